"""The messages of docs/messages.md, each provoked: a function of the name that the page gives."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import communicator, connect, phase
from meshwright.composition import check_model
from meshwright.losses import in_chunks
from meshwright.pipelining import split_args_kwargs_into_chunks
from meshwright.plan import Plan
from meshwright.testing import Ranks, RanksFailed
from meshwright.transfer import Publisher, Receiver
from support.docs.blocks import ROOT
from support.internals.comm import choose
from support.internals.environment import cluster
from support.internals.integrations import tracker_of
from support.internals.recipes import TrainConfig, open_task, read_config
from support.internals.toml_source import read

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def told(call: Callable[[], object]) -> str:
    """What ``call`` raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was raised")


def told_of_a_failure(ranks: Ranks, body: Callable[[], object], rank: int) -> str:
    """What rank ``rank`` raised in a run of two that has failed."""
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=8.0)
    return str(caught.value.outcomes[rank].exception)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, text in variables.items():
            patch.setenv(name, text)
        yield


def plan(text: str) -> Plan:
    return Plan.from_toml(text, source="my.toml")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(batch: Callable[[int], torch.Tensor], steps: int = 3) -> str:
    """What a plan's steps on this rank's batches raise; on a device one step later."""
    torch.manual_seed(0)
    trainable = mw.parallelize(
        nn.Linear(3, 3), plan("[axes]\nreplicate = 2"), optimizer=sgd, loss=F.mse_loss
    )
    rows = batch(communicator().rank)

    def train() -> None:
        for _ in range(steps):
            trainable.step(rows, torch.zeros_like(rows))

    return told(train)


# ------------------------------------------------------------------------------------- plans


def unknown_key(ranks: Ranks, folder: Path) -> str:
    return told(lambda: plan("[train]\nclip_nrm = 1.0\nseed = -1\n"))


def unknown_axis(ranks: Ranks, folder: Path) -> str:
    return told(lambda: plan("[axes]\ndata = 4\n"))


def no_file(ranks: Ranks, folder: Path) -> str:
    return told(lambda: Plan.from_file("my.toml"))


def a_dict(ranks: Ranks, folder: Path) -> str:
    axes: Any = {"replicate": 2}
    return told(lambda: Plan(axes=axes))


def no_module(ranks: Ranks, folder: Path) -> str:
    config = read('[model]\nfactory = "my_models:build"\n', TrainConfig, source="my.toml")
    return told(lambda: open_task(config))


def two_models(ranks: Ranks, folder: Path) -> str:
    text = '[model]\nfactory = "my_models:build"\nlayers = 2\n'
    return told(lambda: read(text, TrainConfig, source="my.toml"))


def number_of_ranks(ranks: Ranks, folder: Path) -> str:
    return told(lambda: plan("[axes]\nreplicate = 2\nshard = 2\n").check(2))


def matches_nothing(ranks: Ranks, folder: Path) -> str:
    given = plan('[axes]\nshard = 2\n\n[shard]\nunits = ["layer.*"]\n')
    return told(lambda: given.check(2, modules=["", "layers", "layers.0", "layers.1"]))


def no_effect(ranks: Ranks, folder: Path) -> str:
    return told(lambda: plan('[axes]\nreplicate = 2\n\n[shard]\nunits = ["0"]\n').check(2))


def no_tensor_plan(ranks: Ranks, folder: Path) -> str:
    given = plan('[axes]\ntensor = 2\n\n[tensor]\nrules = "model"\n')
    return told(lambda: check_model(nn.Sequential(nn.Linear(2, 2)), given, 2))


def nothing_to_cut(ranks: Ranks, folder: Path) -> str:
    return told(lambda: plan("[axes]\ntensor = 2\n").check(2))


def no_head(ranks: Ranks, folder: Path) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return told(lambda: check_model(model, plan("[train]\nloss_chunk = 1024"), 1))


def changed_logits(ranks: Ranks, folder: Path) -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) / 2

    model, labels = in_chunks(Model(), "head"), torch.zeros(3, dtype=torch.int64)
    return told(lambda: model(torch.ones(3, 2), shift_labels=labels))


def batch_norm(ranks: Ranks, folder: Path) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return told(lambda: check_model(model, plan("[axes]\nreplicate = 2"), 2))


def microbatches(ranks: Ranks, folder: Path) -> str:
    return told(lambda: check_model(nn.Linear(2, 2), plan("[axes]\npipeline = 4"), 4))


def shares(ranks: Ranks, folder: Path) -> str:
    example = ROOT / "examples/train.toml"
    return told(lambda: read_config(example, ["data.batch_size=30"]))


def example(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        given = plan("[axes]\npipeline = 2\n\n[pipeline]\nmicrobatches = 2")
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return told(lambda: mw.parallelize(model, given, optimizer=sgd, loss=F.mse_loss))

    return ranks(2, body)[0]


def other_plans(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        given = plan("[axes]\nreplicate = 2\n\n[train]\nclip_norm = 1.0")
        if communicator().rank:
            given = plan("[axes]\nreplicate = 2\n\n[train]\nclip_norm = 2.0")
        trainable = mw.parallelize(nn.Linear(2, 2), given, optimizer=sgd, loss=F.mse_loss)
        return told(lambda: trainable.step(torch.ones(2, 2), torch.ones(2, 2)))

    return ranks(2, body)[0]


# ------------------------------------------------------------------------------------- start


def no_launcher(ranks: Ranks, folder: Path) -> str:
    with environment(RANK="0"):
        return told(cluster)


def rank_beyond(ranks: Ranks, folder: Path) -> str:
    with environment(RANK="2", WORLD_SIZE="2", MASTER_ADDR="node1", MASTER_PORT="29500"):
        return told(cluster)


def no_run(ranks: Ranks, folder: Path) -> str:
    return told(communicator)


def launched(ranks: Ranks, folder: Path) -> str:
    with environment(RANK="1", WORLD_SIZE="4"):
        return told(lambda: mw.launch(print, 2))


def port(ranks: Ranks, folder: Path) -> str:
    def body(taken: int) -> str:
        os.environ["MASTER_PORT"] = str(taken)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        return told(lambda: connect(timeout=2.0))

    with socket.create_server(("", 0)) as taken:
        return ranks(1, body, taken.getsockname()[1], connected=False)[0]


def roll(devices: str, asked: str = "") -> list[dict[str, Any]]:
    """What two ranks of one host say; each letter is a GPU that both see."""
    alike = {"host": "node1", "place": "", "unsupported": "", "asked": asked, "variable": ""}
    own = {"devices": list(devices), "chosen": None, "nccl": True}
    return [{**alike, **own, "local": rank} for rank in range(2)]


def no_gpu(ranks: Ranks, folder: Path) -> str:
    return told(lambda: choose(roll("", "nccl")))


def one_gpu(ranks: Ranks, folder: Path) -> str:
    return " ".join(text for _, text in choose(roll("a")).notes)


def tracker(ranks: Ranks, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        return told(lambda: tracker_of("wandb"))


# ------------------------------------------------------------------------------------- models


def other_models(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        model = nn.Linear(3, 4 + communicator().rank)
        return told(lambda: mw.replicate(model)(torch.ones(1, 3)))

    return ranks(2, body)[0]


def other_values(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        torch.manual_seed(communicator().rank)
        model = mw.fully_shard(nn.Linear(4, 4))
        return told(lambda: model(torch.ones(1, 4)))

    return ranks(2, body)[0]


def meta(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        mw.fully_shard(model)
        return told(lambda: model(torch.ones(1, 4)))

    return ranks(2, body)[0]


def mixed_meta(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
        given = plan("[axes]\nreplicate = 2")
        return told(lambda: mw.parallelize(model, given, optimizer=sgd, loss=F.mse_loss))

    return ranks(2, body)[0]


def early_optimizer(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model.parameters())
        mw.fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        return told(optimizer.step)

    return ranks(2, body)[0]


# ------------------------------------------------------------------------------------- steps


def uneven(ranks: Ranks, folder: Path) -> str:
    def body() -> None:
        torch.manual_seed(0)
        model = mw.replicate(nn.Linear(4, 4))
        for _ in range(3 - communicator().rank):
            model(torch.ones(2, 4)).sum().backward()

    return told_of_a_failure(ranks, body, 0)


def uneven_shards(ranks: Ranks, folder: Path) -> str:
    def body() -> None:
        torch.manual_seed(0)
        model = mw.fully_shard(nn.Linear(4, 4))
        for _ in range(2 - communicator().rank):
            model(torch.ones(2, 4)).sum().backward()

    return told_of_a_failure(ranks, body, 0)


def other_passes(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        torch.manual_seed(0)
        model = mw.replicate(nn.Linear(4, 4))
        optimizer = sgd(model.parameters())

        def train() -> None:
            for number in range(4):
                model(torch.ones(2, 4)).sum().backward()
                if number % 2 or communicator().rank:
                    optimizer.step()

        return told(train)

    return ranks(2, body)[0]


def other_rates(wrap: Callable[[nn.Module], nn.Module]) -> str:
    """What is said of a learning rate that is another one on rank 1."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4))
    optimizer = sgd(model.parameters())
    if communicator().rank:
        optimizer.param_groups[0]["lr"] *= 2

    def train() -> None:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    return told(train)


def parted_weights(ranks: Ranks, folder: Path) -> str:
    return ranks(2, other_rates, mw.replicate)[0]


def other_settings(ranks: Ranks, folder: Path) -> str:
    return ranks(2, other_rates, mw.fully_shard)[0]


def changed_matrix(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        torch.manual_seed(0)
        model = mw.fully_shard(nn.Sequential(nn.Linear(4, 4)))
        muon = mw.own_matrices(torch.optim.Muon([model[0].weight]), model)
        model(torch.ones(2, 4)).sum().backward()
        muon.step()
        model[0].weight.data.mul_(2.0)
        return told(muon.step)

    return ranks(2, body)[0]


def other_operations(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        world = communicator()
        return told(lambda: world.all_reduce(torch.ones(4 + world.rank), label="a sum").wait())

    return ranks(2, body, backend="shm")[0]


def unequal_shares(ranks: Ranks, folder: Path) -> str:
    return ranks(2, lambda: trained(lambda rank: torch.ones(4 - rank, 3)))[0]


def too_few_rows(ranks: Ranks, folder: Path) -> str:
    return told(lambda: split_args_kwargs_into_chunks((torch.ones(2, 8),), None, 4))


def not_finite(ranks: Ranks, folder: Path) -> str:
    values = (1.0, torch.nan)
    return ranks(2, lambda: trained(lambda rank: torch.full((2, 3), values[rank])))[0]


# ------------------------------------------------------------------------------------- failures


def first_failure(ranks: Ranks, folder: Path) -> str:
    def body() -> None:
        world = communicator()
        with phase("train", step=3):
            world.all_reduce(torch.ones(4), label="a sum").wait()
            if world.rank:
                raise ValueError("no such token")
            world.all_reduce(torch.ones(4), label="a sum").wait()

    return told_of_a_failure(ranks, body, 0)


def killed(ranks: Ranks, folder: Path) -> str:
    def body() -> None:
        world = communicator()
        world.all_reduce(torch.ones(4), label="a sum").wait()
        if world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(torch.ones(4), label="a sum").wait()

    return told_of_a_failure(ranks, body, 0)


def waiting(ranks: Ranks, folder: Path) -> str:
    def body() -> list[str]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        world = connect(hang_after=0.5)
        with phase("train", step=3):
            if world.rank:
                time.sleep(2.0)
            world.all_reduce(torch.ones(4), label="a sum").wait()
        return records

    return "\n".join(ranks(2, body, connected=False)[0])


# ------------------------------------------------------------------------------------- checkpoints


def saved(folder: Path, model: nn.Module) -> Path:
    return checkpoint.save(folder / "checkpoints", 1, model=model)


def no_checkpoint(ranks: Ranks, folder: Path) -> str:
    return told(lambda: checkpoint.load(folder / "checkpoints"))


def saved_alone(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        world = communicator()
        if world.rank == 0:
            return told(lambda: checkpoint.save(folder / "checkpoints", 1, extra=1))
        return told(lambda: world.all_reduce(torch.ones(4), label="a sum").wait())

    return ranks(2, body, backend="shm")[0]


def other_model(ranks: Ranks, folder: Path) -> str:
    saved(folder, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return told(lambda: checkpoint.load(folder / "checkpoints", model=other))


def other_dtype(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        model = nn.Linear(3, 4, bias=False)
        if communicator().rank:
            return told(lambda: Receiver(model.bfloat16()).receive())
        return told(lambda: Publisher(model).publish(1))

    return ranks(2, body)[1]


def older_version(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        model = nn.Linear(3, 4)
        if communicator().rank:
            receiver = Receiver(model)
            receiver.receive()
            return told(receiver.receive)
        publisher = Publisher(model)
        publisher.publish(2)
        return told(lambda: publisher.publish(1))

    return ranks(2, body)[1]


def damaged(ranks: Ranks, folder: Path) -> str:
    path = saved(folder, nn.Linear(3, 4))
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return told(lambda: checkpoint.load(path, model=nn.Linear(3, 4)))


def twice(ranks: Ranks, folder: Path) -> str:
    saved(folder, nn.Linear(3, 4))
    return told(lambda: saved(folder, nn.Linear(3, 4)))


def claimed(ranks: Ranks, folder: Path) -> str:
    def body() -> str:
        done, rank = folder / "done", int(os.environ["RANK"])
        if rank == 0:
            (folder / "checkpoints").mkdir()
            checkpoint.claim(folder / "checkpoints")
            (folder / "held").touch()
            until = time.monotonic() + 30
            while not done.exists() and time.monotonic() < until:
                time.sleep(0.02)
            return ""
        while not (folder / "held").exists():
            time.sleep(0.02)
        try:
            return told(lambda: saved(folder, nn.Linear(3, 4)))
        finally:
            done.touch()

    return ranks(2, body, connected=False)[1]
