"""What a trace, or a cut between modules, would drop: it is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from meshwright.pipelining import SplitPoint, pipeline, stages_by_name
from support.internals.composition import observe

X = torch.ones(2, 4)


class Reversed(torch.autograd.Function):
    """Its backward is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


@torch.library.custom_op("meshwright_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(lambda x: x * 2)
doubled.register_autograd(lambda ctx, gradient: gradient * 3)

Act = Callable[[Any, torch.Tensor], torch.Tensor]


def register_hook(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(torch.zeros_like)
    return x


def retain_grad(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    return x


def multi_grad_hook(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.autograd.graph.register_multi_grad_hook((x,), lambda _: None)
    return x


def own_backward(_: Any, x: torch.Tensor) -> torch.Tensor:
    return Reversed.apply(x)  # pyrefly: ignore


def recompute(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.b, x, use_reentrant=False)


def recompute_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.b, x, use_reentrant=True)


def recompute_batch(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.b, x.detach(), use_reentrant=True) + x


def offload(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model.b(x)


def own_operator(_: Any, x: torch.Tensor) -> torch.Tensor:
    return doubled(x)


def keep(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept = x.mean()
    return x


class Model(nn.Module):
    def __init__(self, act: Act | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self._act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self._act is not None:
            y = self._act(self, y)
        return self.c(self.b(y)) + y


def traced(model: nn.Module) -> Any:
    return pipeline(model, (X,), split_spec={"c": SplitPoint.BEGINNING})


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (register_hook, r"Tensor.register_hook in the model \(.*test_dropped.py:\d+\)"),
        (retain_grad, r"Tensor.retain_grad in the model \(.*test_dropped.py:\d+\)"),
        (multi_grad_hook, "Tensor.register_hook in the model"),
        (own_backward, r"the backward of .*test_dropped.Reversed, an autograd.Function"),
        (recompute, r"checkpoint or saved_tensors_hooks in the model \(.*test_dropped.py:\d+\)"),
        (
            recompute_reentrant,
            r"reentrant torch.utils.checkpoint in the model \(.*py:\d+\), .*pass",
        ),
        (recompute_batch, r"reentrant torch.utils.checkpoint in the model \(.*py:\d+\), .*pass"),
        (offload, "checkpoint or saved_tensors_hooks in the model"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_trace_drops_nothing_of_a_forward(act: Act, text: str) -> None:
    model = Model(act)
    for attempt in (traced, functools.partial(lambda m: torch.no_grad()(traced)(m))):
        with pytest.raises(ValueError, match=text):
            attempt(model)
    assert not model._forward_hooks


@pytest.mark.parametrize("act", [register_hook, offload, own_backward])
def test_a_trace_drops_nothing_where_a_module_has_two_names(act: Act) -> None:
    model = Model(act)
    model.again = model.b
    with pytest.raises(ValueError, match=r"in the model|the backward of"):
        traced(model)


class Called(torch.Tensor):
    """Layers compute twice as much with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return 2 * found.as_subclass(torch.Tensor) if func is nn.functional.linear else found


def test_a_trace_does_not_take_parameters_that_compute_by_calls_of_their_own() -> None:
    model = Model(own_operator)
    model.a.weight = nn.Parameter(model.a.weight.detach().as_subclass(Called))
    with pytest.raises(ValueError, match=r"drop what 'a.weight', a Called, does in calls of its"):
        traced(model)


def test_a_trace_keeps_operators_with_a_backward_of_their_own() -> None:
    model = Model(own_operator)
    model(X).sum().backward()
    expected = model.a.weight.grad
    model.zero_grad()
    first, second = (traced(model).get_stage_module(n) for n in range(2))
    second(*first(X)).sum().backward()
    assert torch.equal(model.a.weight.grad, expected)  # pyrefly: ignore


@pytest.mark.filterwarnings("ignore:The tensor attribute .* was assigned during export")
def test_a_trace_leaves_the_attributes_of_a_model_alone() -> None:
    model = Model(keep)
    before = copy.copy(vars(model))
    traced(model)
    assert vars(model) == before


@pytest.mark.filterwarnings(
    "ignore:.*weight_norm. is deprecated", "ignore:The tensor attribute .* was assigned"
)
def test_hooks_of_modules_that_a_trace_takes_apart_are_refused() -> None:
    put: dict[str, Callable[[Any], object]] = {
        "forward pre-hook of module 'b'": lambda m: m.b.register_forward_pre_hook(print),
        "forward hook of module 'a'": lambda m: m.a.register_forward_hook(print, always_call=True),
        "backward hook of module 'c'": lambda m: m.c.register_full_backward_hook(print),
        "backward pre-hook of the model itself": lambda m: m.register_full_backward_pre_hook(print),
    }
    for text, change in put.items():
        model = Model()
        change(model)
        with pytest.raises(ValueError, match=rf"{text}.*\(print\). A traced stage calls no module"):
            traced(model)
    # Torch's own compute what is in the graph.
    for norm in (weight_norm, parametrizations.weight_norm):
        model = Model()
        norm(model.b)
        found, expected = traced(model)(X)[0], model(X)
        torch.testing.assert_close(found, expected)


def test_a_tied_parameter_with_hooks_is_refused_where_stages_have_it_by_hand() -> None:
    model = Model()
    model.c.weight = model.a.weight
    model.a.weight.register_hook(torch.zeros_like)
    with pytest.raises(ValueError, match="'a.weight' has hooks for its gradient, and stages"):
        traced(model)


def test_attributes_of_a_tied_parameter_are_those_of_its_copies() -> None:
    model = Model()
    model.c.weight = model.a.weight
    setattr(model.a.weight, "decays", False)  # noqa: B010
    second = traced(model).get_stage_module(1)
    assert second.c.weight is not model.c.weight
    assert second.c.weight.decays is False


def test_modules_by_name_refuse_hooks_of_what_is_around_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    names = [["0.0"], ["0.1", "1"]]
    model[0].register_forward_hook(print)
    with pytest.raises(ValueError, match="the forward hook of module '0' .print."):
        stages_by_name(model, names)
    model[1].register_forward_hook(lambda _, __, output: output * 2)
    first, second = stages_by_name(model, [["0"], ["1"]])
    torch.testing.assert_close(second(first(X)), model(X))


# -------------------------------------------------------------------------------------- chains


class Chain(nn.Module):
    """A chain, unless its own forward does more than to call its modules."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.log = way, list[torch.Tensor]()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"_{self.way}")(x)

    def _plainly(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] and x.dim() == 2 and x.requires_grad is False
        return self.b(self.a(x))

    def _in_no_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)

    def _in_autocast(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.a(x))

    def _in_checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=False))

    def _on_a_device(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            x = self.a(x)
        return self.b(x)

    def _with_hook(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x.register_hook(torch.zeros_like)
        return self.b(x)

    def _with_grad(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x.retain_grad()
        return self.b(x)

    def _detached(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).detach_())

    def _with_penalty(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.penalty = x.square().mean()
        return self.b(x)

    def _with_list(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.log.append(x)
        return self.b(x)


@pytest.mark.parametrize(
    "way",
    [name[1:] for name in vars(Chain) if name.startswith(("_in", "_on", "_with", "_det", "_pl"))],
)
def test_a_chain_does_nothing_but_call_its_modules(way: str) -> None:
    model = Chain(way)
    before = copy.copy(vars(model))
    found = observe(model, (X,)).links
    assert found == (["a", "b"] if way == "plainly" else None)
    assert vars(model) == before and not model.log


def test_what_a_forward_writes_is_seen() -> None:
    model = Chain("with_penalty")
    assert observe(model, (X,)).left == (("", "penalty"),)
    seen = observe(Chain("with_list"), (X,))
    assert seen.left == (("", "log"),)
    assert seen.moving == ("log",)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_hooks_of_users_do_not_run_while_a_model_is_looked_at() -> None:
    model = Chain("plainly")
    calls: list[object] = []
    model.a.register_forward_hook(lambda *_: calls.append(1))
    model.b.weight.register_hook(lambda _: calls.append(2))
    assert observe(model, (X,)).links == ["a", "b"]
    assert not calls
    model(X).sum().backward()
    assert calls == [1, 2]
    model.register_state_dict_pre_hook(lambda *_: None)
    assert observe(model, (X,)).links is None
    old = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    old(X)  # its weight is what autograd has made, which no deepcopy takes
    seen = observe(old, (X,))
    assert (seen.links, seen.left) == (["0", "1"], ())  # of a hook that computes a weight
