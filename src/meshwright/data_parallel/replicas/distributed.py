"""`DistributedDataParallel`: a wrapper around one module, like torch's, on `Replica`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from meshwright.comm import communicator, settle
from meshwright.comm.graphs.untraced import constant, inlined, untraced
from meshwright.data_parallel.modules.checkpoint_names import SteppedOver, place_of, rename
from meshwright.data_parallel.replicas.join import uneven_inputs
from meshwright.data_parallel.replicas.low_precision import LowPrecision, compute_in
from meshwright.data_parallel.replicas.options import UnusedGradient, resolved
from meshwright.data_parallel.replicas.reducer import GradientReducer
from meshwright.data_parallel.replicas.replica import Replica, move_inputs
from meshwright.data_parallel.residency import ReplicaResidency
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.autograd import is_profiled
from meshwright.torch_internals.modules import IGNORED_NAMES, require_module


class DistributedDataParallel(SteppedOver):
    """Keeps ``module`` equal on all ranks of one axis while they train on different batches.

    Construction is collective: parameters are compared, and with ``init_sync`` parameters and
    buffers are broadcast from rank 0. Gradients become their mean over the ranks during each
    backward pass. A parameter that some ranks did not use counts as zero there; one that no rank
    used keeps ``.grad`` None. Sparse gradients stay sparse.

    Until the backward pass has ended, a gradient is this rank's alone: `torch.autograd.grad`
    returns it, and both kinds of parameter hooks see it; their changes go into the sum.

    Errors have the types of torch's class of the same name.

    `copy.deepcopy` and, over the default group, `torch.save` work: the copy is set up, a
    collective, in its first forward pass with gradients, and runs without other ranks until then.

    >>> model = DistributedDataParallel(Net(), static_graph=True)
    >>> loss(model(batch)).backward()
    """

    _wrapped_as = "module"
    _lacks_hook = False
    """True for a copy of one with a communication hook that has none yet."""
    _loads_below: str | None = None
    """The prefix of the names that torch's checkpoint functions load here."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
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
        *,
        unused_gradient: UnusedGradient = "none",
        stop_on_non_finite: bool = False,
    ) -> None:
        """Wrap ``module``; a collective.

        :param module: the module.
        :param device_ids: the one GPU that inputs are moved to, in a list.
        :param output_device: accepted as torch's class accepts it; outputs stay where they are.
        :param dim: accepted as torch's class accepts it.
        :param broadcast_buffers: the older name of ``forward_sync_buffers``, which has priority;
            False also leaves each rank its own buffers at set-up.
        :param init_sync: give all ranks the parameters and buffers of rank 0 at set-up.
        :param process_group: the axis, as a process group; all ranks when neither this nor
            ``device_mesh`` is given.
        :param bucket_cap_mb: size of a gradient bucket in MiB (25 when None); the first bucket has
            1 MiB.
        :param find_unused_parameters: has no effect: unused parameters are always found, without a
            walk through the graph.
        :param check_reduction: accepted as torch's class accepts it.
        :param gradient_as_bucket_view: leave each ``.grad`` as a view of its bucket.
        :param static_graph: check that every iteration uses the same parameters.
        :param delay_all_reduce_named_params: names and parameters whose gradients wait for that of
            ``param_to_hook_all_reduce``.
        :param param_to_hook_all_reduce: the delayed ones are reduced right after the bucket that
            holds this parameter.
        :param mixed_precision: compute in other dtypes, see `MixedPrecision`.
        :param device_mesh: the axis, as a mesh with one dim.
        :param skip_all_reduce_unused_params: leave parameters that no rank used in the first
            reduction out of all later ones.
        :param bucket_cap_mb_list: sizes of the buckets in MiB, one by one; the last applies to all
            that follow.
        :param batched_grad_copy: has no effect: small gradients are always copied together.
        :param forward_sync_buffers: give all ranks the buffers of rank 0 in each forward pass
            (the default).
        :param unused_gradient: the value of ``.grad`` where no rank had a gradient: ``"none"``
            keeps it None, so that optimizers skip the parameter; ``"zeros"`` lets them decay it. A
            parameter used on other ranks only gets the mean in both cases, or the ranks would
            diverge.
        :param stop_on_non_finite: raise `NonFiniteError` on every rank at the end of a backward
            pass in which a gradient was not finite. Not with a gradient scaler, which skips such
            passes.
        """
        given = locals()
        super().__init__()
        require_module(module, "DistributedDataParallel")
        options = resolved(
            module,
            given,
            device_ids=one_device(module, device_ids, output_device),
            wrong_mesh=RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}. "
                'Select one axis of it, for example mesh["replicate"]'
            ),
        )
        self.module = module
        self.options = options
        self.device_ids = None if options.device_ids is None else list(options.device_ids)
        self.output_device = output_device
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self._replica = Replica(module, options).set_up()
        self._residency = ReplicaResidency(self._replica)
        if options.mixed_precision is not None:
            compute_in(module, options.mixed_precision, (), options.ignored_names)
        module.register_state_dict_pre_hook(settle)
        self.register_load_state_dict_post_hook(_clean_reported_names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """Run the module's forward pass; inputs are moved to ``device_ids``."""
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        if is_profiled():
            with record_function("DistributedDataParallel.forward"):
                return self._run(args, kwargs)
        return self._run(args, kwargs)

    @inlined
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        replica = self._replica
        if not replica.is_set_up:
            if not torch.is_grad_enabled():
                args, kwargs = move_inputs(self.device_ids, args, kwargs)
                return self.module(*args, **kwargs)
            self._set_up()
        moved = replica.enter(args, kwargs)
        if moved is not None:
            args, kwargs = moved
        output = self.module(*args, **kwargs)
        replica.leave(output)
        return output

    @constant
    def _set_up_now(self) -> None:
        self._set_up()

    def _set_up(self) -> Replica:
        """Return the replica, set up now if it was not; that is collective."""
        self._check_hook()
        return self._replica.set_up()

    def _check_hook(self) -> None:
        if self._lacks_hook and not self._replica.is_set_up:
            raise RuntimeError(
                "the DistributedDataParallel that this one is a copy of reduces by a "
                "communication hook, which no copy has: call register_comm_hook on it, too"
            )

    @inlined
    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        replica = self._replica
        if not replica.is_set_up:
            self._set_up_now()
        # Not when the module's forward could not be traced as a whole.
        route = replica.route() if torch.compiler.is_compiling() else "eager"
        if route == "eager":
            moved = untraced(replica.enter, args, kwargs)
        else:
            moved = replica.before_traced(self.module, args, kwargs)
        if moved is not None:
            args, kwargs = moved
        if route == "forward":
            return replica.marking.call(self.module, args, kwargs)
        output = self.module(*args, **kwargs)
        if route == "eager":
            untraced(replica.leave, output)
        return output

    @property
    def process_group(self) -> Any:  # noqa: ANN401 - c10d's type stays in comm
        """The process group that gradients are reduced over."""
        return communicator(self.options.process_group, self.options.axis).group

    device_mesh = property(attrgetter("options.mesh"), doc="The mesh that was asked for.")
    broadcast_buffers = property(
        attrgetter("options.broadcast_buffers"),
        doc="True when buffers are broadcast in each forward pass.",
    )
    forward_sync_buffers = broadcast_buffers
    bucket_bytes_cap = property(
        attrgetter("options.reduction.cap_bytes"), doc="Bytes that close a gradient bucket."
    )
    gradient_as_bucket_view = property(
        attrgetter("options.reduction.is_gradient_view"),
        doc="True when each ``.grad`` is a view of its bucket.",
    )
    static_graph = property(
        attrgetter("options.reduction.is_static"),
        doc="True when every iteration has to use the same parameters.",
    )
    mixed_precision = property(
        attrgetter("options.mixed_precision"),
        doc="The dtypes it computes in, if others than those of its parameters.",
    )

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that are left alone."""
        return set(self.options.ignored_names)

    @property
    def reducer(self) -> GradientReducer:
        """The object that reduces gradients; collective where the replica is not set up yet."""
        return self._set_up().reducer

    @property
    def require_backward_grad_sync(self) -> bool:
        """True when forward passes lead to a reduction; loops that accumulate set it."""
        return self._replica.is_wanted

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_required: bool) -> None:
        self._replica.want(is_required)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep the gradients of forward passes in the block on this rank, to be reduced later."""
        return self._replica.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which ranks may have different numbers of batches."""
        if not enable:
            return contextlib.nullcontext()
        return uneven_inputs(
            self._set_up(),
            divides_by_all=divide_by_initial_world_size,
            throws_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Have ``hook(state, bucket)`` reduce the gradients, see `comm_hooks`.

        Raises TypeError or ValueError for an invalid hook, RuntimeError for a second hook.
        """
        self._replica.register_hook(state, hook)
        self._lacks_hook = False

    def pipeline_residency(self) -> ReplicaResidency:
        """Return the object by which a pipeline's schedule drives reductions and broadcasts."""
        self._check_hook()
        return self._residency

    def state_dict(  # pyrefly: ignore[bad-override] # torch overloads it by arguments
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """List tensors as any module; by names before wrapping for torch's checkpoints."""
        found = super().state_dict(*args, **kwargs)
        if self._is_asked():
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            rename(found, prefix + self._place, prefix)
        return found

    def _load_from_state_dict(  # pyrefly: ignore[bad-override] # the rest is as in any module
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        self._loads_below = prefix if self._is_asked() else None
        if self._loads_below is not None:
            rename(state_dict, prefix, prefix + self._place)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _place(self) -> str:
        return ".".join((*place_of(self, self._wrapped_as), ""))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Ignore the named parameters and buffers of ``module``; call it before wrapping."""
        setattr(module, IGNORED_NAMES, set(params_and_buffers_to_ignore))

    def __getstate__(self) -> dict[str, Any]:
        if self.options.mixed_precision is not None:
            raise TypeError(
                "a DistributedDataParallel with mixed_precision cannot be copied, because of its "
                "hooks: wrap copy.deepcopy(model.module) again, on every rank"
            )
        state = {
            key: own for key, own in self.__dict__.items() if key not in ("_residency", "_replica")
        }
        return {**state, "_lacks_hook": self._lacks_hook or self._replica.hook is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._replica = Replica(self.module, self.options)
        self._residency = ReplicaResidency(self._replica)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - of any object
        if self.options.process_group is not None or self.options.mesh is not None:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. For other groups save model.module, and wrap it again"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        found = self.__new__(type(self))
        memo[id(self)] = found
        kept = self.options  # with its group, which has no copy
        state = {
            key: kept if own is kept else copy.deepcopy(own, memo)
            for key, own in self.__getstate__().items()
        }
        found.__setstate__(state)
        return found


def _clean_reported_names(model: DistributedDataParallel, incompatible: Any) -> None:  # noqa: ANN401
    """Report keys to torch's checkpoint functions by the names before wrapping."""
    prefix = model._loads_below
    if prefix is None:
        return
    inner = prefix + model._place
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [prefix + key[len(inner) :] if key.startswith(inner) else key for key in keys]


def one_device(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None = None,
) -> list[int | torch.device] | None:
    """Return ``device_ids`` as a list of this rank's device. Raises ValueError for any other."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element. "
            f"Found {list(device_ids)}: each rank has one device"
        )
    kinds = {parameter.device.type for parameter in module.parameters()}
    if kinds == {"cpu"} and (device_ids or output_device is not None):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with modules "
            f"on one GPU, but found device_ids {device_ids}, output_device {output_device}, and "
            "parameters on the CPU. Leave both out"
        )
    return list(device_ids) if device_ids else None
