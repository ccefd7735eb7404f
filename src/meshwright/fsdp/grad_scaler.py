"""`ShardedGradScaler`: a gradient scaler whose ranks skip a step together."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler

from meshwright.comm import Communicator, communicator
from meshwright.data_parallel.sharded_modules.sharded_join import joins


class ShardedGradScaler(GradScaler):
    """Like `torch.amp.GradScaler`, for gradients of which each rank holds a part.

    A non-finite value on one rank makes all ranks of ``process_group`` skip the step and lower the
    scale together. It works on CPU tensors.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            # The ranks of a CPU run use the same line of code.
            device = "cpu"
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._group: Communicator | None = communicator(process_group) if enabled else None

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients, then combine the non-finite flags of all ranks."""
        if joins(optimizer):
            raise RuntimeError(
                "ShardedGradScaler does not work inside join: a rank that is done has no scaler "
                "that would divide its gradients and know of a step that is skipped. Give every "
                "rank as many batches, or train in bfloat16, which needs no scaler"
            )
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        group = self._group
        if group is None:
            return found
        worst = torch.zeros(1, dtype=torch.float32, device=group.device)
        for value in found.values():
            worst = torch.maximum(worst, value.detach().to(worst))
        if not group.is_alone:
            group.all_reduce(worst, reduction="max", label="gradients that are not finite").wait()
        # A rank without gradients has to skip as well: GradScaler looks at this dict.
        devices = list(found) or [inv_scale.device]
        return {device: worst.to(device) for device in devices}
