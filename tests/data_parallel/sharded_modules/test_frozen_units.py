"""What units reduce while all, some or none of their parameters are frozen, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks

WIDTH = 6
Reduced = list[tuple[str, tuple[int, ...]]]
"""The unit and the shape of each reduce-scatter, in order."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.relu(self.up(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 2)).double()


def shard(
    one: nn.Module, after: bool | int, *, recomputes: bool = False, has_root: bool = True
) -> nn.Sequential:
    """Make every block a unit, and the rest the root's or a root of its own."""
    model = copy.deepcopy(one)
    assert isinstance(model, nn.Sequential)
    for block in model[:3]:
        if recomputes:
            checkpoint(block)
        fully_shard(block, reshard_after_forward=after)
    fully_shard(model if has_root else model[3], reshard_after_forward=after)
    return model


def share(x: torch.Tensor) -> torch.Tensor:
    world = communicator()
    return x.chunk(world.size)[world.rank]


def reduced(call: Callable[[], object]) -> Reduced:
    recorder = Recorder()
    with observe(recorder):
        call()
    found = [c for c in recorder.collectives if c.kind == "reduce_scatter"]
    return [(c.label.removeprefix("reduce "), c.shape) for c in found]


class Pair:
    """A sharded model and one process beside it, which take the same steps."""

    def __init__(self, one: nn.Module, model: nn.Module) -> None:
        self.one, self.model = one, model
        self.pairs = list(zip(one.named_parameters(), model.parameters(), strict=True))
        self.optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (one, model)]
        self.steps = 0

    def train(self, is_trained: Callable[[str], bool]) -> Reduced:
        """Take a step in which the named parameters are trained; what it reduced."""
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.steps)).double()
        self.steps += 1
        for net in (self.one, self.model):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(is_trained(name))
        self.one(x).square().mean().backward()
        found = reduced(lambda: self.model(share(x)).square().mean().backward())
        for (name, expected), parameter in self.pairs:  # those that the optimizers step
            gradient = parameter.grad
            assert (gradient is None) is (expected.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(
                    gradient.full_tensor(), expected.grad, rtol=1e-10, atol=1e-12
                )
        for optimizer in self.optimizers:
            optimizer.step()
            # Zeros stay with what is frozen next, and the optimizer steps it.
            optimizer.zero_grad(set_to_none=self.steps % 2 == 0)
        with torch.no_grad():
            torch.testing.assert_close(
                self.model(share(x)), share(self.one(x)), rtol=1e-9, atol=1e-11
            )
        return found


# Which blocks are frozen, step by step: the first ones, which have no input that requires a
# gradient; those between trained ones; the last ones; none, as at the end of a fine-tuning.
FROZEN: tuple[Sequence[str], ...] = ("02", "02", "1", "01", "12", "", "012", "2")


AFTER = (True, *(pytest.param(each, marks=pytest.mark.slow) for each in (False, 2)))


def body_across(after: bool | int) -> None:
    for recomputes, has_root in ((False, True), (True, True), (False, False)):
        one = blocks()
        for number in FROZEN[0]:
            one.get_submodule(number).requires_grad_(False)
        pair = Pair(one, shard(one, after, recomputes=recomputes, has_root=has_root))
        sizes: dict[str, set[tuple[int, ...]]] = {}
        for frozen in FROZEN:
            found = pair.train(lambda name, frozen=frozen: name[0] not in frozen)
            trained = [number for number in "210" if number not in frozen]
            if has_root:  # its own parameters come last
                assert [unit for unit, _ in found] == [*trained, "FSDPSequential"], frozen
            else:  # every unit is a root, which has no name within another
                units = sorted(unit for unit, _ in found)
                assert units == ["FSDPBlock"] * len(trained) + ["FSDPLinear"], frozen
            for unit, shape in found:
                sizes.setdefault(unit, set()).add(shape)
        assert all(len(shapes) == 1 for shapes in sizes.values()), sizes  # whoever else is frozen


@pytest.mark.parametrize("after", AFTER)
def test_a_frozen_unit_reduces_nothing(ranks: Ranks, after: bool | int) -> None:
    ranks(4, body_across, after)


def is_bias(name: str) -> bool:
    return "bias" in name


def without_weights(one: nn.Module) -> nn.Module:
    """Make buffers of all weights."""
    biased = copy.deepcopy(one)
    for module in [m for m in biased.modules() if isinstance(m, nn.Linear)]:
        weight = module.weight.detach()
        del module.weight
        module.register_buffer("weight", weight)
    return biased


def body_within(after: bool | int) -> None:
    for recomputes in (False, True):
        one = blocks()
        alone = without_weights(one)
        buffers = Pair(alone, shard(alone, after, recomputes=recomputes))
        units = ["2", "1", "0", "FSDPSequential"]
        # Frozen before the units were made: the trained parameters travel alone.
        early = copy.deepcopy(one)
        for name, parameter in early.named_parameters():
            parameter.requires_grad_(is_bias(name))
        frozen = Pair(early, shard(early, after, recomputes=recomputes))
        for _ in range(2):
            expected = buffers.train(is_bias)
            assert [unit for unit, _ in expected] == units
            assert frozen.train(is_bias) == expected
        # Trained after all, and then but for a unit and a parameter: one operation a unit.
        assert [unit for unit, _ in frozen.train(lambda _: True)] == units
        found = frozen.train(lambda name: name[0] != "1" and name != "0.up.weight")
        assert [unit for unit, _ in found] == ["2", "0", "FSDPSequential"]
        assert frozen.train(is_bias) == expected
        # Frozen afterwards.
        late = Pair(copy.deepcopy(one), shard(one, after, recomputes=recomputes))
        for trained in (is_bias, lambda _: True, is_bias):
            assert [unit for unit, _ in late.train(trained)] == units


@pytest.mark.parametrize("after", AFTER)
def test_a_partly_frozen_unit_reduces_once(ranks: Ranks, after: bool | int) -> None:
    ranks(4, body_within, after)
