"""The named sets of rules, on tiny models of Hugging Face: nothing in them is without effect.

`tests/parity/test_hugging_face_models.py` trains the models over axis tensor.
"""

from __future__ import annotations

import pytest
import torch

from meshwright.plan import match_names
from support.hugging_face import KINDS, model_of
from support.internals.composition import RULES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
pytest.importorskip("transformers")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.rules])
def test_every_rule_of_a_set_is_of_use(name: str) -> None:
    with torch.device("meta"):
        modules = [found for found, _ in model_of(name).named_modules()]
    unused = [pattern for pattern in RULES[KINDS[name].rules] if not match_names(pattern, modules)]
    assert set(unused) <= {
        "**.self_attn.q_norm",  # of qwen3, which shares the set
        "**.self_attn.k_norm",
        "**.mlp.gate_proj",  # of models without experts
        "**.mlp.up_proj",
        "**.mlp.down_proj",
        "**.wi",  # of the first T5, whose layer has no gate
    }
