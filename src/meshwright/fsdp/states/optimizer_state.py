"""Optimizer state under the names of parameters: taken apart, put together, and loaded.

State of a flat parameter, and of an original one that is sharded, has the form of the shard. It is
split into parameters on the way out, and put together on the way in::

    optimizer          {0: {"exp_avg": (17,), "step": ()}}            positions, this rank's shards
    optim_state_dict   {"first.weight": {"exp_avg": (7, 5), "step": ()}, "first.bias": ...}

State of parameters that no unit manages passes as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator, communicator, settle
from meshwright.comm.dtensors.gather_dtensor import whole as gathered
from meshwright.comm.dtensors.gather_dtensor import without_chunks
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.fsdp.exposures.exposure import flat_layout, own_pieces
from meshwright.fsdp.exposures.tensor_axes import part_of, whole_of, whole_shape
from meshwright.fsdp.options import (
    FullOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from meshwright.fsdp.states.full_parameters import cut_line, gather_line
from meshwright.fsdp.states.optimizer_exchange import (
    MADE,
    OWN,
    Held,
    Managed,
    exchange,
    from_first_rank,
    has_state,
    is_scalar,
    managed_parameters,
    names_by_parameter,
    packed,
    state_of_zero_steps,
    unpacked,
    with_gathered,
)
from meshwright.fsdp.states.state_dicts import as_dtensor, copy_of, sharded_value
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import wrappers_in

State = dict[str, Any]
"""The state of one parameter."""

# ------------------------------------------------------------------------------------- out


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: StateDictSettings,
    given: Mapping[str, Any] | None = None,
    group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
) -> dict[str, Any]:
    """State and groups of ``optimizer`` by name; a collective over the shards for FULL.

    LOCAL is as SHARDED: each value is this rank's part; there an optimizer that has not stepped
    has the state of zero steps. ``group`` says which rank is the first.
    """
    settle()
    _check_local(model, settings.state_dict_type)
    names = names_by_parameter(model)
    state, groups = _by_parameter(optimizer, given)
    entries = managed_parameters(model)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    kind = OWN
    if given is None and not any(state.values()) and not (is_full or settings.shares):
        # Checkpoints load into what they are given: without a state that of the file is dropped.
        kind, state = MADE, dict(state_of_zero_steps(optimizer))
    is_agreed = is_full or any(entry.wrapper._groups.mesh is not None for entry in entries)
    offloads = settings.optim_state_dict_config.offload_to_cpu
    form = _Form(is_full=is_full, offloads=offloads, shares=settings.shares)
    parts = _take_apart(entries, state, form, is_agreed=is_agreed, kind=kind)
    found = {entry.names[0]: own for entry, own in parts if own}
    managed = {entry.exposed for entry in entries}
    for parameter, own in state.items():
        if parameter not in managed:
            (name,) = _known(names, parameter)
            found[name] = {k: _copied(v, offloads=offloads) for k, v in own.items()}
    if _is_rank0_only(settings) and communicator(group).rank != 0:
        return {}
    if given is not None and "param_groups" not in given:
        return {"state": found}
    return {"state": found, "param_groups": [_named_group(group, names) for group in groups]}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The form of the values that a parameter's state is given in."""

    is_full: bool
    offloads: bool
    """True for copies on the CPU."""
    shares: bool
    """True for the optimizer's own memory, of what is spread over the ranks."""

    def of(self, value: torch.Tensor) -> torch.Tensor:
        return copy_of(value, offloads=self.offloads, shares=self.shares)


def _by_parameter(
    optimizer: torch.optim.Optimizer, given: Mapping[str, Any] | None
) -> tuple[dict[nn.Parameter, State], list[dict[str, Any]]]:
    """State by parameter, and groups that hold parameters: of the optimizer, or of its dict."""
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
    """List what stands for the parameters in a state dict of an optimizer, in order."""
    return [key for group in given["param_groups"] for key in group["params"]]


def _named_group(
    group: Mapping[str, Any], names: Mapping[nn.Parameter, tuple[str, ...]]
) -> dict[str, Any]:
    listed = [name for parameter in group["params"] for name in _known(names, parameter)]
    return {**group, "params": listed}


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
    """Bring what ``optimizer.state_dict()`` returned into the shapes of the whole parameters.

    Whole tensors, or this rank's parts. All ranks have the same keys: those of positions stay. Of
    each flat parameter, by its position, the state of its parameters by name is beside it.
    ``kind`` is that of this rank's state. A collective over the shards.
    """
    state, _ = _by_parameter(optimizer, given)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    keys = dict(zip(listed, _keys(given), strict=True))
    entries = [entry for entry in managed_parameters(model) if entry.exposed in keys]
    for entry in entries:
        _check_form(entry, state.get(entry.exposed, {}))
    form = _Form(is_full=is_full, offloads=False, shares=False)
    parts: dict[Any, dict[str, State]] = {}
    for entry, own in _take_apart(entries, state, form, is_agreed=True, kind=kind):
        if entry.is_flat:
            parts.setdefault(keys[entry.exposed], {})[entry.names[0]] = own
        state.pop(entry.exposed, None)
        if own and not entry.is_flat:
            state[entry.exposed] = own
    found = {keys[parameter]: own for parameter, own in state.items()}
    return {**given, "state": found}, parts


def _check_form(entry: Managed, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        is_plain = not isinstance(value, torch.Tensor) or value.ndim == 0
        if not is_plain and not _is_shard_like(value, entry.exposed.shape):
            raise ValueError(
                f"Tensor optimizer state does not have same shape as its parameter: {key!r} of "
                f"{entry.names[0]} has shape {tuple(value.shape)}, this rank's part "
                f"{tuple(entry.exposed.shape)}. What it is of the whole parameter is not known"
            )


def _take_apart(
    entries: Sequence[Managed],
    state: Mapping[nn.Parameter, State],
    form: _Form,
    *,
    is_agreed: bool,
    kind: int = OWN,
) -> list[tuple[Managed, State]]:
    """List the state of each parameter, if any rank has some; ``is_agreed`` asks the others.

    Parts are DTensors where a mesh was given, a collective.
    """
    held = [_held(entry, state.get(entry.exposed), kind) for entry in entries]
    answers: list[list[Held] | None] = [None] * len(entries)
    if is_agreed:
        by_shard: dict[Communicator, list[int]] = {}
        for number, entry in enumerate(entries):
            shard = entry.group.axes.shard
            if shard is not None:
                by_shard.setdefault(shard, []).append(number)
        for shard, numbers in by_shard.items():
            found = exchange(shard, [held[number] for number in numbers])
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
    return [
        (entry, _own_state(entry, state.get(entry.exposed), answer, form))
        for entry, answer in zip(entries, answers, strict=True)
    ]


def _held(entry: Managed, own: State | None, kind: int) -> Held:
    """Describe one parameter for the other ranks."""
    shape = entry.exposed.shape
    held = own or {}
    spread = {
        k: str(v.dtype).removeprefix("torch.") for k, v in held.items() if _is_shard_like(v, shape)
    }
    rest = {k: v for k, v in held.items() if k not in spread} if _counts(entry) else {}
    if not _gives(entry):
        rest = {k: v for k, v in rest.items() if is_scalar(v)}
    return (kind if own else 0), spread, rest


def _gives(entry: Managed) -> bool:
    """Whether this rank, the first with elements, sends unsharded state to ranks without any."""
    layout, axes = flat_layout(entry.group), entry.group.axes
    (start, stop), (_, size) = layout.range(entry.index), layout.shard_range(0)
    if entry.is_flat or start == stop:  # every rank has all of one without elements
        return False
    first, last = start // size, (stop - 1) // size
    return axes.part == first and last - first + 1 < axes.parts


def _counts(entry: Managed) -> bool:
    # A rank without elements that others have gets no gradients: what it counts stands still.
    return entry.is_flat or entry.index in own_pieces(entry.group)


def _own_state(
    entry: Managed,
    own: State | None,
    answers: Sequence[Held] | None,
    form: _Form,
) -> State:
    """The state of one parameter; without ``answers`` only what this rank has elements of."""
    held, shape = own or {}, entry.exposed.shape
    spread = {k: v.dtype for k, v in held.items() if _is_shard_like(v, shape)}
    # Copies: several parameters share the counter of their flat one, and optimizers change it.
    rest = {k: v for k, v in held.items() if k not in spread}
    result: State = {k: _copied(v, offloads=form.offloads) for k, v in rest.items()}
    counts = _counts(entry)
    if answers is not None:
        if not has_state(answers):
            return {}
        found: State = {} if counts else result
        for _, dtypes, rests in reversed(answers):
            spread = {**spread, **{k: getattr(torch, name) for k, name in dtypes.items()}}
            found = {**found, **{k: unpacked(v) for k, v in rests.items()}}
        result = {**result, **found}
    elif own is None or not counts:
        return {}
    for key in sorted(spread):
        result[key] = _spread_value(entry, held.get(key), spread[key], form)
    return dict(sorted(result.items()))


def _is_shard_like(value: object, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == shape


def _spread_value(
    entry: Managed,
    value: torch.Tensor | None,
    dtype: torch.dtype,
    form: _Form,
) -> torch.Tensor:
    """The state of one parameter whose parts are spread like its shards."""
    group, index = entry.group, entry.index
    piece, shard = own_pieces(group).get(index), group.buffer.shard
    local = torch.empty(0, dtype=dtype, device=shard.device if value is None else value.device)
    if piece is not None and value is not None:
        flat = value.reshape(-1)
        local = flat[piece.offset : piece.offset + piece.numel] if entry.is_flat else flat
    outer, is_cut = group.slots[index].outer, group.axes.shard is not None
    has_mesh = entry.wrapper._groups.mesh is not None
    gives_part = form.shares or not (form.is_full or has_mesh)
    if gives_part and (is_cut or outer is not None):
        return sharded_value(group, index, form.of(local), entry.names[0])
    if not is_cut:
        part = local.reshape(flat_layout(group).shapes[index])
        return form.of(whole_of(part, outer, f"optimizer state {entry.names[0]}"))
    line = local.new_zeros(shard.numel())
    if piece is not None and local.numel():
        line[piece.offset : piece.offset + piece.numel].copy_(local)
    label = f"optimizer state {entry.names[0]}"
    part = cut_line(group, gather_line(group, line, label))[index]
    if form.is_full:
        return form.of(whole_of(part, outer, label))
    found = as_dtensor(part, entry.wrapper._groups, outer, label)
    return found.cpu() if form.offloads else found


def _copied(value: Any, *, offloads: bool) -> Any:  # noqa: ANN401 - any state
    is_tensor = isinstance(value, torch.Tensor)
    return copy_of(value, offloads=offloads) if is_tensor else copy.deepcopy(value)


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
    """Make what an optimizer with ``groups`` loads: positions, and this rank's parts.

    Where only the first rank of ``group`` gets state dicts, it gives its own to the others. Of a
    parameter without elements on this rank there is state only if the optimizer has ``held`` some.
    With ``is_strict`` groups name no parameter that those of ``state`` do not, and parameters of
    one flat parameter count alike: one that ``state`` lacks does not.
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
    flats: dict[nn.Parameter, list[Managed]] = {}
    managed = managed_parameters(model)
    exposed = {entry.exposed for entry in managed}
    for parameter in position:
        _known(names, parameter)
    others = {names[parameter][0]: parameter for parameter in position if parameter not in exposed}
    given, known = _fitting(model, given, _misfits(given, managed, others), settings, group)
    for entry in managed:
        if entry.is_flat:
            flats.setdefault(entry.exposed, []).append(entry)
            continue
        own = next((given[name] for name in entry.names if name in given), None)
        if own is not None and entry.exposed in position:
            # By all ranks: DTensors are gathered.
            parts = {k: _own_part(entry, v, shares=settings.shares) for k, v in own.items()}
            if _counts(entry) or entry.exposed in held:
                found[position[entry.exposed]] = parts
    for flat, entries in flats.items():
        if flat in position:
            own = _put_together(entries, given, known if is_strict else None, takes=settings.shares)
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
    given: Mapping[str, State], managed: Sequence[Managed], others: Container[str]
) -> list[str]:
    """List the names of state whose views hold other elements than this rank has to load."""
    entries = {name: entry for entry in managed for name in entry.names}

    def fits(name: str, value: object) -> bool:
        if not isinstance(value, ShardView):
            return True
        if name not in entries:
            return name not in others
        piece = own_pieces(entries[name].group).get(entries[name].index)
        begin, count = (0, 0) if piece is None else (piece.start, piece.numel)
        return value.local.numel() == count and (value.start == begin or not count)

    return [n for n, own in given.items() if not all(fits(n, value) for value in own.values())]


def _fitting(
    model: nn.Module,
    given: dict[str, State],
    misfits: Sequence[str],
    settings: StateDictSettings,
    group: Any,  # noqa: ANN401 - c10d's types stay in comm
) -> tuple[Mapping[str, Mapping[str, Any]], set[str]]:
    """State that is whole under the names that do not fit on some rank, and all ranks' names."""
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


def _own_part(entry: Managed, value: Any, *, shares: bool = False) -> Any:  # noqa: ANN401 - any state
    """This rank's part of a value, in the form of the exposed parameter.

    Where it ``shares`` the memory of a view becomes the optimizer's.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return copy.deepcopy(value)
    outer = entry.group.slots[entry.index].outer
    local = flat_layout(entry.group).shapes[entry.index]
    shape = whole_shape(local, outer)
    if tuple(value.shape) != shape:
        raise ValueError(
            "Tensor optimizer state does not have same shape as its parameter: expected "
            f"{shape} for {entry.names[0]}, found {tuple(value.shape)}"
        )
    if isinstance(value, ShardView):
        part = copy_of(value.local, shares=shares)  # it fits
    else:
        piece = own_pieces(entry.group).get(entry.index)
        flat = part_of(gathered(value, label=f"whole state of {entry.names[0]}"), outer).reshape(-1)
        part = flat[:0] if piece is None else flat[piece.start : piece.stop]
        if not shares or part.numel() < flat.numel():
            part = part.clone()
    return part.view(local) if entry.group.axes.shard is None and not entry.is_flat else part


def _put_together(
    entries: Sequence[Managed],
    given: Mapping[str, Mapping[str, Any]],
    known: Container[str] | None,
    *,
    takes: bool,
) -> State:
    """The state of a flat parameter, from that of all its parameters.

    A parameter without state has had no gradients: its elements of the line are zeros. Its count
    of steps differs from the others', so it is rejected where ``known`` lacks its names. ``takes``
    pops from ``given`` what is in the line, so that no rank holds all of it twice.
    """
    found = [next((given[n] for n in e.names if n in given), None) for e in entries]
    present = [own for own in found if own]
    if not present:
        return {}
    keys = set(present[0])
    called = [entry.names[0] for entry in entries]
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
            del values
            result[key] = _line_of(entries, key, found, takes=takes)
            continue
        lacks = known is not None and any(
            not any(name in known for name in entry.names) for entry in entries
        )
        if lacks or any(packed(value) != packed(values[0]) for value in values):
            having = [entry.names[0] for entry, own in zip(entries, found, strict=True) if own]
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have scalar "
                f"state with the same value and dtype, found {values} for state {key!r} of "
                f"{having} among {called}. With use_orig_params=True each parameter has its own"
            )
        result[key] = copy.deepcopy(values[0])
    return result


def _line_of(
    entries: Sequence[Managed], key: str, found: Sequence[Any], *, takes: bool
) -> torch.Tensor:
    group = entries[0].group
    pieces, shard = own_pieces(group), group.buffer.shard
    dtype = next(own[key].dtype for own in found if own)
    line = torch.zeros(shard.numel(), dtype=dtype, device=shard.device)
    for entry, own in zip(entries, found, strict=True):
        if not own:
            continue
        part = _own_part(entry, own.pop(key) if takes else own[key], shares=True)
        piece = pieces.get(entry.index)
        if piece is not None:
            line[piece.offset : piece.offset + piece.numel].copy_(part.reshape(-1))
    return line


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
