"""Seeds from names, and random bits by seed and position, so that any part is drawn alone.

The bits of element ``i`` are half of word ``i // 2``, and word ``n`` is the ``n``-th number of the
generator SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014),
whose state advances by a constant, so that each number is computed independently.

Alternatives considered: Philox, whose ten rounds cost 5 times as much in vectorized torch
operations; torch's own generators, one for each block of elements, which draw whole rows where a
rank holds a slice of each, and start a kernel for each block on a GPU.
"""

from __future__ import annotations

import hashlib
import math

import torch

from meshwright.layout import Box

_CHUNK = 1 << 14
"""Words computed at once on a CPU, so that all passes over them stay in its cache."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def name_seed(seed: int, *names: object) -> int:
    """Compute a 63-bit seed from ``seed`` and ``names``, the same on every machine."""
    text = "\0".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def random_bits(
    seed: int, samples: torch.Tensor, box: Box, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Draw 32 bits for each element of ``box`` of each sample: int32 ``(samples, *box.shape)``.

    A sample is a row-major tensor of ``shape``. The bits of an element depend on ``seed``, its
    sample's number in ``samples`` (int64, 1-D) and its position in the sample, and on nothing else.
    """
    # Scramble keys, too: otherwise consecutive samples would have shifted copies of one sequence.
    keys = (samples.to(device) + 1).mul_(_STEP).bitwise_xor_(_signed(seed))
    _scramble(keys, torch.empty_like(keys))
    start = _flat_start(box, shape)
    if start is None or start % 2:
        return _scattered(keys, box, shape)
    count = box.numel
    words = torch.arange(start // 2, (start + count + 1) // 2, device=device).mul_(_STEP)
    found = torch.empty(len(keys), len(words), dtype=torch.int64, device=device)
    chunk = _CHUNK if device.type == "cpu" else max(found.numel(), 1)
    columns = max(min(len(words), chunk), 1)
    rows = max(chunk // columns, 1)
    spare = torch.empty(rows, columns, dtype=torch.int64, device=device)
    for top in range(0, len(keys), rows):
        for left in range(0, len(words), columns):
            part = found[top : top + rows, left : left + columns]
            torch.add(words[left : left + columns], keys[top : top + rows, None], out=part)
            _scramble(part, spare[: part.shape[0], : part.shape[1]])
    return found.view(torch.int32)[:, :count].reshape(len(keys), *box.shape)


def _scattered(keys: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw as `random_bits` does for elements that are not contiguous in a sample."""
    if not (shape[-1] % 2 or box.offset[-1] % 2 or box.shape[-1] % 2):
        # Both halves of each word are needed, next to each other.
        pairs = Box((*box.offset[:-1], box.offset[-1] // 2), (*box.shape[:-1], box.shape[-1] // 2))
        at = _places(pairs, (*shape[:-1], shape[-1] // 2), keys.device)
        return _words(keys, at).view(torch.int32)
    at = _places(box, shape, keys.device)
    return _words(keys, at >> 1).bitwise_right_shift_((at & 1) * 32).to(torch.int32)


def _words(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    words = keys.view(-1, *(1,) * numbers.ndim) + numbers * _STEP
    _scramble(words, torch.empty_like(words))
    return words


def _places(box: Box, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The flat position in a sample of each element of ``box``."""
    at = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        places = torch.arange(box.offset[dim], box.offset[dim] + box.shape[dim], device=device)
        at = at + places.mul_(stride).view(-1, *(1,) * (len(shape) - dim - 1))
        stride *= shape[dim]
    return at


def _flat_start(box: Box, shape: tuple[int, ...]) -> int | None:
    """The flat position of the first element if those of ``box`` are contiguous, else None."""
    start, is_cut = 0, False
    for dim, size in enumerate(shape):
        start = start * size + box.offset[dim]
        if is_cut and box.shape[dim] != size:
            return None
        is_cut = is_cut or box.shape[dim] > 1
    return start if math.prod(shape) else 0


def _scramble(words: torch.Tensor, spare: torch.Tensor) -> None:
    """Mix the bits of each of ``words`` in place: SplitMix64's output function."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(words, shift, out=spare)
        # The shift keeps the sign; zeros must come in from above.
        spare.bitwise_and_((1 << (64 - shift)) - 1)
        words.bitwise_xor_(spare)
        if factor != 1:
            words.mul_(factor)
