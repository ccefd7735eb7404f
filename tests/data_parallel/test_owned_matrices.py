"""Optimizers of whole matrices on parameters that ranks share: `own_matrices`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import meshwright as mw
from meshwright.comm import Recorder, communicator, observe
from meshwright.errors import LayoutError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks
from support.data_parallel.matrices import D, NewtonSchulz, batch, factory, loss_of, mlp
from support.internals.data_parallel import deal, sharers_of
from support.internals.gradients import OptimizerList, as_one
from support.late import raises_by_now

CLOSE = {"rtol": 0, "atol": 1e-12}


def full(tensor: torch.Tensor) -> torch.Tensor:
    found: Any = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


# ------------------------------------------------------------------------------- who owns what


def llama(layers: int, d: int, kv: int, f: int) -> list[tuple[int, int]]:
    return [(d, d), (kv, d), (kv, d), (d, d), (f, d), (f, d), (d, f)] * layers


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "shapes",
    [llama(16, 2048, 512, 8192), llama(32, 4096, 1024, 14336), llama(80, 8192, 1024, 28672)],
    ids=["1B", "8B", "70B"],
)
def test_ranks_have_equal_work_on_a_llama(shapes: list[tuple[int, int]], count: int) -> None:
    owners, imbalance = deal(shapes, count)
    loads = [0] * count
    for owner, (rows, columns) in zip(owners, shapes, strict=True):
        loads[owner] += rows * columns * min(rows, columns)
    assert imbalance == pytest.approx(max(loads) * count / sum(loads))
    assert imbalance <= 1.1


def test_the_largest_goes_first_to_the_rank_with_least() -> None:
    shapes = [(2, 2), (4, 4), (3, 3), (3, 3), (2, 4, 4), (5,), ()]
    # Work: 8, 64, 27, 27, 128, 25, 1; many matrices of (4, 4) are twice as much as one.
    owners, imbalance = deal(shapes, 2)
    assert owners == [0, 1, 1, 1, 0, 1, 0]
    assert imbalance == pytest.approx(143 * 2 / 280)
    assert deal([], 3) == ([], 0)


# --------------------------------------------------------------------------- several as one


def test_several_optimizers_are_one() -> None:
    model = mlp()
    muon, rest = factory("muon")(model.parameters())
    one = as_one([muon, rest])
    assert isinstance(one, OptimizerList)
    assert as_one(rest) is rest
    schedule = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
    twin = copy.deepcopy(model)
    others = factory("muon")(twin.parameters())
    for step in range(2):
        for each in (model, twin):
            loss_of(each(batch(step))).backward()
        one.step(lambda: torch.zeros(()))
        one.zero_grad()
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        schedule.step()
    assert [group["lr"] for group in one.param_groups] == [0.025, 0.0125]
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    again = as_one(factory("muon")(copy.deepcopy(model).parameters()))
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    found, expected = again.state_dict(), one.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys() != set()
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(found["state"][number][key], value)
    with pytest.raises(TypeError, match="no optimizer of the list would step it"):
        one.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        as_one([muon, torch.optim.SGD([muon.param_groups[0]["params"][0]])])


# ------------------------------------------------------------------------------------ layouts


def replicated(model: Any) -> Any:
    return mw.replicate(model)


def sharded(model: Any) -> Any:
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features == 8:
            mw.fully_shard(layer)
    return mw.fully_shard(model)


def hybrid(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mw.fully_shard(model[0], mesh=mesh)
    return mw.fully_shard(model, mesh=mesh)


def cut_and_sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    styles = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    mw.parallelize_module(model, mesh["tensor"], styles)
    return mw.fully_shard(model, mesh=mesh["shard"])


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "replicate": replicated,
    "shard": sharded,
    "hybrid": hybrid,
    "tensor": cut_and_sharded,
}


def share(whole: torch.Tensor, layout: str) -> torch.Tensor:
    world = communicator()
    if layout == "tensor":  # two ranks read the same
        return whole.chunk(2)[world.rank // 2]
    return whole.chunk(world.size)[world.rank]


def cut_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(D, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def body_trains(layout: str, kind: str) -> None:
    start = cut_mlp() if layout == "tensor" else mlp()
    one, model = start, LAYOUTS[layout](copy.deepcopy(start))
    pair = [factory(kind)(one.parameters()), factory(kind, model)(model.parameters())]
    owned = mw.own_matrices(pair[1][0], model)
    assert owned is pair[1][0]
    held = list(model.parameters())
    for step in range(4):
        loss_of(one(batch(step))).backward()
        loss_of(model(share(batch(step), layout))).backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.3), mw.clip_grad_norm_(model, 0.3)]
        torch.testing.assert_close(full(norms[1]), norms[0], **CLOSE)
        if step == 2:  # a user writes to weights: the owners gather them
            for each in (one, model):
                with torch.no_grad():
                    each[0].weight.mul_(0.5)
        for optimizer in (*pair[0], *pair[1]):
            optimizer.step()
            optimizer.zero_grad()
        for (name, expected), mine in zip(one.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                full(mine), expected.detach(), **CLOSE, msg=lambda t, n=(step, name): f"{n}: {t}"
            )
    # Between steps the optimizer has the model's parameters, and the state of what it owns.
    assert all(any(p is q for q in held) for p in owned.param_groups[0]["params"])
    for parameter, plain in zip(matrices(model), matrices(one), strict=True):
        axis, is_here = sharers_of(parameter)
        assert axis is not None
        assert (parameter in owned.state) is is_here
        for key, value in owned.state.get(parameter, {}).items():
            torch.testing.assert_close(value, pair[0][0].state[plain][key], **CLOSE)
    owners = communicator().gather_values([len(owned.state)], label="owners")
    assert sum(count for (count,) in owners) == len(matrices(one))


@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_two_ranks_train_as_one_process(ranks: Ranks, layout: str) -> None:
    ranks(2, body_trains, layout, "muon")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "own"])
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_four_ranks_train_as_one_process(ranks: Ranks, layout: str, kind: str) -> None:
    ranks(4, body_trains, layout, kind)


def body_same_bits(layout: str) -> None:
    """All ranks read the same, so that the mean of their gradients is that of one."""
    one, model = mlp(), LAYOUTS[layout](mlp())
    pair = [factory("own")(one.parameters()), factory("own", model)(model.parameters())]
    for step in range(3):
        for each, optimizers in zip((one, model), pair, strict=True):
            loss_of(each(batch(step))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for expected, mine in zip(one.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(mine), expected)


@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_equal_gradients_give_equal_bits(ranks: Ranks, layout: str) -> None:
    ranks(2, body_same_bits, layout)


# ------------------------------------------------------------------------------- what is sent


def sent_in_a_step(model: Any, layout: str) -> list[tuple[str, str, int]]:
    """Collectives of the third step of an optimizer: kind, label and bytes."""
    optimizer = mw.own_matrices(NewtonSchulz(matrices(model)), model)
    found: list[tuple[str, str, int]] = []
    for step in range(3):
        loss_of(model(share(batch(step), layout))).backward()
        with observe(recorder := Recorder()):
            optimizer.step()
        found = [(each.kind, each.label, each.bytes) for each in recorder.collectives]
    return found


def body_sends() -> None:
    me, size = communicator().rank, communicator().size
    for layers in (1, 4):
        for layout in ("replicate", "shard"):
            model = LAYOUTS[layout](mlp(rows=8, layers=layers, last=4))
            shapes = [tuple(p.shape) for p in matrices(model)]
            owners, _ = deal(shapes, size)
            wholes = [8 * math.prod(shape) for shape in shapes]
            mine = sum(n for n, owner in zip(wholes, owners, strict=True) if owner == me)
            found = sent_in_a_step(model, layout)
            if layout == "replicate":  # from the owner to each other rank
                assert found == [("all_to_all", "weights from owners", mine * (size - 1))]
                continue
            parts = [8 * (p.to_local().numel()) for p in matrices(model)]
            others = sum(n for n, owner in zip(parts, owners, strict=True) if owner != me)
            back = mine - sum(n for n, owner in zip(parts, owners, strict=True) if owner == me)
            assert found == [
                ("all_to_all", "gradients to owners", others),
                ("all_to_all", "weights from owners", back),
            ]
            # All ranks together, so that who owns how much does not matter.
            sums = communicator().gather_numbers([others + back, sum(parts)], label="bytes")
            sent, held = (sum(each) for each in zip(*sums, strict=True))
            assert sent == 2 * (size - 1) / size * held


def test_two_messages_whatever_the_number_of_matrices(ranks: Ranks) -> None:
    ranks(2, body_sends)


def body_sends_in_rows() -> None:
    """Gradients come from the owner's own replica; weights go to both."""
    me = communicator().rank
    model = hybrid(mlp(rows=8, layers=4, last=4))
    held: list[Any] = matrices(model)
    owners, _ = deal([tuple(p.shape) for p in held], 4)
    parts = [8 * p.to_local().numel() for p in held]
    near = [n for n, o in zip(parts, owners, strict=True) if o // 2 == me // 2 and o != me]
    back = [3 * n for n, o in zip(parts, owners, strict=True) if o == me]
    assert sent_in_a_step(model, "hybrid") == [
        ("all_to_all", "gradients to owners", sum(near)),
        ("all_to_all", "weights from owners", sum(back)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("body", [body_sends, body_sends_in_rows])
def test_two_messages_among_four(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(4, body)


# -------------------------------------------------------------------------------- who writes


def body_writes() -> None:
    """A write that is counted is followed; one past the counter is refused, once it is seen."""
    model = sharded(mlp())
    optimizer = mw.own_matrices(NewtonSchulz(matrices(model)), model)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], fused=True)

    def step(write: Callable[[], Any]) -> list[str]:
        loss_of(model(share(batch(0), "shard"))).backward()
        rest.step()  # writes to memory of the same units
        with torch.no_grad():
            write()
        with observe(recorder := Recorder()):
            optimizer.step()
        return [each.label for each in recorder.collectives]

    two = ["gradients to owners", "weights from owners"]
    weight: Any = model[0].weight
    assert step(lambda: None) == ["weights to owners", *two]
    assert step(lambda: None) == two
    for write in (
        lambda: model.load_state_dict(model.state_dict()),
        lambda: weight.mul_(2.0),
        lambda: nn.init.ones_(weight),
    ):
        assert step(write) == ["weights to owners", *two]
        assert step(lambda: None) == two
    assert step(lambda: weight.data.copy_(weight.detach())) == two  # the same bits
    step(lambda: model.to("cpu"))  # torch swaps the parameters, to which no weak reference may be
    assert sharers_of(weight)[0] is not None
    for write in (lambda: weight.data.mul_(2.0), lambda: torch._foreach_mul_([weight], 2.0)):
        with raises_by_now(LayoutError, match="'0.weight' has changed since .* param.copy_"):
            step(write)
        assert step(lambda: weight.copy_(weight.detach())) == ["weights to owners", *two]


def test_writes_to_weights_between_steps(ranks: Ranks) -> None:
    ranks(2, body_writes)


def body_gradients() -> None:
    """A frozen or unused matrix stays as it is; others are stepped."""
    model, one = sharded(mlp()), mlp()
    pair = [NewtonSchulz(matrices(one)), NewtonSchulz(matrices(model))]
    mw.own_matrices(pair[1], model)
    for step in range(2):
        for each, x in ((one, batch(step)), (model, share(batch(step), "shard"))):
            loss_of(each(x)).backward()
            if step == 1:  # with momentum, which a gradient of zeros would let move the weight
                each[3].weight.grad = None
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    for expected, mine in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(mine), expected.detach(), **CLOSE)
    loss_of(model(share(batch(0), "shard"))).backward()
    model[0].weight.grad = model[0].weight.grad.redistribute(placements=[Replicate()])
    with pytest.raises(LayoutError, match="'0.weight': expected a gradient that is"):
        pair[1].step()


def test_gradients_that_are_none_or_placed_otherwise(ranks: Ranks) -> None:
    ranks(2, body_gradients)


def body_refused() -> None:
    model = sharded(mlp())
    with pytest.raises(TypeError, match="LBFGS looks at all parameters together"):
        mw.own_matrices(torch.optim.LBFGS(model.parameters()), model)
    flat = FSDP(mlp())
    for held in (list(flat.parameters()), mw.flat_groups(sharded(mlp()))):
        with pytest.raises(TypeError, match="Adafactor has parts, or lines of several"):
            mw.own_matrices(torch.optim.Adafactor(held), flat)
    with pytest.raises(TypeError, match="Adafactor looks at .* own_matrices makes whole"):
        torch.optim.Adafactor(flat.parameters()).step()
    with pytest.raises(TypeError, match=r"Adafactor uses .* Call meshwright.own_matrices\("):
        torch.optim.Adafactor(model.parameters()).step()
    optimizer = mw.own_matrices(torch.optim.Adafactor(matrices(model)), model)
    assert mw.own_matrices(optimizer, model) is optimizer
    loss_of(model(share(batch(0), "shard"))).backward()
    with pytest.raises(TypeError, match="expected a step without closure"):
        optimizer.step(lambda: torch.zeros(()))
    optimizer.step()
    rank = communicator().rank
    other = mw.replicate(mlp(rows=6))
    with pytest.raises(LayoutError, match="the parameters of own_matrices, .* to be the same"):
        mw.own_matrices(NewtonSchulz(matrices(other)[rank:]), other)


def test_what_cannot_be_owned_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused)


def test_one_process_steps_as_without() -> None:
    one, other = mlp(), mlp()
    pair = [NewtonSchulz(matrices(one)), mw.own_matrices(NewtonSchulz(matrices(other)), other)]
    for step in range(2):
        for model, optimizer in zip((one, other), pair, strict=True):
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, one.parameters(), other.parameters()))
