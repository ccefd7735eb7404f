"""Loads the state of a checkpoint into this rank's tensors, which are first compared by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.nested import unflatten
from meshwright.checkpoint.pieces import ShardedPiece, dtype_name, parts, torch_dtype
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.training.named_optimizer import differing_groups
from meshwright.checkpoint.training.wrapped import ModelState
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.gather_dtensor import empty_part_like, held, held_boxes
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.data_parallel.owned_matrices import sharers_of
from meshwright.errors import CheckpointMismatchError
from meshwright.torch_internals.modules import COMPILED

FORMAT = "meshwright-state"
VERSION = 1
PREFIX = "state"


class SavedState:
    """The state in an open checkpoint, read piece by piece; a context manager like `Reader`.

    Raises ``CheckpointMismatchError`` for a checkpoint of tensors alone.
    """

    ranks: int
    """The number of ranks that saved it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.path = reader.directory
        self.step = reader.manifest.step
        metadata = reader.manifest.metadata
        found = metadata.get("format"), metadata.get("version")
        structure = metadata.get("state")
        if found != (FORMAT, VERSION) or not isinstance(structure, dict):
            raise CheckpointMismatchError(
                f"{reader.directory} was not saved by checkpoint.save, or by another version of "
                f"it: expected format {FORMAT} {VERSION}, found {found[0]} {found[1]}; "
                "checkpoint.load_tensors reads its tensors"
            )
        self.structure: dict[str, Any] = structure
        forms = metadata.get("forms")
        self.forms: Mapping[str, JSON] = forms if isinstance(forms, dict) else {}
        """The class names of ``scheduler`` and ``data``, nested as saved."""
        self.ranks = int(cast(int, metadata["ranks"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def require(self, keys: Sequence[str], remedy: str = "") -> None:
        """Raise ``CheckpointMismatchError`` unless the state has all ``keys``."""
        missing = [key for key in keys if key not in self.structure]
        if missing:
            remedy = remedy or f"leave {' and '.join(missing)} out"
            raise CheckpointMismatchError(
                f"the checkpoint {self.path} holds no {' and no '.join(missing)}, but "
                f"{', '.join(self.structure)}: {remedy}"
            )

    def read(self, structure: JSON, like: Tensor | None = None) -> Any:  # noqa: ANN401 - any state
        """Read nested state: tensors of the shape of ``like`` with its placement, others full."""
        with self.reading() as read:
            return read(structure, like)

    @contextmanager
    def reading(self) -> Generator[Callable[[JSON, Tensor | None], Any], None, None]:
        """Yield a `read` whose tensors are filled together, at the end of the block."""
        waiting: dict[str, Tensor] = {}
        yield lambda structure, like: unflatten(structure, _Tensors(self.reader, like, waiting))
        fill(self.reader, waiting)

    def weights(self) -> dict[str, str]:
        """Map each name of the model to its stored tensor."""
        found = self.structure.get("model", {})
        return {n: v["$tensor"] for n, v in found.items() if _is_tensor(v)}

    def optimizers(self) -> list[dict[str, Any]]:
        """List the structures of the optimizers."""
        found = self.structure.get("optimizer", [])
        return found if isinstance(found, list) else [found]


def _about_prefix(here: Iterable[str], there: Iterable[str]) -> str:
    """Advice if names of one side have a module prefix that the other's lack; else empty.

    Weights saved from torch's DistributedDataParallel, for example, are called ``module.weight``.
    """
    own, stored = dict.fromkeys(here), dict.fromkeys(there)
    for name in (*stored, *own):
        prefix, _, rest = name.partition(".")
        if name in stored and name not in own and rest in own:
            remedy = f'load it with model=torch.nn.ModuleDict({{"{prefix}": model}})'
            if prefix == COMPILED:
                remedy = "save it anew from the module that was compiled"
            return f"\n{name!r} there seems to be {rest!r} here: {remedy}"
        if name in own and name not in stored and rest in stored:
            return (
                f"\n{rest!r} there seems to be {name!r} here: give the module {prefix!r} as model="
            )
    return ""


def _is_tensor(structure: object) -> bool:
    return isinstance(structure, dict) and structure.keys() == {"$tensor"}


class _Tensors(dict[str, Tensor]):
    """Tensors of a checkpoint, allocated on access and added to ``waiting`` to be filled."""

    def __init__(self, reader: Reader, like: Tensor | None, waiting: dict[str, Tensor]) -> None:
        super().__init__()
        self._reader = reader
        self._like = like
        self._waiting = waiting

    def __missing__(self, name: str) -> Tensor:  # for each name: it holds none
        record = self._reader.manifest.tensors[name]
        like = self._like
        if name in self._waiting:
            fill(self._reader, self._waiting)
            self._waiting.clear()
        if like is None or not record.shape or record.shape != tuple(like.shape):
            found = self._reader.empty(name)
        else:
            found = empty_part_like(like, torch_dtype(record.dtype))
        self._waiting[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._reader.manifest.tensors


@torch.no_grad()
def fill(reader: Reader, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of ``tensors`` with the stored tensors of their names."""
    together: dict[str, Tensor | ShardedPiece] = {}
    for name, tensor in tensors.items():
        if not (is_dtensor(tensor) or isinstance(tensor, ShardView)):
            together[name] = tensor
            continue
        piece = piece_of(name, tensor)
        if len([box for box in piece.boxes if box.numel]) <= 1:
            together[name] = piece
            continue
        places = [memory for box, memory in held_boxes(tensor, name) if box.numel]
        reader.read_into(name, piece)  # a piece of several boxes is a copy: copy it back
        for memory, (_, flat) in zip(places, parts(piece), strict=True):
            memory.copy_(flat.view(memory.shape))
    reader.read_all_into(together, within=None)


def piece_of(name: str, tensor: Tensor) -> ShardedPiece:
    """Describe this rank's part of ``tensor``, without a copy if it is one box.

    Raises ValueError for a tensor that is not strided.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name!r}: expected a dense tensor, found one of layout {tensor.layout}: save "
            "tensor.to_dense(), and make it anew of that"
        )
    return held(tensor, name)


# -------------------------------------------------------------------------------------- names


NOT_STRICT = (
    "\nFor a model with a new head, say: load(..., model=model, strict=False) fills what has one "
    "name and shape in both, and lists the rest"
)


class Restoring:
    """The steps of a load on one rank. A tied tensor is found under any of its names."""

    def __init__(self, saved: SavedState, held: Mapping[str, Any], *, strict: bool) -> None:
        """``held`` is this rank's state, or its outline without the state of optimizers."""
        self._saved = saved
        self._strict = strict
        self._held = held
        self._weights: ModelState | None = held.get("model")
        self._stored = saved.weights()
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for name, tensor in self._stored.items():
            alike[tensor].append(name)
        self._stored_ties = {name: alike[tensor] for name, tensor in self._stored.items()}
        self._first: Mapping[str, str] = {} if self._weights is None else self._weights.ties
        self._ties: dict[str, list[str]] = {}
        for name, first in self._first.items():
            self._ties.setdefault(first, [first]).append(name)
        self._tensors = {} if self._weights is None else dict(self._weights.tensors)
        """The tensors to fill, by their first names."""
        kept = [] if strict else [name for name in self._tensors if not self._fits(name)]
        for name in kept:
            del self._tensors[name]
        self._kept = kept
        """The tensors of the model that keep their values for lack of a match."""
        found = held.get("optimizer", [])
        self._optimizers: list[Any] = found if isinstance(found, list) else [found]
        self._names: list[dict[str, list[str]]] = []
        """For each optimizer, maps saved names to those here that get their state."""

    def _fits(self, first: str) -> bool:
        stored, shape = self._saved.reader.manifest.tensors, tuple(self._tensors[first].shape)
        return {tuple(stored[name].shape) for name in self._sources(first)} == {shape}

    def _alike(self, name: str) -> list[str]:
        """List the names that ``name`` may have in a checkpoint, itself first."""
        own = [name, *self._ties.get(self._first.get(name, name), ())]
        tied = [other for each in own for other in self._stored_ties.get(each, ())]
        return list(dict.fromkeys([*own, *tied]))

    def _sources(self, first: str) -> list[str]:
        """List the stored tensors for a tensor; several if it is tied now but was not then."""
        found = [self._stored[name] for name in self._alike(first) if name in self._stored]
        return list(dict.fromkeys(found))

    # ------------------------------------------------------------------------------ comparing

    def compare(self) -> Any:  # noqa: ANN401 - JSON
        """Compare the checkpoint with this rank's state; returns the names that this rank knows.

        Raises ``CheckpointMismatchError`` listing what is missing or differs.
        """
        self._compare_model()
        saved, stored = self._saved, self._saved.optimizers()
        if self._optimizers and len(stored) != len(self._optimizers):
            raise CheckpointMismatchError(
                f"the checkpoint {saved.path} holds {len(stored)} optimizers, "
                f"{len(self._optimizers)} were passed"
            )
        for own, there in zip(self._optimizers, stored, strict=False):
            groups = [group["params"] for group in own["param_groups"]]
            listed = {name for group in there["param_groups"] for name in group["params"]}
            names: defaultdict[str, list[str]] = defaultdict(list)
            for name in (name for group in groups for name in group):
                source = next((other for other in self._alike(name) if other in listed), name)
                names[source].append(name)
            problems = differing_groups(groups, _renamed(there["param_groups"], names))
            if problems:
                head = f"the optimizer in {saved.path} does not fit this one:"
                raise CheckpointMismatchError("\n  ".join([head, *problems]))
            self._names.append(dict(names))
        used = [sorted({n for s in names for n in self._alike(s)}) for names in self._names]
        known: list[str] = []
        if self._weights is not None:
            known = [*self._weights.tensors, *self._weights.ties, *self._weights.rest]
        return {"model": known, "optimizers": used, "kept": self._kept}

    def _compare_model(self) -> None:
        weights, reader = self._weights, self._saved.reader
        if weights is None:
            return
        expected = {
            source: (tuple(tensor.shape), dtype_name(tensor.dtype))
            for first, tensor in self._tensors.items()
            for source in self._sources(first) or [f"{PREFIX}/model/{first}"]
        }
        try:
            reader.check_names(expected, within=None)
        except CheckpointMismatchError as error:
            hint = _about_prefix(weights.tensors, self._stored) or NOT_STRICT
            raise CheckpointMismatchError(f"{error}{hint}") from error
        stored = self._saved.structure.get("model", {})
        missing = [name for name in weights.rest if name not in stored]
        if missing and self._strict:
            raise CheckpointMismatchError(
                f"the checkpoint {reader.directory} has no extra state {missing[0]!r} of the model"
            )

    def compare_all(self, rows: Sequence[Any]) -> list[str]:
        """List saved weights that no rank knows; if strict, raise CheckpointMismatchError."""
        unknown: list[str] = []
        if self._weights is not None:
            known = {name for row in rows for name in row["model"]}
            unknown = [
                name
                for name in self._saved.structure["model"]
                if not known.intersection(self._alike(name))
            ]
        if not self._strict:
            return unknown
        problems = [f"{name!r} is in the checkpoint but not in the model" for name in unknown]
        for number, there in enumerate(self._saved.optimizers()[: len(self._names)]):
            known = {name for row in rows for name in row["optimizers"][number]}
            problems += [
                f"{name!r} is in the saved optimizer but not in this one"
                for group in there["param_groups"]
                for name in group["params"]
                if not known.intersection(self._alike(name))
            ]
        if problems:
            head = f"the checkpoint {self._saved.path} belongs to another model:"
            hint = NOT_STRICT if unknown else ""
            raise CheckpointMismatchError("\n  ".join([head, *problems]) + hint)
        return []

    # -------------------------------------------------------------------------------- reading

    def read(self) -> dict[str, Any]:
        """Fill the model, and read the rest with this rank's placement."""
        saved = self._saved
        self._fill()
        state: dict[str, Any] = {"steps": saved.step}
        for key in self._held:
            if key not in ("model", "optimizer") and key in saved.structure:
                state[key] = saved.read(saved.structure[key])
        pairs = zip(saved.optimizers(), self._names, strict=False)
        found = [self._read_optimizer(there, names) for there, names in pairs]
        if found:
            state["optimizer"] = found if isinstance(self._held["optimizer"], list) else found[0]
        if self._weights is not None:
            state["model"] = {**self._weights.names(), **self._weights.rest}
        return state

    def _fill(self) -> None:
        """Fill the model's tensors. Raises if tensors tied here differ in the checkpoint."""
        weights, reader = self._weights, self._saved.reader
        if weights is None:
            return
        together: dict[str, Tensor] = {}
        for first, tensor in self._tensors.items():
            source, *others = self._sources(first)
            if not others and source not in together:
                together[source] = tensor
                continue
            fill(reader, {source: tensor})
            for other in others:
                second = empty_part_like(tensor, tensor.dtype)
                fill(reader, {other: second})
                if not torch.equal(piece_of(other, tensor).tensor, piece_of(other, second).tensor):
                    raise CheckpointMismatchError(
                        f"{source!r} and {other!r} differ in the checkpoint {reader.directory}, "
                        "and are one tensor here: load it into a model that does not tie them"
                    )
        fill(reader, together)
        stored = self._saved.structure.get("model", {})
        for name in [name for name in weights.rest if name in stored]:
            weights.set_rest(name, self._saved.read(stored[name]))

    def _read_optimizer(
        self, saved: Mapping[str, Any], names: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        held: dict[str, Tensor] = {} if self._weights is None else self._weights.names()
        state: dict[str, Any] = {}
        with self._saved.reading() as read:
            for source, values in saved["state"].items():
                for name in names.get(source, ()):
                    like = held.get(name)
                    sharers, is_here = sharers_of(like)  # the state of whole matrices is whole
                    if is_here:
                        like = None if sharers else like
                        state[name] = {key: read(v, like) for key, v in values.items()}
        listed = _renamed(saved["param_groups"], names)
        groups = [
            {k: params if k == "params" else self._saved.read(v) for k, v in group.items()}
            for group, params in zip(saved["param_groups"], listed, strict=True)
        ]
        return {"state": state, "param_groups": groups}


def _renamed(
    groups: Sequence[Mapping[str, Any]], names: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """Return the current names of the parameters of saved groups."""
    return [
        [name for source in group["params"] for name in names.get(source, ())] for group in groups
    ]
