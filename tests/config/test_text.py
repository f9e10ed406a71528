"""YAML as people write it, and values that are written for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.config.text import as_value, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert parse(as_value(value)) == value


@pytest.mark.parametrize("text", ["📁/x.npz", "\\📁", "\\\\ud83d\\udcc1", "a\u2028b\x7f", "📁📁"])
def test_text_beyond_the_basic_plane(text: str) -> None:
    assert parse(as_value([text])) == [text]
    assert "\n" not in as_value(text)
