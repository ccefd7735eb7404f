"""Communication hooks beside which something else keeps the ranks equal, or uses gradients at once.

After ``start_localSGD_iter`` passes post-local SGD reduces inside a subgroup only, and the caller
averages the parameters every few steps (Lin et al., arXiv 1808.07217).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.data_parallel.replicas.gradient_bucket import (
    CommunicationHook,
    Deferred,
    GradBucket,
    reduction_axis,
    tensor_of,
)

Future = torch.futures.Future[torch.Tensor]


class PostLocalSGDState:
    """The groups that reduce gradients before and after ``start_localSGD_iter`` backward passes.

    Raises ValueError when there is no ``subgroup`` to reduce in afterwards.
    """

    def __init__(
        self,
        process_group: Any,  # noqa: ANN401 - c10d's type stays in comm
        subgroup: Any,  # noqa: ANN401
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if subgroup is None and post_local_gradient_allreduce:
            raise ValueError(
                "post_local_gradient_allreduce=True needs a subgroup to reduce in after iteration "
                f"{start_localSGD_iter}: pass one, for example the ranks of one host, or False"
            )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        """Backward passes so far."""

    def count_pass(self) -> None:
        """Count a backward pass."""
        self.iter += 1


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Compute the mean over the process group, and from ``start_localSGD_iter`` on over the
    subgroup.
    """
    is_global = state.iter < state.start_localSGD_iter
    if is_global and bucket.is_last():
        state.count_pass()
    buffer = bucket.buffer()
    if not is_global and not state.post_local_gradient_allreduce:
        return Deferred(lambda: buffer)
    axis = reduction_axis(state.process_group if is_global else state.subgroup, bucket)
    pending = axis.all_reduce(buffer.div_(axis.size), label=bucket.label)

    def finish() -> torch.Tensor:
        pending.wait()
        return buffer

    return Deferred(finish)


class OptimizerInBackward:
    """Steps the parameters of each bucket as soon as ``hook`` has reduced their gradients.

    ``make`` builds an optimizer over one bucket's parameters. A parameter without a gradient counts
    as one with zeros. Afterwards ``.grad`` holds the means, so do not call another optimizer.

    >>> state = OptimizerInBackward(lambda parameters: torch.optim.SGD(parameters, lr=0.1), hook)
    >>> model.register_comm_hook(state, optimizer_in_backward_hook)
    """

    def __init__(
        self,
        make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
        hook: CommunicationHook,
        hook_state: object = None,
    ) -> None:
        self.make = make
        self.hook = hook
        self.hook_state = hook_state
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        """The optimizer of each bucket, by its index."""


def optimizer_in_backward_hook(state: OptimizerInBackward, bucket: GradBucket) -> Future:
    """Find the hook inside ``state``, then a step of the bucket's optimizer."""
    future = state.hook(state.hook_state, bucket)

    def finish() -> torch.Tensor:
        mean = tensor_of(future)
        bucket.set_buffer(mean.view(-1))
        parameters = bucket.parameters()
        if bucket.index() not in state.optimizers:
            state.optimizers[bucket.index()] = state.make(parameters)
        kept = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        state.optimizers[bucket.index()].step()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        return mean

    return Deferred(finish)
