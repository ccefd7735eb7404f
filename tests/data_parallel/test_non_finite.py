"""`stop_on_non_finite`: every rank raises at the end of a backward pass, and says who and what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.data_parallel.comm_hooks import fp16_compress_hook, noop_hook
from meshwright.errors import NonFiniteError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

Wrap = Callable[..., Any]


class Spoiled(torch.autograd.Function):
    """Multiplies a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Net(nn.Module):
    """Its first layer can get another gradient than it should."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)
        self.double()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(Spoiled.apply(self.first(x), self.factor)))


def sharded(model: Net, **options: Any) -> nn.Module:
    """The root has no parameters of its own."""
    for part in (model.first, model.second, model.last):
        fully_shard(part)
    return fully_shard(model, **options)


def hybrid(model: Net, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh, **options)


def facade(model: Net, *, use_orig_params: bool, **options: Any) -> nn.Module:
    model.first = FullyShardedDataParallel(model.first, use_orig_params=use_orig_params)
    model.second = FullyShardedDataParallel(model.second, use_orig_params=use_orig_params)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, **options)


def flat(model: Net, **options: Any) -> nn.Module:
    return facade(model, use_orig_params=False, **options)


def original(model: Net, **options: Any) -> nn.Module:
    return facade(model, use_orig_params=True, **options)


WRAPS: dict[str, Wrap] = {
    "replicate": replicate,
    "class": DistributedDataParallel,
    "sharded": sharded,
    "flat": flat,
    "original": original,
}


class Loop:
    """A loop of the user's own."""

    def __init__(self, wrap: Wrap, **options: Any) -> None:
        self.net = Net()
        self.model = wrap(self.net, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, *, is_bad: bool = False) -> torch.Tensor:
        loss = self.model(torch.ones(2, 3).double() + communicator().rank).square().mean()
        return loss * torch.nan if is_bad else loss

    def step(self, *, is_bad: bool = False) -> None:
        self.optimizer.zero_grad()
        self.loss(is_bad=is_bad).backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        found = [p.detach() for p in self.model.parameters()]
        return [(p.to_local() if hasattr(p, "to_local") else p).clone() for p in found]

    def refused(self, *, is_bad: bool = False) -> str:
        """What the step raises, which must leave the weights as they are."""
        before = self.weights()
        with pytest.raises(NonFiniteError) as caught:
            self.step(is_bad=is_bad)
        for ours, kept in zip(self.weights(), before, strict=True):
            assert torch.equal(ours, kept)
        return str(caught.value)


def kinds_of(step: Callable[[], None]) -> list[tuple[str, str]]:
    with observe(recorder := Recorder()):
        step()
    return recorder.kinds()


def body(name: str) -> list[str]:
    """What was refused: a loss that is not a number on the last rank, a gradient on the first."""
    world = communicator()
    loop, free = Loop(WRAPS[name], stop_on_non_finite=True), Loop(WRAPS[name])
    for each in (loop, free):
        each.step()
    said = [loop.refused(is_bad=world.rank == world.size - 1)]
    loop.net.factor = torch.inf if world.rank == 0 else 1.0
    said.append(loop.refused())
    loop.net.factor = 1.0
    counts = [("all_gather", "use counts")] if name == "flat" else []
    assert sorted(kinds_of(loop.step)) == sorted([*kinds_of(free.step), *counts])
    # What was refused has left no trace.
    for ours, theirs in zip(loop.weights(), free.weights(), strict=True):
        torch.testing.assert_close(ours, theirs)
    free.step(is_bad=world.rank == 0)
    assert not any(p.isfinite().all() for p in free.weights() if p.numel())
    return said


def check(name: str, found: list[list[str]]) -> None:
    assert all(said == found[0] for said in found)
    first, second = found[0]
    last = len(found) - 1
    nearest = "'second.0.bias'" if name in ("flat", "original") else "'last.bias'"
    assert f"the gradient of {nearest} and 5 more on ranks [{last}]. No rank" in first
    assert "the gradient of 'first.0.bias' and 1 more on ranks [0]. No rank" in second


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WRAPS)
def test_every_rank_stops_and_says_who(ranks: Ranks, name: str) -> None:
    check(name, ranks(2, body, name))


@pytest.mark.few(0, slow=3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("name", WRAPS)
def test_four_ranks_stop_on_both_backends(ranks: Ranks, name: str) -> None:
    check(name, ranks(4, body, name))


def body_hybrid() -> str:
    loop = Loop(hybrid, stop_on_non_finite=True)
    loop.step()
    return loop.refused(is_bad=communicator().rank in (1, 2))


@pytest.mark.slow
def test_copies_of_shards_stop(ranks: Ranks) -> None:
    found = ranks(4, body_hybrid)
    assert len(set(found)) == 1
    assert "the gradient of 'second.0.bias' and 5 more on ranks [1, 2]." in found[0]


# ------------------------------------------------------------------------- ways of replicas only


def body_two_culprits(**options: Any) -> str:
    """Each rank is told with its own parameter, also where one bucket holds both."""
    loop = Loop(replicate, stop_on_non_finite=True, **options)
    loop.step()
    name = ["first.0.weight", "second.0.weight"][communicator().rank]
    loop.net.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan)
    return loop.refused()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 6e-5}, {"static_graph": True}],
    ids=str,
)
@pytest.mark.few(1)
def test_each_culprit_is_told(ranks: Ranks, options: dict[str, Any]) -> None:
    first, second = ranks(2, body_two_culprits, **options)
    assert first == second
    words = "the gradient of 'first.0.weight' on ranks [0]; the gradient of 'second.0.weight' on"
    assert f"not finite: {words} ranks [1]. No rank" in first


class Odd(nn.Module):
    """A gradient that is reduced where it lies, and one of a few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 3, sparse=True)
        self.large = nn.Linear(3, 2**19)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.large(self.table(rows))


def body_odd() -> None:
    world = communicator()
    model = replicate(Odd(), stop_on_non_finite=True)
    for name in ("table.weight", "large.weight"):
        parameter = model.get_parameter(name)
        spoil = torch.inf if world.rank else 1.0
        handle = parameter.register_hook(lambda gradient, spoil=spoil: gradient * spoil)
        with pytest.raises(NonFiniteError, match=f"the gradient of '{name}' on ranks .1."):
            model(torch.tensor([world.rank])).mean().backward()
        handle.remove()
        model.zero_grad()
        model(torch.tensor([world.rank])).mean().backward()


def body_accumulated() -> None:
    """What a pass without a reduction has left is seen in the one that reduces it."""
    loop = Loop(replicate, stop_on_non_finite=True)
    with loop.model.no_sync():
        loop.loss(is_bad=communicator().rank == 1).backward()
    with pytest.raises(NonFiniteError, match="the gradient of .* on ranks .1."):
        loop.loss().backward()


def body_hooks() -> None:
    """What a hook makes of finite gradients, or leaves on one rank."""
    loop = Loop(DistributedDataParallel, stop_on_non_finite=True)
    loop.model.register_comm_hook(None, fp16_compress_hook)
    loop.step()
    loop.net.factor = 1e9
    words = "own values are finite: their sum overflows, that of the gradient of 'first.0.bias'"
    assert words in loop.refused()
    loop.net.factor = 1.0
    loop.step()
    alone = Loop(DistributedDataParallel, stop_on_non_finite=True)
    alone.model.register_comm_hook(None, noop_hook)
    if communicator().rank:
        assert "the gradient of 'last.bias' and 5 more on ranks [1]" in alone.refused(is_bad=True)
    else:
        alone.step()


def body_uneven(name: str) -> str:
    """A rank that has run out of batches takes part in the error, too."""
    loop = Loop(WRAPS[name], stop_on_non_finite=True)

    def train() -> None:
        with loop.model.join():
            for number in range(1 if communicator().rank else 3):
                loop.step(is_bad=number == 1)

    with pytest.raises(NonFiniteError) as caught:
        train()
    return str(caught.value)


def body_scaler() -> None:
    """Off by default: a gradient scaler finds what is not finite, and skips it on every rank."""
    loop = Loop(replicate)
    loop.net.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loop.net.factor = torch.inf if communicator().rank else 1.0
    before = loop.weights()
    x = torch.ones(2, 3)
    scaler.scale(loop.model(x).square().mean()).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    for ours, kept in zip(loop.weights(), before, strict=True):
        assert torch.equal(ours, kept)


@pytest.mark.few(1)
@pytest.mark.parametrize("body", [body_odd, body_accumulated, body_hooks, body_scaler])
def test_wherever_a_gradient_is_reduced(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


@pytest.mark.parametrize("name", ["replicate", "sharded"])
def test_ranks_without_batches_stop_too(ranks: Ranks, name: str) -> None:
    first, second = ranks(2, body_uneven, name)
    assert first == second
    assert " on ranks [0]. No rank" in first
