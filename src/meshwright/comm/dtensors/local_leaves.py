"""Local leaves, on which modules compute instead of DTensor parameters, and their gradients.

A leaf shares the storage of this rank's part of its parameter. Gradients that autograd accumulates
in it are moved to ``.grad`` of the parameter, as a DTensor with the same placement. Gradients
requested for the parameter itself are DTensors, too: see `local_part_of`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial

from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.after_hooks import defer_hooks, hooks_in, run_after_hooks
from meshwright.comm.dtensors.dtensor import dtensor_like, local_of, mesh_communicators
from meshwright.comm.graphs.untraced import apart
from meshwright.torch_internals.autograd import (
    accumulates,
    at_end_of_backward,
    backward_hooks_of,
    is_executed,
    running_backward,
)
from meshwright.torch_internals.tensors import local_tensor_of
from meshwright.torch_internals.tracing import not_traced

_HELD = "_meshwright_local_leaf"


class _Held:
    """The leaf of one parameter. A copy of the parameter makes its own leaf."""

    __slots__ = (
        "__weakref__",
        "in_both",
        "is_hooked",
        "is_taken",
        "leaf",
        "local",
        "parameter",
        "partial",
        "storage",
    )

    def __init__(self, parameter: nn.Parameter, leaf: nn.Parameter, local: torch.Tensor) -> None:
        self.parameter = parameter
        self.leaf = leaf
        self.local = local
        """The tensor whose storage the leaf shares: the parameter's, unless that was replaced."""
        self.storage = parameter.untyped_storage()
        """Another object as soon as something is assigned to ``.data`` of the parameter."""
        self.in_both: int | None = None
        """The last backward pass in which autograd came to both the leaf and the parameter."""
        self.is_hooked = False
        self.is_taken = False
        """True when the gradient stays with the leaf until somebody hands it over."""
        self.partial: PartialGradient | None = None
        """What gets each gradient, which is a part of a sum."""

    def hook(self) -> None:
        """Register the hook for each gradient that autograd accumulates in the leaf."""
        outside = not_traced(hand_over)
        # The garbage collector does not see what such a hook refers to: a cycle through it would
        # stay. torch converts no parameter that has weak references itself.
        vars(self.leaf)[_HELD] = self
        owner = weakref.ref(self)

        @apart
        def accumulated(leaf: torch.Tensor) -> None:
            held = owner()
            if held is None:
                return
            if torch.compiler.is_compiling():
                if not held.is_taken:
                    outside(held.parameter)
                return
            mine = vars(held.parameter).get(_HELD)
            if mine is None or mine.leaf is not leaf:
                raise RuntimeError(
                    f"a backward pass reached a parameter of local shape {tuple(leaf.shape)} that "
                    "was converted after its forward pass: run the forward pass again"
                )
            if not mine.is_taken:
                hand_over(held.parameter)

        self.leaf.register_post_accumulate_grad_hook(accumulated)
        self.is_hooked = True

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def local_leaf(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local leaf, on which modules compute instead of ``parameter``, a DTensor.

    * It shares the storage of this rank's part, so it sees what an optimizer writes. Each DTensor
      parameter has one: tied modules get the same. Converting the module (``.to()``,
      ``to_empty()``) or assigning another local tensor makes a new one on the next call, so do
      not keep it from one forward to the next.
    * ``requires_grad`` is that of ``parameter`` at the time of the call.
    * As soon as autograd has accumulated into its ``.grad``, `hand_over` moves that to
      ``parameter``, as a DTensor placed alike on the same storage; the leaf's ``.grad`` is None
      outside of a backward. `take_over` disables this for callers that hand it over themselves.
    * It has no name and is in no module's ``parameters()``.

    Raises RuntimeError for a DTensor whose ``.data`` was assigned since the last call.

    A parameter that is no DTensor is returned unchanged: the manager of the module has put its own
    leaf there.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    held = vars(parameter).get(_HELD)
    if held is None or held.local is not local_tensor_of(parameter):
        local = local_tensor_of(parameter)
        requires_grad = parameter.requires_grad
        leaf = nn.Parameter(local.detach(), requires_grad=requires_grad)
        held = _Held(parameter, leaf, local)
        vars(parameter)[_HELD] = held
    elif held.storage is not parameter.untyped_storage():
        raise RuntimeError(
            "something was assigned to .data of a parameter of shape "
            f"{tuple(parameter.shape)}, which is a DTensor: torch leaves its values as they were. "
            "Use copy_() under torch.no_grad(), or load a state dict"
        )
    leaf = held.leaf
    if leaf.requires_grad is not parameter.requires_grad:
        leaf.requires_grad_(parameter.requires_grad)
    if not held.is_hooked and leaf.requires_grad:
        held.hook()
    return leaf


def local_part_of(parameter: torch.Tensor, add: PartialGradient | None = None) -> torch.Tensor:
    """Return what a module computes with in place of ``parameter``: its `local_leaf`, in its graph.

    A backward pass accumulates in the leaf. If gradients of ``parameter`` itself are requested
    (`torch.autograd.grad`, ``inputs=``), or a graph of them, they are DTensors, as for a DTensor
    that is computed from others (`torch.func.functional_call` may pass one). ``add`` is the
    argument of `sum_partial`.
    """
    if isinstance(parameter, DTensor) and not parameter.is_leaf:
        return parameter.to_local(grad_placements=_of_gradient(parameter, add))
    given = cast("nn.Parameter", parameter)
    leaf = local_leaf(given) if add is None else sum_partial(given, add)
    if leaf is parameter or not (leaf.requires_grad and torch.is_grad_enabled()):
        return leaf
    # In this order autograd fills the parameter before the leaf, whose hook then finds both.
    return _InGraph.apply(parameter, leaf, vars(parameter)[_HELD])


def _of_gradient(parameter: DTensor, add: PartialGradient | None) -> list[Any]:
    """List the placements of the gradient that a backward pass computes for ``parameter``."""
    if add is None:
        return list(parameter.placements)
    axes, over = mesh_communicators(parameter.device_mesh, "tensor"), add.communicator.ranks
    pairs = zip(axes, parameter.placements, strict=True)
    return [TorchPartial() if axis.ranks == over else placed for axis, placed in pairs]


class _InGraph(torch.autograd.Function):
    """A leaf, computed from itself and its parameter: a gradient goes to one of the two.

    Autograd would otherwise continue to both, and run hooks of a parameter without a gradient.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - a node, which has no public type
        parameter: DTensor,
        leaf: torch.Tensor,
        held: _Held,
    ) -> torch.Tensor:
        ctx.held = held
        return leaf.detach()  # no view: autograd rejects writes to those, and ``max_norm`` writes

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        held: _Held = ctx.held
        parameter: Any = held.parameter
        # A leaf that is taken over is reduced by its owner, also with a graph.
        is_wanted = held.is_taken or not torch.is_grad_enabled()
        to_leaf = is_wanted and is_executed(ctx.next_functions[1][0])
        defer_hooks(parameter, is_elsewhere=to_leaf)
        if to_leaf:
            if held.is_taken and accumulates(ctx.next_functions[0][0]):
                held.in_both = running_backward()
            return None, grad, None
        if held.is_taken and accumulates(ctx.next_functions[0][0]):
            raise RuntimeError(
                f"backward(inputs=...) names a parameter of shape {tuple(parameter.shape)} whose "
                "gradient is reduced over data ranks, too: its .grad would be this rank's alone. "
                "Call backward() without inputs, and requires_grad_(False) on what should not "
                "train, or take this rank's gradient with torch.autograd.grad"
            )
        part = DTensor.from_local(
            grad,
            parameter.device_mesh,
            _of_gradient(parameter, held.partial),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        placements = parameter.placements
        return part if held.partial is None else part.redistribute(None, placements), None, None


def comes_to_both(parameter: nn.Parameter) -> bool:
    """Whether this backward pass calls hooks of a taken-over leaf and of ``parameter``."""
    held = vars(parameter).get(_HELD)
    return held is not None and held.in_both == running_backward()


def is_taken_over(parameter: torch.Tensor) -> bool:
    """Whether the gradient of the leaf stays there, see `take_over`."""
    held = vars(parameter).get(_HELD)
    return held is not None and held.is_taken


def give_up(parameter: nn.Parameter) -> None:
    """Undo `take_over`."""
    held = vars(parameter).get(_HELD)
    if held is not None:
        held.is_taken = False


def take_over(parameter: nn.Parameter) -> nn.Parameter:
    """Return its `local_leaf`, whose gradient stays there until the caller calls `hand_over`.

    For a data-parallel unit, which first reduces the gradient of the leaf over its axes. Call it
    wherever `local_leaf` would be called: it applies to the leaf, not to the parameter.
    """
    leaf = local_leaf(parameter)
    if leaf is not parameter:
        vars(parameter)[_HELD].is_taken = True
    return leaf


def sum_partial(parameter: nn.Parameter, add: PartialGradient) -> nn.Parameter:
    """Return the `local_leaf` of ``parameter`` and have ``add`` sum its gradient over ranks.

    `hand_over` calls ``add(parameter, gradient)``, which calls `deliver`, now or later.
    """
    leaf = local_leaf(parameter)
    if leaf is not parameter:
        vars(parameter)[_HELD].partial = add
    return leaf


def is_summed_at_end(leaf: torch.Tensor) -> bool:
    """Check whether the gradient of ``leaf`` is summed with others when a backward pass ends.

    The ranks of the sum then have to run the same backward passes.
    """
    held = vars(leaf).get(_HELD)
    return isinstance(held, _Held) and held.leaf is leaf and held.partial is not None


def hand_over(parameter: nn.Parameter) -> None:
    """Move the gradient of the leaf of ``parameter`` to ``parameter.grad``, adding to any there.

    Nothing happens when the leaf has none. A partial gradient arrives at the end of the current
    backward pass, or at once when there is none. Hooks registered on ``parameter`` run as if
    autograd had accumulated into it.

    Raises RuntimeError for a gradient with its own graph (``create_graph=True``), on a leaf that
    was taken over.
    """
    held = vars(parameter).get(_HELD)
    gradient = None if held is None else held.leaf.grad
    if held is None or gradient is None:
        return
    held.leaf.grad = None  # first: what raises below leaves nothing that the next pass would add to
    if gradient.requires_grad:
        raise RuntimeError(
            f"a gradient of shape {tuple(gradient.shape)} has a graph of its own, which a DTensor "
            "parameter cannot keep: call backward without create_graph=True, or differentiate "
            "with respect to inputs (torch.autograd.grad) and call backward on the result"
        )
    if held.partial is not None:
        held.partial(parameter, gradient)
    else:
        deliver(parameter, gradient)


@torch.no_grad()
def deliver(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add ``gradient``, this rank's part, to ``parameter.grad``, or set it without a copy."""
    for hook in hooks_in(backward_hooks_of(parameter)):
        changed = hook(dtensor_like(gradient, parameter))
        gradient = gradient if changed is None else local_of(changed)
    add_to_gradient(parameter, gradient)
    run_after_hooks(parameter)


def add_to_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add this rank's part of a gradient to ``parameter.grad``, or set it."""
    given = parameter.grad
    if given is None:
        parameter.grad = dtensor_like(gradient, parameter)
        return
    is_at_rest = isinstance(parameter, DTensor) and isinstance(given, DTensor)
    if is_at_rest and given.placements != parameter.placements:
        # From an operator on the DTensor itself: a part of a sum, or a whole.
        given = parameter.grad = given.redistribute(placements=parameter.placements)
    local_of(given).add_(gradient)


# ------------------------------------------------------- gradients that are parts of a sum


class _Waiting(NamedTuple):
    number: int
    parameter: nn.Parameter
    gradient: torch.Tensor


class PartialGradient:
    """Sums the gradient of one parameter over ``communicator``, for `sum_partial`.

    A parameter that every rank holds but uses on different elements of its activations gets a
    different gradient on each rank, and needs their sum. All such gradients of a backward pass and
    axis are summed together: one all-reduce for each dtype.

    All ranks create these objects in the same order, which is the order within the sum.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._number = communicator.number("partial gradients")

    def __deepcopy__(self, memo: object) -> PartialGradient:
        return self

    def __call__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Deliver the sum at the end of this backward pass; at once outside of one."""
        communicator = self.communicator
        given = _Waiting(self._number, parameter, gradient)
        task = running_backward()
        if task == -1:
            _sum(communicator, [given])
            return
        waiting = communicator.unsummed.setdefault(task, [])
        waiting.append(given)
        if len(waiting) == 1:  # the first of a pass, which sums at its end for all

            @apart
            def end_backward() -> None:
                _sum(communicator, communicator.unsummed.pop(task))

            at_end_of_backward(end_backward)


def forget_unsummed(communicator: Communicator) -> None:
    """Drop what a backward pass that raised has left. Called when a forward pass begins."""
    if communicator.unsummed and running_backward() == -1:
        communicator.unsummed.clear()


@torch.no_grad()
def _sum(communicator: Communicator, waiting: Sequence[_Waiting]) -> None:
    """Add up and deliver, in the order in which the parameters were numbered."""
    by_dtype: dict[torch.dtype, list[_Waiting]] = {}
    for given in sorted(waiting, key=lambda given: given.number):
        by_dtype.setdefault(given.gradient.dtype, []).append(given)
    for together in by_dtype.values():
        gradients = [given.gradient for given in together]
        line = torch.cat([gradient.reshape(-1) for gradient in gradients])
        communicator.all_reduce(line, label="partial gradients").wait()
        parts = line.split([gradient.numel() for gradient in gradients])
        for given, part in zip(together, parts, strict=True):
            deliver(given.parameter, part.view(given.gradient.shape))
