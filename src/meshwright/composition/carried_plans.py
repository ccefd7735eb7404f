"""Plans that a model carries in attributes, as the models of transformers do.

``tp_plan`` and ``ep_plan`` map patterns of modules and parameters to words, ``pp_plan`` lists
modules in the order in which they run. A plan of a module inside applies below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

KINDS: Mapping[str, str] = MappingProxyType(
    {"tp_plan": "tensor", "ep_plan": "expert", "pp_plan": "pipeline"}
)
"""The attributes, and the axes they are for."""


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
