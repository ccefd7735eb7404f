"""The most memory that torch allocates at one time, and a model that is much larger."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

__all__ = ["BOUND", "COUNT", "TENSOR_BYTES", "Wide", "peak_growth"]

ROWS, COUNT = 256, 12
TENSOR_BYTES = 4 * ROWS * ROWS
BOUND = 5 * TENSOR_BYTES // 2
"""One tensor that is read, one that is being let go, and small ones; the whole are twelve."""


class Wide(nn.Module):
    """Twelve weights of 256 KiB."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        full = (torch.full((ROWS, ROWS), value) for _ in range(COUNT))
        self.rows = nn.ParameterList(full)


def peak_growth(action: Callable[[], object], folder: Path, maps: int | None = None) -> int:
    """Count the bytes that torch has allocated in ``action`` and not given back, at their peak.

    The resident memory of the process would say less: the system takes pages and gives them back as
    it likes. What is larger than ``maps`` does not count: a map of a file, which torch tells of as
    if it were memory.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    trace = folder / "trace.json"
    seen.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    trace.unlink()
    events.sort(key=lambda event: event["ts"])
    assert events, "torch has told of no memory"
    sizes = [int(event["args"]["Bytes"]) for event in events]
    counted = (size for size in sizes if maps is None or abs(size) <= maps)
    return max(accumulate(counted), default=0)
