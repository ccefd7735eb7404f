"""Memory of a run by category, and the operations that its model needs for a token."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch

from meshwright.comm import Clock
from meshwright.comm.streams import is_host
from meshwright.composition import Trainable
from meshwright.recipes.config import ModelConfig
from meshwright.recipes.language_model import LanguageModel
from meshwright.torch_internals import tensors

_LONG_ENOUGH = 0.02
_LARGEST = 16384


def memory_of(trainable: Trainable, device: torch.device) -> dict[str, int]:
    """Count the bytes that this rank holds between steps, by category, and its ``peak``.

    The peak is the largest resident size of the process so far; on a device, the most of its memory
    that tensors have taken.
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


def _bytes(values: Iterable[object]) -> int:
    held = (tensors.memory_of(value) for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def flops_a_token(config: ModelConfig) -> int:
    """Count the floating-point operations that a token needs, forward and backward.

    Six for each parameter that multiplies, so not for the embedding's, and 12 x layers x dim x
    context for attention (Chowdhery et al., PaLM, 2022, appendix B).
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    parameters = sum(each.numel() for each in model.parameters())
    if not config.tied:  # one that is tied multiplies, as the head
        parameters -= model.embedding.weight.numel()
    return 6 * parameters + 12 * config.layers * config.dim * config.context


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
