"""GradientPart: this rank's elements of a gradient, on which sums and norms raise.

Optimizers and clipping by value are element-wise, so a plain tensor of this rank's part is all they
need. But its norm would silently be that of a part: torch's ``clip_grad_norm_`` would scale each
rank's part by another factor. So operations that combine several elements raise on such a tensor
and say what to call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from meshwright.torch_internals.modules import is_stepping
from meshwright.torch_internals.tensors import make_subclass, without_function

_NAMES = """
    argmax argmin argsort amax amin aminmax corrcoef count_nonzero cov cummax cummin cumprod cumsum
    diff dist dot histc inner kthvalue logcumsumexp logsumexp matmul max mean median min mm mode
    msort mv nanmean nanmedian nanquantile nansum norm nuclear_norm outer prod quantile renorm sort
    std std_mean sum topk trace unique unique_consecutive var var_mean vdot
    vector_norm matrix_norm cond svd svdvals svd_lowrank cross_entropy cosine_similarity normalize
    log_softmax softmax softmin layer_norm rms_norm mse_loss l1_loss smooth_l1_loss huber_loss
    einsum tensordot chain_matmul addmm addmv addr addbmm bmm ger
    _foreach_norm _foreach_max __matmul__ __rmatmul__
    all any numpy tolist roll flip fliplr flipud rot90
"""
"""Names of functions that look at several elements together."""


def _functions() -> frozenset[object]:
    homes = (torch, torch.Tensor, torch.linalg, F, torch.special)
    found = (getattr(home, name, None) for home in homes for name in _NAMES.split())
    return frozenset(each for each in found if each is not None)


_WHOLE = _functions()

_OF_PAIRS = frozenset({torch.max, torch.Tensor.max, torch.min, torch.Tensor.min})

_FRESH = frozenset(
    getattr(home, name)
    for home in (torch, torch.Tensor)
    for name in (
        *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "as_subclass", "new"),
        *("isfinite", "isinf", "isnan", "isneginf", "isposinf"),
    )
    if hasattr(home, name)
)
"""Functions whose result is no longer a gradient: optimizers make their state by them, and training
loops look for values that are not finite; all ranks notice a step that only one skips."""

_CLONES = (torch.clone, torch.Tensor.clone)
"""Functions whose result is state of an optimizer where it steps, and else a part."""

_JOINED = frozenset(
    {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.stack, torch.vstack}
)


class GradientPart(torch.Tensor):
    """This rank's elements of the gradient of ``name``, on memory that it shares.

    Element-wise results computed from it alone, and clones, are GradientParts too. Slices, deep
    copies, results that involve other tensors (a difference), and clones made inside an optimizer's
    step are plain. ``as_subclass(torch.Tensor)`` is a plain tensor on the same memory, with this
    rank's elements alone.
    """

    is_sparse = False  # asked of each gradient by each step of an optimizer
    _meshwright_name: str
    """The name of the parameter."""
    _meshwright_waits: bool = False
    """True when it is whole, and this rank's own until it is reduced."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what any function of torch returns
        """Compute on plain tensors, unless ``func`` combines several elements."""
        del types
        if func in _WHOLE and not (func in _OF_PAIRS and _is_pair(args, kwargs or {})):
            raise _refusal(func, args)
        with without_function():
            result = func(*args, **(kwargs or {}))
            kind = type(result)
            if (kind is torch.Tensor or kind is tuple or kind is list) and args:
                is_plain = func in _FRESH or result is args[0]
                if not is_plain and not (func in _CLONES and is_stepping()):
                    return _marked(func, result, args)
            return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy the elements into a plain tensor."""
        memo[id(self)] = copy = plain(self).clone()
        return copy

    def __reduce_ex__(self, proto: object) -> Any:  # noqa: ANN401 - as torch says it
        """Pickle as a plain tensor, which can be read without this library."""
        return plain(self).__reduce_ex__(proto)


def gradient_part(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """Make a `GradientPart` of this rank's elements of the gradient of parameter ``name``."""
    found = make_subclass(GradientPart, gradient)
    found._meshwright_name = name
    return found


def waiting_gradient(like: torch.Tensor, name: str) -> torch.Tensor:
    """Make a gradient for ``like`` in new memory: this rank's own, which waits for its reduction.

    It behaves as a part does: its norm would be that of one rank.
    """
    found: Any = gradient_part(torch.empty_like(like), name)
    found._meshwright_waits = True
    return found


def refuse_waiting(gradient: torch.Tensor) -> None:
    """Raise RuntimeError for a gradient of this rank that waits for its reduction."""
    if type(gradient) is GradientPart and gradient._meshwright_waits:
        raise RuntimeError(
            f"a norm or a sum was asked of gradients of {gradient._meshwright_name!r} that wait "
            "for their reduction: it would be of this rank's own. Run the last backward pass of a "
            "step outside of no_sync, then clip; to look at this rank's own, take "
            ".grad.as_subclass(torch.Tensor)"
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the memory of a `GradientPart`; any other tensor unchanged."""
    if type(tensor) is not GradientPart:
        return tensor
    with without_function():
        return tensor.as_subclass(torch.Tensor)


def plain_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    return None if gradient is None else plain(gradient)


def _marked(func: object, result: Any, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Mark a result computed from parts alone, with as many elements, as a part."""
    if type(result) is not torch.Tensor:
        if type(result) in (list, tuple):
            return type(result)([_marked(func, each, args) for each in result])
        return result
    part = _first_part(args)
    if part is None or (result.numel() != part.numel() and func not in _JOINED):
        return result
    is_comparison = result.dtype is torch.bool and part.dtype is not torch.bool
    if _has_others(args) or (is_comparison and _is_pair(args, {})):
        return result  # who compares two tensors knows what they are
    return gradient_part(result, part._meshwright_name)


def _first_part(values: Iterable[object]) -> GradientPart | None:
    for value in values:
        if isinstance(value, GradientPart):
            return value
    for value in values:
        if type(value) in (list, tuple):
            part = _first_part(cast("Iterable[object]", value))
            if part is not None:
                return part
    return None


def _has_others(values: Iterable[object]) -> bool:
    """Whether other tensors than scalars are involved, as in a comparison of gradients."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, GradientPart) and value.ndim:
                return True
        elif type(value) in (list, tuple) and _has_others(cast("Iterable[object]", value)):
            return True
    return False


def _is_pair(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the call takes the element-wise minimum or maximum of two tensors."""
    return isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), torch.Tensor)


def _refusal(func: Callable[..., object], args: tuple[object, ...]) -> RuntimeError:
    part = _first_part(args)
    if part is not None:
        refuse_waiting(part)
    held = "" if part is None else f" of {part._meshwright_name!r}: {part.numel()} elements here"
    return RuntimeError(
        f"{getattr(func, '__name__', func)} of a gradient of which each rank holds a part{held}. "
        "That would be a number of this rank's elements alone, and another one on each rank. Take "
        "norms and clip with meshwright.clip_grad_norm_(parameters, max_norm), or with "
        "clip_grad_norm_ of the FullyShardedDataParallel; to work on this rank's elements, and sum "
        "over the ranks yourself, take .grad.as_subclass(torch.Tensor)"
    )
