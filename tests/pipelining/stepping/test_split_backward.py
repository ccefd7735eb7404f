"""The two halves of a stage's backward against the whole one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright import parallelize_module
from meshwright.comm import communicator
from meshwright.mesh import init_device_mesh
from meshwright.pipelining import stage_backward, stage_backward_input, stage_backward_weight
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from meshwright.testing import Ranks
from support.internals.layout import Shard
from support.internals.pipelining import backward


class Attention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.all, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        parts = self.all(self.before(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Twice(nn.Module):
    """A weight used twice, and a view as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x))).view(-1, 4)[:, ::2]


class Mixed(nn.Module):
    """Parameters alone, frozen, unused, in a node without a rule, and in an output of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.scale, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3, 1))
        self.unused, self.both = nn.Linear(2, 2), nn.Bilinear(8, 8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.frozen(self.layer(x)) * self.scale + self.bias
        return self.both(y, y), self.scale.exp() * 2


class PassedOn(nn.Module):
    """Gives what it received on as it is, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x), x, self.layer.weight


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.runs = nn.Sequential(Attention(), Attention()), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.body(x)

        return checkpoint(body, x, use_reentrant=False)


class Scale(torch.autograd.Function):
    calls: list[tuple[bool, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = "scale"  # users note there what they like
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        Scale.calls.append(tuple(ctx.needs_input_grad))
        x, weight = ctx.saved_tensors
        to_x = gradient * weight if ctx.needs_input_grad[0] else None
        to_weight = (gradient * x).sum(0) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(self.layer(x), self.weight)


class Several(torch.autograd.Function):
    """Has a number and None before tensors, two results, and one without a gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, none: None, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.factor = factor
        ctx.save_for_backward(x, w)
        kept = x > 0
        ctx.mark_non_differentiable(kept)
        return factor * x * w, factor * x + w, kept

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor, _: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        _, _, *needs = ctx.needs_input_grad
        to_x = ctx.factor * (a * w + b) if needs[0] else None
        to_w = (ctx.factor * a * x + b).sum_to_size(w.shape) if needs[1] else None
        return None, None, to_x, to_w


class Functions(nn.Module):
    """Uses one result of each call, on weights, on what comes in, and on both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Several.apply(3.0, None, x, self.first)[0].tanh()
        y = Several.apply(0.5, None, y, self.second)[1].tanh()
        z = Several.apply(2.0, None, self.first, self.second)[0]
        return Several.apply(1.0, None, y, x)[0] * z


class Hooked(nn.Module):
    """Has hooks on nodes, which change what they send and receive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.grad_fn.register_prehook(lambda gradients: tuple(2 * g for g in gradients))
        y = Scale.apply(self.second(y), self.first.bias)
        for node in (y.grad_fn, y.grad_fn.next_functions[0][0]):
            node.register_hook(lambda sent, _: tuple(None if g is None else 3 * g for g in sent))
        return y


MODELS = {
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
    "twice": (Twice, (3, 8)),
    "mixed": (Mixed, (3, 8)),
    "passed on": (PassedOn, (3, 8)),
    "recomputed": (Recomputed, (2, 3, 16)),
    "custom": (Custom, (4, 8)),
    "functions": (Functions, (4, 8)),
    "hooked": (Hooked, (4, 8)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)
        ),
        (2, 3, 6, 6),
    ),
}


@pytest.mark.parametrize("soon", [1, 1 << 18])
@pytest.mark.parametrize("name", MODELS)
def test_halves_are_the_whole(name: str, soon: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each gradient of a parameter handed over at once, and with all of them together."""
    monkeypatch.setattr(backward, "_SOON", soon)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    one = copy.deepcopy(model)
    fired: list[str] = []
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, parameter_name=parameter_name: fired.append(parameter_name)
            )
    for _ in range(2):  # gradients add up
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        plain = x.detach().clone().requires_grad_()
        outputs, expected = model(x), one(plain)
        listed = list(outputs) if isinstance(outputs, tuple) else [outputs]
        gradients = [torch.randn_like(output) for output in listed]
        theirs = list(expected) if isinstance(expected, tuple) else [expected]
        torch.autograd.backward(theirs, gradients)
        fired.clear()
        found, junctions = stage_backward_input(listed, gradients, [x, 3], model.parameters())
        assert not fired
        assert torch.equal(found[0], plain.grad)
        assert found[1] is None
        stage_backward_weight(model.parameters(), junctions)
        assert junctions == []
        assert len(fired) == len(set(fired))
        for a, b in zip(model.parameters(), one.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_function_computes_only_the_half_it_is_asked_for() -> None:
    model = Custom()
    x = torch.randn(4, 8, requires_grad=True)
    output = model(x)
    Scale.calls.clear()
    _, junctions = stage_backward_input(output, torch.ones_like(output), [x], model.parameters())
    assert Scale.calls == [(True, False)]
    stage_backward_weight(model.parameters(), junctions)
    assert Scale.calls == [(True, False), (False, True)]


def test_a_checkpoint_is_recomputed_once_for_each_half() -> None:
    model = Recomputed()
    x = torch.randn(2, 3, 16, requires_grad=True)
    output = model(x)
    _, junctions = stage_backward_input(output, torch.ones_like(output), [x], model.parameters())
    stage_backward_weight(model.parameters(), junctions)
    assert model.runs == 3


def test_the_whole_backward_clears_the_gradients_of_inputs() -> None:
    layer = nn.Linear(3, 3)
    x, still = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    output = layer(x) + still
    found = stage_backward((output, None, 5), (torch.ones_like(output), None, None), (x, still))
    torch.testing.assert_close(found[0], layer.weight.sum(0).expand(2, 3))
    assert found[1] is None
    assert x.grad is None
    assert layer.weight.grad is not None


def test_a_loss_needs_no_gradient() -> None:
    layer = nn.Linear(3, 1)
    stage_backward(layer(torch.ones(1, 3)).sum(), None, ())
    assert layer.weight.grad.tolist() == [[1, 1, 1]]


def test_gradients_have_to_match_outputs() -> None:
    output = nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(ValueError, match="a gradient for each of 2 outputs, got 1"):
        stage_backward((output, output), (torch.ones(1, 2),), ())
    with pytest.raises(TypeError, match="expected a tensor or None as the gradient"):
        stage_backward(output, 3.0, ())


def body_uneven() -> None:
    axis = communicator()
    torch.manual_seed(0)
    one = nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 4).requires_grad_(False), nn.RMSNorm(4)
    ).double()
    model = copy.deepcopy(one)
    cut = Shard(1)
    plan = {
        "0": SequenceParallel(use_local_output=True),
        "1": ColwiseParallel(input_layouts=cut),
        "2": RowwiseParallel(output_layouts=cut),
        "3": SequenceParallel(use_local_output=True),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    backward._SOON = 8 * (2 * 4 + 3 * (1 + 4))  # rank 0 has 3 rows, and hands over behind them
    whole = torch.randn(2, 2, 4, dtype=torch.float64)
    one(whole).sum().backward()
    x = whole[:, axis.rank : axis.rank + 1].clone().requires_grad_()
    output = model(x)
    _, junctions = stage_backward_input(output, torch.ones_like(output), [x], None)
    stage_backward_weight((), junctions)
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_ranks_with_parts_of_other_sizes_sum_at_the_same_time(ranks: Ranks) -> None:
    """Tensor ranks sum gradients of norms, and hand those of their own weights over in between."""
    ranks(2, body_uneven)
