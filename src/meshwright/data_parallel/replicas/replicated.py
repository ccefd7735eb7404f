"""`replicate`: keeps one module equal on every rank while ranks train on different batches.

The module keeps its parameters, names and state dict. Its class becomes a subclass of its former
class, with `set_requires_gradient_sync` and `no_sync` added, so ``isinstance`` still holds. Set-up
happens in the first forward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.comm import settle
from meshwright.comm.graphs.untraced import apart, constant, inlined, untraced
from meshwright.data_parallel.modules.of_this_process import OfThisProcess, home_of
from meshwright.data_parallel.replicas.distributed import one_device
from meshwright.data_parallel.replicas.join import uneven_inputs
from meshwright.data_parallel.replicas.low_precision import LowPrecision, compute_in
from meshwright.data_parallel.replicas.options import ReplicateOptions, UnusedGradient, resolved
from meshwright.data_parallel.replicas.replica import Replica
from meshwright.data_parallel.replicas.traced import Route, TracedForward
from meshwright.data_parallel.residency import ReplicaResidency
from meshwright.gradients import look_at_optimizers
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.modules import lent_now, require_module

STATES = "_meshwright_states"
"""The attribute of a module that holds the state of each composable function applied to it."""

M = TypeVar("M", bound=nn.Module)

NAME = "replicate"


class ReplicateState(Replica):
    """The state of a module under `replicate`, with the hooks and the forward that drive it."""

    takes_experts = True

    def __init__(self, module: nn.Module, options: ReplicateOptions) -> None:
        self._watched: list[RemovableHandle] = []
        """Hooks on the modules below, until one of them or the whole has run."""
        super().__init__(module, options)
        self._body: TracedForward | None = None
        self._is_called = False
        """True when the module was called, and its forward pass comes next."""
        self.residency = ReplicaResidency(self)

    def ignored(self) -> frozenset[nn.Module]:
        """List the ignored modules, also those that other composable functions manage."""
        module = self.module
        managed = {m for m in module.modules() if m is not module and m.__dict__.get(STATES)}
        return self.options.ignored | managed

    @apart
    def set_up(self, *, may_be_frozen: bool = False) -> Replica:
        """Return this replica, set up now if it was not; that is collective."""
        super().set_up(may_be_frozen=may_be_frozen)
        for handle in self._watched:
            handle.remove()
        self._watched.clear()
        return self

    def watch_children(self) -> None:
        """Set up before any submodule runs, which a program may call directly."""
        module = self.module
        self._watched = [
            part.register_forward_pre_hook(self._begin_below, prepend=True)
            for part in module.modules()
            if part is not module
        ]

    @apart
    def _begin_below(self, part: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            untraced(self._begin_below, part, args)
        elif lent_now() is None:  # a call that lends tensors would hide the module's own
            self.set_up()

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of the module: begins a pass."""
        self._is_called = True
        if torch.compiler.is_compiling():
            if self._route() == "eager":
                return untraced(self.before_forward, module, args, kwargs)
            return self.before_traced(module, args, kwargs)
        if not self.is_set_up:
            self.set_up()
        return self.enter(args, kwargs)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Forward hook of the module: ends a pass."""
        if not torch.compiler.is_compiling():
            self.leave(output)
        elif self._route() == "eager":
            untraced(self.after_forward, module, args, output)

    @inlined
    def forward(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Call ``run``, the forward of the module's original class, compiled or not."""
        is_called, self._is_called = self._is_called, False
        if not is_called:  # the user has called `forward` itself, and so no hook of the module
            args, kwargs = self.before_forward(module, args, kwargs) or (args, kwargs)
            self._is_called = False
        if not torch.compiler.is_compiling() or self._route() != "forward" or self._body is None:
            output = run(module, *args, **kwargs)
        else:
            output = self.marking.call(self._body, (run, *args), kwargs)
        if not is_called:
            self.after_forward(module, args, output)
        return output

    def _route(self) -> Route:
        return self.route() if self._is_traceable() else "eager"

    @constant
    def _is_traceable(self) -> bool:
        """Whether the forward is that of the module's class; sets the replica up, a collective."""
        self.set_up()
        if "forward" in vars(self.module):
            return False
        if self._body is None:
            self._body = TracedForward(self.module)
        return True


class ReplicatedModule(OfThisProcess):
    """The members that `replicate` adds to the class of a module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Make an instance of the original class: a slice of a container has nothing to reduce."""
        return cls.__bases__[1](*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether the gradients of later forward passes are reduced.

        Gradients of passes without a reduction stay on this rank and go into the next one.
        """
        replica_state(self).want(requires_gradient_sync)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep the gradients of forward passes in the block on this rank, to be reduced later.

        >>> with model.no_sync():
        ...     loss(model(first)).backward()
        >>> loss(model(second)).backward()  # reduces the sum of both
        """
        return replica_state(self).no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which ranks may have different numbers of batches, see `uneven_inputs`.

        Collective before the first forward pass.
        """
        if not enable:
            return contextlib.nullcontext()
        return uneven_inputs(
            replica_state(self).set_up(),
            divides_by_all=divide_by_initial_world_size,
            throws_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Have ``hook(state, bucket)`` reduce the gradients, see `comm_hooks`.

        Raises TypeError or ValueError for an invalid hook, RuntimeError for a second hook.
        """
        replica_state(self).register_hook(state, hook)

    def pipeline_residency(self) -> ReplicaResidency:
        """Return the object by which a pipeline's schedule drives reductions and broadcasts."""
        return replica_state(self).residency

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(
            "DDP does not support deepcopy. Copy the module first, then call replicate on the copy"
        )


def replicate(
    module: M,
    ignored_modules: Iterable[nn.Module] | None = None,
    device_id: int | torch.device | None = None,
    device_ids: Sequence[int | torch.device] | None = None,
    *,
    broadcast_buffers: bool | None = None,
    init_sync: bool = True,
    process_group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
    param_to_hook_all_reduce: nn.Parameter | None = None,
    mixed_precision: LowPrecision | None = None,
    device_mesh: DeviceMesh | None = None,
    skip_all_reduce_unused_params: bool = False,
    bucket_cap_mb_list: Sequence[float] | None = None,
    batched_grad_copy: bool = False,
    forward_sync_buffers: bool | None = None,
    unused_gradient: UnusedGradient = "none",
    stop_on_non_finite: bool = False,
) -> M:
    """Keep ``module`` equal on all ranks of one axis; returns the same module.

    Parameters and buffers are broadcast from rank 0 in the first forward pass, gradients become
    their mean over the ranks during each backward pass, and buffers are broadcast in each forward
    pass. A parameter that got no gradient on some ranks counts as zero there; one that got none on
    any rank keeps ``.grad`` None. Sparse gradients stay sparse.

    Until the backward pass has ended, a gradient is this rank's alone: `torch.autograd.grad`
    returns it, and both kinds of parameter hooks see it; their changes go into the sum.

    Parameters may be DTensors of tensor parallelism, on axes other than ``device_mesh``: they stay
    registered as they are, and the gradients of this rank's parts become means.

    The module's class gets the methods of `ReplicatedModule`; check ``isinstance(model,
    ReplicatedModule)`` to tell a type checker.

    :param module: the module; it is not moved.
    :param ignored_modules: submodules whose gradients are left alone.
    :param device_id: the GPU that inputs are moved to.
    :param device_ids: the same, as a list of one.
    :param broadcast_buffers: the older name of ``forward_sync_buffers``, which takes precedence;
        False also leaves each rank its own buffers at set-up.
    :param init_sync: give all ranks the parameters and buffers of rank 0 at set-up.
    :param process_group: the axis, as a process group; all ranks when neither this nor
        ``device_mesh`` is given.
    :param bucket_cap_mb: size of a gradient bucket in MiB (25 when None); the first has 1 MiB.
    :param find_unused_parameters: has no effect: unused parameters are always found, without a walk
        through the graph.
    :param gradient_as_bucket_view: leave each ``.grad`` as a view of its bucket.
    :param static_graph: check that every iteration uses the same parameters.
    :param delay_all_reduce_named_params: names and parameters whose gradients wait for that of
        ``param_to_hook_all_reduce``.
    :param param_to_hook_all_reduce: the delayed ones are reduced right after the bucket that holds
        this parameter.
    :param mixed_precision: compute in other dtypes, see `MixedPrecision`.
    :param device_mesh: the axis, as a mesh with one dim.
    :param skip_all_reduce_unused_params: leave parameters that no rank used in the first reduction
        out of all later ones.
    :param bucket_cap_mb_list: bucket sizes in MiB, one by one; the last for all that follow.
    :param batched_grad_copy: has no effect: small gradients are always copied together.
    :param forward_sync_buffers: give all ranks the buffers of rank 0 in each forward pass (the
        default).
    :param unused_gradient: the value of ``.grad`` where no rank had a gradient: ``"none"`` keeps it
        None, so that optimizers skip the parameter; ``"zeros"`` lets them decay it. A parameter
        used on other ranks only gets the mean in both cases, or the ranks would diverge.
    :param stop_on_non_finite: raise `NonFiniteError` on every rank at the end of a backward pass in
        which a gradient was not finite. Not with a gradient scaler, which skips such passes.

    Raises AssertionError when the module is replicated already, RuntimeError for a module of
    `fully_shard`, a ``device_id`` of another type or a group beside a mesh, ValueError for a mesh
    with more than one dimension and for values out of range.

    >>> model = replicate(Net(), bucket_cap_mb=10)
    >>> loss(model(batch)).backward()  # .grad is the mean over all ranks
    """
    given = locals()
    require_module(module, "replicate")
    options = resolved(
        module,
        given,
        ignored=frozenset(ignored_modules or ()),
        device_ids=_device_ids(device_id) or one_device(module, device_ids),
        wrong_mesh=ValueError(
            f"replicate expects a 1D DeviceMesh but got {device_mesh}. "
            'Select one axis of it, for example mesh["replicate"]'
        ),
    )
    return replicate_with(module, options)


def replicate_with(module: M, options: ReplicateOptions) -> M:
    """Replicate ``module`` with ``options`` that were built before."""
    look_at_optimizers()
    states: dict[str, Any] = module.__dict__.setdefault(STATES, {})
    if NAME in states:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"replicate has been applied to this {type(module).__name__} before"
        )
    if "fully_shard" in states:
        raise RuntimeError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`. "
            "Apply replicate to the modules beside it"
        )
    before = _names(module)
    state = ReplicateState(module, options)
    states[NAME] = state
    cls: type[nn.Module] = type(module)
    # Under its own name, by which programs of others know what a model is, and save it.
    names = {"__qualname__": cls.__qualname__, **home_of(cls)}
    members = {"forward": _traceable(cls.forward), **names}
    module.__class__ = type(cls.__name__, (ReplicatedModule, cls), members)
    if options.mixed_precision is not None:
        # Before the other hooks, which then run outside of the casts.
        compute_in(
            module,
            options.mixed_precision,
            state.ignored(),
            options.ignored_names,
        )
    module.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.after_forward)
    module.register_state_dict_pre_hook(settle)
    state.watch_children()
    check_names("replicate", before, _names(module))
    return module


def replica_state(module: nn.Module) -> ReplicateState:
    """Return the state of a replicated ``module``. Raises ValueError for any other."""
    state = module.__dict__.get(STATES, {}).get(NAME)
    if not isinstance(state, ReplicateState):
        raise ValueError(
            f"expected a replicated module, found a {type(module).__name__} that replicate was "
            "not applied to"
        )
    return state


setattr(replicate, "state", replica_state)  # noqa: B010 - type checkers know no such attributes


def check_names(function: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Raise RuntimeError when a composable function has renamed or reordered parameters or modules.

    ``before`` and ``after`` are the names of parameters, buffers and modules, in order.
    """
    if list(before) == list(after):
        return
    gone, added = sorted({*before} - {*after}), sorted({*after} - {*before})
    if gone or added:
        raise RuntimeError(
            f"{function}: expected the names before and after to be equal, but {gone} are gone and "
            f"{added} are new. Composable distributed API implementations cannot modify FQNs. "
            "Does the module's class rename what is assigned to it?"
        )
    raise RuntimeError(
        f"{function}: expected {list(before)}, found {list(after)}. Composable distributed API "
        "implementations cannot modify the order of FQNs."
    )


def _traceable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` so that `ReplicateState.forward` runs it."""

    @functools.wraps(forward)
    def traceable(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.__dict__[STATES][NAME].forward(forward, self, args, kwargs)

    return traceable


def _names(module: nn.Module) -> list[str]:
    held = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return [name for named in held for name, _ in named]


def _device_ids(device_id: int | torch.device | None) -> tuple[int | torch.device, ...] | None:
    if device_id is None:
        return None
    if not isinstance(device_id, int | torch.device):
        raise RuntimeError(
            "Expected device_id to be int or torch.device, "
            f"but got {type(device_id)}. Pass the one device of this rank"
        )
    if isinstance(device_id, torch.device):
        if device_id.type == "cpu":
            return None
        return (device_id if device_id.index is None else device_id.index,)
    return (device_id,)
