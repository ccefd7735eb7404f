"""A training step that writes digests of each rank's part of every tensor: ``--trace-tensors``.

::

    forwards: input, outputs of modules | backwards | gradients, reduced | clip, update | parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.comm import Communicator, settle
from meshwright.comm.dtensors.gather_dtensor import ShardedPiece, held
from meshwright.comm.graphs.untraced import apart, untraced
from meshwright.composition import StepResult, Trainable
from meshwright.layout import Box
from meshwright.plan import match_names
from meshwright.recipes.metrics import MetricsFile
from meshwright.recipes.tensors.rows import Header, Kind, TensorRow, digest, trace_file
from meshwright.torch_internals.autograd import running_backward
from meshwright.torch_internals.trees import tree_leaves

Write = Callable[[Mapping[str, object]], None]


def traced_modules(patterns: Sequence[str], module: nn.Module) -> dict[str, nn.Module]:
    """List by name the modules that ``patterns`` match; without patterns, all innermost ones."""
    modules = {name: part for name, part in module.named_modules() if name}
    if not patterns:
        return {name: part for name, part in modules.items() if not [*part.children()]}
    return {name: modules[name] for each in patterns for name in match_names(each, modules)}


def open_trace(folder: Path, header: Header, limit: float, world: Communicator) -> MetricsFile:
    """Open the file of this rank and write ``header``; all ranks call it together.

    Rows of the header's step and later ones are dropped, also those of ranks that this run no
    longer has. The file is closed before it grows beyond ``limit`` bytes.
    """
    if world.rank == 0:
        for path in trace_file(folder, 0).parent.glob("rank_*.jsonl"):
            MetricsFile(path, step=header.step - 1).close()
    world.barrier(label="tensor traces").wait()
    file = MetricsFile(trace_file(folder, world.rank), step=header.step - 1, limit=limit)
    file.write(asdict(header))
    return file


@dataclass(slots=True)
class _Pass:
    """The forward pass that one stage is in."""

    begin: int
    """First sample of its microbatch in the global batch."""
    samples: int = 0
    microbatch: int = -1
    calls: Counter[str] = field(default_factory=Counter)


class TensorTrace:
    """Training steps of ``trainable`` that write a row for each tensor; see `TensorRow`.

    This rank reads ``share`` samples of each global batch. Outputs whose dim 0 is not a multiple of
    the samples of their microbatch, and recomputed outputs in a backward pass, are left out.
    """

    def __init__(
        self, trainable: Trainable, write: Write, *, share: int, modules: Sequence[str] = ()
    ) -> None:
        self._trainable = trainable
        self._write = write
        self._first = trainable.data_rank * share
        over = trainable.communicators.get("tensor")
        self._tensor_rank = "" if over is None else f"{over.rank} of {over.size}"
        self._step = 0
        self._passes: dict[int, _Pass] = {}
        for stage, entry in trainable.entries:
            entry.register_forward_pre_hook(partial(self._enter, stage), with_kwargs=True)
            for name, module in traced_modules(modules, entry).items():
                module.register_forward_hook(partial(self._leave, stage, name))

    def step(self, batch: object, target: object = None) -> StepResult:
        """Train as `Trainable.step` does."""
        trainable = self._trainable
        self._step = trainable.steps + 1
        self._passes = {stage: _Pass(self._first) for stage, _ in trainable.entries}
        try:
            trainable.forward_backward(batch, target)
        finally:
            self._passes = {}
        self._write_all("gradient")
        result = trainable.optimizer_step()
        self._write_all("parameter")
        self._put("loss", "", (0, 0), held(result.loss, "loss"))
        return result

    # ----------------------------------------------------------------------------- activations

    @apart
    def _enter(
        self, stage: int, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if torch.compiler.is_compiling():
            untraced(self._enter, stage, module, args, kwargs)
            return
        values = _tensors((args, kwargs)) if self._is_traced(stage) else []
        if not values:
            return
        last = self._passes[stage]
        begin = last.begin + last.samples
        now = _Pass(begin, values[0].shape[0], last.microbatch + 1)
        self._passes[stage] = now
        if stage == 0:
            self._put_samples("input", "", (0, 0), values[0], now)

    @apart
    def _leave(
        self, stage: int, name: str, module: nn.Module, args: object, output: object
    ) -> None:
        if torch.compiler.is_compiling():
            untraced(self._leave, stage, name, module, args, output)
            return
        if not self._is_traced(stage):
            return
        now, values = self._passes[stage], _tensors(output)
        for number, value in enumerate(values):
            full = name if len(values) == 1 else f"{name}[{number}]"
            self._put_samples("activation", full, (stage, now.calls.total()), value, now)
            now.calls[full] += 1

    def _is_traced(self, stage: int) -> bool:
        """True in a step's own forward pass, false in evaluation and recomputation."""
        return stage in self._passes and running_backward() == -1

    def _put_samples(
        self, kind: Kind, name: str, place: tuple[int, int], value: Tensor, now: _Pass
    ) -> None:
        """Write the row of a tensor whose dim 0 holds the samples of a microbatch."""
        each, rest = divmod(value.shape[0], max(1, now.samples))
        if rest or not each:
            return
        holding = held(value, name)
        first = now.begin * each
        boxes = tuple(Box((first + b.offset[0], *b.offset[1:]), b.shape) for b in holding.boxes)
        shape = (first + value.shape[0], *value.shape[1:])  # of the samples up to these
        self._put(kind, name, place, replace(holding, global_shape=shape, boxes=boxes), now, each)

    # -------------------------------------------------------------------------------- all tensors

    def _write_all(self, kind: Kind) -> None:
        settle()
        owned = self._trainable.named_parameters()
        for stage, entry in self._trainable.entries:
            for number, (name, parameter) in enumerate(entry.named_parameters()):
                value = parameter.grad if kind == "gradient" else parameter
                if name in owned and value is not None:
                    self._put(kind, name, (stage, number), held(value, name))

    def _put(
        self,
        kind: Kind,
        name: str,
        place: tuple[int, int],
        holding: ShardedPiece,
        now: _Pass | None = None,
        each: int = 1,
    ) -> None:
        sums = digest(holding)
        if not sums.numel:
            return
        shape, samples = holding.global_shape, None
        if now is not None:
            shape = shape[1:] if each == 1 else (each, *shape[1:])
            samples = (now.begin, now.begin + now.samples)
        row = TensorRow(
            **asdict(sums),
            step=self._step,
            kind=kind,
            name=name,
            call=0 if now is None else now.calls[name],
            place=place,
            shape=shape,
            dtype=str(holding.tensor.dtype).removeprefix("torch."),
            part=_part(holding, skipped=int(now is not None)),
            samples=samples,
            microbatch=None if now is None else now.microbatch,
            tensor_rank=self._tensor_rank if kind == "activation" else "",
        )
        self._write(row.to_json())


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]


def _part(holding: ShardedPiece, *, skipped: int) -> str:
    """Format the ranges of the boxes in all dims after the first ``skipped``; "" for all of it."""
    shape = holding.global_shape[skipped:]
    if all(box.shape[skipped:] == shape for box in holding.boxes):
        return ""
    return ";".join(",".join(box.ranges()[skipped:]) for box in holding.boxes)
