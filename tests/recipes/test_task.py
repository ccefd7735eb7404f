"""A user's own model, data, loss and optimizer in the main job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.checkpoint import load_tensors
from meshwright.cli import main
from meshwright.comm import connect
from meshwright.errors import PlanError
from meshwright.testing import Ranks, RanksFailed
from support.internals.recipes import (
    RunOutcome,
    TrainConfig,
    cross_entropy,
    sketch,
    train,
    without_dropout,
)
from support.internals.sampling import Sampler
from support.internals.toml_source import read
from support.recipes import own
from support.recipes.own import CONFIG
from support.recipes.runs import losses

TWO = "axes.replicate=2"


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    given = [f"run.folder={folder / 'run'}", *overrides]
    return read(CONFIG, TrainConfig, source="own.toml", overrides=given)


def run_own(folder: Path, *overrides: str) -> RunOutcome:
    return train(config_of(folder, *overrides), connect(), lambda line: None)


PLAIN = ("model.factory=support.recipes.own:plain", "precision.parameters=float64")
EVEN = ("optimizer.warmup_steps=0", "optimizer.final_fraction=1.0")


def test_it_trains_with_parity_validation_report_and_export(ranks: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (TWO, "run.check_parity=true", "run.validate_every=3", f"run.export={out}")
    outcome = ranks(2, run_own, tmp_path, *options)[0]
    assert "replicate=2 equals one process over 6 steps in float64" in outcome.parity
    assert "(limit 1e-09;" in outcome.parity
    assert (outcome.unit, outcome.unigram_loss) == ("sample", None)
    assert outcome.validation_loss is not None
    assert "Samples a second" in Path(outcome.report).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows if "samples" in row] == [8, 16, 24, 32, 40, 48]
    assert len([row for row in rows if "validation_loss" in row]) == 2
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]


def alone(steps: int) -> tuple[list[float], nn.Module, float]:
    """Losses, model and validation loss of a loop without the library."""
    torch.manual_seed(0)
    model = own.plain(8).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    training, held_out = (default_collate(part) for part in own.data())
    sampler, found = Sampler(40, 8, 0), []
    for _ in range(steps):
        places = sampler.next_indices()
        loss = own.mean_loss(model(training[0][places].double()), training[1][places])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    places = [place * 20 // 12 for place in range(12)]
    with torch.no_grad():
        loss = own.mean_loss(model(held_out[0][places].double()), held_out[1][places])
    return found, model, loss.item()


@pytest.mark.parametrize("loss", ["", "support.recipes.own:mean_loss"])
def test_its_numbers_are_those_of_a_loop_of_ones_own(
    ranks: Ranks, tmp_path: Path, loss: str
) -> None:
    expected, model, held_out = alone(6)
    options = (*PLAIN, *EVEN, f"loss.factory={loss}")
    outcome = ranks(2, run_own, tmp_path, TWO, *options)[0]
    assert [*losses(tmp_path).values()] == pytest.approx(expected, rel=1e-12)
    assert outcome.validation_loss == pytest.approx(held_out, rel=1e-12)
    saved = load_tensors(outcome.checkpoint).tensors
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(saved[f"state/model/{name}"], weight, rtol=1e-12, atol=0)


def test_it_resumes_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected, model, _ = alone(6)
    for count, steps in ((2, 3), (1, 6)):
        options = (f"axes.replicate={count}", f"run.steps={steps}", "run.accept_changes=true")
        outcome = ranks(count, run_own, tmp_path, *PLAIN, *EVEN, *options)[0]
    assert [*losses(tmp_path).values()] == pytest.approx(expected, rel=1e-12)
    saved = load_tensors(outcome.checkpoint).tensors
    torch.testing.assert_close(saved["state/model/3.weight"], model.state_dict()["3.weight"])


def test_several_optimizers_have_parity_on_shards(ranks: Ranks, tmp_path: Path) -> None:
    options = ["optimizer.factory=support.recipes.own:two", "optimizer.options={lr=0.05}"]
    options += ["axes.shard=2", "axes.replicate=1", "run.check_parity=true", "run.steps=3"]
    outcome = ranks(2, run_own, tmp_path, *options)[0]
    assert "shard=2, replicate=1 equals one process over 3 steps in float64" in outcome.parity


@pytest.mark.parametrize("loss", ["", "support.recipes.own:logits_loss"])
def test_dicts_are_keyword_arguments_and_labels_the_target(
    ranks: Ranks, tmp_path: Path, loss: str
) -> None:
    options = ["model.factory=support.recipes.own:Labeled", "model.options={}", TWO]
    options += ["data.factory=support.recipes.own:dicts", "run.check_parity=true"]
    outcome = ranks(2, run_own, tmp_path, *options, f"loss.factory={loss}")[0]
    assert "equals one process over 6 steps" in outcome.parity
    assert outcome.validation_loss is None


def test_labels_that_a_models_own_mean_leaves_out_are_rejected(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = ["model.factory=support.recipes.own:Labeled", "model.options={}", TWO]
    options += ["data.factory=support.recipes.own:ignored", "loss.factory="]
    with pytest.raises(RanksFailed, match=r"labels other than -100, .* give \[loss\] factory"):
        ranks(2, run_own, tmp_path, *options)


def test_a_row_of_tokens_is_read_in_windows(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "tokens.npy"
    numpy.save(file, (numpy.arange(900) ** 2 % 251).astype(numpy.uint16))
    text = CONFIG_OF_BYTES.format(file=file, run=tmp_path / "run")

    def body() -> RunOutcome:
        return train(read(text, TrainConfig), connect(), lambda line: None)

    outcome = ranks(2, body)[0]
    assert (outcome.unit, outcome.unigram_loss) == ("token", None)
    assert outcome.loss is not None and outcome.validation_loss is not None


CONFIG_OF_BYTES = """
[axes]
replicate = 2
[model]
layers = 1
heads = 2
dim = 8
context = 8
[data]
tokens = "{file}"
batch_size = 4
[run]
steps = 2
folder = "{run}"
"""


# ------------------------------------------------------------------------------------ mistakes

OWN = "support.recipes.own"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"model.factory={OWN}:bild"], f"found nothing of this name in {OWN}; did you mean"),
        ([f"model.factory={OWN}"], "expected package.module:function"),
        (["model.factory=nowhere.at_all:build"], "found no module 'nowhere' on sys.path, nor in"),
        ([f"model.factory={OWN}:not_a_function"], "expected a function, found a int in"),
        (["model.options={wide=3}"], "TypeError: build() got an unexpected keyword argument"),
        (["model.options={wide=3}"], "; it is build(width: "),
        ([f"model.factory={OWN}:fails"], "it raised OSError: no weights of width 8 (own.py:"),
        (
            [f"model.factory={OWN}:not_a_model", "model.options={}"],
            "expected it to return a torch.nn.Module, found str; it is not_a_model() -> ",
        ),
        ([f"data.factory={OWN}:not_a_dataset"], "a Dataset with __len__ and __getitem__, or"),
        ([f"data.factory={OWN}:odd_items"], "items that are (input, target) or a dict, found a"),
        ([f"data.collate={OWN}:rows"], "rows\": it raised KeyError: 'input_ids' (own.py:"),
        ([f"loss.factory={OWN}:loss"], "[loss] factory"),
        (["optimizer.options={lrr=1}"], "unexpected keyword argument 'lrr'"),
        ([f"optimizer.factory={OWN}:data", "optimizer.options={}"], "takes 0 positional"),
        (["optimizer.options={lr=-1}"], "[optimizer] lr in options: expected a number above 0"),
        (["optimizer.learning_rate=1"], "'learning_rate' in [optimizer] and 'lr' in its options"),
        (["optimizer.weight_decay=0.1"], "'weight_decay' in [optimizer] conflicts with 'factory'"),
        (["model.layers=4"], "key 'layers' in [model] conflicts with 'factory'"),
        (["model.hugging_face=x"], "key 'hugging_face' in [model] conflicts with 'factory'"),
        (["data.path=x"], "key 'path' in [data] conflicts with 'factory'"),
        (["data.tokens=x.npy"], "key 'tokens' in [data] conflicts with 'factory'"),
        (
            ["model.weights=x", "model.factory=", "model.options={}"],
            "key 'weights' in [model] is for 'hugging_face'",
        ),
        (
            ["axes.replicate=1", "axes.pipeline=8", "pipeline.microbatches=8"],
            "the model has 4 modules in a row that a stage may begin with, which is too few for 8",
        ),
        (
            [
                f"model.factory={OWN}:dropping",
                "model.options={}",
                "train.dropout=global",
            ],
            "'1' draws random numbers that depend on the layout",
        ),
        (["data.batch_size=64"], "expected at least 64 items of the training data, found 40"),
        (["--run.export", "{here}"], "it exists, and exports never overwrite"),
        (
            [
                "model.peft={r=2}",
                "axes.tensor=2",
                "axes.replicate=1",
                "tensor.rules={'0'='colwise'}",
            ],
            "[model] peft with axis tensor = 2: LoRA's matrices cannot be split over tensor",
        ),
        (["model.factory=", "model.options={}", "model.peft={r=2}"], "peft needs hugging_face"),
        (
            ["model.factory=", "model.options={}", "model.hugging_face=/nowhere"],
            "expected a config.json or a folder with one, found no /nowhere",
        ),
        (
            ["model.factory=", "model.options={}", "data.factory=", "data.tokens=/nowhere.npy"],
            "expected a .npy file with one row of whole numbers at /nowhere.npy, found none",
        ),
    ],
)
def test_a_mistake_is_one_line_before_ranks_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], expected: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(CONFIG)
    given = [word.format(here=tmp_path) if "{here}" in word else word for word in words]
    assert main(["train", str(file), TWO, f"--run.folder={tmp_path / 'run'}", *given]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_module_beside_the_file_is_found_and_none_that_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from support.recipes.own import plain, data\n")
    (tmp_path / "other.py").write_text("raise AssertionError('nobody named it')\n")
    file = tmp_path / "own.toml"
    file.write_text(CONFIG.replace("support.recipes.own:build", "beside:plain"))
    config = read(file.read_text(), TrainConfig, source=str(file))
    assert len(list(sketch(config).parameters())) == 4
    assert "beside" in sys.modules and "other" not in sys.modules


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_meta_cannot_run_is_left_to_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(CONFIG)
    given = [f"model.factory={OWN}:needs_numbers", "model.options={}", "train.dropout=global"]
    assert main(["train", str(file), f"--run.folder={tmp_path / 'run'}", *given]) == 0


def test_a_model_that_needs_its_memory_gets_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"model.factory={OWN}:looks_at_its_weights")
    assert not next(sketch(config).parameters()).is_meta


# ---------------------------------------------------------------------------------- small parts


def test_cross_entropy_counts_what_is_not_ignored() -> None:
    logits, target = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    target[0, :2] = -100
    found = cross_entropy(logits, target)
    assert isinstance(found, tuple)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(found[0] / found[1], expected)
    pixels, classes = torch.randn(2, 7, 4, 4), torch.randint(0, 7, (2, 4, 4))
    found = cross_entropy(pixels, classes)
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[0] / found[1], nn.functional.cross_entropy(pixels, classes))
    known = torch.tensor(2.0)
    assert cross_entropy(own.Output(known, pixels)) is known
    with pytest.raises(PlanError, match="give .loss. factory"):
        cross_entropy(logits)


def test_nothing_drops_in_the_parity_check() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.5))
    without_dropout(model)
    assert torch.equal(model[0](torch.ones(99)), torch.ones(99))
    assert model[1].dropout == 0.0
