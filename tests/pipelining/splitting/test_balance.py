"""Split policies: the largest stage is within 5 % of that of the best split, by any measure."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch import fx, nn

from meshwright.pipelining import balanced, pipeline
from support.internals.pipelining import (
    SLACK,
    OperatorCosts,
    Placement,
    best_cuts,
    cuttable,
    flops,
    parameters,
)


def largest(costs: OperatorCosts, cuts: tuple[int, ...]) -> float:
    edges = [0, *cuts, len(costs.each)]
    return max(costs.of(a, b) for a, b in itertools.pairwise(edges))


def every_split(count: int, stages: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, count), stages - 1))


def test_cuts_against_all_splits() -> None:
    draw = random.Random(0)
    for trial in range(300):
        count, stages = draw.randint(3, 9), draw.randint(1, 3)
        costs = OperatorCosts(
            [draw.choice([0, 1, draw.random(), 10 * draw.random()]) for _ in range(count)]
        )
        for number in range(draw.randint(0, 2)):
            for at in draw.sample(range(count), 2):
                costs.shared.setdefault(at, []).append((number, 5.0))
        limit = OperatorCosts([draw.random() for _ in range(count)]) if trial % 3 == 0 else None
        bound = 0.8 * limit.total() if limit else 0.0
        sent = [
            draw.choice([1.0, 2.0, 7.0, float("inf") if trial % 2 else 3.0]) for _ in range(count)
        ]
        legal = [
            cuts
            for cuts in every_split(count, stages)
            if all(sent[at] < float("inf") for at in cuts)
            and (limit is None or largest(limit, cuts) <= bound)
        ]
        if not legal:
            with pytest.raises(ValueError, match="cannot split"):
                best_cuts(costs, stages, sent, limit, bound)
            continue
        found = tuple(best_cuts(costs, stages, sent, limit, bound))
        assert found in legal
        least = min(largest(costs, cuts) for cuts in legal)
        assert largest(costs, found) <= SLACK * least * (1 + 1e-9)
        near = [cuts for cuts in legal if largest(costs, cuts) <= 1.0499 * least]
        assert sum(sent[at] for at in found) <= min(sum(sent[at] for at in c) for c in near)


class Uneven(nn.Module):
    """Layers of different widths, shared weights, statistics, a count, a skip, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        sizes = [(16, 64), (64, 16), (16, 256), (256, 16), (16, 16), (16, 16), (16, 128), (128, 16)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # in a trace this is assigned at the end, which forbids no cut
        x = self.embed(tokens)
        for wide, narrow in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + narrow(torch.relu_(wide(x)))
        return self.head(self.norm(x))


def exported(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    found = torch.export.export(model, (x,), strict=False).module(check_guards=False)
    assert isinstance(found, fx.GraphModule)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_parameters_and_operations(stages: int) -> None:
    torch.manual_seed(0)
    model = Uneven()
    x = torch.randint(50, (4, 6))
    graph = exported(model, x)
    nodes = cuttable(Placement(graph))
    for by, measure in (("parameters", parameters), ("flops", flops)):
        alone = copy.deepcopy(model)
        pipe = pipeline(model, (x,), split_policy=balanced(stages, by))
        assert pipe.num_stages == stages
        costs = measure(graph, nodes)
        least = min(largest(costs, cuts) for cuts in every_split(len(nodes), stages))
        modules = [pipe.get_stage_module(i) for i in range(stages)]
        if by == "parameters":
            sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
            assert max(sizes) <= SLACK * least
            assert sum(costs.each) + 800 == sum(p.numel() for p in model.parameters())
        else:
            products = sum(2 * layer.weight.numel() for layer in model.layers) + 2 * 800
            assert costs.total() == x.numel() * products
            weights = [[w for n, w in m.named_parameters() if "weight" in n] for m in modules]
            products_in = [
                sum(2 * w.numel() for w in each if w.dim() == 2 and w is not model.embed.weight)
                for each in weights
            ]
            assert x.numel() * max(products_in) <= SLACK * least
        torch.testing.assert_close(fx.Interpreter(pipe.split_gm).run(x), alone(x))


def test_time_and_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, size), nn.ReLU(), nn.Linear(size, 8))
            for size in (4096, 8, 8, 8)
        )
    )
    model.append(nn.BatchNorm1d(8))
    model.append(nn.Dropout(0.5))
    x, before, random_state = torch.randn(256, 8), copy.deepcopy(model), torch.get_rng_state()
    seen: dict[str, list[float]] = {}

    def policy(by: str, **more: float) -> object:
        split = balanced(2, by, **more)  # type: ignore[arg-type]

        def keep(module: fx.GraphModule) -> fx.GraphModule:
            done = split(module)
            seen[by] = done.meta["balance"]
            return done

        return pipeline(model, (x,), split_policy=keep)

    for by in ("time", "memory"):
        pipe = policy(by)
        first = dict(pipe.get_stage_module(0).named_parameters())  # type: ignore[attr-defined]
        # The one wide layer costs more than all others together.
        assert "2.0.weight" not in first
    assert max(seen["time"]) < 0.9 * sum(seen["time"])
    wide = 4 * 4 * (2 * 8 * 4096 + 4096 + 8) + 4 * 256 * 4096
    assert max(seen["memory"]) < 1.2 * wide
    assert sum(seen["memory"]) > wide
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    roomy = policy("time", memory_limit=1.2 * wide)
    assert roomy.num_stages == 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="into 2 stages of at most 1000 bytes each: use fewer"):
        policy("time", memory_limit=1000)
    with pytest.raises(ValueError, match="expected by to be one of"):
        balanced(2, "names")
    with pytest.raises(ValueError, match="cannot split 2 operators into 3 stages"):
        pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(1, 2),), split_policy=balanced(3)
        )


class Chosen(nn.Module):
    """A layer for the rows that a condition chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (rows,) = (x.sum(-1) > 0).nonzero(as_tuple=True)
        return x.index_add(0, rows, self.linear(x[rows]))


def test_sizes_may_depend_on_values() -> None:
    model, x = nn.Sequential(*(Chosen() for _ in range(4))), torch.randn(6, 4)
    pipe = pipeline(model, (x,), split_policy=balanced(2))
    torch.testing.assert_close(fx.Interpreter(pipe.split_gm).run(x), model(x))
