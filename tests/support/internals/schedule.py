"""Names inside of `meshwright.schedule`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.schedule.actions": (
            "B, BACKWARD, COMPUTE, F, I, PER_MICROBATCH, RECV_B, RECV_F, REDUCE_GRAD, RESHARD, "
            "SEND_B, SEND_F, UNSHARD, W, overlap"
        ),
        "meshwright.schedule.builders": (
            "BUILDERS, TWO_A_RANK, build, one_f_one_b, stage_ranks, zbv"
        ),
        "meshwright.schedule.checks": "check, check_lowered",
        "meshwright.schedule.list_scheduling": "arrange",
        "meshwright.schedule.lowering": "forward_part, lower, with_residency",
        "meshwright.schedule.measured": "bubble, compare, costs_of, last_step, schedule_of",
        "meshwright.schedule.messages": "Message, lanes, parts_of, read, received, sent",
        "meshwright.schedule.search": "built_schedules, refilled",
        "meshwright.schedule.simulate": "Costs, simulate",
        "meshwright.schedule.text": "dump_csv, load_csv, parse_csv, to_csv",
    }
)
