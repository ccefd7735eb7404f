"""A compiled root of `fully_shard` in one graph: eager gradients, collectives and memory."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters as torch_counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, observe
from meshwright.compiler import aot_backend, compiled_autograd, counters
from meshwright.data_parallel import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from meshwright.errors import CollectiveMismatchError
from meshwright.mesh import init_device_mesh
from meshwright.pipelining import PipelineStage, get_schedule_class
from meshwright.testing import Ranks, RanksFailed
from support.internals.data_parallel import Phase, Unit

# Dynamo looks at `.grad` of each input of a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

WORDS, WIDTH = 11, 8
Words = torch.Tensor


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.Identity() if case.is_bare else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = None if case.is_bare else nn.Parameter(torch.ones(WIDTH))
        self.recomputes = case.recomputes
        if case.is_nested:
            self.down = case.shard(self.down)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        # What follows reads only this, which is cheap to compute anew: with parameters of here.
        return (x + found) * self.scale if self.scale is not None else x + found


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            case.shard(Block(case).to(case.dtype)) for _ in range(case.blocks)
        )
        self.unused = case.shard(nn.Linear(WIDTH, WIDTH).to(case.dtype))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if case.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Words) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is sharded, and what its steps do."""

    blocks: int = 3
    is_sharded: bool = True
    is_compiled: bool = True
    keeps: bool | None = None
    """``reshard_after_forward``."""
    is_mixed: bool = False
    is_hybrid: bool = False
    is_nested: bool = False
    is_tied: bool = False
    is_bare: bool = False
    """Whether blocks are two products and a sum, which compilers move behind other gradients."""
    recomputes: bool = False
    freezes: bool = False
    synchronized: tuple[bool, ...] = (True, True, True)
    """Of each step, whether it reduces."""
    passes: int = 1
    """Forwards to one backward."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_mixed else torch.float64

    def shard(self, module: nn.Module) -> Any:
        if not self.is_sharded:
            return module
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        if self.is_hybrid:
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.keeps,
            mp_policy=policy if self.is_mixed else None,
        )

    def build(self) -> Any:
        net = Net(self).to(self.dtype)
        if self.freezes:
            net.blocks[0].up.weight.requires_grad_(False)
            net.blocks[1].requires_grad_(False)
        return self.shard(net)


@dataclass
class Run:
    losses: list[float]
    issued: list[list[tuple[str, str]]]
    gradients: list[dict[str, torch.Tensor | None]]
    weights: dict[str, torch.Tensor]
    most: int


def batch(step: int, rank: int | None, *, size: int) -> Words:
    """The words of ``rank``; of all ranks when None."""
    words = torch.randint(0, WORDS, (2 * size, 5), generator=torch.Generator().manual_seed(step))
    return words if rank is None else words.chunk(size)[rank]


def full(tensor: Any) -> Any:
    """A copy of all of it."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@contextlib.contextmanager
def most_whole() -> Any:
    """Count the units that are whole or on their way, at most at a time, root apart."""
    held: set[str] = set()
    found = [0]

    def become(unit: Unit, phase: Phase) -> None:
        unit.__dict__["phase"] = phase
        if unit.name != "FSDPNet":
            is_held = phase in (Phase.GATHERING, Phase.FULL)
            (held.add if is_held else held.discard)(unit.name)
            found[0] = max(found[0], len(held))

    watched = property(lambda unit: unit.__dict__["phase"], become)
    with mock.patch.object(Unit, "phase", watched, create=True):
        yield found


def train(case: Case, backend: Any = aot_backend) -> Run:
    net = case.build()
    model = torch.compile(net, backend=backend, fullgraph=True) if case.is_compiled else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = Run([], [], [], {}, 0)
    size, rank = dist.get_world_size(), dist.get_rank() if case.is_sharded else None
    for step, is_synchronized in enumerate(case.synchronized):
        if case.is_sharded:
            net.set_requires_gradient_sync(is_synchronized)
        recorder = Recorder()
        with observe(recorder), most_whole() as most:
            words = [batch(10 * step + n, rank, size=size) for n in range(case.passes)]
            loss = sum(model(each).square().mean() for each in words)
            loss.backward()
        run.most = max(run.most, most[0])
        run.losses.append(loss.item())
        run.issued.append([(c.kind, c.label) for c in recorder.collectives])
        if is_synchronized:
            run.gradients.append({n: full(p.grad) for n, p in net.named_parameters()})
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        run.losses.append(model(batch(99, None, size=size)).square().mean().item())
    run.weights = {n: full(p.detach()) for n, p in net.named_parameters()}
    return run


def same(found: Run, expected: Run, *, exactly: bool, case: Case) -> None:
    close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-9, "atol": 1e-11}
    if case.is_mixed and not exactly:
        close = {"rtol": 5e-2, "atol": 5e-2}
    if exactly:
        assert found.losses == expected.losses
    for mine, theirs in zip(
        [*found.gradients, found.weights], [*expected.gradients, expected.weights], strict=True
    ):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (mine[name] is None) == (value is None), (case, name)
            if value is not None:
                torch.testing.assert_close(mine[name], value, **close, msg=f"{case}: {name}")


@contextlib.contextmanager
def without_caches() -> Any:
    """Have graphs compiled that an earlier run has left on the disk: of those no pass sees any."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def body_cases(*cases: Case, compiler: Any = None, exactly: bool = True) -> None:
    for case in cases:
        torch._dynamo.reset()
        torch_counters.clear()
        before = counters["gathers"]
        with without_caches():
            found = train(case, compiler or aot_backend)
        # One graph for training and one for evaluation.
        assert torch_counters["stats"]["unique_graphs"] == 2, (case, torch_counters)
        units = case.blocks * (2 if case.is_nested else 1)
        assert counters["gathers"] - before == 3 * units
        eager = train(replace(case, is_compiled=False))
        assert found.most <= 2 + case.is_nested or case.keeps is False
        same(found, eager, exactly=exactly, case=case)
        if not case.is_hybrid and case.passes == 1:
            assert sorted(map(sorted, found.issued)) == sorted(map(sorted, eager.issued)), case
        alone = replace(case, is_compiled=False, is_sharded=False)
        same(found, train(alone), exactly=False, case=case)


@pytest.mark.slow
def test_twelve_blocks_are_one_graph_and_two_of_them_whole(ranks: Ranks) -> None:
    ranks(2, body_cases, Case(blocks=12))


@pytest.mark.few(1, slow=5)
@pytest.mark.parametrize(
    "case",
    [
        Case(keeps=False),
        Case(keeps=True),
        Case(is_mixed=True),
        Case(is_nested=True),
        Case(is_tied=True),
        Case(freezes=True),
        Case(recomputes=True),
        Case(synchronized=(False, True, False, False, True)),
        Case(passes=2),
    ],
    ids=str,
)
def test_gradients_are_those_of_eager_mode(ranks: Ranks, case: Case) -> None:
    ranks(2, body_cases, case)


@pytest.mark.slow
def test_hybrid_shards(ranks: Ranks) -> None:
    ranks(4, body_cases, Case(is_hybrid=True))


@pytest.mark.slow
def test_generated_code(ranks: Ranks) -> None:
    cases = (
        *(Case(), Case(is_bare=True), Case(keeps=False, is_mixed=True)),
        Case(synchronized=(False, True, True)),
    )
    ranks(2, body_cases, *cases, compiler="inductor", exactly=False, timeout=300.0)


def body_order() -> None:
    torch._dynamo.reset()
    net = Case().build()
    model = torch.compile(net, backend=aot_backend, fullgraph=True)
    words = batch(0, dist.get_rank(), size=2)
    for _ in range(2):
        recorder = Recorder()
        with observe(recorder):
            model(words).square().mean().backward()
    labels = [c.label for c in recorder.collectives]
    found = [label for label in labels if label.startswith(("unshard", "reduce"))]
    assert found == [
        *("unshard FSDPNet", "unshard blocks.0", "unshard blocks.1", "unshard blocks.2"),
        *("unshard blocks.2", "unshard blocks.1", "reduce blocks.2"),
        *("unshard blocks.0", "reduce blocks.1", "reduce blocks.0", "reduce FSDPNet"),
    ], found


def test_collectives_one_by_one(ranks: Ranks) -> None:
    ranks(2, body_order)


class Odd(nn.Module):
    """Blocks, in a forward that a graph cannot hold."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        if how == "tied":
            self.blocks[1].weight = self.blocks[0].weight
        for block in self.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "rest":
            x = x * self.blocks[0].bias.shape[0] + x.to(self.blocks[1].bias.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.how == "rest":
            x = x if self.blocks[1].bias is None else x / self.blocks[1].bias.element_size()
        if self.how == "break":
            torch._dynamo.graph_break()
            x = self.blocks[0](x) * self.blocks[1](x)
        if self.how == "again":
            x = self.blocks[0](x)
        if self.how == "recomputed":
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return x


def body_left_to_eager(how: str, backend: Any, told: str) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # pyrefly: ignore
    logging.getLogger("meshwright").addHandler(handler)
    logging.getLogger("meshwright").setLevel(logging.INFO)
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        net: Any = fully_shard(Odd(how), mesh=init_device_mesh("cpu", (2,)))
        model = torch.compile(net, backend=backend or aot_backend) if is_compiled else net
        for step in range(3):
            x = torch.randn(2, WIDTH, generator=torch.manual_seed(step)).double()
            model(x).square().mean().backward()
        found.append([full(p.grad) for p in net.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert [line for line in lines if "outside of the compiled graph" in line] == (
        [f"shards are gathered outside of the compiled graph: {told}"]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "backend", "told"),
    [
        (
            "",
            "aot_eager",
            "the backend runs no pass of ours; inductor and meshwright.compiler.aot_backend do",
        ),
        ("again", None, "'blocks.0' is called several times in a forward"),
        ("recomputed", None, "'blocks.0' is called several times in a forward"),
    ],
)
def test_what_a_graph_cannot_hold_is_left_to_eager_mode(
    ranks: Ranks, how: str, backend: str | None, told: str
) -> None:
    ranks(2, body_left_to_eager, how, backend, told)


class Writing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1.0, 1.0)
        return super().forward(x)


def body_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    inner = Case().build()
    model = torch.compile(inner, backend=aot_backend)
    words = batch(0, dist.get_rank(), size=2)
    model(words).sum().backward()
    # In a graph the write would be lost in silence.
    writing: Any = nn.Sequential(fully_shard(Writing(WIDTH, WIDTH), mesh=mesh))
    with pytest.raises(RuntimeError, match="was written in place while it was whole"):
        torch.compile(fully_shard(writing, mesh=mesh), backend=aot_backend)(torch.ones(2, WIDTH))
    given = {"_orig_mod.blocks.0.scale": torch.ones(WIDTH, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match="where the sharded unit left it"):
        functional_call(model, given, (words,))


def test_what_would_be_lost_in_a_graph_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refusals)


def body_frozen() -> None:
    torch._dynamo.reset()
    torch_counters.clear()
    nets = [Case().build() for _ in range(2)]
    models = [torch.compile(nets[0], backend=aot_backend), nets[1]]
    words = batch(0, dist.get_rank(), size=2)
    for is_frozen in (False, True, False, True):
        for net in nets:
            net.blocks[0].up.weight.requires_grad_(not is_frozen)
        for net, model in zip(nets, models, strict=True):
            net.zero_grad()
            model(words).square().mean().backward()
        for (name, one), other in zip(
            nets[0].named_parameters(), nets[1].parameters(), strict=True
        ):
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(full(one.grad), full(other.grad)), name
    assert torch_counters["stats"]["unique_graphs"] < 4, torch_counters["stats"]


@pytest.mark.slow
def test_what_was_frozen_or_thawed_since_is_compiled_anew(ranks: Ranks) -> None:
    ranks(2, body_frozen)


def body_compiled_backward() -> None:
    loss = torch.compile(Case().build(), backend=aot_backend)(batch(0, 0, size=2)).square().mean()
    refused = pytest.raises(Exception, match="backward outside of")
    with refused, compiled_autograd(lambda graph: torch.compile(graph, backend=aot_backend)):
        loss.backward()


@pytest.mark.slow
def test_a_compiled_backward_is_refused(ranks: Ranks) -> None:
    ranks(2, body_compiled_backward)


def body_different(how: str) -> None:
    net = Case().build()
    model = torch.compile(net, backend=aot_backend)
    if dist.get_rank() and how == "backward":
        net.blocks[1].forward = lambda x: x + net.blocks[1].norm(x)
    elif dist.get_rank():
        model = net
    model(batch(0, 0, size=2)).square().mean().backward()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("eager", r"a compiled forward pass \(blocks.0 to .*; \w+\) on rank 0, blocks.0, outside"),
        ("backward", r"a compiled backward pass \(blocks.2 to blocks.0; \d+ gradients, \w+\) on"),
    ],
)
def test_graphs_that_differ_between_ranks_are_an_error(ranks: Ranks, how: str, told: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body_different, how, grace=8.0, timeout=40.0)
    error = caught.value.first.exception
    assert isinstance(error, CollectiveMismatchError)
    assert re.search(told, str(error)), error


def body_as_eager(how: str) -> None:
    """Models of which some are compiled; in each step one forward is computed anew."""
    torch._dynamo.reset()
    before = counters["gathers"]
    gradients = []
    nets: list[Any] = [fully_shard(Odd(how), mesh=init_device_mesh("cpu", (2,))) for _ in range(4)]
    models = [*(torch.compile(net, backend=aot_backend) for net in nets[:2]), *nets[2:]]
    for step in range(5):
        gradients.clear()
        for number, (net, model) in enumerate(zip(nets, models, strict=True)):
            net.blocks[0].weight.requires_grad_(step % 4 != 1)
            net.blocks[1].weight.requires_grad_(step < 2)
            if step == 4:
                net.set_reduce_scatter_max_input_buffers(1)
            x = torch.randn(2, WIDTH, generator=torch.manual_seed(step + number % 2)).double()
            loss = model(x).sin().mean() + checkpoint(model, x, use_reentrant=False).cos().mean()
            loss.backward()
            gradients.append([full(p.grad) for p in net.parameters()])
            net.zero_grad()
        for mine, theirs in ((0, 2), (1, 3)):
            for one, other in zip(gradients[mine], gradients[theirs], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert counters["gathers"] > before


@pytest.mark.parametrize(
    "how", ["rest", *(pytest.param(how, marks=pytest.mark.slow) for how in ("", "break", "tied"))]
)
def test_looks_breaks_and_twins_are_as_in_eager_mode(ranks: Ranks, how: str) -> None:
    ranks(2, body_as_eager, how)


def body_inputs_alone() -> None:
    """Gradients of inputs alone leave parameters as they are, as in eager mode."""
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        net: Any = fully_shard(Odd(""), mesh=init_device_mesh("cpu", (2,)))
        model = torch.compile(net, backend=aot_backend) if is_compiled else net
        x = torch.randn(2, WIDTH, generator=torch.manual_seed(0)).double().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), [x])
        assert all(p.grad is None for p in net.parameters())
        found.append(gradient)
    assert torch.equal(*found)


@pytest.mark.slow
def test_gradients_of_inputs_alone(ranks: Ranks) -> None:
    ranks(2, body_inputs_alone)


def body_between_steps() -> None:
    """A load makes no other graph; a join and a method that drives the root leave the one there."""
    torch._dynamo.reset()
    torch_counters.clear()
    mesh = init_device_mesh("cpu", (2,))
    nets: list[Any] = [fully_shard(Odd(""), mesh=mesh) for _ in range(2)]
    nets[0].compile(backend=aot_backend)
    gathered, found = [], []
    for net in nets:
        register_fsdp_forward_method(net, "doubled")
    for step in range(8):
        x = torch.randn(2, WIDTH, generator=torch.manual_seed(step)).double()
        if step == 2:
            for net in nets:
                net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
        before = counters["gathers"]
        found.clear()
        for net in nets:
            net.zero_grad()
            call = net.doubled if step in (3, 6) else net
            with net.join() if step in (4, 7) else contextlib.nullcontext():
                call(x).square().mean().backward()
            found.append([full(p.grad) for p in net.parameters()])
        gathered.append(counters["gathers"] - before)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert gathered[0] > 0, gathered
    assert not any(gathered[1:]), "no other graph that gathers was made"


def test_loads_joins_and_methods_between_steps(ranks: Ranks) -> None:
    ranks(2, body_between_steps)


def body_modes() -> None:
    for options in ({"mode": "reduce-overhead"}, {"dynamic": True}):
        torch._dynamo.reset()
        before = counters["gathers"]
        found = []
        for is_compiled in (True, False):
            net: Any = fully_shard(Odd(""), mesh=init_device_mesh("cpu", (2,)))
            model = torch.compile(net, **options) if is_compiled else net
            for step in range(3):
                x = torch.randn(2 + step, WIDTH, generator=torch.manual_seed(step)).double()
                with without_caches():
                    model(x).square().mean().backward()
            found.append([full(p.grad) for p in net.parameters()])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        assert counters["gathers"] > before


@pytest.mark.slow
def test_modes_of_compile(ranks: Ranks) -> None:
    ranks(2, body_modes, timeout=300.0)


def body_driven_by_a_pipeline() -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    nets: list[Any] = [fully_shard(Odd(""), mesh=mesh) for _ in range(2)]
    nets[0].compile(backend=aot_backend)
    alone = dist.new_subgroups(1)[0]
    x = torch.randn(4, WIDTH, generator=torch.manual_seed(dist.get_rank())).double()
    before = counters["gathers"]
    found: list[list[Any]] = []
    issued: list[list[str]] = []
    for net in nets:
        net(x[:2]).square().mean().backward()
        net.zero_grad()
    assert counters["gathers"] > before
    for net in nets:
        stage = PipelineStage(net, 0, 1, torch.device("cpu"), group=alone)
        schedule = get_schedule_class("GPipe")(stage, 2, loss_fn=lambda y, _: y.square().mean())
        recorder = Recorder()
        with observe(recorder):
            schedule.step(x, target=x)
        issued.append(sorted(c.label for c in recorder.collectives if "blocks" in c.label))
        found.append([full(p.grad) for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert issued[0] == issued[1], "units stay whole for all microbatches"


def test_a_pipeline_drives_what_gathered_in_graphs(ranks: Ranks) -> None:
    ranks(2, body_driven_by_a_pipeline)
