"""Compiled replicas whose passes come in other orders, and what users put around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.compiler import aot_backend, compiled_autograd
from meshwright.data_parallel import replicate
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks
from support.compiler.replicas import (
    Heads,
    batch,
    compiled,
    heads,
    in_one_process,
    same_as,
    squared,
)

# ------------------------------------------------------- passes that reduce, and passes that do not


Run = Callable[[Any, Any, int], list[torch.Tensor]]
"""Of the compiled model, the replica and a step: the losses, backward first to last."""


def together(model: Any, replica: Any, step: int) -> list[torch.Tensor]:
    with replica.no_sync():
        kept = squared(model, step)
    return [kept + squared(model, step + 50)]


def reducing_first(model: Any, replica: Any, step: int) -> list[torch.Tensor]:
    with replica.no_sync():
        kept = squared(model, step)
    return [squared(model, step + 50), kept]


def begun_before(model: Any, replica: Any, step: int) -> list[torch.Tensor]:
    reduced = squared(model, step + 50)
    with replica.no_sync():
        kept = squared(model, step)
    return [kept, reduced]


def without_backward(model: Any, replica: Any, step: int) -> list[torch.Tensor]:
    with replica.no_sync():
        squared(model, step + 70)
    return [squared(model, step), squared(model, step + 50)]


def order_passes(run: Run) -> None:
    whole, replica = heads(), replicate(heads())
    model = compiled(replica)
    squared(model, 0).backward()  # a graph is there
    replica.zero_grad()
    for step in range(1, 4):
        for loss in run(model, replica, step):
            loss.backward()
        in_one_process(whole, lambda m, r: squared(m, step, r) + squared(m, step + 50, r))  # noqa: B023
        same_as(whole, replica)
        if step == 2:
            whole.zero_grad()
            replica.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("run", [together, reducing_first, begun_before, without_backward])
def test_whatever_order_passes_come_in_all_gradients_are_means(ranks: Ranks, run: Run) -> None:
    ranks(2, order_passes, run)


def use_two_heads(*, in_hooks: bool) -> None:
    if in_hooks:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    whole, replica = heads(), replicate(heads())
    model = compiled(replica)
    for step in range(3):
        with replica.no_sync():
            backward(squared(model, step, second=True), in_hooks)
        backward(squared(model, step + 50), in_hooks)
        in_one_process(
            whole,
            lambda m, r: squared(m, step, r, second=True) + squared(m, step + 50, r),  # noqa: B023
        )
        same_as(whole, replica)
        if step == 1:
            whole.zero_grad()
            replica.zero_grad()


def backward(loss: torch.Tensor, in_hooks: bool) -> None:
    if not in_hooks:
        loss.backward()
        return
    with compiled_autograd(lambda graph: torch.compile(graph, backend=aot_backend)):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("in_hooks", [False, True])
def test_what_only_a_kept_pass_has_used_is_reduced_too(ranks: Ranks, in_hooks: bool) -> None:
    ranks(2, use_two_heads, in_hooks=in_hooks)


# ---------------------------------------------------------------------------- hooks of parameters


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-0.01, 0.01)


def change_by_hooks() -> None:
    for method, hook in (
        ("register_hook", clamp),
        ("register_post_accumulate_grad_hook", clamp_accumulated),
    ):
        replicas = []
        for _ in range(2):
            model = heads()
            for parameter in model.parameters():
                getattr(parameter, method)(hook)
            replicas.append(replicate(model))
        eager, replica = replicas
        for step in range(2):
            squared(eager, step).backward()
            squared(compiled(replica), step).backward()
            same_as(eager, replica)


@pytest.mark.slow
def test_hooks_of_parameters_get_gradients_of_their_rank_as_in_eager_mode(ranks: Ranks) -> None:
    ranks(2, change_by_hooks)


def hook_late() -> None:
    eager, replica = replicate(heads()), replicate(heads())
    model = compiled(replica)
    squared(model, 0).backward()
    for each in (eager, replica):
        each.zero_grad()
        for parameter in each.parameters():
            parameter.register_hook(clamp)
    with pytest.raises(RuntimeError, match="got a hook after its model was compiled"):
        squared(model, 1).backward()
    replica.zero_grad()
    for step in range(2):
        squared(model, step).backward()
        squared(eager, step).backward()
        same_as(eager, replica)


@pytest.mark.slow
def test_a_hook_that_comes_after_the_graph_is_refused_once(ranks: Ranks) -> None:
    ranks(2, hook_late)


def use_outside(model: Any, replica: Heads, step: int) -> None:
    """From the third pass on, of which the fourth is compared."""
    loss = squared(model, step)
    if step > 1:
        loss = loss + (batch(step) @ replica.first.weight).square().mean()
    loss.backward()


def use_outside_later() -> str:
    replica = replicate(heads())
    model = compiled(replica)
    for step in range(3):
        use_outside(model, replica, step)
    with pytest.raises(CollectiveMismatchError) as caught:
        use_outside(model, replica, 3)
    return str(caught.value)


@pytest.mark.slow
def test_a_use_beside_the_marked_copy_is_named(ranks: Ranks) -> None:
    for text in ranks(2, use_outside_later):
        assert "but the gradient of 'first.weight' is " in text


# ------------------------------------------------------------------------------- what users write


def train_in_one_function() -> None:
    for breaks in (False, True):
        whole, replica = heads(), replicate(Breaking().double() if breaks else heads())
        replica.load_state_dict(whole.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, replica)]

        @torch.compile(backend=aot_backend)
        def train(x: torch.Tensor) -> None:
            optimizers[1].zero_grad()  # noqa: B023
            replica(x).square().mean().backward()  # noqa: B023
            optimizers[1].step()  # noqa: B023

        for step in range(3):
            train(batch(step))
            optimizers[0].zero_grad()
            in_one_process(whole, lambda m, r: squared(m, step, r))  # noqa: B023
            optimizers[0].step()
            same_as(whole, replica)


class Breaking(Heads):
    def forward(self, x: torch.Tensor, *, second: bool = False) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, second=second)


@pytest.mark.slow
def test_a_function_with_backward_and_optimizer_is_compiled(ranks: Ranks) -> None:
    ranks(2, train_in_one_function)


def freeze_and_compile_alone() -> None:
    whole, replica = heads(), replicate(heads())
    model = compiled(replica, dynamic=False)
    for step, (is_frozen, size) in enumerate([(0, 4), (1, 4), (0, 4), (0, 5), (1, 5)]):
        for each in (whole, replica):
            each.body.requires_grad_(not is_frozen)
            each.zero_grad()

        def loss(m: Any, rank: int) -> torch.Tensor:
            return m(batch(step, rank, 4 if rank else size)).square().mean()  # noqa: B023

        loss(model, torch.distributed.get_rank()).backward()
        in_one_process(whole, loss)
        same_as(whole, replica)


@pytest.mark.slow
def test_a_rank_compiles_alone_after_parameters_were_frozen_and_not(ranks: Ranks) -> None:
    ranks(2, freeze_and_compile_alone)


class Bounded(Heads):
    def forward(self, x: torch.Tensor, *, second: bool = False) -> torch.Tensor:
        with torch.no_grad():
            self.body.weight.clamp_(-0.2, 0.2)
        return super().forward(x, second=second)


def write_to_weights() -> None:
    eager, replica = (replicate(Bounded().double()) for _ in range(2))
    replica.load_state_dict(eager.state_dict())
    model = compiled(replica)
    is_told = torch.distributed.get_rank() == 0  # once
    with pytest.warns(UserWarning, match="has written") if is_told else contextlib.nullcontext():
        squared(eager, 0)
    for step in range(2):
        squared(eager, step).backward()
        squared(model, step).backward()
        same_as(eager, replica)
        assert float(replica.body.weight.detach().abs().max()) <= 0.2


@pytest.mark.slow
def test_a_forward_may_write_to_its_weights(ranks: Ranks) -> None:
    ranks(2, write_to_weights)


def call_forward_itself() -> None:
    for is_compiled in (False, True):
        whole, replica = heads(), replicate(heads())
        run = (
            torch.compile(replica.forward, backend=aot_backend) if is_compiled else replica.forward
        )
        for step in range(2):
            with observe(recorder := Recorder()):
                squared(run, step).backward()
            label = (
                "agree on the gradients of a compiled graph" if is_compiled else "reduce bucket 0"
            )
            assert label in [c.label for c in recorder.collectives]
            in_one_process(whole, lambda m, r: squared(m, step, r))  # noqa: B023
            same_as(whole, replica)


def test_forward_itself_may_be_called(ranks: Ranks) -> None:
    ranks(2, call_forward_itself)


# ------------------------------------------------------------------------- large gradients


LARGE = 370
"""In double precision a weight of this width and height is more than 1 MiB."""


def wide(model: Any, step: int, rank: int | None = None) -> torch.Tensor:
    rank = communicator(None, "replicate").rank if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(3, LARGE, generator=generator, dtype=torch.float64)
    return model(x).square().mean()


def keep_large() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(LARGE, LARGE).double()
    inner = replicate(deepcopy(expected))
    model = compiled(inner)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, kind in enumerate(("drop", "drop", "hold", "hold", "drop", "add")):
        if kind != "add":
            expected.zero_grad()
            inner.zero_grad()
        in_one_process(expected, lambda one, rank, step=step: wide(one, step, rank))
        wide(model, step).backward()
        same_as(expected, inner)
        for one, copy in held:
            assert torch.equal(one, copy)
        gradient = inner.weight.grad
        if kind == "hold" and gradient is not None:
            held.append((gradient, gradient.clone()))
        del gradient
    assert len(held) == 2


@pytest.mark.slow
def test_a_large_gradient_that_somebody_holds_stays_as_it_is(ranks: Ranks) -> None:
    ranks(2, keep_large)
