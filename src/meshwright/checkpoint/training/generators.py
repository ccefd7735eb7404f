"""The state of one rank's random number generators."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from meshwright.comm.streams import is_host


def generator_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and ``device``."""
    version, words, gauss = random.getstate()
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (
            name,
            torch.from_numpy(keys.astype(np.int64)),
            *(x.item() if isinstance(x, np.generic) else x for x in rest),
        ),
        "torch": torch.get_rng_state(),
    }
    if not is_host(device):
        state["device"] = torch.get_device_module(device).get_rng_state(device).cpu()
    return state


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `generator_state`; a device without saved state keeps its own."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and not is_host(device):
        torch.get_device_module(device).set_rng_state(state["device"], device)
