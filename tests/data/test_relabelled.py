"""CFL's scenarios: clusters that call the same things differently, and halves that agree."""

from __future__ import annotations

from dataclasses import replace
from math import comb, factorial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data import DATASETS, PARTITIONS, Federation, Partition, Samples, build_federation
from rayfl.errors import ConfigError, DataError
from tests.conftest import RealData


def make(name: str, **fields: Any) -> Partition:
    return PARTITIONS[name](**fields)


def samples_of(each: int = 60, classes: int = 10) -> Samples:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))
    x = y[:, None].astype(np.float32)  # what an image shows is its first label
    return Samples("made", x, y, x, y, classes)


def build(partition: Partition, samples: Samples | None = None, seed: int = 0) -> Federation:
    return build_federation(samples or samples_of(), partition, validation=0.2, test_samples="all", seed=seed)


def called(federation: Federation, client: int, part: str) -> dict[int, set[int]]:
    """What a client calls each kind of input."""
    half: Any = "test" if part == "test" else "train"
    ids = getattr(federation, part)[client]
    shown = federation.samples.inputs(half, ids)[:, 0].astype(int)
    names: dict[int, set[int]] = {}
    for kind, label in zip(shown.tolist(), federation.samples.labels(half, ids).tolist(), strict=True):
        names.setdefault(kind, set()).add(label)
    return names


def test_swapped_labels_by_hand() -> None:
    partition = make("relabelled", clients=5, clusters=2, swaps=[[1, 7], [3, 5]])
    federation = build(partition)
    assert federation.groups is not None
    assert federation.groups.tolist() == [0, 0, 0, 1, 1]
    for client, (a, b) in enumerate([(1, 7)] * 3 + [(3, 5)] * 2):
        expected = {kind: {kind} for kind in range(10)} | {a: {b}, b: {a}}
        for part in ("train", "validation", "test"):
            names = called(federation, client, part)
            assert names == {kind: expected[kind] for kind in names}
        assert len(called(federation, client, "train")) == 10
        assert len(called(federation, client, "test")) == 10


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(2, 12),
    clusters=st.integers(1, 12),
    clients=st.integers(1, 20),
    relabel=st.sampled_from(["swap", "permute"]),
    seed=st.integers(0, 1000),
)
def test_every_cluster_has_its_own_labels(
    classes: int, clusters: int, clients: int, relabel: str, seed: int
) -> None:
    partition = make("relabelled", clients=clients, clusters=clusters, relabel=relabel)
    samples = samples_of(20, classes)
    ways = comb(classes, 2) if relabel == "swap" else factorial(classes) - 1
    if clusters > min(clients, ways):
        with pytest.raises(DataError, match=r"use (fewer|at most)"):
            partition.assign(samples, seed)
        return
    found = partition.assign(samples, seed)
    maps, groups = found.label_maps, found.groups
    assert maps is not None
    assert groups is not None
    assert len(np.unique(maps, axis=0)) == len(maps) == clusters + 1
    np.testing.assert_array_equal(maps[0], np.arange(classes))
    np.testing.assert_array_equal(np.sort(maps, axis=1), np.tile(np.arange(classes), (clusters + 1, 1)))
    np.testing.assert_array_equal(found.label_map, groups + 1)
    assert np.ptp(np.bincount(groups, minlength=clusters)) <= 1
    moved = (maps[1:] != np.arange(classes)).sum(axis=1)
    if relabel == "swap":
        assert (moved == 2).all()
        if 2 * clusters <= classes:
            assert (maps[1:] != np.arange(classes)).sum(axis=0).max() == 1  # no label in two swaps
    assert sorted(np.concatenate(found.clients).tolist()) == list(range(20 * classes))


def test_the_inputs_are_iid() -> None:
    found = make("relabelled", clients=20).assign(samples_of(600), 0)
    labels = samples_of(600).y_train
    shares = np.array([np.bincount(labels[part], minlength=10) / len(part) for part in found.clients])
    assert abs(shares - 0.1).max() < 0.06
    assert {len(part) for part in found.clients} == {300}
    other = make("relabelled", clients=20).assign(samples_of(600), 1)
    assert not np.array_equal(found.label_maps, other.label_maps)  # type: ignore[arg-type]


def test_relabelled_refusals() -> None:
    for fields, message in (
        ({"swaps": [[0, 1]]}, "1 swaps are given for 4 clusters"),
        ({"clusters": 1, "swaps": [[1, 1]]}, "two different labels"),
        ({"clusters": 2, "swaps": [[0, 1], [1, 0]]}, "and no pair twice"),
        ({"clusters": 1, "swaps": [[0, 1]], "relabel": "permute"}, "is used with relabel=swap"),
    ):
        with pytest.raises(ConfigError, match=message):
            make("relabelled", **fields)
    with pytest.raises(DataError, match=r"10 is not a label of this data; labels lie in range\(10\)"):
        build(make("relabelled", clusters=1, swaps=[[0, 10]]))
    with pytest.raises(DataError, match="2 labels can be swapped in 1 ways, not 2"):
        build(make("relabelled", clusters=2), samples_of(classes=2, each=200))
    with pytest.raises(DataError, match="3 labels can be permuted in 5 ways, not 6"):
        build(make("relabelled", clusters=6, relabel="permute"), samples_of(classes=3, each=200))


def test_congruent_halves() -> None:
    federation = build(make("label_blocks"))
    assert federation.clients == 2
    assert federation.groups is not None
    assert federation.groups.tolist() == [0, 0]
    assert federation.samples.label_maps is None
    for client, labels in enumerate(([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])):
        for part in ("train", "validation", "test"):
            assert called(federation, client, part) == {label: {label} for label in labels}
    assert sorted(np.concatenate([federation.train.values, federation.validation.values])) == list(range(600))


def test_label_blocks_generalised() -> None:
    partition = make("label_blocks", clients=7, blocks=3, planted="blocks", samples=20)
    found = partition.assign(samples_of(), 0)
    assert found.groups is not None
    assert found.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    blocks = [{0, 1, 2, 3}, {4, 5, 6}, {7, 8, 9}]
    labels = samples_of().y_train
    for part, group in zip(found.clients, found.groups.tolist(), strict=True):
        assert set(labels[part].tolist()) <= blocks[group]
        assert len(part) == 20
    for fields in ({"clients": 5, "blocks": 6}, {"clients": 50, "blocks": 11}):
        with pytest.raises(DataError, match=f"use at most {min(fields['clients'], 10)}"):
            make("label_blocks", **fields).assign(samples_of(), 0)


def test_label_blocks_are_of_the_labels_that_occur() -> None:
    whole = samples_of()
    gaps = replace(whole, y_train=whole.y_train * 3, y_test=whole.y_test * 3, classes=28)
    found = make("label_blocks").assign(gaps, 0)
    labels = [set(gaps.y_train[part].tolist()) for part in found.clients]
    assert labels == [{0, 3, 6, 9, 12}, {15, 18, 21, 24, 27}]
    with pytest.raises(DataError, match="10 labels and 20 clients do not make 11 blocks; use at most 10"):
        make("label_blocks", clients=20, blocks=11).assign(gaps, 0)
    with pytest.raises(DataError, match=r"^partition, block \[0\]: 1 clients with 5000 samples"):
        make("label_blocks", samples=5000).assign(gaps, 0)


def test_real_label_swap(real_data: RealData) -> None:
    """CFL's setting, m=20 and k=4: the same image counts under other labels, in test as in training."""
    samples = DATASETS["fashion_mnist"]().load(real_data("fashion_mnist"))
    federation = build(make("relabelled", clients=20, samples=300), samples)
    assert federation.samples.x_train is samples.x_train
    maps = federation.samples.label_maps
    assert maps is not None
    assert maps.shape == (5, 10)
    n = len(samples.y_test)
    for client in range(20):
        ids = federation.test[client]
        row = maps[1 + client // 5]
        np.testing.assert_array_equal(ids // n, 1 + client // 5)
        np.testing.assert_array_equal(federation.samples.labels("test", ids), row[samples.y_test[ids % n]])
        assert (federation.samples.labels("test", ids) != samples.y_test[ids % n]).mean() == pytest.approx(
            0.2, abs=0.06
        )
