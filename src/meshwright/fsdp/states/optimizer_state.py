"""Optimizer state by parameter names: split, joined, and loaded.

State of a flat parameter, and of a sharded original one, has the shape of the shard. Saving splits
it into parameters, and loading joins it::

    optimizer          {0: {"exp_avg": (17,), "step": ()}}            positions, this rank's shards
    optim_state_dict   {"first.weight": {"exp_avg": (7, 5), "step": ()}, "first.bias": ...}

State of parameters outside of units is not changed.
"""

from __future__ import annotations

import base64
import copy
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator, communicator, settle
from meshwright.comm.dtensors.gather_dtensor import without_chunks
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.fsdp.exposures.exposure import flat_layout
from meshwright.fsdp.options import (
    FullOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from meshwright.fsdp.states.named import Form, Part, join, parts_of, values_of
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import wrappers_in
from meshwright.torch_internals.modules import forget_step_hooks

_PLAIN = (bool, int, float, str, type(None))

MADE, OWN = 1, 2
"""State of a parameter: made up on a rank that has none at all, or its own. None is 0."""


def is_scalar(value: object) -> bool:
    """Whether ``value`` is a number, text or 0-dim tensor, such as a step count."""
    return value is not None and (
        value.ndim == 0 if isinstance(value, torch.Tensor) else isinstance(value, _PLAIN)
    )


def packed(value: Any) -> list[Any]:  # noqa: ANN401 - any state
    """Describe a value as JSON: its kind and its contents."""
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
    """Return the value that was packed. Raises TypeError on all ranks if JSON cannot hold it."""
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

    An outline is sent first, as JSON, then each tensor. Raises ValueError if the first has none.
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

    Their views hold ranges that loading cannot use directly. A rank with an empty range may lack
    the name, so the names of all ranks are returned, too. A collective over ``shard``, whose ranks
    together hold all ranges.
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
    """Return dtype and shape of a tensor, or anything else packed."""
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
    """List the names of each exposed parameter: several for a flat one."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for part in managed_parameters(model):
        found[part.exposed] = (*found.get(part.exposed, ()), part.names[0])
    for name, parameter in model.named_parameters():
        found.setdefault(parameter, (clean_name(name),))
    return found


def state_of_zero_steps(optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
    """The initial state of ``optimizer``: that of a twin after one step on zeros."""
    kind = type(optimizer)
    twin = object.__new__(kind)  # without `__init__`, whose arguments are not known
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
                own["step"] = own["step"] * 0  # the twin has taken one step, of zeros
            found[original] = own
    return found


def _zeros(parameter: nn.Parameter) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.zeros_like(parameter)
    return stand_in


State = dict[str, Any]
"""The state of one parameter."""

Held = tuple[int, dict[str, str], dict[str, Any]]
"""A rank's share of one parameter: any state, the dtypes of what is spread, the rest packed."""

# ------------------------------------------------------------------------------------- out


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: StateDictSettings,
    given: Mapping[str, Any] | None = None,
    group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
) -> dict[str, Any]:
    """State and groups of ``optimizer`` by name; a collective over the shards for FULL.

    LOCAL is like SHARDED: each value is this rank's part; an optimizer that has not stepped has the
    state of zero steps there. ``group`` determines which rank is the first.
    """
    settle()
    _check_local(model, settings.state_dict_type)
    names = names_by_parameter(model)
    state, groups = _by_parameter(optimizer, given)
    parts = managed_parameters(model)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    kind = OWN
    if given is None and not any(state.values()) and not is_full:
        # Checkpoints load into what they are given: without a state that of the file is dropped.
        kind, state = MADE, dict(state_of_zero_steps(optimizer))
    is_agreed = is_full or any(part.groups.mesh is not None for part in parts)
    offloads = settings.optim_state_dict_config.offload_to_cpu
    form = Form(is_full=is_full, offloads=offloads)
    apart = _take_apart(parts, state, form, is_agreed=is_agreed, kind=kind)
    found = {part.names[0]: own for part, own in apart if own}
    managed = {part.exposed for part in parts}
    for parameter, own in state.items():
        if parameter not in managed:
            (name,) = _known(names, parameter)
            found[name] = {k: _copied(v, offloads=offloads) for k, v in own.items()}
    if _is_rank0_only(settings) and communicator(group).rank != 0:
        return {}
    if given is not None and "param_groups" not in given:
        return {"state": found}
    listed = [[name for p in own["params"] for name in _known(names, p)] for own in groups]
    pairs = zip(groups, listed, strict=True)
    return {"state": found, "param_groups": [{**own, "params": names} for own, names in pairs]}


def _is_rank0_only(settings: StateDictSettings) -> bool:
    config = settings.optim_state_dict_config
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only


def _check_local(model: nn.Module, kind: StateDictType) -> None:
    has_mesh = any(wrapper._groups.mesh is not None for wrapper in wrappers_in(model))
    if kind is StateDictType.LOCAL_STATE_DICT and has_mesh:
        raise RuntimeError(
            f"Found state_dict_type {kind.name}. DeviceMesh is not compatible with "
            "LOCAL_STATE_DICT. Use SHARDED_STATE_DICT"
        )


def _by_parameter(
    optimizer: torch.optim.Optimizer, given: Mapping[str, Any] | None
) -> tuple[dict[nn.Parameter, State], list[dict[str, Any]]]:
    """Return state by parameter, and groups with parameters, from the optimizer or its dict."""
    if given is None:
        held: dict[Any, State] = dict(optimizer.state)
        return held, optimizer.param_groups
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    if "param_groups" not in given:
        return {listed[position]: own for position, own in given["state"].items()}, []
    of_key = dict(zip(_keys(given), listed, strict=True))
    state = {of_key[key]: own for key, own in given["state"].items()}
    groups = [
        {**group, "params": [of_key[key] for key in group["params"]]}
        for group in given["param_groups"]
    ]
    return state, groups


def _keys(given: Mapping[str, Any]) -> list[Any]:
    """List the keys of the parameters in an optimizer's state dict, in order."""
    return [key for group in given["param_groups"] for key in group["params"]]


def _known(
    names: Mapping[nn.Parameter, tuple[str, ...]], parameter: nn.Parameter
) -> tuple[str, ...]:
    if parameter not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
            "model: build the optimizer from the wrapped model's parameters"
        )
    return names[parameter]


def spread_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    *,
    is_full: bool,
    kind: int,
) -> tuple[dict[str, Any], dict[Any, dict[str, State]]]:
    """Convert a result of ``optimizer.state_dict()`` to the shapes of the whole parameters.

    The values are whole tensors, or this rank's parts. All ranks have the same keys: positions
    stay. For each flat parameter, the states of its parameters by name are returned separately, by
    position. ``kind`` is that of this rank's state. A collective over the shards.
    """
    state, _ = _by_parameter(optimizer, given)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    keys = dict(zip(listed, _keys(given), strict=True))
    parts = [part for part in managed_parameters(model) if part.exposed in keys]
    for part in parts:
        _check_form(part, state.get(part.exposed, {}))
    form = Form(is_full=is_full)
    flat: dict[Any, dict[str, State]] = {}
    for part, own in _take_apart(parts, state, form, is_agreed=True, kind=kind):
        if part.is_flat:
            flat.setdefault(keys[part.exposed], {})[part.names[0]] = own
        state.pop(part.exposed, None)
        if own and not part.is_flat:
            state[part.exposed] = own
    found = {keys[parameter]: own for parameter, own in state.items()}
    return {**given, "state": found}, flat


def _check_form(part: Part, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        is_plain = not isinstance(value, torch.Tensor) or value.ndim == 0
        if not is_plain and not _is_shard_like(value, part.exposed.shape):
            raise ValueError(
                f"Tensor optimizer state does not have same shape as its parameter: {key!r} of "
                f"{part.names[0]} has shape {tuple(value.shape)}, this rank's part "
                f"{tuple(part.exposed.shape)}. What it is of the whole parameter is not known"
            )


def _take_apart(
    parts: Sequence[Part],
    state: Mapping[nn.Parameter, State],
    form: Form,
    *,
    is_agreed: bool,
    kind: int = OWN,
) -> list[tuple[Part, State]]:
    """List the state of each parameter, if any rank has some; ``is_agreed`` asks the others.

    If a mesh was given, parts become DTensors, a collective.
    """
    states = [state.get(part.exposed) or {} for part in parts]
    answers: list[Sequence[Held]] = [()] * len(parts)
    if is_agreed:
        by_shard: dict[Communicator, list[int]] = {}
        for number, part in enumerate(parts):
            if part.group.axes.shard is not None:
                by_shard.setdefault(part.group.axes.shard, []).append(number)
        for shard, numbers in by_shard.items():
            held = [_held(parts[n], states[n], kind) for n in numbers]
            everyones = shard.gather_values(held, label="optimizer state keys")
            for number, *answer in zip(numbers, *everyones, strict=True):
                answers[number] = answer
    found: list[State] = []
    spread: dict[tuple[ParameterGroup, str, torch.dtype], list[int]] = {}
    for number, part in enumerate(parts):
        rest, dtypes = _agreed(part, states[number], answers[number], form)
        found.append(rest)
        for key in sorted(dtypes):  # gathered in one order on all ranks
            spread.setdefault((part.group, key, dtypes[key]), []).append(number)
    for (group, key, dtype), numbers in spread.items():
        own = [parts[n] for n in numbers]
        values = [states[n].get(key) for n in numbers]
        nothing = group.buffer.shard.new_empty(0, dtype=dtype)
        pairs = zip(own, values, strict=True)
        elements = [nothing if v is None else part.cut_exposed(v) for part, v in pairs]
        line = values[0] if own[0].is_flat else None
        label = f"optimizer state {key} of {own[0].names[0]}"
        for n, value in zip(numbers, values_of(own, elements, form, label, line), strict=True):
            found[n][key] = value
    return [(p, dict(sorted(own.items()))) for p, own in zip(parts, found, strict=True)]


def _held(part: Part, own: State, kind: int) -> Held:
    """Describe one parameter for the other ranks."""
    shape = part.exposed.shape
    spread = {
        k: str(v.dtype).removeprefix("torch.") for k, v in own.items() if _is_shard_like(v, shape)
    }
    rest = {k: v for k, v in own.items() if k not in spread} if part.counts else {}
    if not _gives(part):
        rest = {k: v for k, v in rest.items() if is_scalar(v)}
    return (kind if own else 0), spread, {k: packed(v) for k, v in rest.items()}


def _gives(part: Part) -> bool:
    """Whether this rank, the first with elements, sends unsharded state to ranks without any."""
    layout, axes = flat_layout(part.group), part.group.axes
    (start, stop), (_, size) = layout.range(part.index), layout.shard_range(0)
    if part.is_flat or start == stop:  # every rank has all of one without elements
        return False
    first, last = start // size, (stop - 1) // size
    return axes.part == first and last - first + 1 < axes.parts


def _agreed(
    part: Part, own: State, answers: Sequence[Held], form: Form
) -> tuple[State, dict[str, torch.dtype]]:
    """Return unsharded state of one parameter, and dtypes of sharded state, equal on all ranks.

    Without ``answers`` only for parameters with elements on this rank.
    """
    dtypes = {k: v.dtype for k, v in own.items() if _is_shard_like(v, part.exposed.shape)}
    # Copies: several parameters share the counter of their flat one, and optimizers change it.
    rest = {k: _copied(v, offloads=form.offloads) for k, v in own.items() if k not in dtypes}
    # Ranks whose parts get no gradients may have none.
    kinds = {kind for kind, _, _ in answers}
    if not (OWN in kinds or kinds == {MADE} if answers else own and part.counts):
        return {}, {}
    for _, told, counted in reversed(answers):  # the first rank's counts
        dtypes |= {key: getattr(torch, name) for key, name in told.items()}
        rest.update({key: unpacked(value) for key, value in counted.items()})
    return rest, dtypes


def _is_shard_like(value: object, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == shape


def _copied(value: Any, *, offloads: bool) -> Any:  # noqa: ANN401 - any state
    is_tensor = isinstance(value, torch.Tensor)
    return Form(is_full=True, offloads=offloads).of(value) if is_tensor else copy.deepcopy(value)


# -------------------------------------------------------------------------------------- in


def state_to_load(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any] | None,
    settings: StateDictSettings | None = None,
    group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    *,
    held: Container[nn.Parameter] = (),
    is_strict: bool = False,
) -> dict[str, Any]:
    """Make the state that an optimizer with ``groups`` loads: by position, with this rank's parts.

    If only the first rank of ``group`` has a state dict, it sends it to the others. A parameter
    without elements on this rank gets state only if the optimizer has ``held`` some. With
    ``is_strict`` groups may not name parameters that those of ``state`` lack; nor may ``state``
    lack one of a flat parameter's parameters if it has others, because their step counts differ.
    """
    settings = settings or StateDictSettings()
    _check_local(model, settings.state_dict_type)
    if _is_rank0_only(settings):
        state = from_first_rank(state, communicator(group))
    if not state:
        raise ValueError(
            "expected what optim_state_dict returned, found nothing on this rank. With "
            "FullOptimStateDictConfig(rank0_only=True) in force the first rank's is enough"
        )
    names = names_by_parameter(model)
    listed = [p for own in groups for p in own["params"]]
    position = {parameter: number for number, parameter in enumerate(listed)}
    given = {clean_name(str(name)): own for name, own in state["state"].items()}
    found: dict[int, State] = {}
    flats: dict[nn.Parameter, list[Part]] = {}
    managed = managed_parameters(model)
    exposed = {part.exposed for part in managed}
    for parameter in position:
        _known(names, parameter)
    others = {names[parameter][0]: parameter for parameter in position if parameter not in exposed}
    given, known = _fitting(model, given, _misfits(given, managed, others), settings, group)
    for part in managed:
        if part.exposed not in position:
            continue
        own = part.found_in(given)
        if part.is_flat:
            flats.setdefault(part.exposed, []).append(part)
        elif own is not None:
            # By all ranks: DTensors are gathered.
            loaded = {key: _own_part(part, value) for key, value in own.items()}
            if part.counts or part.exposed in held:
                found[position[part.exposed]] = loaded
    for flat, parts in flats.items():
        own = _put_together(parts, given, known if is_strict else None)
        if own:
            found[position[flat]] = own
    for name, parameter in others.items():
        if name in given:
            found[position[parameter]] = {
                k: copy.deepcopy(without_chunks(v, f"whole state of {name}"))
                for k, v in given[name].items()
            }
    if "param_groups" not in state:
        return {"state": found}
    loaded = _groups_to_load(groups, state, names, position, is_strict=is_strict)
    return {"state": found, "param_groups": loaded}


def _misfits(
    given: Mapping[str, State], managed: Sequence[Part], others: Container[str]
) -> list[str]:
    """List the names of state whose views hold other elements than this rank has to load."""
    parts = {name: part for part in managed for name in part.names}

    def fits(name: str, value: object) -> bool:
        if not isinstance(value, ShardView):
            return True
        return parts[name].fits(value) if name in parts else name not in others

    return [n for n, own in given.items() if not all(fits(n, value) for value in own.values())]


def _fitting(
    model: nn.Module,
    given: dict[str, State],
    misfits: Sequence[str],
    settings: StateDictSettings,
    group: Any,  # noqa: ANN401 - c10d's types stay in comm
) -> tuple[Mapping[str, Mapping[str, Any]], set[str]]:
    """Return state that is whole where views do not fit on some rank, and all ranks' names."""
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        shards = {wrapper._groups.shard for wrapper in wrappers_in(model)}
        return with_gathered(
            given, misfits, shards.pop() if len(shards) == 1 else communicator(group)
        )
    if misfits:
        raise ValueError(
            f"the state of {misfits[0]!r} is a part of it that another wrapping has left on this "
            "rank. Load it under SHARDED_STATE_DICT (FullyShardedDataParallel.state_dict_type), "
            "so that all ranks gather it"
        )
    return given, set(given)


def _own_part(part: Part, value: Any) -> Any:  # noqa: ANN401 - any state
    """Copy this rank's part of a value, in the shape of the exposed parameter."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return copy.deepcopy(value)
    if tuple(value.shape) != part.shape:
        raise ValueError(
            "Tensor optimizer state does not have same shape as its parameter: expected "
            f"{part.shape} for {part.names[0]}, found {tuple(value.shape)}"
        )
    found = part.elements_of(value, f"whole state of {part.names[0]}").clone()
    return found if part.is_cut or part.is_flat else found.view(part.local_shape)


def _put_together(
    parts: Sequence[Part],
    given: Mapping[str, Mapping[str, Any]],
    known: Container[str] | None,
) -> State:
    """Join the states of all its parameters into the state of a flat parameter.

    A parameter without state has had no gradients: its elements become zeros. Its step count
    differs from the others', so it is rejected if ``known`` lacks its names.
    """
    found = [part.found_in(given) for part in parts]
    present = [own for own in found if own]
    if not present:
        return {}
    keys = set(present[0])
    called = [part.names[0] for part in parts]
    if any(set(own) != keys for own in present):
        raise ValueError(
            "Differing optimizer state names for the unflattened parameters "
            f"{called}: {[sorted(own) for own in present]}"
        )
    result: State = {}
    for key in sorted(keys):
        values = [own[key] for own in present]
        spreads = {isinstance(v, torch.Tensor) and v.ndim > 0 for v in values}
        if len(spreads) > 1:
            raise ValueError(
                f"Differing optimizer state types for state {key!r} of the unflattened parameters "
                f"{called}"
            )
        if spreads.pop():
            shard = parts[0].group.buffer.shard
            line = torch.zeros(shard.numel(), dtype=values[0].dtype, device=shard.device)
            pairs = zip(parts, found, strict=True)
            elements = (_own_part(part, own[key]) if own else None for part, own in pairs)
            result[key] = join(parts, elements, line)
            continue
        lacks = known is not None and any(
            not any(name in known for name in part.names) for part in parts
        )
        if lacks or any(packed(value) != packed(values[0]) for value in values):
            having = [part.names[0] for part, own in zip(parts, found, strict=True) if own]
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have scalar "
                f"state with the same value and dtype, found {values} for state {key!r} of "
                f"{having} among {called}. With use_orig_params=True each parameter has its own"
            )
        result[key] = copy.deepcopy(values[0])
    return result


def _groups_to_load(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    names: Mapping[nn.Parameter, tuple[str, ...]],
    position: Mapping[nn.Parameter, int],
    *,
    is_strict: bool,
) -> list[dict[str, Any]]:
    """List the settings of each group of the optimizer, as saved with its first parameter."""
    saved = {
        clean_name(str(name)): group for group in state["param_groups"] for name in group["params"]
    }
    found: list[dict[str, Any]] = []
    for group in groups:
        own = [name for p in group["params"] for name in _known(names, p)]
        source = next((saved[name] for name in own if name in saved), group)
        listed = [
            position[p]
            for p in group["params"]
            if not is_strict or any(name in saved for name in names[p])
        ]
        found.append({**source, "params": listed})
    return found
