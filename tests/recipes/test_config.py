from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from support.internals.recipes import TrainConfig, option_lines, read_config
from support.internals.settings import keys_of
from support.internals.toml_source import dump, read

GOOD = """
[axes]
replicate = 4

[train]
clip_norm = 1.0

[model]
dim = 64
heads = 4

[data]
path = "/texts"
suffixes = [".txt", ".md"]

[run]
steps = 50
"""


def problems_of(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        read(text, TrainConfig, source="run.toml", overrides=overrides)
    return caught.value.problems


def test_tables_of_plan_and_run_stand_side_by_side() -> None:
    config = read(GOOD, TrainConfig)
    assert config.plan.axes.world_size == 4
    assert config.plan.train.clip_norm == 1.0
    assert config.model.dim == 64
    assert config.data.suffixes == (".txt", ".md")


def test_an_empty_file_is_one_process_with_defaults() -> None:
    assert read("", TrainConfig) == TrainConfig()


def test_what_is_written_reads_back() -> None:
    config = read(GOOD, TrainConfig, overrides=["train.seed=3", "model.tied=true"])
    assert config.plan.train.seed == 3
    assert read(dump(config), TrainConfig) == config
    assert read(dump(config, every_key=True), TrainConfig) == config


def test_every_mistake_is_reported_at_once_with_its_line() -> None:
    text = GOOD.replace("clip_norm", "clip_nrom").replace("steps = 50", 'steps = "many"')
    found = problems_of(text, "model.layer=3")
    assert len(found) == 3
    assert found[0].startswith("line 6: unknown key 'clip_nrom' in [train]")
    assert "did you mean 'clip_norm'?" in found[0]
    assert found[1].startswith("line 17: key 'steps' in [run]: expected a whole number")
    assert "override 'model.layer=3'" in found[2]
    assert "did you mean 'layers'?" in found[2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=3", "[model] dim = 64 cannot be cut into 3 heads"),
        ("model.dim=20", "choose a multiple of 8"),
        ("model.dropout=1.0", "less than 1"),
        ("model.activation=relu", '"gelu" or "swiglu"'),
        ("data.batch_size=6", "choose a multiple of 4"),
        ("train.accumulate=3", "choose a multiple of 12"),
        ("precision.parameters=float16", "choose at least 6e-08"),
        ("data.validation_every=1", "at least 2"),
        ("optimizer.betas=[0.9, 1.0]", "less than 1, found 0.9 and 1.0"),
        ("optimizer.final_fraction=2", "at most 1"),
        ("optimizer.learning_rate=0", "learning_rate"),
        ("run.steps=0", "at least 1"),
        ("pipeline.schedule=1f2b", "did you mean"),
        ("axes.replicat=2", "did you mean 'replicate'"),
        ("optimizr.betas=1", "did you mean [optimizer]"),
    ],
)
def test_a_wrong_value_says_what_to_do(override: str, words: str) -> None:
    assert any(words in problem for problem in problems_of(GOOD, override))


KEYS = [
    (table, key)
    for table, keys in keys_of(TrainConfig).items()
    if table != "axes"  # its keys are names of axes
    for key in keys
]


@pytest.mark.parametrize(("table", "key"), KEYS)
def test_every_misspelled_key_names_its_line_and_the_right_one(table: str, key: str) -> None:
    wrong = key[:-1] + "x" + key[-1]
    (problem,) = problems_of(f"[{table}]\n{wrong} = 1\n")
    assert problem.startswith(f"line 2: unknown key '{wrong}' in [{table}]")
    assert f"'{key}'" in problem


@pytest.mark.parametrize(("table", "key"), KEYS)
def test_every_key_refuses_another_type(table: str, key: str) -> None:
    problems = problems_of(f"[{table}]\n{key} = 1979-05-27\n")
    assert any(f"line 2: key '{key}' in [{table}]" in problem for problem in problems)


@given(st.binary(max_size=200))
@example(b"\x00\x0b\x00")
def test_any_file_is_a_configuration_or_a_plan_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    try:
        read_config(path)
    except PlanError as error:
        assert all(line.startswith(str(path)) for line in str(error).splitlines())


def test_a_configuration_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nstep = 1\n")
    with pytest.raises(PlanError, match=r"run.toml: line 2: unknown key 'step'"):
        read_config(path)


def test_the_help_has_a_meaning_for_each_key() -> None:
    lines = option_lines()
    for table in ("model", "data", "optimizer", "run"):
        places = [n for n, line in enumerate(lines) if line.startswith(f"  --{table}.")]
        assert len(places) == len(keys_of(TrainConfig)[table])
        assert all(lines[place + 1].startswith(" " * 6) for place in places)


def test_the_example_of_the_package_is_that_of_the_repository() -> None:
    shown = Path(__file__).parents[2] / "examples/train.toml"
    assert read_config("example") == read_config(shown)


@pytest.mark.parametrize("value", ["18446744073709551615", "2020-01-01", "[18446744073709551615]"])
def test_values_of_free_tables_are_never_taken_for_text(value: str) -> None:
    with pytest.raises(PlanError, match=r"key 'seed' in \[model.options\]: expected"):
        read('[model]\nfactory = "a:b"', TrainConfig, overrides=[f"model.options.seed={value}"])
