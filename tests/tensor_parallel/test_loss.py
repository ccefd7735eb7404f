"""Cross entropy of logits that are cut by classes: torch's numbers on the whole logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import cross_entropy_of_parts, loss_parallel
from meshwright.testing import FakeCommunicator, Ranks, run_fake
from support.internals.layout import chunk
from support.tensor_parallel.samples import tensor_mesh

CLASSES = 7
SHAPES = [(6, CLASSES), (2, CLASSES, 3), (CLASSES,)]


def drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and a target of which one token is ignored."""
    seed = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(shape, dtype=torch.float64, generator=seed)
    target = torch.randint(
        0, CLASSES, (shape[0], *shape[2:]) if len(shape) > 1 else (), generator=seed
    )
    if target.ndim:
        target.view(-1)[1] = -100
    return logits, target


def parts(
    axis: FakeCommunicator, logits: torch.Tensor, target: torch.Tensor, padding: int, options: dict
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The loss of this rank's columns, its gradient, and what was sent."""
    dim = 0 if logits.ndim == 1 else 1
    rows = -(-CLASSES // axis.size) + padding
    start, length = chunk(CLASSES, axis.size, axis.rank)
    if padding:
        shape = list(logits.shape)
        shape[dim] = rows * axis.size
        whole = torch.full(shape, 1e3, dtype=logits.dtype)
        whole.narrow(dim, 0, CLASSES).copy_(logits)
        logits, start, length = whole, axis.rank * rows, rows
    x = logits.narrow(dim, start, length).clone().requires_grad_()
    loss = cross_entropy_of_parts(x, target, axis, classes=CLASSES, **options)
    forward = len(axis.collectives)
    slope = torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)
    loss.backward(slope)
    assert len(axis.collectives) == forward
    return loss.detach(), x.grad, [f"{c.kind} {c.shape}" for c in axis.collectives]


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_those_of_whole_logits(shape: tuple[int, ...], size: int) -> None:
    """Seven classes over four ranks: the last has one, and with padding none that is a class."""
    logits, target = drawn(shape)
    dim = 0 if len(shape) == 1 else 1
    weights = [None, torch.rand(CLASSES, dtype=torch.float64) + 0.1]
    cases = itertools.product(("none", "sum", "mean"), weights, (0.0, 0.2), (0, 2))
    for reduction, weight, smoothing, padding in cases:
        options = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing}
        x = logits.clone().requires_grad_()
        expected = functional.cross_entropy(x, target, **options)
        expected.backward(torch.arange(1.0, expected.numel() + 1).double().view(expected.shape))
        found = run_fake(size, parts, logits, target, padding, options)
        for loss, _, sent in found:
            torch.testing.assert_close(loss, expected.detach())
            tokens = str(tuple(target.shape))
            assert sent == [f"all_reduce {tokens}"] * ((4 if smoothing else 3) if size > 1 else 0)
        gradient = torch.cat([part for _, part, _ in found], dim)
        torch.testing.assert_close(gradient.narrow(dim, 0, CLASSES), x.grad)
        assert not gradient.narrow(dim, CLASSES, gradient.shape[dim] - CLASSES).any()


def test_the_z_loss_is_the_squared_log_of_the_sum_of_exponentials() -> None:
    logits, target = drawn((6, CLASSES))
    x = logits.clone().requires_grad_()
    kept = target != -100
    extra = x.logsumexp(1).square()[kept].mean()
    expected = functional.cross_entropy(x, target) + 0.3 * extra
    expected.backward()
    found = run_fake(2, parts, logits, target, 0, {"z_loss": 0.3})
    torch.testing.assert_close(found[0][0], expected.detach())
    torch.testing.assert_close(torch.cat([part for _, part, _ in found], 1), x.grad)


def test_a_mean_over_data_ranks_is_that_of_all_tokens() -> None:
    """The ranks 0 and 1 have five tokens, 2 and 3 one; each pair cuts the classes."""
    logits, target = drawn((6, CLASSES))
    x = logits.clone().requires_grad_()
    expected = functional.cross_entropy(x, target)
    expected.backward()

    def body(world: FakeCommunicator) -> tuple[torch.Tensor, torch.Tensor, float]:
        axis = world.split([[0, 1], [2, 3]], "tensor")
        data = world.split([[0, 2], [1, 3]], "replicate")
        rows = slice(0, 5) if world.rank < 2 else slice(5, 6)
        start, length = chunk(CLASSES, 2, axis.rank)
        own = logits[rows, start : start + length].clone().requires_grad_()
        loss = cross_entropy_of_parts(own, target[rows], axis, classes=CLASSES, data_axes=[data])
        loss.backward()
        pair = cross_entropy_of_parts(
            own.detach(), target[rows], axis, classes=CLASSES, reduction="sum and count"
        )
        return loss.detach(), own.grad, pair[1].item()

    found = run_fake(4, body)
    assert [count for _, _, count in found] == [4, 4, 1, 1]
    for loss, _, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    rows = [torch.cat([found[2 * n][1], found[2 * n + 1][1]], 1) for n in range(2)]
    torch.testing.assert_close(torch.cat(rows), x.grad)


def test_half_precision_is_computed_in_float32() -> None:
    logits, target = drawn((6, CLASSES))
    loss, gradient, _ = run_fake(2, parts, logits.bfloat16(), target, 0, {})[0]
    expected = functional.cross_entropy(logits.bfloat16().float(), target)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": torch.tensor([0, CLASSES])}, IndexError, "Target 7 is out of bounds"),
        ({"target": torch.tensor([0, -1])}, IndexError, "Target -1 is out of bounds"),
        ({"target": torch.rand(2, CLASSES)}, ValueError, "class probabilities"),
        ({"target": torch.tensor([0])}, ValueError, r"of shape \(2,\) as target"),
        ({"reduction": "max"}, ValueError, "'max' is not a reduction"),
        ({"classes": 20}, ValueError, "expected rank 0 of axis world to hold 20 of 20 classes"),
        ({"weight": torch.ones(3)}, ValueError, "expected 7 class weights"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, error: type[Exception], text: str) -> None:
    def body(axis: FakeCommunicator) -> None:
        given = {"target": torch.tensor([0, 1]), "classes": CLASSES, **options}
        target = given.pop("target")
        with pytest.raises(error, match=text):
            cross_entropy_of_parts(torch.zeros(2, CLASSES), target, axis, **given)

    run_fake(1, body)


def test_the_context_on_dtensors(ranks: Ranks) -> None:
    """On one axis and on two, of which one cuts the tokens unevenly."""

    def check(mesh: object, placements: list, placed: list, options: dict) -> None:
        logits, target = drawn((5, CLASSES, 3))
        target[3:] = -100
        weight = torch.rand(
            CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        x = logits.clone().requires_grad_()
        given = distribute_tensor(logits, mesh, placements).requires_grad_()
        spread = distribute_tensor(target, mesh, placed) if Shard(0) in placed else target
        expected = nn.CrossEntropyLoss(weight=weight, **options)(x, target)
        with loss_parallel():
            loss = nn.CrossEntropyLoss(weight=weight, **options)(given, spread)
        assert isinstance(loss, DTensor)
        torch.testing.assert_close(loss.full_tensor(), expected)
        recorder = Recorder()
        if options["reduction"] == "none":
            expected, loss = expected.sum(), loss.sum()
        expected.backward()
        with observe(recorder):
            loss.backward()
        assert recorder.collectives == []
        torch.testing.assert_close(given.grad.full_tensor(), x.grad)

    def body() -> None:
        line = tensor_mesh()
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
        turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "replicate"))
        for reduction, smoothing in itertools.product(("none", "sum", "mean"), (0.0, 0.1)):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            check(line, [Shard(1)], [Replicate()], options)
            check(square, [Shard(0), Shard(1)], [Shard(0), Replicate()], options)
            check(square, [Replicate(), Shard(1)], [Replicate(), Replicate()], options)
            check(turned, [Shard(1), Shard(0)], [Replicate(), Shard(0)], options)
        logits, target = drawn((6, CLASSES))
        wrong = [
            (line, [Replicate()], "requires exactly one mesh dim to shard tensor dimension 1"),
            (line, [Shard(0)], "requires exactly one mesh dim to shard tensor dimension 1"),
            (square, [Shard(1), Shard(1)], "with 2 such mesh dim"),
            (
                square,
                [Partial(), Shard(1)],
                "expects non-TP mesh dims to be Shard or Replicate, got",
            ),
            (square, [Shard(0), Shard(1)], r"requires a DTensor \(not a plain torch.Tensor\)"),
        ]
        for mesh, placements, text in wrong:
            x = DTensor.from_local(logits, mesh, placements, run_check=False)
            with loss_parallel(), pytest.raises(ValueError, match=text):
                functional.cross_entropy(x, target)
        with loss_parallel():
            plain = functional.cross_entropy(logits, target)
        assert not isinstance(plain, DTensor)
        assert math.isfinite(plain)
        assert comm.communicator().size == 4

    ranks(4, body)
