"""The parts of the compiler that reductions in graphs need. Loading this loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._dynamo.config as dynamo_settings
import torch._functorch.config as functorch_settings
import torch._inductor.config as inductor_settings
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile as compile_graph
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = [
    "CustomGraphPass",
    "aot_autograd",
    "backward_compiler",
    "compile_graph",
    "counters",
    "ddp_fusion_passes",
    "detect_fake_mode",
    "dynamo_settings",
    "functorch_settings",
    "inductor_settings",
    "make_boxed_func",
]


def backward_compiler() -> Callable[..., Any] | None:
    """Find the context manager under which backward passes are compiled; None without one."""
    old = getattr(compiled_autograd, "enable", None)
    return getattr(compiled_autograd, "_enable", None) or old


def ddp_fusion_passes() -> list[Any]:
    """Read which passes inductor's settings name to fuse the gradients of torch's DDP."""
    return inductor_settings._fuse_ddp_communication_passes
