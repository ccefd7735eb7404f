"""A checkpoint made by an enemy is refused: no code runs, nothing outside is opened or grows."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from meshwright.checkpoint import latest, load_tensors, save_tensors, verify
from meshwright.errors import CheckpointDamagedError, CheckpointError
from support.checkpoint.samples import METADATA, save_sharded, small
from support.internals.checkpoint import MAX_DOCUMENT_BYTES
from support.internals.layout import boxes

FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "marshal.loads",
    "exec",
)


class Watch:
    """Notes what the interpreter opens and runs while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.opened: list[str] = []
        self.run: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            self.opened.append(os.fspath(arguments[0]))
        elif event in FORBIDDEN:
            self.run.append(event)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_sharded(tmp_path, small(1), size=2)


@pytest.fixture
def refuse(watch: Watch, tmp_path: Path) -> Callable[[Path], str]:
    """Load and verify under watch; the words of the refusal."""
    canary = tmp_path / "canary"

    def attempt(path: Path) -> str:
        watch.opened, watch.run = [], []
        allowed = {str(path), "manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}
        messages: list[str] = []
        for action in (load_tensors, verify):
            watch.is_on = True
            try:
                with pytest.raises(CheckpointDamagedError) as caught:
                    action(path)
            finally:
                watch.is_on = False
            messages.append(str(caught.value))
        assert set(watch.opened) <= allowed
        assert watch.run == []
        assert not canary.exists()
        return messages[0]

    return attempt


def reseal(path: Path, body: bytes) -> None:
    """A manifest with a right checksum, whatever it says."""
    tail = b',\n"crc32":"%08x"}\n' % zlib.crc32(body)
    (path / "manifest.json").write_bytes(b'{"manifest":' + body + tail)


def body_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_bytes())["manifest"]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a right checksum."""
    body = body_of(path)
    change(body)
    reseal(path, json.dumps(body, separators=(",", ":")).encode())


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.canary}",)


def bombs(tmp_path: Path) -> list[bytes]:
    plain = pickle.dumps(Bomb(tmp_path / "canary"))
    torch.save(Bomb(tmp_path / "canary"), tmp_path / "zip")
    return [plain, (tmp_path / "zip").read_bytes()]


def test_a_pickle_in_the_place_of_each_file(
    target: Path, tmp_path: Path, refuse: Callable[[Path], str]
) -> None:
    for bomb in bombs(tmp_path):
        for file in sorted(target.iterdir()):
            data = file.read_bytes()
            file.write_bytes(bomb)
            assert str(file) in refuse(target)
            if file.name != "manifest.json":
                file.write_bytes(bomb[: len(data)].ljust(len(data), b"\0"))
                assert str(file) in refuse(target)
            file.write_bytes(data)


def test_a_pickle_in_each_text_of_the_manifest(
    target: Path, tmp_path: Path, refuse: Callable[[Path], str]
) -> None:
    bomb = bombs(tmp_path)[0].decode("latin-1")

    def everywhere(value: Any) -> Iterator[tuple[Any, Any]]:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, dict | list):
                yield from everywhere(item)
            else:
                yield value, key

    original = (target / "manifest.json").read_bytes()
    count = len(list(everywhere({k: v for k, v in body_of(target).items() if k != "metadata"})))
    for number in range(0, count, 7):

        def plant(body: dict[str, Any], number: int = number) -> None:
            rest = {k: v for k, v in body.items() if k != "metadata"}
            holder, key = list(everywhere(rest))[number]
            holder[key] = bomb
            body.update(rest)

        edit(target, plant)
        refuse(target)
        (target / "manifest.json").write_bytes(original)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "rank_00000.safetensors\0",
        "rank_00000.safetensors/../../outside",
        ".",
        "",
        "rank_" + "0" * 5000 + ".safetensors",
        "RANK_00000.safetensors",
        "rank_٠٠٠٠٠.safetensors",
        "manifest.json",
        "rank_00000.safetensors\n",
    ],
)
def test_names_that_lead_elsewhere(target: Path, name: str, refuse: Callable[[Path], str]) -> None:
    outside = target.parent / "outside.safetensors"
    shutil.copyfile(target / "rank_00000.safetensors", outside)

    def rename(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("rank_00000.safetensors")
        for tensor in body["tensors"].values():
            for piece in tensor["pieces"]:
                if piece["file"] == "rank_00000.safetensors":
                    piece["file"] = name

    edit(target, rename)
    assert "is not the name of a checkpoint file" in refuse(target)


def test_links_and_devices(target: Path, refuse: Callable[[Path], str]) -> None:
    for name in ("manifest.json", "rank_00001.safetensors"):
        file, outside = target / name, target.parent / f"outside-{name}"
        file.rename(outside)
        file.symlink_to(outside)
        assert "link" in refuse(target) or "bytes" in refuse(target)
        file.unlink()
        os.link(outside, file)
        assert "hard link" in refuse(target)
        file.unlink()
        os.mkfifo(file)
        refuse(target)
        file.unlink()
        file.mkdir()
        refuse(target)
        file.rmdir()
        outside.rename(file)
    load_tensors(target)


def test_a_linked_file_of_the_right_size_is_refused(
    target: Path, refuse: Callable[[Path], str]
) -> None:
    file = target / "rank_00000.safetensors"
    size = file.stat().st_size
    file.unlink()
    file.symlink_to(("x/" * size)[:size])  # lstat says a size that fits
    assert "symbolic link" in refuse(target)


@pytest.fixture
def _little_memory() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("_little_memory")
def test_bombs_of_json(target: Path, refuse: Callable[[Path], str]) -> None:
    deep = 200_000
    for body in (
        b"[" * deep + b"]" * deep,
        b'{"a":' * deep + b"1" + b"}" * deep,
        b"1" * 100_000,
        b'"\\ud800"',
        b'{"a":1,"a":2}',
        b"1e999",
        b"NaN",
        b"[[],[]]",
        b"\xff",
        b"",
    ):
        reseal(target, body)
        assert "manifest.json" in refuse(target)
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    save_again = small(1)
    shutil.rmtree(target)
    save_tensors(target.parent, save_again, METADATA, step=120)
    edit(target, lambda body: body["metadata"].update(deep=nested))
    assert "nested deeper than" in refuse(target)
    with (target / "manifest.json").open("r+b") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    assert f"at most {MAX_DOCUMENT_BYTES}" in refuse(target)
    with (target / "manifest.json").open("r+b") as file:
        file.truncate(2**40)
    assert "at most" in refuse(target)


@pytest.mark.usefixtures("_little_memory")
def test_huge_headers_and_tensors(target: Path, refuse: Callable[[Path], str]) -> None:
    file = target / "rank_00000.safetensors"
    data = file.read_bytes()
    for length in (2**63, 2**64 - 1, 2**40, 100_000_001, 0):
        file.write_bytes(length.to_bytes(8, "little") + data[8:])
        assert "its header is not the one that was written" in refuse(target)
    file.write_bytes(data)
    original = (target / "manifest.json").read_bytes()
    for shape in ([2**40, 2**40], [2**62], [2**30], [2**63], [1] * 65):

        def grow(body: dict[str, Any], shape: list[int] = shape) -> None:
            tensor = body["tensors"]["half"]
            tensor["shape"] = shape
            piece = tensor["pieces"][0]
            piece.update(offset=[0] * len(shape), shape=shape)
            tensor["pieces"] = [piece]

        edit(target, grow)
        refuse(target)
        (target / "manifest.json").write_bytes(original)


def set_piece(**changes: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["tensors"]["half"]["pieces"][0].update(changes)

    return change


def set_field(*path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        if value is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value

    return change


@pytest.mark.few(14)
@pytest.mark.parametrize(
    "change",
    [
        set_piece(offset=[-1]),
        set_piece(offset=[1]),
        set_piece(offset=[2**70]),
        set_piece(shape=[-3]),
        set_piece(shape=[14]),
        set_piece(shape=[0]),
        set_piece(shape=[15, 1]),
        set_piece(shape=15),
        set_piece(shape=[True]),
        set_piece(shape=[15.0]),
        set_piece(xxh3=None),
        set_piece(xxh3=""),
        set_piece(xxh3="000000000000000g"),
        set_piece(xxh3=0),
        set_piece(crc32="00000000"),
        set_piece(key="mask[0:6]"),
        set_piece(key="__metadata__"),
        set_piece(key="k" * 10_000),
        set_piece(file="rank_00001.safetensors"),
        set_piece(file="rank_00007.safetensors"),
        set_piece(more=1),
        set_field("version", value=None),
        set_field("version", value="1"),
        set_field("version", value=1),
        set_field("format", value="other"),
        set_field("step", value=121),
        set_field("step", value=-1),
        set_field("step", value=2**62),
        set_field("files", value={}),
        set_field("files", "rank_00000.safetensors", "bytes", value=1),
        set_field("files", "rank_00000.safetensors", "header_crc32", value="00000000"),
        set_field("files", "rank_00000.safetensors", "header_crc32", value=None),
        set_field("files", "rank_00009.safetensors", value={"bytes": 9, "header_crc32": "0" * 8}),
        set_field("tensors", "half", "dtype", value="float16"),
        set_field("tensors", "half", "dtype", value="float32"),
        set_field("tensors", "half", "dtype", value="object"),
        set_field("tensors", "half", "shape", value=[32]),
        set_field("tensors", "half", "pieces", value=[]),
        set_field("tensors", "half", "pieces", value=None),
        set_field("tensors", "half", value=None),
        set_field("tensors", "n" * 5000, value={"dtype": "bool", "shape": [0], "pieces": []}),
        set_field("tensors", value=[]),
        set_field("metadata", value=None),
        set_field("metadata", value=[]),
        set_field("extra", value=1),
    ],
)
def test_manifests_with_a_right_checksum_and_a_wrong_content(
    target: Path, change: Callable[[dict[str, Any]], None], refuse: Callable[[Path], str]
) -> None:
    edit(target, change)
    refuse(target)


def test_a_bool_that_is_no_bool(tmp_path: Path, refuse: Callable[[Path], str]) -> None:
    path = save_tensors(tmp_path, {"mask": torch.tensor([True, False])}, {}, step=0)
    file = path / "rank_00000.safetensors"
    data = file.read_bytes()[:-2] + b"\x02\x00"
    file.write_bytes(data)
    edit(
        path,
        lambda body: body["tensors"]["mask"]["pieces"][0].update(
            xxh3=xxhash.xxh3_64_hexdigest(data[-2:])
        ),
    )
    assert "tensor 'mask' holds bytes that are no booleans" in refuse(path)


def test_a_manifest_without_its_checksum(target: Path, refuse: Callable[[Path], str]) -> None:
    manifest = target / "manifest.json"
    data = manifest.read_bytes()
    for changed in (
        data[: data.rindex(b",")] + b"}\n",
        json.dumps(json.loads(data)["manifest"]).encode(),
        data.replace(b'"crc32":"', b'"crc33":"'),
        data + b"\n",
        data.rstrip(),
    ):
        manifest.write_bytes(changed)
        assert "manifest.json" in refuse(target)


def test_pieces_that_take_too_long_to_check(target: Path, refuse: Callable[[Path], str]) -> None:
    shape = (2,) * 30

    def cut(body: dict[str, Any]) -> None:
        piece = body["tensors"]["half"]["pieces"][0]
        found = [*boxes(shape, 0, 12345), *boxes(shape, 12345, 2**30)]
        pieces = [{**piece, "offset": box.offset, "shape": box.shape} for box in found]
        body["tensors"]["half"] = {"dtype": "bool", "shape": shape, "pieces": pieces}

    edit(target, cut)
    assert "are too many to check" in refuse(target)


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no readable checkpoint at .*No such file"):
        load_tensors(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no readable checkpoint at .*Not a directory"):
        verify(tmp_path / "file")
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json: the file is missing"):
        load_tensors(tmp_path)
    assert latest(tmp_path) is None
