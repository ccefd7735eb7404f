"""`ContextParallel` on modules of a model, `split_of`, and attention weights, which are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from context_parallel.test_own_loop import CLOSE, Layer, check, made
from meshwright import comm, init_device_mesh, parallelize_module
from meshwright.context_parallel import (
    ContextParallel,
    context_parallel,
    context_parallel_unshard,
    positions,
    split_of,
)
from meshwright.testing import Ranks


class Inner(nn.Module):
    """Attention of queries, keys and values."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def body_style() -> None:
    """Without a block: each rank has a chunk, and recomputes a layer."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    one, many, ids, labels = made(12)
    parallelize_module(many, mesh, {"layers.*": ContextParallel()})
    expected = one(ids)
    functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    rank = comm.communicator().rank
    mine, goal = (x.chunk(2, 1)[rank] for x in (ids, labels))
    x = many.tokens(mine) + many.places(torch.arange(12).chunk(2)[rank])
    for layer in many.layers:
        assert isinstance(layer, Layer)
        x = checkpoint(layer, x, use_reentrant=False)
    output = many.head(x)
    torch.testing.assert_close(output, expected.chunk(2, 1)[rank], **CLOSE)
    functional.cross_entropy(output.flatten(0, 1), goal.flatten()).backward()
    check(one, many)


def body_inner() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    inner, qkv = Inner(), [torch.randn(2, 4, 10, 3, dtype=torch.float64) for _ in range(3)]
    expected = inner(*qkv)
    parallelize_module(inner, mesh, ContextParallel(seq_dim=2))
    rank = comm.communicator().rank
    found = inner(*(x.chunk(2, 2)[rank] for x in qkv))
    torch.testing.assert_close(found, expected.chunk(2, 2)[rank], **CLOSE)


def body_split_of() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    whole = torch.arange(14).view(2, 7)
    own, places = whole.clone(), torch.tensor([[0, 1, 2, 0, 1, 2, 3], [*range(7)]])
    with context_parallel(mesh, buffers=[own], buffer_seq_dims=[1], documents=places):
        found = split_of(own)
        assert all(map(torch.equal, found, split_of(whole)))
        assert torch.equal(found[mesh.get_local_rank()], positions(own.shape[1]))
        assert torch.equal(torch.cat(found, 1).sort(1).values, torch.arange(7).expand(2, 7))
        assert torch.equal(whole.gather(1, found[mesh.get_local_rank()].to(whole.device)), own)
        with pytest.raises(ValueError, match="expected 7 tokens in dim 1, or this rank's"):
            split_of(whole[:, :2])
    with pytest.raises(RuntimeError, match="call it inside of context_parallel"):
        split_of(whole)


def body_weights() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x, memory = (torch.randn(2, n, 8, dtype=torch.float64) for n in (10, 3))
    whole, cross = attend(x, x, x, need_weights=False)[0], attend(x, memory, memory)[0]
    for trains in (True, False):
        attend.train(trains)
        own = x.clone()
        with torch.no_grad(), context_parallel(mesh, buffers=[own], buffer_seq_dims=[1]):
            found = attend(own, own, own, need_weights=False)[0], attend(own, memory, memory)[0]
            with pytest.raises(ValueError, match="axis cp: attention weights of a Multihead"):
                attend(own, own, own)
        parts = context_parallel_unshard(mesh, found, [1, 1])
        torch.testing.assert_close(parts, [whole, cross], **CLOSE)


@pytest.mark.parametrize("body", [body_style, body_inner, body_split_of])
def test_on_two_ranks(ranks: Ranks, body: object) -> None:
    ranks(2, body)


@pytest.mark.devices("host", reason="torch's function of attention hides devices from simulation")
def test_weights_of_attention_are_refused(ranks: Ranks) -> None:
    ranks(2, body_weights)


@pytest.mark.parametrize("given", [{"seq_dim": 1}, {"attention_type": "flex"}])
def test_what_the_style_is_not_for(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected seq_dim = 2 and attention_type SDPA"):
        ContextParallel(**given)  # pyrefly: ignore[bad-argument-type]
