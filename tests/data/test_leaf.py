"""LEAF's files and their users as clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.data import DATASETS, PARTITIONS, Dataset, Partition, Samples, build_federation
from rayfl.errors import DataError


def leaf(folder: Path, **fields: Any) -> Dataset:
    return DATASETS["leaf"](folder=folder, **fields)


def natural(**fields: Any) -> Partition:
    return PARTITIONS["natural"](**fields)


def write(file: Path, people: dict[str, tuple[list[Any], list[Any]]], **changes: Any) -> None:
    """A file as LEAF's preprocessing writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(people),
        "num_samples": [len(y) for _, y in people.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in people.items()},
    }
    file.write_text(json.dumps({**content, **changes}))


def femnist(folder: Path, writers: int = 5) -> dict[str, int]:
    """A small FEMNIST: writer k has k + 2 training and k + 1 test images; whose every pixel is 10 k / 255."""
    sizes = {f"f{k:04d}_{k}": k for k in range(writers)}
    for part, more in (("train", 2), ("test", 1)):
        for half in (0, 1):
            users = {
                name: ([[10 * k / 255] * 784] * (k + more), [(k + place) % 62 for place in range(k + more)])
                for name, k in sizes.items()
                if k % 2 == half
            }
            write(folder / part / f"all_data_{half}_niid_0_keep_0_{part}_9.json", users)
    return sizes


def test_a_small_femnist(tmp_path: Path) -> None:
    femnist(tmp_path / "data")
    for path in (tmp_path, tmp_path / "data"):
        dataset = leaf(path, classes=62)
        assert dataset.available(tmp_path)
        samples = dataset.load(tmp_path)
        assert samples.shape == (1, 28, 28)
        assert samples.x_train.dtype == np.uint8
        assert len(samples.y_train) == 2 + 3 + 4 + 5 + 6
        assert len(samples.y_test) == 1 + 2 + 3 + 4 + 5
        assert samples.domain_train is not None
        assert samples.domain_test is not None
        # Whose an image is shows in its pixels, whatever the file it came from.
        np.testing.assert_array_equal(samples.x_train[:, 0, 13, 13], 10 * samples.domain_train)
        np.testing.assert_array_equal(samples.x_test[:, 0, 0, 27], 10 * samples.domain_test)
        assert samples.y_train[samples.domain_train == 3].tolist() == [3, 4, 5, 6, 7]
        assert samples.y_test[samples.domain_test == 3].tolist() == [3, 4, 5, 6]
        assert samples.class_names[10] == "A"
        assert samples.classes == 62
    assert not leaf(tmp_path / "elsewhere").available(tmp_path)


def test_every_client_is_a_writer_with_its_own_tests(tmp_path: Path) -> None:
    femnist(tmp_path)
    samples = leaf(tmp_path).load(tmp_path)
    federation = build_federation(samples, natural(clients=5), validation=0.5, test_samples="all", seed=0)
    assert samples.domain_train is not None
    assert samples.domain_test is not None
    for client in range(5):
        own = np.concatenate([federation.train[client], federation.validation[client]])
        assert sorted(own) == np.flatnonzero(samples.domain_train == client).tolist()
        assert federation.test[client].tolist() == np.flatnonzero(samples.domain_test == client).tolist()
    assert federation.groups is None
    capped = build_federation(samples, natural(clients=5), validation=0, test_samples=2, seed=0)
    assert capped.test.sizes.tolist() == [1, 2, 2, 2, 2]

    drawn = {
        tuple(samples.domain_train[natural(clients=2, min_samples=4).assign(samples, seed).clients[0]][:1])
        for seed in range(30)
    }
    assert drawn == {(2,), (3,)}  # the first of two of the writers 2, 3, 4
    with pytest.raises(DataError, match="4 clients for 3 sources with a test sample and 4 or more") as caught:
        natural(clients=4, min_samples=4).assign(samples, 0)
    assert "\n" not in str(caught.value)


def test_sources_without_tests_are_left_out() -> None:
    x, y = np.zeros((4, 1), np.float32), np.zeros(4, np.int64)
    samples = Samples("made", x, y, x, y, 1, np.array([0, 1, 1, 2]), np.array([0, 0, 2, 2]))
    found = natural(clients=2).assign(samples, 0)
    assert [part.tolist() for part in found.clients] == [[0], [3]]
    assert found.test is not None
    assert [part.tolist() for part in found.test] == [[0, 1], [2, 3]]
    plain = Samples("made", x, y, x, y, 1)
    with pytest.raises(DataError, match="natural needs data with sources"):
        natural(clients=2).assign(plain, 0)


def test_features_and_shapes(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write(tmp_path / part / "a.json", {"u": ([[0.5, -2.0, 3, 4, 5, 6]] * 2, [0, 1]), "v": ([], [])})
    samples = leaf(tmp_path).load(tmp_path)
    assert samples.x_train.dtype == np.float32
    assert samples.x_train.tolist() == [[0.5, -2, 3, 4, 5, 6]] * 2
    assert samples.classes == 2
    assert leaf(tmp_path, shape=[2, 3]).load(tmp_path).shape == (1, 2, 3)
    images = leaf(tmp_path, shape=[3, 1, 2], channels=1, size=4).load(tmp_path)
    assert images.shape == (1, 4, 4)
    assert images.x_train.dtype == np.float32  # not pixels of a byte
    for shape in ([7], [2, 2], [1, 1, 1, 6]):
        with pytest.raises(DataError, match="does not fit the 6 numbers of an input"):
            leaf(tmp_path, shape=shape).load(tmp_path)
    with pytest.raises(DataError, match=r"labels go up to 1, data\.classes is 1"):
        leaf(tmp_path, classes=1).load(tmp_path)


@pytest.mark.parametrize(
    ("users", "changes", "message"),
    [
        ({"u": ([[1.0]], [0])}, {"users": ["u", "w"]}, "2 users but 1 num_samples"),
        ({"u": ([[1.0]], [0])}, {"users": ["w"]}, "no lists x and y of user 'w'"),
        ({"u": ([[1.0]], [0])}, {"users": [3]}, "no lists x and y of user 3"),
        ({"u": ([[1.0]], [0])}, {"users": "u"}, "must be lists"),
        ({"u": ([[1.0]], [0])}, {"num_samples": [2]}, "has 1 inputs, 1 labels and num_samples 2"),
        ({"u": ([[1.0]], [0, 1])}, {}, "has 1 inputs, 2 labels"),
        ({"u": ([[1.0], [1.0, 2.0]], [0, 1])}, {}, "user u: inputs must be lists of numbers of one length"),
        ({"u": ([["a text"]], [0])}, {}, "texts and image names are not read"),
        ({"u": (["a text"], [0])}, {}, "texts and image names are not read"),
        ({"u": ([[float("nan")]], [0])}, {}, "NaN or infinity"),
        ({"u": ([[1e300]], [0])}, {}, "NaN or infinity"),
        ({"u": ([[1.0]], [10**9])}, {}, "labels go up to 1000000000 for 2 samples"),
        ({"u": ([[1.0]], [0.5])}, {}, "labels must be integers from 0"),
        ({"u": ([[1.0]], [-1])}, {}, "labels must be integers from 0"),
        ({"u": ([[1.0]], ["yes"])}, {}, "labels must be integers from 0"),
        ({"u": ([[1.0]], [0]), "v": ([[1.0, 2.0]], [0])}, {}, "inputs of u have 1 numbers, of v 2"),
        ({"u": ([[1.0, 2.0]], [0])}, {}, "inputs have 2 numbers in train, 1 in test"),
        ({"u": ([], [])}, {}, "no user has a sample"),
        ({}, {"user_data": []}, "must be lists, user_data a mapping"),
    ],
)
def test_broken_files_are_one_line(
    tmp_path: Path, users: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write(tmp_path / "train" / "a.json", users, **changes)
    write(tmp_path / "test" / "a.json", {"u": ([[1.0]], [0])})
    with pytest.raises(DataError) as caught:
        leaf(tmp_path).load(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_what_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no train/\*\.json in .*write them with LEAF's preprocess"):
        leaf(tmp_path).load(tmp_path)
    write(tmp_path / "train" / "a.json", {"u": ([[1.0]], [0])})
    with pytest.raises(DataError, match=r"there is no test/\*\.json"):
        leaf(tmp_path).load(tmp_path)
    (tmp_path / "test").mkdir()
    for text, message in (
        ('{"users": [', "cannot be read as JSON"),
        ("[1, 2]", "has no users, num_samples, user_data"),
        ('{"users": []}', "has no num_samples, user_data"),
        ("[" * 100_000, "cannot be read as JSON"),
    ):
        (tmp_path / "test" / "a.json").write_text(text)
        with pytest.raises(DataError, match=message) as caught:
            leaf(tmp_path).load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "test" / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        leaf(tmp_path).load(tmp_path)
