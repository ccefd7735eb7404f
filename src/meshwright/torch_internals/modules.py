"""Modules and optimizers as torch keeps them: hooks, buffers of no state dict, compiled calls."""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks_of_all

__all__ = [
    "HOOKS",
    "STATE_HOOKS",
    "AnyBatchNorm",
    "AnyInstanceNorm",
    "call_of",
    "check_input_dim",
    "compiled_call_of",
    "forget_step_hooks",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "is_forward_compiled",
    "non_persistent_buffers_of",
    "set_compiled_call",
    "step_hooks_of_all",
    "step_unless",
    "steps_by_flag",
]

forward_pre_hooks_of = attrgetter("_forward_pre_hooks")
forward_hooks_of = attrgetter("_forward_hooks")
non_persistent_buffers_of = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that state dicts leave out: a set, to be written to as well."""
compiled_call_of = attrgetter("_compiled_call_impl")
"""The call that ``module.compile`` has put in the place of a module's own; None without it."""
call_of = attrgetter("_call_impl")
"""The call of a module with its hooks and without what was compiled."""

HOOKS = MappingProxyType(
    {
        "_forward_pre_hooks": "forward pre-hook",
        "_forward_hooks": "forward hook",
        "_backward_pre_hooks": "backward pre-hook",
        "_backward_hooks": "backward hook",
    }
)
"""The hooks that run when a module is called, by the attribute that holds them."""
STATE_HOOKS = MappingProxyType(
    {
        "_state_dict_pre_hooks": "state_dict pre-hook",
        "_state_dict_hooks": "state_dict hook",
        "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
        "_load_state_dict_post_hooks": "load_state_dict post-hook",
    }
)
"""The hooks that run when a module's state is asked for or given."""


def set_compiled_call(module: nn.Module, call: Any) -> None:  # noqa: ANN401
    """Call ``call`` in place of ``module``'s own forward and hooks."""
    module._compiled_call_impl = call


def is_forward_compiled(module: nn.Module) -> bool:
    """Check that ``module.forward`` itself was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def check_input_dim(module: Any, x: torch.Tensor) -> None:  # noqa: ANN401
    """Raise as a batch norm does for an input of too many or few dims."""
    module._check_input_dim(x)


def steps_by_flag(optimizer: Any) -> bool:  # noqa: ANN401
    """Check that steps of ``optimizer`` write nothing where its ``found_inf``, a tensor, is one."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(is_bad: torch.Tensor, optimizer: Any) -> None:  # noqa: ANN401
    """Step, but write nothing where ``is_bad`` is one: with an optimizer that `steps_by_flag`."""
    optimizer.found_inf = is_bad
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def forget_step_hooks(optimizer: Any) -> None:  # noqa: ANN401
    """Take the hooks of steps off one optimizer."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
