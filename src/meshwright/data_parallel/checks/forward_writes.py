"""Refusals and warnings for parameters and buffers that depend on the batch of one rank."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.failures.sameness import differing
from meshwright.data_parallel.modules.batch_norm import with_statistics
from meshwright.errors import warn
from meshwright.gradients import digests_of
from meshwright.torch_internals.modules import non_persistent_buffers_of
from meshwright.torch_internals.tensors import version_of


def refuse_max_norm(module: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse embeddings with ``max_norm``, which rescale the looked-up rows in each forward pass.

    Raises ValueError naming those of ``parameters`` that are affected.
    """
    held = {id(parameter): name for name, parameter in parameters}
    for part in module.modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.max_norm is None:
            continue
        name = held.get(id(part._parameters.get("weight")))
        if name is not None:
            raise ValueError(
                f"parameter {name!r} is the weight of {type(part).__name__} with "
                f"max_norm={part.max_norm:g}, whose forward scales the rows that the batch of this "
                "rank looks up, so that replicas would part. Leave max_norm out, and scale all "
                "rows after each step of the optimizer, with torch.renorm"
            )


def refuse_lookups(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse embeddings whose rows, or gradients, depend on which rows one batch looks up."""
    refuse_max_norm(module, parameters)
    refuse_frequencies(module.modules(), parameters)


def refuse_frequencies(
    modules: Iterable[nn.Module], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse ``modules`` whose gradients are divided by how often each row is looked up.

    Raises ValueError naming those of ``parameters`` that are affected.
    """
    held = {id(parameter): name for name, parameter in parameters}
    for part in modules:
        is_scaled = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq
        name = held.get(id(part._parameters.get("weight"))) if is_scaled else None
        if name is not None:
            raise ValueError(
                f"parameter {name!r} is the weight of {type(part).__name__} with "
                "scale_grad_by_freq=True, whose gradient is divided by how often each row is "
                "looked up, here in the batch of one rank and not in that of all: one process "
                "would train to other numbers. Leave it out, or weigh the loss of each token"
            )


class ForwardWrites:
    """Warns once about parameters that the first training pass of replicas wrote in place."""

    def __init__(self, communicator: Communicator) -> None:
        self.is_due = communicator.size > 1 and communicator.rank == 0
        """True until the pass has ended."""
        self._before: list[tuple[str, nn.Parameter, int]] = []

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Note the parameters before the pass."""
        self._before = [(name, parameter, version_of(parameter)) for name, parameter in parameters]

    def end(self) -> None:
        """Warn about parameters that were written since `begin`."""
        written = [name for name, parameter, at in self._before if version_of(parameter) != at]
        self.is_due = False
        self._before.clear()
        if written:
            warn(
                f"the forward pass has written {', '.join(map(repr, written[:3]))} in place. "
                "Replicas stay equal only where this does not depend on the batch, which is "
                "another one on each rank. Write parameters after the step of the optimizer, or "
                "keep what the batch decides in buffers, which are made equal in each pass"
            )


class BatchBuffers:
    """Warns once about buffers that the first pass wrote from the batch of each rank alone.

    BatchNorm has a warning of its own. Buffers that no state dict holds may differ by rank.
    """

    def __init__(
        self, module: nn.Module, axis: Communicator, names: Container[str] | None = None
    ) -> None:
        """``names`` lists the buffers to look at; None: all."""
        self._axis = axis
        apart = set(with_statistics(module).values())
        self._places = [
            (f"{path}.{key}".lstrip("."), part, key)
            for path, part in ([] if axis.is_alone else module.named_modules())
            if part not in apart
            for key in part._buffers
            if key not in non_persistent_buffers_of(part)
            and (names is None or f"{path}.{key}".lstrip(".") in names)
        ]
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        self.is_due = bool(self._places)
        """True until a pass has been compared, by all ranks together."""

    def note(self) -> None:
        """Note the versions of the buffers before the pass, unless a pass was compared already."""
        self._before = self._now() if self.is_due else {}

    def compare(self) -> None:
        """Compare the buffers written since `note`; a collective if there are any."""
        if not self._before:
            return
        before, self.is_due = {**self._before}, False
        self._before.clear()
        held = self._now()
        digests = digests_of([buffer for buffer, _ in held.values()])
        numbers = [None if digest is None else digest.item() for digest in digests]
        rows = {}
        for (name, (buffer, version)), number in zip(held.items(), numbers, strict=True):
            known, at = before.get(name, (None, 0))
            rows[name] = known is not buffer or at != version, number
        everyone = differing(self._axis, rows, label="compare buffers")
        # A rank's buffer may have been written alone, by what another rank has sent it.
        found = [
            name
            for name in (rows if everyone else ())
            if any(each[name][0] for each in everyone if name in each)
            and len({each[name][1] for each in everyone if name in each}) > 1
        ]
        if found and self._axis.rank == 0:
            warn(
                f"the forward pass has written buffer {found[0]!r} by the batch of each of "
                f"{self._axis.size} ranks alone, and not by those of all ranks, as in one process. "
                "Reduce what it takes from a batch over the ranks before it is written, or "
                "register it with persistent=False where it is to be each rank's own"
            )

    def _now(self) -> dict[str, tuple[torch.Tensor, int]]:
        held = ((name, part._buffers.get(key)) for name, part, key in self._places)
        return {name: (each, version_of(each)) for name, each in held if each is not None}
