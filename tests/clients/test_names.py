"""Every name of the bridged modules that the source of released clients imports is ours."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.internals.integrations import BRIDGED, torch_names

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CLIENTS = (
    "accelerate",
    "lightning_fabric",
    "peft",
    "pytorch_lightning",
    "ray.train",
    "torchao",
    "torchtitan",
    "transformers",
)
# Of torchtitan: expert parallelism, and its trainer that makes graphs of whole steps.
REFUSED = {
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "FSDPMeshInfo"),
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "ShardPlacementResult"),
    ("torch.distributed.fsdp._fully_shard._fsdp_init", "_get_mesh_info"),
    ("torch.distributed.pipelining.microbatch", "_split_block_mask"),
    ("torch.distributed.pipelining.schedules", "_wait_batch_p2p"),
    ("torch.distributed.pipelining.stage", "_normalize_model_output_as_tuple"),
}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """Names that files below ``folder`` import from modules that something stands for."""
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in (
            ast.walk(ast.parse(text)) if any(f"from {name}" in text for name in BRIDGED) else ()
        ):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(tuple(BRIDGED)):
                yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_imports_is_ours(client: str) -> None:
    pytest.importorskip(client.partition(".")[0], reason=f"{client} is not installed")
    spec = importlib.util.find_spec(client)
    assert spec is not None and spec.origin is not None
    wanted = {*imported(Path(spec.origin).parent)}
    assert wanted
    with torch_names.installed():
        for module, name in sorted(wanted):
            found = getattr(importlib.import_module(module), name, None)
            home = getattr(found, "__module__", None) or type(found).__module__
            is_ours = found is not None and home.startswith("meshwright")
            assert is_ours == ((module, name) not in REFUSED), (module, name)
