"""Failures of ranks: detection, publication, bounded waits, and comparisons.

Bottom-up:

    processes   processes as ``/proc`` shows them
    store       the store client: requests in a thread of its own, waits in the server, time
    status      rank status: the answer of a rank to a roll call
    liveness    sign-in of ranks, roll calls, and inspection of processes that do not answer
    failure     the first failure, published for all ranks
    waiting     the bounded wait: the one rule of all waits
    watchdog    the thread that watches this process and its neighbors
    membership  a rank's membership in a run, from joining to leaving
    sameness    the comparison of values that must be equal on all ranks
    events      comparisons of what ranks are about to do
"""

from __future__ import annotations

__all__: list[str] = []
