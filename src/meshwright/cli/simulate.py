"""``meshwright simulate``; it starts without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from meshwright.cli.words import at_least_0
from meshwright.errors import PlanError, ScheduleError
from meshwright.report import write_simulation
from meshwright.schedule.actions import Schedule
from meshwright.schedule.builders import build
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate
from meshwright.schedule.text import draw, dump_csv, load_csv


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Draw a pipeline schedule, with its idle time and activation memory, without running it."""

    schedule: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCHEDULE")]
    """gpipe, 1f1b, interleaved1f1b, loopedbfs, zb1p, zb2p, zbv, vhalf, vmin or dualpipev, or a CSV
    file."""
    ranks: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Number of ranks of the pipeline."""
    stages: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of stages; 0 means the schedule's usual number for each rank."""
    microbatches: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Number of microbatches in a batch."""
    forward: float = 1.0
    """Time of one microbatch's forward through all stages of a rank."""
    input: float = 1.0
    """The same for the input half of the backward."""
    weight: float = 1.0
    """The same for the weight half of the backward."""
    transfer: float = 0.0
    """Time of one message between ranks."""
    write: Annotated[str, tyro.conf.arg(metavar="FILE.csv")] = ""
    """Write the schedule with its transfers to a CSV file."""
    page: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """Draw it as a page for a browser."""

    def run(self, words: list[str]) -> int:
        try:
            for name in ("forward", "input", "weight", "transfer"):
                at_least_0(f"--{name}", str(getattr(self, name)))
            compute = self._schedule()
            lowered = lower(compute)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        share = len(compute.stages_of(0))
        costs = replace(
            Costs.shared(share, self.forward, self.input, self.weight),
            transfer=self.transfer,
        )
        found = simulate(lowered, costs, events=bool(self.page))
        print(draw(compute))
        print()
        for rank, (busy, idle) in enumerate(zip(found.compute, found.bubbles, strict=True)):
            print(
                f"rank {rank}: computes {busy:g}, idles {idle:g}, holds the activations of at most "
                f"{found.peaks[rank]:g} microbatches"
            )
        print(f"in all {found.makespan:g}, {found.bubble_fraction:.1%} of it idle")
        if self.write:
            dump_csv(lowered, self.write)
        if self.page:
            write_simulation(
                found.timeline,
                self.page,
                title=f"{self.schedule}, simulated",
                idle=found.bubble_fraction,
                held=found.peaks,
            )
        return 0

    def _schedule(self) -> Schedule:
        if self.schedule.endswith(".csv"):
            return load_csv(self.schedule)
        if self.stages % max(1, self.ranks):
            raise ValueError(
                f"--stages: expected a multiple of the {self.ranks} ranks, found {self.stages}"
            )
        chunks = self.stages // max(1, self.ranks) or None
        return build(self.schedule, self.ranks, self.microbatches, chunks)
