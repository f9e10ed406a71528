"""Data from a user's own function: what it may return, and what is refused in a line that names it."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from rayfl import cli, plugins
from rayfl.data import DATASETS, PARTITIONS, Samples, build_federation, fingerprint
from rayfl.data.arrays import column_of
from rayfl.data.held_out import hold_out
from rayfl.data.objects import partition_of
from rayfl.errors import ConfigError, DataError
from rayfl.servers import building
from tests.data.test_own_partitions import SMALL

COMMON = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

rng = np.random.default_rng(0)
X, Y = rng.random((30, 1, 4, 4), np.float32), np.arange(30) % 3
T, L = rng.random((12, 1, 4, 4), np.float32), np.arange(12) % 3

class Squares(Dataset):
    def __init__(self, n=30, bad=None):
        self.n, self.bad = n, bad
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if self.bad and i == 7:
            return self.bad(i)
        return torch.full((1, 4, 4), i / 10), i % 3

class Stream(IterableDataset):
    def __iter__(self):
        return iter([])
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """``mine(code)`` writes a module of the user's, and returns its path."""
    count = 0
    before = set(sys.modules)

    def write(code: str) -> str:
        nonlocal count
        count += 1
        path = tmp_path / f"mine_{tmp_path.name.strip('_').replace('-', '_')}_{count}.py"
        path.write_text(COMMON + textwrap.dedent(code))
        return str(path)

    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_restored", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield write
    for name in set(sys.modules) - before:
        if name.startswith("mine_"):
            del sys.modules[name]


def load(path: str, function: str = "load", **settings: Any) -> Samples:
    return DATASETS["python"](target=f"{path}:{function}", **settings).load(Path("nowhere"))


# --- what is taken --------------------------------------------------------------------------------------


RETURNS = {
    "four arrays": "return X, Y, T, L",
    "tensors": "return tuple(torch.from_numpy(a) for a in (X, Y, T, L))",
    "a dictionary": "return dict(x_train=X, y_train=Y, x_test=T, y_test=L)",
    "tensor datasets": "return TensorDataset(*map(torch.from_numpy, (X, Y))), "
    "TensorDataset(*map(torch.from_numpy, (T, L)))",
    "datasets": "return list(zip(X, Y)), list(zip(T, L))",
}


@pytest.mark.parametrize("kind", RETURNS)
def test_arrays_and_datasets_are_the_same_data(kind: str, mine: Callable[[str], str]) -> None:
    code = RETURNS[kind]
    if kind == "datasets":
        code = "class D(Dataset):\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        code += "    def __len__(self): return len(self.x)\n"
        code += "    def __getitem__(self, i): return self.x[i], self.y[i]\n"
        code += "def load():\n    return D(X, Y), D(T, L)\n"
    else:
        code = f"def load():\n    {code}\n"
    found = load(mine(code))
    rng = np.random.default_rng(0)
    x = rng.random((30, 1, 4, 4), np.float32)
    np.testing.assert_array_equal(found.x_train, x)
    assert found.y_train.tolist() == (np.arange(30) % 3).tolist()
    assert found.x_test.shape == (12, 1, 4, 4)
    assert (found.classes, found.name, found.numbering) == (3, "load", None)
    assert fingerprint(found) == fingerprint(load(mine("def load():\n    return X, Y, T, L\n")))


def test_a_tensor_dataset_that_transforms_its_items_is_read_by_its_items(mine: Callable[[str], str]) -> None:
    code = "class Shifted(TensorDataset):\n"
    code += "    def __getitem__(self, i): return self.tensors[0][i] + 1, self.tensors[1][i]\n"
    code += "def load():\n"
    code += "    return Shifted(*map(torch.from_numpy, (X, Y))), Shifted(*map(torch.from_numpy, (T, L)))\n"
    expected = np.random.default_rng(0).random((30, 1, 4, 4), np.float32) + 1
    np.testing.assert_array_equal(load(mine(code)).x_train, expected)


def test_a_fraction_of_each_class_becomes_the_test_part(mine: Callable[[str], str]) -> None:
    path = mine(
        """
        class One(Squares):
            pass
        def pair(): return X, Y
        def named(): return dict(x=X, y=Y, hospital=np.array(["b", "a", "c"] * 10))
        """
    )
    for function in ("One", "pair", "named"):
        found = load(path, function, test_fraction=0.2)
        assert np.bincount(found.y_test).tolist() == [2, 2, 2]
        assert np.bincount(found.y_train).tolist() == [8, 8, 8]
        assert found.numbering is not None
        assert found.numbering.split
        again, other = (load(path, function, test_fraction=0.2, seed=seed) for seed in (0, 1))
        assert fingerprint(found) == fingerprint(again)
        assert fingerprint(found) != fingerprint(other)
    column = found.columns["hospital"]
    assert column.values.tolist() == ["a", "b", "c"]
    assert column.test is not None
    # Which class a sample has decides its hospital, in this made-up case: 0 b, 1 a, 2 c.
    assert column.values[column.train].tolist() == [["b", "a", "c"][y] for y in found.y_train]
    assert column.values[column.test].tolist() == [["b", "a", "c"][y] for y in found.y_test]


def test_samples_of_a_divided_source_are_numbered_as_in_the_source(
    mine: Callable[[str], str], tmp_path: Path
) -> None:
    path = mine("def load(): return np.arange(30.0).reshape(30, 1), Y")
    found = load(path, test_fraction=0.3)
    owners = tmp_path / "owners.csv"
    owners.write_text("sample,client\n" + "".join(f"{i},{'low' if i < 15 else 'high'}\n" for i in range(30)))
    partition = PARTITIONS["file"](path=owners)
    federation = build_federation(found, partition, validation=0, test_samples="all", seed=0)
    assert federation.names is not None
    for name, train, test in zip(federation.names, federation.train, federation.test, strict=True):
        seen = np.concatenate([found.x_train[train], found.x_test[test]])[:, 0]
        assert sorted(seen.tolist()) == list(range(15) if name == "low" else range(15, 30))
    owners.write_text("sample,client,part\n0,a,train\n1,a,test\n")
    with pytest.raises(DataError, match="the dataset was split into training and test samples itself"):
        partition.assign(found, 0)


def test_global_generators_are_seeded_and_restored(mine: Callable[[str], str]) -> None:
    path = mine(
        """
        import random
        def load():
            x = np.random.rand(30, 2) + torch.rand(30, 2).numpy() + random.random()
            return x, Y
        """
    )
    first = load(path, test_fraction=0.2)
    np.random.rand(), random.random(), torch.rand(1)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate()
    again = load(path, test_fraction=0.2)
    assert fingerprint(first) == fingerprint(again)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert fingerprint(load(path, test_fraction=0.2, seed=5)) != fingerprint(first)


def test_pictures_of_pillow_are_taken(mine: Callable[[str], str]) -> None:
    path = mine(
        """
        from PIL import Image
        class Pictures(Squares):
            def __getitem__(self, i):
                return Image.new("RGB", (5, 3), (i, 0, 255)), i % 3
        """
    )
    found = load(path, "Pictures", test_fraction=0.2)
    assert found.x_train.shape[1:] == (3, 3, 5)
    assert found.x_train.dtype == np.uint8
    assert set(found.x_train[:, 2].ravel().tolist()) == {255}


def test_keyword_arguments_classes_and_size(mine: Callable[[str], str]) -> None:
    path = mine("def load(n, k=1): return X[:n], Y[:n] * k, T, L")
    found = load(path, kwargs={"n": 9, "k": 2}, classes=7, size=6)
    assert len(found.y_train) == 9
    assert found.classes == 7
    assert found.shape == (1, 6, 6)


def test_a_run_on_own_data_and_an_own_partition(mine: Callable[[str], str], tmp_path: Path) -> None:
    path = mine(
        """
        def load(): return X, Y, T, L
        def deal(labels, rng, parts):
            places = rng.permutation(len(labels))
            return {f"site {k}": places[k::parts] for k in range(parts)}
        """
    )
    config = {
        **SMALL,
        "data": {"name": "python", "target": f"{path}:load"},
        "partition": {"name": "python", "target": f"{path}:deal", "kwargs": {"parts": 4}},
        "output": {"root": str(tmp_path / "runs"), "report": False},
    }
    first, again = rayfl.run(config), rayfl.run(config)
    assert first.clients["name"].tolist() == ["site 0", "site 1", "site 2", "site 3"]
    assert first.summary["models_sha256"] == again.summary["models_sha256"]
    assert rayfl.run({**config, "seed": 9}).summary["models_sha256"] != first.summary["models_sha256"]
    new = {
        "x_train": np.random.default_rng(1).random((9, 4, 4)),
        "y_train": np.arange(9) % 3,
        "x_test": np.random.default_rng(2).random((6, 4, 4)),
        "y_test": np.arange(6) % 3,
    }
    np.savez(tmp_path / "new.npz", **new)
    from rayfl.commands.newcomers import assign_newcomers

    assert len(assign_newcomers(first.path, tmp_path / "new.npz", 0, 0)) == 1


# --- what is refused ------------------------------------------------------------------------------------


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("return None", {}, "returned nothing (None); expected (x, y) or (x_train, y_train, x_test"),
    "a number": ("return 3", {}, "returned an int; expected"),
    "three things": ("return X, Y, T", {}, "returned 3 things (ndarray, ndarray, ndarray); expected"),
    "text": ("return 'x.npz'", {}, "returned a str; expected"),
    "a loader": ("return DataLoader(Squares())", {}, "is a DataLoader; return its dataset"),
    "a stream": ("return Stream()", {}, "is a Stream, which has no length"),
    "a dataset without samples": ("return Squares(0)", {}, "is a Squares without samples"),
    "a dictionary without y_test": (
        "return dict(x_train=X, y_train=Y, x_test=T)",
        {},
        "returned a dictionary without y_test; expected",
    ),
    "an unknown entry": (
        "return dict(x_train=X, y_train=Y, x_test=T, y_test=L, hospital=Y)",
        {},
        "returned a dictionary with 'hospital'; columns are called <name>_train, <name>_test",
    ),
    "objects": ("return np.array([{}] * 30), Y, T, L", {}, "x_train is an array of object (30,); expected"),
    "ragged lists": ("return [[1, 2], [3]], Y, T, L", {}, "x_train is not an array ("),
    "text inputs": ("return np.array(['a'] * 30), Y, T, L", {}, "x_train has type <U1; expected"),
    "NaN": ("return np.where(X > 0.9, np.nan, X), Y, T, L", {}, "x_train holds NaN or infinity"),
    "infinity": ("return X, Y, T / 0, L", {}, "x_test holds NaN or infinity"),
    "no samples": ("return X[:0], Y[:0], T, L", {}, "x_train has no samples"),
    "a text that is missing": (
        "return np.array(['a', None] * 15, object), Y, T, L",
        {},
        "x_train is an array of object (30,), entry 1 of which is nothing (None); expected an array of",
    ),
    "a scalar": ("return 1.0, Y, T, L", {}, "x_train is a float; expected an array of numbers"),
    "five axes": ("return X[None], Y, T, L", {}, "x_train has shape (1, 30, 1, 4, 4); expected"),
    "parts of other shapes": ("return X, Y, T[:, :, :3], L", {}, "x_train is float32 (1, 4, 4) a sample, x"),
    "parts of other types": (
        "return (X * 255).astype(np.uint8), Y, T, L",
        {},
        "x_train is uint8 (1, 4, 4) a sample, x_test float32",
    ),
    "fewer labels than samples": ("return X, Y[:29], T, L", {}, "y_train has 29 entries for 30 samples"),
    "float labels": ("return X, Y / 2, T, L", {}, "y_train is float64 of shape (30,)"),
    "labels as one-hot rows": ("return X, np.eye(3, dtype=int)[Y], T, L", {}, "y_train is int64 of shape"),
    "negative labels": ("return X, Y - 1, T, L", {}, "y_train holds -1; labels and domains count from 0"),
    "huge labels": ("return X, Y * 10**8, T, L", {}, "labels go up to 200000000 for 42 samples"),
    "labels out of range": (
        "return X, Y, T, L",
        {"classes": 2},
        "has label 2; data.classes=2 are numbered 0 to 1",
    ),
    "one class": ("return X, Y * 0, T, L", {}, "all training samples have label 0; expected two"),
    "samples of other shapes": (
        "return Squares(30, lambda i: (torch.zeros(1, 4, 5), 0))",
        {"test_fraction": 0.2},
        "sample 7 is float32 (1, 4, 5), sample 0 is float32 (1, 4, 4); they must be equal",
    ),
    "a sample without a label": (
        "return Squares(30, lambda i: torch.zeros(1, 4, 4))",
        {"test_fraction": 0.2},
        "sample 7 is a Tensor of float32 (1, 4, 4); expected (input, label)",
    ),
    "a float label": (
        "return Squares(30, lambda i: (torch.zeros(1, 4, 4), 1.5))",
        {"test_fraction": 0.2},
        "sample 7 has the label 1.5 (float); expected an integer from 0",
    ),
    "text for an input": (
        "return Squares(30, lambda i: ('a cat', 1))",
        {"test_fraction": 0.2},
        "sample 7: its input is a str; expected an array of numbers",
    ),
    "an error in a sample": ("return Squares(30, lambda i: 1 / 0)", {"test_fraction": 0.2}, ": ZeroDivision"),
    "an error": ("raise OSError('the disk\\nis gone')", {}, ": OSError: the disk is gone"),
    "an exit": ("raise SystemExit(3)", {}, ": SystemExit: 3"),
    "a fraction that leaves nothing": ("return X[:3], Y[:3]", {"test_fraction": 0.1}, "leaves no test"),
    "unequal x and y": ("return X, Y[:9]", {"test_fraction": 0.2}, "x has shape (30, 1, 4, 4), y has"),
}  # fmt: skip

BAD_CONFIG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no test part": ("return X, Y", {}, "data.test_fraction: {} has no test part"),
    "two test parts": ("return X, Y, T, L", {"test_fraction": 0.2}, "data.test_fraction: {} has a test part"),
    "an argument too many": (
        "return X, Y, T, L",
        {"kwargs": {"n": 3}},
        "data.kwargs: {}: got an unexpected keyword",
    ),
}


@pytest.mark.parametrize("kind", [*BAD, *BAD_CONFIG])
def test_what_a_function_may_not_return_is_refused_in_a_line(kind: str, mine: Callable[[str], str]) -> None:
    code, settings, message = (BAD | BAD_CONFIG)[kind]
    path = mine(f"def load():\n    {code}\n")
    with np.errstate(all="ignore"), pytest.raises((DataError, ConfigError)) as caught:
        load(path, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert message.replace("{}", f"{path}:load") in text
    assert f"{path}:load" in text


def test_a_target_that_is_no_function_is_refused_before_anything_starts(mine: Callable[[str], str]) -> None:
    path = mine("Z = 3\n")
    for target, message in (
        (f"{path}:loda", "data.target: "),
        (f"{path}:Z", "is an int; expected a function or a class"),
        ("no_such_module_here:load", "data.target: no module named 'no_such_module_here'"),
        ("justaname", "give module:name or path/to/file.py:name"),
    ):
        config = rayfl.load({"data": {"name": "python", "target": target}})
        with pytest.raises(ConfigError) as caught:
            building.build(config) if target.endswith("Z") else building.check(config)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


PARTITIONS_BAD = {
    "nothing": ("return None", "returned nothing (None); expected a list"),
    "an array": ("return labels", "returned an array of int64 (30,); expected a list"),
    "no clients": ("return []", "returned no client"),
    "fractions": ("return {'a': [0.5]}", "client 'a' has list; expected the places of its training samples"),
    "words": ("return {'a': ['x']}", "client 'a' has list; expected the places"),
    "a mask": ("return {'a': labels == 0}", "client 'a' has bool (30,); expected the places"),
    "a sample that does not exist": ("return {'a': [0, 30]}", "client 'a': there is no training sample 30"),
    "a negative sample": ("return {'a': [-1]}", "client 'a': there is no training sample -1"),
    "a sample owned twice": (
        "return {'a': [0, 1], 'b': [1]}",
        "client 'b': training sample 1 belongs to 'a' already",
    ),
    "a sample named twice": ("return {'a': [0, 0]}", "client 'a' has training sample 0 twice"),
    "a client without samples": ("return {'a': [0, 1], 'b': []}", "client 'b' has no training sample"),
    "an id given twice": ("return {1: [0], '1': [1]}", "returned two clients with the id '1'"),
    "an empty id": ("return {'': [0]}", "the client is empty"),
    "an error": ("return labels.no_such_thing", ": AttributeError: "),
    "a client for tests only": ("return {'a': [0]}, {'b': [0]}", "client 'b' has test samples only"),
    "a client without tests": (
        "return {'a': [0], 'b': [1]}, {'b': [0]}",
        "client 'a' has no test sample of its own",
    ),
}


@pytest.mark.parametrize("kind", PARTITIONS_BAD)
def test_what_an_own_partition_may_not_return_is_refused_in_a_line(
    kind: str, mine: Callable[[str], str]
) -> None:
    code, message = PARTITIONS_BAD[kind]
    path = mine(f"def load(): return X, Y, T, L\ndef deal(labels, rng):\n    {code}\n")
    with pytest.raises(DataError) as caught:
        PARTITIONS["python"](target=f"{path}:deal").assign(load(path), 0)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)


def test_own_partitions_with_test_samples_and_lists(mine: Callable[[str], str]) -> None:
    path = mine(
        """
        def load(): return X, Y, T, L
        def both(labels, rng): return {"b": [0, 1], "a": [2]}, {"a": [3], "b": [4, 5]}
        def plain(labels, rng): return [[0, 1], np.array([2])]
        """
    )
    data = load(path)
    both = PARTITIONS["python"](target=f"{path}:both").assign(data, 0)
    assert both.names is not None
    assert both.names.tolist() == ["a", "b"]
    assert [part.tolist() for part in both.clients] == [[2], [0, 1]]
    assert both.test is not None
    assert [part.tolist() for part in both.test] == [[3], [4, 5]]
    assert both.notes == ("partition: 27 of 30 training samples belong to no client and are not used",)
    plain = PARTITIONS["python"](target=f"{path}:plain").assign(data, 0)
    assert [part.tolist() for part in plain.clients] == [[0, 1], [2]]


# --- columns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (np.arange(7), r"site_test has shape \(7,\) and type int64"),
        (np.zeros((8, 2), int), r"site_test has shape \(8, 2\)"),
        (np.arange(8) + 0.5, "site_test has shape .* type float64"),
        (np.array([{}] * 8), "site_test holds objects"),
    ],
)
def test_owners_of_test_samples_that_do_not_fit_are_refused(
    tests: np.ndarray, said: str, tmp_path: Path
) -> None:
    """Left out, they would have clients tested on the samples of all."""
    x, y = np.random.default_rng(0).random((24, 3)), np.arange(24) % 2
    arrays = {"x_train": x, "y_train": y, "x_test": x[:8], "y_test": y[:8], "site_train": np.arange(24) // 8}
    np.savez(tmp_path / "mine.npz", **arrays, site_test=tests)
    with pytest.raises(DataError, match=said):
        DATASETS["npz"](path=tmp_path / "mine.npz").load(tmp_path)


@pytest.mark.parametrize("kind", ["(n, 1)", "floats", "bools"])
def test_columns_of_other_kinds_that_mean_the_same(kind: str, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((24, 3)), np.arange(24) % 2 == 1
    site = np.arange(24) % 3 == 1 if kind == "bools" else np.arange(24) % 3
    made = {"(n, 1)": site[:, None], "floats": site * 1.0, "bools": site}[kind]
    np.savez(
        tmp_path / "mine.npz",
        x_train=x, y_train=y, x_test=x[:9], y_test=y[:9], site_train=made, site_test=made[:9],
    )  # fmt: skip
    data = DATASETS["npz"](path=tmp_path / "mine.npz").load(tmp_path)
    assert data.y_train.tolist() == y.astype(int).tolist()
    found = PARTITIONS["column"](column="site").assign(data, 0)
    assert found.test is not None
    for value, (train, test) in enumerate(zip(found.clients, found.test, strict=True)):
        assert train.tolist() == np.flatnonzero(site == value).tolist()
        assert test.tolist() == np.flatnonzero(site[:9] == value).tolist()


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((24, 3)), np.zeros(24, int)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match="all training samples have label 0; expected two classes or more"):
        DATASETS["npz"](path=tmp_path / "mine.npz").load(tmp_path)


def test_values_of_a_column_that_the_server_has_alone_are_noted() -> None:
    x, y = np.random.default_rng(0).random((40, 3)).astype(np.float32), np.arange(40) % 2
    column = column_of(np.arange(40) // 2, None)
    data = hold_out(Samples("mine", x, y, x, y, 2, columns={"site": column}), 0.5, 0, seed=0)
    found = PARTITIONS["column"](column="site").assign(data, 0)
    gone = 20 - len(found.clients)
    assert found.names is not None
    lost = [str(site) for site in range(20) if str(site) not in found.names.tolist()]
    assert len(lost) == gone > 0
    assert found.notes == (
        f"partition: {gone} of 20 values of site have no training sample and are left out: "
        f"{', '.join(map(repr, lost[:5]))}{f' and {gone - 5} more' if gone > 5 else ''} "
        "(samples may be in the test part, or held by the server: data.server_share)",
    )


def test_clients_by_lists_of_places_and_what_is_none() -> None:
    given = {"b": [0, 2], "a": [1, 3]}
    assert partition_of(given) == partition_of({name: np.array(places) for name, places in given.items()})
    assert partition_of({"name": "tasks", "clients": 4}) is None
    for wrong, said in (
        ([np.array([True, False])], "client 0 has an array of bool; .*flatnonzero"),
        ([0, 1, 0, 1], "client 0 has int; expected the places of its training samples"),
    ):
        with pytest.raises(DataError, match=said):
            partition_of(wrong)


def test_a_single_label_is_refused_in_a_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.ones((4, 2)), y=np.array(3))
    with pytest.raises(DataError, match="y is a single number; expected one for each sample"):
        DATASETS["npz"](path=tmp_path / "mine.npz", test_fraction=0.5).load(tmp_path)


def test_clients_by_a_column_of_an_npz(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hospital = np.array(["b", "a", "c", "a"] * 10)
    arrays = {
        "x_train": rng.random((40, 3)), "y_train": np.arange(40) % 2, "x_test": rng.random((8, 3)),
        "y_test": np.arange(8) % 2, "hospital_train": hospital, "hospital_test": hospital[:8],
        "ward_train": np.arange(40) // 4, "junk_train": np.zeros((40, 2)), "note_train": np.array([{}] * 40),
    }  # fmt: skip
    np.savez(tmp_path / "mine.npz", **arrays)
    data = DATASETS["npz"](path=tmp_path / "mine.npz").load(tmp_path)
    assert sorted(data.columns) == ["hospital", "ward"]
    by_hospital = PARTITIONS["column"](column="hospital").assign(data, 0)
    assert by_hospital.names is not None
    assert by_hospital.names.tolist() == ["a", "b", "c"]
    assert by_hospital.clients[1].tolist() == list(range(0, 40, 4))
    assert by_hospital.test is not None
    assert by_hospital.test[1].tolist() == [0, 4]
    by_ward = PARTITIONS["column"](column="ward").assign(data, 0)
    assert len(by_ward.clients) == 10
    assert by_ward.test is None
    few = PARTITIONS["column"](column="hospital", min_samples=15).assign(data, 0)
    assert few.names is not None
    assert few.names.tolist() == ["a"]
    assert few.notes[0].startswith("partition: 2 of 3 values of hospital have fewer than 15 training samples")
    for settings, message in (
        ({"column": "hopsital"}, "mine has no column 'hopsital'; did you mean 'hospital'?"),
        (
            {"column": "hospital", "min_samples": 30},
            "no value of hospital has 30 training samples; the most is 20",
        ),
        ({"column": "hospital", "clients": 4}, "4, but 3 clients are named"),
    ):
        with pytest.raises(DataError) as caught:
            PARTITIONS["column"](**settings).assign(data, 0)
        assert message in str(caught.value)


def test_the_command_line_says_a_line_and_ends_with_2(
    mine: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = mine("def load(): return X, Y - 1, T, L\n")
    settings = ["data.name=python", f"data.target={path}:load", f"output.root={tmp_path / 'r'}"]
    command = ["rayfl", "run", "digits-demo", *settings, "execution.backend=inline"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    error = capsys.readouterr().err
    line = "labels and domains count from 0; numbers to predict are floats: y.astype(float)"
    assert error == f"error: {path}:load: y_train holds -1; {line}\n"
    assert not list((tmp_path / "r").glob("*"))


def test_a_dataset_that_has_changed_is_said_when_a_run_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.random((40, 3)), "y_train": np.arange(40) % 2}
    arrays |= {"x_test": rng.random((8, 3)), "y_test": np.arange(8) % 2}
    np.savez(tmp_path / "mine.npz", **arrays)
    config = {
        **SMALL,
        "rounds": 1,
        "data": {"name": "npz", "path": str(tmp_path / "mine.npz")},
        "partition": {"name": "iid", "clients": 4},
        "output": {"root": str(tmp_path / "runs"), "report": False},
    }
    first = rayfl.run(config)
    said: list[str] = []
    rayfl.resume(first.path, ["rounds=2"], on_event=lambda event: said.append(str(event)))
    assert not any("other contents" in line for line in said)
    np.savez(tmp_path / "mine.npz", **arrays | {"x_train": arrays["x_train"] + 1})
    rayfl.resume(first.path, ["rounds=3"], on_event=lambda event: said.append(str(event)))
    assert any("the dataset has other contents than when the run began" in line for line in said)
