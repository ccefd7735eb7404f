"""What a call of `ranks` gives: values in rank order, any body, any arguments, little time."""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from meshwright.comm import communicator, connect
from meshwright.testing import Ranks


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def sum_of_ranks(start: float, *, scale: float = 1.0) -> float:
    world = communicator()
    total = torch.tensor(start + world.rank, dtype=torch.float64)
    world.all_reduce(total).wait()
    return total.item() * scale


class TestBodies:
    def test_module_function_with_arguments(self, ranks: Ranks) -> None:
        assert ranks(4, sum_of_ranks, 1.0, scale=2.0) == [20.0] * 4

    def test_nested_function_with_closure(self, ranks: Ranks) -> None:
        factor = torch.arange(3.0)

        class Scale(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) if x.dim() > 5 else x * factor

        def body() -> torch.Tensor:
            return Scale()(torch.full((3,), float(communicator().rank)))

        for rank, value in enumerate(ranks(2, body)):
            torch.testing.assert_close(value, factor * rank)

    def test_closure_over_a_function_of_this_module(self, ranks: Ranks) -> None:
        assert ranks(2, lambda: sum_of_ranks(0.0)) == [1.0, 1.0]

    def test_one_rank_and_no_value(self, ranks: Ranks) -> None:
        assert ranks(1, lambda: None) == [None]

    def test_classes_of_the_test_come_back_as_themselves(self, ranks: Ranks) -> None:
        @dataclass(frozen=True)
        class Local:
            rank: int

        def body() -> tuple[Point, Local]:
            rank = communicator().rank
            return Point(rank, 2), Local(rank)

        assert ranks(2, body) == [(Point(0, 2), Local(0)), (Point(1, 2), Local(1))]

    def test_large_values_travel(self, ranks: Ranks) -> None:
        big = torch.arange(3_000_000)

        def body() -> torch.Tensor:
            return big + communicator().rank

        values = ranks(2, body)
        assert torch.equal(values[1], big + 1)

    def test_parameters_and_gradients_travel(self, ranks: Ranks) -> None:
        def body() -> torch.nn.Parameter:
            weight = torch.nn.Parameter(torch.ones(2))
            (weight * 3).sum().backward()
            return weight

        value = ranks(1, body)[0]
        assert isinstance(value, torch.nn.Parameter)
        assert value.requires_grad

    def test_unsendable_argument_is_refused_before_it_runs(self, ranks: Ranks) -> None:
        with pytest.raises(TypeError, match="cannot be sent between this process and its ranks"):
            ranks(1, print, (number for number in range(3)))

    def test_needs_a_rank(self, ranks: Ranks) -> None:
        with pytest.raises(ValueError, match="at least 1 rank, found 0"):
            ranks(0, print)

    def test_the_body_may_connect_by_itself(self, ranks: Ranks) -> None:
        def body() -> tuple[int, int, str]:
            world = connect(timeout=20.0)
            return world.rank, world.size, os.environ["LOCAL_RANK"]

        assert ranks(2, body, connected=False) == [(0, 2, "0"), (1, 2, "1")]

    def test_output_of_a_good_call_is_passed_on(
        self, ranks: Ranks, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def body() -> None:
            print("here is", communicator().rank)
            os.write(2, b"from below\n")

        ranks(2, body)
        lines = capsys.readouterr().out.splitlines()
        assert "[rank 0] here is 0" in lines
        assert lines.count("[rank 1] from below") == 1


def test_compiled_bodies(ranks: Ranks) -> None:
    def body() -> list[float]:
        @torch.compile(backend="aot_eager")
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        value = double(torch.ones(2) * communicator().rank)
        communicator().all_reduce(value).wait()
        return value.tolist()

    assert ranks(2, body) == [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_twenty_calls_of_four_ranks(ranks: Ranks) -> None:
    ranks(4, sum_of_ranks, 0.0)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert ranks(4, sum_of_ranks, 0.0) == [6.0] * 4
        times.append(time.perf_counter() - start)
    # Shown with -rP, not asserted: the machine may be busy.
    sys.stdout.write(
        f"4 ranks: mean {statistics.mean(times):.3f} s, median {statistics.median(times):.3f} s, "
        f"most {max(times):.3f} s a call\n"
    )
