"""The methods as pure functions: who trains, from what, and what A is."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import settings as few
from hypothesis import strategies as st

import rayfl.algorithms
from rayfl.algorithms import ALGORITHMS, Algorithm, Hierarchy, OneShotClustered, ServerState, Setup
from rayfl.algorithms.base import sample_cohort
from rayfl.clustering.config import Clustering
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.servers.checkpoint import Checkpoint
from rayfl.settings import part_name, summary
from rayfl.training import LocalWork, Training
from tests.algorithms.fakes import (
    NOBODY,
    SIZES,
    SPEC,
    FakeClients,
    algorithm,
    assert_same_state,
    clustered,
    clusters,
    plan_of,
    report,
    setup,
)


def cohort_at(s: Setup, round: int, labels: list[int] | None = None) -> np.ndarray:
    return sample_cohort(s, ServerState(round, 1, np.array(labels or [0] * s.clients)))[1]


# --- discovery -----------------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_a_method_of_that_name():
    files = {info.name for info in pkgutil.iter_modules(rayfl.algorithms.__path__)}
    shared = {"base", "contract", "one_shot", "one_shot_newcomers", "one_shot_state", "cfl_state"}
    assert set(ALGORITHMS) == files - shared
    for name, kind in ALGORITHMS.items():
        assert kind.__module__ == f"rayfl.algorithms.{name}"
        assert part_name(kind) == name == kind().name


def test_abstract_bases_are_no_choice():
    assert part_name(Algorithm) is None
    assert part_name(OneShotClustered) is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_says_what_it_is(name):
    assert len(summary(ALGORITHMS[name])) > 30
    module = importlib.import_module(f"rayfl.algorithms.{name}")
    assert module.__doc__
    assert len(module.__doc__.splitlines()[0]) > 20


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_are_valid_settings_of_other_sections(name):
    for section, values in ALGORITHMS[name].defaults.items():
        shown = load({"algorithm": name}).to_dict()[section]
        for key, value in values.items():
            found = {k: shown[key][k] for k in value} if isinstance(value, dict) else shown[key]
            assert found == value


# --- cohorts and plans ---------------------------------------------------------------------------------


@given(clients=st.integers(1, 300), rho=st.floats(0.01, 1), t=st.integers(0, 50), seed=st.integers(0, 9))
def test_cohorts(clients, rho, t, seed):
    """max(1, round(rho N)) different clients in rising order, a function of (seed, round)."""
    s = dataclasses.replace(setup(sizes=[1] * clients), training=Training(participation=rho), seed=seed)
    cohort = cohort_at(s, t)
    assert len(cohort) == max(1, round(rho * clients))
    assert (np.diff(cohort) > 0).all()
    assert 0 <= cohort.min() <= cohort.max() < clients
    assert (cohort_at(s, t) == cohort).all()


def test_cohorts_differ_between_rounds_and_seeds():
    s = setup(sizes=[1] * 100, training={"participation": 0.1})
    drawn = [cohort_at(s, r).tolist() for r in range(5)]
    drawn += [cohort_at(dataclasses.replace(s, seed=1), 0).tolist()]
    assert len({tuple(d) for d in drawn}) == 6


def test_everybody_is_sampled_equally_often():
    s = setup(sizes=[1] * 20, training={"participation": 0.25})
    counts = np.bincount(np.concatenate([cohort_at(s, r) for r in range(2000)]), minlength=20)
    assert ((counts - 500) ** 2 / 500 / 0.75).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


OF_MIXTURES = {"fedsoft"}
"""Methods whose clients have a share in every model, and are drawn by it; test_fedsoft.py tests the draws."""


def test_only_clients_that_are_there_are_sampled():
    s = setup(sizes=[10, 0, 30, 0, 0, 60], training={"participation": 0.5})
    assert s.present.tolist() == [0, 2, 5]
    for t in range(9):
        cohort = cohort_at(s, t)
        assert len(cohort) == 2  # half of three, rounded
        assert set(cohort) <= {0, 2, 5}
    for name in set(ALGORITHMS) - OF_MIXTURES:
        everybody = setup(name, sizes=[10, 0, 30, 0, 0, 60])
        _, found = algorithm(name).cohort(everybody, clustered([0, 1, 0, 1, 0, 0]), NOBODY)
        assert found.tolist() == [0, 2, 5]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - OF_MIXTURES - {"flt"}))
@few(max_examples=25)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    rho=st.floats(0.05, 1),
    t=st.integers(0, 9),
)
def test_plans_are_sorted_by_group_and_client(name, labels, rho, t):
    s = setup(name, sizes=[1 + i for i in range(len(labels))], training={"participation": rho})
    state = clustered(labels, t)
    if name in ("fedavg", "solo"):
        state = dataclasses.replace(algorithm(name).begin(s), round=t)
    plan = plan_of(algorithm(name), s, state)
    pairs = list(zip(plan.group.tolist(), plan.cohort.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert (plan.group == state.assignment[plan.cohort]).all()
    assert (plan.start == plan.group).all()
    assert sorted(plan.cohort.tolist()) == (
        list(range(len(labels))) if name == "solo" else cohort_at(s, t).tolist()
    )


# --- FedAvg ----------------------------------------------------------------------------------------------


def test_fedavg_by_hand():
    s, method = setup(training={"participation": 0.5, "lr": 0.1, "momentum": 0.5}), algorithm("fedavg")
    assert method.initial(s) == (0,)
    state = method.begin(s)
    assert (state.round, state.models, state.clustered) == (0, 1, False)
    assert state.assignment.tolist() == [0] * 6
    assert method.recluster(s, state, NOBODY) is None
    plan = plan_of(method, s, state)
    assert len(plan.cohort) == 3
    assert method.select(s, state, plan.cohort, NOBODY) is state
    assert method.reports(s, state) == {}
    assert method.adaptation(s, state) is None
    mixing = method.mix(s, state, plan, {})
    assert mixing.weights.toarray().tolist() == [[float(SIZES[c]) for c in plan.cohort]]
    assert method.work(s, state) == LocalWork(epochs=5, batch_size=10, lr=0.1, momentum=0.5)
    assert mixing.keep is mixing.parents is None
    after = method.end(s, state, plan, report(plan, 1))
    assert (after.round, after.models) == (1, 1)
    assert method.split(s, after, NOBODY) is None
    assert state.round == 0
    assert NOBODY.asked == []


def test_fedavg_ignores_the_hierarchy():
    s = setup("pacfl", hierarchy={"common_layers": "all"})
    method = algorithm("fedavg")
    assert method.global_step(s, method.begin(s)) is None


def test_the_learning_rate_follows_the_round():
    s = setup(training={"lr": 0.8, "schedule": "exponential", "decay": 0.5, "weight_decay": 0.1})
    state = algorithm("fedavg").begin(s)
    works = [algorithm("fedavg").work(s, dataclasses.replace(state, round=t)) for t in (0, 1, 3)]
    assert [w.lr for w in works] == pytest.approx([0.8, 0.4, 0.1])
    assert works[0].weight_decay == 0.1
    assert works[0].personal == ()


# --- SOLO ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_solo_by_hand(sampled):
    s, method = setup("solo", training={"participation": 0.5}), algorithm("solo", sampled=sampled)
    state = method.begin(s)
    plan = plan_of(method, s, state)
    assert plan.cohort.tolist() == (cohort_at(s, 0).tolist() if sampled else [0, 1, 2, 3, 4, 5])
    assert method.work(s, state).personal == ((0, SPEC.P),)  # nothing is sent
    mixing = method.mix(s, state, plan, {})
    assert mixing.weights.shape == (1, len(plan.cohort))
    assert mixing.weights.nnz == 0
    assert method.recluster(s, state, NOBODY) is None


# --- one-shot clustering ---------------------------------------------------------------------------------

CLUSTERED = ["pacfl", "mt_hfl", "random_clustering", "flis_hc"]


def regrouped(name: str, s: Setup, labels: list[int], state: ServerState | None = None) -> Any:
    method = algorithm(name)
    return method.regroup(s, method.begin(s) if state is None else state, clusters(labels))


def one_round(method: Algorithm, s: Setup, state: ServerState) -> ServerState:
    plan = plan_of(method, s, state)
    return method.end(s, state, plan, report(plan, state.models))


@pytest.mark.parametrize("name", CLUSTERED)
def test_clustering_happens_once_before_the_first_round(name):
    s, method, clients = setup(name), algorithm(name), FakeClients(labels=[0, 0, 1, 1, 2, 0])
    state = method.recluster(s, method.begin(s), clients).state
    assert (state.models, state.clustered) == (3, True)
    for _ in range(8):
        assert method.recluster(s, state, clients) is None
        state = one_round(method, s, state)
    assert clients.asked == ["cluster"]


def test_clustering_again_every_tau_rounds():
    s, method = setup("mt_hfl", clustering={"every": 3}), algorithm("mt_hfl")
    state, when, clients = method.begin(s), [], FakeClients(labels=[0] * 6)
    for t in range(8):
        if (found := method.recluster(s, state, clients)) is not None:
            when.append(t)
            state = found.state
        state = one_round(method, s, state)
    assert when == [0, 3, 6]


def test_clustering_again_when_more_than_lambda_clients_raised_a_flag():
    s, method = setup("pacfl", clustering={"max_flags": 2}), algorithm("pacfl")
    clients = FakeClients(labels=[0, 0, 0, 1, 1, 1])
    state = method.recluster(s, method.begin(s), clients).state
    for flagged, due in (([0], False), ([0], False), ([4], False), ([2, 4], True)):
        state = method.drift(s, state, np.array(flagged), clients)
        found = method.recluster(s, state, clients)
        assert (found is not None) == due, flagged
    assert method.recluster(s, found.state, clients) is None  # the flags are down again


def test_the_number_of_a_cluster_without_members_is_given_to_the_next_new_one():
    """Client 5 has left: its cluster is not without members."""
    s, method = setup("pacfl", clustering={"every": 1}), algorithm("pacfl")
    state, found = method.begin(s), []
    for t, labels in enumerate(([0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 1, 2], [0, 0, 1, 2, 3, 4])):
        if t:
            s = dataclasses.replace(s, sizes=np.array([10, 20, 30, 40, 50, 0]))
        state = dataclasses.replace(state, round=t)
        regrouping = method.recluster(s, state, FakeClients(labels=labels))
        state = regrouping.state
        found.append((state.assignment.tolist(), state.models, regrouping.parents.tolist()))
    assert found == [
        ([0, 0, 1, 1, 2, 3], 4, [0, 0, 0, 0]),
        ([0, 0, 1, 1, 1, 3], 4, [0, 1, 2, 3]),
        ([0, 0, 1, 2, 4, 3], 5, [0, 1, 1, 3, 1]),
    ]


@pytest.mark.parametrize(("setting", "told_as"), [("flag_loss", "losses"), ("flag_update", "norms")])
def test_a_client_whose_loss_or_update_has_risen_raises_a_flag(setting, told_as):
    s = setup("pacfl", clustering={"max_flags": 0, setting: 0.5})
    method, clients = algorithm("pacfl"), FakeClients(labels=[0] * 6)
    assert bool(method.reports(s, method.begin(s))) == (setting == "flag_update")
    state = method.recluster(s, method.begin(s), clients).state
    for numbers, due in (
        ([1.0, 1, 1, 1, 1, 1], False),  # nothing to compare with
        ([1.5, 1, 1, 0.1, 1, np.nan], False),  # exactly half more is not more
        ([1.0, 1, 1, 0.16, 1, 1.49], True),  # client 3 has
    ):
        plan = plan_of(method, s, state)
        told = report(plan, 1, **{"losses": np.array(numbers), "reports": {"norms": np.array(numbers)}})
        state = method.end(s, state, plan, told)
        assert (method.recluster(s, state, clients) is not None) == due
    assert np.flatnonzero(state.flags).tolist() == [3]


@pytest.mark.parametrize("name", ["pacfl", "mt_hfl"])
def test_rows_of_a_by_hand(name):
    """Clusters {0, 3, 5}, {1}, {2, 4}: each row weighs its own members by n_i."""
    s, method = setup(name), algorithm(name)
    state = regrouped(name, s, [0, 1, 2, 0, 2, 0]).state
    assert (state.models, state.clustered) == (3, True)
    plan = plan_of(method, s, state)
    assert plan.cohort.tolist() == [0, 3, 5, 1, 2, 4]
    assert plan.group.tolist() == [0, 0, 0, 1, 2, 2]
    assert method.mix(s, state, plan, {}).weights.toarray().tolist() == [
        [10, 40, 60, 0, 0, 0],
        [0, 0, 0, 20, 0, 0],
        [0, 0, 0, 0, 30, 50],
    ]


def test_a_cluster_without_sampled_members_has_an_empty_row():
    s, method = setup("pacfl", training={"participation": 0.01}), algorithm("pacfl")
    state = clustered([0, 1, 2, 0, 2, 0])
    weights = method.mix(s, state, plan_of(method, s, state), {}).weights
    assert weights.shape == (3, 1)
    assert weights.nnz == 1


FC1, FC2, FC3 = (0, 18), (18, 26), (26, 38)


@pytest.mark.parametrize(
    ("layers", "segments"),
    [
        ("none", ()),
        (0, ()),
        ("all", ((0, 38),)),
        (1, (FC1,)),
        (2, ((0, 26),)),
        (3, ((0, 38),)),
        ("fc2", (FC2,)),
        (["fc3", "fc1"], (FC1, FC3)),
        ([], ()),
    ],
)
def test_common_layers(layers, segments):
    assert Hierarchy(common_layers=layers).common(SPEC) == segments


@pytest.mark.parametrize("layers", [4, ["fc1", "fc9"], "fc0"])
def test_layers_that_the_model_lacks(layers):
    with pytest.raises(ConfigError, match="fc"):
        Hierarchy(common_layers=layers).common(SPEC)


@pytest.mark.parametrize(("kappa", "rounds"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [2, 5]), (8, [7]), (9, [])])
@pytest.mark.parametrize("name", ["mt_hfl", "random_clustering"])
def test_the_global_server_acts_every_kappa_rounds(name, kappa, rounds):
    """After kappa local rounds, not before the first (Ali and Arafa, Algorithm 1)."""
    s, method = setup(name, hierarchy={"global_every": kappa}), algorithm(name)
    acts = []
    for t in range(8):
        state = clustered([0, 0, 1, 1, 2, 2], round=t)
        step = method.global_step(s, state)
        assert step is not None
        ((common, groups),) = step.layers
        assert (common, groups.tolist(), step.weights) == ((FC1,), [0, 0, 0], None)
        assert step.due.all() == step.due.any()
        acts += [t] if step.due.all() else []
    assert acts == rounds


def test_pacfl_has_no_common_layers_unless_asked():
    state, method = clustered([0, 1, 1, 1, 0, 0]), algorithm("pacfl")
    assert method.global_step(setup("pacfl"), state) is None
    step = method.global_step(setup("pacfl", hierarchy={"common_layers": "all"}), state)
    assert step is not None
    assert step.layers[0][0] == ((0, 38),)


def test_the_weights_of_local_servers_by_hand():
    """As HierFAVG prints them, all samples of a server's clients; of those that are there."""
    s = setup("mt_hfl", hierarchy={"weights": "population"}, sizes=[10, 20, 30, 40, 0, 60])
    step = algorithm("mt_hfl").global_step(s, clustered([0, 0, 1, 1, 1, 2]))
    assert step is not None
    assert step.weights is not None
    assert step.weights.tolist() == [30, 70, 60]


def test_parents_of_new_clusters_by_hand():
    """A new cluster starts from the model that most of its members used; ties go to the smaller id."""
    s = setup("mt_hfl")
    old = clustered([0, 0, 1, 1, 2, 2], round=3)
    new = regrouped("mt_hfl", s, [0, 1, 1, 1, 1, 2], old)
    assert new.parents.tolist() == [0, 1, 2]
    assert (new.state.round, new.state.models) == (3, 3)
    assert regrouped("mt_hfl", s, [0] * 6, old).parents.tolist()[0] == 0  # a tie of three
    fresh = regrouped("mt_hfl", s, [0, 1, 2, 3, 4, 5])
    assert fresh.parents.tolist() == [0] * 6  # everybody from w_0


def test_clusters_keep_their_numbers_when_found_again():
    """The same groups under other labels are the same clusters; one without members keeps its model."""
    s = setup("mt_hfl")
    old = clustered([0, 0, 1, 1, 2, 2], round=3)
    again = regrouped("mt_hfl", s, [1, 1, 2, 2, 0, 0], old)
    assert again.state.assignment.tolist() == [0, 0, 1, 1, 2, 2]
    assert again.parents.tolist() == [0, 1, 2]
    fewer = regrouped("mt_hfl", s, [1, 1, 0, 0, 0, 0], old)
    assert fewer.state.assignment.tolist() == [0, 0, 1, 1, 1, 1]
    assert fewer.parents.tolist() == [0, 1, 2]
    more = regrouped("mt_hfl", s, [3, 0, 1, 1, 2, 2], old)
    assert len(set(more.state.assignment[:2].tolist()) - {0}) == 1  # one of the two founded cluster 3
    assert more.state.assignment[2:].tolist() == [1, 1, 2, 2]
    assert more.parents.tolist() == [0, 1, 2, 0]


def test_clients_that_are_not_there_keep_their_cluster():
    s = setup("pacfl", sizes=[10, 0, 30, 40, 50, 60])
    new = regrouped("pacfl", s, [0, -1, 1, 1, 0, 0], clustered([0, 1, 1, 1, 0, 0], round=2))
    assert new.state.assignment.tolist() == [0, 1, 1, 1, 0, 0]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40).map(np.array), st.integers(0, 5))
def test_random_clustering_keeps_the_sizes_and_mixes_the_members(labels, seed):
    labels = np.unique(labels, return_inverse=True)[1]
    s = dataclasses.replace(setup("random_clustering", sizes=[1] * len(labels)), seed=seed)
    method = algorithm("random_clustering")
    state = method.regroup(s, method.begin(s), clusters(labels)).state
    assert sorted(np.bincount(state.assignment)) == sorted(np.bincount(labels))
    again = method.regroup(s, method.begin(s), clusters(labels)).state
    assert (again.assignment == state.assignment).all()


def test_random_clustering_does_mix():
    labels = np.repeat(np.arange(4), 25)
    s = setup("random_clustering", sizes=[1] * 100)
    method = algorithm("random_clustering")
    assignment = method.regroup(s, method.begin(s), clusters(labels)).state.assignment
    together = (assignment[:, None] == assignment) & (labels[:, None] == labels)
    assert together[:25, :25].mean() < 0.4  # a quarter by chance
    other = dataclasses.replace(s, seed=1)
    assert (method.regroup(other, method.begin(other), clusters(labels)).state.assignment != assignment).any()
    assert algorithm("random_clustering").defaults == algorithm("mt_hfl").defaults


# --- newcomers -----------------------------------------------------------------------------------------


def test_newcomers_find_their_cluster_and_nobody_else_moves():
    """Label histograms on two axes; a newcomer like no one founds a cluster from the largest one's model."""
    s = setup(
        "pacfl",
        clustering={"signature": "label_histogram", "proximity": "cosine", "threshold": 0.1},
    )
    signatures = [[1, 0, 0], [0, 1, 0], [1, 0.1, 0], [0, 1, 0.1], [0, 0, 1], [0.1, 1, 0]]
    state = clustered([0, 1, 0, 0, 0, 0], round=2, newcomers=[3, 4, 5], threshold=0.1)
    method = algorithm("pacfl")
    found = method.join(s, state, np.array([3, 4, 5]), FakeClients(signatures=signatures))
    assert found.state.assignment.tolist() == [0, 1, 0, 1, 2, 1]
    assert found.parents.tolist() == [0, 1, 0]
    assert found.state.models == 3
    assert found.facts["newcomers"] == [3, 4, 5]
    assert np.flatnonzero(found.state.flags).tolist() == [3, 4, 5]


def test_newcomers_before_the_first_clustering_wait_for_it():
    s, method = setup("pacfl"), algorithm("pacfl")
    state = method.begin(s)
    assert method.join(s, state, np.array([5]), NOBODY) is state


class AllAlike(FakeClients):
    """All clients have signatures, at distance 0."""

    def distances(
        self, clustering: Any, clients: np.ndarray, known: np.ndarray, has_feature_map: Any = False
    ) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append("distances")
        return clients, np.zeros(len(clients) * (len(clients) - 1) // 2)


def test_newcomers_of_random_clustering_are_drawn_by_the_sizes_of_the_clusters():
    """A baseline whose newcomers went to their like would not be one."""
    s, method, clients = (
        setup("random_clustering", sizes=[1] * 410),
        algorithm("random_clustering"),
        AllAlike(),
    )
    newcomers = np.arange(10, 410)
    state = clustered([0] * 7 + [1] * 3 + [0] * 400, round=2, newcomers=newcomers, threshold=0.1)
    found = method.join(s, state, newcomers, clients).state
    assert clients.asked == ["distances"]
    assert found.models == 2
    assert abs((found.assignment[newcomers] == 1).sum() - 120) < 4 * np.sqrt(400 * 0.3 * 0.7)
    assert found.assignment[:10].tolist() == state.assignment[:10].tolist()
    # Each is drawn for itself: fewer newcomers go where they would have gone among many.
    few = method.join(s, state, newcomers[:3], clients).state
    assert few.assignment[newcomers[:3]].tolist() == found.assignment[newcomers[:3]].tolist()


# --- states ------------------------------------------------------------------------------------------------


def a_state(method: Algorithm, s: Setup) -> ServerState:
    """A state in which the method could be after two rounds."""
    state = dataclasses.replace(method.begin(s), round=2)
    if isinstance(method, OneShotClustered):
        state = method.regroup(s, state, clusters([0, 1, 2, 0, 2, 0])).state
    return state


def what_was_seen(method: Algorithm, s: Setup, state: ServerState, members: int) -> Any:
    """Reports of the right shape, for methods that mix by them."""
    if not method.mixes_by_reports:
        return {"norms": np.ones(members)}
    each = np.arange(members) / members
    alike = np.abs(np.subtract.outer(each, each))
    asked = method.reports(s, state).items()
    return {name: alike if report.combined or report.needs_models else each for name, report in asked}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_functions_are_pure(name):
    """Twice the same answer, and the state and the setup are as before."""
    s, method = setup(name, training={"participation": 0.5}), algorithm(name)
    state = a_state(method, s)
    before = (state.round, state.models, state.assignment.tolist(), s.sizes.tolist())
    first, second = plan_of(method, s, state), plan_of(method, s, state)
    assert (first.cohort == second.cohort).all()
    seen = what_was_seen(method, s, state, len(first.cohort))
    mixes = [method.mix(s, state, first, seen) for _ in range(2)]
    assert (mixes[0].weights != mixes[1].weights).nnz == 0
    assert isinstance(mixes[0].weights, sp.csr_array)
    after = method.end(s, state, first, report(first, state.models, reports=seen))
    assert after is not state
    assert after.round == state.round + 1
    assert (state.round, state.models, state.assignment.tolist(), s.sizes.tolist()) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.round = 9


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_state_written_down_is_the_state(name, tmp_path):
    s, method = setup(name), algorithm(name)
    state = a_state(method, s)
    plan = plan_of(method, s, state)
    seen = what_was_seen(method, s, state, len(plan.cohort))
    state = method.end(s, state, plan, report(plan, state.models, reports=seen))
    nobody, nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
    models = np.zeros((state.models, 3), np.float32)
    saved = Checkpoint(state, models, nobody, nothing, nothing, nobody, nothing, {}, {})
    kind = type(method.begin(s))
    again = Checkpoint.load(saved.save(tmp_path, keep=1), kind).state
    assert type(again) is kind
    assert_same_state(again, state)
    grown = method.grow(setup(name, sizes=[*SIZES, 70]), again)
    assert len(grown.assignment) == 7
    common = Checkpoint.load(tmp_path / "round-00003").state
    assert_same_state(common, ServerState(3, state.models, state.assignment, state.clustered, state.sweep))


def test_methods_need_no_ray():
    """Plain functions on arrays: importing all of them does not import ray."""
    import subprocess
    import sys

    code = "import sys, rayfl.algorithms, rayfl.config; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_clustering_settings_reach_the_method():
    assert setup("pacfl").clustering == Clustering(
        signature={"name": "subspace", "p": 3}, proximity="principal_angle", linkage="average"
    )
