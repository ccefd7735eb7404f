"""What the server of ranks makes once, so that each rank, forked from it, has it.

A rank that reads or checks a plan would import pydantic and build its schema, a third of a second
of processor time.
"""

from __future__ import annotations

import pydantic.type_adapter  # noqa: F401

from meshwright.plan import Plan
from support.internals.toml_source import adapter

adapter(Plan)
