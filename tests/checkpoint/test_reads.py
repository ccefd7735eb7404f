"""Small neighbors are read together, and each is verified by itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import checkpoint
from meshwright.checkpoint import (
    Reader,
    ShardedPiece,
    load_into,
    load_tensors,
    read_manifest,
    save_tensors,
    verify,
)
from meshwright.errors import CheckpointDamagedError
from support.checkpoint.samples import assert_equal, save_sharded
from support.internals.checkpoint import Held, assign
from support.internals.layout import Box, boxes

Read = Callable[[int, Sequence[Any], int], int]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the buffers of each read."""
    counts: list[int] = []
    read: Read = os.preadv

    def noting(handle: int, buffers: Sequence[Any], position: int) -> int:
        counts.append(len(buffers))
        return read(handle, buffers, position)

    monkeypatch.setattr(os, "preadv", noting)
    return counts


def many(count: int = 1000) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.full((5, 2), float(n)) for n in range(count)}


def test_1000_small_tensors_take_one_read(tmp_path: Path, reads: list[int]) -> None:
    path = save_tensors(tmp_path, many(), {}, step=0)
    targets = {name: torch.zeros(5, 2) for name in many()}
    strided = {name: torch.zeros(2, 5).t() for name in many()}
    for run in (
        lambda: load_tensors(path),
        lambda: load_into(path, targets),
        lambda: load_into(path, strided),
        lambda: verify(path),
    ):
        reads.clear()
        run()
        # The manifest, which ends with an empty read, the header, the tensors.
        assert [count for count in reads if count > 1] == [1000]
        assert len(reads) <= 4
    assert_equal(targets, many())
    assert_equal(strided, many())


def test_more_pieces_than_the_system_reads_in_one_call(tmp_path: Path, reads: list[int]) -> None:
    path = save_tensors(tmp_path, many(2500), {}, step=0)
    reads.clear()
    assert_equal(load_tensors(path).tensors, many(2500))
    assert [count for count in reads if count > 1] == [1024, 1024, 452]


def test_pieces_of_other_ranks_are_read_together(tmp_path: Path, reads: list[int]) -> None:
    path = save_sharded(tmp_path, many(200), size=2)
    targets = {name: torch.zeros(5, 2) for name in many(200)}
    reads.clear()
    load_into(path, targets)
    assert_equal(targets, many(200))
    # Each tensor has two boxes in each file.
    assert [count for count in reads if count > 1] == [400, 400]


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_loop_is_filled_in_a_few_reads(tmp_path: Path, reads: list[int]) -> None:
    (model, optimizer), (other, its) = stepped(), stepped()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    reads.clear()
    checkpoint.load(tmp_path, model=other, optimizer=its)
    # The weights, and the three tensors that the optimizer has of each; two of generators.
    assert sorted(reads, reverse=True)[:2] == [300, 100]
    assert len(reads) < 20
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, its.state[b][key])


def test_small_and_large_tensors_across_the_ends_of_reads(tmp_path: Path, reads: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [50_000, 2, 262_144, 262_143, 1, 100_000, 100_000, 600_000, 3, 250_000, 12_144, 1]
    tensors = {f"{n:02}": torch.rand(size, generator=generator) for n, size in enumerate(sizes)}
    path = save_tensors(tmp_path, tensors, {}, step=0)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reads.clear()
    load_into(path, targets)
    assert_equal(targets, tensors)
    assert [count for count in reads if count > 1] == [2] * 5
    assert_equal(load_tensors(path).tensors, tensors)


def test_one_large_piece_of_which_little_is_taken_is_held_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{n}": torch.rand(2, 200_000) for n in range(6)}
    path = save_tensors(tmp_path, tensors, {}, step=0)
    box = Box((1, 7), (1, 2))
    targets = {
        name: ShardedPiece(global_shape=(2, 200_000), boxes=(box,), tensor=torch.zeros(2))
        for name in tensors
    }
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    empty = torch.empty

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:
        found = empty(*arguments, **options)
        made.append(weakref.ref(found))
        alive.append(sum(each() is not None for each in made))
        return found

    monkeypatch.setattr(torch, "empty", noting)
    load_into(path, targets)
    assert max(alive) <= 2  # the next, while the names of the last still stand
    assert len(alive) == 6
    for name, target in targets.items():
        assert torch.equal(target.tensor, tensors[name][1, 7:9])


@pytest.mark.parametrize("number", [0, 437, 999])
def test_damage_of_one_among_many_is_named(tmp_path: Path, number: int) -> None:
    path = save_tensors(tmp_path, many(), {}, step=0)
    file, name = path / "rank_00000.safetensors", f"layers.{number}.weight"
    start, stop = read_manifest(path).file_maps[file.name].spans[name]
    data = bytearray(file.read_bytes())
    data[stop - 1] ^= 1
    file.write_bytes(data)
    for run in (
        lambda: load_tensors(path),
        lambda: load_into(path, {name: torch.zeros(5, 2) for name in many()}),
        lambda: verify(path),
    ):
        with pytest.raises(CheckpointDamagedError) as caught:
            run()
        (line,) = str(caught.value).splitlines()
        assert f"{file}: tensor {name!r} (bytes {start} to {stop}) has checksum" in line
    others = many()
    del others[name]
    assert_equal(load_tensors(path, names=list(others)).tensors, others)


def test_tensors_have_storages_of_their_own(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, many(), {}, step=0)
    found = load_tensors(path).tensors
    storages = [tensor.untyped_storage() for tensor in found.values()]
    assert len({storage.data_ptr() for storage in storages}) == 1000
    assert {storage.nbytes() for storage in storages} == {40}
    assert all(storage.resizable() for storage in storages)


def test_a_system_that_reads_less_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {**many(50), "large": torch.arange(300_000.0)}
    path = save_tensors(tmp_path, tensors, {}, step=0)
    read: Read = os.preadv

    def little(handle: int, buffers: Sequence[Any], position: int) -> int:
        first = memoryview(buffers[0])
        return read(handle, [first[: min(len(first), 333_333)], *buffers[1:2]], position)

    monkeypatch.setattr(os, "preadv", little)
    assert_equal(load_tensors(path).tensors, tensors)


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, many(), {}, step=0)
    file, name = path / "rank_00000.safetensors", "layers.500.weight"
    _, stop = read_manifest(path).file_maps[file.name].spans[name]
    with Reader(path) as reader:
        reader.read("layers.0.weight")  # the file is open, of the right size
        os.truncate(file, stop - 1)
        with pytest.raises(CheckpointDamagedError, match=f"tensor {name!r} is cut off"):
            reader.read_all(many())


def test_what_one_rank_holds_it_writes_and_the_rest_goes_where_least_is() -> None:
    def held(name: str, rows: int) -> Held:
        return Held(name, "float32", (rows, 4), (Box((0, 0), (rows, 4)),))

    shared = [held("a", 3), held("b", 2), held("c", 2)]
    known, chosen, _ = assign([[held("own", 9), *shared], shared])
    assert list(known) == ["a", "b", "c", "own"]
    assert [[name for name, _ in items] for items in chosen] == [["own"], ["a", "b", "c"]]
    apart = [
        [row._replace(marks=(rank if row.name != "c" else 7,)) for row in shared]
        for rank in range(2)
    ]
    _, chosen, parted = assign(apart)  # a and b differ: the first rank's, both
    assert [[name for name, _ in items] for items in chosen] == [["a", "b"], ["c"]]
    assert parted == [["a", "b"], []]
    parts = [Held("t", "float32", (4,), tuple(boxes((4,), n, n + 2))) for n in (0, 2)]
    assert assign([[parts[0]], [parts[1]]])[1] == [
        [("t", Box((0,), (2,)))],
        [("t", Box((2,), (2,)))],
    ]
    with pytest.raises(ValueError, match=r"'t' is float32 \(4,\) on rank 0 and int8 \(4,\)"):
        assign([[parts[0]], [parts[1]._replace(dtype="int8")]])
