"""Partitions: nobody's sample twice, nothing lost where all is promised, exact counts, bounded work."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from rayfl.data import PARTITIONS, Assignment
from rayfl.data.base import Partition, Samples
from rayfl.data.partitions._dealing import apportion, by_owner, client_weights
from rayfl.data.partitions._own import OwnPartition
from rayfl.errors import ConfigError, DataError
from rayfl.settings import summary

BASIC = {"dirichlet", "domains", "iid", "label_skew", "shards", "tasks"}
"""What this file tests one by one; any other partition is held to what holds for all."""


def make(name: str, **fields: Any) -> Partition:
    return PARTITIONS[name](**fields)


def labels_of(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, n)


def even_labels(each: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))


def data(labels: np.ndarray, domains: np.ndarray | None, classes: int) -> Samples:
    """Samples with these labels and meaningless features; the test samples are the training samples."""
    x = np.random.default_rng(0).random((len(labels), 4), np.float32)
    return Samples("made up", x, labels, x, labels, classes, domains, domains)


def flat(assignment: Assignment) -> np.ndarray:
    return np.concatenate(assignment.clients)


def counts(assignment: Assignment, labels: np.ndarray, classes: int) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=classes) for part in assignment.clients])


def same(a: Assignment, b: Assignment) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.clients, b.clients, strict=True))


def refusal(partition: Partition, labels: np.ndarray, domains: np.ndarray | None, classes: int) -> str:
    with pytest.raises(DataError) as caught:
        partition.assign(data(labels, domains, classes), 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_partitions_are_found_and_described() -> None:
    assert set(PARTITIONS) >= BASIC
    for name, partition in PARTITIONS.items():
        assert len(summary(partition)) > 20, name
        assert all(field.description for key, field in partition.model_fields.items() if key != "name"), name


# --- what holds for all ---------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[Partition, int, int, bool]:
    """Any partition, possible or not; with the number of samples and classes, and whether all are dealt."""
    classes = draw(st.integers(1, 8))
    n = draw(st.integers(1, 150))
    clients = draw(st.integers(1, 20))
    drawn = [name for name, part in PARTITIONS.items() if not issubclass(part, OwnPartition)]
    name = draw(st.sampled_from(sorted(drawn)))
    fields: dict[str, Any] = {"clients": clients}
    all_used = name in BASIC
    if name in ("iid", "domains", "tasks"):
        fields["sizes"] = draw(st.sampled_from(["equal", "lognormal", "power"]))
        fields["spread"] = 1.0 if fields["sizes"] == "equal" else draw(st.floats(0, 10))
        fields["min_samples"] = draw(st.integers(1, 3))
    if name in ("iid", "domains"):
        fields["samples"] = draw(st.none() | st.integers(1, 10))
        all_used = fields["samples"] is None
    if name == "domains" and draw(st.booleans()):
        fields |= {
            "labels": "dirichlet",
            "sizes": "equal",
            "spread": 1.0,
            "alpha": draw(st.floats(0.01, 100)),
            "attempts": 3,
        }
    if name == "label_skew":
        fields["rho"] = draw(st.floats(0.01, 1))
        all_used = clients >= classes
    if name == "shards":
        fields["shards_per_client"] = draw(st.integers(1, 4))
    if name == "dirichlet":
        fields |= {
            "alpha": draw(st.floats(1e-3, 1e3)),
            "min_samples": draw(st.integers(1, 3)),
            "attempts": 3,
            "capped": draw(st.booleans()),
        }
    if name == "difficulty":
        fields["expert"] = "logistic"
    if name == "tasks":
        del fields["clients"]
        task = st.fixed_dictionaries(
            {
                "labels": st.lists(st.integers(0, classes - 1), min_size=1, max_size=4, unique=True),
                "clients": st.integers(1, 6),
                "samples": st.none() | st.integers(1, 8),
            }
        )
        fields["tasks"] = draw(st.lists(task, min_size=1, max_size=3))
        fields["foreign"] = draw(st.sampled_from([0.0, 0.1, 0.5]))
        all_used = False
    return make(name, **fields), n, classes, all_used


@settings(max_examples=200, deadline=None)
@given(request=requests(), seed=st.integers(0, 2**31))
def test_no_sample_twice_no_client_empty_or_one_line(
    request: tuple[Partition, int, int, bool], seed: int
) -> None:
    partition, n, classes, all_used = request
    labels = labels_of(n, classes, seed)
    domains = labels_of(n, 3, seed + 1)
    refused = ""
    try:
        assignment = partition.assign(data(labels, domains, classes), seed)
    except DataError as error:
        refused = str(error)
    if refused:
        event(f"{partition.name} refused")
        assert "\n" not in refused
        return
    event(f"{partition.name} done")
    given_out = flat(assignment)
    assert len(assignment.clients) == partition.clients
    assert min(len(part) for part in assignment.clients) >= getattr(partition, "min_samples", 1)
    assert len(np.unique(given_out)) == len(given_out)
    assert given_out.min() >= 0
    assert given_out.max() < n
    if all_used:
        assert len(given_out) == n
    if assignment.groups is not None:
        assert assignment.groups.shape == (partition.clients,)
        assert assignment.groups.dtype == np.int64
    assert same(assignment, partition.assign(data(labels, domains, classes), seed))


@pytest.mark.parametrize(
    "partition",
    [
        make("iid", clients=10),
        make("iid", clients=10, sizes="lognormal"),
        make("label_skew", clients=10),
        make("shards", clients=10),
        make("dirichlet", clients=10),
        make("domains", clients=10),
        make("domains", clients=10, labels="dirichlet"),
        make("tasks", tasks=[{"labels": [0, 1, 2, 3], "clients": 5}, {"labels": [4, 5, 6], "clients": 5}]),
    ],
    ids=lambda partition: partition.name,
)
def test_seeds_matter_and_impossible_requests_are_refused(partition: Partition) -> None:
    labels = even_labels(100, 10)
    domains = labels % 2
    a, b = (partition.assign(data(labels, domains, 10), seed) for seed in (0, 1))
    assert not same(a, b)
    assert "use fewer" in refusal(partition, labels[:9], domains[:9], 10)
    assert "must lie in range(9)" in refusal(partition, labels, domains, 9)
    assert "must lie in range(10)" in refusal(partition, labels - 1, domains, 10)


def test_the_clients_of_tasks_are_counted_as_they_are_read() -> None:
    """Numbers in quotes are read as numbers, there too."""
    counts = [{"labels": [0, 1], "clients": "3"}, {"labels": [2], "clients": 4}]
    assert make("tasks", tasks=counts).clients == 7


# --- IID and sizes --------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_one_at_most() -> None:
    labels = labels_of(103, 10)
    sizes = [len(part) for part in make("iid", clients=10).assign(data(labels, None, 10), 0).clients]
    assert sorted(sizes) == [10] * 7 + [11] * 3
    few = make("iid", clients=10, samples=5).assign(data(labels, None, 10), 0)
    assert [len(part) for part in few.clients] == [5] * 10


def test_iid_labels_are_independent_of_the_client() -> None:
    labels = even_labels(1000, 4)
    seen = counts(make("iid", clients=8).assign(data(np.sort(labels), None, 4), 0), np.sort(labels), 4)
    assert np.abs(seen - 125).max() < 5 * np.sqrt(125)


def test_power_sizes_are_those_of_flts_algorithm_4() -> None:
    clients, least, delta, total = 50, 20, 0.8, 10_000
    partition = make("iid", clients=clients, sizes="power", spread=delta, min_samples=least)
    assignment = partition.assign(data(np.zeros(total, np.int64), None, 1), 0)
    sizes = np.array([len(part) for part in assignment.clients])
    assert sizes.sum() == total
    # alpha + exp(beta m^delta): beta from the last client must explain all others and the sum.
    powers = np.arange(1, clients + 1) ** delta
    beta = np.log(sizes[-1] - least) / powers[-1]
    expected = least + np.exp(beta * powers)
    assert np.abs(sizes - expected).max() < 2
    assert expected.sum() == pytest.approx(total, rel=0.01)


def test_lognormal_sizes_have_the_spread() -> None:
    for spread in (0.5, 1.5):
        weights = client_weights(1, 20_000, "lognormal", spread, np.random.default_rng(0))
        assert np.log(weights).std() == pytest.approx(spread, rel=0.03)
    partition = make("iid", clients=500, sizes="lognormal", spread=0.5)
    sizes = [len(part) for part in partition.assign(data(np.zeros(500_000, np.int64), None, 1), 0).clients]
    assert np.log(sizes).std() == pytest.approx(0.5, rel=0.15)
    assert sum(sizes) == 500_000


def test_sizes_that_cannot_be_are_refused() -> None:
    labels = labels_of(100, 10)
    assert "need 110, there are 100" in refusal(make("iid", clients=10, samples=11), labels, None, 10)
    assert "need 110, there are 100" in refusal(make("iid", clients=10, min_samples=11), labels, None, 10)
    few = make("iid", clients=10, samples=2, min_samples=3)
    assert "a mean of 2 samples is below min_samples=3" in refusal(few, labels, None, 10)


@given(
    total=st.integers(0, 10_000),
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50),
)
def test_apportion_is_exact_and_fair(total: int, weights: list[float]) -> None:
    shares = np.array(weights)
    seats = apportion(total, shares)
    assert seats.sum() == total
    assert np.abs(seats - shares * total / shares.sum()).max() < 1 + 1e-6


def test_apportion_by_hand() -> None:
    # Quotas 3.33, 1.67, 5.0 -> 3, 1, 5 and the one left goes to the largest remainder.
    np.testing.assert_array_equal(apportion(10, np.array([2.0, 1.0, 3.0])), [3, 2, 5])


def test_owners_by_hand() -> None:
    parts = by_owner(np.array([1, -1, 0, 1, 2, -1, 0]), 3)
    assert [part.tolist() for part in parts] == [[2, 6], [0, 3], [4]]
    with pytest.raises(DataError, match=r"2 of 4 clients \(the first is 1\)"):
        by_owner(np.array([0, 2, -1]), 4)


# --- label skew -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    clients=st.integers(1, 30),
    classes=st.integers(1, 12),
    rho=st.floats(0.01, 1),
    seed=st.integers(0, 1000),
)
def test_label_skew_counts_are_exact(clients: int, classes: int, rho: float, seed: int) -> None:
    labels = even_labels(64, classes)
    seen = counts(
        make("label_skew", clients=clients, rho=rho).assign(data(labels, None, classes), seed),
        labels,
        classes,
    )
    each = max(1, round(rho * classes))
    np.testing.assert_array_equal((seen > 0).sum(axis=1), each)
    if clients * each >= classes:
        np.testing.assert_array_equal(seen.sum(axis=0), 64)
    else:
        assert ((seen > 0).sum(axis=0) == 1).sum() == clients * each
    for label in range(classes):
        dealt = seen[:, label][seen[:, label] > 0]
        assert not len(dealt) or np.ptp(dealt) <= 1


def test_label_skew_of_the_papers() -> None:
    labels = even_labels(6000, 10)
    for rho, each in ((0.2, 2), (0.3, 3)):
        seen = counts(make("label_skew", rho=rho).assign(data(labels, None, 10), 0), labels, 10)
        assert set((seen > 0).sum(axis=1)) == {each}
        owners = (seen > 0).sum(axis=0)
        assert len(set(owners)) > 1  # drawn at random, not in turn
        assert owners.min() >= 5 * each


def test_label_skew_ignores_labels_without_samples() -> None:
    labels = even_labels(30, 3) * 2  # 0, 2, 4 of six classes
    seen = counts(make("label_skew", clients=6, rho=1).assign(data(labels, None, 6), 0), labels, 6)
    np.testing.assert_array_equal(seen, np.tile([5, 0, 5, 0, 5, 0], (6, 1)))


def test_label_skew_with_too_few_samples_of_a_label() -> None:
    labels = np.array([0] * 100 + [1] * 3)
    message = refusal(make("label_skew", clients=10, rho=1), labels, None, 2)
    assert "label 1 has 3 samples for 10 clients" in message


# --- shards ---------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(clients=st.integers(1, 20), each=st.integers(1, 4), n=st.integers(80, 300), seed=st.integers(0, 1000))
def test_shards_are_runs_of_the_sorted_labels(clients: int, each: int, n: int, seed: int) -> None:
    labels = labels_of(n, 5)
    assignment = make("shards", clients=clients, shards_per_client=each).assign(data(labels, None, 5), seed)
    assert np.array_equal(np.sort(flat(assignment)), np.arange(n))
    size = n // (clients * each)
    for part in assignment.clients:
        assert each * size <= len(part) <= each * (size + 1)


def test_shards_of_the_paper() -> None:
    labels = even_labels(6000, 10)
    assignment = make("shards", clients=100).assign(data(labels, None, 10), 0)
    seen = counts(assignment, labels, 10)
    np.testing.assert_array_equal(seen.sum(axis=1), 600)
    # 300 divides 6000, so every shard has one label: 600 of one or 300 of two.
    assert set(seen.ravel()) <= {0, 300, 600}
    assert "need 70000 samples" in refusal(
        make("shards", clients=700, shards_per_client=100), labels, None, 10
    )


@settings(max_examples=50, deadline=None)
@given(
    clients=st.integers(1, 12),
    each=st.integers(1, 3),
    size=st.integers(1, 5),
    spare=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_shards_of_a_size_leave_the_others_to_nobody(
    clients: int, each: int, size: int, spare: int, seed: int
) -> None:
    """A client's samples are runs of the sorted labels, from places that are multiples of the size."""
    n = clients * each * size + spare
    labels = np.arange(n) // 7 % 5
    part = make("shards", clients=clients, shards_per_client=each, shard_size=size)
    assignment = part.assign(data(labels, None, 5), seed)
    assert [len(samples) for samples in assignment.clients] == [each * size] * clients
    assert len(np.unique(flat(assignment))) == clients * each * size
    in_shards = np.zeros(5, np.int64)
    for samples in assignment.clients:
        in_shards += np.bincount(labels[samples], minlength=5)
    assert (in_shards <= np.bincount(labels, minlength=5)).all()


def test_shards_of_a_size_have_few_labels_and_need_enough_samples() -> None:
    labels = even_labels(6000, 10)  # 250 divides 6000: a shard has one label
    few = make("shards", clients=5, shards_per_client=2, shard_size=250)
    seen = counts(few.assign(data(labels, None, 10), 0), labels, 10)
    assert seen.sum(axis=1).tolist() == [500] * 5
    assert (np.count_nonzero(seen, axis=1) <= 2).all()
    whole = make("shards", clients=120, shard_size=250)
    same = make("shards", clients=120)
    for one, other in zip(*(p.assign(data(labels, None, 10), 3).clients for p in (whole, same)), strict=True):
        assert np.array_equal(one, other)  # all 240 shards are somebody's
    assert "121 clients with 2 shards of 250 need 60500 samples" in refusal(
        make("shards", clients=121, shard_size=250), labels, None, 10
    )


# --- Dirichlet ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capped", [True, False])
def test_dirichlet_concentration(capped: bool) -> None:
    labels = even_labels(2000, 10)

    def skew(alpha: float) -> float:
        partition = make("dirichlet", clients=20, alpha=alpha, capped=capped, attempts=1000)
        seen = counts(partition.assign(data(labels, None, 10), 0), labels, 10)
        assert seen.sum() == len(labels)
        return float((seen.max(axis=1) / seen.sum(axis=1)).mean())

    assert skew(1e5) == pytest.approx(0.1, abs=0.02)
    assert 0.2 < skew(1.0) < skew(0.05)
    assert skew(0.05) > 0.6


def test_dirichlet_shares_have_the_right_moments() -> None:
    alpha, clients = 0.7, 5
    shares = []
    for seed in range(400):
        assignment = make("dirichlet", clients=clients, alpha=alpha, capped=False).assign(
            data(np.zeros(10_000, np.int64), None, 1), seed
        )
        shares.append([len(part) / 10_000 for part in assignment.clients])
    total = alpha * clients
    variance = alpha * (total - alpha) / (total**2 * (total + 1))  # of Dir(alpha, ..., alpha)
    assert np.mean(shares) == pytest.approx(1 / clients)
    assert np.var(shares) == pytest.approx(variance, rel=0.12)


def test_dirichlet_is_dirichlet_for_every_class_unless_capped() -> None:
    """The class that is dealt last has shares of Dir(alpha) too; NIID-Bench's cap makes them vary more."""
    alpha, clients, labels = 5.0, 10, even_labels(200, 10)
    variance = alpha * (clients - 1) * alpha / ((alpha * clients) ** 2 * (alpha * clients + 1))

    def last_class(**fields: Any) -> float:
        partition = make("dirichlet", clients=clients, alpha=alpha, **fields)
        made = data(labels, None, 10)
        found = [counts(partition.assign(made, seed), labels, 10)[:, 9] / 200 for seed in range(150)]
        return float(np.var(found))

    assert last_class() == pytest.approx(variance, rel=0.15)
    assert last_class(capped=True) > 2 * variance


def test_gaps_in_labels_change_nothing() -> None:
    """Labels 0, 10, ..., 90: 20 % of the ten that occur, not of the 91 up to the largest."""
    labels = even_labels(60, 10)
    for name in ("label_skew", "relabelled"):
        partition = make(name, clients=20)
        plain, wide = (partition.assign(data(y, None, c), 3) for y, c in ((labels, 10), (10 * labels, 91)))
        for a, b in zip(plain.clients, wide.clients, strict=True):
            np.testing.assert_array_equal(a, b)
        if plain.label_maps is not None and wide.label_maps is not None:
            np.testing.assert_array_equal(wide.label_maps[:, ::10], 10 * plain.label_maps)
        else:
            assert {len(np.unique(labels[part])) for part in wide.clients} == {2}


def test_dirichlet_cap_limits_the_sizes() -> None:
    labels = even_labels(1000, 10)

    def largest(capped: bool) -> int:
        partition = make("dirichlet", clients=20, alpha=0.3, capped=capped, attempts=1000)
        return max(len(part) for part in partition.assign(data(labels, None, 10), 0).clients)

    # A client below n/N = 500 takes at most one more class of 1000.
    assert largest(True) < 1500 < largest(False) + 700
    assert largest(True) < largest(False)


def test_dirichlet_gives_up_and_names_what_would_do() -> None:
    labels = even_labels(500, 10)
    wanted = make("dirichlet", clients=100, alpha=0.01, min_samples=40, attempts=4, capped=False)
    message = refusal(wanted, labels, None, 10)
    assert "in 4 draws of Dir(0.01) over 100 clients" in message
    found = re.search(r"alpha=([\d.e+]+) would do", message)
    assert found is not None
    better = wanted.model_copy(update={"alpha": float(found[1]), "attempts": 200})
    assert min(len(part) for part in better.assign(data(labels, None, 10), 0).clients) >= 40

    wanted = make("dirichlet", clients=100, alpha=2, min_samples=40, attempts=20, capped=False)
    message = refusal(wanted, labels, None, 10)
    found = re.search(r"min_samples=(\d+) or", message)
    assert found is not None
    reached = wanted.model_copy(update={"min_samples": int(found[1])}).assign(data(labels, None, 10), 0)
    assert min(len(part) for part in reached.clients) == int(found[1])

    assert "need 6000, there are 5000" in refusal(make("dirichlet", min_samples=60), labels, None, 10)
    assert "fewer clients would do" in refusal(
        make("dirichlet", clients=5000, alpha=1e-3, attempts=1, capped=False), labels, None, 10
    )


# --- tasks ----------------------------------------------------------------------------------------------

FMNIST_TASKS = [
    {"labels": [0, 1, 2, 3, 4, 6], "clients": 5, "samples": 2000},
    {"labels": [5, 7, 9], "clients": 3, "samples": 1000},
    {"labels": [8], "clients": 2, "samples": 500},
]


@pytest.mark.parametrize("foreign", [0.0, 0.1, 0.2])
def test_tasks_of_mt_hfl(foreign: float) -> None:
    labels = even_labels(6000, 10)
    partition = make("tasks", tasks=FMNIST_TASKS, foreign=foreign)
    assert partition.clients == 10
    assignment = partition.assign(data(labels, None, 10), 0)
    assert assignment.groups is not None
    np.testing.assert_array_equal(assignment.groups, [0] * 5 + [1] * 3 + [2] * 2)
    assert len(np.unique(flat(assignment))) == len(flat(assignment))
    seen = counts(assignment, labels, 10)
    for client, group in enumerate(assignment.groups):
        task = FMNIST_TASKS[group]
        own = seen[client, task["labels"]].sum()
        assert seen[client].sum() == task["samples"]
        assert own == round(task["samples"] * (1 - foreign))
        if not foreign:
            assert (seen[client, task["labels"]] > 0).all()


def test_tasks_use_everything_without_a_number_of_samples() -> None:
    labels = even_labels(60, 10)
    tasks = [{"labels": range(7), "clients": 7}, {"labels": [7, 8, 9], "clients": 2}]
    assignment = make("tasks", tasks=tasks).assign(data(labels, None, 10), 0)
    assert [len(part) for part in assignment.clients] == [60] * 7 + [90] * 2
    half = make(
        "tasks", tasks=[{"labels": [0, 1], "clients": 2}, {"labels": [2, 3], "clients": 2}], foreign=0.25
    )
    seen = counts(half.assign(data(labels, None, 10), 0), labels, 10)
    np.testing.assert_array_equal(seen.sum(axis=1), 48)  # 120 of a task / 1.25 / 2 clients
    np.testing.assert_array_equal(seen[[0, 1, 2, 3], [[2, 2, 0, 0], [3, 3, 1, 1]]].sum(axis=0), 12)


def test_tasks_may_share_labels() -> None:
    labels = even_labels(120, 4)
    tasks = [{"labels": [0, 1], "clients": 3}, {"labels": [1, 2], "clients": 1}]
    assignment = make("tasks", tasks=tasks).assign(data(labels, None, 4), 0)
    seen = counts(assignment, labels, 4)
    # Label 1 is divided three to one: 90 and 30.
    np.testing.assert_array_equal(seen[:3].sum(axis=0), [120, 90, 0, 0])
    np.testing.assert_array_equal(seen[3], [0, 30, 120, 0])
    assert len(np.unique(flat(assignment))) == 360


def test_tasks_may_have_unequal_clients() -> None:
    labels = even_labels(500, 4)
    tasks = [{"labels": [0, 1], "clients": 10, "samples": 80}, {"labels": [2, 3], "clients": 10}]
    partition = make("tasks", tasks=tasks, sizes="power", min_samples=5, foreign=0.1)
    sizes = np.array([len(part) for part in partition.assign(data(labels, None, 4), 0).clients])
    assert sizes[:10].sum() == 800
    assert sizes[10:].sum() == 909  # 1000 / 1.1: the rest is left for the others' foreign share
    assert sizes.min() >= 5
    assert (np.diff(sizes[:10]) >= 0).all()
    assert sizes[9] > 3 * sizes[0]


def test_tasks_errors() -> None:
    labels = even_labels(60, 10)
    big = make("tasks", tasks=[{"labels": [0], "clients": 2, "samples": 31}])
    assert "partition.tasks[0]: 2 clients with 31 samples each need 62, there are 60" in refusal(
        big, labels, None, 10
    )
    beyond = make("tasks", tasks=[{"labels": [0], "clients": 1}, {"labels": [10], "clients": 1}])
    assert "partition.tasks[1].labels: 10 is not a label" in refusal(beyond, labels, None, 10)
    nobody = make("tasks", tasks=[{"labels": [0], "clients": 1}, {"labels": [9, 1], "clients": 1}])
    assert "partition.tasks[1].labels: no training sample has label 9" in refusal(
        nobody, labels[labels < 9], None, 10
    )
    alone = make("tasks", tasks=[{"labels": range(10), "clients": 2, "samples": 10}], foreign=0.5)
    assert "tasks[0] needs 10 samples with labels of other tasks, 0 are left" in refusal(
        alone, labels, None, 10
    )
    with pytest.raises(ConfigError, match="clients is 5, but the tasks have 1 in total"):
        make("tasks", tasks=[{"labels": [0], "clients": 1}], clients=5)
    with pytest.raises(ConfigError, match="labels must be different"):
        make("tasks", tasks=[{"labels": [0, 0], "clients": 1}])
    with pytest.raises(ConfigError, match="samples: set it for each task"):
        make("tasks", tasks=[{"labels": [0], "clients": 1}], samples=5)
    with pytest.raises(ConfigError, match=r"tasks\.0\.clients"):
        make("tasks", tasks=[{"labels": [0]}])
    again = PARTITIONS["tasks"].model_validate(big.model_dump())
    assert again == big


# --- domains --------------------------------------------------------------------------------------------


def test_domains_give_every_client_one_source() -> None:
    domains = np.random.default_rng(0).permutation(np.repeat([0, 2, 5], 100))
    labels = labels_of(300, 4)
    assignment = make("domains", clients=8).assign(data(labels, domains, 4), 0)
    assert assignment.groups is not None
    np.testing.assert_array_equal(assignment.groups, [0] * 3 + [2] * 3 + [5] * 2)
    for part, group in zip(assignment.clients, assignment.groups, strict=True):
        assert set(domains[part]) == {group}
    assert sorted(len(part) for part in assignment.clients) == [33, 33, 33, 33, 34, 34, 50, 50]
    assert len(np.unique(flat(assignment))) == 300


def test_domains_in_given_numbers_as_in_mix_4() -> None:
    domains = np.repeat(np.arange(4), 2000)
    given_numbers = (3, 2, 2, 1)
    partition = make("domains", clients_per_domain=given_numbers, samples=500)
    assert partition.clients == 8
    assignment = partition.assign(data(labels_of(8000, 10), domains, 10), 0)
    assert assignment.groups is not None
    np.testing.assert_array_equal(np.bincount(assignment.groups), given_numbers)
    assert {len(part) for part in assignment.clients} == {500}


def test_dirichlet_within_domains() -> None:
    domains = np.repeat([0, 1], 5000)
    labels = labels_of(10_000, 10)

    def skew(**fields: Any) -> float:
        assignment = make("domains", clients=10, **fields).assign(data(labels, domains, 10), 0)
        assert len(np.unique(flat(assignment))) == 10_000
        seen = counts(assignment, labels, 10)
        return float((seen.max(axis=1) / seen.sum(axis=1)).mean())

    assert skew() < 0.16
    assert skew(labels="dirichlet", alpha=0.2) > 0.3


def test_domains_errors() -> None:
    labels, domains = labels_of(100, 4), np.repeat(np.arange(4), 25)
    assert "needs data with domains" in refusal(make("domains", clients=4), labels, None, 4)
    assert "3 clients for 4 domains" in refusal(make("domains", clients=3), labels, domains, 4)
    wrong = make("domains", clients_per_domain=[2, 2])
    assert "2 numbers for 4 domains; give 4" in refusal(wrong, labels, domains, 4)
    greedy = make("domains", clients=4, samples=26)
    assert "domain 0: 1 clients with 26 samples each need 26" in refusal(greedy, labels, domains, 4)
    with pytest.raises(ConfigError, match="add up to clients=5"):
        make("domains", clients_per_domain=[2, 2], clients=5)
    with pytest.raises(ConfigError, match="leave sizes out"):
        make("domains", labels="dirichlet", sizes="power")


# --- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("iid", {"spread": 2}, "spread 2.0 would change nothing; it is used with sizes=lognormal or power"),
        ("tasks", {"tasks": [{"labels": [0], "clients": 1}], "spread": 2}, "it is used with sizes=lognormal"),
        ("domains", {"alpha": 0.1}, "alpha 0.1 would change nothing; it is used with labels=dirichlet"),
        ("domains", {"attempts": 9}, "attempts 9 would change nothing; it is used with labels=dirichlet"),
        ("difficulty", {"labels": "iid", "attempts": 9}, "attempts 9 would change nothing"),
        ("difficulty", {"alpha": 0.1, "labels": "iid"}, "alpha 0.1 would change nothing"),
        ("difficulty", {"expert": "logistic", "losses": "x.npy"}, "losses replaces the expert"),
        ("sc_niid", {"shards_per_client": 3, "rho": 0.5}, "with rho a client has labels, not shards"),
        (
            "sc_niid",
            {"p": 5, "super_clusters": [[0, 1]]},
            "super_clusters are given, so none are searched for",
        ),
        (
            "sc_dirichlet",
            {"linkage": "single", "super_clusters": [[0]]},
            "linkage single would change nothing",
        ),
    ],
)
def test_settings_that_would_change_nothing_are_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **fields)
    # What a resolved config says of all settings, the defaults among them, is taken.
    needed = {"tasks": [{"labels": [0], "clients": 1}]} if name == "tasks" else {}
    whole = make(name, **needed)
    assert type(whole).model_validate(whole.model_dump()) == whole


# --- scale ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("label_skew", "dirichlet", "tasks"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("iid", "shards", "domains")),
    ],
)
def test_a_hundred_thousand_clients(name: str) -> None:
    labels, clients = labels_of(1_000_000, 10), 100_000
    fields: dict[str, Any] = {"clients": clients}
    if name == "tasks":
        halves = [range(5), range(5, 10)]
        fields = {"tasks": [{"labels": half, "clients": clients // 2, "samples": 9} for half in halves]}
    if name == "dirichlet":
        fields["alpha"] = 2.0
    assignment = make(name, **fields).assign(data(labels, labels % 2, 10), 0)
    assert len(assignment.clients) == clients
    assert len(np.unique(flat(assignment))) == len(flat(assignment)) >= 9 * clients
