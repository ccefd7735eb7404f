"""Graph breaks with reasons and the user's lines, read from torch's log."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import meshwright
from meshwright.torch_internals.tracing import GRAPH_BREAKS

_PLACE = re.compile(r"in user code at (.+):(\d+)$")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_REASON = re.compile(r"Graph Break Reason: (.+)$", re.MULTILINE)
_EXPLAINED = re.compile(r"^(\S.*)\n  Explanation: (.+)$", re.MULTILINE)
_SKIPPED = re.compile(r"frame skipped: (\S+) \((.+) line (\d+)\)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_ROOMS = (
    *("comm", "composition", "data_parallel", "fsdp", "gradients", "losses", "pipelining"),
    "randomness",
)
_HOME = Path(meshwright.__file__).parent
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, *(_HOME / r for r in (*_ROOMS, "tensor_parallel")))
)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One place at which a graph ends."""

    line: str
    """The innermost line outside of libraries: file and number, and the function if known."""
    reason: str
    uncompiled: str = ""
    """A function that runs uncompiled because of it, such as one with a break in a loop."""

    def __str__(self) -> str:
        skipped = f"; {self.uncompiled} runs uncompiled" if self.uncompiled else ""
        return f"{self.line}: {self.reason}{skipped}"


class GraphBreaks(logging.Filter):
    """Collects the graph breaks of all that is compiled in the block.

    torch reports each break only once, until `torch.compiler.reset`.

    >>> with GraphBreaks() as breaks:
    ...     loss(model(inputs)).backward()
    >>> for each in breaks.found:
    ...     print(each)
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[GraphBreak] = []
        """Each break once, in order."""
        self._logger = logging.getLogger(GRAPH_BREAKS)
        self._level = logging.NOTSET

    def __enter__(self) -> Self:
        """Start to collect."""
        self._level = self._logger.level
        self._logger.addFilter(self)
        self._logger.setLevel(logging.DEBUG)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Stop collecting, and restore the logger."""
        self._logger.setLevel(self._level)
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Collect ``record``; it is shown only if it would have been without this filter."""
        found = _read(record.getMessage())
        if found is not None and found not in self.found:
            self.found.append(found)
        return self._level == logging.DEBUG


def _read(text: str) -> GraphBreak | None:
    """Parse the break in ``text``; None for one without a line, which was reported before."""
    place, frames = _PLACE.search(text.partition("\n")[0]), _FRAME.findall(text)
    if place is None or not frames:
        return None
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    line = "{}:{} in {}".format(*own[-1]) if own else ":".join(place.groups())
    explained, plain, skipped = (r.search(text) for r in (_EXPLAINED, _REASON, _SKIPPED))
    reason = plain[1] if plain is not None else "torch does not say why"
    if explained is not None:
        reason = ": ".join(explained.groups())
    return GraphBreak(
        line,
        _ADDRESS.sub("", reason).rstrip("."),
        "" if skipped is None else "{} at {}:{}".format(*skipped.groups()),
    )
