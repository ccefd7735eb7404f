"""Cross entropy in chunks of rows: the numbers of all logits, with one chunk of them alive."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import fully_shard
from meshwright.comm import connect
from meshwright.losses import linear_cross_entropy
from meshwright.mesh import init_device_mesh
from meshwright.testing import FakeCommunicator, Ranks, run_fake
from support.internals.layout import chunk
from support.internals.losses import LossOptions, Vocabulary, sum_and_count

ROWS, WIDTH, CLASSES = (3, 7), 5, 11
CASES = list(itertools.product((0.0, 0.1), (0.0, 0.01), (None, 3.0), (False, True), (False, True)))
"""Smoothing, z-loss, softcap, whether there is a bias, and rows that are ignored."""


def drawn(bias: bool = True, ignored: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight and bias, and labels."""
    seed = torch.Generator().manual_seed(3)
    shapes = [(*ROWS, WIDTH), (CLASSES, WIDTH), *([(CLASSES,)] if bias else [])]
    tensors = [torch.randn(s, dtype=torch.float64, generator=seed).requires_grad_() for s in shapes]
    labels = torch.randint(CLASSES, ROWS, generator=seed)
    if ignored:
        labels[0, :5] = labels[2, 3] = -100
    return tensors, labels


def plain(
    tensors: list[torch.Tensor],
    labels: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over all logits at once, and the count."""
    x = functional.linear(*tensors)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    kept = labels != -100
    total = functional.cross_entropy(
        x.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    return total + z_loss * x.logsumexp(-1)[kept].square().sum(), kept.sum()


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_sums_and_gradients_are_those_of_all_logits(rows: int) -> None:
    for smoothing, z_loss, softcap, bias, ignored in CASES:
        tensors, labels = drawn(bias, ignored)
        hidden, weight, *rest = tensors
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
        expected, counted = plain(tensors, labels, **options)  # pyrefly: ignore
        total, count = linear_cross_entropy(hidden, weight, labels, *rest, chunk=rows, **options)  # pyrefly: ignore
        same(total, expected)
        assert count == counted
        same(
            torch.autograd.grad(total / count, tensors),
            torch.autograd.grad(expected / counted, tensors),
        )


def part(axis: FakeCommunicator, options: dict[str, Any], rows: int) -> tuple[Any, ...]:
    """Sum and gradients of this rank's classes, and what was sent."""
    (hidden, weight, bias), labels = drawn()
    start, length = chunk(CLASSES, axis.size, axis.rank)
    own = [t.detach().narrow(0, start, length).clone().requires_grad_() for t in (weight, bias)]
    hidden = hidden.detach().clone().requires_grad_()
    vocabulary = Vocabulary(CLASSES, axis, "head")
    total, _ = sum_and_count(
        hidden, own[0], labels, own[1], vocabulary, LossOptions(chunk=rows, **options)
    )
    (2 * total).backward()
    sent = [f"{c.label} {c.kind}" for c in axis.collectives]
    return total.detach(), hidden.grad, own[0].grad, own[1].grad, sent


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_vocabulary_split_over_ranks_gives_the_same(size: int) -> None:
    """Eleven classes: of four ranks the last has two, of seven the last has none."""
    for smoothing, z_loss, softcap in itertools.product((0.0, 0.1), (0.0, 0.01), (None, 3.0)):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
        tensors, labels = drawn()
        expected, _ = plain(tensors, labels, **options)  # pyrefly: ignore
        wanted = torch.autograd.grad(2 * expected, tensors)
        found = run_fake(size, part, options, 8)
        for total, of_hidden, _, _, sent in found:
            same((total, of_hidden), (expected.detach(), wanted[0]))
            chunks = 6 if softcap else 3
            wide = ["largest logit all_reduce", "head forward all_reduce"] * chunks
            assert sent == ([] if size == 1 else [*wide, "head backward all_reduce"])
        same(torch.cat([each[2] for each in found]), wanted[1])
        same(torch.cat([each[3] for each in found]), wanted[2])


# --------------------------------------------------------------------------------- memory


class Alive(TorchDispatchMode):
    """Counts the bytes of living tensors whose last dim has the size of the vocabulary."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.now, self.most = classes, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            is_large = isinstance(each, torch.Tensor) and each.dim() > 1 and len(each) > WIDTH
            if is_large and each.shape[-1] == self.classes:  # no transposed weight
                self._count(each.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._end, storage.data_ptr(), storage.nbytes())

    def _end(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def most_of(
    rows: int, classes: int, size: int, dtype: torch.dtype, options: dict[str, Any], *, all_: bool
) -> int:
    """The most bytes of logits alive in a forward and backward: in chunks, or all at once."""
    hidden = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (rows,))
    with Alive(classes) as alive:
        if all_:
            total = functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
        else:
            total, _ = linear_cross_entropy(hidden, weight, labels, chunk=size, **options)
        total.backward()
    return alive.most


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1, "z_loss": 0.1}]
)
def test_at_most_one_chunk_of_logits_is_alive(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Numbers of 16 bits count as those of 32, in which the loss is computed."""
    chunk_bytes = 40 * 97 * max(dtype.itemsize, 4)
    most = most_of(200, 97, 40, dtype, options, all_=False)
    assert 0.45 * chunk_bytes <= most <= 1.1 * chunk_bytes
    assert most_of(200, 97, 40, torch.float64, options, all_=True) >= 2 * 200 * 97 * 8


# ------------------------------------------------------------------------- dtypes and limits


def test_under_autocast_products_are_rounded_and_gradients_wide() -> None:
    (hidden, weight, bias), labels = drawn()
    own = [t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in own[:2]]
    expected, _ = plain([*rounded, own[2].detach().double()], labels, 0.0, 0.0, None)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(own[0], own[1], labels, own[2], chunk=4)
    total.backward()
    assert total.dtype == own[0].grad.dtype == own[1].grad.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected.detach(), rtol=2e-2, atol=0.0)
    for mine, one in zip(own, torch.autograd.grad(expected, rounded), strict=False):
        torch.testing.assert_close(mine.grad.double(), one, rtol=0.1, atol=0.05)


def test_only_gradients_that_are_needed_are_computed() -> None:
    (hidden, weight, bias), labels = drawn()
    with torch.no_grad():
        total, count = linear_cross_entropy(hidden, weight, labels, bias)
    assert not total.requires_grad and count == 15
    total, _ = linear_cross_entropy(hidden, weight.detach(), labels)
    total.backward()
    assert hidden.grad is not None and weight.grad is None


def test_nothing_counted_is_zero_with_zero_gradients() -> None:
    (hidden, weight, bias), labels = drawn()
    total, count = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias)
    total.backward()
    assert total == count == 0
    assert not any(each.grad.any() for each in (hidden, weight, bias))
    total, count = linear_cross_entropy(hidden[:0], weight, labels[:0])
    assert total == count == 0


def test_a_second_backward_is_refused() -> None:
    (hidden, weight, bias), labels = drawn()
    total, _ = linear_cross_entropy(hidden, weight, labels, bias)
    torch.autograd.grad(total, [hidden], retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through one loss"):
        total.backward()
    total, _ = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="a second derivative was asked for"):
        torch.autograd.grad(total, [hidden], create_graph=True)


def test_what_is_refused() -> None:
    (hidden, weight, bias), labels = drawn()
    with pytest.raises(ValueError, match=r"hidden states of shape \(..., 5\) and labels"):
        linear_cross_entropy(hidden, weight, labels[:1], bias)
    with pytest.raises(ValueError, match=r"of one dtype, found torch.float64 and torch.float32"):
        linear_cross_entropy(hidden, weight.float(), labels)
    with pytest.raises(ValueError, match="a chunk of at least 1 row, found 0"):
        linear_cross_entropy(hidden, weight, labels, chunk=0)
    with pytest.raises(IndexError, match="expected classes from 0 to 10"):
        linear_cross_entropy(hidden, weight, torch.full_like(labels, 11))


# -------------------------------------------------------------------------- weights in parts


def body_in_parts() -> list[torch.Tensor]:
    """A weight that is split over classes, and one at rest in shards, each rank with its rows."""
    world = connect()
    (hidden, weight, bias), labels = drawn()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    cut = [nn.Parameter(distribute_tensor(t.detach(), mesh, [Shard(0)])) for t in (weight, bias)]
    total, _ = linear_cross_entropy(hidden, cut[0], labels, cut[1], chunk=4)
    total.backward()
    found = [total.detach(), hidden.grad, *(each.grad.full_tensor() for each in cut)]
    whole = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
    found.append(linear_cross_entropy(hidden, whole, labels)[0].detach())
    with pytest.raises(ValueError, match=r"split over its classes on one axis, Shard\(0\), found"):
        linear_cross_entropy(hidden, DTensor.from_local(weight, mesh, [Shard(1)]), labels)
    layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(weight), layer.bias.copy_(bias)
    fully_shard(layer)
    mine = slice(world.rank, None, world.size)
    own = hidden.detach()[:, mine].contiguous()
    total, _ = linear_cross_entropy(own, layer.weight, labels[:, mine], layer.bias, chunk=4)
    total.backward()
    return found + [each.grad.full_tensor() * world.size for each in (layer.weight, layer.bias)]


def test_a_weight_of_which_each_rank_has_a_part(ranks: Ranks) -> None:
    tensors, labels = drawn()
    expected, _ = plain(tensors, labels, 0.0, 0.0, None)
    wanted = torch.autograd.grad(expected, tensors)
    bare, _ = plain(tensors[:2], labels, 0.0, 0.0, None)
    for found in ranks(2, body_in_parts):
        same(found[:4], [expected.detach(), *wanted])
        same(found[4], bare.detach())
        same(found[5:], [*wanted[1:]])
