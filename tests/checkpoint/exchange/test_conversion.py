"""Weights go to Hugging Face folders, distributed checkpoints and files of torch, and come back."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from meshwright import checkpoint
from meshwright.checkpoint import Reader, Storage, export_weights, import_weights
from meshwright.comm import communicator
from meshwright.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
)
from meshwright.testing import Ranks
from support.checkpoint.loop_layouts import Net
from support.checkpoint.memory import BOUND, TENSOR_BYTES, Wide, peak_growth
from support.internals.checkpoint import weights_of

# It is what torch says of a checkpoint of one process, which these are meant to be.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CONFIG = {"model_type": "net", "tie_word_embeddings": True, "rope": [1, 2.5], "none": None}
TARGETS = {"hf": "folder", "dcp": "folder", "torch": "weights.pt"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "run", 3, model=Net(0), extra={"config": CONFIG})


def names_and_values(path: Path) -> dict[str, torch.Tensor]:
    with Reader(path) as reader:
        weights = weights_of(reader)
        found = {name: weights.read(name) for name in weights.entries}
    return {**found, **{name: found[first] for name, first in weights.ties.items()}}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def imported(source: Path, folder: Path, to: str) -> Path:
    return import_weights(source, folder, source_format=to, trust_pickle=True)


@pytest.mark.parametrize("to", TARGETS)
def test_weights_come_back_as_they_were(saved: Path, tmp_path: Path, to: str) -> None:
    target = export_weights(saved, tmp_path / "out" / TARGETS[to], to=to)
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    back = imported(target, tmp_path / "back", to)
    expected = dict(Net(0).state_dict())
    if to == "hf":
        expected.pop("head.weight")  # as the configuration says, it is tied
        assert json.loads((target / "config.json").read_text()) == CONFIG
        assert checkpoint.load(back).extra == {"config": CONFIG}
    assert_equal(names_and_values(back), expected)
    model = Net(7)
    checkpoint.load(back, model=model)
    assert_equal(dict(model.state_dict()), dict(Net(0).state_dict()))
    with pytest.raises(CheckpointWriteError, match="exists and is never overwritten"):
        export_weights(saved, target, to=to)


def test_torch_reads_what_is_exported(saved: Path, tmp_path: Path) -> None:
    expected = dict(Net(0).state_dict())
    found = torch.load(export_weights(saved, tmp_path / "w.pt", to="torch"), weights_only=True)
    assert_equal(found, expected)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    state = {"model": Net(7).state_dict()}
    dcp.load(state, checkpoint_id=export_weights(saved, tmp_path / "dcp", to="dcp"), no_dist=True)
    assert_equal(state["model"], expected)


def test_what_torch_has_written_is_imported(tmp_path: Path) -> None:
    expected = dict(Net(0).state_dict())
    torch.save({"state_dict": expected, "epoch": 3}, tmp_path / "w.pt")
    found = imported(tmp_path / "w.pt", tmp_path / "a", "torch")
    assert_equal(names_and_values(found), expected)
    state = {"model": expected, "optimizer": {"param_groups": [{"lr": 0.1}]}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(names_and_values(imported(tmp_path / "dcp", tmp_path / "b", "dcp")), expected)


def test_shards_of_a_folder_have_an_index(saved: Path, tmp_path: Path) -> None:
    config = tmp_path / "from"
    config.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (config / name).write_text(f'{{"name": "{name}"}}')
    target = export_weights(
        saved, tmp_path / "out", to="hf", shard_bytes=200, config=config, dtype=torch.bfloat16
    )
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = {file: load_file(target / file) for file in set(index["weight_map"].values())}
    assert len(files) > 1
    expected = {n: t.bfloat16() for n, t in Net(0).state_dict().items() if n != "head.weight"}
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert_equal(found, expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert json.loads((target / "tokenizer.json").read_text()) == {"name": "tokenizer.json"}
    back = imported(target, tmp_path / "back", "hf")
    assert_equal(names_and_values(back), expected)
    with pytest.raises(CheckpointMismatchError, match=r"bfloat16 .* in the checkpoint"):
        checkpoint.load(back, model=Net(0))
    wide = import_weights(target, tmp_path / "wide", source_format="hf", dtype=torch.float32)
    assert_equal(names_and_values(wide), {name: t.float() for name, t in expected.items()})
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(CheckpointDamagedError, match=r"'\.\./b' is not a file beside it"):
        imported(target, tmp_path / "evil", "hf")
    index["weight_map"]["lost"] = next(iter(files))
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointDamagedError, match="'lost' is in none of its files"):
        imported(target, tmp_path / "evil", "hf")


class Shell:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_no_foreign_file_runs_code(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"weight": torch.ones(2), "more": Shell(mark)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        imported(tmp_path / "w.pt", tmp_path / "a", "torch")
    target = export_weights(saved, tmp_path / "dcp", to="dcp")
    with pytest.raises(CheckpointError, match="trust_pickle=True"):
        import_weights(target, tmp_path / "b", source_format="dcp")
    (target / ".metadata").write_bytes(pickle.dumps(Shell(mark)))
    with pytest.raises(CheckpointDamagedError, match=r"names posix\.mkdir"):
        imported(target, tmp_path / "b", "dcp")
    assert not mark.exists()


def test_a_chunk_lies_in_the_folder(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    name = b"__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(name, b"../" + name[:-3]))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        imported(tmp_path / "dcp", tmp_path / "a", "dcp")


def test_mistakes_say_what_to_do(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"to: expected one of .* found 'onnx'"):
        export_weights(saved, tmp_path / "x", to="onnx")
    with pytest.raises(ValueError, match="config is for to='hf'"):
        export_weights(saved, tmp_path / "x", to="dcp", config=CONFIG)
    text = tmp_path / "notes.txt"
    text.write_text("no configuration")
    for given in (tmp_path / "no", tmp_path, text):
        with pytest.raises(CheckpointError, match="expected the configuration|is no JSON"):
            export_weights(saved, tmp_path / "x", to="hf", config=given)
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        imported(saved, tmp_path / "a", "hf")
    with pytest.raises(ValueError, match="key is for"):
        import_weights(tmp_path, tmp_path / "a", source_format="hf", key="model")
    with pytest.raises(CheckpointError, match="is a folder: .* --from hf or dcp"):
        imported(tmp_path, tmp_path / "a", "torch")
    with pytest.raises(CheckpointError, match="is no file of torch.save, is cut off"):
        imported(text, tmp_path / "a", "torch")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"Unsupported global: .*linear\.Linear was not"):
        imported(tmp_path / "module.pt", tmp_path / "a", "torch")
    chunks = export_weights(saved, tmp_path / "dcp", to="dcp")
    os.truncate(chunks / "__0_0.distcp", 9)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; restore that file from a"):
        imported(chunks, tmp_path / "a", "dcp")
    with pytest.raises(CheckpointError, match="found nothing there"):
        imported(tmp_path / "no", tmp_path / "a", "hf")
    with pytest.raises(CheckpointError, match="is no distributed checkpoint"):
        imported(saved, tmp_path / "a", "dcp")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        imported(tmp_path / "empty", tmp_path / "a", "hf")
    path = checkpoint.save(tmp_path / "others", 0, extra=1)
    with pytest.raises(CheckpointMismatchError, match="holds no model"):
        export_weights(path, tmp_path / "x", to="hf")
    assert not (tmp_path / "x").exists()


def test_values_that_a_dtype_cannot_hold_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    path = checkpoint.save(tmp_path, 1, model=model)
    export_weights(path, tmp_path / "fits.pt", to="torch", dtype=torch.float16)
    assert caplog.messages == []
    torch.nn.init.constant_(model.weight, 1e30)
    path = checkpoint.save(tmp_path, 2, model=model)
    export_weights(path, tmp_path / "over.pt", to="torch", dtype=torch.float16)
    export_weights(path, tmp_path / "tiny.pt", to="torch", dtype=torch.float8_e4m3fn)
    for text, dtype in zip(caplog.messages, ("float16", "float8_e4m3fn"), strict=True):
        assert text.startswith(f"'weight' has 2 values that {dtype} cannot hold")


def convert(folder: Path, path: Path) -> list[Path]:
    found = []
    for to in TARGETS:
        options: dict[str, Any] = {"shard_bytes": 200} if to == "hf" else {}
        target = export_weights(path, folder / to, to=to, **options)
        found.append(imported(target, folder / f"{to}-back", to))
    return found


@pytest.mark.slow
def test_ranks_share_the_work(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    expected = dict(Net(0).state_dict())
    for to, path in zip(TARGETS, ranks(2, convert, tmp_path, saved)[0], strict=True):
        assert len(list(path.glob("*.safetensors"))) == 2
        found = names_and_values(path)
        assert_equal(found, {n: t for n, t in expected.items() if to != "hf" or n in found})
        assert expected.keys() - found.keys() <= {"head.weight"}
    files = [file.name for file in (tmp_path / "dcp").iterdir()]
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def refused(folder: Path, path: Path) -> list[str]:
    """What each export says where the last rank may write no large files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if communicator().rank == communicator().size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    found = []
    try:
        for to, name in TARGETS.items():
            options: dict[str, Any] = {"shard_bytes": 200} if to == "hf" else {}
            with pytest.raises(CheckpointWriteError) as caught:
                export_weights(path, folder / to / name, to=to, **options)
            found.append(str(caught.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_export_is_told_on_all_ranks(
    ranks: Ranks, saved: Path, tmp_path: Path, size: int
) -> None:
    for rank, texts in enumerate(ranks(size, refused, tmp_path, saved)):
        for (to, name), text in zip(TARGETS.items(), texts, strict=True):
            said = "" if rank == size - 1 else f"rank {size - 1}: "
            assert text.startswith(f"{said}{tmp_path / to / name} was not written: ")
            assert text.endswith("File too large; free some space or choose another folder")
            assert list((tmp_path / to).iterdir()) == []


@pytest.mark.parametrize("to", TARGETS)
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, to: str) -> None:
    path = checkpoint.save(tmp_path / "run", 0, model=Wide())
    target = tmp_path / "out"
    options: dict[str, Any] = {"shard_bytes": 3 * TENSOR_BYTES} if to == "hf" else {}
    grown = peak_growth(lambda: export_weights(path, target, to=to, **options), tmp_path)
    assert TENSOR_BYTES <= grown < BOUND
    read = lambda: imported(target, tmp_path / "back", to)  # noqa: E731
    assert peak_growth(read, tmp_path, maps=2 * TENSOR_BYTES) < BOUND


def test_files_that_have_the_same_names_are_not_mixed(tmp_path: Path) -> None:
    """As variants of one model do: the last of them was taken, without a word."""
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / parts[0])
    save_file({"a": torch.zeros(2), "b": torch.ones(1)}, tmp_path / parts[1])
    with pytest.raises(CheckpointError, match="'a' is in model-00001.* and in model-00002"):
        checkpoint.import_weights(tmp_path, tmp_path / "none", source_format="hf")
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = checkpoint.import_weights(tmp_path, tmp_path / "made", source_format="hf")
    assert torch.equal(checkpoint.load_tensors(found).tensors["state/model/a"], torch.ones(2))


@pytest.mark.parametrize("to", TARGETS)
def test_what_an_export_cannot_remove_is_told_in_the_log(
    saved: Path,
    tmp_path: Path,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next one names it, too: another job may be writing it."""

    def refuse(self: Storage, path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    target = tmp_path / "out" / TARGETS[to]
    torso = target.with_name(f".{target.name}.tmp-0123abcd")
    torso.mkdir(parents=True)
    monkeypatch.setattr(Storage, "remove_tree", refuse)
    export_weights(saved, target, to=to)
    assert target.exists()
    assert torso.exists()
    assert f"{torso} is of an export that was interrupted, or is under way" in caplog.text
    assert (to == "torch") == ("could not be removed: " in caplog.text)
    with pytest.raises(CheckpointWriteError, match="exists and is never overwritten"):
        export_weights(saved, target, to=to)


@pytest.mark.parametrize("to", TARGETS)
def test_an_export_that_may_lose_its_name_is_told_as_such(
    saved: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / TARGETS[to]
    target.parent.mkdir()
    sync = Storage.sync_directory

    def fail_last(self: Storage, path: Path) -> None:
        if path == target.parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(self, path)

    monkeypatch.setattr(Storage, "sync_directory", fail_last)
    with pytest.raises(CheckpointWriteError, match="is complete, but its name may not survive"):
        export_weights(saved, target, to=to)
    assert target.exists()


def test_names_below_a_module_are_told(tmp_path: Path) -> None:
    """As torch's DistributedDataParallel saves them."""
    one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for prefix in ("module.", "_orig_mod.", ""):
        named = {f"{prefix}{name}": value for name, value in one.state_dict().items()}
        torch.save(named, tmp_path / f"{prefix}pt")
        import_weights(tmp_path / f"{prefix}pt", tmp_path / f"{prefix}in", source_format="torch")
    path = tmp_path / "module.in" / "step_00000000"
    with pytest.raises(CheckpointMismatchError, match=r'ModuleDict\(\{"module": model\}\)'):
        checkpoint.load(path, model=other)
    checkpoint.load(path, model=torch.nn.ModuleDict({"module": other}))
    assert_equal(other.state_dict(), one.state_dict())
    path = tmp_path / "_orig_mod.in" / "step_00000000"
    with pytest.raises(CheckpointMismatchError, match="anew from the module that was compiled"):
        checkpoint.load(path, model=other)
    path = tmp_path / "in" / "step_00000000"
    with pytest.raises(CheckpointMismatchError, match="give the module 'module' as model="):
        checkpoint.load(path, model=torch.nn.ModuleDict({"module": other}))
