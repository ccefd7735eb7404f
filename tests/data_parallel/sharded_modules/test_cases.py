"""`fully_shard` where ranks, dtypes and axes differ: unused parameters, mixed dtypes, sums."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    CPUOffloadPolicy,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    flat_groups,
    fully_shard,
    replicate,
    share_comm_ctx,
)
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).double()


def share(x: torch.Tensor) -> torch.Tensor:
    world = communicator()
    count = len(x) // world.size
    return x[world.rank * count : (world.rank + 1) * count]


def same_gradients(model: nn.Module, one: nn.Module, tolerance: float = 1e-10) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None), name
        if theirs.grad is not None:
            # Offloaded, it is the host's.
            torch.testing.assert_close(
                whole(mine.grad),
                theirs.grad,
                rtol=tolerance,
                atol=tolerance,
                check_device=False,
            )


class Sometimes(nn.Module):
    """One layer is used where its rank says so, another nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if use else y


def body_unused_on_one_rank() -> None:
    world = communicator()
    torch.manual_seed(0)
    one = Sometimes().double()
    model = fully_shard(copy.deepcopy(one))
    x = batch(1)
    model(share(x), world.rank == 1).square().mean().backward()
    first, second = x.chunk(2)
    ((one(first, False).square().mean() + one(second, True).square().mean()) / 2).backward()
    same_gradients(model, one)
    assert model.never.weight.grad is None


def test_a_parameter_unused_on_one_rank_counts_as_zero(ranks: Ranks) -> None:
    ranks(2, body_unused_on_one_rank)


def body_mixed_dtypes() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 5).double(), nn.Linear(5, 3).double())
    one[0].bias.requires_grad_(False)
    model = copy.deepcopy(one)
    model[1].bias = nn.Parameter(model[1].bias.detach().float())
    fully_shard(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64, torch.float32}
    x = batch(1)

    def run(net: nn.Module) -> torch.Tensor:
        return nn.functional.linear(net[0](x), net[1].weight) + net[1].bias

    # The unit is the root's, so its parameters are whole inside the root's methods only.
    model.unshard()
    out = run(model)
    torch.testing.assert_close(out, run(one), rtol=1e-6, atol=1e-6)
    model.reshard()


def test_dtypes_and_frozen_parameters_mix(ranks: Ranks) -> None:
    ranks(2, body_mixed_dtypes)


class Quantized(nn.Module):
    """A frozen table of a dtype that backends do not sum, beside a layer that trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        table = (torch.arange(24).view(6, 4) % 3).to(dtype)
        self.table = nn.Parameter(table, requires_grad=False)
        self.register_buffer("signs", torch.ones(4).to(dtype))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.signs.float() @ self.table.float().t()


def body_tables() -> None:
    world = communicator()
    x = torch.ones(2, 4)
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.int8, torch.bool):
        torch.manual_seed(0)
        one = Quantized(dtype)
        for apply in (fully_shard, replicate, DistributedDataParallel):
            model: Any = apply(copy.deepcopy(one))
            for _ in range(2):
                torch.testing.assert_close(model(x), one(x))
                model(x).sum().backward()
    sent = torch.full((20_000,), 1 + world.rank, dtype=torch.int16)  # by broadcasts, on Gloo
    found = torch.empty(20_000 * world.size, dtype=torch.int16)
    world.all_gather(found, sent).wait()
    assert found.view(world.size, -1)[:, -1].tolist() == [1, 2]


@pytest.mark.backends("gloo")
def test_frozen_tables_of_every_dtype(ranks: Ranks) -> None:
    ranks(2, body_tables)


def body_assigned_to_both_names() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)).double()
    one[1].weight = one[0].weight
    model = fully_shard(copy.deepcopy(one))
    given = {
        name: distribute_tensor(value * 2, model[0].weight.device_mesh, [Shard(0)])
        for name, value in one.state_dict().items()
    }
    other, apart = fully_shard(copy.deepcopy(one)), {**given, "1.weight": given["1.weight"] + 1}
    with pytest.raises(RuntimeError, match="expected parameter '0.weight' of shape"):
        other.load_state_dict(apart, assign=True)
    model.load_state_dict(given, assign=True)
    assert model[0].weight is model[1].weight, "tied again"
    with torch.no_grad():
        one[0].weight.mul_(2)
    words = torch.arange(4)
    model(words[communicator().rank :: 2]).square().mean().backward()
    one(words).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), one[0].weight.grad)
    with pytest.raises(RuntimeError, match="where the sharded unit left it"):
        model.load_state_dict(given, assign=True)


def test_a_tied_parameter_assigned_under_both_names(ranks: Ranks) -> None:
    ranks(2, body_assigned_to_both_names)


def body_partial_sums() -> None:
    one = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = copy.deepcopy(one)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    recorder = Recorder()
    with observe(recorder):
        for number in range(3):
            model.set_requires_all_reduce(number == 2)
            model(share(batch(number))).square().mean().backward()
    for number in range(3):
        one(batch(number)).square().mean().backward()
    same_gradients(model, one)
    kinds = [kind for kind, _ in recorder.kinds()]
    assert kinds.count("reduce_scatter") == 6
    assert kinds.count("all_reduce") == 2


def test_sums_may_wait_for_the_replicating_axis(ranks: Ranks) -> None:
    ranks(4, body_partial_sums)


def body_hybrid_with_one_replica() -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    one = mlp()
    model = fully_shard(copy.deepcopy(one), mesh=mesh)
    recorder = Recorder()
    with observe(recorder):
        model(share(batch(0))).square().mean().backward()
    one(batch(0)).square().mean().backward()
    same_gradients(model, one)
    return recorder.kinds()


def test_a_replicating_axis_of_one_rank_still_reduces(ranks: Ranks) -> None:
    for found in ranks(2, body_hybrid_with_one_replica):
        kinds = [kind for kind, _ in found]
        assert kinds.count("reduce_scatter") == kinds.count("all_reduce") == 1


def body_no_sync_in_low_precision() -> None:
    model = mlp().float()
    one = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    share_comm_ctx([model])
    x = batch(0).float()
    with model.no_sync():
        for _ in range(3):
            model(share(x)).float().square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    model(share(x)).float().square().mean().backward()
    for _ in range(4):
        one(x).square().mean().backward()
    same_gradients(model, one, 0.1)


def test_no_sync_adds_up_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    ranks(2, body_no_sync_in_low_precision)


def body_autocast() -> None:
    model = mlp().float()
    one = copy.deepcopy(model)
    fully_shard(model)
    x = batch(0).float()
    for net, inputs in ((model, share(x)), (one, x)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(inputs).float().square().mean()
        loss.backward()
    same_gradients(model, one, 3e-2)


def test_under_autocast(ranks: Ranks) -> None:
    ranks(2, body_autocast)


def body_checkpoint(folder: str, save: bool) -> None:
    one = mlp()
    model = copy.deepcopy(one)
    if not save:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    fully_shard(model[0])
    fully_shard(model)
    state = {"model": model.state_dict()}
    recorder = Recorder()
    if save:
        with observe(recorder):
            dcp.save(state, checkpoint_id=folder)
        assert recorder.kinds() == []
        return
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(whole(mine), theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_checkpoints_of_torch_load_at_another_world_size(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_checkpoint, str(tmp_path), True)
    ranks(3, body_checkpoint, str(tmp_path), False)


def body_large_parameters() -> list[tuple[str, str]]:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(301, 501), nn.Linear(501, 3)).double()
    model = copy.deepcopy(one)
    fully_shard(model)
    x = torch.randn(8, 301, generator=torch.Generator().manual_seed(1)).double()
    recorder = Recorder()
    with observe(recorder):
        for _ in range(2):
            model(share(x)).square().mean().backward()
            one(x).square().mean().backward()
    same_gradients(model, one)
    return [kind for kind in recorder.kinds() if kind[0] == "all_gather" and "unshard" in kind[1]]


def test_large_parameters_are_gathered_with_the_others(ranks: Ranks) -> None:
    for found in ranks(2, body_large_parameters):
        assert len(found) == 2, "a launch for each forward, none where the root is kept"


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if use else self.always(x)


def body_flat_gradients_are_zeroed_together(through_model: bool) -> None:
    """A unit that does not run again is not stepped with the gradient of the step before."""
    one = Optional().double()
    model = copy.deepcopy(one)
    fully_shard(model.sometimes)
    fully_shard(model)
    optimizer = torch.optim.SGD(flat_groups(model), lr=0.1)
    plain = torch.optim.SGD(one.parameters(), lr=0.1)
    for step, use in enumerate((True, False, True)):
        x = batch(step)
        model(share(x), use).square().mean().backward()
        one(x, use).square().mean().backward()
        assert (model.sometimes.weight.grad is None) is not use
        optimizer.step()
        plain.step()
        (model if through_model else optimizer).zero_grad()
        plain.zero_grad()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs)


def test_flat_gradients_are_zeroed_together(ranks: Ranks) -> None:
    for through_model in (False, True):
        ranks(2, body_flat_gradients_are_zeroed_together, through_model)


def body_parameters_are_copied() -> None:
    """With their gradients, also where their memory does not begin the unit's."""
    model = fully_shard(mlp())
    model(batch(0)).square().sum().backward()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        copied = copy.deepcopy(parameter)
        assert isinstance(copied, DTensor)
        assert isinstance(copied, nn.Parameter)
        before = parameter.full_tensor()
        assert torch.equal(copied.full_tensor(), before)
        assert parameter.grad is not None
        assert copied.grad is not None
        assert torch.equal(whole(copied.grad), whole(parameter.grad))
        with torch.no_grad():
            copied.add_(1.0)
            copied.grad.add_(1.0)
        assert torch.equal(parameter.full_tensor(), before)
        assert not torch.equal(whole(copied.grad), whole(parameter.grad))


def test_parameters_are_copied(ranks: Ranks) -> None:
    ranks(2, body_parameters_are_copied)


def body_frozen_while_whole(through_model: bool) -> None:
    """What is set between two forwards, where the root keeps whole parameters, is not forgotten."""
    one = mlp()
    model = fully_shard(copy.deepcopy(one))
    at_rest = list(model.parameters())
    mine, theirs = torch.optim.SGD(at_rest, lr=0.1), torch.optim.SGD(one.parameters(), lr=0.1)
    for step, trains in enumerate([(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 1, 0), (1, 1, 1, 1)]):
        is_whole = through_model and any(parameter.requires_grad for parameter in at_rest)
        model(share(batch(9)))  # no backward comes
        held = list(model.parameters()) if through_model else at_rest
        assert isinstance(held[0], DTensor) is not is_whole
        for parameter, other, flag in zip(held, one.parameters(), trains, strict=True):
            parameter.requires_grad_(bool(flag))
            other.requires_grad_(bool(flag))
        y = model(share(batch(step)))
        assert y.requires_grad is any(trains)
        if y.requires_grad:
            y.square().mean().backward()
            one(batch(step)).square().mean().backward()
        assert [p.requires_grad for p in at_rest] == [bool(flag) for flag in trains]
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        model(share(batch(9))).square().mean().backward() if any(trains) else None
        model.zero_grad()
        for found, expected in zip(at_rest, one.parameters(), strict=True):
            torch.testing.assert_close(whole(found), expected, rtol=1e-12, atol=1e-14)


def test_parameters_are_frozen_while_they_are_whole(ranks: Ranks) -> None:
    for through_model in (True, False):
        ranks(2, body_frozen_while_whole, through_model)


def body_optimizer_of_whole_parameters() -> None:
    model = fully_shard(mlp())
    model(batch(0))  # no backward comes: the root keeps its whole parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"4 parameters of a SGD .* has while it holds whole"):
        optimizer.step()


def test_an_optimizer_of_whole_parameters_is_refused(ranks: Ranks) -> None:
    ranks(2, body_optimizer_of_whole_parameters)
