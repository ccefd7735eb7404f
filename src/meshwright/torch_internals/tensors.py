"""Private parts of tensors: memory, versions, subclasses, modes, and operators on lists of tensors.

Lookups here return torch's own functions or getters written in C, so calls have no extra cost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from meshwright.torch_internals.required import required

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
]

_made = required("torch._C._autograd._get_creation_meta", "tells views that keep their history")
foreach_copy_ = required("torch._foreach_copy_", "copies many tensors in one call")
foreach_add_ = required("torch._foreach_add_", "adds to many tensors in one call")
foreach_mul_ = required("torch._foreach_mul_", "scales many tensors in one call")
foreach_zero_ = required("torch._foreach_zero_", "clears many tensors in one call")
foreach_norm_operator = required("torch.ops.aten._foreach_norm.Scalar", "corrects norms of lists")
foreach_norm = required("torch._foreach_norm", "takes the norms of many tensors in one call")
join_in_chunks = required("torch._chunk_cat", "packs gradients rank by rank")
"""Split each tensor into chunks along a dim; join the first chunks of all, then the second ones."""
split_into = required("torch.split_with_sizes_copy", "unpacks gathered parameters")
"""Copy the stretches of a tensor along a dim to a list of tensors ``out``: what joining undoes."""
assert_soon = required("torch._assert_async", "checks a value where the device gets to it")
"""Raise where a boolean tensor is false: at once on the CPU, without a host sync elsewhere."""

storage_users = required("torch._C._storage_Use_Count", "sees who else holds memory")
"""Return the reference count of a storage, given its `storage_id`."""
storage_id = attrgetter("_cdata")
has_storage = required("torch._C._has_storage", "sees tensors without memory")
local_tensor_of = attrgetter("_local_tensor")
"""This rank's part of a DTensor, without autograd."""
version_of = attrgetter("_version")
"""The count of writes in place to the memory of a tensor."""
set_versions = required(
    "torch._C._autograd._unsafe_set_version_counter", "keeps graphs from memory that was freed"
)
"""Set the counts of writes of tensors, with which graphs remember what they have saved."""

make_subclass = required("torch.Tensor._make_subclass", "makes tensors of a class of its own")
make_wrapper_subclass = required(
    "torch.Tensor._make_wrapper_subclass", "makes tensors of a class of its own"
)
without_function = required(
    "torch._C.DisableTorchFunctionSubclass", "computes with what a subclass holds"
)
"""Context manager: ``__torch_function__`` of subclasses is not called in the block."""
without_dispatch = required("torch._C._DisableTorchDispatch", "sends what no mode should see")
"""Context manager: dispatch modes and ``__torch_dispatch__`` are not called in the block."""
dispatch_depth = required("torch._C._len_torch_dispatch_stack", "sees dispatch modes")
dispatch_modes = required(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "sees dispatch modes"
)
function_depth = required("torch._C._len_torch_function_stack", "sees function modes")
function_modes = required("torch.overrides._get_current_function_mode_stack", "sees function modes")
Future = required("torch._C.Future", "takes futures from communication hooks")

operator_names = required("torch._C._dispatch_get_all_op_names", "finds operators on lists")
schema_of = attrgetter("_schema")
"""The names and types of an operator's arguments and results."""
without_rules = tuple(
    required(f"torch.ops.aten.{name}", "calls what DTensors have no rule for")
    for name in ("_fused_sgd_", "_fused_adagrad_", "_foreach_copy_")
)
"""Elementwise operators on lists for which torch has no DTensor rule."""
number_operator = required("torch.ops.aten._local_scalar_dense.default", "reads single numbers")
to_copy_operator = required("torch.ops.aten._to_copy.default", "converts its views of shards")

FLASH_ATTENTION = tuple(
    required(f"torch.ops.aten.{name}", "computes attention by parts of the keys")
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
"""The host's attention, which returns the log-sum-exp of the scores too; and its backward."""
EFFICIENT_ATTENTION = tuple(
    required(f"torch.ops.aten.{name}", "computes attention by parts of the keys")
    for name in (
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    )
)
"""The same of CUDA."""

COMPARISON = "torch.testing._comparison"
"""The file of torch that `torch.testing.assert_close` compares in."""
_PYTHON = required("torch._C.DispatchKey.Python", "sees dispatch modes")
_excludes = required("torch._C._dispatch_tls_is_dispatch_key_excluded", "sees dispatch modes")


@contextlib.contextmanager
def without_memory(device: str) -> Iterator[None]:
    """Make tensors of ``device`` fake in the block; failures are raised, not logged too."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    # Conversions of modules exchange parameters, which is refused where weak references name them.
    mode.fake_tensor_converter.meta_converter.tensor_memo = dict[int, torch.Tensor]()
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode, torch.device(device):
            yield
    finally:
        log.disabled = before


def skips_dispatch_modes() -> bool:
    """True inside of a block that disables dispatch modes."""
    return bool(_excludes(_PYTHON))


def any_schema_of(target: object) -> Any:  # noqa: ANN401 - None, or torch's own
    """Return the schema of an operator; None for anything else."""
    return getattr(target, "_schema", None)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def writes_to(value: object) -> int:
    """Count the in-place writes to a tensor; 0 for anything else."""
    return getattr(value, "_version", 0)


def is_view(tensor: torch.Tensor) -> bool:
    """Check whether autograd knows ``tensor`` as a view of another one."""
    return tensor._is_view()


def may_be_rewritten(tensor: torch.Tensor) -> bool:
    """Whether autograd allows in-place writes to ``tensor``, which it does not for every view."""
    if not tensor._is_view():
        return True
    base = tensor._base
    is_of_leaf = base is None or (base.is_leaf and base.requires_grad)
    return not is_of_leaf and _made(tensor).name == "DEFAULT"


def viewed_by(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``tensor`` is a view of, or ``tensor`` itself."""
    return tensor if tensor._base is None else tensor._base


def set_local_tensor(tensor: Any, local: torch.Tensor) -> None:  # noqa: ANN401
    """Replace this rank's part of a DTensor by another tensor of the same shape."""
    tensor._local_tensor = local


def mark_parameter(tensor: Any, is_parameter: bool) -> None:  # noqa: ANN401
    """Set whether a tensor of a subclass counts as a parameter."""
    tensor._is_param = is_parameter
