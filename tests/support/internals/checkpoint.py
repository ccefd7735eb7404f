"""Names inside of `meshwright.checkpoint`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.checkpoint.background": "PendingSave, Staging, begin, staging",
        "meshwright.checkpoint.claims": "Claim, FOLDERS, GRACE, Holder",
        "meshwright.checkpoint.document": "MAX_DOCUMENT_BYTES, canonical, check_json, seal, unseal",
        "meshwright.checkpoint.exchange.weights": "weights_of",
        "meshwright.checkpoint.manifest": "covers, from_bytes, to_bytes",
        "meshwright.checkpoint.pieces": "Held, assign, byte_views, describe, marked, torch_dtype",
        "meshwright.checkpoint.tensor_file": "DTYPES",
        "meshwright.checkpoint.together": "Alone",
        "meshwright.checkpoint.training": "restoring",
        "meshwright.checkpoint.training.named_optimizer": "NamedOptimizer",
        "meshwright.checkpoint.training.wrapped": "ModelState, plain_names",
        "meshwright.checkpoint.writing": "SaveRequest",
    }
)
