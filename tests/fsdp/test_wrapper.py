"""One wrapper: what it shows, summons, converts, initializes and survives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_package
import torch.distributed.fsdp.wrap as peer_wrap
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright import fsdp
from meshwright.comm import Recorder, communicator, observe
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy, TrainingState
from meshwright.testing import Ranks

LINEARS = ModuleWrapPolicy({nn.Linear})


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rank: int = -1) -> torch.Tensor:
    whole = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    return whole if rank < 0 else whole.chunk(dist.get_world_size())[rank]


def gradients(model: FSDP) -> dict[str, torch.Tensor | None]:
    with FSDP.summon_full_params(model, with_grads=True):
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same_gradients(model: FSDP, plain: nn.Module) -> None:
    found = gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def body_attributes() -> None:
    model = FSDP(net(), auto_wrap_policy=LINEARS)
    rank = communicator().rank
    assert (model.rank, model.world_size) == (rank, 2)
    assert model.process_group == dist.group.WORLD
    assert model._inter_node_pg is None
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert model.training_state is TrainingState.IDLE
    assert model.compute_device == communicator().device
    assert model.check_is_root() and not model.module[0].check_is_root()
    assert isinstance(model[1], nn.Tanh)
    assert "Tanh" in repr(model)
    assert len(fsdp._get_fsdp_handles(model)) == 2
    assert isinstance(model.module[0]._flat_param, fsdp.FlatParameter)
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_attributes(ranks: Ranks) -> None:
    ranks(2, body_attributes)


def body_summon(use_orig_params: bool) -> None:
    plain = net()
    model = FSDP(net(), auto_wrap_policy=LINEARS, use_orig_params=use_orig_params)
    listed = list(model.parameters())
    with FSDP.summon_full_params(model):
        for (name, found), (expected, value) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert name == expected
            assert torch.equal(found, value)
        if use_orig_params:
            assert all(a is b for a, b in zip(model.parameters(), listed, strict=True))
        wholes = [parameter.detach().flatten() for parameter in plain[0].parameters()]
        shown = [parameter.detach().flatten() for parameter in model.module[0].params]
        assert torch.equal(torch.cat(shown), torch.cat(wholes))
        with torch.no_grad():
            model.module[0].module.weight.fill_(2.0)
    assert all(a is b for a, b in zip(model.parameters(), listed, strict=True))
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        assert (model.module[0].module.weight == 2.0).all()
        model.module[0].module.weight.fill_(3.0)
    assert (model.state_dict()["0.weight"] == 2.0).all()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        shapes = [tuple(p.shape) for p in model.parameters()]
    assert ((7, 5) in shapes) == (dist.get_rank() == 0)
    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    assert (model.state_dict()["2.weight"] == 1.0).all()
    model(batch(0)).sum().backward()
    if use_orig_params:
        # The first chunk of 8 rows over 3 ranks has 3.
        torch.testing.assert_close(gradients(model)["2.bias"], torch.full((3,), 3.0))


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned_parameters_are_whole_and_written_back(
    ranks: Ranks, use_orig_params: bool
) -> None:
    ranks(3, body_summon, use_orig_params)


class Speaks(nn.Module):
    """Goes on from tokens, each the likeliest after the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.block, self.head = nn.Embedding(9, 5), net(), nn.Linear(3, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(tokens)))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[-1:].argmax(-1)])
        return tokens


def body_generate(use_orig_params: bool) -> None:
    plain, tokens = Speaks(), torch.tensor([1, 7])
    expected = plain.generate(tokens, 6)
    model = FSDP(Speaks(), auto_wrap_policy=LINEARS, use_orig_params=use_orig_params)
    for _ in range(2):  # before the first pass, and after one
        recorder = Recorder()
        with FSDP.summon_full_params(model), observe(recorder):
            assert torch.equal(model.generate(tokens, 6), expected)
            assert recorder.collectives == []
            with pytest.raises(RuntimeError, match="was called inside summon_full_params"):
                model(tokens)
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
            if dist.get_rank() == 0:
                assert torch.equal(model.generate(tokens, 6), expected)
            else:
                text = "on a rank that has them whole"
                with torch.no_grad(), pytest.raises(RuntimeError, match=text):
                    model(tokens)
        model(tokens).sum().backward()
    with FSDP.summon_full_params(model, recurse=False):
        assert torch.equal(model.generate(tokens, 6), expected)
    plain(tokens).sum().backward()
    plain(tokens).sum().backward()
    if use_orig_params:
        same_gradients(model, plain)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned_parameters_run_forwards_without_a_backward(
    ranks: Ranks, use_orig_params: bool
) -> None:
    ranks(2, body_generate, use_orig_params)


def body_convert(use_orig_params: bool) -> None:
    model = FSDP(net(), auto_wrap_policy=LINEARS, use_orig_params=use_orig_params)
    model(batch()).sum().backward()
    model.zero_grad()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    plain = net().double()
    x = batch().double()
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_conversion_converts_the_shards(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(2, body_convert, use_orig_params)


def initialize(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def body_meta() -> None:
    with torch.device("meta"):
        empty = net()
    model = FSDP(empty, auto_wrap_policy=LINEARS, param_init_fn=initialize)
    assert all((v == 0.5).all() for v in model.state_dict().values())
    with torch.device("meta"):
        empty = net()
    torch.manual_seed(dist.get_rank())
    model = FSDP(
        empty, auto_wrap_policy=LINEARS, sync_module_states=True, device_id=communicator().device
    )
    everyone = communicator().gather_numbers([model(batch()).sum().item()], label="sums")
    assert len(set(everyone)) == 1


def test_meta_modules_are_materialized(ranks: Ranks) -> None:
    ranks(2, body_meta)


def body_ignored() -> None:
    plain = net()
    weight = plain[2].weight
    model = FSDP(plain, ignored_states=[weight])
    assert any(p is weight for p in model.parameters())
    rank = dist.get_rank()
    model(batch(rank)).sum().backward()
    one = net()
    one(batch(rank)).sum().backward()
    torch.testing.assert_close(weight.grad, one[2].weight.grad)
    other = FSDP(net(), ignored_modules=[], auto_wrap_policy=LINEARS)
    assert other.state_dict().keys() == model.state_dict().keys()
    skipped = net()
    whole = FSDP(skipped, ignored_modules=[skipped[0]], auto_wrap_policy=LINEARS)
    assert isinstance(skipped[0], nn.Linear)
    assert whole.state_dict()["0.weight"] is not None


def test_ignored_parameters_are_left_alone(ranks: Ranks) -> None:
    ranks(2, body_ignored)


def body_hook(strategy: str) -> None:
    seen: list[int] = []

    def hook(state: list[int], whole: torch.Tensor, out: torch.Tensor | None = None) -> None:
        state.append(whole.numel())
        if out is None:
            dist.all_reduce(whole)
            whole.div_(dist.get_world_size())
            return
        dist.reduce_scatter_single(out, whole, group=group)
        out.div_(dist.get_world_size(group))

    groups: Any = None
    if strategy == "HYBRID_SHARD":
        groups = fsdp.hybrid_process_groups(dist.group.WORLD, 2)
    model = FSDP(
        net(),
        process_group=groups,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )
    group = model.process_group
    model.register_comm_hook(seen, hook)
    model(batch(dist.get_rank())).square().mean().backward()
    plain = net()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)
    assert len(seen) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_a_hook_reduces_gradients(ranks: Ranks, strategy: str) -> None:
    ranks(4, body_hook, strategy)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.breaks = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks == "forward":
            raise ZeroDivisionError
        y = self.body(x)
        if self.breaks == "backward":
            y.register_hook(lambda _: 1 // 0)
        return y


def body_exception(where: str) -> None:
    model = FSDP(Fragile(), auto_wrap_policy=LINEARS, use_orig_params=True)
    for _ in range(2):
        model.module.breaks = where
        with pytest.raises(ZeroDivisionError):
            model(batch()).square().mean().backward()
        model.module.breaks = ""
        model.zero_grad()
        model(batch(dist.get_rank())).square().mean().backward()
    plain = Fragile()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_iteration_after_an_exception_trains(ranks: Ranks, where: str) -> None:
    ranks(2, body_exception, where)


def body_recompute() -> None:
    inner = net()
    inner[0] = checkpoint_wrapper(inner[0])
    model = FSDP(
        nn.Sequential(checkpoint_wrapper(FSDP(inner, use_orig_params=True))), use_orig_params=True
    )
    plain = nn.Sequential(net())
    model(batch(dist.get_rank())).square().mean().backward()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())


def test_recomputed_modules(ranks: Ranks) -> None:
    ranks(2, body_recompute)


def body_originals() -> None:
    plain = net()
    plain[0].bias.requires_grad_(False)
    weight = plain[0].weight
    model = FSDP(copy.deepcopy(plain), use_orig_params=True)
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"_fsdp_wrapped_module.{name}" for name, _ in plain.named_parameters()]
    assert sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in plain.parameters())
    model(batch(dist.get_rank())).square().mean().backward()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)
    assert model.module[0].bias.grad is None
    model.module[0].bias.requires_grad_(True)
    plain[0].bias.requires_grad_(True)
    model.zero_grad()
    plain.zero_grad()
    recorder = Recorder()
    with observe(recorder):
        model(batch(dist.get_rank())).square().mean().backward()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)
    assert [k for k, _ in recorder.kinds()].count("reduce_scatter") == 1
    assert weight.shape == (7, 5)


def test_original_parameters_may_be_frozen_one_by_one(ranks: Ranks) -> None:
    ranks(2, body_originals)


def body_written(use_orig_params: bool) -> None:
    model = FSDP(
        net(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=use_orig_params
    )
    plain = net()
    model(batch())
    with torch.no_grad():
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.add_(1.0)
    torch.testing.assert_close(model(batch()), plain(batch()))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_written_without_a_backward_are_seen(
    ranks: Ranks, use_orig_params: bool
) -> None:
    ranks(2, body_written, use_orig_params)


def body_autocast() -> None:
    model = FSDP(net(), auto_wrap_policy=LINEARS, use_orig_params=True)
    plain = net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(batch(dist.get_rank())), plain(batch(dist.get_rank()))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    found.float().sum().backward()
    with torch.inference_mode():
        torch.testing.assert_close(model(batch()), plain(batch()))
    model.zero_grad()
    plain.zero_grad()
    model(batch(dist.get_rank())).square().mean().backward()
    plain(batch()).square().mean().backward()
    same_gradients(model, plain)


def test_autocast_and_inference_mode(ranks: Ranks) -> None:
    ranks(2, body_autocast)


def body_gradients_of_some() -> None:
    model = FSDP(net(), use_orig_params=True)
    unused = model.module[2].bias
    model.module[2].bias.requires_grad_(False)
    model(batch(dist.get_rank())).square().mean().backward()
    unused.requires_grad_(True)
    found = gradients(model)
    assert [name for name, gradient in found.items() if gradient is None] == ["2.bias"]
    # The last rank holds no element of the first weight, and another rank has its gradient.
    assert found["0.weight"] is not None
    with FSDP.summon_full_params(model, with_grads=True):
        for _, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
    assert all((gradient == 2.0).all() for gradient in gradients(model).values())
    model.zero_grad()
    assert set(gradients(model).values()) == {None}


def test_gradients_that_no_rank_has_are_none(ranks: Ranks) -> None:
    ranks(3, body_gradients_of_some)


def body_looked_at() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FSDP(
            net(), auto_wrap_policy=LINEARS, use_orig_params=True, sharding_strategy=strategy
        )
        plain = net()
        loss = model(batch(dist.get_rank())).square().mean()
        with FSDP.summon_full_params(model):
            assert sum(p.numel() for p in model.parameters()) == 66
        assert len(model.state_dict()) == 4
        loss.backward()
        plain(batch()).square().mean().backward()
        same_gradients(model, plain)


def test_parameters_may_be_looked_at_between_forward_and_backward(ranks: Ranks) -> None:
    ranks(2, body_looked_at)


def body_compiled() -> None:
    for use_orig_params in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            torch._dynamo.reset()
            model = FSDP(
                net(),
                auto_wrap_policy=LINEARS,
                use_orig_params=use_orig_params,
                sharding_strategy=strategy,
            )
            plain = net()
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
            compiled = torch.compile(model, backend="aot_eager")
            for _ in range(3):
                loss = compiled(batch(dist.get_rank())).square().mean()
                loss.backward()
                plain(batch()).square().mean().backward()
                with torch.no_grad():
                    torch.testing.assert_close(compiled(batch()), plain(batch()))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


# Dynamo looks at `.grad` of each input of a graph, and hides what torch says of that.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_wrapper_trains_alike(ranks: Ranks) -> None:
    ranks(2, body_compiled)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def body_shared_changes() -> None:
    """A parameter that two modules share is written or replaced: both have the new one."""
    x, new = torch.ones(2, 4), torch.arange(16.0).view(4, 4) / 10
    part = new.reshape(-1).chunk(dist.get_world_size())[dist.get_rank()]
    for how in ("data", "in place", "replaced in one place"):
        plain = Tied()
        model = FSDP(Tied(), use_orig_params=True)
        model(x).sum().backward()
        model.zero_grad()
        weight = model.module.a.weight
        with torch.no_grad():
            plain.a.weight.copy_(new)
            if how == "data":
                weight.data = part.clone()
            elif how == "in place":
                weight.copy_(part)
            else:
                model.module.a.weight = nn.Parameter(part.clone())
        torch.testing.assert_close(model(x), plain(x), msg=how)
        model(x).sum().backward()
        plain(x).sum().backward()
        assert model.module.a.weight is model.module.b.weight
        mine = plain.a.weight.grad.reshape(-1).chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(model.module.b.weight.grad, mine)


def test_shared_parameters_may_be_changed(ranks: Ranks) -> None:
    ranks(2, body_shared_changes)


# A class of meshes by role, which has no meaning here.
ABSENT = {"DataParallelMeshDims"}


def test_the_names_of_torch_are_here() -> None:
    assert set(peer_package.__all__) - ABSENT <= set(fsdp.__all__)
    assert set(peer_wrap.__all__) <= set(fsdp.wrap.__all__)
