"""Which checkpoint is the newest complete one, and which ones are removed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import Storage, latest, load_tensors, save_tensors, step_directory
from meshwright.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from support.checkpoint.samples import METADATA, small
from support.internals.checkpoint import canonical, seal, unseal


def fill(folder: Path, *steps: int) -> list[Path]:
    return [save_tensors(folder, small(step), METADATA, step=step) for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_none_without_a_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_000000001").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step_00000001.tmp-0123abcd").mkdir()
    assert latest(tmp_path) is None


def test_the_newest_by_number(tmp_path: Path) -> None:
    fill(tmp_path, 99_999_999, 100_000_000, 7)
    assert latest(tmp_path) == tmp_path / "step_100000000"


def test_incomplete_ones_are_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, cut, lost, renamed, flipped = fill(tmp_path, 1, 2, 3, 4, 5)
    file = cut / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (lost / "rank_00000.safetensors").unlink()
    renamed.rename(tmp_path / "step_00000044")
    manifest = flipped / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"640", b"641"))
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "step_00000007").write_text("a file")
    (tmp_path / "step_00000008").symlink_to(good)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == good
    for step in (2, 3, 44, 5, 6, 7, 8):
        assert f"ignoring {tmp_path / f'step_{step:08d}'}: " in caplog.text


def test_starting_over_in_silence_is_refused(tmp_path: Path) -> None:
    (path,) = fill(tmp_path, 1)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"no checkpoint in .* is usable.*manifest"):
        latest(tmp_path)


def test_a_later_format_is_not_passed_over(tmp_path: Path) -> None:
    _, path = fill(tmp_path, 1, 2)
    body = unseal((path / "manifest.json").read_bytes())
    assert isinstance(body, dict)
    (path / "manifest.json").write_bytes(seal(canonical({**body, "version": 3})))
    with pytest.raises(CheckpointMismatchError, match="version 3; this Meshwright reads 1 and 2"):
        latest(tmp_path)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        latest(tmp_path / "file")


def test_keep_last(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    save_tensors(tmp_path, small(4), METADATA, step=4, keep_last=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    save_tensors(tmp_path, small(5), METADATA, step=5, keep_last=1)
    assert names(tmp_path) == ["step_00000005"]


def test_only_complete_ones_count_and_only_they_are_removed(tmp_path: Path) -> None:
    paths = fill(tmp_path, 1, 2, 3)
    for path in paths[1:]:
        (path / "manifest.json").unlink()
    save_tensors(tmp_path, small(4), METADATA, step=4, keep_last=2)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (1, 2, 3, 4)]


def test_the_checkpoint_just_saved_is_never_removed(tmp_path: Path) -> None:
    """A run that resumed from an early step saves lower numbers than there are."""
    fill(tmp_path, 100, 200, 300)
    save_tensors(tmp_path, small(150), METADATA, step=150, keep_last=2)
    assert names(tmp_path) == ["step_00000150", "step_00000300"]


def test_a_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(Storage):
        def remove_tree(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    fill(tmp_path, 1)
    tensors = {"t": torch.ones(1)}
    with caplog.at_level(logging.WARNING):
        path = save_tensors(tmp_path, tensors, {}, step=2, keep_last=1, storage=Stubborn())
    assert "could not be removed" in caplog.text
    assert latest(tmp_path) == path


def test_links_are_not_followed_when_torsos_are_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    run = tmp_path / "run"
    torso = run / ".step_00000001.tmp-0123abcd"
    torso.mkdir(parents=True)
    (torso / "link").symlink_to(precious)
    (run / ".step_00000002.tmp-0123abcd").symlink_to(precious)
    fill(run, 3)
    assert not torso.exists()
    assert (precious / "file").read_text() == "mine"


def test_step_directory() -> None:
    assert step_directory("run", 120) == Path("run/step_00000120")
    for step in (-1, 10**15 + 1, True, 1.0):
        with pytest.raises(ValueError, match="step must be"):
            step_directory("run", step)  # type: ignore[arg-type]


def test_a_copied_checkpoint_loads_from_anywhere(tmp_path: Path) -> None:
    (path,) = fill(tmp_path / "run", 1)
    copy = tmp_path / "best"
    shutil.copytree(path, copy)
    assert load_tensors(copy).step == 1
