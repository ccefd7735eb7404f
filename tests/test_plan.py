"""Plans in TOML and JSON, what a check finds, and patterns of names."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.plan import (
    BucketPlan,
    ExpertPlan,
    PipelinePlan,
    Plan,
    ScheduleName,
    ShardPlan,
    TensorPlan,
    TrainPlan,
    match_names,
    module_names,
)
from support.internals.axes import Axes
from support.internals.precision import FloatName, Precision
from support.internals.recipes import TrainConfig
from support.internals.settings import keys_of
from support.internals.toml_source import read

quick = settings(max_examples=60, deadline=None)

SPECIFIED = """
[axes]                 # ordered, open; product = number of ranks
pipeline = 2
replicate = 1
shard = 2
tensor = 2

[pipeline]
schedule = "1f1b"      # or gpipe, interleaved1f1b, loopedbfs, zb1p, zb2p, zbv, vhalf, ...
microbatches = 8
split = "auto"         # auto | parameters | ["layers.4", "layers.8"]

[shard]
units = ["layers.*"]   # patterns of module names, or "transformer-blocks"
reshard_after_forward = true

[tensor]
rules = "llama"        # a named rule set, or a table  "layers.*.attention.wq" = "colwise"

[precision]
parameters = "float32"
compute = "bfloat16"
reduce = "float32"

[train]
accumulate = 1
clip_norm = 1.0
recompute = ["layers.*"]
compile = false
batch_norm = "local"   # local | sync; asked for only when the model has BatchNorm
seed = 0
"""

MODEL = {
    "embedding.weight": (256, 64),
    **{f"layers.{i}.attention.wq.weight": (64, 64) for i in range(4)},
    **{f"layers.{i}.norm.weight": (64,) for i in range(4)},
    "norm.weight": (64,),
}


def problems(plan: Plan, world_size: int = 1, model: dict | None = None) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan.check(world_size, model)
    return list(caught.value.problems)


def test_the_specified_plan_is_read_and_passes() -> None:
    plan = Plan.from_toml(SPECIFIED)
    assert plan == Plan(
        axes=Axes.of({"pipeline": 2, "replicate": 1, "shard": 2, "tensor": 2}),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=8, split="auto"),
        shard=ShardPlan(units=("layers.*",), reshard_after_forward=True),
        tensor=TensorPlan(rules="llama"),
        precision=Precision(parameters="float32", compute="bfloat16", reduce="float32"),
        train=TrainPlan(clip_norm=1.0, recompute=("layers.*",), batch_norm="local"),
    )
    plan.check(8, MODEL)
    assert plan.data_size == 2


def test_the_default_plan_is_one_process() -> None:
    Plan().check(1)
    Plan().check(1, MODEL)
    assert Plan().axes.world_size == Plan().data_size == 1
    assert Plan.from_toml("") == Plan()
    assert Plan().to_toml() == ""
    assert Plan().buckets == BucketPlan(cap_mb=25.0)


def test_the_order_of_axes_is_kept() -> None:
    text = "[axes]\nshard = 2\npipeline = 1\nreplicate = 2\n"
    plan = Plan.from_toml(text)
    assert plan.axes.names == ("shard", "pipeline", "replicate")
    assert Plan.from_json(plan.to_json()).axes.names == plan.axes.names
    assert plan.to_toml() == text


def test_a_table_of_rules() -> None:
    text = '[axes]\ntensor = 2\n\n[tensor.rules]\n"layers.*.attention.wq" = "colwise"\n'
    plan = Plan.from_toml(text)
    assert plan.tensor.rules == {"layers.*.attention.wq": "colwise"}
    assert plan.to_toml() == text
    inline = '[axes]\ntensor = 2\n[tensor]\nrules = { "layers.*.attention.wq" = "colwise" }'
    assert Plan.from_toml(inline) == plan
    plan.check(2, MODEL)
    assert hash(plan) == hash(Plan.from_toml(inline))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
lists = st.lists(texts, max_size=3).map(tuple)
names = st.sampled_from(get_args(FloatName))
positive = st.floats(0, 1e12, exclude_min=True)
plans = st.builds(
    Plan,
    axes=st.dictionaries(
        st.sampled_from(["pipeline", "replicate", "shard", "tensor"]), st.integers(1, 9)
    ).map(Axes.of),
    pipeline=st.builds(
        PipelinePlan,
        schedule=st.sampled_from(get_args(ScheduleName)),
        order=texts,
        microbatches=st.integers(1, 64),
        split=st.sampled_from(["auto", "parameters"]) | lists,
    ),
    shard=st.builds(
        ShardPlan, units=st.just("transformer-blocks") | lists, reshard_after_forward=st.booleans()
    ),
    expert=st.builds(
        ExpertPlan,
        modules=st.just("auto") | lists,
        balance=st.sampled_from([None, "global", "rank", "none"]),
        auxiliary=st.just(0.0) | positive,
        z_loss=st.just(0.0) | positive,
        bias_rate=st.none() | positive,
        exchange=st.sampled_from(["tokens", "pairs"]),
    ),
    tensor=st.builds(
        TensorPlan, rules=st.none() | texts | st.dictionaries(texts, texts, max_size=3)
    ),
    precision=st.builds(
        Precision,
        parameters=names,
        compute=st.none() | names,
        reduce=st.none() | names,
        optimizer=st.none() | names,
    ),
    train=st.builds(
        TrainPlan,
        accumulate=st.integers(1, 2**40),
        clip_norm=st.none() | positive,
        recompute=lists,
        compile=st.booleans(),
        batch_norm=st.sampled_from([None, "local", "sync"]),
        seed=st.integers(0, 2**63 - 1),
    ),
    buckets=st.builds(BucketPlan, cap_mb=positive),
)


@quick
@given(plans)
def test_round_trips_are_exact(plan: Plan) -> None:
    for back in (
        Plan.from_toml(plan.to_toml()),
        Plan.from_toml(plan.to_toml(every_key=True)),
        Plan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert back == plan
        assert back.axes.names == plan.axes.names
        assert hash(back) == hash(plan)
        assert back.to_json() == plan.to_json()


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().train = TrainPlan()  # pyrefly: ignore


def test_json_has_every_key_and_refuses_other_documents() -> None:
    tree = json.loads(Plan().to_json())
    tables = ["pipeline", "shard", "context", "expert", "tensor", "precision", "train", "buckets"]
    assert list(tree) == ["axes", *tables]
    assert tree["train"]["clip_norm"] is None
    with pytest.raises(PlanError, match="^manifest: not valid JSON"):
        Plan.from_json("{", source="manifest")
    with pytest.raises(PlanError, match="expected a JSON object, found list"):
        Plan.from_json("[]")
    with pytest.raises(PlanError, match="^manifest: unknown key 'sede' in \\[train\\]"):
        Plan.from_json('{"train": {"sede": 1}}', source="manifest")
    with pytest.raises(PlanError, match="'seed' is given twice"):
        Plan.from_json('{"train": {"seed": 1, "seed": 2}}')


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dp_replicate = 2", {"replicate": 2}),
        ("dp_shard = 4", {"shard": 4}),
        ("cp = 2", {"context": 2}),
        ("tp = 2", {"tensor": 2}),
        ("pp = 2", {"pipeline": 2}),
        ("dp_shard = 4, ep = 2", {"shard": 2, "expert": 2}),
        ("tp = 2, cp = 3, dp_shard = 8, ep = 4, pp = 5, dp_replicate = 7", None),
    ],
)
def test_names_of_others_are_translated(theirs: str, ours: dict[str, int] | None) -> None:
    plan = Plan.from_toml("[axes]\n" + theirs.replace(", ", "\n"))
    every = {"pipeline": 5, "replicate": 7, "shard": 2, "context": 3, "expert": 4, "tensor": 2}
    assert [*plan.axes.mapping().items()] == [*(ours or every).items()]
    given = dict(word.split(" = ") for word in theirs.split(", "))
    assert Plan(axes=Axes.of({name: int(size) for name, size in given.items()})) == plan
    assert Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        ("dp_shard = 3\nep = 2", "line 3: dp_shard = 3 is not divisible by ep = 2: ranks of ep"),
        ("ep = 2", "dp_shard = 1 is not divisible by ep = 2"),
        ("dp_shard = 0", "expected a size of at least 1 for axis 'dp_shard', found 0"),
        ("tp = -1", "key 'tp' in .axes.: expected a number of at least 1, found -1"),
        (
            "dp_shard = 2\nshard = 2\ntp = 2",
            "line 2: .axes. mixes dp_shard, tp with other names; use one family: dp_shard is shard "
            "x expert, tp is tensor$",
        ),
    ],
)
def test_names_of_others_that_cannot_be_translated(axes: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Plan.from_toml(f"[axes]\n{axes}")


def test_shards_take_the_ranks_that_are_left() -> None:
    plan = Plan.from_toml("[axes]\ndp_shard = -1\nep = 2\ntp = 2")
    assert plan.over(16).axes.mapping() == {"shard": 4, "expert": 2, "tensor": 2}
    assert plan.over(4).axes.size("shard") == 1
    assert plan.over(16).over(8) == plan.over(16)
    with pytest.raises(PlanError, match="dp_shard = -1: other axes have 4 ranks, which do not div"):
        plan.over(6)


def test_all_mistakes_of_a_text_come_at_once() -> None:
    text = """[axes]
replicate = 0
context = 2
shrad = 2
banana = 2
[pipeline]
schedule = "1f1"
microbatchs = 8
microbatches = 0
[train]
accumulate = 0
clip_norm = 0.0
[precision]
compute = "half"
"""
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text, source="plan.toml")
    assert caught.value.problems == (
        "line 2: key 'replicate' in [axes]: expected a number of at least 1, found 0",
        "line 4: unknown axis 'shrad' in [axes]; did you mean 'shard'?",
        "line 5: unknown axis 'banana' in [axes]; known axes: pipeline, replicate, shard, "
        "context, expert, tensor",
        'line 7: key \'schedule\' in [pipeline]: expected "gpipe", "1f1b", "interleaved1f1b", '
        '"loopedbfs", "zb1p", "zb2p", "zbv", "vhalf", "vmin" or "dualpipev", found the text "1f1"; '
        'did you mean "1f1b"?',
        "line 8: unknown key 'microbatchs' in [pipeline]; did you mean 'microbatches'?",
        "line 9: key 'microbatches' in [pipeline]: expected a number of at least 1, found 0",
        "line 11: key 'accumulate' in [train]: expected a number of at least 1, found 0",
        "line 12: key 'clip_norm' in [train]: expected a number above 0, found 0.0",
        'line 14: key \'compute\' in [precision]: expected "float16", "bfloat16", "float32" or '
        '"float64", found the text "half"',
    )
    assert str(caught.value).startswith("plan.toml: line 2: ")


def test_settings_of_experts_are_typed_and_bounded() -> None:
    text = """
[expert]
modules = ["layers.*.mlp.experts"]
balance = "globl"
auxiliary = -1.0
z_loss = true
bias_rate = 0.0
exchange = "token"
"""
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert caught.value.problems == (
        'line 4: key \'balance\' in [expert]: expected "global", "rank" or "none", found the text '
        '"globl"; did you mean "global"?',
        "line 5: key 'auxiliary' in [expert]: expected a number of at least 0, found -1.0",
        "line 6: key 'z_loss' in [expert]: expected a number, found true",
        "line 7: key 'bias_rate' in [expert]: expected a number above 0, found 0.0",
        'line 8: key \'exchange\' in [expert]: expected "tokens" or "pairs", found the text '
        '"token"; did you mean "tokens"?',
    )


def test_contradictions_between_settings_of_experts() -> None:
    axes = Axes.of({"expert": 2})
    expert = ExpertPlan(auxiliary=0.01, modules=("layers.9",))
    found = problems(Plan(axes=axes, expert=expert), 2, MODEL)
    assert [each.partition("; ")[0] for each in found] == [
        'axis expert: [expert] balance is not set: "global" is the loss of one process, "rank" '
        'uses each rank\'s own statistics, "none" adds no auxiliary loss',
        "'layers.9' in [expert] modules matches no module",
    ]
    none = Plan(axes=axes, expert=ExpertPlan(auxiliary=0.01, balance="none"))
    assert problems(none, 2) == [
        "key 'auxiliary' in [expert] has no effect with balance = \"none\"; remove it, or set "
        'balance = "global"'
    ]
    right = ExpertPlan(auxiliary=0.01, balance="global", modules=("layers.*",))
    Plan(axes=axes, expert=right).check(2, MODEL)
    found = problems(Plan(expert=right), 1, MODEL)
    assert found
    assert all("in [expert] has no effect with expert = 1; remove it" in each for each in found)


def test_axes_whose_ranks_read_other_shares() -> None:
    every = {"pipeline": 2, "replicate": 3, "shard": 5, "context": 7, "expert": 11, "tensor": 13}
    assert Plan(axes=Axes.of(every)).data_size == 3 * 5 * 11
    summed = {axis for axis in every if Plan(axes=Axes.of({axis: 2})).is_summed}
    assert summed == {"replicate", "shard", "context", "expert"}
    # What has an effect where gradients are summed has one on these axes too.
    buckets = BucketPlan(cap_mb=1.0)
    Plan(axes=Axes.of({"expert": 2}), buckets=buckets).check(2)


NUMBERS = ("inf", "-inf", "nan", "1e400", "-1", "0", "1e308", "9223372036854775808", "true", "''")


@pytest.mark.parametrize("kind", [Plan, pytest.param(TrainConfig, marks=pytest.mark.slow)])
def test_any_number_in_any_key_is_read_or_named(kind: type) -> None:
    huge = [f"{sign}1{'0' * zeros}" for sign in ("", "-") for zeros in (30, 400, 5000)]
    shapes = itertools.cycle(
        ("{0}", "[{0}]", "{{a = {0}}}")
    )  # 16 numbers: in three keys each meets each shape
    for table, keys in keys_of(kind).items():
        for key in keys or ["anything"]:
            for number in (*NUMBERS, *huge):
                value = next(shapes).format(number)
                try:
                    read(f"[{table}]\n{key} = {value}", kind, source="run.toml")
                except PlanError as error:
                    told = str(error)
                    assert told.startswith("run.toml: line "), told
                    assert key in told or table in told or "integer string" in told, told
    with pytest.raises(PlanError, match=r"'clip_norm' in \[train\]: .* more than 64 bits, 1000"):
        Plan.from_toml(f"[train]\nclip_norm = 1{'0' * 400}")
    with pytest.raises(PlanError, match="not valid JSON: .* 5003 digits"):
        Plan.from_json(f'{{"train": {{"clip_norm": 100{"0" * 5000}}}}}')


def test_the_number_of_ranks_and_both_ways_to_mend_it() -> None:
    plan = Plan.from_toml("[axes]\nreplicate = 2\nshard = 2")
    plan.check(4)
    assert problems(plan, 8) == [
        "line 1: axes multiply to 4 (replicate = 2 x shard = 2), but there are 8 ranks; start 4 "
        "ranks, or set replicate = 4 in [axes]"
    ]
    assert problems(plan, 6) == [
        "line 1: axes multiply to 4 (replicate = 2 x shard = 2), but there are 6 ranks; start 4 "
        "ranks, or set replicate = 3 in [axes]"
    ]
    assert "or choose sizes in [axes] whose product is 7" in problems(plan, 7)[0]
    assert "but there is 1 rank; start 4 ranks" in problems(plan, 1)[0]
    assert problems(Plan(), 2) == [
        "no [axes] means 1 rank, but there are 2 ranks; start 1 rank, or set replicate = 2 in "
        "[axes]"
    ]


def test_settings_without_effect_are_named_with_their_line() -> None:
    plan = Plan.from_toml("""[axes]
replicate = 1
[pipeline]
microbatches = 8
[shard]
reshard_after_forward = false
units = "transformer-blocks"
[tensor]
rules = "llama"
[train]
batch_norm = "sync"
[buckets]
cap_mb = 1
""")
    assert problems(plan) == [
        "line 4: key 'microbatches' in [pipeline] has no effect with pipeline = 1; remove it, or "
        "give pipeline more than 1 rank in [axes]",
        "line 6: key 'reshard_after_forward' in [shard] has no effect with shard = 1; remove it, "
        "or give shard more than 1 rank in [axes]",
        "line 9: key 'rules' in [tensor] has no effect with tensor = 1; remove it, or give tensor "
        "more than 1 rank in [axes]",
        "line 11: key 'batch_norm' in [train] has no effect with pipeline = 1 and replicate = 1 "
        "and shard = 1 and expert = 1 and context = 1; remove it, or give pipeline or replicate or "
        "shard or expert or context more than 1 rank in [axes]",
        "line 13: key 'cap_mb' in [buckets] has no effect with replicate = 1 and shard = 1 and "
        "expert = 1 and context = 1; remove it, or give replicate or shard or expert or context "
        "more than 1 rank in [axes]",
    ]


def test_a_tensor_axis_without_rules() -> None:
    assert "axis tensor = 2 has nothing to cut" in problems(Plan(axes=Axes.of({"tensor": 2})), 2)[0]


def test_patterns_that_match_nothing_are_all_named() -> None:
    plan = Plan.from_toml("""[axes]
pipeline = 2
shard = 2
tensor = 2
[pipeline]
split = ["layers.2", "layers.9"]
[shard]
units = ["layer.*", "layers.*"]
[tensor.rules]
"layers.*.attention.wq" = "colwise"
"layers.*.attention.wz" = "rowwise"
[train]
recompute = ["banana"]
""")
    assert problems(plan, 8, MODEL) == [
        "line 6: 'layers.9' in [pipeline] split matches no module; did you mean 'layers.3'?",
        "line 8: 'layer.*' in [shard] units matches no module; did you mean 'layers.*'?",
        "line 11: 'layers.*.attention.wz' in [tensor] rules matches no module; did you mean "
        "'layers.*.attention.wq'?",
        "line 13: 'banana' in [train] recompute matches no module; modules: embedding, layers, "
        "layers.*, layers.*.attention, layers.*.attention.wq, layers.*.norm, norm",
    ]
    plan.check(8)


def test_modules_without_parameters_count_when_they_are_given() -> None:
    plan = Plan(axes=Axes.of({"pipeline": 2}), pipeline=PipelinePlan(split=("2",)))
    sequential = {"0.weight": (4, 4), "3.weight": (4, 4)}
    assert len(problems(plan, 2, sequential)) == 1
    plan.check(2, sequential, modules=["", "0", "1", "2", "3"])


def test_plans_built_in_code_are_checked_by_the_same_rules() -> None:
    plan = Plan(
        axes=Axes.of({"contxt": 2}),
        pipeline=PipelinePlan(microbatches=0),
        train=TrainPlan(clip_norm=-1.0),
    )
    assert [problem.split(":")[0] for problem in problems(plan, 2)] == [
        "key 'microbatches' in [pipeline]",
        "key 'clip_norm' in [train]",
        "unknown axis 'contxt' in [axes]; did you mean 'context'?",
        "key 'microbatches' in [pipeline] has no effect with pipeline = 1; remove it, or give "
        "pipeline more than 1 rank in [axes]",
    ]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"axes": {"replicate": 2}}, "write Plan(axes=Axes.of({'replicate': 2}))"),
        ({"train": {"clip_norm": 1.0}}, "write Plan(train=TrainPlan(clip_norm=1.0))"),
        ({"shard": None}, "write Plan(shard=ShardPlan(...))"),
    ],
)
def test_a_table_of_another_type_is_refused_when_the_plan_is_made(
    given: dict[str, Any], advice: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(advice)):
        Plan(**given)


def test_files_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[axes]\nreplicate = 2\n")
    plan = Plan.from_file(path, overrides=["axes.replicate=4", "train.seed=3"])
    assert (plan.axes.world_size, plan.train.seed) == (4, 3)
    with pytest.raises(PlanError, match=r"plan\.toml: line 1: axes multiply to 4"):
        plan.check(8)
    assert Plan.from_toml("", overrides=["axes.shard=2"]) == Plan(axes=Axes.of({"shard": 2}))


NAMES = [
    "",
    "layers",
    "layers.0",
    "layers.0.attention",
    "layers.0.attention.wq",
    "layers.10",
    "head",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*", ["layers.0", "layers.10"]),
        ("layers.0", ["layers.0"]),
        ("*", ["layers", "head"]),
        ("**", NAMES),
        ("", [""]),
        ("layers.**", NAMES[1:6]),
        ("**.wq", ["layers.0.attention.wq"]),
        ("**.layers", ["layers"]),
        ("layers.*.*.w*", ["layers.0.attention.wq"]),
        ("layers.1*", ["layers.10"]),
        ("l*s", ["layers"]),
        ("layers.*.**.wq", ["layers.0.attention.wq"]),
        ("layers..0", []),
        ("layer.", []),
        ("l.yers", []),
        ("[a-z]*", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert list(match_names(pattern, NAMES)) == expected


components = st.text("ab*", min_size=1, max_size=3)


@quick
@given(
    st.lists(components, max_size=4), st.lists(st.text("ab", min_size=1, max_size=3), max_size=4)
)
def test_patterns_against_a_plain_definition(pattern: list[str], name: list[str]) -> None:
    def matches(pattern: list[str], name: list[str]) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "**":
            return any(matches(pattern[1:], name[i:]) for i in range(len(name) + 1))
        return bool(name) and fits(pattern[0], name[0]) and matches(pattern[1:], name[1:])

    def fits(part: str, text: str) -> bool:
        if not part:
            return not text
        if part[0] == "*":
            return any(fits(part[1:], text[i:]) for i in range(len(text) + 1))
        return bool(text) and part[0] == text[0] and fits(part[1:], text[1:])

    joined = ".".join(name)
    assert match_names(".".join(pattern), [joined]) == ((joined,) if matches(pattern, name) else ())


def test_module_names() -> None:
    assert module_names(["a.b.weight", "a.b.bias", "a.c.d.weight", "scale"]) == (
        "",
        "a",
        "a.b",
        "a.c",
        "a.c.d",
    )
