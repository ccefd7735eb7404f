"""A backward through a tensor that a collective has overwritten raises, and names the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import communicator
from meshwright.errors import CommunicationError
from meshwright.testing import Ranks

Write = Callable[[torch.Tensor], object]


def received(tensor: torch.Tensor) -> None:
    work = dist.isend(torch.ones(2), 1 - dist.get_rank())
    dist.recv(tensor, 1 - dist.get_rank())
    assert work is not None
    work.wait()


PLAIN: dict[str, Write] = {
    "all_reduce": dist.all_reduce,
    "later": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "reduce": lambda x: dist.reduce(x, 0),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([x, torch.ones(2)], torch.ones(2)),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.ones(2), torch.ones(2)]),
    "all_to_all": lambda x: dist.all_to_all_single(x, torch.ones(2)),
    "recv": received,
}
OURS: dict[str, Write] = {
    "all_reduce": lambda x: communicator().all_reduce(x).wait(),
    "broadcast": lambda x: communicator().broadcast(x).wait(),
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_backward_through_what_was_overwritten_raises(ranks: Ranks, backend: str) -> None:
    """Calls of torch on Gloo are torch's, which warns."""

    def body() -> None:
        for calls in [OURS, PLAIN] if backend == "shm" else [OURS]:
            for write in calls.values():
                for through in (lambda y: y, lambda y: y.square()):
                    x = torch.ones(2, requires_grad=True)
                    y = x * 3
                    write(y)
                    with pytest.raises(CommunicationError, match="test_overwritten.py:"):
                        through(y).sum().backward()

    ranks(2, body, backend=backend)


def test_a_loss_that_is_reduced_for_the_log_is_silent(ranks: Ranks) -> None:
    def body() -> list[float]:
        found = []

        def silent(reduce: Write, *, is_after: bool = False) -> None:
            x = torch.ones(2, requires_grad=True)
            loss = (x * 3).mean()
            if is_after:
                loss.backward()
            reduce(loss)
            if not is_after:
                loss.backward()
            assert x.grad is not None
            found.append(x.grad.sum().item())

        silent(dist.all_reduce, is_after=True)
        silent(lambda loss: dist.all_reduce(loss.detach()))
        silent(lambda loss: dist.all_reduce(loss.data))
        silent(torch.no_grad()(dist.all_reduce))
        weight = torch.ones(2, requires_grad=True)
        dist.all_reduce(weight)  # a leaf: values of parameters are what the program makes them
        weight.square().sum().backward()
        assert weight.grad is not None
        return [*found, weight.grad.sum().item()]

    assert ranks(2, body, backend="shm") == [[3.0, 3.0, 3.0, 3.0, 8.0]] * 2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_was_computed_before_keeps_its_graph(ranks: Ranks, backend: str) -> None:
    """A part of the loss is reduced for the log before the total's backward."""

    def body() -> None:
        for calls in [OURS, PLAIN] if backend == "shm" else [OURS]:
            for write in calls.values():
                x = torch.ones(2, requires_grad=True)
                part = x * 3
                total = part.sum() + x.square().sum()
                write(part)
                total.backward()
                assert x.grad is not None and x.grad.tolist() == [5, 5]
                for use in (part.sum, (part * 2).sum, (part + x.detach()).sum):
                    with pytest.raises(CommunicationError, match="test_overwritten.py:"):
                        use().backward()

    ranks(2, body, backend=backend)


def test_views_and_what_autograd_has_saved(ranks: Ranks) -> None:
    def body() -> None:
        def wrong(y: torch.Tensor) -> None:
            with pytest.raises(CommunicationError, match="test_overwritten.py:"):
                y.sum().backward()

        x = torch.ones(4, requires_grad=True)
        y = x * 3
        before = y.sum()
        dist.all_reduce(y[:2])  # the base has its values, too
        before.backward()
        assert x.grad is not None and x.grad.tolist() == [3] * 4
        wrong(y)
        y = x * 3
        later = y.view(2, 2)
        dist.all_reduce(y)
        wrong(later)
        first, _ = (x * 3).split(2)
        dist.all_reduce(first)
        wrong(first)
        part = x[:2]  # of a parameter
        dist.all_reduce(part)
        wrong(part)
        x.grad = None
        x.square().sum().backward()  # a leaf itself is what the program makes it
        assert x.grad is not None and x.grad.tolist() == [4, 4, 2, 2]
        saved = x.detach().clone().requires_grad_().sigmoid()
        total = (saved * 2).square().sum() + saved.square().sum()
        dist.all_reduce(saved)
        with pytest.raises(RuntimeError, match="OverwrittenByCollective"):
            total.backward()  # its numbers are gone

    ranks(2, body, backend="shm")
