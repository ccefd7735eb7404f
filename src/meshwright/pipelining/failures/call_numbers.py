"""Numbers that tell to which call of a step a message belongs.

A call that ends before the step has begun on its rank is made again under the same number. Other
ranks may not have been asked for it, or wait in it: in the second case what they have sent, or are
about to receive, is of another batch than what the new call is about.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step on one rank. Times are nanoseconds of the clock on the wall."""

    earlier: int = 0
    """Calls of the same step that have ended before it had begun."""
    given_up: int = 0
    """When the last of those ended."""
    began: int = field(default_factory=time.time_ns)

    def numbers(self) -> list[int]:
        """This as a part of a message."""
        return [self.earlier, self.given_up, self.began]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Call:
        """Make a call of what `numbers` gave."""
        return cls(*numbers)

    def ended_below(self, other: Call) -> bool:
        """Check that the rank of ``other`` has given up a call that this rank waits in.

        Clocks are only asked where one rank has given up more calls than the other.
        """
        return self.earlier < other.earlier and self.began < other.given_up
