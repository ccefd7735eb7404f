"""Parameters that are the same on every layout, drawn module by module from one generator.

Every rank draws the full tensors of one module, keeps its shards, and continues with the next
module. There is no communication, and memory never exceeds one module's tensors besides the shards.
The numbers are those of one process that seeds torch's generator and calls ``reset_parameters`` in
the order of ``modules()``. Parameters may be on the meta device.

A model of Hugging Face's, which initializes its modules by ``_init_weights``, is walked in its own
order, children first; a module's children stay unsharded until it is done, since it may write to
them.

`initialize_by_blocks` draws blocks of rows, each from its own generator, for modules that are too
large to be drawn in full on every rank: a rank draws only the blocks that overlap its shard. The
values of a block depend on the seed, the parameter's name and the block's number. They differ from
those of `initialize`, but are the same on any number of ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.layout import Box
from meshwright.randomness.draws import name_seed
from meshwright.torch_internals.modules import RESET_ATTENTION
from meshwright.torch_internals.tensors import TorchDispatchMode, memory_of, schema_of, version_of

HeldBoxes = Callable[[torch.Tensor], Sequence[tuple[Box, torch.Tensor]]]
"""Returns the boxes of a parameter's full tensor that this rank has, each with its memory."""

Step = Callable[[nn.Module], object]
"""Initializes a module's own parameters and buffers."""


def held_whole(tensor: torch.Tensor) -> Sequence[tuple[Box, torch.Tensor]]:
    """Return the single box of a plain tensor. Raises `LayoutError` for a DTensor."""
    if hasattr(tensor, "device_mesh"):
        raise LayoutError(
            f"a parameter of shape {tuple(tensor.shape)} is a DTensor: pass "
            "held=meshwright.comm.held_boxes, which knows its parts"
        )
    return [(Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    *,
    init: Step | None = None,
    device: torch.device | str | None = None,
    held: HeldBoxes = held_whole,
) -> nn.Module:
    """Initialize all parameters and buffers of ``model`` with values that depend on ``seed`` alone.

    ``init(module)`` is called for each module in place of its ``reset_parameters``. Tensors on the
    meta device get memory on ``device`` (the CPU when None); ``held`` returns this rank's parts of
    sharded tensors. torch's generators are not changed.

    Raises ValueError, before anything is drawn, naming all modules with parameters and without an
    initializer; RuntimeError for a module that leaves elements of unknown value unwritten.
    """
    is_nested = init is None and hasattr(model, "_init_weights")
    if not is_nested:
        check_initializers(model, init)
    walk = _Walk(model, materialize(model, device), held)
    with _seeded(model, seed):
        if is_nested:
            walk.close(walk.children_first(model, model))
        else:
            for module in model.modules():
                walk.draw(module, init)
    return model


def module_initializer(model: nn.Module, seed: int, *, init: Step | None = None) -> Step:
    """Make a ``param_init_fn`` that initializes one module of ``model`` as `initialize` would.

    For `FullyShardedDataParallel`, which initializes modules in its own order: each module is drawn
    twice, once here to record the generator's state. ``model`` is on the meta device.
    """
    if hasattr(model, "_init_weights") and init is None:
        raise ValueError(
            f"{type(model).__name__} initializes modules together with their children: pass init, "
            "or use initialize"
        )
    check_initializers(model, init)
    states: dict[nn.Module, torch.Tensor] = {}
    names = {module: name for name, module in model.named_modules()}
    with _seeded(model, seed), torch.no_grad():
        for module in model.modules():
            states[module] = torch.get_rng_state()
            kept = dict(module._parameters), dict(module._buffers)
            materialize(module, None, recurse=False)
            _draw(module, names[module], init)
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])

    @torch.no_grad()
    def draw(module: nn.Module) -> None:
        walk = _Walk(model, materialize(module, None, recurse=False), held_whole)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(states[module])
            walk.draw(module, init)

    return draw


def materialize(
    model: nn.Module, device: torch.device | str | None, *, recurse: bool = True
) -> set[int]:
    """Allocate tensors on the meta device; returns the ids of those without known values.

    Parameters that were tied stay tied.
    """
    home = torch.device("cpu" if device is None else device)
    cells = list(cells_of(model, recurse=recurse))
    if not any(old.is_meta for *_, old in cells):
        return set()

    def at_home(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor

    model._apply(at_home, recurse=recurse)
    after: dict[int, torch.Tensor | None] = {}
    for where, key, old in cells:
        where[key] = after.setdefault(id(old), where[key])
    return {id(after[id(old)]) for *_, old in cells if old.is_meta}


# ------------------------------------------------------------------------------ one module


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """One tensor of a module: where the module holds it, and the tensor to put back there."""

    where: dict[str, torch.Tensor | None]
    key: str
    name: str
    rest: torch.Tensor
    is_known: bool
    """True when elements that are not written have known values."""


class _Walk:
    def __init__(self, model: nn.Module, undefined: set[int], held: HeldBoxes) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._undefined = undefined
        self._held = held

    def draw(self, module: nn.Module, init: Step | None) -> None:
        """Draw the module's own tensors and keep this rank's parts."""
        opened = self.open(module)
        _draw(module, self._names.get(module, ""), init)
        self.close(opened)

    def open(self, module: nn.Module) -> list[_Cell]:
        """Put full tensors into ``module``, filled with a marker if their values are unknown."""
        cells: list[_Cell] = []
        for where, key, rest in cells_of(module, recurse=False):
            is_whole = not hasattr(rest, "device_mesh")
            is_known = is_whole and id(rest) not in self._undefined
            path = f"{self._names.get(module, '')}.{key}".lstrip(".")
            cells.append(_Cell(where, key, path, rest, is_known))
            if not is_whole:
                where[key] = like_whole(rest, rest.device)
            if not is_known:
                _mark(where[key])
        return cells

    def close(self, cells: Sequence[_Cell]) -> None:
        """Keep this rank's parts of drawn tensors, and put the tensors at rest back."""
        for cell in cells:
            drawn, rest = cell.where[cell.key], cell.rest
            if drawn is None or drawn.shape != rest.shape:
                raise RuntimeError(f"{cell.name!r} was replaced by {drawn} while it was drawn")
            if not cell.is_known and _is_marked(drawn):
                raise RuntimeError(
                    f"{cell.name!r} has elements that its module's initialization leaves as they "
                    "were, and no other rank is asked: let it write all of them, or pass init"
                )
            cell.where[cell.key] = rest
            if drawn is not rest:
                for box, memory in self._held(rest):
                    memory.copy_(drawn[box.slices()])

    def children_first(self, module: nn.Module, owner: nn.Module) -> list[_Cell]:
        """Draw all submodules, then ``module`` itself; returns its own tensors, still full."""
        owner = module if hasattr(module, "_init_weights") else owner
        below: list[_Cell] = []
        for child in module.children():
            below += self.children_first(child, owner)
        opened = self.open(module)
        owner._init_weights(module)  # pyrefly: ignore[not-callable]
        self.close(below)
        return opened


def like_whole(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Allocate the full size of ``tensor``, as a parameter if it is one."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    is_trained = isinstance(tensor, nn.Parameter)
    return nn.Parameter(whole, tensor.requires_grad) if is_trained else whole


def _mark(tensor: torch.Tensor | None) -> None:
    """Fill ``tensor`` with a value that no initialization gives."""
    if tensor is not None and tensor.numel():
        tensor.detach().fill_(_marker(tensor))


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether any element still has the marker of `_mark`."""
    marker = _marker(tensor)
    if isinstance(marker, float):
        return bool(tensor.isnan().any())
    return not isinstance(marker, bool) and bool((tensor == marker).any())


def _marker(tensor: torch.Tensor) -> float | int | bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return math.nan
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


# ------------------------------------------------------------------------ who initializes


def initializer_of(module: nn.Module, init: Step | None) -> Step | None:
    """Return the step that draws the module's own tensors, or None."""
    if init is not None:
        return init
    name = RESET_ATTENTION if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
    own = getattr(module, name, None)
    if not callable(own) or not _holds(module):
        return None
    return lambda _: own()


def check_initializers(model: nn.Module, init: Step | None) -> None:
    """Raise ValueError, naming all modules with tensors and without an initializer."""
    lost = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _holds(module) and initializer_of(module, init) is None
    ]
    if lost:
        raise ValueError(
            f"nobody can initialize {', '.join(lost)}: give these classes a method "
            "reset_parameters, or pass init, which is called for every module"
        )


def _draw(module: nn.Module, name: str, init: Step | None) -> None:
    """Initialize the module's own tensors; RuntimeError if it writes to submodules."""
    step = initializer_of(module, init)
    if step is None:
        return
    below = [t for child in module.children() for t in _tensors(child, True)]
    versions = [version_of(local) for local in map(memory_of, below)]
    step(module)
    if isinstance(module, nn.MultiheadAttention):  # writes zeros below, which are drawn after it
        return
    if versions != [version_of(local) for local in map(memory_of, below)]:
        raise RuntimeError(
            f"the initialization of {name!r} ({type(module).__name__}) writes to parameters of "
            "modules below it, of which this rank may hold a part: let it write to its own alone"
        )


def _holds(module: nn.Module) -> bool:
    return any(True for _ in _tensors(module, False))


@contextlib.contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    devices = {t.device for t in _tensors(model, True) if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


def _tensors(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def cells_of(
    module: nn.Module, *, recurse: bool
) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Yield the place of each tensor (a dict of a module, and the key) and the tensor."""
    for part in module.modules() if recurse else (module,):
        for where in (part._parameters, part._buffers):
            for key, tensor in list(where.items()):
                if tensor is not None:
                    yield where, key, tensor  # pyrefly: ignore[invalid-yield]


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
