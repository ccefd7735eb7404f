"""Commands as README and docs show them, checked without being run: by what they would start."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from torch.distributed.run import get_args_parser

from meshwright.plan import Plan
from support.docs.blocks import ROOT, Block
from support.internals.cli import COMMANDS, command, parse
from support.internals.recipes import TrainConfig, read_config
from support.internals.settings import split_overrides
from support.internals.toml_source import read

PLACEHOLDERS = (
    *("one.py", "train.py", "my.toml", "plan.toml", "my_loop.py"),
    *("model.py", "compare.py", "moe.toml", "lora.toml"),
)
"""Files of the reader."""
TARGETS = frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def lines(block: Block) -> Iterator[list[str]]:
    """The words of each command; a line may go on in the next."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def check(words: Sequence[str]) -> None:
    """Raise for a command that would not start."""
    program, rest = PurePath(words[0]).name, list(words[1:])
    match program:
        case "make":
            assert {word for word in rest if "=" not in word} <= TARGETS, words
        case "meshwright":
            check_meshwright(rest)
        case "torchrun":
            check_torchrun(rest)
        case "python" | "python3" if rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), words
            if rest[1] == "meshwright":
                check_meshwright(rest[2:])
        case "python" | "python3":
            require_file(rest[0])
        case "srun" | "sbatch":
            check(rest) if rest[0] == "meshwright" else require_file(rest[-1])
        case "pip":
            extras = re.findall(r"meshwright\[(\w+)\]", " ".join(rest))
            assert rest[0] == "install" and set(extras) <= set(known_extras()), words
        case _:
            raise AssertionError(f"nobody checks {program!r}: {shlex.join(words)}")


def known_extras() -> Sequence[str]:
    """The extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["optional-dependencies"]]


def require_file(name: str) -> None:
    """Raise for a file that is neither there nor the reader's."""
    assert name in PLACEHOLDERS or (ROOT / name).is_file(), name


def check_meshwright(words: Sequence[str]) -> None:
    """Parse a command of ours as it parses itself; of `train` the configuration, too."""
    names = [name for name in COMMANDS if [*words][: len(name.split())] == name.split()]
    assert names, words
    rest = [*words][len(names[0].split()) :]
    if "--help" in rest:
        return
    given = parse(command(names[0]), names[0], rest)
    if names[0] == "train":
        file = given.config
        require_file(file) if file != "example" else None
        path = ROOT / ("examples/train.toml" if file in ("example", *PLACEHOLDERS) else file)
        config = read_config(path, split_overrides(rest)[0])
        config.plan.check(config.plan.axes.world_size)


def check_torchrun(words: Sequence[str]) -> None:
    """Parse torchrun's own arguments, and what it starts."""
    given = get_args_parser().parse_args([*words])
    rest = given.training_script_args
    if given.no_python:
        check([given.training_script, *rest])
        return
    require_file(given.training_script)
    if rest and rest[0].endswith(".toml") and given.training_script not in PLACEHOLDERS:
        plan = Plan.from_file(ROOT / rest[0], overrides=rest[1:])
        plan.check(int(given.nproc_per_node))


def check_toml(block: Block) -> None:
    """Read a plan, or a configuration, and see that it holds on as many ranks as it says."""
    own = {"model", "data", "optimizer", "run"} & tomllib.loads(block.code).keys()
    if own:
        plan = read(block.code, TrainConfig, source=str(block)).plan
    else:
        plan = Plan.from_toml(block.code, source=str(block))
    plan.check(plan.axes.world_size)


def inline(page: str) -> Iterator[list[str]]:
    """The commands in the running text of a page: a word in capitals stands for the reader's."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for code in re.findall(r"`((?:meshwright|make) [^`\n]+)`", text):
        yield shlex.split(code)


def check_inline(words: Sequence[str]) -> None:
    """Raise for a command that is not there; its arguments may be left out."""
    if words[0] == "make":
        check(words)
        return
    wanted = [*words[1:]]
    known = [name.split() for name in COMMANDS]
    assert any(wanted[: len(name)] == name[: len(wanted)] for name in known), words
    if wanted[0] == "train" and len(wanted) > 1 and not wanted[1].startswith("-"):
        check_meshwright(wanted)
