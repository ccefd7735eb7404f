"""The position of dropout in a training step, so that its masks do not depend on the layout.

A mask is a function of seed, step, site, the sample's number in the global batch, and the position
of the element in the sample. A site is a module's name and the number of its earlier calls in the
forward pass. Microbatches matter only through the numbers of their samples, so a mask does not
depend on how a batch is split.

Random bits are drawn by seed and position, so that any part is drawn alone. The bits of element
``i`` are half of word ``i // 2``, and word ``n`` is the ``n``-th number of the generator SplitMix64
(Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), whose state advances
by a constant, so that each number is computed independently.

Alternatives considered: Philox, whose ten rounds cost 5 times as much in vectorized torch
operations; torch's own generators, one for each block of elements, which draw whole rows where a
rank holds a slice of each, and start a kernel for each block on a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from meshwright.errors import LayoutError
from meshwright.layout import Box, chunk
from meshwright.torch_internals.autograd import running_backward

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
    seed: int,
    samples: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    device: torch.device,
    listed: Mapping[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Draw 32 bits for each element of ``box`` of each sample: int32 ``(samples, *box.shape)``.

    A sample is a row-major tensor of ``shape``. The bits of an element depend on ``seed``, its
    sample's number in ``samples`` (int64, 1-D) and its position in the sample, and on nothing else.
    ``listed``: positions along some dims, where ``box`` has their number alone: (1 or samples, n).
    """
    # Scramble keys, too: otherwise consecutive samples would have shifted copies of one sequence.
    keys = (samples.to(device) + 1).mul_(_STEP).bitwise_xor_(_signed(seed))
    _scramble(keys, torch.empty_like(keys))
    start = None if listed else _flat_start(box, shape)
    if start is None or start % 2:
        return _scattered(keys, box, shape, listed or {})
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


def _scattered(
    keys: torch.Tensor, box: Box, shape: tuple[int, ...], listed: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Draw as `random_bits` does for elements that are not contiguous in a sample."""
    odd = shape[-1] % 2 or box.offset[-1] % 2 or box.shape[-1] % 2
    if not (odd or len(shape) - 1 in listed):
        # Both halves of each word are needed, next to each other.
        pairs = Box((*box.offset[:-1], box.offset[-1] // 2), (*box.shape[:-1], box.shape[-1] // 2))
        at = _places(pairs, (*shape[:-1], shape[-1] // 2), keys.device, listed)
        return _words(keys, at).view(torch.int32)
    at = _places(box, shape, keys.device, listed)
    return _words(keys, at >> 1).bitwise_right_shift_((at & 1) * 32).to(torch.int32)


def _words(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    words = keys.view(-1, *(1,) * (numbers.ndim - 1)) + numbers * _STEP
    _scramble(words, torch.empty_like(words))
    return words


def _places(
    box: Box, shape: tuple[int, ...], device: torch.device, listed: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The flat position in a sample of each element of ``box``: (1 or samples, *box.shape)."""
    at = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        places = listed.get(dim)
        if places is None:
            start = box.offset[dim]
            places = torch.arange(start, start + box.shape[dim], device=device).unsqueeze(0)
        others = (1,) * (len(shape) - dim - 1)
        at = at + (places.to(device) * stride).view(len(places), *(1,) * dim, -1, *others)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DimPart:
    """This rank's shard of one dim of an activation.

    ``DimPart(dim=1, index=rank, parts=4)`` is a quarter of the sequence, ``dim=-1`` one of the
    hidden dim. ``whole`` is the full size of the dim if parts may differ, by torch's rule, or by
    ``positions``: those of this rank's elements, int64, (1 or samples, elements).
    """

    dim: int
    """The dim of the activation, counted with dim 0 (samples), which it may not be."""
    index: int
    parts: int
    whole: int | None = None
    positions: torch.Tensor | None = None

    def place(self, size: int, site: str) -> tuple[int, int]:
        """Return the position of the first of this rank's ``size`` elements, and the full size."""
        whole = size * self.parts if self.whole is None else self.whole
        start, expected = chunk(whole, self.parts, self.index)
        if self.positions is not None:
            start, expected = 0, self.positions.shape[1]
        if size != expected:
            raise LayoutError(
                f"dropout {site!r}: expected {expected} of {whole} elements along dim {self.dim} "
                f"in part {self.index} of {self.parts}, found {size}"
            )
        return start, whole


@dataclass(slots=True, eq=False)
class _Microbatch:
    samples: torch.Tensor
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class _DropoutCall:
    """One call of dropout in a forward pass, to be found again in a recomputation."""

    samples: torch.Tensor
    site: str
    number: int


class Draws:
    """Seed and step of a run, and the current samples. All ranks must have the same seed.

    >>> draws = Draws(seed=0)
    >>> replace_dropout(model, draws)
    >>> for step in range(steps):
    ...     draws.begin_step(step)
    ...     for number, part in enumerate(parts):
    ...         with draws.microbatch(number, part.numbers_in_the_global_batch):
    ...             loss(model(part.inputs)).backward()

    Copies of a model share this object.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        self.seed = seed
        self.step = step
        self.is_drawing = False
        """True while this object itself draws from torch's generator."""
        self._microbatches: dict[int, _Microbatch] = {}
        self._recorded: dict[int, list[_DropoutCall]] = {}
        self._now: _Microbatch | None = None
        self.is_rehearsal = False
        """True within `rehearsal`, where nothing is dropped."""
        self._parts: tuple[DimPart, ...] = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def begin_step(self, step: int) -> None:
        """Set the optimizer step, and drop the records of the last one."""
        self.step = step
        self._microbatches.clear()
        self._recorded.clear()

    @contextlib.contextmanager
    def microbatch(
        self, number: int, samples: Sequence[int] | torch.Tensor | None = None
    ) -> Iterator[None]:
        """The context of microbatch ``number`` of this step; ``samples`` number its rows.

        They are numbers in the global batch (or in the data set), one for each row of dim 0 of
        dropout's input. They may be omitted when the microbatch is entered again, for its backward
        pass.
        """
        known = self._microbatches.get(number)
        if samples is not None:
            rows = torch.as_tensor(samples, dtype=torch.int64, device="cpu")
            if rows.ndim != 1:
                raise ValueError(f"expected one number a sample, found shape {tuple(rows.shape)}")
            if known is None or not torch.equal(known.samples, rows):
                known = self._microbatches[number] = _Microbatch(rows)
        elif known is None:
            raise ValueError(
                f"microbatch {number} of step {self.step} has not been computed: say which samples "
                "it holds"
            )
        before, self._now = self._now, known
        try:
            yield
        finally:
            self._now = before

    @contextlib.contextmanager
    def split(self, *parts: DimPart) -> Iterator[None]:
        """Split the activations of all modules by ``parts``, in forwards and backwards within."""
        before, self._parts = self._parts, parts
        try:
            yield
        finally:
            self._parts = before

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Disable dropout in the block, for runs that only observe shapes or module order."""
        before, self.is_rehearsal = self.is_rehearsal, True
        try:
            yield
        finally:
            self.is_rehearsal = before

    def state_dict(self) -> dict[str, int]:
        """Return the whole state, seed and step, which is valid for any layout."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from the result of `state_dict`."""
        self.seed = int(state["seed"])
        self.begin_step(int(state["step"]))

    def bits(
        self, site: str, local: Sequence[int], parts: Sequence[DimPart], device: torch.device
    ) -> torch.Tensor:
        """Draw random int32 of shape ``local`` for one call of module ``site``.

        ``local`` is the shape of this rank's shard, with samples along dim 0; ``parts`` are its
        sharded dims.
        """
        call = self._recall(site) if running_backward() != -1 else self._count(site)
        if not local or local[0] != len(call.samples):
            raise ValueError(
                f"dropout {site!r}: expected {len(call.samples)} samples along dim 0, found shape "
                f"{tuple(local)}. Give it activations with samples first, or name the module in "
                "per_rank, to let each rank draw for itself"
            )
        offset, shape = [0] * (len(local) - 1), list(local[1:])
        listed = {}
        for part in (*self._parts, *parts):
            dim = part.dim % len(local)
            if not dim:
                raise LayoutError(
                    f"dropout {site!r}: samples are identified by numbers, not {part}"
                )
            if part.positions is not None:
                listed[dim - 1] = part.positions
            offset[dim - 1], shape[dim - 1] = part.place(local[dim], site)
        seed = name_seed(self.seed, "dropout", self.step, call.site, call.number)
        box = Box(tuple(offset), tuple(local[1:]))
        return random_bits(seed, call.samples, box, tuple(shape), device, listed)

    def _count(self, site: str) -> _DropoutCall:
        now = self._now
        if now is None:
            raise RuntimeError(
                f"dropout {site!r} ran in training mode, and nobody has said which samples it is "
                "given: run the forward pass inside `with draws.microbatch(number, samples)`, or "
                "the module in evaluation mode"
            )
        call = _DropoutCall(now.samples, site, now.calls[site])
        now.calls[site] += 1
        self._recorded.setdefault(self._token(), []).append(call)
        return call

    def _recall(self, site: str) -> _DropoutCall:
        """Find the forward call that is being recomputed in a backward pass."""
        now = self._now
        known = [call for call in self._recorded.get(self._token(), ()) if call.site == site]
        if now is not None:
            known = [call for call in known if call.samples is now.samples]
            # A single call is unique even if the checkpoint has not restored the generator.
            if not known and now.calls[site] == 1:
                return _DropoutCall(now.samples, site, 0)
        if len(known) != 1:
            raise RuntimeError(
                f"dropout {site!r} runs again in a backward pass, and which of its calls that is "
                "cannot be told. Leave preserve_rng_state of torch.utils.checkpoint at True, seed "
                "no generator within a step, and run the backward pass inside the same `with "
                "draws.microbatch(number)`"
            )
        return known[0]

    def _token(self) -> int:
        """Draw from torch's generator; checkpoints restore it, so a recomputation gets the same."""
        self.is_drawing = True
        try:
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        finally:
            self.is_drawing = False
