"""A timeline as a Chrome trace file, which https://ui.perfetto.dev and chrome://tracing open.

::

    process "rank 0"     thread "compute"     |## forward ##|## backward ##|
                         thread "reduce"             |#### bucket 0 ####|
                         thread "reduce 2"                |#### bucket 1 ####|    overlaps: own row

A thread of a trace is a stack, so overlapping events of one lane get rows of their own. Only on the
compute lane, an event within another is nested on the same row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.timeline import LANES, Event, Timeline

_ROWS = 1000
"""Thread ids reserved for the rows of one lane."""

_SIMULATED = 1_000_000
"""Process id of rank 0 of a simulation."""

_NANO = 1_000_000_000


def write_chrome_trace(
    timeline: Timeline, path: str | Path, *, simulated: Timeline | None = None
) -> None:
    """Write a trace for ``read_chrome_trace`` and viewers, with times to a nanosecond.

    ``simulated`` is shown below it, from the same start, as processes "rank 0, simulated"; it is
    not read back.

    The write is atomic: to a file next to ``path``, which is then renamed.
    """
    path = Path(path)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"writer": "meshwright", "origin_seconds": timeline.start},
        "traceEvents": [
            *trace_events(timeline),
            *(trace_events(simulated, is_simulated=True) if simulated is not None else ()),
        ],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))
            file.write("\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def trace_events(timeline: Timeline, *, is_simulated: bool = False) -> Iterator[dict[str, object]]:
    """Yield the records of the trace: names of ranks and rows, then one record for each event."""
    origin = timeline.start
    for rank in timeline.ranks:
        process = rank + _SIMULATED * is_simulated
        name = f"rank {rank}" + (", simulated" if is_simulated else "")
        yield _metadata(process, 0, "process_name", {"name": name})
        yield _metadata(process, 0, "process_sort_index", {"sort_index": process})
        for place, lane in enumerate(LANES):
            events = timeline.select(rank=rank, lane=lane).events
            spans = [
                (round((e.start - origin) * _NANO), round((e.end - origin) * _NANO)) for e in events
            ]
            rows = _rows(spans, lane == "compute")
            for row in range(max(rows, default=0) + 1):
                thread = 1 + place * _ROWS + row
                name = lane if row == 0 else f"{lane} {row + 1}"
                yield _metadata(process, thread, "thread_name", {"name": name})
                yield _metadata(process, thread, "thread_sort_index", {"sort_index": thread})
            for event, span, row in zip(events, spans, rows, strict=True):
                yield _record(event, span, process, thread=1 + place * _ROWS + row)


_Span = tuple[int, int]
"""Start and end in whole nanoseconds from the beginning of the timeline.

Integers keep events that touch or nest exactly so; floats might round them apart.
"""


def _rows(spans: Sequence[_Span], nests: bool) -> list[int]:
    """Assign each span, ordered by start, to the first row without overlap (or nested in it)."""
    stacks: list[list[_Span]] = []
    rows: list[int] = []
    for span in spans:
        row = next((i for i, stack in enumerate(stacks) if _fits(span, stack, nests)), len(stacks))
        if row == len(stacks):
            stacks.append([])
        stacks[row].append(span)
        rows.append(row)
    return rows


def _fits(span: _Span, stack: list[_Span], nests: bool) -> bool:
    """Check whether the row's ``stack`` can take the span; pops the spans that have ended."""
    start, end = span
    while stack and stack[-1][1] <= start:
        stack.pop()
    return not stack or (nests and end <= stack[-1][1])


def _metadata(rank: int, thread: int, name: str, args: Mapping[str, object]) -> dict[str, object]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": args}


def _record(event: Event, span: _Span, process: int, thread: int) -> dict[str, object]:
    start, end = span
    told = {"axis": event.axis, "label": event.label, "sequence": event.sequence}
    args = {name: value for name, value in told.items() if value not in ("", None)}
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "name": event.name,
        "cat": event.category,
        "args": {"bytes": event.bytes, **args},
    }


def read_chrome_trace(path: str | Path) -> Timeline:
    """Read a trace that ``write_chrome_trace`` wrote; raises ``ValueError`` for any other file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["otherData"]["writer"] != "meshwright":
            raise KeyError("writer")
        origin = float(document["otherData"]["origin_seconds"])
        return Timeline(
            _event(record, origin)
            for record in document["traceEvents"]
            if record["ph"] == "X" and int(record["pid"]) < _SIMULATED
        )
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"expected a Chrome trace written by Meshwright in {path}, found another file "
            f"({type(error).__name__}: {error})"
        ) from error


def _event(record: Mapping[str, object], origin: float) -> Event:
    start, length = _nano(record["ts"]), _nano(record["dur"])
    thread, args = record["tid"], record["args"]
    if not (isinstance(thread, int) and isinstance(args, dict)):
        raise TypeError(f"tid {thread!r}, args {args!r}")
    sequence = args.get("sequence")
    return Event(
        name=str(record["name"]),
        lane=LANES[(thread - 1) // _ROWS],
        rank=int(str(record["pid"])),
        start=origin + start / _NANO,
        end=origin + (start + length) / _NANO,
        bytes=int(args["bytes"]),
        category=str(record["cat"]),
        axis=str(args.get("axis", "")),
        label=str(args.get("label", "")),
        sequence=None if sequence is None else int(sequence),
    )


def _nano(microseconds: object) -> int:
    return round(float(str(microseconds)) * 1000)
