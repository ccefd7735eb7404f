"""Splitting a batch into microbatches, and merging their outputs.

Every tensor is split along dim 0 unless a spec says otherwise; other values go unchanged to every
microbatch. Sizes are those of `torch.tensor_split`: they differ by one at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from meshwright.errors import PipeliningShapeError
from meshwright.torch_internals.trees import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "CustomReducer",
    "LossReducer",
    "Microbatches",
    "Replicated",
    "TensorChunkSpec",
    "check_cut",
    "check_loss",
    "check_target",
    "chunk_weights",
    "cut_dims",
    "cut_plain",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]


@dataclass(frozen=True)
class TensorChunkSpec:
    """Splits a tensor along dim ``split_dim``, and joins its chunks along it."""

    split_dim: int

    def __str__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """Make the specs of positional arguments from their dims."""
        return tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """Make the specs of keyword arguments from their dims."""
        return tree_map(TensorChunkSpec, chunk_dims)


class Replicated:
    """Gives every microbatch the full value. The class or an instance serves as a spec."""


class CustomReducer:
    """Folds the chunks of an output into one value, starting from ``init_value``."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:  # noqa: ANN401
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class LossReducer(CustomReducer):
    """A reducer of losses."""


# torch's names.
_Replicate, _CustomReducer, _LossReducer = Replicated, CustomReducer, LossReducer

sum_reducer = LossReducer(torch.tensor(0.0, device="cpu"), torch.add)
"""Adds the losses of all microbatches."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One leaf of the arguments, with its name in messages and how it is split."""

    name: str
    value: Any
    dim: int | None
    """None: every microbatch gets the full value."""
    is_declared: bool

    @property
    def is_cut_tensor(self) -> bool:
        """True for a tensor that is split, but not for a mask."""
        return self.dim is not None and not _is_block_mask(self.value)


@dataclass(slots=True)
class Microbatches:
    """The arguments of a step on this rank, split into microbatches."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None = None
    weights: Sequence[float] = ()
    """By microbatch, the weight of its loss in the gradient."""
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    """By microbatch, filled by the last stage, unscaled."""
    schedule_ref: object = None
    """The schedule, for functions of the user."""
    is_scaled: bool = False
    """True when each loss is weighted by its microbatch's share before the backward."""
    key: object = None
    """Stands for the shapes, strides and dtypes of all arguments; None where none was computed."""

    def all_losses(self) -> list[Any]:
        """Return the losses of a step that has ended.

        Raises ``RuntimeError`` where a function of the user has added or removed some.
        """
        count = len(self.args)
        own = "the schedule fills ctx.losses itself, and functions of the user only read it"
        if self.losses and len(self.losses) != count:
            raise RuntimeError(f"Expecting {count} losses but got {len(self.losses)}: {own}")
        for microbatch, loss in enumerate(self.losses):
            if loss is None:
                raise RuntimeError(f"Loss for microbatch {microbatch} is not available: {own}")
        return self.losses


_KINDS: Mapping[str, type] = MappingProxyType({"arg_mbs": tuple, "kwarg_mbs": Mapping})


def check_cut(given: Mapping[str, object], microbatches: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless each value is a list of ``microbatches``."""
    for name, values in given.items():
        if values is None:
            continue
        if not isinstance(values, list):
            raise TypeError(f"{name} must be a list but got a {type(values)}")
        if len(values) != microbatches:
            raise ValueError(f"Expecting {microbatches} {name} but got {len(values)}")
        kind = _KINDS.get(name, object)
        for microbatch, value in enumerate(values):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must have a {kind.__name__.lower()} of arguments for each microbatch, "
                    f"but has a {type(value).__name__} for microbatch {microbatch}"
                )


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: object = None,
    kwargs_chunk_spec: object = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split arguments into ``chunks`` microbatches.

    Specs have one entry for each argument: a `TensorChunkSpec`, `Replicated`, or a tree of them
    nested like the argument. Tensors without a spec are split along dim 0. If their sizes differ,
    each must be a multiple of ``chunks`` and give more than one row for each microbatch.

    Raises ``ValueError`` for a spec of another length or kind, and for a batch with fewer rows
    than microbatches; `PipeliningShapeError` for sizes that differ and cannot be split like this.
    """
    if not kwargs and args_chunk_spec is None and kwargs_chunk_spec is None:
        plain = cut_plain(args, chunks)
        if plain is not None:
            return plain, [{} for _ in range(chunks)]
    named = kwargs or {}
    specs = _listed(args_chunk_spec, len(args))
    leaves: list[_Leaf] = []
    for number, (value, spec) in enumerate(zip(args, specs, strict=True)):
        leaves += _leaves(f"argument {number}", value, spec)
    named_specs = _named(kwargs_chunk_spec, named)
    for name, value in named.items():
        leaves += _leaves(f"argument {name!r}", value, named_specs.get(name))
    _check_sizes(leaves, chunks)
    rows = [list(row) for row in zip(*(_cut(leaf, chunks) for leaf in leaves), strict=True)]
    _, tree = tree_flatten((args, named), is_leaf=_is_block_mask)
    both = [tree_unflatten(row, tree) for row in rows or [[] for _ in range(chunks)]]
    return [positional for positional, _ in both], [keywords for _, keywords in both]


def cut_plain(args: tuple[Any, ...], chunks: int) -> list[tuple[Any, ...]] | None:
    """Split plain tensors without gradients, all of one size along dim 0; None for others."""
    for value in args:
        if type(value) is not torch.Tensor or value.requires_grad or not value.dim():
            return None
        if not chunks <= value.shape[0] == args[0].shape[0]:
            return None
    if not args:
        return None
    return list(zip(*[torch.tensor_split(value, chunks) for value in args], strict=True))


def _listed(specs: object, count: int) -> Sequence[object]:
    if specs is None:
        return [None] * count
    if not isinstance(specs, Sequence):
        raise ValueError(f"Unsupported chunk spec: {specs}; expected one for each argument")
    if len(specs) != count:
        raise ValueError(
            f"args_chunk_spec has {len(specs)} entries for {count} positional arguments"
        )
    return specs


def _named(specs: object, given: Mapping[str, object]) -> Mapping[str, object]:
    if specs is None:
        return {}
    if not isinstance(specs, Mapping):
        raise ValueError(f"Unsupported chunk spec: {specs}; expected one for each keyword")
    missing = [name for name in given if name not in specs]
    if missing or len(specs) != len(given):
        raise ValueError(
            f"kwargs_chunk_spec has the {len(specs)} keys {list(specs)} for the {len(given)} "
            f"keyword arguments {list(given)}"
        )
    return specs


def _leaves(name: str, value: object, spec: object) -> list[_Leaf]:
    """List the leaves of one argument, each with its part of ``spec``."""
    flat, tree = tree_flatten(value, is_leaf=_is_block_mask)
    if _is_spec(spec):
        specs: Sequence[object] = [spec] * len(flat)
    else:
        specs, spec_tree = tree_flatten(spec, is_leaf=_is_spec)
        if spec_tree != tree:
            raise ValueError(
                f"Unsupported chunk spec: {spec} for {name}, which is nested as {tree}"
            )
    names = [name] if len(flat) == 1 else [f"{name}, leaf {n}" for n in range(len(flat))]
    return [_leaf(n, v, s) for n, v, s in zip(names, flat, specs, strict=True)]


def _is_spec(spec: object) -> bool:
    return spec is None or isinstance(spec, TensorChunkSpec | Replicated) or spec is Replicated


def _leaf(name: str, value: Any, spec: object) -> _Leaf:  # noqa: ANN401
    is_cut = _is_block_mask(value) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    if spec is Replicated or isinstance(spec, Replicated) or not is_cut:
        return _Leaf(name, value, None, is_declared=True)
    if isinstance(spec, TensorChunkSpec):
        if _is_block_mask(value) and spec.split_dim != 0:
            raise AssertionError("BlockMask only supports split_dim=0")
        if not _is_block_mask(value) and not -value.dim() <= spec.split_dim < value.dim():
            raise ValueError(
                f"{name} of shape {list(value.shape)} has no dim {spec.split_dim}, along which "
                f"{spec} is to cut it"
            )
        return _Leaf(name, value, spec.split_dim, is_declared=True)
    if spec is None:
        return _Leaf(name, value, 0, is_declared=False)
    raise ValueError(f"Unsupported chunk spec: {spec} for {name}")


def _check_sizes(leaves: Sequence[_Leaf], chunks: int) -> None:
    tensors = [leaf for leaf in leaves if leaf.is_cut_tensor]
    for leaf in tensors:
        size = leaf.value.shape[leaf.dim]
        if size < chunks:
            raise ValueError(
                f"{leaf.name} has {size} rows along dim {leaf.dim}, which cannot be cut into "
                f"{chunks} microbatches: give a larger batch or use fewer microbatches"
            )
    sizes: dict[int, str] = {}
    for leaf in tensors:
        if not leaf.is_declared:
            sizes.setdefault(leaf.value.shape[0], leaf.name)
    # Equal chunks hold the same samples. A chunk of one row would broadcast against larger ones.
    odd = [size for size in sizes if size % chunks or size == chunks]
    if len(sizes) > 1 and odd:
        listed = " and ".join(f"{size} rows in {name}" for size, name in sizes.items())
        found = "is one row a chunk" if odd[0] == chunks else "does not divide"
        raise PipeliningShapeError(
            f"the arguments have a shape mismatch: expected the batch along dim 0 of every tensor, "
            f"or equal chunks of several rows for {chunks} microbatches, found {listed}, of which "
            f"{odd[0]} {found}; say by args_chunk_spec or kwargs_chunk_spec how they are cut "
            "(TensorChunkSpec) or that they are not (Replicated)"
        )


def _cut(leaf: _Leaf, chunks: int) -> Sequence[Any]:
    if leaf.dim is None:
        return [leaf.value] * chunks
    if _is_block_mask(leaf.value):
        return _cut_block_mask(leaf.value, chunks)
    parts = torch.tensor_split(leaf.value, chunks, dim=leaf.dim)
    if leaf.value.is_leaf and leaf.value.requires_grad:
        for part in parts:
            part.retain_grad()
    return parts


def _is_block_mask(value: object) -> bool:
    """Whether ``value`` is flex attention's mask, by name: importing that module is slow."""
    kind = type(value)
    return kind.__name__ == "BlockMask" and kind.__module__.startswith("torch.nn.attention")


def _cut_block_mask(mask: Any, chunks: int) -> list[Any]:  # noqa: ANN401
    """Split flex attention's mask along its batch; one of batch 1 serves every microbatch."""
    batch = mask.kv_num_blocks.shape[0]
    if batch == 1:
        return [mask] * chunks
    if batch < chunks:
        raise AssertionError("Block mask has fewer batch size than the number of chunks. ")
    found: list[Any] = []
    start = 0
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    for part in torch.tensor_split(mask.kv_num_blocks, chunks):
        stop = start + part.shape[0]
        cut = [getattr(mask, name) for name in names]
        rows = [None if tensor is None else tensor[start:stop] for tensor in cut]
        found.append(
            type(mask).from_kv_blocks(
                *rows,
                BLOCK_SIZE=mask.BLOCK_SIZE,
                mask_mod=_moved(mask.mask_mod, start),
                seq_lengths=mask.seq_lengths,
            )
        )
        start = stop
    return found


def _moved(mask_mod: Callable[..., Any], start: int) -> Callable[..., Any]:
    def moved(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ANN401
        return mask_mod(batch + start, head, query, key)

    return moved


def chunk_weights(targets: Sequence[Any], spec: object = None) -> list[float]:
    """List each microbatch's share of the batch, by the rows of its target's first split tensor."""
    if spec is None and all(type(target) is torch.Tensor and target.dim() for target in targets):
        rows = [target.shape[0] for target in targets]
        return [size / sum(rows) for size in rows]
    sizes = []
    for target in targets:
        leaves = _leaves("target", target, spec)
        rows = [leaf.value.shape[leaf.dim] for leaf in leaves if leaf.is_cut_tensor]
        sizes.append(rows[0] if rows else 1)
    return [size / sum(sizes) for size in sizes]


def cut_dims(args: tuple[Any, ...], specs: object) -> list[int | None]:
    """The dim along which each leaf of positional arguments is split; None where it is not."""
    listed = _listed(specs, len(args))
    named = (_leaves("", value, spec) for value, spec in zip(args, listed, strict=True))
    return [leaf.dim for leaves in named for leaf in leaves]


def check_target(target: object, specs: Iterable[object]) -> None:
    """Raise ``ValueError`` for a ``target`` without a spec when arguments split along another dim.

    Split along dim 0, it would have the rows of other samples.
    """
    found = tree_flatten(tuple(specs), is_leaf=_is_spec)[0]
    dims = {spec.split_dim for spec in found if isinstance(spec, TensorChunkSpec)} - {0}
    for leaf in tree_flatten(target)[0]:
        sizes = [
            d for d in dims if isinstance(leaf, torch.Tensor) and -leaf.dim() <= d < leaf.dim()
        ]
        if sizes:
            raise ValueError(
                f"arguments are cut along dim {sizes[0]}, and nothing says how the target of shape "
                f"{list(leaf.shape)} is cut: give target_chunk_spec (TensorChunkSpec or Replicated)"
            )


def check_loss(
    loss: object,
    outputs: Mapping[int, Any],
    targets: Sequence[Any],
    microbatch: int,
    *,
    is_weighed: bool,
) -> None:
    """Raise for a loss whose gradient would silently differ from that of the full batch.

    ``outputs`` are those of this microbatch and of all that ran before it. Raises ``TypeError`` for
    a loss that is no tensor, ``ValueError`` for a (sum, count) that is weighted by rows, and
    `PipeliningShapeError` for an output and a target of which one has a single row and would
    broadcast, and for microbatches of different sizes with a target without rows.
    """
    if is_weighed and isinstance(loss, tuple):
        raise ValueError(
            "loss_fn returned a tuple, whose first value is a sum, but scale_grads=True weighs "
            "mean losses by rows: pass scale_grads=False and divide gradients by the whole count"
        )
    if not isinstance(loss[0] if isinstance(loss, tuple) and loss else loss, torch.Tensor):
        raise TypeError(f"expected loss_fn to return a tensor, found {type(loss).__name__}")
    target, output = targets[microbatch], outputs[microbatch]
    earliest, first = next(iter(outputs.items()))
    if not isinstance(output, torch.Tensor) or not output.dim():
        return
    pairs = zip(tree_flatten(target)[0], tree_flatten(targets[microbatch - 1])[0], strict=False)
    is_cut = any(
        isinstance(leaf, torch.Tensor) and leaf.dim() and leaf is not b for leaf, b in pairs
    )
    if not isinstance(target, torch.Tensor) or not is_cut:
        if is_weighed and not is_cut and len(first) != len(output):
            raise PipeliningShapeError(
                f"microbatches {earliest} and {microbatch} have a shape mismatch: outputs have "
                f"{len(first)} and {len(output)} rows, and a target without rows does not tell "
                "what their losses weigh: give a target with a row for each of the batch"
            )
        return
    is_alike = output.dim() == target.dim() > 0 and output.shape[1:] == target.shape[1:]
    rows = output.shape[:1] + target.shape[:1]
    if is_alike and rows[0] != rows[1] and 1 in rows:
        raise PipeliningShapeError(
            f"the target of microbatch {microbatch} has a shape mismatch: expected "
            f"{list(output.shape)} as the output actual {list(target.shape)}: give a target with "
            "as many rows as the batch"
        )


def merge_chunks(chunks: Sequence[Any], chunk_spec: object = None) -> Any:  # noqa: ANN401
    """Merge the outputs of microbatches: the inverse of splitting.

    ``chunk_spec`` is nested like an output, or one spec for all its leaves: None and
    `TensorChunkSpec` join along a dim, a `CustomReducer` folds, anything else must be equal in all.
    Raises ``ValueError`` for outputs that differ in structure or do not fit the spec.
    """
    if chunk_spec is None and chunks and all(type(c) is torch.Tensor and c.dim() for c in chunks):
        return torch.cat(list(chunks))
    flat = [tree_flatten(chunk) for chunk in chunks]
    if not flat:
        return None
    leaves, tree = flat[0]
    for other in flat[1:]:
        if other[1] != tree:
            raise ValueError(f"Chunk {other[1]} did not match chunk spec {tree}")
    if chunk_spec is None or isinstance(chunk_spec, TensorChunkSpec | CustomReducer):
        specs: Sequence[object] = [chunk_spec] * len(leaves)
    else:
        specs, spec_tree = tree_flatten(
            chunk_spec, is_leaf=lambda spec: _is_spec(spec) or isinstance(spec, CustomReducer)
        )
        if spec_tree != tree:
            raise ValueError(f"Chunk {tree} did not match chunk spec {chunk_spec}")
    columns = zip(*(found for found, _ in flat), strict=True)
    merged = [_merge(list(column), spec) for column, spec in zip(columns, specs, strict=True)]
    return tree_unflatten(merged, tree)


def _merge(parts: list[Any], spec: object) -> Any:  # noqa: ANN401
    if isinstance(spec, CustomReducer):
        value = spec.init_value
        for part in parts:
            value = spec.reduce_fn(value, part)
        return value
    is_joined = spec is None or isinstance(spec, TensorChunkSpec)
    if is_joined and isinstance(parts[0], torch.Tensor) and parts[0].dim():
        kinds = {type(part) for part in parts}
        placements = {getattr(part, "placements", None) for part in parts}
        if len(kinds) > 1 or len(placements) > 1:
            raise AssertionError(
                f"expected microbatches of one kind of tensor with equal placements, found "
                f"{sorted(kind.__name__ for kind in kinds)} with {placements}"
            )
        return torch.cat(parts, dim=spec.split_dim if isinstance(spec, TensorChunkSpec) else 0)
    first = parts[0]
    if is_joined and isinstance(first, torch.Tensor):
        return torch.stack(parts)
    for number, part in enumerate(parts):
        same = torch.equal(part, first) if isinstance(first, torch.Tensor) else part == first
        if not same:
            raise ValueError(
                f"Chunk {number} did not match chunk spec {spec}: expected {first!r} as in chunk "
                f"0, found {part!r}"
            )
    return first
