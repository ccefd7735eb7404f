"""Module hooks and autograd hooks that gather, free and reduce units in an iteration.

::

    before a module's forward    gather its unit, show full parameters, watch its inputs
    after it                     free the unit, watch its outputs
    gradient of an output        gather the unit again, and the one that ran before it
    gradient of all inputs       take the unit's gradients, start their reduction, free the unit
    end of the backward          reduce what is left, wait, set ``.grad``

The root is the first module of a tree to run forward. Its `Iteration` knows all units below it. In
torch's profiler each of these is a range, with the names that torch uses::

    FSDP::pre_forward (layers.0)    FSDP::post_forward     FSDP::pre_backward    FSDP::post_backward
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from meshwright.comm.graphs.untraced import apart, untraced
from meshwright.data_parallel.checks.starting_state import StartingBuffer
from meshwright.data_parallel.modules.nested import (
    Loan,
    cast,
    cloned,
    map_tensors,
    tensors_in,
    tensors_kept_by,
)
from meshwright.data_parallel.sharded_modules.agreement import check_meta, compare_values
from meshwright.data_parallel.sharded_modules.iteration import Iteration
from meshwright.data_parallel.sharded_modules.module_tree import ModuleTree, PlacesIn
from meshwright.data_parallel.shards.replaced_parameters import converted
from meshwright.data_parallel.shards.unit import Phase, Unit
from meshwright.torch_internals.autograd import (
    backward_hooks_of,
    forward_level,
    function_transforms,
    is_profiled,
    running_backward,
)
from meshwright.torch_internals.tracing import is_backward_compiled
from meshwright.torch_internals.trees import tree_leaves

ATTRIBUTE = "_meshwright_driver"
NOBODY: Sequence[Driver] = ()


def attach(module: nn.Module, driver: Driver) -> None:
    """Store ``driver`` on ``module``, where roots find it."""
    module.__dict__[ATTRIBUTE] = driver


def driver_of(module: nn.Module) -> Driver | None:
    """The driver of ``module``; None without one."""
    return module.__dict__.get(ATTRIBUTE)


def _unit_of(module: nn.Module) -> Unit | None:
    driver = driver_of(module)
    return None if driver is None else driver.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSettings:
    """The dtypes that floating-point inputs and outputs of a module are cast to, if any."""

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


class Driver:
    """Drives one unit (None for modules without parameters of their own) from module hooks."""

    _before: Driver | None = None  # its backward follows the current one
    _began = 0  # how many forwards had ended when its last one began

    def __init__(
        self,
        unit: Unit | None,
        name: str = "",
        *,
        cast: CastSettings | None = None,
        in_detail: bool = False,
        parts: Iterable[nn.Module] = (),
        ignored: PlacesIn = (),
        buffers: Sequence[StartingBuffer] = (),
        keeps_as_root: bool = False,
        stops_on_non_finite: bool = False,
    ) -> None:
        """``ignored`` maps modules to parameters that were left out on purpose.

        ``buffers`` must be equal on all ranks before the first step.
        """
        self.unit = unit
        self.ignored = ignored
        self.buffers = buffers
        """Compared when the root starts, and forgotten then."""
        self.name = name
        self.cast = cast or CastSettings()
        self.in_detail = in_detail
        """The order check of a root: see `Ledger`."""
        self.iteration: Iteration | None = None
        """The state that the units of one root share; None before the first forward."""
        self.is_root = self.is_below = False
        """True when it is the first of its iteration, or another one of it."""
        self.keeps_as_root = keeps_as_root
        """True when a root keeps its parameters between forward and backward by default."""
        self.forward_ahead: list[Driver] | None = None
        """Whose units to gather ahead in the forward, instead of the one that came next before."""
        self.backward_ahead: list[Driver] | None = None
        """The same for the backward."""
        self.is_last_backward = True
        """True when backward passes deliver gradients; that of the root counts."""
        self.stops_on_non_finite = stops_on_non_finite
        """True where ranks stop at non-finite gradients; one driver's True counts for the root."""
        self.most_in_flight: int | None = None
        """The most reductions under way that its unit allows; the largest counts for the root."""
        self.without_effect: dict[str, object] = {}
        """Settings that were accepted and change nothing here, with their last values."""
        self.position = -1
        """Its place among the units whose forward has ended, at its last forward."""
        self.residency: object | None = None
        """The object by which a schedule drives this unit, once it has been asked for."""
        self.is_driven = False
        """True while a schedule or a wrapped method gathers and frees, so that hooks need not."""
        self._is_shown = False  # within a range of the profiler
        self._parts = frozenset(map(id, parts))
        self._to_run: set[int] = set()
        self._below: dict[nn.Module, list[nn.Module]] = {}
        self.loans: list[Loan | None] = []
        """Lists and dicts that running forwards have been given; None where there are none."""
        self._uses = 0
        """Forwards whose backward has not ended in the current pass."""
        self._in_graphs = 0
        """Forwards in living graphs, which may run again where they are kept."""
        self._is_inner = False  # True when its last forward watched gradients of inputs
        self._unseen: _GradientHooks | None = None  # None while outputs announce its backward
        self.has_run = False
        """True while its forward has run and its backward has not ended yet."""
        self._changes = 0
        """The number of changes of parameters, see `Unit.changes`, at the last forward."""

    # -------------------------------------------------------------------------- settings

    @property
    def has_parts(self) -> bool:
        """True where several modules form one unit."""
        return bool(self._parts)

    # ---------------------------------------------------------------------------- set-up

    def join_root(self, iteration: Iteration) -> None:
        """Join the root of ``iteration``."""
        self.iteration = iteration
        self.is_below = iteration.drivers[0] is not self

    def start(self, module: nn.Module) -> Iteration:
        """Return the iteration of this driver's root; becomes a root itself if it has none."""
        if self.iteration is not None:
            return self.iteration
        if self._parts:
            raise RuntimeError(
                f"FSDP requires a single root module but got {len(self._parts)} modules of one "
                f"unit, of which {type(module).__name__} ran first. Call fully_shard on a module "
                "that contains them, and run that"
            )
        drivers: dict[Driver, None] = {self: None}
        names = {part: name for name, part in module.named_modules()}
        for part, name in names.items():
            driver = driver_of(part)
            if driver is None or driver in drivers:
                continue
            if driver.iteration is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    "running forward through the root module first"
                )
            driver.name = driver.name or name
            drivers[driver] = None
        self.name = self.name or type(module).__name__
        for driver in drivers:
            driver.adopt_names(names)
            if driver.unit is not None:
                driver.unit.exposure.refresh(driver.unit)
        # An evaluation may come first: autograd could not use inference tensors in training later.
        with torch.inference_mode(False):
            iteration = Iteration(list(drivers), in_detail=self.in_detail)
        ignored = frozenset(place for driver in drivers for place in driver.ignored)
        iteration.look_at(module, ModuleTree(module, ignored, _unit_of, self.clean))
        check_meta(drivers)
        for driver in drivers:
            driver.check_materialized()
        compare_values(list(drivers), names)
        for driver in drivers:
            driver.join_root(iteration)
        self.is_root = True
        iteration.limit_in_flight()
        if self.keeps_as_root and self.unit is not None:
            self.unit.change(keep_full_after_forward=True)
        return iteration

    def clean(self, name: str) -> str:
        """The name by which users know a parameter."""
        return name

    def alike(self, name: str) -> str:
        """Return the name by which ranks compare the parameter that users call ``name``."""
        return name

    def adopt_names(self, modules: Mapping[nn.Module, str]) -> None:
        """Store the names of all modules, seen from the root."""

    def check_materialized(self) -> None:
        """Raise RuntimeError when parameters are not on the device they compute on."""

    # --------------------------------------------------------------------------- forward

    def prepare(self, module: nn.Module) -> None:
        """Prepare for a pass that begins in another method than the call of ``module``."""

    @apart
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: gathers the unit and prefetches the next one. Never traced."""
        if torch.compiler.is_compiling():
            if self.joins_graph(module):
                is_kept = self.cast.inputs is None
                return (args, kwargs) if is_kept else self.cast_inputs(args, kwargs)
            return untraced(self.before_forward, module, args, kwargs)
        if is_profiled() and not self._is_shown:
            with self._shown("pre_forward"):
                # Not `self.before_forward`: a subclass that extends it has called this one already.
                return Driver.before_forward(self, module, args, kwargs)
        if self.is_driven:
            if self.unit is not None:
                self.unit.wait_unshard()
            return self.cast_inputs(args, kwargs)
        self.refuse_transforms(module)
        iteration = self.iteration or self.start(module)
        is_recompute = running_backward() != -1
        following: Driver | None = None
        if not is_recompute and not self._to_run:
            if self.is_root:
                iteration.begin_forward(training=module.training)
            following = iteration.record(self)
            self._to_run.update(self._parts)
        unit = self.unit
        # A forward that is recomputed in the backward must not move it: `before_backward` reads it.
        self._began = self._began if is_recompute else len(iteration.finished)
        if unit is None:
            return self.cast_inputs(args, kwargs)
        unit.unshard(is_late=True)
        if self.forward_ahead is not None:
            for driver in self.forward_ahead:
                if driver.unit is not None:
                    driver.unit.unshard()
        elif (
            unit.settings.forward_prefetch and following is not None and following.unit is not None
        ):
            following.unit.unshard()
        unit.wait_unshard()
        if torch.is_grad_enabled():
            if not is_recompute:
                self._uses += 1
                self._in_graphs += 1
                self.has_run = True
                self._changes = unit.changes
            return self._watch_inputs(args, kwargs)
        return self.cast_inputs(args, kwargs)

    def joins_graph(self, module: nn.Module) -> bool:
        """Have the graph being traced gather the unit of ``module``; False if it cannot."""
        return False

    def leaves_graph(self, module: nn.Module) -> bool:
        """End the unit in the graph after ``module``; False where `after_forward` has to run."""
        return False

    def refuse_transforms(self, module: nn.Module) -> None:
        """Raise RuntimeError in `torch.func` transforms, and in forward-mode AD with gradients."""
        if function_transforms() is not None or (forward_level() >= 0 and torch.is_grad_enabled()):
            raise _in_transform(self.name or type(module).__name__)

    @apart
    def after_forward(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401
        """Forward hook: watches outputs and frees the unit, unless it is kept. Never traced."""
        is_traced = torch.compiler.is_compiling()
        if is_traced and not self.leaves_graph(module):
            return untraced(self.after_forward, module, args, output)
        if not is_traced and is_profiled() and not self._is_shown:
            with self._shown("post_forward"):
                return Driver.after_forward(self, module, args, output)
        loan = self.loans.pop() if self.loans else None
        escaped = loan.hand_back() if loan is not None and loan.lent else []
        dtype = self.cast.outputs
        if dtype is not None:
            output = map_tensors(partial(cast, dtype=dtype), output)
        if is_traced or self.is_driven:
            return output
        if self.unit is not None:
            output = cloned(output, where=self.unit.lends)  # views of memory freed below
        iteration = self.iteration or self.start(module)
        if running_backward() != -1:
            return output
        is_training, is_seen = torch.is_grad_enabled(), False
        if is_training:
            if self.is_root:
                output = _with_own_node(output, Driver._output_gradient)
            is_seen = self._watch_outputs(output)
            for kept in tensors_kept_by(self._below.get(module) or self._own_modules(module)):
                is_watched = self._output_gradient in (backward_hooks_of(kept) or {}).values()
                if not is_watched and (loan is None or not loan.has_given(kept)):
                    escaped.append(kept)
            if escaped:  # a loss of the unit's own, say: its gradient may come before the output's
                is_seen = self._watch_outputs(escaped) or is_seen
            if not is_seen and self._unseen is None:
                self._unseen = _expect(self.unit, iteration, output, is_inner=self._is_inner)
        if self._parts:
            self._to_run.discard(id(module))
            if self._to_run:
                return output
        if is_training:
            self.position = len(iteration.finished)
            iteration.finished.append(self)
        # Not while an outer call of the module runs, nor where no output announces its backward.
        unit = None if self.loans or self._unseen is not None else self.unit
        if unit is not None and not is_seen:  # no backward comes: no gradients, or all is frozen
            unit.reshard()
        elif (
            unit is not None
            and not unit.settings.keep_full_after_forward
            and unit.reshard(for_backward=True)
        ):
            iteration.in_blocks.append(unit)
        if self.is_root:
            is_outermost = not self.loans
            for driver in iteration.drivers:
                has_raised = is_outermost and bool(driver.loans)
                if driver._to_run or has_raised:
                    driver.leave_forward(has_raised=has_raised)
            iteration.end_forward()
        return output

    def end_without_graph(self, module: nn.Module, output: Any) -> Any:  # noqa: ANN401
        """End a forward that has disabled gradients itself: no backward goes through it."""
        if self.unit is not None and torch.is_grad_enabled() and running_backward() == -1:
            # `before_forward` has counted it, since gradients were enabled then.
            self._uses -= 1
            self._in_graphs -= 1
            self.has_run = self._uses > 0
        with torch.no_grad():
            return self.after_forward(module, (), output)

    def leave_forward(self, *, has_raised: bool) -> None:
        """End the root's forward; modules of a unit that did not run, or raised, no longer will."""
        unit = self.unit
        self._to_run.clear()
        if has_raised:
            self.loans.clear()
        if unit is not None and (has_raised or not unit.settings.keep_full_after_forward):
            unit.reshard()

    def _own_modules(self, module: nn.Module) -> Sequence[nn.Module]:
        """``module`` and the modules below it that have no driver, or this one."""
        if module not in self._below:
            self._below[module] = own = [module]
            for part in own:
                below = [each for each in part.children() if driver_of(each) in (None, self)]
                own += [each for each in below if each not in own]
        return self._below[module]

    def _watch_outputs(self, output: object) -> bool:
        is_seen = False
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient)
                is_seen = True
        return is_seen

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook the inputs: this unit's backward ends when all their gradients have arrived."""
        watched: list[torch.Tensor] = []
        give, loan = partial(self._alias, watched), None
        if kwargs or [*map(type, args)] != [torch.Tensor]:
            loan = Loan(give, self._cast_rest)
            give = loan.give
        args = tuple(map(give, args))
        if kwargs:
            kwargs = {key: give(value) for key, value in kwargs.items()}
        self.loans.append(loan)
        self._is_inner = bool(watched)
        if len(watched) == 1:
            # The same moment at less cost: to count several, torch asks which a backward reaches.
            watched[0].register_hook(self.after_backward)
        elif watched:
            torch.autograd.graph.register_multi_grad_hook(watched, self.after_backward, mode="all")
        return args, kwargs

    def _alias(self, watched: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        tensor = given if self.cast.inputs is None else cast(given, self.cast.inputs)
        if tensor.requires_grad and tensor.layout is torch.strided:  # sparse ones have no views
            # A view of its own: the input itself may have uses outside of this module.
            watched.append(tensor := tensor.view_as(tensor))
            if given.__dict__:  # a mask, say, that a program has hung on it
                tensor.__dict__.update({**given.__dict__, **tensor.__dict__})
        return tensor

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating-point inputs to the dtype of the computation, if one is set."""
        loan = None if self.cast.inputs is None else Loan(self._cast_input)
        self.loans.append(loan)  # None, too: each forward pushes one, and its `after_forward` pops
        if loan is None:
            return args, kwargs
        return loan.give(args), {key: loan.give(value) for key, value in kwargs.items()}

    def _cast_rest(self, value: Any) -> Any:  # noqa: ANN401
        return value if self.cast.inputs is None else Loan(self._cast_input).give(value)

    def _cast_input(self, value: Any) -> Any:  # noqa: ANN401
        dtype = self.cast.inputs
        return value if dtype is None else cast(value, dtype)

    # -------------------------------------------------------------------------- backward

    @apart
    def _output_gradient(self, gradient: object) -> None:
        if torch.compiler.is_compiling():
            untraced(self._output_gradient, gradient)
            return
        if is_backward_compiled():
            raise RuntimeError(
                f"the backward pass of {self.name!r} is compiled, which sharded modules do not "
                "support: hooks gather and free its parameters meanwhile. Call backward outside of "
                "compiled_autograd; what torch.compile makes of the forward pass stays compiled"
            )
        self.before_backward(gradient)

    def before_backward(self, gradient: object = None) -> None:
        """Hook of an output's gradient: gathers the unit again, and prefetches others."""
        if is_profiled() and not self._is_shown:
            with self._shown("pre_backward"):
                Driver.before_backward(self, gradient)
            return
        iteration, unit = self.iteration, self.unit
        if iteration is None:
            return
        if unit is not None and unit.changes != self._changes:
            raise converted(self.name, unit.communicators)
        if not iteration.is_in_backward:
            iteration.begin_backward()
        self._before = before = iteration.before(self)
        if unit is not None and unit.settings.unshard_in_backward:
            is_kept = unit.phase is Phase.FULL
            if not is_kept:
                unit.unshard(is_late=True)
            ahead: Sequence[Driver | None] | None = self.backward_ahead
            if ahead is None and unit.settings.backward_prefetch == "before":
                ahead = [before]
            for driver in ahead or NOBODY:
                # One output of several may come late, when those before it are done.
                if driver is None or (is_kept and not driver.has_run):
                    continue
                if driver.unit is not None and driver.unit.settings.unshard_in_backward:
                    driver.unit.unshard()
            if not is_kept:
                unit.wait_unshard()
        if before is not None and before.has_run and before.position >= self._began:
            # It ran inside this forward: tensors it hid may come before its output's hook runs.
            inner = before.unit
            if inner is not None and inner.settings.unshard_in_backward:
                inner.wait_unshard()

    @apart
    def after_backward(self, gradient: object = None) -> None:
        """Hook of the inputs' gradients: reduces parameter gradients and frees the unit."""
        iteration, unit = self.iteration, self.unit
        if iteration is not None:
            if not iteration.is_in_backward:
                iteration.begin_backward()
            if iteration.makes_graph:  # which is run again: that pass is this unit's
                return
        self._uses -= 1
        # Other forwards of it have their backward still to come: gradients are not complete.
        if self._uses > 0 or iteration is None or unit is None:
            return
        before, self._before = self._before, None
        other = None if before is None or not before.has_run else before.unit
        if other is not None and unit.settings.backward_prefetch == "after":
            other.unshard()
        self._end(iteration, unit, is_due=True)
        # Its backward is next: tensors it hid may be read before its output's hook runs.
        if other is not None and other.settings.unshard_in_backward:
            other.wait_unshard()

    def finish_backward(self, iteration: Iteration) -> None:
        """End the whole backward pass: finish units that no input gradient has finished."""
        unit, has_run = self.unit, self.has_run
        if not iteration.keeps_graph:
            self._in_graphs = 0
            self._unseen = self._unseen and self._unseen.stop()
        # A kept graph may run again: each forward in it has its backward before it once more.
        self._uses, self.has_run = self._in_graphs, False
        self.loans.clear()  # of recomputed forwards that stopped early
        if unit is not None and (has_run or unit.has_gradient or unit.phase is not Phase.SHARDED):
            self._end(iteration, unit, is_due=has_run)

    def drop(self) -> None:
        """Abandon an iteration that ended in an exception."""
        self._uses, self._in_graphs, self.has_run = 0, 0, False
        self._to_run.clear()
        self.loans.clear()
        self._unseen = self._unseen and self._unseen.stop()
        if self.unit is not None:
            self.unit.drop()

    def _end(self, iteration: Iteration, unit: Unit, *, is_due: bool) -> None:
        if is_profiled() and not self._is_shown:
            with self._shown("post_backward"):
                self._end(iteration, unit, is_due=is_due)
            return
        self.has_run = False
        settings = unit.settings
        # Gradients of earlier passes may wait in the unit; then the pass itself says what it gives.
        is_of_inputs = iteration.keeps_graph and (iteration.is_of_inputs or not unit.has_gradient)
        if not settings.synchronize or not settings.all_reduce:
            iteration.keeps_sums = True
        if not settings.synchronize or iteration.is_of_inputs:
            unit.keep_gradients()
        elif unit.trainable_groups and (is_due or unit.has_gradient):
            iteration.start_reduction(unit)
        # Modules show what is kept after the forward, so a loss may have read it. A graph that
        # runs again after a pass of inputs alone may begin there, before any hook gathers.
        is_read = is_of_inputs and (self._unseen or settings.keep_full_after_forward)
        if not settings.keep_full_after_backward and not is_read:
            unit.reshard()

    @contextlib.contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        """Show the block as a range in the profiler."""
        self._is_shown = True
        try:
            with record_function(f"FSDP::{what} ({self.name})"):
                yield
        finally:
            self._is_shown = False


# Backward passes that no output of a unit announces: no output of its forward was found. Outputs
# are found in containers, dataclasses and classes that are registered with torch, but not in
# objects of other classes, closures and generators. A unit without outputs stays unsharded until
# the backward has ended, which begins at the latest with the first gradient of a parameter. Where
# some outputs are found, hidden ones are not expected beside them; they train where the unit is
# gathered in time. Where it is not, torch rejects the read of saved parameters (see `Unit`); a
# backward through hidden outputs alone raises.

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))


def _with_own_node(output: Any, tell: Callable[..., None]) -> Any:  # noqa: ANN401
    """Return the root's ``output``, where views replace outputs of units that were freed.

    The gradient of a view arrives before those of everything the unit has computed, and calls its
    hook, too. ``tell`` is the drivers' method that hooks of outputs call.
    """

    views: dict[int, torch.Tensor] = {}

    def is_freed(tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:  # of which there are no views
            return False
        for hook in (backward_hooks_of(tensor) or {}).values():
            unit = hook.__self__.unit if getattr(hook, "__func__", None) is tell else None
            if unit is not None and unit.phase is not Phase.FULL:
                return True
        return False

    def view(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in views:  # one object stays one
            return views[id(tensor)]
        views[id(tensor)] = other = tensor.view_as(tensor)
        other.__dict__.update(tensor.__dict__)  # a mask, say, that a program has hung on it
        for hook in (backward_hooks_of(tensor) or {}).values():
            if getattr(hook, "__func__", None) is tell:
                other.register_hook(hook)
        return other

    return cloned(output, where=is_freed, clone=view)


class _GradientHooks:
    """Hooks on ``leaves``, the first of whose gradients begins the backward of ``iteration``."""

    def __init__(self, leaves: Sequence[torch.Tensor], iteration: Iteration) -> None:
        self._iteration = iteration
        self._hooks = [leaf.register_post_accumulate_grad_hook(self._arrived) for leaf in leaves]

    def _arrived(self, leaf: torch.Tensor) -> None:
        if not self._iteration.is_in_backward:
            self._iteration.begin_backward()

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _in_transform(name: str) -> RuntimeError:
    """Make the error for a forward of module ``name`` in a transform that runs no hooks."""
    transform = "a transform of torch.func (vmap, grad, ...)"
    if function_transforms() is None:
        transform = "forward-mode differentiation (torch.autograd.forward_ad) with gradients"
    return RuntimeError(
        f"{name} is sharded and was called inside of {transform}, which hides when its backward "
        "comes. Call it outside, or use replicate"
    )


def _expect(
    unit: Unit | None, iteration: Iteration, output: object, *, is_inner: bool
) -> _GradientHooks | None:
    """Hook the parameters of ``unit`` to notice its backward; None where none will come.

    ``is_inner`` says that its inputs get gradients. With nothing to train, tensors hidden in its
    ``output`` may still need a backward.
    """
    slots = () if unit is None else unit.slots
    leaves = [slot.leaf for slot in slots if slot.leaf.requires_grad]
    may_come = leaves or is_inner or not all(isinstance(v, _PLAIN) for v in tree_leaves(output))
    return _GradientHooks(leaves, iteration) if may_come else None
