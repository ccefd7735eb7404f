"""Models that a program changes after they were sharded: they train on, or the change is refused.

Each program runs on one process and on ranks. Where it is not refused by name, weights, and what it
has computed, are those of one process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.nn.utils import parametrize

from meshwright.comm import communicator
from meshwright.data_parallel import flat_groups, fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks

SIZE = 4


class Net(nn.Module):
    """Two units and a rest, and a place for one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE)
        self.c: Any = nn.Linear(SIZE, SIZE)
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x).tanh()).tanh()
        return self.c(x if self.extra is None else self.extra(x))


class Adapter(nn.Module):
    """A layer with a low-rank change of it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = drawn(lambda: nn.Linear(SIZE, 2, bias=False))
        self.high = drawn(lambda: nn.Linear(2, SIZE, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.high(self.low(x))


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def laid_out(strategy: str, model: Net) -> Any:
    if strategy == "one":
        return model
    if strategy in ("fully_shard", "kept"):
        after = None if strategy == "fully_shard" else False
        fully_shard(model.a, reshard_after_forward=after)
        fully_shard(model.b, reshard_after_forward=after)
        return fully_shard(model)
    options = {"use_orig_params": strategy == "original"}
    model.a = FSDP(model.a, **options)
    model.b = FSDP(model.b, **options)
    return FSDP(model, **options)


def bare(module: Any) -> Any:
    return getattr(module, "_fsdp_wrapped_module", module)


def value(seed: int = 1) -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def like(parameter: torch.Tensor, whole: torch.Tensor) -> nn.Parameter:
    """A parameter that lies as another one."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    elif isinstance(parameter, nn.Parameter) and parameter.shape != whole.shape:
        world = communicator()  # each rank has a piece of a line
        sizes = [int(n) for (n,) in world.gather_numbers([parameter.numel()], label="pieces")]
        whole = whole.reshape(-1).split(sizes)[world.rank]
    return nn.Parameter(whole.clone())


class Run:
    """One program's model, batches, and what it has found."""

    def __init__(self, model: Any, rank: int, size: int) -> None:
        self.model = model
        self.rank = rank
        self.size = size
        self.found: dict[str, torch.Tensor] = {}
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer

    @property
    def net(self) -> Any:
        return bare(self.model)

    def whole(self, number: int) -> torch.Tensor:
        return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(number))

    def batch(self, number: int) -> torch.Tensor:
        return self.whole(number).chunk(self.size)[self.rank]

    def loss(self, number: int) -> torch.Tensor:
        return self.model(self.batch(number)).square().mean()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(number).backward()
        self.optimizer.step()

    def train_on(self) -> None:
        self.new_optimizer()
        self.step(7)
        self.step(8)


Program = Callable[[Run], None]
PROGRAMS: dict[str, tuple[Program, dict[str, str]]] = {}
ALL = ("fully_shard", "kept", "flat", "original")
SHARDS = ("fully_shard", "kept")
GONE, UNHELD = "where the sharded unit left it", "belongs to no unit"
BETWEEN = "changing the parameters between forward and backward"
SHAPE = "Cannot writeback when the parameter shape changes"


def program(**refused: str) -> Callable[[Program], Program]:
    """``refused`` says by strategy which error says why not; ``all`` stands for the rest."""
    everywhere = refused.pop("all", "")
    texts = {name: refused.get(name, everywhere) for name in ALL}

    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = function, texts
        return function

    return add


# ------------------------------------------------------------------- parameters given anew


@program(all=GONE, original=SHAPE)
def plain_before(run: Run) -> None:
    bare(run.model.a).weight = nn.Parameter(value())
    run.train_on()


@program(all=GONE, original=SHAPE)
def plain_between_steps(run: Run) -> None:
    run.step(0)
    bare(run.model.a).weight = nn.Parameter(value())
    run.train_on()


@program(flat=GONE)
def alike_before(run: Run) -> None:
    module = bare(run.model.a)
    module.weight = like(module.weight, value())
    run.train_on()


@program(flat=GONE)
def alike_and_gathered_by_hand(run: Run) -> None:
    module = bare(run.model.a)
    module.weight = like(module.weight, value(3))
    if hasattr(run.model.a, "unshard"):
        run.model.a.unshard()
    with torch.no_grad():
        run.loss(0)
    run.train_on()


@program(all=GONE, original="")
def alike_after_it_was_gathered_by_hand(run: Run) -> None:
    if hasattr(run.model.a, "unshard"):
        run.model.a.unshard()
        run.model.a.reshard()
    module = bare(run.model.a)
    module.weight = like(module.weight, value(3))
    run.train_on()


@program()
def looked_at_before_the_step(run: Run) -> None:
    """A forward with a graph that no backward follows: what it leaves whole is stepped over."""
    for number in range(3):
        run.optimizer.zero_grad()
        run.loss(number).backward()
        run.loss(9)
        run.optimizer.step()


@program(all=GONE, original="")
def alike_between_steps(run: Run) -> None:
    run.step(0)
    run.net.c.weight = like(run.net.c.weight, value())
    run.train_on()


@program(all=GONE, original="")
def alike_and_the_optimizer_of_before(run: Run) -> None:
    run.step(0)
    before = run.net.c.weight
    run.net.c.weight = like(before, value())
    run.step(1)
    run.step(2)


@program(flat=GONE)
def alike_and_trained_where_it_was_frozen(run: Run) -> None:
    bare(run.model.a).weight.requires_grad_(False)
    module = bare(run.model.a)
    module.weight = like(module.weight, value())
    run.train_on()


@program(all=GONE)
def plain_between_forward_and_backward(run: Run) -> None:
    loss = run.loss(0)
    bare(run.model.a).weight = nn.Parameter(value())
    loss.backward()


@program(all=GONE, original=BETWEEN)
def plain_in_the_root_between_forward_and_backward(run: Run) -> None:
    loss = run.loss(0)
    run.net.c.weight = nn.Parameter(value())
    loss.backward()


@program(all=GONE, original=SHAPE)
def plain_in_evaluation(run: Run) -> None:
    bare(run.model.a).weight = nn.Parameter(value())
    with torch.no_grad():
        run.model(run.batch(0))


def doubled(module: nn.Module) -> dict[str, Any]:
    return {name: each.detach().clone() * 2 for name, each in module.state_dict().items()}


@program()
def loaded_by_assignment(run: Run) -> None:
    run.model.load_state_dict(doubled(run.model), assign=True)
    run.train_on()


@program(all=GONE, flat="", original="")
def loaded_by_assignment_after_a_step(run: Run) -> None:
    run.step(0)
    run.model.load_state_dict(doubled(run.model), assign=True)
    run.train_on()


@program()
def loaded_after_a_step(run: Run) -> None:
    run.step(0)
    run.model.load_state_dict(doubled(run.model))
    run.train_on()


@program()
def loaded_by_assignment_below_the_units(run: Run) -> None:
    if run.net.c.state_dict():  # a flat unit leaves nothing there
        run.net.c.load_state_dict(doubled(run.net.c), assign=True)
    else:
        with FSDP.summon_full_params(run.model), torch.no_grad():
            run.net.c.load_state_dict(doubled(run.net.c))
    run.train_on()


@program(all="converted, loaded or given anew between", flat=BETWEEN, original=BETWEEN)
def loaded_between_forward_and_backward(run: Run) -> None:
    loss = run.loss(0)
    run.model.load_state_dict(doubled(run.model))
    loss.backward()
    raise AssertionError("one process keeps what it has used")


@program(original="weakref", flat="by itself")
def swapped_and_swapped_back(run: Run) -> None:
    run.step(0)
    other = like(run.net.c.weight, value())
    torch.utils.swap_tensors(run.net.c.weight, other)
    with torch.no_grad():
        run.found["swapped"] = run.model(run.whole(1))
    torch.utils.swap_tensors(run.net.c.weight, other)
    run.train_on()


@program(original="weakref", flat="by itself")
def swapped(run: Run) -> None:
    run.step(0)
    run.optimizer.zero_grad()
    torch.utils.swap_tensors(run.net.c.weight, like(run.net.c.weight, value()))
    run.train_on()


@program(all=".data of parameter", flat="by itself", original="")
def data_assigned(run: Run) -> None:
    run.step(0)
    weight = bare(run.model.a).weight
    weight.data = like(weight, value()).detach()
    run.train_on()


@program()
def sent_to_another_process(run: Run) -> None:
    """Which moves the memory, as queues of torch.multiprocessing do."""
    run.step(0)
    for parameter in run.model.parameters():
        for each in (parameter.detach(), parameter.grad):
            if each is not None:  # none where a rank has no piece
                (each.to_local() if isinstance(each, DTensor) else each).share_memory_()
    run.step(1)
    run.optimizer.zero_grad(set_to_none=False)
    run.step(2)


@program(flat="by itself")
def frozen_and_trained_again(run: Run) -> None:
    weight = bare(run.model.a).weight
    for trains in (False, True, False):
        weight.requires_grad_(trains)
        run.step(int(trains))


@program()
def a_part_is_converted(run: Run) -> None:
    run.step(0)
    run.net.c.to(torch.float32).to(torch.float64)
    run.train_on()


@program()
def all_is_converted(run: Run) -> None:
    run.step(0)
    run.model.to(torch.float32)
    run.model.to(torch.float64)
    run.train_on()


@program()
def all_is_converted_with_a_part_frozen(run: Run) -> None:
    run.net.a.requires_grad_(False)
    run.model.to(torch.float32)
    run.model.to(torch.float64)
    run.step(0)
    run.net.a.requires_grad_(True)
    run.net.b.requires_grad_(False)
    run.step(1)
    run.model.to(torch.float64)
    run.step(2)


@program(all="converted, loaded or given anew between", flat=BETWEEN, original=BETWEEN)
def converted_between_forward_and_backward(run: Run) -> None:
    loss = run.loss(0)
    run.model.to(torch.float32)
    loss.backward()
    raise AssertionError("one process keeps what it has used")


# ------------------------------------------------------------- removed, tied, reparametrized


@program(all=GONE)
def removed(run: Run) -> None:
    run.step(0)
    bare(run.model.a).bias = None
    run.train_on()


@program(all=GONE)
def deleted(run: Run) -> None:
    del run.net.c.bias
    run.net.c.register_parameter("bias", None)
    run.train_on()


@program(all=GONE)
def tied(run: Run) -> None:
    run.net.c.weight = bare(run.model.a).weight
    run.train_on()


@program(all=UNHELD, flat="cannot assign")
def tied_in_a_new_module(run: Run) -> None:
    head = nn.Linear(SIZE, SIZE, bias=False)
    head.weight = run.net.c.weight
    run.net.extra = head
    run.train_on()


@program(all=GONE, flat="does not have a parameter")
def parametrized(run: Run) -> None:
    run.step(0)
    parametrize.register_parametrization(bare(run.model.a), "weight", Twice())
    run.train_on()


@program(all=GONE, flat="weight")
def weight_norm(run: Run) -> None:
    warnings.simplefilter("ignore")
    nn.utils.weight_norm(run.net.c)
    run.train_on()


# --------------------------------------------------------------------- modules that came later


@program(all=UNHELD)
def a_module_came_before_the_first_forward(run: Run) -> None:
    run.net.extra = drawn(lambda: nn.Linear(SIZE, SIZE))
    run.train_on()


@program(all=UNHELD)
def a_module_came_between_steps(run: Run) -> None:
    run.step(0)
    run.net.extra = drawn(lambda: nn.Linear(SIZE, SIZE))
    run.train_on()


@program()
def a_frozen_module_came(run: Run) -> None:
    run.step(0)
    run.net.extra = drawn(lambda: nn.Linear(SIZE, SIZE).requires_grad_(False))
    run.train_on()


@program(all=UNHELD)
def a_frozen_module_came_and_trains(run: Run) -> None:
    run.step(0)
    run.net.extra = drawn(lambda: nn.Linear(SIZE, SIZE).requires_grad_(False))
    run.step(1)
    run.net.extra.requires_grad_(True)
    run.train_on()


@program(all=UNHELD)
def a_module_was_replaced(run: Run) -> None:
    run.step(0)
    run.net.c = drawn(lambda: nn.Linear(SIZE, SIZE))
    run.train_on()


@program()
def a_unit_was_taken_out(run: Run) -> None:
    run.step(0)
    run.net.b = nn.Identity()
    run.train_on()


@program(all=UNHELD)
def an_adapter_came(run: Run) -> None:
    run.step(0)
    run.net.c = Adapter(run.net.c)
    run.train_on()


@program()
def a_module_moved(run: Run) -> None:
    run.step(0)
    run.net.c = nn.Sequential(run.net.c)
    run.step(1)
    run.net.c = run.net.c[0]
    run.net.extra = run.net.b
    run.train_on()


@program()
def a_sharded_module_came(run: Run) -> None:
    run.step(0)
    layer: Any = drawn(lambda: nn.Linear(SIZE, SIZE))
    if isinstance(run.model, FSDP):
        layer = FSDP(layer, use_orig_params=run.model._use_orig_params)
    elif isinstance(run.net.c.weight, DTensor):
        layer = fully_shard(layer)
    run.net.extra = layer
    run.train_on()


# ------------------------------------------------------------------------------ other tensors


def given(kind: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return {name: kind(each.detach()) for name, each in Net().named_parameters()}


def called(run: Run, tensors: dict[str, torch.Tensor]) -> None:
    before = dict(tensors)
    output = functional_call(run.model, tensors, run.whole(1))
    assert all(tensors[name] is each for name, each in before.items()), "its dict has changed"
    gradients = torch.autograd.grad(output.square().mean(), list(before.values()))
    run.found.update(zip(before, gradients, strict=True))
    run.found["output"] = output.detach()


def called_with_its_own(run: Run, held: dict[str, Any]) -> None:
    run.optimizer.zero_grad()
    functional_call(run.model, held, run.batch(1)).square().mean().backward()
    run.optimizer.step()


@program()
def functional_with_its_own(run: Run) -> None:
    """Its parameters of now, and those that a program has kept since it was sharded."""
    kept = dict(run.model.named_parameters())
    called_with_its_own(run, dict(kept))
    run.step(0)
    loss = run.loss(2)
    for held in (kept, dict(run.model.named_parameters())):
        with torch.no_grad():
            run.found[f"{len(run.found)}"] = functional_call(run.model, held, run.whole(1))
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    called_with_its_own(run, dict(kept))
    run.train_on()


@program(all=GONE)
def functional(run: Run) -> None:
    called(run, given(lambda each: each.requires_grad_()))


@program(all=GONE)
def functional_after_a_step(run: Run) -> None:
    run.step(0)
    called(run, given(lambda each: 3 * each.requires_grad_()))


@program(all=GONE)
def functional_with_parameters(run: Run) -> None:
    run.step(0)
    called(run, given(nn.Parameter))


@program(all=GONE)
def functional_with_parameters_that_lie_alike(run: Run) -> None:
    """Those of a call are no new parameters, also where none has been gathered."""
    weight = bare(run.model.a).weight
    named = dict(run.model.named_parameters())
    names = [name for name, each in named.items() if each is weight] or ["a.weight"]
    functional_call(run.model, {names[0]: like(weight, value())}, run.whole(1))


@program(all=GONE)
def functional_with_some(run: Run) -> None:
    loss = run.loss(0)
    tensors = given(lambda each: each.requires_grad_())
    called(run, {name: tensors[name] for name in ("a.weight", "c.bias")})
    loss.backward()


@program()
def trained_on_after_a_functional_call_was_refused(run: Run) -> None:
    for number, kind in enumerate((torch.Tensor.requires_grad_, nn.Parameter)):
        run.step(number)
        if run.size > 1:
            with pytest.raises(RuntimeError, match=GONE):
                functional_call(run.model, given(kind), run.whole(1))
    run.step(7)


@program(all=GONE)
def functional_with_parts(run: Run) -> None:
    functional_call(run.model, {"c.weight": value()[:2]}, run.whole(1))


@program(all="inside of a transform of torch.func")
def transformed(run: Run) -> None:
    tensors = given(lambda each: each)

    def loss(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(run.model, tensors, run.whole(1)).mean()

    torch.func.grad(loss)(tensors)


@program(all="inside of forward-mode differentiation")
def in_forward_mode(run: Run) -> None:
    with torch.autograd.forward_ad.dual_level():
        with torch.no_grad():
            run.model(run.whole(1))
        run.model(run.whole(1))


def lost(run: Run) -> torch.Tensor:
    """Leave a loss of a unit where nobody looks, of weights that its output does not need."""
    found: list[torch.Tensor] = []
    inner = bare(run.model.a)
    hook = inner.register_forward_pre_hook(lambda m, args: found.append(m.bias.sum()))
    loss = run.loss(1)
    hook.remove()
    loss.backward()
    return found[0]


@program(all="'a.bias' a gradient and went through no output of unit 'a'")
def stepped_behind_a_hidden_loss(run: Run) -> None:
    loss = lost(run)
    loss.backward()
    run.optimizer.step()


@program(all="'a.bias' a gradient and went through no output of unit 'a'")
def gone_on_behind_a_hidden_loss(run: Run) -> None:
    loss = lost(run)
    loss.backward()
    run.loss(2)


@program(
    all="modified by an inplace operation",
    kept="'a.weight' a gradient and went through no output of unit 'a'",
)
def begun_with_a_hidden_loss(run: Run) -> None:
    """Nothing has gathered the weights that the loss has kept: torch must not read them."""
    found: list[torch.Tensor] = []
    inner = bare(run.model.a)
    hook = inner.register_forward_pre_hook(lambda m, args: found.append(m.weight.sin().sum()))
    run.loss(1)
    hook.remove()
    found[0].backward()
    run.optimizer.step()


@program(all="written in place while it was whole")
def written_by_the_forward(run: Run) -> None:
    def halve(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    bare(run.model.a).register_forward_pre_hook(halve)
    run.train_on()


# -------------------------------------------------------------------------------- the tests


def outcome(strategy: str, name: str) -> str:
    """What went wrong with one program; nothing where all is well."""
    world = communicator()
    function, refused = PROGRAMS[name]
    text = refused[strategy]
    torch.manual_seed(0)
    one = Run(Net(), 0, 1)
    torch.manual_seed(0)
    run = Run(laid_out(strategy, Net()), world.rank, world.size)
    try:
        function(run)
    except Exception as error:
        return "" if text and text in str(error) else f"raised {error}"
    if text:
        return "was not refused"
    function(one)
    state = run.model.state_dict()
    values = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
    expected = {**one.model.state_dict(), **one.found}
    differs = [
        n
        for n, each in expected.items()
        if not torch.allclose({**values, **run.found}[n], each, rtol=1e-6, atol=1e-6)
    ]
    return f"differs in {differs}" if differs else ""


def body(strategy: str) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    return {name: text for name in PROGRAMS if (text := outcome(strategy, name))}


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def body_of_conversions() -> None:
    """The flat view follows its unit to other dtypes, and so do gradients that wait."""
    for how in ("flat", "waiting"):
        run, one = Run(fully_shard(pair()), communicator().rank, 2), Run(pair(), 0, 1)
        if how == "flat":
            run.optimizer = torch.optim.SGD(flat_groups(run.model), lr=0.1, momentum=0.9)
        for each in (run, one):
            if how == "flat":
                each.step(0)
            elif each is run:
                with run.model.no_sync():
                    run.loss(0).backward()
            else:
                one.loss(0).backward()
            each.model.to(torch.float64)
            if how == "flat":
                each.optimizer.zero_grad()
            each.model(each.batch(1).double()).square().mean().backward()
            each.optimizer.step()
        torch.testing.assert_close(weights(run.model), weights(one.model), msg=how)


def body_of_flat_groups() -> None:
    """An optimizer of the flat view steps what a parameter was given before the first pass."""
    run, one = Run(fully_shard(pair()), communicator().rank, 2), Run(pair(), 0, 1)
    run.optimizer = torch.optim.SGD(flat_groups(run.model), lr=0.1, momentum=0.9)
    for each in (run, one):
        each.model[0].weight = nn.Parameter(2 * each.model[0].weight.detach().clone())
    one.new_optimizer()
    for each in (run, one):
        each.step(0)
        each.step(1)
    torch.testing.assert_close(weights(run.model), weights(one.model))
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=GONE):
        run.loss(1)


def body_of_losses_that_read() -> None:
    """Autograd leaves gradients of DTensors that a loss has read as it likes; they are added up."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(SIZE, 3), nn.Tanh(), nn.Linear(3, SIZE))
    model = copy.deepcopy(one)
    fully_shard(model[0])  # of three rows, fewer than ranks
    run, other = Run(fully_shard(model), communicator().rank, 4), Run(one, 0, 1)
    for each in (run, other):
        penalty = each.model[0].weight.square().sum()
        loss = each.loss(0)
        (loss + (penalty.full_tensor() if each is run else penalty)).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    # So they are to the gradient of flat views, of which a pass that is not reduced is one, too.
    model = copy.deepcopy(one)
    fully_shard(model[0])
    run, other = Run(fully_shard(model), communicator().rank, 4), Run(one, 0, 1)
    run.optimizer = torch.optim.AdamW(flat_groups(model), lr=0.1)
    other.optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
    other.optimizer.zero_grad()
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        for each in (run, other):
            weight = each.model[0].weight
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            (each.loss(step) + whole.square().sum()).backward()
            if step % 2:
                each.optimizer.step()
                each.optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(one))
    fully_shard(nn.PReLU(0))  # a parameter without elements is none that a loss reads
    # Hooks would run for that term, and again for the mean.
    first = model[0].weight
    for register in (first.register_hook, first.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(RuntimeError, match="gradient in two parts"):
            (run.loss(0) + first.full_tensor().square().sum()).backward()
        handle.remove()


def body_of_writes() -> None:
    """A write to whole parameters is noticed where these are kept until the backward, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, SIZE, max_norm=0.5), nn.Linear(SIZE, SIZE))
    with pytest.raises(RuntimeError, match=r"'0.weight' was written in place while it was whole"):
        fully_shard(model)(torch.arange(4)).sum().backward()


def body_over_axes() -> None:
    """A parameter is given anew on two data axes, and where tensor parallelism has cut it."""
    torch.set_default_dtype(torch.float64)
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    cut = parallelize_module(
        pair(), both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    world, here = communicator(), both["shard"].get_local_rank()
    for run in (
        Run(fully_shard(pair(), mesh=hybrid), world.rank, 4),
        Run(fully_shard(cut, mesh=both["shard"]), here, 2),
    ):
        one = Run(pair(), 0, 1)
        for each in (run, one):
            weight = nn.Parameter(each.model[0].weight.detach().clone())
            with torch.no_grad():
                each.model[0].weight = weight.mul_(2)
            each.train_on()
        torch.testing.assert_close(weights(run.model), weights(one.model))
        run.model[0].weight = nn.Parameter(value())
        with pytest.raises(RuntimeError, match="where the sharded unit left it"):
            run.loss(0)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["fully_shard", "flat", "original"])
def test_programs_that_change_models(ranks: Ranks, strategy: str) -> None:
    assert ranks(2, body, strategy, timeout=120) == [{}] * 2


def test_conversions_keep_what_waits(ranks: Ranks) -> None:
    ranks(2, body_of_conversions)
    ranks(2, body_of_writes)
    ranks(2, body_of_flat_groups)


def test_a_loss_that_reads_shards_adds_to_their_gradients(ranks: Ranks) -> None:
    ranks(4, body_of_losses_that_read)


@pytest.mark.slow
def test_parameters_given_anew_over_several_axes(ranks: Ranks) -> None:
    ranks(4, body_over_axes)


@pytest.mark.few(0, slow=3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("strategy", ALL)
def test_programs_that_change_models_on_four_ranks(ranks: Ranks, strategy: str) -> None:
    assert ranks(4, body, strategy, timeout=240) == [{}] * 4
