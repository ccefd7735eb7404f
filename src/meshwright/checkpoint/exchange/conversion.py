"""Conversion of weights from checkpoints to other formats and back, on any number of ranks.

No rank holds more than one tensor at a time. The result gets its name once it is complete.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.exchange.dcp import DcpFormat, read_dcp
from meshwright.checkpoint.exchange.hugging_face import HuggingFaceFormat, read_hugging_face
from meshwright.checkpoint.exchange.torch_file import TorchFormat, read_torch_file
from meshwright.checkpoint.exchange.weights import Format, Weights, weights_of
from meshwright.checkpoint.nested import flatten
from meshwright.checkpoint.pieces import ReadTensor, dtype_name, torch_dtype
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.storage import Storage, advice, reason
from meshwright.checkpoint.together import Group, everyone, together
from meshwright.checkpoint.training.restoring import FORMAT, PREFIX, VERSION
from meshwright.checkpoint.writing import save_tensors
from meshwright.comm import Communicator
from meshwright.errors import CheckpointError, CheckpointWriteError

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "hf": "a Hugging Face folder of safetensors files",
        "dcp": "a folder of torch.distributed.checkpoint",
        "torch": "a file that torch.load reads, weights only",
    }
)
_SHARD_BYTES = 5 * 10**9
_log = logging.getLogger(__name__)


def export_weights(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    config: Mapping[str, JSON] | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = _SHARD_BYTES,
    communicator: Communicator | None = None,
) -> Path:
    """Write the weights of a ``checkpoint`` as ``target``, in the format ``to``; return that path.

    ``to``: ``"hf"`` (a folder that `from_pretrained` reads), ``"dcp"`` (a folder of
    `torch.distributed.checkpoint`, weights below ``model``), ``"torch"`` (a file for
    ``torch.load(weights_only=True)``). ``config``: for ``hf``, the model's configuration, its
    file, or a folder whose configuration and tokenizer are copied; by default the
    ``extra={"config": ...}`` of the checkpoint. Floating-point weights become ``dtype``.
    ``shard_bytes``: the most bytes of a file of ``hf``. All ranks of ``communicator`` (by default
    of the run, or this process alone) must call this; they share the work.

    Raises `CheckpointError` if there is no checkpoint of a model, `CheckpointDamagedError` naming
    file and tensor, `CheckpointWriteError` if ``target`` exists or cannot be written.

    >>> checkpoint.export_weights("checkpoints/step_00000120", "my-model", to="hf", config="llama")
    """
    group = communicator if communicator is not None else everyone()
    form = _format(to, config, shard_bytes)
    with Reader(checkpoint) as reader:
        weights = _cast(weights_of(reader), dtype)
        _write(weights, form, Path(target), group)
    return Path(target)


def _write(weights: Weights, form: Format, target: Path, group: Group) -> None:
    """Write next to ``target``, and rename once all ranks have written their share."""
    storage = Storage()

    def begin() -> tuple[None, JSON]:
        if group.rank:
            return None, None
        with _told_of(target):
            _require_free(target)
            storage.make_directories(target.absolute().parent)
            _tell_of_torsos(target)
            folder = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
            storage.make_directory(folder)
            try:
                form.begin(weights, folder)
            except BaseException:
                storage.remove_tree(folder)
                raise
        return None, folder.name

    def write() -> tuple[None, JSON]:
        with _told_of(target):
            return None, form.write(weights, folder, group.rank, group.size)

    def finish() -> tuple[None, JSON]:
        if group.rank == 0:
            with _told_of(target):
                made = form.finish(weights, folder, answers)
                storage.sync_directory(folder)
                _require_free(target)
                storage.rename(made, target)
            with _told_of(target, "is complete, but its name may not survive a loss of power"):
                storage.sync_directory(target.absolute().parent)
        return None, None

    folder = target.with_name(str(together(group, "export: begin", begin)[1][0]))
    try:
        answers = together(group, "export: write", write)[1]
        together(group, "export: finish", finish)
    finally:
        if group.rank == 0 and folder.is_dir():
            try:
                storage.remove_tree(folder)
            except OSError as error:  # the outcome has been agreed on, so only warn
                _log.warning("%s could not be removed: %s; remove it", folder, reason(error))


def _tell_of_torsos(target: Path) -> None:
    """Log leftovers of interrupted exports without removing them: another job may be writing."""
    names = re.compile(rf"\.{re.escape(target.name)}\.tmp-[0-9a-f]{{8}}")
    for name in sorted(os.listdir(target.absolute().parent)):
        if names.fullmatch(name):
            _log.warning(
                "%s is of an export that was interrupted, or is under way: remove it if none is",
                target.with_name(name),
            )


@contextmanager
def _told_of(target: Path, what: str = "was not written") -> Generator[None, None, None]:
    """Raise CheckpointWriteError for an OSError of the block, or an error that one caused."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while not (cause is None or isinstance(cause, OSError)):
            cause = cause.__cause__ or cause.__context__  # torch.save wraps the OSError
        if cause is None:
            raise
        text = f"{target} {what}: {reason(cause)}; {advice(cause)}"
        raise CheckpointWriteError(text) from error


def import_weights(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    source_format: str,
    step: int = 0,
    key: str = "",
    dtype: torch.dtype | None = None,
    trust_pickle: bool = False,
    communicator: Communicator | None = None,
) -> Path:
    """Make the checkpoint of ``step`` in ``folder`` from weights in a format of `export_weights`.

    ``key``: the name below which a ``dcp`` or ``torch`` source has the weights, by default
    ``model`` if it exists. The pickle of a ``dcp`` source is read with an allowlist of names, and
    only with ``trust_pickle``. Ranks as for `export_weights`. Returns the checkpoint, which `load`
    loads into a model under any wrapper.

    Raises `CheckpointError` if ``source`` is not in that format, `CheckpointDamagedError` if it is
    damaged, `CheckpointWriteError` if nothing can be written.

    >>> path = checkpoint.import_weights("llama", "start", source_format="hf")
    >>> checkpoint.load(path, model=model)
    """
    group = communicator if communicator is not None else everyone()
    path = Path(source)
    if source_format not in FORMATS:
        raise ValueError(f"source_format: expected one of {[*FORMATS]}, found {source_format!r}")
    if key and source_format == "hf":
        raise ValueError("key is for source_format='dcp' and 'torch': a folder of hf has none")
    if source_format == "dcp" and not trust_pickle:
        raise CheckpointError(
            f"{path}: a distributed checkpoint of torch begins with a pickle, which is read with a "
            "list of what may be in it: give trust_pickle=True (--trust-pickle) if you know where "
            "it comes from"
        )
    if not path.exists():
        raise CheckpointError(f"{path}: expected weights to import, found nothing there")
    match source_format:
        case "hf":
            found = read_hugging_face(path)
        case "dcp":
            found = read_dcp(path, key)
        case _:
            found = read_torch_file(path, key)
    weights = _cast(found, dtype)
    tensors = {
        f"{PREFIX}/model/{name}": ReadTensor(
            shape=entry.shape,
            dtype=torch_dtype(entry.dtype),
            read=lambda name=name: weights.read(name),
        )
        for name, entry in weights.entries.items()
    }
    first = {**{name: name for name in weights.entries}, **weights.ties}
    model: dict[str, JSON] = {n: {"$tensor": f"{PREFIX}/model/{one}"} for n, one in first.items()}
    state: dict[str, JSON] = {"model": model}
    if weights.config is not None:
        state["extra"] = flatten({"config": dict(weights.config)}, PREFIX)[1]
    metadata = {"format": FORMAT, "version": VERSION, "ranks": group.size, "state": state}
    others = group if isinstance(group, Communicator) else None
    return save_tensors(folder, tensors, metadata, step=step, communicator=others)


def _format(
    to: str, config: Mapping[str, JSON] | str | os.PathLike[str] | None, shard_bytes: int
) -> Format:
    if config is not None and to != "hf":
        raise ValueError(f"config is for to='hf': a {to} export holds weights alone")
    match to:
        case "hf":
            given = config if config is None or isinstance(config, Mapping) else Path(config)
            return HuggingFaceFormat(shard_bytes=shard_bytes, config=given)
        case "dcp":
            return DcpFormat()
        case "torch":
            return TorchFormat()
    raise ValueError(f"to: expected one of {[*FORMATS]}, found {to!r}")


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointWriteError(
            f"{target} exists and is never overwritten: move it away, or choose another name"
        )


def _cast(weights: Weights, dtype: torch.dtype | None) -> Weights:
    """Cast floating-point weights to ``dtype`` when read; log values out of its range."""
    if dtype is None:
        return weights
    cast = {
        name: entry._replace(dtype=dtype_name(dtype))
        if torch_dtype(entry.dtype).is_floating_point
        else entry
        for name, entry in weights.entries.items()
    }

    def read(name: str) -> torch.Tensor:
        values = weights.read(name)
        if lost := _lost(values, dtype):
            _log.warning(
                "%r has %d values that %s cannot hold, infinite or others there: "
                "choose bfloat16 or float32 unless they stand for infinity, as in a mask",
                name,
                lost,
                cast[name].dtype,
            )
        return values.to(torch_dtype(cast[name].dtype))

    return replace(weights, entries=cast, read=read)


def _lost(values: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the finite values beyond the range of ``dtype``."""
    if not values.is_floating_point():
        return 0
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(values.dtype).max:
        return 0
    beyond = values.abs() > limit
    return int((beyond & values.isfinite()).sum()) if bool(beyond.any()) else 0
