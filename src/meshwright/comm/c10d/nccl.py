"""Settings of c10d's NCCL watchdog, so that ours reports a failure before c10d's ends the run.

c10d ends the process when NCCL reports an error, when an operation exceeds c10d's timeout, and when
its own thread hangs. It names no rank, so our watchdog has to report first; c10d's still ends the
run if ours is dead. `docs/devices.md` lists these settings in a table.
"""

from __future__ import annotations

import os

SETTINGS = {
    # Torch's own value: the process ends, and no communicator is aborted behind the program's back.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # With it c10d pauses between an error and the end of the process, which is our time to report:
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # four times this many milliseconds.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000",
    # Every rank asks the store for a signal to dump: not each second.
    "TORCH_NCCL_COORD_CHECK_MILSEC": "10000",
    # A watchdog that stands still may wait for a driver that compiles or frees: not 8 minutes.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
}
"""Variables that c10d reads when a group is made, and what they are where the user says nothing."""


def prepare() -> None:
    """Set what the user has not set. Call it before the first group is made."""
    for name, value in SETTINGS.items():
        if name.removeprefix("TORCH_") not in os.environ:  # the name of older versions
            os.environ.setdefault(name, value)
