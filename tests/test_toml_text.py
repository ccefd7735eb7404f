"""Lines of keys, the first fault of syntax, and text from trees."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.plan import Plan
from support.internals.settings import Key
from support.internals.toml_source import dotted, lines_of, literal, parse_key, read, write

quick = settings(max_examples=150, deadline=None)

LAYOUTS = '''\
# a comment with [brackets] and = signs
top = 1

[axes]
pipeline = 2   # [not] = "a header"
"quoted key" = 3
'single.quoted' = 4
dotted.inner."x.y" = 5

[ shard . deep ]
units = [
  "layers.*",   # ] a bracket in a comment
  "a]b",
]
text = """
[fake]
fake = 1
""\\" not yet
"""
after = 1
raw = \'\'\'
fake = 2 \'\' \'\'\'
inline = { a = 1, b = { c = "}" } }
last = "# no comment"
[[items]]
name = "first"
[[items]]
name = "second"
'''


def test_every_form_of_key_has_its_line() -> None:
    lines = lines_of(LAYOUTS, tomllib.loads(LAYOUTS))
    where = {dotted(key): line for key, line in lines.items()}
    assert where == {
        "top": 2,
        "axes": 4,
        "axes.pipeline": 5,
        'axes."quoted key"': 6,
        'axes."single.quoted"': 7,
        "axes.dotted": 8,
        "axes.dotted.inner": 8,
        'axes.dotted.inner."x.y"': 8,
        "shard": 10,
        "shard.deep": 10,
        "shard.deep.units": 11,
        "shard.deep.text": 15,
        "shard.deep.after": 20,
        "shard.deep.raw": 21,
        "shard.deep.inline": 23,
        "shard.deep.inline.a": 23,
        "shard.deep.inline.b": 23,
        "shard.deep.inline.b.c": 23,
        "shard.deep.last": 24,
        "items": 25,
        "items.name": 26,
    }


def test_line_ends_and_marks_of_other_systems() -> None:
    plan = read("\ufeff[axes]\r\nshard = 2\r\n\r\ntensor = 3\r\n", Plan)
    assert plan.origin.lines == {("axes",): 1, ("axes", "shard"): 2, ("axes", "tensor"): 4}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "[train]\nseed = 1\nschedule = gpipe\n",
            "line 3: not valid TOML: invalid value in `schedule = gpipe`; text needs quotes, as in "
            'key = "text"',
        ),
        ("x = [\n  1,\n  oops,\n]\ny = 2\n", "line 3: not valid TOML: invalid value in `oops,`"),
        (
            "[train]\nseed = 1\nseed = 2\n",
            "line 3: not valid TOML: cannot overwrite a value in `seed = 2`; it is given twice",
        ),
        ("[a]\n[b]\n[a]\n", "line 3: not valid TOML: cannot declare ('a',) twice in `[a]`"),
        ("a = 1\n[a]\nb = 2\n", "line 2: not valid TOML: cannot overwrite a value in `[a]`"),
        ("[a]\nb = [1,\n", "; a bracket or a quote is not closed, or a value is missing"),
    ],
)
def test_the_first_fault_is_told_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(text, Plan)
    (problem,) = caught.value.problems
    assert fault in problem


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a." * 3000 + "b = 1", "x = " + "9" * 5000])
def test_extreme_input_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        read(text, Plan)


fragments = st.lists(
    st.sampled_from(
        [
            *"[]{}=\"'#\n\n\n\\,. ab1",
            '"""',
            "'''",
            "x = 1\n",
            "[t]\n",
            "[[u]]\n",
            "k = [",
            "\r\n",
            "\t",
        ]
    ),
    max_size=40,
).map("".join)


@quick
@given(st.text(max_size=60) | fragments)
@example('x = """')
@example("x = '''\n'''''\n")
@example("[a]\n[a.b]\n[a]")
def test_any_text_has_lines_or_a_fault(text: str) -> None:
    normal = text.removeprefix("\ufeff").replace("\r\n", "\n")
    last = normal.count("\n") + 1
    try:
        expected = tomllib.loads(normal)
    except (ValueError, RecursionError):
        with pytest.raises(PlanError) as caught:
            read(text, Plan)
        (fault,) = caught.value.problems
        assert 1 <= int(fault.removeprefix("line ").partition(":")[0]) <= last
    else:
        lines = lines_of(normal, expected)
        assert set(lines) == set(paths(expected))
        assert all(1 <= line <= last for line in lines.values())


def paths(node: object, key: Key = ()) -> list[Key]:
    """All keys of a tree; items of arrays of tables count as one table."""
    if isinstance(node, list):
        return [path for item in node if isinstance(item, dict) for path in paths(item, key)]
    if not isinstance(node, dict):
        return []
    return [p for k, v in node.items() for p in ([*key_of(key, k), *paths(v, (*key, k))])]


def key_of(key: Key, part: str) -> list[Key]:
    return [(*key, part)]


scalars = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = scalars | st.lists(scalars, max_size=3)
trees = st.dictionaries(
    keys, st.recursive(values, lambda inner: st.dictionaries(keys, inner, max_size=3)), max_size=4
)


@quick
@given(trees)
def test_what_is_written_is_read_back(tree: dict[str, object]) -> None:
    text = write(tree)
    assert tomllib.loads(text) == tree
    for key, line in lines_of(text, tree).items():
        assert dotted(key[-1:]) in text.split("\n")[line - 1]


@quick
@given(st.lists(keys, min_size=1, max_size=4).map(tuple))
def test_keys_are_written_and_read_back(key: Key) -> None:
    assert parse_key(dotted(key)) == key


@pytest.mark.parametrize("text", ["", "a b", "a =", "a.", "[a]", "a\nb", "# a"])
def test_what_is_no_key(text: str) -> None:
    assert parse_key(text) is None


def test_literals() -> None:
    assert literal({"a": [1, 2.5, "x\n"], "b c": {}}) == '{ a = [1, 2.5, "x\\u000a"], "b c" = {} }'
    assert write({"t": {"u": {"x": True}}, "v": 1}) == "v = 1\n\n[t.u]\nx = true\n"
