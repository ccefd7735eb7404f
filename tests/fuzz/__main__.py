"""The fuzzer as a program: draw cases, run them, and print what became of them.

python -m tests.fuzz --cases 5000 --seed 1       # many, drawn from a number
python -m tests.fuzz --cases 1000 --experts      # all with axis expert
python -m tests.fuzz --cases 1000 --context      # all with axis context
python -m tests.fuzz --case 1234                 # one again, with its traceback
python -m tests.fuzz --case 1234 --without block0 clip_ours
python -m tests.fuzz --case 1234 --shrink        # and what can be left out of it
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.cases import CONTEXT, EXPERTS, draw_case, without
from fuzz.judging import Report, Verdict, check, shrink


def main(arguments: list[str] | None = None) -> int:
    """Run the fuzzer; returns 1 when it has found something."""
    options = _parser().parse_args(arguments)
    if options.case is not None:
        return _one(options.case, options.without, shrinks=options.shrink)
    seed = random.randrange(10**6) * 1000 if options.seed is None else options.seed
    seed += CONTEXT if options.context else EXPERTS if options.experts else 0
    print(f"cases {seed} to {seed + options.cases - 1}", flush=True)
    begun, report = time.monotonic(), Report()
    left = range(seed, seed + options.cases)
    while left and (options.minutes is None or time.monotonic() - begun < 60 * options.minutes):
        now, left = left[:200], left[200:]
        cases = [
            case
            for case in map(draw_case, now)
            if case.world in options.ranks and any(word in case.layout for word in options.layouts)
        ]
        report.verdicts += check(cases, _say).verdicts
    print(f"\n{report}\n{time.monotonic() - begun:.0f} s", flush=True)
    return 1 if report.findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, help="of the first case; a random one by default")
    parser.add_argument("--minutes", type=float, help="draw no more cases after that")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--experts", action="store_true", help="draw all with axis expert")
    parser.add_argument("--context", action="store_true", help="draw all with axis context")
    parser.add_argument("--layouts", nargs="+", default=[""], help="words, one of which they have")
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--without", nargs="+", default=[], help="what to leave out of it")
    parser.add_argument("--shrink", action="store_true", help="find out what can be left out")
    return parser


def _one(number: int, words: list[str], *, shrinks: bool) -> int:
    case = without(draw_case(number), words)
    print(case, flush=True)
    (verdict,) = check([case]).verdicts
    if shrinks and verdict.is_finding:
        more, verdict = shrink(verdict)
        words = [*words, *more]
        print(f"small: {verdict.case}")
    print(f"{verdict.trace}\n{verdict.kind}: {verdict.text}\n{command(number, words)}")
    return 1 if verdict.is_finding else 0


def command(number: int, words: list[str]) -> str:
    """What runs a case again."""
    left_out = f" --without {' '.join(words)}" if words else ""
    return f"python -m tests.fuzz --case {number}{left_out}"


def _say(verdict: Verdict) -> None:
    if verdict.is_finding:
        number = verdict.case.seed
        print(
            f"{verdict.kind}: {verdict.text[:300]}\n  {verdict.case}\n  {command(number, [])}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
