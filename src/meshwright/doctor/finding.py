"""A fact about a machine, what is wrong with it, and both as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about this machine."""

    name: str
    value: str
    problem: str = ""
    """The value that was expected instead; empty when the fact is as it should be."""
    remedy: str = ""
    """Advice on what to do about the problem."""
    is_broken: bool = False
    """Training cannot work before this is mended; a mere piece of advice leaves it false."""


def report_lines(findings: list[Finding]) -> list[str]:
    """List the findings as text: a line for each, then what is wrong with what to do."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{finding.name:<{width}}  {finding.value}" for finding in findings]
    problems = [finding for finding in findings if finding.problem]
    lines.append("")
    if not problems:
        return [*lines, "Everything needed for training is in place."]
    for finding in problems:
        kind = "broken" if finding.is_broken else "advice"
        lines.append(f"{kind}: {finding.name}: {finding.problem}; {finding.remedy}")
    return lines
