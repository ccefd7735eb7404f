"""`fully_shard` under autocast and a scaler, without gradients, and after exceptions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from meshwright.testing import Ranks


class Model(nn.Module):
    """Two layers; `generate` calls `forward` and `embed` of layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 6)
        self.drop = nn.Dropout(0.5)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("planted")
        hidden = self.first(x).tanh()
        if self.where == "tensor hook":
            hidden.register_hook(self._raise)
        return self.last(hidden)

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self.last(self.first(x).tanh())
        return x

    def _raise(self, *_: object) -> None:
        raise ValueError("planted")


def build(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def shard(model: Model, **options: Any) -> Any:
    for layer in (model.first, model.last):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(dtype: torch.dtype = torch.float64, seed: int = 5) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(x: torch.Tensor) -> torch.Tensor:
    world = communicator()
    return x.chunk(world.size)[world.rank]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(model: nn.Module, one: nn.Module, tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.detach()),
            theirs.detach(),
            rtol=tolerance,
            atol=tolerance,
            check_device=False,  # offloaded, it is the host's
        )
        assert (mine.grad is None) is (theirs.grad is None)
        if theirs.grad is not None and mine.grad is not None:
            torch.testing.assert_close(
                whole(mine.grad), theirs.grad, rtol=tolerance, atol=tolerance, check_device=False
            )


def body_autocast_and_scaler() -> None:
    """A step with an overflow on one rank is skipped on all, and the scale falls on all."""
    world = communicator()
    one = build(torch.float32)
    model = shard(copy.deepcopy(one))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100) for _ in range(2)]
    for step in range(3):
        x = batch(torch.float32, seed=step)
        mine = share(x).clone()
        if step == 1 and world.rank == 1:
            mine[0, 0] = torch.inf
        pairs = ((model, ours, scalers[0], mine), (one, theirs, scalers[1], x))
        for net, optimizer, scaler, inputs in pairs:
            if step == 1 and net is one:
                continue
            with torch.autocast("cpu", torch.bfloat16):
                out = net(inputs)
                assert out.dtype == torch.bfloat16
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == (4.0 if step == 0 else 2.0)
        same(model, one, 2e-2)
    assert all(torch.isfinite(whole(p)).all() for p in model.parameters())


def body_converted() -> None:
    """What the policy names holds after `.to(dtype)`, and what it does not name follows."""
    low, single, double = torch.bfloat16, torch.float32, torch.float64
    for begins, asked, becomes, computes, reduces in (
        (low, (low, low), single, low, low),
        (low, (low, None), single, low, low),
        (single, (low, single), double, low, single),
        (single, (None, single), double, double, single),
        (single, (None, None), double, double, double),
    ):
        policy = MixedPrecisionPolicy(param_dtype=asked[0], reduce_dtype=asked[1])
        layer = fully_shard(nn.Linear(4, 4, dtype=begins), mp_policy=policy).to(becomes)
        seen: list[torch.dtype] = []
        layer.register_forward_hook(lambda layer, *_, seen=seen: seen.append(layer.weight.dtype))
        with observe(recorder := Recorder()):
            layer(torch.ones(2, 4, dtype=becomes)).float().sum().backward()
        sums = {c.dtype for c in recorder.collectives if c.kind == "reduce_scatter"}
        assert (seen, sums) == ([computes], {str(reduces).removeprefix("torch.")})
        assert layer.weight.grad.dtype == becomes


def body_inference() -> None:
    """Inference first, then training, evaluation with and without gradients, training again."""
    one = build()
    model = shard(copy.deepcopy(one))
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(batch()), one.eval()(batch()))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, one))
    for step in range(3):
        model.train()
        x = batch(seed=step)
        model(share(x)).square().mean().backward()
        one(x).square().mean().backward()
        same(model, one)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        model.eval()
        with torch.inference_mode(mode=step != 1), torch.no_grad():
            torch.testing.assert_close(model(x), one(x))
        model(x)  # with a graph that nobody goes back through
        assert all(isinstance(p, DTensor) for p in model.parameters())


def body_generation() -> None:
    """A method that calls layers by itself, between steps."""
    one = build()
    model = shard(copy.deepcopy(one))
    register_fsdp_forward_method(model, "generate")
    recorder = Recorder()
    with observe(recorder):
        torch.testing.assert_close(model.generate(batch(), 3), one.generate(batch(), 3))
    assert len([k for k in recorder.kinds() if k[1].startswith("unshard")]) == 6
    for step in range(2):
        x = batch(seed=step)
        model(share(x)).square().mean().backward()
        one(x).square().mean().backward()
        same(model, one)
        torch.testing.assert_close(model.generate(x, 2), one.generate(x, 2))
    assert all(isinstance(p, DTensor) for p in model.parameters())


class Writer(Model):
    """`generate` calls the module itself, as that of Hugging Face's models does."""

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def body_generation_by_calls() -> None:
    """The root is gathered once, and sums that wait for their reduction stay."""
    torch.manual_seed(0)
    one = Writer().double()
    model: Any = copy.deepcopy(one)
    fully_shard(model.first)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    for step, is_last in enumerate((False, True)):
        x = batch(seed=step)
        model.set_requires_gradient_sync(is_last)
        model(share(x)).square().mean().backward()
        one(x).square().mean().backward()
        with observe(recorder := Recorder()):
            torch.testing.assert_close(model.generate(x, 3), one.generate(x, 3))
        gathers = [label for _, label in recorder.kinds() if label.startswith("unshard")]
        assert len(gathers) == 4, gathers
    same(model, one)


def body_offload() -> None:
    """On CPU ranks offloading changes nothing: the same collectives, the same training."""
    kinds = []
    one = build()
    for policy in (CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False), None):
        reference = copy.deepcopy(one)
        model = shard(copy.deepcopy(one), offload_policy=policy)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
        recorder = Recorder()
        with observe(recorder):
            for step in range(2):
                x = batch(seed=step)
                with model.no_sync():
                    model(share(x)).square().mean().backward()
                model(share(x)).square().mean().backward()
                for _ in range(2):
                    reference(x).square().mean().backward()
                same(model, reference)
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
        same(model, reference)
        kinds.append(recorder.kinds())
    assert kinds[0] == kinds[1] == kinds[2]


def body_offload_by_types() -> None:
    """Where shard and computation are told apart, so are they: shard and gradient are at home."""
    with torch.device("meta"):
        model = shard(Model(), offload_policy=CPUOffloadPolicy())
    group = fully_shard.state(model.first).unit.groups[0]
    assert group.home == torch.device("meta")
    assert group.buffer.device.type == "cpu"
    model.to_empty(device="cpu")
    reference = build(torch.float32)
    with torch.no_grad():
        for mine, value in zip(model.parameters(), reference.state_dict().values(), strict=True):
            mine.copy_(_like(mine, value))
    x = batch(torch.float32)
    model(share(x)).square().mean().backward()
    assert group.home.type == group.buffer.shard.device.type == "cpu"
    reference(x).square().mean().backward()
    same(model, reference, 1e-5)


def _like(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


class Swaps(nn.Module):
    """Runs its layers in the order it is told, some of them twice, some recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.order: list[int] = [0, 1, 2]
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = x.tanh()
        return x


def body_order_of_modules() -> None:
    """Ranks change the order together, leave layers out and call them again."""
    torch.manual_seed(0)
    one = Swaps().double()
    model = copy.deepcopy(one)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    orders = [[0, 1, 2], [2, 1, 0], [0, 2], [0, 1, 0, 2, 1], [1], [0, 1, 2]]
    for step, order in enumerate(orders):
        for net, x in ((model, share(batch(seed=step))), (one, batch(seed=step))):
            net.order, net.recomputes = order, step % 2 == 1
            net.zero_grad()
            net(x).square().mean().backward()
        same(model, one)


def body_exception(where: str) -> None:
    """Wherever it was raised, the next iteration trains as if nothing had been."""
    one = build()
    model = shard(copy.deepcopy(one))
    x = batch()
    handle = None
    for bad in (False, True, True, False):
        model.zero_grad()
        model.where = where if bad else ""
        if bad and where == "forward hook":
            handle = model.first.register_forward_hook(lambda *_: model._raise())
        if bad and where == "forward pre-hook":
            handle = model.last.register_forward_pre_hook(lambda *_: model._raise())
        if bad and where == "backward hook":
            handle = model.last.register_full_backward_hook(lambda *_: model._raise())
        if bad and where == "reduction hook":
            model.last.set_all_reduce_hook(model._raise)
        if not bad:
            model(share(x)).square().mean().backward()
            continue
        with pytest.raises(ValueError, match="planted"):
            model(share(x)).square().mean().backward()
        if handle is not None:
            handle.remove()
        if where == "reduction hook":
            model.last.set_all_reduce_hook(lambda _: None)
    one(x).square().mean().backward()
    same(model, one)
    assert all(isinstance(p, DTensor) for p in model.parameters())


BODIES = [
    body_autocast_and_scaler,
    body_converted,
    body_inference,
    body_generation,
    body_generation_by_calls,
    body_offload,
    body_offload_by_types,
    body_order_of_modules,
]


@pytest.mark.few(2)
@pytest.mark.parametrize("body", BODIES, ids=[b.__name__.removeprefix("body_") for b in BODIES])
def test_modes(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


WHERE = [
    "forward",
    "tensor hook",
    "forward hook",
    "forward pre-hook",
    "backward hook",
    "reduction hook",
]


def body_exceptions() -> None:
    for where in WHERE:
        try:
            body_exception(where)
        except BaseException as error:
            error.add_note(f"raised in the {where}")
            raise


def test_the_iteration_after_an_exception_trains(ranks: Ranks) -> None:
    ranks(2, body_exceptions)
