"""FedSEM: the E-step and the M-step by hand, the first centers, its limits, planted clusters."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from rayfl.algorithms import ServerState
from rayfl.algorithms.fedsem import Distances, FedSEMState, PairwiseDistances
from rayfl.clustering.centers import first_centers
from rayfl.training.reports import Trained
from tests.algorithms.fakes import SIZES, FakeClients, algorithm, plan_of, report, setup
from tests.algorithms.test_identities import GROUPS, P, Run, run, same, same_curves

__all__ = ["run"]

LOSSES = FakeClients({"train": [[2.0, 1.0, 3.0]] * 6})


def squared(points: np.ndarray) -> np.ndarray:
    return ((points[:, None] - points[None, :]) ** 2).sum(-1)


def trained(rows: np.ndarray, models: list[np.ndarray], statistics: int = 0) -> Trained:
    as_tensor = [torch.tensor(m, dtype=torch.float32) for m in (rows, *models)]
    spec = SimpleNamespace(n_parameters=rows.shape[1] - statistics)
    return Trained(spec, None, None, as_tensor[0], as_tensor[0], None, as_tensor[1:])  # type: ignore[arg-type]


# --- by hand -------------------------------------------------------------------------------------------


def test_distances_to_the_centers_by_hand():
    rows, models = np.array([[0.0, 0], [3, 4]]), [np.array([0.0, 1]), np.array([3.0, 0])]
    assert Distances().compute(trained(rows, models)).tolist() == [[1, 9], [18, 16]]
    # Running statistics, the last numbers of a model, are no part of it.
    rows, models = np.column_stack([rows, [7, 8]]), [np.append(m, 100) for m in models]
    of_parameters = trained(rows, models, statistics=1)
    assert Distances().compute(of_parameters).tolist() == [[1, 9], [18, 16]]
    assert PairwiseDistances().compute(of_parameters).tolist() == [[0, 0], [3, 4]]


def test_distances_among_trained_models_are_exact_far_from_the_origin():
    """Models that differ in the fourth digit, in blocks."""
    rng = np.random.default_rng(0)
    rows = (1000 + 0.1 * rng.standard_normal((7, 5))).astype(np.float32)
    blocks = [PairwiseDistances().compute(trained(part, [])) for part in (rows[:3], rows[3:4], rows[4:])]
    found = PairwiseDistances().combine(blocks)
    np.testing.assert_allclose(found, squared(rows.astype(np.float64)), rtol=1e-6)
    assert (found == found.T).all()
    assert (np.diag(found) == 0).all()


def test_the_e_step_and_the_m_step_by_hand():
    """Two centers; each client goes to the nearer one, whichever it started from, and counts n_i there."""
    s, method = setup("fedsem"), algorithm("fedsem", clusters=2)
    state = FedSEMState(3, 2, np.array([0, 0, 0, 1, 1, 1]), True, seen=np.ones(6, bool))
    plan = plan_of(method, s, state)
    assert plan.start.tolist() == [0, 0, 0, 1, 1, 1]
    assert method.reports(s, state) == {"distances": Distances()}
    reports = {"distances": np.array([[1, 2], [2, 1], [1, 9], [4, 1], [1, 4], [3, 3]], np.float64)}
    mixing = method.mix(s, state, plan, reports)
    assert mixing.parents is None
    assert mixing.weights.toarray().tolist() == [[10, 0, 30, 0, 50, 60], [0, 20, 0, 40, 0, 0]]
    after = method.end(s, state, plan, report(plan, 2, reports=reports))
    assert after.assignment.tolist() == [0, 1, 0, 1, 0, 0]


def test_a_center_without_members_stays():
    s, method = setup("fedsem"), algorithm("fedsem", clusters=3)
    state = FedSEMState(3, 3, np.array([0, 0, 1, 1, 2, 2]), True, seen=np.ones(6, bool))
    plan = plan_of(method, s, state)
    mixing = method.mix(s, state, plan, {"distances": np.array([[0, 1, 2]] * 6, np.float64)})
    assert np.diff(mixing.weights.indptr).tolist() == [6, 0, 0]


def test_the_first_round_by_hand():
    """All start from w_0, where centers cannot differ: after it they are those of the trained models."""
    s, method = setup("fedsem"), algorithm("fedsem", clusters=2)
    state = method.begin(s)
    assert (state.models, state.clustered) == (1, False)
    assert method.initial(s) == (0,)
    plan = plan_of(method, s, state)
    assert method.select(s, state, plan.cohort, LOSSES) is state
    assert LOSSES.asked == []  # there is nothing to choose from
    assert method.reports(s, state) == {"distances": PairwiseDistances()}
    reports = {"distances": squared(np.array([0.0, 0.1, 7, 7.1, 7.2, 0.2])[:, None])}
    mixing = method.mix(s, state, plan, reports)
    assert mixing.parents.tolist() == [0, 0]
    assert mixing.weights.toarray().tolist() == [[10, 20, 0, 0, 0, 60], [0, 0, 30, 40, 50, 0]]
    after = method.end(s, state, plan, report(plan, 2, failures=[4], reports=reports))
    assert (after.models, after.clustered, after.round) == (2, True, 1)
    assert after.assignment.tolist() == [0, 0, 1, 1, 0, 0]
    assert after.seen.tolist() == [True, True, True, True, False, True]


def test_who_has_no_center_takes_the_one_of_least_training_loss():
    """Clients never seen before, and those whose data have changed; the others keep theirs."""
    clients = FakeClients({"train": [[2.0, 1.0, 3.0]] * 6})
    s, method = setup("fedsem"), algorithm("fedsem", clusters=3)
    seen = np.array([True, True, False, True, True, False])
    state = FedSEMState(3, 3, np.array([0, 2, 0, 2, 0, 0]), True, seen=seen)
    cohort = np.array([0, 1, 2, 3])
    assert method.select(s, state, cohort, clients).assignment.tolist() == [0, 2, 1, 2, 0, 0]
    assert method.downloads(s, state, method.plan(s, state, cohort)) == 1 + 1 + 3 + 1
    # Of six clients a client curriculum asks all. Of the two that do not take part 4 downloads its center's
    # model, and 5, which has none, all three.
    curriculum = setup(
        "fedsem", rounds=9, training={"participation": 0.6}, sampling={"name": "curriculum", "b": 0.7}
    )
    assert method.downloads(curriculum, state, method.plan(s, state, cohort)) == 1 + 1 + 3 + 1 + 1 + 3
    state = method.drift(s, state, np.array([3]), clients)
    assert method.select(s, state, cohort, clients).assignment.tolist() == [0, 2, 1, 1, 0, 0]
    assert method.join(s, state, np.array([5]), clients).assignment.tolist() == [0, 2, 0, 2, 0, 1]
    assert clients.asked == ["train"] * 3


def test_more_clients_than_the_state_was_made_for():
    s, method = setup("fedsem", sizes=[1] * 8), algorithm("fedsem", clusters=2)
    state = FedSEMState(3, 2, np.array([0, 0, 0, 1, 1, 1]), True, seen=np.ones(6, bool))
    grown = method.grow(s, state)
    assert grown.assignment.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert grown.seen.tolist() == [True] * 6 + [False] * 2


# --- the first centers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_first_centers_of_separate_clouds(seed: int):
    """In any dimension, with clouds of 1 to 30 points."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(4), [30, 15, 5, 1])
    centers = 10 * rng.standard_normal((4, 50))
    points = centers[truth] + rng.standard_normal((len(truth), 50))
    shuffled = rng.permutation(len(truth))
    found = first_centers(squared(points[shuffled]), 4, seed, rng.integers(1, 100, len(truth)))
    assert adjusted_rand_score(truth[shuffled], found) == 1.0
    _, first = np.unique(found, return_index=True)
    assert (np.diff(first) > 0).all()  # numbered by first occurrence


def test_more_centers_than_different_models():
    equal = np.zeros((3, 3))
    assert first_centers(equal, 4, 0, np.ones(3, np.int64)).tolist() == [0, 0, 0]
    two = squared(np.array([[1.0], [1.0], [5.0]]))
    assert first_centers(two, 4, 0, np.ones(3, np.int64)).tolist() == [0, 0, 1]
    assert first_centers(np.zeros((1, 1)), 2, 0, np.ones(1, np.int64)).tolist() == [0]


# --- whole runs ----------------------------------------------------------------------------------------


def test_one_center_is_fedavg(run: Run):
    for participation in (1.0, 0.4):
        overrides = [f"training.participation={participation}"]
        one, flat = run({"name": "fedsem", "clusters": 1}, *overrides), run("fedavg", *overrides)
        assert same(one.models, flat.models)
        same_curves(one, flat)
        assert one.bytes() == flat.bytes()


@pytest.mark.parametrize("seed", [0, 1])
def test_planted_tasks_are_recovered(run: Run, seed: int):
    settings = {"name": "fedsem", "clusters": 3}, "rounds=2", "training.epochs=3", f"seed={seed}"
    ran = run(*settings)
    assert ran.summary["ari"] == 1.0
    assert adjusted_rand_score(GROUPS, ran.assignment) == 1.0


def test_clients_that_did_not_take_part_in_the_first_round_find_their_center(run: Run):
    """Six of ten a round (with this seed of all groups in the first): who comes later is not just sent to
    the first center."""
    ran = run(
        {"name": "fedsem", "clusters": 3},
        "rounds=8",
        "training.participation=0.6",
        "training.epochs=3",
        "seed=3",
        "evaluation.every=8",
    )
    assert ran.summary["ari"] == 1.0


def test_a_model_each_way_and_all_centers_once_for_those_who_come_later(run: Run):
    full = run({"name": "fedsem", "clusters": 3})
    assert full.bytes(direction="up") == full.bytes(direction="down") == 3 * 10 * P * 4
    ran = run({"name": "fedsem", "clusters": 3}, "training.participation=0.4", "rounds=2")
    assert ran.bytes(direction="up") == 2 * 4 * P * 4
    first, second = (
        set(
            plan_of(algorithm("fedavg"), _setup_of(ran), ServerState(t, 1, np.zeros(10, int))).cohort.tolist()
        )
        for t in (0, 1)
    )
    fresh = len(second - first)
    assert fresh > 0
    assert ran.bytes(direction="down") == (4 + 4 + 2 * fresh) * P * 4


def test_clients_that_are_only_asked_for_their_loss_and_have_no_center_download_all_models(run: Run):
    """A client curriculum asks all ten in every round."""
    method = {"name": "fedsem", "clusters": 3}
    ran = run(
        method, "training.participation=0.4", "rounds=2", sampling={"name": "curriculum", "cohorts": "draw"}
    )
    assert ran.bytes(direction="down", round=0) == 10 * P * 4
    assert ran.bytes(direction="down", round=1) == (4 + 3 * 6) * P * 4


def test_a_client_that_fails_takes_none_of_the_first_centers():
    """Client 4 started from w_0, far from all trained models: as a point it would be a center of its own."""
    s, method = setup("fedsem"), algorithm("fedsem", clusters=2)
    state = method.begin(s)
    plan = plan_of(method, s, state)
    distances = squared(np.array([1.0, 1.1, 7, 7.1, -90, 1.2])[:, None])
    distances[4] = np.nan
    after = method.end(s, state, plan, report(plan, 2, failures=[4], reports={"distances": distances}))
    assert after.assignment.tolist() == [0, 0, 1, 1, 0, 0]
    assert after.seen.tolist() == [True, True, True, True, False, True]


def test_what_the_algorithm_gets_of_a_client_that_failed_is_nan(run: Run, monkeypatch: pytest.MonkeyPatch):
    """In merged reports too."""
    from rayfl.algorithms.fedsem import FedSEM
    from rayfl.training.loop import LoopEngine

    original, mix, seen = LoopEngine.train, FedSEM.mix, []

    def train(self: Any, work: Any, round: int, clients: Any, *rest: Any) -> Any:
        block = original(self, work, round, clients, *rest)
        failures = {row: "Traceback\nValueError: boom" for row, c in enumerate(clients) if c == 3}
        return dataclasses.replace(block, failures=failures)

    def looked_at(self: FedSEM, setup: Any, state: Any, plan: Any, reports: Any) -> Any:
        seen.append(np.flatnonzero(np.isnan(reports["distances"]).any(axis=1)).tolist())
        return mix(self, setup, state, plan, reports)

    monkeypatch.setattr(LoopEngine, "train", train)
    monkeypatch.setattr(FedSEM, "mix", looked_at)
    run(
        {"name": "fedsem", "clusters": 3},
        execution={"backend": "inline", "tolerate_failures": 1, "block_size": 4},
    )
    assert seen == [[3]] * 3


def _setup_of(ran):
    s = setup("fedsem", sizes=[1] * 10, training={"participation": 0.4})
    return dataclasses.replace(s, seed=ran.result.config.seed)


def test_sizes_are_what_the_fake_setup_says():
    assert setup("fedsem").sizes.tolist() == SIZES
