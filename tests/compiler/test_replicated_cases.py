"""`replicate` under `torch.compile`, as upstream tests it, on CPU ranks, with code generation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch import fx, nn
from torch._C import FileCheck
from torch.utils.checkpoint import checkpoint

from meshwright.compiler import aot_backend, compiled_autograd, counters
from meshwright.data_parallel import DistributedDataParallel, replicate
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks

DIM = 2000
TIMEOUT = 280.0
"""Of a test with code generation, most of which is compiling; in seconds."""


class Net(nn.Module):
    def __init__(self, checkpoint: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.fc3 = nn.Linear(dim, dim)
        self.fc4 = nn.Linear(dim, dim)
        self.use_checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(first)))


def compiler_fn(*, no_inductor: bool = False) -> Callable[[fx.GraphModule], Any]:
    def inner(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return graph if no_inductor else torch._inductor.compile(graph, inputs)

    return functools.partial(torch.compile, fullgraph=True, backend=inner)


def compare_three(
    *,
    hook: str = "",
    no_sync: bool = False,
    no_inductor: bool = False,
    no_compile_forward: bool = False,
    use_checkpoint: bool = False,
    dim: int = DIM,
) -> None:
    """Eager `replicate`, compiled `replicate` and the compiled class: all gradients and weights."""
    mode = "python_reducer_without_compiled_forward" if no_compile_forward else "python_reducer"
    torch._dynamo.config.optimize_ddp = mode
    torch.manual_seed(123)
    net = Net(use_checkpoint, dim)
    eager = replicate(deepcopy(net))
    composed = replicate(deepcopy(net))
    wrapped: nn.Module = DistributedDataParallel(deepcopy(net))
    models: list[Any] = [eager, composed, wrapped]
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        for model in models:
            model.register_comm_hook(None, getattr(default_hooks, hook))
    contexts = [contextlib.nullcontext, contextlib.nullcontext, models[2].no_sync]
    if not no_compile_forward:
        backend: Any = aot_backend if no_inductor else "inductor"
        models[1:] = [
            torch.compile(composed, backend=backend),
            torch.compile(wrapped, backend=backend, fullgraph=True),
        ]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    rank = torch.distributed.get_rank()
    for step in range(2):
        torch.manual_seed(123 + rank + step)
        x = torch.randn(1, dim)
        skips = no_sync and step % 2 == 0
        for number, model in enumerate(models):
            if number < 2:
                model.set_requires_gradient_sync(not skips)
            backward = (
                torch._dynamo.compiled_autograd._enable(compiler_fn(no_inductor=no_inductor))
                if number
                else contextlib.nullcontext()
            )
            with contexts[number]() if skips else contextlib.nullcontext(), backward:
                model(x).sum().backward()
        for expected, *found in zip(*(model.parameters() for model in models), strict=True):
            for each in found:
                torch.testing.assert_close(each.grad, expected.grad)
        for optimizer in optimizers:
            # The seed steps after passes in no_sync, where copies part: each model says so.
            parts = pytest.warns(UserWarning, match="an optimizer steps with gradients of")
            with parts if skips else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    for model in models[1:]:
        for expected, found in zip(eager.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected)
    if no_inductor:
        assert counters["unfused"] > 0  # nobody runs a pass: each mark is reduced alone
    else:
        assert counters["ddp_buckets"] == (2 if hook else 3)
        assert counters["unfused"] == 0


CASES = {
    "sync": {},
    "no_sync": {"no_sync": True},
    "bf16": {"hook": "bf16_compress_hook"},
    "fp16": {"hook": "fp16_compress_hook"},
    "backward only": {"no_compile_forward": True},
    "checkpoint": {"use_checkpoint": True},
}


def compare_all() -> None:
    """Every case; what inductor makes of a backward is looked at below, and in the slow tests."""
    for case in CASES.values():
        torch._dynamo.reset()
        compare_three(no_inductor=True, dim=64, **case)


@pytest.mark.slow
def test_compile(ranks: Ranks) -> None:
    ranks(2, compare_all, timeout=TIMEOUT)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("case", CASES)
def test_compile_with_inductor(ranks: Ranks, case: str) -> None:
    ranks(2, functools.partial(compare_three, **CASES[case]), timeout=TIMEOUT)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("case", CASES)
def test_compile_on_four_ranks(ranks: Ranks, case: str) -> None:
    ranks(4, functools.partial(compare_three, **CASES[case]), timeout=TIMEOUT)


# ------------------------------------------------------------------------------- bucketing

COALESCED = ["fuse_ddp_with_coalesced_op", "schedule_comm_wait"]
CONCAT = ["fuse_ddp_with_concat_op", "schedule_comm_wait"]


def backward_code(loops: int) -> str:
    """The generated code of the backward of the last of ``loops`` passes without zeroing."""
    model = torch.compile(replicate(deepcopy(Net())), fullgraph=False)
    x = torch.randn([1, DIM])

    def backward(loss: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(compiler_fn()):
            loss.backward()

    for _ in range(loops - 1):
        backward(model(x).sum())
    loss = model(x).sum()
    _, codes = torch._inductor.utils.run_and_get_code(functools.partial(backward, loss))
    (code,) = codes
    return code


def check_code(passes: Sequence[str], first: Sequence[str], reduction: str) -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    settings = {"_fuse_ddp_communication_passes": list(passes), "reorder_for_locality": False}
    with torch._inductor.config.patch(settings):
        for loops in (1, 2):
            code = backward_code(loops)
            assert torch._dynamo.utils.counters["inductor"]["ddp_buckets"] == 3
            assert counters["ddp_buckets"] == 3
            check = FileCheck()
            for _ in range(3):
                for text in first:
                    check = check.check(text)
                check = check.check(f"torch.ops._c10d_functional.{reduction}.default(")
            for _ in range(3):
                check = check.check("torch.ops._c10d_functional.wait_tensor.default")
            check.run(code)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("size", [2, 4])
def test_bucketing_coalesced_op(ranks: Ranks, size: int) -> None:
    ranks(size, check_code, COALESCED, ["cpp_fused_"], "all_reduce_coalesced_", timeout=TIMEOUT)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.few(0, slow=1)
def test_bucketing_concat_op(ranks: Ranks, size: int) -> None:
    first = ["aten.flatten.using_ints(", "cpp_fused_"]
    ranks(size, check_code, CONCAT, first, "all_reduce_", timeout=TIMEOUT)


# ----------------------------------------------------------------------- with tensor parallel


def compare_on_two_axes(backend: str) -> None:
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "fc1": ColwiseParallel(),
        "fc2": RowwiseParallel(),
        "fc3": ColwiseParallel(),
        "fc4": RowwiseParallel(),
    }
    eager, compiled = (
        replicate(parallelize_module(deepcopy(net), mesh["tp"], plan), device_mesh=mesh["dp"])
        for _ in range(2)
    )
    model = torch.compile(compiled)
    torch.manual_seed(mesh["dp"].get_local_rank())
    data = torch.randn([1, DIM])
    with compiled_autograd(compiler_fn(no_inductor=backend == "eager")):
        model(data).sum().backward()
    eager(data).sum().backward()
    for expected, found in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_ddp_tp(ranks: Ranks, backend: str) -> None:
    ranks(4, compare_on_two_axes, backend, timeout=TIMEOUT)
