"""What `parallelize` refuses of the matrix, and why: everything else has to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matrix.cells import Cell

__all__ = ["REFUSALS", "Refusal", "refusal_of"]

TRACED = ("unused", "skip", "reused", "tied", "transformer", "keywords", "odd", "gated")
"""Models that are no chains of modules."""
TWO_STAGES_A_RANK = ("interleaved1f1b", "loopedbfs", "zbv", "vhalf", "vmin", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Two or more columns that do not go together."""

    what: str
    holds: Callable[[Cell], bool]
    text: str
    """A piece of what is raised."""
    example: Cell


REFUSALS = (
    Refusal(
        what="heads that do not divide by axis tensor",
        holds=lambda cell: cell.size("tensor") == 3 and "language model" in cell.model,
        text="heads = 4, which is no multiple of 3",
        example=Cell(axes="tensor=3", model="language model"),
    ),
    Refusal(
        what="dropout between layers whose features do not divide by axis tensor",
        holds=lambda cell: cell.size("tensor") == 3 and cell.model == "dropout",
        text="differs from the whole model's",
        example=Cell(axes="tensor=3", model="dropout"),
    ),
    Refusal(
        what="a traced stage with a module of tensor style 'replicated'",
        holds=lambda cell: (
            bool(cell.schedule) and cell.size("tensor") > 1 and cell.model == "gated"
        ),
        text="cannot be found again to be cut on axis tensor: 'norm' (replicated)",
        example=Cell(axes="pipeline=2,tensor=2", schedule="1f1b", model="gated"),
    ),
    Refusal(
        what="more stages than modules in a chain",
        holds=lambda cell: cell.schedule in TWO_STAGES_A_RANK and cell.model == "sequential",
        text="too few for 4 stages",
        example=Cell(axes="pipeline=2", schedule="zbv", model="sequential"),
    ),
    Refusal(
        what="more stages than operators in a graph",
        holds=lambda cell: (
            bool(cell.schedule)
            and (
                cell.model == "unused"
                or (cell.model == "keywords" and cell.schedule in TWO_STAGES_A_RANK)
            )
        ),
        text="cannot split",
        example=Cell(axes="pipeline=2", schedule="1f1b", model="unused"),
    ),
    Refusal(
        what="recomputation in traced stages",
        holds=lambda cell: (
            bool(cell.schedule) and cell.model in TRACED and cell.option == "recompute"
        ),
        text="stages are traced graphs, without train.recompute",
        example=Cell(axes="pipeline=2", schedule="1f1b", model="skip", option="recompute"),
    ),
    Refusal(
        what="a tie over stages that axis shard reduces in half precision",
        holds=lambda cell: (
            bool(cell.schedule)
            and cell.size("shard") > 1
            and cell.precision == "narrow"
            and cell.model in ("tied", "odd", "tied language model")
        ),
        text="stages hold parameter 'embedding.weight' together",
        example=Cell(
            axes="pipeline=2,shard=2",
            schedule="1f1b",
            model="tied language model",
            precision="narrow",
        ),
    ),
)
"""In the order in which they are found."""


def refusal_of(cell: Cell) -> Refusal | None:
    return next((refusal for refusal in REFUSALS if refusal.holds(cell)), None)
