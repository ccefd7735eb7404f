"""Operators on DTensors: the numbers and the gradients of one process."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from meshwright.errors import LayoutError
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import write_through

Tensor = torch.Tensor
Spread = Callable[[Tensor], Tensor]
F64 = torch.float64
LABELS = torch.tensor([1, 0, -100, 2, -100])
WEIGHTS = torch.tensor([0.5, 1.5, 1.0, 2.0], dtype=F64)


def loss(function: Callable[..., Tensor], x: Tensor, spread: Spread) -> Tensor:
    target = torch.linspace(0, 1, x.numel(), dtype=F64).view(x.shape)
    return function(x, spread(target))


def entropy(
    x: Tensor, spread: Spread, weight: Tensor | None = None, smoothing: float = 0
) -> Tensor:
    weight = None if weight is None else spread(weight)
    return F.cross_entropy(x, spread(LABELS[: len(x)]), weight=weight, label_smoothing=smoothing)


KERNEL = torch.linspace(-1, 1, 24, dtype=F64)

OPERATORS: dict[str, Callable[[Tensor, Spread], Tensor]] = {
    "mse": functools.partial(loss, F.mse_loss),
    "huber": functools.partial(loss, F.huber_loss),
    "smooth l1": functools.partial(loss, F.smooth_l1_loss),
    "soft margin": functools.partial(loss, F.soft_margin_loss),
    "binary": functools.partial(loss, F.binary_cross_entropy_with_logits),
    "entropy": entropy,
    "weighted entropy": functools.partial(entropy, weight=WEIGHTS),
    "smooth entropy": functools.partial(entropy, smoothing=0.1),
    "any": lambda x, _: (x > 0.5).any().double() * x,
    "any row": lambda x, _: (x > 0.5).any(0).double() * x,
    "any dims": lambda x, _: (x > 0.5).any((0, 1), keepdim=True).sum() * x,
    "kept logsumexp": lambda x, _: x.logsumexp(0, keepdim=True) - x,
    "largest": lambda x, _: x.amax() * 3,
    "least": lambda x, _: x.amin() * 3,
    "norms of rows": lambda x, _: x.norm(dim=1).sum() * x,
    "norms of columns, listed": lambda x, _: torch.cat([x.norm(3, dim=0), x.norm(dim=0)]),
    "norms, listed": lambda x, _: torch.stack([x.norm(), (x * x).norm()]).sum() * x,
    "norms of a list": lambda x, _: torch.stack(torch._foreach_norm([x, x * x])).sum() * x,
    "largest norm": lambda x, _: x.norm(float("inf")) * 3,
    "convolution": lambda x, spread: F.conv1d(
        x.unsqueeze(0), spread(KERNEL[: 6 * len(x)].view(3, len(x), 2)), spread(KERNEL[:3])
    ),
}


def body(rows: int, *names: str) -> None:
    """Each rank has two of four columns; odd ``rows`` are cut unevenly."""
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    values = torch.linspace(-2, 2, rows * 4, dtype=F64).sin().view(rows, 4)
    for placement in (Shard(0), Shard(1)):
        for name in names:
            operator = OPERATORS[name]
            one = values.clone().requires_grad_()
            spread = distribute_tensor(values, mesh, [placement]).requires_grad_()
            expected = operator(one, lambda value: value)
            found = operator(spread, lambda value: distribute_tensor(value, mesh, [Replicate()]))
            where = f"{name}, {placement}, {rows} rows"
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), expected, msg=where)
            for result in (expected, found):
                (result * result).sum().backward()
            assert isinstance(spread.grad, DTensor)
            torch.testing.assert_close(spread.grad.full_tensor(), one.grad, msg=where)


def test_operators_on_dtensors_compute_what_one_process_does(ranks: Ranks) -> None:
    ranks(2, body, 5, *(name for name in OPERATORS if name != "convolution"))


def test_convolutions_of_dtensors_compute_what_one_process_does(ranks: Ranks) -> None:
    ranks(2, body, 4, "convolution")  # torch has no views of rows that are cut unevenly


def body_of_half_precision() -> None:
    """The mean of what has a sum that float16 cannot hold."""
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    values = torch.full((64, 512), 2.0, dtype=torch.float16)
    one = values.clone().requires_grad_()
    spread = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
    for tensor in (one, spread):
        result = F.mse_loss(tensor, torch.zeros_like(tensor))
        (result * 1024).backward()
        found = result.full_tensor() if isinstance(result, DTensor) else result
        assert found.item() == 4
    assert isinstance(spread.grad, DTensor)
    torch.testing.assert_close(spread.grad.full_tensor(), one.grad)


def test_means_of_losses_are_of_what_half_precision_holds(ranks: Ranks) -> None:
    ranks(2, body_of_half_precision)


def body_of_summands() -> None:
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    summands = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(LayoutError, match="'a DTensor that is filled' is placed"):
        summands.fill_(5)
    assert not summands.fill_(0).full_tensor().any()
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    whole[0] = 4
    assert whole.full_tensor().tolist() == [4, 1]


def test_summands_are_not_filled_with_a_sum(ranks: Ranks) -> None:
    ranks(2, body_of_summands)


def body_of_clipping() -> None:
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    wholes = [torch.linspace(-n, n, 5 * n, dtype=F64).view(5, n) for n in range(1, 5)]
    wholes[2][4, 1] = 30
    for order in (2.0, 1.0, 3.0, math.inf):
        plain = [torch.nn.Parameter(torch.zeros_like(each)) for each in wholes]
        spread = [torch.nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])) for p in plain]
        for one, many, whole in zip(plain, spread, wholes, strict=True):
            one.grad = whole.clone()
            many.grad = distribute_tensor(whole, mesh, [Shard(0)])
        expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, order)
        with CommDebugMode() as counted:
            found = torch.nn.utils.clip_grad_norm_(spread, 0.5, order)
        assert counted.get_total_counts() == 1, order
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), expected)
        for one, many in zip(plain, spread, strict=True):
            torch.testing.assert_close(many.grad.full_tensor(), one.grad)


def test_clipping_of_dtensors_sends_once(ranks: Ranks) -> None:
    """By any order of the norm: also by the largest element, which each rank then knows."""
    ranks(2, body_of_clipping)


def body_behind_torch() -> None:
    """torch's own context puts rules of its own in the place of the corrections of `nll_loss`."""
    write_through()
    for _ in range(2):
        with loss_parallel():
            pass
    with contextlib.suppress(KeyError), loss_parallel():
        raise KeyError  # torch leaves its own there
    with loss_parallel():
        pass
    body(5, "entropy", "weighted entropy")


def test_corrections_outlive_the_loss_parallel_of_torch(ranks: Ranks) -> None:
    ranks(2, body_behind_torch)
