"""Ranks with simulated devices: the bodies of rank tests as they stand, on another backend."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

from meshwright import comm
from meshwright.testing import Ranks
from simulated.backend import BACKEND, register
from simulated.device import simulated


def on_devices(ranks: Ranks) -> Ranks:
    """Give the ranks of ``ranks`` that are connected for their body a simulated device each."""

    @functools.wraps(ranks)
    def run(n: int, body: Callable[..., Any], *args: object, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not kwargs.pop("connected", True):
            return ranks(n, body, *args, connected=False, **kwargs)
        kwargs.pop("backend", None)
        kwargs["timeout"] = 4 * kwargs.get("timeout", 60.0)
        return ranks(n, _on_device, body, args, connected=False, **kwargs)

    return run


def _on_device(body: Callable[..., Any], args: tuple[Any, ...], **kwargs: object) -> object:
    with simulated(is_written_for_a_cpu=True) as device:
        register(device)
        comm.connect(BACKEND)
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        value = body(*args, **kwargs)
        comm.disconnect()
    return value
