"""Modules bound to this process by process groups or by memory shared between ranks."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from torch import nn


class OfThisProcess(nn.Module):
    """A module that cannot be pickled: `pickle` and `torch.save` raise."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - of any object
        raise TypeError(
            f"cannot pickle a {type(self).__name__}: it has process groups, and memory that it "
            "shares with other ranks. Save its state_dict(), and load that into a module that was "
            "made and wrapped anew"
        )

    def __copy__(self) -> Self:
        found = object.__new__(type(self))
        vars(found).update(vars(self))
        return found


def home_of(cls: type) -> dict[str, object]:
    """The attribute by which a class derived from ``cls`` can be found where ``cls`` is defined.

    Empty for torch's own modules: compilers look less closely at a module of torch's.
    """
    return {} if cls.__module__.startswith("torch.") else {"__module__": cls.__module__}
