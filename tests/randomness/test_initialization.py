"""Parameters from a seed: the same bits on every layout as in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm import held_boxes
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.randomness import initialize, initialize_by_blocks, module_initializer
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.internals.comm import dtensor_at_rest

Initialize = Callable[..., nn.Module]


class Scale(nn.Module):
    """A parameter of a class that torch does not know, and one that a child shares."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, 5))
        self.weight = weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factor, std=0.3)
        nn.init.xavier_normal_(self.weight)


def build() -> nn.Sequential:
    """Sizes that divide by nothing, a tied weight, buffers of three kinds."""
    tied = nn.Embedding(13, 7)
    return nn.Sequential(
        tied,
        nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11)),
        nn.Conv1d(11, 3, 2),
        nn.BatchNorm1d(3),
        nn.LSTM(3, 5),
        Scale(tied.weight),
        nn.Bilinear(2, 3, 4).double(),
    )


def built_on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return build()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_hand(seed: int) -> dict[str, torch.Tensor]:
    """What one process gives that seeds torch and resets its modules in order."""
    model = build()
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(reset := getattr(module, "reset_parameters", None), Callable):
            reset()
    return state(model)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_one_process_gives_what_resetting_gives() -> None:
    expected = by_hand(5)
    assert_same(state(initialize(build(), 5)), expected)
    before = torch.get_rng_state()
    found = initialize(built_on_meta(), 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(state(found), expected)
    assert found[0].weight is found[5].weight
    assert not torch.equal(initialize(found, 6)[0].weight, expected["0.weight"])
    meta = built_on_meta()
    draw = module_initializer(meta, 5)
    assert all(parameter.is_meta for parameter in meta.parameters())
    for module in reversed([part for part in meta.modules() if part is not meta[0]]):
        draw(module)
    meta[0].weight = meta[5].weight
    assert_same(state(meta), expected)


def placements(dims: int) -> Iterator[tuple[Placement, ...]]:
    """Every way to lay a matrix on a mesh of one or two dims."""
    one: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    if dims == 1:
        yield from ((each,) for each in one)
        return
    yield from ((a, b) for a in one for b in one)


def spread(model: nn.Module, mesh: DeviceMesh, wanted: tuple[Placement, ...]) -> None:
    """Put DTensors without values in place of the parameters, tied ones once."""
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in known:
                fits = [
                    Replicate() if isinstance(p, Shard) and p.dim >= parameter.ndim else p
                    for p in wanted
                ]
                shape = parameter.shape
                local = torch.full_like(cut(parameter.detach(), mesh, fits), math.nan)
                rest = dtensor_at_rest(local, mesh, fits, shape, parameter.stride())
                known[parameter] = nn.Parameter(rest)
            module._parameters[key] = known[parameter]


def cut(tensor: torch.Tensor, mesh: DeviceMesh, wanted: Sequence[Placement]) -> torch.Tensor:
    """This rank's part, by what torch says of its placements."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for size, index, placement in zip(mesh.mesh.shape, coordinate, wanted, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = tensor.chunk(size * int(placement.split_factor), placement.dim)
            tensor = torch.cat(pieces[index::size], placement.dim)
        elif isinstance(placement, Shard):
            pieces = tensor.chunk(size, placement.dim)
            empty = tensor.narrow(placement.dim, 0, 0)
            tensor = pieces[index] if index < len(pieces) else empty
    return tensor


@functools.cache
def mesh_of(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """A mesh as ``rank`` sees it, without a process group."""
    names = ("replicate", "shard", "tensor")[-len(shape) :]
    # torch takes meshes of the same numbers for one mesh, whoever looks at it.
    first = 1000 * (rank + 1)
    numbers = torch.arange(first, first + math.prod(shape)).view(shape)
    return DeviceMesh("cpu", numbers, mesh_dim_names=names, _init_backend=False, _rank=first + rank)


def check_layout(
    route: Initialize, make: Callable[[], nn.Module], shape: tuple[int, ...], wanted: object
) -> None:
    """Each rank's part is that of the whole, and all parts together are the whole."""
    expected = dict(route(make(), 5).named_parameters())
    seen = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in expected.items()}
    for rank in range(math.prod(shape)):
        model = make()
        spread(model, mesh_of(shape, rank), wanted)  # type: ignore[arg-type]
        route(model, 5, held=held_boxes)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            part = cut(expected[name], parameter.device_mesh, parameter.placements)
            assert torch.equal(parameter.to_local(), part), (name, rank)
            for box, memory in held_boxes(parameter):
                assert torch.equal(memory, expected[name][box.slices()]), (name, rank)
                seen[name][box.slices()] = True
    assert all(each.all() for each in seen.values())


@pytest.mark.few(2)
@pytest.mark.parametrize("route", [initialize, initialize_by_blocks])
@pytest.mark.parametrize(
    "shape",
    [(2,), (3,), (2, 2), *(pytest.param(s, marks=pytest.mark.slow) for s in ((4,), (8,), (4, 4)))],
)
def test_every_placement_holds_its_part_of_one_model(
    route: Initialize, shape: tuple[int, ...]
) -> None:
    for wanted in placements(len(shape)):
        check_layout(route, build, shape, wanted)


@pytest.mark.parametrize("route", [initialize, initialize_by_blocks])
def test_rows_in_strides_are_drawn_too(route: Initialize) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 12), nn.Embedding(24, 2))

    check_layout(route, make, (2, 3), (_StridedShard(0, split_factor=3), Shard(0)))
    check_layout(route, make, (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))


def test_blocks_are_random_and_drawn_only_where_they_are_held() -> None:
    whole = initialize_by_blocks(nn.Linear(1 << 10, 1 << 9), 3).weight.detach()
    assert len({tuple(block[0, :4].tolist()) for block in whole.view(8, 64, -1)}) == 8
    assert whole.abs().max() <= 1 / 32
    assert whole.var().item() == pytest.approx(1 / 3 / 1024, rel=0.02)
    model = nn.Linear(1 << 10, 1 << 9)
    spread(model, mesh_of((8,), 5), (Shard(0),))
    with Drawn() as drawn:
        initialize_by_blocks(model, 3, held=held_boxes)
    assert torch.equal(held_boxes(model.weight)[0][1], whole[320:384])
    assert drawn.elements == (1 << 16) + (1 << 9)  # one block of the weight, the only of the bias


class Drawn(TorchDispatchMode):
    """Counts elements that are drawn."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if torch.Tag.nondeterministic_seeded in func.tags and args[0].device.type == "cpu":
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


class Lazy(nn.Module):
    def __init__(self, *, padded: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.padded = padded

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)
        if self.padded:
            self.table[0] = 3.0


class Meddler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.inner.reset_parameters()


def test_what_cannot_be_initialized_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict({"a": Bare(), "b": nn.Linear(2, 2), "c": Bare()})
    for route in (initialize, initialize_by_blocks, module_initializer):
        with pytest.raises(ValueError, match=r"nobody can initialize a \(Bare\), c \(Bare\): give"):
            route(model, 0)

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter)

    one = initialize(model, 0, init=init)["a"].weight.tolist()
    assert initialize(model, 0, init=init)["a"].weight.tolist() == one != [1.0] * 4
    # A value that is known may stay; memory that was never written to may not.
    assert torch.equal(initialize(Lazy(), 0).table, torch.arange(4.0))
    for padded in (False, True):
        with torch.device("meta"):
            lazy = nn.Sequential(Lazy(padded=padded))
        with pytest.raises(RuntimeError, match=r"'0\.table' has elements that its module's init"):
            initialize(lazy, 0)
    with pytest.raises(RuntimeError, match=r"'' \(Meddler\) writes to parameters of modules below"):
        initialize(Meddler(), 0)
    for odd in (nn.Embedding(4, 2, padding_idx=1), Lazy(padded=True)):
        with pytest.raises(ValueError, match="does not treat all elements alike"):
            initialize_by_blocks(nn.Sequential(odd), 0)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_models_of_hugging_face_keep_their_own_initialization(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 29, "n_positions": 16}
    if kind == "llama":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
        sizes |= {"vocab_size": 29, "intermediate_size": 16, "max_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(kind, **sizes)

    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(config)

    torch.manual_seed(5)
    theirs = make()
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    with torch.device("meta"):
        model = make()
    initialize(model, 5)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == expected.keys()
    # Building draws by torch's own rules too, so only how values are spread can be compared.
    for name, tensor in found.items():
        wanted = expected[name]
        if wanted.numel() < 200 or wanted.std() == 0:
            assert torch.equal(tensor, wanted), name
        else:
            assert tensor.std().item() == pytest.approx(wanted.std().item(), rel=0.3), name
    for wanted in placements(1):
        again = make()
        spread(again, mesh_of((3,), 1), wanted)
        initialize(again, 5, held=held_boxes)
        for name, parameter in again.named_parameters():
            for box, memory in held_boxes(parameter):
                assert torch.equal(memory, found[name][box.slices()]), name


def body_strategies() -> None:
    """Models that are laid out already, from the meta device where that is possible."""
    expected = dict(initialize(build(), 5).named_parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for make in (build, built_on_meta):
        model = make()
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        initialize(model, 5, held=held_boxes)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), name  # type: ignore[operator]
        assert dict(model.named_buffers())["3.running_mean"].tolist() == [0.0] * 3
        assert model[0].weight is model[5].weight
    copies = replicate(initialize(built_on_meta(), 5))
    for name, parameter in copies.named_parameters():
        assert torch.equal(parameter, expected[name]), name

    def chain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 7), nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2)))

    wanted = initialize(chain(), 5).state_dict()
    with torch.device("meta"):
        model = chain()
    draw = module_initializer(model, 5)
    model[1] = FullyShardedDataParallel(model[1], param_init_fn=draw, use_orig_params=True)
    facade = FullyShardedDataParallel(model, param_init_fn=draw, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(facade):
        found = {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in facade.named_parameters()
        }
    assert_same(found, wanted)


def body_tensor_parallel() -> None:
    """Axes ``shard`` and ``tensor`` cut the same dim: rows in strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))

    expected = dict(initialize(make(), 5).named_parameters())
    model = parallelize_module(
        make(), mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()}
    )
    for module in (model[1], model[3], model):
        fully_shard(module, mesh=mesh["shard"])
    initialize(model, 5, held=held_boxes)
    found = dict(model.named_parameters())
    assert isinstance(found["1.weight"].placements[0], _StridedShard)
    for name, parameter in found.items():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    words = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model(words), initialize(make(), 5)(words))


@pytest.mark.slow
def test_tensor_parallel_models_hold_the_same_model(ranks: Ranks) -> None:
    ranks(4, body_tensor_parallel)


def test_strategies_hold_the_same_model(ranks: Ranks) -> None:
    ranks(2, body_strategies)
