"""`replicate` and `DistributedDataParallel` over modules that tensor parallelism has cut."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as peer
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, observe
from meshwright.data_parallel import DistributedDataParallel, MixedPrecision, replicate
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.data_parallel import tensor_parallel_samples as samples

AXES = ("replicate", "tensor")


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    return mesh.get_local_rank("replicate"), 2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def torchs_clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


# ------------------------------------------------------------------------------- training


def body_training(steps: int) -> None:
    mesh = grid()
    for sequence, optimizer, options in [
        (False, partial(torch.optim.AdamW, lr=0.01, foreach=True), {}),
        (True, sgd, {}),
        (True, adamw, {"gradient_as_bucket_view": True}),
    ]:
        one = samples.net()
        model = samples.cut(one, mesh["tensor"], sequence=sequence)
        names = [name for name, _ in model.named_parameters()]
        replicate(model, device_mesh=mesh["replicate"], **options)
        samples.train(
            model,
            one,
            optimizer,
            place(mesh),
            steps=steps,
            # Without a sequence norms have no style: plain tensors beside DTensors.
            clip=torchs_clip if not sequence else partial(clip_grad_norm_, max_norm=0.5),
        )
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.blocks[0].up.weight) is DTensor
        assert model.idle.weight.grad is None


@pytest.mark.parametrize("steps", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_replicas_of_cut_modules_train_as_one_process(ranks: Ranks, steps: int) -> None:
    ranks(4, body_training, steps)


def body_steps_alone() -> None:
    """Gradients of DTensors alone are left on their rank, and used."""
    mesh = grid()
    index, count = place(mesh)
    model = samples.cut(samples.net(), mesh["tensor"])
    wrapped = DistributedDataParallel(model, device_mesh=mesh["replicate"])
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    optimizer = torch.optim.SGD(cut, lr=0.1)
    with wrapped.no_sync():
        samples.loss_of(wrapped, *samples.share(samples.batch(0), index, count)).backward()
    with pytest.warns(UserWarning, match="steps with gradients of this rank alone"):
        optimizer.step()


def test_a_step_of_cut_parameters_in_no_sync_is_warned_of(ranks: Ranks) -> None:
    ranks(4, body_steps_alone)


# ----------------------------------------------------------------------- what a step does


def body_steps() -> None:
    mesh = grid()
    index, count = place(mesh)
    one = samples.net()
    one.blocks[0].up.weight.requires_grad_(False)
    model = samples.cut(one, mesh["tensor"])
    model = DistributedDataParallel(
        model, device_mesh=mesh["replicate"], gradient_as_bucket_view=True
    )
    inner = model.module
    heard: list[str] = []
    inner.norm.weight.register_post_accumulate_grad_hook(lambda p: heard.append(str(p.grad.shape)))
    double = [p.blocks[1].up.weight.register_hook(lambda g: g * 2) for p in (inner, one)]

    def backward(step: int) -> None:
        given = samples.batch(step)
        samples.loss_of(model, *samples.share(given, index, count)).backward()
        samples.loss_of(one, *given).backward()

    # Accumulated without a reduction, with one, and once more on top of the mean.
    with model.no_sync():
        backward(0)
        assert isinstance(inner.blocks[0].down.weight.grad, DTensor)
    for step in (1, 2):
        backward(step)
        samples.same(inner, one)
    assert heard == ["torch.Size([6])"] * 3
    # Zeroed in place between forward and backward, where the gradient is a view of its bucket.
    kept = inner.blocks[0].down.weight.grad.to_local()
    loss = samples.loss_of(model, *samples.share(samples.batch(3), index, count))
    for part in (inner, one):
        part.zero_grad(set_to_none=False)
    loss.backward()
    samples.loss_of(one, *samples.batch(3)).backward()
    samples.same(inner, one)
    assert inner.blocks[0].down.weight.grad.to_local().data_ptr() == kept.data_ptr()
    # Trained from now on, without gradients from before.
    for part in (inner, one):
        part.blocks[0].up.weight.requires_grad_(True)
        part.zero_grad()
    backward(4)
    samples.same(inner, one)
    assert inner.blocks[0].up.weight.grad is not None

    # What travels, and that no operator is called on a DTensor meanwhile.
    recorder, operators = Recorder(), samples.CountDTensorOperators()
    for part, hook in zip((inner, one), double, strict=True):
        part.zero_grad()
        hook.remove()
    given = samples.share(samples.batch(5), index, count)
    with observe(recorder), operators:
        samples.loss_of(model, *given).backward()
    assert operators.found == []
    tensor = [(c.kind, c.label) for c in recorder.collectives if c.axis == "tensor"]
    # Of devices these go by the hosts.
    sent = [c for c in recorder.collectives if c.label != "use counts"]
    assert [c.label for c in sent if c.axis == "replicate"] == ["reduce bucket 0"]
    assert {c.axis for c in recorder.collectives} == {"replicate", "tensor"}
    assert tensor.count(("all_reduce", "partial gradients")) == 1
    assert tensor[-1] == ("all_reduce", "partial gradients")
    samples.loss_of(one, *samples.batch(5)).backward()
    samples.same(inner, one)


def test_accumulation_hooks_frozen_parameters_and_what_travels(ranks: Ranks) -> None:
    ranks(4, body_steps)


# ------------------------------------------------------------------------ refused, and torch's


def body_asked() -> None:
    mesh = grid()
    rank, _ = place(mesh)
    ids = torch.randint(0, samples.WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    part = ids.chunk(2)[rank]

    def loss(model: Any, given: torch.Tensor) -> torch.Tensor:
        return model(given).square().mean()

    def asked(model: Any, **more: Any) -> list[torch.Tensor | None]:
        """The gradients of this rank's batch."""
        given = [*model.parameters()]
        found = torch.autograd.grad(loss(model, part), given, allow_unused=True, **more)
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]

    def as_module(model: nn.Module, **given: Any) -> nn.Module:
        return replicate(model, **given)

    for wrap in (as_module, DistributedDataParallel):
        for sequence in (False, True):
            one = samples.net()
            cut = samples.cut(one, mesh["tensor"], sequence=sequence)
            model = wrap(cut, device_mesh=mesh["replicate"])
            for more in ({}, {"create_graph": True}):
                for found, expected in zip(asked(model, **more), asked(one, **more), strict=True):
                    assert (found is None) == (expected is None)
                    if found is not None:
                        torch.testing.assert_close(found, expected)
            named = [cut.blocks[0].up.weight]
            with pytest.raises(RuntimeError, match="reduced over data ranks"):
                loss(model, part).backward(inputs=named)
            for each, given in ((model, part), (one, ids)):  # and backward goes on as ever
                each.zero_grad()
                for _ in range(2):
                    loss(each, given).backward()
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    mine = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    torch.testing.assert_close(mine, q.grad)


def test_gradients_of_cut_parameters_are_given_to_whoever_asks(ranks: Ranks) -> None:
    """They are this rank's, as those of plain parameters of a replica."""
    ranks(4, body_asked)


def body_others() -> None:
    mesh = grid()
    index, count = place(mesh)
    one = samples.net()

    # All ranks as replicas would mix parts of one parameter.
    model = replicate(samples.cut(one, mesh["tensor"]))
    given = samples.share(samples.batch(0), index, count)
    text = r"parameter 'words.weight' is a DTensor placed S.*over axis 'tensor'.*mesh..replicate"
    with pytest.raises(ValueError, match=text):
        model(given[0])

    # In another dtype, with a hook of the user's.
    model = samples.cut(one, mesh["tensor"])
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    replicate(model, device_mesh=mesh["replicate"], mixed_precision=precision)
    model.register_comm_hook(None, allreduce_hook)
    reference = copy.deepcopy(one)
    samples.train(model, reference, sgd, place(mesh), steps=2, tolerance=1e-5)

    # torch's own tensor parallelism computes on DTensors, and partial gradients are summed by it.
    model, reference = copy.deepcopy(one), copy.deepcopy(one)
    theirs = {
        "blocks.*.up": peer.ColwiseParallel(),
        "blocks.*.down": peer.RowwiseParallel(),
        "norm": peer.SequenceParallel(),
        "head": peer.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    model.norm.register_forward_pre_hook(
        lambda _, given: DTensor.from_local(given[0], mesh["tensor"], [Replicate()])
    )
    peer.parallelize_module(model, mesh["tensor"], theirs)
    replicate(model, device_mesh=mesh["replicate"])
    with model.no_sync():
        samples.loss_of(model, *samples.share(samples.batch(7), index, count)).backward()
    samples.loss_of(reference, *samples.batch(7)).backward()
    samples.train(model, reference, sgd, place(mesh), steps=3)

    # Ranks of one replica have run out of batches together.
    model, reference = samples.cut(one, mesh["tensor"]), copy.deepcopy(one)
    replicate(model, device_mesh=mesh["replicate"])
    rows = [samples.batch(step, rows=2) for step in range(3)]
    mine = [rows[0], rows[2]] if index == 0 else [rows[1]]
    with model.join():
        for given in mine:
            model.zero_grad()
            samples.loss_of(model, *given).backward()
    if index == 0:  # half of what the only batch gives: the other replica had none
        (samples.loss_of(reference, *rows[2]) / 2).backward()
        samples.same(model, reference)


def test_others(ranks: Ranks) -> None:
    ranks(4, body_others)


# ------------------------------------------------------------------------------- as upstream


class SeedNet(nn.Module):
    """As in the test of replicated tensor parallelism."""

    def __init__(self, width: int, checkpoint: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(width, width) for _ in range(4))
        self.use_checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(x)))


def body_seed() -> None:
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for uses_checkpoint in (False, True):
        torch.manual_seed(0)
        one = SeedNet(50, uses_checkpoint).double()
        plan = {
            "fc1": ColwiseParallel(),
            "fc2": RowwiseParallel(),
            "fc3": ColwiseParallel(),
            "fc4": RowwiseParallel(),
        }
        model = parallelize_module(copy.deepcopy(one), mesh_2d["tp"], plan)
        model = replicate(model, device_mesh=mesh_2d["dp"])
        data = torch.randn(2, 50, dtype=torch.float64)
        row = mesh_2d.get_local_rank("dp")
        for _ in range(2):
            model(data[row : row + 1]).sum().backward()
            (one(data).sum() / 2).backward()
            assert len(list(model.parameters())) == 8
            samples.same(model, one)


def test_seed_of_replicated_tensor_parallelism(ranks: Ranks) -> None:
    ranks(4, body_seed)


# ------------------------------------------- parameters that are read beside their layers


class Beside(nn.Module):
    """A layer whose parameters the model reads, too: by a functional call, a penalty, or both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def called(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: 0.5 * p for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, weights, (x,))

    def penalty(self) -> torch.Tensor:
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.layer.parameters()]
        return torch.stack([p.square().sum() for p in found]).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "called":
            return self.called(x).tanh()
        if self.how == "called before":
            return (self.called(x) + self.layer(x)).tanh()
        if self.how == "called after":
            return (self.layer(x) + self.called(x)).tanh()
        return self.layer(x).tanh() * self.penalty()


def body_read_beside(how: str) -> None:
    mesh = grid()
    index, count = place(mesh)
    whole, some = Replicate(), Shard(1)
    styles = (
        ColwiseParallel(output_layouts=whole),
        RowwiseParallel(input_layouts=whole),
        # The bias of which each rank of axis tensor has another part of the gradient.
        ColwiseParallel(input_layouts=some, output_layouts=whole),
        RowwiseParallel(input_layouts=whole, output_layouts=some, use_local_output=False),
    )
    for style in styles if how != "penalty" else styles[:3]:  # it multiplies a local output
        for wrap in (
            partial(replicate, device_mesh=mesh["replicate"]),
            partial(
                DistributedDataParallel,
                device_mesh=mesh["replicate"],
                gradient_as_bucket_view=True,
            ),
        ):
            torch.manual_seed(3)
            one = Beside(how).double()
            model = parallelize_module(copy.deepcopy(one), mesh["tensor"], {"layer": style})
            named = dict(model.named_parameters())
            seen: list[tuple[str, torch.Tensor]] = []

            def show(parameter: nn.Parameter, *, name: str) -> None:
                gradient: Any = parameter.grad
                seen.append((name, gradient.full_tensor().clone()))  # noqa: B023

            for name, parameter in named.items():
                parameter.register_post_accumulate_grad_hook(partial(show, name=name))
            outer: Any = wrap(model)
            for step in range(2):
                for part in range(2):
                    x = torch.randn(count, 3, 4, 4, dtype=torch.float64)
                    one(x.flatten(0, 1)).square().mean().backward()
                    if isinstance(outer, DistributedDataParallel):
                        outer.require_backward_grad_sync = part == 1
                    else:
                        outer.set_requires_gradient_sync(part == 1)
                    mine = x[index]
                    if style.input_layouts and style.input_layouts[0] == some:
                        mine = mine.chunk(2, 1)[mesh.get_local_rank("tensor")]
                    found: Any = outer(mine)
                    if isinstance(found, DTensor):
                        found = found.full_tensor()
                    found.square().mean().backward()
                shown = dict(seen[-2:])
                assert len(seen) == 4 * (step + 1)
                for name, parameter in one.named_parameters():
                    gradient: Any = named[name].grad
                    torch.testing.assert_close(gradient.full_tensor(), parameter.grad)
                    torch.testing.assert_close(shown[name], parameter.grad)
                    named[name].grad = parameter.grad = None


@pytest.mark.parametrize("how", ["called", "called after", "penalty"])
def test_gradients_of_what_is_read_beside_its_layer_are_reduced(ranks: Ranks, how: str) -> None:
    ranks(4, body_read_beside, how)


def body_read_late() -> None:
    """What was read first has its gradient last: the layer's is on its way to the other ranks."""
    mesh = grid()
    style = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(Beside("called before"), mesh["tensor"], {"layer": style})
    replicate(model, device_mesh=mesh["replicate"])
    with pytest.raises(RuntimeError, match="got another gradient after the first had gone"):
        model(torch.ones(3, 4)).sum().backward()


def test_a_second_gradient_that_comes_after_its_reduction_is_refused(ranks: Ranks) -> None:
    ranks(4, body_read_late)
