"""Tied parameters: copies of one parameter in several stages (holders), whose gradients are summed.

After its row, each holder sends the others its gradient of this step, and each sums them in the
order of stages, so that all get the same bits. This must follow the last weight half of every
holder and precede the reduction over data-parallel ranks, because holders may be sharded
differently. It comes after the row because a rank that waited for another holder any earlier could
deadlock with it. Gradients of earlier steps, already summed, are set aside meanwhile. In the first
step the owner sends its values to the other holders.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import dtensor_like, is_dtensor, known_at_rest, local_of
from meshwright.errors import LayoutError, PipeliningShapeError
from meshwright.pipelining.edges import Tie
from meshwright.pipelining.p2p import P2PTransfers
from meshwright.pipelining.residency import Residencies, computing
from meshwright.pipelining.signature import digest
from meshwright.torch_internals.modules import CHECKPOINTED, COMPILED, WRAPPED
from meshwright.torch_internals.tensors import is_traceable_wrapper_subclass

_WRAPPERS = ("module", WRAPPED, COMPILED, CHECKPOINTED)
"""Name components that wrappers add to the name of a parameter."""
_FROZEN = -1
"""Sent in place of the gradient of a frozen parameter."""


def copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Copy a parameter with the attributes that were set on it; hooks stay with the original."""
    copied = copy.deepcopy(parameter, own_copies([parameter]))
    vars(copied).update(vars(parameter))
    return copied


def own_copies(tensors: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Copy those of ``tensors`` that ``copy.deepcopy`` cannot; returns its memo.

    These are subclasses that neither define ``__deepcopy__`` nor are traceable wrappers. Raises
    TypeError for one whose ``clone()`` has another class.
    """
    memo: dict[int, Any] = {}
    for tensor in tensors:
        kind = type(tensor)
        is_plain = kind is torch.Tensor or nn.Parameter in kind.__mro__
        if is_plain or kind.__deepcopy__ is not torch.Tensor.__deepcopy__:
            continue
        if is_traceable_wrapper_subclass(tensor):
            continue
        found = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if type(found) is not kind:
            raise TypeError(
                f"a tensor of class {kind.__name__} cannot be copied: clone() gives a "
                f"{type(found).__name__}. Give the class a __deepcopy__"
            )
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, tensor.requires_grad)
        vars(found).update(vars(tensor))
        memo[id(tensor)] = found
    return memo


def tied_pairs(ties: Iterable[Tie]) -> set[tuple[int, int]]:
    """The pairs of stages that share a parameter, in both orders."""
    return {
        (one, other)
        for tie in ties
        for one, _ in tie.names
        for other, _ in tie.names
        if one != other
    }


@dataclass(slots=True, eq=False)
class _TiedParameter:
    """A tie with the parameters of this rank."""

    tie: Tie
    places: dict[int, tuple[nn.Module, str]]
    """By stage of this rank, the module that has the parameter, and its name there."""
    parameters: dict[int, torch.Tensor]
    """By stage of this rank, the tensor that forwards use, whose gradient is local."""
    before: dict[int, torch.Tensor | None]
    """By stage of this rank, the gradient of earlier steps."""


class TiedParameters:
    """The tied parameters of the stages of one rank.

    Raises ``ValueError`` for ties whose stages or parameters do not exist, and for a parameter of
    several stages of this rank whose gradient would be summed twice.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        stage_ranks: Sequence[int],
        residencies: Mapping[int, Residencies],
        *,
        trains: bool,
    ) -> None:
        """``modules`` are this rank's, by stage; ``stage_ranks`` gives the rank of each stage."""
        self._residencies = residencies
        self._held: list[_TiedParameter] = []
        self._is_open = False
        self._has_values = False
        for tie in ties:
            _check(tie, len(stage_ranks))
            places = {
                stage: _place(modules[stage], stage, name, residencies[stage])
                for stage, name in tie.names
                if stage in modules
            }
            if places:
                self._held.append(_TiedParameter(tie, places, {}, {}))
        self._look_up()
        if trains:
            self._check_owners()
            _check_replicas(modules, residencies)
        pairs = tied_pairs(held.tie for held in self._held)
        mine = [pair for pair in pairs if pair[0] in modules and pair[1] not in modules]
        # One order for all ranks, so that exchanges never wait in a circle.
        self._peers = sorted(mine, key=lambda pair: (min(pair), max(pair)))
        """(stage of this rank, stage of another) for each pair that shares a parameter."""
        self.stages = frozenset(stage for held in self._held for stage in held.parameters)
        """Stages of this rank that hold tied parameters."""

    def _look_up(self) -> None:
        """Look up the tensors that forwards use, which may differ from step to step."""
        for held in self._held:
            for stage, (module, name) in held.places.items():
                found = computing(self._residencies[stage], module, name)
                if found is None:
                    raise ValueError(f"stage {stage} has lost its parameter {name!r}")
                held.parameters[stage] = found

    def _check_owners(self) -> None:
        """Raise ``ValueError`` where stages of this rank hold one object, not copies."""
        for held in self._held:
            trained = [id(p) for p in held.parameters.values() if p.requires_grad]
            if len({*trained}) < len(trained):
                raise ValueError(
                    f"stages {list(held.places)} of this rank hold one object as parameter "
                    f"{dict(held.tie.names)[min(held.places)]!r}, and {held.tie} would add its "
                    "gradient once for each: give each stage a copy (copy.deepcopy of the module, "
                    "before it is wrapped), or leave all but one of them out of the tie"
                )

    # -------------------------------------------------------------------------- steps

    def begin(self) -> None:
        """Begin a training step: put the gradients of earlier ones aside."""
        self._look_up()
        self._check_owners()
        for held in self._held:
            # Else `add_up` would sum what earlier steps have summed already.
            held.before = {stage: _gradient(p) for stage, p in held.parameters.items()}
            for parameter in held.parameters.values():
                parameter.grad = None
        self._is_open = bool(self._held)

    def restore(self) -> None:
        """Restore the gradients of earlier steps after a step that failed."""
        if self._is_open:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        for held in self._held:
            for stage, parameter in held.parameters.items():
                before, now = held.before.pop(stage, None), _gradient(parameter)
                if before is not None and now is not None:
                    before += now
                if before is not None:
                    _set_gradient(parameter, before)

    def send_values(self, wire: P2PTransfers) -> None:
        """Send the owner's values to the other holders, until a training step has succeeded."""
        if self._has_values or not self._held:
            return
        gathered = [each for stage in sorted(self.stages) for each in self._residencies[stage]]
        for residency in gathered:
            residency.unshard()
            residency.wait_unshard()
        self._look_up()
        self._exchange_values(wire)
        wire.finish()  # sends read gathered parameters, whose memory `reshard` frees
        for held in self._held:
            for stage, place in held.places.items():
                if stage != held.tie.owner:
                    for residency in self._residencies[stage]:
                        residency.written(*place)
        for residency in gathered:
            residency.reshard()

    def _exchange_values(self, wire: P2PTransfers) -> None:
        for mine, other in self._peers:
            shared = self._shared(mine, other)
            given = [held for held in shared if held.tie.owner == mine]
            taken = [held for held in shared if held.tie.owner == other]
            if given:
                values = [local_of(held.parameters[mine]).detach() for held in given]
                _send(wire, mine, other, given, values)
            for held, value in zip(taken, _receive(wire, other, mine, taken), strict=True):
                if isinstance(value, torch.Tensor):
                    for parameter in held.parameters.values():
                        local_of(parameter).detach().copy_(value)
        for held in self._held:
            own = held.parameters.get(held.tie.owner)
            for parameter in held.parameters.values():
                if own is not None and parameter is not own:
                    local_of(parameter).detach().copy_(local_of(own).detach())

    def add_up(self, wire: P2PTransfers) -> None:
        """Sum the gradients of this step over all holders, and add them to those of earlier ones.

        If the owner's copy is frozen, all holders drop their gradients.

        Raises `PipeliningShapeError` when a parameter differs among its holders, `LayoutError` when
        another holder has frozen what its owner trains.
        """
        if not self._is_open:
            return
        parts = [
            {stage: g for stage, p in held.parameters.items() if (g := _gradient(p)) is not None}
            for held in self._held
        ]
        frozen = [
            {stage for stage, p in held.parameters.items() if not p.requires_grad}
            for held in self._held
        ]
        for mine, other in self._peers:
            shared = self._shared(mine, other)
            places = [self._held.index(held) for held in shared]
            given = [
                _FROZEN if mine in frozen[place] else parts[place].get(mine) for place in places
            ]
            _send(wire, mine, other, shared, given)
            found = _receive(wire, other, mine, shared)
            for place, gradient in zip(places, found, strict=True):
                if isinstance(gradient, torch.Tensor):
                    parts[place][other] = gradient
                elif gradient is not None:
                    frozen[place].add(other)
        wire.finish()  # sends read gradients whose memory the reductions overwrite
        for held, gradients, still in zip(self._held, parts, frozen, strict=True):
            if held.tie.owner in still:
                gradients.clear()
                for parameter in held.parameters.values():
                    parameter.grad = None
            elif still:
                stage, names = min(still), dict(held.tie.names)
                raise LayoutError(
                    f"parameter {names[held.tie.owner]!r} trains in stage {held.tie.owner}, and "
                    f"its copy {names[stage]!r} in stage {stage} is frozen, so that a part of its "
                    "gradient would be missing: freeze it under both names, or under none"
                )
            self._set_sum(held, gradients)
        self._close()
        self._has_values = True

    def _set_sum(self, held: _TiedParameter, parts: Mapping[int, torch.Tensor]) -> None:
        if not parts:
            return
        first, *rest = (parts[stage] for stage in sorted(parts))
        total = first.clone()
        for part in rest:
            total += part
        # A tensor for each holder: later steps add to `.grad` in place.
        for number, parameter in enumerate(held.parameters.values()):
            _set_gradient(parameter, total.clone() if number else total)

    # ----------------------------------------------------------------------- messages

    def _shared(self, stage: int, other: int) -> list[_TiedParameter]:
        """List the ties that two stages share, in the order of the ties, which both ranks know."""
        return [
            held
            for held in self._held
            if {stage, other} <= {holder for holder, _ in held.tie.names}
        ]


def _send(
    wire: P2PTransfers,
    stage: int,
    target: int,
    shared: Sequence[_TiedParameter],
    tensors: Sequence[torch.Tensor | int | None],
) -> None:
    """Send a tensor for each of ``shared``, after a message that says which there are."""
    facts = [
        _facts(each, held.parameters[stage]) if isinstance(each, torch.Tensor) else each or 0
        for held, each in zip(shared, tensors, strict=True)
    ]
    wire.tell(facts, stage, target)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            wire.send_tied(tensor, stage, target)


def _receive(
    wire: P2PTransfers, stage: int, target: int, shared: Sequence[_TiedParameter]
) -> list[torch.Tensor | int | None]:
    if not shared:
        return []
    found: list[torch.Tensor | int | None] = []
    for held, fact in zip(shared, wire.hear(len(shared), stage), strict=True):
        if fact in (0, _FROZEN):
            found.append(fact or None)
            continue
        mine = held.parameters[target]
        buffer = torch.empty_like(local_of(mine), memory_format=torch.contiguous_format)
        if fact != _facts(buffer, mine):
            names = dict(held.tie.names)
            raise PipeliningShapeError(
                f"the tied parameter {names[target]!r} of stage {target} has shape "
                f"{list(buffer.shape)} and {buffer.dtype}, and {names[stage]!r} of stage {stage} "
                "another shape, dtype or placement: holders of a tie must be copies of one "
                "parameter"
            )
        wire.recv_tied(buffer, stage)
        found.append(buffer)
    return found


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient, which all holders place alike on axis tensor."""
    return None if parameter.grad is None else local_of(parameter.grad)


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = dtensor_like(gradient, parameter) if is_dtensor(parameter) else gradient


def _facts(tensor: torch.Tensor, parameter: torch.Tensor) -> int:
    """A digest of shape, dtype and placements, which sender and receiver compare."""
    placed: list[str] = []
    if (rest := known_at_rest(parameter)) is not None:
        cuts = zip(rest.mesh.shape, rest.placements, strict=True)
        placed = [str(placement) for size, placement in cuts if size > 1]
    return digest(list(tensor.shape), str(tensor.dtype), placed)


def counted(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> list[nn.Parameter]:
    """List the parameters of stages without copies of what another stage owns."""
    copies = {
        id(_parameter(modules[stage], stage, name))
        for tie in ties
        for stage, name in tie.names
        if stage in modules and stage != tie.owner
    }
    every = [parameter for module in modules.values() for parameter in module.parameters()]
    return [parameter for parameter in every if id(parameter) not in copies]


def _check(tie: Tie, stages: int) -> None:
    holders = [stage for stage, _ in tie.names]
    wrong = [stage for stage in holders if not 0 <= stage < stages]
    if wrong or tie.owner not in holders or len(set(holders)) != len(holders):
        raise ValueError(
            f"expected a tie of different stages below {stages}, one of them its owner, found "
            f"{tie}: for one stage share the parameter itself"
        )


def _check_replicas(
    modules: Mapping[int, nn.Module], residencies: Mapping[int, Residencies]
) -> None:
    """Raise ``ValueError`` for a parameter that replicas of several stages would each reduce."""
    seen: dict[int, int] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters() if residencies[stage] else ():
            if not parameter.requires_grad:
                continue
            first = seen.setdefault(id(parameter), stage)
            if first != stage and not {*residencies[first]} & {*residencies[stage]}:
                raise ValueError(
                    f"stages {first} and {stage} of this rank share parameter {name!r}, which the "
                    "data-parallel module of each stage would reduce: give each stage a copy "
                    "(copy.deepcopy of the module, before it is wrapped), and name both in ties="
                )


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    for found, parameter in module.named_parameters(remove_duplicate=False):
        if _unwrapped(found) == name:
            return parameter
    raise _missing(stage, name)


def _place(
    module: nn.Module, stage: int, name: str, residencies: Residencies
) -> tuple[nn.Module, str]:
    """Return the module that has the parameter called ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    for found, part in module.named_modules(remove_duplicate=False):
        if _unwrapped(found) == path and computing(residencies, part, leaf) is not None:
            return part, leaf
    raise _missing(stage, name)


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _missing(stage: int, name: str) -> ValueError:
    return ValueError(f"stage {stage} has no parameter {name!r}, which it should hold for a tie")
