"""Names inside of `meshwright.composition`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.composition": "context_rules, expert_rules, trainable",
        "meshwright.composition.carried_plans": (
            "carried_plan, carries, expert_modules, stage_starts, unknown_words"
        ),
        "meshwright.composition.data_layout": "LayoutCommunicators, ReplicatedLayout",
        "meshwright.composition.example_run": "copied, observe",
        "meshwright.composition.expert_rules": "expert_problems, expert_split, expert_styles",
        "meshwright.composition.laying_out": "recompute_modules, split_over_experts",
        "meshwright.composition.pipelined": "PipelinedLayout, PipelinedTrainable",
        "meshwright.composition.stages": (
            "_keep_unused, _partition, chunks_of, cut_model, order_of"
        ),
        "meshwright.composition.tensor_rules": (
            "ModelCut, RULES, WORDS, origin_of_rules, rule_problems"
        ),
        "meshwright.composition.whole_run": "AxisSplit, WholeRun",
    }
)
