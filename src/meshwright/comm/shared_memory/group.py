"""One process group whose ranks share memory: the methods that c10d calls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import record_function

from meshwright.comm.c10d.calls import overwrite
from meshwright.comm.groups.python_group import CpuTransport, GroupOptions, PythonGroup
from meshwright.comm.shared_memory.arena import SharedTensors
from meshwright.comm.shared_memory.buffers import (
    contiguous,
    copied_back,
    cut,
    dense,
    name_of,
    writable,
)
from meshwright.comm.shared_memory.collectives import Exchange
from meshwright.comm.shared_memory.fingerprints import RecordedCall
from meshwright.comm.shared_memory.queue import JoinedWork, OperationQueue, SharedWork
from meshwright.comm.shared_memory.reductions import Options, check_reduction, reduction_of
from meshwright.comm.shared_memory.transfers import ANY_SOURCE, Transfers
from meshwright.comm.shared_memory.waits import Meeting, Steps
from meshwright.errors import CommunicationError
from meshwright.torch_internals.autograd import is_profiled

BACKEND = "meshwright"
CALLS = 2048
"""Calls whose fingerprint is remembered."""

OPERATORS = MappingProxyType(
    {
        "all_gather": "_allgather_base_",
        "all_reduce": "allreduce_",
        "all_to_all": "alltoall_base_",
        "all_to_all list": "alltoall_",
        "barrier": "barrier",
        "broadcast": "broadcast_",
        "gather": "gather_",
        "recv": "recv_",
        "reduce": "reduce_",
        "reduce_scatter": "_reduce_scatter_base_",
        "scatter": "scatter_",
        "send": "send",
    }
)
"""The operators of c10d as which profiles show calls of other groups, by kind."""

Tensors = Sequence[torch.Tensor]
Sizes = Sequence[int]


class _Issuing(threading.local):
    """One thread's state while it issues on a group: the next label, and a batch being built."""

    label = ""
    coalesced: list[SharedWork] | None = None

    def __init__(self, threads: set[str]) -> None:
        """Add the name of this thread, which issues for the first time, to ``threads``."""
        threads.add(threading.current_thread().name)

    def label_next(self, label: str) -> None:
        """Give the next operation ``label``."""
        self.label = label

    def label_nothing(self, label: str) -> None:
        """Leave the next operation without a label, ignoring ``label``."""
        del label
        self.label = ""

    def take_label(self) -> str:
        """Take the label for the operation that is issued now."""
        label = self.label
        if label:
            self.label = ""
        return label


@contextlib.contextmanager
def _in_ranges(kind: str) -> Iterator[None]:
    """Show the block in profiles as the operator of c10d, with the backend's work inside."""
    with record_function(f"c10d::{OPERATORS[kind]}"), record_function(f"meshwright:{kind}"):
        yield


_UNSEEN = contextlib.nullcontext()


class SharedMemoryGroup(PythonGroup):
    """A process group whose ranks share memory.

    Labels appear in errors, and calls on which both sides carry one must carry the same.
    """

    def __init__(
        self,
        options: GroupOptions,
        meeting: Meeting,
        tensors: SharedTensors,
        left: Callable[[SharedMemoryGroup], None],
    ) -> None:
        """``meeting`` is the result of `join`; ``left`` is called at the group's end."""
        super().__init__(options, BACKEND)
        self.tensors = tensors
        self._left: Callable[[SharedMemoryGroup], None] | None = left
        self._ranks = meeting.peers.ranks
        self._meeting = meeting
        self._exchange = Exchange(meeting, tensors)
        self._queue = OperationQueue(meeting, f"meshwright-collectives-{self._name}")
        self._transfers = Transfers(meeting, f"meshwright-transfers-{self._name}")
        self._calls: dict[tuple[Any, ...], RecordedCall] = {}
        self._issuing = _Issuing(self._exchange.records.threads)
        # Methods of `_Issuing` itself, not of ours that call them: they run for every operation.
        self.label_next: Callable[[str], None] = self._issuing.label_next
        """Gives the next operation that this thread issues a label; "" takes it back."""
        self._label = self._issuing.take_label
        self._pid = os.getpid()

    @property
    def next_label(self) -> str:
        """The label of this thread's next operation, which takes it."""
        return self._issuing.label

    def forgo_labels(self) -> None:
        """Stop sending labels: this rank is known to differ from its peers."""
        self.label_next = self._issuing.label_nothing

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Options = None) -> SharedWork:
        """Reduce tensors over all ranks, in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if len(listed) != 1:
            return self._all([self.allreduce([tensor], opts) for tensor in listed])
        tensor = listed[0]
        reduction = reduction_of(opts)
        if tensor.is_sparse:
            if reduction != "sum":
                raise ValueError(f"sparse tensors can only be summed, not reduced by {reduction}")
            self._sum_sparse(tensor)
            work = SharedWork([tensor])
            work.finish()
            return self._note(work)
        call = self._call("all_reduce", tensor.shape, tensor.dtype, reduction)
        buffer = contiguous(tensor)
        body = self._exchange.all_reduce(call, buffer)
        if buffer is not tensor:
            body = copied_back(body, [(tensor, buffer)])
        return self._submit(call, body, listed, opts)

    @torch.no_grad()
    def _sum_sparse(self, tensor: torch.Tensor) -> None:
        """Sum sparse tensors of one shape over all ranks, in place; synchronous.

        Equal indices are summed in rank order, as in all sums of the backend.
        """
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        counts = indices.new_empty(self.size())
        self.all_gather_single(counts, indices.new_tensor([values.shape[0]])).wait()
        places = [indices.new_empty((count, indices.shape[0])) for count in counts.tolist()]
        self.allgather([places], [indices.t().contiguous()]).wait()
        parts = [values.new_empty((count, *values.shape[1:])) for count in counts.tolist()]
        self.allgather([parts], [values]).wait()
        summed = torch.sparse_coo_tensor(
            torch.cat(places).t(),
            torch.cat(parts),
            tensor.shape,
            device=values.device,
            check_invariants=False,
        )
        # Not on a detached tensor: that would have indices and values of its own.
        tensor.copy_(summed.coalesce())

    def allreduce_coalesced(self, tensors: Tensors, opts: Options = None) -> SharedWork:
        """Reduce each tensor over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Options) -> SharedWork:
        """Reduce a tensor over all ranks into the root's."""
        (tensor,) = tensors
        call = self._call("reduce", tensor.shape, tensor.dtype, reduction_of(opts), opts.rootRank)
        buffer = contiguous(tensor)
        body = self._exchange.reduce(call, buffer, opts.rootRank)
        return self._submit(call, copied_back(body, [(tensor, buffer)]), tensors, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None
    ) -> SharedWork:
        """Reduce a tensor that holds a share for each rank, and keep this rank's."""
        if tensor.numel() != output.numel() * self._size or tensor.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter needs an input of {self._size} times the output's elements and "
                f"of its dtype; it has {name_of(tensor)} for an output {name_of(output)}"
            )
        call = self._call("reduce_scatter", tensor.shape, tensor.dtype, reduction_of(opts))
        source, target = contiguous(tensor), writable(output)
        body = self._exchange.reduce_scatter(call, target, source)
        return self._submit(call, copied_back(body, [(output, target)]), [output], opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options = None
    ) -> SharedWork:
        """Reduce a list of tensors, one for each rank, and keep this rank's."""
        works = []
        for output, parts in zip(outputs, inputs, strict=True):
            if len({part.numel() for part in parts}) == 1:
                joined = torch.cat([contiguous(part).view(-1) for part in parts])
                works.append(self.reduce_scatter_single(output, joined, opts))
            else:
                works.append(self._reduce_scatter_uneven(output, parts, opts))
        return self._all(works)

    def _reduce_scatter_uneven(
        self, output: torch.Tensor, parts: Tensors, opts: Options
    ) -> SharedWork:
        shape = tuple(part.numel() for part in parts)
        call = self._call("reduce_scatter", shape, output.dtype, reduction_of(opts))
        joined = torch.cat([contiguous(part).view(-1) for part in parts])
        start = sum(shape[: self._rank])
        own = joined[start : start + shape[self._rank]].view(output.shape)
        body = copied_back(self._exchange.all_reduce(call, joined), [(output, own)])
        return self._submit(call, body, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> SharedWork:
        """Do `reduce_scatter_single` of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.reduce_scatter_single(out, given, opts) for out, given in pairs])

    # ------------------------------------------------------------------ gathering

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None
    ) -> SharedWork:
        """Gather every rank's tensor into one, rank-major."""
        if output.numel() != tensor.numel() * self._size or tensor.dtype != output.dtype:
            raise ValueError(
                f"all_gather needs an output of {self._size} times the input's elements and of "
                f"its dtype; it has {name_of(output)} for an input {name_of(tensor)}"
            )
        call = self._call("all_gather", tensor.shape, tensor.dtype)
        source, target = contiguous(tensor), writable(output)
        nbytes, start = source.nbytes, target.data_ptr()
        places = [start + rank * nbytes for rank in range(self._size)]
        body = self._exchange.gather(
            call, (source.data_ptr(), nbytes), [nbytes] * self._size, places
        )
        copied = copied_back(body, [(output, target)])
        return self._submit(call, copied, [output], opts, source)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None
    ) -> SharedWork:
        """Gather every rank's tensor into a list, whose tensors may differ in size."""
        return self._all(
            [
                self._gather("all_gather", None, list(places), tensor, opts)
                for places, tensor in zip(outputs, inputs, strict=True)
            ]
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> SharedWork:
        """Do `all_gather_single` of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.all_gather_single(out, given, opts) for out, given in pairs])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> SharedWork:
        """Gather every rank's tensor into a list of the root."""
        places = list(outputs[0]) if self._rank == opts.rootRank else None
        return self._gather("gather", opts.rootRank, places, inputs[0], opts)

    def _gather(
        self,
        kind: str,
        root: int | None,
        places: list[torch.Tensor] | None,
        tensor: torch.Tensor,
        opts: Options,
    ) -> SharedWork:
        source = contiguous(tensor)
        if places is not None and (
            len(places) != self._size
            or places[self._rank].numel() != tensor.numel()
            or any(place.dtype != tensor.dtype for place in places)
        ):
            raise ValueError(
                f"{kind} of {name_of(tensor)} over {self._size} ranks does not fit into "
                f"{', '.join(map(name_of, places))}"
            )
        sizes = [place.numel() for place in places or [tensor] * self._size]
        is_even = all(size == sizes[0] for size in sizes)
        shape = tuple(tensor.shape) if is_even else tuple(sizes)
        call = self._call(kind, shape, tensor.dtype, "", root)
        targets = [writable(place) for place in places or ()]
        body = self._exchange.gather(
            call,
            (source.data_ptr(), source.nbytes),
            [size * tensor.dtype.itemsize for size in sizes],
            [target.data_ptr() for target in targets] if places is not None else None,
        )
        copied = copied_back(body, list(zip(places or (), targets, strict=True)))
        return self._submit(call, copied, places or [], opts, source)

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Options) -> SharedWork:
        """Give every rank the root's tensor, in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        (tensor,) = listed
        root = opts.rootRank
        call = self._call("broadcast", tensor.shape, tensor.dtype, "", root)
        is_root = self._rank == root
        buffer = contiguous(tensor) if is_root else writable(tensor)
        sizes, places = [0] * self._size, [0] * self._size
        sizes[root], places[root] = buffer.nbytes, buffer.data_ptr()
        source = (buffer.data_ptr(), buffer.nbytes) if is_root else (0, 0)
        body = self._exchange.gather(call, source, sizes, places)
        pairs = [] if is_root else [(tensor, buffer)]
        return self._submit(call, copied_back(body, pairs), listed, opts, buffer)

    # ------------------------------------------------------------------ exchanging

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sizes,
        input_sizes: Sizes,
        opts: Options = None,
    ) -> SharedWork:
        """Send a part of a tensor to each rank, along dim 0; equal parts without sizes."""
        target, source = writable(output), contiguous(tensor)
        parts = cut(source, input_sizes, self._size, "input")
        places = cut(target, output_sizes, self._size, "output")
        call = self._call("all_to_all", tensor.shape[1:], tensor.dtype)
        body = self._exchange.exchange(call, parts, places, adjacent=True)
        body = copied_back(body, [(output, target)])
        return self._submit(call, body, [output], opts, source)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> SharedWork:
        """Send a tensor to each rank."""
        targets = [writable(output) for output in outputs]
        sources = [contiguous(tensor) for tensor in inputs]
        call = self._call("all_to_all list", (), sources[0].dtype)
        parts = [(source.data_ptr(), source.nbytes) for source in sources]
        places = [(target.data_ptr(), target.nbytes) for target in targets]
        body = self._exchange.exchange(call, parts, places, adjacent=False)
        body = copied_back(body, list(zip(outputs, targets, strict=True)))
        return self._submit(call, body, list(outputs), opts, *sources)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> SharedWork:
        """Send a tensor of the root's list to each rank."""
        (output,), root = outputs, opts.rootRank
        target = writable(output)
        call = self._call("scatter", output.shape, output.dtype, "", root)
        sources = [contiguous(tensor) for tensor in inputs[0]] if self._rank == root else []
        parts = [(source.data_ptr(), source.nbytes) for source in sources]
        places = [(0, 0)] * self._size
        places[root] = (target.data_ptr(), target.nbytes)
        body = self._exchange.exchange(call, parts or [(0, 0)] * self._size, places, adjacent=False)
        body = copied_back(body, [(output, target)])
        return self._submit(call, body, [output], opts, *sources)

    def barrier(self, opts: Options = None) -> SharedWork:
        """Wait until every rank has called it."""
        call = self._call("barrier")
        return self._submit(call, self._exchange.barrier(call), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has called it; any wait here names all missing ranks.

        `torch.distributed` calls it on Gloo only before torch 2.13, then on every host backend.
        """
        self.barrier().wait(timeout or timedelta(0))

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> SharedWork:
        """Send a tensor to a rank of the group."""
        with _in_ranges("send") if is_profiled() else _UNSEEN:
            return self._note(self._transfers.send(tensors[0], peer, tag, self._label()))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> SharedWork:
        """Receive a tensor from a rank of the group."""
        buffer = dense(tensors[0])
        if buffer.grad_fn is not None:
            overwrite("recv", (buffer,))
        with _in_ranges("recv") if is_profiled() else _UNSEEN:
            return self._note(self._transfers.receive(buffer, peer, tag, self._label()))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SharedWork:
        """Receive a tensor from whichever rank sends one with this tag."""
        return self.recv(tensors, ANY_SOURCE, tag)

    # ------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        self._issuing.coalesced = []

    def _end_coalescing(self, device: torch.device) -> SharedWork:
        works, self._issuing.coalesced = self._issuing.coalesced or [], None
        return self._all(works)

    def _note(self, work: SharedWork) -> SharedWork:
        coalesced = self._issuing.coalesced
        if coalesced is not None:
            coalesced.append(work)
        return work

    def _all(self, works: list[SharedWork]) -> SharedWork:
        return works[0] if len(works) == 1 else JoinedWork(works)

    # ------------------------------------------------------------------ issuing

    def _call(
        self,
        kind: str,
        shape: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        reduction: str = "",
        root: int | None = None,
    ) -> RecordedCall:
        key = (kind, shape, dtype, reduction, root, self._label())
        call = self._calls.get(key)
        if call is None:
            if reduction and dtype is not None:
                check_reduction(reduction, dtype)
            if len(self._calls) >= CALLS:
                self._calls.clear()
            call = RecordedCall(
                kind=kind,
                shape=tuple(shape),
                dtype=dtype,
                reduction=reduction,
                root=None if root is None else self._ranks[root],
                label=key[-1],
            ).complete()
            self._calls[key] = call
        return call

    def _submit(
        self, call: RecordedCall, body: Steps, outputs: Tensors, opts: Options, *held: torch.Tensor
    ) -> SharedWork:
        for output in outputs:  # rare, and on the path of each step
            if output.grad_fn is not None:
                overwrite(call.kind, (output,))
        run_now = not getattr(opts, "asyncOp", True)
        if is_profiled():
            with _in_ranges(call.kind):
                return self._note(self._queue.submit(call, body, outputs, held, run_now=run_now))
        return self._note(self._queue.submit(call, body, outputs, held, run_now=run_now))

    # ------------------------------------------------------------------ what c10d asks

    def shutdown(self) -> None:
        """Leave the group: end its threads, and let the peers know."""
        left, self._left = self._left, None
        if left is None or self._pid != os.getpid():  # a forked child must not leave for its parent
            return
        left(self)
        self._meeting.end(CommunicationError(f"the group {self._name!r} was destroyed"))
        self._queue.close()
        self._transfers.close()
        self._meeting.peers.close()

    def abort(self) -> None:
        """Make every operation of the group raise, here and on the other ranks."""
        self._meeting.break_with(CommunicationError(f"rank {self._ranks[self._rank]} aborted it"))

    @property
    def timeout(self) -> float:
        """Seconds for which an operation may wait for its peers."""
        return self._meeting.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may wait for its peers."""
        self._meeting.timeout = timeout.total_seconds()

    def _get_backend(self, device: torch.device) -> CpuTransport:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the group {self._name!r} communicates on the CPU, not on {device}")
        return CpuTransport(BACKEND, self.set_timeout)

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
