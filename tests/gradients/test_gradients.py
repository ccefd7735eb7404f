"""Norm, clipping, loss contract, loss scale, and the stop that all ranks make together."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.comm import Communicator, Recorder, communicator, observe
from meshwright.errors import LayoutError, NonFiniteError
from meshwright.gradients import (
    LossScale,
    LossWindow,
    SpreadGradients,
    agree_on_non_finite,
    clip_grad_norm_,
    cut_batch,
    global_norm,
    group_by_spread,
    read_loss,
)
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.comm.boxes import local_box
from support.internals.comm import (
    ShardView,
    dtensor_at_rest,
    is_distributed,
    mesh_communicators,
    spread_of,
    spread_over,
    torch_placements,
)
from support.internals.layout import Partial, Placement, Replicate, Shard
from support.late import raises_by_now


def model_with_gradients(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 300), nn.Linear(300, 400)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_clips_as_torch_does(norm_type: float, max_norm: float) -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    found = clip_grad_norm_(ours, max_norm, norm_type)
    torch.testing.assert_close(found, expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_tied_parameters_count_once() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_grad_norm_([weight, weight], 10.0).item() == 5.0
    assert clip_grad_norm_(weight, 1.0).item() == 5.0
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.0, 0.8]))


def test_a_long_float32_norm_keeps_its_digits() -> None:
    weight = nn.Parameter(torch.zeros(3_000_001))
    torch.manual_seed(0)
    weight.grad = torch.randn(3_000_001) + 0.3
    exact = weight.grad.double().norm().item()
    assert abs(clip_grad_norm_(weight, 1e9).item() / exact - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_measured_in_float32(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (7, 100_000)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 200.0)
    norm = clip_grad_norm_(weights, 1e9)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.item(), 200.0 * math.sqrt(100_007))


def test_complex_gradients_are_clipped_as_torch_does() -> None:
    weights = [nn.Parameter(torch.zeros(n, dtype=torch.complex64)) for n in (3, 4)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    expected = torch.linalg.vector_norm(torch.cat([w.grad for w in weights]))
    spread = SpreadGradients(gradients=tuple(w.grad for w in weights))
    for norm in (clip_grad_norm_(weights, 1e9), global_norm([spread])):
        torch.testing.assert_close(norm, expected)
    [group] = group_by_spread(weights)
    assert group.dtype is torch.float32


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0


def test_refuses_what_cannot_be_clipped() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(ValueError, match="expected max_norm >= 0"):
        clip_grad_norm_(weight, -1.0)
    named = "the gradient norm of order 2.0 is nan, .* gradient of 'parameter 0' is not finite"
    with pytest.raises(RuntimeError, match=named):
        clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    for order in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected norm_type > 0"):
            clip_grad_norm_(weight, 1.0, order)
    of_complex = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    of_complex.grad = torch.full_like(of_complex, complex(0.0, math.inf))
    with pytest.raises(RuntimeError, match="gradient of 'parameter 0' is not finite"):
        clip_grad_norm_(of_complex, 1.0, error_if_nonfinite=True)


def body_spread_norm(norm_type: float) -> None:
    """Some gradients are held by every rank, others lie spread over the axis."""
    world = communicator()
    torch.manual_seed(0)
    whole, spread = torch.randn(5), torch.randn(6)
    mine = spread.chunk(world.size)[world.rank]
    found = global_norm(
        [
            SpreadGradients(gradients=(whole,)),
            SpreadGradients(gradients=(mine,), communicators=(world,)),
        ],
        norm_type,
    )
    torch.testing.assert_close(found, torch.cat([whole, spread]).norm(norm_type))
    elsewhere = SpreadGradients(gradients=(), communicators=(world,), dtype=torch.complex128)
    assert global_norm([elsewhere], norm_type).dtype is torch.float64


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norm_over_an_axis(ranks: Ranks, norm_type: float) -> None:
    ranks(2, body_spread_norm, norm_type)


NORMS = [1.0, 2.0, 3.0, math.inf]


def gradients_of(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """The same random gradients on every rank, in float64."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def expected_norm(
    gradients: list[torch.Tensor], norm_type: float
) -> tuple[float, list[torch.Tensor]]:
    """What torch finds and leaves in one process that holds all gradients."""
    whole = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(whole, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type).item()
    return norm, [parameter.grad for parameter in whole if parameter.grad is not None]


def flat_shard(gradient: torch.Tensor, axis: Communicator) -> nn.Parameter:
    """A 1-D parameter that holds this rank's range of ``gradient``, of uneven length."""
    share = -(-gradient.numel() // (axis.size + 1))
    start = axis.rank * share
    stop = gradient.numel() if axis.rank == axis.size - 1 else start + share
    parameter = nn.Parameter(torch.zeros(stop - start, dtype=gradient.dtype))
    parameter.grad = gradient.flatten()[start:stop].clone()
    spread_over(parameter, [axis])
    return parameter


def distributed(
    gradient: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> nn.Parameter:
    """A DTensor parameter with ``gradient``, placed."""
    box = local_box(gradient.shape, mesh, torch_placements(placements))
    local = gradient[box.slices()].clone()
    pair = [
        dtensor_at_rest(part, mesh, placements, gradient.shape, gradient.stride())
        for part in (torch.zeros_like(local), local)
    ]
    parameter = nn.Parameter(pair[0])
    parameter.grad = pair[1]
    return parameter


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("norm_type", NORMS)
def test_any_mix_has_the_norm_of_one_process(ranks: Ranks, size: int, norm_type: float) -> None:
    def body() -> None:
        world = communicator()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        gradients = gradients_of((5, 3), (4,), (7, 2), (3, 3), (2, 6))
        norm, clipped = expected_norm(gradients, norm_type)
        plain = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        plain.grad = gradients[1].clone()
        parameters = [
            distributed(gradients[0], mesh, [Shard(0)]),
            plain,
            flat_shard(gradients[2], world),
            distributed(gradients[3], mesh, [Replicate()]),
            distributed(gradients[4], mesh, [Shard(1)]),
        ]
        recorder = Recorder()
        with observe(recorder):
            found = clip_grad_norm_([*parameters, parameters[0], plain], 0.5, norm_type)
        assert not is_distributed(found)
        assert found.item() == pytest.approx(norm, rel=1e-12)
        kinds = [(c.kind, c.reduction) for c in recorder.collectives]
        assert kinds == [("all_reduce", "max" if math.isinf(norm_type) else "sum")]
        assert plain.grad is not None
        torch.testing.assert_close(plain.grad, clipped[1])
        for at in (0, 3, 4):
            gradient = parameters[at].grad
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.full_tensor(), clipped[at])
        again = flat_shard(clipped[2], world)
        torch.testing.assert_close(parameters[2].grad, again.grad)

    ranks(size, body)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_type", NORMS)
def test_axes_are_summed_where_they_shard_and_not_where_they_replicate(
    ranks: Ranks, norm_type: float
) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        axes = dict(zip(("replicate", "shard"), mesh_communicators(mesh), strict=True))
        gradients = gradients_of((5, 3), (6, 4), (9,), (4, 4))
        norm, clipped = expected_norm(gradients, norm_type)
        parameters = [
            distributed(gradients[0], mesh, [Replicate(), Shard(0)]),
            distributed(gradients[1], mesh, [Shard(0), Shard(1)]),
            flat_shard(gradients[2], axes["shard"]),
            distributed(gradients[3], mesh["shard"], [Shard(1)]),
        ]
        assert clip_grad_norm_(parameters, 1e9, norm_type).item() == pytest.approx(norm, rel=1e-12)
        recorder = Recorder()
        with observe(recorder):
            found = clip_grad_norm_(parameters, 0.5, norm_type)
        assert found.item() == pytest.approx(norm, rel=1e-12)
        # Once the ranks know each other, one number goes over all axes.
        assert [(c.kind, c.axis) for c in recorder.collectives] == [
            ("all_reduce", "shard+replicate")
        ]
        for at in (0, 1, 3):
            gradient = parameters[at].grad
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.full_tensor(), clipped[at])

    ranks(4, body)


def body_everything(norm_type: float) -> None:
    """Axes of every kind in one call: strided, uneven, flat, replicated, and tied parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    world, shard = communicator(), mesh_communicators(mesh)[0]
    gradients = gradients_of((8, 3), (3, 1), (4,), (5, 3), (6,), (7, 2))
    expected, _ = expected_norm(gradients, norm_type)

    # The tensor axis cuts first, so that the rows of this rank are not chunk number world.rank.
    rows = gradients[0].chunk(4)[world.rank // 2 + 2 * (world.rank % 2)]
    strided = (_StridedShard(0, split_factor=2), TorchShard(0))
    twice, twice_gradient = (
        dtensor_at_rest(part, mesh, strided, (8, 3), (3, 1))
        for part in (torch.zeros_like(rows), rows.clone())
    )
    cut_twice = nn.Parameter(twice)
    cut_twice.grad = twice_gradient
    tied = distributed(gradients[1], mesh, [Replicate(), Shard(0)])
    whole = distributed(gradients[2], mesh, [Replicate(), Replicate()])
    uneven = distributed(gradients[3], mesh["tensor"], [Shard(0)])
    plain = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    # Ranks that have summed in another order differ in the last bit; their norm may not.
    plain.grad = gradients[4] * (1 + world.rank * 2**-52)
    flat = gradients[5].flatten()[:5] if shard.rank == 0 else gradients[5].flatten()[5:]
    view, view_gradient = (
        ShardView(part, 5 * shard.rank, (7, 2), communicator=shard)
        for part in (torch.zeros_like(flat), flat.clone())
    )
    viewed = nn.Parameter(view)
    viewed.grad = view_gradient

    # torch's own takes DTensors of one mesh, and agrees.
    same = [cut_twice, tied, whole]
    theirs = torch.nn.utils.clip_grad_norm_(same, 1e9, norm_type)
    assert isinstance(theirs, DTensor)
    ours = clip_grad_norm_(same, 1e9, norm_type)
    assert ours.item() == pytest.approx(theirs.full_tensor().item(), rel=1e-12)

    parameters = [cut_twice, tied, whole, uneven, plain, viewed, tied]
    found = clip_grad_norm_(parameters, 0.5, norm_type)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert len(set(world.gather_numbers([found.item()], label="norms"))) == 1
    assert clip_grad_norm_(parameters, 1e9, norm_type).item() == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(view_gradient.local, flat * (0.5 / expected), rtol=1e-5, atol=0.0)
    with pytest.raises(LayoutError, match="holds 3 of 4 elements, and nobody knows"):
        spread_of(ShardView(torch.zeros(3), 0, (4,)))

    # What is not finite is named on all ranks, with the first rank that has it.
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    held = model["b"].weight = distributed(torch.ones(4, 2), mesh, [Shard(0), Shard(1)])
    if world.rank >= 2:
        assert isinstance(held.grad, DTensor)
        held.grad.to_local()[0, 0] = math.inf
    words = r"is (inf|nan), so .*: the gradient of 'b.weight' on ranks .2, 3."
    with raises_by_now(RuntimeError, match=words):
        clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_type", [0.5, 2.0, math.inf])
def test_every_kind_of_part_counts_once(ranks: Ranks, norm_type: float) -> None:
    ranks(4, body_everything, norm_type)


@pytest.mark.devices("host", "simulated")
def test_gradients_may_be_none_on_some_ranks(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        gradients = gradients_of((8,), (6,))
        parameters = [flat_shard(gradient, world) for gradient in gradients]
        if world.rank == 0:
            parameters[0].grad = None
            gradients[0][: gradients[0].numel() // 3 + 1] = 0.0
        norm = clip_grad_norm_(parameters, 1e9)
        assert norm.dtype is torch.float64
        everyone = world.gather_numbers([norm.item()], label="norms")
        assert len(set(everyone)) == 1
        if world.rank == 1:
            parameters[0].grad = parameters[1].grad = None
        everyone = world.gather_numbers([clip_grad_norm_(parameters, 1.0).item()], label="norms")
        assert len(set(everyone)) == 1
        assert everyone[0][0] > 0.0

    ranks(2, body)


def test_a_float32_norm_whose_square_overflows(ranks: Ranks) -> None:
    def body() -> None:
        parameter = flat_shard(torch.full((5,), 1e19), communicator())
        norm = clip_grad_norm_(parameter, 1.0)
        assert norm.dtype is torch.float32
        torch.testing.assert_close(norm.item(), 1e19 * math.sqrt(5), rtol=1e-6, atol=0.0)

    ranks(2, body)


@pytest.mark.devices("host", "simulated")
def test_a_norm_that_is_not_finite_on_one_rank_is_so_on_all(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        for norm_type in (2.0, math.inf):
            parameter = flat_shard(torch.ones(6), world)
            assert parameter.grad is not None
            if world.rank == 1:
                parameter.grad[0] = math.nan
            with raises_by_now(RuntimeError, match="is nan, so gradients cannot be clipped"):
                clip_grad_norm_(parameter, 1.0, norm_type, error_if_nonfinite=True)

    ranks(2, body)


def test_tensors_that_cannot_be_combined(ranks: Ranks) -> None:
    def body() -> None:
        world = init_device_mesh("cpu", (4,))
        rank = communicator().rank
        half = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        gradient = torch.ones(4, 2)
        mixed = [distributed(gradient, mesh, [Shard(0)]) for mesh in (world, half[rank // 2])]
        with pytest.raises(LayoutError, match="cannot be combined: some ranks hold one and not"):
            clip_grad_norm_(mixed, 1.0)
        outside = dtensor_at_rest(torch.empty(0), half[1 - rank // 2], [Shard(0)], (4, 2), (2, 1))
        with pytest.raises(LayoutError, match="this rank is not on"):
            clip_grad_norm_([outside], 1.0)
        partial = nn.Parameter(dtensor_at_rest(gradient, world, [Partial()], (4, 2), (2, 1)))
        with pytest.raises(LayoutError, match="a partial sum on axis shard: reduce it first"):
            clip_grad_norm_([partial], 1.0)

    ranks(4, body)


def test_a_mark_stays_with_its_tensor(ranks: Ranks) -> None:
    def body() -> None:
        parameter = flat_shard(torch.ones(6), communicator())
        assert spread_of(parameter) == (communicator(),)
        assert spread_of(copy.deepcopy(parameter)) == ()
        file = io.BytesIO()
        torch.save(parameter, file)
        file.seek(0)
        assert spread_of(torch.load(file, weights_only=False)) == ()

    ranks(2, body)


# -------------------------------------------------------------------------------- loss contract


def test_losses_are_read() -> None:
    mean = read_loss(torch.tensor([2.0]))
    assert (mean.is_mean, mean.count, mean.total.shape) == (True, 1.0, ())
    counted = read_loss((torch.tensor(2.0), 3))
    assert (counted.is_mean, counted.count) == (False, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        1.0,
        None,
        torch.zeros(2),
        (torch.zeros(2), 1),
        (torch.tensor(1.0),),
        (torch.tensor(1.0), "1"),
    ],
)
def test_other_losses_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected the loss function to return"):
        read_loss(wrong)


def test_batches_are_cut() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = cut_batch({"x": x, "flag": True}, y, 2)
    assert [size for _, _, size in parts] == [3, 2]
    assert parts[1][0]["flag"] is True
    assert torch.equal(torch.cat([part["x"] for part, _, _ in parts]), x)
    assert [t.tolist() for _, t, _ in parts] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"found lengths \[4, 5\]"):
        cut_batch(x, y[:4], 2)
    with pytest.raises(ValueError, match="at least 6"):
        cut_batch(x, y, 6)


def body_window() -> None:
    world = communicator()
    window = LossWindow(world)
    for part in range(2):
        window.add(read_loss((torch.tensor(1.0 + world.rank), 2 + part)), 3)
    window.close()
    assert window.factor() == 1 / (5 * world.size)
    assert window.mean().item() == pytest.approx((2 + 4) / (5 * world.size))
    window.check_sizes()
    unequal = LossWindow(world)
    unequal.add(read_loss(torch.tensor(1.0)), 3 + world.rank)
    unequal.close()
    with pytest.raises(ValueError, match=r"3 on ranks \[0\]; 4 on ranks \[1\]"):
        unequal.check_sizes()
    longer = LossWindow(world)
    for rows in (2, 2):  # equally many samples, and squares beyond what float64 has exactly
        target = torch.empty(rows, 2**40 + world.rank, device="meta")
        longer.add(read_loss(torch.tensor(1.0)), rows, target)
    longer.close()
    with pytest.raises(ValueError, match=rf"labels of -100\); found {2**41}, {2**41} on"):
        longer.check_sizes()
    equal = LossWindow(world)
    equal.add(read_loss(torch.tensor(1.0)), 3, torch.empty(3, 2**40 + 7, device="meta"))
    equal.close()
    equal.check_sizes()


def body_stop() -> None:
    world = communicator()
    mine = [[], ["the gradient of 'b'", "the gradient of 'c'"]][world.rank]
    error = agree_on_non_finite(world, mine, what="step 3: the gradient norm is nan")
    assert isinstance(error, NonFiniteError)
    assert str(error).startswith(
        "step 3: the gradient norm is nan: not finite: the gradient of 'b' and 1 more on ranks [1]."
    )
    sums = ["the gradient of 'a'"] if world.rank else []
    overflow = agree_on_non_finite(world, [], what="step 3: the norm is inf", sums=sums)
    assert "own values are finite: their sum overflows, that of the gradient of 'a'" in str(
        overflow
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("body", [body_window, body_stop], ids=["window", "stop"])
def test_all_ranks_together(ranks: Ranks, body: object) -> None:
    ranks(2, body)


def test_loss_scale() -> None:
    scale = LossScale(initial=8.0, interval=2, smallest=2.0)
    assert scale.update(True)
    assert scale.update(True)
    assert scale.scale == 16.0
    assert scale.update(False)
    assert (scale.scale, scale.good_steps) == (8.0, 0)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert (other.scale, other.good_steps) == (8.0, 0)
    assert [scale.update(False) for _ in range(3)] == [True, True, False]
