"""Communication hooks that average a bucket's gradients unchanged, in half precision or in 8 bits.

Two of them do more. After ``start_localSGD_iter`` passes post-local SGD reduces inside a subgroup
only, and the caller averages the parameters every few steps (Lin et al., arXiv 1808.07217).
`optimizer_in_backward_hook` steps the optimizer as soon as a bucket is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

LEVELS = 255
"""The largest number of 8 bits."""


def allreduce_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean over the axis, as without a hook."""
    return _mean_in(bucket.buffer().dtype, state, bucket)


def fp16_compress_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of the gradients in float16: divided by the number of ranks, then summed."""
    return _mean_in(torch.float16, state, bucket)


def bf16_compress_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of the gradients in bfloat16: divided by the rank count, then summed."""
    return _mean_in(torch.bfloat16, state, bucket)


def fp16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """Make ``hook`` reduce a bucket in float16."""
    return _narrowed(hook, torch.float16)


def bf16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """Make ``hook`` reduce a bucket in bfloat16."""
    return _narrowed(hook, torch.bfloat16)


def noop_hook(state: object, bucket: GradBucket) -> Future:
    """Leave each rank its own gradients, or None, without communication. For measurements."""
    return Deferred(bucket.buffer)


noop_hook.__dict__["is_local"] = True


def quantization_pertensor_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of gradients, each rounded to 256 levels between its bucket's extremes."""
    buffer = bucket.buffer()
    return _quantized(state, bucket, buffer.view(1, -1))


def quantization_perchannel_hook(
    state: object, bucket: GradBucket, bucket_size: int = 512
) -> Future:
    """Quantize as `quantization_pertensor_hook`, separately for each ``bucket_size`` elements."""
    buffer = bucket.buffer()
    rows = torch.nn.functional.pad(buffer, (0, -len(buffer) % bucket_size))
    return _quantized(state, bucket, rows.view(-1, bucket_size))


for _hook in (quantization_perchannel_hook, quantization_pertensor_hook):
    _hook.__dict__["is_for_dense"] = True


@dataclass(eq=False, repr=False)
class PostLocalSGDState:
    """The groups that reduce gradients before and after ``start_localSGD_iter`` backward passes.

    Raises ValueError when there is no ``subgroup`` to reduce in afterwards.
    """

    process_group: Any
    subgroup: Any
    start_localSGD_iter: int  # noqa: N815 - torch's name
    post_local_gradient_allreduce: bool = True
    iter: int = field(default=0, init=False)
    """Backward passes so far."""

    def __post_init__(self) -> None:
        if self.subgroup is None and self.post_local_gradient_allreduce:
            raise ValueError(
                "post_local_gradient_allreduce=True needs a subgroup to reduce in after iteration "
                f"{self.start_localSGD_iter}: pass one, for example the ranks of one host, or False"
            )


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Compute the mean over the group; after ``start_localSGD_iter`` over the subgroup, if any."""
    is_global = state.iter < state.start_localSGD_iter
    if is_global and bucket.is_last():
        state.iter += 1
    if not is_global and not state.post_local_gradient_allreduce:
        return Deferred(bucket.buffer)
    return allreduce_hook(state.process_group if is_global else state.subgroup, bucket)


@dataclass(eq=False, repr=False)
class OptimizerInBackward:
    """Steps the parameters of each bucket as soon as ``hook`` has reduced their gradients.

    ``make`` builds an optimizer over one bucket's parameters. A parameter without a gradient counts
    as one with zeros. Afterwards ``.grad`` holds the means, so do not call another optimizer.

    >>> state = OptimizerInBackward(lambda parameters: torch.optim.SGD(parameters, lr=0.1), hook)
    >>> model.register_comm_hook(state, optimizer_in_backward_hook)
    """

    make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
    hook: CommunicationHook
    hook_state: object = None
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict, init=False)
    """The optimizer of each bucket, by its index."""


def optimizer_in_backward_hook(state: OptimizerInBackward, bucket: GradBucket) -> Future:
    """Run the inner hook of ``state``, then step the bucket's optimizer."""
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


def _mean_in(dtype: torch.dtype, state: object, bucket: GradBucket) -> Future:
    axis, buffer = reduction_axis(state, bucket.communicator), bucket.buffer()
    sent = buffer.to(dtype).div_(axis.size)
    pending = axis.all_reduce(sent, label=bucket.label)

    def finish() -> torch.Tensor:
        pending.wait()
        if sent is buffer:
            return buffer
        return sent.to(buffer.dtype) if sent.is_sparse else buffer.copy_(sent)

    return Deferred(finish)


def _narrowed(hook: CommunicationHook, dtype: torch.dtype) -> CommunicationHook:
    def narrowed(state: object, bucket: GradBucket) -> Future:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))
        future = hook(state, bucket)

        def finish() -> torch.Tensor:
            found = tensor_of(future)
            bucket.set_buffer(buffer)
            return found.to(buffer.dtype) if found.is_sparse else buffer.copy_(found.view(-1))

        return Deferred(finish)

    return narrowed


def _quantized(state: object, bucket: GradBucket, rows: torch.Tensor) -> Future:
    """Compute the mean of ``rows``, each sent with its own scale and offset."""
    axis, buffer = reduction_axis(state, bucket.communicator), bucket.buffer()
    low = rows.amin(1, keepdim=True).clamp(max=0)
    high = rows.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / LEVELS).clamp(min=torch.finfo(rows.dtype).eps)
    zero = (-low / scale).round().clamp(0, LEVELS)
    levels = ((rows / scale).round() + zero).clamp(0, LEVELS).to(torch.uint8)
    scales = torch.cat([scale, zero], 1)
    all_scales = scales.new_empty(axis.size * scales.numel())
    all_levels = levels.new_empty(axis.size * levels.numel())
    pendings = [
        axis.all_gather(all_scales, scales.view(-1), label=f"{bucket.label}: scales"),
        axis.all_gather(all_levels, levels.view(-1), label=bucket.label),
    ]

    def finish() -> torch.Tensor:
        for pending in pendings:
            pending.wait()
        found = all_levels.view(axis.size, *levels.shape).to(rows.dtype)
        factors, zeros = all_scales.view(axis.size, -1, 2).split(1, 2)
        mean = ((found - zeros) * factors).sum(0) / axis.size
        return buffer.copy_(mean.view(-1)[: len(buffer)])

    return Deferred(finish)
