"""Which collectives `fully_shard` issues, by mesh and by what is freed after the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

# G gathers over the shards, g over a block of two of them, R reduces over the shards, A over the
# replicas; the number is the unit's, the root's is 0. In training, then within `no_sync`, then
# after it, then in evaluation. Gathers of the next unit come ahead of the present one's end.
IN_ORDER: dict[tuple[str, bool | int | None], tuple[str, str, str, str]] = {
    ("1-D", None): (
        "G0 G1 G2 G2 G1 R2 R1 R0",
        "G0 G1 G2 G2 G1",
        "G0 G1 G2 G2 G1 R2 R1 R0",
        "G0 G1 G2",
    ),
    ("1-D", True): (
        "G0 G1 G2 G2 G1 G0 R2 R1 R0",
        "G0 G1 G2 G2 G1 G0",
        "G0 G1 G2 G2 G1 G0 R2 R1 R0",
        "G0 G1 G2",
    ),
    ("1-D", False): (
        "G0 G1 G2 R2 R1 R0",
        "G0 G1 G2",
        "G0 G1 G2 R2 R1 R0",
        "G0 G1 G2",
    ),
    ("1-D", 2): (
        "G0 G1 G2 g2 g1 g0 R2 R1 R0",
        "G0 G1 G2 g2 g1 g0",
        "G0 G1 G2 g2 g1 g0 R2 R1 R0",
        "G0 G1 G2",
    ),
    ("2-D", None): (
        "G0 G1 G2 G2 G1 R2 A2 R1 A1 R0 A0",
        "G0 G1 G2 G2 G1",
        "G0 G1 G2 G2 G1 R2 A2 R1 A1 R0 A0",
        "G0 G1 G2",
    ),
    ("2-D", False): (
        "G0 G1 G2 R2 A2 R1 A1 R0 A0",
        "G0 G1 G2",
        "G0 G1 G2 R2 A2 R1 A1 R0 A0",
        "G0 G1 G2",
    ),
}


def build(mesh: str, after: bool | int | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    shape = (4,) if mesh == "1-D" else (2, 2)
    names = ("shard",) if mesh == "1-D" else ("replicate", "shard")
    options = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "reshard_after_forward": after,
    }
    for layer in (model[1], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def issued(call: Callable[[], object]) -> str:
    recorder = Recorder()
    with observe(recorder):
        call()
    words: list[str] = []
    for c in recorder.collectives:
        kind, _, unit = c.label.partition(" ")
        if kind not in ("unshard", "reduce", "replicate"):
            continue
        letter = {"all_gather": "g" if "block" in c.axis else "G", "reduce_scatter": "R"}
        number = unit if unit in ("1", "2") else "0"
        words.append(letter.get(c.kind, "A") + number)
    return " ".join(words)


def body(mesh: str, after: bool | int | None) -> tuple[str, ...]:
    model = build(mesh, after)
    x = torch.ones(2, 8) * (1 + communicator().rank)

    def step() -> None:
        model(x).sum().backward()

    def quietly() -> None:
        with model.no_sync():
            step()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    step()  # the first one agrees on the order
    return tuple(issued(call) for call in (step, quietly, step, evaluate))


@pytest.mark.few(4)
@pytest.mark.parametrize(("mesh", "after"), IN_ORDER)
def test_collectives_one_by_one(ranks: Ranks, mesh: str, after: bool | int | None) -> None:
    for found in ranks(4, body, mesh, after):
        assert found == IN_ORDER[mesh, after]
