"""What is saved comes back bit for bit, under any layout, and other readers understand it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwright.checkpoint import (
    Piece,
    Reader,
    ShardedPiece,
    load_into,
    load_tensors,
    read_manifest,
    save_tensors,
    verify,
)
from meshwright.errors import CheckpointDamagedError, CheckpointMismatchError
from support.checkpoint.faulty_storage import CountingStorage, on_ranks
from support.checkpoint.samples import (
    METADATA,
    assert_equal,
    every_dtype,
    flat_shard,
    save_sharded,
    small,
    whole_box,
)
from support.internals.checkpoint import to_bytes
from support.internals.layout import Box, boxes, chunk


def test_one_process(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "new" / "folder", small(1), METADATA, step=120)
    assert path == tmp_path / "new" / "folder" / "step_00000120"
    found = load_tensors(path)
    assert (found.step, found.metadata) == (120, METADATA)
    assert_equal(found.tensors, small(1))
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    assert [p.name for p in path.parent.iterdir()] == ["step_00000120"]
    verify(path)


def test_every_dtype_in_one_process_and_sharded(tmp_path: Path) -> None:
    whole = save_tensors(tmp_path / "whole", every_dtype(), {}, step=0)
    assert_equal(load_tensors(whole).tensors, every_dtype())
    sharded = save_sharded(tmp_path / "sharded", every_dtype(), size=4)
    verify(sharded)


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, every_dtype(), {}, step=3)
    assert_equal(load_file(path / "rank_00000.safetensors"), every_dtype())


def test_strided_and_conjugated_tensors_and_parameters(tmp_path: Path) -> None:
    odd = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.tensor([1.5]).expand(4),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": nn.Parameter(torch.randn(3)),
    }
    found = load_tensors(save_tensors(tmp_path, odd, {}, step=0)).tensors
    assert all(torch.equal(found[name], odd[name]) for name in odd)
    assert not found["parameter"].requires_grad


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    a, b = (save_sharded(tmp_path / name, small(1)) for name in "ab")
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes()


def test_loading_some_names(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, small(1), {}, step=0)
    assert_equal(load_tensors(path, names=["half"]).tensors, {"half": small(1)["half"]})
    with pytest.raises(CheckpointMismatchError, match="no tensor 'lost'"):
        load_tensors(path, names=["lost"])


def test_replicas_are_written_once_and_spread_over_the_ranks(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    results = on_ranks(
        4, lambda group: save_tensors(tmp_path, tensors, {}, step=1, communicator=group)
    )
    path = results[0]
    assert isinstance(path, Path)
    assert results == [path] * 4
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 2 * 64 * 64 * 4 + 1000
    assert_equal(load_tensors(path).tensors, tensors)


def test_each_rank_may_hold_tensors_of_its_own(tmp_path: Path) -> None:
    results = on_ranks(
        3,
        lambda group: save_tensors(
            tmp_path,
            {f"rng/{group.rank}": torch.full((4,), group.rank), "shared": torch.ones(2)},
            METADATA,
            step=1,
            communicator=group,
        ),
    )
    path = results[0]
    assert isinstance(path, Path)
    expected = {f"rng/{rank}": torch.full((4,), rank) for rank in range(3)}
    assert_equal(load_tensors(path).tensors, {**expected, "shared": torch.ones(2)})


def test_names_that_look_like_keys_or_are_reserved(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(4),
        "__metadata__": torch.randn(2),
        "../../etc/passwd": torch.randn(2),
        "ü \n\0'\"": torch.randn(1),
        "": torch.randn(1),
    }
    assert_equal(
        load_tensors(save_tensors(tmp_path / "whole", tensors, {}, step=0)).tensors, tensors
    )
    tensors["a[0:2]"] = torch.randn(2)
    save_sharded(tmp_path / "sharded", tensors, size=2)


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def _layout_pieces(
    tensor: Tensor, sizes: tuple[int, int], dims: tuple[int, int]
) -> list[ShardedPiece]:
    """The pieces of the ranks of two axes, each of which cuts one of ``dims``, the first first."""
    shape = tuple(tensor.shape)
    pieces = []
    for place in itertools.product(*map(range, sizes)):
        offset, extent = [0] * tensor.ndim, list(shape)
        for parts, index, dim in zip(sizes, place, dims, strict=True) if tensor.ndim else ():
            start, rows = chunk(extent[dim % tensor.ndim], parts, index)
            offset[dim % tensor.ndim] += start
            extent[dim % tensor.ndim] = rows
        box = Box(tuple(offset), tuple(extent))
        pieces.append(ShardedPiece(global_shape=shape, boxes=(box,), tensor=tensor[box.slices()]))
    return pieces


@settings(max_examples=40, deadline=None)
@given(
    shape=SHAPES,
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dims=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    readers=st.integers(1, 4),
    flat_writers=st.booleans(),
)
def test_any_layout_reads_any_layout(
    shape: tuple[int, ...],
    sizes: tuple[int, int],
    dims: tuple[int, int],
    readers: int,
    flat_writers: bool,
) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    size = math.prod(sizes)
    chunks = _layout_pieces(tensor, sizes, dims)
    with TemporaryDirectory() as folder:
        results = on_ranks(
            size,
            lambda group: save_tensors(
                folder,
                {"t": flat_shard(tensor, group.rank, size) if flat_writers else chunks[group.rank]},
                {},
                step=5,
                communicator=group,
            ),
        )
        path = results[0]
        assert isinstance(path, Path), results
        assert_equal(load_tensors(path).tensors, {"t": tensor})
        for rank in range(readers):
            expected = flat_shard(tensor, rank, readers)
            target = ShardedPiece(
                global_shape=shape,
                boxes=expected.boxes,
                tensor=torch.full_like(expected.tensor, -1),
            )
            load_into(path, {"t": target})
            assert torch.equal(target.tensor, expected.tensor)
        for chunk in chunks:
            target = ShardedPiece(
                global_shape=shape, boxes=chunk.boxes, tensor=torch.full_like(chunk.tensor, -1)
            )
            load_into(path, {"t": target})
            assert torch.equal(target.tensor, chunk.tensor)


def test_only_overlapping_pieces_are_read(tmp_path: Path) -> None:
    tensor = torch.randn(9, 4)
    path = save_sharded(tmp_path, {"t": tensor}, size=3)
    damaged = path / "rank_00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with Reader(path) as reader:
        box = Box((1, 1), (5, 2))
        assert torch.equal(reader.read_piece("t", box), tensor[1:6, 1:3])
        with pytest.raises(ValueError, match="does not lie in"):
            reader.read_piece("t", Box((8, 0), (2, 4)))


def test_loading_into_strided_and_differentiable_targets(tmp_path: Path) -> None:
    source = small(1)
    path = save_sharded(tmp_path, source)
    targets = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    targets["layers.0.weight"] = nn.Parameter(torch.zeros(16, 12)).t()
    targets["half"] = torch.zeros(62, dtype=torch.bfloat16)[::2]
    found = load_into(path, targets)
    assert (found.step, found.metadata, found.tensors) == (120, METADATA, {})
    assert_equal({name: tensor.detach() for name, tensor in targets.items()}, source)


def as_version_1(path: Path) -> None:
    """Give a checkpoint the manifest that version 1 of the format would have written."""
    manifest = read_manifest(path)

    def crc32(piece: Piece) -> int:
        start, stop = manifest.file_maps[piece.file].spans[piece.key]
        return zlib.crc32((path / piece.file).read_bytes()[start:stop])

    old = dataclasses.replace(manifest, version=1)
    (path / "manifest.json").write_bytes(to_bytes(old, crc32))


def test_checkpoints_of_version_1_are_read_and_verified(tmp_path: Path) -> None:
    path = save_sharded(tmp_path, small(1))
    as_version_1(path)
    assert b'"crc32":"' in (path / "manifest.json").read_bytes().rpartition(b"metadata")[0]
    assert verify(path).version == 1
    assert_equal(load_tensors(path).tensors, small(1))
    file = path / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointDamagedError, match=r"has checksum [0-9a-f]{8}, expected"):
        load_tensors(path)


def test_pieces_are_read_straight_into_targets_and_autograd_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(12.0).view(4, 3)
    path = save_sharded(tmp_path, {"w": weight}, size=2)
    target = torch.zeros(4, 3, requires_grad=True)
    product = (target * target).sum()
    with Reader(path) as reader, monkeypatch.context() as patched:
        patched.delattr(torch, "empty")
        reader.read_into("w", target)
    assert torch.equal(target, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_small_tensors_are_written_together(tmp_path: Path) -> None:
    written: list[str] = []

    class Noting(CountingStorage):
        def before(self, operation: str, path: Path, data: bytes = b"") -> None:
            super().before(operation, path, data)
            written.extend([path.name] if operation == "write" else [])

    tensors = {f"t{n}": torch.full((7,), float(n)) for n in range(500)}
    tensors["large"] = torch.randn(100_000)
    path = save_tensors(tmp_path, tensors, {}, step=1, storage=Noting())
    # The header, the large one, the others.
    assert written == ["rank_00000.safetensors"] * 3 + ["manifest.json"]
    assert_equal(load_tensors(path).tensors, tensors)


def test_every_difference_of_a_model_is_listed_and_nothing_overwritten(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, small(1), {}, step=0)
    targets = {name: torch.zeros_like(tensor) for name, tensor in small(1).items()}
    del targets["mask"]
    targets["new"] = torch.zeros(1)
    targets["half"] = torch.zeros(31)
    targets["layers.0.bias"] = torch.zeros(13)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_into(path, targets)
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "'new' is expected but not in the checkpoint",
        "'mask' is in the checkpoint but not expected",
        "'half' is bfloat16 (31,) in the checkpoint, expected float32 (31,)",
        "'layers.0.bias' is float32 (12,) in the checkpoint, expected float32 (13,)",
    ]
    assert all(not tensor.any() for tensor in targets.values())


def test_within_limits_which_stored_tensors_must_be_expected(tmp_path: Path) -> None:
    path = save_tensors(
        tmp_path, {"model/w": torch.ones(2), "optimizer/w": torch.ones(2)}, {}, step=0
    )
    target = torch.zeros(2)
    load_into(path, {"model/w": target}, within="model/")
    assert torch.equal(target, torch.ones(2))
    with pytest.raises(CheckpointMismatchError, match="'optimizer/w'"):
        load_into(path, {"model/w": target})


def test_the_manifest_tells_the_boxes(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4)
    manifest = read_manifest(save_sharded(tmp_path, {"t": tensor}, size=2))
    record = manifest.tensors["t"]
    assert (record.dtype, record.shape) == ("float32", (3, 4))
    assert [piece.box for piece in record.pieces] == [
        *boxes((3, 4), 0, 6),
        *boxes((3, 4), 6, 12),
    ]
    assert [piece.key for piece in record.pieces] == [
        "t[0:1,0:4]",
        "t[1:2,0:2]",
        "t[1:2,2:4]",
        "t[2:3,0:4]",
    ]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([whole_box((4,)), Box((0,), (2,))], "overlap"),
        ([Box((0,), (2,)), Box((3,), (1,))], "leave a gap: they hold 3 of 4"),
        ([Box((0,), (3,)), Box((1,), (3,))], r"\[0:3\] and \[1:4\] overlap"),
        ([Box((0,), (2,)), Box((1,), (2,))], r"overlap"),
    ],
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused_before_writing(
    tmp_path: Path, pieces: list[Box], message: str
) -> None:
    held = ShardedPiece(
        global_shape=(4,),
        boxes=tuple(pieces),
        tensor=torch.zeros(sum(box.numel for box in pieces)),
    )
    with pytest.raises(ValueError, match=message):
        save_tensors(tmp_path / "run", {"t": held}, {}, step=0)
    assert not (tmp_path / "run").exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="step must be an integer"):
        save_tensors(tmp_path, {}, {}, step=-1)
    with pytest.raises(ValueError, match="keep_last must be"):
        save_tensors(tmp_path, {}, {}, step=0, keep_last=0)
    with pytest.raises(TypeError, match=r"metadata\.betas: expected None, bool.*found tuple"):
        save_tensors(tmp_path, {}, {"betas": (0.9, 0.99)}, step=0)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"metadata\.a\[1\]: nan is not a JSON number"):
        save_tensors(tmp_path, {}, {"a": [1, float("nan")]}, step=0)
    with pytest.raises(ValueError, match="'t': dtype 'complex128' cannot be saved"):
        save_tensors(tmp_path, {"t": ones.to(torch.complex128)}, {}, step=0)
    with pytest.raises(ValueError, match="no plain bytes"):
        save_tensors(tmp_path, {"t": ones.to_sparse()}, {}, step=0)
    with pytest.raises(ValueError, match="no plain bytes"):
        save_tensors(tmp_path, {"t": ones.to("meta")}, {}, step=0)
    with pytest.raises(TypeError, match="'t': expected a tensor, found list"):
        save_tensors(tmp_path, {"t": [1]}, {}, step=0)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="expected a tensor of 2 elements"):
        ShardedPiece(global_shape=(4,), boxes=(Box((0,), (2,)),), tensor=torch.ones(3))
    assert list(tmp_path.iterdir()) == []


def calls_of(run: Callable[[], object]) -> int:
    """Python functions entered, generators resumed included."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_tensor_costs_the_same_among_many(tmp_path: Path) -> None:
    """Nothing looks at all tensors for each of them."""
    each: list[list[float]] = []
    for number in (50, 400):
        tensors = {f"{n}.weight": torch.full((2, 3), float(n)) for n in range(number)}
        runs = (
            partial(save_tensors, tmp_path, tensors, {}, step=number),
            partial(load_tensors, tmp_path / f"step_{number:08d}"),
            partial(load_into, tmp_path / f"step_{number:08d}", tensors),
            partial(verify, tmp_path / f"step_{number:08d}"),
        )
        each.append([calls_of(run) / number for run in runs])
    for few, many in zip(*each, strict=True):
        assert many < 1.2 * few


class Listless(dict[str, Any]):
    """Refuses to be gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all names were looked at for one tensor")

    def keys(self) -> Any:
        raise AssertionError("all names were compared for one tensor")


def test_one_name_is_not_compared_with_all(tmp_path: Path) -> None:
    save_tensors(tmp_path, small(1), {}, step=1)
    with Reader(tmp_path / "step_00000001") as reader:
        object.__setattr__(reader.manifest, "tensors", Listless(reader.manifest.tensors))
        for name, tensor in small(1).items():
            reader.read_into(name, torch.empty_like(tensor))
