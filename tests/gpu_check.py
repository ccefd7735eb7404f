"""The check of a machine with a GPU: ``make gpu-check``, or ``python3 tests/gpu_check.py``.

It runs under any Python that has a CUDA build of torch, numpy, safetensors and pydantic. ``--only
TEXT`` runs the rows whose name holds TEXT; ``--share 2/6`` the second of six shares of them, which
may run side by side where the GPU has room. It prints a table, the details of what has failed, and
last how many rows passed and failed; its status is 0 where none failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

LEAST = (2, 11)
NEEDED = ("numpy", "safetensors", "pydantic")
"""Packages that the rows need beside torch."""
REFUSED = 2
"""The status where nothing could be checked."""


def refusal(torch_version: str | None, cuda_build: str | None, gpus: int) -> str:
    """Say why nothing can be checked here; empty where it can."""
    if torch_version is None:
        return "expected torch 2.11 or newer, found none: start this with a python3 that has it"
    if tuple(map(int, torch_version.split(".")[:2])) < LEAST:
        return f"expected torch 2.11 or newer, found {torch_version}"
    if cuda_build is None:
        return f"expected a CUDA build of torch, found {torch_version} without CUDA"
    if gpus < 1:
        return f"expected a GPU, found none that torch {torch_version} (CUDA {cuda_build}) can use"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="run the rows whose name holds this")
    parser.add_argument("--share", default="1/1", type=share, help="run one share of the rows: 2/6")
    options = parser.parse_args(arguments)
    first, shares = options.share
    reason = _examined()
    if reason:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return REFUSED
    # What follows needs the torch that was found good.
    from gpu.running import line_of, perform, summary
    from gpu.table import all_rows

    rows = [row for row in all_rows() if options.only in row.name]
    results = []
    for result in perform(rows[first - 1 :: shares]):
        results.append(result)
        print(line_of(result), flush=True)
    for result in results:
        if result.details:
            print(f"\n--- {result.row.name} on {result.row.site}\n{result.details}")
    print(f"\n{summary(results)}")
    return 1 if any(result.state == "failed" for result in results) else 0


def share(text: str) -> tuple[int, int]:
    """Read ``2/6``. Raises ValueError, which argparse reports, for anything else."""
    first, shares = map(int, text.split("/"))
    if not 1 <= first <= shares:
        raise ValueError(text)
    return first, shares


def _examined() -> str:
    """Give the reason to refuse this machine; empty where there is none."""
    if importlib.util.find_spec("torch") is None:
        return refusal(None, None, 0)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"expected a python3 that has {', '.join(NEEDED)}, found no {', '.join(missing)}"
    import torch

    gpus = torch.cuda.device_count() if torch.version.cuda else 0
    return refusal(torch.__version__, torch.version.cuda, gpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
