"""A `Slot`: one parameter of a unit, with all its uses and the hooks that users register on it."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import carry_after_hooks
from meshwright.comm.dtensors.dtensor import AtRest, local_of
from meshwright.data_parallel.distributed_parameters import LocalParameter
from meshwright.data_parallel.shards.placement import Place
from meshwright.data_parallel.shards.tensor_extensions import Extension
from meshwright.errors import InternalError
from meshwright.torch_internals.autograd import backward_hooks_of, set_backward_hooks
from meshwright.torch_internals.tensors import has_storage, storage_id, storage_users

HOME = "_meshwright_home"
"""The attribute of a parameter that was taken over: a weak reference to its slot."""
AS_IT_IS = LocalParameter()
ALONE = 2
"""Uses, seen from a function, of a storage that one tensor has."""


class StorageKey(NamedTuple):
    """Identifies the memory of a tensor, also after the tensor was given other memory."""

    storage: weakref.ref[torch.UntypedStorage]
    """One object for one storage, which others may still hold."""
    bytes: range | None
    """Those that are the tensor's; None where they are not side by side."""

    def meets(self, other: StorageKey) -> bool:
        """Whether ``other``, in the same storage, may overlap with it."""
        if self.bytes is None or other.bytes is None:
            return True
        return self.bytes.start < other.bytes.stop and other.bytes.start < self.bytes.stop


def memory_of_plain(tensor: torch.Tensor) -> StorageKey | None:
    """The memory of ``tensor``; None where it has none, as on the meta device."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return None
    size, first = tensor.element_size(), tensor.storage_offset()
    found = range(first * size, (first + tensor.numel()) * size)
    return StorageKey(
        weakref.ref(tensor.untyped_storage()), found if tensor.is_contiguous() else None
    )


def _shared_memory(parameter: nn.Parameter) -> StorageKey | None:
    """The memory of ``parameter``, if another tensor uses it or did; otherwise None."""
    if type(parameter) is not nn.Parameter or not has_storage(parameter):
        return None
    # Uses: the parameter's, and that of the storage which is asked for here.
    storage = parameter.untyped_storage()
    is_shared = storage_users(storage_id(storage)) > ALONE or weakref.getweakrefcount(storage)
    return memory_of_plain(parameter) if is_shared else None


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """One parameter of a unit and everywhere it is used."""

    names: tuple[str, ...]
    """Full names, one for each place."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules and attributes that hold it."""
    original: nn.Parameter
    """The parameter that the module held when it was taken over; its storage is given up then."""
    full: nn.Parameter = field(init=False)
    """The parameter of modules while it is gathered: one object, which has memory only then."""
    leaf: nn.Parameter = field(init=False)
    """The plain parameter that computes; ``full`` itself unless that is a DTensor whose modules
    take the leaf over its local tensor."""
    local: torch.Tensor | None = None
    """This rank's chunk where it does not come from ``original``; taken by the next group."""
    place: Place | None = None
    """Its placement; None for a mere part of a flat buffer."""
    outer: AtRest | None = None
    """The DTensor of which it was this rank's part, where it was one."""
    computes: LocalParameter = AS_IT_IS
    """The form in which it computes: a DTensor, unless all its modules take a local tensor."""
    is_spread: bool = False
    """True where modules of other units use it too."""
    given: weakref.ref[nn.Parameter] | None = None
    """The parameter object that the user had, as long as somebody holds it."""
    memory: StorageKey | None = None
    """The memory that this object lay in with others, where it was a plain parameter."""
    extension: Extension | None = None
    """How it is gathered, for a tensor subclass that defines this."""
    start: torch.Tensor | None = None
    """Digests of when it was sharded, until they are compared over the ranks."""
    home: weakref.ref[Any] | None = None
    """The driver of its unit."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def driver(self) -> Any:  # noqa: ANN401 - of a file above this one
        """The driver of its unit, while that lives."""
        return None if self.home is None else self.home()

    def rename(self, modules: Mapping[nn.Module, str]) -> None:
        """Set its names from the full names of its ``modules``, as far as these are known."""
        found = [
            f"{modules[module]}.{attribute}" if modules[module] else attribute
            for module, attribute in self.places
            if module in modules
        ]
        self.names = tuple(found) or self.names

    def forget_gone(self) -> None:
        """Forget the user's original parameter object, if nobody holds it any more."""
        if self.given is not None and self.given() is None:
            self.given = None

    def show(self, parameter: nn.Parameter | torch.Tensor) -> None:
        """Put ``parameter`` into every module that holds this one."""
        for module, name in self.places:
            # Not setattr: the order of the names has to stay, and this is on the hot path.
            module._parameters[name] = parameter  # pyrefly: ignore[unsupported-operation]


def collect_slots(
    modules: Iterable[tuple[str, nn.Module]], skipped: Container[int] = ()
) -> list[Slot]:
    """List the parameters that ``modules`` (with their full names) hold directly, each once.

    Those whose ``id`` is in ``skipped`` are left out.
    """
    slots: dict[int, Slot] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"parameter {full_name!r} has no shape yet, and cannot be sharded: run a "
                    "forward pass of the module on one batch first"
                )
            slot = slots.get(id(parameter))
            if slot is None:
                slots[id(parameter)] = Slot(
                    names=(full_name,),
                    places=((module, name),),
                    original=parameter,
                    given=weakref.ref(parameter),
                    memory=_shared_memory(parameter),
                )
            else:
                slot.names += (full_name,)
                slot.places += ((module, name),)
    return list(slots.values())


def group_slots(slots: Iterable[Slot], *, by_training: bool = True) -> list[list[Slot]]:
    """Group slots that can share a buffer: one dtype, all trainable or all frozen by default."""
    groups: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        is_trainable = slot.original.requires_grad or not by_training
        groups.setdefault((slot.original.dtype, is_trainable), []).append(slot)
    return list(groups.values())


# ------------------------------------------------------------------------- hooks of users

# Autograd never sees a sharded parameter: it sees the full one, whose gradient is of one rank. So
# what was registered on the parameter runs here, once for each mean that is delivered. The hook of
# a single process sees the same; `Tensor.register_hook` on a replica sees that of its own rank.


def carry_hooks(source: torch.Tensor, target: nn.Parameter, name: str) -> None:
    """Share the hooks of ``source`` with ``target``, which replaces it; handles remove both."""
    if backward_hooks_of(source):
        set_backward_hooks(target, backward_hooks_of(source))
    carry_after_hooks(source, target, name)


class _Behind(torch.autograd.Function):
    """A graph node after leaves. It calls no operator, which would be slow on DTensors."""

    @staticmethod
    def forward(ctx: object, *leaves: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        return torch.empty(0, device="cpu")


def accumulators_of(leaves: Sequence[torch.Tensor]) -> list[torch.autograd.graph.Node]:
    """The nodes by which autograd adds to ``.grad`` of ``leaves``, which require grad."""
    with torch.enable_grad():
        behind: torch.Tensor = _Behind.apply(*leaves)
    nodes = () if behind.grad_fn is None else behind.grad_fn.next_functions
    found = [node for node, _ in nodes if node is not None]
    if len(found) != len(leaves):
        raise InternalError(f"{len(leaves)} leaves have {len(found)} nodes behind them")
    return found


def accumulator_of(leaf: torch.Tensor) -> torch.autograd.graph.Node:
    """The node by which autograd adds to ``leaf.grad``; ``leaf`` requires grad."""
    return accumulators_of([leaf])[0]


def change_by_hooks(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Run the hooks of ``parameter`` on ``gradient``; results are written to it in place."""
    for hook in tuple((backward_hooks_of(parameter) or {}).values()):
        try:
            changed = hook(gradient)
            if changed is not None:
                local_of(gradient).copy_(local_of(changed))
        except Exception as error:
            error.add_note(
                f"This was a hook of parameter {name!r}, which is sharded: it was given the mean "
                f"gradient as a {type(gradient).__name__} of shape {tuple(gradient.shape)}."
            )
            raise
