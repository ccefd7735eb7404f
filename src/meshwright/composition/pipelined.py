"""A model whose stages lie on different ranks, and its training step.

::

    every rank    its share of the batch, split into microbatches: forwards and backwards, in the
                  order of the schedule | reductions | loss and counts | norm, clip | optimizer
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from meshwright.comm import Communicator, phase, settle
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.composition.context_rules import BatchSplit, over_parts, split_batch
from meshwright.composition.data_layout import DataLayout, LayoutCommunicators
from meshwright.composition.description import Description
from meshwright.composition.example_run import evaluating
from meshwright.composition.loss_sources import LossSources
from meshwright.composition.own_model import CutGuard, TiedValues
from meshwright.composition.stages import order_of
from meshwright.composition.trainable import (
    EvalResult,
    StepResult,
    Trainable,
    of_one,
    tensors_in,
    union,
)
from meshwright.errors import InternalError, PipelinePeerError, PlanError, warn
from meshwright.gradients import Factor, SpreadGradients, apply_loss, group_by_spread, multiply_
from meshwright.pipelining import (
    PipelineContext,
    PipelineSchedule,
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineStage,
    get_schedule_class,
    split_args_kwargs_into_chunks,
)
from meshwright.pipelining.signature import Signature, TensorMeta, Values, signature_of
from meshwright.plan import PipelinePlan, Plan
from meshwright.schedule.actions import BACKWARD, Action, F, Schedule
from meshwright.torch_internals.tensors import version_of


class StageModules(nn.Module):
    """The stages of one rank, under the names of the model."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the stages, by their names in the model."""
        seen: set[nn.Parameter] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if not remove_duplicate or parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def state_dict(self, **options: Any) -> dict[str, Any]:  # pyrefly: ignore[bad-override]
        """Map names in the model to the state of the stages."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            found.update(stage.state_dict(**options))
        return found

    def load_state_dict(  # pyrefly: ignore[bad-override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load each stage's own entries. Raises RuntimeError for names that none has."""
        left = dict(state_dict)
        for stage in self.stages:
            own = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            stage.load_state_dict(own, strict=strict, assign=assign)
            for name in own:
                left.pop(name, None)
        if left and strict:
            raise RuntimeError(f"Unexpected key(s) in state_dict: {sorted(left)}")


class PipelinedLayout(DataLayout):
    """The layouts of this rank's stages, and its place in the pipeline.

    Gradients are scaled only after all are summed: the last stage alone knows the counts, and
    waiting for them before a reduction could deadlock with ranks that wait for this one's messages.
    """

    def __init__(
        self,
        layouts: Sequence[DataLayout],
        modules: StageModules,
        peers: LayoutCommunicators,
        copies: Collection[int],
        *,
        dtype: torch.dtype,
    ) -> None:
        """``copies`` holds the ``id`` of each parameter that another stage counts in the norm.

        ``dtype`` is the widest of the full model: all ranks must compute the same norm.
        """
        inner = {name: axis for each in layouts for name, axis in each.communicators.items()}
        communicators = {"pipeline": peers.pipeline, **inner}
        super().__init__(modules, communicators, (b for each in layouts for b in each.buffers))
        self._layouts = tuple(layouts)
        self._stages = tuple(modules.stages)
        self._copies = copies
        self._dtype = dtype
        self._peers = peers
        some = (
            axes
            for over in peers.cutting
            for n in range(len(over) + 1)
            for axes in itertools.combinations(over, n)
        )
        self._spreads = tuple(dict.fromkeys(some))
        """The axes that parameters of any stage may be spread over."""
        for each in layouts:
            each.scale_by(lambda: 1.0)

    @property
    def found_non_finite(self) -> Sequence[str]:
        return [name for each in reversed(self._layouts) for name in each.found_non_finite]

    def reduce_next(self, is_wanted: bool) -> None:
        for each in self._layouts:
            each.reduce_next(is_wanted)

    @torch.no_grad()
    def scale_by(self, scale: Callable[[], Factor]) -> None:
        """See `DataLayout`. Scales at once, since all gradients have been summed."""
        factor, held = scale(), self.every_gradient()
        if held:
            multiply_(held, factor)

    def every_gradient(self) -> list[torch.Tensor]:
        """List this rank's parts of all gradients, copies of tied ones too."""
        return [g for each in self._layouts for part in each.gradients() for g in part.gradients]

    def versions(self) -> int:
        """Sum the versions of this rank's gradients, which count writes to them."""
        held = [p.grad for stage in self._stages for p in stage.parameters()]
        return sum([version_of(local_of(gradient)) for gradient in held if gradient is not None])

    def gradients(self) -> list[SpreadGradients]:
        """See `DataLayout`. Groups are the same on all ranks, so that their collectives match."""
        parameters = [p for s in self._stages for p in s.parameters() if id(p) not in self._copies]
        found = group_by_spread(parameters)
        wanted = self._spreads
        others = [part.communicators for part in found if part.communicators not in wanted]
        if others:
            raise InternalError(f"gradients of a stage are sharded over {others}, not {wanted}")
        return [
            SpreadGradients(
                gradients=tuple(g for p in found if p.communicators == axes for g in p.gradients),
                communicators=(*axes, self._peers.pipeline),
                dtype=self._dtype,
            )
            for axes in wanted
        ]

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        pipeline = self._peers.pipeline
        each = [
            layout.describe(stage, plan)
            for layout, stage in zip(self._layouts, self._stages, strict=True)
        ]
        collectives = [c for d in each for c in d.collectives if c.label != "loss and counts"]
        settings = [line for d in each for line in d.settings]
        return Description(
            rank=self._peers.everyone.rank,
            parameters=tuple(row for d in each for row in d.parameters),
            collectives=tuple(replace(c, sequence=n) for n, c in enumerate(collectives)),
            settings=(
                f"axes: {pipeline.size} ranks hold {pipeline.size * len(each)} stages in a row; "
                f"this is rank {pipeline.rank} of them, with {len(each)}",
                f"pipeline.schedule = {plan.pipeline.order or plan.pipeline.schedule}: the order "
                "of their actions",
                f"pipeline.microbatches = {plan.pipeline.microbatches}: consecutive parts of each "
                "rank's batch",
                *dict.fromkeys(settings),
            ),
        )


# ------------------------------------------------------------------- what all ranks hold together


def said_by(source: int, say: Callable[[], object], axis: Communicator, what: str) -> Any:  # noqa: ANN401
    """Send the result of ``say``, no string, from rank ``source`` of ``axis`` to all ranks.

    Its exception is raised there, and elsewhere as `PipelinePeerError` with its text.
    """
    said: object = None
    failure: Exception | None = None
    if axis.rank == source:
        try:
            said = say()
        except Exception as error:  # raised below, when the other ranks know
            failure, said = error, f"{type(error).__name__}: {error}"
    found = axis.gather_values(said, label=f"{what} of a pipeline")[source]
    if failure is not None:
        raise failure
    if isinstance(found, str):
        rank = axis.ranks[source]
        raise PipelinePeerError(f"the {what} failed on rank {rank}, in an evaluation: {found}")
    return found


def output_of(source: int, output: object, axis: Communicator) -> Any:  # noqa: ANN401
    """Send the ``output`` of rank ``source`` of ``axis``, with its nesting, to every rank.

    Raises `PipeliningShapeError` there, and elsewhere `PipelinePeerError`, for what cannot be sent.
    """
    values = Values.of((output,)) if axis.rank == source else None

    def facts() -> object:
        return None if values is None else signature_of(values, "the model's output").to_json()

    signature = Signature.from_json(said_by(source, facts, axis, "output"))
    leaves: list[object] = []
    for number, meta in enumerate(signature.leaves):
        if not isinstance(meta, TensorMeta):
            leaves.append(meta)
            continue
        if values is not None:
            tensor = values.leaves[number].detach().contiguous()
        else:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=axis.device)
        if tensor.numel():
            axis.broadcast(tensor, source=source, label="output of a pipeline").wait()
        leaves.append(tensor)
    return Values(leaves, signature.spec).nested_as(leaves)[0]


_NAMES = MappingProxyType({"zb1p": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"})
"""torch's names of schedules that have another name in a plan."""


def schedule_of(plan: PipelinePlan) -> type[PipelineSchedule]:
    """Return the class of the schedule that ``plan`` names."""
    if plan.order:
        return PipelineScheduleRuntime
    return get_schedule_class(_NAMES.get(plan.schedule, plan.schedule))


class _Undivided(PipelineScheduleMulti):
    """The forwards of a batch with fewer samples than microbatches, which is not split."""

    def __init__(self, stages: Sequence[PipelineStage], like: Schedule) -> None:
        self._like = like
        super().__init__(stages, 1)

    def _compute(self) -> Schedule:
        rows = [
            [Action(stage, F, 0) for stage in self._like.stages_of(rank)]
            for rank in range(self._like.ranks)
        ]
        return Schedule.of("undivided", rows, self._like.stage_ranks, 1, self._like.edges)


class PipelinedTrainable(Trainable):
    """The trainable that `parallelize` returns for a plan with an axis ``pipeline``.

    Every rank of a pipeline gets the same share of a batch: the first stage reads it, the last its
    target. ``module`` has the stages of this rank. State and gradients are those of the full
    model, so all ranks must call the methods that return them, and `eval`, together.
    """

    _prefix = "stages.*."

    def __init__(
        self,
        module: StageModules,
        plan: Plan,
        *,
        layout: PipelinedLayout,
        stages: Sequence[PipelineStage],
        names: Sequence[str],
        copies: Mapping[str, str],
        tied: TiedValues,
        guard: CutGuard,
        **others: Any,
    ) -> None:
        """``names`` are the names in the full model's state, in its order.

        ``copies`` maps other names of a tied parameter to its first name.
        ``others`` are the arguments of `Trainable`.
        """
        super().__init__(module, plan, layout=layout, **others)
        self._pipeline = self._peers.pipeline
        self._pipelined = layout
        self._names = tuple(names)
        self._copies = dict(copies)
        self._tied = tied
        _watch(stages[0], guard)
        for stage in stages:
            stage.checks_outputs = self._chunked is None or not stage.is_last
        numbered = {stage.stage_index: stage.submod for stage in stages}
        last = numbered.pop(stages[0].num_stages - 1, module)
        self._sources = LossSources(last, numbered)
        kind = schedule_of(plan.pipeline)
        one_or_all: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        count, options = plan.pipeline.microbatches, dict[str, Any](scale_grads=False)
        if plan.pipeline.order:
            options["order"] = order_of(plan.pipeline, stages[0].group_size)
        with tied.inside():  # a schedule refuses stages that hold one object
            self.schedule = kind(one_or_all, count, loss_fn=self._lose, **options)
        self._samples: list[torch.Tensor] = []
        """By microbatch of the current step, the numbers of its samples in the global batch."""
        self._undivided = _Undivided(stages, self.schedule.schedule)
        if self._draws is not None or self._chunked is not None:
            self.schedule.register_custom_function(F, self._forward)
        self._splits: list[BatchSplit] = []
        """By microbatch that is computed now, how axis context splits it."""
        for each in (self.schedule, self._undivided):
            for operation in (F, *BACKWARD) if self._peers.context is not None else ():
                each.register_custom_function(operation, self._attend)
        self._last = self.schedule.schedule.stage_ranks[-1]
        """The rank of the pipeline that has the last stage."""
        self._has_target = True
        self._versions = 0
        """The sum of the gradients' versions after `forward_backward`."""

    def forward_backward(
        self, batch: object, target: object = None, *, is_last: bool = True
    ) -> None:
        super().forward_backward(batch, target, is_last=is_last)
        self._versions = self._pipelined.versions()

    def optimizer_step(self) -> StepResult:
        """See `Trainable`. Warns if gradients have been changed since they were computed."""
        if self._pipelined.versions() != self._versions:
            warn(
                "gradients were changed between forward_backward and optimizer_step. Each rank has "
                "those of its own stages, so a norm over them, as clip_grad_norm_ takes it, is "
                "another number on each rank: clip by [train] clip_norm, whose norm is over all"
            )
        return super().optimizer_step()

    @property
    def draws(self) -> tuple[object, ...]:
        """A key for this rank's random numbers: each pipeline rank draws its own."""
        return (*super().draws, "pipeline", self._pipeline.rank)

    @property
    def entries(self) -> tuple[tuple[int, nn.Module], ...]:
        """The stages of this rank, each with its number."""
        ranks = self.schedule.schedule.stage_ranks
        mine = (number for number, rank in enumerate(ranks) if rank == self._pipeline.rank)
        return tuple(zip(mine, cast(StageModules, self.module).stages, strict=True))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Map original names to this rank's parameters (or shards); a tied one once."""
        named = super().named_parameters()
        # Backwards and back: of several copies the first stage's counts, in the order of stages.
        first = {self._copies.get(name, name): p for name, p in reversed(named.items())}
        return dict(reversed(first.items()))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Map original names to full gradients; all ranks must call this."""
        return self._ordered(union(super().gradients(), self._pipeline))

    @torch.no_grad()
    def eval(self, batch: object, target: object = None) -> EvalResult:
        """Compute outputs and loss in evaluation mode; all ranks of a pipeline must call this."""
        rows = min((t.shape[0] for t in tensors_in(batch) if t.dim()), default=1)
        is_whole = rows < self.plan.pipeline.microbatches
        settle()
        schedule = self._undivided if is_whole else self.schedule
        count = 1 if is_whole else self.plan.pipeline.microbatches
        batch, target, around = self._part(batch, target, rows, count)
        args, kwargs = _call(batch)
        with evaluating(self.module), self._tied.inside(), self._autocast(), around:
            found = schedule.eval(*args, **kwargs)
            output = output_of(self._last, found, self._pipeline)
            loss = self._loss_of_last(found, target)
        return EvalResult(output=output, loss=loss, target=target)

    def weights(self) -> dict[str, torch.Tensor]:
        """Map original names to the full tensors of the model's state, on every rank."""
        return self._ordered(union(super().weights(), self._pipeline))

    def load_state_dict(self, state: Mapping[str, Any], *, copies: bool = True) -> None:
        elsewhere = {*self._names} - self.module.state_dict().keys()
        model = {n: value for n, value in state["model"].items() if n not in elsewhere}
        own: dict[str, Any] = dict(state, model=model)
        if "optimizer" in state:
            saved = state["optimizer"]
            elsewhere -= {self._copies.get(n, n) for n in super().named_parameters()}
            values = {n: value for n, value in saved["state"].items() if n not in elsewhere}
            groups = [
                {**group, "params": [n for n in group["params"] if n not in elsewhere]}
                for group in saved["param_groups"]
            ]
            own["optimizer"] = {"state": values, "param_groups": groups}
            if not copies:
                saved["state"].clear()  # as `Trainable` does
        super().load_state_dict(own, copies=copies)

    def describe(self) -> Description:
        with self._tied.inside():
            return super().describe()

    # --------------------------------------------------------------------------- internals

    def _forward(self, action: Action, context: PipelineContext) -> None:
        """Run one forward; tell dropout which samples it has, and a head in chunks the target."""
        number, targets, chunked = action.microbatch or 0, context.target_mbs, self._chunked
        with contextlib.ExitStack() as stack:
            if self._draws is not None and self._samples:  # an evaluation drops nothing
                samples = self._samples[number]
                stack.enter_context(self._draws.microbatch(int(samples[0]), samples))
            if chunked is not None and targets and self._has_target and self._is_last(action):
                stack.enter_context(chunked.expecting(targets[number]))
            context.run(action)

    def _is_last(self, action: Action) -> bool:
        return action.stage == len(self.schedule.schedule.stage_ranks) - 1

    def _part(
        self, batch: object, target: object, rows: int, count: int
    ) -> tuple[object, object, contextlib.AbstractContextManager[None]]:
        """Take this rank's part of a batch of ``rows``, which goes into ``count`` microbatches.

        Returns it, that of the target, and what a pass over the batch runs in.
        """
        axis = self._peers.context
        if axis is None:
            return batch, target, contextlib.nullcontext()
        split = split_batch(batch, self.plan.context, axis)
        self._splits.clear()
        start = 0
        for each in torch.empty(rows, device="cpu").tensor_split(count):
            stop = start + len(each)
            self._splits.append(split.of_rows(start, stop))
            start = stop
        return split.part(batch), split.part(target), split.attending()

    def _attend(self, action: Action, context: PipelineContext) -> None:
        """Run one action with attention of its microbatch; a backward may compute that again."""
        with self._splits[action.microbatch or 0].attending(self._draws):
            if action.operation is F:
                self._forward(action, context)
            else:
                context.run(action)

    def _train_on(self, part: tuple[object, object, int], first: int, *, is_last: bool) -> None:
        batch, target, size = part
        count = self.plan.pipeline.microbatches
        batch, target, around = self._part(batch, target, size, count)
        if self._draws is not None:
            numbers = torch.arange(first, first + size, device="cpu")
            cut, _ = split_args_kwargs_into_chunks((numbers,), None, count)
            self._samples = [each for (each,) in cut]
        self._tied.enter()
        self._layout.reduce_next(is_last)
        self._has_target = target is not None
        args, kwargs = _call(batch)
        # A schedule with a loss asks for a target, which `_lose` leaves out again.
        goal = torch.empty(size, device="cpu") if target is None else target
        running = phase("pipeline", step=self.steps + 1, computes=True)
        with running, self._autocast(), around:
            self.schedule.step(*args, target=goal, return_outputs=False, **kwargs)
        self._samples = []
        if is_last:
            window, scale = self._window, self._loss_scale
            window.close(numbers := self._tied.numbers())
            self._layout.scale_by(lambda: window.factor() / scale)
            if numbers:
                self._tied.check(window.beside())

    def _whole_optimizer(self, parts: Mapping[str, Any]) -> dict[str, object]:
        every = of_one(super()._whole_optimizer(parts), self._pipeline)
        return _joined(every, [name for name in self._names if name not in self._copies])

    def _load_model(self, parts: Mapping[str, Any]) -> None:
        with self._tied.inside():  # each stage loads what it computes with
            super()._load_model(parts)

    def _start_over(self) -> None:
        super()._start_over()
        self._tied.leave()

    def _every_gradient(self, spread: Sequence[SpreadGradients]) -> list[torch.Tensor]:
        # Copies of tied parameters do not count in the norm, but are clipped like the original.
        return self._pipelined.every_gradient()

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _lose(self, output: object, target: object) -> torch.Tensor:
        """Compute the loss of one microbatch, on the last stage."""
        sizes = (tensor.shape[0] for tensor in tensors_in(target) if tensor.dim())
        goal = target if self._has_target else None
        if self._chunked is not None and self._chunked.terms is not None:
            output = self._chunked.finished(output)
        if self._splits and self.steps == 0 and torch.is_grad_enabled():
            self._splits[0].watch_loss(output, goal, self._late)
        local = apply_loss(self._loss, output, goal, self._sources.look)
        if torch.is_grad_enabled():
            self._window.add(local, min(sizes, default=1), goal)
        return local.total if self._loss_scale == 1.0 else local.total * self._loss_scale

    def _loss_of_last(self, output: object, target: object) -> torch.Tensor:
        """Compute the loss on the rank with the last stage, and send it to all of the pipeline."""

        def mean() -> float:
            local = apply_loss(self._loss, output, target)
            if self._peers.context is not None:
                terms = output if target is None else target
                local = over_parts(local, terms, self._peers.context)
            return (local.total.float() / local.count).item()

        found = said_by(self._last, mean, self._pipeline, "loss")
        return torch.tensor(found, dtype=torch.float32, device=self._pipeline.device)

    def _ordered(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: found[name] for name in self._names if name in found}


def _watch(stage: PipelineStage, guard: CutGuard) -> None:
    """Run ``guard`` with the checks of arguments, whose errors the schedule reports to all."""
    check_arguments = stage.check_microbatches

    def check(args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]) -> None:
        guard.check()
        check_arguments(args, kwargs)

    vars(stage)["check_microbatches"] = check


def _call(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's arguments for ``batch``, as `call_module` does."""
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def _joined(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, object]:
    """Merge the optimizer states of all stages into one, in the order of ``names``."""
    counts = {len(part["param_groups"]) for part in parts}
    if len(counts) > 1:
        raise PlanError(
            "the optimizers of the stages have different numbers of groups of parameters "
            f"({sorted(counts)}), so their state is not that of one optimizer: make the same "
            "groups on every rank, empty ones too"
        )
    place = {name: number for number, name in enumerate(names)}
    # For a tied parameter the first stage's state is taken.
    state = {n: v for part in reversed(parts) for n, v in part["state"].items() if n in place}
    groups = []
    for together in zip(*(part["param_groups"] for part in parts), strict=True):
        listed = {name for group in together for name in group["params"] if name in place}
        groups.append({**together[0], "params": sorted(listed, key=place.__getitem__)})
    return {
        "state": {name: state[name] for name in sorted(state, key=place.__getitem__)},
        "param_groups": groups,
    }
