"""Memory of a run by category."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.failures.sameness import sides
from meshwright.comm.streams import is_host
from meshwright.composition import Trainable
from meshwright.composition.checks import recomputed
from meshwright.gradients.optimizer_list import each_of
from meshwright.planner.rehearsed import tensors_of
from meshwright.torch_internals import tensors
from meshwright.torch_internals.tensors import storage_id


def memory_of(trainable: Trainable, device: torch.device) -> dict[str, int]:
    """Count the bytes that this rank holds between steps, by category, and its ``peak``.

    The peak is the largest resident size of the process so far; on a device, the most memory that
    tensors there have taken.
    """
    parameters = trainable.named_parameters().values()
    optimizer = trainable.optimizer
    states = () if optimizer is None else optimizer.state.values()
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if is_host(device)
        else torch.accelerator.max_memory_allocated(device)
    )
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _bytes(value for state in states for value in state.values()),
        "peak": peak,
    }


def memory_of_ranks(trainable: Trainable, world: Communicator) -> dict[str, dict[str, int]]:
    """Return `memory_of` all ranks, equal ones together: ``{"0-2": ..., "3": ...}``.

    The peak is the largest of these ranks. All ranks call it together.
    """
    mine = memory_of(trainable, world.device)
    rows = world.gather_numbers([*mine.values()], label="memory")
    alike = sides(range(len(rows)), [tuple(held) for *held, _ in rows])
    return {
        _text(ranks): dict(
            zip(mine, map(int, [*held, max(rows[rank][-1] for rank in ranks)]), strict=True)
        )
        for held, ranks in alike.items()
    }


@contextlib.contextmanager
def memory_in_step(trainable: Trainable) -> Iterator[dict[str, int]]:
    """Measure what `memory_of` cannot, in a step without pipeline: bytes, by category.

    ``units``: whole parameters of units. ``gradients``: before the optimizer's step.
    ``activations``: storages that a forward has kept when its backward begins.
    """
    found = dict.fromkeys(("gradients", "units", "activations"), 0)
    module, parameters = trainable.module, trainable.named_parameters().values()
    resting = _storages([*parameters, *module.buffers()])
    again = {id(module.get_submodule(name)) for name in recomputed(module, trainable.plan)}
    whole: dict[int, torch.UntypedStorage] = {}
    kept: dict[int, torch.UntypedStorage] = {}

    def most(name: str, held: Mapping[int, torch.UntypedStorage], but: Container[int]) -> None:
        size = sum(storage.nbytes() for key, storage in held.items() if key not in but)
        found[name] = max(found[name], size)

    def enter(part: nn.Module, args: object, kwargs: object) -> None:
        whole.update(_storages([*part.parameters(recurse=False), *part.buffers(recurse=False)]))
        most("units", whole, resting)
        if id(part) in again:
            kept.update(_storages((args, kwargs)))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.update(_storages(tensor))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        most("activations", kept, whole)
        kept.clear()
        return tensor

    def before(*_: object) -> None:
        found["gradients"] = _bytes(p.grad for p in parameters if p.grad is not None)

    with contextlib.ExitStack() as stack:
        for part in module.modules():
            handle = part.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(handle.remove)
        for each in () if trainable.optimizer is None else each_of(trainable.optimizer):
            stack.callback(each.register_step_pre_hook(before).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield found


def _storages(values: object) -> dict[int, torch.UntypedStorage]:
    held = (tensor.untyped_storage() for tensor in tensors_of(values))
    return {storage_id(storage): storage for storage in held}


def _text(ranks: Iterable[int]) -> str:
    """Format ascending ``ranks`` as ranges: ``0-2,5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def _bytes(values: Iterable[object]) -> int:
    held = (tensors.memory_of(value) for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
