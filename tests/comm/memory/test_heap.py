"""What C's heap keeps: a process of its own, since others may have freed large blocks before."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEP = """
import resource, sys, torch
from meshwright.comm.memory.heap import keep_freed

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 18) for _ in range(30)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
if sys.argv[1] == "kept":
    keep_freed()
    step()
print(step())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_what_a_step_has_freed_serves_the_next_one_without_page_faults() -> None:
    faults = {
        how: int(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", STEP, how],
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout
        )
        for how in ("plain", "kept")
    }
    assert faults["plain"] > 1000, "the heap of this process is kept without our doing"
    assert faults["kept"] < faults["plain"] / 10
