"""What the server of ranks makes once, so that each rank, forked from it, has it.

A rank that reads or checks a plan would import pydantic and build its schema, a third of a second
of processor time; one that builds a model of transformers would import three seconds of it.
"""

from __future__ import annotations

import contextlib

import pydantic.type_adapter  # noqa: F401

from meshwright.plan import Plan
from support.internals.toml_source import adapter

adapter(Plan)
with contextlib.suppress(ImportError):  # its tests are skipped then
    import transformers.models.llama.modeling_llama  # noqa: F401
