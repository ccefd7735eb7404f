"""Hides wrappers from torch's checkpoint functions, so that these see the names before wrapping.

`torch.distributed.checkpoint.state_dict` recognizes torch's own wrappers by class. The name of any
other wrapper becomes part of the keys. Only while those functions run, our wrappers answer so::

    torch asks a wrapper                              the answer
    1  ``_fqn_modifiers()``, how names change         a name continues inside the wrapper
    2  ``named_children()``                           the innermost wrapped module alone
    3  ``named_modules()``, and so its parameters     names without the wrapper's own
    4  ``state_dict()``                               names without it
    5  ``load_state_dict(...)``                       accepts names without it

The module that `torch.compile` puts around a wrapped module is skipped with it. Alternatives
considered: posing as a subclass of torch's own wrapper, which would mislead all other code.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.torch_internals.modules import COMPILED, asked


def place_of(wrapper: nn.Module, own: str) -> tuple[str, ...]:
    """List the name components between ``wrapper`` and the module it wraps, compiled or not."""
    place, inner = [own], wrapper._modules[own]
    while inner is not None and COMPILED in inner._modules:
        place.append(COMPILED)
        inner = inner._modules[COMPILED]
    return tuple(place)


def without_compiled(name: str) -> str:
    """Remove the path components from ``name`` that `torch.compile` has added."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


class Inside:
    """The module inside a wrapper, as torch's checkpoint functions find it.

    ``hidden`` is the name prefix of parameters that users did not register.
    """

    def __init__(self, module: nn.Module, hidden: str = "") -> None:
        self._module, self._hidden = module, hidden

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any module
        if self._hides(name):
            return None  # torch only checks whether names lead somewhere
        module: Any = self._module
        own = getattr(module, "_fqn_modifiers", dict)().get(name)
        if own and hasattr(module, own):
            module = getattr(module, own)
        return getattr(module, name)

    @property
    def __class__(self) -> Any:  # noqa: ANN401 - torch asks the class for its extra state
        return type(self._module)

    def __hash__(self) -> int:
        return hash(self._module)

    def __eq__(self, other: object) -> bool:
        # Torch keeps what it has visited, which may be the module itself by another way.
        return self._module is (other._module if type(other) is Inside else other)

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        found = self._module._parameters
        return {name: held for name, held in found.items() if not self._hides(name)}

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """List the module's parameters, except hidden ones."""
        for name, parameter in self._module.named_parameters(**options):
            if not self._hides(name):
                yield name, parameter

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """List the module's children, with hidden parameters left out."""
        for name, module in self._module.named_children():
            yield name, module if isinstance(module, SteppedOver) else Inside(module, self._hidden)

    def _hides(self, name: str) -> bool:
        return bool(self._hidden) and name.startswith(self._hidden)


class StepOver(dict[str, str]):
    """Tells torch's checkpoint functions how names continue below a wrapper."""

    def __init__(self, place: str, inside: Inside) -> None:
        super().__init__({"": place})
        self._inside = inside

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as of any dict
        """Return the attribute in which a name continues; the wrapper adds no component.

        A module around the wrapper that forwards its attributes (PEFT) has names of its own.
        """
        return "_inside" if hasattr(self._inside, key) else default


class SteppedOver(nn.Module):
    """A wrapper around one module that torch's checkpoint functions skip."""

    _wrapped_as: str
    """The attribute that holds what it wraps."""
    _names_are_asked = False

    def _fqn_modifiers(self) -> dict[str, str]:
        self._names_are_asked = True
        return StepOver(self._wrapped_as, self._inside)

    @property
    def _inside(self) -> Inside:
        module: nn.Module = self
        for part in place_of(self, self._wrapped_as):
            module = getattr(module, part)
        return Inside(module)

    def _is_asked(self) -> bool:
        if self._names_are_asked:
            self._names_are_asked = asked("anything") is not None
        return self._names_are_asked

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """List the children; for torch's checkpoint functions only the innermost wrapped module."""
        if asked("tensors") is None:
            yield from super().named_children()
        else:
            inside = self._inside
            is_wrapper = isinstance(inside, SteppedOver)
            yield self._wrapped_as, inside._module if is_wrapper else inside

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module]]:
        """List modules as any module; for those functions, under the names before wrapping."""
        found = super().named_modules(memo, prefix, remove_duplicate)
        return self._as_before(found, prefix) if self._is_asked() else found

    def _as_before(
        self, found: Iterable[tuple[str, nn.Module]], prefix: str
    ) -> Generator[tuple[str, nn.Module]]:
        start = f"{prefix}." if prefix else ""
        place = place_of(self, self._wrapped_as)
        shown = {start + ".".join(place[: count + 1]) for count in range(len(place))}
        inner = start + ".".join((*place, ""))
        for name, module in found:
            if name in shown:
                yield prefix, module
            elif name.startswith(inner):
                yield start + name[len(inner) :], module
            else:
                yield name, module


def rename(state: dict[str, Any], old: str, new: str) -> None:
    """Rename the keys of ``state`` that begin with ``old`` to begin with ``new``."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key[len(old) :]] = state.pop(key)
