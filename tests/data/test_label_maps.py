"""Label maps: the same samples under other labels, by virtual ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from typing_extensions import override

from rayfl.data import Assignment, Partition, Ragged, Samples, build_federation, describe, fingerprint
from rayfl.errors import DataError
from rayfl.evaluation.sharing import EvaluationPlan
from rayfl.training.batches import Batches

# Sample i is [i]; labels 0, 1, 2 in turn. 6 training samples, 9 test samples.
PLAIN = Samples(
    "rows",
    np.arange(6, dtype=np.float32)[:, None],
    np.arange(6) % 3,
    np.arange(9, dtype=np.float32)[:, None] + 100,
    np.arange(9) % 3,
    classes=3,
    domain_train=np.arange(6) // 3,
    domain_test=np.arange(9) % 2,
)
MAPS = np.array([[0, 1, 2], [1, 0, 2], [2, 2, 0]])
MAPPED = replace(PLAIN, label_maps=MAPS)


class Written(Partition):
    """A partition that is written down, with label maps."""

    name: Literal["written"] = "written"

    parts: tuple[tuple[int, ...], ...]
    maps: tuple[int, ...] | None = None
    rows: tuple[tuple[int, ...], ...] | None = None
    tests: tuple[tuple[int, ...], ...] | None = None

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        return Assignment(
            [np.array(part) for part in self.parts],
            label_map=None if self.maps is None else np.array(self.maps),
            label_maps=None if self.rows is None else np.array(self.rows),
            test=None if self.tests is None else [np.array(part, np.int64) for part in self.tests],
        )


def build(partition: Written, samples: Samples = PLAIN, **fields: Any) -> Any:
    settings = {"validation": 0.0, "test_samples": "all", "seed": 0, **fields}
    return build_federation(replace(samples, domain_train=None, domain_test=None), partition, **settings)


def test_virtual_ids_by_hand() -> None:
    ids = np.array([0, 4, 6 + 4, 12 + 4, 12 + 5], np.int32)
    np.testing.assert_array_equal(MAPPED.inputs("train", ids)[:, 0], [0, 4, 4, 4, 5])
    np.testing.assert_array_equal(MAPPED.labels("train", ids), [0, 1, 0, 2, 0])
    np.testing.assert_array_equal(MAPPED.targets("train", ids), [0, 1, 0, 2, 0])
    np.testing.assert_array_equal(MAPPED.domains("train", ids), [0, 1, 1, 1, 1])
    tests = np.array([3, 9 + 3, 18 + 8])
    np.testing.assert_array_equal(MAPPED.inputs("test", tests)[:, 0], [103, 103, 108])
    np.testing.assert_array_equal(MAPPED.labels("test", tests), [0, 1, 0])
    np.testing.assert_array_equal(MAPPED.domains("test", tests), [1, 1, 0])


def test_without_maps_ids_are_indices() -> None:
    ids = np.array([5, 1, 1], np.int32)
    np.testing.assert_array_equal(PLAIN.inputs("train", ids), PLAIN.x_train[ids])
    np.testing.assert_array_equal(PLAIN.labels("train", ids), PLAIN.y_train[ids])
    np.testing.assert_array_equal(PLAIN.labels("test", ids), PLAIN.y_test[ids])
    assert replace(PLAIN, domain_test=None).domains("test", ids) is None
    with pytest.raises(IndexError):
        PLAIN.labels("train", np.array([6]))


def test_batches_read_through_the_maps() -> None:
    batches = Batches(MAPPED, torch.device("cpu"))
    ids = np.array([12 + 1, 1, 6 + 1])
    inputs, labels = batches.train(ids)
    assert inputs[:, 0].tolist() == [1, 1, 1]
    assert labels.tolist() == [2, 1, 0]
    inputs, labels = batches.test(ids)  # 13 = 9 + 4 there
    assert inputs[:, 0].tolist() == [104, 101, 107]
    assert labels.tolist() == [0, 1, 1]


def test_all_parts_of_a_client_are_seen_through_its_map() -> None:
    partition = Written(clients=2, parts=((0, 1, 3), (2, 4, 5)), maps=(0, 2), rows=MAPS.tolist())
    mapped = build(partition, validation=0.4)
    plain = build(Written(clients=2, parts=((0, 1, 3), (2, 4, 5))), validation=0.4)
    for part, count in (("train", 6), ("validation", 6), ("test", 9)):
        of = getattr(mapped, part)
        np.testing.assert_array_equal(of[0], getattr(plain, part)[0])
        np.testing.assert_array_equal(of[1], getattr(plain, part)[1] + 2 * count)
        assert of.values.dtype == np.int32
        assert len(of[1])
    # Client 1 has labels 2, 1, 2 as they are: the test part follows these, and then shows 0, 2, 0.
    seen = mapped.samples.labels("test", mapped.test[1])
    assert np.bincount(seen, minlength=3).tolist() == [3, 0, 1]
    assert np.bincount(plain.samples.labels("test", plain.test[1]), minlength=3).tolist() == [0, 1, 3]
    table = describe(mapped)[["class_0", "class_1", "class_2"]].to_numpy()
    counted = [
        np.bincount(MAPS[v][PLAIN.y_train[part]], minlength=3)
        for v, part in ((0, plain.train[0]), (2, plain.train[1]))
    ]
    np.testing.assert_array_equal(table, counted)


def test_the_same_image_under_two_maps_is_two_predictions() -> None:
    plan = EvaluationPlan.of([0, 0, 0], Ragged.of([np.array([3]), np.array([9 + 3]), np.array([3])]), 10)
    assert [job.samples.tolist() for job in plan.jobs] == [[3, 12]]
    labels = MAPPED.labels("test", plan.jobs[0].samples)
    correct = [labels == 1]
    counts, *_ = plan.gather(correct, [np.zeros(2, np.float32)])
    assert counts.tolist() == [0, 1, 0]


def test_own_test_samples() -> None:
    parts = ((0, 3), (1, 2))
    federation = build(Written(clients=2, parts=parts, tests=((8, 2, 5), (1,))))
    assert [part.tolist() for part in federation.test] == [[2, 5, 8], [1]]
    capped = build(Written(clients=2, parts=parts, tests=((8, 2, 5), (1,))), test_samples=2)
    assert capped.test.sizes.tolist() == [2, 1]
    assert set(capped.test[0].tolist()) < {2, 5, 8}
    with pytest.raises(DataError, match=r"client 1 has no test sample \(1 such clients\)"):
        build(Written(clients=2, parts=parts, tests=((8,), ())))
    both = build(
        Written(clients=2, parts=parts, tests=((8,), (1,)), maps=(1, 0), rows=MAPS.tolist()),
    )
    assert [part.tolist() for part in both.test] == [[9 + 8], [1]]


def test_refusals() -> None:
    with pytest.raises(DataError, match=r"has shape \(2, 2\) and type int64; expected integers \(V, 3\)"):
        replace(PLAIN, label_maps=np.zeros((2, 2), np.int64))
    with pytest.raises(DataError, match=r"labels outside range\(3\)"):
        replace(PLAIN, label_maps=np.array([[0, 1, 2], [0, 1, 3]]))
    with pytest.raises(DataError, match="first map must leave the labels as they are"):
        replace(PLAIN, label_maps=MAPS[1:])
    with pytest.raises(DataError, match="need data whose models predict labels"):
        replace(PLAIN, label_maps=MAPS, targets_train=np.zeros((6, 2), np.int64))
    with pytest.raises(DataError, match="names rows of 0 label maps for 2 clients"):
        build(Written(clients=2, parts=((0,), (1,)), maps=(0, 1)))
    with pytest.raises(DataError, match="names rows of 3 label maps"):
        build(Written(clients=2, parts=((0,), (1,)), maps=(0, 3), rows=MAPS.tolist()))
    with pytest.raises(DataError, match="has label maps already"):
        build(Written(clients=2, parts=((0,), (1,)), maps=(0, 1), rows=MAPS.tolist()), MAPPED)
    assert build(Written(clients=2, parts=((0,), (1,)), maps=(0, 1)), MAPPED).train[1].tolist() == [7]


def test_ids_that_do_not_fit_are_refused() -> None:
    many = 2**20
    x = np.broadcast_to(np.zeros((1, 1), np.float32), (many, 1))
    y = np.broadcast_to(np.zeros(1, np.int64), (many,))
    big = Samples("big", x, y, x[:10], y[:10], 1)
    replace(big, label_maps=np.zeros((2**11 - 1, 1), np.int64))
    with pytest.raises(DataError, match=r"more than 2\^31 - 1 ids; use at most 2047 different maps"):
        replace(big, label_maps=np.zeros((2**11, 1), np.int64))


def test_the_fingerprint_knows_the_maps() -> None:
    assert (
        len({fingerprint(PLAIN), fingerprint(MAPPED), fingerprint(replace(MAPPED, label_maps=MAPS[:2]))}) == 3
    )
