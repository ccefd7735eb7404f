"""Under the styles of torch no more is sent than torch sends, from the first forward on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as of_torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import meshwright.tensor_parallel as ours
from meshwright import comm
from meshwright.comm import Recorder
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter")


class Model(nn.Module):
    """A table, a norm, an MLP with biases and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        return self.head(self.down(self.up(x).relu()))


def plans(of: Any) -> dict[str, dict[str, Any]]:
    cols, rows, rest = of.ColwiseParallel, of.RowwiseParallel, Replicate()
    return {
        "mlp": {"up": cols(), "down": rows()},
        "whole": {
            "table": rows(input_layouts=rest),
            "up": cols(),
            "down": rows(),
            "head": cols(output_layouts=rest),
        },
        "sequence": {
            "table": rows(input_layouts=rest, output_layouts=Shard(1)),
            "norm": of.SequenceParallel(),
            "up": cols(input_layouts=Shard(1)),
            "down": rows(output_layouts=Shard(1)),
            "head": cols(input_layouts=Shard(1), output_layouts=rest),
        },
        "rows of what is whole": {"down": rows(input_layouts=rest)},
        "rows and their bias, left in parts": {
            "down": rows(input_layouts=rest, output_layouts=Shard(1)),
            "head": cols(input_layouts=Shard(1), output_layouts=rest),
        },
    }


def kinds_of(counts: dict[Any, int]) -> list[str]:
    """The kinds of what CommDebugMode has counted, as often as each, sorted."""
    named = {str(op): str(op).replace("allreduce", "all_reduce") for op in counts}
    kind = {op: next(k for k in KINDS if k in name) for op, name in named.items()}
    return sorted(k for op, count in counts.items() for k in [kind[str(op)]] * count)


def sent(of: Any, name: str) -> list[list[str]]:
    """By step, what forward, backward and step send on this rank."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (comm.communicator().size,))
    of.parallelize_module(model, mesh, plans(of)[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[str]] = []
    for _ in range(3):
        tokens = torch.arange(8).view(2, 4)
        if of is ours:
            recorder = Recorder()
            with comm.observe(recorder):
                model(tokens).sum().backward()
                optimizer.step()
            found.append(sorted(each.kind for each in recorder.collectives))
        else:
            with warnings.catch_warnings(), CommDebugMode() as mode:
                warnings.simplefilter("ignore")  # of its hooks, on tokens
                model(tokens).sum().backward()
                optimizer.step()
            found.append(kinds_of(mode.get_comm_counts()))
    return found


def body() -> dict[str, tuple[list[list[str]], list[list[str]]]]:
    return {name: (sent(ours, name), sent(of_torch, name)) for name in plans(ours)}


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_no_more_is_sent_than_torch_sends(ranks: Ranks) -> None:
    for found in ranks(2, body):
        for name, (mine, theirs) in found.items():
            for now, there in zip(mine, theirs, strict=True):
                assert all(now.count(kind) <= there.count(kind) for kind in KINDS), (name, mine)
            assert mine[0] == mine[1] == mine[2], name
        lists = {name: mine[0] for name, (mine, _) in found.items()}
        assert lists == {
            "mlp": ["all_reduce"] * 2,
            "whole": ["all_gather", *["all_reduce"] * 4],
            "sequence": [*["all_gather"] * 5, "all_reduce", *["reduce_scatter"] * 4],
            "rows of what is whole": ["all_gather", "all_reduce"],
            "rows and their bias, left in parts": [*["all_gather"] * 4, *["reduce_scatter"] * 2],
        }


class Mlp(nn.Module):
    """The model of torch's own test of these counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def seen(of: Any, is_sequence: bool) -> list[tuple[list[str], list[str]]]:
    """By step, what torch's mode counts in forward and backward."""
    torch.manual_seed(0)
    model = Mlp()
    mesh = init_device_mesh("cpu", (comm.communicator().size,))
    before, after = ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)})
    plan = {
        "up": of.ColwiseParallel(**(before if is_sequence else {})),
        "down": of.RowwiseParallel(**(after if is_sequence else {})),
    }
    of.parallelize_module(model, mesh, plan)
    found: list[tuple[list[str], list[str]]] = []
    for _ in range(2):
        with CommDebugMode() as forward:
            output = model(torch.ones(8, 10))
        with CommDebugMode() as backward:
            output.sum().backward()
        found.append((kinds_of(forward.get_comm_counts()), kinds_of(backward.get_comm_counts())))
    return found


def body_seen() -> None:
    warnings.simplefilter("ignore")  # of the hooks of torch's mode
    for is_sequence, expected in (
        (False, (["all_reduce"], [])),
        (True, (["all_gather", "reduce_scatter"], ["all_gather"])),
    ):
        assert seen(of_torch, is_sequence) == [expected] * 2
        assert seen(ours, is_sequence) == [expected] * 2


@pytest.mark.backends("shm", "gloo")
def test_torchs_mode_counts_what_it_counts_for_torch(ranks: Ranks) -> None:
    ranks(2, body_seen)
