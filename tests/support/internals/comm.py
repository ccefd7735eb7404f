"""Names inside of `meshwright.comm`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.comm.c10d": "lookup, nccl",
        "meshwright.comm.dtensors.dtensor": (
            "at_rest, beginning_storage, cut_once_more, dtensor_around, dtensor_at_rest, "
            "dtensor_like, is_dtensor, local_of, mesh_communicators, "
            "parameter_at_rest, torch_placements"
        ),
        "meshwright.comm.dtensors.exchanging": "exchange_over",
        "meshwright.comm.dtensors.gather_dtensor": "held, part_like, side_by_side, whole",
        "meshwright.comm.dtensors.gradient_part": "GradientPart, gradient_part",
        "meshwright.comm.dtensors.local_leaves": (
            "PartialGradient, deliver, local_leaf, local_part_of"
        ),
        "meshwright.comm.dtensors.operators.derivatives": "differentiate_moves",
        "meshwright.comm.dtensors.operators.mixed_lists": "take_lists_apart",
        "meshwright.comm.dtensors.operators.random_values": "draw_whole",
        "meshwright.comm.dtensors.operators.written_parts": "write_through",
        "meshwright.comm.dtensors.shard_view": "Ranges, ShardView",
        "meshwright.comm.dtensors.sharded_axes": (
            "is_distributed, singles_of, spread_of, spread_over"
        ),
        "meshwright.comm.dtensors.unreadable": "Unreadable",
        "meshwright.comm.failures": "membership, waiting, watchdog",
        "meshwright.comm.failures.events": "EventCheck, GroupEvent, meet",
        "meshwright.comm.failures.failure": "FailureMonitor",
        "meshwright.comm.failures.liveness": "Entry, Need",
        "meshwright.comm.failures.membership": "LEAVE_TIMEOUT, record_failure",
        "meshwright.comm.failures.processes": "Process",
        "meshwright.comm.failures.sameness": "differing, first_difference, require_equal",
        "meshwright.comm.failures.status": (
            "ENGINE, hook_frame, line_of as whereabouts_line_of, one_line, own_state"
        ),
        "meshwright.comm.failures.store": (
            "KeyWait, Notices, STORE, StoreClient, SystemClock, Worker"
        ),
        "meshwright.comm.failures.waiting": "Awaited, Issued",
        "meshwright.comm.graphs": "functional, marks",
        "meshwright.comm.graphs.marks": (
            "AGREE, ALL_REDUCE, ALL_REDUCE_COALESCED, ALL_REDUCE_IN_PLACE, DIVIDED, "
            "GRAD_REDUCE, WAIT, grad_reduce"
        ),
        "meshwright.comm.graphs.units": (
            "DRIVE, FREE, UnitPart, REDUCE, SEND, START, UNSHARD, UnitForm, WHOLE"
        ),
        "meshwright.comm.groups": "device_choice, registry, rendezvous",
        "meshwright.comm.groups.device_choice": "choose, device_of, own_entry, require_own_devices",
        "meshwright.comm.groups.launch": "first_failure, launch",
        "meshwright.comm.groups.python_group": "CpuTransport, GroupOptions, PythonGroup",
        "meshwright.comm.groups.registry": "PROCESS, ProcessState",
        "meshwright.comm.memory": "pages",
        "meshwright.comm.memory.pages": "BLOCK, PagePool",
        "meshwright.comm.memory.reusable_storage": (
            "LARGE, _StorageLine, line_of as reusable_storage_line_of"
        ),
        "meshwright.comm.observing": "late",
        "meshwright.comm.pending": "Launched, TransferWaiter",
        "meshwright.comm.shared_memory": "arena, backend, collectives",
        "meshwright.comm.shared_memory.arena": "ArenaLayout, Segment, SharedTensors",
        "meshwright.comm.shared_memory.collectives": "SLOT_BYTES",
        "meshwright.comm.shared_memory.reductions": "accumulate, check_reduction",
        "meshwright.comm.shared_memory.transfers": "CHANNEL_BYTES",
    }
)
