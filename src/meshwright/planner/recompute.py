"""What to recompute: the least time that fits a budget of memory, with a proven gap.

Each unit takes one of its options. A storage that several units keep counts once, so sums over
units would be too large: the program has a variable for each such set of storages. A mixed integer
program, as Jain et al. 2020, arXiv 1910.02653, with modules instead of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.errors import PlanError

SECONDS = 20.0
"""After so long the best choice so far is taken, and its gap is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """One way to run one unit."""

    modules: tuple[str, ...]
    """What is recomputed."""
    seconds: float
    """That this takes."""
    kept: frozenset[int]
    """Storages that the unit keeps until its backward."""
    again: int
    """Bytes that its backward makes again, and has beside what is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """The chosen options of all units."""

    modules: tuple[str, ...]
    """For ``train.recompute``."""
    seconds: float
    peak: int
    """The most bytes at a time, as `peak_of`."""
    gap: float
    """No choice that fits is faster by more than this share of ``seconds``."""
    share: float = 0.0
    """``seconds`` over those of recomputing every unit that can be."""


def peak_of(options: Sequence[RecomputeOption], sizes: Mapping[int, int]) -> int:
    """The most bytes at a time if units run with ``options``: what is kept when a backward begins.

    The backward of a unit finds what it and earlier units keep; later ones have given theirs back.
    """
    seen: set[int] = set()
    kept = most = 0
    for option in options:
        kept += sum(sizes[key] for key in option.kept - seen)
        seen |= option.kept
        most = max(most, kept + option.again)
    return most


def choose(
    units: Sequence[Sequence[RecomputeOption]],
    sizes: Mapping[int, int],
    budget: float,
    *,
    gap: float = 0.01,
) -> RecomputePolicy:
    """Choose an option for each of ``units``, in their order, within ``budget`` bytes.

    ``sizes`` has the bytes of storages. Raises ``PlanError`` if no choice fits, or without scipy.
    """
    try:
        from scipy.optimize import LinearConstraint, milp
    except ImportError as error:
        raise PlanError(
            "a policy for each layer needs scipy: pip install 'meshwright[planner]'"
        ) from error
    first = np.cumsum([0, *map(len, units)])
    choices = int(first[-1])
    keepers: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for unit, options in enumerate(units):
        for number, option in enumerate(options):
            for key in option.kept:
                keepers[key][unit].add(int(first[unit]) + number)
    groups: dict[tuple[tuple[int, frozenset[int]], ...], float] = defaultdict(float)
    for key, by_unit in keepers.items():
        groups[tuple((u, frozenset(c)) for u, c in sorted(by_unit.items()))] += sizes[key] / budget
    # A variable for what a unit or an earlier one keeps, for each unit of a group after its first.
    count = choices + sum(len(group) - 1 for group in groups)
    one, rows = np.zeros((len(units), count)), np.zeros((len(units), count))
    """Options of each unit; bytes when its backward begins, as shares of the budget."""
    links, variable = np.zeros((max(1, 2 * (count - choices)), count)), choices
    for unit, options in enumerate(units):
        one[unit, first[unit] : first[unit + 1]] = 1
        rows[unit, first[unit] : first[unit + 1]] = [option.again / budget for option in options]
    for group, size in groups.items():
        alive = np.zeros(count)
        for number, (unit, chosen) in enumerate(group):
            end = group[number + 1][0] if number + 1 < len(group) else len(units)
            last, alive = alive, np.zeros(count)
            alive[list(chosen)] = 1
            if number:
                pair = slice(2 * (variable - choices), 2 * (variable - choices) + 2)
                links[pair] = last, alive
                links[pair, variable] = -1
                alive = np.zeros(count)
                alive[variable] = 1
                variable += 1
            rows[unit:end] += size * alive
    costs, integral = np.zeros(count), np.zeros(count)
    costs[:choices] = [option.seconds for options in units for option in options]
    integral[:choices] = 1
    scale = costs.max() or 1.0
    found = milp(
        costs / scale,
        integrality=integral,
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one, 1, 1),
            LinearConstraint(rows, -np.inf, 1 - 1e-6),
            LinearConstraint(links, -np.inf, 0),
        ],
        options={"mip_rel_gap": gap, "time_limit": SECONDS},
    )
    picked = [
        options[int(np.argmax(found.x[first[unit] : first[unit + 1]]))]
        if found.x is not None
        else min(options, key=lambda o: sum(sizes[k] for k in o.kept))
        for unit, options in enumerate(units)
    ]
    if (peak := peak_of(picked, sizes)) > budget:
        raise PlanError(
            f"recomputing: activations of {budget:,.0f} bytes do not fit, with every unit "
            f"recomputed they are {peak:,}"
        )
    seconds = sum(option.seconds for option in picked)
    every = sum(options[1].seconds for options in units if len(options) > 1)
    return RecomputePolicy(
        modules=tuple(name for option in picked for name in option.modules),
        seconds=seconds,
        peak=peak,
        share=seconds / (every or 1.0),
        gap=1.0 if found.x is None else float(found.mip_gap or 0.0),
    )
