"""The communication ledger."""

import pandas as pd
import pytest

from rayfl.evaluation.ledger import COLUMNS, Ledger, Transfer

LEDGER = Ledger().add(
    Transfer(-1, "client_lps", "up", "signature", 30),
    Transfer(0, "client_lps", "down", "model", 100),
    Transfer(0, "client_lps", "up", "model", 80),
    Transfer(0, "client_lps", "up", "model", 20),
    Transfer(0, "lps_gps", "up", "model", 7),
)


def test_totals_by_hand():
    assert LEDGER.total() == 237
    assert LEDGER.total(direction="up") == 137
    assert LEDGER.total(direction="up", round=0) == 107
    assert LEDGER.total(tier="lps_gps") == 7
    assert LEDGER.total(kind="signature", round=-1) == 30
    assert LEDGER.total(round=1) == 0


def test_the_table_sums_equal_rows_and_sorts():
    frame = LEDGER.to_frame()
    assert list(frame.columns) == list(COLUMNS)
    assert frame.to_numpy().tolist() == [
        [-1, "client_lps", "up", "signature", 30],
        [0, "client_lps", "down", "model", 100],
        [0, "client_lps", "up", "model", 100],
        [0, "lps_gps", "up", "model", 7],
    ]


def test_large_numbers_stay_exact():
    huge = Ledger().add(*[Transfer(0, "client_lps", "up", "model", 2**61 + 1)] * 3)
    assert huge.total() == huge.to_frame()["bytes"].iloc[0] == 3 * 2**61 + 3


def test_adding_leaves_the_old_ledger_alone():
    assert LEDGER.add(Transfer(1, "lps_gps", "down", "model", 1)).total() == 238
    assert LEDGER.total() == 237


def test_adding_reads_no_earlier_transfers_but_the_last(monkeypatch):
    """Appended, not copied; a round that is done again grows from the ledger before it."""
    monkeypatch.setattr(Ledger, "transfers", property(lambda self: pytest.fail("all were copied")))
    ledger, seen = Ledger(), []
    for number in range(100):
        ledger = ledger.add(Transfer(number, "client_lps", "up", "model", 1))
        seen.append(ledger.total())
    assert seen == list(range(1, 101))


def test_ledgers_that_grow_from_one_another_differ():
    old = Ledger().add(Transfer(0, "client_lps", "up", "model", 1))
    one = old.add(Transfer(1, "client_lps", "up", "model", 10))
    other = old.add(Transfer(1, "client_lps", "up", "model", 100))
    longest = one.add(Transfer(2, "client_lps", "up", "model", 1000))
    assert [each.total() for each in (old, one, other, longest)] == [1, 11, 101, 1011]
    assert [each.total(round=1) for each in (old, one, other, longest)] == [0, 10, 100, 10]
    assert [len(each.rows()) for each in (old, one, other, longest)] == [1, 2, 2, 3]
    assert [len(each.rows(upto=1)) for each in (old, longest)] == [1, 2]
    assert old == Ledger(old.transfers) != one
    assert repr(old) == f"Ledger({old.transfers!r})"


def test_rounds_in_any_order_are_found():
    rounds = [3, -1, 3, 0, 7, 3, 0]
    ledger = Ledger()
    for at, number in enumerate(rounds):
        ledger = ledger.add(Transfer(number, "client_lps", "up", "model", 10**at))
    assert ledger == Ledger().add(*[t for r in (-1, 0, 3, 7) for t in ledger.transfers if t.round == r])
    assert [ledger.total(round=r) for r in (-2, -1, 0, 1, 3, 7, 8)] == [
        0,
        10,
        1_001_000,
        0,
        100_101,
        10_000,
        0,
    ]
    assert ledger.total() == 1_111_111


def test_round_trip_through_csv(tmp_path):
    LEDGER.to_frame().to_csv(tmp_path / "communication.csv", index=False)
    again = Ledger.from_frame(pd.read_csv(tmp_path / "communication.csv"))
    pd.testing.assert_frame_equal(again.to_frame(), LEDGER.to_frame())


def test_an_empty_ledger_has_the_columns():
    assert list(Ledger().to_frame().columns) == list(COLUMNS)
    assert len(Ledger().to_frame()) == 0
    assert Ledger().total() == 0


@pytest.mark.parametrize(
    "wrong", [("client_gps", "up", 1), ("lps_gps", "sideways", 1), ("lps_gps", "up", -1)]
)
def test_nonsense_is_refused(wrong):
    tier, direction, count = wrong
    with pytest.raises(ValueError, match=r"bytes|no such"):
        Transfer(0, tier, direction, "model", count)
