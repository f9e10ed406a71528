"""YAML as people write it, and values that are written for it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayfl.config import text as text_module
from rayfl.config.text import as_value, dump, is_dump, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert parse(as_value(value)) == value


ANY_TEXT = st.text(st.characters(), max_size=20)  # lone surrogates too
LONG = st.text(st.sampled_from("ab \\\"'#:\n\tä€😀\u2028"), min_size=90, max_size=200)  # broken into lines
NUMBERS = st.floats(allow_nan=False) | st.integers()
LIKE_NUMBERS = st.sampled_from(["1e-3", "2:4", "1_000", "0o7", ".5e2", "yes", "~", "", "- a", "a: b", "a #b"])


@given(st.dictionaries(ANY_TEXT, ANY_TEXT | NUMBERS | LIKE_NUMBERS | st.lists(LIKE_NUMBERS), max_size=4))
def test_files_are_read_as_they_were_written(values: dict[str, Any]) -> None:
    assert parse(dump(values)) == values
    assert is_dump(dump(values), values)


@given(LONG)
def test_whoever_breaks_the_lines(long: str) -> None:
    values = {"title": long, long[:30]: [long]}
    in_python = yaml.dump(values, Dumper=text_module._PythonDumper, sort_keys=False)
    for text in (dump(values), in_python):
        assert parse(text) == values
        assert is_dump(text, values)
        assert not is_dump(f"# mine\n{text}", values)


def test_names_of_files_that_are_not_utf_8() -> None:
    assert parse(dump({"root": "runs-\udcff"})) == {"root": "runs-\udcff"}


def test_a_value_that_was_read_before_is_not_the_callers_to_change() -> None:
    for text in ("a: [1]", "a: [1]\n" + "b: 2\n# " + "x" * 300):
        parse(text)["a"].append(2)
        assert parse(text)["a"] == [1]


@pytest.mark.parametrize("text", ["📁/x.npz", "\\📁", "\\\\ud83d\\udcc1", "a\u2028b\x7f", "📁📁"])
def test_text_beyond_the_basic_plane(text: str) -> None:
    assert parse(as_value([text])) == [text]
    assert "\n" not in as_value(text)
