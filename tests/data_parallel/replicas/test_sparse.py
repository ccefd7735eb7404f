"""Sparse gradients over several ranks: equal to one process, sparse, and sent as rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DistributedDataParallel,
    GradBucket,
    comm_hooks,
    fully_shard,
    replicate,
)
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.gradients import clip_grad_norm_
from meshwright.testing import Ranks
from support.internals.data_parallel import NOTES
from support.late import raises_by_now

ROWS = 12


class Words(nn.Module):
    """Two sparse tables, one of which is tied to a dense layer on request."""

    def __init__(self, is_tied: bool = False, is_sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 3, sparse=is_sparse)
        self.bag = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=is_sparse)
        self.last = nn.Linear(3, ROWS, bias=False)
        if is_tied:
            self.last.weight = self.table.weight
        self.double()

    def forward(
        self, x: torch.Tensor, uses_bag: bool = True, uses_table: bool = True
    ) -> torch.Tensor:
        found = self.bag(x) if uses_bag else torch.zeros(len(x), 3, dtype=torch.float64)
        found = found + self.table(x).sum(1) if uses_table else found
        return self.last(found).tanh()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch, and this rank's share; ranks look up different numbers of rows."""
    world = communicator()
    torch.manual_seed(step + 1)
    x = torch.randint(0, ROWS, (4 * world.size, 2))
    return x, x.chunk(world.size)[world.rank]


def same(found: nn.Module, expected: nn.Module, *, sparse: bool) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is None:
            continue
        if sparse and ("table" in name or "bag" in name):
            assert a.grad.is_sparse, name
            assert a.grad.is_coalesced()
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


def body_trains(wrap: Callable[..., nn.Module], is_tied: bool, options: dict[str, Any]) -> None:
    """Also with an accumulated pass, and with torch's class where it can."""
    one = Words(is_tied)
    ours = wrap(copy.deepcopy(one), **options)
    theirs = None if is_tied else TorchDDP(copy.deepcopy(one))
    models = [m for m in (one, ours, theirs) if m is not None]
    steps = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    for step in range(3):
        x, share = batch(step)
        more, more_share = batch(step + 10)
        one(x).square().mean().backward()
        one(more).square().mean().backward()
        with ours.no_sync():
            ours(share).square().mean().backward()
        ours(more_share).square().mean().backward()
        if theirs is not None:
            with theirs.no_sync():
                theirs(share).square().mean().backward()
            theirs(more_share).square().mean().backward()
            same(theirs, one, sparse=True)
        same(ours, one, sparse=not is_tied)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    x, share = batch(20)
    for _ in range(2):
        one(x).square().mean().backward()
        ours(share).square().mean().backward()
    same(ours, one, sparse=not is_tied)


@pytest.mark.parametrize("size", [2, 3])
def test_trains_as_one_process(ranks: Ranks, size: int) -> None:
    ranks(size, body_trains, DistributedDataParallel, False, {})


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 1e-5},
        {"unused_gradient": "zeros", "skip_all_reduce_unused_params": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_trains_with_options(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(2, body_trains, replicate, False, options)


def test_a_table_that_is_used_densely_too(ranks: Ranks) -> None:
    ranks(2, body_trains, replicate, True, {})


def body_clipping() -> None:
    """The norm of one process, and every gradient scaled in place."""
    one = Words()
    ours = replicate(copy.deepcopy(one))
    x, share = batch()
    one(x).square().mean().backward()
    ours(share).square().mean().backward()
    gradients = replicate.state(ours).reducer.gradients()
    total = sum(gradient.square().sum() for gradient in gradients)
    expected = sum(p.grad.to_dense().square().sum() for p in one.parameters())
    torch.testing.assert_close(total, expected)
    norm = clip_grad_norm_(ours, 0.01)
    torch.testing.assert_close(norm, expected.sqrt())
    for p, q in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense() * 0.01 / (norm + 1e-6))


def body_unused() -> None:
    """Used on one rank, and on none; with zeros on request; and in a pass that was given up."""
    world = communicator()
    for unused in ("none", "zeros"):
        one = Words()
        ours = DistributedDataParallel(copy.deepcopy(one), unused_gradient=unused)
        x, share = batch()
        for rank, rows in enumerate(x.chunk(world.size)):
            (one(rows, rank == 1, False).square().mean() / world.size).backward()
        value = ours(share, world.rank == 1, False).square().mean()
        # Rank 0 has no rows of the bag, and nobody has any of the table.
        with observe(recorder := Recorder()):
            value.backward()
        assert recorder.kinds() == [
            ("all_reduce", "reduce bucket 0"),
            ("all_gather", "reduce bucket 1: rows"),
            ("all_gather", "reduce bucket 2: rows"),
            ("all_reduce", "reduce bucket 3"),
            ("all_gather", "reduce bucket 1: indices"),
            ("all_gather", "reduce bucket 1"),
        ]
        table = ours.module.table.weight
        assert (table.grad is None) is (unused == "none")
        if unused == "zeros":
            assert table.grad.is_sparse
            assert not table.grad.to_dense().any()
            table.grad = None
        same(ours, one, sparse=True)


def body_bytes() -> None:
    """What is sent grows with the rows that were looked up and not with the table."""
    torch.manual_seed(0)
    ours = replicate(nn.Embedding(10_000, 4, sparse=True))
    ours(torch.zeros(1, dtype=torch.int64))
    value = ours(torch.tensor([5, 7, 5])).sum()
    with observe(recorder := Recorder()):
        value.backward()
    assert [(c.kind, c.shape) for c in recorder.collectives] == [
        ("all_gather", (2,)),
        ("all_reduce", (NOTES,)),
        ("all_gather", (2, 2)),
        ("all_gather", (2, 2, 4)),
    ]
    expected = torch.sparse_coo_tensor(
        [[5, 7]], [[2.0] * 4, [1.0] * 4], (10_000, 4), check_invariants=True
    )
    torch.testing.assert_close(ours.weight.grad, expected.coalesce())


def body_gives_up() -> None:
    """A peer that goes on gets an error and never a mean that lacks a rank."""
    world = communicator()
    ours = replicate(Words())
    _, share = batch()
    value = ours(share).square().mean()
    if world.rank == 0:
        ours.last.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            value.backward()
        ours(share)
    else:
        with raises_by_now(CollectiveMismatchError, match="was given up, on ranks .0."):
            value.backward()


def body_refusals() -> None:
    world = communicator()
    hooked = DistributedDataParallel(Words())
    with pytest.raises(RuntimeError, match=r"bag.weight, table.weight have sparse gradients"):
        hooked.register_comm_hook(None, comm_hooks.quantization_pertensor_hook)
    with pytest.raises(CollectiveMismatchError, match="sparse gradient"):
        DistributedDataParallel(Words(is_sparse=world.rank == 0))


def body_hooks() -> None:
    """What a hook makes of sparse gradients is what it makes of dense ones."""
    world = communicator()

    def own(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A hook of a user, by c10d."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        for gradient in bucket.gradients():
            dist.all_reduce(gradient)
            gradient.div_(world.size)
        future.set_result(bucket.buffer())
        return future

    # Half a second, which only the ranks of this case take.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as theirs

    for hook, tolerance, is_tied in [
        (comm_hooks.allreduce_hook, 1e-12, False),
        (comm_hooks.allreduce_hook, 1e-12, True),
        (theirs.allreduce_hook, 1e-12, False),
        (own, 1e-12, False),
        (comm_hooks.bf16_compress_hook, 0.02, False),
        (theirs.bf16_compress_hook, 0.02, False),
        (comm_hooks.bf16_compress_wrapper(comm_hooks.allreduce_hook), 0.02, False),
    ]:
        one = Words(is_tied, is_sparse=False)
        ours = DistributedDataParallel(Words(is_tied), find_unused_parameters=True)
        ours.register_comm_hook(None, hook)
        for step in range(2):
            whole, share = batch(step)
            # In the second pass one rank looks nothing up in the table.
            uses = [step == 0 or rank == 0 for rank in range(world.size)]
            rows = zip(whole.chunk(world.size), uses, strict=True)
            (
                sum(one(part, True, use).square().mean() for part, use in rows) / world.size
            ).backward()
            ours(share, True, uses[world.rank]).square().mean().backward()
            for (name, a), b in zip(ours.module.named_parameters(), one.parameters(), strict=True):
                assert a.grad.is_sparse is (name in ours_sparse(is_tied)), name
                torch.testing.assert_close(
                    a.grad.to_dense(), b.grad, rtol=tolerance, atol=tolerance, msg=name
                )
            for model in (ours, one):
                model.zero_grad()
        # Nobody uses it: it stays None.
        ours(share, True, False).square().mean().backward()
        assert (ours.module.table.weight.grad is None) is not is_tied
    local = DistributedDataParallel(Words())
    local.register_comm_hook(None, comm_hooks.noop_hook)
    alone = Words()
    for model in (local, alone):
        model(share).square().mean().backward()
    for a, b in zip(local.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


def ours_sparse(is_tied: bool) -> set[str]:
    return {"bag.weight"} if is_tied else {"bag.weight", "table.weight"}


@pytest.mark.parametrize("backend", ["meshwright", pytest.param("gloo", marks=pytest.mark.slow)])
def test_hooks_reduce_sparse_gradients(ranks: Ranks, backend: str) -> None:
    ranks(2, body_hooks, backend=backend)


def body_sharded() -> None:
    """A line of gradients has no place for rows: all ranks are told of which parameter."""
    _, share = batch()
    for ours in (fully_shard(Words()), FSDP(Words(), use_orig_params=True)):
        with pytest.raises(
            RuntimeError, match=r"dense gradient of sharded .* '(table|bag).weight'"
        ):
            ours(share).square().mean().backward()
    for use_orig_params in (False, True):
        waits = FSDP(Words(), use_orig_params=use_orig_params)
        with waits.no_sync(), pytest.raises(RuntimeError, match="dense gradient of sharded"):
            waits(share).square().mean().backward()


@pytest.mark.parametrize(
    "body",
    [body_clipping, body_unused, body_bytes, body_gives_up, body_refusals, body_sharded],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
@pytest.mark.few(2)
def test_sparse(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
