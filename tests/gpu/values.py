"""Checks of values: every collective, every strategy and every schedule against one process."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from typing import Any

import torch
from torch import nn

from gpu.places import Place, slow_collectives
from gpu.ways import DIM, STEPS, WAYS, both, net
from meshwright import checkpoint
from meshwright.comm import Clock, Communicator, Transfer, held_boxes
from meshwright.composition import parallelize
from meshwright.gradients import NonFiniteValues
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.plan import Plan
from meshwright.randomness import Draws, initialize, replace_dropout
from support.internals.schedule import stage_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def collectives(place: Place, world: Communicator) -> str:
    """Each kind of collective in several dtypes, and control data beside them."""
    size, rank = world.size, world.rank
    for dtype in DTYPES:
        line = torch.arange(6 * size, device=place.device).to(dtype)
        total = line.clone()
        world.all_reduce(total, label="sum").wait()
        _same(total, line * size)
        most = line + rank
        world.all_reduce(most, reduction="max").wait()
        _same(most, line + size - 1)
        whole = torch.empty_like(line)
        world.all_gather(whole, line[6 * rank : 6 * rank + 6].clone()).wait()
        _same(whole, line)
        share = torch.empty(6, dtype=dtype, device=place.device)
        world.reduce_scatter(share, line).wait()
        _same(share, line[6 * rank : 6 * rank + 6] * size)
        root = line.clone() if rank == size - 1 else torch.zeros_like(line)
        world.broadcast(root, source=size - 1).wait()
        _same(root, line)
        came = torch.empty_like(line)
        world.all_to_all(came, line).wait()
        _same(came, line[6 * rank : 6 * rank + 6].repeat(size))
    world.barrier()
    assert world.gather_values({"rank": rank}, label="ranks") == [{"rank": r} for r in range(size)]
    return f"6 kinds in {len(DTYPES)} dtypes, a barrier, control data"


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def transfers(place: Place, world: Communicator) -> str:
    """A ring in one batch: to the next rank, from the one before; both are this one where alone."""
    sent = torch.arange(5.0, device=place.device) + world.rank
    came = torch.zeros_like(sent)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    if world.size == 1:  # c10d's own functions refuse the own rank
        group: Any = world.group
        group._start_coalescing(place.device)
        group.send([sent], 0, 0)
        group.recv([came], 0, 0)
        group._end_coalescing(place.device).wait()
    else:
        posted = [
            Transfer(direction="send", tensor=sent, peer=after),
            Transfer(direction="recv", tensor=came, peer=before),
        ]
        for pending in world.batch(posted):
            pending.wait()
    _same(came, sent - world.rank + before)
    return f"a ring of {world.size}"


def trains(place: Place, world: Communicator, name: str) -> str:
    """Losses of some steps, and the output after them, are those of the plain model."""
    plain, laid_out = both(name, place, world)
    return _compared(plain, laid_out, world)


def trains_with_slow_collectives(place: Place, world: Communicator, name: str) -> str:
    """The same where each collective begins late."""
    plain, laid_out = both(name, place, world)
    with slow_collectives(place):
        return _compared(plain, laid_out, world)


def trains_under_a_default_device(place: Place, world: Communicator, name: str) -> str:
    """Train under a default device of the user's: some tensors of the library are the host's."""
    plain, laid_out = both(name, place, world)
    with torch.device(place.device):
        return _compared(plain, laid_out, world)


def _compared(plain: Any, laid_out: Any, world: Communicator) -> str:
    way, worst = laid_out.way, 0.0
    for number in range(STEPS):
        expected, mean = plain.step(number), laid_out.step(number)
        if way.cuts_batch:
            world.all_reduce(mean).wait()
            mean = mean / world.size
        worst = max(worst, _difference(mean, expected, way.tolerance, f"loss of step {number}"))
    with torch.no_grad():
        x = plain.inputs[0]
        worst = max(
            worst, _difference(laid_out.call(x), plain.call(x), way.tolerance, "output after all")
        )
    return f"{STEPS} steps, largest difference {worst:.1e}"


def _difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> float:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
    return (found - expected).abs().max().item()


def steady(place: Place, world: Communicator, name: str) -> str:
    """A step after some warm ones lets the host wait nowhere."""
    run = both(name, place, world)[1]
    for number in range(3):
        run.step(number)
    world.barrier()
    with place.stops() as found:
        run.step(3)
    assert not found, f"the host waits {len(found)} times: {', '.join(found)}"
    return "0 host stops"


class Piped:
    """A schedule on this rank, and the same stages one after the other."""

    def __init__(self, place: Place, world: Communicator, name: str) -> None:
        kind = get_schedule_class(name)
        is_multi = issubclass(kind, PipelineScheduleMulti)
        self.count = world.size * (2 if is_multi else 1)
        ones = [_layer(seed).to(place.device) for seed in range(self.count)]
        self.one, self.layers = nn.Sequential(*ones), copy.deepcopy(ones)
        owners = stage_ranks(world.size, self.count, "v" if "V" in name else "loop")
        self.listed = [stage for stage, owner in enumerate(owners) if owner == world.rank]
        stages: Any = [
            PipelineStage(self.layers[stage], stage, self.count, place.device)
            for stage in self.listed
        ]
        self.microbatches = 4 * world.size
        self.schedule = kind(
            stages if is_multi else stages[0], self.microbatches, loss_fn=nn.MSELoss()
        )
        draw = torch.Generator().manual_seed(3)
        drawn = torch.empty(2, 2 * self.microbatches, 8, dtype=torch.float64, device="cpu")
        self.x, self.target = drawn.normal_(generator=draw).to(place.device)

    @property
    def is_last(self) -> bool:
        return self.count - 1 in self.listed

    def step(self, losses: list[torch.Tensor]) -> None:
        args = (self.x,) if 0 in self.listed else ()
        more = {"target": self.target} if self.is_last else {}
        self.schedule.step(*args, losses=losses, **more)

    def update(self) -> None:
        """Go against the gradients, of all stages, and drop them."""
        for module in (*(self.layers[stage] for stage in self.listed), self.one):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.1)
            module.zero_grad()


def pipeline(place: Place, world: Communicator, name: str) -> str:
    """A schedule trains as its stages do one after the other; all of one rank where alone."""
    piped, worst = Piped(place, world, name), 0.0
    for _ in range(2):
        expected = nn.functional.mse_loss(piped.one(piped.x), piped.target)
        expected.backward()
        losses: list[torch.Tensor] = []
        piped.step(losses)
        if piped.is_last:
            worst = max(worst, _difference(torch.stack(losses).mean(), expected, 1e-12, "loss"))
        for stage in piped.listed:
            pairs = zip(
                piped.layers[stage].parameters(), piped.one[stage].parameters(), strict=True
            )
            for mine, one in pairs:
                what = f"a gradient of stage {stage}"
                worst = max(worst, _difference(mine.grad, one.grad, 1e-12, what))
        piped.update()
    return f"{piped.count} stages, {piped.microbatches} microbatches, difference {worst:.1e}"


def steady_pipeline(place: Place, world: Communicator, name: str) -> str:
    """A step of a schedule after some warm ones lets the host wait nowhere."""
    piped = Piped(place, world, name)
    for _ in range(3):
        piped.step([])
        piped.update()
    world.barrier()
    with place.stops() as found:
        piped.step([])
        piped.update()
    assert not found, f"the host waits {len(found)} times: {', '.join(found)}"
    return "0 host stops"


def plan(place: Place, world: Communicator, axis: str, train: str = "") -> str:
    """A plan of one axis trains as the plain model on the host, from weights of the host.

    ``train`` is a line of its table of that name.
    """
    sample = nn.Sequential(net(), nn.Dropout(0.25)) if "dropout" in train else net()
    one, draws = copy.deepcopy(sample).cpu(), Draws(seed=0)
    if "dropout" in train:
        replace_dropout(one, draws)
    trainable = parallelize(
        sample,
        Plan.from_toml(f"[axes]\n{axis} = {world.size}\n[train]\n{train}\n"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    draw, worst = torch.Generator().manual_seed(5), 0.0
    rows = 8 * world.size
    share = slice(8 * world.rank, 8 * world.rank + 8)
    for number in range(STEPS):
        drawn = torch.empty(2, rows, DIM, dtype=torch.float64, device="cpu")
        x, y = drawn.normal_(generator=draw)
        draws.begin_step(number)
        with draws.microbatch(0, range(rows)):
            expected = nn.functional.mse_loss(one(x), y[:, :3])
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        mine, wanted = place.to(x[share], y[share, :3])
        loss = trainable.step(mine, wanted).loss
        what = f"loss of step {number}"
        found = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        worst = max(worst, _difference(found, expected.detach().cpu(), 1e-12, what))
    return f"{STEPS} steps, largest difference {worst:.1e}"


def goes_on(place: Place, world: Communicator, name: str) -> str:
    """A run that is saved and loaded again, into another model, goes on to the same bits."""
    warnings.filterwarnings("ignore", ".*NO_SHARD")  # the class says that one rank shards nothing
    first, other = both(name, place, world)[1], both(name, place, world)[1]
    folder = world.gather_values(tempfile.mkdtemp() if world.rank == 0 else "", label="folder")[0]
    try:
        for number in (0, 1):
            first.step(number)
        checkpoint.save(folder, 2, model=first.model, optimizer=first.optimizer)
        expected = [first.step(number) for number in (2, 3)]
        other.step(3)
        checkpoint.load(folder, model=other.model, optimizer=other.optimizer)
        for number, loss in zip((2, 3), expected, strict=True):
            _difference(other.step(number), loss, 0.0, f"loss of step {number}")
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    return "saved after 2 steps, 2 more of each"


def weights_from_a_seed(place: Place, world: Communicator) -> str:
    """A seed gives what one process of this kind of device draws by hand, sharded or not."""
    by_hand, whole = net().to(place.device), net().to(place.device)
    torch.manual_seed(3)
    for module in by_hand.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
    shards = WAYS["fully_shard"].wrap(net().to(place.device), place)
    initialize(whole, 3)
    initialize(shards, 3, held=held_boxes)
    expected = by_hand.state_dict()
    for name, value in expected.items():
        _same(whole.state_dict()[name], value)
        # Not full_tensor(): torch's own gathers of a GPU's memory over Gloo end the process.
        parts = [*value.chunk(world.size), *[value[:0]] * world.size]
        _same(shards.state_dict()[name].to_local(), parts[world.rank])
    return f"{len(expected)} tensors"


def _layer(seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)).double()
    for parameter in layer.parameters():
        drawn = torch.empty(parameter.shape, dtype=torch.float64, device="cpu")
        parameter.data.copy_(drawn.uniform_(-0.5, 0.5, generator=draw))
    return layer


def names_of_what_is_not_finite(place: Place, world: Communicator) -> str:
    """A note on the device is enough until names are wanted: nothing stops the host before."""
    held = {
        "a": torch.ones(3, device=place.device),
        "b": torch.tensor([1.0, float("inf")], device=place.device),
        "c": torch.empty(0, device=place.device),
    }
    values, note = NonFiniteValues(), torch.zeros((), device=place.device)
    joined = torch.cat([*held.values()])
    with place.stops() as found:
        values.look(joined, held.items)
        values.add_to(note)
    assert not found, found
    assert note.item() == 1
    assert values.names() == ["b"]
    return "one of three tensors"


def marks(place: Place, world: Communicator) -> str:
    """Marks of the device's clock are passed in their order."""
    x = torch.zeros(1 << 20, device=place.device)
    clock = Clock(place.device)
    start = clock.mark()
    x.add_(1)
    end = clock.mark()
    assert end.seconds() >= start.seconds() > 0
    return f"{(end.seconds() - start.seconds()) * 1e6:.0f} us between two"


WAYS_OF_STREAMS = [name for name, way in WAYS.items() if not way.is_compiled]
WAYS_WITHOUT_STOPS = [name for name in WAYS_OF_STREAMS if not WAYS[name].steps_on_host]
