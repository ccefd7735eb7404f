"""What `ExpertParallel` and its layer refuse, in their words."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright import comm, fully_shard, init_device_mesh, parallelize_module
from meshwright.expert_parallel import ExpertParallel
from meshwright.testing import Ranks, RanksFailed
from support.expert_parallel.samples import Block, D, Fused, Own, alike, expert_mesh, over


def whole(text: str) -> str:
    """The pattern of exactly ``text``."""
    return f"^{re.escape(text)}$"


def style(module: nn.Module) -> nn.Module:
    return parallelize_module(module, expert_mesh(), {"experts": ExpertParallel()})


def test_a_module_that_is_not_known_to_hold_experts(ranks: Ranks) -> None:
    def body() -> None:
        text = (
            "axis expert: 'experts' is a Own, which is not known to hold experts: expected a "
            "module of Hugging Face's use_experts_implementation, torchtitan's GroupedExperts, or "
            "one that meshwright.expert_parallel.experts has marked"
        )
        with pytest.raises(ValueError, match=whole(text)):
            style(Block(Own(4), 2))

    ranks(2, body)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("key", "value"), [("capacity_factor", 1.25), ("expert_capacity", 64), ("drop_tokens", True)]
)
@pytest.mark.parametrize("where", ["experts", "router", "Block"])
def test_a_module_that_drops_tokens(ranks: Ranks, key: str, value: float, where: str) -> None:
    """`capacity_by_rank`: by rank it would be another model."""

    def body() -> None:
        block = Block(Fused(4), 2)
        part = block if where == "Block" else block.get_submodule(where)
        setattr(part, key, value)
        text = (
            f"axis expert: '{where}' has {key} = {value}: which tokens are dropped would depend on "
            "the ranks. Set it to None"
        )
        with pytest.raises(ValueError, match=whole(text)):
            style(block)
        for no in (None, False):
            block = Block(Fused(4), 2)
            setattr(block if where == "Block" else block.get_submodule(where), key, no)
            style(block)

    ranks(2, body)


def test_a_router_that_routes_differently_when_recomputed(ranks: Ranks) -> None:
    def body() -> None:
        _, many = alike(Block(Fused(4), 1, bias=torch.tensor([0.0, 0, 0, 9])))
        over(many)
        x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
        for reentrant in (True, False):
            many.bias = torch.tensor([0.0, 0, 0, 9])
            y = checkpoint(many, x, use_reentrant=reentrant)
            many.bias = torch.tensor([0.0, 0, 9, 0])
            text = (
                "axis expert: the router of 'experts' routed differently when recomputed (expert "
                "2: 5 tokens, 0 before). Make it a function of its input only"
            )
            with pytest.raises(RuntimeError, match=whole(text)):
                y.sum().backward()

    ranks(2, body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_without_a_graph_of_its_own_is_not_refused(
    ranks: Ranks, reentrant: bool
) -> None:
    """Experts and all before them are frozen; an evaluation in between routes otherwise."""

    def body() -> None:
        one, many = alike(Block(Fused(4), 2))
        over(many)
        for block in (one, many):
            block.requires_grad_(False).down.requires_grad_(True)
        x = torch.randn(5, D, dtype=torch.float64).requires_grad_(reentrant)
        y = checkpoint(many, x, use_reentrant=reentrant)
        with torch.no_grad():
            many(torch.randn(3, D, dtype=torch.float64))
        y.sum().backward()
        one(x).sum().backward()
        assert many.down.weight.grad is not None
        torch.testing.assert_close(many.down.weight.grad, one.down.weight.grad)

    ranks(2, body)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_indices_that_name_no_expert(ranks: Ranks, wrong: int) -> None:
    """`router_gradient_of_sentinels`: Hugging Face's own expert parallelism marks tokens so."""

    def body() -> None:
        _, many = alike(Block(Fused(4), 2))
        over(many)
        x = torch.randn(3, D, dtype=torch.float64)
        indices = torch.tensor([[0, 1], [2, 3], [1, 0]])
        if comm.communicator().rank == 1:
            indices[1, 0] = wrong
        many.experts(x, indices, torch.ones(3, 2, dtype=torch.float64))

    text = (
        f"axis expert: 'experts' got experts from {min(wrong, 0)} to {max(wrong, 3)} on rank 1, "
        "expected 0 to 3. If they mark tokens of other ranks (Hugging Face's own expert "
        "parallelism), load the model without it"
    )
    with pytest.raises(RanksFailed, match=re.escape(text)):
        ranks(2, body)


def test_weights_of_another_shape(ranks: Ranks) -> None:
    def body() -> None:
        _, many = alike(Block(Fused(4), 2))
        over(many)
        x = torch.randn(3, D, dtype=torch.float64)
        indices = torch.tensor([[0, 1], [2, 3], [1, 0]])
        text = (
            "axis expert: 'experts' got 3 tokens, indices of shape (3, 2) and weights of shape "
            "(3, 4): expected both of shape (tokens, experts of each)"
        )
        with pytest.raises(ValueError, match=whole(text)):
            many.experts(x, indices, torch.ones(3, 4, dtype=torch.float64))

    ranks(2, body)


def test_a_tensor_mesh_of_ranks_with_tokens_of_their_own(ranks: Ranks) -> None:
    def body() -> None:
        mesh, text = expert_mesh(), "ranks [0, 1] have the same tokens; ranks [{}] of them hold"
        style = ExpertParallel(tensor_mesh=mesh)
        other = 1 - comm.communicator().rank
        with pytest.raises(ValueError, match=re.escape(text.format(other))):
            parallelize_module(Block(Fused(4), 2), mesh, {"experts": style})

    ranks(2, body)


def test_experts_that_two_units_share(ranks: Ranks) -> None:
    """Where no rank holds the same experts, nothing is gathered, so that shapes do not tell."""

    def body() -> None:
        torch.manual_seed(0)
        shared = Fused(4)
        one, two = (alike(nn.Sequential(Block(shared, 2), Block(shared, 2)))[1] for _ in "ab")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "ep"))
        dense = mesh["shard", "ep"]._flatten("dense")
        for model in (one, two):
            parallelize_module(model, mesh["ep"], {"0.experts": ExpertParallel()})
        for block in two:
            fully_shard(block, mesh=dense)
        x = torch.randn(5, D, dtype=torch.float64)
        fully_shard(one, mesh=dense)(x).sum().backward()
        text = (
            "'0.experts' is called outside of its unit of fully_shard, which would not reduce this "
            "gradient of gate_up_proj. Where several blocks share these experts, shard a module "
            "that holds all of the blocks, as one unit"
        )
        with pytest.raises(RuntimeError, match=whole(text)):
            fully_shard(two, mesh=dense)(x)
        with torch.no_grad():
            two(x)

    ranks(2, body)
