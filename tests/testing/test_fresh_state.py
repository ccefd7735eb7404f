"""Every body starts from the same state, whatever the bodies before it have done."""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed
from torch._dynamo.utils import counters

from meshwright.comm import communicator
from meshwright.testing import Ranks, RanksFailed


def disturb() -> None:
    """What the bodies of careless tests leave behind."""
    torch.manual_seed(communicator().rank + 100)
    random.seed(7)
    numpy.random.seed(9)
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    torch._dynamo.config.cache_size_limit = 1
    torch._inductor.config.fallback_random = True
    counters["stats"]["disturbed"] += 1
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["MESHWRIGHT_DISTURBED"] = "1"
    warnings.simplefilter("ignore")


def state() -> dict[str, object]:
    return {
        "draws": (torch.rand(2).tolist(), random.random(), numpy.random.rand()),
        "debug level": torch.distributed.get_debug_level().name,
        "dynamo": torch._dynamo.config.cache_size_limit,
        "inductor": torch._inductor.config.fallback_random,
        "counters": dict(counters["stats"]),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": "MESHWRIGHT_DISTURBED" in os.environ,
        "threads": torch.get_num_threads(),
        "filters": [str(row) for row in warnings.filters],
    }


def test_a_body_cannot_disturb_the_next(ranks: Ranks) -> None:
    before = ranks(2, state)
    ranks(2, disturb)
    after = ranks(2, state)
    assert after == before
    assert before[0] == before[1]
    assert before[0]["debug level"] == "OFF"
    assert before[0]["threads"] == 1


def test_the_environment_is_the_callers(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHWRIGHT_SEEN", "by the ranks")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def body() -> tuple[str | None, str | None, str, bool]:
        here = os.getcwd()
        return os.environ.get("MESHWRIGHT_SEEN"), os.environ.get("HOME"), here, here in sys.path

    assert ranks(1, body) == [("by the ranks", None, str(tmp_path), True)]


def test_warnings_are_errors_as_in_the_caller(ranks: Ranks) -> None:
    def body() -> None:
        warnings.warn("noticed", UserWarning, stacklevel=1)

    with pytest.raises(RanksFailed, match="UserWarning: noticed"):
        ranks(1, body)


@pytest.mark.filterwarnings("ignore:noticed")
def test_filters_of_the_test_hold_in_its_ranks(ranks: Ranks) -> None:
    def body() -> None:
        warnings.warn("noticed", UserWarning, stacklevel=1)

    ranks(1, body)
