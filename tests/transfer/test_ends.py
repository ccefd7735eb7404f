"""What both ends of a transfer agree on, refuse, and keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import fully_shard
from meshwright.comm import Communicator, Pending, Transfer, communicator
from meshwright.errors import RankFailedError, TransferError
from meshwright.mesh import DeviceMesh
from meshwright.testing import Ranks
from meshwright.transfer import Publisher, Receipt, Receiver

both = pytest.mark.devices("host", "simulated")


def model_of(seed: int, width: int = 5, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    return layers.to(communicator().device, dtype)


def run(end: Publisher | Receiver, version: int | None = None) -> Receipt:
    if isinstance(end, Receiver):
        return end.receive(version)
    assert version is not None
    return end.publish(version)


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two.to(one.dtype)) for one, two in pairs)


def ends(
    build: Callable[[int], nn.Module] = model_of, **options: Any
) -> tuple[Publisher | Receiver, nn.Module]:
    """This rank's end: rank 0 publishes, the others receive; options are "publisher" and so on."""
    rank = communicator().rank
    model = build(rank)
    kind = Receiver if rank else Publisher
    return kind(model, **options.get("receiver" if rank else "publisher", {})), model


@both
def test_each_version_is_what_the_trainer_has_then(ranks: Ranks) -> None:
    def body() -> tuple[str, str]:
        end, model = ends()
        first = run(end, 1)
        if isinstance(end, Publisher):
            with torch.no_grad():
                model[0].weight.mul_(2)
        second, again = run(end, 2), run(end, 2)
        expected = model_of(0)
        with torch.no_grad():
            expected[0].weight.mul_(2)
        assert same(model, expected)
        assert end.version == 2 and second.digest == again.digest
        for each in (model, expected):  # what both sides hold may change, too
            each.double()[0].weight.data.div_(3)
        if isinstance(end, Receiver):
            nn.init.zeros_(model[0].weight)
        run(end, 3)
        assert same(model, expected)
        return first.digest, second.digest

    one, two = ranks(2, body)
    assert one == two and one[0] != one[1]


# ----------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("published", "wanted", "text"),
    [
        (3, None, "rank 0 publishes version 3, and rank 1 has version 4 and takes no older one"),
        (6, 7, "rank 0 publishes version 6, and rank 1 asks for version 7"),
    ],
)
def test_another_version_is_an_error_on_both_sides(
    ranks: Ranks, published: int, wanted: int | None, text: str
) -> None:
    def body() -> None:
        end, model = ends()
        run(end, 4)
        if isinstance(end, Publisher):
            nn.init.zeros_(model[0].weight)
        with pytest.raises(TransferError, match=text):
            run(end, published if isinstance(end, Publisher) else wanted)
        assert end.version == 4
        assert isinstance(end, Publisher) or same(model, model_of(0))
        run(end, 8)  # the group goes on
        assert not model[0].weight.any()

    ranks(2, body)


def test_publishers_that_differ_in_the_version(ranks: Ranks) -> None:
    def body() -> None:
        rank = communicator().rank
        end = Receiver(model_of(1)) if rank == 2 else Publisher(model_of(0))
        text = "rank 0 publishes version 1, and rank 1 publishes version 2"
        with pytest.raises(TransferError, match=text):
            run(end, None if rank == 2 else 1 + rank)

    ranks(3, body)


@pytest.mark.parametrize("kind", [Publisher, Receiver])
def test_a_group_with_one_side_alone(ranks: Ranks, kind: type[Publisher | Receiver]) -> None:
    missing = "Receiver" if kind is Publisher else "Publisher"

    def body() -> None:
        with pytest.raises(TransferError, match=rf"no rank of \[0, 1\] has a {missing}"):
            run(kind(model_of(0)), 1)

    ranks(2, body)


# ----------------------------------------------------------------------------- names and dtypes


def test_names_and_shapes_of_one_side_alone(ranks: Ranks) -> None:
    def build(rank: int) -> nn.Module:
        model = model_of(rank, 5 + rank)
        model.add_module(("head", "tail")[rank], nn.Linear(1, 1, bias=False))
        return model

    def body() -> None:
        end, model = ends(build)
        before = [value.clone() for value in model.state_dict().values()]
        with pytest.raises(TransferError) as caught:
            run(end, 1)
        for text in (
            "'0.weight' is float32 (5, 4) from rank 0 and float32 (6, 4) on rank 1",
            "'head.weight' is on the publisher of rank 0 and on no receiver",
            "'tail.weight' is one tensor on the receiver of rank 1 and none on the publishers",
        ):
            assert text in str(caught.value)
        assert all(map(torch.equal, before, model.state_dict().values()))

    ranks(2, body)


@both
def test_a_difference_in_dtype_is_an_error_unless_asked_for(ranks: Ranks) -> None:
    def build(rank: int) -> nn.Module:
        return model_of(rank, dtype=(torch.float32, torch.bfloat16)[rank])

    def body() -> list[int]:
        end, _ = ends(build)
        text = r"'0.weight' is float32 \(5, 4\) from rank 0 and bfloat16 \(5, 4\) on rank 1"
        with pytest.raises(TransferError, match=text):
            run(end, 1)
        moved: list[int] = []
        expected = model_of(0).to(torch.bfloat16)
        for options in (
            {"publisher": {"dtype": torch.bfloat16}},
            {"receiver": {"dtype": torch.float32}},
        ):
            end, model = ends(build, **options)
            moved.append(run(end, 2).moved)
            if isinstance(end, Receiver):
                assert same(model, expected) and model[0].weight.dtype == torch.bfloat16
        return moved

    floats, counter = 5 * 4 + 5 + 4 * 5 + 5 * 3 + 3, 8
    assert ranks(2, body) == [[2 * floats + counter, 4 * floats + counter]] * 2


def test_a_function_renames(ranks: Ranks) -> None:
    def build(rank: int) -> nn.Module:
        model = model_of(rank)
        return nn.ModuleDict({"policy": model}) if rank == 0 else model

    def body() -> None:
        name = {"publisher": {"names": lambda name: name.removeprefix("policy.")}}
        end, model = ends(build, **name)
        run(end, 1)
        assert same(model, model_of(0))

    ranks(2, body)


def test_stages_that_have_copies_of_one_tensor(ranks: Ranks) -> None:
    """Both receive it, and a publisher whose copies differ is refused."""

    def stages(*seeds: int) -> list[nn.Module]:
        return [nn.ModuleDict({"embed": model_of(seed)[0]}) for seed in seeds]

    def body() -> None:
        if communicator().rank == 0:
            Publisher(nn.ModuleDict({"embed": model_of(0)[0]})).publish(1)
            return
        model = stages(1, 2)
        Receiver(model).receive()
        assert all(torch.equal(each["embed"].weight, model_of(0)[0].weight) for each in model)

    ranks(2, body)

    def body_refused() -> None:
        if communicator().rank == 0:
            with pytest.raises(ValueError, match=r"several of the modules have a 'embed\.weight'"):
                Publisher(stages(1, 2)).publish(1)
        else:
            with pytest.raises(RankFailedError, match="rank 0 failed first"):
                Receiver(model_of(0)).receive()

    ranks(2, body_refused)


def test_a_receiver_without_memory(ranks: Ranks) -> None:
    def body() -> None:
        if communicator().rank == 0:
            with pytest.raises(RankFailedError, match="rank 1 failed first"):
                Publisher(model_of(0)).publish(1)
        else:
            with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
                Receiver(model_of(0).to("meta")).receive()

    ranks(2, body)


def test_names_that_are_no_function() -> None:
    with pytest.raises(ValueError, match="names: expected 'model' or a function of a name"):
        Publisher(nn.Linear(1, 1), names="hf")


# -------------------------------------------------------------------------------- what is kept


def test_other_bytes_than_were_sent_are_not_taken(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        end, model = ends()
        run(end, 1)
        issue = Communicator.batch

        def broken(self: Communicator, transfers: Sequence[Transfer]) -> list[Pending]:
            pendings = issue(self, transfers)
            for pending in pendings:
                pending.wait()
            transfers[0].tensor.view(torch.uint8)[0] ^= 1
            return pendings

        with monkeypatch.context() as patched:
            if isinstance(end, Receiver):
                patched.setattr(Communicator, "batch", broken)
            else:
                nn.init.zeros_(model[2].weight)
            text = "rank 1 has received other bytes than rank 0 sent: publish again"
            with pytest.raises(TransferError, match=text):
                run(end, 2)
        assert end.version == 1 and (isinstance(end, Publisher) or same(model, model_of(0)))
        run(end, 2)
        assert not model[2].weight.any()

    ranks(2, body)


@pytest.mark.devices("host", reason="operations of a device hold their tensors until it ends them")
@pytest.mark.parametrize("in_place", [False, True])
def test_memory_beside_the_weights(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """At most the bytes of the largest unit, but for a receiver that keeps its old weights."""

    def body() -> tuple[int, int, int]:
        rank = communicator().rank
        torch.manual_seed(rank)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=n % 3 == 0) for n in range(9)))
        group = dist.new_group([0, 1])
        if rank < 2:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                fully_shard(layer, mesh=mesh)
        alive: list[weakref.ref[torch.Tensor]] = []
        peaks: list[int] = []
        issue = Communicator.batch

        def counted(self: Communicator, transfers: Sequence[Transfer]) -> list[Pending]:
            alive.extend(weakref.ref(each.tensor) for each in transfers)
            here = [tensor for each in alive if (tensor := each()) is not None]
            peaks.append(sum({each.data_ptr(): each.nbytes for each in here}.values()))
            return issue(self, transfers)

        monkeypatch.setattr(Communicator, "batch", counted)
        if rank < 2:
            Publisher(model).publish(1)
        else:
            Receiver(model).receive(in_place=in_place)
        total = sum(value.nbytes for value in model.state_dict().values())
        return max(peaks), total, len(peaks)

    unit = 4 * (16 * 16 + 16)
    *trainers, (peak, total, rounds) = ranks(3, body)
    assert rounds > 6
    assert all(found <= unit for found, *_ in trainers)
    assert peak <= unit if in_place else total - unit <= peak <= total
