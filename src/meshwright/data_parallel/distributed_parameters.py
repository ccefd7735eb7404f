"""How data parallelism handles parameters that are DTensors on axes of tensor parallelism.

Modules that compute on local tensors are marked, see `LocalComputation`; all others compute on the
DTensors. Data-parallel sums run over the data axes only, on this rank's local tensors.

A replica reduces the gradient of a *leaf*, a plain parameter over the same storage. The registered
parameter stays a DTensor::

    a backward begins   its ``.grad`` is lent to the leaf: the same memory
    a gradient arrives  autograd adds it to the leaf, or to the parameter, from where it is moved
    the backward ends   the leaf's gradient, now the mean, is given back

The gradient of an expert is a sum over the ranks that exchange samples. It is divided by their
number as it comes, before it is added to ``.grad``, and becomes the mean over the ranks that hold
the same expert. So all gradients have one divisor, and a second reduction leaves the first alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.comm import Communicator
from meshwright.comm.dtensors.after_hooks import Own, defer_hooks, run_after_hooks
from meshwright.comm.dtensors.dtensor import (
    AtRest,
    dtensor_like,
    is_dtensor,
    is_replicated,
    known_at_rest,
    local_gradient,
    local_of,
    mesh_communicators,
)
from meshwright.comm.dtensors.exchanging import NO_EXPERTS, ExpertRanks
from meshwright.comm.dtensors.local_leaves import (
    add_to_gradient,
    comes_to_both,
    give_up,
    local_leaf,
    take_over,
)
from meshwright.comm.dtensors.sharded_axes import refuse_spread, spread_over
from meshwright.comm.graphs.untraced import apart, constant
from meshwright.gradients import look_at_optimizers
from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    running_backward,
)

MARK = "_meshwright_style"
"""The attribute of a module that holds its `LocalComputation`."""


class PartialSum(Protocol):
    """Sums a gradient of which each rank of another axis has a part (a Partial)."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of that axis."""

    def __call__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add the sum to ``parameter.grad``, at the latest at the end of this backward pass."""


class LocalComputation(Protocol):
    """The value of `MARK` on a module that computes on local tensors of DTensor parameters.

    It applies to the modules inside, too.
    """

    @property
    def partial(self) -> Sequence[tuple[str, str, PartialSum]]:
        """List parameters whose gradients are summed over an axis: (path, name, `PartialSum`)."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """Whether one DTensor parameter computes as a local tensor, and how its gradient is summed."""

    is_local: bool = False
    """True when every module that holds it computes on a plain tensor in its place."""
    partial: PartialSum | None = None
    experts: ExpertRanks | None = None
    """The ranks of its experts, whose gradients are sums over some of them already."""


def local_parameters(
    module: nn.Module, experts: Mapping[int, ExpertRanks] = NO_EXPERTS
) -> Mapping[int, LocalParameter]:
    """Map the ``id`` of each DTensor parameter below ``module`` to how it computes."""
    inside: set[nn.Module] = set()
    sums: dict[tuple[nn.Module, str], PartialSum] = {}
    for part in module.modules():
        computation: LocalComputation | None = vars(part).get(MARK)
        if computation is not None:
            inside.update(part.modules())
            for path, key, add in computation.partial:
                sums[part.get_submodule(path), key] = add
    found: dict[int, LocalParameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None or not is_dtensor(parameter):
                continue
            before = found.get(id(parameter), LocalParameter(is_local=True))
            found[id(parameter)] = LocalParameter(
                is_local=before.is_local and part in inside,
                partial=before.partial or sums.get((part, key)),
                experts=experts.get(id(parameter)),
            )
    return found


def computing(parameter: nn.Parameter, local: Mapping[int, LocalParameter]) -> nn.Parameter:
    """Return the tensor that modules compute with: the local leaf of a DTensor, if it has one."""
    known = local.get(id(parameter))
    return local_leaf(parameter) if known is not None and known.is_local else parameter


def check_axes(name: str, known: AtRest, communicator: Communicator) -> None:
    """Raise ValueError where ranks of ``communicator``, a data axis, hold parts of one DTensor."""
    for axis, placement in zip(mesh_communicators(known.mesh), known.placements, strict=True):
        shared = sorted({*axis.ranks} & {*communicator.ranks})
        if len(shared) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor placed {placement} over axis {axis.axis!r}, "
                f"which has the ranks {shared} in common with the data axis "
                f"{communicator.axis!r}: a mean over them would mix gradients of other parts. "
                'Pass the data axes of the mesh alone, for example mesh["replicate"]'
            )


def cut_axes(outer: AtRest | None, shard: Communicator | None) -> tuple[Communicator, ...]:
    """Return the axes that cut a tensor: ``shard``, and those that cut it as ``outer``."""
    own = () if shard is None else (shard,)
    if outer is None:
        return own
    axes = zip(mesh_communicators(outer.mesh), outer.placements, strict=True)
    return (*own, *(axis for axis, placement in axes if not is_replicated(placement)))


def mark_spread(
    line: nn.Parameter,
    outers: Sequence[AtRest | None],
    shard: Communicator | None,
    name: str,
    *,
    is_line: bool = True,
) -> None:
    """Mark which axes spread a parameter's elements, for sums over parameters (gradient norm).

    ``line`` holds parts of the tensors that were ``outers``. Such a sum is refused if they are
    spread in several ways; ``name`` is the first of them. Without ``is_line`` it is one parameter.
    """
    look_at_optimizers()
    cuts = {cut_axes(outer, shard) for outer in outers}
    if len(cuts) > 1:
        refuse_spread(
            line,
            f"the flat parameter of {name!r} and {len(outers) - 1} more holds some that tensor "
            "parallelism has cut and some that it replicates: take the norm of the parameters "
            "themselves, or by clip_grad_norm_ of the FullyShardedDataParallel",
        )
    else:
        spread_over(line, cuts.pop(), is_line=is_line)


ARRIVED, CAME_EMPTY = 1, 2
"""A gradient in this backward pass; one that a function of the graph has left undefined."""


class ReadyCounters:
    """Counts the gradients that a backward pass has yet to produce. Holds no tensor: hooks own it.

    Hooks count in it while `is_open`. They leave the rest to the reducer: the first gradient of a
    pass, the last of a bucket, a second one of a parameter, one that is None.
    """

    def __init__(self) -> None:
        self.is_open = False
        """True in a pass that reduces in hooks."""
        self.homes: Sequence[tuple[bytearray, int, int] | None] = ()
        """Of each parameter the marks of its bucket, its place in them, and the bucket's number."""
        self.missing: list[int] = []
        """Of each bucket, the parameters without a gradient so far in this backward pass."""


class _Lent:
    """One DTensor parameter and the leaf that is reduced in its place."""

    __slots__ = ("came_in", "leaf", "local", "parameter")

    def __init__(self, parameter: nn.Parameter, local: LocalParameter) -> None:
        self.parameter = parameter
        self.local = local
        self.leaf = take_over(parameter)
        self.came_in: int | None = None
        """The last backward pass in which the gradient of the leaf has come."""

    def hook(self, arrived: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
        """Call ``arrived`` when this rank's gradient is complete, until the handles are removed.

        The parameter has a gradient of its own where a model reads it beside its layer, for example
        in a functional call. In a pass with both, the leaf's hook collects it; one that comes later
        is a second arrival, which the reducer adds or refuses.
        """

        @apart
        def came(tensor: torch.Tensor) -> None:
            if torch.compiler.is_compiling():
                if tensor is not self.parameter or not self.local.is_local:
                    arrived(tensor)
            elif tensor is not self.parameter:
                self.came_in = running_backward()
                arrived(self.leaf)
            elif not comes_to_both(self.parameter) or (
                self.came_in == running_backward() and self.parameter.grad is not None
            ):
                arrived(self.leaf)

        handles = [
            self.leaf.register_post_accumulate_grad_hook(came),
            self.parameter.register_post_accumulate_grad_hook(Own(came)),
        ]
        if self.local.experts is not None:
            handles.append(self.leaf.register_hook(self._shared))
        if self.local.is_local:
            handles.append(self.leaf.register_hook(self._by_hooks_of_parameter))
        return handles

    def _shared(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divide the gradient of experts by the ranks that it is a sum over."""
        assert self.local.experts is not None
        return gradient / self.local.experts.exchange.size

    def lend(self) -> None:
        """Move the gradient that the parameter has so far to the leaf."""
        parameter, given, like = self.parameter, self.parameter.grad, known_at_rest(self.parameter)
        if given is None or like is None:
            return
        gradient = local_gradient(given, like, ())
        assert gradient is not None
        partial_sum = self.local.partial
        if partial_sum is not None:
            if backward_hooks_of(parameter):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a hook, and a gradient "
                    "from before that would go through it once more: its gradient is a sum over "
                    f"axis {partial_sum.communicator.axis}. Zero gradients before each backward, "
                    "or use register_post_accumulate_grad_hook"
                )
            if partial_sum.communicator.rank:
                gradient.zero_()  # what was summed before counts once in the next sum
        if self.leaf.grad is not None:
            gradient.add_(self.leaf.grad)
        self.leaf.grad, parameter.grad = gradient, None

    def give_back(self) -> None:
        """Add the leaf's gradient to the parameter's, as autograd would have."""
        parameter, gradient = self.parameter, self.leaf.grad
        if gradient is None:
            return
        if gradient.requires_grad:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} has a graph of its own, which a "
                "DTensor parameter cannot keep: call backward without create_graph=True"
            )
        self.leaf.grad = None
        if self.local.partial is not None:
            self.local.partial(parameter, gradient)
            return
        add_to_gradient(parameter, gradient)
        if self.local.is_local:
            run_after_hooks(parameter)

    @constant
    def _has_hooks(self) -> bool:
        return bool(backward_hooks_of(self.parameter))

    def give_up(self) -> None:
        """Give back the gradients of an unfinished pass, except partial sums, which are lost."""
        if self.local.partial is not None:
            self.leaf.grad = None
        self.give_back()

    def _by_hooks_of_parameter(self, gradient: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and not self._has_hooks():
            return gradient
        if self.local.partial is None:  # those of a sum run when it is there
            for hook in tuple((backward_hooks_of(self.parameter) or {}).values()):
                changed = hook(dtensor_like(gradient, self.parameter))
                gradient = gradient if changed is None else local_of(changed)
        return gradient


class ReducedLeaves:
    """The tensors that a replica reduces: plain parameters, and the leaves of DTensors."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        local: Mapping[int, LocalParameter],
    ) -> None:
        self.lent = {
            index: _Lent(parameter, local.get(id(parameter), LocalParameter()))
            for index, parameter in enumerate(parameters)
            if is_dtensor(parameter)
        }
        """Those that are DTensors, by their position."""
        self.parameters = tuple(
            self.lent[index].leaf if index in self.lent else parameter
            for index, parameter in enumerate(parameters)
        )
        """In the order given."""
        self._given = tuple(parameters)
        self._hooked: dict[int, list[RemovableHandle]] = {}
        """The hooks on each parameter that has some, by its position."""
        self._is_lent = False
        # Parameters may outlive their reducer: a model whose wrapper is gone.
        leaving = [lent.parameter for lent in self.lent.values()]
        self._last = weakref.finalize(self, _let_go, self._hooked, leaving)
        self._last.atexit = False  # pyrefly: ignore[missing-attribute]

    def follow(self) -> set[int]:
        """Look up the leaves again, in each forward; returns the positions that changed."""
        for lent in self.lent.values():
            if lent.local.is_local:  # `give_back` runs its hooks, with the mean
                defer_hooks(lent.parameter, is_elsewhere=True)
        changed = {n for n, lent in self.lent.items() if take_over(lent.parameter) is not lent.leaf}
        if changed:
            found = list(self.parameters)
            for index in changed:
                lent = self.lent[index]
                found[index] = lent.leaf = take_over(lent.parameter)
                for handle in self._hooked.pop(index, ()):
                    handle.remove()
            self.parameters = tuple(found)
        return changed

    def hook_trainable(
        self,
        counters: ReadyCounters,
        arrived: Callable[[int, torch.Tensor], None],
        arrived_at_leaf: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Call ``arrived``, for DTensors ``arrived_at_leaf``, with each complete gradient's index.

        Both are methods; hooks do not keep their object alive. Arrivals that ``counters`` can
        handle are counted there instead. Parameters that do not require grad get no hook yet.
        """
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad or index in self._hooked:
                continue
            if index in self.lent:
                hook = _weakly(arrived_at_leaf, index, counters)
                self._hooked[index] = self.lent[index].hook(hook)
            else:
                hook = _weakly(arrived, index, counters)
                self._hooked[index] = [parameter.register_post_accumulate_grad_hook(hook)]

    def release(self) -> None:
        """Remove all hooks, before other parameters take the place of these."""
        self._last()
        self._hooked.clear()

    @property
    def has_hooks_of_others(self) -> bool:
        """True when gradients pass foreign hooks before they are reduced."""
        found = sum([len(backward_hooks_of(p) or ()) for p in self._given])
        found += sum([len(after_hooks_of(p) or ()) for p in self._given])
        return found > len(self._hooked)

    @torch.no_grad()
    def lend(self) -> None:
        """Begin a backward that reduces: lend gradients to the leaves."""
        self._is_lent = True
        for lent in self.lent.values():
            lent.lend()

    @torch.no_grad()
    def collect(self, index: int) -> None:
        """Collect the gradient of parameter ``index``, complete on this rank, to be reduced."""
        self.lent[index].lend()

    @torch.no_grad()
    def take(self, index: int, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's part of ``.grad`` of parameter ``index``, and set it to None."""
        if index in self.lent:
            self.lent[index].lend()
            parameter = self.lent[index].leaf
        gradient, parameter.grad = parameter.grad, None
        return gradient

    @torch.no_grad()
    def deliver(self, index: int, gradient: torch.Tensor) -> None:
        """Set ``gradient``, from a compiled backward, for parameter ``index``, a DTensor."""
        lent = self.lent[index]
        lent.leaf.grad = gradient
        lent.give_back()

    @torch.no_grad()
    def keep(self, index: int) -> None:
        """Keep the complete gradient of parameter ``index`` on this rank, without a reduction."""
        lent = self.lent[index]
        if not lent.local.is_local:
            lent.lend()  # what autograd left may be a part of a sum
        elif lent.leaf.grad is None and lent.parameter.grad is not None:
            run_after_hooks(lent.parameter)
        lent.give_back()

    @torch.no_grad()
    def give_back(self) -> None:
        """End a backward: give the means from the leaves back to the DTensors."""
        self._is_lent = False
        for lent in self.lent.values():
            lent.give_back()

    @torch.no_grad()
    def give_up(self) -> None:
        """Abandon a backward that did not finish."""
        if self._is_lent:
            self._is_lent = False
            for lent in self.lent.values():
                lent.give_up()


def _weakly(
    method: Callable[[int, torch.Tensor], None], index: int, counters: ReadyCounters
) -> Callable[[torch.Tensor], None]:
    """Make a hook that calls ``method`` with ``index`` for as long as its object lives.

    The garbage collector does not see references from hooks of accumulated gradients: a reducer
    held by them would leak with its parameters, buffers and communicator. Expected gradients that
    are not the last of their bucket, the most frequent case, are counted here directly.
    """
    bound = cast("MethodType", method)
    owner, function = weakref.ref(bound.__self__), bound.__func__

    @apart
    def arrived(parameter: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and counters.is_open:
            home = counters.homes[index]
            if home is not None:
                flags, place, number = home
                if not flags[place] and parameter.grad is not None:
                    left = counters.missing[number] - 1
                    if left > 0:
                        flags[place] = ARRIVED
                        counters.missing[number] = left
                        return
        reducer = owner()
        if reducer is not None:
            function(reducer, index, parameter)

    return arrived


def _let_go(
    hooked: Mapping[int, Sequence[RemovableHandle]], parameters: Sequence[nn.Parameter]
) -> None:
    for handles in hooked.values():
        for handle in handles:
            handle.remove()
    for parameter in parameters:
        give_up(parameter)
