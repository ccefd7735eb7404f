"""Compiled replicas against eager ones and one process: gradients, refusals, settings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.compiler import aot_backend, compiled_autograd, counters
from meshwright.data_parallel import (
    DistributedDataParallel,
    GradBucket,
    MixedPrecision,
    keep_batch_norm_local,
    replicate,
)
from meshwright.data_parallel.comm_hooks import bf16_compress_hook
from meshwright.errors import CollectiveMismatchError, CommunicationError
from meshwright.testing import Ranks, RanksFailed

WIDTH = 8


class Mixed(nn.Module):
    """Tied, frozen and unused parameters, two dtypes, buffers, a path that ``used`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        keep_batch_norm_local(self.norm)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.breaks = False

    def forward(self, x: torch.Tensor, *, used: bool = False) -> torch.Tensor:
        x = self.frozen(self.norm(checkpoint(self.first, x, use_reentrant=False)))
        if self.breaks:
            torch._dynamo.graph_break()
        if used:
            x = x + self.unused(x)
        return self.tied(x) + self.wide(x.double())


def mixed(**settings: bool) -> Mixed:
    torch.manual_seed(0)
    model = Mixed()
    vars(model).update(settings)
    return model


def rank_and_size() -> tuple[int, int]:
    axis = communicator(None, "replicate")
    return axis.rank, axis.size


def batch(step: int) -> torch.Tensor:
    rank, size = rank_and_size()
    torch.manual_seed(1000 + step * size + rank)
    return torch.randn(4, WIDTH)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=aot_backend, **options)


def same_gradients(expected: nn.Module, *found: nn.Module) -> None:
    for model in found:
        rows = zip(expected.named_parameters(), model.parameters(), strict=True)
        for (name, one), other in rows:
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                assert torch.equal(one.grad, other.grad), name


# ------------------------------------------------------------------------------- same numbers


def train_three(*, breaks: bool) -> None:
    eager = replicate(mixed(breaks=breaks))
    inner, wrapped = replicate(mixed(breaks=breaks)), DistributedDataParallel(mixed(breaks=breaks))
    models = [eager, compiled(inner), compiled(wrapped, fullgraph=not breaks)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model in models:
            model(batch(step)).square().mean().backward()
        same_gradients(eager, inner, wrapped)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(eager.buffers(), inner.buffers(), strict=True):
        assert torch.equal(one, other)
    # Float64 and float32 go apart; where a graph breaks, hooks reduce.
    assert counters["ddp_buckets"] == (0 if breaks else 2)


@pytest.mark.parametrize("breaks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_eager_mode(ranks: Ranks, breaks: bool) -> None:
    ranks(2, train_three, breaks=breaks)


def accumulate(patterns: Sequence[tuple[bool, ...]], *, in_hooks: bool) -> None:
    """Each pattern says of its passes whether they reduce; gradients are zeroed behind it."""
    if in_hooks:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    eager, inner = replicate(mixed()), replicate(mixed())
    model = compiled(inner)
    for pattern, zeroes in itertools.product(patterns, (True, False)):
        for step, reduces in enumerate(pattern):
            for each in (eager, inner):
                each.set_requires_gradient_sync(reduces)
            eager(batch(step)).square().mean().backward()
            with compile_backward() if in_hooks else contextlib.nullcontext():
                model(batch(step)).square().mean().backward()
            rows = zip(eager.parameters(), inner.parameters(), strict=True)
            for one, other in rows:
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-6)
        if zeroes or not pattern[-1]:
            eager.zero_grad()
            inner.zero_grad()


def compile_backward() -> contextlib.AbstractContextManager[None]:
    return compiled_autograd(lambda graph: torch.compile(graph, backend=aot_backend))


def patterns(length: int) -> list[tuple[bool, ...]]:
    return [p for n in range(1, length + 1) for p in itertools.product((True, False), repeat=n)]


@pytest.mark.slow
def test_accumulation_reduces_what_was_kept(ranks: Ranks) -> None:
    ranks(2, accumulate, [(False, True), (True, False, False, True)], in_hooks=False)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("in_hooks", [False, True])
def test_every_accumulation_of_four_passes(ranks: Ranks, in_hooks: bool) -> None:
    ranks(2, accumulate, patterns(4), in_hooks=in_hooks, timeout=280)


def count_compilations() -> int:
    model = replicate(nn.Linear(WIDTH, WIDTH))
    run = compiled(model)
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        run(batch(step)).square().mean().backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_two_compilations_serve_an_alternating_run(ranks: Ranks) -> None:
    assert ranks(2, count_compilations) == [2, 2]


class Random(nn.Module):
    """A model that a number makes up: sizes, ties, unused and frozen parameters, dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draws = random.Random(seed)
        torch.manual_seed(seed)
        widths = [self.draws.choice([2, 5, 8, 33]) for _ in range(self.draws.randint(2, 5))]
        pairs = itertools.pairwise([WIDTH, *widths, WIDTH])
        self.layers = nn.ModuleList(
            nn.Linear(*pair, bias=self.draws.random() < 0.7) for pair in pairs
        )
        self.extra = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if self.draws.random() < 0.5:
            self.extra[1].weight = self.extra[0].weight
        self.extra[2].to(self.draws.choice([torch.float64, torch.bfloat16]))
        self.used = [self.draws.random() < 0.7 for _ in self.extra]
        for parameter in self.parameters():
            parameter.requires_grad_(self.draws.random() < 0.85)
        self.layers[0].weight.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for used, layer in zip(self.used, self.extra, strict=True):
            if used:
                x = x + layer(x.to(layer.weight.dtype)).to(x.dtype)
        return x


def fuzz(seeds: Sequence[int]) -> None:
    for seed in seeds:
        torch._dynamo.reset()
        eager = replicate(Random(seed), bucket_cap_mb=0.0003)
        inner = replicate(Random(seed), bucket_cap_mb=0.0003)
        whole, model = Random(seed), compiled(inner)
        rank, size = rank_and_size()
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(4 * size, WIDTH)
            share = x[4 * rank : 4 * rank + 4]
            for each in (eager, model):
                each(share).square().mean().backward()
            whole(x).square().mean().backward()
            same_gradients(eager, inner)
            for one, other in zip(whole.parameters(), inner.parameters(), strict=True):
                if one.grad is not None:
                    close = {"rtol": 0.05, "atol": 0.01} if one.dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(other.grad, one.grad, **close)
            for each in (eager, inner, whole):
                each.zero_grad()


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_many_models_that_numbers_make_up(ranks: Ranks, size: int) -> None:
    ranks(size, fuzz, range(20), timeout=280)


def compress() -> None:
    eager, inner = replicate(mixed()), replicate(mixed())
    model = compiled(inner)
    eager.register_comm_hook(None, bf16_compress_hook)
    model(batch(0)).square().mean().backward()
    inner.zero_grad()
    inner.register_comm_hook(None, bf16_compress_hook)  # a graph is there, without the casts
    model(batch(1)).square().mean().backward()
    eager(batch(1)).square().mean().backward()
    same_gradients(eager, inner)
    assert counters["unfused"] == 0
    assert counters["ddp_buckets"] == 1, "both dtypes go together, as casts"


@pytest.mark.slow
def test_a_hook_that_compresses_becomes_casts(ranks: Ranks) -> None:
    ranks(2, compress)


def own_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(2))
    return future


def leave_to_hooks() -> None:
    inner = replicate(mixed())
    inner.register_comm_hook(None, own_hook)
    compiled(inner)(batch(0)).square().mean().backward()
    local = mixed()
    local(batch(0)).square().mean().backward()
    torch.testing.assert_close(inner.first.weight.grad, 2 * local.first.weight.grad)
    assert counters["ddp_buckets"] == 0
    torch._dynamo.config.optimize_ddp = "python_reducer"
    with pytest.raises(Exception, match="own_hook sees whole buckets"), compile_backward():
        inner(batch(1)).square().mean().backward()


@pytest.mark.slow
def test_another_hook_is_left_outside_or_refused(ranks: Ranks) -> None:
    ranks(2, leave_to_hooks)


class Tokens(nn.Module):
    """Takes no floating-point input that a cast would show in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x))


def compute_narrow() -> None:
    outputs: list[torch.Tensor] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        precision = MixedPrecision(param_dtype=torch.bfloat16)
        model = DistributedDataParallel(Tokens(), mixed_precision=precision)
        output = (compiled(model) if compiles else model)(torch.arange(5))
        output.sum().backward()
        outputs += [output, model.module.table.weight.grad]
    assert outputs[0].dtype is outputs[2].dtype is torch.bfloat16
    torch.testing.assert_close(outputs[2:], outputs[:2])


@pytest.mark.slow
def test_parameters_that_are_cast_are_left_to_the_hooks(ranks: Ranks) -> None:
    ranks(2, compute_narrow)


def without_the_pass() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    eager, inner = replicate(mixed()), replicate(mixed())
    model = torch.compile(inner, backend="aot_eager")
    for _ in range(2):
        model(batch(0)).square().mean().backward()
        inner.zero_grad()
    model(batch(0)).square().mean().backward()
    eager(batch(0)).square().mean().backward()
    same_gradients(eager, inner)
    assert counters["unfused"] > 0
    return texts


class Either(nn.Module):
    """A module of two layers, the second of which a pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.one(x) + self.other(x) if both else self.one(x)


def checks_without_the_pass() -> None:
    """Gradients that were left on their rank are reduced, and a step left out is named."""
    eager, inner = replicate(Either()), replicate(Either())
    x = torch.ones(2, 6) * (communicator().rank + 1)
    for model, held in ((eager, eager), (torch.compile(inner, backend="aot_eager"), inner)):
        optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
        for is_last in (False, True):
            held.set_requires_gradient_sync(is_last)
            model(x, not is_last).square().mean().backward()
        optimizer.step()  # no warning
        optimizer.zero_grad()
    for expected, found in zip(eager.parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    model(x, True).square().mean().backward()
    if communicator().rank:
        optimizer.step()
    with pytest.raises(CollectiveMismatchError, match="gradients of different passes"):
        model(x, True).square().mean().backward()


@pytest.mark.slow
def test_a_backend_without_the_pass_is_checked(ranks: Ranks) -> None:
    ranks(2, checks_without_the_pass)


@pytest.mark.slow
def test_a_backend_without_the_pass_is_right_and_says_so(ranks: Ranks) -> None:
    for texts in ranks(2, without_the_pass):
        assert len([text for text in texts if "one by one" in text]) == 1


# ------------------------------------------------------------------------------- differences


def use_on_one_rank() -> str:
    rank, _ = rank_and_size()
    model = compiled(replicate(mixed()))
    model(batch(0)).square().mean().backward()
    with pytest.raises(CollectiveMismatchError) as caught:
        model(batch(1), used=rank == 1).square().mean().backward()
    return str(caught.value)


@pytest.mark.slow
def test_a_path_that_one_rank_takes_is_named_on_all(ranks: Ranks) -> None:
    for text in ranks(2, use_on_one_rank):
        assert 'unused.weight is nothing on ranks [0]; "in the graph" on ranks [1]' in text


def step_apart() -> str:
    rank, _ = rank_and_size()
    inner = replicate(mixed())
    model = compiled(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        if step == 0 or rank == 0:
            optimizer.step()
    with pytest.raises(CollectiveMismatchError) as caught:
        model(batch(2)).square().mean().backward()
    return str(caught.value)


@pytest.mark.slow
def test_ranks_at_different_steps_are_named(ranks: Ranks) -> None:
    for text in ranks(2, step_apart):
        assert "different passes" in text


def compile_alone() -> list[str]:
    """Rank 1 meets another shape: it compiles anew while rank 0 waits, and both go on."""
    rank, _ = rank_and_size()
    eager, inner = replicate(mixed()), replicate(mixed())
    model = compiled(inner, dynamic=False)
    for step in range(2):
        x = batch(step)[: 3 if step and rank else 4]
        for each in (eager, model):
            each.zero_grad()
            each(x).square().mean().backward()
        same_gradients(eager, inner)
    with observe(recorder := Recorder()):
        model(batch(2)).square().mean().backward()
    return [c.label for c in recorder.collectives]


@pytest.mark.slow
def test_a_rank_that_compiles_alone_is_waited_for(ranks: Ranks) -> None:
    for labels in ranks(2, compile_alone):
        assert labels == ["agree on the gradients of a compiled graph"]


# --------------------------------------------------------------------- copies and caches


def sizes_of_buckets(cap: float) -> int:
    inner = replicate(mixed(), bucket_cap_mb=cap)
    torch.compile(inner)(batch(0)).square().mean().backward()
    return counters["ddp_buckets"]


@pytest.mark.slow
def test_another_bucket_size_is_no_stale_plan_from_a_cache(ranks: Ranks) -> None:
    assert ranks(2, sizes_of_buckets, 25, timeout=280) == [2, 2]
    assert ranks(2, sizes_of_buckets, 25, timeout=280) == [2, 2]  # from the cache
    assert ranks(2, sizes_of_buckets, 0.0001, timeout=280) == [3, 3]


def copies_refused() -> None:
    inner = replicate(mixed())
    compiled(inner)(batch(0)).square().mean().backward()
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        deepcopy(inner)
    with torch.no_grad():
        inner.eval()
        one = compiled(inner)(batch(1))
        torch.testing.assert_close(one, inner(batch(1)))


@pytest.mark.slow
def test_a_compiled_replica_evaluates_and_is_not_copied(ranks: Ranks) -> None:
    ranks(2, copies_refused)


# ------------------------------------------------------------------------------- failures


def fail_before_backward() -> None:
    rank, _ = rank_and_size()
    model = compiled(replicate(mixed()))
    for step in range(2):
        loss = model(batch(step)).square().mean()
        if step and rank:
            raise ValueError("planted")
        loss.backward()


def leave_before_backward() -> str:
    rank, _ = rank_and_size()
    model = compiled(replicate(mixed()))
    for step in range(2):
        loss = model(batch(step)).square().mean()
        if step and rank:
            return ""  # without a backward pass, and without an error
        try:
            loss.backward()
        except CommunicationError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_raises_before_its_backward_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 was first: it raised ValueError: planted"):
        ranks(2, fail_before_backward)


@pytest.mark.slow
def test_a_rank_that_leaves_out_its_backward_is_named(ranks: Ranks) -> None:
    text, _ = ranks(2, leave_before_backward)
    assert "agree on the gradients of a compiled graph" in text
    assert "rank 1" in text
