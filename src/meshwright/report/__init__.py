"""What a run did, for readers: timelines as files that viewers open.

- ``chrome_trace``: a ``Timeline`` as a Chrome trace, which Perfetto shows, and back.
"""

from __future__ import annotations

from meshwright.report.chrome_trace import read_chrome_trace, write_chrome_trace

__all__ = ["read_chrome_trace", "write_chrome_trace"]
