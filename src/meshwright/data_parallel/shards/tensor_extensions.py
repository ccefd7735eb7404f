"""Parameters of tensor subclasses: gathered by their own methods, kept, or refused by name.

::

    a subclass with                             then
    fsdp_pre_all_gather, fsdp_post_all_gather   each rank's part is of the subclass; the first gives
                                                what is gathered, the second makes the whole of it
    no __torch_dispatch__ of its own            whole parameters are of the class, plain at rest
    anything else                               TypeError

The values of a part are in the shard of its group, like those of plain parameters: optimizers write
to them through the subclass; gradients and checkpoints are plain tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import Pending
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.subclasses import PROTOCOL, dispatches, has_protocol, holder_of
from meshwright.data_parallel.shards.buffer import CustomCollective, FlatBuffer, Moves
from meshwright.layout import contiguous_strides
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.autograd import keeps_versions
from meshwright.torch_internals.tensors import (
    FakeTensor,
    local_tensor_of,
    make_subclass,
    mark_parameter,
    storage_id,
    version_of,
)

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def check_class(name: str, parameter: torch.Tensor, *, why: str = "") -> None:
    """Raise TypeError for a subclass that sharding would drop; ``why`` rejects extensions too."""
    inner: Any = parameter
    check_gradient_dtype(name, parameter)
    if is_dtensor(parameter):
        inner = local_tensor_of(inner)
        why = why or "is this rank's part of a DTensor"
    if type(inner) in PLAIN or not (dispatches(inner) or has_protocol(inner)):
        return
    kind, has_both = type(inner).__name__, all(hasattr(type(inner), each) for each in PROTOCOL)
    remedy = "Shard it with fully_shard alone" if has_both else "Give the class both"
    if has_both and not why:
        if holder_of(inner) is not None or not dispatches(inner) or _has_memory(inner):
            return
        why, remedy = (
            "has not its values in one plain tensor of its own shape and dtype",
            "Let __tensor_flatten__ name one such tensor",
        )
    why = why or f"has not both of {' and '.join(PROTOCOL)}, which say how it is gathered"
    raise TypeError(
        f"parameter {name!r} is a {kind}, a tensor subclass that {why}: it would become a plain "
        f"tensor. {remedy}, leave the parameter out (ignored_params, ignored_states), or use "
        "replicate"
    )


def check_gradient_dtype(name: str, parameter: torch.Tensor) -> None:
    """Raise TypeError for a ``grad_dtype`` (torch 2.10 and later) that a reduction would drop."""
    if (getattr(parameter, "grad_dtype", None) or parameter.dtype) != parameter.dtype:
        raise TypeError(
            f"parameter {name!r} of {parameter.dtype} has grad_dtype={parameter.grad_dtype}: "
            "reduced gradients have the dtype of their parameter. Hold the parameter in "
            f"{parameter.grad_dtype} and compute in {parameter.dtype} (mixed precision), or use "
            "replicate"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0 or not tensor.numel()
    except RuntimeError:  # a wrapper has none
        return False


def whole_parameter(view: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    """Make a parameter on ``view``, of the class of ``like`` unless that has its own dispatch."""
    cls = type(like)
    if cls in PLAIN or is_dtensor(like) or is_dtensor(view) or dispatches(like):
        if type(view) is torch.Tensor:  # as the class does it, which looks at more first
            return make_subclass(nn.Parameter, view, like.requires_grad)
        return nn.Parameter(view, requires_grad=like.requires_grad)
    made: Any = make_subclass(cls, view.detach(), like.requires_grad)
    made.__dict__.update(like.__dict__)
    return made


def extension_of(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh | None, module: nn.Module, policy: object
) -> Extension | None:
    """Return the extension of ``parameter``; None where it has none.

    ``mesh`` (sharded over) and ``policy`` (mixed precision) are arguments of its methods. Raises
    TypeError for a subclass that would be dropped.
    """
    check_class(name, parameter)
    if type(parameter) in PLAIN or is_dtensor(parameter) or not has_protocol(parameter):
        return None
    return Extension(name, parameter, mesh, module, policy)


class Extension:
    """How one tensor subclass is sharded and gathered."""

    def __init__(
        self,
        name: str,
        whole: nn.Parameter,
        mesh: DeviceMesh | None,
        module: nn.Module,
        policy: object,
    ) -> None:
        self.name = name
        self.part: Any = None
        """This rank's part, as modules hold it at rest: what is gathered."""
        self._class = type(whole)
        self._attributes = {**whole.__dict__}
        self._holder = holder_of(whole)
        self._like: torch.Tensor = whole
        """The full tensor until the first part is made, then the last part."""
        self._arguments = (mesh, whole.shape, whole.stride(), module, policy)
        self._is_cut = False

    @torch.no_grad()
    def around(self, part: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """Make a tensor of the subclass on the memory of ``part``, which is number ``index``."""
        kind = self._class.__name__
        made: Any = self._like
        if self._holder is None:
            made = part.detach().as_subclass(self._class)
            made.__dict__.update(self._attributes)
            mark_parameter(made, is_parameter=False)
        elif not self._is_cut:
            chunks = torch.chunk(made.detach(), parts)
            made = chunks[index] if index < len(chunks) else chunks[0].narrow(0, 0, 0)
        elif made.dtype != part.dtype or made.device != part.device:
            made = made.to(part.device, part.dtype)
        else:
            made = made.detach()
        if type(made) is not self._class or made.shape != part.shape:
            raise TypeError(
                f"parameter {self.name!r}: expected torch.chunk, detach and to of a {kind} to give "
                f"one of shape {tuple(part.shape)}, found a {type(made).__name__} of shape "
                f"{tuple(made.shape)}. Let its __torch_dispatch__ wrap their results"
            )
        if self._holder is not None:
            setattr(made, self._holder, part.detach())
        self._like, self._is_cut = made, True
        return made

    def inputs(self, rows: int, device: torch.device) -> tuple[list[torch.Tensor], object]:
        """Return this rank's inputs of the gather, padded to ``rows``, and its metadata.

        Raises ValueError for an input with neither ``rows`` rows nor as many as this rank's part.
        """
        part = self.part if self.part.device == device else self.part.to(device)
        count = len(inspect.signature(part.fsdp_pre_all_gather).parameters)
        given, metadata = part.fsdp_pre_all_gather(*self._arguments[: 1 if count == 1 else None])
        short = part.shape[0] if part.shape[0] < rows else None
        found: list[torch.Tensor] = []
        for tensor in given:
            if short is not None and tensor.ndim and tensor.shape[0] == short:
                padding = tensor.new_zeros((rows - short, *tensor.shape[1:]))
                tensor = torch.cat((tensor, padding))
            elif short is not None and (not tensor.ndim or tensor.shape[0] != rows):
                raise ValueError(
                    f"parameter {self.name!r}: fsdp_pre_all_gather must return all-gather inputs "
                    f"with the padded sharded size, {rows} rows, or with the {short} of this "
                    f"rank's part; found shape {tuple(tensor.shape)}"
                )
            found.append(tensor.contiguous())
        return found, metadata


class _Gathered:
    """The gathered tensors of one parameter and the whole one; the objects never change."""

    def __init__(self, inputs: Sequence[torch.Tensor], parts: int) -> None:
        self.kinds = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self.lines = [
            torch.empty(t.numel() * parts, dtype=t.dtype, device=t.device) for t in inputs
        ]
        self.outputs = [
            line.view(-1, *tensor.shape[1:]).data
            for line, tensor in zip(self.lines, inputs, strict=True)
        ]
        self.full: nn.Parameter | None = None
        """Made by the first gather and kept for every later one."""
        self._storages = [(line.untyped_storage(), line.nbytes) for line in self.lines]

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free and restore the memory of ``tensors`` too."""
        known = {storage_id(storage) for storage, _ in self._storages}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage_id(storage) not in known:
                known.add(storage_id(storage))
                self._storages.append((storage, storage.nbytes()))

    def restore(self) -> None:
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def lends(self, address: int) -> bool:
        """Whether ``address`` is in memory that `free` releases."""
        starts = [
            (storage.data_ptr(), size) for storage, size in self._storages if storage.nbytes()
        ]
        return any(start <= address < start + size for start, size in starts)


class ExtendedBuffer(FlatBuffer):
    """A buffer of parameters with extensions; shards and gradients are as in any other buffer."""

    def __init__(self, extensions: Sequence[Extension], *args: Any) -> None:
        self._extensions = extensions
        self._gathered: list[_Gathered] = []
        self._sent: list[torch.Tensor] = []
        self._metadata: list[object] = []
        super().__init__(*args)
        self.is_copy = True

    @property
    def gathered(self) -> int:
        """Elements that a gather moves, as far as they are known."""
        found = sum(line.numel() for each in self._gathered for line in each.lines)
        return found or super().gathered

    def around(self, index: int) -> torch.Tensor:
        """See `FlatBuffer`; the result is of the parameter's class."""
        return self._extensions[index].around(
            super().around(index), self.axes.parts, self.axes.part
        )

    @torch.no_grad()
    def gather(
        self, label: str, started: list[Pending], custom: CustomCollective | None = None
    ) -> Moves | None:
        """Prepare to gather the inputs of all ranks' parts; see `FlatBuffer`."""
        layout = self.layout.chunked_layout()
        self.gathered_version = version_of(self.shard)
        self._metadata.clear()
        is_first = not self._gathered
        moves = None if self.axes.shard is None else Moves(self.axes.shard, [], [])
        for index, extension in enumerate(self._extensions):
            rows = layout.sizes[index] // max(1, math.prod(layout.shapes[index][1:]))
            inputs, metadata = extension.inputs(rows, self.device)
            self._metadata.append(metadata)
            if is_first:
                self._gathered.append(_Gathered(inputs, self.axes.parts))
            gathered = self._gathered[index]
            found = [(tensor.shape, tensor.dtype) for tensor in inputs]
            if found != gathered.kinds:
                raise ValueError(
                    f"parameter {extension.name!r}: expected fsdp_pre_all_gather to return what "
                    f"it did the first time, {gathered.kinds}; found {found}"
                )
            gathered.restore()
            for line, tensor in zip(gathered.lines, inputs, strict=True):
                mine = tensor.detach().view(-1)
                if moves is None or moves.ranks.is_alone:
                    line.copy_(mine)
                    continue
                # Bytes: c10d does not know all dtypes.
                whole, part = line.view(torch.uint8), mine.view(torch.uint8)
                self._sent.append(part)  # which must live until the gather has ended
                if custom is not None:
                    ranks = moves.ranks
                    started.append(ranks.custom("all_gather", custom, whole, part, label=label))
                    continue
                moves.outputs.append(whole)
                moves.tensors.append(part)
        return moves if moves is not None and moves.outputs else None

    @torch.no_grad()
    def finish_gather(self, before_freeing: Callable[[], None] | None = None) -> None:
        """Make the whole parameters from what was gathered; see `FlatBuffer`."""
        if before_freeing is not None:
            before_freeing()
        self._sent.clear()
        # What has come with them, on the stream of gathers, stays until that waits for its reader.
        for index, known in enumerate(self._metadata):
            part, gathered = self._extensions[index].part, self._gathered[index]
            outputs, compute = tuple(gathered.outputs), self.types.compute
            if gathered.full is not None:
                kept = (gathered.full, *outputs)
                with keeps_versions(kept):
                    part.fsdp_post_all_gather(outputs, known, compute, out=gathered.full)
                continue
            whole, inner = part.fsdp_post_all_gather(outputs, known, compute)
            shape = self.layout.shapes[index]
            if tuple(whole.shape) != tuple(shape):
                # Rows of padding come last.
                whole = torch.as_strided(whole, shape, contiguous_strides(shape), 0)
            gathered.own(inner)
            gathered.full = nn.Parameter(whole, requires_grad=False)
        self.wholes = [each.full for each in self._gathered if each.full is not None]

    def release(self) -> None:
        """Free the memory of what was gathered."""
        super().release()
        self._metadata.clear()
        for each in self._gathered:
            each.free()

    def lends(self, address: int) -> bool:
        """Whether `release` frees the memory at ``address``."""
        return any(each.lends(address) for each in self._gathered)
