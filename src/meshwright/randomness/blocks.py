"""Parameters drawn in blocks of rows, each from its own generator.

A rank draws only the blocks that overlap its shard: for modules that are too large to be drawn in
full on every rank. The values of a block depend on the seed, the parameter's name and the block's
number. They differ from those of `initialize`, but are the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.layout import Box
from meshwright.randomness.counters import name_seed
from meshwright.randomness.initialization import (
    HeldBoxes,
    Step,
    cells_of,
    check_initializers,
    held_whole,
    initializer_of,
    like_whole,
    materialize,
)
from meshwright.torch_internals.tensors import TorchDispatchMode, schema_of

BLOCK = 1 << 16
"""Elements of a block, rounded down to full rows; at least one row."""

_Call = tuple[Any, tuple[object, ...], dict[str, object]]
"""An operator, and its arguments after the tensor that it writes to."""


@torch.no_grad()
def initialize_by_blocks(
    model: nn.Module,
    seed: int,
    *,
    init: Step | None = None,
    device: torch.device | str | None = None,
    held: HeldBoxes = held_whole,
) -> nn.Module:
    """Initialize ``model``; each rank draws only the blocks of rows that overlap its shards.

    ``reset_parameters``, or ``init(module)``, runs on the meta device to record what is written to
    each parameter: operators that treat all elements alike, such as ``normal_`` and ``zero_``.

    Raises ValueError for modules without an initializer, and for those that write in another way,
    such as orthogonal matrices, truncated normals or the zero row of a padding index.
    """
    check_initializers(model, init)
    plans = {
        name: _recorded(module, name, step)
        for name, module in model.named_modules()
        if (step := initializer_of(module, init)) is not None
    }
    undefined = materialize(model, device)
    for name, module in model.named_modules():
        for _, key, tensor in cells_of(module, recurse=False):
            calls = plans.get(name, {}).get(key, [])
            path = f"{name}.{key}".lstrip(".")
            if not calls and (id(tensor) in undefined or hasattr(tensor, "device_mesh")):
                raise ValueError(
                    f"{path!r}: its module's initialization writes nothing to it on the meta "
                    "device, so it cannot be drawn in blocks: use initialize"
                )
            for box, memory in held(tensor):
                _fill(memory, box, tuple(tensor.shape), calls, (seed, path))
    return model


def _fill(
    memory: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    calls: Sequence[_Call],
    source: tuple[int, str],
) -> None:
    if not shape:
        memory, box, shape = memory.view(1), Box((0,), (1,)), (1,)
    rows = max(BLOCK // max(math.prod(shape[1:]), 1), 1)
    first, last = box.offset[0] // rows, -(-(box.offset[0] + box.shape[0]) // rows)
    for number in range(first, last if calls and box.numel else first):
        start = number * rows
        whole = Box((start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
        block = torch.empty(whole.shape, dtype=memory.dtype, device="cpu")
        generator = torch.Generator().manual_seed(name_seed(*source, number))
        for function, args, kwargs in calls:
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            function(block, *args, **kwargs, **({"generator": generator} if is_random else {}))
        part = whole.intersect(box)
        if part is not None:
            memory[part.slices(box)].copy_(block[part.slices(whole)])


def _recorded(module: nn.Module, name: str, step: Step) -> dict[str, list[_Call]]:
    """Record the operators that the initialization of ``module`` calls on its own tensors."""
    kept = dict(module._parameters), dict(module._buffers)
    twins: dict[str, torch.Tensor] = {}
    for where, key, tensor in cells_of(module, recurse=False):
        where[key] = twins[key] = like_whole(tensor, "meta")
    recorder = _Recorder(name, twins)
    try:
        with recorder:
            step(module)
    finally:
        module._parameters.update(kept[0])
        module._buffers.update(kept[1])
    return recorder.calls


class _Recorder(TorchDispatchMode):
    """Records operators that write to tensors; rejects those that treat elements differently."""

    def __init__(self, name: str, twins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        self._keys = {id(tensor): key for key, tensor in twins.items()}
        self.calls: dict[str, list[_Call]] = {key: [] for key in twins}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        others = [*args[1:], *given.values()]
        key = self._keys.get(id(args[0])) if args else None
        alike = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded} & set(func.tags)
        is_fill = schema_of(func).name in ("aten::zero_", "aten::fill_")
        is_plain = not any(isinstance(value, torch.Tensor) for value in others)
        if key is not None and schema_of(func).is_mutable and (alike or is_fill) and is_plain:
            self.calls[key].append((func, args[1:], given))
            return args[0]
        if any(id(value) in self._keys for value in (*args, *others)):
            raise ValueError(
                f"the initialization of {self._name!r} calls {func} on "
                f"{key or 'its parameters'!r}, which does not treat all elements alike, so it "
                "cannot be drawn in blocks: use initialize, or another initialization"
            )
        return func(*args, **(kwargs or {}))
