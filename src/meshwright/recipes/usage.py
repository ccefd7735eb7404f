"""Memory of a run by category, and the floating-point operations of its model per token."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch
from torch import nn

from meshwright.comm import Clock, Communicator
from meshwright.comm.streams import is_host
from meshwright.composition import Trainable
from meshwright.recipes.config import ModelConfig
from meshwright.recipes.language_model import LanguageModel
from meshwright.torch_internals import tensors

_LONG_ENOUGH = 0.02
_LARGEST = 16384


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


def flops_a_token(config: ModelConfig) -> int:
    """Count the floating-point operations per token, forward and backward.

    Six for each parameter that multiplies (not those of the embedding), and 12 x layers x dim x
    context for attention (Chowdhery et al., PaLM, 2022, appendix B).
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    parameters = sum(each.numel() for each in model.parameters())
    if not config.tied:  # a tied embedding multiplies, as the head
        parameters -= model.embedding.weight.numel()
    return 6 * parameters + 12 * config.layers * config.dim * config.context


def flops_of(model: nn.Module) -> int:
    """Count operations per token for any model: six for each parameter outside of embeddings.

    The cost of attention, which grows with the context, is unknown here and not counted.
    """
    tables = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)]
    return 6 * max(0, sum(each.numel() for each in model.parameters()) - sum(tables))


def matrix_flops(device: torch.device, dtype: str) -> float:
    """Measure the floating-point operations a second of a large matrix product of ``dtype``."""
    clock, size = Clock(device), 256
    while True:
        matrix = torch.full((size, size), 0.5, dtype=getattr(torch, dtype), device=device)
        matrix @ matrix
        start, _, end = clock.mark(), matrix @ matrix, clock.mark()
        took = end.seconds() - start.seconds()
        if took >= _LONG_ENOUGH or size >= _LARGEST:
            return 2.0 * size**3 / took
        size *= 2
