"""Shards: rows are read where they are needed, clients are ranges, and the results are those of one file."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rayfl
from rayfl.data import DATASETS, Samples, fingerprint, sharded, write_npz
from rayfl.data.base import Ragged, Ranges
from rayfl.data.held_out import hold_out
from rayfl.data.sharded import ShardedArray
from rayfl.errors import ConfigError, DataError, RayflError

N, EACH, FILES = 12, 10, 4
rng = np.random.default_rng(0)
X = rng.integers(0, 256, (N * EACH, 1, 4, 4), dtype=np.uint8)
Y = np.arange(N * EACH) % 3
CLIENT = np.repeat(np.arange(N), EACH)


def write(folder: Path, kind: str = "savez", client: NDArray[np.int64] = CLIENT, **more: Any) -> Path:
    """Four files, of which the edges cut through clients, and a test file with two samples a client."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(Y)), FILES)):
        arrays = {"x": X[part], "y": Y[part], "client": client[part], **more}
        if kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            rows = {**arrays, "x": list(X[part].reshape(len(part), -1))}
            pq.write_table(pa.table(rows), folder / f"train-{number}.parquet", row_group_size=7)
        else:
            getattr(np, kind)(folder / f"train-{number}.npz", **arrays)
    tests = np.repeat(np.arange(N), 3)
    np.savez(folder / "test-0.npz", x=X[:36], y=Y[:36], client=tests)
    return folder


def load(folder: Path, **settings: Any) -> Samples:
    return DATASETS["sharded"].model_validate({"name": "sharded", "path": folder, **settings}).load(folder)


@pytest.mark.parametrize("kind", ["savez", "savez_compressed", "parquet"])
def test_the_rows_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    samples = load(write(tmp_path, kind), shape=(1, 4, 4), cache_gb=0)
    ids = rng.permutation(len(Y))[:50]
    np.testing.assert_array_equal(samples.inputs("train", ids), X[ids])
    np.testing.assert_array_equal(samples.labels("train", ids), Y[ids])
    assert (samples.shape, samples.classes, len(samples.x_train)) == ((1, 4, 4), 3, len(Y))
    again = pickle.loads(pickle.dumps(samples))
    np.testing.assert_array_equal(again.inputs("train", ids), X[ids])


def test_only_the_shards_that_are_needed_are_read_and_few_are_kept(tmp_path: Path) -> None:
    x = load(write(tmp_path, "savez_compressed"), cache_gb=2 * 480 / 1e9).x_train
    assert isinstance(x, ShardedArray)
    x.take(np.array([31, 35, 59]))
    assert x.reads == 1  # all in the second of four
    x.take(np.array([31, 119]))
    assert x.reads == 2
    x.take(np.array([0, 119]))
    assert x.reads == 3
    assert list(x._kept) == [0, 3]  # two of 480 bytes each
    assert len(pickle.dumps(x)) < 2000


def test_what_is_written_as_it_is_is_mapped_and_not_read(tmp_path: Path) -> None:
    x = load(write(tmp_path)).x_train
    assert isinstance(x, ShardedArray)
    x.take(np.arange(40))
    assert [held for _, held in x._kept.values()] == [0, 0]


def test_of_parquet_only_the_row_groups_that_are_needed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start labels and clients, no inputs."""
    pq = pytest.importorskip("pyarrow.parquet")
    tables: list[tuple[str, ...]] = []
    groups: list[tuple[str, int]] = []
    table, group = pq.read_table, pq.ParquetFile.read_row_group

    def read_table(path: Path, columns: list[str]) -> Any:
        tables.append((path.name, *columns))
        return table(path, columns=columns)

    def read_row_group(file: Any, number: int, columns: list[str]) -> Any:
        groups.append((columns[0], number))
        return group(file, number, columns=columns)

    monkeypatch.setattr(pq, "read_table", read_table)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    samples = load(write(tmp_path, "parquet"), shape=(1, 4, 4))
    expected = {(f"train-{file}.parquet", name) for file in range(FILES) for name in ("y", "client")}
    assert (set(tables), groups) == (expected, [])
    x = pickle.loads(pickle.dumps(samples.x_train))
    ids = np.array([31, 59, 35, 44])  # rows 1, 29, 5 and 14 of the second of four files
    np.testing.assert_array_equal(x.take(ids), X[ids])
    assert sorted(groups) == [("x", 0), ("x", 2), ("x", 4)]
    np.testing.assert_array_equal(x.take(ids), X[ids])
    assert len(groups) == x.reads == 3
    np.testing.assert_array_equal(x.take_once(np.arange(len(Y))), X)
    assert not x._kept


def test_clients_are_ranges_of_samples(tmp_path: Path) -> None:
    stored = load(write(tmp_path)).stored
    assert stored is not None
    assert isinstance(stored.train, Ranges)
    held = [part.tolist() for part in stored.train]
    assert held == [np.flatnonzero(c == CLIENT).tolist() for c in range(N)]
    assert stored.test is not None
    assert stored.test[1].tolist() == [3, 4, 5]
    assert stored.names is None
    plain = Ragged(stored.train.values, stored.train.offsets)
    some = np.array([7, 2, 2])
    np.testing.assert_array_equal(stored.train.take(some).values, plain.take(some).values)


@pytest.mark.parametrize("kind", ["savez", "parquet"])
def test_a_run_is_that_of_the_same_clients_from_one_file(kind: str, tmp_path: Path) -> None:
    """The same hash of the models as with the natural partition of an npz."""
    common: dict[str, Any] = {
        "rounds": 2,
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"epochs": 1, "batch_size": 5, "lr": 0.1, "participation": 0.5},
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path / "runs"), "report": False, "tensorboard": False},
    }
    tests = np.repeat(np.arange(N), 3)
    whole = Samples("whole", X, Y, X[:36], Y[:36], 3, CLIENT, tests)
    write_npz(tmp_path / "whole.npz", whole)
    partition = {"clients": N, "validation": 0.0}
    one = rayfl.run(
        {
            **common,
            "data": {"name": "npz", "path": str(tmp_path / "whole.npz"), "normalise": "none"},
            "partition": {**partition, "name": "natural"},
        }
    )
    many = rayfl.run(
        {
            **common,
            "data": {
                "name": "sharded",
                "path": str(write(tmp_path / "shards", kind)),
                "shape": (1, 4, 4),
                "normalise": "none",
            },
            "partition": {**partition, "name": "stored"},
        }
    )
    assert many.summary["models_sha256"] == one.summary["models_sha256"]
    assert many.clients["accuracy_last"].tolist() == one.clients["accuracy_last"].tolist()


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    first = fingerprint(load(write(tmp_path)))
    assert fingerprint(load(write(tmp_path))) == first
    np.savez(tmp_path / "train-3.npz", x=X[90:] // 2, y=Y[90:], client=CLIENT[90:])
    assert fingerprint(load(tmp_path)) != first


def test_ids_of_clients_are_their_names(tmp_path: Path) -> None:
    write(tmp_path, client=CLIENT * 10 + 5)
    np.savez(tmp_path / "test-0.npz", x=X[:3], y=Y[:3], client=np.array([5, 15, 15]))
    stored = load(tmp_path).stored
    assert stored is not None
    assert stored.names is not None
    assert stored.names[:2].tolist() == ["5", "15"]
    assert stored.test is not None
    assert stored.test.sizes[:3].tolist() == [1, 2, 0]


def channels_last(folder: Path) -> None:
    for path in folder.glob("*.npz"):
        with np.load(path) as content:
            arrays = dict(content)
        np.savez(path, **arrays | {"x": np.zeros((len(arrays["y"]), 6, 6, 3), np.uint8)})


def one_class(folder: Path) -> None:
    for path in folder.glob("*.npz"):
        with np.load(path) as content:
            arrays = dict(content)
        np.savez(path, **arrays | {"y": 0 * arrays["y"]})


@pytest.mark.parametrize("shape", [[], [-1, 4], [0]])
def test_a_shape_has_lengths(shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        DATASETS["sharded"](path=tmp_path, shape=shape)


def test_rows_of_the_test_files_must_have_the_shape(tmp_path: Path) -> None:
    np.savez(tmp_path / "train-0.npz", x=np.zeros((4, 4), np.float32), y=np.arange(4) % 2)
    np.savez(tmp_path / "test-0.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4) % 2)
    with pytest.raises(DataError, match=r"x of the test files has rows of \(3,\); data.shape is \(1, 2, 2\)"):
        load(tmp_path, shape=(1, 2, 2))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: (f / "train-1.npz").write_bytes(b"PK no"), "train-1.npz: cannot be read"),
        (lambda f: np.savez(f / "train-2.npz", x=X[:5, :, :2], y=Y[:5], client=CLIENT[:5]), "must be alike"),
        (lambda f: np.savez(f / "train-3.npz", x=X[:5], y=Y[:5], client=CLIENT[:5]), "ascending order"),
        (lambda f: np.savez(f / "train-3.npz", x=X[:5], y=Y[:4]), "has 4 entries for 5"),
        (lambda f: (f / "test-0.npz").unlink(), "has no test-"),
        (lambda f: np.savez(f / "test-0.npz", x=X[:5], y=Y[:5], client=np.full(5, 99)), "client 99 has test"),
        (
            lambda f: np.savez(f / "train-3.npz", x=X[:5], y=Y[:5], client=CLIENT[-4:]),
            "client has 4 .* for 5",
        ),
        (
            lambda f: np.savez(f / "train-3.npz", x=X[:5], y=Y[:5], client=CLIENT[-6:]),
            "client has 6 .* for 5",
        ),
        (lambda f: np.savez(f / "test-0.npz", x=X[:5], y=Y[:5], client=CLIENT[:3]), "client has 3 .* for 5"),
        (lambda f: np.savez(f / "train-0.npz", x=X[:5], y=Y[:5]), "train-0.npz: has no 'client'"),
        (lambda f: np.savez(f / "test-1.npz", x=X[:5], y=Y[:5]), "test-1.npz: has no 'client'"),
        (lambda f: np.savez(f / "test-1.npz", x=X[:5, :, :2], y=Y[:5], client=CLIENT[-5:]), "must be alike"),
        (lambda f: np.savez(f / "train-0.npz", x=np.array(3), y=Y[:1], client=CLIENT[:1]), "single number"),
        (lambda f: np.savez(f / "test-0.npz", x=X[:0], y=Y[:0], client=CLIENT[:0]), "has no test samples"),
        (lambda f: flipped(f / "train-1.npz"), "train-1.npz: cannot be read .*CRC"),
        (lambda f: channels_last(f), r"rows of shape \(6, 6, 3\), which looks like \(H, W, C\)"),
        (lambda f: one_class(f), "all training samples have label 0; expected two classes"),
    ],
)
def test_mistakes_are_one_line(break_it: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path)
    break_it(tmp_path)
    with pytest.raises(DataError, match=said) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 2, 3, 4], [5, 6], [7, 8, 9]], "rows of x have 2 to 4 numbers"),
        ([[1, 2, 3], None, [4, 5, 6]], "x is missing in 1 of 3 rows"),
        ([[1, 2, 3], [None, 2, 3], [4, 5, 6]], "1 numbers of x are missing"),
    ],
)
def test_rows_of_parquet_that_are_no_matrix_are_refused(rows: Any, said: str, tmp_path: Path) -> None:
    """Nine numbers in three rows would be a matrix of 3 x 3 of other samples."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = pa.array(rows, pa.list_(pa.uint8()))
    pq.write_table(pa.table({"x": x, "y": [0, 1, 0], "client": [0, 0, 1]}), tmp_path / "train-0.parquet")
    np.savez(tmp_path / "test-0.npz", x=np.ones((1, 3), np.uint8), y=[0], client=[0])
    with pytest.raises(DataError, match=f"train-0.parquet: {said}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "at_once", "said"),
    [
        ({400: [1.0, 2], 401: [1.0, 2, 3, 4]}, False, "rows of x have 2 to 4 numbers"),
        ({400: [1.0, 2]}, True, "rows of x have 2 to 3 numbers"),
        ({row: [1.0, 2] for row in range(300, 450)}, True, "rows of x have 2 to 3 numbers"),
        ({400: None}, True, "x is missing in (1 of 450|some) rows"),
        ({400: [1.0, None, 3]}, True, "1 numbers of x are missing"),
        ({400: [1.0, np.nan, 3]}, False, "x holds NaN or infinity"),
    ],
)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_fault_deep_in_a_parquet_file_is_found(
    change: dict[int, Any], at_once: bool, said: str, fixed: bool, tmp_path: Path
) -> None:
    """At the start, or where the footer does not show it in the block that reads it."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if fixed and "rows of x" in said:
        pytest.skip("these cannot be written")
    rows = [change.get(row, [row, 1.0, 2.0]) for row in range(450)]
    kind = pa.list_(pa.float32(), 3) if fixed else pa.list_(pa.float32())
    table = pa.table({"x": pa.array(rows, kind), "y": np.arange(450) % 2})
    pq.write_table(table, tmp_path / "train-0.parquet", row_group_size=150)
    np.savez(tmp_path / "test-0.npz", x=np.ones((1, 3), np.float32), y=[0])
    if at_once:
        with pytest.raises(DataError, match=f"train-0.parquet: {said}"):
            load(tmp_path)
        return
    x = load(tmp_path).x_train
    assert x[:300][:, 0].tolist() == [*range(300)]
    with pytest.raises(DataError, match=f"train-0.parquet: {said}"):
        x[299:420]


@pytest.mark.parametrize("kind", ["savez", "savez_compressed"])
def test_nan_is_refused_where_it_is_read(kind: str, tmp_path: Path) -> None:
    """And not taken for a learning rate that is too large."""
    x = X.reshape(len(X), -1).astype(np.float32)
    for part in ("train", "test"):
        getattr(np, kind)(tmp_path / f"{part}-0.npz", x=x[:30], y=Y[:30], client=CLIENT[:30])
    x[40, 3] = np.nan
    getattr(np, kind)(tmp_path / "train-1.npz", x=x[30:60], y=Y[30:60], client=CLIENT[30:60])
    inputs = load(tmp_path).x_train
    np.testing.assert_array_equal(inputs[:40], x[:40])
    with pytest.raises(DataError, match=r"train-1.npz: x holds NaN or infinity"):
        inputs[35:45]
    np.testing.assert_array_equal(inputs[41:60], x[41:60])


def flipped(path: Path) -> None:
    """A compressed shard with a broken bit."""
    np.savez_compressed(path, x=X[30:60], y=Y[30:60], client=CLIENT[30:60])
    stored = bytearray(path.read_bytes())
    stored[200] ^= 1
    path.write_bytes(stored)


def test_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """As a loop writes them, without leading zeros: train-2 before train-10."""
    for number in range(N):
        np.savez(tmp_path / f"train-{number}.npz", x=X[number == CLIENT], y=Y[number == CLIENT])
    np.savez(tmp_path / "test-0.npz", x=X, y=Y)
    np.testing.assert_array_equal(load(tmp_path).x_train[:], X)


@pytest.mark.parametrize("kind", ["savez", "parquet"])
def test_files_without_samples_are_left_out(kind: str, tmp_path: Path) -> None:
    whole = load(write(tmp_path, kind), shape=(1, 4, 4))
    np.savez(tmp_path / "test-1.npz", x=X[:0], y=Y[:0], client=CLIENT[:0])
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pq.read_table(tmp_path / "train-0.parquet").slice(0, 0)
        pq.write_table(pa.table(table), tmp_path / "train-00.parquet")
    else:
        np.savez(tmp_path / "train-00.npz", x=X[:0], y=Y[:0], client=CLIENT[:0])
    assert fingerprint(load(tmp_path, shape=(1, 4, 4))) == fingerprint(whole)


def test_the_server_gets_no_sample_of_shards(tmp_path: Path) -> None:
    settings = {
        "rounds": 1,
        "data": {"name": "sharded", "path": str(write(tmp_path)), "server_share": 0.5},
        "partition": {"name": "stored", "clients": 4},
        "model": "linear",
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path / "runs")},
    }
    with pytest.raises(ConfigError, match=r"data\.server_share"):
        rayfl.run(settings)
    settings = {**settings, "data": {"name": "digits"}}
    with pytest.raises(RayflError, match="name the client of each sample"):
        rayfl.run(settings)


@pytest.mark.parametrize("kind", ["savez", "savez_compressed", "parquet"])
def test_where_clients_are_divided_here_the_server_gets_samples(kind: str, tmp_path: Path) -> None:
    """The others stay in their files; a run is the same as with all of them in memory."""
    samples = load(write(tmp_path, kind), shape=(1, 4, 4), cache_gb=0)
    samples = replace(samples, stored=None)
    held = hold_out(samples, 0.25, 0, 3)
    assert isinstance(held.x_train, ShardedArray)
    assert held.x_server is not None
    assert len(held.x_train) + len(held.x_server) == len(X)
    in_memory = hold_out(replace(samples, x_train=X), 0.25, 0, 3)
    np.testing.assert_array_equal(held.x_server, in_memory.x_server)
    for x in (held.x_train, pickle.loads(pickle.dumps(held.x_train))):
        np.testing.assert_array_equal(x[:], in_memory.x_train)
    twice = held.x_train.of_rows(np.array([5, 2]))
    np.testing.assert_array_equal(twice[:], in_memory.x_train[[5, 2]])
    assert len({x.fingerprint() for x in (samples.x_train, held.x_train, twice)}) == 3


@pytest.mark.parametrize("normalise", ["pooled", "none"])
def test_a_run_whose_server_holds_samples_of_shards(normalise: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "shards")
    for path in folder.glob("train-*.npz"):  # no clients in it
        arrays = dict(np.load(path))
        del arrays["client"]
        np.savez(path, **arrays)
    tests = dict(np.load(folder / "test-0.npz"))
    del tests["client"]
    np.savez(folder / "test-0.npz", **tests)
    data = {"name": "sharded", "path": str(folder), "server_share": 0.1, "normalise": normalise}
    result = rayfl.run(
        {
            "rounds": 1,
            "data": data,
            "partition": {"name": "iid", "clients": 4},
            "model": "linear",
            "execution": {"backend": "inline"},
            "output": {"root": str(tmp_path / "runs"), "report": False},
        }
    )
    assert result.clients["n"].sum() < len(X)


@pytest.mark.parametrize("large", [False, True])
def test_the_checksum_of_parquet_sees_its_samples(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the file holds only what is where, which stays the same when samples are permuted."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if large:  # than what is read whole
        monkeypatch.setattr(sharded, "_PART_BYTES", 1 << 12)
        monkeypatch.setattr(sharded, "_MOST_PARTS", 8)
    values, found = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8), []
    for order in (slice(None), slice(None, None, -1)):
        pq.write_table(pa.table({"x": values[order]}), tmp_path / "a.parquet", compression="none")
        found.append(sharded._checksum(tmp_path / "a.parquet"))
    assert found[0] != found[1]
