"""``meshwright train`` beside four busy loops: it prints no warning and ends well.

Run it as ``python tests/soak/busy_train.py [--steps 300] [--loops 4]``.
What `make train` runs, examples/train.toml on four processes, whole or with fewer steps, while
other programs want every core. Other words are options of ``meshwright train``, as ``--loops 0
--axes.replicate 32`` for 32 processes that are a crowd by themselves. Exits with status 1 when the
run fails, writes to its standard error or prints a line that a run without trouble does not print.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["busy_loops", "unexpected"]

ROOT = Path(__file__).parents[2]
TROUBLE = re.compile(
    r"warning|error|has not ended|not answer|hang|lost|fail|timed out|mismatch|slow", re.IGNORECASE
)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing."""
    words = [sys.executable, "-c", "while True: sum(range(10_000))"]
    loops = [subprocess.Popen(words) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def unexpected(output: str, errors: str) -> list[str]:
    """The lines of a run that tell of trouble: all of standard error, and such on the other."""
    return [*errors.splitlines(), *filter(TROUBLE.search, output.splitlines())]


def main() -> int:
    """Train beside the loops, and show the run's last lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(ROOT / "examples" / "train.toml"))
    parser.add_argument("--steps", type=int, default=0, help="fewer than the configuration's")
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=3600.0)
    given, options = parser.parse_known_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, busy_loops(given.loops):
        words = [sys.executable, "-m", "meshwright", "train", given.config]
        words += ["--run.folder", f"{folder}/run"]
        words += [f"--run.steps={given.steps}"] if given.steps else []
        words += options
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=given.timeout,
            check=False,
        )
    trouble = unexpected(done.stdout, done.stderr)
    print("\n".join(done.stdout.splitlines()[-8:]))
    for line in trouble:
        print(f"    MISSED: {line}")
    is_well = done.returncode == 0 and not trouble
    word = "held" if is_well else "missed"
    seconds = time.monotonic() - begun
    print(
        f"{word}: exit status {done.returncode}, {len(trouble)} lines of trouble, {seconds:.0f} s"
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
