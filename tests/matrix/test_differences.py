"""The table of planted differences: the last rank does something else than the others.

Every rank raises soon, names it, and no rank trains on. Where a strategy may train on, a replica's
gradient is the mean over the ranks of what each has run, with zeros where it has run nothing: those
cases are listed.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator, settle
from meshwright.composition import Trainable, parallelize
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.errors import CommunicationError, MeshwrightError
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.plan import Plan
from meshwright.testing import Ranks
from support.late import as_on_a_host

SOON = 30.0
STRATEGIES = ("replicate", "fully_shard", "facade")
REPLICAS = ("replicate", "ddp")


class Paths(nn.Module):
    """Units of equal size; ``path`` says which of them run."""

    def __init__(self, tower: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.tower = nn.Linear(6, tower)
        self.head = nn.Linear(6, 3)
        self.path = ["left", "right"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.path:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)


class Loop:
    """A user's loop around a model that is laid out by one strategy."""

    def __init__(
        self,
        strategy: str,
        model: Paths | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.plain = (model or Paths()).to(dtype)
        self.dtype = dtype
        parts = ("left", "right", "tower")
        self.model: Any = self.plain
        if strategy == "replicate":
            replicate(self.plain)
        elif strategy == "ddp":
            self.model = DistributedDataParallel(self.plain)
        elif strategy in ("fully_shard", "hybrid"):
            mesh = None
            if strategy == "hybrid":
                mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            for name in parts:
                fully_shard(getattr(self.plain, name), mesh=mesh)
            fully_shard(self.plain, mesh=mesh)
        else:
            options = {"use_orig_params": strategy == "facade", **options}
            for name in parts:
                part = FullyShardedDataParallel(getattr(self.plain, name), **options)
                setattr(self.plain, name, part)
            self.model = FullyShardedDataParallel(self.plain, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        inputs = torch.full((2, 6), 1.0 + communicator().rank)
        return self.model(inputs.to(self.dtype)).square().sum()

    def step(self, count: int = 1, *, passes: int = 1) -> None:
        for _ in range(count):
            for _ in range(passes):
                self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


Case = Callable[[str, bool], None]


def on_a_path(path: list[str]) -> Case:
    def case(strategy: str, is_odd: bool) -> None:
        loop = Loop(strategy)
        loop.step(4)
        if is_odd:
            loop.plain.path = path
        loop.step(3)

    return case


def frozen_from_the_start(strategy: str, is_odd: bool) -> None:
    model = Paths()
    model.left.requires_grad_(not is_odd)
    Loop(strategy, model).step(3)


def frozen_later(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        loop.plain.left.requires_grad_(False)
    loop.step(3)


def one_more_backward(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loss = loop.loss()
    if is_odd:
        loss.backward(retain_graph=True)
    loss.backward()
    loop.optimizer.step()
    loop.step(3)


def one_more_step(strategy: str, is_odd: bool) -> None:
    Loop(strategy).step(4 if is_odd else 3)


def without_a_reduction(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        with loop.model.no_sync():
            loop.step()
    else:
        loop.step()
    loop.step(3)


def evaluates(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loop.model.train(not is_odd)
    loop.step(3)


def without_gradients(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        with torch.no_grad():
            loop.loss()
    else:
        loop.step()
    loop.step(3)


def more_microbatches(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loop.step(3, passes=3 if is_odd else 2)


def keeps_whole_parameters(strategy: str, is_odd: bool) -> None:
    if strategy in ("facade", "flat"):
        keeps = ShardingStrategy.SHARD_GRAD_OP
        Loop(strategy, sharding_strategy=keeps if is_odd else None).step()
        return
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        loop.model.set_reshard_after_forward(False)
    loop.step(3)


def another_shape(strategy: str, is_odd: bool) -> None:
    Loop(strategy, Paths(tower=7 if is_odd else 6)).step()


def another_name(strategy: str, is_odd: bool) -> None:
    model = Paths()
    if is_odd:
        model.attic = model.head
        del model.head
        model.__dict__["head"] = model.attic
    Loop(strategy, model).step()


def another_dtype(strategy: str, is_odd: bool) -> None:
    Loop(strategy, dtype=torch.float32 if is_odd else torch.float64).step()


def another_rate(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        loop.optimizer.param_groups[0]["lr"] /= 2
    loop.step(7)  # replicas compare their weights in the eighth pass


def writes_its_weights(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(1.1)
    loop.step(7)


def another_strategy(strategy: str, is_odd: bool) -> None:
    other = "fully_shard" if strategy in ("flat", "facade") else "facade"
    Loop(other if is_odd else strategy).step()


CASES: dict[str, tuple[Case, str]] = {
    "skips a unit": (on_a_path(["left"]), "position 2: .*right"),
    "runs one more": (on_a_path(["left", "right", "tower"]), "position 3: .*tower"),
    "swaps two": (on_a_path(["right", "left"]), "position 1: .*left.*right|position 1: .*right"),
    "frozen from the start": (frozen_from_the_start, "left.*(true|True)"),
    "frozen later": (frozen_later, "left.weight"),
    "one more backward": (one_more_backward, "backward pass"),
    "one more step": (one_more_step, r"leaves the run .*\(batches\) on every rank.*join\(\)"),
    "without a reduction": (without_a_reduction, "synchronize=False|backward pass 1"),
    "evaluates": (evaluates, "a forward pass in evaluation"),
    "without gradients": (without_gradients, "a forward pass in evaluation|leaves the run"),
    "more microbatches": (more_microbatches, "passes"),
    "keeps whole parameters": (keeps_whole_parameters, "keep_full_after_forward"),
    "another shape": (another_shape, r"tower.*\[7, 6\]"),
    "another name": (another_name, "attic"),
    "another dtype": (another_dtype, "float32|float64"),
    "another rate": (another_rate, "lr=0.05|weight"),
    "another strategy": (another_strategy, "number 0|differ at step 1 "),
    "writes its weights": (writes_its_weights, "weight"),
}
COUNTS_AS_ZERO = ("skips a unit", "runs one more", "swaps two", "evaluates")
"""No collective comes with a forward pass of a replica: what a rank does not run counts as zero."""


def body(strategy: str, name: str) -> tuple[str, float]:
    """What this rank said, and after how many seconds."""
    case, _ = CASES[name]
    world = communicator()
    begun = time.monotonic()
    said = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            case(strategy, world.rank == world.size - 1)
            settle()
        except CommunicationError as error:
            said = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in told if "differ" in str(warning.message)]
    return "; ".join([*texts, said]), as_on_a_host(time.monotonic() - begun)


def check(strategy: str, name: str, said: list[tuple[str, float]]) -> None:
    pattern = CASES[name][1]
    for text, seconds in said:
        assert seconds < SOON
        if strategy in REPLICAS and name in COUNTS_AS_ZERO:
            assert text == ""
            continue
        # A rank that is done with its own part of the run has nothing to raise.
        if name == "one more step" or (strategy in REPLICAS and name == "without gradients"):
            continue
        assert re.search(pattern, text), text
        assert re.search(r"rank(s \[)? ?[01]", text), text
    trains = strategy in REPLICAS and name in COUNTS_AS_ZERO
    assert trains or any(re.search(pattern, text) for text, _ in said), said


@pytest.mark.few(16, slow=60)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (strategy, name)
        for strategy in (*STRATEGIES, "ddp", "flat")
        for name in CASES
        if name not in ("writes its weights", "one more step")
        if not (strategy in REPLICAS and name == "keeps whole parameters")
    ],
)
def test_ranks_that_differ_are_named(ranks: Ranks, strategy: str, name: str) -> None:
    check(strategy, name, ranks(2, body, strategy, name, timeout=SOON + 15))


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", reason="a device waits for its peer, where no host looks")
@pytest.mark.parametrize("strategy", [*STRATEGIES, "ddp", "flat"])
def test_a_rank_that_steps_once_more_is_told_who_left(ranks: Ranks, strategy: str) -> None:
    check(strategy, "one more step", ranks(2, body, strategy, "one more step", timeout=SOON + 15))


@pytest.mark.few(2)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize("strategy", ["replicate", "ddp", "hybrid"])
def test_weights_written_on_one_rank_are_named(ranks: Ranks, strategy: str) -> None:
    """Copies alone can be compared: each rank's shard is its own."""
    for text, seconds in ranks(2, body, strategy, "writes its weights", timeout=SOON + 15):
        assert seconds < SOON
        assert re.search("CollectiveMismatchError: .*weight", text), text


# ----------------------------------------------------------------- ranks that train one model

LAYOUTS = ("tensor", "pipeline")


class Training:
    """A user's loop around a `Trainable` whose two ranks train one model on one batch."""

    def __init__(
        self, axis: str, *, settings: str = "", dtype: torch.dtype = torch.float64
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)
        options = {
            "tensor": '[tensor.rules]\n"0" = "colwise"\n"2" = "rowwise"\n',
            "pipeline": "[pipeline]\nmicrobatches = 2\n",
        }
        plan = Plan.from_toml(f"[axes]\n{axis} = 2\n{options[axis]}[train]\n{settings}")
        self.dtype = dtype
        self.trainable: Trainable = parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=nn.functional.mse_loss,
            example=self.batch(0),
        )

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def step(self, count: int, *, seed: int = 0) -> None:
        for number in range(count):
            x = self.batch(seed + number)
            self.trainable.step(x, x)


def another_batch(axis: str, is_odd: bool) -> None:
    Training(axis).step(3, seed=7 if is_odd else 0)


def another_setting(axis: str, is_odd: bool) -> None:
    Training(axis, settings="clip_norm = 0.5\n" if is_odd else "").step(3)


def another_dtype_of_one_model(axis: str, is_odd: bool) -> None:
    Training(axis, dtype=torch.float32 if is_odd else torch.float64).step(3)


def one_step_less(axis: str, is_odd: bool) -> None:
    Training(axis).step(2 if is_odd else 3)


def an_evaluation_instead(axis: str, is_odd: bool) -> None:
    loop = Training(axis)
    loop.step(2)
    if is_odd:
        loop.trainable.eval(loop.batch(2), loop.batch(2))
    loop.step(2)


OF_ONE_MODEL: dict[str, tuple[Case, str]] = {
    "another batch": (another_batch, "batch 1"),
    "another setting": (another_setting, "clip_norm"),
    "another dtype": (another_dtype_of_one_model, "float32|float64"),
    "one step less": (one_step_less, "leaves the run|left the run"),
    "an evaluation instead": (an_evaluation_instead, "rank"),
}
ENDS_EARLY = ("one step less", "an evaluation instead")


def body_of_one_model(axis: str, name: str) -> tuple[str, float]:
    case, _ = OF_ONE_MODEL[name]
    world = communicator()
    begun = time.monotonic()
    said = ""
    try:
        case(axis, world.rank == world.size - 1)
        settle()
    except (MeshwrightError, ValueError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, as_on_a_host(time.monotonic() - begun)


def check_one_model(ranks: Ranks, axis: str, name: str) -> None:
    said = ranks(2, body_of_one_model, axis, name, timeout=SOON + 15)
    pattern = OF_ONE_MODEL[name][1]
    for rank, (text, seconds) in enumerate(said):
        assert seconds < SOON
        if name == "one step less" and rank == 1:
            continue  # it is done
        assert re.search(pattern, text), text
        assert re.search(r"rank(s \[)? ?[01]", text), text


@pytest.mark.few(4, slow=20)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize(
    ("axis", "name"),
    [
        *(("tensor", name) for name in OF_ONE_MODEL),
        *(("pipeline", name) for name in OF_ONE_MODEL if name not in ENDS_EARLY),
    ],
)
def test_ranks_of_one_model_that_differ_are_named(ranks: Ranks, axis: str, name: str) -> None:
    check_one_model(ranks, axis, name)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
@pytest.mark.parametrize("name", ENDS_EARLY)
def test_pipelines_of_which_a_rank_ends_early_are_named(ranks: Ranks, name: str) -> None:
    check_one_model(ranks, "pipeline", name)
