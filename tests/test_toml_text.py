"""Lines of keys, faults of syntax all at once, and text from trees."""

from __future__ import annotations

import tomllib
from textwrap import dedent

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.internals.toml_text import Key, dotted, literal, parse, parse_key, write

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
    document = parse(LAYOUTS)
    assert document.tree == tomllib.loads(LAYOUTS)
    assert document.faults == ()
    where = {dotted(key): line for key, line in document.lines.items()}
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
    document = parse("\ufeff[a]\r\nx = 1\r\n\r\ny = [\r\n1]\r\n")
    assert document.tree == {"a": {"x": 1, "y": [1]}}
    assert document.lines == {("a",): 1, ("a", "x"): 2, ("a", "y"): 4}


def faults(text: str) -> list[tuple[int, str]]:
    return [(fault.line, fault.message) for fault in parse(dedent(text)).faults]


def test_all_faults_are_found_and_the_rest_is_read() -> None:
    text = dedent("""\
        [train]
        seed = 1
        seed = 2
        clip_norm = = 1
        schedule = gpipe
        [axes]
        shard = 2
        [train]
        compile = true
        axes
        """)
    document = parse(text)
    assert [fault.line for fault in document.faults] == [3, 4, 5, 8, 10]
    messages = [fault.message for fault in document.faults]
    assert messages[0] == "key 'train.seed' is given twice, first on line 2"
    assert messages[2] == (
        'not valid TOML: invalid value in `schedule = gpipe`; text needs quotes, as in key = "text"'
    )
    assert messages[3] == "table [train] is given twice, first on line 1"
    assert document.tree == {"train": {"seed": 1, "compile": True}, "axes": {"shard": 2}}


def test_a_bracket_that_is_not_closed_does_not_hide_what_follows() -> None:
    document = parse('[a]\nx = [1,\n  2\n[b]\ny = 1\nz = "never closed\n')
    assert [fault.line for fault in document.faults] == [3, 6]
    assert "is not closed" in document.faults[0].message
    assert document.tree == {"a": {}, "b": {"y": 1}}


def test_a_fault_inside_a_list_names_its_own_line() -> None:
    assert faults("x = [\n  1,\n  oops,\n]\ny = 2\n") == [
        (3, 'not valid TOML: invalid value in `oops,`; text needs quotes, as in key = "text"')
    ]


def test_tables_and_values_of_one_name() -> None:
    assert faults("a = 1\n[a]\nb = 2\n") == [
        (2, "table [a] is given twice, first on line 1"),
        (3, "'a.b' is given both as a table and as a value"),
    ]
    assert faults("[a]\nb = 1\n[a.b.c]\n") == [
        (3, "'a.b.c' is given both as a table and as a value")
    ]


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a." * 3000 + "b = 1", "x = " + "9" * 5000])
def test_extreme_input_is_a_fault_or_a_value(text: str) -> None:
    document = parse(text)
    assert document.faults or document.tree


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
def test_any_text_is_read_or_has_faults(text: str) -> None:
    document = parse(text)
    normal = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        expected = tomllib.loads(normal)
    except (ValueError, RecursionError):
        assert document.faults
    else:
        assert document.faults == ()
        assert document.tree == expected
        assert set(document.lines) == set(paths(expected))
    last = normal.count("\n") + 1
    assert all(1 <= line <= last for line in [*document.lines.values()])
    assert all(1 <= fault.line <= last and fault.message for fault in document.faults)


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
    document = parse(text)
    assert document.tree == tree
    assert document.faults == ()
    assert list(document.lines) == [key for key in document.lines if key]
    for key, line in document.lines.items():
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
