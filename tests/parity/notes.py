"""The reasons for what is not the same: a note for each name that differs or is absent.

A key is a name of the table, or a pattern of `fnmatch`; the first that fits counts. What the script
says of two signatures stands in the table anyway: a note says why.
"""

from __future__ import annotations

__all__ = ["ABSENT", "BEHAVIOR", "DIFFERENT"]

WORK_OF_A_STAGE = (
    "schedules of ours move tensors between stages themselves, so that a lost rank is named at its "
    "transfer; a schedule of one's own is given as a CSV or as actions"
)
SPECS = "ours cuts targets by spec, too, and runs with replicated or sharded stages"
JOINABLE = (
    "`model.join()` is there. The hooks by which `Join` runs several classes at once are not: its "
    "shadow collectives would come in another order than those that ours check; wrap the loop in "
    "`model.join()`"
)
ABSENT: dict[str, str] = {
    "DistributedDataParallel.scatter": (
        "of the mode with several devices in one process, which torch has removed"
    ),
    "DistributedDataParallel.to_kwargs": "the same",
    "DistributedDataParallel.gather": "the same",
    "DistributedDataParallel.join_hook": JOINABLE,
    "DistributedDataParallel.join_device": "the same",
    "DistributedDataParallel.join_process_group": "the same",
    "DistributedDataParallel.will_sync_module_buffers": (
        "a question of torch's own reducer; `broadcast_buffers` says whether they are kept equal"
    ),
    "PipelineStage.has_backward": (
        "schedules know it from their loss; `eval()` runs without a backward pass"
    ),
    "PipelineStage.get_*_ops": WORK_OF_A_STAGE,
    "PipelineStage.forward_maybe_with_nosync": WORK_OF_A_STAGE,
}
DIFFERENT: dict[str, str] = {
    "DistributedDataParallel": (
        "ours adds `unused_gradient` (what "
        "`.grad` becomes where no rank had one) and `stop_on_non_finite`"
    ),
    "FullyShardedDataParallel": "ours adds a check that gradients are finite",
    "FullyShardedDataParallel.named_*": "the same arguments, spelled out",
    "StateDictSettings": "ours has defaults: the full state dict",
    "fully_shard": (
        "None is the default policy; ours adds a check that gradients are finite, and equal starts"
    ),
    "UnshardHandle": "made by `unshard(async_op=True)` in both, not by users",
    "pipeline": "ours traces with other row counts on request",
    "PipelineStage": (
        "ours takes shapes, and weights that several stages share, where they cannot be found out"
    ),
    "PipelineScheduleMulti": (
        "the order of the schedules that are made of it, not that of torch's base: give what comes "
        "after `loss_fn` by keyword. `use_full_backward` and `defer_pp_recv` have no effect"
    ),
    "ScheduleLoopedBFS": (
        "arguments can be cut by spec, as in the other schedules: give what comes after "
        "`loss_fn` by keyword"
    ),
    "Schedule*.eval": "ours returns what `step` returns, and passes keywords to the loss",
    "PipelineSchedule*.eval": "ours returns what `step` returns, and passes keywords to the loss",
    "Schedule*": SPECS,
    "PipelineSchedule*": SPECS,
    "merge_chunks": "None cuts rows, as `split_args_kwargs_into_chunks` does by default",
}
# Names whose signature is torch's, and whose work is not.
BEHAVIOR: dict[str, str] = {
    "FSDPModule.set_reshard_after_forward": (
        "with False a pass of evaluation gathers again, and torch reads what the pass before "
        "gathered: a write through `.data` or of an optimizer leaves no trace that either could see"
    ),
    "FSDPModule.set_reshard_after_backward": (
        "with False units that got gradients are gathered again in the next forward, since an "
        "optimizer may have stepped; torch computes with the values of before the step"
    ),
    "FSDPModule.set_is_last_backward": (
        "with False over two axes the all-reduce of the last unit comes in the next backward; the "
        "number of collectives is the same"
    ),
}
