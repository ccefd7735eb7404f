"""Tensors that have no dense memory of their own: every collective rejects them by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from meshwright import comm
from meshwright.testing import Ranks


def of_mesh() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.ones(4), mesh)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "DTensor": (of_mesh, r"DTensor of shape (4,): pass its .full_tensor()"),
    "nested": (nested, "NestedTensor"),
    "fake": (fake, "FakeTensor"),
    "freed": (freed, "Tensor of shape (4,) without any"),
    "opaque": (lambda: torch.ones(4).to_mkldnn(), "Tensor of shape (4,) without any"),
}

Calls = Callable[[torch.Tensor, torch.Tensor], object]
"""Called with the tensor, and with 4 elements of ordinary memory."""


def coalesced(bad: torch.Tensor, good: torch.Tensor) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, bad, 1 - dist.get_rank())])


CALLS: dict[str, Calls] = {
    "all_reduce": lambda bad, good: dist.all_reduce(bad),
    "later": lambda bad, good: dist.all_reduce(bad, async_op=True),
    "coalesced": lambda bad, good: dist.all_reduce_coalesced([good, bad]),
    "reduce": lambda bad, good: dist.reduce(bad, 0),
    "broadcast": lambda bad, good: dist.broadcast(bad, 0),
    "send": lambda bad, good: dist.send(bad, 1 - dist.get_rank()),
    "recv": lambda bad, good: dist.recv(bad, 1 - dist.get_rank()),
    "later from": lambda bad, good: dist.irecv(bad, 1 - dist.get_rank()),
    "batch": coalesced,
    "all_gather": lambda bad, good: dist.all_gather([good, good.clone()], bad),
    "all_gather to": lambda bad, good: dist.all_gather([bad, bad], good),
    "into_tensor": lambda bad, good: dist.all_gather_into_tensor(good.repeat(2), bad),
    "into_tensor to": lambda bad, good: dist.all_gather_into_tensor(bad, good[:2]),
    "reduce_scatter": lambda bad, good: dist.reduce_scatter(good, [bad, bad]),
    "reduce_scatter to": lambda bad, good: dist.reduce_scatter(bad, [good, good]),
    "scatter_tensor": lambda bad, good: dist.reduce_scatter_tensor(good[:2], bad),
    "gather": lambda bad, good: dist.gather(bad, [good, good.clone()] * (1 - dist.get_rank()), 0),
    "scatter": lambda bad, good: dist.scatter(good, [bad, bad] * (1 - dist.get_rank()), 0),
    "scatter to": lambda bad, good: dist.scatter(bad, [good, good] * (1 - dist.get_rank()), 0),
    "all_to_all": lambda bad, good: dist.all_to_all([good, good.clone()], [bad, bad]),
    "all_to_all to": lambda bad, good: dist.all_to_all([bad, bad], [good, good.clone()]),
    "single": lambda bad, good: dist.all_to_all_single(good, bad),
    "single to": lambda bad, good: dist.all_to_all_single(bad, good),
}


@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_memory_is_named(ranks: Ranks, kind: str, check: bool) -> None:
    def body() -> dict[str, str]:
        warnings.simplefilter("ignore")  # torch's own, of former names and of fake memory
        comm.connect("shm", check=check)
        found: dict[str, str] = {}
        for name, call in CALLS.items():
            bad = KINDS[kind][0]()
            if name == "scatter" and (check or dist.get_rank()):
                continue  # the root alone has a list, and is compared with the others first
            try:
                call(bad, torch.ones(4))
            except (ValueError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = "nothing"
        return found

    for found in ranks(2, body, connected=False):
        # Ragged shapes are numbered, by which calls that are checked are told apart before that.
        numbered = ("[2, j", "float32[j", "call different things, at number")
        numbered = numbered if kind == "nested" and check else ()
        words = (KINDS[kind][1], *numbered)
        assert not {k: text for k, text in found.items() if not any(w in text for w in words)}
