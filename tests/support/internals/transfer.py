"""Names inside of `meshwright.transfer`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside({"meshwright.transfer": "_overlaps as overlaps"})
