"""Names inside of `meshwright.pipelining`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.pipelining": "_ScheduleForwardOnly, backward, signature",
        "meshwright.pipelining.failures": "Failures, Turns",
        "meshwright.pipelining.messages": "known_signatures",
        "meshwright.pipelining.messages.lanes": "Lanes",
        "meshwright.pipelining.messages.letters": "Letters, ROOM",
        "meshwright.pipelining.messages.metadata": "Signature, Values, signature_of",
        "meshwright.pipelining.messages.transfers": "Transfers",
        "meshwright.pipelining.splitting.balance": (
            "Costs, SLACK, best_cuts, cuttable, flops, parameters"
        ),
        "meshwright.pipelining.splitting.placement": "Placement",
        "meshwright.pipelining.ties": "TiedParameters",
    }
)
