"""A layer of experts on two ranks against the same written by hand, on the CPU.

    python benchmarks/experts.py
    python benchmarks/experts.py --works exchange --rounds 15
    python benchmarks/experts.py --profile tokens

A step is forward and backward of 2,048 tokens a rank, of width 256, each of which goes to 2 of 8
experts. ``layer``: experts are MLPs (256, 512, 256); ``exchange``: they are (256, 4, 256), so that
the tokens' way is nearly all there is. ``bare`` is plain parameters and torch's operations, written
by hand: sort by expert, an all-to-all of counts and one of rows, two products for each expert, an
all-to-all back, a weighed sum; on Gloo, and (``bare shm``) on the same shared memory as ours.
``tokens`` and ``pairs`` are `ExpertParallel` by `parallelize_module` with that ``exchange``.

Outputs and all gradients are compared first. Then the arms take turns in short rounds, so that a
busy machine slows all of them alike; a ratio is taken within a round, of the CPU times of the
processes. Printed are medians and quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _figures import note, quartiles
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright import comm
from meshwright.expert_parallel import ExpertParallel
from meshwright.tensor_parallel import parallelize_module

__all__ = ["main"]

TOKENS, DIM, EXPERTS, K = 2048, 256, 8, 2
ARMS = ("tokens", "pairs")


@dataclass(frozen=True)
class Workload:
    """The inner width of experts, and how many steps make a round."""

    hidden: int
    steps: int


WORKS = {"layer": Workload(512, 4), "exchange": Workload(4, 12)}


class Experts(nn.Module):
    """MLPs without biases, of the form that Hugging Face's modules of experts have."""

    has_gate = has_bias = is_concatenated = False
    is_transposed = True  # (experts, in, out)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, DIM, hidden) / DIM**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, hidden, DIM) / hidden**0.5)
        self.act_fn = nn.ReLU()

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Bare(nn.Module):
    """This rank's experts, with what they need and no more."""

    def __init__(self, whole: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.size, rank, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.up = nn.Parameter(whole.up_proj.detach().chunk(self.size)[rank].clone())
        self.down = nn.Parameter(whole.down_proj.detach().chunk(self.size)[rank].clone())

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        pairs = indices.flatten()
        order = pairs.argsort(stable=True)
        sent = pairs.bincount(minlength=EXPERTS)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        going, coming = sent.view(self.size, -1).sum(1).tolist(), got.view(self.size, -1)
        here, coming = coming.sum(0).tolist(), coming.sum(1).tolist()
        rows = _Exchange.apply(x.index_select(0, order // K), going, coming, self.group)
        local = torch.arange(len(here)).repeat(self.size).repeat_interleave(got)
        by_expert = local.argsort(stable=True)
        parts = rows.index_select(0, by_expert).split(here)
        every = zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        y = torch.cat([(part @ up).relu() @ down for part, up, down in every])
        y = torch.empty_like(rows).index_copy(0, by_expert, y)
        y = _Exchange.apply(y, coming, going, self.group)
        y = torch.empty_like(y).index_copy(0, order, y)
        return (y.view(*indices.shape, DIM) * weights.unsqueeze(-1)).sum(1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        going: list[int],
        coming: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.way = going, coming, group
        found = x.new_empty(sum(coming), x.shape[1])
        dist.all_to_all_single(found, x, coming, going, group=group)
        return found

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        going, coming, group = ctx.way
        found = grad.new_empty(sum(going), grad.shape[1])
        dist.all_to_all_single(found, grad.contiguous(), going, coming, group=group)
        return found, None, None, None


class Arm:
    """One module of experts, and this rank's tokens."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.module = module
        draw = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(TOKENS, DIM, generator=draw).requires_grad_()
        chosen = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(-1).topk(K)
        self.indices, self.weights = chosen.indices, chosen.values.requires_grad_()
        self.grad = torch.randn(TOKENS, DIM, generator=draw)

    def step(self) -> torch.Tensor:
        """Forward and backward; the output."""
        y = self.module(self.x, self.indices, self.weights)
        y.backward(self.grad)
        return y.detach()

    def clear(self) -> list[torch.Tensor]:
        """Take away all gradients, of tokens, weights of experts for them, and experts."""
        found = []
        for leaf in (self.x, self.weights, *self.module.parameters()):
            assert leaf.grad is not None
            found.append(leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad)
            leaf.grad = None
        return found

    def spend(self, steps: int) -> float:
        """CPU seconds of a step."""
        comm.communicator().barrier()
        cpu = time.process_time()
        for _ in range(steps):
            self.step()
            self.clear()
        return (time.process_time() - cpu) / steps


def arms(work: Workload, rank: int, gloo: dist.ProcessGroup) -> dict[str, Arm]:
    """All arms, whose outputs and gradients are equal."""
    torch.manual_seed(0)
    whole = Experts(work.hidden)
    world = comm.communicator().group
    mesh = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("expert",))
    made = {"bare": Arm(Bare(whole, gloo), rank), "bare shm": Arm(Bare(whole, world), rank)}
    for exchange in ARMS:
        block = nn.Sequential(Experts(work.hidden))
        block.load_state_dict({f"0.{key}": value for key, value in whole.state_dict().items()})
        parallelize_module(block, mesh, {"0": ExpertParallel(exchange=exchange)})
        made[exchange] = Arm(block[0], rank)
    expected = [made["bare"].step(), *made["bare"].clear()]
    for name, arm in made.items():
        found = [arm.step(), *arm.clear()] if name != "bare" else expected
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    return made


def profiled(step: Callable[[], object], steps: int) -> None:
    """Print where the Python of ``steps`` calls spends its time."""
    with cProfile.Profile() as profile:
        for _ in range(steps):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def measure(rank: int, options: argparse.Namespace) -> None:
    """One rank of the comparison; rank 0 prints."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port)
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = comm.connect("shm")
    gloo = dist.new_group(backend="gloo")
    assert gloo is not None
    for name in options.works:
        work = WORKS[name]
        made = arms(work, rank, gloo)
        spent: dict[str, list[float]] = {arm: [] for arm in made}
        for number in range(options.rounds + 2):
            for arm in made if number % 2 else reversed(made):
                row = [made[arm].spend(work.steps)]
                (ranks,) = zip(*world.gather_numbers(row, label="seconds"), strict=True)
                if number > 1:
                    spent[arm].append(statistics.mean(ranks))
        if rank == 0:
            print(f"{name}: CPU ms, over bare shm, over bare; {options.rounds} rounds", flush=True)
            for arm, rows in spent.items():
                ratios = []
                for over in ("bare shm", "bare"):
                    values = [a / b for a, b in zip(rows, spent[over], strict=True)]
                    ratios.append(spread(values))
                    if arm in ARMS:
                        note(f"experts {name}: ours {arm} over {over}, CPU", values)
                print(f"  {arm:10} {1e3 * statistics.median(rows):8.2f}  {'  '.join(ratios)}")
        if options.profile:
            arm = made[options.profile]
            (profiled if rank == 0 else _repeated)(lambda arm=arm: (arm.step(), arm.clear()), 50)
    comm.disconnect()


def _repeated(step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", choices=("bare", "bare shm", *ARMS))
    parser.add_argument("--port", type=int, default=29871)
    mp.spawn(measure, (parser.parse_args(),), nprocs=2)


if __name__ == "__main__":
    main()
