"""Refusals of tensors that users assign in place of a sharded parameter, by name.

A unit puts its full parameters and its sharded ones into modules in turn. An optimizer would train
any other tensor there on each rank alone, or not at all. Only before its first gather does a unit
of `fully_shard` take over another DTensor parameter of the same layout, as loaders leave it.

Outside of its unit a sharded parameter is a DTensor. When an operator mixes it with a plain tensor,
an error that names the parameter and its unit replaces torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.unreadable import make_unreadable, retire
from meshwright.data_parallel.shards.gradient_lines import COUNTS, OURS
from meshwright.data_parallel.shards.slot import HOME, Slot, StorageKey, memory_of_plain
from meshwright.torch_internals.tensors import is_view, viewed_by

BEFORE = (
    "Change modules before they are sharded (weight_norm, parametrizations, pruning, adapters and "
    "ties too). To change values, write to the sharded parameter or load a state dict without "
    "assign=True. Of replicas "
    "torch.func.functional_call takes any tensors, of shards their own parameters only"
)


def rank_in(communicators: Sequence[Communicator]) -> int:
    """Return this rank's number in the world that the ranks of ``communicators`` belong to."""
    return communicators[0].ranks[communicators[0].rank] if communicators else 0


def replaced(
    name: str,
    module: nn.Module,
    found: object,
    shape: Sequence[int],
    communicators: Sequence[Communicator],
) -> RuntimeError:
    """Make the error for ``found`` in place of a sharded parameter of full ``shape``."""
    what = "nothing"
    if isinstance(found, torch.Tensor):
        what = f"a {type(found).__name__} of shape {tuple(found.shape)} and {found.dtype}"
    return RuntimeError(
        f"rank {rank_in(communicators)}: expected parameter {name!r} of shape {tuple(shape)} where "
        f"the sharded unit left it in its {type(module).__name__}, found {what}: neither gathered "
        f"nor reduced, it would train on each rank alone. {BEFORE}"
    )


def data_assigned(name: str, communicators: Sequence[Communicator]) -> RuntimeError:
    """Make the error for an assignment that torch does not carry out for a DTensor."""
    return RuntimeError(
        f"rank {rank_in(communicators)}: something was assigned to .data of parameter {name!r}, "
        "which is a DTensor: torch leaves its values as they were. Use copy_() under "
        "torch.no_grad(), or load a state dict"
    )


def written(name: str, communicators: Sequence[Communicator]) -> RuntimeError:
    """Make the error for a write to a full parameter."""
    return RuntimeError(
        f"rank {rank_in(communicators)}: parameter {name!r} was written in place while it was "
        "whole, or given other memory (.data), as a forward does that changes its own weights, or "
        "nn.Embedding with max_norm: that is a copy of what is sharded, and the change would be "
        "lost. Write to the sharded "
        "parameter between passes, leave it out (ignored_params), or use replicate"
    )


def converted(name: str, communicators: Sequence[Communicator]) -> RuntimeError:
    """Make the error for a backward whose graph needs parameters that have changed since."""
    return RuntimeError(
        f"rank {rank_in(communicators)}: parameters of {name!r} were converted, loaded or given "
        "anew between its forward and its backward pass, or stepped, and its graph needs those of "
        "before. Run backward first, then change them"
    )


def is_ours_alone(parameter: nn.Parameter) -> bool:
    """Whether only the caller, by one name, holds ``parameter``."""
    # References: the caller's name, the argument here, that of the call.
    return COUNTS and sys.getrefcount(parameter) <= OURS


def retire_sharded(parameter: nn.Parameter, name: str) -> None:
    """Make ``parameter`` unreadable, because a sharded one has taken its place."""
    retire(parameter, name, "its module was sharded")


def refuse_views(modules: Iterable[nn.Module], slots: Iterable[Slot]) -> None:
    """Raise ValueError for other tensors in the former memory of a parameter of ``slots``.

    Such an attribute, buffer or parameter would keep old values. What a hook recomputes from
    ``<name>_orig`` in each forward is allowed. A tensor that a parameter was made from may be kept,
    but becomes unreadable.
    """
    lying: dict[int, list[tuple[str, StorageKey]]] = {}
    places: set[tuple[nn.Module, str]] = set()
    for slot in slots:
        places.update(slot.places)
        if slot.memory is not None:
            lying.setdefault(id(slot.memory.storage), []).append((slot.name, slot.memory))
    for module in modules:
        for name, parameter in module._parameters.items():
            if type(parameter) is nn.Parameter and (module, name) not in places:
                memory = memory_of_plain(parameter)
                if memory is not None and id(memory.storage) in lying:
                    lying[id(memory.storage)].append((name, memory))
        for attribute, value in (*vars(module).items(), *module._buffers.items()):
            if type(value) is not torch.Tensor and not isinstance(value, (list, tuple)):
                continue
            listed: Sequence[Any] = [value] if isinstance(value, torch.Tensor) else value
            memories = [memory_of_plain(each) for each in listed if type(each) is torch.Tensor]
            found, held = next(
                (
                    (name, held)
                    for memory in memories
                    if memory is not None
                    for name, held in lying.get(id(memory.storage), ())
                    if held.meets(memory)
                ),
                (None, None),
            )
            if held is not None and f"{attribute}_orig" not in module._parameters:
                is_attribute = isinstance(value, torch.Tensor) and attribute in vars(module)
                if is_attribute and held == memories[0] and not is_view(value):
                    text = f"attribute {attribute!r} was in the memory of parameter {found!r}"
                    make_unreadable(
                        value, f"{text} before that was sharded", "Keep a clone() of it"
                    )
                    continue
                raise ValueError(
                    f"attribute {attribute!r} of a {type(module).__name__} is a view of parameter "
                    f"{found!r}, which is sharded: it would keep the values of then. "
                    "Compute it in the forward, from the parameter"
                )
    for together in lying.values():
        if len(together) > 1:
            _refuse_overlap(together)


def _refuse_overlap(named: Iterable[tuple[str, StorageKey]]) -> None:
    """Raise ValueError where parameters in one storage share elements."""
    dense = [(name, memory.bytes) for name, memory in named if memory.bytes is not None]
    dense.sort(key=lambda each: each[1].start)
    for (one, first), (other, second) in pairwise(dense):
        if second.start < first.stop:
            raise ValueError(
                f"parameters {one!r} and {other!r} are two objects in the same memory, "
                "as assigned to .data: sharded, a step of one would no longer change the other. "
                "Hold one parameter in both places: b.weight = a.weight"
            )


def _slot_of(given: object) -> Slot | None:
    """The slot of a sharded parameter, of a view of one, or of a cast of one."""
    if not isinstance(given, torch.Tensor) or not is_dtensor(given):
        return None
    behind, node = viewed_by(given), given.grad_fn
    while node is not None and HOME not in behind.__dict__:
        behind = getattr(node, "variable", behind)
        node = next((each for each, _ in node.next_functions if each is not None), None)
    held = behind.__dict__.get(HOME)
    return None if held is None else held()


def mixed(op: object, given: Iterable[object]) -> RuntimeError | None:
    """Make the error for ``op`` on a sharded parameter and a plain tensor, if it is one."""
    slot = next((found for each in given if (found := _slot_of(each)) is not None), None)
    if slot is None:
        return None
    driver, (module, _) = slot.driver, slot.places[0]
    unit = repr(driver.name) if driver and driver.name else f"of its {type(module).__name__}"
    now = driver and driver.iteration
    why = "outside of its unit it is sharded. Read it in the forward of the unit's module"
    remedy = (
        ", or in a method of that module after register_fsdp_forward_method(module, 'the_method'); "
        "elsewhere full_tensor(grad_placements=[Partial('avg')]) gathers it for a term beside data"
    )
    if now and now.is_in_forward and now.ended_in_forward:
        why = "a backward pass (backward, autograd.grad) inside of this forward has resharded it"
        remedy = ". Run that after the last use of a parameter, or keep the graph (create_graph)"
    elif op is torch.ops.aten.copy_.default:
        why = "it is sharded. Load plain tensors of full shape by torch.distributed.checkpoint."
        remedy = (
            "state_dict.set_model_state_dict(model, state, "
            "options=StateDictOptions(full_state_dict=True))"
        )
    return RuntimeError(
        f"rank {rank_in(slot.place.axes.reached if slot.place else ())}: expected DTensors "
        f"alone in {op}, found parameter {slot.name!r} of the unit {unit} beside a plain tensor: "
        f"{why}{remedy}"
    )
