"""Names inside of `meshwright.compiler`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.compiler.bucket_pass": (
            "ALONE_BYTES, check_buckets, describe, fuse_marks, marks_of, peak_bytes, plan_marks"
        ),
        "meshwright.compiler.unit_pass": "check_units, keep_apart, place_units",
    }
)
