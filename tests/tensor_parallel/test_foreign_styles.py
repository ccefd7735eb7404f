"""Styles of torch's protocol: torch's own, subclasses of it, and subclasses of ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module

import meshwright.tensor_parallel as ours
from meshwright import parallelize_module
from meshwright.mesh import DeviceMesh
from meshwright.testing import Ranks
from support.tensor_parallel.samples import WORDS, Block, alike, check_alike, tensor_mesh


def by_their_helpers(home: Any) -> type[Any]:
    """A style that lays out the parts that its base offers, and gives its output out otherwise."""

    class Scattering(home.SequenceParallel):
        @staticmethod
        def _prepare_output_fn(
            is_local: bool, factor: float, mod: nn.Module, outputs: Any, mesh: DeviceMesh
        ) -> torch.Tensor:
            found = outputs * factor
            return found.to_local() if is_local else found

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(
                module,
                device_mesh,
                self._replicate_module_fn,
                partial(self._prepare_input_fn, self.sequence_sharding),
                partial(self._prepare_output_fn, self.use_local_output, 1.0),
            )

    return Scattering


def by_one_helper(base: type[Any], name: str) -> type[Any]:
    """A subclass that changes one part and counts its calls, and leaves ``_apply`` to its base."""
    given = getattr(base, name)

    @wraps(given)
    def counted(*args: Any) -> Any:
        kind.calls += 1
        return given(*args)

    counted.__module__ = __name__
    is_method = next(iter(signature(given).parameters)) == "self"
    body: dict[str, Any] = {"calls": 0, name: counted if is_method else staticmethod(counted)}
    kind: Any = type(f"Own{base.__name__}", (base,), body)
    return kind


def plan_of(
    home: Any,
    sequence: Callable[[], object],
    columns: Callable[..., object],
    rows: Callable[..., object],
) -> Mapping[str, Any]:
    cut = Shard(1)
    return {
        "embed": home.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=cut, use_local_output=False
        ),
        "norm": sequence(),
        "up": columns(input_layouts=cut),
        "down": rows(output_layouts=cut, use_local_output=False),
        "head": home.ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }


class Untied(Block):
    """As `Block`, with sizes that ranks share equally, and weights of its own in the head."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=6)
        self.head = nn.Linear(8, WORDS + 1)


def check_plan(plan: Mapping[str, Any]) -> None:
    one, many = alike(Untied())
    parallelize_module(many, tensor_mesh(), plan)
    ids = torch.randint(0, WORDS - 1, (3, 8), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
    for _ in range(3):
        losses = [model(ids).square().mean() for model in (one, many)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        check_alike(one, many)
        for optimizer in optimizers:
            optimizer.step()
    check_alike(one, many, of="data")


@pytest.mark.few(3)
@pytest.mark.backends("gloo", "shm")
@pytest.mark.parametrize("kinds", ["torch's", "built", "mixed"])
def test_styles_that_build_on_torchs_protocol_train_as_one_process(
    ranks: Ranks, kinds: str
) -> None:
    def body() -> None:
        if kinds == "torch's":
            parts = theirs, theirs.SequenceParallel, theirs.ColwiseParallel, theirs.RowwiseParallel
        elif kinds == "built":
            built = by_their_helpers(ours)
            parts = ours, built, ours.ColwiseParallel, ours.RowwiseParallel
        else:
            built = by_their_helpers(theirs)
            parts = ours, built, theirs.ColwiseParallel, ours.RowwiseParallel
        check_plan(plan_of(*parts))

    ranks(2, body)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("norm", "_replicate_module_fn"),
        ("norm", "_prepare_input_fn"),
        ("norm", "_prepare_output_fn"),
        ("up", "_partition_linear_fn"),
        ("up", "_prepare_input_fn"),
        ("down", "_partition_linear_fn"),
        ("down", "_prepare_output_fn"),
    ],
)
def test_a_part_of_a_style_that_a_subclass_changes_is_called(
    ranks: Ranks, place: str, name: str
) -> None:
    def body() -> None:
        kinds = {
            "norm": ours.SequenceParallel,
            "up": ours.ColwiseParallel,
            "down": ours.RowwiseParallel,
        }
        kinds[place] = by_one_helper(kinds[place], name)
        check_plan(plan_of(ours, kinds["norm"], kinds["up"], kinds["down"]))
        assert kinds[place].calls

    ranks(2, body)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (ours.PrepareModuleInput, "_prepare_input_arg"),
        (ours.PrepareModuleInput, "_prepare_input_fn"),
        (ours.PrepareModuleInput, "_prepare_input_kwarg_fn"),
        (ours.PrepareModuleOutput, "_prepare_out_fn"),
        (ours.FusedColwiseParallel, "_partition_linear_fn"),
        (ours.SequenceParallel, "_partition_linear_fn"),
    ],
)
@pytest.mark.parametrize("calls_super", [False, True])
def test_a_part_that_no_style_of_ours_calls_is_refused(
    ranks: Ranks, base: type[Any], name: str, calls_super: bool
) -> None:
    def body() -> None:
        parts: dict[str, Any] = {name: lambda *given: given}
        if calls_super:
            parts["_apply"] = lambda self, *given: base._apply(self, *given)
        kind = type("Own", (base,), {"__module__": __name__, **parts})
        layouts: dict[str, Any] = {}
        if base is ours.PrepareModuleInput:
            layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        elif base is ours.PrepareModuleOutput:
            layouts = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
        elif base is ours.FusedColwiseParallel:
            layouts = {"parts": 2}
        with pytest.raises(TypeError, match=f"Own changes {name}, which {base.__name__} of"):
            parallelize_module(nn.Linear(4, 4), tensor_mesh(), kind(**layouts))

    ranks(1, body)


def test_a_style_of_ones_own_may_have_parts_of_any_name(ranks: Ranks) -> None:
    def body() -> None:
        class Own(ours.ParallelStyle):
            def _prepare_input_arg(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

            def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
                self.site_of(module, device_mesh)
                module.register_forward_pre_hook(lambda _, given: self._prepare_input_arg(*given))
                return module

        model = parallelize_module(nn.Identity(), tensor_mesh(), Own())
        assert model(torch.ones(2)).tolist() == [2, 2]

    ranks(1, body)


def test_what_is_no_style_is_refused(ranks: Ranks) -> None:
    def body() -> None:
        for wrong in (nn.Linear(2, 2), theirs.ColwiseParallel, "colwise"):
            with pytest.raises(TypeError, match="for parallelize_plan"):
                parallelize_module(nn.Linear(2, 2), tensor_mesh(), wrong)

    ranks(1, body)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_modules_stay_what_they_were_and_show_the_axis(ranks: Ranks) -> None:
    def body() -> None:
        model = nn.Sequential(
            nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6), Doubled(6, 4), nn.Dropout(0.1)
        )
        kinds = [type(module) for module in model]
        columns, rows = ours.ColwiseParallel(), ours.RowwiseParallel()
        sequence = ours.SequenceParallel()
        styles = [columns, sequence, columns, rows, sequence]
        parallelize_module(model, tensor_mesh(), {str(n): s for n, s in enumerate(styles)})
        assert all(isinstance(module, kind) for module, kind in zip(model, kinds, strict=True))
        shown = str(model).splitlines()
        for kind, line in zip(kinds, shown[1:-1], strict=True):
            assert f": {kind.__name__}(" in line
            assert "over axis tensor of 2 ranks)" in line
        assert "Linear(in_features=4, out_features=6, bias=True, over axis tensor" in shown[3]
        for module in (model[0], model[2]):
            assert pickle.loads(pickle.dumps(type(module))) is type(module)

    ranks(2, body)
