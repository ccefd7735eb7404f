"""Names inside of `meshwright.compiler`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.compiler.bucket_pass": "check_buckets, fuse_marks, peak_bytes",
        "meshwright.compiler.bucket_plan": "ALONE_BYTES, describe, marks_of, plan_marks",
        "meshwright.compiler.unit_pass": "check_units, keep_apart, place_units",
    }
)
