"""Failures of ranks: seen, told, waited for, and compared.

Bottom-up:

    processes   processes as ``/proc`` shows them
    store       the store client: requests in a thread of its own, waits in the server, time
    status      rank status: the answer of a rank to a roll call
    liveness    who has come, roll calls, and looks at processes that do not answer
    failure     the first failure, and what a rank says of itself
    waiting     the bounded wait: the one rule of all waits
    watchdog    the thread that watches this process and its neighbors
    membership  the time of a rank in a run, from its first word to its last
    sameness    the one comparison of what all ranks must have alike
    events      comparisons of what ranks are about to do
"""

from __future__ import annotations

__all__: list[str] = []
