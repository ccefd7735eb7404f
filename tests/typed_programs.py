"""Check the types of what README, the tutorial and the examples show, as a reader's checkers do.

::

    python tests/typed_programs.py               mypy and pyrefly on every program that is shown
    python tests/typed_programs.py FILE ...      on these files
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.docs.blocks import ROOT, blocks


def shown() -> Iterator[tuple[str, str]]:
    """The programs, with their names: blocks up to the one that imports from scratch again."""
    for page in ("README.md", "docs/tutorial.md"):
        programs: list[str] = []
        for block in blocks(page):
            if block.language != "python" or block.mark == "file":
                continue
            if (
                not programs
                or block.mark in ("ranks", "here")
                or block.code.startswith("import torch\n")
            ):
                programs.append("")
            programs[-1] += f"{block.code}\n"
        for index, program in enumerate(programs):
            yield f"{Path(page).stem.lower()}_{index}.py", program
    yield "train.py", ""  # the reader's own, which a block imports
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"example_{path.name}", path.read_text(encoding="utf-8")


def check(files: Sequence[Path]) -> bool:
    """Run both checkers on ``files``, and show what they say. True when both find nothing."""
    absent = [f"--ignore-missing-imports={name}" for name in ("monarch.*", "peft", "submitit")]
    where = ["--search-path", ROOT / "src", "--python-interpreter-path", sys.executable]
    commands = (
        ["mypy", "--config-file", ROOT / "pyproject.toml"],
        ["pyrefly", "check", "--preset", "default", *where, *absent],
    )
    codes = [
        subprocess.run([sys.executable, "-m", *command, *files], cwd=files[0].parent).returncode
        for command in commands
    ]
    return not any(codes)


def main(given: Sequence[str]) -> int:
    """The exit status: 1 where a checker finds something."""
    if given:
        return int(not check([Path(name).absolute() for name in given]))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name, _ in shown()]
        for file, (_, program) in zip(files, shown(), strict=True):
            file.write_text(program, encoding="utf-8")
        return int(not check(files))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
