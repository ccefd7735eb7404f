"""The stages of one rank as one layout, and the union of all ranks' state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from meshwright.checkpoint.nested import flatten, unflatten
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.composition.data_layout import DataLayout, LayoutCommunicators
from meshwright.composition.description import Description
from meshwright.errors import InternalError, PipelinePeerError
from meshwright.gradients import Factor, SpreadGradients, group_by_spread, multiply_
from meshwright.pipelining.signature import Signature, TensorMeta, Values, signature_of
from meshwright.plan import Plan
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
        """``copies`` are the ``id`` of parameters that other stages count in the norm.

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
        for each in layouts:
            each.scale_by(lambda: 1.0)

    @property
    def found_non_finite(self) -> Sequence[str]:
        """See `DataLayout`."""
        return [name for each in reversed(self._layouts) for name in each.found_non_finite]

    def reduce_next(self, is_wanted: bool) -> None:
        """See `DataLayout`."""
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
        cutting = (self.communicators.get("shard"), self._peers.tensor)
        over = [axis for axis in cutting if axis is not None and not axis.is_alone]
        parameters = [p for s in self._stages for p in s.parameters() if id(p) not in self._copies]
        found = group_by_spread(parameters)
        wanted = [axes for n in range(len(over) + 1) for axes in itertools.combinations(over, n)]
        others = [part.communicators for part in found if part.communicators not in wanted]
        if others:
            raise InternalError(f"gradients of a stage lie spread over {others}, not {wanted}")
        return [
            SpreadGradients(
                gradients=tuple(g for p in found if p.communicators == axes for g in p.gradients),
                communicators=(*axes, self._peers.pipeline),
                dtype=self._dtype,
            )
            for axes in wanted
        ]

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        """See `DataLayout`."""
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
                f"pipeline.schedule = {plan.pipeline.schedule}: the order of their actions",
                f"pipeline.microbatches = {plan.pipeline.microbatches}: parts of each rank's batch "
                "that follow each other",
                *dict.fromkeys(settings),
            ),
        )


# ------------------------------------------------------------------- what all ranks hold together


def union(own: Mapping[str, torch.Tensor], axis: Communicator) -> dict[str, torch.Tensor]:
    """Collect the tensors of all ranks of ``axis`` on each, sparse ones as dense.

    If several ranks have a name, the first rank's tensor is taken.
    """
    own = {name: tensor.to_dense() if tensor.is_sparse else tensor for name, tensor in own.items()}
    facts = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in own.items()]
    rows = axis.gather_values(facts, label="names of a pipeline")
    found: dict[str, torch.Tensor] = {}
    for source, row in enumerate(rows):
        for name, shape, dtype in row:  # the gathered order, so that broadcasts match
            if source == axis.rank:
                tensor = own[name].detach().to(axis.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=axis.device)
            if tensor.numel():
                axis.broadcast(tensor, source=source, label="state of a pipeline").wait()
            found.setdefault(name, tensor)
    return found


def of_one(own: Mapping[str, Any], axis: Communicator) -> list[Mapping[str, Any]]:
    """Collect the nested states of all ranks of ``axis`` on each, in rank order."""
    tensors, structure = flatten(dict(own), str(axis.rank))
    whole = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    everything = union(whole, axis)
    rows = axis.gather_values(structure, label="state of a pipeline")
    return [cast("Mapping[str, Any]", unflatten(row, everything)) for row in rows]


def said_by(source: int, say: Callable[[], object], axis: Communicator, what: str) -> Any:  # noqa: ANN401
    """Give what ``say`` returns on rank ``source`` of ``axis`` to every rank; it is no string.

    What it raises is raised there, and elsewhere `PipelinePeerError` with its text.
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
