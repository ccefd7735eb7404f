"""One rank raises in code of the user's, catches that, and goes on with its next batch.

Where a pass sends nothing before it raises, the rank goes on: its next pass takes the place of the
one that it gave up. Everywhere else every rank gets an error that names the one that raised, and no
optimizer uses a sum of different passes.
"""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm import communicator, settle
from meshwright.data_parallel import fully_shard, replicate
from meshwright.errors import CollectiveMismatchError, CommunicationError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.gradients import declare_element_wise
from meshwright.testing import Ranks, RanksFailed
from support.late import as_on_a_host, raises_by_now

SOON = 5.0
STRATEGIES = ("replicate", "fully_shard", "flat", "original")
PLACES = ("forward", "loss", "backward", "optimizer", "half a step")
ON_HOSTS = pytest.mark.devices("host", reason="a simulated device stands in a broadcast of buffers")


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


class Net(nn.Module):
    """Raises between its first and its second unit, in the forward or in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.raises_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.a(x).tanh()
        if self.raises_in == "forward":
            raise ValueError("planted")
        return self.b(RaisesInBackward.apply(x) if self.raises_in == "backward" else x)


@declare_element_wise
class HalfSGD(torch.optim.SGD):
    """Raises when it has changed its first parameter, if asked to."""

    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            first = self.param_groups[0]["params"][0]
            with torch.no_grad():
                first.sub_(0.1 * first.grad)
            raise ValueError("planted")
        super().step(closure)


def laid_out(strategy: str) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net().double()
    if strategy == "replicate":
        return net, replicate(net)
    if strategy == "fully_shard":
        for part in (net.a, net.b):
            fully_shard(part)
        return net, fully_shard(net)
    options = {"use_orig_params": strategy == "original"}
    net.a, net.b = FSDP(net.a, **options), FSDP(net.b, **options)
    return net, FSDP(net, **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def raising(*_: object) -> None:
    raise ValueError("planted")


class Loop:
    """A loop whose rank ``odd`` raises at step ``at``, and that goes on."""

    def __init__(self, strategy: str, place: str, *, odd: Callable[[int], bool]) -> None:
        self.net, self.model = laid_out(strategy)
        self.optimizer = HalfSGD(self.model.parameters(), lr=0.1)
        self.place = place
        self.is_odd = odd(communicator().rank)
        self.steps = 0

    def step(self, *, raises: bool) -> None:
        raises = raises and self.is_odd
        self.net.raises_in = self.place if raises else ""
        HalfSGD.raises = raises and self.place == "half a step"
        hook = None
        if raises and self.place == "optimizer":
            hook = self.optimizer.register_step_pre_hook(raising)
        self.steps += 1
        try:
            self.optimizer.zero_grad()
            loss = self.model(batch(self.steps, communicator().rank)).square().sum()
            if raises and self.place == "loss":
                raise ValueError("planted")
            loss.backward()
            self.optimizer.step()
        except ValueError:
            pass
        finally:
            if hook is not None:
                hook.remove()


def body_one(strategy: str, place: str) -> tuple[str, float]:
    """What this rank said, and how many seconds it took from where rank 1 raised."""
    loop = Loop(strategy, place, odd=lambda rank: rank == 1)
    for _ in range(2):
        loop.step(raises=False)
    begun = time.monotonic()
    try:
        # A replica sends nothing in its forward pass: its next batch takes the place of that one.
        makes_up = loop.is_odd and (strategy, place) == ("replicate", "forward")
        for number in range(4 if makes_up else 3):
            loop.step(raises=number == 0)
        settle()
    except CommunicationError as error:
        return str(error), as_on_a_host(time.monotonic() - begun)
    return "", as_on_a_host(time.monotonic() - begun)


EXPECTED = {
    "forward": r"rank 1 raised in a forward pass",
    "loss": r"a forward pass in training on rank 1, a backward pass on rank 0|"
    r'rank 1 (called|issued) broadcast.*"broadcast buffers|rank 0 issued all_reduce #\d+ "reduce',
    "backward": r"rank 1 raised in a backward pass|was given up, on ranks .1.|"
    r'rank 1 (called|issued) all_gather.*"unshard',
    "optimizer": r"step raised, .*, on ranks .1.|after 2 weight changes, on ranks .1.",
    "half a step": r"step raised, .*, on ranks .1.|after 4 weight changes, on ranks .1.",
}


def check_one(ranks: Ranks, strategy: str, place: str) -> None:
    said = ranks(2, body_one, strategy, place, timeout=30)
    if (strategy, place) == ("replicate", "forward"):
        assert [text for text, _ in said] == ["", ""]
        return
    if (strategy, place) == ("replicate", "backward"):
        assert re.search(EXPECTED[place], said[0][0]), said
        return
    for text, seconds in said:
        assert re.search(EXPECTED[place], text), text
        assert seconds < SOON


CASES = [
    pytest.param(
        strategy,
        place,
        marks=[ON_HOSTS] if strategy == "replicate" and place in ("loss", "backward") else [],
    )
    for strategy in STRATEGIES
    for place in PLACES
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("strategy", "place"), CASES)
def test_every_rank_is_told_who_raised(ranks: Ranks, strategy: str, place: str) -> None:
    check_one(ranks, strategy, place)


@pytest.mark.few(0, slow=6)
@pytest.mark.backends("gloo")
@pytest.mark.parametrize(("strategy", "place"), CASES)
def test_every_rank_is_told_on_gloo(ranks: Ranks, strategy: str, place: str) -> None:
    check_one(ranks, strategy, place)


def body_unconnected(strategy: str) -> None:
    """Rank 1 raises at its third step, in a run whose group the user has made."""
    dist.init_process_group("gloo")
    net, model = laid_out(strategy)
    for step in range(3):
        net.raises_in = "forward" if step == 2 and dist.get_rank() == 1 else ""
        model(batch(step, dist.get_rank())).square().sum().backward()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_raised_is_named_without_connect(ranks: Ranks, strategy: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body_unconnected, strategy, connected=False, grace=SOON)
    assert re.search(r"rank 1 failed first.* ValueError: planted", str(caught.value))


# ------------------------------------------------------------------------ what goes on


def sgd_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def body_retry(strategy: str, raises_on: tuple[int, ...]) -> None:
    """Ranks repeat a forward pass that raised; the weights are those of one process."""
    world = communicator()
    net, model = laid_out(strategy)
    torch.manual_seed(0)
    one = Net().double()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(4):
        x = batch(step, world.rank)
        if step in (1, 2) and world.rank in raises_on:
            net.raises_in = "forward"
            with pytest.raises(ValueError, match="planted"):
                model(x)
            net.raises_in = ""
        sgd_step(model, mine, x)
        sgd_step(one, theirs, torch.cat([batch(step, rank) for rank in range(world.size)]))
    state = {name: value for name, value in model.state_dict().items() if name != "calls"}
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, one.state_dict()[name], msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_pass_may_be_repeated(ranks: Ranks, strategy: str) -> None:
    """By all ranks; by one where nothing was sent."""
    ranks(2, body_retry, strategy, (0, 1))
    if strategy == "replicate":
        ranks(2, body_retry, strategy, (1,))


def body_skips(ends_with: str) -> None:
    """Rank 1 leaves its second batch out before any pass: pass for pass the ranks still agree.

    Only the count of passes differs, and that is an error at the first pass without a partner.
    """
    world = communicator()
    torch.manual_seed(0)
    one = nn.Linear(4, 2).double()
    model = replicate(copy.deepcopy(one))
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    batches = [(0, 0), (1, 2), (2, 3)]
    for steps in batches:
        sgd_step(model, mine, batch(steps[world.rank], world.rank))
        together = [batch(step, rank) for rank, step in enumerate(steps)]
        sgd_step(one, theirs, torch.cat(together))
    if world.rank == 0:
        text = "rank 1 (called|issued) barrier|rank 1 failed first"
        text = "rank 1 is done" if ends_with == "the end" else text
        with pytest.raises(CommunicationError, match=text):
            sgd_step(model, mine, batch(3, 0))
    elif ends_with != "the end":
        with pytest.raises(CommunicationError, match="rank 0 .*all_reduce|rank 0 failed first"):
            world.barrier()
    for ours, expected in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.few(1)
@pytest.mark.devices("host", reason="only the watch of a real device names who does not come")
@pytest.mark.parametrize("ends_with", ["the end", "something else"])
def test_a_replica_that_skips_a_batch(ranks: Ranks, ends_with: str) -> None:
    ranks(2, body_skips, ends_with)


def body_split_optimizer() -> None:
    """Rank 2 owns no parameter: the other ranks change its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    world = communicator()
    torch.manual_seed(0)
    one = nn.Linear(4, 2).double()
    model = replicate(copy.deepcopy(one))
    mine = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(4):
        sgd_step(model, mine, batch(step, world.rank))
        sgd_step(one, theirs, torch.cat([batch(step, rank) for rank in range(world.size)]))
    for ours, expected in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    # Equal once, and told apart all the same.
    model(batch(8, world.rank)).square().mean().backward()
    if world.rank == 0:
        with torch.no_grad():
            model.weight.add_(1.0)
    with raises_by_now(CollectiveMismatchError, match=r"pass 1 .* after 5 .* on ranks .0."):
        sgd_step(model, mine, batch(9, world.rank))


@pytest.mark.devices("host", "simulated")
def test_a_rank_whose_weights_others_change(ranks: Ranks) -> None:
    ranks(3, body_split_optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "place", [pytest.param("optimizer", marks=pytest.mark.slow), "half a step"]
)
def test_all_ranks_may_leave_a_step_out(ranks: Ranks, strategy: str, place: str) -> None:
    def body() -> None:
        loop = Loop(strategy, place, odd=lambda rank: True)
        for number in range(4):
            loop.step(raises=number in (0, 2))

    ranks(2, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_what_the_module_had_before(ranks: Ranks, strategy: str) -> None:
    """Where the parameter objects stay it steps; elsewhere it would step nothing, in silence."""

    def body() -> None:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if strategy in ("replicate", "fully_shard"):
            (replicate if strategy == "replicate" else fully_shard)(model)
        else:
            model = FSDP(model, use_orig_params=strategy == "original")
        before = copy.deepcopy(model.state_dict())
        model(batch(0, 0)).sum().backward()
        if strategy in ("fully_shard", "flat"):
            with pytest.raises(RuntimeError, match="had before it was sharded, or has while"):
                optimizer.step()
            return
        optimizer.step()
        assert not torch.equal(model.state_dict()["weight"], before["weight"])

    ranks(2, body)
