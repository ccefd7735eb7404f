"""Every folder of transformers whose experts are exchangeable: tiny models on two ranks."""

from __future__ import annotations

import time
import traceback

import pytest

from meshwright.testing import Ranks
from support.expert_parallel.hugging_face import check_sum, folders, import_folder

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TEN = (
    *("aria", "deepseek_v4", "gemma4", "glm5_next", "granitemoehybrid", "jamba", "muse_spark"),
    *("nemotron_h", "openai_privacy_filter", "qwen3_next"),
)
"""Transposed, no gate, bias, norm after the experts, gates of their own; all kinds of layers."""

WITHOUT: dict[str, str] = {}
"""Folders of which no tiny model can be built, and why."""


def run(ranks: Ranks, names: list[str]) -> dict[str, str]:
    """Check the models of ``names`` one after the other on the same ranks; what failed, and how."""
    for name in names:
        import_folder(name)

    def body() -> dict[str, str]:
        failed: dict[str, str] = {}
        for name in names:
            try:
                check_sum(name)
            except Exception:
                failed[name] = traceback.format_exc(limit=-3)
        return failed

    first, second = ranks(2, body, timeout=120 + 15 * len(names))
    return {**second, **first}


def test_ten_folders_that_differ(ranks: Ranks) -> None:
    failed = run(ranks, list(TEN))
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


@pytest.mark.soak
def test_all_folders(ranks: Ranks) -> None:
    """A new folder fails here until it passes or `WITHOUT` says why it cannot."""
    names = folders()
    began = time.monotonic()
    failed = run(ranks, [name for name in names if name not in WITHOUT])
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    passed = len(names) - len(WITHOUT)
    print(f"{passed} of {len(names)} folders passed in {time.monotonic() - began:.0f} s")
    assert set(WITHOUT) <= set(names)
    assert passed >= 60
