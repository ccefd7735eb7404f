"""The metadata of a value that crosses stages: shapes, strides, dtypes, and where constants are.

A signature describes all outputs of a stage for one microbatch. A rank sends each signature to a
reader at most once, as JSON; from then on its id stands for it.

Constants (leaves that are not tensors) may differ between microbatches, so each message has them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.messages.nesting import read_spec, write_spec
from meshwright.torch_internals.trees import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)


def as_outputs(value: object) -> tuple[Any, ...]:
    """Return the outputs of a module as a tuple: each element is an argument of the next stage."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


@dataclass(slots=True)
class Values:
    """Nested values as a flat list, with the spec to rebuild the nesting."""

    leaves: list[Any]
    spec: TreeSpec | None = None
    """None: the values are the leaves, as one tuple."""

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Values:
        """Flatten ``values``; in the usual case they are all tensors, and nothing is nested."""
        if len(values) == 1 and isinstance(values[0], torch.Tensor):
            return cls([values[0]])
        if all(isinstance(value, torch.Tensor) for value in values):
            return cls(list(values))
        leaves, spec = tree_flatten(values)
        return cls(leaves, spec)

    def nested_as(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Nest ``leaves`` as these values were."""
        return tuple(leaves) if self.spec is None else tree_unflatten(leaves, self.spec)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Iterate over the leaves that are tensors."""
        return (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def constants(self) -> list[object]:
        """List the leaves that are not tensors."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The shape, strides and dtype of a tensor, without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def describes(self, tensor: object) -> bool:
        """Check that ``tensor`` has this shape, stride and dtype."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )

    def empty(self, device: torch.device) -> torch.Tensor:
        """Make a tensor to receive into: contiguous, as values are sent."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def is_plain(self) -> bool:
        """True when the strides are contiguous, as values are sent."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True

    def laid_out(self, received: torch.Tensor) -> torch.Tensor:
        """Copy ``received`` into the declared strides; unchanged where elements shared memory."""
        if 0 in self.stride:
            return received
        made = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=received.device
        )
        return made.copy_(received)


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of all leaves of a value, and of their nesting."""

    leaves: tuple[TensorMeta | None, ...]
    """None for a constant."""
    spec: TreeSpec | None = None
    tensors: tuple[TensorMeta, ...] = field(init=False, compare=False, repr=False)
    """The leaves that are tensors."""
    wanted: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Indices of the leaves that are tensors that require a gradient."""
    strided: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Indices of those ``tensors`` that are copied to their strides on arrival."""
    has_constants: bool = field(init=False, compare=False, repr=False)
    """True when some leaves are not tensors."""

    def __post_init__(self) -> None:
        tensors = tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))
        object.__setattr__(self, "tensors", tensors)
        numbers = (
            n
            for n, leaf in enumerate(self.leaves)
            if isinstance(leaf, TensorMeta) and leaf.requires_grad
        )
        object.__setattr__(self, "wanted", tuple(numbers))
        strided = (n for n, meta in enumerate(tensors) if not meta.is_plain)
        object.__setattr__(self, "strided", tuple(strided))
        object.__setattr__(self, "has_constants", len(tensors) < len(self.leaves))

    def to_json(self) -> list[Any]:
        """Convert to JSON. Raises as `write_spec` does."""
        nesting = None if self.spec is None else write_spec(self.spec)
        return [[_to_json(leaf) for leaf in self.leaves], nesting]

    @classmethod
    def from_json(cls, written: list[Any]) -> Signature:
        """Rebuild the signature that `to_json` wrote."""
        leaves, nesting = written
        spec = None if nesting is None else read_spec(nesting)
        return cls(tuple(map(_from_json, leaves)), spec)

    def describes(self, values: Values) -> bool:
        """Whether ``values`` match; the values of constants do not matter."""
        if len(values.leaves) != len(self.leaves) or values.spec != self.spec:
            return False
        for meta, leaf in zip(self.leaves, values.leaves, strict=True):
            if isinstance(meta, TensorMeta):
                if not meta.describes(leaf):
                    return False
            elif type(leaf) not in CONSTANTS:
                return False
        return True

    def check_gradients(self, values: Values, where: str) -> None:
        """Raise `PipeliningShapeError` where ``values`` need a gradient that nobody will send."""
        for number, (meta, leaf) in enumerate(zip(self.leaves, values.leaves, strict=True)):
            if not isinstance(meta, TensorMeta) or meta.requires_grad:
                continue
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise PipeliningShapeError(
                    f"{where}, value {number}, requires a gradient, and did not for another "
                    "microbatch of the same shapes, so none will come: make the stage's outputs "
                    "require gradients in all microbatches or in none"
                )


def signature_of(values: Values, where: str) -> Signature:
    """Describe ``values``. ``where`` names them in messages.

    Raises ``PipeliningShapeError`` for leaves that are neither dense tensors nor plain constants.
    """
    leaves: list[TensorMeta | None] = []
    for number, leaf in enumerate(values.leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise PipeliningShapeError(
                    f"Failed to perform pipeline shape inference: {where}, value {number}, is a "
                    f"{'nested' if leaf.is_nested else leaf.layout} tensor; only dense ones go "
                    "from stage to stage"
                )
            leaves.append(TensorMeta.of(leaf))
        elif type(leaf) in CONSTANTS:
            leaves.append(None)
        else:
            raise PipeliningShapeError(refusal(leaf, f"{where}, value {number},"))
    return Signature(tuple(leaves), values.spec)


def declared(values: object, stage: int, name: str) -> Signature | None:
    """Return the signature of what the user declares, by argument ``name``, for ``stage``.

    Raises as `signature_of` does.
    """
    if values is None:
        return None
    flat = Values.of(as_outputs(values))
    for number, leaf in enumerate(flat.leaves):
        is_known = isinstance(leaf, torch.Tensor) or type(leaf) in CONSTANTS
        if name == "input_args" and not is_known:
            raise PipeliningShapeError(
                f"Stage arg[{number}] has type {type(leaf).__qualname__}, and stage {stage} can be "
                "sent tensors, None, bool, int, float, str and dtypes. Use kwargs for non-tensor "
                "inputs."
            )
    return signature_of(flat, f"[Stage {stage}] {name}")


def digest(*parts: object) -> int:
    """Compute a positive number of 62 bits, the same for the same parts in every process."""
    text = json.dumps([part.decode() if isinstance(part, bytes) else part for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def differences(expected: Signature, actual: Values, where: str) -> str:
    """Describe all ways in which ``actual`` differs from ``expected``; empty if in none."""
    if len(actual.leaves) != len(expected.leaves):
        return (
            f"{where} has a shape mismatch: expected {len(expected.leaves)} values actual "
            f"{len(actual.leaves)}"
        )
    found: list[str] = []
    for number, (meta, leaf) in enumerate(zip(expected.leaves, actual.leaves, strict=True)):
        name = where if len(expected.leaves) == 1 else f"{where}, value {number},"
        found += _leaf_differences(meta, leaf, name)
    if not found and actual.spec != expected.spec:
        found.append(
            f"{where} is nested differently: expected {expected.spec} actual {actual.spec}"
        )
    return "; ".join(found)


def _leaf_differences(meta: TensorMeta | None, leaf: object, name: str) -> list[str]:
    if meta is None:
        if isinstance(leaf, torch.Tensor):
            return [f"{name} is {_brief(leaf)}: expected a constant, as before"]
        return [] if type(leaf) in CONSTANTS else [refusal(leaf, name)]
    if not isinstance(leaf, torch.Tensor):
        return [f"{name} is no tensor: expected shape {list(meta.shape)} actual {_brief(leaf)}"]
    found = []
    for what, want, got in (
        ("shape", list(meta.shape), list(leaf.shape)),
        ("stride", meta.stride, leaf.stride()),
        ("dtype", meta.dtype, leaf.dtype),
    ):
        if want != got and not (what == "stride" and list(meta.shape) != list(leaf.shape)):
            found.append(f"{name} has a {what} mismatch: expected {want} actual {got}")
    return found


def _brief(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)[:60]


def _to_json(leaf: TensorMeta | None) -> object:
    if leaf is None:
        return None
    return [list(leaf.shape), list(leaf.stride), named(leaf.dtype), leaf.requires_grad]


def _from_json(leaf: Sequence[Any] | None) -> TensorMeta | None:
    if leaf is None:
        return None
    shape, stride, dtype, requires_grad = leaf
    return TensorMeta(tuple(shape), tuple(stride), getattr(torch, dtype), requires_grad)


def shapes(values: object) -> str:
    """Describe arguments for error messages: shapes and dtypes of tensors, types of the rest."""
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{k}: {shapes(v)}" for k, v in values.items()) + "}"
    if isinstance(values, torch.Tensor):
        return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return "(" + ", ".join(map(shapes, values)) + ")"
    return type(values).__name__


def tensors_in(given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """List the tensors among arguments, however nested."""
    if not named:
        for value in given:
            if not isinstance(value, torch.Tensor):
                break
        else:
            return list(given)
    leaves = tree_leaves((list(given), dict(named)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def detached(value: object) -> object:
    """Return ``value`` with its tensors detached from their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def trained(module: nn.Module) -> tuple[bool, ...]:
    """``requires_grad`` of each parameter: which outputs require gradients depends on it."""
    return tuple([parameter.requires_grad for parameter in module.parameters()])


CONSTANTS = frozenset({bool, int, float, str, torch.dtype, type(None)})
"""The exact types that can be sent: a subclass would arrive as something else."""


def refusal(leaf: object, where: str) -> str:
    """The error message for a ``leaf`` that cannot be sent to another stage."""
    kind = type(leaf)
    return (
        f"{where} is of type {kind.__module__}.{kind.__qualname__}; expected a tensor, None, bool, "
        "int, float, str or dtype, in tuples, lists, dicts or NamedTuples: only those go from "
        "stage to stage; return what it holds in one of them"
    )


def named(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in torch."""
    return str(dtype).removeprefix("torch.")


def written(constants: Sequence[object]) -> list[object]:
    """Convert ``constants`` to JSON."""
    return [{"dtype": named(c)} if isinstance(c, torch.dtype) else c for c in constants]


def read(constants: Sequence[object]) -> list[object]:
    """Rebuild the constants that `written` wrote."""
    return [getattr(torch, c["dtype"]) if isinstance(c, dict) else c for c in constants]
