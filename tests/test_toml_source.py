"""Typed reading: types, bounds, overrides, composition, and all mistakes at once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.plan import Plan
from support.internals.settings import Above, AtLeast, Inline, Origin, Problem, nearest
from support.internals.toml_source import dump, plain, read, read_file, read_tree, review

quick = settings(max_examples=60, deadline=None)


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    flag: bool = False
    count: Annotated[int, AtLeast(1)] = 1
    ratio: float = 0.5
    name: str = "x"
    path: Path = Path("here")
    color: Color = Color.RED
    mode: Literal["auto", "never", 3] = "auto"
    limit: Annotated[float, Above(0)] | None = None
    names: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    table: Mapping[str, int] = field(default_factory=dict)
    either: Literal["all"] | tuple[str, ...] | Mapping[str, str] = "all"
    inner: Inner = Inner()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    steps: Annotated[int, AtLeast(1)] = 10
    warmup: int = 0
    folder: str = "runs"

    def problems(self) -> list[Problem]:
        if self.warmup <= self.steps:
            return []
        message = f"warmup = {self.warmup} is longer than the run of {self.steps} steps"
        return [Problem(("warmup",), message, involves=(("steps",),))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    plan: Annotated[Plan, Inline()] = Plan()
    every: Every = Every()
    run: Run = Run()
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    name: str
    inner: Inner


def problems(text: str, kind: type = Whole, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(text, kind, overrides=overrides)
    return list(caught.value.problems)


def test_every_type_is_read() -> None:
    text = """
    flag = true
    count = 7
    ratio = 2
    name = "y"
    path = "/tmp/x"
    color = "blue"
    mode = 3
    limit = 1.5
    names = ["a", "b"]
    betas = [0, 1]
    table = { a = 1 }
    either = { "layers.*" = "colwise" }
    [inner]
    depth = 2
    """
    assert read(text, Every) == Every(
        flag=True,
        count=7,
        ratio=2.0,
        name="y",
        path=Path("/tmp/x"),
        color=Color.BLUE,
        mode=3,
        limit=1.5,
        names=("a", "b"),
        betas=(0.0, 1.0),
        table={"a": 1},
        either={"layers.*": "colwise"},
        inner=Inner(depth=2),
    )
    assert type(read("ratio = 2", Every).ratio) is float
    assert read("either = []", Every).either == ()
    assert read("", Every) == Every()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flag = 1", "key 'flag': expected true or false, found 1"),
        ("count = true", "key 'count': expected a whole number, found true"),
        ("count = 0", "key 'count': expected a number of at least 1, found 0"),
        ("count = 1.5", "key 'count': expected a whole number, found 1.5"),
        ('count = "8"', "key 'count': expected a whole number, found the text \"8\""),
        ("ratio = nan", "key 'ratio': expected a number, found nan"),
        ("ratio = inf", "key 'ratio': expected a number, found inf"),
        ("ratio = false", "key 'ratio': expected a number, found false"),
        ("name = 1", "key 'name': expected text, found 1"),
        ("path = 1", "key 'path': expected text, found 1"),
        ('color = "rde"', 'expected "red" or "blue", found the text "rde"; did you mean "red"?'),
        ('mode = "nver"', '"auto", "never" or 3, found the text "nver"; did you mean "never"?'),
        ("mode = true", '"auto", "never" or 3, found true'),
        ("limit = 0", "key 'limit': expected a number above 0, found 0"),
        ('names = "a"', "key 'names': expected a list, found the text \"a\""),
        ('names = ["a", 1, "b", 2]', "key 'names': expected text, found 1"),
        ("betas = [1]", "key 'betas': expected another item, found the list [1]"),
        ("betas = [1, 2, 3]", "key 'betas': expected at most 2 items, found the list [1, 2, 3]"),
        ("table = { a = 1, b = 2.5 }", "key 'b' in [table]: expected a whole number, found 2.5"),
        ("either = 3", 'expected "all", a list or a table, found 3'),
        ("either = { a = 1 }", "key 'a' in [either]: expected text, found 1"),
        ("inner = 3", "key 'inner': expected a table, found 3"),
        ("name = 1979-05-27", "key 'name': expected text in quotes"),
        ("table = { a = 1979-05-27 }", "another value, found 1979-05-27"),
        ("names = [{ a = 1979-05-27 }]", "another value, found 1979-05-27"),
        ("names = [{ a = 1 }]", "key 'names': expected text, found the table { a = 1 }"),
        ("plan = 3", "unknown key 'plan'"),
        ("origin = {}", "unknown table [origin]"),
        ("count = 9223372036854775808", "expected a number of at most 64 bits, found"),
        ("[[inner]]", "key 'inner': expected a table, found the list [{}]"),
        ("naem = 1", "unknown key 'naem'; did you mean 'name'?"),
        ("[inner]\ndetph = 1", "unknown key 'detph' in [inner]; did you mean 'depth'?"),
        ("depth = 1", "unknown key 'depth'; it belongs to [inner]"),
        ("[iner]", "unknown table [iner]; did you mean [inner]?"),
        ("[inner]\nzzz = 1", "unknown key 'zzz' in [inner]; known keys: depth"),
    ],
)
def test_wrong_values(line: str, message: str) -> None:
    found = problems("\n\n" + line, Every)
    expected_line = 3 + line.count("\n")
    assert found[0].startswith(f"line {expected_line}: ")
    assert message in found[0]


def test_all_mistakes_come_at_once_in_the_order_of_the_text() -> None:
    text = """[run]
steps = 0
setps = 3
folder = 1
[every]
names = ["a", 1]
[plans]
[axes]
shard = 0
replicate = 0
contxt = 2
"""
    assert [problem.split(": ")[0] for problem in problems(text)] == [
        "line 2",
        "line 3",
        "line 4",
        "line 6",
        "line 7",
        "line 9",
        "line 10",
        "line 11",
    ]


def test_the_source_names_the_text() -> None:
    with pytest.raises(PlanError, match=r"^train\.toml: line 2: unknown key 'sede' in \[train\]"):
        read("[train]\nsede = 1", Whole, source="train.toml")


def test_rules_between_keys_have_a_line_and_wait_for_their_keys() -> None:
    assert problems("[run]\nsteps = 3\nwarmup = 5") == [
        "line 3: warmup = 5 is longer than the run of 3 steps"
    ]
    assert len(problems("[run]\nsteps = 0\nwarmup = 50")) == 1
    assert len(problems("[run]\nsetps = 100\nwarmup = 50")) == 2


def test_keys_without_a_default_are_asked_for() -> None:
    assert problems("", Needed) == [
        "missing key 'name'",
        "missing key 'inner'",
    ]
    assert problems('name = "a"\n[inner]\ndepth = "x"', Needed) == [
        "line 3: key 'depth' in [inner]: expected a whole number, found the text \"x\""
    ]
    made = Needed(name="a", inner=Inner())
    assert read(dump(made), Needed) == made


def test_tables_of_a_plan_stand_beside_others() -> None:
    whole = read("[axes]\nshard = 2\n[train]\nseed = 3\n[run]\nsteps = 4", Whole, source="t")
    assert whole.plan.axes.mapping() == {"shard": 2}
    assert (whole.plan.train.seed, whole.run.steps) == (3, 4)
    assert whole.origin.source == whole.plan.origin.source == "t"
    assert read(dump(whole), Whole) == whole
    assert read(dump(whole, every_key=True), Whole) == whole
    assert dump(whole) == "[axes]\nshard = 2\n\n[train]\nseed = 3\n\n[run]\nsteps = 4\n"
    assert dump(Whole()) == ""
    with pytest.raises(PlanError, match=r"^t: line 1: axes multiply to 2"):
        whole.plan.check(8)


def test_overrides_win_and_are_typed_like_the_text() -> None:
    text = "[run]\nsteps = 4\n[axes]\npipeline = 2\nshard = 2"
    whole = read(
        text,
        Whole,
        overrides=[
            "run.steps=20",
            "run.folder=some/where",
            "axes.pipeline = 4",
            "axes.tensor=2",
            'every.names=["a", "b"]',
            "every.limit=none",
            "every.name=123",
            "every.mode=never",
            "train.clip_norm=1e-1",
            'every.either."layers.*"=colwise',
            'every.path="quoted"',
        ],
    )
    assert (whole.run.steps, whole.run.folder) == (20, "some/where")
    assert whole.plan.axes.mapping() == {"pipeline": 4, "shard": 2, "tensor": 2}
    assert (whole.every.names, whole.every.limit) == (("a", "b"), None)
    assert (whole.every.name, whole.every.mode) == ("123", "never")
    assert whole.every.either == {"layers.*": "colwise"}
    assert (whole.every.path, whole.plan.train.clip_norm) == (Path("quoted"), 0.1)
    assert read("", Whole, overrides=["train.clip_norm=2", "train.clip_norm=None"]) == Whole()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.setps=3", "unknown key 'setps' in [run]; did you mean 'steps'?"),
        ("run.steps=three", 'expected a whole number, found the text "three"'),
        ("run.steps=none", 'expected a whole number, found the text "none"'),
        ("run.steps", "expected key=value, as in train.seed=3"),
        ("=3", "expected key=value, as in train.seed=3"),
        ("run.folder.deep=3", "run.folder is a value, not a table"),
        ("rnu.steps=3", "unknown table [rnu]; did you mean [run]?"),
        ("run=3", "key 'run': expected a table, found 3"),
        ("axes.shrd=3", "unknown axis 'shrd' in [axes]; did you mean 'shard'?"),
        ("run.steps=1\nx=2", 'expected a whole number, found the text "1\\u000ax=2"'),
    ],
)
def test_wrong_overrides_are_quoted(override: str, message: str) -> None:
    found = problems('[run]\nfolder = "x"', overrides=(override,))
    quoted = override.replace("\n", "\\n")  # a problem stays on one line
    assert found == [f"override '{quoted}': {found[0].split(': ', 1)[1]}"]
    assert message in found[0]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[run]\nsteps = 5\n", encoding="utf-8")
    assert read_file(path, Whole, overrides=["run.warmup=2"]).run == Run(steps=5, warmup=2)
    with pytest.raises(PlanError, match=r"nope\.toml: .*cannot be read: No such file"):
        read_file(tmp_path / "nope.toml", Whole)
    path.write_bytes(b"[run]\nfolder = '\xff'\n")
    with pytest.raises(PlanError, match=r"c\.toml: line 2: expected text in UTF-8"):
        read_file(path, Whole)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
whole = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
everything = st.builds(
    Every,
    flag=st.booleans(),
    count=st.integers(1, 2**63 - 1),
    ratio=finite,
    name=texts,
    path=texts.map(Path),
    color=st.sampled_from(Color),
    mode=st.sampled_from(["auto", "never", 3]),
    limit=st.none() | st.floats(0, 1e300, exclude_min=True),
    names=st.lists(texts).map(tuple),
    betas=st.tuples(finite, finite),
    table=st.dictionaries(texts, whole),
    either=st.just("all") | st.lists(texts).map(tuple) | st.dictionaries(texts, texts),
    inner=st.builds(Inner, depth=whole),
)


@quick
@given(everything)
def test_round_trips_are_exact(every: Every) -> None:
    for every_key in (False, True):
        back = read(dump(every, every_key=every_key), Every)
        assert back == every
        assert list(back.table) == list(every.table)
    tree = plain(every)
    assert isinstance(tree, dict)
    assert read_tree(tree, Every) == every
    assert review(every, Origin()) == []


@quick
@given(st.text(max_size=40), st.lists(st.text(max_size=12), max_size=2))
def test_any_text_is_read_or_refused(text: str, overrides: list[str]) -> None:
    with contextlib.suppress(PlanError):
        read(text, Whole, overrides=overrides)


def test_what_toml_cannot_hold_is_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Limited:
        limit: float | None = 1.0

    with pytest.raises(ValueError, match="limit is None where the default is"):
        dump(Limited(limit=None))


def test_values_built_in_code_are_reviewed_by_the_same_rules() -> None:
    wrong = dataclasses.replace(Every(), count=0, mode="x")
    assert [problem.key for problem in review(wrong, Origin())] == [("count",), ("mode",)]


def test_nearest() -> None:
    assert nearest("Microbatchs", ["microbatches", "schedule"]) == "microbatches"
    assert nearest("zzz", ["microbatches"]) is None
    assert nearest("x", []) is None
