"""Starts ranks on this machine through torch's elastic launcher, and reports which failed first."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from meshwright.environment import LOCAL_NETWORK
from meshwright.errors import LaunchError


def launch(command: Sequence[str], ranks: int, *, grace: float = 60.0) -> int:
    """Run ``command`` as ``ranks`` processes of this machine and wait for them.

    The ranks find each other through the environment variables of torchrun, and run with one
    compute thread and `LOCAL_NETWORK` unless the caller's environment says otherwise. SIGINT and
    SIGTERM are passed on, and the ranks have ``grace`` seconds to save and leave (always 30 with
    torch 2.11). Returns 0, or 128 plus the number of the signal that ended the run.

    Raises `LaunchError` naming the rank that failed first, its exit status and its error.
    """
    if shutil.which(command[0]) is None:
        raise LaunchError(f"cannot start {command[0]!r}: there is no such program")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **_time_to_leave(grace),
        )
        try:
            with _quiet_agent():
                launch_agent(config, "env", [*_assignments(), *command])
        except ChildFailedError as error:
            raise LaunchError(first_failure(error.failures, ranks)) from None
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def _time_to_leave(grace: float) -> dict[str, Any]:
    """Return the option of torch's launcher for ``grace`` seconds, if it has one."""
    is_known = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
    return {"shutdown_timeout": max(1, int(grace))} if is_known else {}


def first_failure(failures: Mapping[int, ProcessFailure], ranks: int) -> str:
    """Describe in a line the rank that failed first, not as a consequence of another."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int, int]:
        rank, failure = item
        said = _said(failure)
        follower = "RankFailedError" in said
        ended_by_launcher = failure.exitcode == -signal.SIGTERM
        # Whoever gave up waiting has named the rank behind it, and may have killed it since.
        knows_less = "CollectiveTimeoutError" not in said
        return follower, ended_by_launcher, knows_less, int(failure.timestamp), rank

    rank, failure = min(failures.items(), key=order)
    said = _said(failure)
    if said and failure.exitcode == -signal.SIGTERM:
        end = "failed"  # the launcher ended it while it left
    elif failure.exitcode < 0:
        end = f"was ended by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        end = f"exited with status {failure.exitcode}"
    return f"rank {rank} of {ranks} {end}" + (f": {said}" if said else "")


def _said(failure: ProcessFailure) -> str:
    """Read the error that the rank itself wrote, in one line; empty when it wrote nothing."""
    message: object = failure.error_file_data.get("message", "")
    if isinstance(message, Mapping):
        message = message.get("message", "")
    text = " ".join(str(message).split())
    return "" if text == "<NONE>" else text


def _assignments() -> list[str]:
    """List the variables of the ranks that this process lacks, as arguments for ``env``.

    The agent passes on its own environment, and its own connections need name resolution.
    """
    wanted = {"OMP_NUM_THREADS": "1", **LOCAL_NETWORK}
    return [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Hide the agent's own log lines: the ranks and the final error say what matters."""
    # The agent gives its loggers levels of their own, so the parent's level would not do.
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger)
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
