"""Ranks that shard other values are told before the first step; what was loaded since is not."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.functional import mse_loss

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import fully_shard, keep_batch_norm_local
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ShardingStrategy
from meshwright.gradients import digest_of_all, digests_of
from meshwright.mesh import init_device_mesh
from meshwright.plan import Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes

CLASSES = {"flat": {"use_orig_params": False}, "original": {"use_orig_params": True}}
STRATEGIES = ["fully_shard", *CLASSES]


def here() -> int:
    return communicator().rank


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    return nn.Sequential(layer, nn.Linear(6, 5))


def laid_out(model: Any, strategy: str, **options: Any) -> Any:
    keep_batch_norm_local(model)
    if strategy == "fully_shard":
        fully_shard(model[0], **options)
        return fully_shard(model, **options)
    options = {**CLASSES[strategy], **options}
    model[0] = FSDP(model[0], **options)
    return FSDP(model, **options)


def train(model: Any) -> None:
    kind = next(model.parameters()).dtype
    model(torch.ones(3, 4, dtype=kind)).sum().backward()


def another_seed(strategy: str) -> Any:
    return laid_out(build(here()), strategy)


def a_checkpoint_on_one_rank(strategy: str) -> Any:
    model = build()
    if here() == 0:
        model.load_state_dict(build(5).state_dict())
    return laid_out(model, strategy)


def one_element(strategy: str) -> Any:
    model = build()
    with torch.no_grad():
        model[1].bias[-1] += 1e-7 * here()
    return laid_out(model, strategy)


def a_swap(strategy: str) -> Any:
    model = build()
    if here():
        weight = model[1].weight.data
        weight.copy_(weight.flip(0))
    return laid_out(model, strategy)


def another_buffer(strategy: str) -> Any:
    model = build()
    model[0][1].running_mean += here()
    return laid_out(model, strategy)


def converted_since(strategy: str) -> Any:
    return laid_out(build(here()), strategy).to(torch.float64)


def one_part_loaded_since(strategy: str) -> Any:
    """A parameter is loaded, and one that differs is not."""
    model = another_seed(strategy)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    return model


DIFFERENT: dict[Callable[[str], Any], str] = {
    another_seed: ".weight'",
    a_checkpoint_on_one_rank: ".weight'",
    one_element: "'1.bias'",
    a_swap: "'1.weight'",
    another_buffer: "'0.1.running_mean'",
    converted_since: ".weight'",
    one_part_loaded_since: "'",
}


def seeded_since(strategy: str) -> Any:
    """Values that no counter of versions sees."""
    model = another_seed(strategy)
    for parameter in model.parameters():
        getattr(parameter, "_local_tensor", parameter).data.fill_(0.1)
    return model


def loaded_since(strategy: str) -> Any:
    model = another_seed(strategy)
    state = build(3).state_dict()
    if strategy == "fully_shard":
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, state, options=options)
        return model
    model.load_state_dict(state)
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    with FSDP.summon_full_params(model):
        assert model.state_dict().keys() == state.keys()
    return model


def loaded_with_buffers(strategy: str) -> Any:
    model = another_buffer(strategy)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    layer = model[0][1] if strategy == "fully_shard" else model[0].module[1]
    layer.running_mean.zero_()
    return model


def materialized_since(strategy: str) -> Any:
    with torch.device("meta"):
        model = build()
    if strategy != "fully_shard":
        return laid_out(
            model, strategy, param_init_fn=given_values, device_id=communicator().device
        )
    model = laid_out(model, strategy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def given_values(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.data.fill_(1)


def sent_from_rank_0(strategy: str) -> Any:
    model = build(here())
    model[0][1].running_mean += here()
    model = laid_out(model, strategy, sync_module_states=True)
    whole = build(0)
    if strategy == "fully_shard":
        found = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
        torch.testing.assert_close(found, dict(whole.named_parameters()), rtol=0, atol=0)
        torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()))
    else:
        with FSDP.summon_full_params(model):
            torch.testing.assert_close(
                [*model.parameters()] if strategy == "original" else [],
                [*whole.parameters()] if strategy == "original" else [],
            )
    return model


def own_buffers(strategy: str) -> Any:
    """What no state dict has may be each rank's own."""
    model = build()
    model[1].register_buffer("number", torch.tensor(here()), persistent=False)
    return laid_out(model, strategy)


def left_out(strategy: str) -> Any:
    """An expert of each rank's own, with its buffers."""
    model = build()
    expert = nn.BatchNorm1d(5)
    with torch.no_grad():
        expert.weight += here()
        expert.running_var += here()
    keep_batch_norm_local(model.append(expert))
    own = list(expert.parameters())
    if strategy == "fully_shard":
        return fully_shard(model, ignored_params=set(own))
    return FSDP(model, ignored_states=own, **CLASSES[strategy])


SAME = [
    seeded_since,
    loaded_since,
    loaded_with_buffers,
    materialized_since,
    sent_from_rank_0,
    own_buffers,
    left_out,
]


def body(strategy: str) -> None:
    for prepare, name in DIFFERENT.items():
        model = prepare(strategy)
        with pytest.raises(CollectiveMismatchError, match="to have the same values") as caught:
            train(model)
        text = str(caught.value)
        assert name in text, (prepare.__name__, text)
        assert "ranks [0], others on ranks [1]" in text, text
        assert "sync_module_states=True" in text, text
    for prepare in SAME:
        train(prepare(strategy))


def body_of_copies(strategy: str, odd: int) -> None:
    """Rank ``odd`` alone differs: all ranks are told, also those of other rows and columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(7 * (here() == odd))
    if strategy == "fully_shard":
        model = laid_out(model, strategy, mesh=mesh)
    else:
        hybrid = ShardingStrategy.HYBRID_SHARD
        model = laid_out(model, strategy, device_mesh=mesh, sharding_strategy=hybrid)
    begun = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match=f"to have the same values.*{odd}"):
        train(model)
    assert time.monotonic() - begun < 60


def body_of_loaded_copies() -> None:
    """Copies of one part that were loaded apart, after they were sharded alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = laid_out(build(), "fully_shard", mesh=mesh)
    row = mesh["replicate"].get_local_rank()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.fill_(1.0 + row)
    with pytest.raises(CollectiveMismatchError, match="copies of one part"):
        train(model)
    train(laid_out(build(), "fully_shard", mesh=mesh))


def body_of_plans() -> None:
    """Plans send what rank 0 has."""
    plan = Plan(axes=Axes.of({"shard": 2}), train=TrainPlan(batch_norm="local"))
    batch, target = torch.ones(4, 4), torch.zeros(4, 5)
    options: Any = {"optimizer": torch.optim.SGD, "loss": mse_loss}
    found = []
    for seed in (0, here()):
        trainable = parallelize(build(seed), plan, **options)
        trainable.step(batch, target)
        found.append(trainable.state_dict()["model"])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_start_from_other_values(ranks: Ranks, strategy: str) -> None:
    ranks(2, body, strategy)


def test_ranks_of_a_plan_that_start_from_other_values(ranks: Ranks) -> None:
    ranks(2, body_of_plans)


def test_copies_that_start_from_other_values(ranks: Ranks) -> None:
    ranks(4, body_of_loaded_copies)
    ranks(4, body_of_copies, "fully_shard", 1)


@pytest.mark.few(0, slow=6)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("odd", range(4))
def test_one_rank_of_two_axes_differs(ranks: Ranks, strategy: str, odd: int) -> None:
    ranks(4, body_of_copies, strategy, odd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 5, 2**14, 2**18 + 3])
def test_a_digest_sees_every_element_and_its_place(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    digest = _digest_of(tensor)
    assert digest.shape == ()
    assert torch.equal(digest, _digest_of(tensor.clone()))
    for index in {0, size // 2, size - 1} if size else ():
        other = tensor.clone()
        other[index] = 1 - other[index].to(torch.int8)
        assert not torch.equal(digest, _digest_of(other))
    moved = tensor.roll(1)
    if not torch.equal(moved, tensor):
        assert not torch.equal(digest, _digest_of(moved))


def test_digests_taken_together_are_those_of_each() -> None:
    torch.manual_seed(0)
    sizes = (0, 1, 2, 3, 4, 5, 17, 1000, 2**14 - 1, 2**14, 2**15 + 1)
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64)
    tensors = [torch.randint(0, 2, (n,)).to(dtype) for n in sizes for dtype in dtypes]
    tensors += [torch.randn(5, 4).t(), torch.randn(9)[1:], torch.tensor(2.0)]
    together = digests_of([*tensors, None, torch.empty(3, device="meta")])
    assert together[len(tensors) :] == [None, None]
    for tensor, digest in zip(tensors, together, strict=False):
        assert digest is not None
        assert torch.equal(digest, _digest_of(tensor))


def test_one_digest_of_all_sees_each_of_many_tensors_and_its_place() -> None:
    torch.manual_seed(0)
    kinds = ((3, torch.int8), (7, torch.float32), (5, torch.bfloat16), (2**14, torch.float64))
    tensors = [torch.randint(0, 2, (n,)).to(dtype) for _ in range(150) for n, dtype in kinds]
    digest = digest_of_all([*tensors, torch.empty(3, device="meta")])
    assert digest is not None
    assert digest == digest_of_all([*map(torch.clone, tensors)])
    for place, tensor in [*enumerate(tensors)][::23]:
        others = [*tensors]
        others[place] = tensor.clone()
        others[place][-1] = 1 - tensor[-1].to(torch.int8)
        assert digest != digest_of_all(others)
    assert digest != digest_of_all(tensors[::-1])
    long = [torch.full((2**14,), value) for value in (1.0, 2.0)]
    assert digest_of_all(long) != digest_of_all(long[::-1])
    assert digest_of_all([]) is None


def _digest_of(tensor: torch.Tensor) -> torch.Tensor:
    (digest,) = digests_of([tensor])
    assert digest is not None
    return digest
