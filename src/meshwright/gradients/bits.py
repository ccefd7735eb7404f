"""The bits of tensors, read as integers on the tensors' own device: digests and flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.comm.streams import moved
from meshwright.torch_internals.modules import step_unless, steps_by_flag
from meshwright.torch_internals.tensors import foreach_mul_

_WORDS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integers by their bytes."""

LANES = 2**14
"""32-bit lanes that are multiplied by weights of their own in a digest."""
ROWS = 16
"""Rows of lanes that are read at once, so that memory of a digest stays in a cache."""
_TOGETHER = 16 * ROWS
"""Short tensors that are read as one: few operators, in at most 16 MiB."""
GOLDEN = -7046029254386353131
"""Odd, with the bits of the golden ratio's fraction in 64 bits: multiples of it look random."""


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_WORDS[real.element_size()])


@torch.no_grad()
def digests_of(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Compute 64 bits for each tensor, equal for equal bits, on its device without a host sync.

    A DTensor's local tensor is used. None for None, and for tensors without readable bits.

    Lanes of 32 bits are folded, so that all their bits count, and multiplied by weights that depend
    on the position; integers wrap around, so the order of the sum does not matter. Short tensors of
    a device share operators, whose launches dominate the cost: all tensors of a unit in one call
    take a tenth of the time of separate calls.
    """
    found: list[torch.Tensor | None] = [None] * len(tensors)
    short: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        raw = None if tensor is None else _bytes_of(tensor)
        if raw is None:
            continue
        if raw.device not in factors:
            factors[raw.device] = _weights(raw.device)
        if not raw.numel() % 4 and raw.numel() < 4 * LANES:
            short.setdefault(raw.device, []).append((index, raw.view(torch.int32)))
        else:
            found[index] = _digest_of_long(raw, factors[raw.device])
    for device, words in short.items():
        weights = factors[device]
        for start in range(0, len(words), ROWS):
            some = words[start : start + ROWS]
            lengths = [each.numel() for _, each in some]
            line = _folded(torch.cat([each for _, each in some]))
            line.mul_(torch.cat([weights[:length] for length in lengths]))
            sums = torch.stack([part.sum() for part in line.split(lengths)])
            for (index, _), digest in zip(some, sums.mul_(GOLDEN).unbind(), strict=True):
                found[index] = digest
    return found


@torch.no_grad()
def digest_of_all(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Compute 64 bits for all ``tensors`` together, in order, on the device of the first.

    See `digests_of`. Short ones are read as one long tensor. None if no bits can be read.
    """
    found: list[torch.Tensor] = []
    short: dict[torch.device, list[torch.Tensor]] = {}
    factors: dict[torch.device, torch.Tensor] = {}

    def read(raw: torch.Tensor) -> None:
        if raw.device not in factors:
            factors[raw.device] = _weights(raw.device)
        found.append(_digest_of_long(raw, factors[raw.device]))

    for tensor in tensors:
        raw = _bytes_of(tensor)
        if raw is None:
            continue
        if raw.numel() >= 4 * LANES:
            read(raw)
            continue
        line = short.setdefault(raw.device, [])
        line.append(raw)
        if len(line) == _TOGETHER:
            read(torch.cat(line))
            line.clear()
    for line in short.values():
        if line:
            read(torch.cat(line))
    return _one_of(torch.stack([moved(each, found[0].device) for each in found])) if found else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """View the bytes of ``tensor``, or copy them; None if it has none to read."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        tensor = values_of(local_of(tensor))
    local = tensor.detach()
    if local.is_meta or local.layout is not torch.strided or local.is_quantized:
        return None
    if type(local) is not torch.Tensor and type(local) is not nn.Parameter:
        return None
    raw = local.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 4 else raw


def _digest_of_long(raw: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `digests_of`; for any number of bytes."""
    lanes = raw.numel() // 4
    whole = lanes // LANES * LANES
    words = raw[: lanes * 4].view(torch.int32)
    rows = words[:whole].view(-1, LANES).split(ROWS) if whole else ()
    parts = [_folded(each).mul_(weights).sum(1) for each in rows]
    tail = words[whole:]
    parts.append(_folded(tail).mul_(weights[: tail.numel()]).sum().view(1))
    rest = raw[lanes * 4 :].to(torch.int32)
    parts.append((rest * weights[: rest.numel()]).sum().view(1))
    return _one_of(torch.cat(parts))


def _one_of(digests: torch.Tensor) -> torch.Tensor:
    """Combine several digests into one."""
    places = torch.arange(1, 2 * digests.numel(), 2, device=digests.device)
    return (digests * places.mul_(GOLDEN)).sum()


def _folded(words: torch.Tensor) -> torch.Tensor:
    return (words >> 16).bitwise_xor_(words)


def _weights(device: torch.device) -> torch.Tensor:
    """Odd 32-bit numbers, one for each lane."""
    steps = torch.arange(1, LANES + 1, device=device).mul_(GOLDEN)
    return (steps >> 32).to(torch.int32).bitwise_or_(1)


def step_if(is_good: torch.Tensor, optimizer: Optimizer, gradients: Iterable[torch.Tensor]) -> None:
    """Step ``optimizer`` if ``is_good``, a flag on the device that the host does not read.

    If it is False, fused optimizers write nothing; others step with ``gradients`` set to zero.
    """
    if steps_by_flag(optimizer):
        step_unless(is_good.logical_not().float(), optimizer)
    else:
        zero_unless(is_good, gradients)
        optimizer.step()


@torch.no_grad()
def zero_unless(is_wanted: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Zero all ``tensors``, in place, unless ``is_wanted``, which the host does not read.

    Their bits are multiplied by one or zero, so that non-finite values become zero, too.
    """
    words: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        each = _as_words(tensor)
        words.setdefault(each.dtype, []).append(each)
    for kind, group in words.items():
        foreach_mul_(group, is_wanted.to(kind))
