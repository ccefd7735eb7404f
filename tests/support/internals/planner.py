"""Names inside of `meshwright.planner`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.planner.constants": "Constants, priors, ranges",
        "meshwright.planner.fitting": "fit, linearize",
        "meshwright.planner.hardware": (
            "calibrated_file, hardware_names, load_hardware, require_machine, this_machine"
        ),
        "meshwright.planner.kernels": "Kernels, PassTimes",
        "meshwright.planner.layouts": (
            "LAYER_LISTS, RunLayout, Software, can_cut, rank_layers, rank_parameters, rank_stages, "
            "stage_layers, tensor_rules"
        ),
        "meshwright.planner.memory": "GIB, USABLE, flights, layer_activations, rank_memory",
        "meshwright.planner.network": "Group",
        "meshwright.planner.plans": "answer, to_plan",
        "meshwright.planner.predictions": "best_plan, predict",
        "meshwright.planner.published": "published_runs",
        "meshwright.planner.recompute": "RecomputeOption, choose, peak_of",
        "meshwright.planner.rehearsed": "rank_bytes",
        "meshwright.planner.scoring": "ranking",
        "meshwright.planner.search": "Searcher, changes, families, neighbors",
        "meshwright.planner.software": "OURS",
        "meshwright.planner.shapes": "from_config",
        "meshwright.planner.traced": "recompute_options",
        "meshwright.planner.utilization": "StepWork, work_of",
        "meshwright.planner.steps": "data_seconds, is_built, makespan, replayed, step_time",
    }
)
