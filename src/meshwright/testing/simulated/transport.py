"""The transport of a simulated device: like NCCL's, it matches operations by order alone.

Each communicator has one queue, whose thread runs operations in the order of the calls. So a
receive without a send blocks everything behind it, and a send ends when its receiver has reached
it. The k-th send to a rank matches that rank's k-th receive from here, whatever their tags. If
tags, or the numbers at the end of labels, show that the two do not belong together, that is a
fault. The transfers of one batch are posted together. Bytes move through Gloo, in separate groups.
"""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from meshwright.comm import check_peers
from meshwright.testing.simulated.device import SimulatedDevice, SimulationError
from meshwright.testing.simulated.memory import Fault
from meshwright.testing.simulated.operators import tensors_in
from meshwright.testing.simulated.streams import WorkLine
from meshwright.torch_internals.distributed import Work

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
                    f"{ours['text']} is met by {theirs['text']}, whose {key} is {theirs[key]} and "
                    f"not {ours[key]}: transfers go by their order alone"
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
        """Queue an operation."""
        self._open.append(job)
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after everything queued."""
        self._jobs.put(None)

    def describe(self) -> str:
        """List the operations that have not ended, in order."""
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
        """Make the current stream wait for the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Check, without waiting, whether the operation has ended."""
        if not self._job.ended.is_set():
            return False
        self._device.host.wait_until(self._clock)
        return True

    def is_success(self) -> bool:
        """True if the operation has ended without an error."""
        return self.is_completed() and self._job.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of the operation."""
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
