"""Comparison of what the ranks of an axis do with models that are cut over it.

A rank that gives a pass up, and goes on, would add what it sends next to what the others still
wait for. Each rank knows how many collectives lie between the beginnings of two passes::

    the numbers and passes so far were known     go on: nothing is sent, and nobody is asked
    another number, or another turn of passes    ask the others first, see `comm.failures.events`

So each turn is asked about once, as the first evaluation after training.

Ranks that do the same may do it with other values: where they are to be equal they are compared,
the first time, the second, the fourth, the eighth and so on::

    first pass       parameters without a style: a forgotten seed would train a model on each rank
    passes           what the root is given: a rank that left out a batch computes on other batches
    steps            gradients of what each rank holds whole: copies would be trained apart; what
                     the program updates itself, as no optimizer does, before a pass
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshwright.comm import Communicator, LateNumbers, settle
from meshwright.comm.dtensors.dtensor import is_dtensor, known_at_rest, mesh_communicators
from meshwright.comm.dtensors.sharded_axes import singles_of
from meshwright.comm.failures.events import Event, EventCheck
from meshwright.gradients import (
    Held,
    is_due,
    look_at_optimizers,
    require_close,
    warn_without_gradients,
)
from meshwright.tensor_parallel.checks.equality import (
    Exchange,
    held_whole,
    look_at_bits,
    verify_gradients,
    verify_plain,
    verify_weights,
)
from meshwright.torch_internals.modules import forward_pre_hooks_of
from meshwright.torch_internals.trees import tree_flatten

_KEPT = "passes of models"


class Passes:
    """The passes on one axis of all models that are cut over it, and all steps of optimizers."""

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        self._check = EventCheck(axis, "the model", dict, (axis,))
        self._issued = 0
        self.late = LateNumbers()
        """Digests of what the device has not computed yet; read before the next pass."""
        self._roots: list[tuple[weakref.ref[nn.Module], _Begin]] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._trains = self._has_warned = False
        """True when a forward in training has run since the last step; a step without gradients was
        told of."""
        look_at_optimizers()
        hook = partial(_before_step, weakref.ref(self))
        weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    @classmethod
    def on(cls, axis: Communicator) -> Passes:
        """Find those on ``axis``."""
        if _KEPT not in axis.kept:
            axis.kept[_KEPT] = cls(axis)
        return axis.kept[_KEPT]

    def compare(
        self, root: nn.Module, plain: Sequence[tuple[str, nn.Parameter]], *, is_layer: bool
    ) -> None:
        """Compare the forward passes of ``root`` that are to come with those of the other ranks.

        ``plain`` parameters, which each rank has for itself, are compared in the first of them, by
        when they may have been loaded; those that something else has replaced until then are left
        out. Inputs are not compared of what ``is_layer``, which may be given parts. Passes that a
        compiler traces are not compared.
        """
        if self.axis.is_alone:
            return
        known = [hook for hook in forward_pre_hooks_of(root).values() if isinstance(hook, _Begin)]
        begin = known[0] if known else _Begin(self, root)
        begin.expect(plain, is_layer=is_layer)
        if not known:
            root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            root.register_state_dict_pre_hook(settle)
            self._roots = [row for row in self._roots if row[0]() is not None]
            self._roots.append((weakref.ref(root), begin))

    def begin(self, root: str) -> None:
        """Note that a forward of ``root`` is next. Raises CollectiveMismatchError: `EventCheck`."""
        if self.late.coming:
            self.late.settle()
        issued = self.axis.counts.get("", 0)
        self._trains = self._trains or torch.is_grad_enabled()
        kind = "" if torch.is_grad_enabled() else " without gradients"
        since = f"{issued - self._issued} collectives after the one before"
        event = Event(f"a forward pass of {root}{kind}, {since}")
        self._issued = issued
        is_new = self._check.is_new(event)
        after = "a pass or left out a part of one" if is_new else ""
        self._check.happens(event, after=after)

    def exchange(self, what: str) -> Exchange:
        """Make an exchange through the store, at the event ``what``."""
        return partial(self._check.exchange, Event(what))

    def step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Compare gradients before a step of ``optimizer``, where that is due.

        Raises `LayoutError`, on all ranks, where those of one parameter differ.
        """
        if self.axis.is_alone:
            return
        if optimizer not in self._steps:
            optimizer.register_state_dict_pre_hook(settle)
        is_done = self._trains and not has_closure
        if is_done and not self._has_warned and self._has_some(optimizer):
            self._has_warned = warn_without_gradients(optimizer)
        self._trains = False
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if is_due(number) and (named := list(self._held_whole(optimizer))):
            kind = type(optimizer).__name__
            exchange = self.exchange(f"step {number} of a {kind}")
            verify_gradients(self.axis, named, exchange, self.late)

    @staticmethod
    def _has_some(optimizer: Optimizer) -> bool:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return first is not None and any(map(is_dtensor, singles_of(first)))

    def written_by_hand(self, root: nn.Module, begin: _Begin) -> Iterator[tuple[str, nn.Parameter]]:
        """List what the ranks hold whole of ``root`` and train without an optimizer of torch."""
        groups = [group for optimizer in self._steps for group in optimizer.param_groups]
        stepped = {id(p) for group in groups for each in group["params"] for p in singles_of(each)}
        plain = {name for name, _ in begin.plain_of(root)}
        for name, parameter in root.named_parameters():
            is_trained = parameter.requires_grad and id(parameter) not in stepped
            if is_trained and (name in plain or self._is_over_axis(parameter)):
                yield name, parameter

    def _held_whole(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[int, str] = {}
        for held, begin in self._roots:
            root = held()
            if root is not None:
                names.update({id(p): name for name, p in begin.plain_of(root)})
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(p for each in listed for p in singles_of(each)):
            if id(parameter) in names:
                yield names[id(parameter)], parameter
            elif self._is_over_axis(parameter):
                yield f"its parameter {number}", parameter

    def _is_over_axis(self, parameter: torch.Tensor) -> bool:
        rest = known_at_rest(parameter)
        if rest is None or held_whole(parameter, self.axis, parameter) is None:
            return False
        return any(a.ranks == self.axis.ranks for a in mesh_communicators(rest.mesh, "tensor"))


def _before_step(
    passes: weakref.ref[Passes],
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Look at a step of any optimizer; the hook does not keep ``passes`` alive."""
    found = passes()
    if found is not None and not torch.compiler.is_compiling():
        found.step(optimizer, has_closure=len(args) > 1 or bool(kwargs))


class _Begin:
    """The hook of one root; copies of the module share it."""

    def __init__(self, passes: Passes, root: nn.Module) -> None:
        self._passes = passes
        self._root = type(root).__name__
        self._number = 0
        self._are_alike: dict[str, bool] = {}
        """By input, True when ranks were given the same when it came first and had a content."""
        self._plain: dict[str, tuple[int, bool]] = {}
        """Parameters without a style, by name: which it was, and whether it had no values yet."""
        self._is_verified = False
        self._is_layer = False

    def expect(self, plain: Sequence[tuple[str, nn.Parameter]], *, is_layer: bool) -> None:
        """Compare these parameters in the next pass."""
        self._plain = {name: (id(p), p.is_meta) for name, p in plain}
        self._is_verified = not plain
        self._is_layer = self._is_layer or is_layer

    def __call__(
        self, module: nn.Module, inputs: tuple[object, ...], options: Mapping[str, object]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        passes = self._passes
        self._number += 1
        passes.begin(self._root)
        if not self._is_verified:
            held = [(n, p) for n, p in self.plain_of(module) if not is_dtensor(p)]
            exchange = passes.exchange(f"the parameters without a style of {self._root}")
            verify_plain(passes.axis, held, exchange)
            self._is_verified = True
        elif (
            is_due(self._number)
            and torch.is_grad_enabled()
            and (trained := list(passes.written_by_hand(module, self)))
        ):
            exchange = passes.exchange(f"the weights before pass {self._number} of {self._root}")
            verify_weights(passes.axis, trained, exchange, passes.late)
        if is_due(self._number) and not self._is_layer:
            self._compare_inputs((inputs, options))

    def __deepcopy__(self, memo: object) -> _Begin:
        return self

    def plain_of(self, root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """List parameters without a style that are as they were, or sharded over other axes."""
        for name, parameter in root.named_parameters():
            known, was_empty = self._plain.get(name, (0, False))
            is_same = not parameter.is_meta and (known == id(parameter) or was_empty)
            if known and (is_dtensor(parameter) or is_same):
                yield name, parameter

    def _compare_inputs(self, given: object) -> None:
        """Raise ValueError where ranks that were given the same are not any more.

        Of inputs on a device before the next pass.
        """
        axis = self._passes.axis
        leaves, structure = tree_flatten(given)
        tensors: list[Held] = [
            (f"input {place}", found)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and (found := held_whole(leaf, axis, leaf)) is not None
        ]
        of = hashlib.sha256(str(structure).encode()).hexdigest()
        judge = partial(self._judge_inputs, self._number, of)
        late, is_late = self._passes.late, not axis.is_on_host
        look_at_bits(tensors, late, judge, is_late=is_late, only_telling=True)

    def _judge_inputs(
        self, number: int, structure: str, held: Sequence[Held], digests: Sequence[str]
    ) -> None:
        """Raise ValueError where the inputs ``held`` of pass ``number`` are others than before."""
        axis, tensors = self._passes.axis, dict(held)
        said = json.dumps([structure, dict(zip(tensors, digests, strict=True))])
        exchange = self._passes.exchange(f"the inputs of pass {number} of {self._root}")
        rows: list[tuple[str, dict[str, str]]] = [json.loads(row) for row in exchange(said)]
        # From here on the same on all ranks: by the structure of the arguments, then by name.
        differ: list[str] = []
        for name in sorted({name for _, found in rows for name in found}):
            together = {(of, found.get(name)) for of, found in rows}
            keys = [f"{of}/{name}" for of, _ in rows]
            if len(together) > 1 and any(self._are_alike.get(key) for key in keys):
                differ.append(name)
            if together != {(rows[0][0], "")}:
                for key in keys:
                    self._are_alike.setdefault(key, len(together) == 1)
        if differ:
            require_close(
                axis,
                [(name, tensors.get(name)) for name in differ],
                [[found.get(name) for name in differ] for _, found in rows],
                f"what is given to pass {number} of one {self._root}, as it was until now,",
                error=ValueError,
                remedy="Give all of them the same batches in the same order; parts of a batch give "
                "as DTensors",
            )
