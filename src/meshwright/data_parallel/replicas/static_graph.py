"""Checks that every backward pass uses the same parameters as the first (``static_graph``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.comm import Communicator
from meshwright.comm.failures.sameness import told
from meshwright.data_parallel.replicas.buckets import Reduction


class StaticGraph:
    """Counts the arrivals of each parameter's gradient, in the first backward pass and later.

    From the second pass on, a gradient is complete when it has arrived as often as in the first.
    This supports reentrant activation checkpoints around a module that is used twice.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._expected: list[int] | None = None
        self._seen = [0] * len(names)
        self._is_skipped = False

    def skip(self) -> None:
        """Leave out a reduction over several passes, in which arrivals were not counted."""
        self._is_skipped = True

    def arrived(self, index: int) -> bool:
        """Count an arrival; True when it is the last (False in the first, counting pass)."""
        self._seen[index] += 1
        return self._expected is not None and self._seen[index] == self._expected[index]

    def deviates(self) -> bool:
        """Whether this pass has differed from the first, as far as it has come."""
        if self._is_skipped:
            return False
        return self._expected is not None and self._seen != self._expected

    def end(self) -> None:
        """End a complete pass; later passes are compared with the first."""
        if self._expected is None and not self._is_skipped:
            self._expected = self._seen
        self.reset()

    def reset(self) -> None:
        """Forget the arrivals of this pass."""
        self._seen = [0] * len(self._names)
        self._is_skipped = False

    def differences(self) -> str:
        """Name the parameters whose gradient arrived less or more often than in the first pass."""
        rows = list(zip(self._names, self._expected or self._seen, self._seen, strict=True))
        lacks = [name for name, before, now in rows if now < before]
        more = [name for name, before, now in rows if now > before]
        found = [f"did not use {_named_with_modules(lacks)}"] if lacks else []
        return " and ".join([*found, f"used {_named_with_modules(more)}"] if more else found)

    def refuse(self, communicator: Communicator, differences: str) -> RuntimeError:
        """Make the error that every rank raises when a rank deviates; collective.

        ``differences`` are this rank's in the judged pass.
        """
        said = differences or "used the same"
        everyone = communicator.gather_values(said, label="static graph: what differs")
        found = told(communicator.ranks, everyone)
        return RuntimeError(
            "Your training graph has changed in this iteration: static_graph=True expects every "
            f"one to use the parameters of the first, but this one {found}. Leave static_graph "
            "out, or make forward take the same path each time"
        )


def late_gradient(
    bucket: Reduction, place: int, buckets: Iterable[Reduction], *, rank: int
) -> RuntimeError:
    """Make the error for a second gradient of a parameter, after its bucket's reduction."""
    name = bucket.layout.slots[place].name
    waiting = [
        slot.name
        for other in buckets
        for slot, has_come in zip(other.layout.slots, other.arrived, strict=True)
        if not has_come
    ]
    return RuntimeError(
        f"Expected to mark a variable ready only once. Rank {rank}: parameter {name!r} "
        f"(of {_module_of(name)}) got another gradient after the "
        f"first had gone into {bucket.layout.label!r}; no gradient yet: "
        f"{_named_with_modules(waiting) if waiting else 'none'}. A reentrant activation "
        "checkpoint around a module that is used twice does this: pass use_reentrant=False to "
        "torch.utils.checkpoint, or static_graph=True"
    )


def unexpected_gradient(name: str, *, rank: int) -> RuntimeError:
    """Make the error for a gradient of a parameter that no rank used in the first pass."""
    return RuntimeError(
        "skip_all_reduce_unused_params=True expects every iteration to leave unused what the "
        f"first one did, but on rank {rank} parameter {name!r} (of "
        f"{_module_of(name)}) got a gradient. Leave the option "
        "out, or make forward take the same path each time"
    )


def _named_with_modules(names: Sequence[str]) -> str:
    modules = sorted({_module_of(name) for name in names})
    return f"parameters {', '.join(names)} (of {', '.join(modules)})"


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or "the module itself"
