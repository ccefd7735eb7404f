"""Traces of tensors on several layouts, and what `meshwright compare` finds in them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint import ShardedPiece
from meshwright.cli import main
from meshwright.comm import Communicator, connect
from meshwright.composition import Trainable
from meshwright.testing import Ranks
from support.internals.comm import ShardView, held
from support.internals.layout import Box
from support.internals.recipes import Sums, compare_runs, digest, loop, trace_file
from support.recipes.runs import run_tiny, write_text

TRACED = ("run.trace_tensors=true", "run.steps=3", "model.tied=true")
REPLICATE = ("axes.replicate=2", "train.accumulate=2")
SHARD = ("axes.shard=2", 'train.recompute=["layers.*"]')
TENSOR = ("axes.tensor=2", "tensor.rules=language-model", "train.accumulate=2")
PIPELINE = ("axes.pipeline=2", "pipeline.schedule=zbv", "pipeline.microbatches=4")

Fault = Callable[[Trainable], None]


def nothing(trainable: Trainable) -> None:
    """A run without a fault."""


def in_one_call(trainable: Trainable) -> None:
    """Rank 1 computes too much of one output, in the second microbatch of step 2."""
    passed = iter(range(100))

    def spoil(module: object, args: object, output: Tensor) -> Tensor:
        is_struck = next(passed) == 3 and trainable.data_rank == 1
        return output * 1.1 if is_struck else output

    trainable.module.get_submodule("layers.0.feed_forward.w1").register_forward_hook(spoil)


def in_one_reduction(trainable: Trainable) -> None:
    """In step 2 the reduction of one layer's gradients leaves out rank 1."""
    reduce_scatter = Communicator.reduce_scatter

    def reduce(
        self: Communicator, output: Tensor, tensor: Tensor, *, label: str = "", **more: object
    ) -> object:
        if trainable.steps == 1 and self.rank == 1 and label.endswith("layers.1"):
            tensor = torch.zeros_like(tensor)
        return reduce_scatter(self, output, tensor, label=label, **more)

    Communicator.reduce_scatter = reduce


def after_one_reduction(trainable: Trainable) -> None:
    """In step 3 rank 1 keeps another sum of one gradient than rank 0."""
    forward_backward = trainable.forward_backward

    def train(batch: object, target: object = None) -> None:
        forward_backward(batch, target)
        if trainable.steps == 2 and trainable.data_rank == 1:
            gradient = trainable.named_parameters()["layers.1.attention.wo.weight"].grad
            assert gradient is not None
            gradient.mul_(0.5)

    trainable.forward_backward = train


RUNS: dict[str, tuple[Any, ...]] = {
    "replicate": (nothing, *REPLICATE),
    "shard": (nothing, *SHARD),
    "pipeline": (nothing, *PIPELINE),
    "one call": (in_one_call, *REPLICATE),
    "one reduction": (in_one_reduction, *SHARD),
    "one copy": (after_one_reduction, *REPLICATE),
}


def run_all(folder: Path) -> None:
    """Every run on two ranks, one after the other."""
    rank = connect().rank
    parallelize, reduce_scatter = loop.parallelize, Communicator.reduce_scatter

    def planted(fault: Fault, *args: Any, **more: Any) -> Trainable:
        trainable = parallelize(*args, **more)
        fault(trainable)
        return trainable

    for name, (fault, *options) in RUNS.items():
        if rank == 0:
            (folder / name).mkdir()
            shutil.copy(folder / "one" / "text.txt", folder / name)
        connect().barrier(label=name).wait()
        loop.parallelize = partial(planted, fault)
        try:
            run_tiny(folder / name, *TRACED, *options)
        finally:
            loop.parallelize, Communicator.reduce_scatter = parallelize, reduce_scatter


@pytest.mark.slow
def test_runs_on_any_layout_compare_and_faults_are_found_by_name(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    ranks(1, run_tiny, tmp_path / "one", *TRACED, "train.accumulate=4")
    ranks(2, run_all, tmp_path, timeout=120)
    one = tmp_path / "one" / "run"
    for name in ("replicate", "shard", "pipeline"):
        found = compare_runs(one, tmp_path / name / "run")
        assert found.divergence is None, found.lines()
        assert len(found.notes) == 2, found.notes
        assert found.steps == [1, 2, 3]
        # Two layers of 9 modules, 8 with parameters; 4 more with 3 parameters, one of them tied.
        each = {"input": 1, "activation": 24, "loss": 1, "gradient": 23, "parameter": 23}
        assert found.counts == {kind: 3 * count for kind, count in each.items()}
        assert found.largest is not None
        assert 0 < found.largest.error < 1e-5
    same = compare_runs(one, one)
    assert same.first_bits is None
    assert "equal, bit for bit" in same.lines()[-1]

    call = compare_runs(one, tmp_path / "one call" / "run").divergence
    assert call is not None
    assert (call.step, call.kind, call.name) == (2, "activation", "layers.0.feed_forward.w1")
    assert call.samples == (6, 8)
    assert call.error == pytest.approx(0.1 / 1.1, rel=0.5)
    assert "microbatch 3 of rank 0 in A, microbatch 1 of rank 1 in B" in call.detail

    reduction = compare_runs(one, tmp_path / "one reduction" / "run")
    first = reduction.divergence
    assert first is not None
    # The last of the layer's parameters is the first whose gradient the backward pass makes.
    assert (first.step, first.kind, first.name) == (
        2,
        "gradient",
        "layers.1.feed_forward.w2.weight",
    )
    assert reduction.others > 6
    assert reduction.steps == [1, 2]

    copy = compare_runs(tmp_path / "replicate" / "run", tmp_path / "one copy" / "run").divergence
    assert copy is not None
    assert (copy.step, copy.kind, copy.name) == (3, "gradient", "layers.1.attention.wo.weight")
    assert "between ranks 0 and 1 of B" in copy.detail

    assert main(["compare", str(one), str(tmp_path / "shard" / "run")]) == 0
    assert "the runs agree" in capsys.readouterr().out
    assert main(["compare", str(one), str(tmp_path / "one copy" / "run")]) == 1
    assert "DIVERGED: step 3: the gradient of 'layers.1.attention.wo" in capsys.readouterr().out
    _check_refusals(one, tmp_path / "shard" / "run", capsys)


def run_over_tensor_ranks(folder: Path) -> None:
    """Two runs over two tensor ranks; in the second, rank 1 adds too much to the sum of a layer."""
    world, all_reduce = connect(), Communicator.all_reduce

    def add(axis: Communicator, tensor: Tensor, *, label: str = "", **more: Any) -> object:
        if label == "layers.1.attention.wo forward" and axis.rank == 1:
            tensor.mul_(1.01)  # less than what `parallelize` finds
        return all_reduce(axis, tensor, label=label, **more)

    for name in ("right", "wrong"):
        Communicator.all_reduce = add if name == "wrong" else all_reduce
        try:
            run_tiny(folder / name, *TRACED[:1], "run.steps=2", *TENSOR)
        finally:
            Communicator.all_reduce = all_reduce
        world.barrier(label=name).wait()


def test_outputs_that_are_cut_are_compared_rank_by_rank(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        write_text(tmp_path / name)
    ranks(2, run_over_tensor_ranks, tmp_path, timeout=60)
    right = tmp_path / "right" / "run"
    same = compare_runs(right, right)
    assert same.first_bits is None
    assert same.counts["activation"] == 2 * 24
    # What comes out of queries, keys and values is cut, and equal; the sum is not.
    found = compare_runs(right, tmp_path / "wrong" / "run").first_bits
    assert found is not None
    assert (found.step, found.kind, found.name) == (1, "activation", "layers.1.attention.wo")


def _check_refusals(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of bad input is one line; a file that ends early is none."""
    first, second = (trace_file(other, rank) for rank in (0, 1))
    lines, kept = first.read_text().splitlines(keepends=True), second.read_text()
    header = json.loads(lines[0])

    def refusal(*words: str) -> str:
        assert main(["compare", str(one), str(other), *words]) == 2
        told = capsys.readouterr().err
        assert told.startswith("meshwright compare: ")
        assert told.count("\n") == 1
        return told

    assert main(["compare", str(one), str(one / "none")]) == 2
    assert "none: expected the folder of a run, found no such" in capsys.readouterr().err
    assert main(["compare", str(one), str(one / "checkpoints")]) == 2
    assert "start the run with --trace-tensors" in capsys.readouterr().err
    for number in ("-1", "nan", "few"):
        told = refusal("--tolerance", number)
        assert f"--tolerance: expected a number from 0 to 1e100, found {number}" in told
    header["run"]["config"]["model"]["dim"] = 32
    first.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    assert "runs of one model, found model.dim = 16 in A, 32 in B" in refusal()
    moved = [line.replace('"step": ', '"step": 1') for line in lines[1:]]
    first.write_text("".join([lines[0], *moved]))
    second.write_text("".join([lines[0], *moved]))
    assert "no step in common: the first begins with step 1, the second with step 11" in refusal()
    second.write_text(kept)
    for bad in ("{}\n", "[1]\n", "\x00\n", lines[-1].replace('"loss"', '"lose"')):
        first.write_text("".join([*lines[:4], bad, *lines[4:]]))
        assert f"{first}, line 5, is damaged" in refusal()
    first.write_text("".join([*lines, lines[1]]))
    assert "is damaged: step 1 comes after 3" in refusal()
    first.write_text("".join([lines[0], *(line for line in lines if '"gradient"' not in line)]))
    assert "hold 8 of 16 elements of the gradient 'norm.bias'" in refusal()
    second.unlink()
    assert "expected the traces of 2 ranks" in refusal()

    # A run that was killed in the middle of a line, in step 3.
    second.write_text(lines[0])
    first.write_text(lines[0])
    alone = trace_file(one, 0)
    text = alone.read_text()
    alone.write_text(text[: int(len(text) * 0.8)])
    cut = compare_runs(one, one)
    assert cut.steps == [1, 2, 3]
    assert "the trace of B ends in step 3, which not all ranks finished" in cut.notes
    assert "no step in common" in refusal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_sums_do_not_depend_on_how_a_tensor_lies(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5, 3, dtype=torch.float64).mul(100).to(dtype)
    whole = digest(held(tensor, "whole"))
    flat = tensor.reshape(-1)
    views = [ShardView(flat[a:b], a, (7, 5, 3)) for a, b in ((0, 11), (11, 64), (64, 105))]
    columns = [
        ShardedPiece(
            tensor=tensor[:, a:b].contiguous(),
            global_shape=(7, 5, 3),
            boxes=(Box((0, a, 0), (7, b - a, 3)),),
        )
        for a, b in ((0, 2), (2, 5))
    ]
    for parts in ([held(view, "view") for view in views], columns):
        found = Sums.of([digest(part) for part in parts])
        assert found.hash == whole.hash
        assert found.numel == whole.numel == 105
        assert found.norm == pytest.approx(whole.norm, rel=1e-12)
        assert found.sketch == pytest.approx(whole.sketch, rel=1e-9, abs=1e-9 * whole.norm)
    assert whole.norm == pytest.approx(tensor.abs().double().norm().item())
    swapped = tensor.flip(0)
    assert digest(held(swapped, "swapped")).hash != whole.hash


def test_the_distance_is_that_of_the_elements_and_not_of_the_norms() -> None:
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randn(200, 700, dtype=torch.float64, generator=draw)
    whole, turned = digest(held(tensor, "t")), digest(held(tensor.flip(1), "t"))
    assert whole.norm == pytest.approx(turned.norm)
    distance = math.dist(whole.sketch, turned.sketch) / math.sqrt(len(whole.sketch))
    assert distance / whole.norm == pytest.approx(math.sqrt(2), rel=0.5)
    tensor[3, 4], tensor[5, 6] = math.nan, -math.inf
    spoilt = digest(held(tensor, "t"))
    assert spoilt.nonfinite == 2
    assert math.isfinite(spoilt.norm)
