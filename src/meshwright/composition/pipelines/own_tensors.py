"""Stages of this rank with the very parameters and buffers of the model that they were cut from.

Hooks, attributes and optimizers that know a parameter know it in its stage then. Tracing and
tensor parallelism put others into modules, so the two are brought together before a stage is laid
out, and after::

    share     model's tensors  ->  the stages of this rank
    show      what the stages hold now (DTensors, where they are cut)  ->  the model's modules
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.pipelining.stepping.ties import copy_parameter

__all__ = ["share", "show"]


def share(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Give ``stages``, all of this rank, the parameters and buffers of ``model`` by name.

    Where several of them hold one parameter, the first has the model's, and others copies: each
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
    """Give the modules of ``model`` what ``stages``, all of this rank, hold by these names.

    Where a stage has all of a module they share the table of it, so that the model has whole
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
