"""torch's operators on lists of DTensors of several meshes and plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import take_lists_apart


def body() -> None:
    take_lists_apart()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    drawn = torch.Generator().manual_seed(0)
    wholes = [torch.randn(3, 2, generator=drawn, dtype=torch.float64) for _ in range(5)]
    places = [
        None,
        (mesh["tensor"], [Shard(0)]),
        (mesh, [Replicate(), Shard(1)]),
        None,
        (mesh["tensor"], [Replicate()]),
    ]

    def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(tensors, places, strict=True)
        return [t.clone() if at is None else distribute_tensor(t.clone(), *at) for t, at in pairs]

    def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        for each, wanted in zip(found, expected, strict=True):
            value = each.full_tensor() if hasattr(each, "full_tensor") else each
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)

    mixed = spread(wholes)
    assert [type(t) for t in torch._foreach_mul(mixed, 2.0)] == [type(t) for t in mixed]
    factors = [1.0, 2.0, 3.0, 4.0, 5.0]
    same(torch._foreach_mul(mixed, factors), [w * f for f, w in zip(factors, wholes, strict=True)])
    same(torch._foreach_mul(mixed, mixed), [whole * whole for whole in wholes])
    for order in (1.0, 2.0, math.inf):
        for foreach in (None, True, False):
            norm = nn.utils.get_total_norm(mixed, order, foreach=foreach)
            same([norm], [nn.utils.get_total_norm(wholes, order)])
    with pytest.raises(RuntimeError, match="only numbers can be stacked so"):
        torch.stack(mixed)

    copies = spread([torch.zeros_like(whole) for whole in wholes])
    torch._foreach_copy_(copies, mixed)
    same(copies, wholes)
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in mixed]
    with pytest.raises(RuntimeError, match=r"lies as .*Shard.*, and what is to change it as a pl"):
        torch._foreach_copy_(copies, whole)

    # Optimizers over DTensors, and a gradient scaler.
    for cls, options in [
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.RMSprop, {"foreach": True}),
        (torch.optim.Adagrad, {"foreach": True}),
    ]:
        sides = [
            [nn.Parameter(t) for t in made]
            for made in (spread(wholes), [w.clone() for w in wholes])
        ]
        optimizers = [cls(side, lr=0.1, **options) for side in sides]
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in sides]
        for step in range(2):
            gradients = [whole * (step + 1.0) for whole in wholes]
            for side, given, optimizer, scaler in zip(
                sides, (spread(gradients), gradients), optimizers, scalers, strict=True
            ):
                scaler.scale(torch.zeros(()))  # pyrefly: ignore[bad-argument-type]
                for parameter, gradient in zip(side, given, strict=True):
                    parameter.grad = gradient * 4.0
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(side, 0.5)
                scaler.step(optimizer)
                scaler.update(4.0)
            same([p.detach() for p in sides[0]], [p.detach() for p in sides[1]])

    # What overflows on one rank alone stops all.
    (side, _), optimizer, scaler = sides, optimizers[0], torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # pyrefly: ignore[bad-argument-type]
    before = [p.detach().clone() for p in side]
    wholes[1][2, 1] = math.inf
    for parameter, gradient in zip(side, spread(wholes), strict=True):
        parameter.grad = gradient
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for parameter, kept in zip(side, before, strict=True):
        same([parameter.detach()], [kept.full_tensor() if hasattr(kept, "full_tensor") else kept])


def test_lists_of_several_meshes_and_none(ranks: Ranks) -> None:
    ranks(2, body)
