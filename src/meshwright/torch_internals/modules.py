"""Private parts of modules and optimizers: hooks, non-persistent buffers, compiled calls."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks_of_all
from torch.utils.hooks import RemovableHandle

from meshwright.torch_internals.required import lacking, required, variable_of

__all__ = ["AnyBatchNorm", "AnyInstanceNorm", "step_hooks_of_all"]

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
HOOKS_OF_ALL: Mapping[str, Mapping[int, object]] = MappingProxyType(
    {
        name: required(f"torch.nn.modules.module._global{name}", "refuses what would not run")
        for name in HOOKS
    }
)
"""Hooks of all modules of the process, by the attribute that holds those of one."""
STATE_HOOKS = MappingProxyType(
    {
        "_state_dict_pre_hooks": "state_dict pre-hook",
        "_state_dict_hooks": "state_dict hook",
        "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
        "_load_state_dict_post_hooks": "load_state_dict post-hook",
    }
)
"""The hooks that run when a module's state is asked for or given."""
ASKING = "torch.distributed.checkpoint.state_dict"
"""The module of torch's whose functions ask."""
_STATE = "knows what torch's checkpoint functions want"
QUESTIONS = MappingProxyType(
    {
        "anything": ((), ()),
        "tensors": (("_iterate_valid_model_state",), ()),
        "model state": (("_get_model_state_dict",), ("info",)),
        "optimizers": (("_verify_options",), ("optims",)),
        "optimizer state": (("_get_optim_state_dict",), ("model", "info")),
        "optimizer state to load": (("_load_optim_state_dict",), ("model",)),
        "to load optimizers": (("set_state_dict", "set_optimizer_state_dict"), ()),
    }
)
"""By question: torch's functions that ask it, and their variables that say more of it."""
COMPILED = "_orig_mod"
"""The attribute of what `torch.compile` returns that holds the module itself."""
WRAPPED = "_fsdp_wrapped_module"
"""The attribute of a `FullyShardedDataParallel` that holds the module it wraps."""
FLAT = "_flat_param"
"""The attribute of a `FullyShardedDataParallel` that holds its flat parameter."""
CHECKPOINTED = "_checkpoint_wrapped_module"
"""The attribute of torch's wrappers for activation checkpointing that holds the module."""
IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names of tensors that replicas leave alone."""
STEPPERS = "_in_backward_optimizers"
"""The attribute of a parameter with the optimizers that step it in the backward."""
_HOME = "torch.distributed.optim.apply_optimizer_in_backward"
_OWN = required("torch.nn.MultiheadAttention._reset_parameters", "initializes attention")
RESET_ATTENTION: str = _OWN.__name__
_LENDING = required(
    "torch.nn.utils.stateless._functional_call", "sees what a functional call lends"
).__code__


def set_compiled_call(module: nn.Module, call: Any) -> None:  # noqa: ANN401
    """Set the function that a call of ``module`` runs instead of its forward and hooks."""
    module._compiled_call_impl = call


def is_forward_compiled(module: nn.Module) -> bool:
    """Check whether ``module.forward`` itself was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def check_input_dim(module: Any, x: torch.Tensor) -> None:  # noqa: ANN401
    """Raise as a batch norm does for an input with too many or too few dims."""
    module._check_input_dim(x)


def steps_by_flag(optimizer: Any) -> bool:  # noqa: ANN401
    """Check whether steps of ``optimizer`` write nothing while its ``found_inf`` tensor is one."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(is_bad: torch.Tensor, optimizer: Any) -> None:  # noqa: ANN401
    """Step, but write nothing if ``is_bad`` is one: for an optimizer that `steps_by_flag`."""
    optimizer.found_inf = is_bad
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def forget_step_hooks(optimizer: Any) -> None:  # noqa: ANN401
    """Remove all step hooks of one optimizer."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def hooks_of_steppers() -> dict[torch.Tensor, Iterable[RemovableHandle]]:
    """Return torch's table of parameters stepped in the backward, with their hooks; writable.

    Raises ImportError if this torch keeps the optimizers under another name than `STEPPERS`.
    """
    if _HOME not in sys.modules:
        return {}
    use = "steps sharded parameters in the backward"
    if STEPPERS not in required(f"{_HOME}._get_in_backward_optimizers", use).__code__.co_consts:
        raise lacking(f"attribute {STEPPERS} of parameters", use)
    return required(f"{_HOME}.param_to_optim_hook_handle_map", use)


_OPTIMIZERS = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def lent_now() -> Mapping[str, torch.Tensor] | None:
    """Return the tensors that `torch.func.functional_call` now substitutes; None outside of it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _LENDING:
            return variable_of(frame, "parameters_and_buffers", "sees what a functional call lends")
    return None


def is_stepping() -> bool:
    """Whether a torch optimizer is stepping now; always True while a compiler traces."""
    if torch.compiler.is_compiling():
        return True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _OPTIMIZERS:
            return True
        frame = frame.f_back
    return False


def asked(question: str) -> tuple[Any, ...] | None:
    """Return the values of its variables if torch asks ``question`` now; None if it does not.

    Raises ImportError, naming it, in a torch that lacks one of the functions or variables.
    """
    functions, variables = QUESTIONS[question]
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == ASKING:
            for name in functions:
                required(f"{ASKING}.{name}", _STATE)
            if not functions or frame.f_code.co_name in functions:
                return tuple(variable_of(frame, name, _STATE) for name in variables)
        frame = frame.f_back
    return None


def require_module(value: object, by: str) -> None:
    """Raise TypeError, in the name of ``by``, if ``value`` is not a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{by}: expected a torch.nn.Module, found {type(value).__name__} {value!r}")
