"""A module that is kept equal on all ranks: set-up, buffers and inputs, around its reducer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.comm import Communicator
from meshwright.data_parallel.reducer import GradientReducer, ReductionSettings
from meshwright.data_parallel.starting_state import broadcast_tensors, compare_parameters

__all__ = ["Replica"]


class Replica:
    """One module on one axis, set up and running.

    Constructing it is collective: parameters are compared over the ranks, and with ``init_sync``
    parameters and buffers are broadcast from the axis' rank 0.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        *,
        ignored: Collection[nn.Module],
        device_ids: Sequence[int | torch.device] | None,
        init_sync: bool,
        broadcast_buffers: bool,
        reduction: ReductionSettings,
        ignored_names: Collection[str] = (),
    ) -> None:
        self.communicator = communicator
        self.device_ids = None if device_ids is None else list(device_ids)
        """The device that inputs are moved to, as a list of one; None on the CPU."""
        self.broadcast_buffers = broadcast_buffers
        self.on_buffers: Callable[[], int] | None = None
        """Called before buffers are broadcast in a forward pass; gives the rank to take them of."""
        parameters, buffers = _managed(module, ignored, ignored_names)
        _check(module, parameters, self.device_ids)
        self.buffers = tuple(buffers)
        """The buffers that are kept equal."""
        compare_parameters(communicator, parameters)
        if init_sync:
            tensors = [parameter for _, parameter in parameters]
            broadcast_tensors(communicator, [*tensors, *buffers], label="broadcast parameters")
        self.reducer = GradientReducer(communicator, parameters, reduction)

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Get ready for a forward pass of the module; returns inputs on the module's device."""
        # A forward pass inside a backward pass recomputes activations: it begins nothing.
        if torch._C._current_graph_task_id() != -1:
            return None
        if torch.is_grad_enabled():
            self.reducer.begin_forward()
        if self.broadcast_buffers and self.buffers and self.reducer.is_wanted:
            self.synchronise_buffers(0 if self.on_buffers is None else self.on_buffers())
        if self.device_ids is None:
            return None
        device = self.device_ids[0]
        return tree_map(partial(_moved, device), (args, kwargs))

    def after_forward(self, output: object) -> None:
        """Let the backward pass of ``output`` tell the reducer when it begins.

        Without this a rank that uses none of the parameters would never join the reductions.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)

    def synchronise_buffers(self, source: int = 0) -> None:
        """Give every rank the buffers of rank ``source`` of the axis."""
        broadcast_tensors(self.communicator, self.buffers, label="broadcast buffers", source=source)

    def synchronise_all(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank ``source`` of the axis."""
        tensors = [*(parameter for _, parameter in self.reducer.named), *self.buffers]
        broadcast_tensors(self.communicator, tensors, label="broadcast parameters", source=source)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self.reducer.begin_backward()


def _managed(
    module: nn.Module, ignored: Collection[nn.Module], names: Collection[str]
) -> tuple[list[tuple[str, nn.Parameter]], list[torch.Tensor]]:
    """Parameters by name and buffers of ``module`` without those of ``ignored``, each once."""
    left_out = {id(tensor) for part in ignored for tensor in _tensors(part)}
    left_out |= {id(p) for n, p in module.named_parameters() if n in names}
    left_out |= {id(b) for n, b in module.named_buffers() if n in names}
    parameters = [(n, p) for n, p in module.named_parameters() if id(p) not in left_out]
    buffers = [b for b in module.buffers() if id(b) not in left_out]
    return parameters, buffers


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _check(
    module: nn.Module,
    parameters: Sequence[tuple[str, nn.Parameter]],
    device_ids: Sequence[int | torch.device] | None,
) -> None:
    """Refuse what could only fail later, on this rank, before any collective."""
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                f"`DistributedDataParallel` or replicate: {name!r} has no shape yet. "
                "Run a forward pass on one batch first"
            )
    if not any(parameter.requires_grad for _, parameter in parameters):
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
    managed = {id(parameter) for _, parameter in parameters}
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or id(part.weight) not in managed:
            continue
        if part.sparse:
            raise RuntimeError(
                f"module {name!r} has sparse=True and gives a sparse gradient, which replicate "
                "does not reduce: build it with sparse=False, or put it into ignored_modules"
            )


def _moved(device: int | torch.device, value: object) -> object:
    return value.to(device) if isinstance(value, torch.Tensor) else value
