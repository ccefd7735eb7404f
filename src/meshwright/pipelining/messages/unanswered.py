"""The messages of a step whose other ranks are no processes: those of torch's fake process group.

Nothing comes from them, so a stage reads zeros of the shapes that it is declared to take, or that
the trace has seen, and every value that can have a gradient gets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.comm import Pending
from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.messages.metadata import Signature, TensorMeta, digest
from meshwright.pipelining.messages.transfers import Transfers, _Receive
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.program import Leg


class UnansweredTransfers(Transfers):
    """Transfers of which none is answered."""

    def __init__(self, stages: Mapping[int, PipelineStage], *args: Any) -> None:
        """``stages`` are those of this rank; ``args`` as `Transfers` has them."""
        super().__init__(*args)
        self._stages = stages

    def incoming(self, stage: int, *, wait: bool) -> tuple[int, ...]:
        """See `Transfers`."""
        found = self.came.get(stage)
        if found is None:
            identity = digest("not told", stage)
            self._agreed[stage].outputs[identity] = self._declared(stage)
            found = self.came[stage] = (identity,) * self._schedule.microbatches
        return found

    def recv_tied(self, tensor: torch.Tensor, stage: int, target: int, number: int) -> None:
        """See `Transfers`."""
        super().recv_tied(tensor.zero_(), stage, target, number)

    def _declared(self, stage: int) -> Signature:
        """Find what the stages of this rank that read ``stage`` say of its outputs."""
        readers = [mine for mine in self._stages.values() if stage in mine.edges.sources()]
        found = next((s for mine in readers if (s := mine.takes_of(stage)) is not None), None)
        if found is None or found.room:
            raise PipeliningShapeError(
                f"{readers[0].name} does not know what stage {stage} sends, and the ranks of a "
                "fake process group tell nothing: give PipelineStage input_args of tensors, as "
                "one microbatch has them, or cut a traced model"
            )
        leaves = [
            TensorMeta(m.shape, m.stride, m.dtype, m.dtype.is_floating_point or m.dtype.is_complex)
            for m in found.tensors
        ]
        return Signature(tuple(leaves), found.spec)

    def _wait(self, leg: Leg) -> _Receive:
        received = super()._wait(leg)
        for buffer in received.buffers:
            buffer.zero_()
        return received

    def _hear(self, buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Pending:
        return super()._hear(buffer.fill_(1), *args, **kwargs)
