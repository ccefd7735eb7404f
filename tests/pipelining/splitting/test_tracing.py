"""Models cut by tracing: the stages give what the model gives, and the model stays as it was."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from meshwright.pipelining import (
    LossWrapper,
    Pipe,
    PipeliningShapeError,
    PipeSequential,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    build_stage,
    pipe_split,
    pipeline,
    stages_by_name,
)
from support.internals.composition import copied as copied_model


def run(pipe: Pipe, *given: Any) -> Any:
    """All stages, one after the other, in one graph of gradients."""
    return fx.Interpreter(pipe.split_gm).run(*given)


def gradients(pipe: Pipe) -> dict[str, torch.Tensor]:
    """By name in the model; those of a tied parameter are summed under its owner's name."""
    owners = {held: tie.names[0][1] for tie in pipe.info().ties for held in tie.names}
    found: dict[str, torch.Tensor] = {}
    for stage in range(pipe.num_stages):
        for name, parameter in pipe.get_stage_module(stage).named_parameters():
            key = owners.get((stage, name), name)
            if parameter.grad is not None:
                found[key] = found[key] + parameter.grad if key in found else parameter.grad
    return found


def compare(pipe: Pipe, model: nn.Module) -> None:
    """Gradients of the stages and of the model; all that the model has, and no others."""
    got = gradients(pipe)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in got
        else:
            torch.testing.assert_close(got.pop(name), parameter.grad)
    assert got == {}


def state(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {key: copy.copy(value) for key, value in module.__dict__.items()}
        for name, module in model.named_modules()
    }


class Everything(nn.Module):
    """Tied weights, buffers, dropout, statistics, changes in place, a skip, nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("table", torch.arange(4.0))
        self.constant = torch.ones(4)

    def forward(self, x: torch.Tensor, power: int = 2, *, more: dict[str, Any]) -> dict[str, Any]:
        mask = x > 0
        h = self.drop(self.norm(self.first(x))) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        pipe_split()
        pipe_split()
        h.mul_(2)
        with torch.no_grad():
            count = (h > 0).sum(-1)
        with torch.autocast("cpu", enabled=False):
            places = torch.arange(4).float() @ self.table.float().reshape(4, 1)
        h += more["bias"][0] ** power
        y = h.relu()
        pipe_split()
        z = self.last(y) * mask + places + self.constant
        return {"out": z, "pair": (h, count), "none": None}


def total(output: dict[str, Any]) -> torch.Tensor:
    return output["out"].sum() + output["pair"][0].square().sum()


def test_everything_is_equal() -> None:
    torch.manual_seed(0)
    model = Everything()
    alone = copy.deepcopy(model)
    x, more = torch.randn(3, 4), {"bias": [torch.ones(4), 3]}
    before, random = state(model), torch.get_rng_state()
    pipe = pipeline(model, (x, 2), {"more": more})
    assert torch.equal(random, torch.get_rng_state())
    after = state(model)
    for name, values in before.items():
        assert values.keys() == after[name].keys()
        assert all(str(values[key]) == str(after[name][key]) for key in values), name
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))
    assert pipe.num_stages == 3
    for mode in (True, False):
        for stage in range(3):
            pipe.get_stage_module(stage).train(mode)
        alone.train(mode)
        torch.manual_seed(1)
        expected = alone(x, 2, more=more)
        torch.manual_seed(1)
        found = run(pipe, x, more, 2)
        torch.testing.assert_close(found, expected)
        total(expected).backward()
        total(found).backward()
        compare(pipe, alone)
    statistics = pipe.get_stage_module(0).state_dict()
    for name, value in alone.norm.state_dict().items():
        torch.testing.assert_close(statistics[f"norm.{name}"], value)
    assert int(statistics["norm.num_batches_tracked"]) == 1
    torch.testing.assert_close(pipe(x, 2, more=more)[0], alone(x, 2, more=more))
    with pytest.raises(TypeError, match=r"see \['other', 'more'\]"):
        pipe(x, 2, other=more)
    with pytest.raises(PipeliningShapeError, match="'power' was traced as 2, actual 3"):
        pipe(x, 3, more=more)


def test_where_things_are() -> None:
    model = Everything()
    pipe = pipeline(model, (torch.randn(3, 4), 2), {"more": {"bias": [torch.ones(4), 3]}})
    keys = [set(pipe.get_stage_module(i).state_dict()) for i in range(3)]
    norm = {f"norm.{name}" for name in model.norm.state_dict()}
    assert keys == [
        {"first.weight", "first.bias"} | norm,
        set(),
        {"last.weight", "last.bias", "table"},
    ]
    transient = [name for name, _ in pipe.get_stage_module(0).named_buffers() if "norm" not in name]
    assert transient == ["scale", "lifted_tensor_0"]
    first, second, third = pipe.info().edges
    assert [source.output for source in first.args] == [0, 1]
    assert len(second.args) == 1
    assert [name for name, _ in second.kwargs] == ["more"]
    assert sorted(source.stage or 0 for source in third.args) == [0, 1, 1, 1]
    assert pipe.replicated_params == [{"submod_0": "first.weight", "submod_2": "last.weight"}]
    (tie,) = pipe.info().ties
    assert tie.owner == 0
    weights = [pipe.get_stage_module(s).get_parameter(name) for s, name in tie.names]
    assert weights[0] is model.first.weight
    assert weights[1] is not weights[0]
    assert torch.equal(*weights)
    again = copy.deepcopy(pipe)
    assert [set(again.get_stage_module(i).state_dict()) for i in range(3)] == keys


class Chain(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"layers.2": BEGINNING}, [["0", "1"], ["2", "3"]]),
        ({"layers.1": END}, [["0", "1"], ["2", "3"]]),
        ({"layers.0": BEGINNING, "layers.3": BEGINNING}, [["0", "1", "2"], ["3"]]),
        ({"layers.1": BEGINNING, "layers.2": BEGINNING}, [["0"], ["1"], ["2", "3"]]),
    ],
)
def test_split_spec(spec: dict[str, SplitPoint], expected: list[list[str]]) -> None:
    model = Chain()
    before = state(model)
    pipe = pipeline(model, (torch.randn(2, 8),), split_spec=spec)
    assert str(before) == str(state(model))
    stages = [pipe.get_stage_module(i) for i in range(pipe.num_stages)]
    names = [[name.split(".")[1] for name in s.state_dict() if "weight" in name] for s in stages]
    assert names == expected
    x = torch.randn(2, 8)
    torch.testing.assert_close(run(pipe, x), model(x))


class Shared(nn.Module):
    """One module, called in two places that do not follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(torch.tanh(self.twice(x)))
        pipe_split()
        return self.twice(x)


def test_a_module_called_in_two_stages() -> None:
    model = Shared()
    alone = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,))
    run(pipe, x).sum().backward()
    alone(x).sum().backward()
    compare(pipe, alone)
    assert [tie.names for tie in pipe.info().ties] == [
        ((0, "twice.weight"), (1, "twice.weight")),
        ((0, "twice.bias"), (1, "twice.bias")),
    ]


class Changing(nn.Module):
    """Changes in place what another stage has made; a third reads it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        view = h[:, :2]
        before = h + self.count
        if self.what == "assigned":
            self.count = self.count + x.sum().detach()
        pipe_split()
        if self.what == "views":
            before = before + view.sum()
        if self.what == "buffer":
            self.count += 1
        h.add_(1)
        y = self.b(before)
        if self.what == "views":
            y = y + view.sum()
        pipe_split()
        return y * h


class CountsPasses(nn.Module):
    """Reads buffers before and after it gives them anew, in the computation with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.unread: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.mean
        self.mean = 0.5 * self.mean + self.layer(x).mean(0)  # with a gradient in this pass
        self.mean = self.mean.detach() + 1
        self.unread = y
        return y / self.mean


class Aliased(nn.Module):
    """Has a module under two names, for which export runs others in place of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class CountsWithoutGradient(nn.Module):
    """Writes to buffers in a block that has settings of its own, as spectral norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            z = y.mean(0)
            self.mean.mul_(0.5).add_(z)
            self.scale = torch.mul(z, 2.0, out=self.scale)
        pipe_split()
        return self.last(y) + y


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_changes_in_place() -> None:
    x = torch.randn(2, 4)
    for model in (
        CountsWithoutGradient(),
        nn.Sequential(spectral_norm(nn.Linear(4, 4)), Changing("assigned")),
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), Changing("assigned")),
        nn.Sequential(weight_norm(nn.Linear(4, 4)), Changing("assigned")),
        Changing("assigned"),
        nn.Sequential(nn.Sequential(Changing("assigned"), CountsPasses())),
        nn.Sequential(Aliased(), CountsPasses()),
    ):
        alone = copied_model(model)
        pipe = pipeline(model, (x,))
        for _ in range(2):
            found = [run(pipe, part) for part in (x, 2 * x)]
            expected = [alone(part) for part in (x, 2 * x)]
            torch.testing.assert_close(found, expected)
            torch.stack(found).square().sum().backward()
            torch.stack(expected).square().sum().backward()
            compare(pipe, alone)
        for name, buffer in alone.named_buffers():
            held = [pipe.get_stage_module(n) for n in range(pipe.num_stages)]
            (copied,) = [b for stage in held for n, b in stage.named_buffers() if n == name]
            torch.testing.assert_close(copied, buffer)
    with pytest.raises(ValueError, match="several values share"):
        pipeline(Changing("views"), (x,))
    with pytest.raises(
        ValueError, match=r"count is changed in place at .* read in stages \[0, 1\]"
    ):
        pipeline(Changing("buffer"), (x,))


class Remembering(nn.Module):
    """Gives what it has another shape, or a tensor that is no buffer another value."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.before = what, nn.Linear(4, 4), torch.zeros(4)
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.what == "shape":
            self.last = y.detach()
        else:
            y = y + self.before
            self.before = self.before + y.detach().mean(0)
        return y


def test_what_forwards_assign_and_stages_would_lose_is_refused() -> None:
    x = torch.randn(2, 4)
    for what, text in (
        ("shape", r"0\.last had shape \(0,\) and torch\.float32, and forward gives it \(2, 4\)"),
        ("attribute", r"reads the tensor '0\.before' and gives the attribute another one"),
    ):
        for rest in (nn.Linear(4, 4), Aliased()):
            with pytest.raises(ValueError, match=text):
                pipeline(nn.Sequential(Remembering(what), rest), (x,))


class Doubled(torch.Tensor):
    """A weight with which layers compute twice as much."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return 2 * found.as_subclass(torch.Tensor) if "linear" in func.__name__ else found


def test_parameters_of_subclasses_are_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Doubled))
    copied, x = copied_model(model), torch.randn(2, 4)
    torch.testing.assert_close(copied(x), model(x))
    assert type(copied[0].weight) is Doubled
    assert isinstance(copied[0].weight, nn.Parameter)
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()


class Uncapturable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), Branch())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class Region(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x + 1
            pipe_split()
            return y * 2


def test_errors() -> None:
    model, x = Chain(2), torch.randn(2, 8)
    before = str(state(model))
    more = {"more": {"bias": [torch.ones(4), 3]}}
    spec = {"layers.1": BEGINNING}
    with pytest.raises(ValueError, match="Cannot specify both `split_spec` and `split_policy`"):
        pipeline(model, (x,), split_spec=spec, split_policy=lambda module: module)
    with pytest.raises(AttributeError, match="Specified target layers.7 referenced nonexistent"):
        pipeline(model, (x,), split_spec={"layers.1": BEGINNING, "layers.7": END})
    with pytest.raises(ValueError, match="Unknown split point type."):
        pipeline(model, (x,), split_spec={"layers.1": 3})  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match=r"split_spec names \['unused'\], which the model does not"
    ):
        pipeline(Everything(), (torch.randn(3, 4), 2), more, split_spec={"unused": END})
    with pytest.raises(RuntimeError, match="cannot capture your model as a full graph") as caught:
        pipeline(model, (torch.randn(2, 3),), split_spec=spec)
    assert "in module 'layers.0'" in str(caught.value)
    assert str(state(model)) == before
    with pytest.raises(
        RuntimeError, match=r"in module 'inner.1' \(.*test_tracing.py:\d+\)"
    ) as caught:
        pipeline(Uncapturable(), (torch.randn(2, 2),))
    assert caught.value.__cause__ is not None
    assert "stages_by_name" in str(caught.value)
    assert "Modules of the model: inner, inner.0, inner.1" in str(caught.value)
    with pytest.raises(ValueError, match="a split point lies inside"):
        pipeline(Region(), (x,))
    pipe = pipeline(model, (x,), split_spec=spec)
    with pytest.raises(ValueError, match="Invalid stage index 2!"):
        pipe.get_stage_module(2)
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly, not `split_gm`"):
        pipe.split_gm(x)
    info = pipe.info()
    with pytest.raises(ValueError, match="Stage index 2 is out of range of 2"):
        build_stage(pipe.get_stage_module(0), 2, info, torch.device("cpu"))
    info.num_stages = 3
    text = "Number of submodules in pipe graph 2 does not match number of stages 3"
    with pytest.raises(PipeliningShapeError, match=text):
        build_stage(pipe.get_stage_module(0), 0, info, torch.device("cpu"))
    pipe = pipeline(model.eval(), (x,))
    with pytest.raises(RuntimeError, match="traced in evaluation mode"):
        pipe.get_stage_module(0).train()


def test_arguments_come_by_position_or_by_keyword() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(
            self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, **more: torch.Tensor
        ) -> torch.Tensor:
            x = self.one(x) * scale
            pipe_split()
            return self.two(x) - y + more["z"]

    model = Weighted()
    x, y, z = torch.randn(3, 2, 4)
    expected = model(x, y, z=z)
    for traced in ((x, y), (x,), ()):
        named = {name: v for name, v in (("x", x), ("y", y)) if not any(v is t for t in traced)}
        pipe = pipeline(model, traced, {**named, "z": z})
        for out in (pipe(x, y, z=z), pipe(x, y=y, z=z), pipe(z=z, y=y, x=x)):
            torch.testing.assert_close(out, (expected,))
        for args, kwargs in (((x, y, 2.0, x), {"z": z}), ((x, y), {"y": y, "z": z}), ((x,), {})):
            with pytest.raises(TypeError, match="expected the arguments"):
                pipe(*args, **kwargs)


def test_an_info_does_not_keep_the_pipe() -> None:
    pipe = pipeline(Chain(2), (torch.randn(2, 8),), split_spec={"layers.1": BEGINNING})
    gone = weakref.ref(pipe), weakref.ref(pipe.split_gm)
    info = pipe.info()
    del pipe
    gc.collect()
    assert [found() for found in gone] == [None, None]
    assert info.num_stages == 2


def test_sizes_left_open() -> None:
    model = Chain(2)
    pipe = pipeline(
        model,
        (torch.randn(4, 8),),
        split_spec={"layers.1": BEGINNING},
        dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}},
    )
    x = torch.randn(7, 8)
    torch.testing.assert_close(run(pipe, x), model(x))
    assert [(facts.shape) for (facts,) in pipe.info().outputs if facts] == [(None, 8), (None, 8)]


def test_torchs_marker_cuts_too() -> None:
    from torch.distributed.pipelining import pipe_split as torchs

    class Marked(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            torchs()
            return self.layers[1](x)

    model, x = Marked(2), torch.randn(2, 8)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x)[0], model(x))


def test_wrappers_of_torchs_front_end() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(3, 4), torch.randn(3, 2)
    model = PipeSequential.from_sequential(chain)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x), (chain(x),))
    annotated = Chain(3)
    annotate_split_points(annotated, {"layers.1": BEGINNING, "layers.2": BEGINNING})
    assert pipeline(annotated, (torch.randn(2, 8),)).num_stages == 3
    assert TrivialLossWrapper(chain, nn.MSELoss())(x, target) == nn.MSELoss()(chain(x), target)
    with pytest.raises(NotImplementedError, match="LossWrapper has no forward"):
        LossWrapper(chain, nn.MSELoss())(x, target)


def test_stages_by_name() -> None:
    model = Chain(3)
    x = torch.randn(2, 8)
    first, last = stages_by_name(model, [["layers.0", "layers.1"], ["layers.2"]])
    torch.testing.assert_close(last(first(x)), nn.Sequential(*model.layers)(x))
    assert [*first.state_dict(), *last.state_dict()] == [*model.state_dict()]
    with pytest.raises(ValueError, match="stage 1 has no modules"):
        stages_by_name(model, [["layers.0"], []])
    with pytest.raises(ValueError, match="'layers' is named twice"):
        stages_by_name(model, [["layers.0"], ["layers"]])
    with pytest.raises(ValueError, match=r"the parameters \['layers.1.weight', 'layers.1.bias'\]"):
        stages_by_name(model, [["layers.0"], ["layers.2"]])
    with pytest.raises(AttributeError, match="has no attribute `9`"):
        stages_by_name(model, [["layers.9"]])


PRIVATE = {
    "": "",
    ".stage": "",
    ".microbatch": "_Replicate _CustomReducer _LossReducer",
    ".schedules": "_PipelineSchedule _PipelineScheduleRuntime _ScheduleForwardOnly "
    "_PipelineContext _Action _ComputationType",
}
"""Private names of torch that programs import, beside all public ones."""
METHODS = (
    "forward_one_chunk backward_one_chunk backward_weight_one_chunk clear_runtime_states "
    "set_local_fwd_input get_local_bwd_output set_local_bwd_input scale_grads perform_reduce_grad "
    "backward_maybe_with_nosync"
)
HERE = (
    "PipeInfo PipeSequential LossWrapper TrivialLossWrapper MultiUseParameterConfig Replicated "
    "annotate_split_points generate_stage_to_rank_mapping generate_rank_to_stage_mapping "
    "stage_backward stage_backward_input stage_backward_weight PipeliningMetadataError"
)


def test_names_are_torchs() -> None:
    package = importlib.import_module("meshwright.pipelining")
    for path, private in PRIVATE.items():
        ours = importlib.import_module(f"meshwright.pipelining{path}")
        torchs = importlib.import_module(f"torch.distributed.pipelining{path}")
        own = {
            n for n, v in vars(torchs).items() if getattr(v, "__module__", "") == torchs.__name__
        }
        public = {*torchs.__all__, *(name for name in own if not name.startswith("_"))}
        assert len(public) >= 2
        for name in {*public, *private.split()}:
            assert hasattr(torchs, name) and hasattr(ours, name), name
            assert getattr(package, name, getattr(ours, name)) is getattr(ours, name), name
    theirs_stage = importlib.import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    for name in METHODS.split():
        wanted, found = (
            [
                (p.name, p.default)
                for p in inspect.signature(getattr(kind, name)).parameters.values()
            ]
            for kind in (theirs_stage, package.PipelineStage)
        )
        assert found == wanted, name
    assert all(hasattr(package, name) for name in HERE.split())
    for function in (pipeline, build_stage, Pipe.__init__, Pipe.from_tracing, Pipe._from_traced):
        theirs = importlib.import_module("torch.distributed.pipelining")
        for part in function.__qualname__.split("."):
            theirs = getattr(theirs, part)
        wanted = [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
        assert [(p.name, p.default) for p in inspect.signature(function).parameters.values()][
            : len(wanted)
        ] == wanted
    assert package.generate_stage_to_rank_mapping(2, 4, "v") == {0: 0, 1: 1, 2: 1, 3: 0}
    assert package.generate_rank_to_stage_mapping(2, 4) == {0: [0, 2], 1: [1, 3]}
