"""Optimizers that need whole matrices, on parameters that ranks share: one rank steps each matrix.

::

    every rank                     the owner of a matrix                     every rank
    its part of the gradient ────> whole gradient, weight and state ───────> its part of the new
                      all-to-all   the optimizer's own step     all-to-all   weight

Owners keep whole weights between steps, so that they travel one way only. They gather those anew
whose parameter was written to: all ranks count the same writes. Digests find writes that no counter
has. Where ranks hold whole parameters, the owner steps on its own, and only weights travel.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.comm import Communicator, LateNumbers, held_boxes, union
from meshwright.comm.dtensors.dtensor import known_at_rest, local_of, mesh_communicators
from meshwright.comm.failures.sameness import require_equal
from meshwright.comm.graphs.untraced import apart
from meshwright.data_parallel.replicas.replicated import ReplicatedModule, replica_state
from meshwright.errors import LayoutError
from meshwright.gradients import digests_of, mean_axes
from meshwright.gradients.optimizers import OWNED, check_ownable
from meshwright.layout import Box
from meshwright.torch_internals.tensors import foreach_copy_, local_tensor_of, version_of

_log = logging.getLogger(__name__)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Matrix:
    """A parameter that several ranks hold, whole or cut, and that one of them steps."""

    axis: Communicator
    name: str
    parameter: nn.Parameter
    owner: int
    is_here: bool
    is_cut: bool
    whole: nn.Parameter | None = None
    version: int = -1
    """That of the parameter when ``whole`` had its values."""
    digest: torch.Tensor | None = None
    """The bits of this rank's part then."""

    @property
    def is_old(self) -> bool:
        return self.version != version_of(self.parameter)

    def stepped(self) -> nn.Parameter:
        """Return what the owner steps on: whole, in memory of its own if the parameter is cut."""
        local = local_of(self.parameter)
        if local is self.parameter:
            return self.parameter
        if self.whole is None:
            shape = self.parameter.shape
            self.whole = nn.Parameter(local.new_empty(shape) if self.is_cut else local.detach())
        return self.whole

    def part(self, number: int, *, of_gradient: bool) -> torch.Tensor:
        """Return the ``number``-th box that this rank holds; zeros where there is no gradient."""
        like, tensor = self.parameter, self.parameter.grad if of_gradient else self.parameter
        if tensor is None:
            return torch.zeros_like(_parts(like)[number][1])
        wanted, found = ((t.dtype, getattr(t, "placements", None)) for t in (like, tensor))
        if found != wanted:
            raise LayoutError(f"{self.name!r}: expected a gradient that is {wanted}, found {found}")
        return _parts(tensor)[number][1]


_Route = tuple[_Matrix, int, int, Box]
"""A matrix, a rank that holds it, and the number and box of a part there."""


class _Exchange:
    """The matrices of one dtype that the ranks of one axis hold; they travel together."""

    def __init__(self, axis: Communicator, named: Mapping[str, nn.Parameter]) -> None:
        """Deal the matrices out, and find the routes to owners and from them. Collective."""
        self.axis = axis
        self.matrices: list[_Matrix] = []
        self.inward: list[_Route] = []
        """This rank's to owners: each element once, from ranks that differ from the owner least."""
        self.outward: list[_Route] = []
        rows = [[name, list(p.shape), str(p.dtype)] for name, p in named.items()]
        what = "the parameters of own_matrices, [name, shape, dtype],"
        require_equal(axis, rows, what, label="compare matrices", error=LayoutError)
        mine = [[[box.offset, box.shape] for box, _ in _parts(p)] for p in named.values()]
        everyones = axis.gather_values(mine, label="parts of matrices")
        owners, self.imbalance = deal([p.shape for p in named.values()], axis.size)
        for number, (name, parameter) in enumerate(named.items()):
            owner = owners[number]
            boxes = [[Box(*map(tuple, each)) for each in row[number]] for row in everyones]
            alike: dict[tuple[Box, ...], list[int]] = {}
            for rank, each in enumerate(boxes):
                alike.setdefault(tuple(each), []).append(rank)
            # Of ranks with equal boxes, those that stand where the owner stands among its equals.
            place = alike[tuple(boxes[owner])].index(owner)
            senders = {ranks[place % len(ranks)] for ranks in alike.values()}
            if sum(box.numel for r in senders for box in boxes[r]) != parameter.numel():
                raise LayoutError(f"{name!r}: ranks {axis.ranks} do not hold each element once")
            is_here = owner == axis.rank
            matrix = _Matrix(axis, name, parameter, owner, is_here, is_cut=len(alike) > 1)
            self.matrices.append(matrix)
            _owned()[id(parameter)] = matrix
            for rank in range(axis.size) if matrix.is_here else [axis.rank]:
                routes = [(matrix, rank, n, box) for n, box in enumerate(boxes[rank])]
                self.inward += routes if matrix.is_cut and rank in senders else []
                self.outward += routes if matrix.is_cut or rank != owner else []

    def move(self, routes: Iterable[_Route], label: str, *, of_gradient: bool = False) -> None:
        """Move weights or gradients to owners, or from owners if ``routes`` are `outward`."""
        me, is_in = self.axis.rank, routes is not self.outward
        going, coming = ([list[torch.Tensor]() for _ in self.axis.ranks] for _ in range(2))
        for each, holder, number, box in routes:
            held = each.part(number, of_gradient=of_gradient) if holder == me else None
            stepped: Any = each.stepped() if each.is_here else None
            stepped = stepped.grad if of_gradient and each.is_here else stepped
            whole = stepped[box.slices()] if each.is_here else None
            source, target = (held, whole) if is_in else (whole, held)
            if source is not None and target is not None:
                target.copy_(source)
            elif source is not None:
                going[each.owner if is_in else holder].append(source)
            elif target is not None:
                coming[holder if is_in else each.owner].append(target)
        to_go, to_come = ([sum(t.numel() for t in to) for to in way] for way in (going, coming))
        flat = [tensor.reshape(-1) for to in going for tensor in to]
        dtype = self.matrices[0].parameter.dtype
        found = torch.empty(sum(to_come), dtype=dtype, device=self.axis.device)
        line = torch.cat(flat).to(found.device) if flat else found.new_empty(0)
        self.axis.all_to_all(
            found, line, output_splits=to_come, input_splits=to_go, label=label
        ).wait()
        if targets := [tensor for to in coming for tensor in to]:
            parts = found.split([tensor.numel() for tensor in targets])
            foreach_copy_(targets, [p.view_as(t) for p, t in zip(parts, targets, strict=True)])

    def __str__(self) -> str:
        me = self.axis.rank
        numel = sum(box.numel for m, holder, _, box in self.inward if holder == me != m.owner)
        numel += sum(box.numel for m, holder, _, box in self.outward if m.owner == me != holder)
        sent = numel * self.matrices[0].parameter.itemsize
        return (
            f"steps each of {len(self.matrices)} matrices on one of {self.axis.size} ranks, "
            f"{sum(m.is_here for m in self.matrices)} on this one, which sends "
            f"{sent} bytes a step; the busiest has {self.imbalance:.2f} "
            "times the mean work"
        )


class OwnedMatrices:
    """The exchanges around the steps of one optimizer, between which it has its own parameters."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Deal the matrices out. ``names`` are those of parameters, by ``id``. Collective."""
        self._late = LateNumbers()
        self._given: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        """During a step, each group with the model's parameters."""
        shared: dict[object, tuple[Communicator, dict[str, nn.Parameter]]] = {}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(held):
            name = names.get(id(parameter), f"parameter {number}")
            if (axis := _axis_of(parameter, name)) is not None:
                key = axis.ranks, parameter.dtype
                shared.setdefault(key, (axis, {}))[1][name] = parameter
        self._exchanges = [_Exchange(*each) for each in shared.values()]
        kind = type(optimizer).__name__
        self.shares = [f"own_matrices: {kind} {each}" for each in self._exchanges]
        """Who has how much of the work, for each set of ranks that share matrices."""
        self._matrices = {id(m.parameter): m for each in self._exchanges for m in each.matrices}
        self._cut = [matrix for matrix in self._matrices.values() if matrix.is_cut]
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @apart
    @torch.no_grad()
    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step pre-hook: gathers gradients on owners, and puts whole matrices into the groups."""
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise TypeError("own_matrices: expected a step without closure, after the backward")
        self._put_back(optimizer)  # the step before may have raised
        self._look_for_writes()
        for matrix in self._cut:
            if matrix.is_here:
                matrix.stepped().grad = torch.empty_like(matrix.stepped())
        for each in self._exchanges:
            if any(matrix.is_cut and matrix.is_old for matrix in each.matrices):
                each.move([r for r in each.inward if r[0].is_old], "weights to owners")
            if any(matrix.is_cut for matrix in each.matrices):
                each.move(each.inward, "gradients to owners", of_gradient=True)
        for group in optimizer.param_groups:
            self._given.append((group, group["params"]))
            group["params"] = [w for p in group["params"] for w in self._stepped(p, optimizer)]

    def _stepped(self, parameter: nn.Parameter, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return what this rank steps on for ``parameter``, with its gradient and state."""
        found, state = self._matrices.get(id(parameter)), optimizer.state
        if found is None:
            return [parameter]
        if not found.is_here:
            state.pop(parameter, None)  # a state that was loaded on all ranks
            return []
        whole = found.stepped()
        if parameter.grad is None or not found.is_cut:
            whole.grad = None if parameter.grad is None else local_of(parameter.grad)
        if parameter in state:
            state[whole] = state.pop(parameter)
        return [whole]

    @apart
    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step post-hook: gives every rank its parts of the new weights."""
        self._put_back(optimizer)
        for each in self._exchanges:
            each.move(each.outward, "weights from owners")
        for matrix, digest in zip(self._cut, _digests(self._cut), strict=True):
            matrix.version, matrix.digest = version_of(matrix.parameter), digest

    def _put_back(self, optimizer: Optimizer) -> None:
        """Put the model's parameters, and the state of those stepped here, into the optimizer."""
        for group, parameters in self._given:
            group["params"] = parameters
        self._given.clear()
        for found in self._matrices.values():
            if found.whole is not None:
                found.whole.grad = None
                if found.whole in optimizer.state:
                    optimizer.state[found.parameter] = optimizer.state.pop(found.whole)

    def _look_for_writes(self) -> None:
        """Raise LayoutError for parts that have changed though no write to them was counted."""
        self._late.settle()
        known = [m for m in self._cut if m.digest is not None and not m.is_old]

        def judge(numbers: Sequence[float]) -> None:
            for found in (m for m, is_changed in zip(known, numbers, strict=True) if is_changed):
                raise LayoutError(
                    f"{found.name!r} has changed since the last step, past the counter of writes "
                    "(as by .data, .to_local() and torch._foreach functions), and its owner would "
                    "undo that: write to the parameter itself, as in param.copy_(values)"
                )

        if known:
            before = [m.digest for m in known if m.digest is not None]
            self._late.look(torch.stack(_digests(known)) != torch.stack(before), judge)


def own_matrices(optimizer: AnyOptimizer, model: nn.Module) -> AnyOptimizer:
    """Make ``optimizer`` step on whole matrices, each on one of the ranks that share it.

    For optimizers such as `torch.optim.Muon`, whose update of a parameter depends on that whole
    parameter, its gradient and its state alone. Its parameters are those of ``model`` under
    `replicate`, `fully_shard`, `parallelize_module` or several of them; all ranks call this after
    these, and before the first step. Biases and embeddings belong to another optimizer.

    Changes ``optimizer`` in place and returns it. Between steps its groups have the model's
    parameters. State is whole, and on owners alone; `checkpoint` saves it by name and loads it on
    any layout. A step sends gradients to owners and weights back, in one message each way.

    Raises TypeError for an optimizer that looks at all parameters together or has flat ones, and
    LayoutError where ranks have other parameters.

    >>> matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    >>> muon = meshwright.own_matrices(torch.optim.Muon(matrices, lr=0.02), model)
    """
    if OWNED in vars(optimizer):
        return optimizer
    check_ownable(optimizer)
    for module in model.modules():
        if isinstance(module, ReplicatedModule):
            replica_state(module).set_up()  # so that its parameters know their ranks
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    vars(optimizer)[OWNED] = found = OwnedMatrices(optimizer, names)
    for line in found.shares:
        _log.info("%s", line)
    return optimizer


def sharers_of(parameter: torch.Tensor | None) -> tuple[Communicator | None, bool]:
    """Return the ranks that share an owned parameter (else None), and whether its state is here."""
    found = _owned().get(id(parameter))
    return (None, True) if found is None else (found.axis, found.is_here)


@functools.cache
def _owned() -> WeakValueDictionary[int, _Matrix]:
    """By ids of parameters, which live as long. Weak references to them would forbid `.to()`."""
    return WeakValueDictionary()


def deal(shapes: Sequence[Sequence[int]], ranks: int) -> tuple[list[int], float]:
    """Give each matrix to the rank with the least work so far, the one with most work first.

    Work are multiplications in the smaller Gram matrix; leading dims are many matrices. Returns the
    rank of each, and the work of the busiest over the mean. (Graham 1969.)
    """
    work = [math.prod(shape) * min(shape[-2:], default=1) for shape in shapes]
    loads, found = [0] * ranks, [0] * len(work)
    for number in sorted(range(len(work)), key=lambda n: -work[n]):
        found[number] = rank = loads.index(min(loads))
        loads[rank] += work[number]
    return found, max(loads) * ranks / max(1, sum(work))


def _axis_of(parameter: nn.Parameter, name: str) -> Communicator | None:
    """Return the communicator of all ranks that hold ``parameter``; None for this one alone."""
    known = known_at_rest(parameter)
    if known is not None and type(local_tensor_of(parameter)) is not torch.Tensor:
        raise TypeError(f"own_matrices: {name!r} is a tensor subclass, which no rank holds whole")
    along = () if known is None else mesh_communicators(known.mesh)
    axes = {axis.ranks: axis for axis in (*along, *mean_axes([parameter])) if not axis.is_alone}
    wide = [a for r, a in axes.items() if not any({*r} < {*other} for other in axes)]
    return union(wide) if wide else None


def _parts(tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    return [(box, memory) for box, memory in held_boxes(tensor) if box.numel]


def _digests(matrices: Iterable[_Matrix]) -> list[torch.Tensor]:
    return [d for d in digests_of([m.parameter for m in matrices]) if d is not None]
