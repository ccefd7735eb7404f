"""Where compiled graphs end: the user's line, the reason, and what runs uncompiled for it."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook

import meshwright
from meshwright.comm import communicator
from meshwright.compiler import GraphBreak, GraphBreaks
from meshwright.data_parallel import DistributedDataParallel, replicate
from meshwright.testing import Ranks
from support.recipes.runs import run_tiny


@torch.compiler.disable
def outside(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return outside(x.sin()).cos()  # the line of the break


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(module: nn.Module) -> nn.Module:
    torch.compiler.reset()
    module.compile(backend="eager")
    return module


def line_of(words: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def body_breaks() -> None:
    shown: list[str] = []
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # pyrefly: ignore
    logging.getLogger("torch").addHandler(handler)
    before = (logger.level, list(logger.filters))
    with GraphBreaks() as breaks:
        compiled(Net())(torch.ones(2))
    looped, alone = breaks.found
    assert alone == GraphBreak(looped.line, looped.reason)
    assert alone.line == f"{__file__}:{line_of('# the line of the break')} in forward"
    assert "torch.compiler.disable" in alone.reason
    assert "0x" not in str(alone)
    # The loop over blocks cannot go on in the middle, so the whole model's function is left out.
    assert looped.uncompiled == f"forward at {__file__}:{line_of('for block in') - 1}"
    assert str(looped).endswith(f"; {looped.uncompiled} runs uncompiled")
    with contextlib.suppress(ZeroDivisionError), GraphBreaks() as breaks:
        compiled(nn.Linear(2, 2))(torch.ones(2))
        raise ZeroDivisionError
    assert breaks.found == []
    assert (logger.level, logger.filters) == before
    assert shown == []
    # Hooks that communicate are told with the line of who calls the module.
    model = replicate(nn.Linear(2, 2), static_graph=True)
    with GraphBreaks() as breaks:
        compiled(model)(torch.ones(2))  # the line of the call
    assert f"{__file__}:{line_of('# the line of the call')} in body_breaks" in {
        each.line for each in breaks.found
    }


@pytest.mark.slow
def test_breaks_are_named(ranks: Ranks) -> None:
    ranks(1, body_breaks)


def body_run(folder: Path, *overrides: str) -> tuple[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # pyrefly: ignore
    logger = logging.getLogger("meshwright")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    outcome = run_tiny(folder, "train.compile=true", "run.check_parity=true", *overrides)
    return outcome.parity, [line for line in told if "a graph ends at" in line]


@pytest.mark.few(0, slow=1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("axis", ["replicate", "shard", "pipeline"])
def test_a_compiled_run_equals_one_process_and_names_its_breaks(
    ranks: Ranks, tmp_path: Path, axis: str
) -> None:
    options = ["run.steps=3", "run.parity_steps=2", "run.trace_tensors=true", f"axes.{axis}=2"]
    if axis == "pipeline":
        options.append("pipeline.microbatches=2")
    for parity, breaks in ranks(2, body_run, tmp_path, *options, timeout=240.0):
        assert f"{axis}=2 equals one process over 2 steps" in parity
        assert breaks
        assert len(set(breaks)) == len(breaks)
        assert all(line.startswith("step 1: ") for line in breaks)


def body_step(wrap: Callable[[nn.Module], nn.Module], backend: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    plain, everyone = copy.deepcopy(model), torch.randn(8, 2, dtype=torch.float64)
    replica, world = wrap(model), communicator()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = outside(model(x)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    found: list[CodeType] = []
    by_graphs = torch.compile(step, backend=backend)
    handle = register_bytecode_hook(lambda code, _: found.append(code))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (replica, plain)]
    for _ in range(3):
        by_graphs(replica, optimizers[0], everyone.chunk(world.size)[world.rank])
        step(plain, optimizers[1], everyone)
    handle.remove()
    for own, expected in zip(replica.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)
    assert __file__ in {code.co_filename for code in found}
    ours = Path(meshwright.__file__).parent
    # `replicate` has its hooks traced, which decide where gradients are reduced.
    own = {code.co_name for code in found if Path(code.co_filename).is_relative_to(ours)}
    assert own <= {"before_forward", "traceable", "after_forward"}


@pytest.mark.few(1)
@pytest.mark.parametrize("wrap", [replicate, DistributedDataParallel])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hooks_of_replicas_are_no_frames_of_a_compiled_step(
    ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], backend: str
) -> None:
    ranks(2, body_step, wrap, backend)
