"""The commands by name, and `main`, which runs one; a command's module is imported on use."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from meshwright import __version__
from meshwright.cli.words import Command, fail, one_line, parse
from meshwright.errors import LaunchError, MeshwrightError, PlanError
from meshwright.settings import nearest

# The class of each command, in the module of the command's first word, and its line of help.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("TrainCommand", "Train a model on the ranks of a plan."),
        "compare": ("CompareCommand", "Name the first tensor in which two runs differ."),
        "doctor": ("DoctorCommand", "Show what this machine offers, and what to fix."),
        "report": ("ReportCommand", "Draw a run as a page for a browser."),
        "plan": ("PlanCommand", "Say which layouts of a model fit, and how fast they are."),
        "simulate": ("SimulateCommand", "Draw a pipeline schedule, its idle time and its memory."),
        "checkpoint verify": ("VerifyCommand", "Verify every byte of a checkpoint."),
        "checkpoint show": ("ShowCommand", "Show the tensors and values of a checkpoint."),
        "checkpoint diff": ("DiffCommand", "List the tensors in which two checkpoints differ."),
        "checkpoint export": ("ExportCommand", "Write the weights in another format."),
        "checkpoint import": ("ImportCommand", "Make a checkpoint from weights in another format."),
    }
)


def command(name: str) -> type[Command]:
    """Return the class of the command ``name``; imports its module."""
    return getattr(import_module(f"meshwright.cli.{name.split()[0]}"), COMMANDS[name][0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(words: list[str]) -> int:
    for name in COMMANDS:
        begin, rest = words[: len(name.split())], words[len(name.split()) :]
        if begin == name.split():
            try:
                return parse(command(name), name, rest).run(rest)
            except PlanError as error:
                return fail(name, *error.args[0].splitlines(), status=2)
            except LaunchError as error:
                return fail(name, *str(error).splitlines(), status=1)
            except MeshwrightError as error:
                return fail(name, one_line(error), status=1)
            except OSError as error:
                where = f"{error.filename}: {error.strerror}"
                return fail(name, where if error.filename else one_line(error), status=2)
    if words and words[0] in ("-h", "--help", "help", "--version"):
        print(f"meshwright {__version__}" if words[0] == "--version" else _overview())
        return 0
    group = [name for name in COMMANDS if words and name.startswith(f"{words[0]} ")]
    if group and words[1:2] in (["-h"], ["--help"]):
        print(_overview(group, f"{words[0]} COMMAND"))
        return 0
    if group and len(words) == 1:
        return fail(words[0], f"expected a command: {', '.join(group)}", status=2)
    if not words:
        return fail("", f"expected a command: {', '.join(COMMANDS)}", status=2)
    close = nearest(" ".join(words[:2]), list(COMMANDS)) or nearest(words[0], list(COMMANDS))
    hint = f"did you mean '{close}'?" if close else f"known commands: {', '.join(COMMANDS)}"
    return fail("", f"unknown command '{words[0]}'; {hint}", status=2)


def _overview(names: Sequence[str] = (), usage: str = "COMMAND") -> str:
    lines = [f"  {name:<18} {COMMANDS[name][1]}" for name in names or COMMANDS]
    return "\n".join(
        [f"usage: meshwright {usage} ...", "", *lines, "", f"meshwright {usage} --help shows more."]
    )
