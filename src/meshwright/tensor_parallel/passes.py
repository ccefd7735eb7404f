"""Whether the ranks of an axis begin the same passes of models that are cut over it.

A rank that gives a pass up, and goes on, would add what it sends next to what the others still
wait for. Each rank knows how many collectives lie between the beginnings of two passes::

    the numbers and passes so far were known     go on: nothing is sent, and nobody is asked
    another number, or another turn of passes    ask the others first, see `meshwright.comm.events`

So each turn is asked about once, as the first evaluation after training.

In the first pass what ranks hold without a style is compared, too: a forgotten seed would train a
model of its own on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.events import Event, EventCheck
from meshwright.tensor_parallel.weights import verify_plain

__all__ = ["compare_passes"]

_KEPT = "passes of models"


class _Passes:
    """The passes on one axis of all models that are cut over it."""

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        self._check = EventCheck(axis, "the model", dict, (axis,))
        self._issued = 0

    def begin(self, root: str) -> None:
        """The forward of ``root`` is next. Raises `CollectiveMismatchError`, see `EventCheck`."""
        issued = self.axis.counts.get("", 0)
        kind = "" if torch.is_grad_enabled() else " without gradients"
        since = f"{issued - self._issued} collectives after the one before"
        event = Event(f"a forward pass of {root}{kind}, {since}")
        self._issued = issued
        is_new = self._check.is_new(event)
        self._check.happens(event, after="a pass or left out a part of one" if is_new else "")


def compare_passes(
    root: nn.Module, axis: Communicator, plain: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Compare the forward passes of ``root`` that are to come with those of the other ranks.

    ``plain`` parameters, which each rank has for itself, are compared in the first of them, by when
    they may have been loaded; those that something else has replaced until then are left out.
    Passes that a compiler traces are not compared.
    """
    if axis.size == 1:
        return
    known = [hook for hook in root._forward_pre_hooks.values() if isinstance(hook, _Begin)]
    if known:
        known[0].plain = {name: id(parameter) for name, parameter in plain}
        return
    passes = axis.kept.get(_KEPT)
    if passes is None:
        passes = axis.kept[_KEPT] = _Passes(axis)
    root.register_forward_pre_hook(_Begin(passes, root, plain), prepend=True)


class _Begin:
    """The hook of one root; copies of the module share it."""

    def __init__(
        self, passes: _Passes, root: nn.Module, plain: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self._passes = passes
        self._root = type(root).__name__
        self.plain: dict[str, int] = {name: id(parameter) for name, parameter in plain}
        """Parameters that are to be compared in the next pass, by name."""

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._passes.begin(self._root)
        if self.plain:
            named = [(n, p) for n, p in module.named_parameters() if self.plain.get(n) == id(p)]
            verify_plain(self._passes.axis, [(n, p) for n, p in named if p.device.type != "meta"])
            self.plain = {}

    def __deepcopy__(self, memo: object) -> _Begin:
        return self
