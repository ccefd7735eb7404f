"""A model laid out over ranks, and its training step.

One step on one rank, with ``accumulate = 2``::

    forward 0 | backward 0 | forward 1 | counts | backward 1 | norm, clip | optimizer
                                         ~~~~~~~~~~~~~~~~~~~~ all ranks: loss and counts
                                                  ~~~~~~~~~~~ all ranks: buckets of gradients
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.nested import flatten, unflatten
from meshwright.checkpoint.training.named_optimizer import NamedOptimizer
from meshwright.checkpoint.training.wrapped import ModelState
from meshwright.comm import Communicator, LateNumbers, phase, settle
from meshwright.comm.dtensors.gather_dtensor import part_like, whole
from meshwright.comm.failures.events import EventCheck, GroupEvent
from meshwright.comm.failures.sameness import Exchange, require_equal
from meshwright.comm.groups.registry import PROCESS
from meshwright.composition.context_rules import LABELS, over_parts, split_batch
from meshwright.composition.data_layout import DataLayout, LayoutCommunicators
from meshwright.composition.description import Description
from meshwright.composition.example_run import evaluating
from meshwright.composition.expert_rules import imbalance, move_biases, with_balance
from meshwright.composition.loss_sources import LossSources
from meshwright.composition.whole_run import AxisTraffic, add_traffic
from meshwright.data_parallel.owned_matrices import sharers_of
from meshwright.errors import LayoutError, NonFiniteError, PlanError
from meshwright.gradients import (
    UNTOUCHED,
    UNWRITTEN,
    ZEROED,
    Held,
    LossScale,
    LossWindow,
    SpreadGradients,
    agree_on_non_finite,
    apply_loss,
    call_module,
    cut_batch,
    global_norm,
    is_due,
    scale_to_norm,
    step_if,
)
from meshwright.gradients.optimizer_list import each_of
from meshwright.gradients.optimizers import OWNED
from meshwright.losses.chunked import chunked_heads
from meshwright.plan import Plan, match_names
from meshwright.randomness import Draws, RandomOperators
from meshwright.sampling import Sampler
from meshwright.tensor_parallel.checks.equality import look_at_bits, verify_gradients
from meshwright.torch_internals.modules import steps_by_flag
from meshwright.torch_internals.trees import tree_leaves, tree_map

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""``loss(output, target)``, or ``loss(output)`` without a target: a mean or (sum, count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one optimizer step; equal on all ranks."""

    loss: torch.Tensor
    """Mean over the global batch, 0-dim, float64, on the CPU or on the losses' device; reading it
    there is a host sync."""
    grad_norm: torch.Tensor
    """2-norm of all gradients together before clipping, 0-dim."""
    skipped: bool
    """True when the optimizer step was skipped for a non-finite loss or gradient (float16 only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Outputs and loss of this rank's batch."""

    output: object
    loss: torch.Tensor
    """Mean over this batch, 0-dim; NaN when the loss counted nothing."""
    target: object
    """What ``output`` is compared with: this rank's part of it under axis context."""


class Trainable:
    """The result of `parallelize`: this rank's module, its optimizer, and the step of both."""

    _prefix = ""
    """A prefix of the model's names in ``module``."""
    _copies: Mapping[str, str] = MappingProxyType({})
    """Maps other names of a tied parameter to its first name."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        peers: LayoutCommunicators,
        layout: DataLayout,
        optimizer: Optimizer | None,
        loss: Loss,
        draws: Draws | None = None,
        traffic: AxisTraffic | None = None,
        origins: Collection[str] = (),
    ) -> None:
        """``draws`` are those of dropout that does not depend on the layout.

        ``traffic`` has the messages of this rank's modules over axis tensor in one pass.
        ``origins`` say where rules come from.
        """
        self.module = module
        self.plan = plan
        self.optimizer = optimizer
        over = {"tensor": peers.tensor} if not peers.tensor.is_alone else {}
        self.communicators: Mapping[str, Communicator] = MappingProxyType(
            {**layout.communicators, **over}
        )
        """The communicator of each axis."""
        self.steps = 0
        """Optimizer steps so far, skipped ones included."""
        self.loss_scale = LossScale() if plan.precision.needs_loss_scaling else None
        self._is_piped = plan.axes.size("pipeline") > 1
        self._is_balanced = bool(plan.expert.auxiliary or plan.expert.z_loss)
        # A pipeline changes parameters between microbatches, so that cached casts would be stale.
        self._autocast = autocast_of(plan, peers.everyone.device, keeps_casts=not self._is_piped)
        self._layout = layout
        self._peers = peers
        self._loss = loss
        self._sources = LossSources(module, {})
        self._chunked = next(iter(chunked_heads(module).values()), None)
        """The head that computes the loss of a target, if it does, and is on this rank."""
        self._window = LossWindow(peers.losses)
        self._calls = 0
        """The number of calls of `forward_backward`."""
        self._draws = draws
        self._traffic = traffic
        self._origins = origins
        inside = [each for each in (peers.tensor, peers.context, peers.expert) if each is not None]
        self._passes = EventCheck(peers.passes, "the model", dict, inside)
        self._raised_in = ""
        """The step that raised since the last pass; ranks may differ in its collectives."""
        self._late = LateNumbers()
        """Checks of the last step's loss and norm, until the device has computed them."""
        # With loss scaling a step may be skipped, so the check cannot be deferred.
        self._looks_late = not peers.losses.is_on_host and self.loss_scale is None
        self._numbered = 0
        """Samples of this step's global batch that have been computed."""

    @property
    def data_rank(self) -> int:
        """The share of a global batch that this rank reads, from 0."""
        return self._peers.data.rank

    @property
    def data_size(self) -> int:
        """The number of shares that a global batch is split into."""
        return self._peers.data.size

    def sampler(self, dataset_size: int, batch_size: int, seed: int | None = None) -> Sampler:
        """Make a sampler of this rank's part of an order that is the same on any number of ranks.

        ``batch_size`` is that of the global batch; the plan's seed is used when ``seed`` is None.
        """
        return Sampler(
            dataset_size,
            batch_size,
            self.plan.train.seed if seed is None else seed,
            data_rank=self.data_rank,
            data_size=self.data_size,
        )

    # ---------------------------------------------------------------------------- training

    def step(self, batch: object, target: object = None) -> StepResult:
        """Train on this rank's share of one global batch, and zero the gradients.

        A tuple or list ``batch`` is passed to the module as positional arguments, a mapping as
        keyword arguments, anything else as one argument. Tensors are split along dim 0 into the
        plan's ``accumulate`` parts. Raises NonFiniteError, on all ranks, when the loss or a
        gradient is not finite, unless loss scaling skips the step. On a device without it the error
        comes in the next step, or before a state is returned; a fused optimizer skips the bad step,
        another one steps with zero gradients.
        """
        self.forward_backward(batch, target)
        return self.optimizer_step()

    def forward_backward(
        self, batch: object, target: object = None, *, is_last: bool = True
    ) -> None:
        """Run the first half of `step`. The call with ``is_last`` reduces gradients.

        Your own loop may call it several times for one optimizer step, with ``is_last=False`` in
        all calls but the last: loss and gradient are then those of all their samples together.
        """
        if self._window.is_closed:
            raise RuntimeError(
                "forward_backward was called after the gradients of this step had been reduced: "
                "pass is_last=False to all calls but the last, and call optimizer_step after it"
            )
        if PROCESS.saving is not None:
            PROCESS.saving.look()
        # Raises for the last step before its weights are used once more.
        if self._late.coming:
            self._late.settle()
        self._calls += 1
        if self._calls == 1:
            self._compare_plans()
        if not self._is_piped:  # else its schedule compares steps
            after, self._raised_in = self._raised_in, ""
            self._passes.happens(GroupEvent("a pass"), after=after)
        if is_due(self._calls):
            self._compare_batches(batch, target)
        parts = cut_batch(batch, target, self.plan.train.accumulate)
        first, watch = 0, contextlib.nullcontext()
        if self._draws is not None:
            first = self._number_samples(self._draws, sum(size for *_, size in parts))
            if not self.steps:
                watch = self._random_operators(self._draws)
        try:
            with watch:
                for number, part in enumerate(parts):
                    last = is_last and number == len(parts) - 1
                    self._train_on(part, first, is_last=last)
                    first += part[2]
        except BaseException:
            self._raised_in = f"step {self.steps + 1}"
            self._start_over()
            raise
        if is_last and (buffers := self._layout.buffers_now()):
            with phase("buffers", step=self.steps + 1):
                for each in buffers:
                    each.synchronize()

    def optimizer_step(self) -> StepResult:
        """Run the second half of `step`: norm, check, clip, optimizer, zero."""
        optimizer = self.optimizer
        if optimizer is None:
            raise RuntimeError("this Trainable has no optimizer: pass one to parallelize")
        if not self._window.is_closed:
            raise RuntimeError("optimizer_step needs gradients: call forward_backward first")
        try:
            with phase("optimizer", step=self.steps + 1, computes=True):
                loss = self._window.mean()
                spread = self._layout.gradients()
                norm = global_norm(spread)
                is_finite = self._look(norm)
                if is_finite:
                    if is_due(self.steps + 1):
                        self._compare_gradients(loss)
                    if self.plan.train.clip_norm is not None:
                        scale_to_norm(self._every_gradient(spread), norm, self.plan.train.clip_norm)
                    if self._looks_late:
                        is_good = loss.isfinite() & norm.isfinite()
                        step_if(is_good, optimizer, self._every_gradient(spread))
                    else:
                        optimizer.step()
                if self.plan.expert.bias_rate is not None:
                    move_biases(self.module, self.plan.expert, is_skipped=not is_finite)
        finally:
            self._start_over()
        self.steps += 1
        return StepResult(loss=loss, grad_norm=norm, skipped=not is_finite)

    @property
    def draws(self) -> tuple[object, ...]:
        """A key for this rank's random numbers; ranks that compute the same share it."""
        context = self._peers.context
        return (self.data_rank, *(() if context is None else ("context", context.rank)))

    @property
    def entries(self) -> tuple[tuple[int, nn.Module], ...]:
        """The modules that this rank runs on a batch, each with the number of its stage."""
        return ((0, self.module),)

    def expert_imbalance(self) -> float:
        """Return the tokens of the busiest expert in the last step, over the mean of its layer.

        Without padding, over all ranks; 0.0 without axis expert. All ranks must call this.
        """
        has_axis = self._peers.expert is not None
        return imbalance(self.module, self._peers.everyone) if has_axis else 0.0

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Map original names to this rank's parameters (or shards); a tied one once."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            found.setdefault(name, parameter)  # stages may share a parameter under one name
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """Map original names to full gradients, as in one process.

        Call it between the two halves of a step; all ranks must if parameters are sharded.
        """
        settle()
        return {
            name: whole(parameter.grad)
            for name, parameter in self.named_parameters().items()
            if parameter.grad is not None
        }

    @torch.no_grad()
    def eval(self, batch: object, target: object = None) -> EvalResult:
        """Compute outputs and loss of ``batch`` in evaluation mode.

        If parameters are sharded, all ranks must call this.
        """
        settle()
        self._passes.happens(GroupEvent("an evaluation"))
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        context = self._peers.context
        if context is not None:
            split = split_batch(batch, self.plan.context, context)
            batch, target, around = split.part(batch), split.part(target), split.attending()
        with evaluating(self.module), self._autocast(), around:
            output = call_module(self.module, batch)
            local = apply_loss(self._loss, output, target)
        if context is not None:
            local = over_parts(local, output if target is None else target, context)
        loss = local.total.float() / local.count
        return EvalResult(output=output, loss=loss, target=target)

    # ------------------------------------------------------------------------ what it holds

    def weights(self) -> dict[str, torch.Tensor]:
        """Map original names to the full tensors of the model's state, on every rank.

        If parameters are sharded, all ranks must call this.
        """
        settle()
        return {name: whole(value) for name, value in self.module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model and optimizer by original names, in full tensors, and steps.

        If parameters are sharded, all ranks must call this.
        """
        state = self.held_state()
        state["model"] = self.weights()
        if self.optimizer is not None:
            state["optimizer"] = self._whole_optimizer(state["optimizer"])
        return state

    def held_state(self) -> dict[str, Any]:
        """Return the entries of `state_dict` with this rank's tensors or shards; sends nothing.

        The model is a `ModelState`, and the optimizer's tensors are not copied. Tied parameters
        have their first names.
        """
        settle()
        copies = self._copies
        state: dict[str, Any] = {"model": ModelState([self.module], copies), "steps": self.steps}
        if self.optimizer is not None:
            state["optimizer"] = NamedOptimizer(self.optimizer, [self.module], copies).state()
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, copies: bool = True) -> None:
        """Resume exactly where ``state`` was taken, on any layout. Every rank loads the same state.

        Its tensors are full, or sharded like this rank's. Without ``copies`` the optimizer takes
        over its tensors, which are removed from ``state``. Raises RuntimeError, or
        CheckpointMismatchError, naming missing and unknown entries.
        """
        held = self.module.state_dict()
        parts = {
            name: part_like(value, held[name]) if name in held else value
            for name, value in state["model"].items()
        }
        self._load_model(parts)
        if self.optimizer is not None and "optimizer" in state:
            named, saved = self.named_parameters(), state["optimizer"]
            values = {
                name: {key: _part(value, named.get(name)) for key, value in own.items()}
                for name, own in saved["state"].items()
                if sharers_of(named.get(name))[1]
            }
            if not copies:
                saved["state"].clear()  # so that tensors are freed once copied into flat storage
            saved = {"state": values, "param_groups": saved["param_groups"]}
            named_optimizer = NamedOptimizer(self.optimizer, [self.module], self._copies)
            named_optimizer.load(saved, copies=copies)
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.steps = int(state["steps"])
        self._start_over()

    def describe(self) -> Description:
        """Describe each parameter's layout, a step's collectives, and each setting's effect."""
        passes = self.plan.train.accumulate
        passes *= self.plan.pipeline.microbatches if self._is_piped else 1
        sums = passes if self.plan.axes.size("shard") == 1 else 1  # shards are summed once
        sent = [] if self._traffic is None else self._traffic.of_step(self.module, passes, sums)
        described = self._layout.describe(self.module, self.plan)
        found = add_traffic(described, [*sent], self._layout.gradients())
        owned = () if self.optimizer is None else each_of(self.optimizer)
        shares = (
            line for each in owned if OWNED in vars(each) for line in vars(each)[OWNED].shares
        )
        return replace(found, settings=(*found.settings, *self._origins, *shares))

    # --------------------------------------------------------------------------- internals

    def _number_samples(self, draws: Draws, size: int) -> int:
        """Return the number, in the global batch, of the first of this rank's ``size`` samples."""
        if not self._numbered:
            draws.begin_step(self.steps)
        data, first = self._peers.data, self._numbered
        sizes = [size]
        if not data.is_alone:
            sizes = data.gather_values(size, label="sizes of shares")
        self._numbered += sum(sizes)
        return first + sum(sizes[: data.rank])

    @contextlib.contextmanager
    def _random_operators(self, draws: Draws) -> Iterator[None]:
        """Raise for random operators whose numbers depend on the layout."""
        with contextlib.ExitStack() as stack:
            if self.plan.train.compile:
                # A graph would hide operators, and keep the hooks that this check registers.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            names = [name for name, _ in self.module.named_modules()]
            patterns = [f"{self._prefix}{pattern}" for pattern in self.plan.train.per_rank]
            per_rank = [name for pattern in patterns for name in match_names(pattern, names)]
            stack.enter_context(RandomOperators(self.module, draws, per_rank=per_rank))
            yield

    def _train_on(self, part: tuple[object, object, int], first: int, *, is_last: bool) -> None:
        """Run forward and backward of ``part``, whose first sample has number ``first``."""
        batch, target, size = part
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        split = None
        if self._peers.context is not None:
            split = split_batch(batch, self.plan.context, self._peers.context)
            batch, target = split.part(batch), split.part(target)
            around = partial(split.attending, self._draws)
        layout, window = self._layout, self._window
        layout.reduce_next(is_last)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        drawing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if self._draws is not None:
            drawing = partial(self._draws.microbatch, first, range(first, first + size))
        with phase("forward", step=self.steps + 1, computes=True), drawing(), around():
            chunked = self._chunked
            labeled = contextlib.nullcontext() if chunked is None else chunked.expecting(target)
            with self._autocast(), labeled:
                output = call_module(self.module, batch)
                if split is not None and self.steps == 0:
                    split.watch_loss(output, target, self._late)
                local = apply_loss(self._loss, output, target, self._sources.look)
                if self._is_balanced:
                    local = with_balance(local, self.module, self.plan.expert, self._peers.data)
            terms = target
            if target is None and split is not None:
                terms = batch  # so that means over unlike parts are unlike
            elif target is None and isinstance(batch, Mapping):
                terms = batch.get(LABELS)  # of a model that computes its own loss
            window.add(local, size, terms)
            if is_last:
                window.close()
                # A function: the counts are on their way, and only complete gradients need them.
                layout.scale_by(lambda: window.factor() / scale)
        # Checkpoints run forwards again in the backward, and must draw the same masks.
        with phase("backward", step=self.steps + 1, computes=True), drawing(), around():
            total = local.total if scale == 1.0 else local.total * scale
            total.backward()

    def _every_gradient(self, spread: Sequence[SpreadGradients]) -> list[torch.Tensor]:
        """List the gradients to clip; ``spread`` has those that count in the norm."""
        return [each for group in spread for each in group.gradients]

    def _look(self, norm: torch.Tensor) -> bool:
        """Whether the optimizer may step; always True if the next step makes the check instead."""
        window, step = self._window, self.steps
        numbers = torch.cat([norm.reshape(1).to(torch.float64), window.sums()])
        if self._looks_late:
            self._late.look(numbers, partial(self._judge, window, step))
            return True
        return self._judge(window, step, numbers.tolist())

    def _judge(self, window: LossWindow, step: int, numbers: Sequence[float]) -> bool:
        """Whether ``step`` is finite; raises on all ranks unless it may be skipped."""
        norm, *sums = numbers
        window.know(sums)
        loss = sums[0] / sums[1]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        may_skip = self.loss_scale is not None and self.loss_scale.update(is_finite)
        if not is_finite and not may_skip:
            raise self._non_finite(window, step, loss, norm)
        return is_finite

    def _non_finite(
        self, window: LossWindow, step: int, loss: float, norm: float
    ) -> NonFiniteError:
        """Make the error that all ranks raise; collective, with the same ``loss`` and ``norm``."""
        harm = UNTOUCHED
        if self._looks_late:
            harm = UNWRITTEN if steps_by_flag(self.optimizer) else ZEROED
        found = [f"the gradient of {name!r}" for name in self._layout.found_non_finite]
        if not window.is_finite:
            found.append("the loss")
        what = f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}"
        return agree_on_non_finite(self._peers.everyone, found, what=what, harm=harm)

    def _whole_optimizer(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        found = tree_map(_whole, dict(parts))
        state, owned = found["state"], defaultdict[Communicator, dict[str, Any]](dict)
        for name, parameter in self.named_parameters().items():
            axis, _ = sharers_of(parameter)
            if axis is not None:
                owned[axis].update({name: state[name]} if name in state else {})
        for axis, mine in owned.items():
            for each in of_one(mine, axis):
                state.update(each)
        return found

    def _load_model(self, parts: Mapping[str, Any]) -> None:
        self.module.load_state_dict(parts)

    def _start_over(self) -> None:
        """Forget the gradients and losses of this step."""
        self._window = LossWindow(self._peers.losses)
        self._numbered = 0
        self.module.zero_grad(set_to_none=True)

    def _compare_plans(self) -> None:
        """Check that all ranks have the same plan. Raises PlanError, naming ranks and keys."""
        with phase("compare plans", step=self.steps + 1):
            everyone = self._peers.everyone
            plan, remedy = json.loads(self.plan.to_json()), "Give every rank the same plan"
            require_equal(
                everyone, plan, "the plan", label="compare plans", error=PlanError, remedy=remedy
            )

    def _compare_batches(self, batch: object, target: object) -> None:
        """Check that ranks of one share get equal batches. Raises ValueError on all of them."""
        alike = self._peers.alike
        if alike.is_alone:
            return
        held = [("", tensor) for tensor in tensors_in((batch, target))]
        with phase("compare batches", step=self.steps + 1):
            judge = partial(self._judge_batches, self._calls)
            look_at_bits(held, self._late, judge, is_late=not alike.is_on_host)

    def _judge_batches(self, number: int, held: Sequence[Held], digests: Sequence[str]) -> None:
        """Raise ValueError if ``digests`` differ between ranks in call ``number``."""
        require_equal(
            self._peers.alike,
            {f"tensor {place}": digest for place, digest in enumerate(digests)},
            f"batch {number}",
            label="compare batches",
            error=ValueError,
            remedy="All ranks that differ only on the axes tensor and pipeline get the same share, "
            "that of their data_rank",
            exchange=partial(self._exchange, self._peers.alike, f"batch {number}"),
        )

    def _exchange(self, axis: Communicator, event: str, said: str) -> list[str]:
        """Exchange short texts at ``event`` over all of a pass; returns those of ``axis``."""
        everyone = self._passes.exchange(GroupEvent(event), said)
        ranks = self._passes.communicator.ranks
        return [each for rank, each in zip(ranks, everyone, strict=True) if rank in axis.ranks]

    def _compare_gradients(self, loss: torch.Tensor) -> None:
        """Check that tensor ranks have one ``loss``, and equal gradients of replicated parameters.

        Raises LayoutError on all of them.
        """
        tensor = self._peers.tensor
        if tensor.is_alone:
            return
        step = self.steps

        def exchange(what: str) -> Exchange:
            return partial(self._exchange, tensor, f"{what} of step {step + 1}")

        def judge(numbers: Sequence[float]) -> None:
            require_equal(
                tensor,
                {"it": numbers[0]},
                "the loss of one batch",
                label="compare losses",
                error=LayoutError,
                remedy="The loss reads a parameter of which each has a part. Take its "
                "`full_tensor()` there, or, beside axis shard, compute the term in the model's "
                "forward and return it with the output",
                exchange=exchange("loss"),
            )

        with phase("compare gradients", step=step + 1):
            held = list(self.named_parameters().items())
            verify_gradients(tensor, held, exchange("gradients"), self._late)
            self._late.look(loss.reshape(1), judge)


def autocast_of(
    plan: Plan, device: torch.device, *, keeps_casts: bool = True
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes the autocast context of ``plan``; ``keeps_casts`` caches cast weights."""
    precision = plan.precision
    if not precision.is_mixed:
        return contextlib.nullcontext
    dtype = getattr(torch, str(precision.compute))
    return partial(torch.autocast, device.type, dtype, cache_enabled=keeps_casts)


def tensors_in(values: object) -> list[torch.Tensor]:
    """List the tensors of any nested value."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def union(own: Mapping[str, torch.Tensor], axis: Communicator) -> dict[str, torch.Tensor]:
    """Collect the tensors of all ranks of ``axis`` on each, sparse ones as dense.

    If several ranks have a name, the first rank's tensor is taken.
    """
    own = {name: tensor.to_dense() if tensor.is_sparse else tensor for name, tensor in own.items()}
    facts = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in own.items()]
    rows = axis.gather_values(facts, label="names of a state")
    found: dict[str, torch.Tensor] = {}
    for source, row in enumerate(rows):
        for name, shape, dtype in row:  # the gathered order, so that broadcasts match
            if source == axis.rank:
                tensor = own[name].detach().to(axis.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=axis.device)
            if tensor.numel():
                axis.broadcast(tensor, source=source, label="state of all ranks").wait()
            found.setdefault(name, tensor)
    return found


def of_one(own: Mapping[str, Any], axis: Communicator) -> list[Mapping[str, Any]]:
    """Collect the nested states of all ranks of ``axis`` on each, in rank order."""
    tensors, structure = flatten(dict(own), str(axis.rank))
    whole = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    everything = union(whole, axis)
    rows = axis.gather_values(structure, label="state of all ranks")
    return [cast("Mapping[str, Any]", unflatten(row, everything)) for row in rows]


def _whole(value: object) -> object:
    return whole(value, label="optimizer state") if isinstance(value, torch.Tensor) else value


def _part(value: object, parameter: torch.Tensor | None) -> object:
    """Shard state of the parameter's shape like the parameter; copy step counts and the like."""
    if not isinstance(value, torch.Tensor):
        return value
    if parameter is not None and value.shape == parameter.shape and not sharers_of(parameter)[0]:
        return part_like(value, parameter)
    # torch keeps a step count as the tensor that it is given.
    return value.clone()
