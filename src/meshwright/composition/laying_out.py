"""The steps of laying a module out: its values and device, its dropout, its layers, its data axes.

Each changes the module in place; `assembly` orders them.

A model on the meta device gets the values that `randomness.initialize` gives in one process, bit by
bit, on every layout. Ranks that shard parameters draw module by module and keep their shards. Axes
pipeline and tensor run the full model first, so each of their ranks has all of it until it is
split.

Layouts replace the user's parameters: by values for the meta device, by DTensors for shards.
`GivenParameters` gives the replacements the user's attributes and hooks, and checks an optimizer
that was built before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import meshwright
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import check_ties, mesh_communicators
from meshwright.comm.dtensors.gather_dtensor import held_boxes
from meshwright.composition.checks import recomputed
from meshwright.composition.data_layout import LayoutCommunicators, ReplicatedLayout, ShardedLayout
from meshwright.composition.example_run import Inputs
from meshwright.composition.own_model import is_elsewhere
from meshwright.composition.tensor_rules import ModelCut
from meshwright.data_parallel import ReductionSettings, ReplicateOptions, flat_groups
from meshwright.data_parallel.checks.starting_state import broadcast_tensors, compare_parameters
from meshwright.data_parallel.flat_parameters import parts_of_flat
from meshwright.data_parallel.owned_matrices import own_matrices
from meshwright.data_parallel.replicas.replicated import replica_state, replicate_with
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.data_parallel.sharded_modules.sharded import fully_shard
from meshwright.data_parallel.shards.policies import MixedPrecisionPolicy
from meshwright.errors import InternalError, PlanError
from meshwright.expert_parallel import ExpertParallel
from meshwright.gradients import check_optimizer
from meshwright.gradients.optimizer_list import OptimizerFactory, as_one, each_of
from meshwright.gradients.optimizers import looks_at_parameters
from meshwright.losses.chunked import head_of, in_chunks
from meshwright.mesh import DeviceMesh
from meshwright.plan import Plan, match_names
from meshwright.randomness import DimPart, Draws, Dropout, replace_dropout
from meshwright.randomness.initialization import HeldBoxes, held_whole, initialize
from meshwright.tensor_parallel import ParallelStyle
from meshwright.tensor_parallel.apply import apply_plan
from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    set_after_hooks,
    set_backward_hooks,
)
from meshwright.torch_internals.trees import tree_map_only

Buffers = dict[str, torch.Tensor | None]
"""The buffers of one module, by name."""


def optimized_parameters(
    module: nn.Module, plan: Plan, copies: contextlib.AbstractContextManager[object]
) -> Iterable[nn.Parameter]:
    """Return the parameters for the optimizer: flat ones if the plan says so.

    Inside of ``copies`` each stage of this rank holds its own copy of a tied parameter.
    """
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if not (plan.train.flat and trains):
        return module.parameters()
    held = {id(parameter) for parameter in module.parameters()}
    # A unit may consist of copies of tied parameters, which each pipeline step overwrites.
    with copies:  # a unit looks for what it has put into its modules
        flats = flat_groups(module)
    return [flat for flat in flats if _has_any(module, flat, held)]


def _has_any(module: nn.Module, flat: nn.Parameter, held: Collection[int]) -> bool:
    parts = parts_of_flat(module, flat, flat.detach())
    return parts is None or any(id(parameter) in held for parameter, _ in parts)


def is_on_meta(model: nn.Module) -> bool:
    """Whether ``model`` has no values yet. Raises PlanError if only some parameters have values."""
    empty = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if any(empty.values()) and not all(empty.values()):
        first = next(name for name, is_empty in empty.items() if is_empty)
        known = next(name for name, is_empty in empty.items() if not is_empty)
        raise PlanError(
            f"parameter {first!r} is on the meta device and {known!r} is not: give parallelize a "
            "model that is all on the meta device, to be drawn from [train] seed, or none of it"
        )
    return any(empty.values())


def is_drawn_in_parts(plan: Plan) -> bool:
    """Whether no rank needs the full model to draw its values."""
    # Drawing in another dtype would give other values.
    is_cast = plan.precision.parameters != Plan().precision.parameters
    drawn = ("replicate", "shard")
    others = any(plan.axes.size(axis) > 1 for axis in plan.axes.names if axis not in drawn)
    return plan.axes.size("shard") > 1 and not others and not is_cast


def _draw(model: nn.Module, plan: Plan, device: torch.device, held: HeldBoxes = held_whole) -> None:
    """Allocate ``model`` on ``device`` and draw the values of the plan's seed.

    ``held`` gives this rank's parts of parameters. Raises PlanError for modules that nothing
    can initialize.
    """
    try:
        initialize(model, plan.train.seed, device=device, held=held)
    except (ValueError, RuntimeError) as error:
        raise PlanError(
            f"the model is on the meta device, and cannot be drawn from [train] seed: {error}. "
            "Build it on a device instead"
        ) from error


def apply_dropout(model: nn.Module, plan: Plan) -> Draws | None:
    """Make dropout draw the masks of one process, if the plan says so; returns its draws."""
    if plan.train.dropout == "local":
        return None
    draws = Draws(plan.train.seed)
    try:
        replace_dropout(model, draws, per_rank=plan.train.per_rank)
    except ValueError as error:
        raise PlanError(f'[train] dropout = "global": {error}') from error
    return draws


def chunk_loss(model: nn.Module, plan: Plan) -> None:
    """Have the head of ``model`` compute the loss of a target, if the plan says so."""
    if plan.train.loss_chunk is None:
        return
    try:
        in_chunks(model, head_of(model) or "", chunk=plan.train.loss_chunk)
    except ValueError as error:
        raise PlanError(f"[train] loss_chunk = {plan.train.loss_chunk}: {error}") from error


def place(model: nn.Module, plan: Plan, axis: Communicator) -> None:
    """Draw a model on meta; move it to this rank's device and, unless default, the plan's dtype."""
    if is_on_meta(model):
        _draw(model, plan, axis.device)
    model.to(axis.device)
    if plan.precision.parameters != Plan().precision.parameters:
        dtype = getattr(torch, plan.precision.parameters)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            # Complex tensors keep their dtype.
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        model._apply(cast)


def equalize(model: nn.Module, everyone: Communicator) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks."""
    compare_parameters(everyone, list(model.named_parameters()))
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors(everyone, tensors, label="broadcast parameters")


def cut_over_tensor(
    module: nn.Module, cut: ModelCut, peers: LayoutCommunicators, *, follows: bool = True
) -> None:
    """Shard modules of a model, or of one stage, over the ranks of axis tensor, in place.

    ``follows``: its next forward is eager, and the first since it was cut.
    """
    mesh = peers.mesh_of("tensor")
    here = {name for name, _ in module.named_modules()}
    styles = {name: cut.style_of(name) for name in cut.styles if name in here}
    if mesh is None or not styles:
        return
    cut.set_widths(module)
    _apply_styles(module, mesh, styles, "[tensor] rules", follows)
    axis = peers.tensor
    for name in styles:
        part = module.get_submodule(name)
        if isinstance(part, Dropout):
            # Between sharded layers its input has a shard of the features.
            part.parts = (DimPart(dim=-1, index=axis.rank, parts=axis.size),)


def split_over_experts(
    module: nn.Module,
    styles: Mapping[str, ExpertParallel],
    peers: LayoutCommunicators,
    *,
    follows: bool = True,
) -> None:
    """Give each rank of axis expert its experts of a model, or of one stage, in place.

    Ranks of axis tensor compute a slice of the tokens each. ``follows`` as in `cut_over_tensor`.
    """
    mesh, here = peers.mesh_of("expert"), {name for name, _ in module.named_modules()}
    styles = {name: style for name, style in styles.items() if name in here}
    for style in styles.values():
        style.tensor_mesh = peers.mesh_of("tensor")
    if mesh is not None and styles:
        _apply_styles(module, mesh, styles, "[expert] modules", follows)


def _apply_styles(
    module: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, ParallelStyle],
    setting: str,
    follows: bool,
) -> None:
    try:
        # Parameters are equal on all ranks by now, so no broadcast is needed.
        apply_plan(module, mesh, styles, src_data_rank=None, follows=follows)
        check_ties(module)
    except ValueError as error:
        raise PlanError(f"{setting}: {error}") from error


def replicate_module(model: nn.Module, plan: Plan, peers: LayoutCommunicators) -> ReplicatedLayout:
    """Replicate ``model`` over all ranks over which gradients are summed."""
    cap_bytes, reduce = int(plan.buckets.cap_mb * 2**20), plan.precision.reduce
    options = ReplicateOptions(
        process_group=peers.sums.group,
        axis="replicate",
        # The Trainable broadcasts them once a step, so that `eval` needs no other rank.
        broadcast_buffers=False,
        reduction=ReductionSettings(
            first_bytes=min(2**20, cap_bytes),
            cap_bytes=cap_bytes,
            is_gradient_view=True,
            reduce_dtype=None if reduce is None else getattr(torch, reduce),
            is_watched=True,
        ),
    )
    replicate_with(model, options)
    is_cut = any(plan.axes.size(axis) > 1 for axis in ("expert", "tensor"))
    return ReplicatedLayout(replica_state(model).set_up(), model, is_cut=is_cut)


def shard_module(model: nn.Module, plan: Plan, peers: LayoutCommunicators) -> ShardedLayout:
    """Shard a module that is equal on its ranks, unit by unit."""
    mesh = peers.sharding
    if mesh is None:
        raise InternalError("a plan with axis shard has no mesh of it")
    reduce = plan.precision.reduce
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=None if reduce is None else getattr(torch, reduce)
        ),
    }
    after = plan.shard.reshard_after_forward
    try:
        for name in _unit_names(model, plan):
            if name:
                fully_shard(model.get_submodule(name), reshard_after_forward=after, **options)
        fully_shard(model, reshard_after_forward=None if after else False, **options)
    except NotImplementedError as error:
        raise PlanError(
            f"axis shard over what axis tensor has cut: {error}. Leave its module out of [tensor] "
            "rules, or use other numbers of ranks"
        ) from error
    if is_on_meta(model):
        _draw(model, plan, peers.everyone.device, held_boxes)
    units = [
        unit
        for part in model.modules()
        if (driver := driver_of(part)) is not None and (unit := driver.unit) is not None
    ]
    communicators = {each.axis: each for each in mesh_communicators(mesh)}
    return ShardedLayout(model, units, peers.sums, communicators)


def _unit_names(model: nn.Module, plan: Plan) -> list[str]:
    """List the modules that are a unit each, inner ones first; the root gets the rest."""
    names = [name for name, _ in model.named_modules()]
    if isinstance(plan.shard.units, str):
        found = blocks(model)
    else:
        found = [name for pattern in plan.shard.units for name in match_names(pattern, names)]
    return sorted(dict.fromkeys(found), key=lambda name: -name.count("."))


def blocks(model: nn.Module) -> list[str]:
    """List the items of module lists of a single class, such as the layers of a transformer."""
    return [
        f"{name}.{number}" if name else number
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and len(part) > 1
        and len({type(child) for child in part}) == 1
        for number, child in part.named_children()
        if any(True for _ in child.parameters())
    ]


def recompute_modules(model: nn.Module, plan: Plan) -> None:
    """Make the matching modules recompute their activations in the backward pass."""
    named = map(model.get_submodule, recomputed(model, plan))
    for module in dict.fromkeys(each for found in named for each in _called(found)):
        run = _checkpointed
        if plan.train.compile and any(True for _ in module.buffers()):
            # A compiled recomputation would read buffers that the forward has already written.
            run = torch.compiler.disable(run, recursive=False)
        # Set on the instance, so that names, state dict and class do not change.
        module.forward = partial(run, module, module.forward)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module``, or those in one without forward: a list, or a Sequential taken apart."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _checkpointed(
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:  # noqa: ANN401
    # Called through our frame: the compiler traces it, but skips torch's own frames.
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    held = [part._buffers for part in module.modules() if part._buffers]
    begun, first = _copies(held), iter([contextlib.nullcontext()])

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with next(first, None) or _exchanged(held, _copies(begun)):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


@contextlib.contextmanager
def _exchanged(held: Sequence[Buffers], begun: Sequence[Buffers]) -> Iterator[None]:
    """Replace the ``held`` buffers, in the block, by those that the forward has ``begun`` with."""
    now = [dict(each) for each in held]
    try:
        for each, values in zip(held, begun, strict=True):
            each.update(values)
        yield
    finally:
        for each, values in zip(held, now, strict=True):
            each.update(values)


def _copies(buffers: Sequence[Buffers]) -> list[Buffers]:
    """Copy all values, shared ones once: versions do not show writes through ``.data``."""
    memo: dict[int, torch.Tensor] = {}
    return [
        {k: None if v is None else memo.setdefault(id(v), v.clone()) for k, v in each.items()}
        for each in buffers
    ]


def moved_to(example: Inputs, everyone: Communicator) -> Inputs:
    """Copy ``example`` to the device of the ranks."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(everyone.device)

    return tree_map_only(torch.Tensor, moved, example)


def compiled(module: nn.Module, plan: Plan) -> nn.Module:
    """Compile ``module`` in place if ``plan`` says so, and return it.

    With axis shard each innermost unit is compiled, because gathers break graphs; otherwise the
    model, or this rank's stage. The loss and the optimizer are not compiled.
    """
    if plan.train.compile:
        # Not imported at the top: the compiler takes seconds to load.
        for part in _parts(module, plan):
            meshwright.compiler.compile_module(part)
    return module


def _parts(module: nn.Module, plan: Plan) -> list[nn.Module]:
    if plan.axes.size("shard") == 1:
        return [module]
    units = [part for part in module.modules() if driver_of(part) is not None]
    return [part for part in units if not any(_inside(part, other) for other in units)]


def _inside(module: nn.Module, other: nn.Module) -> bool:
    return other is not module and any(part is other for part in module.modules())


@dataclass(frozen=True, slots=True)
class _Given:
    """One parameter as it was; a weak reference does not keep its memory."""

    name: str
    itself: weakref.ref[nn.Parameter]
    attributes: Mapping[str, Any]
    """Attributes that users have set."""
    hooks: Any
    """Hooks of `Tensor.register_hook`, in the dict that their handles refer to, or None."""
    later_hooks: Any
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, likewise."""


class GivenParameters:
    """The parameters of one model before anything is laid out."""

    def __init__(self, model: nn.Module) -> None:
        self._given = {
            name: _Given(
                name,
                weakref.ref(parameter),
                dict(vars(parameter)),
                backward_hooks_of(parameter) or None,
                after_hooks_of(parameter) or None,
            )
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def carry(self, module: nn.Module) -> None:
        """Copy attributes and hooks to parameters of ``module`` from those that they replace."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            before = self._given.get(name)
            if before is None or before.itself() is parameter:
                continue
            for key, value in before.attributes.items():
                vars(parameter).setdefault(key, value)
            if before.hooks and not backward_hooks_of(parameter):
                set_backward_hooks(parameter, before.hooks)
            if before.later_hooks and not after_hooks_of(parameter):
                set_after_hooks(parameter, before.later_hooks)

    def optimizer(
        self,
        make: OptimizerFactory | None,
        module: nn.Module,
        plan: Plan,
        copies: contextlib.AbstractContextManager[object],
    ) -> Optimizer | None:
        """Call ``make`` with this rank's parameters; it may return existing optimizers.

        Those that look at whole parameters get them by `own_matrices`. Inside of ``copies`` each
        stage holds its own copy of a tied parameter. Parameters of other stages are removed. Raises
        PlanError for one of replaced parameters, whose steps would have no effect, TypeError as
        `check_optimizer` does.
        """
        if make is None:
            return None
        # torch rejects an empty list, but the groups must be those of the other ranks.
        nothing = nn.Parameter(torch.empty(0, device="cpu"))
        optimizer = as_one(make([*optimized_parameters(module, plan, copies)] or [nothing]))
        for each in each_of(optimizer):
            if looks_at_parameters(each) and not plan.train.flat:
                own_matrices(each, module)
            check_optimizer(each, has_closure=False)
        groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
        held = {id(parameter) for parameter in module.parameters()}
        given = {
            id(found): g.name for g in self._given.values() if (found := g.itself()) is not None
        }
        lost = [
            given[id(parameter)]
            for group in groups
            for parameter in group["params"]
            if id(parameter) in given.keys() - held and not is_elsewhere(parameter)
        ]
        if lost:
            raise PlanError(
                f"{len(lost)} parameters of the {type(optimizer).__name__}, {lost[0]!r} first, are "
                "what the model had before it was laid out, and others train in their place: build "
                "the optimizer from the parameters that its function is given"
            )
        for group in groups:
            kept: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter is nothing or is_elsewhere(parameter):
                    for each in each_of(optimizer):
                        each.state.pop(parameter, None)
                else:
                    kept.append(parameter)
            group["params"] = kept
        return optimizer
