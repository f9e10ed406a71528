import numpy as np
import pytest

from experiments.cfl.figure3 import draw_figure, gradients, guarantee, markdown, simulate, summary


def test_gradients_are_what_the_paper_assumes():
    noisy, exact = gradients(4, 0.7, 100, 0, 3), gradients(4, 0.0, 100, 0, 3)
    assert np.abs(exact.sum(axis=0)).max() < 1e-12  # stationary
    assert (exact[:4] == exact[4:8]).all()  # client i is of group i mod k
    relative = np.linalg.norm(noisy - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert relative == pytest.approx(np.full(12, 0.7))  # Eq. 16


@pytest.mark.parametrize("k", [2, 3, 5, 12])
def test_the_guarantee_is_where_the_bounds_of_theorem_1_meet(k):
    def gap(gamma):
        h, angle = 1 - 2 * gamma**2, np.pi / (k - 1)  # Eq. 20 with equal gammas
        if h < np.cos(angle):
            return h - 1
        return h - (np.cos(angle) * h + np.sin(angle) * np.sqrt(1 - h**2))  # Eq. 21 - Eq. 19

    assert gap(guarantee(k) - 1e-4) > 0 > gap(guarantee(k) + 1e-4)


def test_bipartitions_are_correct_for_many_groups_and_much_noise():
    """Eq. 30, 31: P(correct) about 1 even for k > 10 and gamma > 1."""
    table = simulate([12], [1.1], draws=20)
    assert table["correct"].tolist() == [1.0]
    assert table["positive_gap"].iloc[0] >= 0.9


def test_noise_spoils_them_in_the_end_and_below_the_guarantee_it_never_does():
    table = simulate([2, 4], [0.9 * guarantee(4), 0.9 * guarantee(2), 12.0], draws=20)
    assert table.set_index(["k", "gamma"])["correct"].loc[2, 0.9 * guarantee(2)] == 1
    assert (table["correct"][table["gamma"] < guarantee(4)] == 1).all()
    assert (table["positive_gap"][table["gamma"] < guarantee(4)] == 1).all()
    assert (table["correct"][table["gamma"] == 12] < 0.7).all()
    assert (table["positive_gap"] <= table["correct"]).all()  # Corollary 1


def test_table_and_figure(tmp_path):
    table = simulate([3, 2], [0.5, 12.0], draws=3)
    assert simulate([2], [12.0], draws=3).equals(
        table[(table["k"] == 2) & (table["gamma"] == 12)].reset_index(drop=True)
    )
    rows = summary(table)
    assert rows["k"].tolist() == [2, 3]
    assert rows["correct"].tolist() == [0.5, 0.5]
    assert markdown(rows).splitlines()[2].startswith("| 2 | 0.71 | 0.5 |")
    draw_figure(table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
