"""Failures of ranks: seen, told, waited for, and compared.

Bottom-up:

    clock        time, pauses, threads, and waits in the server
    board        the run's store, in a thread of its own; notices that ranks leave there
    processes    processes as ``/proc`` shows them
    roll         who has come, and the processes of this host
    whereabouts  rank status: the answer of a rank to a roll call
    attendance   roll calls, and looks at processes that do not answer
    operations   operations that were issued, as reports name them
    failure      the first failure, and what a rank says of itself
    waiting      the one rule of all waits
    stuck_calls  calls of c10d that do not return
    watching     the thread that watches this process and its neighbors
    membership   the time of a rank in a run, from its first word to its last
    sameness     the one comparison of what all ranks must have alike
    events       comparisons of what ranks are about to do
"""

from __future__ import annotations

__all__: list[str] = []
