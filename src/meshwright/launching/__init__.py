"""Runs functions on several processes of this machine: `meshwright.launch`, and ranks of tests.

Bottom-up:

    wire          messages and their bytes
    modules       test modules in ranks
    outcome       how ranks end
    server        the clean process that ranks are forked from, and the supervisor of a call
    pool          the caller's side

::

    caller ── Pool ──(socket)── server ── supervisor ─┬─ rank 0
                                 │         (a call)    ├─ rank 1
                                 │                     └─ ...
                      torch loaded once, one thread; forks only

The caller's side loads no torch. Commands are started as ranks by `comm.groups.launch`.
"""

from __future__ import annotations

__all__: list[str] = []
