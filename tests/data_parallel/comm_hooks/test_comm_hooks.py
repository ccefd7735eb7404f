"""Communication hooks: each against its plain formula, and torch's own on ours, unchanged."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook as torch_local_sgd,
)
from torch.distributed.algorithms.ddp_comm_hooks import (
    powerSGD_hook as torch_power_sgd,
)

from meshwright.comm import Communicator, Recorder, communicator, observe, subgroup
from meshwright.data_parallel import DistributedDataParallel, GradBucket, replicate
from meshwright.data_parallel import comm_hooks as hooks
from meshwright.testing import Ranks
from support.internals.data_parallel import CommunicationHook, RegisteredHook, compressed_dtype

SEVERAL = 4e-5
"""A bucket_cap_mb that gives several buckets."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.spare = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, uses_spare: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.spare(x) if uses_spare else self.last(x)


def share(step: int = 0) -> torch.Tensor:
    torch.manual_seed(communicator().rank + 10 * step)
    return torch.randn(5, 6)


def local_gradients(model: nn.Module, step: int = 0) -> list[torch.Tensor]:
    """This rank's own gradients, where it has one."""
    plain = Net()
    plain.load_state_dict(model.state_dict())
    plain(share(step)).square().sum().backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    world = communicator()
    found = [tensor.clone() for tensor in tensors]
    for tensor in found:
        world.all_reduce(tensor, label="check").wait()
    return found


def mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor / communicator().size for tensor in summed(tensors)]


def same(model: nn.Module, expected: list[torch.Tensor], **tolerance: float) -> None:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def narrow(dtype: torch.dtype) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    def formula(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        size = communicator().size
        return [t.float() for t in summed([t.to(dtype).div_(size) for t in tensors])]

    return formula


EXACT: dict[str, tuple[Any, Callable[[list[torch.Tensor]], list[torch.Tensor]]]] = {
    "allreduce": (hooks.allreduce_hook, mean),
    "fp16": (hooks.fp16_compress_hook, narrow(torch.float16)),
    "bf16": (hooks.bf16_compress_hook, narrow(torch.bfloat16)),
    "fp16 around": (hooks.fp16_compress_wrapper(hooks.allreduce_hook), narrow(torch.float16)),
    "bf16 around": (hooks.bf16_compress_wrapper(hooks.allreduce_hook), narrow(torch.bfloat16)),
    "noop": (hooks.noop_hook, lambda tensors: tensors),
    "torch allreduce": (default_hooks.allreduce_hook, mean),
    "torch fp16": (default_hooks.fp16_compress_hook, narrow(torch.float16)),
    "torch bf16": (default_hooks.bf16_compress_hook, narrow(torch.bfloat16)),
    "torch fp16 around": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        narrow(torch.float16),
    ),
    "torch around ours": (
        default_hooks.bf16_compress_wrapper(hooks.allreduce_hook),
        narrow(torch.bfloat16),
    ),
    "ours around torch": (
        hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        narrow(torch.float16),
    ),
    "torch noop": (debugging_hooks.noop_hook, lambda tensors: tensors),
}


def body_formula(name: str, is_view: bool, wrap: Callable[..., nn.Module]) -> None:
    hook, formula = EXACT[name]
    ours = wrap(Net(), bucket_cap_mb=SEVERAL, gradient_as_bucket_view=is_view)
    ours.register_comm_hook(None, hook)
    for step in range(2):
        with torch.no_grad():
            plain = ours.module if wrap is DistributedDataParallel else ours
        ours(share(step)).square().sum().backward()
        same(ours, formula(local_gradients(plain, step)))
        ours.zero_grad()


@pytest.mark.few(6, slow=7)
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_hook_does_what_its_formula_says(ranks: Ranks, name: str, is_view: bool) -> None:
    ranks(2, body_formula, name, is_view, DistributedDataParallel)


@pytest.mark.parametrize("name", ["bf16", "torch fp16"])
def test_hook_of_replicate_waits_for_set_up(ranks: Ranks, name: str) -> None:
    ranks(2, body_formula, name, False, replicate)


# --------------------------------------------------------------------------------- protocol


def body_protocol() -> None:
    seen: list[tuple[int, bool, list[tuple[int, ...]], int]] = []

    def user_hook(state: list[str], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert state == ["mine"]
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()]
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        seen.append((bucket.index(), bucket.is_last(), shapes, bucket.buffer().numel()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), bucket.index() + 1))
        return future

    ours = DistributedDataParallel(Net(), bucket_cap_mb=SEVERAL)
    ours.register_comm_hook(["mine"], user_hook)
    with observe(recorder := Recorder()):
        ours(share()).sum().backward()
    assert [row[:2] for row in seen] == [(0, False), (1, False), (2, True)][: len(seen)]
    assert seen[-1][1]
    assert recorder.kinds() == [("all_gather", "use counts")]
    assert bool((ours.module.first.weight.grad == len(seen)).all())
    assert ours.module.spare.weight.grad is None


def body_used_on_one_rank() -> None:
    world = communicator()
    ours = DistributedDataParallel(Net(), bucket_cap_mb=SEVERAL)
    ours.register_comm_hook(world.group, hooks.allreduce_hook)
    ours(share(), world.rank == 0).sum().backward()
    for part in (ours.module.last, ours.module.spare):
        torch.testing.assert_close(part.bias.grad, torch.full((4,), 5.0 / world.size))


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def body_refusals(wrap: Callable[..., nn.Module]) -> None:
    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_return(state: object, bucket: GradBucket) -> torch.Tensor: ...

    def no_future(state: object, bucket: GradBucket):  # noqa: ANN202
        return bucket.buffer()

    def wrong_size(state: object, bucket: GradBucket):  # noqa: ANN202
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.zeros(1))
        return future

    ours = wrap(Net())
    raises(
        TypeError,
        "Communication hook must be callable.",
        lambda: ours.register_comm_hook(None, 3),
    )
    raises(
        ValueError,
        "Communication hook: bucket annotation should be dist.GradBucket.",
        lambda: ours.register_comm_hook(None, wrong_bucket),
    )
    raises(
        ValueError,
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
        lambda: ours.register_comm_hook(None, wrong_return),
    )
    ours.register_comm_hook(None, hooks.allreduce_hook)
    raises(
        RuntimeError,
        "register_comm_hook or register_builtin_comm_hook can only be called once.",
        lambda: ours.register_comm_hook(None, hooks.allreduce_hook),
    )
    for hook, text in (
        (no_future, "must return a torch.futures.Future object, but got"),
        (wrong_size, "one tensor"),
    ):
        other = wrap(Net())
        other.register_comm_hook(None, hook)
        value = other(share()).sum()
        raises(TypeError, text, value.backward)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate], ids=["class", "function"])
def test_what_cannot_be_a_hook_is_refused(ranks: Ranks, wrap: Callable[..., nn.Module]) -> None:
    ranks(2, body_refusals, wrap)


# -------------------------------------------------------------------------------- power SGD


def test_power_sgd_refuses_an_early_start() -> None:
    text = "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled"
    for options in ({"warm_start": False}, {"use_error_feedback": False}, {}):
        raises(
            ValueError,
            text,
            lambda o=options: hooks.PowerSGDState(None, start_powerSGD_iter=1, **o),
        )
    state = hooks.PowerSGDState(
        None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False
    )
    assert (state.matrix_approximation_rank, state.min_compression_rate) == (1, 2)
    assert hooks.PowerSGDState(None).start_powerSGD_iter == 1000


def body_power_sgd_formula() -> None:
    """Step by step as in the paper, by hand, with the hook's Q."""
    world = communicator()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model = nn.Linear(8, 6).double()
    ours = DistributedDataParallel(model)
    ours.register_comm_hook(state, hooks.powerSGD_hook)
    error, q = torch.zeros(6, 8, dtype=torch.float64), None
    for step in range(5):
        torch.manual_seed(world.rank + 10 * step)
        x = torch.randn(4, 8, dtype=torch.float64)
        ours.zero_grad()
        ours(x).square().sum().backward()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        plain(x).square().sum().backward()
        weight, bias = mean([plain.weight.grad, plain.bias.grad])
        torch.testing.assert_close(model.bias.grad, bias)
        if step < 2:
            torch.testing.assert_close(model.weight.grad, weight)
            continue
        matrix = plain.weight.grad + error
        if q is not None:
            (p,) = summed([matrix @ (q / q.norm())])
            p /= p.norm()
            (q,) = mean([matrix.t() @ p])
            torch.testing.assert_close(model.weight.grad, p @ q.t())
        q = state.q_memory_dict[0][0]
        assert torch.linalg.matrix_rank(model.weight.grad) == 1
        error = matrix - model.weight.grad
        torch.testing.assert_close(state.error_dict[0][6:].view(6, 8), error)
    assert state.compression_stats() == (3 * 48 / (3 * 14), 3 * 48, 3 * 14)


def body_power_sgd_full_rank(hook: Any, dtype: torch.dtype) -> None:
    """With as many columns as the matrix has nothing is lost."""
    state = hooks.PowerSGDState(
        None,
        matrix_approximation_rank=64,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(dtype)
    ours = DistributedDataParallel(model, bucket_cap_mb=SEVERAL)
    ours.register_comm_hook(state, hook)
    for step in range(4):
        x = share(step).to(dtype)
        ours.zero_grad()
        ours(x).square().sum().backward()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        plain(x).square().sum().backward()
        same(ours, mean([p.grad for p in plain.parameters()]), rtol=1e-4, atol=1e-4)


def body_power_sgd_options() -> None:
    """Each option gives what goes without it, or a little less; and says how much was sent."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "batched": {"batch_tensors_with_same_shape": True},
        "epsilon": {"orthogonalization_epsilon": 1e-9},
        "shorter": {"orthogonalization_epsilon": 1e3},
    }
    found: dict[str, list[torch.Tensor]] = {}
    for name, options in variants.items():
        state = hooks.PowerSGDState(
            None,
            matrix_approximation_rank=2,
            start_powerSGD_iter=2,
            min_compression_rate=0.1,
            compression_stats_logging_frequency=2,
            **options,
        )
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(3)]
        ours = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(6, 4)).double())
        ours.register_comm_hook(state, hooks.powerSGD_hook)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        log = logging.getLogger("meshwright")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        for step in range(6):
            ours.zero_grad()
            ours(share(step).double()).square().sum().backward()
        log.removeHandler(handler)
        assert [line.split(":")[0] for line in lines] == [
            "PowerSGD after 3 passes",
            "PowerSGD after 5 passes",
        ]
        found[name] = [p.grad for p in ours.parameters() if p.ndim == 2]
    for name in ("batched", "epsilon"):
        for a, b in zip(found[name], found["plain"], strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(found["shorter"], found["plain"], strict=True):
        assert a.norm() < 0.1 * b.norm()


def body_error_feedback_trains(hook: Any) -> None:
    """Rank 1 alone would not do; with what is lost added again, the loss goes down all the same."""
    world = communicator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    ours = DistributedDataParallel(model)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2)
    ours.register_comm_hook(state, hook)
    torch.manual_seed(world.rank + 5)
    x, y = torch.randn(32, 6), torch.randn(32, 4) * 0.1
    losses = []
    for _ in range(60):
        ours.zero_grad()
        value = (ours(x) - y).square().mean()
        value.backward()
        losses.append(value.item())
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter -= 0.1 * parameter.grad
    assert losses[-1] < 0.5 * losses[0]
    rows = world.gather_bytes(model[0].weight.detach().numpy().tobytes(), label="check")
    assert rows[0] == rows[1], "the ranks stay equal, bit by bit"


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
def test_power_sgd_of_full_rank_is_exact(ranks: Ranks, hook: Any, dtype: torch.dtype) -> None:
    ranks(2, body_power_sgd_full_rank, hook, dtype)


@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
def test_power_sgd_trains(ranks: Ranks, hook: Any) -> None:
    ranks(2, body_error_feedback_trains, hook)


def body_torch_power_sgd() -> None:
    state = torch_power_sgd.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    ours = DistributedDataParallel(model, bucket_cap_mb=SEVERAL)
    ours.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    for step in range(4):
        ours.zero_grad()
        ours(share(step)).square().sum().backward()
    rows = communicator().gather_bytes(model[0].weight.grad.numpy().tobytes(), label="check")
    assert rows[0] == rows[1]
    assert state.iter == 4


# torch's batched variant refuses its own matrices, on any bucket.
def test_power_sgd_of_torch_runs(ranks: Ranks) -> None:
    ranks(2, body_torch_power_sgd)


# ------------------------------------------------------------------- local SGD, quantization


def body_local_sgd(is_torch: bool) -> None:
    world = communicator()
    pairs = subgroup(world, [[0, 1], [2, 3]], "pair")
    kind = torch_local_sgd.PostLocalSGDState if is_torch else hooks.PostLocalSGDState
    hook = torch_local_sgd.post_localSGD_hook if is_torch else hooks.post_localSGD_hook
    for is_reduced in (True, False):
        state = kind(None, pairs.group, 2, is_reduced)
        ours = DistributedDataParallel(Net())
        ours.register_comm_hook(state, hook)
        for step in range(4):
            ours.zero_grad()
            ours(share(step)).square().sum().backward()
            own = local_gradients(ours.module, step)
            if step < 2:
                same(ours, mean(own))
            elif is_reduced:
                for tensor in own:
                    pairs.all_reduce(tensor, label="check").wait()
                same(ours, [tensor / 2 for tensor in own])
            else:
                same(ours, own)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_torch", [False, True])
def test_post_local_sgd(ranks: Ranks, is_torch: bool) -> None:
    ranks(4, body_local_sgd, is_torch)


def test_post_local_sgd_needs_a_subgroup() -> None:
    with pytest.raises(ValueError, match="needs a subgroup"):
        hooks.PostLocalSGDState(None, None, 3)


def rounded(gradients: list[torch.Tensor], row: int | None) -> list[torch.Tensor]:
    """Rounded to 256 levels between the extremes of the bucket (last parameter first)."""
    flat = torch.cat([g.view(-1) for g in gradients[::-1]])
    length = len(flat) if row is None else row
    for part in flat.split(length):
        low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
        scale = (high - low) / 255
        zero = round(-low / scale) if scale else 0
        part.copy_(((part / scale).round() + zero).clamp(0, 255).sub(zero) * scale)
    pieces = flat.split([g.numel() for g in gradients[::-1]])
    return [piece.view(g.shape) for piece, g in zip(pieces, gradients[::-1], strict=True)][::-1]


def body_quantized(hook: Any, row: int | None) -> None:
    model = nn.Linear(60, 30)
    ours = DistributedDataParallel(model)
    ours.register_comm_hook(communicator().group, hook)
    torch.manual_seed(communicator().rank)
    x = torch.randn(4, 60)
    ours(x).square().sum().backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).square().sum().backward()
    own = [p.grad for p in plain.parameters()]
    exact = mean(own)
    spread = max(g.abs().max().item() for g in own) * 2 / 255
    same(ours, mean(rounded(own, row)), rtol=0, atol=spread / 10)
    same(ours, exact, rtol=0, atol=spread)


# torch's own quantization reads the futures of another backend than Gloo.
@pytest.mark.parametrize(("name", "row"), [("pertensor", None), ("perchannel", 512)])
def test_quantization(ranks: Ranks, name: str, row: int | None) -> None:
    ranks(2, body_quantized, getattr(hooks, f"quantization_{name}_hook"), row)


# ------------------------------------------------------------------- optimizer in the backward


def body_optimizer_in_backward(inner: Any) -> None:
    ours = DistributedDataParallel(Net(), bucket_cap_mb=SEVERAL)
    other = DistributedDataParallel(Net(), bucket_cap_mb=SEVERAL)
    state = hooks.OptimizerInBackward(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), inner)
    ours.register_comm_hook(state, hooks.optimizer_in_backward_hook)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for model in (ours, other):
            model.zero_grad()
            model(share(step)).square().mean().backward()
        optimizer.step()
        for a, b in zip(ours.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inner", [hooks.allreduce_hook, default_hooks.allreduce_hook])
def test_optimizer_in_backward(ranks: Ranks, inner: Any) -> None:
    ranks(2, body_optimizer_in_backward, inner)


@pytest.mark.parametrize(
    "body",
    [body_protocol, body_used_on_one_rank, body_power_sgd_formula, body_power_sgd_options],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
def test_hooks(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


def body_axis() -> None:
    """A hook's state may be a communicator, whose name its collectives carry."""
    ours = DistributedDataParallel(Net())
    named: Communicator = communicator(None, "data")
    ours.register_comm_hook(named, hooks.bf16_compress_hook)
    with observe(recorder := Recorder()):
        ours(share()).sum().backward()
    reduced = [(c.axis, c.dtype, c.label) for c in recorder.collectives if c.kind == "all_reduce"]
    assert reduced == [("data", "bfloat16", "reduce bucket 0")]


def test_the_axis_of_a_hook(ranks: Ranks) -> None:
    ranks(2, body_axis)


def test_hooks_that_sum_in_one_dtype_are_known_to_compiled_graphs() -> None:
    def sent(hook: CommunicationHook, state: object = None) -> torch.dtype | None:
        registered = RegisteredHook(hook=hook, state=state)
        return compressed_dtype(registered, cast("Communicator", None), torch.float64)

    for home in (hooks, default_hooks):
        assert sent(home.allreduce_hook) == torch.float64
        assert sent(home.bf16_compress_hook) == torch.bfloat16
        assert sent(home.fp16_compress_hook) == torch.float16
    state = object()
    assert sent(hooks.noop_hook, state) is None
    assert sent(hooks.powerSGD_hook, state) is None
    assert sent(hooks.post_localSGD_hook, state) is None
    assert sent(hooks.fp16_compress_wrapper(hooks.powerSGD_hook), state) is None
    assert sent(hooks.bf16_compress_wrapper(hooks.noop_hook), state) is None
