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

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.dtensor import known_at_rest, mesh_communicators, torch_placements
from meshwright.comm.process_groups import peers
from meshwright.layout import Shard
from meshwright.torch_internals.distributed import root_mesh

_MESH = "_meshwright_exchanged_over"


def exchange_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Note that ``module`` exchanges samples over ``mesh``, which has one dim."""
    vars(module)[_MESH] = mesh


def exchanged_over(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which ``module`` exchanges samples, or None."""
    return getattr(module, _MESH, None)


@dataclass(frozen=True, slots=True)
class Experts:
    """The ranks of the experts of one exchange, among those of the data axes."""

    exchange: Communicator
    """Its ranks hold other experts, and the gradient of each is a sum over all of them."""
    holders: Communicator
    """The data axes without ``exchange``: its ranks hold the same experts."""
    alike: tuple[int, ...]
    """For each rank of the data axes the position there of the first that holds the same."""


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
        where = f"module {path!r} exchanges samples over axis {exchange.axis!r}"
        if away := sorted({*exchange.ranks} - {*data.ranks}):
            raise ValueError(
                f"{where}, ranks {list(exchange.ranks)}, and axis {data.axis!r}, over which "
                f"gradients become means, has ranks {list(data.ranks)}: those of the samples of "
                f"ranks {away} would be left out. Pass all ranks with samples of their own, for "
                f'example mesh["replicate", {exchange.axis!r}]._flatten("dense")'
            )
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) not in reduced:
                continue
            known = known_at_rest(parameter)
            wanted = torch_placements([Shard(0)])
            if known is None or known.mesh != mesh or known.placements != wanted:
                lies = "a plain tensor" if known is None else f"{known.placements} on {known.mesh}"
                raise ValueError(
                    f"{where}: expected parameter {name!r} of it to be a DTensor placed (Shard(0),) "
                    f"on {mesh}, found {lies}. Split the experts before the model is replicated, "
                    "and give other parameters a module of their own"
                )
            found[id(parameter)] = mesh
    return found


def experts_among(meshes: Mapping[int, DeviceMesh], data: Communicator) -> dict[int, Experts]:
    """Map the ``id`` of each parameter in ``meshes`` to its experts' ranks.

    Collective over ``data`` if there are any; makes the groups of holders that the mesh lacks.
    """
    made: dict[Communicator, Experts] = {}
    found: dict[int, Experts] = {}
    for key, mesh in meshes.items():
        (exchange,) = mesh_communicators(mesh, "expert")
        if exchange not in made:
            made[exchange] = _experts(exchange, mesh, data)
        found[key] = made[exchange]
    return found


def _experts(exchange: Communicator, mesh: DeviceMesh, data: Communicator) -> Experts:
    rows = data.gather_values(list(exchange.ranks), label=f"ranks of axis {exchange.axis}")
    lines = list(dict.fromkeys(map(tuple, rows)))
    is_even = {len(line) for line in lines} == {exchange.size}
    if not is_even or sorted(rank for line in lines for rank in line) != sorted(data.ranks):
        raise ValueError(
            f"expected axis {exchange.axis!r}, over which samples travel, to split ranks "
            f"{list(data.ranks)} evenly, found {[list(line) for line in lines]}. Take both from "
            "one mesh"
        )
    first = {rank: lines[0][place] for line in lines for place, rank in enumerate(line)}
    alike = tuple(data.ranks.index(first[rank]) for rank in data.ranks)
    ranks = sorted(line[exchange.rank] for line in lines)
    around = (each for each in mesh_communicators(root_mesh(mesh)) if sorted(each.ranks) == ranks)
    name = f"{data.axis} without {exchange.axis}"
    holders = next(around, None) or peers(data, ranks, name)
    return Experts(exchange=exchange, holders=holders, alike=alike)
