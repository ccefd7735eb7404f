"""What ranks tell each other about optimizer state, as JSON and tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.comm import Communicator

__all__ = ["Held", "exchange", "from_first_rank", "of_numbers"]


Held = tuple[bool, dict[str, str], dict[str, Any]]
"""What a rank has of one parameter: any state, the dtypes of what is spread, and the scalars."""


def exchange(shard: Communicator, held: Sequence[Held]) -> list[list[Held]]:
    """What each rank has of each parameter: one whose part is empty may have no state at all."""
    plain = [(has, spread, _scalars(rest)) for has, spread, rest in held]
    texts = shard.gather_bytes(json.dumps(plain).encode(), label="optimizer state keys")
    return [list(answers) for answers in zip(*map(json.loads, texts), strict=True)]


def _scalars(rest: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {k: n for k, v in rest.items() if (n := _numbers(v)) is not None}


def _numbers(value: object) -> list[Any] | None:
    """A scalar as JSON: its dtype (none for a number or text) and value; None for anything else."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return [str(value.dtype).removeprefix("torch."), value.item()]
    return ["", value] if isinstance(value, bool | int | float | str) else None


def of_numbers(numbers: Sequence[Any]) -> Any:  # noqa: ANN401 - a number or a tensor
    """What `exchange` has made numbers of."""
    dtype, value = numbers
    return torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value


def from_first_rank(state: Mapping[str, Any] | None, world: Communicator) -> dict[str, Any]:
    """The state of the first rank of ``world``, on all its ranks.

    An outline goes first, as JSON, then each tensor. Raises ValueError where the first has none.
    """
    outline: dict[str, Any] = {}
    if state is not None and world.rank == 0:
        outline = {
            "state": {
                n: {k: _outline(v) for k, v in own.items()} for n, own in state["state"].items()
            },
            "rest": {key: own for key, own in state.items() if key != "state"},
        }
    payload = json.dumps(outline, default=_plain).encode()
    texts = world.gather_bytes(payload, label="optimizer state outline")
    outline = json.loads(texts[0])
    if not outline:
        raise ValueError(
            "expected the optimizer's state on the first rank of the group, found none there: pass "
            "what optim_state_dict returned on that rank"
        )
    found: dict[str, dict[str, Any]] = {}
    for name, own in outline["state"].items():
        found[name] = {}
        for key, (dtype, shape, value) in own.items():
            if dtype is None:
                found[name][key] = value
                continue
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            if state is not None and world.rank == 0:
                tensor.copy_(state["state"][name][key])
            world.broadcast(tensor, label=f"optimizer state {name}").wait()
            found[name][key] = tensor.cpu()
    return {"state": found, **outline["rest"]}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a setting
    """A setting that is a tensor, as a rate may be."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    raise TypeError(
        f"expected settings of the optimizer that JSON can hold, found {type(value).__name__}"
    )


def _outline(value: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - any state
    """Dtype and shape of a tensor, or the value of anything else."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), list(value.shape), None
    return None, None, value
