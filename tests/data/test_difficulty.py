"""Easy and hard clients: the class counts stay, the order is the expert's."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data import DATASETS, PARTITIONS, Partition, Samples
from rayfl.data.held_out import hold_out
from rayfl.data.own import split_numbering
from rayfl.data.partitions import _expert
from rayfl.data.partitions._expert import expert_losses
from rayfl.data.partitions.difficulty import by_rank
from rayfl.errors import DataError
from tests.conftest import RealData


def difficulty(**fields: Any) -> Partition:
    return PARTITIONS["difficulty"](**fields)


def blobs(n: int = 600, classes: int = 3, seed: int = 0) -> tuple[Samples, np.ndarray]:
    """Two-dimensional classes; and which samples lie between the classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    centres = 6 * np.array([[np.cos(a), np.sin(a)] for a in 2 * np.pi * np.arange(classes) / classes])
    hard = np.arange(n) // classes % 2 == 1  # half of each class
    x = centres[y] * np.where(hard, 0.1, 1.0)[:, None] + 0.5 * rng.standard_normal((n, 2))
    x = x.astype(np.float32)
    return Samples("blobs", x, y, x, y, classes), hard


def with_losses(folder: Path, losses: np.ndarray, **fields: Any) -> Partition:
    np.save(folder / "losses.npy", losses)
    return difficulty(losses=folder / "losses.npy", **fields)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_losses_are_those_of_all_training_samples_whichever_the_server_holds(
    seed: int, split: bool, tmp_path: Path
) -> None:
    """Which ones it holds depends on the seed; the expert does not know them."""
    samples, _ = blobs()
    losses = samples.x_train[:, 0].astype(np.float64)
    if split:
        test = np.arange(600) % 4 == 0
        left = (samples.x_train[~test], samples.y_train[~test], samples.x_train[test], samples.y_train[test])
        samples, losses = replace(Samples("blobs", *left, 3), numbering=split_numbering(test)), losses[~test]
    held = hold_out(samples, 0.2, 0, seed=seed)
    found = with_losses(tmp_path, losses, clients=4, labels="iid").assign(held, seed)
    for label in range(3):
        x = [held.x_train[part[held.y_train[part] == label], 0] for part in found.clients]
        assert all(one.max() <= other.min() for one, other in pairwise(x))
    few = with_losses(tmp_path, losses[:-1], clients=4, labels="iid")
    with pytest.raises(DataError, match=r"one per training sample \(the \d+ that the server holds too"):
        few.assign(held, seed)


def test_ranks_by_hand() -> None:
    rng = np.random.default_rng(0)
    # Shares 4, 2, 4: all in order.
    assert by_rank(np.array([4, 2, 4]), 1.0, rng).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    # Half of them begin at ranks 0, 4 and 6; the other 2, 1 and 2 places are dealt at random.
    seen = set()
    for _ in range(50):
        owners = by_rank(np.array([4, 2, 4]), 0.5, rng)
        assert owners[[0, 1, 4, 6, 7]].tolist() == [0, 0, 1, 2, 2]
        assert sorted(owners[[2, 3, 5, 8, 9]].tolist()) == [0, 0, 1, 2, 2]
        seen.add(tuple(owners.tolist()))
    assert len(seen) > 10
    assert sorted(by_rank(np.array([3, 0, 1]), 0.0, rng).tolist()) == [0, 0, 0, 2]


@settings(max_examples=40, deadline=None)
@given(ordered=st.floats(0, 1), alpha=st.floats(0.1, 10), clients=st.integers(1, 8), seed=st.integers(0, 99))
def test_class_counts_are_those_of_the_division(
    ordered: float, alpha: float, clients: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples, _ = blobs()
    folder = tmp_path_factory.getbasetemp()
    losses = np.random.default_rng(seed).random(600)
    fields: dict[str, Any] = {"clients": clients, "alpha": alpha, "attempts": 500}
    mine = with_losses(folder, losses, ordered=ordered, **fields).assign(samples, seed)
    plain = PARTITIONS["dirichlet"](**fields).assign(samples, seed)
    for a, b in zip(mine.clients, plain.clients, strict=True):
        np.testing.assert_array_equal(
            np.bincount(samples.y_train[a], minlength=3), np.bincount(samples.y_train[b], minlength=3)
        )
    assert np.array_equal(np.sort(np.concatenate(mine.clients)), np.arange(600))


def test_fully_ordered_clients_do_not_overlap(tmp_path: Path) -> None:
    samples, _ = blobs()
    losses = np.random.default_rng(1).random(600)
    found = with_losses(tmp_path, losses, clients=5, labels="iid").assign(samples, 0)
    assert [len(part) for part in found.clients] == [120] * 5
    for label in range(3):
        ranges = [losses[part[samples.y_train[part] == label]] for part in found.clients]
        for easy, hard in pairwise(ranges):
            assert easy.max() < hard.min()


def test_consistency_grows_with_the_ordered_fraction(tmp_path: Path) -> None:
    """Figure 2.8: the difficulty within a client spreads as over all data for f_ord = 0, and little for 1."""
    samples, _ = blobs(3000)
    losses = np.random.default_rng(1).random(3000)
    spreads, levels = [], []
    for ordered in (0.0, 0.5, 1.0):
        found = with_losses(tmp_path, losses, clients=20, labels="iid", ordered=ordered).assign(samples, 0)
        spreads.append(np.mean([losses[part].std() for part in found.clients]))
        levels.append(np.std([losses[part].mean() for part in found.clients]))
    assert spreads[0] == pytest.approx(losses.std(), rel=0.03)
    assert spreads[0] > spreads[1] > spreads[2]
    assert spreads[2] < 0.1 * spreads[0]
    assert levels[0] < 0.1 * levels[2]


@pytest.mark.parametrize("kind", ["mlp", "logistic"])
def test_the_expert_finds_the_planted_difficulty(kind: Any) -> None:
    samples, hard = blobs()
    losses = expert_losses(samples, kind)
    assert losses.shape == (600,)
    assert (losses >= 0).all()
    assert losses[hard].mean() > 3 * losses[~hard].mean()
    np.testing.assert_array_equal(losses, expert_losses(samples, kind))
    found = difficulty(clients=4, labels="iid", expert=kind).assign(samples, 0)
    planted = [hard[part].mean() for part in found.clients]
    assert max(planted[:2]) < 0.1
    assert min(planted[2:]) > 0.9


def test_no_sample_is_scored_by_an_expert_that_learnt_it() -> None:
    samples, _ = blobs()
    wrong = samples.y_train.copy()
    wrong[:60] = (wrong[:60] + 1) % 3  # mislabelled: hard, unless learnt by heart
    losses = expert_losses(Samples("wrong", samples.x_train, wrong, samples.x_test, wrong, 3), "mlp")
    assert losses[:60].mean() > 2 * losses[60:].mean()


def test_classes_that_an_expert_has_never_seen() -> None:
    x = np.arange(8, dtype=np.float32)[:, None]
    one = np.zeros(8, np.int64)
    assert expert_losses(Samples("one class", x, one, x, one, 2), "mlp").tolist() == [0.0] * 8
    single = one.copy()
    single[3] = 1  # in one half only
    losses = expert_losses(Samples("nearly", x, single, x, single, 2), "mlp")
    assert losses[3] == 50.0
    alone = Samples("alone", x[:1], one[:1], x, one, 2)
    assert expert_losses(alone, "mlp").tolist() == [0.0]


def test_losses_of_large_data_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(_expert, "_LEAST_CACHED", 100)
    samples, _ = blobs()
    losses = expert_losses(samples, "logistic")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("difficulty-logistic-")
    monkeypatch.setattr(_expert, "_compute_losses", lambda *_: pytest.fail("computed again"))
    np.testing.assert_array_equal(losses, expert_losses(samples, "logistic"))
    monkeypatch.undo()
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(_expert, "_LEAST_CACHED", 100)
    file.write_bytes(b"broken")
    np.testing.assert_array_equal(losses, expert_losses(samples, "logistic"))
    np.testing.assert_array_equal(np.load(file), losses)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "a file"))
    np.testing.assert_array_equal(losses, expert_losses(samples, "logistic"))


def test_kept_losses_of_another_scikit_learn_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    monkeypatch.setattr(_expert, "_LEAST_CACHED", 100)
    samples, _ = blobs()
    losses = expert_losses(samples, "logistic")
    monkeypatch.setattr(_expert, "version", lambda name: "0.1")
    monkeypatch.setattr(_expert, "_compute_losses", lambda *_: losses + 1)
    np.testing.assert_array_equal(expert_losses(samples, "logistic"), losses + 1)


def test_refusals(tmp_path: Path) -> None:
    samples, _ = blobs(12)

    def refusal(**fields: Any) -> str:
        with pytest.raises(DataError) as caught:
            difficulty(**{"clients": 3, "labels": "iid", **fields}).assign(samples, 0)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such file" in refusal(losses=tmp_path / "none.npy")
    (tmp_path / "text.npy").write_text("text")
    assert "cannot be read as .npy" in refusal(losses=tmp_path / "text.npy")
    np.savez(tmp_path / "many.npz", a=np.zeros(12))
    assert "holds several arrays" in refusal(losses=tmp_path / "many.npz")
    for wrong, message in (
        (np.zeros(11), r"holds shape (11,); expected 12 numbers"),
        (np.zeros((12, 1)), "holds shape (12, 1)"),
        (np.array(["x"] * 12), "expected 12 numbers"),
        (np.full(12, np.nan), "NaN or infinity"),
    ):
        np.save(tmp_path / "losses.npy", wrong)
        assert message in refusal(losses=tmp_path / "losses.npy")
    assert "4 clients with 4 samples each need 16, there are 12" in refusal(clients=4, min_samples=4)
    assert "use fewer" in refusal(clients=13)


def test_real_difficulty(real_data: RealData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fashion-MNIST: shirts are harder than trousers, and the last client's samples than the first's."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    everything = DATASETS["fashion_mnist"]().load(real_data("fashion_mnist"))
    x, y = everything.x_train[:4000], everything.y_train[:4000]
    samples = Samples("some", x, y, x, y, 10)
    losses = expert_losses(samples, "logistic")
    assert losses[y == 6].mean() > 5 * losses[y == 1].mean()
    found = difficulty(clients=10, labels="iid", expert="logistic").assign(samples, 0)
    means = [losses[part].mean() for part in found.clients]
    assert means == sorted(means)
    assert means[9] > 20 * means[0]
