"""What users of torch's DistributedDataParallel rely on, beside torch's class and one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DistributedDataParallel,
    GradBucket,
    keep_batch_norm_local,
    replicate,
    synchronize_batch_norm,
)
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.testing import Ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.spare = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x).tanh() + self.shift
        return self.last(x), self.spare(x)


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    world = communicator()
    torch.manual_seed(7 + step)
    x = torch.randn(4 * world.size, 3, dtype=torch.float64)
    return x, x.chunk(world.size)[world.rank]


def same(*models: nn.Module) -> None:
    """Gradients of all models as those of the first."""
    for model in models[1:]:
        for (name, a), b in zip(model.named_parameters(), models[0].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, msg=name)


def wrapped(one: nn.Module, **options: object) -> list[nn.Module]:
    """torch's, and both of ours."""
    theirs = {key: value for key, value in options.items() if key != "bucket_cap_mb"}
    return [
        TorchDDP(copy.deepcopy(one), find_unused_parameters=True, **theirs),
        DistributedDataParallel(copy.deepcopy(one), **options),
        replicate(copy.deepcopy(one), **options),
    ]


def body_outputs() -> None:
    """An output that is ignored, several, and a backward pass for each, with and without views."""
    x, share = batch()
    losses: list[Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]] = [
        lambda out: out[0].square().mean(),
        lambda out: out[1].mean(),
        lambda out: out[0].square().mean() + out[1].mean(),
    ]
    for is_view in (False, True):
        one = Net()
        models = wrapped(one, gradient_as_bucket_view=is_view, bucket_cap_mb=1e-5)
        for value in losses:
            for model in (one, *models):
                model.zero_grad()
                value(model(x if model is one else share)).backward()
            same(one, *models)


def body_accumulation() -> None:
    """Passes without a sum, by block and by setting, then one with; and two with in a row."""
    one = Net()
    models = wrapped(one)
    for step in range(3):
        x, share = batch(step)
        more, more_share = batch(step + 10)
        for model in (one, *models):
            model.zero_grad()
            first, second = (x, more) if model is one else (share, more_share)
            if model is one or step == 2:
                sum(out.mean() for out in model(first)).backward()
            else:
                with model.no_sync():
                    sum(out.mean() for out in model(first)).backward()
            sum(out.square().mean() for out in model(second)).backward()
        same(one, *models)


def body_double_forward() -> None:
    """Two forwards before the backward, and forwards without one in between."""
    one = Net()
    ours = wrapped(one)[1:]
    x, share = batch()
    for _ in range(2):
        for model in (one, *ours):
            model.zero_grad()
            part = x if model is one else share
            model(part)
            with torch.no_grad():
                model(part)
            (model(part)[0].square().mean() + model(part * 2)[1].mean()).backward()
        same(one, *ours)


def body_unfinished() -> None:
    """A forward whose outputs nobody uses is no error: the next iteration trains."""
    one = Net()
    models = wrapped(one)[1:]
    x, share = batch()
    for model in models:
        model(share)
        # torch raises "Expected to have finished reduction in the prior iteration" here.
        model(share)[0].square().mean().backward()
        model(share)
        model.zero_grad()
        model(share)[0].square().mean().backward()
    one(x)[0].square().mean().backward()
    same(one, *models)


def body_buffers() -> None:
    """Buffers come from rank 0 in a forward that leads to a sum, and stay in one that does not."""
    world = communicator()
    for model in wrapped(Net()):
        buffer = next(model.buffers())
        _, share = batch()
        model(share)
        buffer.fill_(world.rank + 1)
        with model.no_sync():
            model(share)
        if type(model).__module__.startswith("meshwright"):
            # torch's broadcasts in the first forward of `no_sync` too.
            assert buffer[0].item() == world.rank + 1
        model(share)
        # torch's takes up the broadcasts one forward later than it is asked to.
        model(share)
        assert buffer[0].item() == 1


def body_hook_futures() -> None:
    """A hook may return a chain of futures, of ours, of torch's, or one that is ready."""

    def chained(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = allreduce_hook(state, bucket)
        return future.then(lambda done: done.value() * 10).then(lambda done: done.wait() / 2)

    def ready(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        axis = bucket.communicator
        axis.all_reduce(bucket.buffer(), label=bucket.label).wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / axis.size)
        return future.then(lambda done: done.value() * 5)

    x, share = batch()
    for hook in (chained, ready):
        one = Net()
        ours = DistributedDataParallel(copy.deepcopy(one), bucket_cap_mb=1e-5)
        ours.register_comm_hook(None, hook)
        one(x)[0].mean().backward()
        ours(share)[0].mean().backward()
        for a, b in zip(ours.parameters(), one.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad * 5)


def body_batch_norm() -> None:
    """Local statistics as torch's class; those of all ranks, converted, as one process."""
    world = communicator()
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    one.double()
    ours, theirs = copy.deepcopy(one), TorchDDP(copy.deepcopy(one))
    local = DistributedDataParallel(copy.deepcopy(one))
    keep_batch_norm_local(local)
    synchronize_batch_norm(ours, world)
    replicate(ours)
    torch.manual_seed(1)
    x = torch.randn(3 * world.size, 2, 4, 4, dtype=torch.float64)
    share = x.chunk(world.size)[world.rank]
    for _ in range(2):
        for model in (one, ours, theirs, local):
            model.zero_grad()
            model(x if model is one else share).square().mean().backward()
        same(one, ours)
        same(theirs, local)
    for a, b in zip(ours.buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(theirs.buffers(), local.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def body_shared() -> None:
    """Two replicas that have a layer in common are refused in one backward, and train by turns."""
    for features, options in ((800, {}), (4, {"gradient_as_bucket_view": True})):
        torch.manual_seed(0)
        layers = nn.Linear(features, features).double(), *(nn.Linear(features, 2).double(),) * 2
        x = torch.randn(4, features, dtype=torch.float64)
        share = x.chunk(communicator().size)[communicator().rank]
        heads = [nn.Sequential(layers[0], layers[1]), nn.Sequential(layers[0], layers[2])]
        whole = copy.deepcopy(heads)
        replicas = [DistributedDataParallel(head, **options) for head in heads]
        again = DistributedDataParallel(heads[0], **options)
        losses = [model(share).square().mean() for model in replicas]
        with pytest.raises(RuntimeError, match=r"found two that reduce '.*0\.weight'"):
            sum(losses).backward()
        for each in heads:
            each.zero_grad()
        for models, given in ((whole, x), ([again, replicas[1]], share)):
            for _ in range(2):
                for model in models:
                    model.zero_grad()
                for model in models:
                    model(given).square().mean().backward()
        same(nn.ModuleList(whole), nn.ModuleList(heads))


def body_shared_by_turns() -> None:
    """Heads on one encoder are stepped one after the other; each counts its own passes alone."""
    for options in ({}, {"static_graph": True}, {"skip_all_reduce_unused_params": True}):
        torch.manual_seed(0)
        encoder = nn.Linear(3, 3).double()
        heads = [nn.Sequential(encoder, nn.Linear(3, 2).double()) for _ in range(2)]
        whole = copy.deepcopy(heads)
        x, share = batch()
        replicas = [DistributedDataParallel(head, **options) for head in heads]
        for models, given in ((whole, x), (replicas, share)):
            for _ in range(2):
                for model in models:
                    model.zero_grad()
                    model(given).square().mean().backward()
        same(nn.ModuleList(whole), nn.ModuleList(heads))
        losses = [model(share).square().mean() for model in replicas]
        with observe(recorder := Recorder()):
            losses[0].backward()
        sums = [label for kind, label in recorder.kinds() if kind == "all_reduce"]
        assert len(sums) == len(replicas[0].reducer.buckets), "the other replica reduces nothing"


def body_shared_over_other_ranks() -> None:
    """A replica over other ranks is refused where it is built, until the other one is dropped."""
    layer = nn.Linear(3, 2)
    own = [dist.new_group([rank]) for rank in range(communicator().size)][communicator().rank]
    replica = DistributedDataParallel(layer)
    with pytest.raises(ValueError, match=r"'weight', which is reduced over ranks \[0, 1"):
        DistributedDataParallel(layer, process_group=own)
    del replica
    DistributedDataParallel(layer, process_group=own)


def body_function_transforms() -> None:
    """The gradients that `torch.func.grad` takes are this rank's, and no pass begins."""
    model = DistributedDataParallel(nn.Linear(3, 2).double())
    _, share = batch()
    model(share).sum().backward()
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, share).sum())(held)
    torch.testing.assert_close(found["module.weight"], share.sum(0).expand(2, 3))
    model(share).sum().backward()


def body_silent() -> None:
    """Nothing is sent in `no_sync`, in evaluation, or for a module without buffers in forward."""
    ours = DistributedDataParallel(nn.Linear(3, 2).double())
    _, share = batch()
    with observe(recorder := Recorder()):
        with ours.no_sync():
            ours(share).sum().backward()
        with torch.no_grad():
            ours(share)
        value = ours(share).sum()
    assert recorder.kinds() == []
    value.backward()


BODIES = [
    body_outputs,
    body_accumulation,
    body_double_forward,
    body_unfinished,
    body_buffers,
    body_hook_futures,
    body_batch_norm,
    body_shared,
    body_shared_by_turns,
    body_shared_over_other_ranks,
    body_function_transforms,
    body_silent,
]


# Of the buffer that the test writes on each rank.
@pytest.mark.filterwarnings("ignore:the forward pass has written buffer 'shift'")
@pytest.mark.few(2)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.removeprefix("body_"))
def test_beside_torch(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
