"""One rank of a measurement: ``python -m meshwright.doctor FILE cpu`` or ``cuda``, and seconds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from meshwright.comm import connect, disconnect
from meshwright.doctor.calibration import rates
from meshwright.doctor.collectives import medians_on_device, medians_on_host


def main(target: Path, where: str, seconds: str = "") -> None:
    """Connect, measure, and write the result to ``target`` on rank 0."""
    if where == "cuda":
        communicator = connect("cpu:gloo,cuda:nccl")
    else:
        # By name: on a machine with GPUs, the default would put these ranks on them.
        communicator = connect(os.environ.get("MESHWRIGHT_CPU_BACKEND", "shm"))
    if seconds:
        answer = rates(communicator, float(seconds))
    elif where == "cuda":
        answer = medians_on_device(
            communicator, lambda: torch.cuda.mem_get_info()[0], torch.cuda.synchronize
        )
    else:
        answer = medians_on_host(communicator)
    if communicator.rank == 0:
        target.write_text(json.dumps({"backend": communicator.backend, **answer}))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
