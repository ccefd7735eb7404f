"""No damage is loaded: flipped bits, cut, emptied, exchanged, lost and foreign files are named."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from meshwright.checkpoint import Manifest, load_tensors, read_manifest, verify
from meshwright.errors import CheckpointDamagedError
from support.checkpoint.samples import header_bytes, save_sharded, small

MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(tmp_path_factory.mktemp("original"), small(1))


@pytest.fixture
def damaged(original: Path, tmp_path: Path) -> Path:
    path = tmp_path / "step_00000120"
    shutil.copytree(original, path)
    return path


def refusal(path: Path) -> str:
    """What ``load`` says; ``verify`` must refuse as well, and in the same words first."""
    with pytest.raises(CheckpointDamagedError) as from_load:
        load_tensors(path)
    with pytest.raises(CheckpointDamagedError) as from_verify:
        verify(path)
    assert str(from_load.value).splitlines()[0] in str(from_verify.value).splitlines()
    return str(from_load.value)


def tensor_at(manifest: Manifest, file: str, position: int) -> str | None:
    """The tensor that a byte of a file belongs to; ``None`` in the header."""
    for key, (start, stop) in manifest.file_maps[file].spans.items():
        if start <= position < stop:
            return manifest.owner(file, key)
    return None


def flip(path: Path, bit: int) -> bytes:
    """Flip one bit of a file; returns its former bytes."""
    data = path.read_bytes()
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    return data


def check_flips(path: Path, manifest: Manifest, flips: list[tuple[str, int]]) -> int:
    """Each flip alone is refused, naming its file and, within tensor data, the tensor."""
    in_tensors = 0
    for file, bit in flips:
        before = flip(path / file, bit)
        message = refusal(path)
        assert f"{path / file}: " in message
        tensor = None if file == MANIFEST else tensor_at(manifest, file, bit // 8)
        if tensor is not None:
            assert f"tensor {tensor!r}" in message
            in_tensors += 1
        (path / file).write_bytes(before)
    load_tensors(path)
    return in_tensors


def random_flips(path: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """One third each in tensor data, in headers and in the manifest."""
    choose = random.Random(seed)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    flips: list[tuple[str, int]] = []
    for number in range(count):
        file = choose.choice(files) if number % 3 else MANIFEST
        size = (path / file).stat().st_size
        start, stop = 0, size
        if number % 3 == 1:
            stop = header_bytes(path / file)
        if number % 3 == 2:
            start = header_bytes(path / file)
        flips.append((file, choose.randrange(start * 8, stop * 8)))
    return flips


def test_300_flipped_bits_are_refused_and_named(damaged: Path) -> None:
    manifest = read_manifest(damaged)
    assert check_flips(damaged, manifest, random_flips(damaged, 300, seed=0)) == 100


def test_flips_in_lengths_padding_and_frames_are_refused(damaged: Path) -> None:
    manifest = read_manifest(damaged)
    file = next(
        file.name
        for file in sorted(damaged.glob("*.safetensors"))
        if file.read_bytes()[: header_bytes(file)].endswith(b"}  ")
    )
    header = header_bytes(damaged / file)
    padding = header - len((damaged / file).read_bytes()[:header].rstrip(b" "))
    assert padding >= 2
    places = [*range(64), *range((header - padding) * 8, header * 8)]
    size = (damaged / MANIFEST).stat().st_size
    frame = [*range(12 * 8), *range((size - 22) * 8, size * 8)]
    flips = [(file, bit) for bit in places] + [(MANIFEST, bit) for bit in frame]
    assert check_flips(damaged, manifest, flips) == 0


@pytest.mark.soak
def test_a_bit_of_every_byte_of_every_file(damaged: Path) -> None:
    manifest = read_manifest(damaged)
    for file in sorted(damaged.iterdir()):
        # Each of the eight bits of a byte in turn.
        bits = [8 * byte + byte % 8 for byte in range(file.stat().st_size)]
        check_flips(damaged, manifest, [(file.name, bit) for bit in bits])


def test_50_truncations_and_longer_files_are_refused_and_named(damaged: Path) -> None:
    choose = random.Random(1)
    manifest = read_manifest(damaged)
    for number in range(50):
        file = choose.choice(sorted(damaged.iterdir()))
        data = file.read_bytes()
        edges = [0, 1, 8, len(data) - 1, len(data) // 2]
        size = edges[number] if number < len(edges) else choose.randrange(len(data))
        file.write_bytes(data[:size])
        message = refusal(damaged)
        assert f"{file}: " in message
        tensor = None if file.name == MANIFEST else tensor_at(manifest, file.name, size)
        if tensor is not None:
            assert f"tensor {tensor!r} is cut off" in message
        file.write_bytes(data + bytes(1 + number % 2))
        assert f"{file}: " in refusal(damaged)
        file.write_bytes(data)
    load_tensors(damaged)


def test_zero_fill(damaged: Path) -> None:
    for file in sorted(damaged.iterdir()):
        data = file.read_bytes()
        file.write_bytes(bytes(len(data)))
        assert f"{file}: " in refusal(damaged)
        if file.name != MANIFEST:
            header = header_bytes_of(data)
            file.write_bytes(data[:header] + bytes(len(data) - header))
            assert re.search(r"rank_0000\d\.safetensors: tensor '", refusal(damaged))
        file.write_bytes(data)


def header_bytes_of(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_verify_lists_every_damaged_file(damaged: Path) -> None:
    for file in sorted(damaged.glob("*.safetensors")):
        flip(file, file.stat().st_size * 8 - 1)
    with pytest.raises(CheckpointDamagedError) as caught:
        verify(damaged)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert [re.findall(r"rank_0000\d", line)[0] for line in sorted(lines)] == [
        "rank_00000",
        "rank_00001",
        "rank_00002",
    ]


def test_exchanged_files_of_one_checkpoint(damaged: Path) -> None:
    files = sorted(damaged.glob("*.safetensors"))
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        first, second = files[a].read_bytes(), files[b].read_bytes()
        files[a].write_bytes(second)
        files[b].write_bytes(first)
        message = refusal(damaged)
        assert files[a].name in message or files[b].name in message
        files[a].write_bytes(first)
        files[b].write_bytes(second)


@pytest.mark.parametrize("step", [121, 7])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("file", ["rank_00001.safetensors", MANIFEST])
def test_a_file_of_another_step(
    damaged: Path, tmp_path: Path, step: int, seed: int, file: str
) -> None:
    """Even with equal tensors, a file of another step does not belong."""
    other = save_sharded(tmp_path / "other", small(seed), step=step)
    shutil.copyfile(other / file, damaged / file)
    message = refusal(damaged)
    assert "rank_0000" in message
    if file != MANIFEST and step == 121:
        assert f"it is that of {file} of step 121" in message


def test_a_file_of_another_run_at_the_same_step(damaged: Path, tmp_path: Path) -> None:
    other = save_sharded(tmp_path / "other", small(2))
    shutil.copyfile(other / "rank_00001.safetensors", damaged / "rank_00001.safetensors")
    assert re.search(r"rank_00001\.safetensors: tensor '.*' .*has checksum", refusal(damaged))


def test_missing_and_extra_files(damaged: Path) -> None:
    for name in [MANIFEST, "rank_00002.safetensors"]:
        data = (damaged / name).read_bytes()
        (damaged / name).unlink()
        assert f"{damaged / name}: the file is missing" in refusal(damaged)
        (damaged / name).write_bytes(data)
    for name in ["rank_00003.safetensors", "notes.txt", ".hidden"]:
        (damaged / name).write_bytes(b"")
        assert f"{damaged / name}: the file does not belong" in refusal(damaged)
        (damaged / name).unlink()
    (damaged / "folder").mkdir()
    assert "the file does not belong" in refusal(damaged)
