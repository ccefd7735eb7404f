"""Cutting and merging batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import microbatch
from torch.nn.attention.flex_attention import create_block_mask

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.microbatch import (
    CustomReducer,
    Replicated,
    TensorChunkSpec,
    check_target,
    chunk_weights,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)


@given(st.integers(1, 40), st.integers(1, 8))
def test_cutting_and_merging_is_the_identity(rows: int, chunks: int) -> None:
    if rows < chunks:
        return
    x, y = torch.arange(rows * 2).view(rows, 2), torch.arange(rows)
    args, kwargs = split_args_kwargs_into_chunks((x, {"y": [y, 3]}), {"flag": True}, chunks)
    assert len(args) == len(kwargs) == chunks
    sizes = [chunk[0].shape[0] for chunk in args]
    assert max(sizes) - min(sizes) <= 1
    assert all(chunk[1]["y"][1] == 3 for chunk in args)
    assert all(chunk == {"flag": True} for chunk in kwargs)
    assert torch.equal(merge_chunks([chunk[0] for chunk in args]), x)
    assert torch.equal(merge_chunks([chunk[1] for chunk in args])["y"][0], y)
    assert sum(chunk_weights([chunk[0] for chunk in args])) == pytest.approx(1)


def test_specs() -> None:
    x, mask, table = torch.ones(4, 6), torch.ones(3, 4), torch.ones(5)
    args, kwargs = split_args_kwargs_into_chunks(
        (x, mask), {"table": table}, 2, TensorChunkSpec.from_tuple((0, 1)), {"table": Replicated}
    )
    assert [tuple(a.shape) for a in args[1]] == [(2, 6), (3, 2)]
    assert kwargs[1]["table"] is table
    assert str(TensorChunkSpec(1)) == "TensorChunkSpec(1)"
    assert TensorChunkSpec.from_dict({"mask": 1}) == {"mask": TensorChunkSpec(1)}
    merged = merge_chunks([a[1] for a in args], TensorChunkSpec(1))
    assert torch.equal(merged, mask)


@given(st.integers(1, 4), st.lists(st.integers(2, 5), min_size=2, max_size=4))
def test_arguments_of_other_lengths_are_cut_each_by_its_own(chunks: int, rows: list[int]) -> None:
    first, *others = (torch.arange(each * chunks) for each in rows)
    args, named = (first, {"pairs": others}), {"y": others[-1].view(-1, 1)}
    assert str(split_args_kwargs_into_chunks(args, named, chunks)) == str(
        microbatch.split_args_kwargs_into_chunks(args, named, chunks)
    )


def test_uneven_batches_weigh_their_rows() -> None:
    (chunks, _) = split_args_kwargs_into_chunks((torch.arange(10),), {}, 4)
    assert [c[0].tolist() for c in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert chunk_weights([c[0] for c in chunks]) == [0.3, 0.3, 0.2, 0.2]


def test_gradients_of_leaves_are_kept_on_their_chunks() -> None:
    x = torch.ones(4, requires_grad=True)
    (chunks, _) = split_args_kwargs_into_chunks((x,), {}, 2)
    (chunks[0][0] * 2).sum().backward()
    assert chunks[0][0].grad.tolist() == [2, 2]
    assert x.grad.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("args", "kwargs", "specs", "kind", "text"),
    [
        ((torch.ones(3),), {}, (None, None), ValueError, "argument 0 has 3 rows along dim 0"),
        (
            (torch.ones(8), torch.ones(7)),
            {},
            (None, None),
            PipeliningShapeError,
            "shape mismatch.*8 rows in argument 0 and 7 rows in argument 1, of which 7 does not",
        ),
        (
            (torch.ones(8, 4), torch.ones(4)),
            {},
            (None, None),
            PipeliningShapeError,
            "8 rows in argument 0 and 4 rows in argument 1, of which 4 is one row a chunk",
        ),
        (
            (torch.ones(8),),
            {"y": torch.ones(5)},
            (None, None),
            PipeliningShapeError,
            "5 rows in argument 'y'",
        ),
        ((torch.ones(8),), {}, ((None, None), None), ValueError, "2 entries for 1 positional"),
        (
            (torch.ones(8),),
            {"y": 1},
            (None, {"z": None}),
            ValueError,
            r"keys \['z'\] for the 1 keyword arguments \['y'\]",
        ),
        ((torch.ones(8),), {}, ((0,), None), ValueError, "Unsupported chunk spec: 0"),
        ((torch.ones(8),), {}, (7, None), ValueError, "Unsupported chunk spec: 7"),
    ],
)
def test_what_cannot_be_cut(
    args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        split_args_kwargs_into_chunks(args, kwargs, 4, *specs)


def test_merging_by_other_means() -> None:
    outputs = [(torch.tensor([1.0]), torch.tensor(2.0), "name") for _ in range(3)]
    total = CustomReducer(0, lambda a, b: a + b)
    merged = merge_chunks(outputs, (TensorChunkSpec(0), total, Replicated()))
    assert merged[0].tolist() == [1, 1, 1]
    assert float(merged[1]) == 6
    assert merged[2] == "name"
    assert merge_chunks([torch.tensor(1.5)] * 2).tolist() == [1.5, 1.5]
    assert float(merge_chunks([torch.tensor(1.5)] * 2, sum_reducer)) == 3
    with pytest.raises(ValueError, match="Chunk 1 did not match chunk spec"):
        merge_chunks([("a",), ("b",)])
    with pytest.raises(ValueError, match="did not match chunk spec"):
        merge_chunks([torch.ones(1), (torch.ones(1), torch.ones(1))])
    with pytest.raises(ValueError, match="did not match chunk spec"):
        merge_chunks([torch.ones(1)], (None, None))


def test_merging_scalars_reads_none_of_their_values() -> None:
    """On a device each comparison would be a host sync; a meta tensor has nothing to compare."""
    merged = merge_chunks([(torch.empty((), device="meta"), "name")] * 2)
    assert merged[0].shape == (2,)
    assert merged[1] == "name"


def test_block_masks_are_cut_along_their_batch() -> None:
    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(causal, 4, 1, 128, 128, device="cpu")
    (chunks, _) = split_args_kwargs_into_chunks((torch.ones(4, 2), mask), {}, 2)
    assert [c[1].kv_num_blocks.shape[0] for c in chunks] == [2, 2]
    query = torch.tensor(5)
    for b in range(2):
        found = chunks[1][1].mask_mod(torch.tensor(b), 0, query, torch.arange(8))
        assert torch.equal(found, causal(torch.tensor(b + 2), 0, query, torch.arange(8)))
    whole = create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    (chunks, _) = split_args_kwargs_into_chunks((torch.ones(4, 2), whole), {}, 2)
    assert chunks[1][1] is whole
    with pytest.raises(AssertionError, match="fewer batch size than the number of chunks"):
        split_args_kwargs_into_chunks((mask,), {}, 8)
    with pytest.raises(AssertionError, match="BlockMask only supports split_dim=0"):
        split_args_kwargs_into_chunks((mask,), {}, 2, (TensorChunkSpec(1),))


def test_who_says_how_a_target_is_cut() -> None:
    along_1 = TensorChunkSpec(1)
    tokens = torch.zeros(4, 6)
    weights = [0.5, 1 / 3, 1 / 6]
    parts = tokens.split([3, 2, 1], dim=1)
    assert chunk_weights([{"y": part} for part in parts], {"y": along_1}) == weights
    assert chunk_weights([tokens] * 3, Replicated) == [1 / 3] * 3
    check_target(tokens, (None, None))
    check_target(tokens[0], ((along_1, None), {"mask": Replicated}))
    for specs in (((along_1,), None), (None, {"mask": {"deep": along_1}})):
        with pytest.raises(ValueError, match=r"cut along dim 1.*\[4, 6\].*target_chunk_spec"):
            check_target({"y": tokens}, specs)
    with pytest.raises(ValueError, match=r"argument 0 of shape \[6\] has no dim 1"):
        split_args_kwargs_into_chunks((tokens[0],), {}, 2, (along_1,))
