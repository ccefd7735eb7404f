"""Tensors of a model whose stages lie on other ranks: known by name here, and without values.

A pipeline's rank computes with the model's own parameters. Those of other ranks stay the objects
that they are, so that groups of an optimizer and loops over ``model.parameters()`` go on, but their
memory is given back, and who asks for their values is told where they are.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.torch_internals.autograd import STATE_OF_TENSORS
from meshwright.torch_internals.tensors import without_function
from meshwright.torch_internals.trees import tree_leaves

__all__ = ["FACTS", "HeldElsewhere", "let_go", "name_of"]

_WHERE = "_meshwright_where"
FACTS = frozenset(
    {
        "__hash__",
        "__len__",
        *STATE_OF_TENSORS,
        "device",
        "dim",
        "dtype",
        "element_size",
        "get_device",
        "grad",
        "grad_fn",
        "is_complex",
        "is_cpu",
        "is_cuda",
        "is_floating_point",
        "is_leaf",
        "is_meta",
        "is_nested",
        "is_quantized",
        "is_sparse",
        "itemsize",
        "layout",
        "names",
        "ndim",
        "ndimension",
        "nelement",
        "numel",
        "requires_grad",
        "retains_grad",
        "shape",
        "size",
        "stride",
    }
)
"""What can be asked without a value, by the names of torch's functions and attributes."""
_SETTINGS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "requires_grad_"})
"""What may be said to a parameter on every rank alike."""


class HeldElsewhere:
    """A tensor that another rank holds: what it looks like is known, and its values are refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - a function or the getter of an attribute
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Answer what needs no value. Raises LayoutError, naming the tensor, for all else."""
        if name_of(func) not in FACTS | _SETTINGS:
            _refuse([*tree_leaves((args, dict(kwargs or {})))])
        with without_function():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        """Say where the values are."""
        return f"<{vars(self)[_WHERE]}>"


def name_of(func: object) -> str:
    """The name of a function of torch, or of the attribute that is read or set."""
    found = getattr(func, "__name__", "")
    of = getattr(func, "__self__", None)
    return getattr(of, "__name__", found) if found in ("__get__", "__set__") else found


def _refuse(values: list[object]) -> NoReturn:
    names = [vars(value)[_WHERE] for value in values if isinstance(value, HeldElsewhere)]
    raise LayoutError(
        f"{names[0]}. A loss can read what the last stage holds: compute what needs other "
        "parameters in the model's forward, and return it with the output. `Trainable.weights` "
        "gives all values, and `Trainable.eval` runs the whole model"
    )


def let_go(model: nn.Module, held: Container[int], where: Mapping[str, str]) -> None:
    """Give back the memory of all of ``model`` whose identity is not ``held`` on this rank.

    ``where`` says by name which stage and rank have it. What no stage has, as a buffer that no
    forward reads, is left as it is.
    """
    classes: dict[type, type] = {}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if id(tensor) not in held and name in where:
                _empty(tensor, f"{kind} {name!r} {where[name]}", classes)


def _empty(tensor: torch.Tensor, text: str, classes: dict[type, type]) -> None:
    """Leave of ``tensor`` what it looks like, and one number that no training goes on with."""
    kind = type(tensor)
    if kind not in classes:
        classes[kind] = type(kind)(kind.__name__, (HeldElsewhere, kind), {})
    is_number = tensor.is_floating_point() or tensor.is_complex()
    tensor.data = tensor.new_full((), math.nan if is_number else 0).expand(tensor.shape)
    tensor.grad = None
    tensor.__class__ = classes[kind]
    vars(tensor)[_WHERE] = text
