"""The matrix can see: each of these faults, planted on every rank, makes a cell of it differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from matrix.cells import Cell
from matrix.refusals import refusal_of
from matrix.training import Outcome, body, expected_of
from meshwright.comm import Communicator
from meshwright.composition import Trainable
from meshwright.gradients import LossWindow
from meshwright.testing import Ranks
from support.internals.composition import PipelinedLayout, PipelinedTrainable, ReplicatedLayout
from support.internals.gradients import norm
from support.internals.pipelining import TiedParameters
from support.internals.reference import ReferenceRun
from support.internals.tensor_parallel import layers

Patch = pytest.MonkeyPatch


def unsummed(kind: str, *starts: str) -> Callable[[Patch], None]:
    """Leave out the sums with labels that begin with one of ``starts``: each rank keeps its own."""

    def plant(patch: Patch) -> None:
        real: Any = getattr(Communicator, kind)

        def call(axis: Communicator, tensor: torch.Tensor, *more: Any, **options: Any) -> Any:
            if not options.get("label", "").startswith(starts):
                return real(axis, tensor, *more, **options)
            if kind == "all_reduce":
                return real(axis, tensor.clone(), *more, **options)
            pending = real(axis, torch.empty_like(tensor), *more, **options)
            (own,) = more
            if kind == "all_gather":
                tensor.view(axis.size, -1)[:] = own.reshape(-1)
            else:
                tensor.copy_(own.view(axis.size, -1)[axis.rank].view_as(tensor))
            return pending

        patch.setattr(Communicator, kind, call)

    return plant


def own_count(patch: Patch) -> None:
    """A mean of the means of the ranks."""

    def factor(window: LossWindow) -> float:
        terms = 0.0 if window._terms is None else window._terms.item()
        return 1.0 / (max(window._counts[1] + terms, 1.0) * window._communicator.size)

    patch.setattr(LossWindow, "factor", factor)


def counted_on_every_replica(patch: Patch) -> None:
    patch.setattr(norm, "_counts_here", lambda group, over: True)


def untied(patch: Patch) -> None:
    def close(ties: TiedParameters, wire: object) -> None:
        ties._close()
        ties._has_values = True

    patch.setattr(TiedParameters, "add_up", close)


def copies_not_clipped(patch: Patch) -> None:
    patch.setattr(PipelinedTrainable, "_every_gradient", Trainable._every_gradient)


def unmasked(patch: Patch) -> None:
    """Rows that another rank holds are looked up here too."""
    real = layers._Lookup.apply

    class Lookup:
        @staticmethod
        def apply(
            weight: torch.Tensor, ids: torch.Tensor, outside: torch.Tensor, *more: Any
        ) -> Any:
            return real(weight, ids % len(weight), torch.zeros_like(outside), *more)

    patch.setattr(layers, "_Lookup", Lookup)


def same_samples(patch: Patch) -> None:
    """Every share of a batch draws the masks of the first."""

    def number(self: Trainable, draws: Any, size: int) -> int:
        draws.begin_step(self.steps)
        return 0

    patch.setattr(Trainable, "_number_samples", number)


def scale_kept(patch: Patch) -> None:
    """Gradients of the scaled loss of float16 reach the optimizer as they are."""
    real = ReplicatedLayout.scale_by

    def scale_by(self: ReplicatedLayout, scale: Callable[[], float]) -> None:
        real(self, lambda: scale() * 2.0**10)

    patch.setattr(ReplicatedLayout, "scale_by", scale_by)


def microbatches_summed(patch: Patch) -> None:
    patch.setattr(PipelinedLayout, "scale_by", lambda self, scale: None)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    plant: Callable[[Patch], None]
    cell: Cell
    sees: str
    """A piece of what the matrix says."""


MUTATIONS = {
    "buckets": Mutation(
        plant=unsummed("all_reduce", "reduce bucket"),
        cell=Cell(axes="replicate=2", model="odd"),
        sees="gradient",
    ),
    "shards": Mutation(
        plant=unsummed("reduce_scatter", "reduce "),
        cell=Cell(axes="shard=2", model="odd"),
        sees="gradient",
    ),
    "shards of replicas": Mutation(
        plant=unsummed("all_reduce", "replicate "),
        cell=Cell(axes="replicate=2,shard=2", model="odd"),
        sees="copies of the weights",
    ),
    "partial sums": Mutation(
        plant=unsummed("all_reduce", "partial gradients"),
        cell=Cell(axes="replicate=2,tensor=2", model="gated"),
        sees="'norm.weight'",
    ),
    "embedding": Mutation(
        plant=unmasked, cell=Cell(axes="tensor=2", model="odd"), sees="differs from the whole"
    ),
    "counts": Mutation(
        plant=own_count, cell=Cell(axes="replicate=2", model="odd", loss="counted"), sees="gradient"
    ),
    "norm": Mutation(
        plant=counted_on_every_replica,
        cell=Cell(axes="replicate=2,tensor=2", model="tied language model"),
        sees="the norm of all gradients",
    ),
    "tie": Mutation(
        plant=untied,
        cell=Cell(axes="pipeline=2", schedule="1f1b", model="tied language model"),
        sees="on ranks [0, 1], whose values differ",
    ),
    "clipped copies": Mutation(
        plant=copies_not_clipped,
        cell=Cell(axes="pipeline=2", schedule="1f1b", model="tied language model", is_clipped=True),
        sees="on ranks [0, 1], whose values differ",
    ),
    "microbatches": Mutation(
        plant=microbatches_summed,
        cell=Cell(axes="pipeline=2", schedule="zb1p", model="deep"),
        sees="gradient",
    ),
    "statistics": Mutation(
        plant=unsummed("all_gather", "batch norm"),
        cell=Cell(axes="replicate=2", model="batch norm of all ranks"),
        sees="loss",
    ),
    "masks": Mutation(
        plant=same_samples, cell=Cell(axes="replicate=2", model="dropout"), sees="loss"
    ),
    "loss scale": Mutation(
        plant=scale_kept,
        cell=Cell(axes="replicate=2", model="odd", precision="float16"),
        sees="gradient",
    ),
}


def body_mutated(name: str, expected: ReferenceRun) -> Outcome:
    mutation = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(patch)
        (outcome,) = body([(mutation.cell, expected)])
    return outcome


@pytest.mark.few(0, slow=6)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_seen(ranks: Ranks, name: str) -> None:
    mutation = MUTATIONS[name]
    assert refusal_of(mutation.cell) is None
    outcomes = ranks(mutation.cell.world, body_mutated, name, expected_of(mutation.cell))
    said = [outcome.wrong or outcome.refused for outcome in outcomes]
    assert any(mutation.sees in text for text in said), said
