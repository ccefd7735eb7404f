"""Split policies: where to split a traced model so that its largest stage is as small as possible.

Operators keep the order of the trace, so a split is a list of cut positions. A bisection finds the
least bound on the cost of a stage for which a split exists. Among all splits whose largest stage is
within 5 % of that bound, the one that sends the fewest bytes between stages is taken.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from meshwright import comm
from meshwright.errors import CommunicationError
from meshwright.pipelining.splitting.measuring import (
    Costs,
    cuttable,
    flops,
    measured,
    memory,
    parameters,
    traffic,
)
from meshwright.pipelining.splitting.placement import Placement
from meshwright.pipelining.splitting.split_points import put_marker
from meshwright.pipelining.splitting.tracing import SplitPolicy

SLACK = 1.05
"""Bound on the largest stage, as a multiple of the least possible, to save traffic."""
_PRECISION = 1e-4
_MEASURES: Mapping[str, Callable[[fx.GraphModule, Sequence[fx.Node]], Costs]] = MappingProxyType(
    {"parameters": parameters, "flops": flops, "time": measured, "memory": measured}
)


@dataclass(slots=True)
class _Window:
    """The cost of the operators from one position to another, kept while both move."""

    costs: Sequence[float]
    shared: Mapping[int, Sequence[tuple[int, float]]]
    """By position, (number, cost) of parameters that count once however often they are used."""
    total: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, position: int) -> None:
        """Add a position at the end."""
        self.total += self.costs[position]
        for number, cost in self.shared.get(position, ()):
            before = self.counts.get(number, 0)
            self.counts[number] = before + 1
            self.total += 0.0 if before else cost

    def remove(self, position: int) -> None:
        """Remove a position at the start."""
        self.total -= self.costs[position]
        for number, cost in self.shared.get(position, ()):
            self.counts[number] -= 1
            self.total -= 0.0 if self.counts[number] else cost


def best_cuts(
    costs: Costs, stages: int, sent: Sequence[float], limit: Costs | None = None, bound: float = 0.0
) -> list[int]:
    """List the positions at which ``stages`` stages begin, the first of them left out.

    ``sent[p]`` is the traffic of a cut in front of position ``p``, infinite where none is allowed.
    With ``limit`` no stage may exceed ``bound`` of that cost. Raises ``ValueError`` where no split
    exists.
    """
    both = [costs] if limit is None else [costs, limit]
    count = len(costs.each)
    low, high = 0.0, costs.total()

    def bounds(cap: float) -> list[float]:
        return [cap] if limit is None else [cap, bound]

    if _chosen(both, bounds(high), stages, sent) is None:
        raise ValueError(
            f"cannot split {count} operators into {stages} stages"
            + (f" of at most {bound:g} {limit.unit} each" if limit is not None else "")
            + ": use fewer stages"
            + ("" if limit is None else " or a larger limit")
        )
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _chosen(both, bounds(middle), stages, sent) is None:
            low = middle
        else:
            high = middle
    return _chosen(both, bounds(high * SLACK / (1 + _PRECISION)), stages, sent) or []


def _chosen(
    costs: Sequence[Costs], bounds: Sequence[float], stages: int, sent: Sequence[float]
) -> list[int] | None:
    """Find the cuts of least traffic with all stages within the bounds, if there are any."""
    starts = _first_starts(costs, bounds)
    count = len(starts)
    before = [0.0, *[math.inf] * count]
    origins: list[list[int]] = []
    for stage in range(stages):
        after, origin = [math.inf] * (count + 1), [0] * (count + 1)
        window: deque[int] = deque()
        for end in range(1, count + 1):
            begin = end - 1
            if before[begin] < math.inf:
                while window and before[window[-1]] > before[begin]:
                    window.pop()
                window.append(begin)
            while window and window[0] < starts[end - 1]:
                window.popleft()
            is_cut = end < count
            if window and (is_cut or stage == stages - 1):
                after[end] = before[window[0]] + (sent[end] if is_cut else 0.0)
                origin[end] = window[0]
        origins.append(origin)
        before = after
    if before[count] == math.inf:
        return None
    cuts: list[int] = []
    end = count
    for origin in reversed(origins):
        end = origin[end]
        cuts.append(end)
    return cuts[-2::-1]


def _first_starts(costs: Sequence[Costs], bounds: Sequence[float]) -> list[int]:
    """For each last position of a stage, the first position at which it may start."""
    count = len(costs[0].each)
    found = [0] * count
    for cost, bound in zip(costs, bounds, strict=True):
        window, start = _Window(cost.each, cost.shared), 0
        for end in range(count):
            window.add(end)
            while start <= end and window.total > bound * (1 + 1e-12):
                window.remove(start)
                start += 1
            found[end] = max(found[end], start)
    return found


def balanced(
    stages: int,
    by: str = "parameters",
    *,
    memory_limit: float | None = None,
    in_flight: int = 1,
) -> SplitPolicy:
    """Make a split policy for `pipeline` that keeps the largest of ``stages`` stages small.

    ``by`` is ``"parameters"`` (their number), ``"flops"`` (of matrix products and convolutions in a
    forward), ``"time"`` (of each operator's forward and backward, run alone on random inputs with
    the model's parameters) or ``"memory"`` (bytes, see below). What several operators of a stage
    share counts once in it, and again in every other stage that uses it.

    ``memory_limit`` bounds the bytes of each stage: four times its parameters (values, gradients
    and two states of an optimizer) and what ``in_flight`` microbatches keep for their backward.

    All ranks use the measurements of the first, so with ``"time"`` or ``"memory"`` every rank of
    the job must call `pipeline`. Buffers and the state of random generators are restored.

    Raises ``ValueError`` for another measure, and when the model cannot be split that way.
    """
    if by not in _MEASURES:
        raise ValueError(f"expected by to be one of {list(_MEASURES)}, found {by!r}")

    def policy(module: fx.GraphModule) -> fx.GraphModule:
        place = Placement(module)
        nodes = cuttable(place)
        if len(nodes) < stages:
            raise ValueError(f"cannot split {len(nodes)} operators into {stages} stages")
        cost = _agreed(by, module, nodes)
        limit = None
        if by == "memory" or memory_limit is not None:
            timed = cost if cost.saved else _agreed("memory", module, nodes)
            size = memory(timed, module, nodes, in_flight)
            cost = size if by == "memory" else cost
            limit = size if memory_limit is not None else None
        cuts = best_cuts(cost, stages, traffic(place, nodes), limit, memory_limit or 0.0)
        for position in cuts:
            put_marker(module.graph, nodes[position])
        module.recompile()
        edges = [0, *cuts, len(nodes)]
        module.meta["balance"] = [cost.of(a, b) for a, b in itertools.pairwise(edges)]
        return module

    return policy


def _agreed(by: str, module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Costs:
    """Return the costs of operators; measured ones are the first rank's, on all ranks."""
    costs = _MEASURES[by](module, nodes)
    if by in ("parameters", "flops"):
        return costs
    try:
        communicator = comm.communicator()
    except CommunicationError:  # One process.
        return costs
    mine = [costs.each, costs.saved]
    each, saved = communicator.gather_values(mine, label="costs of operators")[0]
    return replace(costs, each=each, saved=saved)
