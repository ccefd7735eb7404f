"""``meshwright doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.doctor import examine, report_lines
from meshwright.doctor.calibration import calibrate
from meshwright.toml_source import dump


def hardware_text(seconds: float) -> str:
    """Measure this machine for ``plan --calibrate``, as TOML."""
    return dump(calibrate(seconds))


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Show what this machine offers, measure small collectives, and say what to fix."""

    measure: bool = True
    """Also start two ranks and measure collectives."""

    def run(self, words: list[str]) -> int:
        findings = examine(measure_collectives=self.measure)
        print("\n".join(report_lines(findings)))
        return int(any(finding.is_broken for finding in findings))
