"""Plans that a model carries in attributes, as the models of transformers do.

``tp_plan`` and ``ep_plan`` map patterns of modules and parameters to words, ``pp_plan`` lists
modules in the order in which they run. A plan of a module inside applies below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.plan import match_names

KINDS = ("tp_plan", "ep_plan", "pp_plan")


def carried_plan(model: nn.Module, kind: str) -> dict[str, Any]:
    """Return the plan of ``kind`` that ``model``, or a module inside, carries; names of the root.

    Empty where there is none.
    """
    found: dict[str, Any] = {}
    owners: list[str] = []
    for name, part in model.named_modules():
        if any(name.startswith(owner) for owner in owners):
            continue
        # Not of the instance: a wrapper may answer for what it wraps, with names of that.
        plan = getattr(part, kind, None) if hasattr(type(part), kind) else vars(part).get(kind)
        if isinstance(plan, Mapping) and plan:
            prefix = f"{name}." if name else ""
            owners.append(prefix)
            found |= {f"{prefix}{pattern}": word for pattern, word in plan.items()}
    return found


def carries(model: nn.Module) -> str:
    """Say which plans ``model`` carries."""
    found = [f"{kind} ({', '.join(plan)})" for kind in KINDS if (plan := carried_plan(model, kind))]
    return f"{type(model).__name__} carries {' and '.join(found) or 'no plan'}"


def stage_starts(model: nn.Module) -> list[str]:
    """The modules that a stage may begin with by the ``pp_plan``; of a list, each of its items."""
    plan, found = carried_plan(model, "pp_plan"), list[str]()
    for name, part in model.named_modules():  # the plan of a head comes before that of its model
        if name in plan:
            is_list = isinstance(part, nn.ModuleList)
            found += [f"{name}.{key}" for key, _ in part.named_children()] if is_list else [name]
    return found


def expert_modules(model: nn.Module) -> list[str]:
    """The modules of experts in the ``ep_plan``, or those whose parameters it names."""
    words, found = carried_plan(model, "ep_plan"), set[str]()
    for pattern, word in words.items():
        if word in _SPLIT:
            found.update(match_names(pattern, [name for name, _ in model.named_modules()]))
        elif word == _ROWS:
            parameters = match_names(pattern, [name for name, _ in model.named_parameters()])
            found |= {name.rpartition(".")[0] for name in parameters}
    return [name for name, _ in model.named_modules() if name in found]


def unknown_words(model: nn.Module) -> list[tuple[str, str]]:
    """List pattern and word of what the ``ep_plan`` says and nobody here knows."""
    known = {*_SPLIT, _ROWS, *_LEFT}
    return [each for each in carried_plan(model, "ep_plan").items() if each[1] not in known]


_SPLIT, _ROWS = ("ep_dispatch_experts", "moe_tp_experts"), "grouped_gemm"
_LEFT = ("ep_router", "colwise", "rowwise", "replicated_with_grad_allreduce", "replicate")
"""Words for modules beside the experts, which every rank needs for its own tokens."""
