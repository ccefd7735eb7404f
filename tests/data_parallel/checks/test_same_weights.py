"""Copies of the weights that a write on one rank alone has parted are named; equal ones never."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    keep_batch_norm_local,
    replicate,
)
from meshwright.data_parallel.comm_hooks import GradBucket, PostLocalSGDState, post_localSGD_hook
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks, RanksFailed
from support.internals.data_parallel import BITS, PATIENCE, SameWeights, bits_of
from support.late import raises_by_now

BEFORE = 10
"""Steps before a rank does something else: the next pass that is compared is the 16th."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    keep_batch_norm_local(model)
    return model.to(communicator().device)


def of_class(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model, broadcast_buffers=False)


def mesh_of_copies() -> Any:
    return init_device_mesh(communicator().device.type, (2, 1), mesh_dim_names=("dp", "shard"))


def hybrid(model: nn.Sequential) -> nn.Module:
    return fully_shard(model, mesh=mesh_of_copies())


def flat(model: nn.Sequential) -> nn.Module:
    options: Any = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    options |= {"device_mesh": mesh_of_copies(), "use_orig_params": True}
    return FullyShardedDataParallel(model, **options)


WRAPS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "replicate": replicate,
    "class": of_class,
    "fully_shard": hybrid,
    "facade": flat,
}


class Loop:
    """A user's loop, in which rank 1 may do something by itself."""

    def __init__(
        self, wrap: Callable[[nn.Sequential], nn.Module] = replicate, momentum: float = 0.9
    ) -> None:
        self.model: Any = wrap(build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        self.passes = 0

    def held(self) -> list[torch.Tensor]:
        """List the parameters' own memory on this rank."""
        return [getattr(p, "_local_tensor", p) for p in self.model.parameters()]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            x = torch.ones(4, 3) * (communicator().rank + 1) + torch.arange(4.0)[:, None]
            self.passes += 1
            self.model(x.to(communicator().device)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@torch.no_grad()
def written(loop: Loop) -> None:
    for held in loop.held():
        held.add_(0.5)


def written_unseen(loop: Loop) -> None:
    """Do what no count of versions sees."""
    for held in loop.held():
        held.data.mul_(1.5)


def another_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.1


def fewer_steps_of_momentum(loop: Loop) -> None:
    loop.optimizer.state.clear()


APART = (written, written_unseen, another_rate, fewer_steps_of_momentum)


def body_apart(name: str, apart: Callable[[Loop], None]) -> int:
    loop = Loop(WRAPS[name])
    loop.step(BEFORE)
    if communicator().rank == 1:
        apart(loop)
    with raises_by_now(CollectiveMismatchError) as raised:
        loop.step(8)
    said = str(raised.value)
    assert "copies of the weights" in said, said
    assert re.search(r"is that of rank 0 on ranks \[0\]; off by .* on ranks \[1\]", said), said
    assert re.search(r"but [01]\.weight is", said), said
    return loop.passes


@pytest.mark.few(4)
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize("name", WRAPS)
def test_a_write_on_one_rank_is_named_on_all(ranks: Ranks, name: str) -> None:
    found = ranks(2, body_apart, name, written_unseen)
    assert len(set(found)) == 1
    assert 16 <= found[0] <= 17  # of a device one pass late


@pytest.mark.parametrize("apart", APART)
def test_what_one_rank_does_alone_is_named(ranks: Ranks, apart: Callable[[Loop], None]) -> None:
    found = ranks(2, body_apart, "replicate", apart)
    # A write that counts of versions see is asked for in the pass after the next.
    first = BEFORE + 2 if apart is written else 16
    assert len(set(found)) == 1
    assert first <= found[0] <= first + 1  # of a device one pass late


def body_loaded_at_the_start() -> None:
    loop = Loop(of_class)
    if communicator().rank == 0:
        state = {name: value * 2 for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(state)
    text = r"copies of the weights.*load|weight changes"
    with raises_by_now(CollectiveMismatchError, match=text):
        loop.step(1 if communicator().is_on_host else 2)  # of a device it travels a pass later


def test_a_state_that_one_rank_loads_before_the_first_pass_is_named(ranks: Ranks) -> None:
    ranks(2, body_loaded_at_the_start)


# ------------------------------------------------------------------------------ what may be done


@torch.no_grad()
def swapped_in_and_out(loop: Loop) -> None:
    """Evaluate an average of the weights on one rank."""
    if communicator().rank == 0:
        before = [held.clone() for held in loop.held()]
        for held in loop.held():
            held.mul_(0.5)
        for held, value in zip(loop.held(), before, strict=True):
            held.copy_(value)


@torch.no_grad()
def loaded_on_all(loop: Loop) -> None:
    state = {name: value * 2 for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state)


def own_statistics(loop: Loop) -> None:
    for buffer in loop.model.buffers():
        buffer.add_(communicator().rank)


def body_allowed(name: str) -> None:
    for change in (swapped_in_and_out, loaded_on_all, own_statistics):
        loop = Loop(WRAPS[name])
        loop.step(3)
        for _ in range(3):
            change(loop)
            loop.step(2)


@pytest.mark.parametrize("name", ["replicate", "class"])
def test_equal_weights_may_be_written_in_any_way(ranks: Ranks, name: str) -> None:
    ranks(2, body_allowed, name)


def ignoring(model: nn.Sequential) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.bias"])
    with torch.no_grad():
        model[3].bias.add_(communicator().rank)
    return DistributedDataParallel(model)


def local_steps(model: nn.Sequential) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    return wrapped


def hook_of_own(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce gradients, and let each rank have its own: copies part by right."""
    bucket.buffer().mul_(communicator().rank + 1)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hooked(model: nn.Sequential) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    hook: Any = hook_of_own
    hook.parts_copies = True
    wrapped.register_comm_hook(None, hook)
    return wrapped


def mistaken(model: nn.Sequential) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    hook: Any = hook_of_own
    hook.parts_copies = False
    wrapped.register_comm_hook(None, hook)
    return wrapped


def body_by_right() -> None:
    for wrap in (ignoring, local_steps, hooked):
        Loop(wrap).step(9)
    with raises_by_now(CollectiveMismatchError, match="hook that lets copies part"):
        Loop(mistaken).step(2 if communicator().is_on_host else 3)  # of a device a pass later


def body_ascent() -> None:
    """Sharpness-aware minimization: each rank ascends by its own batch before the pass of all."""
    loop = Loop(of_class)
    for _ in range(9):
        start = [held.detach().clone() for held in loop.held()]
        x = torch.ones(4, 3) * (communicator().rank + 1) + torch.arange(4.0)[:, None]
        with loop.model.no_sync():
            loop.model(x).square().sum().backward()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(parameter.grad, alpha=1e-3)
        loop.optimizer.zero_grad()
        loop.model(x).square().sum().backward()
        with torch.no_grad():
            for parameter, before in zip(loop.model.parameters(), start, strict=True):
                parameter.copy_(before)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    weights = [held.tolist() for held in loop.held()]
    one, two = communicator().gather_values(weights, label="weights")
    assert one == two


def body_noise(name: str) -> None:
    """Each rank takes gradients at two samples of the weights of its own; one is then apart."""
    loop = Loop(WRAPS[name])
    loop.step()
    noise = torch.Generator().manual_seed(communicator().rank)

    def step() -> None:
        for sample in range(2):
            loop.passes += 1
            start = [held.detach().clone() for held in loop.held()]
            for held in loop.held():
                draw = torch.randn(held.shape, generator=noise).to(held.device)
                held.data.add_(draw, alpha=0.1)
            x = torch.ones(4, 3) * (communicator().rank + 1) + torch.arange(4.0)[:, None] + sample
            loop.model(x.to(communicator().device)).square().sum().backward()
            for held, before in zip(loop.held(), start, strict=True):
                held.data.copy_(before)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    for _ in range(4):
        step()
    weights = [held.tolist() for held in loop.held()]
    one, two = communicator().gather_values(weights, label="weights")
    assert one == two
    if communicator().rank == 1:
        written_unseen(loop)
    with raises_by_now(CollectiveMismatchError, match="copies of the weights"):
        for _ in range(5):
            step()
    assert 16 <= loop.passes <= 18


@pytest.mark.few(2)
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize("name", ["class", "fully_shard"])
def test_what_is_undone_before_a_step_may_differ(ranks: Ranks, name: str) -> None:
    ranks(2, body_noise, name)


def body_fused() -> None:
    """Fused steps change no version: a rank that leaves one out is named by their number."""
    loop = Loop(of_class)
    kind = torch.optim.SGD
    fused = kind(loop.model.parameters(), lr=0.01, fused=True)
    for optimizer in (fused, fused if communicator().rank else loop.optimizer):
        loop.optimizer = optimizer  # the second may differ: it computes the same
        loop.optimizer.param_groups[0]["momentum"] = 0.0
        loop.step(3)
    loop.optimizer = fused
    loop.step(4)
    if communicator().rank:
        loop.optimizer = kind([nn.Parameter(torch.ones(1))], lr=1.0)
    with raises_by_now(CollectiveMismatchError, match=r"after 11 .*\[0\]; .* after 10 .*\[1\]"):
        loop.step(2)


def test_fused_steps_count(ranks: Ranks) -> None:
    ranks(2, body_fused)


def test_copies_that_part_by_right_are_let_be(ranks: Ranks) -> None:
    ranks(2, body_by_right)
    ranks(2, body_ascent)


def body_rounding() -> None:
    loop = Loop()
    loop.step(BEFORE)
    if communicator().rank == 1:
        with torch.no_grad():
            loop.held()[0].mul_(1 + 1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.step(30)
    said = [str(each.message) for each in caught]
    assert len([text for text in said if "copies of the weights differ by rounding" in text]) == 1
    assert any("'0.weight' first" in text for text in said), said


def test_rounding_is_said_once_and_lets_training_go_on(ranks: Ranks) -> None:
    ranks(2, body_rounding)


def body_join(case: str) -> None:
    """Ranks 0 and 1 train on while rank 2 has no more batches and takes part by zeros."""
    rank = communicator().rank
    loop = Loop(of_class, 0.9 if case == "momentum" else 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with loop.model.join():
                loop.step(2)
                if rank < 2:
                    if case == "apart" and rank == 1:
                        written_unseen(loop)
                    loop.step(3)
    said = [text for each in caught if "copies" in (text := str(each.message))]
    assert len(said) == (case != "alike"), said
    assert all("join() goes on" in text and "weight" in text for text in said), said
    loop.step(3)


def test_join_with_uneven_inputs(ranks: Ranks) -> None:
    ranks(3, body_join, "alike")
    # Inside of it copies may part; behind it, where rank 2 has made fewer steps, they may not.
    ranks(3, body_join, "apart")
    with pytest.raises(RanksFailed, match=r"as after join\(\)"):
        ranks(3, body_join, "momentum")


# ------------------------------------------------------------------------------------- in parts


def test_passes_that_are_compared() -> None:
    weights = SameWeights(lambda: [("w", torch.ones(3))])
    seen: list[int] = []

    def run(until: int) -> None:
        while weights.passes < until:
            weights.begin_pass()
            if weights.digest is not None:
                seen.append(weights.passes)

    run(9)
    weights.ask()
    run(10)
    for _ in range(40):  # more than are answered
        weights.ask()
        run(weights.passes + 1)
    assert seen == [1, 2, 4, 8, 10, 11, 12, 13, 16, 32, 33]
    weights.start_over()
    seen.clear()
    run(3)
    assert seen == [1, 2]


def test_doubt_ends_with_a_step_or_after_some_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SameWeights(lambda: [("w", torch.ones(3))])
    axis: Any = "axis"
    error = CollectiveMismatchError("apart")
    monkeypatch.setattr(weights, "_compare", lambda *_, **__: error)
    seen: list[int] = []
    while not seen:
        weights.begin_pass()
        if weights.digest is not None and weights.doubt(axis):
            seen.append(weights.passes)
    assert seen == [1 + PATIENCE]
    assert not weights.is_in_doubt
    weights.judge()  # nothing to compare
    assert weights.doubt(axis) is None
    assert weights.is_in_doubt
    with weights.parting():
        weights.judge()  # not inside of join
        assert weights.doubt(axis) is error
    assert weights.doubt(axis) is None
    with pytest.raises(CollectiveMismatchError, match="apart"):
        weights.judge()
    assert not weights.is_in_doubt


def test_numbers_are_taken_once_and_tell_values() -> None:
    def first(value: torch.Tensor) -> tuple[float, float]:
        weights = SameWeights(lambda: [("v", torch.zeros(2)), ("w", value)])
        weights.begin_pass()
        return weights.number(), weights.number()

    (one, again), (same, _), (other, _) = map(first, (torch.ones(3), torch.ones(3), torch.eye(3)))
    assert one == same != other
    assert again == 0.0 != one == int(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_bits_tell_other_digests_in_any_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    digests = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)

    def is_parted(some: list[torch.Tensor]) -> bool:
        total = torch.zeros(2 * BITS, dtype=dtype)
        for each in some:
            total.add_(bits_of(each))
        sums = (total.real if dtype.is_complex else total).tolist()
        return max(map(min, sums[:BITS], sums[BITS:])) > 0

    for digest in digests:
        assert not is_parted([digest] * 300)
        assert is_parted([*([digest] * 300), digests[0] ^ digest ^ digests[1]]) or (
            digest in digests[:2]
        )
