"""Names as torch's checkpoint functions find them: as if nothing had been wrapped.

`torch.distributed.checkpoint.state_dict` looks for torch's own wrappers by their classes. Any other
one has a place in names. While those functions ask, and only then, a wrapper steps aside::

    torch asks a wrapper                              the answer
    1  ``_fqn_modifiers()``, how names change         below it a name continues inside
    2  ``named_children()``                           what is inside
    3  ``named_modules()``, and so its parameters     names without the wrapper's place
    4  ``state_dict()``                               names without it
    5  ``load_state_dict(...)``                       names without it are taken

What `torch.compile` has made of the wrapped module, which torch's functions step over elsewhere, is
stepped over with it. Alternatives considered: to pass for a subclass of torch's own wrapper, which
changes what all code of the process takes these for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.torch_internals.modules import COMPILED, asked


def place_of(wrapper: nn.Module, own: str) -> tuple[str, ...]:
    """List the parts of names between ``wrapper`` and what it wraps, compiled or not."""
    place, inner = [own], wrapper._modules[own]
    while inner is not None and COMPILED in inner._modules:
        place.append(COMPILED)
        inner = inner._modules[COMPILED]
    return tuple(place)


def without_compiled(name: str) -> str:
    """Remove the path components from ``name`` that `torch.compile` has added."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


class Inside:
    """The module below a wrapper as torch's functions find it in its place, by its own rules.

    ``hidden`` is the prefix of names of parameters that users have not given.
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
        """List those of the module, without those that are hidden."""
        for name, parameter in self._module.named_parameters(**options):
            if not self._hides(name):
                yield name, parameter

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """List those of the module, hiding the same."""
        for name, module in self._module.named_children():
            yield name, module if isinstance(module, SteppedOver) else Inside(module, self._hidden)

    def _hides(self, name: str) -> bool:
        return bool(self._hidden) and name.startswith(self._hidden)


class StepOver(dict[str, str]):
    """The answer of a wrapper to how names change below it."""

    def __init__(self, place: str, inside: Inside) -> None:
        super().__init__({"": place})
        self._inside = inside

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as of any dict
        """The way on from the wrapper to a name inside: its own place is in none.

        A module around the wrapper that hands on its attributes (of PEFT) has names of its own.
        """
        return "_inside" if hasattr(self._inside, key) else default


class SteppedOver(nn.Module):
    """A wrapper around one module that torch's checkpoint functions step over."""

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
        """List as any module; while those functions ask, what is inside of what it wraps."""
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
        """List as any module; while those functions ask, under the names before wrapping."""
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
    """Give the entries below ``old`` names below ``new``."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key[len(old) :]] = state.pop(key)
