"""Names inside of `meshwright.pipelining`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.pipelining": "_ScheduleForwardOnly, backward, signature",
        "meshwright.pipelining.failures": "Failures, Turns",
        "meshwright.pipelining.p2p": "ROOM, ControlMessages, P2PChannels, P2PTransfers",
        "meshwright.pipelining.residency": "find_residencies",
        "meshwright.pipelining.runtime": "Listener",
        "meshwright.pipelining.schedules": "_is_compiled",
        "meshwright.pipelining.signature": "Signature, Values, signature_of",
        "meshwright.pipelining.splitting.balance": (
            "OperatorCosts, SLACK, best_cuts, cuttable, flops, parameters"
        ),
        "meshwright.pipelining.splitting.placement": "Placement",
        "meshwright.pipelining.ties": "TiedParameters",
    }
)
