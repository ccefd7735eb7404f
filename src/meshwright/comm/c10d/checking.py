"""Every call of a group compared with those of the other ranks: ``connect(check=True)``.

Calls are intercepted at the process group, whoever makes them: methods of c10d's groups and ours
are replaced for the duration of the run, and functional collectives pass a kernel of ours.

    collective   descriptions go through the store before data, see `EventCheck.exchange`
    message      each side stores its description and reads the other's, at once or while it waits
    at the end   messages that nobody has received are named

Compared are `Call.form`, labels where ranks give any, and the split sizes between each pair of
ranks. A group of one rank has nothing to compare.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.c10d.calls import CONTROL_TAGS, Call, call_of
from meshwright.comm.collectives import Communicator
from meshwright.comm.failures.events import EventCheck, GroupEvent
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.liveness import Answers, Need
from meshwright.comm.failures.sameness import told
from meshwright.comm.failures.status import line_of, object_of
from meshwright.comm.failures.waiting import Awaited, BoundedWait
from meshwright.comm.groups.python_group import PythonGroup
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.pending import TransferWaiter
from meshwright.comm.shared_memory.reductions import reduction_of
from meshwright.errors import CollectiveMismatchError
from meshwright.torch_internals.distributed import (
    FORMER_METHODS,
    Work,
    living_groups,
    watch_functional_operators,
)

REMEDY = "Nothing of it has been used. Make every rank call the same, in the same order"
LOOK_EVERY = 0.02
"""Seconds between two looks for the words of the other side of a message."""

_KINDS: Mapping[str, tuple[str, bool, bool]] = MappingProxyType(
    {
        "allreduce": ("all_reduce", True, False),
        "allreduce_coalesced": ("all_reduce", True, False),
        "broadcast": ("broadcast", False, True),
        "reduce": ("reduce", True, True),
        "allgather": ("all_gather", False, False),
        "all_gather_single": ("all_gather", False, False),
        "all_gather_single_coalesced": ("all_gather", False, False),
        "allgather_into_tensor_coalesced": ("all_gather", False, False),
        "reduce_scatter": ("reduce_scatter", True, False),
        "reduce_scatter_single": ("reduce_scatter", True, False),
        "reduce_scatter_single_coalesced": ("reduce_scatter", True, False),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", True, False),
        "gather": ("gather", False, True),
        "scatter": ("scatter", False, True),
        "alltoall": ("all_to_all", False, False),
        "all_to_all_single": ("all_to_all", False, False),
        "alltoall_base": ("all_to_all", False, False),
        "barrier": ("barrier", False, False),
    }
)
"""Methods of a group: the kind of the collective, and whether it has a reduction and a root."""
_MESSAGES = ("send", "recv", "recv_anysource")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One rank's description of its call."""

    call: Call
    gives: tuple[int, ...] = ()
    """Elements for each rank, where these may differ."""
    takes: tuple[int, ...] = ()
    """Elements that it expects of each."""
    tag: int = 0
    line: str = ""

    def to_json(self) -> str:
        call = self.call
        form = replace(call, reduction="").form
        return json.dumps(
            [form, call.reduction, call.label, self.gives, self.takes, self.tag, self.line]
        )


def _as_told(row: Sequence[Any]) -> str:
    """Format one rank's description for people."""
    form, reduction, label, gives, takes, tag, line = row
    kind, _, rest = form.partition(" ")
    parts = [kind, reduction, rest, f'"{label}"' if label else ""]
    parts += [f"giving {gives}" if gives else "", f"taking {takes}" if takes else ""]
    parts += [f"tag {tag}" if tag else "", f"at {line}"]
    return " ".join(filter(None, parts))


def differ(rows: Sequence[Sequence[Any]]) -> bool:
    """Check whether the calls described by ``rows`` do not match."""
    forms, reductions, labels = (list(column) for column in list(zip(*rows, strict=True))[:3])
    known = [{each for each in column if each} for column in (reductions, labels)]
    if len(set(forms)) > 1 or any(len(values) > 1 for values in known):
        return True
    gives, takes = [row[3] for row in rows], [row[4] for row in rows]
    return any(
        gives[a] and takes[b] and gives[a][b] != takes[b][a]
        for a in range(len(rows))
        for b in range(len(rows))
    )


# --------------------------------------------------------------------------- what is called


def words_of(method: str, given: Sequence[Any], ranks: Sequence[int]) -> Words:
    """Describe a call of ``method``, with arguments ``given``, on a group of ``ranks``."""
    kind, is_reduced, is_rooted = _KINDS[method]
    size = len(ranks)
    more: dict[str, Any] = {}
    if kind == "barrier":
        return Words(call=Call(kind=kind))
    count = 1 if kind in ("all_reduce", "reduce", "broadcast") else 2
    count = 4 if method in ("all_to_all_single", "alltoall_base") else count
    tensors = [_tensors(each) for each in given[:2]]
    options: Any = given[count] if len(given) > count else None
    if is_reduced:
        more["reduction"] = reduction_of(options)
    if is_rooted:
        more["root"] = ranks[getattr(options, "rootRank", options)]
    if count == 1:
        return Words(call=call_of(kind, tensors[0], **more))
    outputs, inputs = tensors[:2]
    if kind == "reduce_scatter":
        return Words(call=call_of(kind, inputs, **more))
    if kind == "scatter":
        return Words(call=call_of(kind, outputs, **more))
    if kind == "all_to_all":
        return _exchange(size, outputs, inputs, given[2:count])
    if method == "allgather" and len({output.numel() for output in outputs}) > 1:
        call = Call(kind=kind, shape=(), dtype=inputs[0].dtype, more="of unequal sizes")
        takes = tuple(output.numel() for output in outputs)
        return Words(call=call, gives=(inputs[0].numel(),) * size, takes=takes)
    return Words(call=call_of(kind, inputs, **more))


def _exchange(
    size: int,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
) -> Words:
    """Describe an all-to-all: of lists of tensors, or of rows of one tensor."""
    if not sizes:
        gives, takes = ([each.numel() for each in side] for side in (inputs, outputs))
        return Words(
            call=Call(kind="all_to_all", dtype=inputs[0].dtype, more="of lists"),
            gives=tuple(gives),
            takes=tuple(takes),
        )
    (whole,), (mine,) = outputs, inputs
    takes, gives = (
        tuple(listed) or (tensor.shape[0] // size,) * size
        for listed, tensor in zip(sizes, (whole, mine), strict=True)
    )
    rows = Call(kind="all_to_all", shape=tuple(mine.shape[1:]), dtype=mine.dtype, more="a row")
    return Words(call=rows, gives=tuple(gives), takes=tuple(takes))


def _tensors(given: Any) -> list[torch.Tensor]:  # noqa: ANN401 - arguments of any method
    """List the tensors of an argument, which may be one, a list, or a list of lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    if type(given) in (list, tuple):
        return [tensor for each in given for tensor in _tensors(each)]
    return []


# --------------------------------------------------------------------------- the comparison


class _ThreadNotes(threading.local):
    """The state of one thread: the label of its next call, and whether it is inside a call."""

    label = ""
    is_inside = False
    """True while a call is compared or made: what that calls itself is no call of the user's."""
    is_control = False
    """True where the next call moves control data."""

    def mark(self, label: str, *, is_control: bool) -> None:
        """Set the label of the next call, and whether that moves control data."""
        self.label, self.is_control = label, is_control

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Compare and make a call in the block; calls inside it are not the user's."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


class _Group:
    """The calls of one group so far, on this rank."""

    def __init__(self, axis: Communicator, monitor: FailureMonitor) -> None:
        self.axis = axis
        self.monitor = monitor
        self._lock = threading.Lock()
        self._number = 0
        self._events = EventCheck(axis, f"axis {axis.axis}", dict)
        self._messages: dict[str, Counter[str]] = {"send": Counter(), "recv": Counter()}
        """Messages that this rank has issued, by "source>target/tag"."""

    def compare(self, words: Words) -> None:
        """Compare the next collective with those of the other ranks."""
        with self._lock:
            number, self._number = self._number, self._number + 1
            event = GroupEvent("a call", shown=f"{words.call}, called at {words.line},")
            rows = [json.loads(row) for row in self._events.exchange(event, words.to_json())]
        if differ(rows):
            raise self.error(self.axis.ranks, rows, f"number {number}")

    def expect_from_any(self, count: int) -> None:
        """Note ``count`` more messages to be received from any sender."""
        self._messages["recv"][_ANY] += count

    def message(self, side: str, peer: int, words: Words) -> _MessageSides:
        """Store this side's description of the next message, and look for the other side's."""
        axis, messages = self.axis, self._messages[side]
        source, target = (axis.rank, peer) if side == "send" else (peer, axis.rank)
        # Transports of a device know no tags.
        is_by_tag = axis.waits_on_host or words.tag >= CONTROL_TAGS
        lane = f"{source}>{target}/{words.tag if is_by_tag else 'any tag'}"
        key = f"calls/{axis.name}/{lane}/{messages[lane]}"
        messages[lane] += 1
        meeting = _MessageSides(self, key, side, peer, words)
        meeting.look()
        return meeting

    def error(self, ranks: Sequence[int], rows: Sequence[Any], where: str) -> Exception:
        """Make the error for ``ranks`` whose calls differ; ``rows`` describe them, one for each."""
        found = told(ranks, map(_as_told, rows))
        return CollectiveMismatchError(
            f"the ranks call different things, at {where} of axis {self.axis.axis}: {found}. "
            f"{REMEDY}"
        )

    def finish(self) -> None:
        """Raise for a message that only one side has issued; the later of the two ranks sees it."""
        axis, board, mine = self.axis, self.monitor.board, self._messages
        key = f"calls/{axis.name}/messages"
        board.set(f"{key}/{axis.rank}", json.dumps(mine))
        for peer, number in enumerate(axis.ranks):
            theirs = object_of(board.get(f"{key}/{peer}"), {"send": dict, "recv": dict})
            if theirs is None or peer == axis.rank:
                continue
            for sent, received, pair in (
                (mine["send"], theirs["recv"], f"{axis.rank}>{peer}/"),
                (theirs["send"], mine["recv"], f"{peer}>{axis.rank}/"),
            ):
                for lane in {lane for lane in (*sent, *received) if lane.startswith(pair)}:
                    counts = sent.get(lane, 0), received.get(lane, 0)
                    if counts[0] != counts[1] and not received.get(_ANY):
                        raise CollectiveMismatchError(
                            f"axis {axis.axis}: of the messages {lane} (ranks of the axis, tag) "
                            f"between ranks {axis.ranks[axis.rank]} and {number} {counts[0]} were "
                            f"sent and {counts[1]} were to be received. {REMEDY}"
                        )


_ANY = "from any rank"
"""Counts receives from any source that nobody has waited for yet."""


class _MessageSides(Awaited):
    """Both sides of one message; a `BoundedWait` awaits the other side's description."""

    lacks = "has not called the other side of it"

    def __init__(self, group: _Group, key: str, side: str, peer: int, words: Words) -> None:
        self.group = group
        self.key = f"{key}/{'recv' if side == 'send' else 'send'}"
        self._said = words.to_json()
        self._own, self.ranks = group.axis.ranks[group.axis.rank], [group.axis.ranks[peer]]
        self.text = f"{words.call} {'to' if side == 'send' else 'from'} rank {self.ranks[0]}"
        self.is_met = False
        self.error: Exception | None = None
        group.monitor.board.set(f"{key}/{side}", self._said)

    def look(self) -> None:
        """Compare both sides once the other description has arrived. Raises if they differ."""
        board = self.group.monitor.board
        if not self.is_met and (text := board.get(self.key)):
            self.is_met = True
            board.delete_key(self.key)  # nobody else reads it
            rows = [json.loads(self._said), json.loads(text)]
            kinds = [row[0].partition(" ") for row in rows]
            # Labels of messages say what each side is about.
            plain = [[k[2], "", "", *row[3:]] for k, row in zip(kinds, rows, strict=True)]
            if differ(plain) or plain[0][5] != plain[1][5]:
                self.error = self.group.error([self._own, *self.ranks], rows, "a message")
        if self.error is not None:
            raise self.error

    def describe(self) -> str:
        return self.text

    def topic(self, answers: Answers) -> str:
        return self.key

    def need(self) -> Need:
        return Need(ranks=[] if self.is_met else self.ranks)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        return self.is_met


class CheckedMessage(Work):
    """The handle of a message whose other side is compared during the wait."""

    def __init__(self, work: Any, meeting: _MessageSides) -> None:  # noqa: ANN401 - c10d's or ours
        super().__init__()
        self._work = work
        self._meeting = meeting
        is_waited = meeting.group.axis.waits_on_host
        self._waiter = TransferWaiter(work, PROCESS.idle_waiters) if is_waited else None

    def is_completed(self) -> bool:
        if self._meeting.error is not None:
            return True
        return (self._waiter or self._work).is_completed()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended; raises if the other side made a different call."""
        seconds = timeout.total_seconds()
        if seconds > 0:
            self._wait(time.monotonic() + seconds, self._meeting.group.monitor.check)
            return True
        monitor = self._meeting.group.monitor
        with BoundedWait(monitor, self._meeting, monitor.limit) as watch:
            try:
                self._wait(float("inf"), watch.look)
            except RuntimeError as error:
                watch.explain(error)
        return True

    def _wait(self, until: float, look: Callable[[], object]) -> None:
        """Wait until it has ended, or RuntimeError at ``until``; calls ``look`` now and then."""
        while not self._is_over():
            self._meeting.look()
            look()
            if time.monotonic() >= until:
                raise RuntimeError(f"{self._meeting.text} has not ended yet")
        self._meeting.look()
        self._work.wait() if self._waiter is None else self._waiter.wait()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Return c10d's future of it, which does not know of the other side."""
        return self._work.get_future()

    def _is_over(self) -> bool:
        """Check whether it has ended; on a device, whether both sides have arrived."""
        if self._waiter is None:
            time.sleep(0 if self._meeting.is_met else LOOK_EVERY)
            return self._meeting.is_met
        try:
            self._waiter.wait(timedelta(seconds=LOOK_EVERY))
        except RuntimeError:  # of the time, or its own: that is raised by the wait that follows
            return self._waiter.is_completed()
        return True


class MessageFromAny(Work):
    """The handle of a receive from any source; it is compared once a message has arrived."""

    def __init__(self, work: Any, group: _Group, words: Words) -> None:  # noqa: ANN401 - as above
        super().__init__()
        self._work = work
        self._group = group
        self._words: Words | None = words
        self.is_completed = work.is_completed
        self.get_future = work.get_future
        group.expect_from_any(1)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended; raises if the message came from a different call."""
        self._work.wait(timeout)
        words, self._words = self._words, None
        if words is not None:
            self._group.expect_from_any(-1)
            self._group.message("recv", self._source_rank(), words)
        return True

    def _source_rank(self) -> int:  # torch's ``recv`` asks for it
        source: int = self._work._source_rank()
        return source

    def synchronize(self) -> None:
        self.wait()


class CallChecks:
    """The comparison of all calls of this process, from `install` to `release`."""

    def __init__(self, find: Callable[[Any], Communicator]) -> None:
        """``find`` returns the communicator of a group."""
        self._find = find
        self._thread = _ThreadNotes()
        self._is_labeled = True
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Replace the methods of groups: all calls are compared from now on."""
        for kind in (dist.ProcessGroup, *PythonGroup.__subclasses__()):
            for name in (*_KINDS, *_MESSAGES, *FORMER_METHODS):
                if name in vars(kind):
                    self._undo.append(partial(setattr, kind, name, vars(kind)[name]))
                    method = FORMER_METHODS.get(name, name)
                    setattr(kind, name, self._checked(method, getattr(kind, name)))
        self._undo.append(watch_functional_operators(self._seen))
        PROCESS.checks = self

    def release(self) -> None:
        """Restore the methods that were replaced; nothing is compared any more."""
        PROCESS.checks = None
        for undo in self._undo:
            undo()
        self._undo.clear()

    @contextmanager
    def labeled(self, label: str, *, is_control: bool) -> Iterator[None]:
        """Label this thread's operations in the block, and note whether they are control data."""
        self._thread.mark(label if self._is_labeled else "", is_control=is_control)
        try:
            yield
        finally:
            self._thread.mark("", is_control=False)

    def forgo_labels(self) -> None:
        """Stop comparing labels of this rank, which is known to differ from its peers."""
        self._is_labeled = False

    def finish(self) -> None:
        """Raise where a message was never received."""
        for group in list(self._groups.values()):
            group.finish()

    def _checked(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(group: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - c10d's
            go = partial(call, group, *args, **options)
            return self._seen(group, method, [*args, *options.values()], go)

        return checked

    def _seen(
        self,
        group: Any,  # noqa: ANN401 - c10d's
        method: str,
        given: Sequence[Any],
        go: Callable[[], Any],
    ) -> Any:  # noqa: ANN401
        """Compare a call, and make it."""
        thread = self._thread
        known = None if thread.is_inside else self._group(group)
        if known is None:
            return go()
        with thread.inside():
            label, line = thread.label, line_of(sys._getframe())
            more = "of control data" if thread.is_control else ""
            if method in _MESSAGES:
                return self._message(known, method, given, go, label, line)
            words = words_of(method, given, known.axis.ranks)
            more = " ".join(filter(None, (words.call.more, more)))
            call = replace(words.call, label=label, more=more)
            known.compare(replace(words, call=call, line=line))
            return go()

    def _message(
        self,
        group: _Group,
        method: str,
        given: Sequence[Any],
        go: Callable[[], Any],
        label: str,
        line: str,
    ) -> Any:  # noqa: ANN401
        tensors, *numbers = given
        peer, tag = (-1, numbers[0]) if method == "recv_anysource" else (*numbers, 0)[:2]
        call = call_of(method[:4], _tensors(tensors), label=label)
        words = Words(call=call, tag=tag, line=line)
        if peer < 0:
            return MessageFromAny(go(), group, words)
        meeting = group.message(method[:4], peer, words)
        work = go()
        return work if work is None else CheckedMessage(work, meeting)

    def _group(self, group: Any) -> _Group | None:  # noqa: ANN401 - c10d's
        """Return the state of ``group``; None for one that is not compared."""
        monitor = PROCESS.monitor
        if monitor is None or group not in living_groups():
            return None
        known = self._groups.get(group)
        if known is None:
            axis = self._find(group)
            if axis.size == 1:
                return None
            known = self._groups[group] = _Group(axis, monitor)
        return known
