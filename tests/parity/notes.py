"""The reasons for what is not the same: a note for each name that differs or is absent.

A key is a name of the table, or a pattern of `fnmatch`; the first that fits counts. What the script
says of two signatures stands in the table anyway: a note says why.
"""

from __future__ import annotations

__all__ = ["ABSENT", "BEHAVIOR", "DIFFERENT"]

WORK_OF_A_STAGE = (
    "Meshwright's schedules move the tensors between stages, so that errors name the transfer of a "
    "lost rank; pass a custom schedule as a CSV file or as actions"
)
SPECS = "also splits targets by spec, and runs replicated or sharded stages"
JOINABLE = (
    "only `model.join()` exists: wrap the loop in it. With the hooks that let `Join` run several "
    "classes at once, shadow collectives would come in another order than the checks expect"
)
ABSENT: dict[str, str] = {
    "DistributedDataParallel.scatter": (
        "part of the mode with several devices in one process, which torch has removed"
    ),
    "DistributedDataParallel.to_kwargs": "the same",
    "DistributedDataParallel.gather": "the same",
    "DistributedDataParallel.join_hook": JOINABLE,
    "DistributedDataParallel.join_device": "the same",
    "DistributedDataParallel.join_process_group": "the same",
    "DistributedDataParallel.will_sync_module_buffers": (
        "for torch's own reducer; `broadcast_buffers` tells whether buffers are kept equal"
    ),
    "PipelineStage.has_backward": (
        "a schedule knows from its loss; `eval()` runs without a backward pass"
    ),
    "PipelineStage.get_*_ops": WORK_OF_A_STAGE,
    "PipelineStage.forward_maybe_with_nosync": WORK_OF_A_STAGE,
}
DIFFERENT: dict[str, str] = {
    "DistributedDataParallel": (
        "`unused_gradient` sets what `.grad` becomes where no rank had one; `stop_on_non_finite` "
        "checks that gradients are finite"
    ),
    "FullyShardedDataParallel": "checks that gradients are finite",
    "FullyShardedDataParallel.named_*": "the same arguments, by name",
    "StateDictSettings": "has defaults: the full state dict",
    "fully_shard": (
        "None is the default policy; can check that gradients are finite and that ranks start equal"
    ),
    "UnshardHandle": "`unshard(async_op=True)` makes it, not users, in both",
    "pipeline": "can trace for other numbers of rows",
    "PipelineStage": ("takes edges and shared weights where it cannot infer them"),
    "PipelineScheduleMulti": (
        "the order is that of the derived schedules, not that of torch's base class: pass "
        "everything after `loss_fn` by keyword. `use_full_backward` and `defer_pp_recv` have no "
        "effect"
    ),
    "ScheduleLoopedBFS": (
        "also splits arguments by spec, as the other schedules do: pass everything after "
        "`loss_fn` by keyword"
    ),
    "Schedule*.eval": "returns what `step` returns, and passes keywords to the loss",
    "PipelineSchedule*.eval": "returns what `step` returns, and passes keywords to the loss",
    "Schedule*": SPECS,
    "PipelineSchedule*": SPECS,
    "merge_chunks": "None splits rows, as `split_args_kwargs_into_chunks` does by default",
}
# Names whose signature is torch's, and whose work is not.
BEHAVIOR: dict[str, str] = {
    "FSDPModule.set_reshard_after_forward": (
        "with False, an evaluation pass gathers again. torch reuses what the previous pass "
        "gathered, although nobody can detect a write through `.data` or by an optimizer in between"
    ),
    "FSDPModule.set_reshard_after_backward": (
        "with False, units with gradients are gathered again in the next forward, since an "
        "optimizer may have stepped; torch computes with the values from before the step"
    ),
    "FSDPModule.set_is_last_backward": (
        "with False over two axes, the all-reduce of the last unit runs in the next backward; the "
        "number of collectives is the same"
    ),
}
