"""Parameters that are tensor subclasses: gathered as they say, kept, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.comm import communicator
from meshwright.data_parallel import MixedPrecisionPolicy, flat_groups, fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

LEVELS = 31


class Wrapper(torch.Tensor):
    """A tensor around another of its shape and dtype, in all operators."""

    @staticmethod
    def __new__(cls: Any, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, found)


class Rounded(Wrapper):
    """Gathered as integers and one scale: float8 training in the large."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest = self.held.abs().amax() if self.held.numel() else self.held.new_zeros(())
        if mesh.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / LEVELS
        return ((self.held / scale).round().to(torch.int8),), scale

    def fsdp_post_all_gather(
        self, outputs: Any, scale: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (levels,) = outputs
        if out is not None:
            out.copy_(levels[: out.shape[0]] * scale)
            return None
        whole = (levels * scale).to(dtype)
        return whole, (levels, whole)


class Levels(torch.Tensor):
    """A whole weight that stays in integers: only products see it as floats."""

    @staticmethod
    def __new__(cls: Any, levels: torch.Tensor, scale: torch.Tensor) -> Any:
        shape, stride = levels.shape, levels.stride()
        return torch.Tensor._make_wrapper_subclass(cls, shape, stride, dtype=scale.dtype)

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor) -> None:
        self.levels, self.scale = levels, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten.detach,
            torch.ops.aten.t,
            torch.ops.aten.as_strided,
            torch.ops.aten.view,
        ):
            first = args[0]
            return cls(func(first.levels, *args[1:], **(kwargs or {})), first.scale)
        args, kwargs = tree_map_only(cls, lambda each: each.levels * each.scale, (args, kwargs))
        return func(*args, **(kwargs or {}))


class Quantized(Rounded):
    """As `Rounded`, and computes as `Levels`."""

    def fsdp_pre_all_gather(  # pyrefly: ignore[bad-override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        assert tuple(outer_stride) == (outer_size[1], 1)
        (levels,), scale = super().fsdp_pre_all_gather(mesh)
        rows = -(-outer_size[0] // mesh.size())
        padded = levels.new_zeros((rows, outer_size[1]))
        padded[: levels.shape[0]] = levels
        return (padded,), scale

    def fsdp_post_all_gather(
        self, outputs: Any, scale: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (levels,) = outputs
        if out is not None:
            out.scale.copy_(scale)  # pyrefly: ignore[missing-attribute]
            return None
        return Levels(levels, scale.to(dtype)), (levels,)


class Marked(torch.Tensor):
    """With memory of its own, and gathered in two parts: as whole numbers and what is left."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return (plain.floor().to(torch.int16), plain - plain.floor()), self.mark

    def fsdp_post_all_gather(
        self, outputs: Any, mark: str, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        assert mark == "kept"
        whole, rest = outputs
        if out is not None:
            out.copy_((whole + rest)[: out.shape[0]])
            return None
        made = (whole + rest).to(dtype)
        return made, (whole, rest, made)


class Asis(Wrapper):
    """Gathered in the dtype of the computation: the whole is what has arrived."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self.held.to(mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return None if out is not None else (outputs[0], (outputs[0],))


class Half(Wrapper):
    """Half of the protocol."""

    fsdp_pre_all_gather = Rounded.fsdp_pre_all_gather


class Pair(Wrapper):
    """Its values are in two tensors."""

    fsdp_pre_all_gather = Rounded.fsdp_pre_all_gather
    fsdp_post_all_gather = Rounded.fsdp_post_all_gather

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # pyrefly: ignore[bad-override]
        self.other = self.held
        return ["held", "other"], None


class Python(nn.Parameter):
    """Nothing but a method and an attribute, which forward uses."""

    factor = 1.0

    def scaled(self) -> torch.Tensor:
        return self * self.factor


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Python(torch.ones(3, 5))
        self.weight.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.scaled()


class Straight(nn.Linear):
    """One process: what computes has the values of the extension, the gradient goes through."""

    cls: Any = None
    dtype: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.weight.detach()
        seen = plain
        if self.cls in (Rounded, Quantized):
            scale = plain.abs().amax() / LEVELS
            seen = (plain / scale).round() * scale
        return nn.functional.linear(x, self.weight + (seen - plain), self.bias)


def build(cls: Any, *, is_one: bool) -> Any:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for ins, outs in ((6, 8), (8, 5), (5, 3)):
        layer = (Straight if is_one else nn.Linear)(ins, outs, dtype=torch.float64)
        if is_one:
            layer.cls = cls  # pyrefly: ignore[missing-attribute]
        else:
            if cls is Marked:
                weight: Any = layer.weight.detach().as_subclass(Marked)
            elif ins == 8:
                weight = cls(layer.weight)  # around the parameter itself, as torchao's float8
            else:
                weight = cls(layer.weight.detach())
            layer.weight = nn.Parameter(weight)
            layer.weight.mark = "kept"  # pyrefly: ignore[missing-attribute]
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


def steps(model: Any, rank: int, size: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    losses: list[float] = []
    for step in range(4):
        batch = torch.randn(
            8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        for part in range(2):
            mine = batch[rank + part * size :: 2 * size]
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == 1)
            loss = model(mine).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(parameter: Any) -> torch.Tensor:
    """The values of a parameter of any class."""
    if not isinstance(parameter, DTensor):
        return getattr(parameter, "held", parameter).detach().as_subclass(torch.Tensor)
    local = parameter._local_tensor
    plain = getattr(local, "held", local).as_subclass(torch.Tensor)
    mesh, places = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    found = DTensor.from_local(plain, mesh, places, run_check=False, shape=shape, stride=stride)
    return found.full_tensor().detach()


def compare(cls: Any, *, mesh: Any = None, after: Any = None) -> None:
    world = communicator()
    model = build(cls, is_one=False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=after)
    fully_shard(model, mesh=mesh, reshard_after_forward=after)
    weight: Any = model[0].weight
    assert type(weight._local_tensor) is cls
    one = build(cls, is_one=True)
    steps(model, world.rank, world.size)
    steps(one, 0, 1)
    for (name, found), (_, expected) in zip(
        model.named_parameters(), one.named_parameters(), strict=True
    ):
        torch.testing.assert_close(whole(found), whole(expected), msg=f"{cls.__name__} {name}")
    # Loaded, converted, and used again.
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.load_state_dict(state)
    torch.testing.assert_close(whole(model[0].weight), whole(one[0].weight))
    assert type(model[0].weight._local_tensor) is cls
    x = torch.ones(2, 6, dtype=torch.float64)
    output = model(x)
    torch.testing.assert_close(output, one(x))
    output.sum().backward()


def body() -> None:
    for cls in (Rounded, Quantized, Marked, Asis):
        for after in (None, False):
            compare(cls, after=after)
    model = build(Rounded, is_one=False)
    model[0].weight.held.add_(communicator().rank)
    fully_shard(model, sync_module_states=True)
    torch.testing.assert_close(whole(model[0].weight), whole(build(Rounded, is_one=True)[0].weight))
    model = build(Asis, is_one=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    fully_shard(model, mp_policy=policy)
    model(torch.ones(2, 6)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float64


def body_of_metadata() -> None:
    """A scale that was made on the stream of gathers is there until the computation has read it."""
    compare(Rounded)


@pytest.mark.devices("simulated")
def test_what_comes_with_a_gather_stays_until_it_is_read(ranks: Ranks) -> None:
    ranks(2, body_of_metadata)


def body_of_classes() -> None:
    """A mere Python subclass computes as one; other dims, and the class, refuse extensions."""
    for strategy in ("fully_shard", "flat", "original"):
        one, model = Uses(), Uses()
        sharded: Any = model
        if strategy == "fully_shard":
            fully_shard(model)
        else:
            sharded = FSDP(model, use_orig_params=strategy == "original")
        x = torch.ones(2, 3)
        torch.testing.assert_close(sharded(x), one(x))
    x = torch.ones(2, 3)
    tied = nn.Sequential(Uses(), nn.Linear(5, 3), Uses())
    tied[2].weight = tied[0].weight
    expected = tied(x)
    fully_shard(tied[0])  # it moves from this unit to the one around both
    fully_shard(tied)
    torch.testing.assert_close(tied(x), expected)
    linear = build(Rounded, is_one=False)[0]
    with pytest.raises(TypeError, match=r"'weight' is a Rounded.*Shard it with fully_shard alone"):
        FSDP(copy.deepcopy(linear))
    for cls, text in (
        (Wrapper, "Wrapper, a tensor subclass that has not both of fsdp_pre_all_gather"),
        (Half, "Half, a tensor subclass that has not both"),
        (Pair, "Pair, a tensor subclass that has not its values in one plain tensor"),
    ):
        for shard in (fully_shard, FSDP):
            layer = build(cls, is_one=False)[0]
            with pytest.raises(TypeError, match="'weight' is a"):
                shard(layer)
        with pytest.raises(TypeError, match=text):
            fully_shard(build(cls, is_one=False)[0])
    left_out = build(Wrapper, is_one=False)[0]
    fully_shard(left_out, ignored_params={left_out.weight})
    assert type(left_out.weight) is Wrapper
    model = fully_shard(build(Rounded, is_one=False)[0])
    with pytest.raises(ValueError, match="build the optimizer of the module's parameters"):
        flat_groups(model)


def body_over_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for cls in (Rounded, Quantized, Marked, Asis):
        compare(cls, mesh=mesh)
        compare(cls)


def test_subclasses_with_extensions(ranks: Ranks) -> None:
    ranks(2, body)


def test_subclasses_that_are_kept_or_refused(ranks: Ranks) -> None:
    ranks(2, body_of_classes)


@pytest.mark.slow
@pytest.mark.backends("shm", "gloo")
def test_extensions_over_two_axes(ranks: Ranks) -> None:
    ranks(4, body_over_axes)
