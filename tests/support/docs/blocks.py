"""The fenced blocks of README and docs, and how each is tested: as the comment above it says.

::

    <!-- ranks: 2 -->           python, from here on, on two ranks, which begin with no names
    <!-- here -->               python in the test's own process: it starts ranks, or defines tests
    <!-- run -->                bash: each line is run, where it stands among the others
    <!-- file: PATH -->         python that is this file, which another test runs
    <!-- test: FILE::NAME -->   run by this test
    <!-- said by: NAME -->      a message: of the function of `support.docs.messages` that provokes
                                it, or of a file of the source; … stands for any words
    <!-- not run: WHY -->       a reason

Without a comment python runs behind the blocks before it, at first in a rank of its own; toml is
read and checked; bash is parsed by what it would start. The blocks of a page share their names.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
LANGUAGES = ("python", "bash", "toml", "text", "diff", "{toctree}", "{eval-rst}")
MARKS = ("ranks", "here", "run", "file", "test", "said by", "not run")
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- *(?P<mark>.*?) *-->\n(?P=indent))?```(?P<language>\S*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    mark: str
    said: str
    """What follows on the mark."""
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(slots=True)
class Group:
    """Blocks that run one behind the other and share their names."""

    page: str
    ranks: int
    """0 for the test's own process."""
    blocks: list[Block] = field(default_factory=list)

    def __str__(self) -> str:
        return str(self.blocks[0])


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks of one page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        mark, _, said = (found["mark"] or "").partition(": ")
        line = text.count("\n", 0, found.start("language")) + 1
        code = textwrap.dedent(found["code"])
        yield Block(page, line, found["language"], mark, said, code)


ALL = tuple(block for page in PAGES for block in blocks(page))


def groups() -> list[Group]:
    """The blocks that are run by `test_docs`, in the order of their pages."""
    found: list[Group] = []
    for page in PAGES:
        group = Group(page, 1)
        for block in blocks(page):
            if block.mark in ("ranks", "here"):
                group = Group(page, int(block.said or 0))
            runs = block.language == "python" and block.mark in ("", "ranks", "here")
            if runs or block.mark == "run":
                if not group.blocks:
                    found.append(group)
                group.blocks.append(block)
    return found
