"""A model split over an axis is compared with the whole one: experts, and parts of sequences."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.comm import Communicator, communicator
from meshwright.errors import PlanError
from meshwright.expert_parallel import experts
from meshwright.mesh import DeviceMesh
from meshwright.plan import ExpertPlan, Plan
from meshwright.tensor_parallel import ParallelStyle
from meshwright.testing import Ranks
from support.expert_parallel.samples import Fused, Own
from support.internals.axes import Axes
from support.internals.comm import exchange_over
from support.internals.composition import (
    AxisSplit,
    LayoutCommunicators,
    WholeRun,
    expert_problems,
    expert_split,
    expert_styles,
    split_over_experts,
)

WIDTH, COUNT = 4, 3


class _Gather(torch.autograd.Function):
    """Rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, axis: Communicator) -> torch.Tensor:
        ctx.axis = axis
        found = rows.new_empty(axis.size * len(rows), *rows.shape[1:])
        axis.all_gather(found, rows.contiguous(), label="dispatch").wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(gradients[0], ctx.axis), None


class _Sum(torch.autograd.Function):
    """This rank's rows of the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, axis: Communicator) -> torch.Tensor:
        ctx.axis = axis
        found = rows.new_empty(len(rows) // axis.size, *rows.shape[1:])
        axis.reduce_scatter(found, rows.contiguous(), label="combine").wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(gradients[0], ctx.axis), None


def halved(value: torch.Tensor) -> torch.Tensor:
    """The same values, with half of the gradient."""
    return 0.5 * value + 0.5 * value.detach()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH))
        self.axis: Communicator | None = None
        self.first = 0
        self.fault = ""

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if self.axis is not None:
            weight = weight.to_local()
            rows, chosen = _Gather.apply(rows, self.axis), _Gather.apply(chosen, self.axis)
        weight = {"half": halved, "none": torch.Tensor.detach}.get(self.fault, lambda w: w)(weight)
        out = torch.zeros_like(rows)
        for index in range(len(weight)):
            out = out + (chosen == self.first + index)[:, None] * (rows @ weight[index])
        return out if self.axis is None else _Sum.apply(out, self.axis)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.experts = Experts()
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(1).max(1)
        return x + self.change(shares[:, None]) * self.experts(x, chosen)


class Spread(ParallelStyle):
    """Each rank of the axis has some of the experts."""

    def __init__(self, off_by: int = 0, fault: str = "") -> None:
        self.off_by, self.fault = off_by, fault

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        module.axis = communicator(device_mesh.get_group(), axis="expert")
        module.first = module.axis.rank * -(-COUNT // module.axis.size) + self.off_by
        split = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(split)
        module.fault = self.fault
        exchange_over(module, device_mesh)
        return module


def body_experts() -> None:
    torch.manual_seed(0)
    model, example = Model().double(), (torch.randn(8, WIDTH, dtype=torch.float64),)
    plan = Plan(axes=Axes.of({"expert": 2}))
    peers = LayoutCommunicators.of(plan, communicator())
    split = expert_split(peers)

    def check(style: Spread, split: AxisSplit, **changes: Any) -> None:
        one = copy.deepcopy(model)
        whole = WholeRun(one, example, None)
        split_over_experts(one, {"experts": style}, peers)
        vars(one).update(changes)
        whole.compare(one, split)

    check(Spread(), split)
    with pytest.raises(PlanError, match=r"output of shape \(8, 4\) of .* cut on axis expert"):
        check(Spread(off_by=1), split)
    with pytest.raises(PlanError, match=r"gradient of 'experts\.weight' of .*differs .* by 0\.5 "):
        check(Spread(fault="half"), split)
    with pytest.raises(PlanError, match=r"gradient of 'experts\.weight' is missing"):
        check(Spread(fault="none"), split)
    with pytest.raises(PlanError, match=r"gradient of 'gate\.weight' of .*differs .* by 0\.5 "):
        check(Spread(), split, change=halved)
    # Each rank has a part of the sum: not to sum, or to take each loss whole, is seen.
    with pytest.raises(PlanError, match=r"gradient of 'gate\.weight' of .*differs .* by 0\.5 "):
        check(Spread(), replace(split, sums=()))
    with pytest.raises(PlanError, match=r"gradient of 'experts\.weight' of .*differs .* by 1 "):
        check(Spread(), replace(split, share=1.0))


def test_experts_are_compared_by_the_mean_of_all_ranks(ranks: Ranks) -> None:
    ranks(2, body_experts)


class Positions(nn.Module):
    """Mixes no positions, or each with those before it."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x.cumsum(1) if self.mixes else x


def body_positions() -> None:
    axis = communicator()

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(axis.size, 1)[axis.rank]

    words = {"on_shapes": "shapes", "on_outputs": "outputs", "on_gradients": "gradients"}
    split = AxisSplit(
        axis=axis.along("context"),
        judges=axis,
        setting="[context]",
        inputs=lambda example: tuple(map(part, example)),
        part=part,
        sums=(axis,),
        **words,
    )
    for mixes in (False, True):
        torch.manual_seed(0)
        model = Positions(mixes=mixes).double()
        whole = WholeRun(model, (torch.randn(2, 5, WIDTH, dtype=torch.float64),), None)
        if not mixes:
            whole.compare(model, split)
            with pytest.raises(PlanError, match=r"gradient of 'layer\.weight'.*gradients"):
                whole.compare(model, replace(split, sums=()))
            with pytest.raises(PlanError, match=r"tensors of shapes .*\(2, [23], 4\).* shapes"):
                whole.compare(model, replace(split, part=lambda tensor: tensor))
            continue
        with pytest.raises(PlanError, match=r"cut on axis context differs .*: outputs \(rank 1\)"):
            whole.compare(model, split)


def test_parts_of_sequences_are_compared_with_those_of_the_whole(ranks: Ranks) -> None:
    ranks(2, body_positions)


def test_experts_are_found_or_named() -> None:
    model = nn.ModuleList([nn.Sequential(Fused(4)), nn.Sequential(experts(Own(4)))])
    plan = Plan(axes=Axes.of({"expert": 4}))
    assert [*expert_styles(model, plan)] == ["0.0", "1.0"]
    named = replace(plan, expert=ExpertPlan(modules=("1.*", "*.0")))
    assert [*expert_styles(model, named)] == ["1.0", "0.0"]
    assert not [*expert_problems(model, plan)]
    words = r"axis expert = 4: no module of Linear is known to hold experts\. Name them in \[expert"
    (problem,) = expert_problems(nn.Linear(2, 2), plan)
    assert re.match(words, problem.message)


def test_an_auxiliary_loss_has_to_be_said() -> None:
    model = nn.Sequential(Fused(4))
    model.config = SimpleNamespace(router_aux_loss_coef=0.01, output_router_logits=True)

    def found(**options: Any) -> list[str]:
        plan = Plan(axes=Axes.of({"expert": 2}), expert=ExpertPlan(**options))
        return [problem.message for problem in expert_problems(model, plan)]

    assert [text.partition(":")[2][:33] for text in found()] == [
        ' [expert] balance is not set: "gl'
    ]
    (text,) = found(balance="global")
    assert text.startswith("axis expert: the model returns an auxiliary loss of its own (output_")
    assert not found(balance="rank")
    model.config.output_router_logits = False
    assert not found(balance="none")


@pytest.mark.parametrize("key", ["auxiliary", "z_loss", "bias_rate"])
def test_a_stage_balances_no_experts(key: str) -> None:
    balance = {"balance": "global"} if key == "auxiliary" else {}
    expert: Any = ExpertPlan(**{key: 0.01}, **balance)  # pyrefly: ignore
    model = nn.Sequential(Fused(4))
    model.register_buffer("e_score_correction_bias", torch.zeros(4))
    reason = "multiplies means" if key == "auxiliary" else "tokens are padding"
    for ranks in (1, 2):
        plan = Plan(axes=Axes.of({"expert": 2, "pipeline": ranks}), expert=expert)
        found = [*expert_problems(model, plan)]
        assert [problem.key for problem in found] == [("expert", key)] * (ranks > 1)
        assert all(reason in problem.message for problem in found)


def test_a_model_without_biases_moves_none() -> None:
    plan = Plan(axes=Axes.of({"expert": 2}), expert=ExpertPlan(bias_rate=0.1))
    (found,) = expert_problems(nn.Sequential(Fused(4)), plan)
    assert "bias_rate moves buffers e_score_correction_bias, and Sequential has" in found.message
