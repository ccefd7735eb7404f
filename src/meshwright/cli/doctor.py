"""``meshwright doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.doctor import examine, report_lines


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Show what this machine offers, measure small collectives, and say what to mend."""

    measure: bool = True
    """Start two ranks and measure; otherwise look only."""

    def run(self, words: list[str]) -> int:
        """Print the findings."""
        findings = examine(measure_collectives=self.measure)
        print("\n".join(report_lines(findings)))
        return int(any(finding.is_broken for finding in findings))
