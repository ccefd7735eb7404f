"""Dtypes of computation, gradients and buffers; full precision in evaluation; shards on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp import MixedPrecision as PeerPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerPolicy
from torch.nn.parallel.distributed import _MixedPrecision as LowPrecision

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import DistributedDataParallel, MixedPrecisionPolicy, fully_shard
from meshwright.fsdp import (
    CPUOffload,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks
from support.internals.data_parallel import BufferTypes, DataAxes, ParameterGroup, collect_slots
from support.internals.layout import FlatLayout

LINEARS = ModuleWrapPolicy({nn.Linear})
CPU = torch.device("cpu")


class Net(nn.Module):
    """Tells in which dtypes it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("shift", torch.full((7,), 1 / 3))
        self.seen: tuple[torch.dtype, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.seen = (x.dtype, hidden.dtype, self.shift.dtype)
        return self.last(torch.tanh(hidden + self.shift.to(hidden.dtype)))


def whole() -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(0))


def batch() -> torch.Tensor:
    return whole().chunk(dist.get_world_size())[dist.get_rank()]


def body_low_gradients() -> None:
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    for use_orig_params in (False, True):
        ours = FSDP(
            Net(),
            auto_wrap_policy=LINEARS,
            mixed_precision=MixedPrecision(**options),
            use_orig_params=use_orig_params,
        )
        theirs = Peer(
            Net(),
            auto_wrap_policy=PeerPolicy({nn.Linear}),
            mixed_precision=PeerPrecision(**options),
            use_orig_params=use_orig_params,
            device_id=communicator().device,
        )
        for _ in range(2):
            for model in (ours, theirs):
                model(batch()).float().square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.dtype == torch.float32
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                assert a.grad.dtype == b.grad.dtype == torch.bfloat16
            # With original parameters torch aligns, and so cuts, by the size of bfloat16.
            if a.grad is not None and not use_orig_params:
                torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02)
        before = [a.grad for a in ours.parameters()]
        with FSDP.summon_full_params(ours, with_grads=use_orig_params):
            pass
        assert all(a.grad is b for a, b in zip(ours.parameters(), before, strict=True))
        assert {b.dtype for b in before if b is not None} == {torch.bfloat16}


@pytest.mark.devices("host", reason="torch's FSDP keeps memory by record_stream, on no CPU")
def test_gradients_may_stay_in_low_precision(ranks: Ranks) -> None:
    ranks(2, body_low_gradients)


def body_full_in_eval(strategy: str) -> None:
    low = torch.bfloat16
    precision = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=low)
    for use_orig_params in (False, True):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The `NO_SHARD`")
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
            model = FSDP(
                Net(),
                sharding_strategy=ShardingStrategy[strategy],
                auto_wrap_policy=LINEARS,
                mixed_precision=precision,
                use_orig_params=use_orig_params,
            )
        listed = list(model.parameters())
        plain = Net()
        with model.no_sync():
            model(batch()).float().sum().backward()
        assert model.module.seen == (low, low, low)
        model.eval()
        with torch.no_grad():
            found = model(batch())
        assert model.module.seen == (torch.float32,) * 3
        # The buffer has been in bfloat16 before.
        plain.shift.copy_(plain.shift.to(low))
        torch.testing.assert_close(found, plain(batch()))
        model.train()
        recorder = Recorder()
        with observe(recorder):
            model(batch()).float().sum().backward()
        assert model.module.seen == (low, low, low)
        sent = {(c.kind, c.dtype) for c in recorder.collectives if c.label[:2] in ("un", "re")}
        assert ("all_gather", "float32") not in sent
        assert all(a is b for a, b in zip(model.parameters(), listed, strict=True))
        # Two passes: the one before evaluation was not lost.
        for _ in range(2):
            plain(whole()).sum().backward()
        norm = model.clip_grad_norm_(1e9)
        expected = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
        torch.testing.assert_close(norm * dist.get_world_size(), expected, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_evaluation_may_be_in_full_precision(ranks: Ranks, strategy: str) -> None:
    ranks(2, body_full_in_eval, strategy)


def body_offload() -> None:
    for use_orig_params in (False, True):
        ours = FSDP(
            Net(),
            auto_wrap_policy=LINEARS,
            cpu_offload=CPUOffload(offload_params=True),
            use_orig_params=use_orig_params,
        )
        # Torch's class cannot offload without an accelerator.
        plain = Net()
        for model in (ours, plain):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(2):
                x = batch() if model is ours else whole()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        # Ours also accumulates without no_sync.
        ours(batch()).square().sum().backward()
        once = [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
        ours(batch()).square().sum().backward()
        for parameter, gradient in zip(ours.parameters(), once, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_offload_on_a_cpu_trains_as_one_process(ranks: Ranks) -> None:
    ranks(2, body_offload)


def test_shards_live_apart_from_what_computes() -> None:
    """Without a GPU: ``meta`` stands for it, which knows shapes and devices and no values."""
    module = nn.Linear(3, 2)
    slots = collect_slots([("", module)])
    layout = FlatLayout.pack(["weight", "bias"], [(2, 3), (2,)], "float32", 1)
    types = BufferTypes.of(torch.float32, None, None)
    away = torch.device("meta")
    group = ParameterGroup(slots, layout, DataAxes(), types, away, CPU)
    assert group.buffer.shard.device == CPU
    torch.testing.assert_close(group.buffer.shard[:6], module.weight.detach().reshape(-1))
    assert group.buffer.view(0).device.type == "meta"
    group.buffer.gather("", [])
    group.buffer.finish_gather()
    assert slots[0].full.device.type == "meta"


class Ended(nn.Module):
    """Ends in a layer that may stay in full precision, and one that takes its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)
        self.norm.register_buffer("seen", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.given: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        normed = self.norm(hidden)
        out = self.last(normed)
        self.given = [hidden.dtype, normed.dtype, out.dtype]
        return out


def body_classes_left_out() -> None:
    warnings.filterwarnings("ignore", message="Both mixed precision")
    low = torch.bfloat16
    for kind in (nn.LayerNorm, nn.Linear):
        options: dict[str, Any] = {"param_dtype": low, "_module_classes_to_ignore": (kind,)}
        models = (
            FSDP(Ended(), auto_wrap_policy=LINEARS, mixed_precision=MixedPrecision(**options)),
            Peer(
                Ended(),
                auto_wrap_policy=PeerPolicy({nn.Linear}),
                mixed_precision=PeerPrecision(**options),
                device_id=communicator().device,
            ),
        )
        found = []
        for model in models:
            inner: Any = model.module
            out = model(batch())
            out.float().square().sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append((inner.given, out, gradients))
        (dtypes, *ours), (expected, *theirs) = found
        assert dtypes == expected == [low] * 3
        torch.testing.assert_close(ours, theirs)


class Recursive(nn.Linear):
    def forward(self, x: torch.Tensor, me: list[Any], kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(super().forward(x))
        return me[0](x, me, kept) + kept[-1] if len(kept) < 3 else super().forward(x)


class Calling(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        return self.inner(x, [self.inner], kept)


def body_calls_itself() -> None:
    """A unit that calls itself appends to its caller's list each time."""
    low, high = torch.bfloat16, torch.float64
    casts = MixedPrecision(param_dtype=low, cast_forward_inputs=True)
    keeps = MixedPrecision(param_dtype=low, cast_root_forward_inputs=False)
    inner = FSDP(Recursive(4, 4).double(), mixed_precision=casts)
    model = FSDP(Calling(inner), mixed_precision=keeps)
    kept = [torch.zeros(2, 4, dtype=high)]
    model(torch.ones(2, 4, dtype=high), kept).sum().backward()
    assert [each.dtype for each in kept] == [high, low, low]


def body_buffers_saved() -> None:
    low = torch.bfloat16
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
    precision = MixedPrecision(param_dtype=low, buffer_dtype=low, _module_classes_to_ignore=())
    norms = ModuleWrapPolicy({nn.LayerNorm})
    model = FSDP(Ended(), auto_wrap_policy=norms, mixed_precision=precision)
    model(batch())
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            saved = model.state_dict()["norm.seen"]
            assert saved.dtype is torch.float64
            torch.testing.assert_close(saved, torch.full_like(saved, 1 / 3).to(low).double())
            assert [buffer.dtype for buffer in model.buffers()] == [low]
            model.load_state_dict({**model.state_dict(), "norm.seen": saved + 1})
            torch.testing.assert_close(
                model.state_dict()["norm.seen"], saved + 1, atol=0.01, rtol=0
            )
            model.load_state_dict({**model.state_dict(), "norm.seen": saved})


def body_waiting_gradients() -> None:
    for use_orig_params in (False, True):
        precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
        models = [
            FSDP(nn.Linear(3, 3), mixed_precision=precision, use_orig_params=use_orig_params)
            for _ in (torch.manual_seed(0), torch.manual_seed(0))
        ]
        x = torch.full((2, 3), 0.1)
        for model, factor in zip(models, (1, 4), strict=True):
            with model.no_sync():
                for _ in range(3):
                    model(x).sum().backward()
                    # As autograd gives them; what is added up is in the dtype of the reduction.
                    assert {p.grad.dtype for p in model.parameters()} == {torch.float16}
                for parameter in model.parameters():
                    parameter.grad.mul_(factor)
            model(x * 0).sum().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert one.grad.dtype == other.grad.dtype == torch.float32
        weights = []
        for model in models:
            with FSDP.summon_full_params(model):
                pass
            weights.append(
                torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            )
        # Weights got nothing but from the passes before, biases 2 from the last one, too.
        last = (weights[0] > 1).float() * 2
        torch.testing.assert_close(weights[1] - last, 4 * (weights[0] - last), rtol=1e-2, atol=1e-2)


@dataclass(frozen=True)
class Given:
    x: torch.Tensor
    mask: torch.Tensor
    name: str = "given"


class Taker(nn.Module):
    """Takes and returns its tensors in containers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, given: Any, kind: str) -> Any:
        if kind == "set":
            (x,) = given
            return {self.last(self.first(x))}
        given = given["given"][0] if kind == "nested" else given
        assert given.name == "given" and given.mask.dtype is torch.long
        out = replace(given, x=self.last(self.first(given.x)))
        return {"given": (out,)} if kind == "nested" else out


def body_containers() -> None:
    low = torch.bfloat16

    def ours(net: nn.Module) -> nn.Module:
        return FSDP(net, mixed_precision=MixedPrecision(param_dtype=low), auto_wrap_policy=LINEARS)

    def sharded(net: nn.Module) -> nn.Module:
        return fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=low))

    def replicated(net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net, mixed_precision=LowPrecision(param_dtype=low))

    x = batch()
    mask = torch.arange(2)
    for make in (ours, sharded, replicated):
        expected = None
        for kind in ("set", "data", "nested"):
            model = make(Taker())
            data = Given(x.clone().requires_grad_(kind == "data"), mask)
            given = {"set": {x}, "data": data, "nested": {"given": (data,)}}[kind]
            out = model(given, kind)
            out = out["given"][0] if kind == "nested" else out
            (found,) = out if kind == "set" else (out.x,)
            assert found.dtype is low
            expected = found if expected is None else expected
            torch.testing.assert_close(found, expected)
            found.float().square().sum().backward()
            assert all(p.grad is not None for p in model.parameters() if p.numel())
            assert data.x.dtype is torch.float32  # a copy was cast


def body_dtypes() -> None:
    body_containers()
    body_classes_left_out()
    body_calls_itself()
    body_buffers_saved()
    body_waiting_gradients()


@pytest.mark.devices("host", reason="torch's FSDP keeps memory by record_stream, on no CPU")
def test_what_is_left_out_saved_and_waits_has_the_dtypes_of_torch(ranks: Ranks) -> None:
    ranks(2, body_dtypes)
