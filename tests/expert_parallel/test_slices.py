"""Ranks of axis tensor, which have the same tokens, send a slice of them each."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright import comm, init_device_mesh, parallelize_module
from meshwright.comm import Recorder, observe
from meshwright.expert_parallel import ExpertParallel
from meshwright.testing import Ranks
from support.expert_parallel.samples import FORMS, Block, D, alike

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def body(form: str, exchange: str) -> None:
    world = comm.communicator()
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("ep", "tp"))
    expert = comm.communicator(mesh.get_group("ep"))
    name = "experts.grouped" if form == "grouped" else "experts"
    for number, k, sizes in ((4, 2, [7, 4]), (3, 3, [1, 3]), (5, 1, [0, 2]), (1, 1, [2, 1])):
        sizes = sizes[-expert.size :]
        one, many = alike(Block(FORMS[form](number), k))
        style = ExpertParallel(exchange=exchange, tensor_mesh=mesh["tp"])
        parallelize_module(many, mesh["ep"], {name: style})
        x, weigh = torch.randn(2, sum(sizes), D, dtype=torch.float64).unbind()
        for each in (x, weigh):
            world.broadcast(each).wait()
        given = x.clone().requires_grad_()
        mine = x.split(sizes)[expert.rank].clone().requires_grad_()
        expected = one(given)
        (expected * weigh).sum().backward()
        with observe(recorder := Recorder()):
            found = many(mine)
        torch.testing.assert_close(found, expected.split(sizes)[expert.rank], **CLOSE)
        (found * weigh.split(sizes)[expert.rank]).sum().backward()
        assert given.grad is not None
        torch.testing.assert_close(mine.grad, given.grad.split(sizes)[expert.rank], **CLOSE)
        for (key, whole), part in zip(one.named_parameters(), many.parameters(), strict=True):
            if isinstance(part.grad, DTensor):
                grad = part.grad.full_tensor()
            else:
                assert part.grad is not None
                grad = part.grad.clone()
                expert.all_reduce(grad).wait()
            torch.testing.assert_close(grad, whole.grad, **CLOSE, msg=lambda t, n=key: f"{n}: {t}")
        if expert.size > 1 and form != "post norm":
            out = next(c for c in recorder.collectives if "dispatch" in c.label)
            each = k if exchange == "pairs" else min(k, expert.size)
            rows, times = (len(mine) * k, 1) if form == "grouped" else (len(mine), each)
            assert out.shape[0] <= -(-rows // 2) * times, (out.shape, sizes)


@pytest.mark.few(12, slow=12)
@pytest.mark.parametrize("exchange", ["tokens", "pairs"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 4])
def test_slices_are_one_process(ranks: Ranks, form: str, exchange: str, count: int) -> None:
    """Tokens that do not divide, a rank without any, fewer than slices; experts, too."""
    ranks(count, body, form, exchange)
