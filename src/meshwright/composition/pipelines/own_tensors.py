"""The parameters and buffers of a model whose stages lie on different ranks.

This rank's stages use the model's own tensors, so that hooks, attributes and optimizers of a
parameter stay valid. Tracing and tensor parallelism replace tensors in modules, so model and stages
are matched before a stage is laid out, and after::

    share     the model's tensors  ->  the stages of this rank
    show      the tensors of the stages now (DTensors, if sharded)  ->  the model's modules

Tensors of other ranks stay the same objects, without values; reading one raises an error that says
where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from meshwright.comm.dtensors.unreadable import SETTINGS, make_unreadable
from meshwright.errors import LayoutError
from meshwright.pipelining.ties import copy_parameter

_ELSEWHERE = "_meshwright_elsewhere"

_REMEDY = (
    "A loss can read what the last stage holds: compute what needs other parameters in the model's "
    "forward, and return it with the output. `Trainable.weights` gives all values, and "
    "`Trainable.eval` runs the whole model"
)


def share(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Put the parameters and buffers of ``model`` into ``stages``, all of this rank, by name.

    If several of them share a parameter, the first has the model's, and others copies: each
    accumulates a gradient of its own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    taken: set[int] = set()
    for stage in stages:
        used: dict[int, nn.Parameter] = {}
        for path, part in stage.named_modules():
            prefix = f"{path}." if path else ""
            for leaf in part._parameters:
                own = parameters.get(f"{prefix}{leaf}")
                if own is None:
                    continue
                if id(own) not in used:
                    used[id(own)] = copy_parameter(own) if id(own) in taken else own
                part._parameters[leaf] = used[id(own)]
            for leaf in part._buffers:
                part._buffers[leaf] = buffers.get(f"{prefix}{leaf}", part._buffers[leaf])
        taken |= used.keys()


def show(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Put the tensors of ``stages``, all of this rank, into the modules of ``model``, by name.

    If a stage has all of a module, both share its dict, so that the model shows unsharded
    parameters while the stage has them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for stage in reversed(stages):
        for path, part in stage.named_modules():
            owner = modules.get(path)
            if owner is None or owner is part:
                continue
            for table in ("_parameters", "_buffers"):
                mine, theirs = getattr(part, table), getattr(owner, table)
                absent = {key: None for key, tensor in theirs.items() if tensor is None}
                if mine.keys() | absent.keys() == theirs.keys():
                    mine.update(absent)
                    setattr(owner, table, mine)
                else:
                    theirs.update({key: mine[key] for key in mine.keys() & theirs.keys()})


def let_go(
    model: nn.Module, stages: Sequence[nn.Module], mine: Sequence[int], ranks: Sequence[int]
) -> None:
    """Free the tensors of ``model`` that belong to ``stages`` other than ``mine``.

    ``ranks`` are the stages' ranks. A tensor of no stage, such as an unused buffer, is kept.
    """
    held = {id(tensor) for stage in mine for _, tensor in _named_tensors(stages[stage])}
    asked = f"on rank {ranks[mine[0]]}, which has stage {', '.join(map(str, mine))}"
    where = {
        name: f"is held by stage {number}, on rank {ranks[number]}; its value was asked for {asked}"
        for number, stage in enumerate(stages)
        if number not in mine
        for name, _ in _named_tensors(stage)
    }
    for name, tensor in _named_tensors(model):
        if id(tensor) not in held and name in where and not is_elsewhere(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            text = f"{kind} {name!r} {where[name]}"
            make_unreadable(tensor, text, _REMEDY, error=LayoutError, settings=SETTINGS)
            vars(tensor)[_ELSEWHERE] = True


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def is_elsewhere(tensor: object) -> bool:
    """Whether ``tensor`` belongs to a stage on another rank."""
    return isinstance(tensor, torch.Tensor) and _ELSEWHERE in vars(tensor)
