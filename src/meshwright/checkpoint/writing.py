"""Saves a checkpoint completely or not at all, on all ranks.

::

    1 describe   the ranks exchange what they hold, and compute the writers
    2 prepare    rank 0 claims the folder, checks name and space, removes torsos, makes
                 .step_00000120.tmp-1f0c22d9
    3 write      every rank writes its file and syncs it
    4 commit     rank 0 writes the manifest, syncs it and the directory, renames, syncs the parent

After each step the ranks exchange outcomes. A failure on one rank is raised by all, naming the
rank, and rank 0 removes the torso. If a rank is killed, the next save removes the torso.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import zlib
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from meshwright import comm
from meshwright.checkpoint import claims
from meshwright.checkpoint.document import JSON, canonical, check_json
from meshwright.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Piece,
    TensorRecord,
    to_bytes,
)
from meshwright.checkpoint.pieces import (
    Held,
    NamedPiece,
    ReadTensor,
    ShardedPiece,
    assign,
    byte_views,
    describe,
    held_from_rows,
    held_to_rows,
    marked,
    parts,
    with_keys,
)
from meshwright.checkpoint.steps import prune, remove_torsos, step_directory, torso_directory
from meshwright.checkpoint.storage import Storage, advice, naming, reason
from meshwright.checkpoint.tensor_file import OURS, FileMap, algorithm, file_map, file_name
from meshwright.checkpoint.together import Alone, Group, attempt
from meshwright.comm import Communicator, settle
from meshwright.comm.failures.processes import place
from meshwright.comm.failures.sameness import first_difference
from meshwright.errors import (
    CheckpointClaimedError,
    CheckpointError,
    CheckpointWriteError,
)
from meshwright.layout import Box

_log = logging.getLogger(__name__)

_CHUNK = 2**20
_SMALL = 2**16
"""Bytes up to which tensors are collected and written in one call."""
_BLOCK = 4096
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaveRequest:
    """The arguments of a save on this rank."""

    target: Path
    torso: Path
    """Each rank chooses one; rank 0's is used."""
    tensors: Mapping[str, Tensor | ShardedPiece | ReadTensor]
    metadata: Mapping[str, JSON]
    step: int
    alike: Collection[str]
    keep_last: int | None
    group: Group
    storage: Storage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writes:
    """This rank's part of a save, and on rank 0 the manifest with checksums still zero."""

    own: Sequence[NamedPiece]
    at: FileMap
    draft: Manifest | None


def save_tensors(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | ShardedPiece | ReadTensor],
    metadata: Mapping[str, JSON],
    *,
    step: int,
    communicator: Communicator | None = None,
    keep_last: int | None = None,
    alike: Collection[str] = (),
    storage: Storage | None = None,
) -> Path:
    """Save ``tensors`` and ``metadata`` as ``directory/step_00000120`` and return that path.

    With a ``communicator`` every rank calls this with the same ``step``, ``metadata`` and shared
    ``directory``, and with its tensors: full tensors on any number of ranks, or ``ShardedPiece``;
    together they must cover each tensor exactly. Replicas of a box are written once; if they
    differ, the lowest rank's. A ``ReadTensor`` is read when it is written, by one of its ranks.
    State of a single rank needs its own name, such as ``"rng/3"``.

    ``keep_last``: the number of complete checkpoints to keep in ``directory``, this one included.
    ``alike``: the names of tensors that should be equal on all ranks that have the same box, such
    as parameters: a warning is logged for those that are not.

    Raises ``CheckpointWriteError`` (one line: rank, file, reason, advice) on all ranks when any of
    them fails, `CheckpointClaimedError` when another job saves to ``directory`` (see
    `claim`); earlier checkpoints are untouched. An existing checkpoint of the step is never
    overwritten. In one process wrong arguments raise ``TypeError`` or ``ValueError``.
    """
    target = step_directory(directory, step)
    request = SaveRequest(
        target=target,
        torso=torso_directory(target),
        tensors=tensors,
        metadata=metadata,
        step=step,
        alike=alike,
        keep_last=keep_last,
        group=communicator if communicator is not None else Alone(),
        storage=storage if storage is not None else Storage(),
    )
    return save_now(request)


def save_now(request: SaveRequest) -> Path:
    """Take all four steps; returns the checkpoint."""
    with ExitStack() as held, discarding(request):
        writes, torso, _ = prepare(request, held)
        write_together(request, writes, torso)
    return request.target


def claim(directory: str | os.PathLike[str], *, communicator: Communicator | None = None) -> None:
    """Claim the folder ``directory`` for this job before its first save, which would claim it too.

    Every rank of ``communicator`` must call this. One job at a time saves to a folder. The claim
    ends when the first rank leaves its run or its process ends, or with `release`; other jobs may
    read meanwhile.

    Raises ``CheckpointClaimedError`` on all ranks, naming the process that saves there, and
    ``CheckpointWriteError`` if nothing can be written.
    """
    group = communicator if communicator is not None else Alone()
    told: list[object] = []
    if group.rank == 0:
        try:
            Storage().make_directories(Path(directory))
            claims.hold(Path(directory), stays=True)
        except CheckpointClaimedError as error:
            told = [True, str(error)]
        except OSError as error:
            told = [False, f"{reason(error)}; {advice(error)}"]
    rows = group.gather_bytes(json.dumps(told).encode(), label=f"claim {directory}")
    if first := json.loads(rows[0]):
        raise _kind(first[0])(first[1])


# ------------------------------------------------------------------ the four steps


@contextmanager
def discarding(request: SaveRequest) -> Generator[None, None, None]:
    """Have rank 0 remove the torso when the block raises."""
    try:
        yield
    except BaseException:
        if request.group.rank == 0:
            discard(request)
        raise


def prepare(request: SaveRequest, held: ExitStack) -> tuple[Writes, Path, list[Any]]:
    """Take the first two steps; returns this rank's part, the torso, and the needs of all ranks.

    Rank 0 keeps the claim until ``held`` is closed.
    """
    settle()
    own, rows = agree(request, "describe", lambda: _describe(request))
    writes, answers = agree(request, "prepare", lambda: _prepare(request, own, rows, held))
    needs = [json.loads(row) for row in answers]
    return writes, request.target.with_name(needs[0]["torso"]), needs


def write_together(request: SaveRequest, writes: Writes, torso: Path) -> None:
    """Take the last two steps, all ranks together."""

    def write_own() -> tuple[None, JSON]:
        return None, {**write(request, writes, torso, tensors_of(request, writes))}

    _, rows = agree(request, "write", write_own)

    def finish() -> tuple[None, JSON]:
        if writes.draft is not None:
            checksums = dict(enumerate(map(json.loads, rows)))
            commit(request, writes.draft, checksums, torso)
        return None, None

    agree(request, "commit", finish)


def _describe(request: SaveRequest) -> tuple[list[Held], JSON]:
    keep_last = request.keep_last
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last must be an integer of at least 1 or None, found {keep_last!r}")
    metadata = dict(request.metadata)
    check_json(metadata, "metadata")
    held = [describe(name, value) for name, value in request.tensors.items()]
    if request.group.size > 1:
        held = [marked(*pair) for pair in zip(held, request.tensors.values(), strict=True)]
    return held, {
        "step": request.step,
        "metadata": zlib.crc32(canonical(metadata)),
        "held": held_to_rows(held) if request.group.size > 1 else [],
    }


def _prepare(
    request: SaveRequest, own: Sequence[Held], rows: Sequence[bytes], held: ExitStack
) -> tuple[Writes, JSON]:
    writes = _plan(request, own, rows)
    needs: dict[str, JSON] = {"host": place(), "bytes": writes.at.size if writes.own else 0}
    if writes.draft is None:
        return writes, needs
    storage, target = request.storage, request.target
    storage.make_directories(target.parent)
    held.enter_context(claims.hold(target.parent, stays=comm.is_connected()).saving())
    remove_torsos(target.parent, storage)
    if os.path.lexists(target):  # a link to nothing is in the way, too
        raise FileExistsError(
            errno.EEXIST, "a checkpoint of this step exists and is never overwritten", str(target)
        )
    free = storage.free_bytes(target.parent)
    maps = writes.draft.file_maps.values()
    # The manifest's entry of a piece is at most three times as long as its file's header entry.
    manifest = 3 * sum(len(at.header) for at in maps) + len(canonical(writes.draft.metadata))
    sizes = [*(at.size for at in maps), manifest]
    # Rounded up to blocks, with one for the directory.
    needed = sum(-(-size // _BLOCK) * _BLOCK for size in sizes) + _BLOCK
    if free < needed:
        text = f"needs {_size(needed)}, {_size(free)} free"
        raise OSError(errno.ENOSPC, text, str(target.parent))
    storage.make_directory(request.torso)
    return writes, {"torso": request.torso.name, **needs}


def _plan(request: SaveRequest, own: Sequence[Held], rows: Sequence[bytes]) -> Writes:
    """Assign pieces to ranks. Rank 0 checks the full manifest; the others plan their own file.

    Raises ``ValueError`` unless the ranks agree and cover every tensor.
    """
    told = [json.loads(row) for row in rows]
    for key, remedy in (
        ("step", "call save on all ranks at the same step"),
        ("metadata", "pass the same on all ranks, with what is per rank under one key for each"),
    ):
        said = [{key: each[key]} for each in told]
        if (found := first_difference(range(len(said)), said)) is not None:
            raise ValueError(f"{found}; {remedy}")
    rank = request.group.rank
    known, chosen, parted = assign(
        own if number == rank else held_from_rows(each["held"]) for number, each in enumerate(told)
    )
    if lost := [name for name in parted[rank] if name in request.alike]:
        _log.warning(
            "%s gets the values that rank %d has of %r, and %d more: other ranks have others. "
            "Modules that are another part of the model on each rank need names of the whole model "
            "(as meshwright.pipelining gives stages); the same module needs a wrapper, such as "
            "meshwright.replicate, that keeps it the same",
            request.target,
            rank,
            lost[0],
            len(lost) - 1,
        )
    mine = with_keys(rank, chosen[rank], known)
    draft = None
    if rank == 0:
        others = (with_keys(other, chosen[other], known) for other in range(1, len(chosen)))
        pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for name, piece in itertools.chain(mine, *others):
            pieces[name].append(piece)
        tensors = {
            name: TensorRecord(row.dtype, row.shape, tuple(pieces[name]))
            for name, row in known.items()
        }
        draft = Manifest(step=request.step, tensors=tensors, metadata=dict(request.metadata))
    if draft is not None and mine:
        at = draft.file_maps[file_name(rank)]
    else:
        entries = ((piece.key, known[name].dtype, piece.box.shape) for name, piece in mine)
        at = file_map(file_name(rank), request.step, entries)
    return Writes(own=mine, at=at, draft=draft)


def tensors_of(request: SaveRequest, writes: Writes) -> Iterator[Tensor]:
    """Yield the tensors of this rank's file, in its order."""
    boxes = {piece.key: (name, piece.box) for name, piece in writes.own}
    cut = dict[str, Mapping[Box, Tensor]]()
    for key in writes.at.spans if writes.own else ():
        name, box = boxes[key]
        value = request.tensors[name]
        if isinstance(value, ShardedPiece):
            if name not in cut:
                cut[name] = dict(parts(value))
            yield cut[name][box]
        else:
            yield value.checked() if isinstance(value, ReadTensor) else value


def write(
    request: SaveRequest, writes: Writes, torso: Path, tensors: Iterable[Tensor]
) -> dict[str, int]:
    """Write ``tensors`` as this rank's file, if it has one; returns the checksum of each key."""
    if not writes.own:
        return {}
    path = torso / file_name(request.group.rank)
    checksums = write_file(request.storage, path, writes.at.header, byte_views(tensors))
    return dict(zip(writes.at.spans, checksums, strict=True))


def report_name(rank: int) -> str:
    """The file in which a rank that writes in the background says that its file is written."""
    return f"rank_{rank:05d}.json"


def write_file(
    storage: Storage, path: Path, header: bytes, views: Iterable[memoryview]
) -> list[int]:
    """Write and sync a new file, view by view. Returns their checksums."""
    checksums: list[int] = []
    begin = algorithm(OURS)
    with naming(path):
        handle = storage.create(path)
        try:
            small = bytearray(header)
            for view in views:
                if len(view) <= _SMALL:
                    checksums.append(begin(view).intdigest())
                    small += view
                if len(small) >= _CHUNK or len(view) > _SMALL:
                    storage.write(handle, memoryview(small))
                    small = bytearray()
                if len(view) > _SMALL:
                    checksum = begin(b"")
                    for start in range(0, len(view), _CHUNK):
                        chunk = view[start : start + _CHUNK]
                        checksum.update(chunk)
                        storage.write(handle, chunk)
                    checksums.append(checksum.intdigest())
            storage.write(handle, memoryview(small))
            storage.sync(handle)
        finally:
            storage.close(handle)
    return checksums


def commit(
    request: SaveRequest, draft: Manifest, checksums: Mapping[int, Mapping[str, int]], torso: Path
) -> None:
    """On rank 0 make the torso a checkpoint, and remove older ones that are not to be kept.

    ``checksums`` are those of each rank's file, by key.
    """
    storage, target = request.storage, request.target
    found = {file_name(rank): row for rank, row in checksums.items()}
    data = to_bytes(draft, lambda piece: found[piece.file][piece.key])
    write_file(storage, torso / MANIFEST_NAME, data, [])
    with naming(torso):
        storage.sync_directory(torso)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "appeared during the save", str(target))
    # The commit: all bytes and names in the folder are on the disk, and no reader has seen it.
    storage.rename(torso, target)
    try:
        storage.sync_directory(target.parent)
    except OSError as error:
        text = f"{error.strerror}: complete, but its name may not survive a loss of power"
        raise OSError(error.errno, text, str(target)) from error
    if request.keep_last is not None:
        try:
            prune(target, request.keep_last, storage)
        except (OSError, CheckpointError) as error:
            _log.warning("checkpoints older than %s could not be removed: %s", target, error)


def discard(request: SaveRequest) -> None:
    """Remove the torso by its possible file names, which needs no file descriptor."""
    if not os.path.lexists(request.torso):
        return  # a read-only file system would raise even for missing files
    ranks = range(request.group.size)
    names = [name(rank) for rank in ranks for name in (file_name, report_name)]
    try:
        for name in [*names, MANIFEST_NAME]:
            with suppress(FileNotFoundError, NotADirectoryError):
                request.storage.remove_file(request.torso / name)
        with suppress(FileNotFoundError, NotADirectoryError):
            request.storage.remove_directory(request.torso)
    except OSError as error:
        _log.warning(
            "%s could not be removed (%s); it is never read, and the next save removes it",
            request.torso,
            error.strerror,
        )


# ------------------------------------------------------------------ failing together


def agree(
    request: SaveRequest, phase: str, action: Callable[[], tuple[_T, JSON]]
) -> tuple[_T, list[bytes]]:
    """Run one step on every rank; returns its own result and those of all, or raises on all."""
    label, step = f"checkpoint step {request.step}: {phase}", request.step
    outcome, failed = attempt(request.group, phase, action, label=label, step=step)
    failure = outcome if isinstance(outcome, Exception) else None
    if request.group.size == 1 and isinstance(failure, ValueError | TypeError):
        raise failure
    if failed or isinstance(outcome, Exception):
        claimed = any(row["claimed"] for row in failed.values())
        raise _kind(claimed)(_summary(request, phase, failed)) from failure
    return outcome


def _kind(claimed: bool) -> type[CheckpointWriteError]:
    return CheckpointClaimedError if claimed else CheckpointWriteError


def _summary(request: SaveRequest, phase: str, failed: Mapping[int, Mapping[str, Any]]) -> str:
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, row in failed.items():
        ranks[str(row["error"])].append(rank)
    reasons = [
        text if request.group.size == 1 else f"rank {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    ]
    remedy = str(next(iter(failed.values()))["advice"])
    return (
        f"checkpoint {request.target} was not saved ({phase}): {'; '.join(reasons)};"
        f" earlier checkpoints are untouched; {remedy}"
    )


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
