"""Tensors as contiguous memory: strided tensors pass through a buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from meshwright.comm.shared_memory.waits import Steps


def over(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor over memory at ``address``, outside autograd; it does not own the memory."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View ``tensor`` as one dimension, outside autograd and without touching its version."""
    if tensor.is_inference() and tensor.numel():
        return over(tensor.data_ptr(), tensor.numel(), tensor.dtype)
    return tensor.data.view(-1)


def bytes_of(flat: torch.Tensor, first: int, nbytes: int) -> torch.Tensor:
    """View the elements of ``flat`` in ``nbytes`` bytes from byte ``first``."""
    width = flat.dtype.itemsize
    return flat[first // width : (first + max(0, nbytes)) // width]


def name_of(tensor: torch.Tensor) -> str:
    """Describe a tensor for messages: dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def no_memory(tensor: torch.Tensor) -> str:
    """Explain that ``tensor`` has no memory to send, and what to pass instead."""
    found = f"found a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    if hasattr(tensor, "device_mesh"):
        return (
            f"expected a plain tensor, {found}: pass its .full_tensor() for the value of one "
            "process, or .to_local() for this rank's part"
        )
    return (
        f"expected a dense tensor with memory of its own, {found} without any: a nested tensor has "
        "its .values(), a sparse one .to_dense(), an asynchronous one .wait(); a tensor whose "
        "storage was freed has to be filled first, as a unit gathers its parameters"
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; raises unless it is dense, on the CPU, and has memory for its elements."""
    try:
        if tensor.is_cpu and (tensor.data_ptr() or not tensor.numel()):
            return tensor
    except RuntimeError:  # by a layout that has no one stretch of memory
        pass
    if tensor.is_cpu:
        raise ValueError(f"collectives through shared memory: {no_memory(tensor)}")
    raise ValueError(
        f"collectives through shared memory move CPU tensors, but this one is on {tensor.device}"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Check whether the elements are contiguous in memory, with no lazy conjugate or negative."""
    dense(tensor)
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself or a contiguous copy, for reading."""
    if _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself or a contiguous buffer of its shape, for writing."""
    if _is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copied_back(body: Steps, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Steps:
    """Run ``body``, then copy separate buffers back to their tensors."""
    strided = [(tensor, buffer) for tensor, buffer in pairs if buffer is not tensor]
    return _then_copied(body, strided) if strided else body


def _then_copied(body: Steps, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Steps:
    yield from body
    with torch.no_grad():
        for tensor, buffer in pairs:
            tensor.data.copy_(buffer)


def cut(tensor: torch.Tensor, sizes: Sequence[int], size: int, name: str) -> list[tuple[int, int]]:
    """List address and bytes of ``size`` parts along dim 0, of ``sizes`` rows or equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        sizes = [rows // size] * size
    if sum(sizes) != rows or len(sizes) != size:
        raise ValueError(
            f"all_to_all over {size} ranks cannot split an {name} of {rows} rows into {list(sizes)}"
        )
    row = tensor.nbytes // rows if rows else 0
    start = tensor.data_ptr()
    parts: list[tuple[int, int]] = []
    for count in sizes:
        parts.append((start, count * row))
        start += count * row
    return parts
