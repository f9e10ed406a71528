"""The results of short runs are those recorded in ``table.json``; ``record.py`` says how to record anew."""

from __future__ import annotations

import pytest

from tests.hashes.record import cases, differences, portable, read_table, surroundings

SLOW = [name for name in cases() if name.startswith("flt-")]
"""UMAP is compiled for half a minute."""
QUICK = [name for name in cases() if name not in SLOW]


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    """The recorded hashes; skipped where they were recorded with other libraries, or for another machine."""
    recorded = read_table()
    here = surroundings()
    other = [
        f"{key} {value} (here {here[key]})"
        for key, value in recorded["surroundings"].items()
        if here.get(key) != value
    ]
    if other:
        pytest.skip(f"the hashes in table.json were recorded with {', '.join(other)}")
    return dict(recorded["hashes"])


@pytest.mark.timeout(1200)  # a machine may be busy
@pytest.mark.parametrize("names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_results_are_the_recorded_ones(names: list[str], table: dict[str, str]) -> None:
    changed = differences(portable(names), table)
    assert not changed, (
        f"other models than recorded: {changed}; if that is meant, say why in the commit message and run "
        "python tests/hashes/record.py " + " ".join(map(repr, changed))
    )


def test_a_change_of_a_setting_is_seen(table: dict[str, str]) -> None:
    name = "digits/fedavg"
    found = {name: table[name], "digits/solo": "0" * 64, "a new preset": "1" * 64}
    assert differences(found, table) == ["digits/solo", "a new preset"]


def test_the_table_has_every_run_and_no_other(table: dict[str, str]) -> None:
    assert set(table) == set(cases())
