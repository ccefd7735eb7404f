"""The transport of a simulated device: as NCCL's, by order alone.

Each communicator has one queue, which a thread works off in the order of the calls. So a receive
that nobody has sent to holds up all that is behind it, and a send is over when its receiver has
come to it. The k-th send to a rank is met by that rank's k-th receive from here, whatever their
tags say; where tags, or numbers at the end of labels, show that these two are not meant for each
other, that is a fault. What was issued as one batch is posted at once. Bytes move through Gloo, in
groups of their own.
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
"""c10d's class of Gloo, of whose methods the stubs lack some."""
LATEST = 0.001
"""Seconds at most for which an operation that could run waits, at random."""
HEADER = 512
"""Bytes that go ahead of a transfer."""
PATIENCE = 20.0
"""Seconds after which a queue that stands still is told as a deadlock."""


@dataclass(frozen=True, slots=True)
class Message:
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
        """Write what goes ahead of a send: how its receiver can tell it from others."""
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
        """Say how this receive was meant for another send than the one with ``header``."""
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
        """Run it. Whoever waits for it gets what it raises."""
        try:
            self.run(gloo)
        except BaseException as error:
            self.error = error


class OrderedQueue:
    """The operations of one communicator on this rank, and the thread that runs them."""

    def __init__(self, gloo: Gloo, name: str, report: Callable[[Fault], None]) -> None:
        """``report`` takes faults."""
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
        """End the thread behind what is queued."""
        self._jobs.put(None)

    def describe(self) -> str:
        """List what has not ended, in its order."""
        return ", then ".join(job.text for job in list(self._open))

    def transfers(self, messages: Sequence[Message]) -> Callable[[Gloo], None]:
        """Make what runs ``messages`` at once. Called in the order of the program."""
        numbered = []
        for message in messages:
            key = (message.is_send, message.peer)
            numbered.append((message, 3 * self._counts[key]))
            self._counts[key] += 1

        def run(gloo: Gloo) -> None:
            # A send ends when its receiver says that it was there.
            works: list[Any] = []
            came: list[tuple[Message, int, torch.Tensor, Any]] = []
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
        with torch.inference_mode():  # whose tensors may be written, too
            self._run_all()

    def _run_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(self._random.random() * LATEST)
            job.run_on(self._gloo)
            self._open.remove(job)
            job.ended.set()


class SimulatedWork(Work):
    """The handle of an operation on a device: streams wait for it, and the host goes on."""

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
        """The tensors, until somebody has waited."""
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for the operation.

        The numbers must be there, since operators run at once: the thread waits for them, and knows
        no more of the device than before.
        """
        job, until = self._job, time.monotonic() + PATIENCE
        while not job.ended.wait(0.1) or job.error is not None:
            # One of NCCL's stands still when a rank is gone, until ours say which, and abort it.
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
        """Ask, without waiting, whether the operation has ended."""
        if not self._job.ended.is_set():
            return False
        self._device.host.wait_until(self._clock)
        return True

    def is_success(self) -> bool:
        """Check that the operation has ended without an error."""
        return self.is_completed() and self._job.error is None

    def exception(self) -> BaseException | None:
        """Find the error of the operation."""
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        """List the tensors of the operation."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:  # type: ignore[override]
        """Make a future that has the tensors when the operation has ended."""
        self.wait()
        found: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        found.set_result(self._outputs)
        return found


class CommunicationStream:
    """The stream of one communicator, in which its operations run in the order of their calls."""

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
        """Queue an operation behind what the current stream was given by now."""
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
