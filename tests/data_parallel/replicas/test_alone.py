"""Large gradients: reduced in their own memory, and what users may see of that."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import ReductionSettings, ReplicateOptions
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import Branches, Breaks, batch, loss, same_gradients
from support.internals.data_parallel import NOTES, GradientSlot, plan_buckets, replicate_with

EVERY = ReductionSettings(alone_bytes=1)
SOME = ReductionSettings(alone_bytes=8 * 9)
"""Weights of 3 x 3 in float64 are reduced alone, biases are not."""
VIEWS = ReductionSettings(is_gradient_view=True, first_bytes=64, cap_bytes=64)
"""Gradients are views of small buckets."""
ON_HOSTS = pytest.mark.devices("host", reason="what is zeroed while it is summed is given up")
ALONE = pytest.mark.devices("host", reason="devices reduce large gradients in one line with others")


def pair(settings: ReductionSettings) -> tuple[Branches, Branches]:
    one = Branches()
    ours = copy.deepcopy(one)
    replicate_with(ours, ReplicateOptions(reduction=settings))
    return one, ours


def test_alone_gradients_are_counted_in_the_last_bucket() -> None:
    def slot(index: int, is_alone: bool) -> GradientSlot:
        return GradientSlot(
            index=index, name=f"p{index}", shape=(5,), dtype=torch.float32, is_alone=is_alone
        )

    alternating = [slot(i, i % 2 == 0) for i in range(6)]
    layouts = plan_buckets(alternating, first_bytes=10**6, cap_bytes=10**6)
    assert [[s.index for s in x.slots] for x in layouts] == [[4], [2], [0], [5, 3, 1]]
    assert [x.numel for x in layouts] == [5, 5, 5, 15 + 3 + 3]
    (alone, counts) = plan_buckets([slot(0, True)], first_bytes=1, cap_bytes=1)
    assert (alone.numel, counts.numel, counts.slots) == (5, 1, ())


def test_sizes_one_by_one_and_delayed_ones_last() -> None:
    slots = [
        GradientSlot(index=i, name=f"p{i}", shape=(10,), dtype=torch.float32, turn=int(i in (5, 4)))
        for i in range(6)
    ]
    layouts = plan_buckets(slots, first_bytes=1, cap_bytes=1, listed_bytes=[40, 80])
    assert [[s.index for s in x.slots] for x in layouts] == [[3], [2, 1], [0], [5, 4]]


def body_accumulation(settings: ReductionSettings) -> None:
    one, ours = pair(settings)
    x, share = batch()
    for set_to_none in (True, True, False, False, True):
        for factor in (1, 2):
            loss(one, x * factor).backward()
            loss(ours, share * factor).backward()
            if factor == 1:
                held = [p.grad for p in ours.parameters()]
        same_gradients(ours, one)
        assert all(p.grad is h for p, h in zip(ours.parameters(), held, strict=True))
        one.zero_grad(set_to_none=set_to_none)
        ours.zero_grad(set_to_none=set_to_none)
        # As `zero_grad` of an optimizer does it, which views refuse.
        for parameter in ours.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
    with ours.no_sync():
        loss(ours, share).backward()
    loss(ours, share).backward()
    for _ in range(2):
        loss(one, x).backward()
    same_gradients(ours, one)


def body_held_gradients() -> None:
    """A gradient that the user keeps is not written to by later passes."""
    _, ours = pair(EVERY)
    _, share = batch()
    kept: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for step in range(6):
        loss(ours, share * (step + 1)).backward()
        gradient = ours.layers[1].weight.grad
        if step % 2 == 0:
            kept.append([gradient, gradient.view(-1), gradient.detach()][step // 2])
            values.append(kept[-1].clone())
        del gradient
        ours.zero_grad()
    for found, value in zip(kept, values, strict=True):
        assert torch.equal(found, value)


def body_memory_is_kept() -> None:
    _, ours = pair(EVERY)
    _, share = batch()
    places: set[int] = set()
    for _ in range(4):
        loss(ours, share).backward()
        places.add(ours.layers[1].weight.grad.data_ptr())
        ours.zero_grad()
    assert len(places) == 1


def body_unused() -> None:
    world = communicator()
    one, ours = pair(SOME)
    x, share = batch()
    choices = [(0, 1), (0, 2)]
    for _ in range(2):
        for rank, rows in enumerate(x.chunk(world.size)):
            (one(rows, choices[rank]).square().mean() / world.size).backward()
        ours(share, choices[world.rank]).square().mean().backward()
        assert ours.layers[3].weight.grad is None
        same_gradients(ours, one)
        one.zero_grad()
        ours.zero_grad()


def body_other_forms() -> None:
    """Gradients in other strides, and with a graph, are copied."""
    one, ours = pair(EVERY)
    x, share = batch()
    for model, part in ((one, x), (ours, share)):
        model.layers[0].weight.grad = torch.zeros(3, 3, dtype=torch.float64).t()
        model.layers[0].weight.grad.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the strides and of the graph
            loss(model, part).backward(create_graph=model is ours)
    same_gradients(ours, one)
    one.zero_grad()
    ours.zero_grad()
    loss(one, x).backward()
    loss(ours, share).backward()
    same_gradients(ours, one)


def body_failed_backward(settings: ReductionSettings, set_to_none: bool) -> None:
    world = communicator()
    one, ours = pair(settings)
    x, share = batch()
    loss(ours, share).backward()
    ours.zero_grad(set_to_none=set_to_none)
    for place in (1 + world.rank, 3):
        handle = ours.layers[place].register_forward_hook(lambda *a: Breaks.apply(a[-1]))
        value = loss(ours, share)
        with pytest.raises(ValueError, match="planted"):
            value.backward()
        handle.remove()
        ours.zero_grad(set_to_none=set_to_none)
    loss(one, x).backward()
    loss(ours, share).backward()
    same_gradients(ours, one)


def body_checkpointed() -> None:
    one, ours = pair(EVERY)
    x, share = batch()
    for model, part in ((one, x), (ours, share)):
        inner = model.layers[2]
        plain = inner.forward
        inner.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=True)
        loss(model, part).backward()
    same_gradients(ours, one)


def body_collectives() -> None:
    _, ours = pair(SOME)
    _, share = batch()
    loss(ours, share).backward()
    with observe(recorder := Recorder()):
        loss(ours, share).backward()
    assert [(c.kind, c.axis, c.shape) for c in recorder.collectives] == [
        *[("all_reduce", "replicate", (9,))] * 4,
        ("all_reduce", "replicate", (4 * 3 + 4 + 4 + NOTES,)),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [EVERY, SOME], ids=["every", "some"])
def test_accumulation(ranks: Ranks, settings: ReductionSettings) -> None:
    ranks(2, body_accumulation, settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=ON_HOSTS)])
@pytest.mark.parametrize("settings", [EVERY, SOME, VIEWS], ids=["every", "some", "views"])
def test_the_iteration_after_a_failed_backward_trains(
    ranks: Ranks, settings: ReductionSettings, set_to_none: bool
) -> None:
    ranks(2, body_failed_backward, settings, set_to_none)


@pytest.mark.parametrize(
    "body",
    [
        body_held_gradients,
        pytest.param(body_memory_is_kept, marks=ALONE),
        body_unused,
        body_other_forms,
        body_checkpointed,
        pytest.param(body_collectives, marks=ALONE),
    ],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
@pytest.mark.few(2)
def test_large_gradients(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
