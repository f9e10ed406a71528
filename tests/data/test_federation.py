"""Federations: validation and test parts of every client."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from rayfl.data import (
    DATASETS,
    PARTITIONS,
    Assignment,
    Federation,
    Partition,
    Samples,
    build_federation,
    describe,
)
from rayfl.data import federation as federation_module
from rayfl.data.federation import scarce_strata
from rayfl.data.remarks import remarks
from rayfl.errors import ConfigError, DataError


class Given(Partition):
    """A partition that is written down."""

    name: Literal["given"] = "given"

    parts: tuple[tuple[int, ...], ...]

    def assign(self, samples: Samples, seed: int) -> Assignment:
        return Assignment([np.array(part) for part in self.parts])


def samples_of(
    train: list[int] | np.ndarray,
    test: list[int] | np.ndarray,
    domain_train: list[int] | None = None,
    domain_test: list[int] | None = None,
) -> Samples:
    y_train, y_test = np.array(train, np.int64), np.array(test, np.int64)
    return Samples(
        "test",
        np.zeros((len(y_train), 1), np.float32),
        y_train,
        np.zeros((len(y_test), 1), np.float32),
        y_test,
        classes=int(max(y_train.max(), y_test.max())) + 1,
        domain_train=None if domain_train is None else np.array(domain_train, np.int64),
        domain_test=None if domain_test is None else np.array(domain_test, np.int64),
    )


def same(a: Federation, b: Federation, part: str) -> bool:
    x, y = getattr(a, part), getattr(b, part)
    return np.array_equal(x.values, y.values) and np.array_equal(x.offsets, y.offsets)


# --- the test part --------------------------------------------------------------------------------------


def test_test_part_by_hand() -> None:
    # Client 0 has 3/4 of class 0: m <= 10 / (3/4) = 13.3, so 13: 9.75 and 3.25 -> 10 and 3.
    # Client 1 has class 1 only: all ten.
    # Client 2 has 1/2, 1/2: m = 20.
    samples = samples_of([0, 0, 0, 1, 1, 1, 0, 1], [0, 1] * 10)
    partition = Given(clients=3, parts=((0, 1, 2, 3), (4, 5), (6, 7)))
    federation = build_federation(samples, partition, validation=0, test_samples=None, seed=0)
    seen = [np.bincount(samples.y_test[part], minlength=2).tolist() for part in federation.test]
    assert seen == [[10, 3], [0, 10], [10, 10]]
    capped = build_federation(samples, partition, validation=0, test_samples=6, seed=0)
    # Quotas 4.5 and 1.5: equal remainders, the smaller label gets the place.
    assert [np.bincount(samples.y_test[part], minlength=2).tolist() for part in capped.test] == [
        [5, 1],
        [0, 6],
        [3, 3],
    ]
    one = build_federation(samples, partition, validation=0, test_samples=1, seed=0)
    assert one.test.sizes.tolist() == [1, 1, 1]


def test_test_part_follows_domains() -> None:
    samples = samples_of(
        [0, 1, 0, 1],
        [0, 0, 0, 1, 1, 1, 1, 0],
        domain_train=[0, 0, 1, 1],
        domain_test=[0, 0, 1, 0, 1, 1, 1, 1],
    )
    partition = Given(clients=2, parts=((0, 1), (2, 3)))
    federation = build_federation(samples, partition, validation=0, test_samples="all", seed=0)
    # Domain 0 has test labels 0, 0, 1; domain 1 has 0, 1, 1, 1, 0: m = 2 and 4.
    assert federation.test.sizes.tolist() == [2, 4]
    assert samples.domain_test is not None
    for client, part in enumerate(federation.test):
        assert set(samples.domain_test[part]) == {client}
        assert np.bincount(samples.y_test[part]).tolist() == [client + 1] * 2


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 8), domains=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_whole_labels_are_all_test_samples_of_a_clients_labels(clients: int, domains: int, seed: int) -> None:
    """By definition, in plain Python; of the domains that the client has them in. Training parts do not
    depend on it."""
    rng = np.random.default_rng(seed)
    samples = samples_of(
        np.arange(60) % 4,
        rng.integers(0, 4, 200),
        domain_train=(np.arange(60) // 4 % domains).tolist(),
        domain_test=rng.integers(0, domains, 200).tolist(),
    )
    assert samples.domain_train is not None
    assert samples.domain_test is not None
    partition = PARTITIONS["dirichlet"](clients=clients, alpha=0.5, attempts=1000)
    given: dict[str, Any] = {"samples": samples, "partition": partition, "validation": 0, "seed": seed}
    federation = build_federation(test_samples="whole_labels", **given)
    kinds = list(zip(samples.domain_test.tolist(), samples.y_test.tolist(), strict=True))
    for train, test in zip(federation.train, federation.test, strict=True):
        own = set(zip(samples.domain_train[train].tolist(), samples.y_train[train].tolist(), strict=True))
        assert test.tolist() == [place for place, kind in enumerate(kinds) if kind in own]
    assert same(federation, build_federation(test_samples="all", **given), "train")


def test_whole_labels_are_refused_for_clients_with_test_samples_of_their_own() -> None:
    class OwnTests(Given):
        @override
        def assign(self, samples: Samples, seed: int) -> Assignment:
            return replace(super().assign(samples, seed), test=[np.array([0]), np.array([1])])

    partition = OwnTests(clients=2, parts=((0,), (1,)))
    with pytest.raises(DataError, match=r"partition\.test_samples: whole_labels, but clients have test"):
        build_federation(
            samples_of([0, 1], [0, 1]), partition, validation=0, test_samples="whole_labels", seed=0
        )


def test_whole_labels_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of(np.arange(60) % 4, np.arange(200) % 4)
    given: dict[str, Any] = {
        "samples": samples, "partition": PARTITIONS["iid"](clients=3), "validation": 0, "seed": 0
    }  # fmt: skip
    monkeypatch.setattr(federation_module, "free_memory", lambda: 3 * 200 * 32)  # all have all labels
    assert build_federation(test_samples="whole_labels", **given).test.sizes.tolist() == [200] * 3
    monkeypatch.setattr(federation_module, "free_memory", lambda: 3 * 200 * 32 - 1)
    with pytest.raises(DataError, match=r"^partition\.test_samples: whole_labels gives the clients 600 test"):
        build_federation(test_samples="whole_labels", **given)
    build_federation(test_samples="all", **given)


def test_labels_without_test_samples() -> None:
    samples = samples_of([0, 1, 1, 2, 2], [0, 0, 1, 1])
    samples = replace(samples, classes=3)
    mixed = Given(clients=2, parts=((0, 1, 3), (2,)))
    federation = build_federation(samples, mixed, validation=0, test_samples=None, seed=0)
    assert np.bincount(samples.y_test[federation.test[0]]).tolist() == [2, 2]  # as if label 2 were not there
    alone = Given(clients=2, parts=((0, 1, 2), (3, 4)))
    with pytest.raises(DataError, match="no test sample has a label of client 1") as caught:
        build_federation(samples, alone, validation=0, test_samples=None, seed=0)
    assert "\n" not in str(caught.value)


def largest_following(counts: np.ndarray, available: np.ndarray) -> int:
    """The definition, in plain Python: the largest m with m p_c <= t_c for all c."""
    m = 0
    while all(
        (m + 1) * int(n) <= int(t) * int(counts.sum()) for n, t in zip(counts, available, strict=True) if n
    ):
        m += 1
    return m


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(1, 5),
    clients=st.integers(1, 8),
    alpha=st.floats(0.5, 10),
    cap=st.none() | st.integers(1, 30),
    seed=st.integers(0, 10_000),
)
def test_test_parts_are_the_largest_that_follow(
    classes: int, clients: int, alpha: float, cap: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samples = samples_of(
        np.concatenate([np.arange(classes), rng.integers(0, classes, 120)]),
        np.concatenate([np.arange(classes), rng.integers(0, classes, 60)]),
    )
    assume(not len(scarce_strata(samples)))  # which make no test part smaller
    partition = PARTITIONS["dirichlet"](clients=clients, alpha=alpha, attempts=1000)
    federation = build_federation(samples, partition, validation=0, test_samples=cap, seed=seed)
    available = np.bincount(samples.y_test, minlength=classes)
    prefixes: dict[int, list[set[int]]] = {c: [] for c in range(classes)}
    for train, test in zip(federation.train, federation.test, strict=True):
        counts = np.bincount(samples.y_train[train], minlength=classes)
        taken = np.bincount(samples.y_test[test], minlength=classes)
        m = largest_following(counts, available)
        assert len(test) == (m if cap is None else min(m, cap)) >= 1
        assert np.abs(taken - len(test) * counts / counts.sum()).max() < 1
        assert (np.diff(test) > 0).all()  # ascending, none twice
        for c in range(classes):
            prefixes[c].append(set(test[samples.y_test[test] == c].tolist()))
    for sets in prefixes.values():  # shared: all are beginnings of one order
        ordered = sorted(sets, key=len)
        assert all(small <= large for small, large in pairwise(ordered))


def test_test_samples_are_drawn_at_random() -> None:
    samples = samples_of([0, 0], np.zeros(1000, int))
    partition = Given(clients=1, parts=((0, 1),))

    def drawn(seed: int) -> list[int]:
        federation = build_federation(samples, partition, validation=0, test_samples=100, seed=seed)
        return federation.test[0].tolist()

    assert np.mean(drawn(0)) == pytest.approx(500, abs=120)
    assert drawn(0) == drawn(0) != drawn(1)


def test_auto_cap(tmp_path: Path) -> None:
    samples = samples_of(np.zeros(1000, int), np.zeros(30_000, int))
    sizes = {}
    for clients in (1, 1000):
        partition = PARTITIONS["iid"](clients=clients)
        federation = build_federation(samples, partition, validation=0, test_samples="auto", seed=0)
        sizes[clients] = set(federation.test.sizes.tolist())
    assert sizes == {1: {30_000}, 1000: {20_000}}


# --- validation -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(clients=st.integers(1, 30), fraction=st.floats(0, 0.99), seed=st.integers(0, 10_000))
def test_validation_is_a_fraction_and_training_is_the_rest(clients: int, fraction: float, seed: int) -> None:
    samples = samples_of(np.random.default_rng(seed).integers(0, 3, 90), [0, 1, 2])
    partition = PARTITIONS["iid"](clients=clients, sizes="lognormal")
    assigned = partition.assign(samples, seed).clients
    federation = build_federation(samples, partition, validation=fraction, test_samples=None, seed=seed)
    for whole, train, held in zip(assigned, federation.train, federation.validation, strict=True):
        assert len(held) == min(np.rint(fraction * len(whole)), len(whole) - 1)
        assert np.array_equal(np.sort(np.concatenate([train, held])), np.sort(whole))
        assert (np.diff(train) > 0).all()
        assert (np.diff(held) > 0).all()


def test_validation_is_drawn_at_random() -> None:
    samples = samples_of(np.zeros(10_000, int), [0])
    partition = PARTITIONS["iid"](clients=1)
    federation = build_federation(samples, partition, validation=0.3, test_samples=None, seed=0)
    assert federation.validation.values.mean() == pytest.approx(5000, abs=200)
    assert len(federation.validation.values) == 3000
    assert np.diff(federation.validation.values).max() > 5


def test_gaps_between_labels_are_named() -> None:
    y = np.repeat([0, 10, 20, 30], 10)
    partition = PARTITIONS["iid"](clients=2)

    def build(y: np.ndarray) -> Federation:
        return build_federation(samples_of(y, y), partition, validation=0, test_samples=None, seed=0)

    (line,) = remarks(build(y))
    assert line.startswith(
        "data: labels go up to 30, and no sample has label 1 (the first of 27 such): "
        "the network has 31 outputs"
    )
    assert remarks(build(y // 10)) == []


# --- the whole ------------------------------------------------------------------------------------------


def test_a_scarce_class_does_not_make_tests_small() -> None:
    """One test image of class 0: all others are tested in proportion, and the one that there is with them."""
    y_train, y_test = np.arange(5000) % 10, np.arange(1000) % 10
    few = [*np.flatnonzero(y_test != 0).tolist(), 0]
    partition = PARTITIONS["iid"](clients=20)

    def build(y: np.ndarray) -> Federation:
        return build_federation(samples_of(y_train, y), partition, validation=0, test_samples=None, seed=0)

    whole, scarce = build(y_test), build(y_test[few])
    assert remarks(whole) == []
    (line,) = remarks(scarce)
    assert line.startswith(
        "data: 1 test sample of label 0; in proportion to the training data there would be 90 ("
    )
    for part, full in zip(scarce.test, whole.test, strict=True):
        labels = np.bincount(scarce.samples.y_test[part], minlength=10)
        assert labels[0] == 1
        assert len(part) >= 0.75 * len(full)
    (line,) = remarks(build(y_test[few[:-1]]))
    assert line == "data: no test sample of label 0 (the only one): no client is tested on it"
    unseen = build_federation(
        samples_of(y_train % 8, y_test), partition, validation=0, test_samples=None, seed=0
    )
    assert remarks(unseen)[-1] == (
        "data: no training sample of label 8 (the first of 2 such), but 200 test samples: no network can "
        "learn to recognise them"
    )


def test_clients_of_scarce_classes_only_have_all_there_are() -> None:
    samples = samples_of(np.repeat([0, 1, 2], 1000), np.repeat([0, 1, 2], [2, 3, 600]))
    partition = Given(clients=2, parts=((0, 1, 1000, 1001, 1002), (2000, 2001, 2, 3)))
    federation = build_federation(samples, partition, validation=0, test_samples=40, seed=0)
    first, second = (np.bincount(samples.y_test[part], minlength=3).tolist() for part in federation.test)
    assert first == [2, 3, 0]
    assert second == [2, 0, 20]


def test_federation_is_a_function_of_the_seed(tmp_path: Path) -> None:
    samples = DATASETS["digits"]().load(tmp_path)
    partition = PARTITIONS["dirichlet"](clients=20)

    def build(seed: int, validation: float = 0.1) -> Federation:
        return build_federation(samples, partition, validation=validation, test_samples=40, seed=seed)

    for part in ("train", "validation", "test"):
        assert same(build(0), build(0), part)
        assert not same(build(0), build(1), part)
    assert same(build(0), build(0, 0.5), "test")  # what is set aside does not change what is tested
    assert build(0).train.values.dtype == np.int32


def test_groups_are_passed_on(tmp_path: Path) -> None:
    samples = DATASETS["synthetic"](samples=600, test_size=300).load(tmp_path)
    partition = PARTITIONS["domains"](clients=6)
    federation = build_federation(samples, partition, validation=0.1, test_samples="auto", seed=0)
    assert federation.groups is not None
    assert samples.domain_test is not None
    np.testing.assert_array_equal(federation.groups, [0, 0, 1, 1, 2, 2])
    for group, part in zip(federation.groups, federation.test, strict=True):
        assert set(samples.domain_test[part]) == {group}


def test_settings_out_of_range(tmp_path: Path) -> None:
    samples = samples_of([0, 1], [0, 1])
    partition = PARTITIONS["iid"](clients=1)
    for validation in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=r"validation: .* \[0, 1\)"):
            build_federation(samples, partition, validation=validation, test_samples=None, seed=0)
    with pytest.raises(ConfigError, match="test_samples: 0"):
        build_federation(samples, partition, validation=0, test_samples=0, seed=0)
    half = replace(samples, domain_train=np.zeros(2, np.int64))
    with pytest.raises(DataError, match="give both or none"):
        build_federation(half, partition, validation=0, test_samples=None, seed=0)


def test_describe() -> None:
    samples = samples_of([0, 0, 0, 1, 1, 1], [0, 1] * 10)
    partition = Given(clients=2, parts=((0, 1, 2, 3), (4, 5)))
    federation = build_federation(samples, partition, validation=0, test_samples=8, seed=0)
    table = describe(federation)
    assert table.columns.tolist() == ["n", "validation", "test", "group", "class_0", "class_1"]
    assert table.index.name == "client"
    assert table["group"].isna().all()
    assert table.drop(columns="group").to_numpy().tolist() == [[4, 0, 8, 3, 1], [2, 0, 8, 0, 2]]
    grouped = describe(replace(federation, groups=np.array([1, 0])))
    assert grouped["group"].tolist() == [1, 0]
    assert isinstance(table, pd.DataFrame)


@pytest.mark.slow
def test_a_hundred_thousand_clients(tmp_path: Path) -> None:
    dataset = DATASETS["synthetic"](samples=1_000_000, test_size=2_000, features=1, clusters=4)
    samples = dataset.load(tmp_path)
    partition = PARTITIONS["domains"](clients=100_000)
    federation = build_federation(samples, partition, validation=0.1, test_samples="auto", seed=0)
    assert federation.clients == 100_000
    assert federation.sizes.sum() == 900_000
    assert federation.test.sizes.max() <= 200
    assert federation.test.sizes.min() >= 1
    assert len(describe(federation)) == 100_000


def test_real_label_skew(real_data: object) -> None:
    root = real_data("fashion_mnist")  # type: ignore[operator]
    samples = DATASETS["fashion_mnist"]().load(root)
    partition = PARTITIONS["label_skew"](clients=100, rho=0.2)
    federation = build_federation(samples, partition, validation=0.1, test_samples="auto", seed=0)
    assert federation.sizes.sum() + federation.validation.sizes.sum() == 60_000
    for train, test in zip(federation.train, federation.test, strict=True):
        mine, tested = np.unique(samples.y_train[train]), np.unique(samples.y_test[test])
        assert len(mine) == 2
        np.testing.assert_array_equal(mine, tested)
        assert 1000 <= len(test) <= 2000  # all test samples of the label that is more frequent
