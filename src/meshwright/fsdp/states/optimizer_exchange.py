"""Managed parameters under the names of the model, and messages of ranks about their state."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.fsdp.states.named import Part, parts_of
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import wrappers_in
from meshwright.torch_internals.modules import forget_step_hooks

_PLAIN = (bool, int, float, str, type(None))

MADE, OWN = 1, 2
"""State of a parameter: made up on a rank that has none at all, or its own. None is 0."""


def is_scalar(value: object) -> bool:
    """Whether ``value`` is a number, a text or a tensor without dims: what every rank counts."""
    return value is not None and (
        value.ndim == 0 if isinstance(value, torch.Tensor) else isinstance(value, _PLAIN)
    )


def packed(value: Any) -> list[Any]:  # noqa: ANN401 - any state
    """A value as JSON: its kind, and what it is made of."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        text = base64.b64encode(bytes(raw.tolist())).decode()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), text]
    if isinstance(value, _PLAIN):
        return ["plain", value]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) in (list, tuple, torch.Size):
        return ["list" if type(value) is list else "tuple", *map(packed, value)]
    if isinstance(value, dict):
        return ["dict", *([packed(key), packed(own)] for key, own in value.items())]
    return ["unknown", f"{type(value).__module__}.{type(value).__qualname__}"]


def unpacked(value: Sequence[Any]) -> Any:  # noqa: ANN401 - any state
    """Return the value that was packed. Raises TypeError on all ranks for what JSON cannot hold."""
    kind, *parts = value
    if kind == "plain":
        return parts[0]
    if kind == "tensor":
        dtype, shape, text = parts
        raw = torch.frombuffer(bytearray(base64.b64decode(text)) or bytearray(1), dtype=torch.uint8)
        return (raw if text else raw[:0]).view(getattr(torch, dtype)).reshape(shape)
    if kind == "complex":
        return complex(*parts)
    if kind == "dtype":
        return getattr(torch, parts[0])
    if kind in ("list", "tuple"):
        values = [unpacked(part) for part in parts]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {unpacked(key): unpacked(own) for key, own in parts}
    raise TypeError(
        "expected optimizer state that is None, a number, a text, a tensor, a dtype, or a list, "
        f"tuple or dict of such, found a {parts[0]}: it cannot be sent to ranks that have none of "
        "the parameter's elements. Save it apart"
    )


def from_first_rank(state: Mapping[str, Any] | None, world: Communicator) -> dict[str, Any]:
    """Return the state of the first rank of ``world`` on all its ranks; a collective.

    An outline goes first, as JSON, then each tensor. Raises ValueError where the first has none.
    """
    outline: dict[str, Any] = {}
    if state is not None and world.rank == 0:
        outline = {
            "state": {
                n: {k: _outline(v) for k, v in own.items()} for n, own in state["state"].items()
            },
            "rest": packed({key: own for key, own in state.items() if key != "state"}),
        }
    outline = world.gather_values(outline, label="optimizer state outline")[0]
    if not outline:
        raise ValueError(
            "expected the optimizer's state on the first rank of the group, found none there: pass "
            "what optim_state_dict returned on that rank"
        )
    rest = unpacked(outline["rest"])
    found: dict[str, dict[str, Any]] = {}
    for name, own in outline["state"].items():
        found[name] = {k: unpacked(value) for k, (dtype, _, value) in own.items() if dtype is None}
    for name, own in outline["state"].items():
        for key, (dtype, shape, _) in own.items():
            if dtype is None:
                continue
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            if state is not None and world.rank == 0:
                tensor.copy_(state["state"][name][key])
            world.broadcast(tensor, label=f"optimizer state {name}").wait()
            found[name][key] = tensor.cpu()
    return {"state": found, **rest}


def with_gathered(
    given: Mapping[str, Mapping[str, Any]], misfits: Iterable[str], shard: Communicator
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return ``given`` with whole tensors under the names that are ``misfits`` on any rank.

    These hold views of ranges that loading cannot use as they are; a rank whose range is empty
    may not have the name at all, so the names of all ranks are returned, too. A collective over
    ``shard``, whose ranks hold all ranges.
    """
    mine = {
        name: {
            key: _outline(value) if isinstance(value, ShardView) else (None, None, packed(value))
            for key, value in given[name].items()
        }
        for name in misfits
    }
    known: set[str] = set()
    wanted: dict[str, dict[str, Any]] = {}
    everyones = shard.gather_values([list(given), mine], label="optimizer state to gather")
    for names, outlines in everyones:
        known.update(names)
        wanted = {**outlines, **wanted}
    found = dict(given)
    for name, outlines in sorted(wanted.items()):
        own = given.get(name, {})
        found[name] = {
            key: _whole(name, own.get(key), outline, shard) for key, outline in outlines.items()
        }
    return found, known


def _whole(name: str, value: Any, outline: Sequence[Any], shard: Communicator) -> Any:  # noqa: ANN401
    dtype, shape, rest = outline
    if dtype is None:
        return unpacked(rest)
    start = 0
    if isinstance(value, ShardView):
        start, value = value.start, value.local
    elif value is None:
        value = torch.empty(0, dtype=getattr(torch, dtype), device=shard.device)
    # A view that was in a file has no communicator of its own.
    view = ShardView(value.reshape(-1), start, shape, name=name, communicator=shard)
    return view.full_tensor()


def _outline(value: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - any state
    """Dtype and shape of a tensor, or anything else packed."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), list(value.shape), None
    return None, None, packed(value)


def managed_parameters(model: nn.Module) -> list[Part]:
    """List all parameters that units manage, in order, under the names of ``model``."""
    found: list[Part] = []
    prefixes = {module: clean_name(name) for name, module in model.named_modules()}
    for wrapper in wrappers_in(model):
        if wrapper._unit is not None:
            prefix = f"{prefixes[wrapper]}." if prefixes[wrapper] else ""
            names = [tuple(prefix + name for name in own) for own in wrapper._driver.own_names]
            found += parts_of(wrapper._unit, names, wrapper._groups)
    return found


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """List the names that stand for each exposed parameter: several for a flat one."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for part in managed_parameters(model):
        found[part.exposed] = (*found.get(part.exposed, ()), part.names[0])
    for name, parameter in model.named_parameters():
        found.setdefault(parameter, (clean_name(name),))
    return found


def state_of_zero_steps(optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
    """The state that ``optimizer`` begins with: that of a twin after one step on zeros."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    # A scheduler's ``step`` on the object is bound to the original.
    vars(twin).update({key: own for key, own in vars(optimizer).items() if key != "step"})
    forget_step_hooks(twin)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_zeros(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.step()
    stand_ins = [p for group in twin.param_groups for p in group["params"]]
    originals = [p for group in optimizer.param_groups for p in group["params"]]
    found: defaultdict[Any, Any] = defaultdict(dict)
    for original, stand_in in zip(originals, stand_ins, strict=True):
        own = twin.state.get(stand_in)
        if own:
            if "step" in own:
                own["step"] = own["step"] * 0
            found[original] = own
    return found


def _zeros(parameter: nn.Parameter) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.zeros_like(parameter)
    return stand_in
