"""The options of `replicate` and `DistributedDataParallel`: one list, and each has its effect."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DistributedDataParallel,
    MixedPrecision,
    replicate,
)
from meshwright.data_parallel.comm_hooks import noop_hook
from meshwright.testing import Ranks
from support.internals.data_parallel import NOTES

Wrap = Callable[..., nn.Module]

WRAPS = pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate], ids=["class", "fn"])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    world = communicator()
    torch.manual_seed(7)
    x = torch.randn(4 * world.size, 3, dtype=torch.float64)
    return x, x.chunk(world.size)[world.rank]


def same(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


class Paths(nn.Module):
    """Uses the layers it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]).double()

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return x


class Copies(TorchDispatchMode):
    """Counts copies into buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------ without ranks


def test_an_unknown_keyword_is_named() -> None:
    for wrap in (DistributedDataParallel, replicate):
        raises(
            TypeError,
            "got an unexpected keyword argument 'bucket_cap'",
            lambda wrap=wrap: wrap(mlp(), bucket_cap=3),
        )


def test_values_out_of_range() -> None:
    raises(
        ValueError,
        'expected unused_gradient="none" or',
        lambda: replicate(mlp(), unused_gradient=0),
    )
    raises(ValueError, "expected bucket sizes above 0", lambda: replicate(mlp(), bucket_cap_mb=-1))
    model = mlp()
    named = list(model.named_parameters())
    other = {"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))}
    for options, text in (
        ({"delay_all_reduce_named_params": named[:1]}, "need to be set at the same time."),
        ({"delay_all_reduce_named_params": named[:1], **other}, "is no parameter of it"),
        (
            {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": named[0][1]},
            "'0.weight', which is delayed itself",
        ),
    ):
        raises(ValueError, text, lambda options=options: replicate(model, **options))


# --------------------------------------------------------------------------------- each effect


def body_delay(wrap: Wrap) -> None:
    """The delayed ones come right after the one that they wait for."""
    one = mlp()
    inner = copy.deepcopy(one)
    ours = wrap(
        inner,
        bucket_cap_mb=1e-6,
        delay_all_reduce_named_params=[("3.weight", inner[3].weight), ("3.bias", inner[3].bias)],
        param_to_hook_all_reduce=inner[2].weight,
    )
    x, share = batch()
    one(x).square().mean().backward()
    value = ours(share).square().mean()
    with observe(recorder := Recorder()):
        value.backward()
    same(ours, one)
    sizes = [c.shape[0] for c in recorder.collectives]
    assert sizes == [4 + 1, 16 + 1, 2 + 1, 8 + 1, 4 + 1, 12 + 1 + NOTES]


def body_mixed_precision(wrap: Wrap) -> None:
    """Ignored modules keep their dtype, and parameters and gradients theirs."""

    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype is torch.float32
            return super().forward(x.float())

    class Narrow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is self.weight.dtype is torch.bfloat16
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Wide(3, 4), Narrow(4, 2))
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if wrap is replicate:
        ours = replicate(model, ignored_modules=[model[0]], mixed_precision=precision)
    else:
        names = ["0.weight", "0.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        ours = DistributedDataParallel(model, mixed_precision=precision)
    _, share = batch()
    for _ in range(2):
        ours.zero_grad()
        with observe(recorder := Recorder()):
            ours(share.float()).float().square().mean().backward()
    assert [c.dtype for c in recorder.collectives if c.kind == "all_reduce"] == ["float32"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    plain = copy.deepcopy(model[1]).bfloat16()
    plain.zero_grad()
    plain(model[0](share.bfloat16().float()).bfloat16()).float().square().mean().backward()
    world = communicator()
    rows = torch.empty(world.size, *plain.weight.shape)
    world.all_gather(rows, plain.weight.grad.float(), label="check").wait()
    torch.testing.assert_close(model[1].weight.grad, rows.mean(0))


def body_unused_gradient(wrap: Wrap) -> None:
    """Zeros or None where no rank had a gradient; the mean where one had."""
    world = communicator()
    for alone in ({}, {"bucket_cap_mb_list": [1e-6]}, {"gradient_as_bucket_view": True}):
        for unused in ("none", "zeros"):
            ours = wrap(Paths(), unused_gradient=unused, **alone)
            layers = (ours.module if wrap is DistributedDataParallel else ours).layers
            _, share = batch()
            for _ in range(2):
                ours.zero_grad()
                ours(share, [0] if world.rank else [0, 1]).sum().backward()
                for parameter in layers[2].parameters():
                    if unused == "none":
                        assert parameter.grad is None
                    else:
                        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
                assert bool((layers[1].bias.grad == 4 / world.size).all())


def body_skip(wrap: Wrap) -> None:
    """What no rank used is left out from the second pass on; a later gradient is refused."""
    world = communicator()
    one = Paths()
    ours = wrap(copy.deepcopy(one), skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6)
    x, share = batch()
    found = []
    for _ in range(3):
        one.zero_grad()
        ours.zero_grad()
        for rank, rows in enumerate(x.chunk(world.size)):
            (one(rows, [0, 1] if rank else [0]).square().mean() / world.size).backward()
        value = ours(share, [0, 1] if world.rank else [0]).square().mean()
        with observe(recorder := Recorder()):
            value.backward()
        found.append([c.shape[0] for c in recorder.collectives if c.kind == "all_reduce"])
        same(ours, one)
    rest = [3 + 1, 9 + 1 + NOTES]
    assert found == [[3 + 1, 9 + 1] * 2 + rest, [3 + 1, 9 + 1, *rest], [3 + 1, 9 + 1, *rest]]
    value = ours(share, [0, 2]).sum()
    with pytest.raises(RuntimeError) as caught:
        value.backward()
    assert "skip_all_reduce_unused_params=True expects every iteration" in str(caught.value)
    assert f"rank {world.rank} parameter" in str(caught.value)
    assert "layers.2" in str(caught.value)
    # Without communication ranks do not know of each other, and nothing is left out.
    ours = wrap(Paths(), skip_all_reduce_unused_params=True)
    ours.register_comm_hook(None, noop_hook)
    for used in ([0], [2]):
        ours(share, used).sum().backward()


def body_batched(wrap: Wrap) -> None:
    """Small gradients are copied into their bucket together, and out of it again."""
    for asked in (False, True):
        ours = wrap(mlp(), batched_grad_copy=asked)
        _, share = batch()
        value = ours(share).sum()
        with Copies() as copies:
            value.backward()
        batched = ["aten._foreach_copy_.default"]
    assert copies.names == batched * 2


def body_listed(wrap: Wrap) -> None:
    ours = wrap(mlp(), bucket_cap_mb_list=[2e-5, 1e-4])
    _, share = batch()
    value = ours(share).sum()
    with observe(recorder := Recorder()):
        value.backward()
    # 8 bytes an element: 2 + 8 reach the first size, 4 + 16 the second, 4 + 12 are left.
    assert [c.shape[0] for c in recorder.collectives] == [10 + 2, 20 + 2, 16 + 2 + NOTES]


BODIES = [
    body_delay,
    body_mixed_precision,
    body_unused_gradient,
    body_skip,
    body_batched,
    body_listed,
]


def body_all(wrap: Wrap) -> None:
    for body in BODIES:
        body(wrap)


@WRAPS
def test_each_option_has_its_effect(ranks: Ranks, wrap: Wrap) -> None:
    ranks(2, body_all, wrap)
