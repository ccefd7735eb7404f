"""Programs of torch's context parallelism with our import compute what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as by_name

from meshwright import comm, init_device_mesh
from meshwright.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    global_mean,
    positions,
    set_rotate_method,
)
from meshwright.testing import Ranks

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
V, D, H = 19, 16, 4


class Layer(nn.Module):
    attend: Callable[..., torch.Tensor] | None = None

    def __init__(self, *, is_named: bool) -> None:
        super().__init__()
        self.is_named = is_named
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (H, D // H)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)
        )
        attend = by_name if self.is_named else functional.scaled_dot_product_attention
        attend = self.attend or attend
        y = attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + torch.tanh(self.out(y))


class Model(nn.Module):
    """Embeddings of tokens and positions, two layers, one of which imported attention by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList([Layer(is_named=False), Layer(is_named=True)])
        self.head = nn.Linear(D, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions(ids.shape[1], ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(length: int) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    one = Model().double()
    ids = torch.randint(V, (2, length + 1))
    return one, copy.deepcopy(one), ids[:, :-1].clone(), ids[:, 1:].clone()


def summed(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        comm.communicator().all_reduce(grad).wait()
        found.append(grad / comm.communicator().size)
    return found


def check(one: nn.Module, many: nn.Module) -> None:
    found = summed(many)
    for (name, whole), mine in zip(one.named_parameters(), found, strict=True):
        assert whole.grad is not None
        torch.testing.assert_close(mine, whole.grad, **CLOSE, msg=lambda t, n=name: f"{n}: {t}")


def body(length: int, method: str, split: str) -> None:
    mesh = init_device_mesh("cpu", (comm.communicator().size,), mesh_dim_names=("cp",))
    one, many, ids, labels = made(length)
    expected = one(ids)
    functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    kept, before = ids.clone(), ids.data_ptr()
    options = {"method": method, "split": split}
    with context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1], **options):
        assert ids.shape[1] in (length // mesh.size(), length // mesh.size() + 1)
        output = many(ids)
        if length % mesh.size():
            losses = functional.cross_entropy(
                output.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            loss = global_mean(losses, labels.numel(), mesh)
        else:
            loss = functional.cross_entropy(output.flatten(0, 1), labels.flatten())
        loss.backward()
    assert torch.equal(ids, kept)
    assert ids.data_ptr() == before
    (whole,) = context_parallel_unshard(mesh, [output], [1])
    torch.testing.assert_close(whole, expected, **CLOSE)
    check(one, many)


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", ["all-to-all", "ring"])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_numbers_are_those_of_one_process(
    ranks: Ranks, count: int, method: str, split: str
) -> None:
    def both() -> None:
        body(24, method, split)
        body(21, method, split)

    ranks(count, both)


def test_a_mesh_over_the_group_of_all_ranks(ranks: Ranks) -> None:
    """Which has a name, and a communicator of that, already."""

    def run() -> None:
        group = comm.communicator().group
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        x = torch.arange(7).view(1, 7)
        own = x.clone()
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[1]):
            part = own.clone()
        assert torch.equal(context_parallel_unshard(mesh, [part], [1])[0], x)

    ranks(2, run)


class Placed(Model):
    """Is given the places of tokens in their documents."""

    def forward(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(at)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def body_documents(rows: list[list[int]], method: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    one = Placed().double()
    many = copy.deepcopy(one)
    at = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    ids, labels = (torch.randint(V, at.shape) for _ in range(2))

    def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")

    for number, row in enumerate(rows):
        documents = [x[number].split(row) for x in (ids, at, labels)]
        for words, places, goal in zip(*documents, strict=True):
            (loss_of(one(words[None], places[None]), goal[None]) / labels.numel()).backward()
    with context_parallel(
        mesh,
        buffers=[ids, labels, at],
        buffer_seq_dims=[1, 1, 1],
        documents=at.clone(),
        method=method,
    ):
        global_mean(loss_of(many(ids, at), labels), labels.numel(), mesh).backward()
    check(one, many)


@pytest.mark.parametrize("method", ["all-to-all", "ring"])
def test_documents_are_kept_apart(ranks: Ranks, method: str) -> None:
    def both() -> None:
        body_documents([[9, 3, 1, 8], [21]], method)
        body_documents([[4, 4, 5], [4, 4, 5]], method)

    ranks(2, both)


def test_unequal_labels_raise_unless_they_are_weighed(ranks: Ranks) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        one, many, ids, labels = made(16)
        labels[0, :5] = -100
        functional.cross_entropy(one(ids).flatten(0, 1), labels.flatten()).backward()
        given = {"buffers": [ids, labels], "buffer_seq_dims": [1, 1]}
        with (
            pytest.raises(
                ValueError, match=r"axis cp: the parts of its ranks have 1\d, 1\d labels"
            ),
            context_parallel(mesh, split="contiguous", **given),
        ):
            functional.cross_entropy(many(ids).flatten(0, 1), labels.flatten()).backward()
        many.zero_grad()
        with context_parallel(mesh, **given):
            losses = functional.cross_entropy(
                many(ids).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            global_mean(losses, (labels != -100).sum(), mesh).backward()
        check(one, many)
        many.requires_grad_(False)  # a backbone, on which a head is trained
        many.head.requires_grad_(True)
        with (
            pytest.raises(ValueError, match=r"axis cp: the parts of its ranks have"),
            context_parallel(mesh, split="contiguous", **given),
        ):
            functional.cross_entropy(many(ids).flatten(0, 1), labels.flatten()).backward()

    ranks(2, run)


def test_buffers_that_cannot_be_split_are_refused(ranks: Ranks) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        x = torch.zeros(1, 8)

        def refuse(match: str, *buffers: torch.Tensor, dims: tuple[int, ...] = (1,)) -> None:
            with (
                pytest.raises(ValueError, match=match),
                context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims),
            ):
                pass

        refuse("is a view", x[:, :4])
        refuse("requires gradients", x.clone().requires_grad_())
        refuse("expected buffers of one length", x, torch.zeros(1, 6), dims=(1, 1))
        refuse("a sequence dim for each, found 1 buffers and 2 dims", x, dims=(1, 1))
        refuse("a row has 1 tokens for 2 ranks. Pad it", torch.zeros(1, 1))
        with (
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
            pytest.raises(ValueError, match="is a part already"),
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        ):
            pass
        assert x.shape == (1, 8)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
            pass
        assert x.shape == (1, 4)

    ranks(2, run)


@pytest.mark.devices("host", reason="torch adds masks with scalars of the host, which devices take")
def test_attention_that_cannot_be_split_is_refused(ranks: Ranks) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        x, q = torch.zeros(1, 8), torch.randn(1, 4, 4, 4)

        def refuse(match: str, method: str = "auto", **options: object) -> None:
            with (
                context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], method=method),
                pytest.raises(ValueError, match=match),
            ):
                functional.scaled_dot_product_attention(q, q, q, **options)

        refuse(r"a 2-D mask of shape \(4, 4\) that covers only", attn_mask=torch.ones(4, 4).bool())
        refuse(r"attention dropout \(p = 0.1\), which cannot match", dropout_p=0.1)
        refuse("has a mask that is a tensor", "ring", attn_mask=torch.ones(8, 8).bool())
        q = q.unsqueeze(1)
        refuse(r"with \[\(1, 1, 4, 4, 4\), .* positions of queries, keys and values, expected 4")
        q = q.squeeze(1)
        with (
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
            pytest.raises(
                ValueError, match="axis cp: attention got 1 queries and 4 keys: expected"
            ),
        ):
            functional.scaled_dot_product_attention(q[:, :, :1], q, q)
        with pytest.raises(ValueError, match="expected one of"):
            set_rotate_method("broadcast")
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            mask = torch.ones(8, 8).tril().bool()
            one = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            other = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            torch.testing.assert_close(one, other)

    ranks(2, run)
