"""Programs of ranks that train in every way, step by step, for a soak to interrupt.

Each prints ``STEP n`` after a step, and ends with status 0 after ``SOAK_STEPS`` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["INSIDE", "PLAIN", "STRATEGIES", "program"]

_HEAD = """
import logging, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import meshwright as mw
from meshwright import comm
from meshwright.comm.failures import liveness

logging.basicConfig(format="%(message)s")
R, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT = float(os.environ["SOAK_LIMIT"]) if os.environ.get("SOAK_LIMIT") else None
BACKEND, FOLDER = os.environ["SOAK_BACKEND"], os.environ["SOAK_FOLDER"]
STEPS, PAUSE = int(os.environ["SOAK_STEPS"]), float(os.environ["SOAK_PAUSE"])
os.environ["MESHWRIGHT_CPU_BACKEND"] = BACKEND
sign_in = liveness.Liveness.sign_in

def signs_in(*args, **more):
    sign_in(*args, **more)
    print("SIGNED IN", flush=True)

liveness.Liveness.sign_in = signs_in

def built():
    torch.manual_seed(0)
    wide = nn.Linear(32, 32)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), wide, nn.Tanh(), nn.Linear(32, 8))

def trains(model, parameters=None):
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.01)
    def step(number):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    return step

def by_plan(plan, **more):
    trainable = mw.parallelize(
        built(), mw.Plan.from_toml(plan), optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        loss=F.mse_loss, example=(torch.randn(2, 16),),
    )
    def step(number):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(12, 16, generator=generator), torch.randn(12, 8, generator=generator)
        share = slice(trainable.data_rank, None, trainable.data_size)
        trainable.step(x[share], y[share])
    return step

def by_schedule(name, count):
    from meshwright.pipelining import PipelineStage, PipelineScheduleMulti, get_schedule_class
    from meshwright.schedule.builders import stage_ranks
    kind = get_schedule_class(name)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]
    mine = range(count) if N == 1 else [s for s, r in enumerate(placed(name, count)) if r == R]
    stages = [PipelineStage(layers[s], s, count, torch.device("cpu")) for s in mine]
    multi = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages if multi else stages[0], 4, loss_fn=F.mse_loss)
    first, last = 0 in mine, count - 1 in mine
    def step(number):
        x, y = torch.randn(8, 16), torch.randn(8, 16)
        schedule.step(*([x] if first else []), **({"target": y} if last else {}))
    return step

def placed(name, count):
    if name in ("ZBVZeroBubble", "VHalf", "VMin", "DualPipeV"):
        return [s if s < N else 2 * N - 1 - s for s in range(count)]
    return [s % N for s in range(count)]
"""

_TAIL = """
from meshwright.comm import observe

class Strikes:
    number = -1
    def issued(self, collective):
        where, victim, signal = os.environ.get("SOAK_INSIDE", "|0|0").split("|")
        is_there = where and collective.label.endswith(where)
        if is_there and self.number == 8 and R == int(victim):
            print("STRUCK", flush=True)
            os.kill(os.getpid(), int(signal))
    def completed(self, collective, start, end):
        pass

strikes = Strikes()
observing = observe(strikes)
observing.__enter__()
for number in range(STEPS):
    strikes.number = number
    step(number)
    print(f"STEP {number}", flush=True)
    time.sleep(PAUSE)
comm.disconnect()
print("DONE", flush=True)
"""

_CONTEXT = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (6, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

torch.manual_seed(0)
trainable = mw.parallelize(
    nn.Sequential(Attention(), Attention(), nn.Linear(24, 8)),
    mw.Plan.from_toml(f"[axes]\\ncontext = {N}\\n[context]\\nmethod = '{METHOD}'\\n"),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=F.mse_loss,
    example=(torch.randn(2, 12, 24),),
)
def step(number):
    generator = torch.Generator().manual_seed(number)
    trainable.step(*(torch.randn(4, 12, width, generator=generator) for width in (24, 8)))
"""

_CONNECT = """
world = comm.connect(BACKEND, timeout=LIMIT)
"""

_BODIES: Mapping[str, str] = MappingProxyType(
    {
        "replicate": "step = trains(mw.replicate(built()))",
        "ddp class": "step = trains(mw.DistributedDataParallel(built()))",
        "fully_shard": """
model = built()
for layer in model[::2]:
    mw.fully_shard(layer)
step = trains(mw.fully_shard(model))
""",
        "fsdp class": "step = trains(mw.FullyShardedDataParallel(built()))",
        "tensor parallel": """
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
mesh = mw.init_device_mesh("cpu", (N,), mesh_dim_names=("tensor",))
model = mw.parallelize_module(built(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
torch.manual_seed(1)
step = trains(model)
""",
        "plan replicate": 'step = by_plan(f"[axes]\\nreplicate = {N}\\n")',
        "plan shard": 'step = by_plan(f"[axes]\\nshard = {N}\\n[train]\\nclip_norm = 1.0\\n")',
        "plan pipeline": """
step = by_plan(f"[axes]\\npipeline = {N}\\n[pipeline]\\nschedule = '1f1b'\\nmicrobatches = 4\\n")
""",
        "plan expert": """
from meshwright.expert_parallel import experts

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.num_experts = nn.Parameter(torch.randn(6, 16, 16) / 4), 6
    def forward(self, x, indices, weights):
        found = torch.zeros_like(x)
        for n in range(self.num_experts):
            token, slot = (indices == n).nonzero(as_tuple=True)
            found = found.index_add(0, token, x[token] @ self.w[n] * weights[token, slot, None])
        return found

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 6), experts(Experts())
    def forward(self, x):
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, indices, weights)

def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Mixture(), Mixture(), nn.Linear(16, 8))

step = by_plan(f"[axes]\\nexpert = {N}\\n")
""",
        "plan context": f"METHOD = 'all-to-all'{_CONTEXT}",
        "plan context ring": f"METHOD = 'ring'{_CONTEXT}",
        "pipeline gpipe": 'step = by_schedule("GPipe", N)',
        "pipeline interleaved": 'step = by_schedule("Interleaved1F1B", 2 * N)',
        "pipeline zbv": 'step = by_schedule("ZBVZeroBubble", 2 * N)',
        "pipeline dualpipev": 'step = by_schedule("DualPipeV", 2 * N)',
        "saving": """
from meshwright.checkpoint import save_tensors
weights = {f"layer.{n}": torch.randn(256, 256) for n in range(4)}
def step(number):
    save_tensors(FOLDER, weights, {}, step=number + 1, communicator=world, keep_last=2)
""",
        "plain all_reduce": """
def step(number):
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
""",
        "plain work.wait": """
def step(number):
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
""",
        "plain send": """
def step(number):
    for turn in range(N):
        if R == turn:
            dist.send(torch.ones(1000), (R + 1) % N)
        elif (R - 1) % N == turn:
            dist.recv(torch.ones(1000), turn)
""",
        "plain objects": """
def step(number):
    dist.all_gather_object([None] * N, {"rank": R})
""",
        "plain groups": """
def step(number):
    group = dist.new_group(list(range(N)))
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
""",
        "torch's ddp": "step = trains(nn.parallel.DistributedDataParallel(built()))",
    }
)

_TRAIN = """
sys.argv = ["meshwright"]
from meshwright.cli import main
from meshwright.recipes import loop
take = loop._Training._take_step
def takes(self, *args):
    take(self, *args)
    print(f"STEP {self._step - 1}", flush=True)
    time.sleep(PAUSE)
loop._Training._take_step = takes
limit = [] if LIMIT is None else [f"--run.timeout={LIMIT}"]
status = main(
    ["train", os.path.join(FOLDER, "train.toml"), f"--run.steps={STEPS}", "--run.save_every=2",
     "--run.folder", os.path.join(FOLDER, "run"), f"--axes.replicate={N}", *limit]
)
if status == 0:
    print("DONE", flush=True)
raise SystemExit(status)
"""

PLAIN = tuple(name for name in _BODIES if name.startswith(("plain a", "plain w", "plain s")))

STRATEGIES = (*_BODIES, "meshwright train")
"""Their names."""

INSIDE = (
    ("plan context", " by head forward"),
    ("plan context", " by position forward"),
    ("plan context", " by head backward"),
    ("plan context ring", " ring step 1 forward"),
    ("plan context ring", " ring step 1 backward"),
    ("plan context ring", " ring step 1 gradients"),
    ("plan expert", " dispatch forward"),
    ("plan expert", " combine forward"),
    ("plan expert", " dispatch backward"),
    ("plan expert", " combine backward"),
)
"""What ends the labels of operations, of strategies that can be interrupted in one."""


def program(strategy: str) -> str:
    """The program of every rank."""
    if strategy == "meshwright train":
        return _HEAD + _TRAIN
    return _HEAD + _CONNECT + _BODIES[strategy] + _TAIL
