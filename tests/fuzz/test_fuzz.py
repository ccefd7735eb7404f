"""Drawn cases of models, layouts and loops train as one process does, or are refused by name."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fuzz.cases import CONTEXT, EXPERTS, Case, draw_case
from fuzz.judging import Report, check
from fuzz.layouts import ByHand, Part
from fuzz.models import ModelSpec
from fuzz.training import Fault, is_refusal
from meshwright.errors import CollectiveMismatchError

SLOW = pytest.param(6, 34, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 16), pytest.param(16, 64, marks=pytest.mark.slow)]
)
def test_drawn_cases_train_as_one_process_or_are_refused_by_name(first: int, count: int) -> None:
    # The same each time, so that whoever sees it fail can run it again.
    _judge(first, count=count)


@pytest.mark.parametrize(("first", "count"), [(0, 6), SLOW])
def test_drawn_cases_with_axis_expert(first: int, count: int) -> None:
    _judge(EXPERTS + first, count=count)


@pytest.mark.parametrize(("first", "count"), [(0, 6), SLOW])
def test_drawn_cases_with_axis_context(first: int, count: int) -> None:
    _judge(CONTEXT + first, count=count)


@pytest.mark.soak
def test_as_many_fresh_cases_as_fit_in_three_minutes() -> None:
    begun, first = time.monotonic(), random.SystemRandom().randrange(10**6) * 1000
    while time.monotonic() - begun < 170:
        _judge(first, count=60)
        first += 60


def _judge(first: int, count: int) -> None:
    print(f"python -m tests.fuzz --cases {count} --seed {first}")
    report = check([draw_case(number) for number in range(first, first + count)])
    print(report)
    assert not report.findings, f"{report}\nOne again: python -m tests.fuzz --case NUMBER"
    assert report.count("same") > 0.3 * count


MODEL = ModelSpec(seed=1, blocks=(("Widen", 1), ("Residual", 2)), is_chain=True)


def _case(layout: str = "replicate") -> Case:
    return Case(seed=5, world=2, backend="shm", model=MODEL, layout=layout)


def _planted(fault: Fault, seconds: float = 20.0) -> Report:
    return check([_case()], fault=fault, seconds=seconds)


def test_an_untouched_case_is_the_same() -> None:
    assert check([_case(), _case("fully_shard")]).count("same") == 2


def test_a_wrong_gradient_is_found() -> None:
    def longer(laid: ByHand) -> None:
        gradient = laid.named()["0.layer.weight"].grad
        assert gradient is not None
        gradient.mul_(1 + 1e-8)

    (finding,) = _planted(lambda case: _spoilt(longer, at=3)).findings
    assert finding.kind == "differs"
    assert "the gradient of '0.layer.weight' differs by" in finding.text


@pytest.mark.slow
def test_a_wrong_weight_of_one_rank_is_found() -> None:
    def moved(laid: ByHand) -> None:
        laid.named()["0.layer.weight"].add_(1e-7)

    (finding,) = _planted(lambda case: _spoilt(moved, at=1)).findings
    assert finding.kind == "differs"
    assert "'0.layer.weight' after the step differs by" in finding.text


@contextlib.contextmanager
def _spoilt(what: Callable[[ByHand], None], at: int) -> Iterator[None]:
    """After the backward of step ``at`` rank 1 does ``what``."""
    train = ByHand.train

    def spoilt(laid: ByHand, parts: Sequence[Part], step: int) -> float:
        loss = train(laid, parts, step)
        if step == at and dist.get_rank() == 1:
            with torch.no_grad():
                what(laid)
        return loss

    with mock.patch.object(ByHand, "train", spoilt):
        yield


def test_ranks_that_start_apart_may_be_refused_and_others_not() -> None:
    error = CollectiveMismatchError("expected 'weight' to have the same values on all ranks")
    assert is_refusal(error, replace(_case("fully_shard"), loop=("other start",)))
    assert not is_refusal(error, _case("fully_shard"))


def test_what_optimizers_and_clipping_get_is_what_the_module_holds() -> None:
    loop = ("clip torch", "new parameter")
    trained = [
        replace(_case("replicate"), loop=loop),
        replace(_case("fully_shard"), loop=loop[:1]),
    ]
    assert check(trained).count("same") == len(trained)
    assert check([replace(_case("fully_shard"), loop=loop)]).count("refused") == 1


@pytest.mark.slow
def test_a_hang_is_found_within_its_deadline() -> None:
    @contextlib.contextmanager
    def hangs(case: Case) -> Iterator[None]:
        time.sleep(600)
        yield

    (finding,) = _planted(hangs, seconds=2.0).findings
    assert finding.kind == "hangs"


def test_an_error_that_is_not_ours_is_found() -> None:
    @contextlib.contextmanager
    def fails(case: Case) -> Iterator[None]:
        torch.zeros(2) @ torch.zeros(3)
        yield

    (finding,) = _planted(fails).findings
    assert finding.kind == "raised"
    assert "inconsistent tensor size" in finding.text
