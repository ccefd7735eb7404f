"""``meshwright simulate``; it starts without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.words import at_least_0
from meshwright.errors import PlanError, ScheduleError
from meshwright.report import write_simulation
from meshwright.report.run import read_run
from meshwright.schedule.actions import Schedule
from meshwright.schedule.builders import build
from meshwright.schedule.lowering import compute_part, lower
from meshwright.schedule.measured import costs_of, last_step, schedule_of
from meshwright.schedule.search import built_schedules, find_schedule
from meshwright.schedule.simulate import Costs, simulate
from meshwright.schedule.text import draw, dump_csv, load_csv
from meshwright.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Draw a pipeline schedule, with its idle time and activation memory, without running it."""

    schedule: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCHEDULE")]
    """gpipe, 1f1b, interleaved1f1b, loopedbfs, zb1p, zb2p, zbv, vhalf, vmin or dualpipev; a CSV
    file; or the folder of a run, whose order and measured times are taken."""
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
    find: bool = False
    """Find the fastest order for these times that needs no more memory, and compare it with the
    built schedules; `[pipeline] order` of a plan runs what --write writes."""
    limit: float = 0.0
    """With --find: microbatches whose activations a rank may hold; 0 means as many as SCHEDULE."""
    write: Annotated[str, tyro.conf.arg(metavar="FILE.csv")] = ""
    """Write the schedule with its transfers to a CSV file."""
    page: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """Draw it as a page for a browser."""

    def run(self, words: list[str]) -> int:
        try:
            for name in ("forward", "input", "weight", "transfer", "limit"):
                at_least_0(f"--{name}", str(getattr(self, name)))
            compute, costs = self._given()
            if self.find:
                compute = self._found(compute, costs)
            lowered = lower(compute)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
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

    def _given(self) -> tuple[Schedule, Costs]:
        """The order and the costs to simulate."""
        if Path(self.schedule).is_dir() or self.schedule.endswith(".json"):
            step = last_step(read_run(self.schedule).timeline or Timeline())
            ran = schedule_of(step)
            if ran is None:
                raise ValueError(f"{self.schedule}: expected a timeline of all stages, found none")
            # Of pipelines side by side, one.
            rows = tuple(row for r, row in enumerate(ran.rows) if r in ran.stage_ranks)
            holders = sorted(set(ran.stage_ranks))
            ranks = tuple(holders.index(rank) for rank in ran.stage_ranks)
            return replace(ran, rows=rows, stage_ranks=ranks), costs_of(step, ran)
        if self.schedule.endswith(".csv"):
            order = compute_part(load_csv(self.schedule))
        elif self.stages % max(1, self.ranks):
            raise ValueError(
                f"--stages: expected a multiple of the {self.ranks} ranks, found {self.stages}"
            )
        else:
            chunks = self.stages // max(1, self.ranks) or None
            order = build(self.schedule, self.ranks, self.microbatches, chunks)
        costs = Costs.shared(len(order.stages_of(0)), self.forward, self.input, self.weight)
        return order, replace(costs, transfer=self.transfer)

    def _found(self, like: Schedule, costs: Costs) -> Schedule:
        """The fastest order on as many ranks and stages; says what others take."""
        ranks, m, chunks = like.ranks, like.microbatches, like.stages // like.ranks
        most = self.limit or max(simulate(lower(like), costs, events=False).peaks)
        found = find_schedule(ranks, m, costs, chunks=chunks, limits=[most] * ranks)
        for each in {s.name: s for s in (like, *built_schedules(ranks, m, chunks), found)}.values():
            step = simulate(lower(each), costs, events=False)
            fits = "" if max(step.peaks) <= most * (1 + 1e-9) else ", more than may be"
            print(f"{each.name:<16} {step.makespan:.5g}, holds at most {max(step.peaks):g}{fits}")
        print()
        return found
