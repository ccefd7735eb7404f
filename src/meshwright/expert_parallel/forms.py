"""Which modules hold experts, by what they are, and which of them cannot be split over ranks."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

_MARK = "_meshwright_holds_experts"
APPLY_GATE = "_apply_gate"
"""The method of Hugging Face's modules between two linear layers."""

_FUSED = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", APPLY_GATE)
_DROPPING = ("capacity_factor", "expert_capacity", "drop_tokens")


class ExpertForm(Enum):
    """How a module is called, and who computes."""

    FUSED = auto()
    """As Hugging Face's ``use_experts_implementation`` has them: our arithmetic, whatever the
    config says."""
    ROUTED = auto()
    """Marked by `experts`: (tokens, indices, weights), its own forward."""
    COUNTED = auto()
    """torchtitan's ``GroupedExperts``: (rows sorted by expert, counts), its own forward."""


def experts(module: M) -> M:
    """Mark ``module`` as one that holds experts, for `ExpertParallel`, and return it.

    Its forward takes tokens (n, D), the indices of their experts (n, K) and their weights (n, K),
    and returns (n, D). Dim 0 of each of its parameters is the number of experts. Under the style it
    gets the tokens of this rank's experts, ``indices`` counted from the first of them and K = 1.
    An attribute ``num_experts`` is that of this rank's during its forward.

    Raises ValueError for parameters that do not fit.
    """
    vars(module)[_MARK] = True
    _check_parameters(module, type(module).__name__, "a module of experts")
    return module


def form_of(module: nn.Module) -> ExpertForm | None:
    """Return the form of a module that holds experts, None for any other."""
    if vars(module).get(_MARK, False):
        return ExpertForm.ROUTED
    if all(hasattr(module, name) for name in _FUSED):
        return ExpertForm.FUSED
    is_counted = type(module).__name__ == "GroupedExperts" and hasattr(module, "num_experts")
    return ExpertForm.COUNTED if is_counted else None


def checked_form(module: nn.Module, name: str, axis: str) -> tuple[ExpertForm, int]:
    """Return the form of module ``name`` and its number of experts.

    Raises ValueError for a module that is not known to hold experts, that drops tokens, or has
    parameters or buffers that cannot be split by expert.
    """
    where = f"axis {axis}: '{name}'"
    form = form_of(module)
    if form is None:
        raise ValueError(
            f"{where} is a {type(module).__name__}, which is not known to hold experts: expected "
            "a module of Hugging Face's use_experts_implementation, torchtitan's GroupedExperts, "
            "or one that meshwright.expert_parallel.experts has marked"
        )
    check_keeps_all(module, name, axis)
    number = _check_parameters(module, name, f"axis {axis}")
    for path, part in module.named_modules():
        rows = [f"{path}.{key}".lstrip(".") for key, b in part.named_buffers(recurse=False)
                if b.ndim and len(b) == number]  # fmt: skip
        own = [f"{path}.{key}" for key, _ in part.named_parameters(recurse=False)] if path else []
        if rows or (own and form is not ExpertForm.FUSED):
            raise ValueError(
                f"{where} has {', '.join(rows or own)}, of which each rank would need other rows: "
                "make it a parameter of the module itself, with an expert in each row of dim 0"
            )
    return form, number


def check_keeps_all(module: nn.Module, name: str, axis: str) -> None:
    """Raise ValueError for a module that drops tokens: experts, their block, or its router."""
    for key in _DROPPING:
        value = getattr(module, key, None)
        if value is not None and value is not False:
            raise ValueError(
                f"axis {axis}: '{name}' has {key} = {value}: which tokens are dropped would depend "
                "on the ranks. Set it to None"
            )


def _check_parameters(module: nn.Module, name: str, where: str) -> int:
    """Return the number of experts. Raises ValueError unless each parameter has as many rows."""
    own = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    given: Any = getattr(module, "num_experts", None)
    number = given if isinstance(given, int) else next((s[0] for s in own.values() if s), 0)
    if not own or not number or any(not s or s[0] != number for s in own.values()):
        raise ValueError(
            f"{where}: expected parameters of '{name}' whose dim 0 is the number of experts "
            f"({number or 'unknown'}), found {own or 'none'}"
        )
    return number
