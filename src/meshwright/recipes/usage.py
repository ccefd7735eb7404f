"""Memory of a run by category, and the floating-point operations of its model's forward."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.comm import Communicator
from meshwright.comm.streams import is_host
from meshwright.composition import Trainable
from meshwright.gradients import call_module
from meshwright.torch_internals import tensors


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
    alike: dict[tuple[float, ...], list[int]] = {}
    rows = world.gather_numbers([*mine.values()], label="memory")
    for rank, (*held, _) in enumerate(rows):
        alike.setdefault(tuple(held), []).append(rank)
    return {
        _text(ranks): dict(
            zip(mine, map(int, [*held, max(rows[rank][-1] for rank in ranks)]), strict=True)
        )
        for held, ranks in alike.items()
    }


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


def forward_flops(model: nn.Module, example: object, positions: int) -> dict[str, float]:
    """Count the operations of each module's forward of ``example``; ``""`` is the model.

    Where a forward needs values, which tensors on meta lack, two count for each parameter and one
    of ``positions``, of experts for those that a token passes; attention is left out then.
    """
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call_module(model, example)
    except Exception:
        return _by_parameters(model, positions)
    found = {name: float(sum(by.values())) for name, by in counter.get_flop_counts().items()}
    outer = f"{type(model).__name__}."
    inner = {name.removeprefix(outer): n for name, n in found.items() if name.startswith(outer)}
    return {**inner, "": found.get("Global", 0.0)}


def _by_parameters(model: nn.Module, positions: int) -> dict[str, float]:
    modules = dict(model.named_modules())
    tops = (
        getattr(m, key, 0) for m in modules.values() for key in ("top_k", "num_experts_per_tok")
    )
    top = next((top for top in tops if isinstance(top, int) and top), 0)
    own: dict[str, float] = {}
    for name, module in modules.items():
        count = (
            0
            if isinstance(module, nn.Embedding)
            else sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        )
        experts = getattr(module, "num_experts", 0)
        share = top / experts if experts and top and not isinstance(module, nn.Linear) else 1.0
        own[name] = 2.0 * positions * count * share
    return {
        name: sum(n for inner, n in own.items() if not name or f"{inner}.".startswith(f"{name}."))
        for name in own
    }
