"""Whether the ranks of an axis do the same with models that are cut over it.

A rank that gives a pass up, and goes on, would add what it sends next to what the others still
wait for. Each rank knows how many collectives lie between the beginnings of two passes::

    the numbers and passes so far were known     go on: nothing is sent, and nobody is asked
    another number, or another turn of passes    ask the others first, see `meshwright.comm.events`

So each turn is asked about once, as the first evaluation after training.

Ranks that do the same may do it with other values: where they are to be equal they are compared,
the first time, the second, the fourth, the eighth and so on::

    first pass       parameters without a style: a forgotten seed would train a model on each rank
    passes           what the root is given: a rank that left out a batch computes on other batches
    steps            gradients of what each rank holds whole: copies would be trained apart
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.comm import Communicator
from meshwright.comm.dtensor import is_dtensor, known_at_rest, mesh_communicators
from meshwright.comm.events import Event, EventCheck
from meshwright.tensor_parallel.equality import (
    Difference,
    are_equal,
    first_difference,
    held_whole,
    is_due,
    verify_gradients,
    verify_plain,
)

__all__ = ["Passes"]

_KEPT = "passes of models"


class Passes:
    """The passes on one axis of all models that are cut over it."""

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        self._check = EventCheck(axis, "the model", dict, (axis,))
        self._issued = 0
        self._whole: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """Parameters that a mesh does not say to be whole on each rank, and their names, by id."""
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def on(cls, axis: Communicator) -> Passes:
        """Those on ``axis``."""
        if _KEPT not in axis.kept:
            axis.kept[_KEPT] = cls(axis)
        return axis.kept[_KEPT]

    def compare(self, root: nn.Module, plain: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare the forward passes of ``root`` that are to come with those of the other ranks.

        ``plain`` parameters, which each rank has for itself, are compared in the first of them, by
        when they may have been loaded; those that something else has replaced until then are left
        out. Passes that a compiler traces are not compared.
        """
        if self.axis.size == 1:
            return
        known = [hook for hook in root._forward_pre_hooks.values() if isinstance(hook, _Begin)]
        if known:
            known[0].expect(plain)
        else:
            begin = _Begin(self, root, plain)
            root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)

    def begin(self, root: str) -> None:
        """The forward of ``root`` is next. Raises `CollectiveMismatchError`, see `EventCheck`."""
        issued = self.axis.counts.get("", 0)
        kind = "" if torch.is_grad_enabled() else " without gradients"
        since = f"{issued - self._issued} collectives after the one before"
        event = Event(f"a forward pass of {root}{kind}, {since}")
        self._issued = issued
        is_new = self._check.is_new(event)
        after = "a pass or left out a part of one" if is_new else ""
        self._check.happens(event, after=after)

    def compare_inputs(self, what: str, given: object, *, were_alike: bool) -> Difference | None:
        """What differs between the ranks of all tensors ``given``, but for parts in DTensors.

        Rounding differs, too, unless they ``were_alike``: what is not to be equal is not sent.
        """
        tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and not t.is_meta]
        axis, exchange = self.axis, functools.partial(self._check.exchange, Event(what))
        named = [(f"input {number}", held_whole(t, axis, t)) for number, t in enumerate(tensors)]
        if were_alike:
            return first_difference(axis, named, exchange)
        return None if are_equal(named, exchange) else Difference("its input", "differs")

    def hold(self, named: Mapping[str, torch.Tensor]) -> None:
        """Let `step` know that each rank holds these parameters whole."""
        self._whole = {key: held for key, held in self._whole.items() if held[0]() is not None}
        self._whole.update({id(p): (weakref.ref(p), name) for name, p in named.items()})

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of ``optimizer`` is next: compare gradients where that is due.

        Raises `LayoutError`, on all ranks, where those of one parameter differ.
        """
        if self.axis.size == 1:
            return
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if is_due(number) and (named := list(self._held_whole(optimizer))):
            event = Event(f"step {number} of a {type(optimizer).__name__}")
            verify_gradients(self.axis, named, functools.partial(self._check.exchange, event))

    def _held_whole(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(listed):
            held, name = self._whole.get(id(parameter), (None, f"its parameter {number}"))
            if (held is not None and held() is parameter) or self._is_over_axis(parameter):
                yield name, parameter

    def _is_over_axis(self, parameter: torch.Tensor) -> bool:
        rest = known_at_rest(parameter)
        if rest is None or held_whole(parameter, self.axis, parameter) is None:
            return False
        return any(a.ranks == self.axis.ranks for a in mesh_communicators(rest.mesh, "tensor"))


class _Begin:
    """The hook of one root; copies of the module share it."""

    def __init__(
        self, passes: Passes, root: nn.Module, plain: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self._passes = passes
        self._root = type(root).__name__
        self._number = 0
        self._are_alike: bool | None = None
        """Whether ranks were given the same when that was last compared."""
        self._plain: dict[str, tuple[int, bool]] = {}
        """Parameters without a style, by name: which it was, and whether it had no values yet."""
        self._is_verified = False
        self.expect(plain)

    def expect(self, plain: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare these parameters in the next pass."""
        self._plain = {name: (id(p), p.is_meta) for name, p in plain}
        self._is_verified = not plain

    def __call__(
        self, module: nn.Module, inputs: tuple[object, ...], options: Mapping[str, object]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        passes = self._passes
        self._number += 1
        passes.begin(self._root)
        if not self._is_verified:
            held = [(n, p) for n, p in module.named_parameters() if self._is_plain(n, p)]
            verify_plain(passes.axis, [(n, p) for n, p in held if not is_dtensor(p)])
            passes.hold(dict(held))
            self._is_verified = True
        if is_due(self._number) and self._are_alike is not False:
            self._compare_inputs((inputs, options))

    def __deepcopy__(self, memo: object) -> _Begin:
        return self

    def _is_plain(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` has no style: it is as it was, or sharded over other axes."""
        known, was_empty = self._plain.get(name, (0, False))
        if is_dtensor(parameter):
            return known != 0
        return not parameter.is_meta and (known == id(parameter) or was_empty)

    def _compare_inputs(self, given: object) -> None:
        """Raise ValueError where ranks that were given the same are not any more."""
        axis, number = self._passes.axis, self._number
        what = f"the inputs of pass {number} of {self._root}"
        were_alike = bool(self._are_alike)
        difference = self._passes.compare_inputs(what, given, were_alike=were_alike)
        if difference is not None and were_alike:
            raise ValueError(
                f"axis {axis.axis}: the ranks {list(axis.ranks)} compute one {self._root} together "
                f"and were given the same until now, but in its pass {number} "
                f"{difference.name} {difference.text}. Give all of them the same batches in the "
                "same order; parts of a batch give as DTensors"
            )
        self._are_alike = difference is None
