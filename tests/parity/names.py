"""The public names of torch's training wrappers, and the same names of ours.

Everything is read from torch and from our modules, so that a new torch, or a new name of ours,
shows itself. `rows` has one `Row` for each name; `docs/parity_names.md` is made of them and of the
notes in `notes.py`.
"""

from __future__ import annotations

import importlib
import inspect
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["SUBJECTS", "Row", "Subject", "rows"]


@dataclass(frozen=True)
class Subject:
    """A heading of the table: modules of torch, and ours that has their names."""

    title: str
    torch: tuple[str, ...]
    ours: tuple[str, ...]
    tests: tuple[str, ...]
    """Folders whose tests show what is the same."""
    only: tuple[str, ...] = ()
    """Names that are meant; all that torch's ``__all__`` lists by default."""


SUBJECTS = (
    Subject(
        "DistributedDataParallel",
        ("torch.nn.parallel",),
        ("meshwright.data_parallel",),
        ("data_parallel", "fsdp"),
        only=("DistributedDataParallel",),
    ),
    Subject(
        "FullyShardedDataParallel and fully_shard",
        (
            "torch.distributed.fsdp",
            "torch.distributed.fsdp.api",
            "torch.distributed.fsdp.fully_sharded_data_parallel",
            "torch.distributed.fsdp.sharded_grad_scaler",
        ),
        ("meshwright.fsdp",),
        ("fsdp", "data_parallel"),
    ),
    Subject(
        "Wrapping policies",
        ("torch.distributed.fsdp.wrap",),
        ("meshwright.fsdp.wrap",),
        ("fsdp",),
    ),
    Subject(
        "Pipelining",
        (
            "torch.distributed.pipelining",
            "torch.distributed.pipelining.schedules",
            "torch.distributed.pipelining.stage",
            "torch.distributed.pipelining.microbatch",
        ),
        ("meshwright.pipelining",),
        ("pipelining",),
    ),
    Subject(
        "Tensor parallel",
        ("torch.distributed.tensor.parallel",),
        ("meshwright.tensor_parallel",),
        ("tensor_parallel",),
    ),
)


TYPED = "typed"
"""The default of a keyword whose default stands in code, not in the signature."""


@dataclass(frozen=True)
class Row:
    """A name of torch's beside ours."""

    name: str
    found: bool
    differs: str
    """In words, the difference of the two signatures; empty when there is none."""


def rows(subject: Subject) -> list[Row]:
    """The names of ``subject``, each class followed by its members."""
    result: list[Row] = []
    for name, theirs in _public(subject):
        ours = _first(subject.ours, name)
        result.append(_row(name, theirs, ours))
        if inspect.isclass(theirs):
            result += [
                _row(f"{name}.{member}", value, getattr(ours, member, None))
                for member, value in _members(theirs)
            ]
    return result


def _public(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Names of torch's modules, the first meaning of each."""
    seen: set[str] = set()
    for path in subject.torch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(path)
        for name in subject.only or getattr(module, "__all__", ()):
            value = getattr(module, name)
            if name not in seen and not inspect.ismodule(value):
                seen.add(name)
                yield name, value


def _first(paths: tuple[str, ...], name: str) -> Any:
    for path in paths:
        module = importlib.import_module(path)
        if hasattr(module, name):
            return getattr(module, name)
    return None


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public members that ``cls`` or its own bases define, not those of every module or object."""
    foreign = {object, nn.Module, Exception, BaseException, tuple, dict}
    seen: set[str] = set()
    for base in cls.__mro__:
        if base in foreign or not base.__module__.startswith("torch"):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, getattr(cls, name, value)


def _row(name: str, theirs: Any, ours: Any) -> Row:
    if ours is None and theirs is not None:
        return Row(name, found=False, differs="")
    return Row(name, found=True, differs=_difference(theirs, ours))


def _difference(theirs: Any, ours: Any) -> str:
    if not (callable(theirs) and callable(ours)):
        return ""
    expected, found = _parameters(theirs), _parameters(ours)
    if expected is None or found is None:
        return ""
    words = []
    if missing := [name for name in expected if name not in found]:
        words.append("without " + ", ".join(f"`{name}`" for name in missing))
    if more := [name for name in found if name not in expected]:
        words.append("also takes " + ", ".join(f"`{name}`" for name in more))
    shared = [name for name in expected if name in found]
    if TYPED not in found.values() and shared != [name for name in found if name in expected]:
        words.append("in another order")
    other = [name for name in shared if found[name] not in (expected[name], TYPED)]
    words += [f"`{name}` is `{found[name]}`, not `{expected[name]}`" for name in other]
    return "; ".join(words)


def _parameters(value: Any) -> dict[str, str] | None:
    """Parameters of ``value`` as they are called: by name, its kind and default."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None  # built in C, or an enumeration: no signature to read
    found = {
        name: _default(parameter.default)
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    return found | dict.fromkeys(_unpacked(value), TYPED)


def _unpacked(value: Any) -> Iterator[str]:
    """Names of keywords that are given as ``**keywords: Unpack[SomeTypedDict]``."""
    method = value.__init__ if inspect.isclass(value) else value
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            hints = typing.get_type_hints(method, include_extras=True)
            for keywords in typing.get_args(hints.get(parameter.name)):
                yield from typing.get_type_hints(keywords)


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    return str(value) if not hasattr(value, "__dict__") else type(value).__name__
