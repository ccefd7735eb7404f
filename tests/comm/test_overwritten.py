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
