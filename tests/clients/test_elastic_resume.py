"""A pretraining job of the FSDP class that another number of ranks resumes, by torch's own loader.

As fms-fsdp has it: shards of model and optimizer through `torch.distributed.checkpoint`, the
optimizer read by `load_sharded_optimizer_state_dict`, a token counter beside them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from meshwright.fsdp.wrap import transformer_auto_wrap_policy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.clients import assert_same, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",  # torch deprecates what its own loader stands on
        "ignore:Please use DTensor",
        "ignore:`_get_pg_default_device`",
        "ignore:FSDP is switching to use `NO_SHARD`",
        "ignore:When using ``NO_SHARD``",
    ),
]

WORDS, WIDTH, LENGTH, ROWS = 13, 6, 5, 8
HALFWAY, STEPS = 3, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = x.cumsum(1) / torch.arange(1, LENGTH + 1, dtype=x.dtype).unsqueeze(-1)
        return x + self.ff(self.ln(past))


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.dec_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dec_norm(x))


def build(seed: int) -> LM:
    torch.manual_seed(seed)
    return LM().double()


def wrap(model: LM, strategy: str, use_orig_params: bool) -> FSDP:
    size, double = communicator().size, torch.float64
    mesh = init_device_mesh("cpu", (2, size // 2)) if "HYBRID" in strategy else None
    return FSDP(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(double, double, double),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
        use_orig_params=use_orig_params,
        sync_module_states=True,
        limit_all_gathers=True,
    )


class Job:
    """A model, its optimizer and schedule, and how far they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 - step / (2 * STEPS)
        )
        self.step = self.tokens = 0

    def train(self, until: int, rank: int, size: int) -> list[float]:
        losses = []
        for step in range(self.step, until):
            draw = torch.Generator().manual_seed(step)
            rows = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw)[rank::size]
            self.optimizer.zero_grad()
            output = self.model(rows[:, :-1])
            loss = F.cross_entropy(output.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            if isinstance(self.model, FSDP):
                self.model.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.tokens += ROWS * LENGTH
            losses.append(loss.item())
        self.step = until
        return losses

    def save(self, folder: Path, rank: int) -> None:
        model: Any = self.model
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {
                "model_state": model.state_dict(),
                "optimizer_state": FSDP.optim_state_dict(model, self.optimizer),
            }
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True))
        if rank == 0:
            done = {"schedule": self.schedule.state_dict(), "step": self.step}
            torch.save({**done, "tokens": self.tokens}, folder / "metadata.pth")

    def load(self, folder: Path) -> None:
        model: Any = self.model
        reader = dcp.FileSystemReader(folder)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model_state": model.state_dict()}
            dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
            model.load_state_dict(state["model_state"])
            found = load_sharded_optimizer_state_dict(
                model_state_dict=model.state_dict(),
                optimizer_key="optimizer_state",
                storage_reader=reader,
            )
            own = FSDP.optim_state_dict_to_load(model, self.optimizer, found["optimizer_state"])
        self.optimizer.load_state_dict(own)
        done = torch.load(folder / "metadata.pth")
        self.schedule.load_state_dict(done["schedule"])
        self.step, self.tokens = done["step"], done["tokens"]


def body(folder: Path, strategy: str, use_orig_params: bool, until: int) -> tuple[Any, ...]:
    world = communicator()
    model = build(seed=until)  # that resumes starts from other weights
    job = Job(wrap(model, strategy, use_orig_params))
    if until > HALFWAY:
        job.load(folder)
        assert (job.step, job.tokens) == (HALFWAY, HALFWAY * ROWS * LENGTH)
    losses = torch.tensor(job.train(until, world.rank, world.size), dtype=torch.float64)
    mean = world.all_reduce(losses).wait() / world.size
    if until == HALFWAY:
        job.save(folder, world.rank)
    with FSDP.state_dict_type(job.model, StateDictType.FULL_STATE_DICT):
        return mean.tolist(), whole(job.model.state_dict())


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    job = Job(build(seed=HALFWAY))
    return job.train(STEPS, 0, 1), whole(job.model)


@pytest.mark.parametrize(
    ("before", "after", "use_orig_params"),
    [
        ((4, "FULL_SHARD"), (2, "FULL_SHARD"), True),
        ((2, "FULL_SHARD"), (4, "FULL_SHARD"), False),
        ((2, "SHARD_GRAD_OP"), (1, "SHARD_GRAD_OP"), True),
        ((4, "HYBRID_SHARD"), (2, "FULL_SHARD"), False),
    ],
    ids=str,
)
def test_another_number_of_ranks_resumes(
    ranks: Ranks,
    tmp_path: Path,
    before: tuple[int, str],
    after: tuple[int, str],
    use_orig_params: bool,
) -> None:
    expected, weights = alone()
    for (size, strategy), until in ((before, HALFWAY), (after, STEPS)):
        begun = until - HALFWAY
        rest = (tmp_path, strategy, use_orig_params, until)
        for losses, state in ranks(size, body, *rest, timeout=240):
            torch.testing.assert_close(losses, expected[begun:until], rtol=1e-9, atol=0.0)
            if until == STEPS:
                assert_same([state], weights)
