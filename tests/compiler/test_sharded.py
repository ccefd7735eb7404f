"""Sharded modules under `torch.compile`: eager gradients, and no collective more than eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, observe
from meshwright.compiler import compiled_autograd
from meshwright.data_parallel import MixedPrecisionPolicy, fully_shard
from meshwright.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.pipelining import _is_compiled

# Dynamo looks at `.grad` of each input of a graph, and hides what torch says of those of blocks.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

Gradients = dict[str, torch.Tensor]

WORDS, WIDTH = 11, 8
SYNCHRONIZED = (True, False, True)
"""Of each step, whether it reduces."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def chain() -> nn.Sequential:
    """Its class's forward is torch's, which dynamo does not begin a graph with."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        block = chain if case.has_chains else Block
        self.blocks = nn.ModuleList(block() for _ in range(case.blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if case.is_tied:
            self.head.weight = self.embedding.weight
        self.recomputes = case.recomputes

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what shards it, and what of it is compiled."""

    compiles: str = "nothing"
    """What, and for blocks also whether ``before`` or ``after`` they are sharded."""
    is_facade: bool = False
    use_orig_params: bool = True
    reshard_after_forward: bool | None = None
    is_mixed: bool = False
    is_tied: bool = False
    recomputes: bool = False
    has_chains: bool = False
    blocks: int = 3

    def shard(self, module: nn.Module) -> Any:
        reduced = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        if self.is_facade:
            kept = self.reshard_after_forward is False
            strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
            return FullyShardedDataParallel(
                module,
                sharding_strategy=strategy,
                mixed_precision=MixedPrecision(**reduced) if self.is_mixed else None,
                use_orig_params=self.use_orig_params,
            )
        return fully_shard(
            module,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(**reduced) if self.is_mixed else None,
        )

    def plain(self) -> Net:
        net = Net(self)
        return net if self.is_mixed else net.double()

    def build(self, backend: Any) -> nn.Module:
        net = self.plain()
        for number, block in enumerate(net.blocks):
            for when in ("before", "sharded", "after"):
                if when == "sharded":
                    block = self.shard(block)
                elif self.compiles == f"blocks in place {when}":
                    # What gathers stays outside of the graph of a block that is sharded.
                    is_whole = when == "after" and not self.is_facade
                    block.compile(backend=backend, fullgraph=is_whole)
                elif self.compiles == f"blocks {when}":
                    block = torch.compile(block, backend=backend)
            net.blocks[number] = block
        whole = self.shard(net)
        if self.compiles == "whole in place":
            whole.compile(backend=backend)
        return torch.compile(whole, backend=backend) if self.compiles == "whole" else whole


@dataclass
class Graphs:
    """A backend that counts what it compiles."""

    forward: int = 0
    backward: int = 0

    @property
    def backend(self) -> Any:
        return aot_autograd(
            fw_compiler=self._counts("forward"), bw_compiler=self._counts("backward")
        )

    def _counts(self, kind: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
            setattr(self, kind, getattr(self, kind) + 1)
            return make_boxed_func(graph.forward)

        return compiler


@dataclass
class Run:
    issued: list[list[tuple[str, str]]]
    """By step, kind and label of each collective."""
    gradients: list[Gradients]
    weights: Gradients


def clean(name: str) -> str:
    for part in ("_orig_mod", "_fsdp_wrapped_module"):
        name = name.replace(f"{part}.", "").removesuffix(f".{part}")
    return name


def words_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (4, 5), generator=generator)


def train(case: Case, backend: Any = "aot_eager") -> Run:
    torch._dynamo.reset()
    net = case.build(backend)
    assert _is_compiled(net) is (case.compiles != "nothing")
    own: Any = getattr(net, "_orig_mod", net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run([], [], {})
    for step, is_synchronized in enumerate(SYNCHRONIZED):
        words = words_of(step).chunk(dist.get_world_size())[dist.get_rank()]
        recorder = Recorder()
        block = contextlib.nullcontext() if is_synchronized else own.no_sync()
        with observe(recorder), block:
            net(words).square().mean().backward()
        run.issued.append([(c.kind, clean(c.label)) for c in recorder.collectives])
        if is_synchronized:
            run.gradients.append(whole_gradients(case, own))
            optimizer.step()
            optimizer.zero_grad()
    run.weights = whole_weights(case, own)
    return run


def whole_gradients(case: Case, net: Any) -> Gradients:
    if not case.is_facade:
        return {clean(n): p.grad.full_tensor() for n, p in net.named_parameters()}
    if not case.use_orig_params:
        return {}
    with FullyShardedDataParallel.summon_full_params(net, with_grads=True):
        return {clean(n): p.grad.clone() for n, p in net.named_parameters()}


def whole_weights(case: Case, net: Any) -> Gradients:
    state = net.state_dict()
    return {clean(n): v if case.is_facade else v.full_tensor() for n, v in state.items()}


def in_one_process(case: Case) -> Run:
    net = replace(case, recomputes=False).plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run([], [], {})
    for step, is_synchronized in enumerate(SYNCHRONIZED):
        net(words_of(step)).square().mean().backward()
        if is_synchronized:
            run.gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    run.weights = dict(net.state_dict())
    return run


def check(case: Case, backend: Any = "aot_eager") -> None:
    compiled, eager = train(case, backend), train(replace(case, compiles="nothing"))
    assert compiled.issued == eager.issued, case
    assert any("unshard" in label for _, label in eager.issued[0])
    for other in (eager, in_one_process(case)):
        # Compiled casts to bfloat16 are rounded elsewhere.
        close = {"rtol": 5e-2, "atol": 5e-2} if case.is_mixed else {"rtol": 1e-9, "atol": 1e-11}
        pairs = [(compiled.weights, other.weights)]
        if case.use_orig_params:  # gradients of flat parameters have no names
            pairs += zip(compiled.gradients, other.gradients, strict=True)
        for found, expected in pairs:
            assert found.keys() == expected.keys(), case
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, **close, msg=f"{case}: {name}")


def body_cases(cases: Sequence[Case], backend: str = "aot_eager") -> None:
    for case in cases:
        check(case, backend)


def body_one_graph(cases: Sequence[Case]) -> None:
    """More blocks than dynamo compiles one function for: all of them run the same graph."""
    for case in cases:
        graphs = Graphs()
        check(replace(case, blocks=9), graphs.backend)
        assert (graphs.forward, graphs.backward) == (1, 1), case


SHARING = (
    Case(compiles="blocks in place after", has_chains=True),
    Case(compiles="whole", is_facade=True),
    Case(compiles="blocks in place after"),
    Case(compiles="whole"),
    Case(compiles="blocks in place after", is_facade=True),
    Case(compiles="blocks before"),
    Case(compiles="blocks in place before", is_facade=True),
)


@pytest.mark.slow
def test_blocks_share_a_graph_and_gather_no_more_than_eager(ranks: Ranks) -> None:
    ranks(2, body_one_graph, SHARING[:2])


@pytest.mark.slow
def test_blocks_share_a_graph_however_they_are_compiled(ranks: Ranks) -> None:
    ranks(2, body_one_graph, SHARING[2:])


def body_compiled_backward() -> None:
    for is_facade in (False, True):
        loss = Case(is_facade=is_facade).build(None)(words_of(0)).square().mean()
        # Where parameters are freed the compiler reads what was saved of them before hooks run.
        text = "is compiled, which sharded modules do not|modified by an inplace operation"
        refused = pytest.raises(RuntimeError, match=text)
        with refused, compiled_autograd(lambda graph: torch.compile(graph, backend="aot_eager")):
            loss.backward()


@pytest.mark.slow
def test_a_compiled_backward_is_refused(ranks: Ranks) -> None:
    ranks(2, body_compiled_backward)


@pytest.mark.few(0, slow=2)
@pytest.mark.parametrize("is_facade", [False, True])
@pytest.mark.parametrize(
    "compiles",
    [
        "blocks before",
        "blocks in place before",
        "blocks after",
        "blocks in place after",
        "whole",
        "whole in place",
    ],
)
def test_every_way_to_compile(ranks: Ranks, compiles: str, is_facade: bool) -> None:
    case = Case(compiles=compiles, is_facade=is_facade)
    cases = [
        case,
        replace(case, reshard_after_forward=True),
        replace(case, reshard_after_forward=False),
        replace(case, is_mixed=True),
        replace(case, is_tied=True),
        replace(case, recomputes=True),
        replace(case, recomputes=True, is_mixed=True, reshard_after_forward=False),
    ]
    if is_facade:
        cases.append(replace(case, use_orig_params=False))
    ranks(2, body_cases, cases, timeout=180.0)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("is_facade", [False, True])
def test_generated_code(ranks: Ranks, is_facade: bool) -> None:
    case = Case(compiles="blocks in place after", is_facade=is_facade)
    cases = [case, replace(case, is_mixed=True), replace(case, compiles="whole", is_tied=True)]
    ranks(2, body_cases, cases, "inductor", timeout=180.0)


# What is at rest, inside of graphs.


@torch.compile(backend="aot_eager", fullgraph=True)
def scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Reads parameters that are at rest, none of which but one begins the memory of the unit."""
    named = dict(model.named_parameters())
    return x * sum(p.shape[0] * p.element_size() for p in named.values() if p.requires_grad)


def body_graphs_read_what_is_at_rest() -> None:
    model = Net(Case())
    for module in (*model.blocks, model):
        fully_shard(module)
    x = torch.ones(2)
    expected = x * sum(p.shape[0] * 4 for p in model.parameters())
    torch.testing.assert_close(scaled(model, x), expected)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()
    torch.testing.assert_close(scaled(model, x), expected)


def test_graphs_read_what_is_at_rest(ranks: Ranks) -> None:
    ranks(2, body_graphs_read_what_is_at_rest)


def body_optimizers_are_compiled(kind: str, is_kept: bool) -> None:
    """As one process does with its compiled optimizer: torch's count steps in float32."""
    torch._dynamo.reset()
    found = []
    for is_sharded in (False, True):
        model: Any = Net(Case()).double()
        for module in (*model.blocks, model) if is_sharded else ():
            fully_shard(module)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for number in range(4):
            words = torch.arange(6).view(2, 3).roll(number) % WORDS
            model(words).square().sum().backward()
            step()
            optimizer.zero_grad(set_to_none=not is_kept)
        found.append([p.full_tensor() if is_sharded else p for p in model.parameters()])
    plain, sharded = found
    for one, other in zip(plain, sharded, strict=True):
        torch.testing.assert_close(other, one.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_kept"), [("AdamW", False), ("SGD", True)])
def test_optimizers_of_sharded_models_are_compiled(ranks: Ranks, kind: str, is_kept: bool) -> None:
    ranks(2, body_optimizers_are_compiled, kind, is_kept)
