"""Cases run on ranks of a pool, and the verdict on each: the same, refused, or a finding.

A refusal is legal where all ranks refuse, before or in the first step, or in the step before which
the program has changed its model. Cases run many in one call, one after the other. What looks like
a finding there is run again alone, so that nothing of another case is left in its processes.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.cases import CHANGED, Case, simpler
from fuzz.training import SECONDS, Fault, run_cases, told
from meshwright.testing import RanksFailed, ranks

__all__ = ["Report", "Verdict", "check", "shrink"]

TOGETHER = 12
"""Cases of one call."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a case."""

    case: Case
    kind: str
    """"same", "told", "no program", "refused", or what kind of finding it is."""
    text: str = ""
    trace: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("same", "told", "no program", "refused")

    @property
    def normalized(self) -> str:
        """Its text without names and numbers."""
        text = self.text.splitlines()[0] if self.text else ""
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|\S*[\d._]\w\S*|\S*\d\S*", "…", text)
        return re.sub(r"…[\W]*…|…", "…", re.sub(r"(…[\s,and]*)+…", "…", text))[:130]


def _verdict(case: Case, rows: Sequence[dict[str, Any]]) -> Verdict:
    """On what each rank has found."""
    kinds = {row["kind"] for row in rows}
    worst = next(
        (
            row
            # The first rank warns for all of what gives other numbers.
            for kind in ("raised", "told", "differs", "warned", "refused")
            for row in rows
            if row["kind"] == kind
        ),
        rows[0],
    )
    kind, text = worst["kind"], worst["text"]
    if kind == "refused":
        if not kinds <= {"refused", "followed"}:
            kind, text = "refused on some ranks only", f"{sorted(kinds)}: {text}"
        elif worst["step"] > 0 and not _may_refuse_late(case, worst["step"]):
            kind = f"refused late, in step {worst['step']}"
    elif kinds - {kind, "followed"} and kind != "warned" and kind == "same":
        kind, text = "ranks differ", f"{sorted(kinds)}: {text}"
    elif kind == "followed":
        kind = "raised"
    return Verdict(case=case, kind=kind, text=text, trace=worst["trace"])


def _may_refuse_late(case: Case, step: int) -> bool:
    names = {name for name, _ in case.model.blocks}
    if step == 1 and case.tensor_ranks > 1 and "Remembered" in names:
        return True  # what it has made of a cut weight is read in its next pass
    if step == 1 and "static graph" in case.options and "Alternating" in names:
        return True  # the program says that its graph stays the same, and then changes it
    return step in (CHANGED, CHANGED + 1) and _changes(case)


def _changes(case: Case) -> bool:
    return bool({"freeze", "scale weights", "round trip", "new parameter"} & set(case.loop))


def _call(
    cases: Sequence[Case], fault: Fault, seconds: float = SECONDS
) -> tuple[list[Verdict], str]:
    """Verdicts on the first of ``cases``, and why there are no more; all have one kind of ranks."""
    world, backend = cases[0].world, cases[0].backend
    with tempfile.TemporaryDirectory() as name:
        folder, why = Path(name), ""
        try:
            ranks(
                world,
                run_cases,
                list(cases),
                name,
                fault,
                seconds,
                backend=backend,
                timeout=20 + 2 * seconds * len(cases),
                grace=1.0,
            )
        except RanksFailed as error:
            why = str(error)
        rows = [[row for row in said if "kind" in row] for said in told(folder, world)]
    ended = min(len(each) for each in rows)
    found = [_verdict(cases[n], [row[n] for row in rows]) for n in range(ended)]
    if ended == len(cases) and all(v.kind == "same" for v in found[-1:]):
        why = ""
    return found, why


def _alone(case: Case, fault: Fault, seconds: float = SECONDS) -> Verdict:
    found, why = _call([case], fault, seconds)
    if found:
        return found[0]
    kind = "hangs" if re.search("deadline|timeout", why, re.IGNORECASE) else "ends"
    return Verdict(case=case, kind=kind, text=_gist(why), trace=why)


def _gist(why: str) -> str:
    return why.splitlines()[0] if why else "nothing was said"


def check(
    cases: Sequence[Case],
    tell: Callable[[Verdict], None] = lambda _: None,
    *,
    fault: Fault = nullcontext,
    seconds: float = SECONDS,
) -> Report:
    """Run ``cases`` and judge them; ``tell`` hears each verdict.

    ``fault`` is for tests, as less than ``seconds`` for a case are.
    """
    report = Report()
    for batch in _batches(cases):
        waiting = list(batch)
        while waiting:
            found, _ = _call(waiting, fault, seconds)
            # The first that was not ended by all ranks stands in the way of the rest.
            alone = waiting[len(found) : len(found) + 1]
            waiting = waiting[len(found) + 1 :]
            doubtful = [v.case for v in found if v.is_finding] + alone
            verdicts = [v for v in found if not v.is_finding] + [
                _alone(c, fault, seconds) for c in doubtful
            ]
            for verdict in verdicts:
                report.verdicts.append(verdict)
                tell(verdict)
    return report


def _batches(cases: Sequence[Case]) -> Iterator[list[Case]]:
    alike: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case in cases:
        alike[case.world, case.backend].append(case)
    for found in alike.values():
        for start in range(0, len(found), TOGETHER):
            yield found[start : start + TOGETHER]


def shrink(verdict: Verdict) -> tuple[list[str], Verdict]:
    """What can be left out of a finding so that it stays one of its kind."""
    words: list[str] = []
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for word, case in simpler(verdict.case):
            left = _alone(case, nullcontext)
            if left.kind == verdict.kind and left.normalized == verdict.normalized:
                words.append(word)
                verdict, is_smaller = left, True
                break
    return words, verdict


@dataclass(kw_only=True)
class Report:
    """Verdicts on many cases."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def findings(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.is_finding]

    def count(self, kind: str) -> int:
        """How many are of ``kind``."""
        return [verdict.kind for verdict in self.verdicts].count(kind)

    def __str__(self) -> str:
        kinds = Counter("finding" if v.is_finding else v.kind for v in self.verdicts)
        lines = [", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), ""]
        for kind in ("refused", "told"):
            lines += self._table(kind, [v for v in self.verdicts if v.kind == kind])
        lines += self._table("no program", [v for v in self.verdicts if v.kind == "no program"])
        lines += self._table("FINDINGS", self.findings)
        return "\n".join(lines)

    @staticmethod
    def _table(title: str, verdicts: Sequence[Verdict]) -> list[str]:
        by_text: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            kind = f"{verdict.kind}: " if verdict.is_finding else ""
            by_text[kind + verdict.normalized].append(verdict)
        rows = sorted(by_text.items(), key=lambda row: -len(row[1]))
        lines = [f"{title}:"] if rows else []
        for text, found in rows:
            seeds = ", ".join(str(v.case.seed) for v in found[:4])
            lines.append(f"  {len(found):4}  {text}   [{seeds}]")
        return lines
