"""Any model, run once on fake tensors: what each unit holds, computes and keeps for its backward.

The run has no memory and no values. Bytes are those of storages, each counted once however many
tensors view it; those of parameters and buffers are not activations. The rest of the planner does
not import this file, which loads torch.
"""

from __future__ import annotations

import contextlib
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.composition.laying_out import blocks
from meshwright.errors import PlanError
from meshwright.gradients import call_module
from meshwright.plan import match_names
from meshwright.planner.hardware import Hardware
from meshwright.planner.recompute import RecomputeOption, RecomputePolicy, choose
from meshwright.planner.shapes import LIMIT, ModelShape
from meshwright.planner.software import OURS
from meshwright.torch_internals.tensors import FLASH_ATTENTION, storage_id, without_memory
from meshwright.torch_internals.trees import tree_leaves, tree_map_only

CHEAP = 0.5
"""Share of a block's operations below which a child of it is cheap to recompute."""
CLOSE = 0.05
"""Share by which parameters and operations of a decoder may differ from those of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTrace:
    """A block of the model, or a module beside the blocks; the root has the rest, as ``""``."""

    name: str
    parameters: int
    """Elements; of a tied parameter in the first unit that has it."""
    trainable: int
    """Of these, those that require gradients."""
    flops: int
    """Of its forward."""
    saved: int
    """Bytes that it keeps for its backward, without those that earlier units keep too."""
    shape: tuple[int, ...]
    """Of the first tensor that it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """What one forward of a model holds, computes and keeps."""

    name: str
    units: tuple[UnitTrace, ...]
    blocks: tuple[str, ...]
    """Names of the units that are items of a list of equal modules."""
    flops: Mapping[str, int]
    """Of the forward, by module; ``""`` is the model."""
    keeps: tuple[tuple[frozenset[str], int], ...]
    """Each tensor that autograd saved: the modules that ran, and its storage."""
    inputs: Mapping[str, frozenset[int]]
    """Storages that modules were called with."""
    sizes: Mapping[int, int]
    """Bytes of storages."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(unit.parameters for unit in self.units)

    @property
    def tokens(self) -> int:
        """Rows of what the first block returns."""
        blocks = [u.shape for u in self.units if u.name in self.blocks or not self.blocks]
        return math.prod(next((shape for shape in blocks if len(shape) > 1), (1, 1))[:-1]) or 1

    def kept(self, recomputed: Iterable[str] = (), inside: str | None = None) -> frozenset[int]:
        """Storages that a forward keeps if ``recomputed``, patterns of modules, are run again.

        ``inside``: only those of this module.
        """
        again = {n for pattern in recomputed for n in match_names(pattern, self.inputs)}
        found = {
            key
            for running, key in self.keeps
            if not running & again and (inside is None or inside in running)
        }
        for name in again:
            # What is inside of a recomputed module starts from its input.
            is_inner = any(name.startswith(f"{other}.") for other in again)
            if not is_inner and (inside is None or f"{name}.".startswith(f"{inside}.")):
                found |= self.inputs[name]
        return frozenset(found)

    def children(self, block: str, share: float = 2.0) -> tuple[str, ...]:
        """Modules inside of ``block`` that have less than ``share`` of its operations each."""
        most = max(share * self.flops.get(block, 0), 1)
        inside = (name for name in self.inputs if name.rpartition(".")[0] == block)
        return tuple(name for name in inside if self.flops.get(name, 0) < most)

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Bytes of ``storages`` together."""
        return sum(self.sizes[key] for key in storages)

    def saved(self, recomputed: Iterable[str] = ()) -> int:
        """Bytes that a forward of the model keeps, as `kept`."""
        return self.bytes_of(self.kept(recomputed))


class _TracedRun:
    """What is seen of one forward."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(part): name for name, part in model.named_modules()}
        self.running: list[str] = []
        self.keeps: list[tuple[frozenset[str], int]] = []
        self.inputs: dict[str, frozenset[int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sizes: dict[int, int] = {}
        own = (*model.parameters(), *model.buffers())
        # Storages are held, so that no number is given twice.
        self._held = [tensor.untyped_storage() for tensor in own]
        self._own = {storage_id(storage) for storage in self._held}
        for part in model.modules():
            part.register_forward_pre_hook(self.enter, with_kwargs=True)
            part.register_forward_hook(self.leave, with_kwargs=True)

    def storages(self, values: object) -> frozenset[int]:
        """Number the storages of the tensors in ``values``, without the model's own."""
        found = set()
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                if key not in self._own:
                    self._held.append(storage)
                    self.sizes[key] = storage.nbytes()
                    found.add(key)
        return frozenset(found)

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        self.running.append(name := self.names[id(module)])
        self.inputs[name] = self.inputs.get(name, frozenset()) | self.storages((args, kwargs))

    def leave(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        shapes = [tuple(t.shape) for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        self.shapes[self.running.pop()] = shapes[0] if shapes else ()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        running = frozenset(self.running)
        self.keeps += [(running, key) for key in self.storages(tensor)]
        return tensor


def trace_model(
    build: Callable[[], nn.Module],
    example: object,
    *,
    target: object = None,
    loss: Callable[..., Any] | None = None,
    compute: str | None = None,
) -> ModelTrace:
    """Run the forward of ``build()`` on a batch like ``example``, without memory.

    Of ``example`` and ``target``, as for `Trainable.step`, shapes and dtypes count. What ``loss``
    saves belongs to the root. ``compute``: the dtype of autocast. Raises ``PlanError`` if the model
    cannot be built or run so.
    """
    flops = FlopCounterMode(display=False, custom_mapping={FLASH_ATTENTION[0]: _attention_flops})
    like = partial(torch.empty_like, device="cpu")
    computing = compute and torch.autocast("cpu", getattr(torch, compute))
    with without_memory("cpu"):
        try:
            model = build().train()
            run = _TracedRun(model)
            saving = torch.autograd.graph.saved_tensors_hooks(run.pack, lambda tensor: tensor)
            batch, goal = tree_map_only(torch.Tensor, like, (example, target))
            with computing or contextlib.nullcontext(), saving, flops:
                output = call_module(model, batch)
                if loss is not None:
                    loss(output) if goal is None else loss(output, goal)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise PlanError(f"the model cannot be traced without memory: {said}") from error
        return _traced(model, run, flops)


def named_model(name: str, seq: int = 0) -> tuple[ModelShape, ModelTrace]:
    """The sizes of a model that ``package.module:function`` builds, and its trace in bfloat16.

    Bytes of the trace are those that grow with the batch, without the weights in bfloat16.
    The function returns a module and an example batch, or a module of tokens alone, which gets a
    row of ``seq`` of them. Raises ``PlanError``.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = pkgutil.resolve_name(name)
        with without_memory("meta"):
            model, *given = _parts(function)
        if not isinstance(model, nn.Module):
            raise TypeError(f"it returned a {type(model).__name__}")
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise PlanError(
            f"MODEL {name!r}: expected package.module:function, which returns a module, or a "
            f"module and an example batch; {said}"
        ) from error
    tokens = torch.empty(1, seq or 2048, dtype=torch.int64, device="meta")
    example = given[0] if given else tokens
    batched = (t for t in tree_leaves(example) if isinstance(t, torch.Tensor) and t.ndim)
    rows = next((len(tensor) for tensor in batched), 0)
    one, two = (
        trace_model(
            lambda: cast(nn.Module, _parts(function)[0]),
            tree_map_only(torch.Tensor, partial(_repeated, times, rows), example),
            compute="bfloat16",
        )
        for times in (1, 2)
    )
    if len(one.keeps) != len(two.keeps):
        raise PlanError(f"MODEL {name!r}: it runs otherwise on a batch that is twice as long")
    kept = ((less, more) for (_, less), (_, more) in zip(one.keeps, two.keeps, strict=True))
    growing = {less: two.sizes[more] - one.sizes[less] for less, more in kept}
    trace = replace(one, sizes={**one.sizes, **growing})
    return _shape(name, trace), trace


def _repeated(times: int, rows: int, tensor: torch.Tensor) -> torch.Tensor:
    """Repeat a batch of ``rows``; other tensors, such as positions, stay."""
    return torch.cat([tensor] * times) if tensor.shape[:1] == (rows,) else tensor


def _parts(function: Callable[[], object]) -> tuple[object, ...]:
    made = function()
    return made if isinstance(made, tuple) else (made,)


def _shape(name: str, one: ModelTrace) -> ModelShape:
    """The decoder that has as many parameters and operations, and keeps as much of a token.

    A model without blocks is a single one. Nothing is known of its heads, so no axis splits them.
    Raises ``PlanError`` where no decoder is like it.
    """
    blocks = [u for u in one.units if u.name in one.blocks or not one.blocks]
    count, tokens = len(one.blocks) or 1, one.tokens
    shape = next((u.shape for u in blocks if len(u.shape) > 1), (1, 1))
    hidden, seq = shape[-1] or 1, math.prod(shape[1:-1]) or 1
    parameters = sum(u.parameters for u in blocks) / count
    extra = sum(u.flops for u in blocks) / count / tokens - 2 * parameters
    attended = _size(extra / (4 * seq))
    rest = one.parameters - sum(u.parameters for u in blocks)
    head = (one.flops[""] - sum(u.flops for u in blocks)) / tokens / 2
    is_tied = rest <= 1.5 * head
    saved = one.saved() / count / tokens
    # A step has what recomputed blocks keep and, as the search counts, one block that is whole.
    again = [one.bytes_of(one.kept((), n) - one.kept((n,), n)) for n in one.blocks]
    least = (one.saved(one.blocks) + max(again, default=0)) / tokens - saved
    trainable = sum(unit.trainable for unit in one.units)
    flops = one.flops[""] / tokens
    for glu, norms in ((False, 8), (True, 2)):
        found = ModelShape(
            name=name,
            layers=count,
            hidden=hidden,
            heads=1,
            head_dim=attended,
            ffn=_size((parameters / hidden - 4 * attended - norms) / (3 if glu else 2)),
            glu=glu,
            vocab=_size(rest / hidden / (1 if is_tied else 2)),
            seq=seq,
            tied=is_tied,
            saved=saved,
            least=max(1, math.ceil(least / count)),
            frozen=1 - trainable / (one.parameters or 1),
        )
        # What is beside the blocks counts as vocabulary, of which a step keeps outputs.
        width = one.units[-1].shape[-1] if one.units[-1].shape else found.vocab
        outputs = OURS.logits_bytes * max(0, found.vocab - width)
        pairs = (one.parameters, found.parameters), (flops, found.flops)
        if all(abs(has - real) <= CLOSE * real for real, has in pairs) and (
            outputs <= CLOSE * (count * saved + OURS.logits_bytes * width)
        ):
            return found
    raise PlanError(
        f"MODEL {name!r}: no decoder has its {one.parameters:,} parameters, and {flops:,.0f} "
        f"operations and outputs for each of {tokens:,} rows, within {CLOSE:.0%}, so that layouts "
        "cannot be compared; see what it holds with planner.trace_model, let meshwright train "
        "--plan auto choose its data axes, or try a plan with meshwright train --rehearse RANK"
    )


def _size(number: float) -> int:
    return min(max(1, round(number)), LIMIT)


def recompute_options(trace: ModelTrace, hardware: Hardware) -> list[list[RecomputeOption]]:
    """The ways to run each unit: as it is, a block recomputed, or one or all cheap children of it.

    Recomputing takes the time of the products, and of writing and reading what they make.
    """
    found: list[list[RecomputeOption]] = []
    counted: frozenset[int] = frozenset()
    for unit in trace.units:
        whole = trace.kept(inside=unit.name) if unit.name else trace.kept() - counted
        counted |= whole
        options = [RecomputeOption(modules=(), seconds=0.0, kept=whole, again=0)]
        if unit.name in trace.blocks:
            name = unit.name
            ways = [(name,), trace.children(name, CHEAP), *((n,) for n in trace.children(name))]
            for way in ways:
                kept = trace.kept(way, inside=name)
                if again := trace.bytes_of(whole - kept):
                    seconds = sum(trace.flops.get(n, 0) for n in way) / hardware.products[2]
                    seconds += 2 * again / (1e9 * hardware.memory_gbps)
                    option = RecomputeOption(modules=way, seconds=seconds, kept=kept, again=again)
                    options.append(option)
        found.append(options)
    return found


def recompute_for(
    trace: ModelTrace, hardware: Hardware, tokens: int, budget: float
) -> RecomputePolicy:
    """Choose what to recompute for microbatches of ``tokens``, within ``budget`` bytes.

    Raises ``PlanError`` if no choice fits.
    """
    if not (tokens > 0 and 0 < budget < math.inf):
        raise PlanError(f"expected tokens and bytes above 0, found {tokens} and {budget}")
    scale = tokens / trace.tokens
    found = choose(recompute_options(trace, hardware), trace.sizes, budget / scale)
    modules: dict[str, None] = {}
    for name in found.modules:
        pattern = re.sub(r"\b\d+\b", "*", name)
        is_whole = {*match_names(pattern, trace.inputs)} <= {*found.modules}
        modules[pattern if is_whole else name] = None
    seconds, peak = found.seconds * scale, round(found.peak * scale)
    return replace(found, modules=tuple(modules), seconds=seconds, peak=peak)


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Operations of the two products of attention, whole also where it is causal."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[-2] * (size + value[-1])


def _traced(model: nn.Module, run: _TracedRun, counted: FlopCounterMode) -> ModelTrace:
    kind = type(model).__name__
    found = {k: sum(v.values()) for k, v in counted.get_flop_counts().items()}
    flops = {k[len(kind) + 1 :]: v for k, v in found.items() if k.startswith(kind)}
    flops[""] = counted.get_total_flops()
    called = tuple(run.inputs)
    listed = tuple(name for name in blocks(model) if name in run.inputs)
    above = {f"{name}.".split(".")[0] for name in listed}
    units = [n for n in called if n in listed or (n and "." not in n and n not in above)]
    trace = ModelTrace(
        name=kind,
        units=(),
        blocks=listed,
        flops=flops,
        keeps=tuple(run.keeps),
        inputs=run.inputs,
        sizes=run.sizes,
    )
    counted_before: frozenset[int] = frozenset()
    seen: set[int] = set()
    rows: list[UnitTrace] = []
    for name in (*units, ""):
        mine = trace.kept(inside=name or None) - counted_before
        counted_before |= mine
        own = {id(p): p for p in model.get_submodule(name).parameters() if id(p) not in seen}
        seen |= own.keys()
        rest = sum(flops.get(unit, 0) for unit in units) if not name else 0
        rows.append(
            UnitTrace(
                name=name,
                parameters=sum(p.numel() for p in own.values()),
                trainable=sum(p.numel() for p in own.values() if p.requires_grad),
                flops=flops.get(name, 0) - rest,
                saved=trace.bytes_of(mine),
                shape=run.shapes.get(name, ()),
            )
        )
    return replace(trace, units=tuple(rows))
