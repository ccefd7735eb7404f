"""One replicated module: set-up, buffers and inputs, around its reducer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator, communicator
from meshwright.comm.dtensors.after_hooks import step_in_backward, take_over_steps
from meshwright.comm.dtensors.dtensor import known_at_rest, local_of
from meshwright.comm.dtensors.exchanging import (
    ExpertRanks,
    exchanged_over,
    exchanges_below,
    experts_among,
)
from meshwright.comm.graphs.functional import broadcast_traced
from meshwright.comm.graphs.untraced import apart, constant, untraced
from meshwright.data_parallel.checks.forward_writes import (
    BatchBuffers,
    ForwardWrites,
    refuse_lookups,
)
from meshwright.data_parallel.checks.starting_state import (
    broadcast_tensors,
    compare_digests,
    compare_parameters,
)
from meshwright.data_parallel.checks.step_watch import StepWatch
from meshwright.data_parallel.distributed_parameters import check_axes, local_parameters
from meshwright.data_parallel.modules.batch_norm import LocalStatistics
from meshwright.data_parallel.modules.module_tensors import EqualBuffers, ModuleParameters
from meshwright.data_parallel.modules.nested import Loan, tensors_in
from meshwright.data_parallel.replicas.gradient_bucket import CommunicationHook, check_hook
from meshwright.data_parallel.replicas.options import ReplicateOptions
from meshwright.data_parallel.replicas.reducer import (
    GradientReducer,
    reducers_in_backward,
    refuse_other_ranks,
)
from meshwright.data_parallel.replicas.traced import Marking, Route
from meshwright.errors import CollectiveMismatchError
from meshwright.gradients import digests_of, mark_mean
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.autograd import (
    at_end_of_backward,
    function_transforms,
    outside_of_transforms,
    running_backward,
)
from meshwright.torch_internals.modules import lent_now

ALIKE = (
    "The first forward pass with it was one of torch.func.functional_call, whose tensors are made "
    "before rank 0's values can be sent. Start all ranks in the same way, or run the module first"
)


class Replica:
    """The state of one replicated module, for `replicate` and `DistributedDataParallel`.

    It has its options from the start, and everything else after `set_up`, which is collective:
    parameters are compared over the ranks, and with ``init_sync`` parameters and buffers are
    broadcast from the axis' rank 0.
    """

    takes_experts = False
    """False for `DistributedDataParallel`, which refuses modules that exchange samples."""
    communicator: Communicator
    reducer: GradientReducer
    marking: Marking
    buffers: EqualBuffers

    def __init__(self, module: nn.Module, options: ReplicateOptions) -> None:
        self.options = options
        self.is_set_up = False
        self.is_wanted = True
        """True when forward passes from now on lead to a reduction."""
        self.hook: tuple[object, CommunicationHook] | None = None
        """The communication hook, with its state."""
        self.is_driven = False
        """True when a pipeline schedule says when gradients are reduced and buffers broadcast."""
        self.on_buffers: Callable[[], int] | None = None
        """Called before buffers are broadcast in a forward pass; gives the rank to send from."""
        # The module holds this state, so a strong reference back would be a cycle.
        self._module = weakref.ref(module)
        self._steps: StepWatch | None = self._watch_first_steps()
        self._has_equal_buffers = False
        """True while a forward pass has begun with equal buffers and not ended: after an exception
        the next one takes its place, since other ranks do not send a second time."""
        self._was_lent = False
        """True when a forward pass ran with what a call lent it: what the module trains is then
        looked at when the backward begins, after that call."""
        self._is_stepping = False
        """True while a backward pass runs that ends with steps of optimizers."""

    @property
    def module(self) -> nn.Module:
        """The module. Raises RuntimeError when it was garbage-collected."""
        module = self._module()
        if module is None:
            raise RuntimeError("the replicated module is gone")
        return module

    @property
    def device_ids(self) -> list[int | torch.device] | None:
        """The device that inputs are moved to, as a list of one; None on the CPU."""
        ids = self.options.device_ids
        return None if ids is None else list(ids)

    def ignored(self) -> frozenset[nn.Module]:
        """List the ignored modules."""
        return self.options.ignored

    @apart
    def set_up(self, *, may_be_frozen: bool = False) -> Replica:
        """Return this replica, set up now if it was not; that is collective."""
        if not self.is_set_up:
            with torch.inference_mode(False), outside_of_transforms():  # an evaluation may be first
                self._set_up(may_be_frozen=may_be_frozen)
            self.is_set_up = True
            if self._steps is not None:
                self._steps.ask(None)  # a compiler may keep the watch alive
            self._steps = None
        return self

    def _set_up(self, *, may_be_frozen: bool) -> None:
        module, options = self.module, self.options
        self.communicator = axis = communicator(options.process_group, options.axis)
        left_alone = self.ignored(), options.ignored_names
        # Those of experts are each rank's own, as experts are.
        own = _buffers_of_experts(module)
        self.buffers = EqualBuffers(module, axis, left_alone[0], left_alone[1] | own)
        self._held = ModuleParameters(module, *left_alone)
        self._statistics = LocalStatistics(module, [axis])
        self._writes = ForwardWrites(axis)
        self._written = BatchBuffers(module, axis, self.buffers.look())
        parameters = self._held.named
        tensors = [parameter for _, parameter in parameters]
        self._stepped = take_over_steps(tensors)
        may_be_frozen = may_be_frozen or self._held.is_lent
        meshes = self._check(parameters, may_be_frozen=may_be_frozen)
        if not axis.is_alone:
            refuse_lookups(module, parameters)
        mark_mean(tensors, [axis])
        sparse = _sparse_names(module, parameters)
        starts_alike = options.init_sync and options.init_buffers
        sends_buffers = starts_alike or options.broadcast_buffers
        buffers = self.buffers.look() if sends_buffers else {}
        split = _names_of(parameters, meshes)
        compare_parameters(axis, parameters, sparse, experts=split, buffers=buffers)
        experts = experts_among(meshes, axis)
        if options.init_sync:
            given = [*tensors, *(buffers.values() if starts_alike else ())]
            # Not what is equal already: a penalty may have been computed from it.
            self._send(given, experts, only_changed=True)
        lent = {id(tensor) for tensor in (lent_now() or {}).values()}
        self._unsent = [name for name, each in buffers.items() if id(each) in lent]
        """Buffers in whose place a call had lent others when rank 0's were sent."""
        settings = replace(options.reduction, sparse=sparse)
        local = local_parameters(module, experts)
        self.reducer = GradientReducer(axis, parameters, settings, local)
        self.reducer.is_wanted = self.is_wanted
        swaps = options.mixed_precision is not None
        self.marking = Marking(module, self.reducer, axis, swaps_parameters=swaps)
        if self.hook is not None:
            self.reducer.register_hook(*self.hook)

    def _check(
        self, parameters: Sequence[tuple[str, nn.Parameter]], *, may_be_frozen: bool
    ) -> Mapping[int, DeviceMesh]:
        """Check ``parameters`` as `_check` does; returns the meshes of experts, by ``id``."""
        module, axis = self.module, self.communicator
        meshes = exchanges_below(module, {id(each) for _, each in parameters}, axis)
        if meshes and not self.takes_experts:
            name, mesh = next((n, meshes[id(p)]) for n, p in parameters if id(p) in meshes)
            raise ValueError(
                f"DistributedDataParallel: parameter {name!r} belongs to a module that exchanges "
                f"samples over {mesh}: its gradient is a sum over these ranks, which hold other "
                "experts. Use meshwright.data_parallel.replicate, or a plan with axis expert"
            )
        ids = self.device_ids
        _check(module, parameters, axis, ids, may_be_frozen=may_be_frozen, experts=meshes)
        return meshes

    def _send(
        self,
        tensors: Iterable[torch.Tensor],
        experts: Mapping[int, ExpertRanks],
        *,
        only_changed: bool = False,
    ) -> None:
        """Broadcast from the first rank: of all, and for experts of those that hold the same."""
        for axis, given in self._by_holders([("", each) for each in tensors], experts).items():
            held = [tensor for _, tensor in given]
            broadcast_tensors(axis, held, label="broadcast parameters", only_changed=only_changed)

    def _by_holders(
        self, named: Iterable[tuple[str, torch.Tensor]], experts: Mapping[int, ExpertRanks]
    ) -> dict[Communicator, list[tuple[str, torch.Tensor]]]:
        """Sort tensors by the ranks that hold the same."""
        found: dict[Communicator, list[tuple[str, torch.Tensor]]] = {self.communicator: []}
        for name, tensor in named:
            own = experts.get(id(tensor))
            axis = self.communicator if own is None else own.holders
            found.setdefault(axis, []).append((name, tensor))
        return found

    def _watch_first_steps(self) -> StepWatch:
        """Watch for an optimizer step with gradients that were not reduced, and raise before it.

        Gradients of zeros pass: torch uses them, with a learning rate of zero, to make optimizers
        build their state.
        """
        find = weakref.ref(self)  # which holds the watch

        def named() -> Sequence[tuple[str, nn.Parameter]]:
            replica = find()
            module = None if replica is None else replica._module()
            if replica is None or module is None:
                return ()
            return ModuleParameters(module, replica.ignored(), replica.options.ignored_names).named

        def check(optimizer: torch.optim.Optimizer) -> None:
            replica = find()
            if replica is None:
                return
            axis = communicator(replica.options.process_group, replica.options.axis)
            stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
            for name, parameter in () if axis.is_alone else named():
                gradient = parameter.grad if id(parameter) in stepped else None
                if gradient is not None and local_of(gradient).abs().sum() != 0:
                    raise RuntimeError(
                        f"replicate: expected gradients that are means over axis {axis.axis}, "
                        f"found one of rank {axis.ranks[axis.rank]} alone for parameter {name!r}: "
                        "the first forward of the module sets its reductions up, and none has "
                        "run. Call the module itself before the first backward, once is enough, "
                        "or wrap it in DistributedDataParallel, which is set up when it is built"
                    )

        return StepWatch(lambda: [each for _, each in named()], check=partial(untraced, check))

    def want(self, is_wanted: bool) -> None:
        """Set whether gradients of later forward passes are reduced, or kept on this rank."""
        self.is_wanted = is_wanted
        if self.is_set_up:
            self.reducer.is_wanted = is_wanted

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of forward passes in the block on this rank, to be reduced later."""
        before = self.is_wanted
        self.want(False)
        try:
            yield
        finally:
            self.want(before)

    def register_hook(self, state: object, hook: object) -> None:
        """Have ``hook`` reduce the gradients, from the set-up on if that is still to come."""
        checked = check_hook(hook)
        if self.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. "
                "Combine the hooks into one function"
            )
        if self.is_set_up:
            self.reducer.register_hook(state, checked)
        self.hook = (state, checked)

    def _ddp_weakref(self) -> Replica | None:
        """This replica, with its ``device_ids``; None before the first forward pass."""
        return self if self.is_set_up else None

    def be_driven(self, is_driven: bool) -> None:
        """Set whether a pipeline's schedule drives reductions and broadcasts."""
        if is_driven and self._stepped:
            raise RuntimeError(
                "parameters have optimizers in the backward (_apply_optimizer_in_backward), which "
                "would step in the middle of a pipeline's schedule: step after it"
            )
        self.is_driven = is_driven

    @apart
    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a forward pass of the module; returns inputs on the module's device."""
        # A forward pass inside a backward pass recomputes activations: it begins nothing.
        if running_backward() != -1:
            return None
        if not self.is_driven:
            self.begin()
        ids = self.options.device_ids
        return None if ids is None else move_inputs(ids, args, kwargs)

    def route(self) -> Route:
        """Return how gradients of the pass being traced are marked."""
        if self._stepped or self.is_driven or not self._follow_module():
            return "eager"
        return self.marking.route()

    def before_traced(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare for a traced pass whose gradients are marked."""
        if torch.is_grad_enabled():
            self.marking.begin()
            # A trace guards what it compares: its graph runs for these parameter objects only.
            held = dict(module.named_parameters())
            _ = [held.get(name) is parameter for name, parameter in self.reducer.named]
        if self.options.broadcast_buffers and self.reducer.is_wanted:
            known = self._buffer_names().split("\n")
            # Through the module, or a graph would keep the buffers that it was traced with.
            found = [buffer for name, buffer in module.named_buffers() if name in known]
            if found:
                broadcast_traced(self.communicator, found)
        ids = self.options.device_ids
        return None if ids is None else move_inputs(ids, args, kwargs)

    def begin(self) -> None:
        """Begin a forward pass or a pipeline's step: take up new tensors, and broadcast buffers."""
        if function_transforms() is not None:  # what is sent is no part of what is differentiated
            with outside_of_transforms():
                self.begin()
            return
        if self._unsent and lent_now() is None:
            self._send_own_buffers()
        if not torch.is_grad_enabled():
            if not self.reducer.named:
                self._take_up()  # a call has hidden the module's own until now
        else:
            # A backward that raised, also one of another replica that reduces a parameter of ours.
            for reducer in reducers_in_backward(self.reducer.reduced):
                reducer.abandon()
            self._is_stepping = False
            self._take_up()
            self.reducer.begin_forward()
            if self._statistics.is_due:
                self._statistics.tell()
            if self._writes.is_due:
                self._writes.begin(self.reducer.named)
        if not self.reducer.is_wanted:
            return
        sends = self.options.broadcast_buffers and bool(self.buffers.follow())
        if self._has_equal_buffers:
            return
        trains, written = torch.is_grad_enabled(), self._written
        looks = written.is_due and self.reducer.on_reduction is None and lent_now() is None
        if looks and (trains or sends):
            written.compare()
        if sends:
            self.buffers.broadcast(0 if self.on_buffers is None else self.on_buffers())
        if looks and trains:
            written.note()
        self._has_equal_buffers = (sends or looks) and not self.is_driven

    def _take_up(self) -> None:
        """Reduce the parameters that the module holds now; collective where they have changed.

        They are compared, and with ``init_sync`` get the values of rank 0. Where a pass may have
        used new ones already, they must have these values.
        """
        found, reducer = self._held.look(), self.reducer
        was_lent, self._was_lent = self._was_lent, self._held.is_lent
        if self._was_lent:
            self._refuse_lent_experts()
        if found is reducer.named:
            return
        known = {id(parameter) for _, parameter in reducer.named}
        fresh = {name: parameter for name, parameter in found if id(parameter) not in known}
        module = self._held.module
        meshes = self._check(found, may_be_frozen=True)
        sparse, split = _sparse_names(module, found), _names_of(found, meshes)
        reason = _difference(reducer.named, found, fresh)
        compare_parameters(
            self.communicator, found, sparse, fresh=fresh, experts=split, reason=reason
        )
        experts = experts_among(meshes, self.communicator)
        if self.options.init_sync and was_lent:
            self._compare_values(fresh, experts)
        elif self.options.init_sync:
            self._send(fresh.values(), experts)
        mark_mean(fresh.values(), [self.communicator])
        self._stepped += take_over_steps(list(fresh.values()))
        local = local_parameters(module, experts)
        reducer.take_up(found, replace(reducer.settings, sparse=sparse), local)
        self.marking.take_up()
        self._statistics.follow(module)

    def _send_own_buffers(self) -> None:
        """Broadcast the module's own buffers from rank 0, once, if the options say so."""
        names = tuple(self._unsent)
        self._unsent.clear()
        own = self.buffers.follow()
        if self.options.init_sync and self.options.init_buffers:
            found = [own[name] for name in names if name in own]
            broadcast_tensors(self.communicator, found, label="broadcast buffers")

    def _compare_values(
        self, fresh: Mapping[str, nn.Parameter], experts: Mapping[int, ExpertRanks]
    ) -> None:
        difference = ""
        held = self._by_holders(fresh.items(), experts)
        for axis, named in reversed(held.items()):  # all ranks last, so that all of them raise
            digests = digests_of([tensor for _, tensor in named])
            rows = [
                (name, None if each is None else (each, each, each))
                for (name, _), each in zip(named, digests, strict=True)
            ]
            difference = compare_digests(axis, rows, difference, ALIKE)
        if difference:
            raise CollectiveMismatchError(difference)

    @constant
    def _follow_module(self) -> bool:
        """Update the parameters when a pass is traced; collective where they have changed.

        Compilers trace again when a parameter was replaced. Returns False where a call substitutes
        the module's own tensors.
        """
        if self._unsent and lent_now() is None:
            self._send_own_buffers()
        if torch.is_grad_enabled():
            self._take_up()
            if self._statistics.is_due:
                self._statistics.tell()
        if self.options.broadcast_buffers and self.reducer.is_wanted:
            self.buffers.follow()
        return not self._held.is_lent

    def _refuse_lent_experts(self) -> None:
        """Refuse experts without leaves, on which gradients are divided and data axes known."""
        meshes = [exchanged_over(part) for part in self._held.module.modules()]
        for name, tensor in (lent_now() or {}).items():
            rest = None if tensor.is_leaf else known_at_rest(tensor)
            if rest is not None and rest.mesh in meshes:
                raise RuntimeError(
                    f"a torch.func.functional_call gives experts {name!r}, a DTensor that is "
                    "computed from others: its gradient would be a sum over the ranks that "
                    "exchange tokens, where that of the replica is a mean. Give it parameters, "
                    "or change them in place"
                )

    @constant
    def _buffer_names(self) -> str:
        return "\n".join(self.buffers.look())

    @apart
    def leave(self, output: object) -> None:
        """End a forward pass: have the backward of ``output`` tell the reducer when it begins.

        Without this, a rank that uses none of the parameters would never join the reductions.
        """
        if running_backward() != -1:
            return
        self._has_equal_buffers = False
        if self.is_driven or not torch.is_grad_enabled():
            return
        if self._writes.is_due:
            self._writes.end()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def synchronize_all(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank ``source`` of the axis."""
        buffers = self.buffers.look().values()
        tensors = [*(parameter for _, parameter in self.reducer.named), *buffers]
        broadcast_tensors(self.communicator, tensors, label="broadcast parameters", source=source)

    @apart
    def _backward_begins(self, _: torch.Tensor) -> None:
        # Not in `torch.func.grad`, which takes gradients for itself: this rank's.
        if not torch.compiler.is_compiling() and function_transforms() is None:
            if self._was_lent:
                self._take_up()
            self.reducer.begin_backward()
            if self._stepped and self.reducer.is_synchronizing and not self._is_stepping:
                self._is_stepping = True
                at_end_of_backward(self._step)  # runs after the reducer's, which was queued first

    @torch.no_grad()
    def _step(self) -> None:
        """Step torch's optimizers in the backward, once the reducer has finished."""
        self._is_stepping = False
        for parameter in self._stepped:
            if parameter.grad is not None:
                step_in_backward(parameter)


def _difference(
    before: Sequence[tuple[str, nn.Parameter]],
    now: Sequence[tuple[str, nn.Parameter]],
    fresh: Collection[str],
) -> str:
    """Describe a change of parameters, for ranks that do something else."""
    for name in fresh:
        return f": parameter {name!r} was given anew"
    for name in sorted({name for name, _ in before} - {name for name, _ in now}):
        return f": parameter {name!r} is gone"
    return ": parameters have another order"


def _check(
    module: nn.Module,
    parameters: Sequence[tuple[str, nn.Parameter]],
    communicator: Communicator,
    device_ids: Sequence[int | torch.device] | None,
    *,
    may_be_frozen: bool,
    experts: Container[int] = (),
) -> None:
    """Reject on this rank, before any collective, what could only fail later."""
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                f"`DistributedDataParallel` or replicate: {name!r} has no shape yet. "
                "Run a forward pass on one batch first"
            )
    if not may_be_frozen and not any(p.requires_grad for _, p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            f"requires a gradient. None of the {len(parameters)} parameters of this "
            f"{type(module).__name__} does, so replicate has nothing to do either"
        )
    kinds = sorted({parameter.device.type for _, parameter in parameters})
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but its parameters are on {' and '.join(kinds)}"
        )
    if device_ids is not None and kinds == ["cpu"]:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            f"modules on one GPU, but the parameters are on the CPU and device_id is "
            f"{device_ids[0]}. Leave device_id out"
        )
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(
                f"replicate: expected parameters with values, found {name!r} on the meta device. "
                "Give the model memory with to_empty(device=...), and then values with "
                "meshwright.randomness.initialize or from a checkpoint, before the first step"
            )
        if parameter.device != communicator.device and not communicator.is_alone:
            raise ValueError(
                f"replicate: axis {communicator.axis} communicates on {communicator.device}, found "
                f"parameter {name!r} on {parameter.device}: move the model there first"
            )
        known = known_at_rest(parameter)
        if known is not None and id(parameter) not in experts:
            check_axes(name, known, communicator)
    refuse_other_ranks(parameters, communicator)


def _names_of(named: Iterable[tuple[str, nn.Parameter]], ids: Container[int]) -> frozenset[str]:
    return frozenset(name for name, parameter in named if id(parameter) in ids)


def _buffers_of_experts(module: nn.Module) -> frozenset[str]:
    """Name the buffers that modules hold directly which exchange samples with other ranks."""
    return frozenset(
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        if exchanged_over(part) is not None
        for key in part._buffers
    )


def _sparse_names(
    module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]
) -> frozenset[str]:
    """List the parameters whose modules look up rows with sparse gradients."""
    tables = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    return frozenset(name for name, parameter in parameters if id(parameter) in tables)


def move_inputs(
    device_ids: Sequence[int | torch.device] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the tensors of ``args`` and ``kwargs`` to the one device, if any."""
    if not device_ids:
        return args, kwargs
    loan = Loan(partial(_moved, device_ids[0]))  # what lies there already stays the caller's
    return loan.give(args), {key: loan.give(value) for key, value in kwargs.items()}


def _moved(device: int | torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)
