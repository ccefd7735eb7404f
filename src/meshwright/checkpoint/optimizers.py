"""The state of an optimizer by the names of its parameters, independent of their order.

torch numbers parameters in the order in which an optimizer got them; in another program, or after
layers moved, a parameter would get the moments of another. Here each state is keyed by the
parameter's name, and a mismatch is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm.dtensors.dtensor import is_dtensor, local_of
from meshwright.errors import CheckpointMismatchError


def optimizer_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, object]:
    """Return ``{"state": {name: {...}}, "param_groups": [{"params": [names], "lr": ...}]}``.

    ``flatten`` turns it into named tensors and JSON. Tensors are the optimizer's own, not copies.
    Raises ``ValueError`` for a parameter of the optimizer without a name.
    """
    names = _names(optimizer, named_parameters)
    packed = optimizer.state_dict()
    state = {names[index]: dict(packed["state"][index]) for index in sorted(packed["state"])}
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    for group in groups:
        group.pop("param_names", None)  # torch's names, of the wrapped model; each optimizer's own
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    saved: object,
    *,
    copies: bool = True,
) -> None:
    """Load the state that ``optimizer_state`` returned, by name and without any cast.

    Without ``copies`` the tensors of ``saved`` become the optimizer's own.

    Raises ``CheckpointMismatchError`` listing every parameter that is missing, unknown or in
    another group, before anything is changed.
    """
    names = _names(optimizer, named_parameters)
    state, groups = _checked(saved)
    packed = optimizer.state_dict()
    mine = [[names[index] for index in group["params"]] for group in packed["param_groups"]]
    listed = [[str(name) for name in cast("list[object]", g["params"])] for g in groups]
    problems = differing_groups(mine, listed)
    known = {name for names in listed for name in names}
    problems += [f"{name!r} has state but no group" for name in sorted(state.keys() - known)]
    if problems:
        raise CheckpointMismatchError(
            "\n  ".join(["the saved optimizer does not fit this one:", *problems])
        )
    index_of = {name: index for index, name in enumerate(names)}
    own_groups = [
        {**saved_group, "params": group["params"]}
        for group, saved_group in zip(packed["param_groups"], groups, strict=True)
    ]
    own_state = {index_of[name]: dict(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})
    _restore_as_saved(optimizer, names, state, copies=copies)


def _names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """List the name of each parameter, in the order in which ``state_dict`` numbers them."""
    by_identity: dict[int, str] = {}
    for name, parameter in named_parameters:
        by_identity.setdefault(id(parameter), name)
    found: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in by_identity:
                raise ValueError(
                    f"the optimizer's parameter {len(found)} of shape {tuple(parameter.shape)} is"
                    " not among the named parameters"
                )
            found.append(by_identity[id(parameter)])
    return found


def _checked(saved: object) -> tuple[dict[str, dict[str, object]], list[dict[str, object]]]:
    """Return the two halves of a saved state; CheckpointMismatchError for other types."""
    if isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}:
        state, groups = saved["state"], saved["param_groups"]
        if (
            isinstance(state, dict)
            and isinstance(groups, list)
            and all(isinstance(values, dict) for values in state.values())
            and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        ):
            return state, groups
    raise CheckpointMismatchError(
        "expected the state of an optimizer as optimizer_state makes it"
        f" (a dict with 'state' and 'param_groups'), found {str(saved)[:80]}"
    )


def differing_groups(here: Sequence[Sequence[str]], there: Sequence[Sequence[str]]) -> list[str]:
    """Describe each parameter that is missing or in another group than in the checkpoint."""
    mine = {name: number for number, names in enumerate(here) for name in names}
    saved = {name: number for number, names in enumerate(there) for name in names}
    problems = [f"{name!r} has no saved state" for name in sorted(mine.keys() - saved.keys())]
    problems += [
        f"{name!r} is saved but not a parameter here" for name in sorted(saved.keys() - mine.keys())
    ]
    problems += [
        f"{name!r} is in group {saved[name]} in the checkpoint, in group {mine[name]} here"
        for name in sorted(mine.keys() & saved.keys())
        if mine[name] != saved[name]
    ]
    if len(here) != len(there):
        problems.append(f"{len(there)} groups in the checkpoint, {len(here)} here")
    return problems


def _restore_as_saved(
    optimizer: Optimizer, names: list[str], state: dict[str, dict[str, object]], *, copies: bool
) -> None:
    """Undo the cast to the parameter's dtype that torch's ``load_state_dict`` makes silently.

    Values of a parameter's shape also get its strides: fused steps iterate over the memory of both
    as flat arrays, and would pair wrong elements if the strides differed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    taken: set[int] = set()  # parameters may share one saved state, but need one each
    for name, parameter in zip(names, parameters, strict=True):
        own = optimizer.state[parameter] if name in state else {}
        for key, value in state.get(name, {}).items():
            loaded = own.get(key)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            is_alike = loaded.shape == parameter.shape and not is_dtensor(parameter)
            if is_alike and loaded.stride() != parameter.stride():
                like = parameter.detach().as_subclass(Tensor)
                laid = torch.empty_like(like, dtype=value.dtype, device=loaded.device)
                own[key] = laid.copy_(value)
            elif loaded.dtype != value.dtype:
                own[key] = value.to(loaded.device, copy=True)
            elif loaded.data_ptr() == value.data_ptr():
                place = local_of(loaded).data_ptr()
                if copies or place in taken or _is_of_more(loaded):
                    own[key] = torch.clone(loaded)
                taken.add(place)


def _is_of_more(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of larger memory, which it would keep alive."""
    return type(tensor) is Tensor and tensor.untyped_storage().nbytes() > tensor.nbytes
