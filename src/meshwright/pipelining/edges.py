"""The sources of the arguments of a stage, and the parameters that several stages share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one argument."""

    stage: int | None
    """The stage that makes it; None for the batch."""
    output: int | str | None = None
    """Index of the stage's output, or the argument of the batch (a position or a keyword).

    None: all outputs of the stage, in order, as so many arguments.
    """

    @property
    def keyword(self) -> str | None:
        """The keyword of the batch that it stands for; None for anything else."""
        return self.output if self.stage is None and isinstance(self.output, str) else None


@dataclass(frozen=True, slots=True)
class StageEdges:
    """The arguments of one stage, in the order of its ``forward``."""

    args: tuple[Source, ...] = ()
    kwargs: tuple[tuple[str, Source], ...] = field(default=())
    """By keyword. A stage with edges of its own gets no other keywords of the batch."""

    @property
    def only(self) -> int | None:
        """The stage whose outputs, all and in order, are the only arguments; None otherwise."""
        is_one = len(self.args) == 1 and not self.kwargs and self.args[0].output is None
        return self.args[0].stage if is_one else None

    def sources(self) -> Iterator[int]:
        """Yield the stages that this one reads from, with repetitions."""
        for source in (*self.args, *(source for _, source in self.kwargs)):
            if source.stage is not None:
                yield source.stage

    def keywords(self) -> set[str]:
        """Return the keyword arguments of the batch that this stage reads."""
        every = (*self.args, *(source for _, source in self.kwargs))
        return {source.keyword for source in every if source.keyword is not None}

    def positions(self) -> set[int]:
        """Return the positional arguments of the batch that this stage reads."""
        every = (*self.args, *(source for _, source in self.kwargs))
        return {int(s.output or 0) for s in every if s.stage is None and s.keyword is None}


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter of the model that several stages share."""

    owner: int
    """The stage whose copy sets the initial value, and counts in norms."""
    names: tuple[tuple[int, str], ...]
    """(stage, name in that stage) of every holder."""


def adjacent(stage: int) -> StageEdges:
    """Return the edges of a stage in a plain chain: all outputs of the previous one, in order."""
    return StageEdges() if stage == 0 else StageEdges((Source(stage - 1),))


def edges_of(stages: tuple[StageEdges, ...]) -> tuple[tuple[int, int], ...]:
    """(source stage, target stage) of every value that crosses stages, sorted."""
    return tuple(
        sorted(
            {(source, target) for target, edges in enumerate(stages) for source in edges.sources()}
        )
    )
