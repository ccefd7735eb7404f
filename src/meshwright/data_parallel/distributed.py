"""`DistributedDataParallel`: a wrapper around one module, as torch's, on the house's replica."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel.gradient_bucket import check_hook
from meshwright.data_parallel.join import UnevenInputs
from meshwright.data_parallel.low_precision import LowPrecision, compute_in
from meshwright.data_parallel.reducer import ReductionSettings
from meshwright.data_parallel.replica import Replica
from meshwright.mesh import DeviceMesh

__all__ = ["DistributedDataParallel"]

IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names of tensors that are left alone, as torch's."""

AXIS = "replicate"


class DistributedDataParallel(nn.Module):
    """Keeps ``module`` equal on all ranks of one axis while they train on different batches.

    Constructing it is collective: parameters are compared, and with ``init_sync`` those and the
    buffers of rank 0 are given to all. Gradients become their mean over the ranks during each
    backward pass. A parameter that some ranks did not use counts as zero there; one that no rank
    used keeps ``.grad`` None. ``find_unused_parameters``, ``skip_all_reduce_unused_params`` and
    ``batched_grad_copy`` are not needed for that: they are accepted and change nothing.

    ``bucket_cap_mb`` (MiB, 25 when None) bounds a bucket, ``bucket_cap_mb_list`` each of them;
    ``static_graph`` checks that every iteration uses the same parameters;
    ``delay_all_reduce_named_params`` are reduced after all others. ``mixed_precision`` is a
    `MixedPrecision`. Arguments and errors are those of torch's class of this name.

    >>> model = DistributedDataParallel(Net())
    >>> loss(model(batch)).backward()
    """

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
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: LowPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        group, axis = _axis_of(process_group, device_mesh)
        devices = _device_ids(module, device_ids, output_device)
        reduction = ReductionSettings.of(
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            is_gradient_view=gradient_as_bucket_view,
            reduce_dtype=None if mixed_precision is None else mixed_precision.reduce_dtype,
            delayed=_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
            is_static=static_graph,
        )
        ignored = frozenset(getattr(module, IGNORED_NAMES, ()))
        self.module = module
        self.device_ids = devices
        self.output_device = output_device
        self.dim = dim
        self.broadcast_buffers = _broadcasts(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.process_group = group
        self._replica = Replica(
            module,
            communicator(group, axis),
            ignored=(),
            ignored_names=ignored,
            device_ids=devices,
            init_sync=init_sync,
            broadcast_buffers=self.broadcast_buffers,
            reduction=reduction,
        )
        if mixed_precision is not None:
            compute_in(module, mixed_precision, ignored)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """The module's forward pass; inputs are moved to ``device_ids``."""
        moved = self._replica.before_forward(args, kwargs)
        if moved is not None:
            args, kwargs = moved
        output = self.module(*args, **kwargs)
        self._replica.after_forward(output)
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forward passes lead to a reduction."""
        return self._replica.reducer.is_wanted

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in the block leave their gradients on this rank, to be reduced later."""
        with self._replica.reducer.no_sync():
            yield

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which ranks may have different numbers of batches, see `UnevenInputs`."""
        if not enable:
            return contextlib.nullcontext()
        return UnevenInputs(
            self._replica,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Let ``hook(state, bucket)`` reduce the gradients, see `comm_hooks`.

        Raises TypeError or ValueError for what cannot be one, RuntimeError for a second hook.
        """
        self._replica.reducer.register_hook(state, check_hook(hook))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Leave the named parameters and buffers of ``module`` alone; before wrapping it."""
        setattr(module, IGNORED_NAMES, set(params_and_buffers_to_ignore))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        # A replica holds a process group, which has no copy.
        raise TypeError(
            "a DistributedDataParallel cannot be copied: wrap copy.deepcopy(model.module) again, "
            "on every rank"
        )


def _axis_of(process_group: Any, mesh: DeviceMesh | None) -> tuple[Any, str]:  # noqa: ANN401
    if mesh is None:
        return process_group, AXIS
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Pass the mesh alone"
        )
    if mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {mesh}. "
            'Select one axis of it, for example mesh["replicate"]'
        )
    names = mesh.mesh_dim_names
    return mesh.get_group(), names[0] if names else AXIS


def _device_ids(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> list[int | torch.device] | None:
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


def _broadcasts(older: bool | None, newer: bool | None) -> bool:
    if older is not None and newer is not None:
        raise ValueError("broadcast_buffers is the older name of forward_sync_buffers: give one")
    return older is not False and newer is not False


def _delayed(
    module: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
) -> frozenset[str]:
    """Names of the parameters that are reduced last."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time. Give both or neither"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in named or ():
        if id(parameter) not in names:
            raise ValueError(
                f"delay_all_reduce_named_params has {name!r}, which is no parameter of the "
                f"{type(module).__name__}"
            )
    return frozenset(names[id(parameter)] for _, parameter in named or ())
