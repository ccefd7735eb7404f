"""Training on several ranks to the numbers of one process, and exactly what is sent."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call
from torch.nn import functional

from meshwright import comm, parallelize_module
from meshwright.comm import Recorder, observe
from meshwright.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    cross_entropy_of_parts,
)
from meshwright.testing import Ranks
from support.internals.comm import PartialGradient, deliver, local_leaf
from support.tensor_parallel.samples import (
    WORDS,
    Block,
    DTensorOperators,
    alike,
    check_alike,
    sent,
    sequence_plan,
    tensor_mesh,
)

SEQUENCE = [
    "reduce_scatter embed forward",
    "all_gather up forward",
    "reduce_scatter down forward",
    "all_gather head forward",
    "all_gather head forward",
    "reduce_scatter head backward",
    "all_gather down backward",
    "reduce_scatter up backward",
    "all_gather embed backward",
    "all_reduce partial gradients",
]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_those_of_one_process(ranks: Ranks, size: int) -> None:
    """Sizes 7, 10 and 13 divide by neither 2 nor 4; AdamW and torch's clipping see DTensors."""

    def body() -> None:
        one, many = alike(Block())
        parallelize_module(many, tensor_mesh(), sequence_plan())
        assert many.head.weight is many.embed.weight
        ids = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (one, many)]
        for step in range(10):
            recorder, operators = Recorder(), DTensorOperators()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2 if step == 3 else 1):  # two backwards accumulate
                expected = one(ids).square().mean()
                expected.backward()
                with observe(recorder), operators:
                    loss = many(ids).square().mean()
                    loss.backward()
                torch.testing.assert_close(loss, expected)
            assert sent(recorder) == SEQUENCE * (2 if step == 3 else 1)
            assert operators.found == []
            check_alike(one, many)
            for parameter in many.parameters():
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter, nn.Parameter)
                leaf = local_leaf(parameter)
                assert leaf.grad is None
                assert leaf.data_ptr() == parameter.to_local().data_ptr()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (one, many)]
            torch.testing.assert_close(norms[1].full_tensor(), norms[0])
            for optimizer in optimizers:
                optimizer.step()
            check_alike(one, many, of="data")

    ranks(size, body)


def replicated_plan() -> dict[str, ParallelStyle]:
    """Whole activations between the layers, logits that are cut by classes."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(),
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loss_on_logits_that_are_cut(ranks: Ranks, size: int, tmp_path: Path) -> None:
    """Three sums of a number for each token; the head's gradient is one; DCP takes all of it."""

    def body() -> None:
        axis = comm.communicator()
        one, many = alike(Block())
        parallelize_module(many, tensor_mesh(), replicated_plan())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (one, many)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            ids = torch.randint(0, WORDS, (3, 8), generator=generator)
            target = torch.randint(0, WORDS, (24,), generator=generator)
            target[::5] = -100
            expected = functional.cross_entropy(one(ids).flatten(0, 1), target)
            expected.backward()
            recorder = Recorder()
            with observe(recorder):
                logits = many(ids).flatten(0, 1)
                loss = cross_entropy_of_parts(logits, target, axis, classes=WORDS)
                loss.backward()
            torch.testing.assert_close(loss, expected)
            check_alike(one, many)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert sent(recorder) == [
            "all_reduce embed forward",
            "all_reduce down forward",
            "all_reduce largest logit",
            "all_reduce sum of exponentials",
            "all_reduce logit of the class",
            "all_reduce head backward",
            "all_reduce up backward",
        ]
        assert [c.shape for c in recorder.collectives[2:5]] == [(24,)] * 3
        check_alike(one, many, of="data")
        model, optimizer = get_state_dict(many, optimizers[1])
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        # One process reads what the ranks have written, and goes on to the same numbers.
        other = Block().double()
        whole, state = get_state_dict(other, torch.optim.AdamW(other.parameters(), lr=0.01))
        dcp.load({"model": whole, "optimizer": state}, checkpoint_id=tmp_path)
        for name, found in one.state_dict().items():
            torch.testing.assert_close(whole[name], found)
        moments = state["state"]["up.weight"]["exp_avg"]
        torch.testing.assert_close(moments, optimizers[0].state[one.up.weight]["exp_avg"])

    ranks(size, body)


def test_without_the_sum_of_partial_gradients_the_comparison_fails(ranks: Ranks) -> None:
    """The tests above see the gradient of a norm that each rank takes of its own positions."""

    def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialGradient, "__call__", lambda self, *given: deliver(*given))
            one, many = alike(Block())
            parallelize_module(many, tensor_mesh(), sequence_plan())
            ids = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))
            one(ids).square().mean().backward()
            many(ids).square().mean().backward()
            with pytest.raises(AssertionError, match="norm.weight"):
                check_alike(one, many)

    ranks(2, body)


def test_leaves_follow_their_parameters(ranks: Ranks) -> None:
    """Freezing, conversion, hooks, several backwards, and gradients of gradients."""

    def body() -> None:
        one, many = alike(Block())
        parallelize_module(many, tensor_mesh(), sequence_plan())
        ids = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))

        def train() -> None:
            for model in (one, many):
                model.zero_grad()
                model(ids).square().mean().backward()
            check_alike(one, many)

        for model in (one, many):
            model.up.weight.requires_grad_(False)
        train()
        for model in (one, many):
            model.up.weight.requires_grad_(True)
        train()
        weight = many.up.weight
        before, gradient = local_leaf(weight), weight.grad.to_local()
        many(ids).square().mean().backward()
        assert weight.grad.to_local().data_ptr() == gradient.data_ptr()
        with torch.no_grad():
            for model in (one, many):
                model.up.weight.mul_(2)
        train()
        assert local_leaf(weight) is before
        many.float()
        assert many(ids).dtype == torch.float32
        many.double()
        assert local_leaf(many.up.weight) is not before
        calls = []
        many.down.bias.register_hook(lambda gradient: calls.append("gradient") or 3 * gradient)
        many.down.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
        many.zero_grad()
        many(ids).square().mean().backward()
        assert calls == ["gradient", "after"]
        found = many.down.bias.grad.full_tensor()
        torch.testing.assert_close(found, 3 * one.down.bias.grad, rtol=1e-5, atol=1e-6)
        loss = many(ids).square().mean()
        with torch.no_grad():
            many.up.weight.mul_(1)
        with pytest.raises(RuntimeError, match="up.weight has been modified by an inplace"):
            loss.backward()

        # An operator on the DTensor itself leaves a part of a sum, or a whole gradient.
        one, many = alike(nn.LayerNorm(6))
        parallelize_module(many, tensor_mesh(), SequenceParallel())
        x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (one(x) * one.weight).square().sum().backward()
        one.weight.square().sum().backward()
        found = many(x.chunk(2, 1)[comm.communicator().rank]) * many.weight
        found.square().sum().full_tensor().backward()
        many.weight.square().sum().full_tensor().backward()
        check_alike(one, many)

        # A forward under autocast gives what one process gives.
        layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        one, many = alike(layers)
        one, many = one.float(), many.float()
        parallelize_module(many, tensor_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = many(x.float()), one(x.float())
        found.float().sum().backward()
        expected.float().sum().backward()
        assert found.dtype == expected.dtype == torch.bfloat16
        for name, whole in one.named_parameters():
            part = many.get_parameter(name).grad
            assert part.dtype == torch.float32
            torch.testing.assert_close(part.full_tensor(), whole.grad, rtol=0.05, atol=0.05)

    ranks(2, body)


class Fused(nn.Module):
    """Two matrices in one layer, whose bias has a gradient that is summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(10, 8), nn.Linear(4, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ramp = torch.linspace(-1, 1, 10, dtype=torch.float64, device=ids.device)
        rows = ramp * (1 + ids).unsqueeze(-1)
        gate, up = self.both(rows).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


def _full(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def _as_asked(model: nn.Module, ids: torch.Tensor, way: str) -> list[torch.Tensor]:
    """Gradients of parameters of ``model``, or of a penalty on those, by one of torch's ways."""
    parameters = dict(model.named_parameters())
    given = list(parameters.values())
    if way == "functional":
        twice = {name: 2 * parameter for name, parameter in parameters.items()}
        functional_call(model, twice, (ids,)).square().mean().backward()
        return _full(p.grad for p in given)
    loss = model(ids).square().mean()
    match way:
        case "grad":
            return _full(torch.autograd.grad(loss, given))
        case "unused":
            return _full(torch.autograd.grad(loss, given[1:2], allow_unused=True))
        case "inputs":
            loss.backward(inputs=given[::2])
            assert all(p.grad is None for p in given[1::2])
            return _full(p.grad for p in given[::2])
        case "graph":
            loss.backward(create_graph=True)
            first = [p.grad for p in given]
        case _:
            first = torch.autograd.grad(loss, given, create_graph=True)
    for parameter in given:
        parameter.grad = None
    penalty = torch.stack(_full(g.square().sum() for g in first)).sum()
    penalty.backward()
    return [*_full(p.grad for p in given), *_full(g.detach() for g in first)]


@pytest.mark.few(6, slow=6)
@pytest.mark.backends("gloo", "shm")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", ["grad", "unused", "inputs", "penalty", "graph", "functional"])
def test_gradients_of_parameters_are_given_to_whoever_asks(ranks: Ranks, way: str) -> None:
    """They are DTensors, placed as the parameters, and those of one process."""

    def body() -> None:
        fused = {"both": FusedColwiseParallel(2), "down": RowwiseParallel()}
        ids = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))
        calls: list[torch.Size] = []
        whole = {**replicated_plan(), "head": ColwiseParallel(output_layouts=Replicate())}
        for kind, plan in (Block, sequence_plan()), (Block, whole), (Fused, fused):
            one, many = alike(kind())
            parallelize_module(many, tensor_mesh(), plan)
            calls.clear()
            for parameter in many.parameters():
                parameter.register_hook(lambda gradient: calls.append(gradient.shape))
            found = _as_asked(many, ids, way)
            torch.testing.assert_close(found, _as_asked(one, ids, way))
            calls.clear()
            for model in (one, many):  # and backward goes on as ever
                model.zero_grad()
                for _ in range(2):
                    model(ids).square().mean().backward()
            check_alike(one, many)
            assert sorted(calls) == sorted([p.shape for p in one.parameters()] * 2)

    ranks(2, body)


def test_a_penalty_on_the_gradient_of_the_input_trains(ranks: Ranks) -> None:
    """Through local tensors and DTensors, placed as each style may give them."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    cut = {"1": ColwiseParallel(input_layouts=Shard(1)), "3": rows}
    partial, summand = {"output_layouts": Partial()}, RowwiseParallel(output_layouts=Partial())
    plans = (
        {"1": columns, "3": rows},
        {
            "1": ColwiseParallel(use_local_output=False),
            "3": RowwiseParallel(use_local_output=False),
        },
        {"": _given(Shard(1)), "0": SequenceParallel(), **cut},
        {"1": columns, "3": RowwiseParallel(**partial, use_local_output=False)},
        {"1": columns, "3": summand, "": _left(Shard(1))},
        {"1": columns, "3": summand, "": _left(Replicate())},
        {"0": _left(Replicate(), of=Replicate()), "1": columns, "3": rows},
        {"0": _left(Shard(1), of=Replicate()), **cut},
    )

    def body() -> None:
        x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for plan in plans:
            layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
            one, many = alike(layers)
            parallelize_module(many, tensor_mesh(), plan)
            found = []
            for model in (one, many):
                given = x.clone().requires_grad_()
                y = model(given)
                y = y.full_tensor() if isinstance(y, DTensor) else y
                (slope,) = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
                (slope.square().sum() + y.square().mean()).backward()
                found.append((given.grad, _curved(model, x)))
            torch.testing.assert_close(*found)
            check_alike(one, many)

    ranks(2, body)


def test_dropout_of_parts_is_that_of_one_process(ranks: Ranks) -> None:
    """As a style's module, and of the DTensors that styles give."""
    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    scattered = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plans = (
        {"0": columns, "2": rows},
        {"0": columns, "2": scattered, "3": SequenceParallel()},
        {
            "0": columns,
            "2": RowwiseParallel(output_layouts=Shard(1)),
            "3": SequenceParallel(use_local_output=True),
            "": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        },
    )

    def body() -> None:
        x = torch.arange(32, dtype=torch.float64).view(2, 4, 4)
        for plan in plans:
            layers = nn.Sequential(
                nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 4), nn.Dropout(0.5)
            )
            one, many = alike(layers)
            parallelize_module(many, tensor_mesh(), plan)
            found = []
            for model in (one, many):
                torch.manual_seed(7)
                y = model(x)
                y = y.full_tensor() if isinstance(y, DTensor) else y
                y.square().sum().backward()
                found.append((y, torch.rand(2)))
            torch.testing.assert_close(*found)
            check_alike(one, many)

    ranks(2, body)


def _curved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute the second derivative times ``x``: torch differentiates three times for it."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y.full_tensor() if isinstance(y, DTensor) else y).sin().sum()

    return torch.autograd.functional.hvp(loss, x, x)[1]


def _given(layout: Shard) -> PrepareModuleInput:
    """Make the style of a model that is given all, and goes on with DTensors of a ``layout``."""
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=layout)


def _left(layout: Shard | Replicate, of: Partial | Replicate | None = None) -> PrepareModuleOutput:
    """Make the style of a module that gives what its ranks have as a DTensor in a ``layout``."""
    return PrepareModuleOutput(
        output_layouts=of or Partial(), desired_output_layouts=layout, use_local_output=False
    )


@pytest.mark.slow
def test_a_compiler_leaves_the_communication_out_of_its_graphs(ranks: Ranks) -> None:
    def body() -> None:
        one, many = alike(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
        parallelize_module(many, tensor_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).double()
        compiled = torch.compile(many, backend="aot_eager")
        for _ in range(2):
            one(x).sin().sum().backward()
            with warnings.catch_warnings():  # torch's own, of what it looks at while it traces
                warnings.simplefilter("ignore", UserWarning)
                compiled(x).sin().sum().backward()
        check_alike(one, many)

    ranks(2, body)


def test_layers_of_torch_evaluate_as_they_train(ranks: Ranks) -> None:
    """torch computes an encoder's layer with one operator in evaluation, past its modules."""

    def body() -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=10, dropout=0.0, batch_first=True)
        one = nn.TransformerEncoder(layer, 2).double()
        plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
        many = parallelize_module(copy.deepcopy(one), tensor_mesh(), plan)
        many = copy.deepcopy(many)
        one.use_nested_tensor = False  # it warns
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        mask = torch.tensor([[False, False, True], [False, False, False]])
        for options in ({}, {"src_key_padding_mask": mask}):
            for model in (one, many):
                model.train()
                model(x, **options)[~mask].square().sum().backward()
                model.eval()
            with torch.no_grad():
                found, expected = many(x, **options), one(x, **options)
            torch.testing.assert_close(found[~mask], expected[~mask])
        check_alike(one, many)
        outer = {"layers.0.self_attn.out_proj": RowwiseParallel()}
        with pytest.raises(
            ValueError, match=r"layers\.0\.self_attn\.out_proj has a style, but nn\."
        ):
            parallelize_module(one, tensor_mesh(), outer)

    ranks(2, body)
