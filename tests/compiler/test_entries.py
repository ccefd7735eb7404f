"""Our own entries to compilation: right gradients, scoped settings, what a forward keeps."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import fx, nn
from torch._dynamo.utils import counters as torch_counters

from meshwright.compiler import compile_module, compiled_autograd, counters
from meshwright.data_parallel import fully_shard, replicate
from meshwright.testing import Ranks
from support.internals.comm import local_of

CONFIGS = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 64))


def settings() -> dict[str, object]:
    found: dict[str, object] = {}
    for module in CONFIGS:
        found |= {f"{module.__name__}.{k}": v for k, v in module.get_config_copy().items()}
    return found


def same_gradients(eager: nn.Module, inner: nn.Module) -> None:
    for each in (eager, inner):
        each(torch.randn(2, 3, 64, generator=torch.manual_seed(1))).square().mean().backward()
    for one, other in zip(eager.parameters(), inner.parameters(), strict=True):
        mine, theirs = (local_of(each.grad) for each in (other, one) if each.grad is not None)
        torch.testing.assert_close(mine, theirs)


def compile_in_scope() -> None:
    before = settings()
    eager, inner = replicate(layers()), compile_module(replicate(layers()))
    names = list(inner.state_dict())
    same_gradients(eager, inner)
    assert counters["ddp_buckets"] == 1
    assert list(inner.state_dict()) == names == list(eager.state_dict())
    assert settings() == before
    inside: list[dict[str, object]] = []
    with pytest.raises(ZeroDivisionError):
        raise_in_scope(inside)
    assert inside != [before] == [settings()]


def raise_in_scope(inside: list[dict[str, object]]) -> None:
    with compiled_autograd():
        inside.append(settings())
        raise ZeroDivisionError


@pytest.mark.slow
def test_our_entries_leave_no_setting_behind(ranks: Ranks) -> None:
    ranks(2, compile_in_scope, timeout=280)


@pytest.mark.slow
def test_no_sign_is_kept_beside_its_activation() -> None:
    eager = layers()
    inner = compile_module(copy.deepcopy(eager))
    kept: list[set[torch.dtype]] = []

    def note(graph: fx.Graph) -> None:
        outputs = graph.output_node().args[0]
        nodes = [each for each in outputs if isinstance(each, fx.Node)]
        kept.append({node.meta["val"].dtype for node in nodes})

    with torch._inductor.config.patch(post_grad_custom_post_pass=note):
        same_gradients(eager, inner)
    assert kept == [{torch.float32}, {torch.float32}]  # of the forward, and the gradients


def graphs_of(parts: Sequence[nn.Module]) -> int:
    before = torch_counters["stats"]["unique_graphs"]
    for part in parts:
        compile_module(part)(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return torch_counters["stats"]["unique_graphs"] - before


@pytest.mark.slow
def test_modules_of_torch_itself_are_compiled() -> None:
    def block(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    limit = torch._dynamo.config.recompile_limit
    assert graphs_of([block(2) for _ in range(limit + 1)]) == 1
    assert graphs_of([block(layers) for layers in range(3, limit + 4)]) == limit + 1


def compile_units() -> int:
    eager, inner = (fully_shard_blocks() for _ in range(2))
    before = torch_counters["stats"]["unique_graphs"]
    for block in inner:
        compile_module(block)
    same_gradients(eager, inner)
    return torch_counters["stats"]["unique_graphs"] - before


def fully_shard_blocks() -> nn.Module:
    root = nn.Sequential(*(layers() for _ in range(3)))
    for part in (*root, root):
        fully_shard(part)
    return root


@pytest.mark.slow
def test_units_that_are_modules_of_torch_itself_are_compiled(ranks: Ranks) -> None:
    assert ranks(2, compile_units, timeout=280) == [2, 2]
