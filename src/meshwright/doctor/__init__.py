"""The offer of a machine to a run: what is there, what is wrong, and how to mend it.

Bottom-up:

    finding      a fact about a machine, what is wrong with it, and both as text
    machine      facts of GPUs and network, which tests invent
    devices      findings about GPUs, ranks on them, and the way to other hosts
    collectives  collectives measured between ranks that are started for it
    survey       all findings, in their order
    __main__     one rank of a measurement
"""

from __future__ import annotations

from meshwright.doctor.finding import Finding, report_lines
from meshwright.doctor.survey import examine, memory_limit, usable_cores

__all__ = ["Finding", "examine", "memory_limit", "report_lines", "usable_cores"]
