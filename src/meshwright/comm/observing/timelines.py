"""Measurements of every rank, as one timeline."""

from __future__ import annotations

from meshwright.comm.collectives import Communicator
from meshwright.comm.observing.observers import Timer
from meshwright.timeline import Timeline


def gather_timeline(timer: Timer, communicator: Communicator) -> Timeline:
    """Gather what ``timer`` has measured on all ranks of ``communicator``, who call it together.

    Events have the world's numbers of the ranks. Clocks of one machine agree; those of several do
    not.
    """
    mine = timer.timeline(communicator.ranks[communicator.rank])
    answers = communicator.gather_bytes(mine.to_json().encode(), label="timelines")
    return Timeline().merge(Timeline.from_json(answer.decode()) for answer in answers)
