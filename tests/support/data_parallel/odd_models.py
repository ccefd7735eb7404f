"""Models and steps that users write and a table of features does not show: one class each.

A case has the units ``a`` and ``b`` where it says nothing else, takes batches of five features, and
is trained by its own ``step``, which is the same for one process and for ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case"]

Pair = namedtuple("Pair", "p q")


def layer(inputs: int = 5, outputs: int = 5, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


def step_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


class Case(nn.Module):
    """Two layers; `forward` and `step` are what cases change."""

    units: ClassVar[tuple[str, ...]] = ("a", "b")
    refused: ClassVar[dict[str, str]] = {}
    """By strategy, the error that says why not."""
    tolerance: ClassVar[float] = 1e-9

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = layer()
        self.b: Any = layer()

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x).tanh())

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: model(x).square().mean())


# ------------------------------------------------------------------------ what is called


class CalledTwice(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x).tanh()).tanh())


class Filling(Case):
    """Units write to lists and dicts that they are given; the loss reads those."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Writer(), Writer()

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        named: dict[str, torch.Tensor] = OrderedDict()
        x = self.b(self.a(x, kept, named=named), kept, named=named)
        return x + sum(each.sin() for each in [*kept, *named.values()])

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        kept: list[torch.Tensor] = []
        step_on(model, optimizer, lambda: model(x, kept).square().mean() + kept[-1].cos().mean())
        assert len(kept) == 2


class Writer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(
        self, x: torch.Tensor, kept: list[torch.Tensor], named: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = super().forward(x + sum(kept)).tanh()
        kept.append(x)
        named["last"] = x * named.pop("last", 1.0)
        return x


class LeavesLosses(Case):
    """Units leave losses in an attribute and in a list, which other weights of theirs have made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Router(), Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        x = self.b(self.a(x, losses), losses)
        return x.square().mean() + self.a.loss + self.b.loss + sum(losses)

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: model(x))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = layer(), layer(), layer()

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        x = self.inner(x).tanh()
        self.loss = self.first(x).softmax(-1).square().mean()
        losses.append(self.second(x).sin().mean())
        return x


class HidesLosses(Case):
    """Units leave losses, beside and behind their outputs, where nobody looks for any."""

    units = ("a", "b", "c.inner", "c")

    def __init__(self) -> None:
        super().__init__()
        hidden: list[torch.Tensor] = []
        self.a, self.b, self.c = Losing(hidden), Losing(hidden), LosingAround(hidden)
        self.hidden = hidden.copy  # a method, through which nobody looks either
        self.forget = hidden.clear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forget()
        return self.c(self.b(self.a(x)))

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        inner = getattr(model, "module", model)
        step_on(model, optimizer, lambda: model(x).square().mean() + sum(inner.hidden()))


class Losing(nn.Module):
    def __init__(self, hidden: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.scale = layer(), nn.Parameter(torch.linspace(-1, 1, 5))
        self.leave = hidden.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        self.leave(((x * self.scale).sin() * self.scale).square().mean())
        self.leave(self.layer(x.detach()).sin().mean())
        return x


class LosingAround(Losing):
    """The last unit, whose output is the root's, too, around another one."""

    def __init__(self, hidden: list[torch.Tensor]) -> None:
        super().__init__(hidden)
        self.inner = Losing(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))


class CallsItself(Case):
    """A unit that calls itself computes with its weights when that has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Recursive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x), self, 2)


class Recursive(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: torch.Tensor, around: Any, depth: int) -> torch.Tensor:
        inner = around.b(super().forward(x).tanh(), around, depth - 1) if depth else x
        return super().forward(inner).tanh()


class SharedModule(Case):
    refused = dict.fromkeys(("flat", "original"), "wrapped in another place, and here it is not")

    def __init__(self) -> None:
        super().__init__()
        self.c = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)).tanh())


class SharedWeight(Case):
    refused = dict.fromkeys(("flat", "original"), "Wrap with auto_wrap_policy")

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


class Attending(nn.Module):
    """Computes something else where two inputs are one, and for what hangs on them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = layer(), layer()

    def forward(self, x: torch.Tensor, key: torch.Tensor, *kept: list[torch.Tensor]) -> Any:
        for each in kept:
            each.append(x)
        y = self.q(x) * (2 if key is x else 3) + getattr(key, "rate", 5) * self.k(key)
        return y * sum(map(len, kept)) if kept else y


class OneInputTwice(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Attending(), Attending()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x.rate, kept = 7, []
        y = self.a(x, x).tanh()
        return self.b(y, y, kept, kept) + sum(kept)


class Own:
    """An object that nobody knows to look into."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Hiding(nn.Linear):
    """Returns an object of its own, and the gradient of its weight's view comes through it."""

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, torch.Tensor) else x.y
        return Own(super().forward(super().forward(x).tanh()) + self.weight[0])


class HiddenOutputs(Case):
    """Units, one of them frozen, and the root return objects in which no tensor is found."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Hiding(5, 5), Hiding(5, 5)
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Own:
        return Own(self.b(self.a(x)).y + self.a(x.cos()).y)

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: model(x).y.square().mean())


class SparseInput(Case):
    """A unit is given a sparse tensor with a graph."""

    units = ("a",)

    def __init__(self) -> None:
        super().__init__()
        self.a = Graph(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(5).repeat(2, 1)
        return self.a(x, torch.sparse_coo_tensor(at, self.b.bias, (5, 5)))


class Graph(nn.Linear):
    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(weights, super().forward(x).t()).t()


class Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(self.bias.detach().numpy().sum())


class ShownToNumPy(Case):
    """A unit looks at its weights by NumPy, after which torch lets nobody resize their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Looking(5, 5), Looking(5, 5)


class Recomputed(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.a, x, use_reentrant=False).tanh()
        return checkpoint(self.b, hidden, use_reentrant=False)


class RecomputedReentrant(Case):
    units = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.c = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.a, self.c(x), use_reentrant=True).tanh()
        return checkpoint(self.b, hidden, use_reentrant=True)


class RecomputedTogether(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.b(self.a(y).tanh()), x, use_reentrant=False)


class InAList(Case):
    units = ("layers.0", "layers.1", "layers.2")

    def __init__(self) -> None:
        super().__init__()
        del self.a, self.b
        self.layers = nn.ModuleList([layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.layers:
            x = part(x).tanh()
        return x


class Unused(Case):
    units = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.c = layer()


class OutputUnused(Unused):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x).tanh()
        return self.b(hidden), self.c(hidden)

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: model(x)[0].square().mean())


class Detached(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).detach().tanh())


class WeightsInTheLoss(Case):
    units = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()) + self.a.weight.square().sum()


class Hooked(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, inputs, output: output * 2)
        self.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.b.register_full_backward_hook(lambda module, before, after: None)


class HookOnATensor(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return self.b(hidden.tanh())


class Vectorized(Case):
    refused = dict.fromkeys(("fully_shard", "flat", "original"), "inside of a transform of torch")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: self.b(self.a(row).tanh()))(x)


# ------------------------------------------------------------------------ what is given


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, *, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x) if y is None else self.layer(x) + y


class KeywordsOnly(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Keywords(), Keywords()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x=self.a(x=x, y=None), y=x)


@dataclass
class Record:
    hidden: torch.Tensor
    nothing: None = None
    more: Any = None


class OfRecords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, record: Record) -> Record:
        more = {"before": [record.hidden, None, 3]}
        return Record(hidden=self.layer(record.hidden).tanh(), more=more)


class Dataclasses(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = OfRecords(), OfRecords()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        record = self.b(self.a(Record(hidden=x)))
        return record.hidden + record.more["before"][0]


class OfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, items: list[Any]) -> torch.Tensor:
        return self.layer(items[0]) + items[2]["k"][0]


class Lists(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = OfLists(), OfLists()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b([self.a([x, None, {"k": (x,)}]), None, {"k": (x, x)}])


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.layer(pair.p) + pair.q, pair.q)


class NamedTuples(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = OfPairs(), OfPairs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(Pair(x, x))).p


class InputReturned(Case):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.a(x), x

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: torch.mul(*model(x)).mean())


class OddOutputs(Case):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x), "n": None, "f": 3.0, "t": "text", "i": torch.tensor(1)}

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        step_on(model, optimizer, lambda: model(x)["loss"].square().mean())


class InputWithGradient(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        x = x.clone().requires_grad_()
        step_on(model, optimizer, lambda: model(x).square().mean())
        assert x.grad is not None


class InPlace(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        hidden += 1
        hidden = self.b(F.relu_(hidden))
        return hidden.mul_(2)


class AddsToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.add_(1.0))


class InputInPlace(Case):
    def __init__(self) -> None:
        super().__init__()
        self.b = AddsToItsInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh() * 1.0)


# ------------------------------------------------------------------------ what it holds


class FrozenFirst(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class FrozenLast(Case):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)


class Buffers(Case):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.whole += 1
        return super().forward(x) * self.count[0]


class NoElements(Case):
    def __init__(self) -> None:
        super().__init__()
        self.z, self.y = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.z.sum() + self.y.sum()


class NoElementsBesideEven(Case):
    """All dims 0 can be cut evenly, that of the empty parameter too."""

    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(5, 6), layer(6, 6)
        self.z = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.z.sum(0)


class TwoWays(Case):
    """One module under two names, and in the list of another module."""

    units = ("b",)

    def __init__(self) -> None:
        super().__init__()
        self.again = self.a
        self.listed = nn.ModuleList([self.a, layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.listed[1](self.again(x)))


class Scalar(Case):
    refused = dict.fromkeys(("fully_shard", "flat", "original"), "support scalar parameters")

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class TwoDtypes(Case):
    tolerance = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.b = self.b.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh().float()).double()


class WeightNorm(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(self.a)


class ParameterLists(Case):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(5) * n) for n in range(1, 4)])
        self.named = nn.ParameterDict({"u": nn.Parameter(torch.ones(5))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(self.listed) + self.named["u"]


class Recurrent(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(5, 4, batch_first=True), nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.unsqueeze(1).repeat(1, 3, 1))[0])[0]


class Attention(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(5, 6), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).unsqueeze(1).repeat(1, 2, 1)
        return self.b(hidden, hidden, hidden, need_weights=False)[0]


class Convolution(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 3, 2), nn.ConvTranspose1d(3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unsqueeze(1))


class Table(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(7, 4, padding_idx=0), layer(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.abs() * 3).long().clamp(max=6))


class OneRow(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(5, 1), layer(1, 1)


# ------------------------------------------------------------------------ how it is trained


class Accumulated(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(x).square().mean().backward()
        model(x * 2).square().mean().backward()
        optimizer.step()


class GraphRetained(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


class TwoForwards(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        first, second = model(x).square().mean(), model(x * 3).square().mean()
        if number % 2:
            (first + second).backward()
        else:
            first.backward()
            second.backward()
        optimizer.step()


class Evaluated(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        Case.step(model, optimizer, x, number)
        model.eval()
        model(x)
        with torch.inference_mode():
            model(x)
        model.train()
        with torch.no_grad():
            model(x)


class ErrorCaught(Case):
    """A unit raises and its caller goes on, also in an evaluation between backward and step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            self.b(x[:, :3])
        return super().forward(x)

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            model(x)
        model(x)  # with a graph that no backward follows
        optimizer.step()


class Flipped(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        getattr(model, "module", model).a.requires_grad_(number % 2 == 0)
        Case.step(model, optimizer, x, number)


class GradientGiven(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        output = model(x)
        output.backward(2 * output.detach() / output.numel())
        optimizer.step()


class Compiled(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        if number == 0:
            torch._dynamo.reset()
        Case.step(torch.compile(model, backend="aot_eager"), optimizer, x, number)


class CompiledInside(Case):
    def __init__(self) -> None:
        super().__init__()
        self.a.compile(backend="aot_eager")


class Rows(nn.Module):
    """Its output is a view of its parameter."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * 5).view(rows, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[:1]


class ParametersReturned(Case):
    """By units whose memory is gone before it is used: from the allocator, and pages."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Rows(20)
        self.b = Rows(30_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.a(x), self.b(x)]
        return (x + rows[0]) * rows[1]


class ParametersReturnedByTheRoot(Case):
    units: ClassVar[tuple[str, ...]] = ()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.b(self.a(x)), {"bias": self.b.bias}

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        with torch.no_grad():
            before = model(x)[1]["bias"].sum().item()

        def loss() -> torch.Tensor:
            output, kept = model(x)
            return output.square().mean() + kept["bias"].square().sum() * before

        step_on(model, optimizer, loss)


class SavedAndLoaded(Case):
    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
        Case.step(model, optimizer, x, number)
        state = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CASES = {case.__name__: case for case in Case.__subclasses__() + Unused.__subclasses__()}
