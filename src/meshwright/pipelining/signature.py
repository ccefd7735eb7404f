"""Metadata of the values that cross stages, and how both sides learn it.

A signature describes all outputs of a stage for one microbatch. A rank sends each signature to a
reader at most once, as JSON; from then on its id stands for it. An id follows from the stage's
inputs, so it is known before anything is computed.

Constants (leaves that are not tensors) may differ between microbatches, so each message has them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from meshwright.errors import PipeliningShapeError
from meshwright.torch_internals.trees import (
    TreeSpec,
    is_namedtuple_class,
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)


def as_outputs(value: object) -> tuple[Any, ...]:
    """Return the outputs of a module as a tuple: each element is an argument of the next stage."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple) and not is_namedtuple_instance(value):
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


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The shape, strides and dtype of a tensor, without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

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
        """Copy ``received`` into the declared strides; unchanged if a stride is 0."""
        if 0 in self.stride:
            return received
        made = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=received.device
        )
        return made.copy_(received)


@dataclass(frozen=True)
class Signature:
    """The description of all leaves of a value, and of their nesting."""

    leaves: tuple[TensorMeta | None, ...]
    """None for a constant."""
    spec: TreeSpec | None = None

    @cached_property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """Indices of the leaves that are tensors that require a gradient."""
        return tuple(n for n, leaf in enumerate(self.leaves) if leaf and leaf.requires_grad)

    @cached_property
    def wanted_tensors(self) -> tuple[TensorMeta, ...]:
        """The leaves that are tensors that require a gradient."""
        return tuple(meta for meta in self.tensors if meta.requires_grad)

    @cached_property
    def strided(self) -> tuple[int, ...]:
        """Indices of those ``tensors`` that are copied to their strides on arrival."""
        return tuple(n for n, meta in enumerate(self.tensors) if not meta.is_plain)

    @cached_property
    def has_constants(self) -> bool:
        """True when some leaves are not tensors."""
        return len(self.tensors) < len(self.leaves)

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
            if meta is None:
                if type(leaf) not in CONSTANTS:
                    return False
            elif not (
                isinstance(leaf, torch.Tensor)
                and leaf.dtype is meta.dtype
                and leaf.shape == meta.shape
                and leaf.stride() == meta.stride
            ):
                return False
        return True

    def check_outputs(
        self, values: Values, stage: int, microbatch: int, *, gradients: bool
    ) -> None:
        """Raise `PipeliningShapeError` for outputs of ``stage`` that do not match.

        With ``gradients`` also for an output that requires one where this signature, by which its
        readers send gradients, has none.
        """
        where = f"[Stage {stage}] output of microbatch {microbatch}"
        if not self.describes(values):
            raise PipeliningShapeError(differences(self, values, where))
        for number, (meta, leaf) in enumerate(zip(self.leaves, values.leaves, strict=True)):
            if gradients and meta and leaf.requires_grad and not meta.requires_grad:
                raise PipeliningShapeError(
                    f"{where}, value {number}, requires a gradient, and did not for another "
                    "microbatch of the same shapes, so none will arrive: make the stage's outputs "
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
    return [list(leaf.shape), list(leaf.stride), _dtype_name(leaf.dtype), leaf.requires_grad]


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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_constants(constants: Sequence[object]) -> list[object]:
    """Convert ``constants`` to JSON."""
    return [{"dtype": _dtype_name(c)} if isinstance(c, torch.dtype) else c for c in constants]


def read_constants(constants: Sequence[object]) -> list[object]:
    """Rebuild the constants that `write_constants` wrote."""
    return [getattr(torch, c["dtype"]) if isinstance(c, dict) else c for c in constants]


# --------------------------------------------------------------------------------- cache

KEPT = 256
"""The number of ids that are kept for each stage."""


@dataclass(slots=True)
class KnownSignature:
    """The signature that an id stands for, and what the other ranks know of it."""

    signature: Signature
    told: set[int] = field(default_factory=set)
    """The ranks that it was sent to."""
    complete: dict[int, bool] = field(default_factory=dict)
    """By reading stage, whether all outputs had gradients in the first microbatch."""


class SignatureCache:
    """The signatures known of this rank's stages, and of those whose outputs it reads.

    Each stage keeps the ids used last; older ones are dropped at the end of a step. The sender and
    the readers of its outputs see the same ids in the same steps, so they drop the same ones.
    """

    def __init__(self) -> None:
        self.stages: defaultdict[int, dict[int, KnownSignature]] = defaultdict(dict)
        """By stage and id, the one used last at the end."""
        self._learned: list[tuple[int, int]] = []
        """Stage and id of what this rank's stages have made in this step."""
        self._used: Mapping[int, tuple[int, ...]] = {}

    def learn(self, stage: int, identity: int, signature: Signature) -> None:
        """Note the outputs of a stage of this rank; `drop` undoes it if the step is refused."""
        self.stages[stage][identity] = KnownSignature(signature)
        self._learned.append((stage, identity))

    def keep(self, used: Mapping[int, tuple[int, ...]]) -> None:
        """Keep what a successful step has learned; ``used`` are its ids by stage."""
        self._learned.clear()
        if used == self._used:
            return
        self._used = used
        for stage, ids in used.items():
            known = self.stages[stage]
            for identity in dict.fromkeys(ids):
                if identity in known:
                    known[identity] = known.pop(identity)
            while len(known) > KEPT:
                del known[next(iter(known))]

    def drop(self) -> None:
        """Drop what a step has learned that failed before any message was sent or received."""
        for stage, identity in self._learned:
            self.stages[stage].pop(identity, None)
        self._learned.clear()


# -------------------------------------------------------------------------- nesting


def write_spec(spec: TreeSpec) -> Any:  # noqa: ANN401 - JSON
    """Convert ``spec`` to JSON.

    Raises `PipeliningShapeError` for classes that another process cannot look up.
    """
    cause = None
    try:
        written = _written(tree_unflatten([0] * spec.num_leaves, spec))
        if read_spec(written) == spec:
            return written
    except (NotImplementedError, TypeError) as error:
        cause = error
    raise PipeliningShapeError(
        f"values nested as {spec} cannot go to another rank: expected tuples, lists, NamedTuples "
        "that are defined at the top of a module, dicts with keys that JSON has, or classes "
        "registered with torch.utils._pytree under a serialized name"
    ) from cause


def read_spec(written: Any) -> TreeSpec:  # noqa: ANN401 - JSON
    """Rebuild a spec that `write_spec` wrote. Raises `PipeliningShapeError` for unknown classes."""
    if isinstance(written, str):
        return treespec_loads(written)
    return tree_flatten(_example(written))[1]


def _written(value: object) -> Any:  # noqa: ANN401 - JSON
    leaves, outer = tree_flatten(value, is_leaf=is_namedtuple_instance)
    text = treespec_dumps(outer)
    inner = [_named(leaf) if is_namedtuple_instance(leaf) else None for leaf in leaves]
    return [text, inner] if any(inner) else text


def _named(leaf: Sequence[object]) -> list[Any]:
    kind = type(leaf)
    return [kind.__module__, kind.__qualname__, _written(tuple(leaf))]


def _example(written: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(written, str):
        spec = treespec_loads(written)
        return tree_unflatten([0] * spec.num_leaves, spec)
    text, inner = written
    leaves = [0 if each is None else _found(*each[:2])(*_example(each[2])) for each in inner]
    return tree_unflatten(leaves, treespec_loads(text))


def _found(module: str, name: str) -> Any:  # noqa: ANN401 - a class
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    # The names come from another rank's message: call nothing but NamedTuple classes.
    if isinstance(found, type) and is_namedtuple_class(found):
        return found
    raise PipeliningShapeError(
        f"no NamedTuple {name} is found in {module} on this rank, of which a stage gives a "
        "value: define it at the top of a module that all ranks import"
    )
