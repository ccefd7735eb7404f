"""`replicate`: the contract of the composable function, and parity with one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import keep_batch_norm_local, replicate
from meshwright.errors import CollectiveMismatchError
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.data_parallel import NOTES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 2)
        self.fc2 = nn.Linear(2, 2)
        self.fc3 = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, kwarg: torch.Tensor | None = None) -> torch.Tensor:
        if kwarg is not None:
            x = x @ kwarg
        return self.fc3(self.fc2(self.fc1(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


# ------------------------------------------------------------------------------- as upstream


def compare_modules(one: nn.Module, replicated: nn.Module, rank: int, size: int) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(size, 2), torch.randn(size, 2)
    for iteration in range(2):
        step(one, inputs, targets)
        step(replicated, inputs[rank : rank + 1], targets[rank : rank + 1])
        assert len(list(one.parameters())) == len(list(replicated.parameters()))
        for expected, found in zip(one.parameters(), replicated.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=5e-5)
        torch.manual_seed(iteration)
        inputs = inputs[torch.randperm(size)]


def step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    model.train()
    F.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
            parameter.grad = None


def same_state(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name])


def body_seed_single_module() -> None:
    world = communicator()
    model = net()
    replicated = replicate(copy.deepcopy(model))
    same_state(model, replicated)
    compare_modules(model, replicated, world.rank, world.size)


def body_seed_multi_module() -> None:
    world = communicator()
    model = net()
    replicated = copy.deepcopy(model)
    for part in (replicated.fc1, replicated.fc2, replicated.fc3):
        replicate(part)
    same_state(model, replicated)
    compare_modules(model, replicated, world.rank, world.size)


def body_seed_with_kwargs() -> None:
    world = communicator()
    model = net()
    replicated = replicate(copy.deepcopy(model), bucket_cap_mb=1, gradient_as_bucket_view=True)
    compare_modules(model, replicated, world.rank, world.size)


def body_seed_move_args() -> None:
    model = replicate(net(), device_id=torch.device("cpu"))
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    model(a, kwarg=b).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def body_seed_ignore_module() -> None:
    world = communicator()
    torch.manual_seed(world.rank)
    model = Net()
    first = model.fc1.weight.detach().clone()
    replicate(model, ignored_modules=[model.fc1])
    inputs = torch.randn(5, 2) * (world.rank + 1)
    (model(inputs) * 10).sum().backward()
    assert torch.equal(model.fc1.weight, first), "ignored parameters are not broadcast"
    for parameter, is_equal in ((model.fc1, False), (model.fc2, True), (model.fc3, True)):
        gradient = parameter.weight.grad
        everyone = torch.empty(world.size * gradient.numel())
        world.all_gather(everyone, gradient.contiguous(), label="check").wait()
        rows = everyone.view(world.size, -1)
        for row in rows[1:]:
            assert torch.equal(row, rows[0]) is is_equal


def body_seed_device_id() -> None:
    model = replicate(net(), device_id=torch.device("cpu"))
    assert replicate.state(model)._ddp_weakref() is None, "set-up waits for the first forward"
    model(torch.randn(2, 2))
    assert replicate.state(model)._ddp_weakref().device_ids is None
    for device_id in (0, torch.device("cuda", 0), torch.device("cuda")):
        other = replicate(net(), device_id=device_id)
        text = "DistributedDataParallel device_ids and output_device arguments only work with"
        raises(ValueError, text, lambda other=other: other(torch.randn(2, 2)))


def body_seed_wrong_device_id_type() -> None:
    raises(
        RuntimeError,
        "Expected device_id to be int or torch.device, but got",
        lambda: replicate(net(), device_id=[torch.device("cpu")]),
    )


SEED = [
    body_seed_single_module,
    body_seed_multi_module,
    body_seed_with_kwargs,
    body_seed_move_args,
    body_seed_ignore_module,
    body_seed_device_id,
    body_seed_wrong_device_id_type,
]


@pytest.mark.few(5)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("body", SEED, ids=lambda body: body.__name__.removeprefix("body_seed_"))
def test_seed(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


def test_seed_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, body_seed_multi_module)


# ------------------------------------------------------------------------------ the contract


def body_contract() -> None:
    model = net()
    names = [name for name, _ in model.named_modules()]
    identities = [id(parameter) for parameter in model.parameters()]
    assert replicate(model) is model
    assert isinstance(model, Net)
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), name) == getattr(Net, name)
    assert names == [name for name, _ in model.named_modules()]
    assert identities == [id(parameter) for parameter in model.parameters()]
    raises(
        AssertionError,
        "Each distinct composable distributed API can only be applied",
        lambda: replicate(model),
    )
    raises(AssertionError, "DDP does not support deepcopy.", lambda: copy.deepcopy(model))
    outer = nn.Sequential(model)
    raises(AssertionError, "DDP does not support deepcopy.", lambda: copy.deepcopy(outer))
    raises(ValueError, "expected a replicated module", lambda: replicate.state(net()))


def body_mesh() -> None:
    world = communicator()
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    raises(
        ValueError,
        "replicate expects a 1D DeviceMesh but got",
        lambda: replicate(net(), device_mesh=plane),
    )
    raises(
        RuntimeError,
        "Cannot specify both process_group and device_mesh arguments.",
        lambda: replicate(net(), device_mesh=line, process_group=world.group),
    )
    model = net()
    replicated = replicate(copy.deepcopy(model), device_mesh=line)
    compare_modules(model, replicated, world.rank, world.size)


def body_refusals() -> None:
    frozen = net().requires_grad_(False)
    mixed = net()
    mixed.fc2.to("meta")
    empty = net().to("meta")
    cases = [
        (
            RuntimeError,
            "DistributedDataParallel is not needed when a module doesn't have any",
            frozen,
        ),
        (
            RuntimeError,
            "Modules with uninitialized parameters can't be used with",
            nn.LazyLinear(2),
        ),
        (ValueError, "DistributedDataParallel's input module must be on the same type of", mixed),
        (ValueError, "replicate: expected parameters with values, found 'fc1.weight'", empty),
    ]
    for kind, text, model in cases:
        replicate(model)
        raises(kind, text, lambda model=model: model(torch.zeros(1, 2)))


def body_sparse_gradient() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.embedding(x, self.table, sparse=True)

    model = replicate(Lookup())
    loss = model(torch.tensor([1])).sum()
    raises(RuntimeError, "parameter 'table' has a sparse gradient", loss.backward)


def body_different_parameters() -> None:
    world = communicator()
    model = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + world.rank)))
    with pytest.raises(CollectiveMismatchError) as caught:
        model(torch.zeros(1, 2))
    found = r'\["1.weight", \[3, 2\].* on ranks \[0\]; \["1.weight", \[4, 2\].* on ranks \[1\]'
    assert re.search(found, str(caught.value))


def body_frozen_on_one_rank() -> None:
    world = communicator()
    model = net()
    model.fc1.weight.requires_grad_(world.rank == 0)
    replicate(model)
    raises(CollectiveMismatchError, '"fc1.weight"', lambda: model(torch.zeros(1, 2)))


CONTRACT = [
    body_contract,
    body_mesh,
    body_refusals,
    body_sparse_gradient,
    body_different_parameters,
    body_frozen_on_one_rank,
]


@pytest.mark.few(1)
@pytest.mark.parametrize("body", CONTRACT, ids=lambda body: body.__name__.removeprefix("body_"))
def test_contract(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


# ------------------------------------------------------------------------- start and buffers


def body_initial_sync(init_sync: bool) -> None:
    world = communicator()
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, dtype=torch.float64))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(world.rank + 1)
    replicate(model[0], init_sync=init_sync)
    replicate(model[1], init_sync=init_sync)
    replicate(model[2], init_sync=init_sync)
    with torch.no_grad():
        model[2](model[1](model[0](torch.zeros(2, 3))).double())
    expected = 1 if init_sync else world.rank + 1
    assert all(bool((p == expected).all()) for p in model.parameters())
    assert model[1].num_batches_tracked.item() == 1 + 1, "buffers come from rank 0 before a forward"


def body_buffers(broadcast_buffers: bool) -> None:
    world = communicator()
    model = replicate(nn.BatchNorm1d(2), broadcast_buffers=broadcast_buffers)
    keep_batch_norm_local(model)
    torch.manual_seed(world.rank)
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
    before = model.running_mean.clone()
    model.eval()
    model(torch.zeros(2, 2))
    everyone = torch.empty(world.size * 2)
    world.all_gather(everyone, model.running_mean, label="check").wait()
    rows = everyone.view(world.size, 2)
    assert torch.equal(rows[0], rows[1]) is broadcast_buffers
    if world.rank == 0:
        assert torch.equal(model.running_mean, before)


def body_collectives() -> None:
    model = replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), bucket_cap_mb=2e-5)
    keep_batch_norm_local(model)
    with observe(recorder := Recorder()):
        model(torch.randn(3, 4)).sum().backward()
    assert recorder.kinds() == [
        ("all_gather", "compare parameters"),
        ("broadcast", "broadcast parameters"),
        ("broadcast", "broadcast buffers"),
        ("all_reduce", "reduce bucket 0"),
        ("all_reduce", "reduce bucket 1"),
    ]
    assert [c.shape for c in recorder.collectives[-2:]] == [
        (4 + 4 + 2,),
        (4 + 16 + 2 + NOTES,),
    ]
    with observe(again := Recorder()), torch.no_grad():
        model(torch.randn(3, 4))
    assert again.kinds() == [("broadcast", "broadcast buffers")]


@pytest.mark.parametrize("init_sync", [True, False])
def test_parameters_and_buffers_start_as_on_rank_0(ranks: Ranks, init_sync: bool) -> None:
    ranks(2, body_initial_sync, init_sync)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_broadcast_in_each_forward(ranks: Ranks, broadcast_buffers: bool) -> None:
    ranks(2, body_buffers, broadcast_buffers)


def test_exact_collectives(ranks: Ranks) -> None:
    ranks(2, body_collectives)


def test_a_wrong_group_argument_is_refused_without_ranks() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        partial(replicate, bucket_cap=3)(net())


# ------------------------------------------------------------------------------- what comes first


def evaluate_first() -> None:
    one, replicated = net(), replicate(net())
    with torch.inference_mode():
        replicated(torch.ones(1, 2))
    axis = communicator(None, "replicate")
    compare_modules(one, replicated, axis.rank, axis.size)


def test_an_evaluation_in_inference_mode_may_come_first(ranks: Ranks) -> None:
    ranks(2, evaluate_first)
