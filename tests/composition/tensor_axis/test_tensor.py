"""`parallelize` with axis tensor: parity with one process, alone and with other axes, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.composition import Trainable, check_model, parallelize
from meshwright.errors import (
    CheckpointMismatchError,
    CollectiveMismatchError,
    CommunicationError,
    LayoutError,
    PlanError,
)
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import MODELS, Ranks, Sample, assert_same_training
from support.internals.axes import Axes
from support.internals.precision import Precision
from support.internals.recipes import LanguageModel, ModelConfig
from support.late import raises_by_now

RULES = {
    "transformer": {
        "embedding": "embedding",
        "layers.*.widen": "colwise",
        "layers.*.narrow": "rowwise",
        "head": "colwise_gathered",
    },
    "tied": {"embedding": "embedding", "hidden": "colwise_gathered", "head": "colwise_gathered"},
    "frozen": {"0": "colwise", "2": "rowwise", "4": "colwise_gathered"},
    "uneven": {"0": "colwise", "2": "rowwise", "3": "rowwise_scattered"},
    "reused": {"layer": "colwise_gathered", "head": "rowwise_scattered"},
}
CLIPPED = TrainPlan(clip_norm=0.05, accumulate=2)


def plan_of(
    rules: Any, train: TrainPlan | None = None, schedule: PipelinePlan | None = None, **axes: int
) -> Plan:
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules=rules),
        train=train or TrainPlan(),
        pipeline=schedule or PipelinePlan(),
    )


def language_model(**options: Any) -> Sample:
    config = ModelConfig(dim=16, heads=4, layers=2, **options)
    like = MODELS["transformer"]
    return Sample(
        name="language model",
        build=lambda: LanguageModel(config),
        inputs=like.inputs,
        targets=like.targets,
        loss=like.loss,
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    assert_same_training(
        MODELS[name], plan_of(RULES[name], CLIPPED, tensor=2), world=2, ranks=ranks
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("other", ["replicate", "shard"])
def test_trains_as_one_process_beside_data_axes(ranks: Ranks, other: str) -> None:
    plan = plan_of("language-model", CLIPPED, **{other: 2, "tensor": 2})
    assert_same_training(language_model(tied=True), plan, world=4, ranks=ranks)


@pytest.mark.slow
def test_trains_as_one_process_in_a_pipeline(ranks: Ranks) -> None:
    schedule = PipelinePlan(schedule="1f1b", microbatches=2)
    plan = plan_of("language-model", CLIPPED, schedule, pipeline=2, tensor=2)
    assert_same_training(language_model(tied=True), plan, world=4, batch_size=16, ranks=ranks)


def body_flat(axes: dict[str, int]) -> None:
    sample = language_model(tied=True)
    batches = [sample.example_batch(8, torch.Generator().manual_seed(n)) for n in range(4)]

    schedule = PipelinePlan(schedule="1f1b", microbatches=2) if "pipeline" in axes else None

    def built(flat: bool) -> Trainable:
        torch.manual_seed(1)
        train = TrainPlan(clip_norm=0.05, accumulate=2, flat=flat)
        return parallelize(
            sample.build().double(),
            plan_of("language-model", train, schedule, **axes),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            loss=sample.loss,
            example=(batches[0][0],),
        )

    def train(trainable: Trainable, number: int) -> None:
        rows = 8 // trainable.data_size
        first = trainable.data_rank * rows
        trainable.step(*(part[first : first + rows] for part in batches[number]))

    flat, plain = built(True), built(False)
    for number in range(2):
        train(flat, number)
        train(plain, number)
    assert flat.optimizer is not None
    assert all(p.ndim == 1 for group in flat.optimizer.param_groups for p in group["params"])
    # Each goes on from the state of the other, and so do fresh ones.
    states = flat.state_dict(), plain.state_dict()
    alike(*states)
    others = built(False), built(True)
    for trainable, state in zip(others, states, strict=True):
        trainable.load_state_dict(state)
    for number in range(2, 4):
        for trainable in (flat, plain, *others):
            train(trainable, number)
    expected = plain.state_dict()
    for trainable in (flat, *others):
        alike(trainable.state_dict(), expected)
    if "pipeline" in axes:
        return
    name = next(iter(states[1]["optimizer"]["state"]))
    states[1]["optimizer"]["state"][name]["step"] += 1
    with pytest.raises(CheckpointMismatchError, match=r"has 'step' = .* one flat parameter here"):
        flat.load_state_dict(states[1])
    # What has another shape than the parameter is one for all parts, too.
    for number, values in enumerate(states[0]["optimizer"]["state"].values()):
        values["row"] = torch.full((3,), float(number > 0))
    with pytest.raises(CheckpointMismatchError, match=r"has 'row' = .* one flat parameter here"):
        flat.load_state_dict(states[0])


def alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same numbers by the same names."""
    torch.testing.assert_close(found["model"], expected["model"], rtol=1e-11, atol=1e-13)
    state, like = (each["optimizer"]["state"] for each in (found, expected))
    torch.testing.assert_close(state, like, rtol=1e-9, atol=1e-13)
    (group,), (other,) = (each["optimizer"]["param_groups"] for each in (found, expected))
    for one in (group, other):
        one["params"].sort()
    assert group == other


@pytest.mark.parametrize(
    "other",
    ["replicate", *(pytest.param(o, marks=pytest.mark.slow) for o in ("shard", "pipeline"))],
)
def test_flat_trains_and_saves_as_plain(ranks: Ranks, other: str) -> None:
    ranks(4, body_flat, {other: 2, "tensor": 2})


class Conv1D(nn.Module):
    """A linear layer as Hugging Face's GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    """Query, key and value in one layer, whose sizes are attributes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = heads, width // heads, width
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(seen.transpose(1, 2).flatten(-2))


class LikeGPT2(nn.Module):
    """The names of Hugging Face's GPT-2 and its tied head; 11 words, which nothing divides."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, width)
        self.attn = Attention(width, heads)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(12, width), "c_proj": Conv1D(width, 12)})
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words)
        x = x + self.attn(x)
        return self.lm_head(x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](x))))


class Gated(nn.Module):
    """A scale between two layers that are cut: its gradient is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(2)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).unflatten(-1, (-1, 2))
        return self.down(self.norm(hidden).flatten(-2))


class Heads(nn.Module):
    """Two heads of four features, whose number is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).view(len(x), 2, 4).flatten(1)


class Counted(nn.Module):
    """A module of heads that a cut does not fit, and one that would take its part."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.heads(x))


class Mixed(nn.Module):
    """Three matrices side by side in one layer: a part of it is not a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 12)
        self.down = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.mixed(x).chunk(3, dim=-1)
        return self.down(first * second + third)


WORDS = MODELS["transformer"]
FUSED = {
    "conv1d": Sample(
        name="like GPT-2",
        build=LikeGPT2,
        inputs=WORDS.inputs,
        targets=WORDS.targets,
        loss=WORDS.loss,
    ),
    "linear": Sample(
        name="mixed",
        build=Mixed,
        inputs=lambda size, generator: torch.randn(size, 6, generator=generator),
        targets=lambda size, generator: torch.randint(3, (size,), generator=generator),
        loss=F.cross_entropy,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", FUSED)
def test_several_matrices_in_one_layer_train_as_one_process(ranks: Ranks, kind: str) -> None:
    rules = "gpt2" if kind == "conv1d" else {"mixed": "colwise_3", "down": "rowwise"}
    plan = plan_of(rules, CLIPPED, shard=2, tensor=2)
    assert_same_training(FUSED[kind], plan, world=4, batch_size=16, ranks=ranks)


def body_state() -> None:
    """State taken after one step goes on as one process does, in a model that began elsewhere."""
    generator = torch.Generator().manual_seed(1)
    words = WORDS.inputs(4, generator)
    assert isinstance(words, torch.Tensor)

    def laid_out(seed: int) -> Trainable:
        torch.manual_seed(seed)
        return parallelize(
            LikeGPT2().double(),
            plan_of("gpt2", shard=2, tensor=2),
            optimizer=torch.optim.Adam,
            loss=WORDS.loss,
            example=(words[:2],),
        )

    def step(trainable: Trainable) -> None:
        mine = words.chunk(trainable.data_size)[trainable.data_rank]
        trainable.step(mine, mine)

    first, second = laid_out(0), laid_out(9)
    torch.manual_seed(0)
    one = LikeGPT2().double()
    optimizer = torch.optim.Adam(one.parameters())
    for trainable in (first, second):
        if trainable is second:
            second.load_state_dict(first.state_dict())
        step(trainable)
        WORDS.loss(one(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in trainable.weights().items():
            torch.testing.assert_close(value, one.state_dict()[name], rtol=1e-8, atol=1e-10)


def test_state_of_several_matrices_goes_on_elsewhere(ranks: Ranks) -> None:
    ranks(4, body_state)


def body_uneven() -> None:
    """State dicts of rows that neither axis divides are whole, and go on elsewhere."""
    sample = MODELS["uneven"]

    def laid_out(**axes: int) -> Trainable:
        return parallelize(
            sample.build(),
            plan_of({"0": "colwise", "2": "rowwise"} if "tensor" in axes else None, **axes),
            optimizer=torch.optim.Adam,
            loss=sample.loss,
            example=(torch.zeros(2, 7),),
        )

    first, second = laid_out(shard=2, tensor=2), laid_out(shard=4)
    before = first.weights()
    second.load_state_dict(first.state_dict())
    for name, value in second.weights().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    first.load_state_dict(second.state_dict())
    for name, value in first.weights().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.slow
def test_rows_that_two_axes_do_not_divide(ranks: Ranks) -> None:
    plan = plan_of({"0": "colwise", "2": "rowwise"}, CLIPPED, shard=2, tensor=2)
    assert_same_training(MODELS["uneven"], plan, world=4, ranks=ranks)
    ranks(4, body_uneven)


def body_check() -> None:
    example = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)

    def lay_out(rules: dict[str, str], kind: type[nn.Module] = Gated) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"optimizer": None, "loss": F.mse_loss, "example": example}
        parallelize(kind(), plan_of(rules, tensor=2), **options)

    both = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(PlanError, match=r"gradient of 'norm\.weight' .* differs .*\"replicated\""):
        lay_out(both)
    lay_out({**both, "norm": "replicated"})
    with pytest.raises(PlanError, match=r"then: 'down' raised down .* found shape \(4, 8\)"):
        lay_out({"up": "colwise_gathered", "norm": "replicated", "down": "rowwise"})
    with pytest.raises(PlanError, match="as a whole .* Give the last module a style that gathers"):
        lay_out({"up": "colwise_gathered", "down": "colwise"})
    with pytest.raises(PlanError, match=r"cannot run then: 'heads' raised shape '\[4, 2, 4\]'"):
        lay_out({"heads.up": "colwise", "down": "rowwise"}, Counted)
    with pytest.raises(PlanError, match="an output of shape .* differs from the whole"):
        lay_out({"mixed": "colwise", "down": "rowwise"}, Mixed)
    with pytest.raises(PlanError, match=r"axis tensor is checked against the whole model: give"):
        parallelize(Gated(), plan_of(both, tensor=2), optimizer=None, loss=F.mse_loss)
    rank = communicator().rank
    trainable = parallelize(
        Gated(),
        plan_of({**both, "norm": "replicated"}, tensor=2),
        optimizer=torch.optim.Adam,
        loss=F.mse_loss,
        example=example,
    )
    assert (trainable.data_rank, trainable.data_size) == (0, 1)
    with raises_by_now(ValueError, match=r"expected batch 1 .*tensor 0 is .* on ranks \[1\]"):
        trainable.step(torch.full((4, 6), float(rank)), torch.zeros(4, 3))
    text = str(trainable.describe())
    assert "up.weight" in text
    assert "tensor(2)" in text


def test_a_cut_that_changes_the_model_is_refused(ranks: Ranks) -> None:
    ranks(2, body_check)


def problems_of(model: nn.Module, plan: Plan) -> str:
    with pytest.raises(PlanError) as found:
        check_model(model, plan, plan.axes.world_size)
    return str(found.value)


def test_rules_that_do_not_fit_are_named() -> None:
    model = LanguageModel(ModelConfig(dim=12, heads=3, layers=1))
    assert "heads = 3, which is no multiple of 2" in problems_of(
        model, plan_of("language-model", tensor=2)
    )
    assert "did you mean 'llama'?" in problems_of(model, plan_of("llamma", tensor=2))
    assert "match no module of _Tied" in problems_of(
        MODELS["tied"].build(), plan_of("llama", tensor=2)
    )
    dropping = LanguageModel(ModelConfig(dim=16, heads=4, layers=1, dropout=0.1))
    assert "would drop other activations on each rank of axis tensor, which hold" in problems_of(
        dropping, plan_of("language-model", tensor=2)
    )
    wrong = problems_of(model, plan_of({"head": "columnwise", "tail": "rowwise"}, tensor=2))
    assert "unknown style 'columnwise'" in wrong
    assert "'tail' in [tensor] rules matches no module" in wrong


def body_ties() -> None:
    words = torch.arange(4).view(2, 2)
    sample = MODELS["tied"]
    with pytest.raises(PlanError, match=r"rules: .*tied parameter.*placed"):
        parallelize(
            sample.build(),
            plan_of({"embedding": "embedding", "head": "rowwise_scattered"}, tensor=2),
            optimizer=None,
            loss=sample.loss,
            example=(words,),
        )


def test_a_tied_table_is_not_cut_two_ways(ranks: Ranks) -> None:
    ranks(2, body_ties)


class Slopes(nn.Module):
    """Its slopes are whole on every rank, and each rank's gradient of them is a part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.slope = nn.PReLU()
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.slope(self.up(x)))


def body_described(axes: dict[str, int], plans: list[dict[str, Any]]) -> None:
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    rules = {"*.up": "colwise", "*.down": "rowwise", "*.slope": "replicated"}
    for options in plans:
        torch.manual_seed(0)
        plan = Plan(axes=Axes.of(axes), tensor=TensorPlan(rules=rules), **options)
        passes = plan.train.accumulate * plan.pipeline.microbatches
        trainable = parallelize(
            nn.Sequential(Slopes(), Slopes()),
            plan,
            optimizer=torch.optim.Adam,
            loss=F.mse_loss,
            example=(rows[: 8 // passes // plan.data_size],),
        )
        share = rows.chunk(trainable.data_size)[trainable.data_rank]
        trainable.step(share, share)
        with observe(recorder := Recorder()):
            trainable.step(share, share)
        described = trainable.describe()
        found = [replace(c, sequence=0) for c in described.collectives if "tensor" in c.axis]
        sent = [replace(c, sequence=0) for c in recorder.collectives if "tensor" in c.axis]
        if "pipeline" in axes:  # the schedule orders them
            found, sent = sorted(found, key=str), sorted(sent, key=str)
        assert found == sent, (axes, options)
        if communicator().rank == 0:  # the others may have no part of a slope
            assert {c.label for c in sent} >= {"partial gradients", "gradient norm"}
        lines = str(described).splitlines()
        assert not any("frozen" in line for line in lines)
        label = described.collectives[-2].label
        assert any(f'x all_reduce "{label}" on axis tensor: ' in line for line in lines)


def test_describe_lists_what_a_step_sends_over_tensor_ranks(ranks: Ranks) -> None:
    plans = [
        {"train": TrainPlan(accumulate=2, clip_norm=1.0)},
        {"train": TrainPlan(recompute=("0",)), "precision": Precision(compute="bfloat16")},
    ]
    ranks(2, body_described, {"tensor": 2}, plans)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["replicate", "shard", "pipeline"])
def test_describe_lists_what_a_step_sends_beside_other_axes(ranks: Ranks, other: str) -> None:
    schedule = PipelinePlan(schedule="1f1b", microbatches=2 if other == "pipeline" else 1)
    plans = [{"train": TrainPlan(accumulate=2), "pipeline": schedule}]
    ranks(4, body_described, {other: 2, "tensor": 2}, plans)


class Counting(nn.Module):
    """Counts its passes, in evaluation too, and computes with their number."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x * self.passes


def body_raised() -> None:
    """A batch that only one rank gives up: its next pass must not meet what others wait for."""
    rank, calls = communicator().rank, [0]
    rows = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3 and rank == 1:
            raise KeyError("a bad row")
        return F.mse_loss(output, target)

    trainable = parallelize(
        nn.Sequential(Slopes(), Counting(), Slopes()),
        plan_of({"*.up": "colwise", "*.down": "rowwise", "*.slope": "replicated"}, tensor=2),
        optimizer=torch.optim.Adam,
        loss=loss,
        example=(rows,),
    )
    first = trainable.step(rows, rows).loss
    # The runs that compared the cut model with the whole one have changed nothing.
    assert trainable.module.get_buffer("1.passes") == 1
    assert trainable.step(rows, rows).loss != first
    with pytest.raises((KeyError, CommunicationError)):
        trainable.step(rows, rows)
    if rank == 1:
        # Rank 0 still waits for the rest of that pass, or has ended for it.
        with pytest.raises(CollectiveMismatchError, match=r"raised in step 3\b"):
            trainable.step(rows, rows)


@pytest.mark.few(1)
@pytest.mark.backends("gloo", "shm")
def test_a_rank_that_gave_up_a_pass_alone_does_not_go_on(ranks: Ranks) -> None:
    ranks(2, body_raised)


class Recomputing(nn.Module):
    """Checkpoints a layer itself, and looks rows up whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=False))


def body_recomputing() -> None:
    ids = torch.arange(8)
    rules = {"layer": "colwise_gathered", "head": "colwise_gathered"}
    plan = Plan(axes=Axes.of({"tensor": 2}), tensor=TensorPlan(rules=rules))
    torch.manual_seed(0)
    model, alone = Recomputing().double(), Recomputing().double()
    alone.load_state_dict(model.state_dict())
    trainable = parallelize(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=F.mse_loss,
        example=(ids[:2],),
    )
    optimizer, target = torch.optim.SGD(alone.parameters(), lr=0.1), torch.ones(8, 4).double()
    for _ in range(2):
        F.mse_loss(alone(ids), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        trainable.step(ids, target)
    torch.testing.assert_close(trainable.weights(), dict(alone.state_dict()), rtol=1e-9, atol=1e-12)
    before = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(4, 4).double())
    with pytest.raises(LayoutError, match=r"head\.weight is a whole tensor of shape \(4, 4\)"):
        model.head(target)
    model.head.weight = before
    before.data = 2 * before.data
    with pytest.raises(RuntimeError, match=r"something was assigned to \.data of a parameter"):
        model.head(target)


def test_what_recomputes_itself_is_cut_and_what_replaces_parts_is_refused(ranks: Ranks) -> None:
    ranks(2, body_recomputing)
