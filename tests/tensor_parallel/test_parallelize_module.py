"""`parallelize_module`: which modules it finds, where values come from, and what it refuses."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright import comm, parallelize_module, tensor_parallel
from meshwright.comm import Recorder, observe
from meshwright.data_parallel import fully_shard
from meshwright.errors import LayoutError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    verify_replicated,
)
from meshwright.testing import Ranks
from support.internals.comm import local_leaf
from support.tensor_parallel.samples import (
    Block,
    alike,
    check_alike,
    sent,
    sequence_plan,
    tensor_mesh,
)


class Layers(nn.Module):
    """Two layers, each with an MLP and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., 4)."""
        for layer in self.layers:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())
        return x


class Scaled(nn.Linear):
    """A subclass whose forward calls the one it inherits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Twice a linear layer."""
        return 2 * super().forward(input)


class Called(torch.Tensor):
    """Layers compute twice as much with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return 2 * found.as_subclass(torch.Tensor) if func is nn.functional.linear else found


class Doubling(ParallelStyle):
    """A style of a user's: doubles the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, inputs, output: 2 * output)
        return module


MLP = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def test_plans_and_values(ranks: Ranks) -> None:
    def body() -> None:
        world, mesh = comm.communicator(), tensor_mesh()
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        # Patterns, and exactly what is sent.
        one, many = alike(Layers())
        recorder = Recorder()
        found = parallelize_module(many, mesh, MLP)
        assert found is many
        many(x)  # in the first pass parameters without a style are compared
        with observe(recorder):
            many(x.clone().requires_grad_()).sum().backward()
        one(x).sum().backward()
        check_alike(one, many)
        assert sent(recorder) == [
            "all_reduce layers.0.down forward",
            "all_reduce layers.1.down forward",
            "all_reduce layers.1.up backward",
            "all_reduce layers.0.up backward",
        ]
        again = copy.deepcopy(many)  # copies have leaves of their own
        again(x).sum().backward()
        assert local_leaf(again.layers[0]["up"].weight) is not local_leaf(
            many.layers[0]["up"].weight
        )
        torch.testing.assert_close(
            again.layers[0]["up"].weight.grad.full_tensor(), 2 * one.layers[0]["up"].weight.grad
        )

        # Every way to say the same: nested, root, sliced mesh, the mesh of a block.
        square = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("replicate", "tensor"))
        up, down = MLP["layers.*.up"], MLP["layers.*.down"]

        def by_layer(module: nn.Module) -> None:
            for layer in module.layers:
                parallelize_module(layer, mesh, {"up": up, "down": down})

        def by_module(module: nn.Module) -> None:
            for layer in module.layers:
                parallelize_module(layer["up"], mesh, up)
                parallelize_module(layer["down"], mesh, down)

        ways: list[Callable[[nn.Module], object]] = [
            by_layer,
            by_module,
            lambda m: parallelize_module(m, square["tensor"], MLP),
            lambda m: parallelize_module(m, mesh, {"layers.[01].u?": up, "*.*.down": down}),
        ]
        for way in ways:
            one, many = alike(Layers())
            way(many)
            torch.testing.assert_close(many(x), one(x))
            assert isinstance(many.layers[1]["up"].weight, DTensor)
        one, many = alike(Layers())
        with mesh:
            parallelize_module(many, parallelize_plan=MLP)
        torch.testing.assert_close(many(x), one(x))

        # A subclass with a forward of its own, and a style of the user's.
        one, many = alike(Scaled(4, 6))
        parallelize_module(many, mesh, ColwiseParallel(output_layouts=Replicate()))
        torch.testing.assert_close(many(x), one(x))
        assert isinstance(many, Scaled)
        one, many = alike(nn.Linear(4, 6))
        torch.testing.assert_close(parallelize_module(many, mesh, {"": Doubling()})(x), 2 * one(x))

        # Values are those of a rank, or each rank's own.
        for source in (0, 1, None):
            layer = nn.Linear(4, 6)
            with torch.no_grad():
                layer.weight.fill_(world.rank)
                layer.bias.fill_(world.rank)
            recorder = Recorder()
            with observe(recorder):
                parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
            expected = world.rank if source is None else source
            assert (layer.weight.to_local() == expected).all()
            kinds = [found.kind for found in recorder.collectives]
            assert kinds == ([] if source is None else ["broadcast", "broadcast"])
        layer = nn.Linear(4, 6)
        with torch.no_grad():
            layer.bias.fill_(world.rank)
        with pytest.raises(LayoutError, match=r"they replicate.* on ranks \[0, 1\], but bias is"):
            parallelize_module(layer, mesh, RowwiseParallel(), src_data_rank=None)
        layer = parallelize_module(nn.Linear(4, 6), mesh, RowwiseParallel())
        verify_replicated(layer)
        with torch.no_grad():
            layer.bias.to_local().add_(world.rank)
        with pytest.raises(LayoutError, match=r"bias is .* on ranks \[0\]; .* on ranks \[1\]"):
            verify_replicated(layer)

        # On the meta device nothing is sent; the parameters are filled later.
        with torch.device("meta"):
            layer = nn.Linear(4, 6)
        recorder = Recorder()
        with observe(recorder):
            parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert recorder.collectives == []
        layer.to_empty(device="cpu").double()
        with torch.no_grad():
            layer.weight.to_local().fill_(1.0)
            layer.bias.to_local().fill_(2.0)
        torch.testing.assert_close(layer(x), x.sum(1, keepdim=True).expand(3, 6) + 2)

    ranks(2, body)


def test_what_is_refused_when_built(ranks: Ranks) -> None:
    """The texts of torch, then what to do."""

    def body() -> None:
        mesh = tensor_mesh()
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "tensor"))
        columns, rows, cut = ColwiseParallel(), RowwiseParallel(), Shard(0)

        def on(module: nn.Module, plan: object, mesh: DeviceMesh = mesh) -> Callable[[], object]:
            return lambda: parallelize_module(module, mesh, plan)

        def twice() -> None:
            layer = nn.Linear(4, 4)
            on(layer, columns)()
            on(layer, columns)()

        called = nn.Linear(4, 4)
        called.weight = nn.Parameter(called.weight.detach().as_subclass(Called))

        def hooked() -> None:
            layer = nn.Linear(4, 4)
            layer.weight.register_post_accumulate_grad_hook(print)
            on(layer, columns)()

        def assigned() -> None:
            state = nn.LayerNorm(4).state_dict()
            layer = on(nn.Sequential(nn.LayerNorm(4)), {"0": SequenceParallel()})()
            layer.load_state_dict({f"0.{key}": value for key, value in state.items()}, assign=True)

        def replaced() -> None:
            table = on(nn.Embedding(4, 4), RowwiseParallel(input_layouts=Replicate()))()
            table.weight = nn.Parameter(torch.ones(4, 4))
            table(torch.tensor([1, 3]))

        def half_tied() -> None:
            block = Block()
            on(block, {"embed": rows})()  # the other side may get its style in a later call
            block(torch.ones(2, 3, dtype=torch.long))

        def half_tied_in(wrap: Callable[[nn.Module], object]) -> Callable[[], object]:
            block = Block()
            on(block, {"embed": rows})()
            return lambda: wrap(block)

        only = "Parallel currently only support nn.Linear and nn.Embedding!"
        length = "should have same length!"
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (NotImplementedError, f"Colwise{only}", on(nn.LayerNorm(4), columns)),
            (NotImplementedError, f"Rowwise{only}", on(nn.LayerNorm(4), rows)),
            (
                TypeError,
                r"Expect Union\[ParallelStyle, Dict\[str, ParallelStyle\]\] for parallelize_plan",
                on(Layers(), ["up"]),
            ),
            (
                TypeError,
                "parallelize_plan, <class 'str'> for 'up' found",
                on(Layers(), {"up": "c"}),
            ),
            (ValueError, "only accepts a 1D DeviceMesh, but found 2D", on(Layers(), MLP, square)),
            (
                AssertionError,
                "desired module inputs should not be None!",
                lambda: PrepareModuleInput(input_layouts=cut),
            ),
            (
                AssertionError,
                f"input_layouts and desired_input_layouts {length}",
                lambda: PrepareModuleInput(input_layouts=cut, desired_input_layouts=(cut, None)),
            ),
            (
                AssertionError,
                f"input_kwarg_layouts and desired_input_kwarg_layouts {length}",
                lambda: PrepareModuleInput(input_kwarg_layouts={"x": cut}),
            ),
            (
                AssertionError,
                f"output_layouts and desired_output_layouts {length}",
                lambda: PrepareModuleOutput(output_layouts=cut, desired_output_layouts=(cut, cut)),
            ),
            (ValueError, "sparse=True", on(nn.Embedding(4, 4, sparse=True), rows)),
            (
                ValueError,
                "max_norm=1.0 applies to whole",
                on(nn.Embedding(4, 4, max_norm=1.0), columns),
            ),
            (ValueError, "weight is a DTensor already", twice),
            (ValueError, "weight is a Called, a tensor subclass with calls", on(called, columns)),
            (ValueError, "weight has hooks for its gradient, which the DTensor", hooked),
            (ValueError, r"0.weight is a DTensor, and .* a plain tensor of shape \(4,\)", assigned),
            (
                ValueError,
                r"weight: expected 2 of 4 rows on rank . of axis tensor, found 4",
                replaced,
            ),
            (
                ValueError,
                "head.weight and embed.weight are one tied parameter, which cannot be placed",
                on(Block(), {"embed": columns, "head": columns}),
            ),
            (ValueError, "head.weight is tied to embed.weight", half_tied),
            *(
                (ValueError, "head.weight is tied to embed.weight", half_tied_in(wrap))
                for wrap in (fully_shard, FullyShardedDataParallel)
            ),
            (ValueError, "expected a ParametrizedLinear with the parameters", on(normed, columns)),
        ]
        for error, text, build in cases:
            with pytest.raises(error, match=text):
                build()
        with pytest.warns(
            UserWarning,
            match=r"Parallelize plan key 'layer.*.up' could not be resolved.*layers.0.up",
        ):
            parallelize_module(Layers(), mesh, {"layer.*.up": ColwiseParallel()})
        with pytest.warns(
            UserWarning, match="No parallelize_plan is provided and auto-parallel is not"
        ):
            parallelize_module(Layers(), mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize_module(Layers(), mesh, MLP)

    ranks(2, body)


def test_outputs_may_be_written_in_place(ranks: Ranks) -> None:
    """Of one row too, where the whole is a view of what was gathered."""

    def body() -> None:
        whole = Replicate()
        for style in (
            ColwiseParallel(output_layouts=whole),
            RowwiseParallel(input_layouts=whole),
        ):
            for rows in (1, 3):
                one, ours = alike(nn.Linear(4, 3))
                ours = parallelize_module(ours, tensor_mesh(), style)
                inputs = [torch.ones(rows, 4).double().requires_grad_() for _ in range(2)]
                for module, x in zip((one, ours), inputs, strict=True):
                    module(x).add_(1).sigmoid_().sum().backward()
                torch.testing.assert_close(inputs[1].grad, inputs[0].grad)

    ranks(2, body)


def body_of_a_reference_transformer(*, is_sequence: bool) -> None:
    """torch's example calls parallelize_module once for each layer of a tied model."""
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = object
    from torch.testing._internal.distributed._tensor import common_dtensor as theirs

    for name in tensor_parallel.__all__:
        if hasattr(theirs, name):
            setattr(theirs, name, getattr(tensor_parallel, name))
    torch.manual_seed(0)
    settings = theirs.ModelArgs(dropout_p=0.0, dim=8, n_heads=4, vocab_size=8, use_attn_mask=False)
    one = theirs.Transformer(settings).double()
    cut = theirs.Transformer.parallelize(copy.deepcopy(one), tensor_mesh(), is_sequence)
    ids = torch.arange(16).view(2, 8) % 8
    with sdpa_kernel(SDPBackend.MATH):  # torch has no other for DTensors on CPUs
        for model in (one, cut):
            model(ids).sin().sum().backward()
    pairs = zip(one.named_parameters(), cut.parameters(), strict=True)
    for (name, expected), parameter in pairs:
        found: Any = parameter.grad
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(whole, expected.grad, msg=name)


def test_a_tied_model_may_be_cut_step_by_step(ranks: Ranks) -> None:
    for is_sequence in (False, True):
        ranks(2, body_of_a_reference_transformer, is_sequence=is_sequence)


def test_modules_may_be_cut_and_run_in_inference_mode(ranks: Ranks) -> None:
    def body() -> None:
        ids = torch.arange(12).view(2, 6)
        one, model = alike(Block())
        expected = one(ids)
        with torch.inference_mode():
            cut = parallelize_module(model, tensor_mesh(), sequence_plan())
            torch.testing.assert_close(cut(ids), expected)
        with torch.no_grad():
            torch.testing.assert_close(cut(ids), expected)

    ranks(2, body)


def test_weights_may_be_computed_from_others(ranks: Ranks) -> None:
    def body() -> None:
        model = parallelize_module(nn.Linear(4, 6), tensor_mesh(), ColwiseParallel())
        x = torch.ones(2, 4)
        named = dict(model.named_parameters())
        for is_trained in (False, True):
            with torch.set_grad_enabled(is_trained):
                doubled = {name: 2 * parameter for name, parameter in named.items()}
                found = torch.func.functional_call(model, doubled, (x,))
            torch.testing.assert_close(found, 2 * model(x))
        model(x).sum().backward()
        expected = 2 * model.weight.grad.full_tensor()
        model.weight.grad = None
        found.sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), expected)

    ranks(2, body)
