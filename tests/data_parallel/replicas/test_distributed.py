"""`DistributedDataParallel`: torch's arguments and errors, and parity with one process."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DistributedDataParallel,
    GradBucket,
    MixedPrecision,
    keep_batch_norm_local,
    replicate,
)
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import Branches, batch, loss, same_gradients
from support.internals.data_parallel import NOTES, check_names
from support.late import raises_by_now


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        keep_batch_norm_local(self.norm)
        self.last = nn.Linear(5, 2)
        self.spare = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, uses_spare: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(x) + self.spare(x) if uses_spare else self.last(x)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def same(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    same_gradients(found, expected)


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 5e-5},
    "listed": {"bucket_cap_mb_list": [2e-5, 1e-4]},
    "unneeded": {
        "find_unused_parameters": True,
        "batched_grad_copy": True,
        "skip_all_reduce_unused_params": True,
    },
    "static": {"static_graph": True, "bucket_cap_mb": 5e-5},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "buffers": {"forward_sync_buffers": False},
    "older": {"broadcast_buffers": False, "device_ids": [], "init_sync": False},
}


def body_trains(options: dict[str, object], optimizer: type[torch.optim.Optimizer]) -> None:
    one = mlp()
    ours = DistributedDataParallel(copy.deepcopy(one), **options)
    x, share = batch()
    steps = [optimizer(m.parameters(), lr=0.05) for m in (one, ours)]
    for number in range(5):
        loss(one, x + number).backward()
        loss(ours, share + number).backward()
        same(ours, one)
        for step in steps:
            step.step()
            step.zero_grad()


@pytest.mark.few(6)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trains_as_one_process(
    ranks: Ranks, options: dict[str, object], optimizer: type[torch.optim.Optimizer]
) -> None:
    ranks(2, body_trains, options, optimizer)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_trains_as_one_process_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, body_trains, {"bucket_cap_mb": 5e-5}, torch.optim.Adam)


def body_state_dict() -> None:
    model = Net()
    ours = DistributedDataParallel(copy.deepcopy(model))
    theirs = TorchDDP(copy.deepcopy(model))
    assert ours.module.__class__ is Net
    a, b = ours.state_dict(), theirs.state_dict()
    assert list(a) == list(b)
    assert all(name.startswith("module.") for name in a)
    ours.load_state_dict(b)
    for name, value in b.items():
        assert torch.equal(value, a[name])


def body_beside_torch() -> None:
    """Losses, gradients, parameters and buffers of a model with BatchNorm, as torch's."""
    model = Net().double()
    pairs = [
        (kind, kind(copy.deepcopy(model), find_unused_parameters=True))
        for kind in (DistributedDataParallel, TorchDDP)
    ]
    _, share = batch(6)
    for number in range(3):
        values = []
        for _, ddp in pairs:
            ddp.zero_grad()
            value = ddp(share + number).square().mean()
            value.backward()
            values.append(value.detach())
            with torch.no_grad():
                for parameter in ddp.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        torch.testing.assert_close(*values)
    a, b = pairs[0][1], pairs[1][1]
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
        if "spare" in name:
            assert p.grad is None
            assert q.grad is None
        else:
            torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(a.buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def body_unused_on_one_rank() -> None:
    world = communicator()
    one = Net().double().eval()
    ours = DistributedDataParallel(copy.deepcopy(one))
    x, share = batch()
    for rank, rows in enumerate(x.chunk(world.size)):
        (one(rows, rank == 0).square().mean() / world.size).backward()
    ours(share, world.rank == 0).square().mean().backward()
    same(ours, one)


def body_no_sync() -> None:
    one = mlp()
    ours = DistributedDataParallel(copy.deepcopy(one))
    x, share = batch()
    with observe(recorder := Recorder()), ours.no_sync():
        assert not ours.require_backward_grad_sync
        loss(ours, share).backward()
    assert recorder.kinds() == []
    assert ours.require_backward_grad_sync
    loss(ours, share * 2).backward()
    loss(one, x).backward()
    loss(one, x * 2).backward()
    same(ours, one)
    for is_last in (False, True):  # as loops that accumulate do
        ours.require_backward_grad_sync = is_last
        with observe(recorder := Recorder()):
            loss(ours, share).backward()
        assert bool(recorder.kinds()) is is_last
        loss(one, x).backward()
    same(ours, one)


def body_buffers_at_the_start() -> None:
    """Those of rank 1 after the set-up and after a pass: its own (1), or rank 0's (0)."""
    rank = communicator().rank
    for options, after in (
        ({}, (0, 0)),
        ({"broadcast_buffers": False}, (1, 1)),
        ({"forward_sync_buffers": False}, (0, 0)),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, (0, 0)),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, (0, 0)),
        ({"init_sync": False}, (1, 0)),
    ):
        wraps: tuple[Any, ...] = (DistributedDataParallel, replicate)
        for wrap in wraps:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
            module[1].running_mean.fill_(rank)
            ours: Any = wrap(module, **options)
            if wrap is replicate:
                ours(torch.ones(1, 3)).sum().backward()
            found = [module[1].running_mean[0].item()]
            ours(torch.ones(1, 3)).sum().backward()
            found.append(module[1].running_mean[0].item())
            wanted = after if wrap is DistributedDataParallel else after[1:] * 2
            assert found == [each * rank for each in wanted], (wrap, options, found)


def body_attributes() -> None:
    import torch.distributed as dist

    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias"])
    group = dist.new_group(list(range(dist.get_world_size())))
    for options in ({}, {"process_group": group, "bucket_cap_mb": 2}):
        ours = DistributedDataParallel(copy.deepcopy(module), **options)
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), **options)
        for name in (
            "process_group",
            "device",
            "device_ids",
            "bucket_bytes_cap",
            "broadcast_buffers",
            "forward_sync_buffers",
            "parameters_to_ignore",
            "require_backward_grad_sync",
        ):
            if hasattr(theirs, name):  # some are those of newer versions
                assert getattr(ours, name) == getattr(theirs, name), name


def body_collectives() -> None:
    ours = DistributedDataParallel(Net(), bucket_cap_mb=5e-5)
    with observe(recorder := Recorder()):
        ours(torch.randn(4, 3)).sum().backward()
    assert {c.axis for c in recorder.collectives} == {"replicate"}
    assert recorder.kinds() == [
        ("broadcast", "broadcast buffers"),
        ("all_reduce", "reduce bucket 0"),
        ("all_reduce", "reduce bucket 1"),
        ("all_reduce", "reduce bucket 2"),
    ]


def body_mesh() -> None:
    world = communicator()
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    raises(
        RuntimeError,
        "Only 1D device mesh is supported, but got",
        lambda: DistributedDataParallel(mlp(), device_mesh=plane),
    )
    raises(
        RuntimeError,
        "Cannot specify both process_group and device_mesh arguments.",
        lambda: DistributedDataParallel(mlp(), device_mesh=line, process_group=world.group),
    )
    raises(
        TypeError,
        "expected a process group, found DeviceMesh: of a mesh give the group of one axis",
        lambda: DistributedDataParallel(mlp(), process_group=line),
    )
    given = DistributedDataParallel(mlp(), None, None, 0, False, True, world.group, 7, True, True)
    assert not given.options.broadcast_buffers
    assert given.options.process_group is world.group
    assert given.options.reduction.cap_bytes == 7 << 20
    raises(
        TypeError,
        "got multiple values for argument 'init_sync'",
        lambda: DistributedDataParallel(mlp(), None, None, 0, *[None] * 4, init_sync=False),
    )
    raises(
        TypeError,
        "positional arguments but",
        lambda: DistributedDataParallel(mlp(), None, None, 0, *[None] * 17),
    )
    ours = DistributedDataParallel(mlp(), device_mesh=line)
    _, share = batch()
    with observe(recorder := Recorder()):
        loss(ours, share).backward()
    assert {c.axis for c in recorder.collectives} == {"dp"}


def body_autocast_and_scaler() -> None:
    """A value that is not finite on one rank lets all ranks skip the step."""
    world = communicator()
    ours = DistributedDataParallel(mlp().float(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    _, share = batch()
    for step in range(3):
        before = [p.detach().clone() for p in ours.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = ours(share.float()).float().square().mean()
        if step == 1 and world.rank == 1:
            value = value * torch.inf
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stayed = [torch.equal(p, b) for p, b in zip(ours.parameters(), before, strict=True)]
        assert all(stayed) if step == 1 else not any(stayed)
    assert scaler.get_scale() == 4.0
    rows = world.gather_bytes(ours.module[0].weight.detach().numpy().tobytes(), label="check")
    assert rows[0] == rows[1]


def body_evaluation_between_steps() -> None:
    one = Net().double()
    ours = DistributedDataParallel(copy.deepcopy(one), forward_sync_buffers=False)
    x, share = batch(6)
    for _ in range(2):
        ours.eval()
        with torch.inference_mode():
            ours(share)
        with torch.no_grad():
            ours(share)
        ours(share)
        ours.zero_grad()
        loss(ours, share).backward()
        one.eval()
        one.zero_grad()
        loss(one, x).backward()
        same(ours, one)


def body_axis_names() -> None:
    """A group under two names counts its operations once."""
    world = communicator()
    other = communicator(world.group, "replicate")
    assert (world.axis, other.axis) == ("world", "replicate")
    assert communicator(world.group) is world
    with observe(recorder := Recorder()):
        for axis in (world, other, world):
            axis.all_reduce(torch.ones(1), label="count").wait()
    found = [(c.axis, c.sequence) for c in recorder.collectives]
    first = found[0][1]
    assert found == [("world", first), ("replicate", first + 1), ("world", first + 2)]


def body_hook_raises() -> None:
    """The iteration after an exception in a communication hook trains."""
    one = mlp()
    ours = DistributedDataParallel(copy.deepcopy(one), bucket_cap_mb=5e-5)
    calls = 0

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("planted")
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(None, hook)
    x, share = batch()
    value = loss(ours, share)
    raises(ValueError, "planted", value.backward)
    ours.zero_grad()
    for _ in range(2):
        loss(one, x).backward()
        loss(ours, share).backward()
        same(ours, one)
        one.zero_grad()
        ours.zero_grad()


def body_refusals() -> None:
    mixed = Net()
    mixed.last.to("meta")
    first = mlp()
    hooked = {"delay_all_reduce_named_params": [("x", nn.Parameter(torch.zeros(1)))]}
    cases: list[tuple[type[BaseException], str, nn.Module, dict[str, object]]] = [
        (
            RuntimeError,
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient.",
            mlp().requires_grad_(False),
            {},
        ),
        (
            RuntimeError,
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`",
            nn.LazyLinear(2),
            {},
        ),
        (
            ValueError,
            "DistributedDataParallel's input module must be on the same type of devices",
            mixed,
            {},
        ),
        (
            ValueError,
            "device_ids can only be None or contain a single element.",
            mlp(),
            {"device_ids": [0, 1]},
        ),
        *(
            (
                ValueError,
                "DistributedDataParallel device_ids and output_device arguments only work with",
                mlp(),
                options,
            )
            for options in ({"device_ids": [0]}, {"output_device": 0})
        ),
        (ValueError, "need to be set at the same time.", mlp(), hooked),
        (ValueError, "need to be set at the", first, {"param_to_hook_all_reduce": first[0].bias}),
        (
            ValueError,
            "no parameter of",
            first,
            {**hooked, "param_to_hook_all_reduce": first[0].bias},
        ),
        (ValueError, "expected bucket sizes above 0", mlp(), {"bucket_cap_mb": 0}),
        (ValueError, "expected bucket sizes above 0", mlp(), {"bucket_cap_mb_list": [1, -1]}),
    ]
    with observe(recorder := Recorder()):
        for kind, text, model, options in cases:
            raises(kind, text, lambda m=model, o=options: DistributedDataParallel(m, **o))
    assert recorder.kinds() == [], "refused before any rank waits for another"
    narrow = MixedPrecision(param_dtype=torch.bfloat16)
    precise = DistributedDataParallel(mlp(), mixed_precision=narrow)
    raises(TypeError, "cannot be copied", lambda: copy.deepcopy(precise))


def body_ignored() -> None:
    world = communicator()
    model = Net()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(world.rank + 1)
    names = ["last.weight", "norm.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ours = DistributedDataParallel(model)
    assert model.last.weight[0, 0].item() == world.rank + 1
    assert model.last.bias[0].item() == 1
    torch.manual_seed(world.rank)
    ours(torch.randn(4, 3)).square().sum().backward()
    for gradient, is_equal in ((model.last.weight.grad, False), (model.last.bias.grad, True)):
        rows = world.gather_bytes(gradient.numpy().tobytes(), label="check")
        assert (rows[0] == rows[1]) is is_equal


def body_delayed(is_view: bool) -> None:
    one = mlp()
    inner = copy.deepcopy(one)
    ours = DistributedDataParallel(
        inner,
        bucket_cap_mb=1e-6,
        gradient_as_bucket_view=is_view,
        delay_all_reduce_named_params=[("3.weight", inner[3].weight), ("3.bias", inner[3].bias)],
        param_to_hook_all_reduce=inner[0].weight,
    )
    x, share = batch()
    loss(one, x).backward()
    with observe(recorder := Recorder()):
        loss(ours, share).backward()
    same(ours, one)
    sizes = [c.shape[0] for c in recorder.collectives]
    assert sizes == [4 + 1, 16 + 1, 4 + 1, 12 + 1, 2 + 1, 8 + 1 + NOTES], (
        "the last layer's come last"
    )


def body_two_outputs() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": self.inner(x), "b": self.inner(x * 2)}

    one = Twins()
    ours = DistributedDataParallel(copy.deepcopy(one))
    x, share = batch()
    for model, part in ((one, x), (ours, share)):
        found = model(part)
        (found["a"].square().mean() + found["b"].mean()).backward()
    same(ours, one)
    for model, part in ((one, x), (ours, share)):
        model(part)["b"].mean().backward()
    same(ours, one)


def body_converted() -> None:
    """The module, or its last layer alone, becomes float64 after a step in float32."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.inner:
                x = layer(x.to(next(layer.parameters(), x).dtype))
            return x

    x, share = batch()
    for is_view, part in itertools.product((False, True), ("inner", "inner.3")):
        one = Casts().float()
        ours = DistributedDataParallel(copy.deepcopy(one), gradient_as_bucket_view=is_view)
        for model, rows in ((one, x), (ours, share)):
            loss(model, rows).backward()
            model.zero_grad()
            inner = model if model is one else ours.module
            inner.get_submodule(part).double()
            loss(model, rows).backward()
        for p, q in zip(ours.parameters(), one.parameters(), strict=True):
            assert p.grad.dtype is p.dtype
            exact = {"rtol": 1e-6, "atol": 1e-12} if part == "inner" else {}
            torch.testing.assert_close(p.grad, q.grad, **exact)
        if part == "inner":
            same(ours, one)


def body_mixed_precision(is_checkpointed: bool) -> None:
    """As float32 parameters that are cast by hand, and gradients reduced in float32."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is self.first.weight.dtype is self.shift.dtype is torch.bfloat16
            if is_checkpointed:
                x = checkpoint(self.first, x, use_reentrant=False)
            else:
                x = self.first(x)
            return self.last(torch.tanh(x) + self.shift)

    world = communicator()
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    )
    ours = DistributedDataParallel(Block(), mixed_precision=precision)
    narrow = Block().bfloat16()
    _, share = batch()
    ours(share.float()).float().square().mean().backward()
    narrow(share.bfloat16()).float().square().mean().backward()
    for p, q in zip(ours.parameters(), narrow.parameters(), strict=True):
        assert type(p) is nn.Parameter
        assert p.dtype is p.grad.dtype is torch.float32
        rows = torch.empty(world.size, *q.shape)
        world.all_gather(rows, q.grad.float(), label="check").wait()
        torch.testing.assert_close(p.grad, rows.mean(0))


BODIES = [
    body_state_dict,
    body_beside_torch,
    body_unused_on_one_rank,
    body_no_sync,
    body_attributes,
    body_buffers_at_the_start,
    body_collectives,
    body_mesh,
    body_autocast_and_scaler,
    body_evaluation_between_steps,
    body_axis_names,
    body_hook_raises,
    body_refusals,
    body_ignored,
    body_two_outputs,
    body_converted,
]


@pytest.mark.few(5)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.removeprefix("body_"))
def test_distributed(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


@pytest.mark.parametrize("is_view", [False, True])
def test_delayed_reduction(ranks: Ranks, is_view: bool) -> None:
    ranks(2, body_delayed, is_view)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_mixed_precision(ranks: Ranks, is_checkpointed: bool) -> None:
    ranks(2, body_mixed_precision, is_checkpointed)


# ------------------------------------------------------------------------------ static graph


def body_static_graph(wrap: Callable[..., nn.Module], is_swap: bool) -> None:
    """Both ranks are told, also when rank 1 gives up what rank 0 takes up."""
    world = communicator()
    ours = wrap(Branches(), static_graph=True)
    _, share = batch()
    paths = [[0, 1], [0, 2]] if is_swap else [[0, 1], [0, 1]]
    for _ in range(2):
        ours(share, paths[world.rank]).square().mean().backward()
        ours.zero_grad()
    paths = paths[::-1] if is_swap else [[0, 1], [0, 3]]
    changed = "^Your training graph has changed in this iteration: static_graph=True"
    with raises_by_now(RuntimeError, match=changed) as caught:
        ours(share, paths[world.rank]).square().mean().backward()
    text = str(caught.value)
    prefix = "" if wrap is replicate else "layers."
    used = "layers.1" if is_swap else "layers.3"
    lost = "layers.2" if is_swap else "layers.1"
    lacks = f"did not use parameters {lost}.weight, {lost}.bias (of {lost})"
    more = f"used parameters {used}.weight, {used}.bias (of {used})"
    assert f"{lacks} and {more} on ranks [1]" in text, prefix
    assert ("used the same on ranks [0]" in text) is not is_swap


def body_static_reentrant() -> None:
    """With a static graph the second gradient of a checkpoint used twice is waited for."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    one = Twice()
    ours = DistributedDataParallel(copy.deepcopy(one), static_graph=True)
    x, share = batch()
    for _ in range(3):
        loss(one, x.detach().requires_grad_()).backward()
        loss(ours, share.detach().requires_grad_()).backward()
        same(ours, one)
        one.zero_grad()
        ours.zero_grad()


@pytest.mark.few(1)
@pytest.mark.parametrize("is_swap", [False, True])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate], ids=["class", "function"])
def test_static_graph_names_what_deviates(
    ranks: Ranks, wrap: Callable[..., nn.Module], is_swap: bool
) -> None:
    ranks(2, body_static_graph, wrap, is_swap)


def test_static_graph_counts_arrivals(ranks: Ranks) -> None:
    ranks(2, body_static_reentrant)


# ------------------------------------------------------------------------ composable contract


def test_composable_functions_keep_names() -> None:
    check_names("f", ["a", "b"], ["a", "b"])
    with pytest.raises(RuntimeError, match="implementations cannot modify FQNs") as caught:
        check_names("f", ["a", "b"], ["a", "c"])
    assert "['b'] are gone and ['c'] are new" in str(caught.value)
    with pytest.raises(RuntimeError, match="cannot modify the order of FQNs"):
        check_names("f", ["a", "b"], ["b", "a"])
