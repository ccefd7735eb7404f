"""What a rank keeps for its backwards, against the formulas of the schedules."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.comm import communicator
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.testing import Ranks
from support.internals.schedule import stage_ranks

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 16


class Held:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Meter:
    """Bytes that autograd keeps of forwards, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        # The tensor itself would hold the graph that holds it.
        held, size = Held(tensor.detach()), tensor.numel() * tensor.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(held, self._freed, size)
        return held

    def unpack(self, held: Any) -> torch.Tensor:
        return held.tensor if isinstance(held, Held) else held

    def _freed(self, size: int) -> None:
        self.now -= size


class Metered(nn.Module):
    """Two products with a curve between: each microbatch leaves three tensors to keep."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.meter = meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(self.meter.pack, self.meter.unpack):
            return self.second(torch.tanh(self.first(x)))


def formula(name: str, p: int, m: int, r: int) -> Fraction:
    """Activations of microbatches, each over a rank's whole share, that rank ``r`` may hold."""
    v, g = 2, m // max(1, m // p)
    return {
        "GPipe": Fraction(m),
        "1F1B": Fraction(min(m, p - r)),
        "LoopedBFS": Fraction(m),
        "Interleaved1F1B": min(Fraction(m), Fraction(g * (v - 1) + 2 * (p - r) - 1, v)),
        "InterleavedZeroBubble": Fraction(min(m, p)),
        "ZBVZeroBubble": Fraction(p),
        "DualPipeV": p + Fraction(1, 2),
        "ZB2P": Fraction(min(m, 2 * p - 1)),
        "VHalf": Fraction((p + 2) // 2),
        "VMin": Fraction((p + 4) // 3),
    }[name]


NAMES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "ZB2P",
    "VHalf",
    "VMin",
)


def body_peak() -> None:
    world = communicator()
    m = 4 * world.size
    for name in NAMES:
        kind, meter = get_schedule_class(name), Meter()
        chunks = 2 if issubclass(kind, PipelineScheduleMulti) else 1
        count = world.size * chunks
        holders = stage_ranks(world.size, count, "v" if "V" in name else "loop")
        mine = [s for s, rank in enumerate(holders) if rank == world.rank]
        stages = [PipelineStage(Metered(meter), s, count, CPU) for s in mine]
        schedule = kind(stages if chunks > 1 else stages[0], m, loss_fn=nn.MSELoss())
        x = torch.ones(ROWS * m, WIDTH)
        args, kwargs = (x,) if 0 in mine else (), {"target": x} if count - 1 in mine else {}
        share = 3 * ROWS * WIDTH * x.element_size() * chunks
        losses: list[torch.Tensor] = []
        gc.disable()  # nothing may wait for it
        try:
            schedule.step(*args, losses=losses, **kwargs)
            assert meter.now == 0, name
        finally:
            gc.enable()
        assert Fraction(meter.most, share) == formula(name, world.size, m, world.rank), name
        assert len(losses) == (m if count - 1 in mine else 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_peak_activations_are_those_of_the_schedule(ranks: Ranks, size: int) -> None:
    ranks(size, body_peak)
