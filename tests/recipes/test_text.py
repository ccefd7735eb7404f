from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from meshwright.errors import PlanError
from support.internals.recipes import Data, DataConfig, Windows, open_text, unigram_loss


def folder_of(tmp_path: Path, count: int = 30) -> Path:
    for number in range(count):
        part = tmp_path / f"part{number % 3}"
        part.mkdir(exist_ok=True)
        (part / f"{number}.py").write_bytes(bytes([number]) * 100)
    return tmp_path


def test_windows_predict_every_byte_once() -> None:
    windows = Windows(data=torch.arange(21, dtype=torch.uint8), context=5)
    inputs, targets = windows.batch(range(len(windows)))
    assert len(windows) == 4
    assert inputs.flatten().tolist() == list(range(20))
    assert targets.flatten().tolist() == list(range(1, 21))
    assert inputs.dtype == torch.int64


def test_a_window_does_not_depend_on_its_batch() -> None:
    windows = Windows(data=torch.arange(250, dtype=torch.uint8), context=7)
    together, _ = windows.batch([3, 9, 20])
    alone, _ = windows.batch([9])
    assert torch.equal(together[1:2], alone)


def test_default_is_the_standard_library_without_its_tests() -> None:
    text = open_text(DataConfig(max_bytes=1 << 20), 64)
    again = open_text(DataConfig(max_bytes=1 << 20), 64)
    assert torch.equal(text.training.data, again.training.data)
    assert 100_000 < text.training.data.numel() <= 1 << 20
    assert len(text.validation) > 10
    assert "held out" in text.description


def test_held_out_files_depend_on_their_names_alone(tmp_path: Path) -> None:
    text = open_text(DataConfig(path=str(folder_of(tmp_path)), validation_every=5), 10)
    held_out = set(text.validation.data.tolist())
    (tmp_path / "part0" / "later.py").write_bytes(b"\xff" * 100)
    larger = open_text(DataConfig(path=str(tmp_path), validation_every=5), 10)
    assert held_out
    assert held_out.isdisjoint(text.training.data.tolist())
    assert held_out <= set(larger.validation.data.tolist())


def test_few_files_still_hold_one_out(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(name.encode() * 40)
    text = open_text(DataConfig(path=str(tmp_path), validation_every=1000), 10)
    assert text.training.data.numel() == text.validation.data.numel() == 160


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(250)))
    text = open_text(DataConfig(path=str(file), validation_every=10), 10)
    assert text.training.data.tolist() == list(range(225))
    assert text.validation.data.tolist() == list(range(225, 250))
    assert file.read_bytes() == bytes(range(250))


def test_suffixes_and_excluded_folders(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"n" * 500)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_bytes(b"t" * 500)
    python = open_text(DataConfig(path=str(tmp_path)), 10)
    everything = open_text(DataConfig(path=str(tmp_path), suffixes=(), exclude=()), 10)

    def total(text: object) -> int:
        return text.training.data.numel() + text.validation.data.numel()  # type: ignore[attr-defined]

    assert total(python) == 3000
    assert total(everything) == 4000


def test_max_bytes_takes_a_sample_of_whole_files(tmp_path: Path) -> None:
    text = open_text(DataConfig(path=str(folder_of(tmp_path)), max_bytes=950), 10)
    assert text.training.data.numel() + text.validation.data.numel() == 900
    assert "9 of 30 files" in text.description


def test_bytes_that_are_not_utf8_are_text(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.py")
    file.write_bytes(b"\xff\xfe\x00\x80" * 100)
    text = open_text(DataConfig(path=str(tmp_path)), 10)
    assert set(text.training.data.tolist()) == {0xFF, 0xFE, 0x00, 0x80}


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path / "nowhere", ["found nothing at", "nowhere"]),
        (lambda path: path, ["expected files (.py)", "found none"]),
        (lambda path: _empty_file(path), ["expected at least 11 bytes of training", "found 0"]),
        (lambda path: _short_file(path), ["expected at least 11 bytes of held-out", "found 5"]),
    ],
)
def test_bad_text_is_one_line(tmp_path: Path, prepare: object, words: list[str]) -> None:
    path = prepare(tmp_path)  # type: ignore[operator]
    with pytest.raises(PlanError) as caught:
        open_text(DataConfig(path=str(path)), 10)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [*words, str(tmp_path), "[data] path"])


def test_unigram_loss_of_uniform_bytes_is_log_256() -> None:
    uniform = torch.arange(256, dtype=torch.uint8).repeat(1000)
    assert math.isclose(unigram_loss(uniform, uniform[:512]), math.log(256), rel_tol=1e-6)


def test_unigram_loss_of_an_unseen_byte_is_finite() -> None:
    seen = torch.zeros(1000, dtype=torch.uint8)
    loss = unigram_loss(seen, torch.tensor([[1]]))
    assert math.isclose(loss, math.log(1256), rel_tol=1e-9)


def test_validation_sample_is_spread_and_never_too_long() -> None:
    windows = Windows(data=torch.zeros(101, dtype=torch.uint8), context=10)
    text = Data(windows, windows, "", "byte", 10)
    assert text.validation_sample(5) == [0, 2, 4, 6, 8]
    assert text.validation_sample(50) == list(range(10))


def _empty_file(path: Path) -> Path:
    (path / "empty").touch()
    return path / "empty"


def _short_file(path: Path) -> Path:
    (path / "short").write_bytes(b"x" * 100)
    return path / "short"
