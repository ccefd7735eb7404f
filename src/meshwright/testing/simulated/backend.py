"""The c10d backend ``simulated``: host tensors through Gloo, device tensors in order of calls.

A group has two halves, like a group of the backends ``cpu:gloo,cuda:nccl``. The memory of a tensor
decides which half moves it.

The device's half matches operations by order alone, as NCCL does. Each communicator has one queue,
whose thread runs operations in the order of the calls. So a receive without a send blocks
everything behind it, and a send ends when its receiver has reached it. The k-th send to a rank
matches that rank's k-th receive from here, whatever their tags. If tags, or the numbers at the end
of labels, show that the two do not belong together, that is a fault. The transfers of one batch are
posted together. Bytes move through Gloo, in separate groups.
"""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright import comm
from meshwright.comm import check_peers
from meshwright.comm.groups.python_group import CpuTransport, GroupOptions, PythonGroup
from meshwright.errors import RankFailedError
from meshwright.testing.pool import SIMULATED as BACKEND
from meshwright.testing.simulated.device import DEVICE, SimulatedDevice, SimulationError
from meshwright.testing.simulated.memory import Fault, caller
from meshwright.testing.simulated.operators import tensors_in
from meshwright.testing.simulated.seen import simulated
from meshwright.testing.simulated.streams import WorkLine
from meshwright.torch_internals.distributed import (
    Work,
    default_group,
    known_backends,
    living_groups,
)
from meshwright.torch_internals.simulation import BackendBase, without_modes
from meshwright.torch_internals.tensors import storage_id

Gloo = Any
"""c10d's Gloo class; type stubs lack some of its methods."""
LATEST = 0.001
"""Largest random delay of an operation, in seconds."""
HEADER = 512
"""Bytes of the header of a transfer."""
PATIENCE = 20.0
"""Seconds after which a blocked queue is reported as a deadlock."""


@dataclass(frozen=True, slots=True)
class TransferSide:
    """One side of a transfer; ``peer`` is a rank of the group."""

    is_send: bool
    tensor: torch.Tensor
    peer: int
    tag: int = 0
    label: str = ""
    where: str = ""
    """File and line of the caller."""

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"{'send to' if self.is_send else 'recv from'} rank {self.peer}{label}"

    def written(self) -> torch.Tensor:
        """Return the header of a send, by which the receiver can identify it."""
        number = re.search(r"(\d+)( on axis .*)?$", self.label)
        told = {
            "tag": self.tag,
            "number": number and int(number[1]),
            "bytes": self.tensor.nbytes,
            "text": f"{self} at {self.where}"[:200],
        }
        data = json.dumps(told).encode()[:HEADER].ljust(HEADER)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def difference(self, header: torch.Tensor) -> str:
        """Tell how this receive differs from the send with ``header``; "" if they match."""
        ours, theirs = (json.loads(bytes(h.tolist())) for h in (self.written(), header))
        for key in ("tag", "number", "bytes"):
            if ours[key] != theirs[key] and None not in (ours[key], theirs[key]):
                return (
                    f"{ours['text']} is matched with {theirs['text']}, whose {key} is "
                    f"{theirs[key]} and not {ours[key]}: transfers match by order alone"
                )
        return ""


@dataclass(slots=True, eq=False)
class Job:
    """An operation in a queue: a collective, or the transfers of one batch."""

    text: str
    run: Callable[[Gloo], None]
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run_on(self, gloo: Gloo) -> None:
        """Run it; keeps its exception for whoever waits for it."""
        try:
            self.run(gloo)
        except BaseException as error:
            self.error = error


class OrderedQueue:
    """The operations of one communicator on this rank, and the thread that runs them."""

    def __init__(self, gloo: Gloo, name: str, report: Callable[[Fault], None]) -> None:
        """``report`` receives faults."""
        self._gloo = gloo
        self._report = report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._counts: Counter[tuple[bool, int]] = Counter()
        self._random = random.Random(name)
        self._open: list[Job] = []
        self._thread = threading.Thread(target=self._work_off, name=f"device {name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._open.append(job)
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after everything queued."""
        self._jobs.put(None)

    def describe(self) -> str:
        return ", then ".join(job.text for job in list(self._open))

    def transfers(self, messages: Sequence[TransferSide]) -> Callable[[Gloo], None]:
        """Make a function that runs ``messages`` together. Must be called in program order."""
        numbered = []
        for message in messages:
            key = (message.is_send, message.peer)
            numbered.append((message, 3 * self._counts[key]))  # tags: header, payload, answer
            self._counts[key] += 1

        def run(gloo: Gloo) -> None:
            # A send ends when its receiver acknowledges it.
            works: list[Any] = []
            came: list[tuple[TransferSide, int, torch.Tensor, Any]] = []
            for message, tag in numbered:
                peer = message.peer
                if message.is_send:
                    works.append(gloo.send([message.written()], peer, tag))
                    works.append(gloo.send([message.tensor.detach()], peer, tag + 1))
                    works.append(gloo.recv([torch.zeros(1, device="cpu")], peer, tag + 2))
                else:
                    header = torch.zeros(HEADER, dtype=torch.uint8, device="cpu")
                    came.append((message, tag, header, gloo.recv([header], peer, tag)))
            for message, tag, header, work in came:
                work.wait()
                if difference := message.difference(header):
                    self._report(Fault("mixed up", difference))
                gloo.recv([message.tensor.detach()], message.peer, tag + 1).wait()
                works.append(gloo.send([torch.zeros(1, device="cpu")], message.peer, tag + 2))
            for work in works:
                work.wait()

        return run

    def _work_off(self) -> None:
        with torch.inference_mode():  # in which inference tensors may be written too
            self._run_all()

    def _run_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(self._random.random() * LATEST)
            job.run_on(self._gloo)
            self._open.remove(job)
            job.ended.set()


class SimulatedWork(Work):
    """The handle of an operation on a device: streams wait for it, the host does not."""

    def __init__(
        self,
        job: Job,
        clock: dict[int, int],
        device: SimulatedDevice,
        queue: OrderedQueue,
        held: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._job = job
        self._clock = clock
        self._device = device
        self._queue = queue
        self._held = held
        """Keeps the tensors alive until somebody has waited."""
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for the operation.

        Operators run immediately, so this thread really waits for the values; in the simulation, it
        knows no more about the device than before.
        """
        job, until = self._job, time.monotonic() + PATIENCE
        while not job.ended.wait(0.1) or job.error is not None:
            # An NCCL operation hangs when a rank is gone, until our check names it and aborts.
            check_peers()
            if time.monotonic() > until:
                text = f"deadlock: in the queue stand {self._queue.describe()}"
                raise job.error or SimulationError(text)
            if job.error is not None:
                time.sleep(0.1)
        self._device.current.wait_until(self._clock)
        self._held = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._job.ended.is_set():
            return False
        self._device.host.wait_until(self._clock)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._job.error is None

    def exception(self) -> BaseException | None:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:  # type: ignore[override]
        """Wait, and return a completed future with the output tensors."""
        self.wait()
        found: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        found.set_result(self._outputs)
        return found


class CommunicationStream:
    """The stream of one communicator: its operations run in the order of their calls."""

    def __init__(self, device: SimulatedDevice, gloo: Gloo, name: str) -> None:
        self.line = WorkLine(f"the stream of group {name}")
        self.queue = OrderedQueue(gloo, name, device.faults.append)
        self._device = device

    def issue(
        self,
        text: str,
        run: Callable[[Gloo], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> SimulatedWork:
        """Queue an operation after everything on the current stream so far."""
        device, line = self._device, self.line
        line.wait_for(device.current)
        device.launch(text, reads, writes, line)
        held = list(tensors_in([*reads, *writes]))  # before it runs: a sparse sum gets new parts
        clock = line.snapshot()

        def run_here(gloo: Gloo) -> None:
            run(gloo)
            device.host.wait_until(clock)  # the queue's thread may be the last to hold a tensor

        job = Job(text, run_here)
        self.queue.put(job)
        device.keep(device.record(text, line), held)
        return SimulatedWork(job, clock, device, self.queue, held, writes)


Tensors = Sequence[torch.Tensor]
Options = Any
"""c10d's options, one class for each kind of call."""
Handle = Any
"""A handle of c10d, or an object of ours with ``wait``."""


class _SimulatedIssuing(threading.local):
    """The state of one thread that issues operations on a group."""

    label = ""
    messages: list[TransferSide] | None = None
    """The transfers of an open batch; None outside of one."""
    collectives: list[Work] | None = None

    def label_next(self, label: str) -> None:
        self.label = label

    def named(self, what: str) -> str:
        """Return ``what``, followed by the label if there is one."""
        return f"{what} ({self.label})" if self.label else what

    def begin(self) -> None:
        messages: list[TransferSide] = []
        works: list[Work] = []
        self.messages, self.collectives = messages, works

    def end(self) -> tuple[list[TransferSide], list[Work]]:
        kept = self.messages or [], self.collectives or []
        self.messages = self.collectives = None
        return kept


class _Transport(CpuTransport, BackendBase):
    """The part of c10d's ``Backend`` that c10d looks up by name.

    If the world is bound to a device, c10d makes groups by splitting its communicator, as for NCCL:
    the ranks in the group and all others must enter the split.
    """

    supports_coalescing = True
    supports_splitting = True

    def __init__(self) -> None:
        CpuTransport.__init__(self, BACKEND, lambda timeout: None)
        BackendBase.__init__(self, *((0, 1) if BackendBase is not object else ()))

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make a group that this rank is in."""
        enter_split()

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Enter the split for a group that this rank is not in."""
        enter_split()

    @property
    def __class__(self) -> type:
        return _Transport


class SimulatedGroup(PythonGroup):
    """A process group whose ranks have simulated devices."""

    def __init__(self, options: GroupOptions, device: SimulatedDevice) -> None:
        super().__init__(options, BACKEND)
        rank, size = options.group_rank, options.group_size
        halves: list[Gloo] = [
            dist.ProcessGroupGloo(
                dist.PrefixStore(name, options.store), rank, size, timeout=options.timeout
            )
            for name in ("host", "device")
        ]
        self._device = device
        self._host, moved = halves
        self._stream = CommunicationStream(device, moved, str(options.group_id))
        self._store, self._splits = options.store, 0
        self._issuing = _SimulatedIssuing()
        self.label_next: Callable[[str], None] = self._issuing.label_next
        """Labels the next operation of this thread, for reports of faults."""

    def forgo_labels(self) -> None:
        """Do nothing: this backend never compares labels."""

    def _run(
        self,
        kind: str,
        reads: Tensors,
        writes: Tensors,
        call: Callable[[Gloo], Handle],
    ) -> Handle:
        """Run ``call`` on the half whose memory the tensors are in."""
        tensors, memory = [*reads, *writes], self._device.memory
        if any(map(memory.is_host, tensors)):
            # Result tensors that c10d made are in the same memory as the tensors it was given.
            self._device.take_host([t for t in tensors if not memory.is_known(t)], is_pinned=False)
        if all(map(self._device.memory.is_host, tensors)):
            with without_modes():  # the device must not record the operators that Gloo runs
                return call(self._host)
        if any(map(self._device.memory.is_host, tensors)):
            raise ValueError(f"{kind} of group {self.group_name!r} has tensors of host and device")
        text = f"{self._issuing.named(kind)} of group {self.group_name}"
        work = self._stream.issue(text, lambda gloo: call(gloo).wait(), reads, writes)
        if self._issuing.collectives is not None:
            self._issuing.collectives.append(work)
        return work

    # ---------------------------------------------------------------------- collectives

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Options = None) -> Handle:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = opts or dist.AllreduceOptions()
        return self._run("all_reduce", [], listed, lambda gloo: gloo.allreduce(listed, given))

    def reduce(self, tensors: Tensors, opts: Options) -> Handle:
        return self._run("reduce", [], tensors, lambda gloo: gloo.reduce(list(tensors), opts))

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Options) -> Handle:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._run("broadcast", [], listed, lambda gloo: gloo.broadcast(listed, opts))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None
    ) -> Handle:
        rows = list(output.detach().view(self.size(), *tensor.shape).unbind(0))
        reads = [] if _lies_in(tensor, output) else [tensor]

        def call(gloo: Gloo) -> Handle:
            return gloo.allgather([rows], [tensor.detach().clone()])

        return self._run("all_gather", reads, [output], call)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None
    ) -> Handle:
        rows = [list(row) for row in outputs]
        flat = [tensor for row in rows for tensor in row]
        return self._run(
            "all_gather", inputs, flat, lambda gloo: gloo.allgather(rows, list(inputs))
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None
    ) -> Handle:
        reduction = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def call(gloo: Gloo) -> _Shared:
            return _Shared(gloo, tensor, output, reduction)

        reads = [] if _lies_in(output, tensor) else [tensor]
        return self._run("reduce_scatter", reads, [output], call)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options = None
    ) -> Handle:
        (output,), (parts,) = outputs, inputs
        joined = torch.cat([part.reshape(-1) for part in parts])
        return self.reduce_scatter_single(output, joined, opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> Handle:
        return self._in_turn(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> Handle:
        return self._in_turn(self.reduce_scatter_single, outputs, inputs, opts)

    def _in_turn(
        self, call: Callable[..., Handle], outputs: Tensors, inputs: Tensors, opts: Options
    ) -> Handle:
        """Call ``call`` for each pair; returns the last handle, whose operation ends last."""
        pairs = zip(outputs, inputs, strict=True)
        return [call(output, tensor, opts) for output, tensor in pairs][-1]

    def allreduce_coalesced(self, tensors: Tensors, opts: Options = None) -> Handle:
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> Handle:
        sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]

        def call(gloo: Gloo) -> _Parted:
            return _Parted(gloo, outputs, inputs, sizes)

        return self._run("all_to_all", inputs, outputs, call)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options = None,
    ) -> Handle:
        given = opts or dist.AllToAllOptions()
        sizes = list(output_sizes), list(input_sizes)
        return self._run(
            "all_to_all",
            [tensor],
            [output],
            lambda gloo: gloo.alltoall_base(output, tensor, *sizes, given),
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> Handle:
        rows = [list(row) for row in outputs]
        flat = [tensor for row in rows for tensor in row]
        return self._run("gather", inputs, flat, lambda g: g.gather(rows, list(inputs), opts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> Handle:
        rows = [list(row) for row in inputs]
        flat = [tensor for row in rows for tensor in row]
        return self._run("scatter", flat, outputs, lambda g: g.scatter(list(outputs), rows, opts))

    def barrier(self, opts: Options = None) -> Handle:
        return self._host.barrier(opts or dist.BarrierOptions())

    # ------------------------------------------------------------------- point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Handle:
        return self._transfer(tensors[0], peer, tag, is_send=True)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Handle:
        return self._transfer(tensors[0], peer, tag, is_send=False)

    def _transfer(self, tensor: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Handle:
        if self._device.memory.is_host(tensor):
            post = self._host.send if is_send else self._host.recv
            return post([tensor], peer, tag)
        message = TransferSide(is_send, tensor, peer, tag, self._issuing.label, caller())
        if self._issuing.messages is not None:
            self._issuing.messages.append(message)
            return None
        return self._issue([message])

    def _issue(self, messages: Sequence[TransferSide]) -> Work:
        reads = [message.tensor for message in messages if message.is_send]
        writes = [message.tensor for message in messages if not message.is_send]
        run = self._stream.queue.transfers(messages)
        text = f"{' and '.join(map(str, messages))} of group {self.group_name}"
        return self._stream.issue(text, run, reads, writes)

    def _start_coalescing(self, device: torch.device) -> None:
        self._issuing.begin()

    def _end_coalescing(self, device: torch.device) -> Work:
        messages, works = self._issuing.end()
        return self._issue(messages) if messages else works[-1]

    # -------------------------------------------------------------------- what c10d asks

    @property
    def device(self) -> SimulatedDevice:
        return self._device

    @property
    def host_backend(self) -> str:
        return "gloo"

    def bind(self) -> None:
        """Bind the group to a device. c10d requires an accelerator, and checks nothing else."""
        self.bound_device_id = torch.device("cuda", 0)

    def split(self) -> None:
        """Wait until all ranks enter this split. Raises `SimulationError` if one does not."""
        self._splits += 1
        keys = [f"split {self._splits} of rank {rank}" for rank in range(self.size())]
        self._store.set(keys[self.rank()], "")
        until = time.monotonic() + PATIENCE
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > until:
                raise SimulationError(
                    f"deadlock: group {self.group_name} is bound to a device and is split for a "
                    f"group, at {caller()}, which its ranks {missing} do not enter"
                )
            time.sleep(0.005)

    def shutdown(self) -> None:
        self._stream.queue.close()

    @property
    def _device_types(self) -> Sequence[torch.device]:
        return (DEVICE,) if self in living_groups() else ()

    def _get_backend(self, device: torch.device) -> _Transport:
        return _Transport()

    # Names of the same methods in torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _Parted:
    """An all-to-all of lists of tensors, as one of their concatenations."""

    def __init__(
        self,
        gloo: Gloo,
        outputs: Tensors,
        inputs: Tensors,
        sizes: tuple[list[int], list[int]],
    ) -> None:
        sent = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        self._line = sent.new_empty(sum(sizes[0]))
        self._outputs, self._sizes = outputs, sizes[0]
        self._work = gloo.alltoall_base(self._line, sent, *sizes, dist.AllToAllOptions())

    def wait(self) -> None:
        """Wait, and split the result into the outputs."""
        self._work.wait()
        for output, part in zip(self._outputs, self._line.split(self._sizes), strict=True):
            output.detach().copy_(part.view(output.shape))


class _Shared:
    """A reduce-scatter done as an all-reduce of which each rank keeps its share."""

    def __init__(
        self, gloo: Gloo, tensor: torch.Tensor, output: torch.Tensor, reduction: object
    ) -> None:
        self._line = tensor.detach().reshape(-1).clone()
        self._output = output.detach()
        self._rank = gloo.rank()
        self._work = gloo.allreduce([self._line], reduction)

    def wait(self) -> None:
        """Wait, and keep the share."""
        self._work.wait()
        count = self._output.numel()
        first = self._rank * count
        self._output.copy_(self._line[first : first + count].view(self._output.shape))


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return storage_id(part.untyped_storage()) == storage_id(whole.untyped_storage())


def enter_split() -> None:
    """Enter a split of the communicator of all ranks."""
    default_group().split()


def register(device: SimulatedDevice) -> None:
    """Register the backend with `torch.distributed`, for groups on ``device``."""

    def make(options: GroupOptions, _: object) -> SimulatedGroup:
        return SimulatedGroup(options, device)

    if BACKEND.upper() not in known_backends():
        dist.Backend.register_backend(
            BACKEND,
            make,
            extended_api=True,
            devices=["cpu"],
        )


@contextmanager
def connected_device() -> Iterator[None]:
    """Connect this rank, with its tensors on a simulated device, within the block."""
    with simulated(is_written_for_a_cpu=True) as device:
        register(device)
        comm.connect(BACKEND)
        default_group().bind()
        yield
        with suppress(RankFailedError):  # as on a host: every rank's own outcome is reported
            comm.disconnect()


def device_of(communicator: comm.Communicator) -> SimulatedDevice:
    """Return the simulated device of this rank. Raises TypeError if it has none."""
    group = communicator.group
    if not isinstance(group, SimulatedGroup):
        raise TypeError(
            f"the ranks of axis {communicator.axis} communicate by {communicator.backend}, not on "
            f"simulated devices: give ranks() backend={BACKEND!r}"
        )
    return group.device
