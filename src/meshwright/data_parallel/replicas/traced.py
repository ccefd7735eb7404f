"""A replica under `torch.compile`: gradients are marked in the graph; a compiler pass fuses marks.

Where the marks are placed:

=========  ==========================================================================
forward    route B: the forward computes with copies of the parameters, whose backward
           marks the gradient. Needs nothing but the forward's own graph
hooks      route A: the hook of each parameter marks what ``.grad`` has accumulated.
           Needs a compiled backward (`meshwright.compiler.compiled_autograd`)
nowhere    the graph ends before the replica's own hooks, and the reducer works as in
           eager mode; `Marking.obstacle` lists what a graph cannot express
=========  ==========================================================================

This file does not depend on the compiler; it asks a `GradientMarking`.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.func import functional_call

import meshwright
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.failures.sameness import require_equal
from meshwright.comm.graphs.marks import announce, deliver, grad_reduce, stays, with_kept
from meshwright.comm.graphs.untraced import apart, constant
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.observing.late import Rows
from meshwright.data_parallel.checks.alignment import PassPlace
from meshwright.data_parallel.replicas.buckets import KeptMemory
from meshwright.data_parallel.replicas.gradient_bucket import compressed_dtype
from meshwright.data_parallel.replicas.reducer import GradientReducer
from meshwright.errors import CollectiveMismatchError
from meshwright.gradients import digests_of
from meshwright.torch_internals.autograd import at_end_of_backward, running_backward

_log = logging.getLogger("meshwright")

_SAME_PATH = "take the same path on every rank"
_ALONE = '["alone", []]'
"""The plan of a graph in which marks are reduced one by one."""

Route = str
"""``"forward"``, ``"hooks"`` or ``"eager"``: plain text, which a trace takes for a constant."""


class GradientMarking(Protocol):
    """The compiler's interface for marks. Called in a trace; `ran` and `is_unfused`: in a run."""

    def route(self, module: nn.Module | None) -> tuple[Route, str]:
        """Choose the route for the marks of ``module``, and how buckets are sent and fused."""
        ...

    def modules_of_trace(self) -> list[nn.Module]:
        """List the modules of the function whose graph is being traced."""
        ...

    def obstacle_to_gathers(self, module: nn.Module) -> str:
        """Prepare gathers of shards of ``module`` in the graph; returns an obstacle or ""."""
        ...

    def has_written(self) -> bool:
        """Whether the graph being traced has written to tensors that it gathers."""
        ...

    def ran(self, plan: str) -> None:
        """Record that a graph with this plan begins its first reduction."""
        ...

    def is_unfused(self, model: str) -> None:
        """Count a mark of ``model`` that was reduced alone: the compiler pass has not run."""
        ...


class Marking:
    """The gradient marks of one replica."""

    def __init__(
        self,
        module: nn.Module,
        reducer: GradientReducer,
        communicator: Communicator,
        *,
        swaps_parameters: bool = False,
    ) -> None:
        """``swaps_parameters`` is True when modules compute with casts of the parameters."""
        self._module = weakref.ref(module)
        self._reducer = reducer
        self._communicator = communicator
        self._swaps_parameters = swaps_parameters
        self.name = f"{communicator.name}/{communicator.number('marked models')}"
        """Equal on all ranks; marks carry it."""
        self.keeps = False
        """True when ``.grad`` may hold what a pass without a reduction has left."""
        self.is_open = False
        """True while such a pass has begun, and its gradients have not come."""
        self.renewals = 0
        """The number of times that all graphs have become invalid."""
        self._running = -1
        """The backward pass of the graph that ran last, as autograd numbers it."""
        self._takes = False
        """True when the graph that runs reduces what was left, too."""
        self.has_begun = False
        """True when a traced forward pass has begun, which no hook has seen."""
        self.index = {name: index for index, (name, _) in enumerate(reducer.named)}
        self._ranks = communicator.size
        self._mode = "coalesced"
        self._narrow: torch.dtype | None = None
        """The dtype in which gradients are sent, if it is not their own."""
        self._group = communicator.name
        settings = reducer.settings
        self._sizes = list(settings.listed_bytes) or [settings.first_bytes, settings.cap_bytes]
        self._passes: Counter[str] = Counter()
        """The number of runs of each plan on this rank."""
        self._plan = ""
        """The plan that ran last."""
        self._after: dict[str, str] = {}
        """The plan that has followed each."""
        self._memory: dict[tuple[int, torch.dtype], KeptMemory] = {}
        """Of large gradients, by index."""
        self._told = ""
        self._token = torch.zeros((), device=communicator.device)
        reducer.marking = self
        announce(self.name, self)

    def take_up(self) -> None:
        """Forget the former parameters: the reducer has other ones."""
        self.index = {name: index for index, (name, _) in enumerate(self._reducer.named)}
        self._passes.clear()
        self._memory.clear()

    # ------------------------------------------------------------------ while a graph is traced

    def route(self) -> Route:
        """Choose the route for the marks of the pass being traced."""
        reducer = self._reducer
        # Read while tracing: compilers guard them, and trace again when they change.
        is_scaled = reducer.on_reduction is not None or reducer.scale is not None
        route = self._choose(is_scaled, reducer.registered_hook is not None, self.renewals)
        # One backward may bring both gradients, and a graph marks its own alone.
        return "eager" if route == "forward" and reducer.is_wanted and self.is_open else route

    @constant
    def _choose(self, is_scaled: bool, is_hooked: bool, renewals: int) -> Route:
        self._reducer.follow_leaves()
        obstacle = self.obstacle()
        route = "eager" if obstacle else self._prepare()
        if route == "forward" and self._reducer.leaves.has_hooks_of_others:
            obstacle = "hooks of parameters come before the reduction"
        if not obstacle:
            return route
        if obstacle != self._told:
            self._told = obstacle
            _log.info("gradients are reduced outside of the compiled graph: %s", obstacle)
        return "eager"

    def _prepare(self) -> Route:
        route, mode = compiler_of_marks().route(self._module())
        ranks = self._communicator
        if mode == "coalesced" and not ranks.is_on_host:
            mode = "concat"  # a list is as many operations, and Gloo takes none of devices
        shares = ranks.backend == "meshwright"
        self._mode = "shared" if mode == "coalesced" and shares else mode
        sent = self._sent_in()
        self._narrow = None if sent == torch.float32 else sent
        return route

    def _sent_in(self) -> torch.dtype | None:
        """The dtype in which float32 is sent; None where a hook computes more than a mean."""
        hook, dtype = self._reducer.registered_hook, torch.float32
        return dtype if hook is None else compressed_dtype(hook, self._communicator, dtype)

    def obstacle(self) -> str:
        """Name what this replica needs and marks cannot express; "" when they can express all."""
        reducer, module = self._reducer, self._module()
        settings = reducer.settings
        reasons = {
            "static_graph=True compares the passes": settings.is_static,
            "sparse gradients have no place in a bucket": bool(settings.sparse),
            "param_to_hook_all_reduce sets an order of its own": bool(settings.delayed),
            "skip_all_reduce_unused_params=True looks at the first pass": settings.skips_unused,
            'unused_gradient="zeros" is decided after the reduction': settings.zeros_for_unused,
            "mixed_precision swaps the parameters": self._swaps_parameters,
            "gradients are reduced in another dtype": settings.reduce_dtype is not None,
            "values that are not finite are looked for": settings.is_watched,
            "gradients are scaled by a factor of the step": reducer.scale is not None,
            "uneven inputs or a pipeline drive the reductions": reducer.on_reduction is not None,
            "experts are reduced over other ranks": bool(reducer.experts),
            "modules compute on DTensors": not all(
                lent.local.is_local for lent in reducer.leaves.lent.values()
            ),
            "recurrent modules keep their weights in a list of their own": module is not None
            and any(isinstance(part, nn.RNNBase) for part in module.modules()),
        }
        hook = reducer.registered_hook
        if hook is not None and self._sent_in() is None:
            name = getattr(hook.hook, "__name__", type(hook.hook).__name__)
            reasons[f"the communication hook {name} sees whole buckets"] = True
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def begin(self) -> None:
        """Begin a forward pass that is being traced."""
        reducer = self._reducer
        reducer.synchronize(reducer.is_wanted)
        self.has_begun = True
        if not reducer.is_wanted:
            self.keep()

    def keep(self) -> None:
        """Begin a forward pass whose gradients stay on this rank."""
        self.keeps = self.is_open = True

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the module's own
        """Call ``module`` with copies of its parameters whose gradients are marked.

        Hooks have nothing to reduce then. Where a frame of the forward is not traced after all,
        this is not called, and hooks reduce.
        """
        reducer, leaves = self._reducer, self._reducer.leaves
        is_due = torch.is_grad_enabled() and reducer.is_wanted
        if is_due:
            reducer.synchronize(False)
        above = "module." if isinstance(module, TracedForward) else ""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            index = self.index.get(name.removeprefix(above))
            if index is None or parameter is not reducer.named[index][1]:
                continue  # another tensor is lent for this call alone
            # Of a DTensor what modules compute with, which has the gradient.
            leaf = leaves.parameters[index]
            if is_due and parameter.requires_grad:
                found[name] = cast("torch.Tensor", _Marked.apply(leaf, self, index))
            elif leaf is not parameter:
                found[name] = leaf
        return functional_call(module, found, args, kwargs)

    def mark(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """Compute the mean of ``gradient`` over the ranks when the graph runs."""
        narrow = self._narrow if gradient.is_floating_point() else None
        reduced = grad_reduce(
            gradient if narrow is None else gradient.to(narrow),
            index=index,
            ranks=self._ranks,
            group=self._group,
            model=self.name,
            mode=self._mode,
            sizes=self._sizes,
        )
        return reduced if narrow is None else reduced.to(gradient.dtype)

    def accumulated(self, index: int, parameter: torch.Tensor) -> None:
        """Mark the whole gradient of one parameter, in a hook of a compiled backward."""
        if not self._reducer.is_synchronizing:
            if not self._reducer.is_wanted and self._ranks > 1:
                stays(self._token, index, self.name)
            return
        self._check_hooks()
        gradient = parameter.grad
        if gradient is not None:
            gradient.copy_(self.mark(gradient, index))

    def accumulated_at_leaf(self, index: int, leaf: torch.Tensor) -> None:
        """As `accumulated`, for a DTensor's leaf, whose gradient may be marked already."""
        gradient = leaf.grad
        if gradient is None:
            return
        if not self._reducer.is_synchronizing:
            self.accumulated(index, leaf)
        else:
            self._check_hooks()
            if self.keeps:
                gradient = with_kept(gradient, index, self.name)
            gradient = self.mark(gradient, index)
        deliver(self._token, gradient, index, self.name)
        leaf.grad = None

    @constant
    def _check_hooks(self) -> bool:
        self._prepare()
        obstacle = self.obstacle()
        if obstacle:
            raise RuntimeError(
                f"a compiled backward cannot reduce the gradients of this model: {obstacle}. "
                "Call backward outside of compiled_autograd"
            )
        return True

    # ------------------------------------------------------------------ while a graph runs

    def stays(self) -> None:
        """Note a gradient that hooks do not reduce: a graph did, or it stays on this rank."""
        if self.is_open and running_backward() != self._running:
            self.is_open = False

    def stays_local(self, index: int) -> None:
        """Note a gradient of a pass in ``no_sync``, see `Alignment.stays_local`."""
        self._reducer.alignment.stays_local(index)

    def take_kept(self, index: int) -> torch.Tensor | None:
        """Take from ``.grad`` what passes without a reduction have left for parameter ``index``."""
        self._takes = True
        return self._reducer.leaves.take(index, self._reducer.named[index][1])

    def deliver(self, index: int, gradient: torch.Tensor) -> None:
        """Add ``gradient``, this rank's part, to the gradient of DTensor parameter ``index``."""
        self._reducer.leaves.deliver(index, gradient)

    @torch.no_grad()
    def divided(self, index: int, gradient: torch.Tensor, ranks: int) -> torch.Tensor:
        """Divide ``gradient`` by ``ranks``, into memory shared by the ranks of a host."""
        key = index, gradient.dtype
        if key not in self._memory:
            allocate = self._communicator.empty_shared
            self._memory[key] = KeptMemory(gradient.numel(), gradient.dtype, allocate)
        form = torch.empty(gradient.shape, device="meta")
        kept = self._memory[key].tensor(form.shape, form.stride(), gradient.device)
        return torch.div(gradient, ranks, out=kept)

    def agree(self, indices: Sequence[int], plan: str) -> None:
        """Compare across ranks which backward pass this is and what it will reduce.

        On a device the answer is read in the next pass, unless this rank does something else than
        in the previous pass: then it reads the answer before it reduces, and waits for ranks that
        still compile. Raises CollectiveMismatchError on every rank, RuntimeError when a hook of a
        parameter was registered after the graph was compiled.
        """
        late, alignment = self._reducer.late, self._reducer.alignment
        running = running_backward()
        if late.coming and running != self._running:
            late.settle()
        self._running = running
        self._refuse_hooks()
        self._passes[plan] = count = self._passes[plan] + 1
        is_as_before = self._after.get(self._plan) == plan
        self._after[self._plan] = self._plan = plan
        rest = self._rest(indices)
        alignment.begin_forward()
        alignment.begin_backward()
        is_late = not self._communicator.is_on_host and is_as_before and rest is _Rest.NONE
        digest = hashlib.blake2b(plan.encode(), digest_size=6).digest()
        mine = (float(int.from_bytes(digest, "little")), float(is_late), rest, *alignment.say())
        started = self._communicator.start_numbers(
            (*mine, *(float(mark) for mark in alignment.marks())),
            label="agree on the gradients of a compiled graph",
        )
        judge = partial(self._judge, indices, plan, alignment.place)
        late.compare(started, judge, is_late=is_late)
        if count.bit_count() == 1 and not self._reducer.is_synchronizing:
            at_end_of_backward(self._verify)
        compiler_of_marks().ran(plan)

    def _judge(self, indices: Sequence[int], plan: str, place: PassPlace, rows: Rows) -> None:
        """Raise if ``rows`` of a pass differ; reduce gradients that the graph leaves out."""
        most = max(row[2] for row in rows)
        if len({row[0] for row in rows}) > 1 or (most and any(row[1] for row in rows)):
            self._refuse(indices, plan, [bool(row[1]) for row in rows])
        alignment = self._reducer.alignment
        if len({row[5:] for row in rows}) > 1:
            error = alignment.refuse(place)
            if error is not None:
                raise error
        if any(row[4] for row in rows):
            alignment.copies.ask()
        if len({row[3] for row in rows} - {0.0}) > 1:
            error = alignment.doubt()
            if error is not None:
                raise error
        match most:
            case _Rest.LATER:
                at_end_of_backward(partial(self._reduce_rest, ()))
            case _Rest.NOW:
                self._reduce_rest(indices)

    def _rest(self, indices: Sequence[int]) -> _Rest:
        """When to reduce gradients of passes without a reduction that this graph leaves out."""
        in_hooks = self._reducer.is_synchronizing
        takes, self._takes = self._takes or in_hooks, False
        kept, self.is_open = self.keeps, self.is_open and not in_hooks
        self.keeps = self.is_open
        if kept and (self.is_open or not takes):
            return _Rest.LATER
        return _Rest.NOW if kept and self._beside(indices) else _Rest.NONE

    def _beside(self, indices: Sequence[int]) -> list[int]:
        """List the parameters, except ``indices``, that have a gradient."""
        rows = enumerate(self._reducer.named)
        return [n for n, (_, p) in rows if p.grad is not None and n not in indices]

    @torch.no_grad()
    @apart
    def _reduce_rest(self, indices: Sequence[int]) -> None:
        """Replace gradients, except those of ``indices``, by their means; equal ones stay equal."""
        rows = self._communicator.gather_values(
            self._beside(indices), label="which gradients are left"
        )
        for index in sorted({index for row in rows for index in row}):
            name, parameter = self._reducer.named[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_of(parameter.grad)
            mean = gradient.div(self._ranks).contiguous()
            self._communicator.all_reduce(mean, label=f"reduce {name}, which was left").wait()
            gradient.copy_(mean)

    def _refuse_hooks(self) -> None:
        reducer = self._reducer
        if reducer.is_synchronizing or not reducer.leaves.has_hooks_of_others:
            return
        self.renewals += 1
        raise RuntimeError(
            "a parameter has got a hook after its model was compiled, and would be given gradients "
            "that are reduced already. Register hooks before the first forward pass, or run this "
            "step once more: it is compiled anew"
        )

    def _refuse(self, indices: Sequence[int], plan: str, is_late: Sequence[bool]) -> None:
        """Name the parameters that only some ranks are about to reduce.

        Ranks that are ``is_late`` have gone on and cannot be asked. So each rank names its own
        parameters, and the error of one that is not late is published: the others name that rank.
        """
        communicator = self._communicator
        names = [self._reducer.named[index][0] for index in indices]
        if any(is_late):
            ranks = [r for r, late in zip(communicator.ranks, is_late, strict=True) if not late]
            me = communicator.ranks[communicator.rank]
            error = CollectiveMismatchError(
                f"axis {communicator.axis}: the compiled graphs of ranks {ranks} do not do what "
                "they did in the pass before, and those of the others do: on rank "
                f"{me} it reduces {', '.join(names)}, in buckets {plan}. One step of an optimizer "
                f"may have used such gradients. {_SAME_PATH}, and leave as many passes without a "
                "reduction"
            )
            if me in ranks and PROCESS.monitor is not None:
                PROCESS.monitor.publish(error, is_cause=True)
            raise error
        found = {f"the gradient of {name}": "in the graph" for name in names}
        for rows in (found, {"the order of buckets": plan}):
            require_equal(
                communicator,
                rows,
                "what compiled graphs reduce",
                label="graphs that differ",
                remedy="A graph holds what its forward pass has used: take the same path on every "
                "rank, or leave the model uncompiled",
            )

    @apart
    def _verify(self) -> None:
        """Compare the gradients, after passes 1, 2, 4, 8 and so on with a plan; collective.

        A contribution that bypasses the marked copy, as from a use of the parameter outside of the
        module, would differ on every rank.

        Raises CollectiveMismatchError on every rank, naming the first parameter.
        """
        gradients = [parameter.grad for _, parameter in self._reducer.named]
        missing = torch.zeros((), dtype=torch.int64, device=self._communicator.device)
        sums = [missing if each is None else each for each in digests_of(gradients)]
        self._reducer.late.look(torch.stack(sums), self._compare_sums)

    def _compare_sums(self, sums: list[float]) -> None:
        named = zip(self._reducer.named, sums, strict=True)
        require_equal(
            self._communicator,
            {f"the gradient of {name!r}": f"{found}" for (name, _), found in named},
            "what the backward pass of a compiled graph leaves",
            label="verify a compiled graph",
            remedy="Is the parameter used outside of the replicated module's forward, or was its "
            "gradient changed? Use it inside, or run backward in "
            "meshwright.compiler.compiled_autograd with torch._dynamo.config.optimize_ddp = "
            '"python_reducer"',
        )

    def unfused(self) -> None:
        """Prepare for a mark that is reduced alone; the first of a pass compares it over ranks."""
        compiler_of_marks().is_unfused(self.name)
        if running_backward() != self._running:
            self.agree((), _ALONE)


class _Rest(IntEnum):
    """When to reduce gradients that were kept on their rank and that no graph reduces."""

    NONE = 0
    NOW = 1
    """They are of parameters that the graph has no gradient of."""
    LATER = 2
    """The backward pass may yet bring some; it reduces all at its end."""


class _Marked(torch.autograd.Function):
    """A copy of a parameter whose gradient is marked in the backward."""

    # The compiler reads these signatures, so they cannot be autograd's general ones.
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - autograd's context takes what it is given
        parameter: torch.Tensor,
        marking: Marking,
        index: int,
    ) -> torch.Tensor:
        ctx.mark = marking, index, marking.keeps
        return parameter.detach()  # no view, so that a forward may write to it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        marking, index, keeps = ctx.mark
        if keeps:
            gradient = with_kept(gradient, index, marking.name)
        return marking.mark(gradient, index), None, None


class TracedForward(nn.Module):
    """A module's original forward without its hooks, which run before `functional_call`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """Call ``run``, the forward of the module's class."""
        return run(self.module, *args, **kwargs)


def compiler_of_marks() -> GradientMarking:
    """The compiler's side of the marks, loaded by the first trace that needs it."""
    # The one use of a package above this one: looked up here, not imported.
    return cast("GradientMarking", meshwright.compiler.MARKING)
