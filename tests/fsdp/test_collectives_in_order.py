"""Which collectives each strategy issues, one by one and in which order."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp import ShardingStrategy as PeerStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerPolicy

from meshwright.comm import Mark, Recorder, communicator, observe
from meshwright.fsdp import (
    BackwardPrefetch,
    ModuleWrapPolicy,
    ShardingStrategy,
    hybrid_process_groups,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks
from support.internals.timeline import Collective

STRATEGIES = [strategy.name for strategy in ShardingStrategy]

# G gathers over `shard`, R reduces over it, A reduces over `replicate`; the number is the unit's.
IN_ORDER = {
    "FULL_SHARD": {
        "train": "G0 G1 G1 G0 R1 R0",
        "no_sync": "G0 G1 G1 G0",
        "no_sync again": "G0 G1 G1 G0",
        "after no_sync": "G0 G1 G1 G0 R1 R0",
        "eval": "G0 G1",
    },
    "SHARD_GRAD_OP": {
        "train": "G0 G1 R1 R0",
        "no_sync": "G0 G1",
        "no_sync again": "",
        "after no_sync": "R1 R0",
        "eval": "G0 G1",
    },
    "NO_SHARD": {
        "train": "A1 A0",
        "no_sync": "",
        "no_sync again": "",
        "after no_sync": "A1 A0",
        "eval": "",
    },
    "HYBRID_SHARD": {
        "train": "G0 G1 G1 G0 R1 A1 R0 A0",
        "no_sync": "G0 G1 G1 G0",
        "no_sync again": "G0 G1 G1 G0",
        "after no_sync": "G0 G1 G1 G0 R1 A1 R0 A0",
        "eval": "G0 G1",
    },
    "_HYBRID_SHARD_ZERO2": {
        "train": "G0 G1 R1 A1 R0 A0",
        "no_sync": "G0 G1",
        "no_sync again": "",
        "after no_sync": "R1 A1 R0 A0",
        "eval": "G0 G1",
    },
}
LETTERS = {"all_gather": "G", "reduce_scatter": "R", "all_reduce": "A"}
AGREEMENTS = ("order", "use counts", "compare copies")
"""Labels of the few bytes by which ranks compare what they ran, used and hold."""
AXES = {"G": "shard", "R": "shard", "A": "replicate"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()


def batch(part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(part)
    return torch.randn(8, 5, dtype=torch.float64, generator=generator)


def mine(part: int) -> torch.Tensor:
    return batch(part).chunk(dist.get_world_size())[dist.get_rank()]


def wrap(strategy: str, use_orig_params: bool) -> FSDP:
    groups: Any = None
    if "HYBRID" in strategy:
        groups = hybrid_process_groups(communicator().group, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        return FSDP(
            net(),
            process_group=groups,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )


def run(model: nn.Module, mode: str, x: torch.Tensor) -> None:
    if mode == "eval":
        with torch.no_grad():
            model(x)
    elif mode.startswith("no_sync"):
        with model.no_sync():
            model(x).square().sum().backward()
    else:
        model(x).square().sum().backward()


def drawn(recorder: Recorder) -> str:
    """What was paid for, without the few bytes by which ranks compare order and use."""
    found = []
    for collective in recorder.collectives:
        if collective.label in AGREEMENTS:
            continue
        letter = LETTERS[collective.kind]
        assert collective.axis == AXES[letter]
        found.append(letter + collective.label[-1])
    return " ".join(found)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls on `torch.distributed`, whoever makes them."""
    counts: Counter[str] = Counter()
    gathers = ("all_gather", "all_gather_into_tensor", "all_gather_single")
    scatters = ("reduce_scatter_tensor", "reduce_scatter_single")
    names = {**dict.fromkeys(gathers, "G"), **dict.fromkeys(scatters, "R"), "all_reduce": "A"}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=FutureWarning)
        inside = [False]
        for name, letter in names.items():
            original: Callable[..., Any] | None = getattr(dist, name, None)
            if original is None:
                continue

            def call(
                *args: Any, _original: Any = original, _letter: str = letter, **kw: Any
            ) -> Any:
                # An older spelling calls the newer one. Ranks compare lists of integers.
                tensors = args[1] if isinstance(args[0], list) else args[0]
                is_outer, inside[0] = not inside[0], True
                counts[_letter] += is_outer and tensors.is_floating_point()
                try:
                    return _original(*args, **kw)
                finally:
                    inside[0] = not is_outer

            setattr(dist, name, call)
            stack.callback(setattr, dist, name, original)
        yield counts


def body_order(strategy: str) -> None:
    for use_orig_params in (False, True):
        model, plain = wrap(strategy, use_orig_params), net()
        run(model, "train", mine(0))
        model.zero_grad()
        modes = ["eval", "train", "no_sync", "no_sync again", "after no_sync", "train"]
        for part, mode in enumerate(modes):
            recorder = Recorder()
            with observe(recorder):
                run(model, mode, mine(part))
            assert drawn(recorder) == IN_ORDER[strategy][mode], (mode, use_orig_params)
            if mode != "eval":
                (plain(batch(part)).square().sum() / dist.get_world_size()).backward()
        if use_orig_params:
            with FSDP.summon_full_params(model, with_grads=True):
                found = {n: p.grad for n, p in model.named_parameters()}
                for name, parameter in plain.named_parameters():
                    torch.testing.assert_close(found[name], parameter.grad, msg=name)
        for mode in ("train", "no_sync", "no_sync again", "after no_sync"):
            with counted() as counts:
                run(model, mode, mine(0))
            letters = Counter(word[0] for word in IN_ORDER[strategy][mode].split())
            assert +counts == letters, (mode, use_orig_params)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_one_by_one(ranks: Ranks, strategy: str) -> None:
    ranks(4 if "HYBRID" in strategy else 2, body_order, strategy)


def body_as_torch() -> None:
    groups = hybrid_process_groups(communicator().group, 2)
    for strategy in STRATEGIES:
        is_hybrid = "HYBRID" in strategy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = Peer(
                net(),
                process_group=groups if is_hybrid else None,
                sharding_strategy=PeerStrategy[strategy],
                auto_wrap_policy=PeerPolicy({nn.Linear}),
                device_id=communicator().device,
            )
        run(peer, "train", mine(0))
        for mode in ("train", "no_sync", "no_sync again", "after no_sync"):
            with counted() as counts:
                run(peer, mode, mine(0))
            letters = Counter(word[0] for word in IN_ORDER[strategy][mode].split())
            assert +counts == letters, (strategy, mode, counts)


@pytest.mark.devices("host", reason="torch's FSDP keeps memory by record_stream, on no CPU")
def test_torch_issues_as_many(ranks: Ranks) -> None:
    ranks(4, body_as_torch)


# ---------------------------------------------------------------------------- gathers ahead


class Mark_(torch.autograd.Function):  # noqa: N801
    """Says when its place in the forward and in the backward is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, seen: list[str]) -> torch.Tensor:
        ctx.name, ctx.seen = name, seen
        seen.append(f"f{name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.append(f"b{ctx.name}")
        return gradient, None, None


class Layer(nn.Linear):
    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__(4, 4)
        self.name, self.seen = name, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Mark_.apply(super().forward(x), self.name, self.seen)


class Watch:
    """Puts collectives between the marks, and counts gathers on their way."""

    def __init__(self, seen: list[str]) -> None:
        self.seen, self.open, self.most = seen, 0, 0

    def issued(self, collective: Collective) -> None:
        if collective.label not in AGREEMENTS:
            self.seen.append(LETTERS[collective.kind] + collective.label[-1])
            self.open += collective.label.startswith("unshard")
            self.most = max(self.most, self.open)

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        self.open -= collective.label.startswith("unshard")


BACKWARD = {
    BackwardPrefetch.BACKWARD_PRE: "G2 G1 b2 R2 G0 b1 R1 b0 R0",
    BackwardPrefetch.BACKWARD_POST: "G2 b2 G1 R2 b1 G0 R1 b0 R0",
    None: "G2 b2 R2 G1 b1 R1 G0 b0 R0",
}
FORWARD = {True: "G0 G1 f0 G2 f1 f2", False: "G0 f0 G1 f1 G2 f2"}


def body_ahead() -> None:
    for limit in (True, False):
        for prefetch, backward in BACKWARD.items():
            for ahead, forward in FORWARD.items():
                seen: list[str] = []
                model = FSDP(
                    nn.Sequential(*(Layer(str(number), seen) for number in range(3))),
                    auto_wrap_policy=ModuleWrapPolicy({Layer}),
                    backward_prefetch=prefetch,
                    forward_prefetch=ahead,
                    limit_all_gathers=limit,
                )
                model(torch.ones(2, 4)).sum().backward()
                seen.clear()
                watch = Watch(seen)
                with observe(watch):
                    model(torch.ones(2, 4)).sum().backward()
                assert " ".join(seen) == f"{forward} {backward}", (prefetch, ahead)
                assert watch.most <= 2


def test_gathers_ahead_are_where_they_were_asked_for(ranks: Ranks) -> None:
    ranks(2, body_ahead)


class Headed(nn.Module):
    """Two layers that are wrapped, and a gain that the root holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.gain


def body_root() -> None:
    for use_orig_params in (True, False):
        model = FSDP(
            Headed(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        # A part may run first, and is the root of its pass.
        for part, gathers in ((model.layers[1], 1), (model, 5)):
            for _ in range(2):
                recorder = Recorder()
                with observe(recorder):
                    part(torch.ones(2, 4)).sum().backward()
            found = [c.label for c in recorder.collectives if c.label.startswith("unshard")]
            names = [label.rpartition(" ")[2] for label in found]
            assert len(names) == gathers, names
            if part is model:
                assert names[1:] == ["layers.0", "layers.1", "layers.1", "layers.0"]


def test_a_root_keeps_its_own_parameters_until_the_backward(ranks: Ranks) -> None:
    """As torch's: they would be gathered again at once."""
    ranks(2, body_root)
