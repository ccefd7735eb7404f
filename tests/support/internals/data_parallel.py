"""Names inside of `meshwright.data_parallel`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.data_parallel.checks.alignment": (
            "Alignment, BITS, NOTES, PATIENCE, SameWeights, bits_of"
        ),
        "meshwright.data_parallel.checks.starting_state": "synchronize",
        "meshwright.data_parallel.checks.step_watch": "StepWatch, Steps",
        "meshwright.data_parallel.checks.forward_writes": "BatchBuffers",
        "meshwright.data_parallel.distributed_parameters": "_Lent, MARK",
        "meshwright.data_parallel.modules.batch_norm": "LocalStatistics",
        "meshwright.data_parallel.modules.checkpoint_names": "SteppedOver",
        "meshwright.data_parallel.modules.nested": "Loan, tensors_kept_by",
        "meshwright.data_parallel.owned_matrices": "deal, sharers_of",
        "meshwright.data_parallel.replicas": "traced",
        "meshwright.data_parallel.replicas.bucket_layout": "GradientSlot, plan_buckets",
        "meshwright.data_parallel.replicas.buckets": "Bucket, KeptMemory",
        "meshwright.data_parallel.replicas.gradient_bucket": (
            "CommunicationHook, RegisteredHook, compressed_dtype"
        ),
        "meshwright.data_parallel.replicas.reducer": "GradientReducer",
        "meshwright.data_parallel.replicas.replicated": "check_names, replicate_with",
        "meshwright.data_parallel.replicas.traced": "Marking",
        "meshwright.data_parallel.sharded_modules.agreement": "Ledger, OrderedUnit, digest_of",
        "meshwright.data_parallel.sharded_modules.iteration": "Iteration",
        "meshwright.data_parallel.sharded_modules.module_hooks": "Driver, attach",
        "meshwright.data_parallel.sharded_modules.module_tree": "ModuleTree",
        "meshwright.data_parallel.shards": "buffer, sharding",
        "meshwright.data_parallel.shards.buffer": "BufferTypes, DataAxes, FlatBuffer",
        "meshwright.data_parallel.shards.dtensor_exposure": "HOME",
        "meshwright.data_parallel.shards.gradient_lines": "GradientLine, KeptLine",
        "meshwright.data_parallel.shards.parameter_group": "ParameterGroup, UnitSettings",
        "meshwright.data_parallel.shards.slot": "accumulator_of, collect_slots, group_slots",
        "meshwright.data_parallel.shards.unit": "Exposure, Phase, Unit",
    }
)
