"""Layouts between styles: those that do not meet are found before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from meshwright import parallelize_module
from meshwright.comm import Recorder, communicator, observe
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from meshwright.testing import Ranks
from support.internals.comm import is_dtensor
from support.tensor_parallel.samples import DTensorOperators, alike, check_alike, sent, tensor_mesh

WIDTH, HEADS, LENGTH = 8, 4, 6


@dataclass
class Boxed:
    parts: list[torch.Tensor]


class Attention(nn.Module):
    """Separate projections; as many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Shape (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        shape = (batch, length, -1, WIDTH // HEADS)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(batch, length, -1))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, WIDTH)."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def sequence_plan(*, local: bool = False) -> dict[str, ParallelStyle]:
    """As torch's tutorials have it: blocks gather their input once for all their projections."""
    cut, whole = Shard(1), Replicate()
    gather = PrepareModuleInput(
        input_layouts=(cut,), desired_input_layouts=(whole,), use_local_output=local
    )
    return {
        "norms.*": SequenceParallel(),
        "attention": gather,
        "attention.[qkv]": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=cut),
        "mlp": gather,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=cut),
        "": PrepareModuleInputOutput(
            input_layouts=whole,
            desired_input_layouts=cut,
            use_local_input=True,
            output_layouts=cut,
            desired_output_layouts=whole,
        ),
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_transformer_layer_with_prepared_inputs(ranks: Ranks, size: int) -> None:
    """One gather and one reduce-scatter a block for all projections; local inputs cost k sums."""

    def body() -> None:
        length = LENGTH if size == 2 else 8
        x = torch.randn(
            2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        for local in (False, True):
            one, many = alike(Layer())
            parallelize_module(many, tensor_mesh(), sequence_plan(local=local))
            whole, given = x.clone().requires_grad_(), x.clone().requires_grad_()
            recorder, operators = Recorder(), DTensorOperators()
            expected = one(whole)
            with observe(recorder), operators:
                found = many(given)
                found.square().mean().backward()
            expected.square().mean().backward()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(given.grad, whole.grad)
            check_alike(one, many)
            assert operators.found == []
            kinds = [each.kind for each in recorder.collectives]
            forward = ["all_gather", "reduce_scatter"] * 2 + ["all_gather"]
            assert kinds[:5] == forward
            backward = sorted(kinds[5:])
            gathers, sums, scatters = 3, (5 if local else 1), (0 if local else 2)
            expected_kinds = ["all_gather"] * gathers + ["all_reduce"] * sums
            assert backward == expected_kinds + ["reduce_scatter"] * scatters, sent(recorder)

    ranks(size, body)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH)


CUT, WHOLE = Shard(1), Replicate()
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
SEQUENCE = SequenceParallel(use_local_output=True)
REPLICATED = RowwiseParallel(input_layouts=WHOLE)
MISFITS: list[tuple[list[nn.Module], dict[str, ParallelStyle], str]] = [
    # By the number of features, at every forward.
    (
        [linear(), nn.Unflatten(2, (2, -1)), nn.Flatten(2), linear()],
        {"0": COLUMNS, "3": COLUMNS},
        r"3 \(ColwiseParallel\): expected .* 8 of 8 features .* which is this rank's part",
    ),
    (
        [linear()],
        {"0": ROWS},
        r"0 \(RowwiseParallel\): expected .* 4 of 8 features .* which are all of them on every",
    ),
    # By what the style before has said, through operators that keep the layout.
    (
        [linear(), linear()],
        {"*": COLUMNS},
        r"1: expected an input placed Replicate.*output of 0 .* placed Shard\(dim=2\)",
    ),
    (
        [norm(), nn.GELU(), linear()],
        {"0": SEQUENCE, "2": COLUMNS},
        r"2: expected an input placed Replicate.*output of 0 .* placed Shard\(dim=1\)",
    ),
    (
        [norm(), nn.Dropout(0.0), linear()],
        {"0": SEQUENCE, "2": ColwiseParallel(input_layouts=Shard(0))},
        r"2: expected an input placed Shard\(dim=0\).*output of 0",
    ),
    (
        [linear(), norm()],
        {"0": REPLICATED, "1": SEQUENCE},
        r"1: expected an input placed Shard\(dim=1\).*output of 0 .* placed Replicate",
    ),
]


def test_layouts_that_do_not_meet(ranks: Ranks) -> None:
    """In the first forward, before the style that does not fit sends anything."""

    def body() -> None:
        mesh, x = tensor_mesh(), torch.randn(2, LENGTH, WIDTH)
        depth = torch._C._len_torch_function_stack()
        for modules, plan, text in MISFITS:
            model = parallelize_module(nn.Sequential(*modules), mesh, plan)
            recorder = Recorder()
            with observe(recorder), pytest.raises(ValueError, match=text):
                model(x)
            assert sent(recorder) in ([], ["all_reduce 0 forward"])
            assert torch._C._len_torch_function_stack() == depth
        # A view may be anything, so what follows it is not judged.
        views = nn.Sequential(norm(), nn.Flatten(0, 1), linear())
        parallelize_module(views, mesh, {"0": SEQUENCE, "2": COLUMNS})(x)

    ranks(2, body)


class Mixing(nn.Module):
    """A forward that keeps a value of a cut weight in a buffer, and then mixes the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.layer.weight.detach() * 2
        return functional.linear(x, self.layer.weight)


def test_what_a_first_forward_mixes_is_named_where_it_has_changed_buffers(ranks: Ranks) -> None:
    def body() -> None:
        model = parallelize_module(Mixing(), tensor_mesh(), {"layer": COLUMNS})
        model.register_forward_hook(lambda *_: None)  # which comes after ours
        with pytest.raises(RuntimeError, match="expected local tensors alone or DTensors alone"):
            model(torch.randn(2, WIDTH))

    ranks(2, body)


def test_what_is_refused_when_called(ranks: Ranks) -> None:
    def body() -> None:
        mesh, x = tensor_mesh(), torch.randn(2, LENGTH, WIDTH)

        def apply(module: nn.Module, style: ParallelStyle) -> nn.Module:
            return parallelize_module(module, mesh, style)

        def refused(error: type[Exception], text: str, module: nn.Module, *inputs: object) -> None:
            with pytest.raises(error, match=text):
                module(*inputs)

        # A local output of unequal chunks would not say how long the whole is; a DTensor does.
        part = x[:, :5, :4]
        rows = apply(linear(), RowwiseParallel(output_layouts=CUT))
        refused(ValueError, r"dim 1 has 5 rows, which 2 ranks .* use_local_output=Fal", rows, part)
        rows = apply(linear(), RowwiseParallel(output_layouts=CUT, use_local_output=False))
        assert rows(part).shape == (2, 5, 8)

        given = PrepareModuleInput(input_layouts=(CUT, None), desired_input_layouts=(WHOLE, None))
        block = apply(nn.Bilinear(8, 8, 2), given)
        length = "should have same length!"
        refused(ValueError, f"module inputs and input_layouts {length}", block, x)
        refused(AssertionError, "expecting input to be a torch.Tensor!", block, "x", x)
        pair = PrepareModuleOutput(output_layouts=(CUT, CUT), desired_output_layouts=(WHOLE, WHOLE))
        refused(ValueError, f"module outputs and output_layouts {length}", apply(linear(), pair), x)

        # Layouts cannot say which tensor of a dataclass, a dict or a list they mean.
        inside = "which tensor inside of {} they mean: pass a tensor or a tuple of tensors"
        single = PrepareModuleOutput(output_layouts=CUT, desired_output_layouts=WHOLE)
        for make in (Boxed, list, dict):
            name, box = make.__name__, {"x": x} if make is dict else make([x])
            for style, kind in ((single, AssertionError), (pair, ValueError)):
                refused(kind, inside.format(name), apply(nn.Identity(), style), box)
            refused(AssertionError, inside.format(name), apply(nn.Bilinear(8, 8, 2), given), box, x)
            refused(ValueError, inside.format(name), apply(nn.Bilinear(8, 8, 2), given), box)
        table = apply(nn.Embedding(5, 4), RowwiseParallel(input_layouts=WHOLE))
        # The host cannot see what a device has: there the device itself asserts it.
        wrong: dict[bool, tuple[type[Exception], str]] = {
            True: (IndexError, "expected ids from 0 to 4, found 0 to 5"),
            False: (RuntimeError, "Expected Tensor with single nonzero value"),
        }
        refused(*wrong[communicator().is_on_host], table, torch.tensor([0, 5]))

        # A DTensor and a plain tensor, by the names of parameters.
        text = (
            r"linear in Sequential: .* DTensors \(a tensor of shape .* \[Shard\(dim=2\)\]\) mixed"
        )
        mixed = nn.Sequential(linear(), linear())
        parallelize_module(mixed, mesh, {"0": ColwiseParallel(use_local_output=False)})
        refused(RuntimeError, f"{text} .* \\(parameter '1.weight' and parameter '1.bias'", mixed, x)

        # An exception in a forward leaves DTensors behind, and the next forward works.
        normed = apply(norm(), SEQUENCE)
        text = "expecting input of LayerNorm.* to be a torch.Tensor or DTensor, but got"
        refused(ValueError, text, normed, "x")
        refused(RuntimeError, "normalized_shape", normed, x[..., :3])
        assert all(is_dtensor(parameter) for parameter in normed.parameters())
        normed(x)

        # Keyword inputs go by their names.
        named = PrepareModuleInput(
            input_kwarg_layouts={"shift": CUT},
            desired_input_kwarg_layouts={"shift": WHOLE},
            use_local_output=True,
        )
        attention, seen = apply(Attention(), named), []
        attention.register_forward_pre_hook(
            lambda module, inputs, options: seen.append(options["shift"].shape), with_kwargs=True
        )
        attention(x, shift=x)
        assert seen == [(2, 2 * LENGTH, WIDTH)]

    ranks(2, body)
