"""Ours under the names of torch's modules."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import meshwright.data_parallel
import meshwright.fsdp
import meshwright.pipelining
import meshwright.tensor_parallel
from support.internals.integrations import BRIDGED, torch_names

NAME = "torch_names"


def run(code: str, name: str = "client") -> dict[str, Any]:
    """What a module called ``name`` has after ``code``."""
    found: dict[str, Any] = {"__name__": name}
    exec(textwrap.dedent(code), found)
    return found


def modules() -> dict[str, ModuleType]:
    """Every module of torch, by name, and where the one around it shows it."""
    found = {name: module for name, module in sys.modules.items() if name.startswith("torch")}
    shown = {
        f"{name} in {name.rpartition('.')[0]}": vars(around).get(name.rpartition(".")[2])
        for name in found
        if isinstance(around := sys.modules.get(name.rpartition(".")[0]), ModuleType)
    }
    return found | shown


@pytest.mark.parametrize("name", BRIDGED)
def test_all_names_that_torch_shows_are_ours(name: str) -> None:
    real, bridge = importlib.import_module(name), BRIDGED[name]
    ours = importlib.import_module(bridge.ours)
    shown = getattr(real, "__all__", ()) if bridge.names is None else bridge.names
    with torch_names.installed():
        module = importlib.import_module(name)
        assert module is not real
        for each in shown:
            value = getattr(module, each)
            assert value is getattr(ours, each)
            assert value is not getattr(real, each)
        assert run(f"from {name} import *").keys() >= {*shown}


CLIENT = """
    import torch
    import torch.nn.parallel
    import torch.distributed.fsdp as whole
    import torch.distributed.fsdp.wrap
    from torch.distributed._composable.fsdp import FSDPModule
    from torch.distributed._composable.fsdp.fully_shard import fully_shard as composable
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action, _add_unshard_reshard
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
    from torch.distributed.pipelining.stage import _PipelineStageBase
    from torch.distributed.tensor.parallel import ColwiseParallel
    from torch.nn.parallel import DistributedDataParallel, DataParallel
    from torch.nn.parallel.distributed import DistributedDataParallel as same

    ddp, wrap = torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp.wrap
"""


def test_a_client_that_is_loaded_then_gets_ours() -> None:
    with torch_names.installed():
        found = run(CLIENT)
    ours = meshwright.fsdp
    assert found["fully_shard"] is found["composable"] is ours.fully_shard
    assert found["whole"].fully_shard is ours.fully_shard
    assert found["FSDPModule"] is ours.FSDPModule
    assert found["FullyShardedDataParallel"] is ours.FullyShardedDataParallel
    assert found["StateDictType"] is ours.StateDictType
    assert found["_get_fsdp_handles"] is ours.fsdp_units
    assert found["ModuleWrapPolicy"] is found["wrap"].ModuleWrapPolicy is ours.ModuleWrapPolicy
    assert found["replicate"] is meshwright.data_parallel.replicate
    of_ddp = meshwright.data_parallel.DistributedDataParallel
    assert found["ddp"] is found["same"] is found["DistributedDataParallel"] is of_ddp
    assert found["DataParallel"] is nn.DataParallel
    assert found["PipelineStage"] is found["_PipelineStageBase"]
    assert found["ScheduleZBVZeroBubble"] is meshwright.pipelining.ScheduleZBVZeroBubble
    assert found["ColwiseParallel"] is meshwright.tensor_parallel.ColwiseParallel
    first = found["_add_unshard_reshard"]([None, found["_Action"].parse("0F0")])
    assert list(map(str, first)) == ["0UNSHARD", "0F0", "0RESHARD"]


def test_everything_is_put_back() -> None:
    for name in BRIDGED:
        importlib.import_module(name)
    before = modules()
    with torch_names.installed():
        inside = modules()
        torch_names.install()
        assert modules() == inside
    assert inside != before
    assert modules() == before
    torch_names.uninstall()
    assert modules() == before
    assert run("from torch.distributed.fsdp import fully_shard")["fully_shard"] is not (
        meshwright.fsdp.fully_shard
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.fsdp", "_fsdp_anything"),
        ("torch.distributed.fsdp._common_utils", "TrainingState"),
        ("torch.distributed.fsdp._fully_shard._fsdp_common", "FSDPMeshInfo"),
        ("torch.distributed.pipelining.schedules", "_merge_bw"),
        ("torch.distributed._composable.replicate_with_fsdp", "replicate"),
        ("torch.nn.parallel.distributed", "_MixedPrecision"),
    ],
)
def test_what_torch_alone_has_is_refused_by_name(module: str, name: str) -> None:
    with torch_names.installed():
        with pytest.raises(ImportError, match=rf"'{name}' from '{module}' \(.*torch_names.py\)"):
            run(f"from {module} import {name}")
        text = rf"^{module} has no '{name}' while the names of torch are meshwright's: .*BRIDGED"
        with pytest.raises(AttributeError, match=text):
            getattr(sys.modules[module], name)
        assert not hasattr(sys.modules[module], name)


def test_modules_that_were_not_loaded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.tensor.parallel.input_reshard"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with torch_names.installed(), pytest.raises(ModuleNotFoundError, match="input_reshard"):
        run(f"import {name}")


def test_torchs_own_code_goes_on_with_torchs() -> None:
    with torch_names.installed():
        found = run(CLIENT.partition("from torch.distributed.pipelining")[0], "torch.of_its_own")
    for name in ("fully_shard", "FSDPModule", "FullyShardedDataParallel", "replicate"):
        assert not found[name].__module__.startswith("meshwright")


FRESH = """
    from meshwright.integrations import torch_names

    torch_names.install()
    import torch
    import torch.distributed.checkpoint.optimizer
    import torch.distributed.checkpoint.state_dict as functions
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert functions.FSDP.__module__.startswith("torch."), functions.FSDP
    assert functions.DDP.__module__.startswith("torch."), functions.DDP
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    apply_activation_checkpointing(model, check_fn=lambda part: part is model[0])
    assert "Checkpoint" in type(model[0]).__name__
    assert torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2)).shape == (1, 2)
    assert FSDPModule.__module__.startswith("meshwright.")
    functions.get_model_state_dict(model)
    torch_names.uninstall()
    from torch.distributed.fsdp import FSDPModule
    assert FSDPModule.__module__ == "torch.distributed.fsdp"
"""


@pytest.mark.slow
def test_it_may_come_before_all_else() -> None:
    code = textwrap.dedent(FRESH)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_instances_are_known_by_the_clients_names() -> None:
    code = """
        import torch
        from torch.distributed.fsdp import FSDPModule

        def kinds(module):
            return isinstance(module, torch.nn.parallel.DistributedDataParallel), isinstance(
                module, FSDPModule
            )
    """
    with torch_names.installed():
        kinds = run(code)["kinds"]
        assert kinds(nn.Linear(1, 1)) == (False, False)
        ddp = meshwright.data_parallel.DistributedDataParallel
        assert kinds(object.__new__(ddp)) == (True, False)
        sharded = type("Sharded", (meshwright.fsdp.FSDPModule, nn.Linear), {})
        assert kinds(object.__new__(sharded)) == (False, True)
    assert kinds(object.__new__(ddp)) == (False, False)


def test_the_page_for_users_of_others() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if NAME in each)
    assert run(code)["fully_shard"] is meshwright.fsdp.fully_shard
    assert not any(type(module) is torch_names.StandIn for module in sys.modules.values())
    table = page.partition("`torch_names.BRIDGED`")[2].partition("\n\n")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        first, *more = re.findall(r"`([\w.]+)`", line.split("|")[1])
        for name in (first, *(f"{first}{each}" for each in more if each.startswith("."))):
            assert name in BRIDGED or name.rpartition(".")[0] in BRIDGED, name
