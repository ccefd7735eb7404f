"""Modules over whose mesh samples travel: experts.

Each rank of the mesh holds some rows of the module's parameters (DTensors, ``Shard(0)``), and
computes with the samples of all its ranks. So a gradient of these parameters is a sum over the
ranks of the mesh already, where that of any other parameter is this rank's summand.

::

    data axes    ranks 0 1 2 3: gradients of all other parameters are means over them
    exchange     ranks 0 1 and 2 3: one set of experts each
    holders      ranks 0 2 and 1 3: hold the same experts, which are summed over them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.dtensor import (
    AtRest,
    known_at_rest,
    mesh_beside,
    mesh_communicators,
    torch_placements,
)
from meshwright.comm.process_groups import peers
from meshwright.layout import Shard

_MESH = "_meshwright_exchanged_over"


def exchange_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Note that ``module`` exchanges samples over ``mesh``, which has one dim.

    It computes on local leaves, see `local_part_of`.
    """
    vars(module)[_MESH] = mesh


def exchanged_over(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which ``module`` exchanges samples, or None."""
    return getattr(module, _MESH, None)


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks of the experts of one exchange, among those of the data axes."""

    exchange: Communicator
    """Its ranks hold other experts, and the gradient of each is a sum over all of them."""
    holders: Communicator
    """The data axes without ``exchange``: its ranks hold the same experts."""


NO_EXPERTS: Mapping[int, ExpertRanks] = MappingProxyType({})


def check_split(name: str, known: AtRest | None, over: DeviceMesh) -> None:
    """Raise ValueError unless a parameter of a module that exchanges samples is split ``over``."""
    if (
        known is not None
        and known.mesh == over
        and known.placements == torch_placements([Shard(0)])
    ):
        return
    found = "a plain tensor" if known is None else f"placed {known.placements} on {known.mesh}"
    raise ValueError(
        f"parameter {name!r} belongs to a module that exchanges samples: expected a DTensor placed "
        f"(Shard(0),) on {over}, found {found}. Split the experts before gradients are reduced, "
        "and give other parameters a module of their own"
    )


def exchanges_below(
    module: nn.Module, reduced: Collection[int], data: Communicator
) -> dict[int, DeviceMesh]:
    """Map the ``id`` of each ``reduced`` parameter of experts to the mesh of its exchange.

    Raises ValueError, without any collective, where ``data``, over which gradients become means,
    lacks ranks that exchange samples, and for experts that are not split over these ranks.
    """
    found: dict[int, DeviceMesh] = {}
    for path, part in module.named_modules():
        mesh = exchanged_over(part)
        (exchange,) = (None,) if mesh is None else mesh_communicators(mesh, "expert")
        if mesh is None or exchange is None or exchange.is_alone:
            continue
        if away := sorted({*exchange.ranks} - {*data.ranks}):
            raise ValueError(
                f"module {path!r} exchanges samples over axis {exchange.axis!r}, ranks "
                f"{list(exchange.ranks)}, and axis {data.axis!r}, over which gradients become "
                f"means, has ranks {list(data.ranks)}: those of the samples of ranks {away} would "
                "be left out. Pass all ranks with samples of their own, for example "
                f'mesh["replicate", {exchange.axis!r}]._flatten("dense")'
            )
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in reduced:
                check_split(f"{path}.{name}".lstrip("."), known_at_rest(parameter), mesh)
                found[id(parameter)] = mesh
    return found


def experts_among(meshes: Mapping[int, DeviceMesh], data: Communicator) -> dict[int, ExpertRanks]:
    """Map the ``id`` of each parameter in ``meshes`` to its experts' ranks, all within ``data``.

    Collective over ``data`` where a group of holders has to be made.
    """
    made: dict[DeviceMesh, ExpertRanks] = {}
    for mesh in dict.fromkeys(meshes.values()):
        (exchange,) = mesh_communicators(mesh, "expert")
        left = mesh_beside(mesh, data.ranks)
        (holders,) = (
            (peers(data, [data.ranks[data.rank]], "holders"),)
            if left is None
            else mesh_communicators(left)
        )
        made[mesh] = ExpertRanks(exchange=exchange, holders=holders)
    return {key: made[mesh] for key, mesh in meshes.items()}
