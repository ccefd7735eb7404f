"""Communication hooks that send sums: as they are, in half precision, or in 8 bits."""

from __future__ import annotations

import torch

from meshwright.comm import Communicator
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
    axis = reduction_axis(state, bucket)
    buffer = bucket.buffer().div_(axis.size)
    pending = axis.all_reduce(buffer, label=bucket.label)

    def finish() -> torch.Tensor:
        pending.wait()
        return buffer

    return Deferred(finish)


def fp16_compress_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of the gradients in float16: divided by the number of ranks, then summed."""
    return _compressed(state, bucket, torch.float16)


def bf16_compress_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of the gradients in bfloat16: divided by the number of ranks, then
    summed.
    """
    return _compressed(state, bucket, torch.bfloat16)


def fp16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """``hook`` on a bucket in float16."""
    return _narrowed(hook, torch.float16)


def bf16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """``hook`` on a bucket in bfloat16."""
    return _narrowed(hook, torch.bfloat16)


def noop_hook(state: object, bucket: GradBucket) -> Future:
    """No communication: each rank keeps its own gradients, and Nones. For measurements."""
    return Deferred(bucket.buffer)


noop_hook.__dict__["is_local"] = True


def quantization_pertensor_hook(state: object, bucket: GradBucket) -> Future:
    """Compute the mean of gradients that were rounded to 256 levels between a bucket's extremes."""
    buffer = bucket.buffer()
    return _quantised(reduction_axis(state, bucket), bucket, buffer.view(1, -1))


def quantization_perchannel_hook(
    state: object, bucket: GradBucket, bucket_size: int = 512
) -> Future:
    """As `quantization_pertensor_hook`, for each ``bucket_size`` elements on their own."""
    buffer = bucket.buffer()
    rows = torch.nn.functional.pad(buffer, (0, -len(buffer) % bucket_size))
    return _quantised(reduction_axis(state, bucket), bucket, rows.view(-1, bucket_size))


for _hook in (quantization_perchannel_hook, quantization_pertensor_hook):
    _hook.__dict__["is_for_dense"] = True


def _compressed(state: object, bucket: GradBucket, dtype: torch.dtype) -> Future:
    axis = reduction_axis(state, bucket)
    buffer = bucket.buffer()
    narrow = buffer.to(dtype).div_(axis.size)
    pending = axis.all_reduce(narrow, label=bucket.label)

    def finish() -> torch.Tensor:
        pending.wait()
        return narrow.to(buffer.dtype) if narrow.is_sparse else buffer.copy_(narrow)

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


def _quantised(axis: Communicator, bucket: GradBucket, rows: torch.Tensor) -> Future:
    """Find each row of ``rows`` with a scale and an offset of its own."""
    buffer = bucket.buffer()
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
