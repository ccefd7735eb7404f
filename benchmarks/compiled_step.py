r"""A whole training step under `torch.compile`, with a replica, against torch's DDP, on the CPU.

    python benchmarks/compiled_step.py --rounds 9
    python benchmarks/compiled_step.py --backend shm --profile

The program is that of contrastive models: two towers are one module, whose features are gathered
from all ranks for the loss; forward, loss, backward, clipping, the optimizer's step and the clamp
of the temperature are one function, which is compiled. Torch's arm always runs on Gloo. Arms take
turns in short rounds; a ratio is taken within a round; printed is the median of the rounds, and
their quartiles. ``--profile`` prints what rank 0 calls in steps of our arm.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.nn.functional as dist_functional
import torch.multiprocessing as mp
import torch.nn.functional as F
from _data_parallel_arms import encoder
from _figures import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data_parallel import Spent, enter, ratios, show_times, spread
from meshwright import comm
from meshwright.data_parallel import DistributedDataParallel as OwnDistributedDataParallel
from meshwright.data_parallel import replicate

__all__ = ["main"]

STEPS = 4


class Towers(nn.Module):
    """Two encoders of sequences, which return features and the temperature of their loss."""

    def __init__(self, layers: int = 1, dim: int = 128) -> None:
        super().__init__()
        self.towers = nn.ModuleList([encoder(layers, dim, 4) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(
        self, images: torch.Tensor, texts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        image, text = (
            F.normalize(head(tower(x).mean(1)), dim=-1)
            for tower, head, x in zip(self.towers, self.heads, (images, texts), strict=True)
        )
        return image, text, self.scale.exp()


def contrast(
    image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, group: object
) -> torch.Tensor:
    """Compute the loss of a batch over the features of all ranks."""
    images, texts = (torch.cat(dist_functional.all_gather(x, group=group)) for x in (image, text))
    scores = scale * images @ texts.T
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: object
) -> Callable[..., torch.Tensor]:
    """Make the compiled step."""
    scale = dict(model.named_parameters())[
        next(name for name, each in model.named_parameters() if each.ndim == 0)
    ]

    def step(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = contrast(*model(images, texts), group)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, 4.6)
        return loss.detach()

    return torch.compile(step)


WRAPS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "ddp": lambda model, group: DistributedDataParallel(model, process_group=group),
    "class": lambda model, group: OwnDistributedDataParallel(model),
    "replicate": lambda model, group: replicate(model),
}


def measure(rank: int, options: argparse.Namespace) -> None:
    """One rank; rank 0 prints the table."""
    group = enter(rank, options)
    world = comm.communicator()
    steps = {}
    for arm in options.arms:
        torch.manual_seed(0)
        model = WRAPS[arm](Towers(), group)
        rate = torch.tensor(1e-4)  # a number would be compiled anew when it changes
        steps[arm] = step_of(model, torch.optim.AdamW(model.parameters(), rate), group)
    torch.manual_seed(1 + rank)
    batch = torch.randn(8, 16, 128), torch.randn(8, 16, 128)
    losses = {arm: [step(*batch).item() for _ in range(6)] for arm, step in steps.items()}
    for arm, found in losses.items():
        torch.testing.assert_close(found, losses[options.arms[0]], msg=f"{arm}: {losses}")
    spent: Spent = {arm: [] for arm in steps}
    for number in range(options.rounds + 2):
        for arm in options.arms if number % 2 else options.arms[::-1]:
            world.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(STEPS):
                steps[arm](*batch)
            mine = time.process_time() - cpu, time.perf_counter() - wall
            rows = world.gather_numbers(mine, label="s")
            if number > 1:
                cpus, walls = zip(*rows, strict=True)
                spent[arm].append((statistics.mean(cpus), max(walls), 0.0))
    if rank == 0:
        title = f"compiled step, {options.backend}"
        show_times(title, STEPS, spent, [])
        for arm in spent:
            if arm != "ddp" and "ddp" in spent:
                found = ratios(spent, arm, "ddp")
                print(f"{title}: {arm} over torch, CPU {spread(found)}")
                note(f"{title}: {arm} over torch, CPU", found)
    if options.profile:
        profile(steps[options.arms[-1]], batch, is_shown=rank == 0)
    comm.disconnect()


def profile(step: Callable[..., object], batch: Sequence[torch.Tensor], *, is_shown: bool) -> None:
    """Print the functions in which steps spend their time."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        step(*batch)
    profiler.disable()
    if is_shown:
        for order in ("tottime", "cumulative"):
            pstats.Stats(profiler).sort_stats(order).print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=list(WRAPS), choices=list(WRAPS))
    parser.add_argument("--backend", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=29871)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    mp.spawn(measure, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
