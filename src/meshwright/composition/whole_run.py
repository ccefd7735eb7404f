"""Checks that a model split over an axis computes what the full model computes.

A wrong split may train without an error: a replicated parameter used on sharded activations has a
gradient that lacks the shares of the other ranks. So the model runs forward and backward on the
example once before it is split and once after, and outputs and gradients are compared.

The traffic of modules over the axis depends on styles, recomputation and autocast, so it is
recorded in such a run too. A step has that traffic once for each part of the batch, then sums of
partial gradients, then the norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.comm import Communicator, Recorder, observe, phase
from meshwright.comm.dtensors.dtensor import is_dtensor, local_of, mesh_communicators
from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.dtensors.gather_dtensor import part_like
from meshwright.composition.description import Description
from meshwright.composition.example_run import Inputs, evaluating, left_as_it_is, same_numbers
from meshwright.data_parallel.distributed_parameters import MARK, local_parameters
from meshwright.errors import PlanError
from meshwright.gradients import (
    SpreadGradients,
    beyond_rounding,
    call_module,
    leaves_of,
    rounding_floor,
)
from meshwright.losses.chunked import chunked_heads
from meshwright.randomness import Draws, Dropout, RandomOperators
from meshwright.timeline import Collective
from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    set_after_hooks,
    set_backward_hooks,
)
from meshwright.torch_internals.trees import tree_leaves

_LABEL = "compare with the whole model"
_DIRECTIONS = ("forward", "backward")
_PARTIAL = "partial gradients"
"""The label of sums that belong to no single module."""


@contextlib.contextmanager
def _running(model: nn.Module) -> Iterator[list[str]]:
    """Track the names of the modules of ``model`` that are running, the innermost last."""
    running: list[str] = []

    def end(*_: object) -> None:
        running.pop()

    hooks: list[RemovableHandle] = []
    for name, module in model.named_modules():
        begin = partial(_append, running, name or type(module).__name__)
        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


_Norms = dict[str, tuple[tuple[int, ...], float]]
"""By module, in the order in which they end: the shape and norm of what its first call returns."""


@contextlib.contextmanager
def _noting(model: nn.Module) -> Iterator[_Norms]:
    """Note what the modules of ``model`` return, so that the first that differs can be named."""
    norms: _Norms = {}
    # A styled module may compute with what lies inside in parts.
    inside = {c for p in model.modules() if MARK in vars(p) for c in p.modules() if c is not p}
    parts = [(n, part) for n, part in model.named_modules() if n and part not in inside]
    hooks = [part.register_forward_hook(partial(_note, norms, name)) for name, part in parts]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def _note(norms: _Norms, name: str, module: nn.Module, inputs: object, output: object) -> None:
    found = next((x for x in tree_leaves(output) if isinstance(x, torch.Tensor)), None)
    if found is not None and found.is_floating_point() and not is_dtensor(found):
        norms.setdefault(name, (tuple(found.shape), float(found.detach().double().norm())))


def _first_apart(found: _Norms, expected: _Norms) -> str:
    """Name the first module that returns another tensor of the same shape, for a message."""
    for name, (shape, norm) in found.items():
        known, whole = expected.get(name, ((), 0.0))
        if known == shape and abs(norm - whole) > 1e-3 * max(norm, whole):
            return f". The first module that returns something else is {name!r}"
    return ""


def _append(running: list[str], name: str, *_: object) -> None:
    running.append(name)


def _leaves(output: object) -> list[object]:
    """List the leaves of ``output``, including those of unregistered dataclasses."""
    found: list[object] = []
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            found += _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            found.append(leaf)
    return found


def _itself(value: Any) -> Any:  # noqa: ANN401
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSplit:
    """How an axis splits a model, and what to do about a split that changes it."""

    axis: Communicator
    judges: Communicator
    """Ranks that are split together, and refuse together."""
    setting: str
    """The setting that splits it, such as ``[tensor] rules``."""
    on_shapes: str
    on_outputs: str
    on_gradients: str
    inputs: Callable[[Inputs], Inputs] = _itself
    """Gives this rank's part of the example."""
    part: Callable[[torch.Tensor], torch.Tensor] = _itself
    """Gives this rank's part of an output of the whole model."""
    sums: tuple[Communicator, ...] = ()
    """Axes whose ranks have losses of their own, over which gradients are summed: a module that
    exchanges samples over one has sums already."""
    computing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """What the split model computes in."""
    explain: Callable[[nn.Module, Callable[[bool], object]], Iterable[str]] | None = None
    """Says what of the model differs, given a function that runs it as a whole or in part."""
    share: float = 1.0
    """The part of the loss that this rank's outputs have; 1 / ranks where all compute the same."""


class WholeRun:
    """The results of the full model on ``example``, computed before it is split in place."""

    def __init__(
        self,
        model: nn.Module,
        example: Inputs,
        draws: Draws | None,
    ) -> None:
        """With ``draws`` masks of dropout are compared too.

        The model runs in training mode, unless that draws random numbers of its own, is not
        reproducible, or fails (batch norm on one sample). Then it runs in evaluation mode, where
        dropout is active only with ``draws``.
        """
        self._example = example
        self._draws = draws
        self._parameters = dict(model.named_parameters())
        self._trains = True
        with _noting(model) as self._norms:
            found = self._trained(model)
            self._trains = found is not None
            if found is None:
                self._norms.clear()
            self._outputs = self._forward(model) if found is None else found
        # Run the backward now: checkpoints recompute with the modules as they are then.
        seeds = [_seed(output) for output in self._outputs]
        with left_as_it_is(model):
            self._gradients = _gradients(self._outputs, seeds, self._parameters, is_kept=True)
        self._counted = len(self._outputs)
        """Outputs that have a part in these gradients."""

    def compare(self, model: nn.Module, split: AxisSplit) -> None:
        """Run the split ``model`` and compare. All ``judges`` must call this.

        A model split over several axes is compared once after each.

        Raises PlanError, on all of them, naming the outputs and the gradients that differ.
        """
        with phase(_LABEL):
            outputs: list[torch.Tensor] = []
            refused: list[str] = []
            with _running(model) as running, _noting(model) as norms:
                try:
                    with split.computing():
                        outputs = self._forward(model, split.inputs)
                except (ValueError, RuntimeError, TypeError, AttributeError) as error:
                    # Sizes may differ between ranks: agree before any rank continues.
                    where = f"{running[-1]!r} raised {error}" if running else f"{error}"
                    refused.append(f"{split.setting} cut a model that cannot run then: {where}")
            _agree(split, refused)
            pairs = [*zip(outputs, self._outputs, strict=False)]
            # Outputs of other shapes, such as a sharded cache of keys and values, are not compared.
            alike = [(mine, one) for mine, one in pairs if mine.shape == split.part(one).shape]
            parameters = dict(model.named_parameters())
            _agree(split, _dtensor_problems(split, outputs, parameters))
            problems = [*_output_problems(split, outputs, self._outputs, alike)]
            first = _first_apart(norms, self._norms)
            problems = [f"{problem}{first}" for problem in problems]
            explain = split.explain if split.judges.backend != "fake" else None
            if explain is not None and any(split.judges.gather_values(problems, label=_LABEL)):
                said = explain(model, partial(self._again, model, split))
                problems = [*said, *problems][:1]
            _agree(split, problems)
            seeds = [_seed(whole) for _, whole in alike]
            if len(alike) < self._counted:
                outs = [whole for _, whole in alike]
                self._gradients = _gradients(outs, seeds, self._parameters)
                self._counted = len(alike)
            expected = self._gradients
            self._outputs = [whole.detach() for whole in self._outputs]
            with left_as_it_is(model), split.computing():
                mine = [split.part(seed) * split.share for seed in seeds]
                found = _gradients([each for each, _ in alike], mine, parameters)
            for axis in split.sums:
                _sum(axis, found, expected, model)
            _agree(split, _gradient_problems(split, found, expected, parameters))

    def traffic(
        self, model: nn.Module, split: AxisSplit, computing: AbstractContextManager[object]
    ) -> AxisTraffic:
        """Record the messages of ``model`` over the axis in one pass over the example.

        The forward runs in the context ``computing``. All ranks of the axis must call this, after
        recomputation has been set up.
        """
        with phase(f"record what axis {split.axis.axis} sends"), observe(recorder := Recorder()):
            with computing:
                outputs = self._forward(model, split.inputs)
            count = len(recorder.collectives)
            pairs = zip(outputs, self._outputs, strict=True)
            alike = [mine for mine, one in pairs if mine.shape == split.part(one).shape]
            seeds = [_seed(mine) for mine in alike]
            with left_as_it_is(model):
                _gradients(alike, seeds, dict(model.named_parameters()))
        # A head that computes its loss in chunks gathers no logits in training.
        left_out = {_PARTIAL, *(f"{n} {w}" for n in chunked_heads(model) for w in _DIRECTIONS)}
        sent = [
            tuple(c for c in each if c.axis == split.axis.axis and c.label not in left_out)
            for each in (recorder.collectives[:count], recorder.collectives[count:])
        ]
        return AxisTraffic(axis=split.axis, forward=sent[0], backward=sent[1])

    def _again(self, model: nn.Module, split: AxisSplit, is_part: bool) -> None:
        with split.computing() if is_part else contextlib.nullcontext():
            self._forward(model, split.inputs if is_part else _itself)

    def _trained(self, model: nn.Module) -> list[torch.Tensor] | None:
        """Run ``model`` in training mode; None if its result cannot be compared."""
        try:
            with RandomOperators(model, self._draws or Draws(0)):
                found, again = self._forward(model), self._forward(model)
        except Exception:  # an error of both modes is raised by the evaluation that follows
            return None
        pairs = list(zip(found, again, strict=False))
        if len(found) != len(again) or any(one.shape != two.shape for one, two in pairs):
            return None
        return None if any(beyond_rounding(two, one, 0.0) for one, two in pairs) else found

    def _forward(
        self, model: nn.Module, inputs: Callable[[Inputs], Inputs] = _itself
    ) -> list[torch.Tensor]:
        """Run ``model``; returns its differentiable output tensors, or all if there are none."""
        rows = [t.shape[0] for t in tree_leaves(self._example) if isinstance(t, torch.Tensor)][:1]
        draws = self._draws if rows else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_numbers())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(left_as_it_is(model))
            if draws is not None:
                draws.begin_step(0)
                stack.enter_context(draws.microbatch(0, range(rows[0])))
            if not self._trains:
                stack.enter_context(evaluating(model))
                for part in model.modules() if draws is not None else ():
                    part.training = isinstance(part, Dropout)
            output = call_module(model, inputs(self._example))
        found = [
            leaf
            for leaf in _leaves(output)
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        return [leaf for leaf in found if leaf.requires_grad] or found


def _sum(
    axis: Communicator,
    found: dict[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    model: nn.Module,
) -> None:
    """Sum over ``axis`` those gradients in ``found`` that are this rank's summands."""
    exchanged = {
        id(parameter)
        for part in model.modules()
        if (mesh := exchanged_over(part)) is not None
        and mesh_communicators(mesh)[0].ranks == axis.ranks
        for parameter in part.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if name in expected and id(parameter) not in exchanged:  # the same on all ranks
            gradient = found.get(name)
            mine = torch.zeros_like(local_of(parameter)) if gradient is None else gradient
            found[name] = local_of(mine).clone(memory_format=torch.contiguous_format)
            axis.all_reduce(found[name], label=_LABEL).wait()


def _agree(split: AxisSplit, problems: Iterable[str]) -> None:
    """Raise PlanError on all ranks with the problems of any rank."""
    judges = split.judges
    if judges.backend == "fake":  # which does not add what the others have
        return
    rows = judges.gather_values(list(problems), label=_LABEL)
    found: dict[str, int] = {}
    for rank, row in zip(judges.ranks, rows, strict=True):
        for problem in row:
            found.setdefault(problem, rank)
    if found:
        raise PlanError([f"{problem} (rank {rank})" for problem, rank in found.items()])


def _dtensor_problems(
    split: AxisSplit, outputs: Sequence[torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> Iterator[str]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for output in filter(is_dtensor, outputs):
        read = [names[id(leaf)] for leaf in leaves_of(output, ()) if id(leaf) in names]
        yield (
            f"cut on axis {split.axis.axis} the model returns a DTensor of shape "
            f"{tuple(output.shape)}, which it computes from "
            f"{', '.join(map(repr, read)) or 'parts of parameters'}; a loss of it "
            "and of plain tensors has no backward. Take `full_tensor()` of the parameter in the "
            f"forward, or leave its module out of {split.setting}"
        )


def _output_problems(
    split: AxisSplit,
    outputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    alike: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[str]:
    if len(outputs) != len(expected) or not alike:
        shapes = [[tuple(tensor.shape) for tensor in each] for each in (outputs, expected)]
        yield (
            f"cut on axis {split.axis.axis} the model returns on the example differentiable "
            f"tensors of shapes {shapes[0]}, as a whole {shapes[1]}. {split.on_shapes}"
        )
        return
    for mine, whole in alike:
        if error := beyond_rounding(mine, split.part(whole), 0.0):
            yield (
                f"an output of shape {tuple(whole.shape)} of the model cut on axis "
                f"{split.axis.axis} differs from the whole model's by {error:.3g} of its norm on "
                f"the example: {split.on_outputs}"
            )


def _seed(output: torch.Tensor) -> torch.Tensor:
    """Make a random gradient of an output, the same on all ranks and in both runs."""
    generator = torch.Generator().manual_seed(output.numel())
    values = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(device=output.device, dtype=output.dtype)


@contextlib.contextmanager
def _without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Disable the hooks on gradients of ``parameters`` in the block."""
    hooked = [p for p in parameters if backward_hooks_of(p) or after_hooks_of(p)]
    held = [(p, backward_hooks_of(p), after_hooks_of(p)) for p in hooked]
    for parameter, _, after in held:
        set_backward_hooks(parameter, None)
        if after is not None:
            set_after_hooks(parameter, OrderedDict())  # None would leave what autograd has cached
    try:
        yield
    finally:
        for parameter, before, after in held:
            set_backward_hooks(parameter, before)
            set_after_hooks(parameter, after)


def _gradients(
    outputs: list[torch.Tensor],
    seeds: list[torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    *,
    is_kept: bool = False,
) -> dict[str, torch.Tensor]:
    """Compute the gradients of ``parameters``; ``is_kept`` lets another backward follow."""
    pairs = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out.requires_grad]
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    if pairs:
        with _without_hooks(parameters.values()):  # an optimizer may step in a hook
            torch.autograd.backward(
                [out for out, _ in pairs], [seed for _, seed in pairs], retain_graph=is_kept
            )
    found = {
        name: grad.to_dense() if grad.is_sparse else grad
        for name, parameter in parameters.items()
        if (grad := parameter.grad) is not None
    }
    for name, parameter in parameters.items():
        parameter.grad = before[name]
    return found


def _gradient_problems(
    split: AxisSplit,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
) -> Iterator[str]:
    floor, cut = rounding_floor(expected.values()), f"cut on axis {split.axis.axis}"
    for name, whole in expected.items():
        mine = found.get(name)
        if mine is None:
            yield f"the gradient of {name!r} is missing when the model is {cut}"
            continue
        error = beyond_rounding(local_of(mine), local_of(part_like(whole, parameters[name])), floor)
        if error:
            yield (
                f"the gradient of {name!r} of the model {cut} differs from the whole model's by "
                f"{error:.3g} of its norm on the example. {split.on_gradients}"
            )
    for name in found.keys() - expected.keys():
        yield f"{name!r} has a gradient only when the model is {cut}"


# ---------------------------------------------------------------------------- traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """The messages of modules over one axis in one pass, by direction."""

    axis: Communicator
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]

    def inside(self, stages: Iterable[nn.Module]) -> AxisTraffic:
        """The traffic of the modules in ``stages``."""
        names = {name for stage in stages for name, _ in stage.named_modules()}
        mine = [
            tuple(c for c in each if c.label.rpartition(" ")[0] in names)
            for each in (self.forward, self.backward)
        ]
        return replace(self, forward=mine[0], backward=mine[1])

    def of_step(self, module: nn.Module, passes: int, sums: int) -> Iterator[Collective]:
        """Yield collectives of ``passes`` passes; the last ``sums`` also sum partial gradients."""
        partial = list(self._partial(module))
        for number in range(passes):
            yield from self.forward
            yield from self.backward
            if number >= passes - sums:
                yield from partial

    def _partial(self, module: nn.Module) -> Iterator[Collective]:
        """Yield one sum for each dtype of parameters with partial gradients."""
        known = local_parameters(module)
        sizes: dict[torch.dtype, int] = {}
        for parameter in module.parameters():
            found = known.get(id(parameter))
            if parameter.requires_grad and found is not None and found.partial is not None:
                size = sizes.get(parameter.dtype, 0)
                sizes[parameter.dtype] = size + local_of(parameter).numel()
        for dtype, size in sizes.items():
            if size:
                yield Collective(
                    kind="all_reduce",
                    axis=self.axis.axis,
                    shape=(size,),
                    dtype=str(dtype).removeprefix("torch."),
                    reduction="sum",
                    label=_PARTIAL,
                )


def add_traffic(
    described: Description,
    traffic: Collection[Collective],
    spread: Collection[SpreadGradients],
) -> Description:
    """Add the modules' ``traffic`` of a step, and the gradient norm, to ``described``.

    ``spread`` gives the axes over which gradients are sharded.
    """
    axes = dict.fromkeys(axis for group in spread for axis in group.communicators)
    norm = Collective(
        kind="all_reduce",
        axis="+".join(axis.axis for axis in axes),
        dtype="float64",
        reduction="sum",
        label="gradient norm",
    )
    everything = [*described.collectives, *traffic, *([norm] if axes else [])]
    note = (
        "axis tensor: what modules send was seen in one pass over the example; a part of a batch "
        "of another size sends as much more or less"
    )
    return replace(
        described,
        collectives=tuple(replace(each, sequence=n) for n, each in enumerate(everything)),
        settings=(*described.settings, *([note] if traffic else [])),
    )
