"""A fact about a machine, what is wrong with it, and both as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about this machine."""

    name: str
    value: str
    problem: str = ""
    """What was expected instead; empty when the fact is as it should be."""
    remedy: str = ""
    """What to do about the problem."""
    is_broken: bool = False
    """True if training cannot work before this is fixed; false for advice."""


def report_lines(findings: list[Finding]) -> list[str]:
    """Format the findings: one line each, then the problems and what to do about them."""
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
