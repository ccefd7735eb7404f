"""Comparison of the passes that the ranks of an axis run on models that are sharded over it.

If a rank aborts a pass and begins another, its next collectives would match those that the others
still wait for. Each rank counts the collectives between the beginnings of two passes::

    these counts and passes were seen before     continue: nothing is sent
    another count, or another order of passes    ask the others first, see `comm.failures.events`

So each order is checked once, such as the first evaluation after training.

Ranks that run the same passes may do so with different values. Values that must be equal are
compared the first, second, fourth, eighth time and so on::

    first pass       parameters without a style: without a common seed each rank would train its own
    passes           inputs from outside that a style declares Replicate: ranks with different
                     batches would sum gradients that do not belong together
    steps            gradients of replicated parameters: the copies would diverge; before a pass,
                     parameters that the program updates without an optimizer
"""

from __future__ import annotations

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
from meshwright.comm.failures.events import EventCheck, GroupEvent
from meshwright.gradients import (
    is_due,
    look_at_optimizers,
    warn_without_gradients,
)
from meshwright.tensor_parallel.checks.equality import (
    Exchange,
    held_whole,
    verify_gradients,
    verify_inputs,
    verify_plain,
    verify_weights,
)
from meshwright.torch_internals.autograd import running_backward
from meshwright.torch_internals.modules import forward_pre_hooks_of

_KEPT = "passes of models"


class Passes:
    """The passes of all models that are sharded over one axis, and all optimizer steps."""

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        self._check = EventCheck(axis, "the model", dict, (axis,))
        self._issued = 0
        self.late = LateNumbers()
        """Digests that the device may not have computed yet; read before the next pass."""
        self._roots: list[tuple[weakref.ref[nn.Module], _Begin]] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._trains = self._has_warned = False
        """True when a training forward has run since the last step; True after the warning about a
        step without gradients."""
        self.compared = ""
        """The name of the current pass; empty if it is not compared."""
        self.is_first = True
        """True until a style of this pass has received an input that it declares Replicate."""
        look_at_optimizers()
        hook = partial(_before_step, weakref.ref(self))
        weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    @classmethod
    def on(cls, axis: Communicator) -> Passes:
        """Return the instance of ``axis``, made on first use."""
        if _KEPT not in axis.kept:
            axis.kept[_KEPT] = cls(axis)
        return axis.kept[_KEPT]

    def compare(self, root: nn.Module, plain: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare later forward passes of ``root`` with those of the other ranks.

        The first pass compares the ``plain`` parameters, which each rank owns; that leaves time to
        load them. Those that were replaced until then are left out. Passes that a compiler traces
        are not compared.
        """
        if self.axis.is_alone:
            return
        known = [hook for hook in forward_pre_hooks_of(root).values() if isinstance(hook, _Begin)]
        begin = known[0] if known else _Begin(self, root)
        begin.expect(plain)
        if not known:
            root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            root.register_state_dict_pre_hook(settle)
            self._roots = [row for row in self._roots if row[0]() is not None]
            self._roots.append((weakref.ref(root), begin))

    def begin(self, root: str) -> None:
        """Announce a forward of ``root``. Raises CollectiveMismatchError, see `EventCheck`."""
        if self.late.coming:
            self.late.settle()
        issued = self.axis.counts.get("", 0)
        self._trains = self._trains or torch.is_grad_enabled()
        kind = "" if torch.is_grad_enabled() else " without gradients"
        since = f"{issued - self._issued} collectives after the one before"
        event = GroupEvent(f"a forward pass of {root}{kind}, {since}")
        self._issued = issued
        self._check.happens(event, if_new="a pass or left out a part of one")

    def declared_whole(self, tensor: torch.Tensor, name: str) -> None:
        """Compare an input that module ``name`` declares Replicate across ranks.

        Only the first such input of a pass, and inputs without a ``grad_fn``; nothing in a
        recomputation. Raises ValueError on all ranks, for inputs on a device before the next pass.
        """
        is_given = torch.is_grad_enabled() and tensor.grad_fn is None
        if not (self.is_first or is_given) or running_backward() != -1:
            return
        self.is_first = False
        found = held_whole(tensor, self.axis, tensor)
        if found is not None:
            exchange = self.exchange(f"the input of {name} in {self.compared}")
            given, weights = (f"the input of {name}", found), self._without_style
            where, late = self.compared, self.late
            verify_inputs(self.axis, given, exchange, late, where=where, weights=weights)

    def exchange(self, what: str) -> Exchange:
        """Make an exchange through the store, at the event ``what``."""
        return partial(self._check.exchange, GroupEvent(what))

    def step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Compare gradients before a step of ``optimizer``, if a comparison is due.

        Raises `LayoutError` on all ranks if those of a replicated parameter differ.
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
        """Yield trained parameters of ``root`` on this axis that no optimizer of torch steps."""
        groups = [group for optimizer in self._steps for group in optimizer.param_groups]
        stepped = {id(p) for group in groups for each in group["params"] for p in singles_of(each)}
        plain = {name for name, _ in begin.plain_of(root)}
        for name, parameter in root.named_parameters():
            is_trained = parameter.requires_grad and id(parameter) not in stepped
            if is_trained and (name in plain or self._is_over_axis(parameter)):
                yield name, parameter

    def _held_whole(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self._without_style()}
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(p for each in listed for p in singles_of(each)):
            if id(parameter) in names:
                yield names[id(parameter)], parameter
            elif self._is_over_axis(parameter):
                yield f"its parameter {number}", parameter

    def _without_style(self) -> list[tuple[str, nn.Parameter]]:
        roots = [(root, begin) for held, begin in self._roots if (root := held()) is not None]
        return [row for root, begin in roots for row in begin.plain_of(root)]

    def _is_over_axis(self, parameter: torch.Tensor) -> bool:
        rest = known_at_rest(parameter)
        if rest is None or held_whole(parameter, self.axis, parameter) is None:
            return False
        return any(a.ranks == self.axis.ranks for a in mesh_communicators(rest.mesh, "tensor"))


def check_whole(tensor: torch.Tensor, axis: Communicator, name: str) -> None:
    """Call `Passes.declared_whole` if the current pass on ``axis`` is compared."""
    passes: Passes | None = axis.kept.get(_KEPT)
    if passes is not None and passes.compared:
        passes.declared_whole(tensor, name)


def _before_step(
    passes: weakref.ref[Passes],
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Step pre-hook of all optimizers; the weak reference lets ``passes`` die."""
    found = passes()
    if found is not None and not torch.compiler.is_compiling():
        found.step(optimizer, has_closure=len(args) > 1 or bool(kwargs))


class _Begin:
    """Forward pre-hook of one root; copies of the module share it."""

    def __init__(self, passes: Passes, root: nn.Module) -> None:
        self._passes = passes
        self._root = type(root).__name__
        self._number = 0
        self._plain: dict[str, tuple[int, bool]] = {}
        """Parameters without a style, by name: their ``id``, and whether they were on meta."""
        self._is_verified = False

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
            late, is_late = passes.late, not passes.axis.is_on_host
            verify_weights(passes.axis, trained, exchange, late, is_late=is_late)
        passes.compared = f"pass {self._number} of one {self._root}" if is_due(self._number) else ""
        passes.is_first = True

    def __deepcopy__(self, memo: object) -> _Begin:
        return self

    def plain_of(self, root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters without a style that are the same objects, or DTensors by now."""
        for name, parameter in root.named_parameters():
            known, was_empty = self._plain.get(name, (0, False))
            is_same = not parameter.is_meta and (known == id(parameter) or was_empty)
            if known and (is_dtensor(parameter) or is_same):
                yield name, parameter
