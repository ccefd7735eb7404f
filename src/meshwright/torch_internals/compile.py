"""The parts of the compiler that reductions in graphs need. Importing this imports the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch._dynamo.config as dynamo_settings
import torch._functorch.config as functorch_settings
import torch._inductor.config as inductor_settings
from torch import fx
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile as compile_graph
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.utils import stateless
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CustomGraphPass",
    "aot_autograd",
    "compile_graph",
    "counters",
    "default_partition",
    "detect_fake_mode",
    "dynamo_settings",
    "functorch_settings",
    "inductor_settings",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
]


def backward_compiler() -> Callable[..., Any] | None:
    """Return the context manager that compiles backward passes; None if there is none."""
    old = getattr(compiled_autograd, "enable", None)
    return getattr(compiled_autograd, "_enable", None) or old


def ddp_fusion_passes() -> list[Any]:
    """Read which passes inductor's settings use to fuse the gradients of torch's DDP."""
    return inductor_settings._fuse_ddp_communication_passes


def backend_of_trace() -> object:
    """Return the backend of the graph being traced, as it was passed to `torch.compile`."""
    found: Any = InstructionTranslator.current_tx().output.compiler_fn
    while (inner := getattr(found, "_torchdynamo_orig_backend", None)) is not None:
        found = inner
    if getattr(found, "compiler_name", None) == "inductor":
        return "inductor"
    return getattr(found, "compiler_fn", found)


def first_frame_locals() -> Mapping[str, Any]:
    """Return the locals, by name, of the frame in which the graph being traced begins."""
    return InstructionTranslator.current_tx().output.root_tx.f_locals


def is_functional_call_traced() -> bool:
    """Whether the code being traced runs inside `torch.func.functional_call`."""
    frame: Any = InstructionTranslator.current_tx()
    while frame is not None:
        if frame.f_code.co_filename == stateless.__file__:
            return True
        frame = getattr(frame, "parent", None)
    return False


def values_in_trace(operator: Callable[..., Any]) -> list[Any]:
    """List the tensors in all lists that ``operator`` returns in the graph being traced."""
    graph = InstructionTranslator.current_tx().output.graph
    nodes = graph.find_nodes(op="call_function", target=operator)
    return [each for node in nodes for each in node.meta["example_value"]]


def recompute_always(node: fx.Node) -> None:
    """Have the partitioner recompute ``node`` in the backward, wherever its users are."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _LAST_REGION


def recompute_never(node: fx.Node) -> None:
    """Have the partitioner keep ``node``, if the backward needs it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


_LAST_REGION = 1 << 31
"""Above the numbers of all regions that are checkpointed: what they use is not kept for them."""
