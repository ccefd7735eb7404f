"""One `Communicator` for each process group; every collective goes through its `_issue`.

A collective carries an axis and a label that says why it is made ("unshard layers.3"). It returns a
`Pending`; callers that need the value wait. Tensors are contiguous and on the communicator's
device.
"""

from __future__ import annotations

import copy
import json
import struct
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Self

import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.comm.c10d import gloo, lookup, shares
from meshwright.comm.c10d.calls import CONTROL_TAGS, overwrite
from meshwright.comm.c10d.lookup import Transfer
from meshwright.comm.c10d.shares import works_of
from meshwright.comm.failures.liveness import CONTROL
from meshwright.comm.failures.waiting import REMEMBERED, Issued
from meshwright.comm.groups.python_group import PythonGroup
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.observing import shown
from meshwright.comm.observing.shown import in_ranges
from meshwright.comm.pending import Launched, Pending, TransferWaiter, Work
from meshwright.comm.streams import Clock, is_host
from meshwright.errors import CommunicationError
from meshwright.timeline import Collective
from meshwright.torch_internals.autograd import is_profiled
from meshwright.torch_internals.distributed import (
    can_abort,
    coalesced,
    device_types_of,
    living_groups,
)
from meshwright.torch_internals.tensors import dispatch_depth, without_dispatch


class Communicator:
    """Collectives over one process group, which is one axis of the layout.

    Get it from `meshwright.comm.communicator`. Each group has one, so its sequence numbers count
    all operations of the group. Ranks in arguments are ranks of this group. It does not keep the
    group alive: after the group is destroyed, every operation raises `CommunicationError`.
    """

    _is_labeled = False
    """True where the group's backend is told labels, for errors, or to compare them."""
    _is_functional = False
    """True while `functional` is entered."""
    _first_tag = 0
    """`CONTROL_TAGS` for a control channel."""

    is_rehearsed = False
    """True where the other ranks are missing, and with them what they send."""

    def __init__(
        self, group: dist.ProcessGroup, axis: str, device: torch.device, timeout: float | None
    ) -> None:
        self._group: Callable[[], dist.ProcessGroup | None] = weakref.ref(group)
        self._living: Container[Any] = living_groups()
        """c10d's groups that were not destroyed."""
        self.axis = axis
        self.device = device
        self.is_on_host = is_host(device)
        self.is_followed = can_abort(group, device)
        """True where a device may hang in an operation that the host does not wait for."""
        self.timeout = timeout
        """Seconds after which a wait gives up in any case; None where the user set no limit."""
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.is_alone = self.size == 1 and not PROCESS.one_as_many
        """True where nothing has to be sent or compared, as there is no other rank."""
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        """The world's number of each rank of this group."""
        self.backend: str = lookup.backend_for(group, device)
        self.is_rehearsed = self.backend == "fake"
        self.waits_on_host = self.is_on_host or self.backend == "gloo"
        """True where waits are the host's, and not those of a stream of the device."""
        self.name: str = group.group_name
        """The name by which c10d and traced graphs know the group."""
        self.clock = Clock(device)
        self._is_labeled = isinstance(group, PythonGroup)
        self._begin()

    def _begin(self) -> None:
        """Reset the counts and all values cached for axes and models."""
        self.issued: deque[Issued] = deque(maxlen=REMEMBERED)
        self.counts: dict[str, int] = {}
        """Operations issued so far: collectives under "", transfers under "send:2", "recv:0"."""
        self.unsummed: dict[int, list[Any]] = {}
        """Partial gradients of the backward passes that are under way; see `local_leaves`."""
        self.unions: dict[tuple[Communicator, ...], Communicator] = {}
        """Communicators of all ranks along this axis and others, by the others."""
        self.kept: dict[str, Any] = {}
        """Objects that other rooms keep for this axis, by name."""
        self._control: list[Communicator] = []

    @property
    def control(self) -> Communicator:
        """The same ranks on the host, for data that is no tensor of the model.

        It counts its own operations. A group of a device uses its own CPU backend for them, or a
        Gloo group that all its ranks make at the first use.
        """
        if self._first_tag:
            return self
        if not self._control:
            self._control.append(self._control_channel())
        found = self._control[0]
        return found if found.axis == self.axis else found.along(self.axis)

    @property
    def channels(self) -> tuple[Communicator, ...]:
        """This communicator and its control channel, if it was used; each has its own counts."""
        return (self, *self._control)

    def _control_channel(self) -> Communicator:
        host = copy.copy(self)
        host.device, host.is_followed = torch.device("cpu"), False
        host.is_on_host = host.waits_on_host = True
        host.clock = Clock(host.device)
        host.name += CONTROL
        host._first_tag = CONTROL_TAGS
        host._begin()
        group = self._group()
        if not isinstance(group, dist.ProcessGroup):
            return host  # of ranks that are no processes
        if host.device.type not in {device.type for device in device_types_of(group)}:
            made: Any = lookup.host_group(self.ranks)
            # c10d's table of groups keeps it alive.
            host._group, group = weakref.ref(made), made
        host.backend = lookup.backend_for(group, host.device)
        return host

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises `CommunicationError` when it was destroyed."""
        group = self._group()
        if group is None or group not in self._living:
            raise CommunicationError(
                f"axis {self.axis} communicates over process group {self.name!r} of ranks "
                f"{list(self.ranks)}, which this rank has destroyed: destroy a group after the "
                "last use of what was built on it, and build that anew on a new group"
            )
        return group

    @property
    def is_open(self) -> bool:
        """True until the group is destroyed."""
        return self._group() in self._living

    def along(self, axis: str) -> Self:
        """Copy it under the name ``axis``; copies share operation counts and cached values."""
        named = copy.copy(self)
        named.axis = axis
        return named

    def __eq__(self, other: object) -> bool:
        """Equal if both are the same rank of the same group, under any axis name."""
        if not isinstance(other, Communicator):
            return NotImplemented
        return (self.name, self.rank) == (other.name, other.rank)

    def __hash__(self) -> int:
        return hash((self.name, self.rank))

    def __repr__(self) -> str:
        return f"Communicator({self.axis!r}, rank {self.rank} of {self.size}, on {self.backend!r})"

    def __deepcopy__(self, memo: object) -> Communicator:
        # State that torch copies to save it in the background holds views, and they their ranks.
        return self

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        reduction: str = "sum",
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Reduce ``tensor``, dense or sparse, over all ranks, in place."""
        lookup.reduction(reduction)
        self._check(tensor)
        launch = partial(shares.all_reduce, tensor, reduction=reduction, async_op=async_op)
        return self._issue("all_reduce", tensor, label, launch, reduction=reduction)

    def all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Gather every rank's ``tensor`` into ``output``, rank-major.

        ``output`` has ``size`` times the elements of ``tensor``, which may be this rank's own part
        of it: then nothing is copied.
        """
        self._check(output, tensor, "all_gather")
        launch = partial(shares.all_gather, self, output, tensor, async_op=async_op)
        return self._issue("all_gather", output, label, launch)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, label: str = ""
    ) -> Pending:
        """Gather into each of ``outputs`` as `all_gather` does, all in one launch."""
        if len(outputs) == 1:
            return self.all_gather(outputs[0], tensors[0], label=label)
        pairs = list(zip(outputs, tensors, strict=True))
        for output, tensor in pairs:
            self._check(output, tensor, "all_gather")
        return self._issue_together("all_gather", pairs, label, shares.all_gather)

    def all_gather_list(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Gather as `all_gather`, through c10d's call that fills a list of tensors.

        For control data. Tools that count gathers of parameters replace the other call, or use a
        dispatch mode, which does not see this one.
        """
        self._check(output, tensor, "all_gather")
        rows = list(output.view(self.size, *tensor.shape).unbind(0))

        def launch(group: dist.ProcessGroup) -> Launched:
            call = lookup.current("all_gather_list")
            return works_of(call(rows, tensor, group=group, async_op=async_op)), None

        with without_dispatch():
            return self._issue("all_gather", output, label, launch)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        reduction: str = "sum",
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Reduce ``tensor`` over all ranks and keep this rank's share in ``output``.

        ``tensor`` holds ``size`` equal shares, rank-major, and is left as it was.
        """
        lookup.reduction(reduction)
        self._check(tensor, output, "reduce_scatter")
        options = {"reduction": reduction, "async_op": async_op}
        launch = partial(shares.reduce_scatter, self, output, tensor, **options)
        return self._issue(
            "reduce_scatter", tensor, label, launch, reduction=reduction, value=output
        )

    def reduce_scatter_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, label: str = ""
    ) -> Pending:
        """Sum each of ``tensors`` as `reduce_scatter` does, all in one launch."""
        if len(outputs) == 1:
            return self.reduce_scatter(outputs[0], tensors[0], label=label)
        pairs = list(zip(outputs, tensors, strict=True))
        for output, tensor in pairs:
            self._check(tensor, output, "reduce_scatter")
        return self._issue_together("reduce_scatter", pairs, label, shares.reduce_scatter)

    def custom(
        self,
        kind: str,
        call: Callable[..., Any],
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        label: str = "",
    ) -> Pending:
        """Run an ``all_gather`` or ``reduce_scatter`` by the user's ``call`` instead of c10d's.

        ``call`` gets ``output_tensor``, ``input_tensor`` and ``group``; a gather also gets
        ``async_op=True`` and may return a work to wait for; a reduce-scatter gets ``op``, a sum.
        """
        self._check(output, tensor)
        gathers = kind == "all_gather"
        options = {"async_op": True} if gathers else {"op": dist.ReduceOp.SUM}

        def launch(group: dist.ProcessGroup) -> Launched:
            line, mine = output.view(-1), tensor.view(-1)
            work = call(output_tensor=line, input_tensor=mine, group=group, **options)
            return works_of(work), None

        if gathers:
            return self._issue(kind, output, label, launch, is_ours=False)
        return self._issue(
            kind, tensor, label, launch, reduction="sum", value=output, is_ours=False
        )

    def broadcast(
        self, tensor: torch.Tensor, *, source: int = 0, label: str = "", async_op: bool = True
    ) -> Pending:
        """Give every rank the ``tensor`` of rank ``source``, in place."""
        self._check(tensor)
        root = self._global(source)

        def launch(group: dist.ProcessGroup) -> Launched:
            call = lookup.current("broadcast")
            moved = tensor if tensor.dtype in gloo.MOVED else gloo.as_bytes(tensor)
            return works_of(call(moved, src=root, group=group, async_op=async_op)), None

        return self._issue("broadcast", tensor, label, launch, peer=source)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Send part ``i`` of ``tensor`` to rank ``i``; ``output`` receives the parts, rank-major.

        The splits count rows of dim 0; equal parts when they are None.
        """
        self._check(output, tensor)

        def launch(group: dist.ProcessGroup) -> Launched:
            work = lookup.current("all_to_all")(
                output,
                tensor,
                output_split_sizes=None if output_splits is None else list(output_splits),
                input_split_sizes=None if input_splits is None else list(input_splits),
                group=group,
                async_op=async_op,
            )
            return works_of(work), None

        return self._issue("all_to_all", tensor, label, launch, value=output)

    def barrier(self, *, label: str = "", async_op: bool = False) -> Pending:
        """Wait until every rank has called this; with ``async_op`` return before that.

        It uses the control channel, and does not wait for work on devices.
        """
        if not self.is_on_host:
            return self.control.barrier(label=label, async_op=async_op)
        token = torch.zeros(1, device=self.device)

        def launch(group: dist.ProcessGroup) -> Launched:
            if not self._first_tag:
                return works_of(lookup.current("barrier")(group=group, async_op=True)), None
            # c10d's barrier takes the device that the group is bound to. A sum goes where its
            # tensor lies.
            return works_of(lookup.current("all_reduce")(token, group=group, async_op=True)), None

        pending = self._issue("barrier", token, label, launch)
        if not async_op:
            pending.wait()
        return pending

    # ------------------------------------------------------------------ point to point

    def send(self, tensor: torch.Tensor, peer: int, *, tag: int = 0, label: str = "") -> Pending:
        """Send ``tensor`` to rank ``peer``. It must not change before the wait has returned.

        Transports of a device ignore tags: the k-th send to a rank matches its k-th receive.
        """
        return self._transfer(
            Transfer(direction="send", tensor=tensor, peer=peer, tag=tag, label=label)
        )

    def recv(self, tensor: torch.Tensor, peer: int, *, tag: int = 0, label: str = "") -> Pending:
        """Receive into ``tensor`` from rank ``peer``; its shape and dtype are the sender's."""
        return self._transfer(
            Transfer(direction="recv", tensor=tensor, peer=peer, tag=tag, label=label)
        )

    def batch(self, transfers: Sequence[Transfer]) -> list[Pending]:
        """Issue several transfers as one, so that no order among them can block the ranks."""
        if self.waits_on_host or len(transfers) == 1:
            return list(map(self._transfer, transfers))
        with coalesced(self.group, self.device) as works:
            return [self._transfer(transfer, works) for transfer in transfers]

    def _transfer(self, transfer: Transfer, batched: Sequence[Work] | None = None) -> Pending:
        """Issue one transfer; a device's batch puts its one work into ``batched`` at its end."""
        self._check(transfer.tensor)
        peer = self._global(transfer.peer)
        sent = transfer
        if self._first_tag:
            sent = replace(sent, tag=self._first_tag + transfer.tag)
        if transfer.tensor.dtype not in gloo.MOVED:
            sent = replace(sent, tensor=gloo.as_bytes(transfer.tensor))

        def launch(group: dist.ProcessGroup) -> Launched:
            moved, finish = (sent, None) if self.is_on_host else gloo.staged(sent, self)
            work = lookup.transfer(moved, peer, group)
            if batched is not None:
                return batched, None
            if self.backend == "gloo" or (PROCESS.checks is not None and self.is_on_host):
                return [TransferWaiter(work, PROCESS.idle_waiters)], finish
            return [work], None

        return self._issue(
            transfer.direction, transfer.tensor, transfer.label, launch, peer=transfer.peer
        )

    # ------------------------------------------------------------------ control and memory

    def gather_bytes(self, payload: bytes, *, label: str) -> list[bytes]:
        """List every rank's ``payload``, in rank order: for small control data."""
        lengths = self.gather_numbers([len(payload)], label=f"{label}: sizes")
        counts = [int(count) for (count,) in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * self.size
        everyones = self.start_equal(payload + bytes(longest - len(payload)), label)()
        places = range(0, len(everyones), longest)
        return [everyones[at : at + n] for at, n in zip(places, counts, strict=True)]

    def gather_values(self, value: object, *, label: str) -> list[Any]:
        """List every rank's ``value``, in rank order, after a round trip through JSON."""
        return list(map(json.loads, self.gather_bytes(json.dumps(value).encode(), label=label)))

    def gather_numbers(self, numbers: Sequence[float], *, label: str) -> list[tuple[float, ...]]:
        """List every rank's ``numbers`` (the same count on each), in rank order, in float64."""
        return self.start_numbers(numbers, label=label)()

    def start_numbers(
        self, numbers: Sequence[float], *, label: str
    ) -> Callable[[], list[tuple[float, ...]]]:
        """Start `gather_numbers`. Returns a function that waits and lists all ranks' numbers."""
        form = f"<{len(numbers)}d"
        started = self.start_equal(struct.pack(form, *numbers), label)
        return lambda: list(struct.iter_unpack(form, started()))

    def start_equal(self, payload: bytes, label: str) -> Callable[[], bytes]:
        """Start to gather ``payload``, equally long on each rank, over the control channel.

        Returns a function that waits and joins all payloads, in rank order.
        """
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = torch.frombuffer(bytearray(self.size * len(payload)), dtype=torch.uint8)
        pending = self.control.all_gather_list(everyone, mine, label=label)

        def read() -> bytes:
            pending.wait()
            return everyone.numpy().tobytes()

        return read

    def empty_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialized 1-D tensor in the memory that this backend moves fastest."""
        if self.is_on_host:
            return shared_memory.allocate(self.group, numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    @contextmanager
    def functional(self) -> Iterator[None]:
        """Show torch's ``CommDebugMode`` functional collectives, not c10d's, in the block."""
        self._is_functional = True
        try:
            yield
        finally:
            self._is_functional = False

    def forgo_labels(self) -> None:
        """Stop sending labels to the peers: this rank's operations may differ from theirs.

        They are still compared by kind, shape, dtype, reduction and root.
        """
        if PROCESS.checks is not None:
            PROCESS.checks.forgo_labels()
        if self._is_labeled:
            self.group.forgo_labels()  # pyrefly: ignore[missing-attribute]

    # ------------------------------------------------------------------ the door

    def _issue_together(
        self, kind: str, pairs: Sequence[shares.Pair], label: str, start: Callable[..., Launched]
    ) -> Pending:
        """Issue the operation that ``start`` begins for each of ``pairs`` as one operation."""
        calls = [partial(start, self, *pair) for pair in pairs]
        text = f"{label} on axis {self.axis}" if self._is_labeled and label else ""
        launch = partial(shares.together, self, calls, text)
        if kind == "all_gather":
            first, *more = [output for output, _ in pairs]
            return self._issue(kind, first, label, launch, more=more)
        first, *more = [tensor for _, tensor in pairs]
        return self._issue(kind, first, label, launch, reduction="sum", more=more)

    def _issue(
        self,
        kind: str,
        tensor: torch.Tensor,
        label: str,
        launch: Callable[[Any], Launched],
        *,
        reduction: str | None = None,
        peer: int | None = None,
        value: torch.Tensor | None = None,
        is_ours: bool = True,
        more: Sequence[torch.Tensor] = (),
    ) -> Pending:
        """Number the operation, notify the observers, and run it by c10d or by a user's call.

        ``more`` are further tensors that the same launch moves.
        """
        if PROCESS.stopped is not None:
            PROCESS.refuse()
        group: Any = self._group()
        if group not in self._living:
            group = self.group  # raises; where it does not, the property would cost a call more
        PROCESS.issuers.add(get_ident())
        # A transfer concerns two ranks only: numbered with the collectives it would shift theirs.
        key = "" if peer is None or kind == "broadcast" else f"{kind}:{peer}"
        self.counts[key] = 1 + (sequence := self.counts.get(key, 0))
        self.issued.append(issued := Issued(sequence, kind, label, peer))
        value = tensor if value is None else value
        if value.grad_fn is not None and not self._is_labeled:  # or the group does so
            overwrite(kind, (value,))
        pending = Pending(self, issued, value)
        if PROCESS.observers:
            shape, dtype = shares.amount_of(tensor, more)
            collective = Collective(
                kind=kind,
                axis=self.axis,
                shape=shape,
                dtype=dtype,
                reduction=reduction,
                peer=peer,
                label=label,
                sequence=issued.sequence,
            )
            PROCESS.tell("issued", collective)
            pending.observed = collective, self.clock.mark()
        if is_ours and dispatch_depth() and shown.is_counted(kind, tensor):
            launch = shown.in_place_of(kind, launch, functional=self._is_functional)
        if self.is_followed and PROCESS.watcher is not None:
            launch = pending.followed(launch)
        if is_profiled():
            launch = in_ranges(launch, f"meshwright::{kind} {label} on axis {self.axis}")
        text = f"{label} on axis {self.axis}" if label else ""
        try:
            if PROCESS.checks is not None:
                with PROCESS.checks.labeled(text, is_control=self._first_tag > 0):
                    pending.works, pending.finish = launch(group)
                return pending
            if self._is_labeled:
                group.label_next(text)
            pending.works, pending.finish = launch(group)
        except RuntimeError as error:
            pending.explain_call(error)
            raise
        finally:
            if self._is_labeled:  # a call that raised before it took the label must not leave it
                group.label_next("")
        return pending

    def number(self, what: str) -> int:
        """Return how many calls with ``what`` came before; equal on ranks with the same calls."""
        key = f"numbered {what}"
        self.counts[key] = 1 + (number := self.counts.get(key, 0))
        return number

    def _global(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on axis {self.axis}: expected 0..{self.size - 1}")
        return self.ranks[rank]

    def _check(
        self, whole: torch.Tensor, share: torch.Tensor | None = None, kind: str = ""
    ) -> None:
        """Refuse what cannot be sent; in a ``kind`` that shares, shares of another size."""
        for tensor in (whole,) if share is None else (whole, share):
            is_plain = type(tensor) is torch.Tensor or not hasattr(tensor, "device_mesh")
            if not is_plain or tensor.device != self.device:
                raise ValueError(shares.refusal(self, tensor))
            if not tensor.is_sparse and not tensor.is_contiguous():
                raise ValueError(shares.refusal(self, tensor))
        if share is None or not kind:
            return
        if whole.numel() != share.numel() * self.size or whole.dtype != share.dtype:
            raise ValueError(
                f"{kind} on axis {self.axis} (size {self.size}): expected {self.size} x "
                f"{share.numel()} elements of {share.dtype}, found {whole.numel()} of {whole.dtype}"
            )
