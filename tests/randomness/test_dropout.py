"""Dropout masks: the same for every cut of a batch and of its activations, and random."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.errors import LayoutError
from meshwright.randomness import DimPart, Draws, Dropout, RandomOperators, replace_dropout
from support.internals.layout import Box, chunk
from support.internals.randomness import random_bits

SHAPE = (6, 5, 7)
"""Samples, positions, width: nothing divides by accident."""


def mask(draws: Draws, samples: list[int], *parts: DimPart, width: tuple[int, ...]) -> torch.Tensor:
    """What a dropout called "drop" lets through of ones of shape ``(samples, *width)``."""
    module = Dropout(0.4, site="drop", draws=draws, parts=parts)
    with draws.microbatch(samples[0] if samples else 0, samples):
        return module(torch.ones(len(samples), *width, dtype=torch.float64))


def test_splitmix64_gives_its_known_numbers() -> None:
    """The generator's published sequence, written out once more in whole numbers."""
    word, factor = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def scramble(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & word
        return x ^ x >> 31

    assert scramble(factor) == 0xE220A8397B1DCDAF  # the first number from seed 0
    seed, sample = 12345, 7
    key = scramble(((sample + 1) * factor & word) ^ seed)
    words = [scramble((key + n * factor) & word) for n in range(3)]
    halves = [half for each in words for half in (each & 0xFFFFFFFF, each >> 32)]
    found = random_bits(seed, torch.tensor([3, sample]), Box((0,), (5,)), (5,), torch.device("cpu"))
    assert [n & 0xFFFFFFFF for n in found[1].tolist()] == halves[:5]


@pytest.mark.parametrize("width", [(), (6,), (7,), (3, 4)])
def test_listed_positions_have_their_part_of_one_mask(width: tuple[int, ...]) -> None:
    """Of each sample others, along the dim behind the samples, beside a contiguous part."""
    draws, samples = Draws(seed=3, step=5), [4, 0, 7]
    whole = mask(draws, samples, width=(9, *width))
    assert 0 < (whole == 0).sum() < whole.numel()
    rows = torch.stack([torch.randperm(9)[:5] for _ in samples])
    for listed in (rows, rows[:1]):
        part = DimPart(dim=1, index=0, parts=2, whole=9, positions=listed)
        draws.begin_step(5)
        with draws.split(part):
            found = mask(draws, samples, width=(5, *width))
        expected = torch.stack(
            [row[at] for row, at in zip(whole, listed.expand(3, 5), strict=True)]
        )
        assert torch.equal(found, expected)
    with (
        draws.split(part),
        pytest.raises(LayoutError, match="expected 5 of 9 elements along dim 1"),
    ):
        mask(draws, samples, width=(4, *width))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_cut_of_a_batch_has_its_part_of_one_mask(ranks: int) -> None:
    draws = Draws(seed=3, step=5)
    whole = mask(draws, list(range(SHAPE[0])), width=SHAPE[1:])
    assert 0 < (whole == 0).sum() < whole.numel()
    for dims in itertools.chain.from_iterable(itertools.combinations((0, 1, 2), n) for n in (1, 2)):
        for numbers in itertools.product(range(ranks), repeat=len(dims)):
            cut = {d: chunk(SHAPE[d], ranks, n) for d, n in zip(dims, numbers, strict=True)}
            parts = [
                DimPart(dim=dim, index=number, parts=ranks, whole=SHAPE[dim])
                for dim, number in zip(dims, numbers, strict=True)
                if dim
            ]
            rows = range(cut[0][0], sum(cut[0])) if 0 in cut else range(SHAPE[0])
            width = tuple(cut[d][1] if d in cut else SHAPE[d] for d in (1, 2))
            draws.begin_step(5)
            found = mask(draws, list(rows), *parts, width=width)
            expected = whole
            for dim, (start, length) in cut.items():
                expected = expected.narrow(dim, start, length)
            assert torch.equal(found, expected)
    # Parts of equal size need no size of the whole, and dims may be counted from behind.
    draws.begin_step(5)
    assert torch.equal(
        mask(draws, [0, 1], DimPart(dim=-1, index=6, parts=7), width=(5, 1)), whole[:2, :, 6:]
    )


def test_large_activations_are_drawn_in_chunks_with_the_same_bits() -> None:
    samples = torch.arange(3)
    whole = random_bits(1, samples, Box((0, 0), (50, 1001)), (50, 1001), torch.device("cpu"))
    part = random_bits(1, samples, Box((7, 3), (40, 900)), (50, 1001), torch.device("cpu"))
    wide = random_bits(1, samples, Box((0, 0), (50, 1000)), (50, 1000), torch.device("cpu"))
    pairs = random_bits(1, samples, Box((7, 4), (40, 900)), (50, 1000), torch.device("cpu"))
    odd = random_bits(1, samples, Box((1, 0), (49, 1001)), (50, 1001), torch.device("cpu"))
    assert torch.equal(part, whole[:, 7:47, 3:903])
    assert torch.equal(odd, whole[:, 1:])
    assert torch.equal(pairs, wide[:, 7:47, 4:904])


def test_masks_are_random_and_do_not_follow_each_other() -> None:
    draws, count, p = Draws(seed=0), 40_000, 0.3
    modules = [Dropout(p, site=site, draws=draws) for site in ("a", "b")]
    found: dict[tuple[int, str, int], torch.Tensor] = {}
    for step in range(3):
        draws.begin_step(step)
        with draws.microbatch(0, [0, 1, 2, 1000]):
            for module in modules * 2:
                kept = module(torch.ones(4, count, dtype=torch.float64)) != 0
                for sample in range(4):
                    found[step, f"{module.site}{len(found) // 4 % 4}", sample] = kept[sample]
    masks = torch.stack([each.double() for each in found.values()]) - (1 - p)
    assert len(masks) == 3 * 4 * 4
    # Within 5 deviations of what independent draws give: each mean, and each of 1128 products.
    deviation = math.sqrt(p * (1 - p) / count)
    assert masks.mean(1).abs().max() < 5 * deviation
    correlation = masks @ masks.T / count / (p * (1 - p))
    assert (correlation - torch.eye(len(masks))).abs().max() < 5 / math.sqrt(count) + 0.01
    shifted = (masks[:, 1:] * masks[:, :-1]).mean(1) / (p * (1 - p))
    assert shifted.abs().max() < 5 / math.sqrt(count)


def test_each_kind_scales_as_torch_does() -> None:
    draws = Draws(seed=1)
    kinds = [nn.Dropout(0.25), nn.Dropout1d(0.25), nn.Dropout2d(0.5), nn.Dropout3d(0.5)]
    model = nn.Sequential(*kinds, nn.AlphaDropout(0.3), nn.Dropout(1.0), nn.Dropout(0.0))
    assert replace_dropout(model, draws) == list("0123456")
    shapes = [(400, 9), (400, 9, 4), (400, 9, 2, 2), (400, 9, 1, 2, 2), (400, 90), (4, 3), (4, 3)]
    with draws.microbatch(0, range(400)):
        for number, shape in enumerate(shapes[:4]):
            out = model[number](torch.ones(shape))
            p = kinds[number].p
            assert torch.equal(out.unique(), torch.tensor([0.0, 1 / (1 - p)]))
            by_channel = out.flatten(2) if number else out[..., None]
            assert torch.equal(by_channel.amin(2), by_channel.amax(2))
            assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.04)
        normal = torch.randn(shapes[4], dtype=torch.float64)
        out = model[4](normal)
        assert out.mean().abs() < 0.03 and (out.std() - 1).abs() < 0.03
        assert len(set(out.flatten().tolist()) & set(normal.flatten().tolist())) == 0
    with draws.microbatch(1, range(4)):
        assert not model[5](torch.ones(4, 3)).any()
        ones = torch.ones(4, 3)
        assert model[6](ones) is ones
    assert model.eval()[0](ones) is ones  # evaluation draws nothing, and needs to be told nothing
    with draws.microbatch(2, range(4)):
        written = Dropout(0.5, True, site="in place", draws=draws)(ones)
    assert written is ones


class Repeated(nn.Module):
    """Layers with dropout; one of them is called three times."""

    def __init__(self, wrap: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.3))
        self.shared = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wrap(self.first, x)
        for _ in range(3):
            x = self.wrap(self.shared, x)
        return x


def plainly(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return part(x)


def non_reentrant(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=False)


def reentrant(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=True)


def nested(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(part, x, use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


def unseeded(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)


def trained(
    wrap: Callable[..., torch.Tensor], cuts: list[list[int]], *, late: bool = False
) -> list[torch.Tensor]:
    """Gradients of `Repeated` on five samples, cut into microbatches."""
    torch.manual_seed(0)
    model, draws = Repeated(wrap).double(), Draws(seed=2, step=1)
    data = torch.randn(5, 7, dtype=torch.float64)
    model = copy.deepcopy(model)
    replace_dropout(model, draws)
    losses: list[torch.Tensor] = []
    for number, rows in enumerate(cuts):
        with draws.microbatch(number, rows):
            losses.append(model(data[rows].requires_grad_()).square().sum())
            if not late:
                losses[-1].backward()
    if late:
        for number in reversed(range(len(cuts))):
            with draws.microbatch(number):
                losses[number].backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("wrap", [non_reentrant, reentrant, nested])
def test_recomputation_replays_each_call(wrap: Callable[..., torch.Tensor]) -> None:
    expected = trained(plainly, [list(range(5))])
    assert len(expected) == 4
    for found in (
        trained(wrap, [list(range(5))]),
        trained(wrap, [[0, 1], [2, 3, 4]]),
        trained(wrap, [[4, 2], [3], [0, 1]], late=True),
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_call_that_cannot_be_told_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'shared.[13]' runs again .* preserve_rng_state"):
        trained(unseeded, [list(range(5))])
    draws = Draws(seed=0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    replace_dropout(model, draws)
    data = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="'1' ran in training mode, and nobody has said"):
        model(data)
    with draws.rehearsal():
        assert (model(data) != 0).all()
    with draws.microbatch(0, [0, 1]):
        plain = model(data)
        with pytest.raises(ValueError, match=r"expected 2 samples along dim 0, found shape \(1, 3"):
            model(data[:1])
        # A module that is called once is known without the generator.
        again = Draws(seed=0)
        other = nn.Sequential(copy.deepcopy(model[0]), nn.Dropout(0.5))
        replace_dropout(other, again)
    with again.microbatch(0, [0, 1]):
        out = unseeded(other, data)
        assert torch.equal(out, plain)
        out.sum().backward()
    with pytest.raises(ValueError, match="microbatch 3 of step 0"), draws.microbatch(3):
        pass
    with draws.microbatch(0, [0, 1]), pytest.raises(LayoutError, match="expected 2 of 5"):
        Dropout(0.5, site="x", draws=draws, parts=[DimPart(dim=1, index=0, parts=3, whole=5)])(data)


def test_state_is_seed_and_step() -> None:
    draws = Draws(seed=4, step=9)
    expected = mask(draws, [0, 1], width=(50,))
    resumed = Draws(seed=0)
    resumed.load_state_dict(draws.state_dict())
    assert torch.equal(mask(resumed, [0, 1], width=(50,)), expected)
    resumed.begin_step(10)
    assert not torch.equal(mask(resumed, [0, 1], width=(50,)), expected)
    assert not torch.equal(mask(Draws(5, 9), [0, 1], width=(50,)), expected)


class Other(nn.Module):
    """Draws in a way that is seen only when it runs."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = Drawing(draw)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.noise(self.linear(x)))


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


def attend(x: torch.Tensor, p: float) -> torch.Tensor:
    x = x.view(1, 1, *x.shape)
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=p)[0, 0]


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda x: functional.dropout(x, 0.5), "aten.bernoulli_"),
        (lambda x: attend(x, 0.5), "aten"),
        (lambda x: x + torch.rand(4), "aten.rand"),
        (functional.rrelu, None),
        (lambda x: functional.rrelu(x, training=True), "aten.rrelu"),
        (lambda x: functional.dropout(x, 0.5, training=False), None),
        (lambda x: functional.dropout(x, 0.0), None),
        (lambda x: attend(x, 0.0), None),
    ],
)
def test_random_operators_are_refused_by_name(
    draw: Callable[[torch.Tensor], torch.Tensor], found: str | None
) -> None:
    draws, model = Draws(seed=0), Other(draw)
    replace_dropout(model, draws)
    data = torch.randn(3, 4)

    def run(*per_rank: str) -> None:
        with draws.microbatch(0, range(3)), RandomOperators(model, draws, per_rank=per_rank):
            model(data).sum().backward()

    run("noise")
    if found is None:
        run()
        return
    with pytest.raises(RuntimeError, match=f"module 'noise' ran {found}.* depend on the layout"):
        run()
    outside = "code outside of all modules ran aten.rand"
    with pytest.raises(RuntimeError, match=outside), RandomOperators(model, draws):
        torch.rand(3)
    assert not model.noise._forward_hooks and not model.noise._forward_pre_hooks


def test_modules_that_draw_are_refused_before_they_run() -> None:
    draws = Draws(seed=0)
    parts = {
        "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
        "lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        "rrelu": nn.RReLU(),
        "feature": nn.FeatureAlphaDropout(0.1),
        "fine": nn.LSTM(4, 4, num_layers=1),
        "drop": nn.Dropout(0.1),
        "block": nn.Sequential(nn.Dropout(0.2)),
    }
    model = nn.ModuleDict(parts)
    with pytest.raises(ValueError, match="depend on the layout: attention ") as caught:
        replace_dropout(model, draws)
    for name in ("attention", "lstm", "rrelu", "feature"):
        assert f"{name} ({type(parts[name]).__name__}" in str(caught.value)
    assert "fine" not in str(caught.value)
    assert type(model["drop"]) is nn.Dropout
    left = ["attention", "lstm", "rrelu", "feature", "block"]
    assert replace_dropout(model, draws, per_rank=left) == ["drop"]
    assert type(model["block"][0]) is nn.Dropout
    assert replace_dropout(model, draws, per_rank=left) == []
    with pytest.raises(ValueError, match="'nothing' matches no module of ModuleDict"):
        replace_dropout(model, draws, per_rank=["nothing"])
