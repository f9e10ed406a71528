"""Partitions whose clients the user knows: who owns which sample, and that ids are kept to the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

import rayfl
from rayfl import cli
from rayfl.api import client_models
from rayfl.commands.newcomers import assign_newcomers
from rayfl.data import PARTITIONS, Assignment, Federation, Samples, build_federation, build_stages
from rayfl.data.events import Join
from rayfl.data.held_out import hold_out
from rayfl.errors import ClientError, ConfigError, DataError

HOSPITALS = ["zoe", "anna", "zoe", "NA", "anna", "zoe", "NA", "007"] * 5


def samples(train: int = 40, test: int = 20, classes: int = 2) -> Samples:
    rng = np.random.default_rng(0)
    x = [rng.random((n, 3), np.float32) for n in (train, test)]
    return Samples("made", x[0], np.arange(train) % classes, x[1], np.arange(test) % classes, classes)


def owners(folder: Path, clients: Sequence[object], name: str = "owners.csv", **more: Any) -> Path:
    frame = pd.DataFrame({"sample": np.arange(len(clients)), "client": clients, **more})
    frame.to_csv(folder / name, index=False)
    return folder / name


def assigned(path: Path, data: Samples | None = None, **settings: Any) -> Assignment:
    return PARTITIONS["file"](path=path, **settings).assign(data or samples(), 0)


def divided(path: Path, data: Samples | None = None, **settings: Any) -> Federation:
    partition = PARTITIONS["file"](path=path, **settings)
    return build_federation(data or samples(), partition, validation=0.0, test_samples="all", seed=0)


def named(federation: Federation) -> dict[str, list[int]]:
    assert federation.names is not None
    return {str(name): ids.tolist() for name, ids in zip(federation.names, federation.train, strict=True)}


def expected(clients: Sequence[str]) -> dict[str, list[int]]:
    return {name: [i for i, c in enumerate(clients) if c == name] for name in sorted(set(clients))}


# --- who gets what --------------------------------------------------------------------------------------


def test_every_sample_goes_to_its_owner_and_ids_stay_text(tmp_path: Path) -> None:
    federation = divided(owners(tmp_path, HOSPITALS))
    assert named(federation) == expected(HOSPITALS)
    assert list(named(federation)) == ["007", "NA", "anna", "zoe"]
    assert federation.notes == ()
    # Test samples follow the labels, as in any other partition.
    assert set(federation.samples.labels("test", federation.test[3])) <= {0, 1}


def test_whole_numbers_are_ordered_by_size_and_dense_ones_need_no_names(tmp_path: Path) -> None:
    federation = divided(owners(tmp_path, [10, 9, 100, 9] * 10))
    assert federation.names is not None
    assert federation.names.tolist() == ["9", "10", "100"]
    assert divided(owners(tmp_path, [1, 0, 2, 0] * 10)).names is None
    assert [len(part) for part in divided(owners(tmp_path, [1, 0, 2, 0] * 10)).train] == [20, 10, 10]


def test_the_order_of_the_rows_does_not_matter(tmp_path: Path) -> None:
    path = owners(tmp_path, HOSPITALS)
    shuffled = tmp_path / "shuffled.csv"
    pd.read_csv(path, dtype=str, na_filter=False).sample(frac=1, random_state=0).to_csv(shuffled, index=False)
    assert named(divided(shuffled)) == named(divided(path))


def test_unowned_samples_are_a_note(tmp_path: Path) -> None:
    federation = divided(owners(tmp_path, HOSPITALS[:30]))
    assert federation.notes == ("partition: 10 of 40 training samples belong to no client and are not used",)
    assert np.concatenate(list(federation.train)).max() == 29


@pytest.mark.parametrize("second", [False, True])
def test_test_samples_may_have_owners(tmp_path: Path, second: bool) -> None:
    tests = ["zoe", "anna", "NA", "007"] * 5
    if second:
        path = owners(tmp_path, HOSPITALS)
        settings = {"test_path": owners(tmp_path, tests, "tests.csv")}
    else:
        part = ["train"] * 40 + ["test"] * 20
        frame = pd.DataFrame(
            {"sample": [*range(40), *range(20)], "client": [*HOSPITALS, *tests], "part": part}
        )
        path, settings = tmp_path / "owners.csv", {}
        frame.to_csv(path, index=False)
    federation = divided(path, **settings)
    assert federation.test[3].tolist() == list(range(0, 20, 4))
    assert named(federation) == expected(HOSPITALS)
    by_label = divided(path, tests="labels", **settings)
    assert by_label.test[3].tolist() != federation.test[3].tolist()


def test_samples_are_numbered_as_the_dataset_has_them_whatever_the_server_holds(tmp_path: Path) -> None:
    data = samples()
    kept = hold_out(data, 0.25, 0, 3)
    assert len(kept.y_train) == 30
    federation = divided(owners(tmp_path, HOSPITALS), kept)
    for name, ids in named(federation).items():
        for i in ids:
            (at,) = np.flatnonzero((data.x_train == kept.x_train[i]).all(axis=1))
            assert HOSPITALS[at] == name
    assert federation.samples.numbering is None  # nothing of it travels to the workers


@pytest.mark.slow
def test_a_million_rows_are_read_in_seconds(tmp_path: Path) -> None:
    count = 1_000_000
    data = Samples(
        "many",
        np.zeros((count, 1), np.uint8),
        np.arange(count) % 10,
        np.zeros((100, 1), np.uint8),
        np.arange(100) % 10,
        10,
    )
    path = tmp_path / "owners.csv"
    clients = np.random.default_rng(0).permutation(count) % 50_000
    pd.DataFrame({"sample": np.arange(count), "client": np.char.add("c", clients.astype(str))}).to_csv(
        path, index=False
    )
    begun = time.process_time()
    found = assigned(path, data)
    print(f"{time.process_time() - begun:.1f} s of CPU")
    assert len(found.clients) == 50_000
    assert sum(map(len, found.clients)) == count


# --- the ids are kept to the end ------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "name": "own",
    "rounds": 3,
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"epochs": 1, "batch_size": 10, "lr": 0.1},
    "execution": {"backend": "inline"},
}


def digits_owners(folder: Path) -> Path:
    """Owners of the 1,438 training digits: five hospitals."""
    return owners(folder, [f"h {i % 5}/{i % 5}" if i % 5 else "NA" for i in range(1438)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> rayfl.Result:
    folder = tmp_path_factory.mktemp("own")
    config = {
        **SMALL,
        "partition": {"name": "file", "path": str(digits_owners(folder))},
        "algorithm": "pacfl",
        "clustering": {"n_clusters": 2},
        "events": [
            {"name": "join", "round": 1, "clients": ["h 2/2"]},
            {"name": "leave", "round": 2, "clients": ["NA"]},
        ],
        "output": {"root": str(folder / "runs")},
    }
    return rayfl.run(config)


NAMES = ["NA", "h 1/1", "h 2/2", "h 3/3", "h 4/4"]


def test_clients_and_clusters_speak_of_the_users_ids(ran: rayfl.Result) -> None:
    assert ran.clients["name"].tolist() == NAMES
    assert list(ran.clients.columns[:3]) == ["client", "name", "n"]
    assert ran.clusters["names"] == NAMES
    assert ran.clients["n"].tolist()[0] == 0  # it left
    labels = [entry["labels"] for entry in ran.clusters["timeline"]]
    assert labels[0][2] == -1  # it joined later
    assert labels[-1][2] >= 0


def test_the_report_speaks_of_the_users_ids(ran: rayfl.Result) -> None:
    page = (ran.path / "report.html").read_text(encoding="utf-8")
    assert page.count("h 3/3") >= 2  # in the table of clients and as a member of a cluster


def test_models_are_asked_for_by_the_users_ids(
    ran: rayfl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(client_models(ran.path, ["h 3/3", "h 1/1"]))
    assert sorted(found) == ["h 1/1", "h 3/3"]
    monkeypatch.setattr("sys.argv", ["rayfl", "models", str(ran.path), "h 3/3", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    (file,) = tmp_path.iterdir()
    assert file.name == "client_h 3%2F3.safetensors"
    for name, tensor in load_file(file).items():
        assert tensor.equal(found["h 3/3"][name])
    with pytest.raises(ConfigError, match=r"there is no client 'h 3'; did you mean 'h 3/3'\?"):
        ran.client_model("h 3")


def test_newcomers_keep_their_ids(ran: rayfl.Result, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (30, 8, 8), dtype=np.uint8),
        "y_train": np.arange(30) % 10,
        "x_test": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_test": np.arange(20) % 10,
        "client_train": np.array(["st. mary", "NA"] * 15),
        "client_test": np.array(["st. mary", "NA"] * 10),
    }
    np.savez(tmp_path / "new.npz", **arrays)
    frame = assign_newcomers(ran.path, tmp_path / "new.npz", 0, 0)
    assert frame["name"].tolist() == ["NA", "st. mary"]
    assert frame["client"].tolist() == [5, 6]
    assert pd.read_csv(ran.path / "newcomers.csv", na_filter=False)["name"].tolist() == ["NA", "st. mary"]
    np.savez(tmp_path / "new.npz", **arrays | {"client_test": np.arange(20) % 2})
    with pytest.raises(DataError, match="both hold numbers, or both ids as text"):
        assign_newcomers(ran.path, tmp_path / "new.npz", 0, 0)
    np.savez(tmp_path / "new.npz", **arrays | {"client_test": np.array(["NA"] * 20)})
    with pytest.raises(DataError, match=r"newcomer 'st\. mary' has no sample in client_test"):
        assign_newcomers(ran.path, tmp_path / "new.npz", 0, 0)


def test_partition_and_cluster_speak_of_the_users_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        "partition.name=file",
        f"partition.path={digits_owners(tmp_path)}",
        "execution.backend=inline",
    ]
    command = [
        "rayfl",
        "partition",
        "digits-demo",
        *settings,
        "--measures",
        "emd",
        "--out",
        str(tmp_path / "p"),
    ]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert "h 4/4" in capsys.readouterr().out
    clients = pd.read_csv(tmp_path / "p" / "clients.csv", na_filter=False)
    assert clients["name"].tolist() == NAMES
    pairs = pd.read_csv(tmp_path / "p" / "distances.csv", na_filter=False)
    assert pairs["other_name"].tolist()[0] == "h 1/1"
    command = [
        "rayfl",
        "cluster",
        "digits-demo",
        *settings,
        "clustering.n_clusters=2",
        "--out",
        str(tmp_path / "c"),
    ]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert '"h 4/4"' in (tmp_path / "c" / "clusters.json").read_text()


def test_a_client_that_fails_is_called_by_its_id() -> None:
    error = ClientError(3, 1, "Traceback\nValueError: no", "'anna'")
    assert str(error) == "client 'anna' failed in round 2: ValueError: no"


def test_runs_without_ids_have_no_names(tmp_path: Path) -> None:
    result = rayfl.run({**SMALL, "rounds": 1, "output": {"root": str(tmp_path)}})
    assert "name" not in result.clients
    assert "names" not in result.clusters


def test_a_run_goes_on_only_with_the_owners_with_which_it_began(tmp_path: Path) -> None:
    path = digits_owners(tmp_path)
    config = {
        **SMALL,
        "rounds": 1,
        "partition": {"name": "file", "path": str(path)},
        "output": {"root": str(tmp_path / "runs"), "report": False, "checkpoint_every": 1},
    }
    first = rayfl.run(config)
    path.write_text(path.read_text().replace("\n7,h 2/2\n", "\n7,h 3/3\n"))
    for going_on in (
        lambda: rayfl.resume(first.path, ["rounds=2"]),
        lambda: first.client_model("NA"),
    ):
        with pytest.raises(DataError, match="the clients have other samples than when the run began"):
            going_on()
    path.write_text(path.read_text().replace("\n7,h 3/3\n", "\n7,h 2/2\n"))
    resumed = rayfl.resume(first.path, ["rounds=2"])
    whole = rayfl.run({**config, "rounds": 2})
    assert resumed.summary["models_sha256"] == whole.summary["models_sha256"]


def test_ids_follow_the_clients_that_events_renumber(tmp_path: Path) -> None:
    """Clients that wait for a join get the last numbers; their samples and ids go with them."""
    partition = PARTITIONS["file"](path=owners(tmp_path, HOSPITALS))
    join = Join(round=1, clients=2)
    first, last = build_stages(
        samples(), partition, [join], validation=0.0, test_samples="all", seed=0, rounds=3
    )
    assert named(last.federation) == expected(HOSPITALS)
    assert last.federation.names is not None
    assert last.federation.names.tolist() != sorted(set(HOSPITALS))
    assert (first.federation.sizes == 0).tolist() == [False, False, True, True]


# --- mistakes -------------------------------------------------------------------------------------------


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        assigned(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRONG_FILES = {
    "empty file": ("", "the file is empty"),
    "no rows": ("sample,client\n", "has no rows"),
    "no header": ("0,a\n1,b\n", "has no column 'sample', only 0, a"),
    "missing column": (
        "sample,clinet\n0,a\n",
        "has no column 'client', only sample, clinet; did you mean 'clinet'",
    ),
    "semicolons": ("sample;client\n0;a\n", "owners.csv: its columns seem to be separated by ';'; expected c"),
    "two columns of a name": ("sample,client,client\n0,a,b\n", "has two columns 'client'"),
    "too many cells": ("sample,client\n0,a,b\n", "a row has more cells than the header has columns"),
    "fractional sample": (
        "sample,client\n0,a\n1.5,a\n",
        "owners.csv:3: sample '1.5' is not a position in the dataset",
    ),
    "text for a sample": ("sample,client\n0,a\n\nx7,a\n", "owners.csv:4: sample 'x7' is not a position"),
    "negative sample": ("sample,client\n-1,a\n", "owners.csv:2: sample '-1' is not a position"),
    "infinite sample": ("sample,client\ninf,a\n", "owners.csv:2: sample 'inf' is not a position"),
    "no sample": ("sample,client\n,a\n", "owners.csv:2: sample '' is not a position"),
    "sample that does not exist": (
        "sample,client\n0,a\n40,b\n",
        "owners.csv:3: there is no training sample 40; they are numbered 0 to 39",
    ),
    "sample owned twice": (
        "sample,client\n0,a\n1,b\n0,b\n",
        r"owners.csv:4: training sample 0 belongs to 'a' already \(.*owners.csv:2\)",
    ),
    "no client": ("sample,client\n0,a\n1,\n", "owners.csv:3: the client is empty"),
    "cell left out": ("sample,client\n0,a\n1\n", "owners.csv:3: the client is empty"),
    "unprintable client": (
        "sample,client\n0,a\x07b\n",
        r"owners.csv:2: client 'a\\x07b'\.\.\.: an id has at most",
    ),
    "endless client": (f"sample,client\n0,{'x' * 300}\n", "an id has at most 200 printable"),
    "unknown part": (
        "sample,client,part\n0,a,train\n1,a,val\n",
        "owners.csv:3: part is 'val'; expected train or test",
    ),
    "only test samples": ("sample,client,part\n0,a,test\n", "no client has a training sample"),
    "unknown client in the test part": (
        "sample,client,part\n0,a,train\n0,a,test\n1,b,test\n",
        "owners.csv:4: client 'b' has no training sample",
    ),
    "test sample that does not exist": (
        "sample,client,part\n0,a,train\n20,a,test\n",
        "owners.csv:3: there is no test sample 20; they are numbered 0 to 19",
    ),
    "test sample owned twice": (
        "sample,client,part\n0,a,train\n3,a,test\n3,a,test\n",
        "owners.csv:4: test sample 3 belongs to 'a' already",
    ),
    "client without a test sample": (
        "sample,client,part\n0,a,train\n1,b,train\n0,a,test\n",
        r"client 'b' has no test sample of its own \(the only one\); give it one, or set partition.tests=l",
    ),
    "not text": (b"\xff\xfe\x00", "cannot be read as a table"),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_wrong_file_is_refused_in_a_line(tmp_path: Path, kind: str) -> None:
    content, message = WRONG_FILES[kind]
    path = tmp_path / "owners.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = refused(path)
    assert pd.Series([found]).str.contains(message).all(), found
    assert "owners.csv" in found or "partition" in found


def test_other_mistakes_are_refused_in_a_line(tmp_path: Path) -> None:
    path = owners(tmp_path, HOSPITALS)
    assert "there is no such file" in refused(tmp_path / "none.csv")
    assert "it is a folder" in refused(tmp_path)
    assert "partition.clients: 7, but 4 clients are named; leave it out" in refused(path, clients=7)
    both = owners(tmp_path, HOSPITALS, "both.csv", part="train")
    assert "has a column part, and there is partition.test_path" in refused(both, test_path=path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    assert "broken.parquet: " in refused(tmp_path / "broken.parquet")
    all_held = hold_out(samples(), 0.9, 0, 0)
    first = int(np.flatnonzero(hold_out_places(all_held) < 0)[0])
    lonely = owners(tmp_path, ["lonely" if i == first else "other" for i in range(40)], "lonely.csv")
    assert "client 'lonely' has no training sample (the only one" in refused(lonely, data=all_held)


def hold_out_places(held: Samples) -> np.ndarray:
    assert held.numbering is not None
    return held.numbering.train


EVENTS = [
    ({"name": "leave", "round": 1, "clients": ["ana"]}, "there is no client 'ana'; did you mean 'anna'?"),
    (
        {"name": "leave", "round": 1, "clients": [3]},
        "there is no client '3'; use the ids of the partition, such as '007', 'NA', 'anna'",
    ),
    (
        {"name": "join", "round": 1, "returning": True, "clients": ["zoe"]},
        "client 'zoe' has not left after 1 round; leave returning out for clients that are new",
    ),
]


@pytest.mark.parametrize(("event", "message"), EVENTS)
def test_events_that_name_wrong_clients_are_refused(
    tmp_path: Path, event: dict[str, Any], message: str
) -> None:
    path = owners(tmp_path, (HOSPITALS * 40)[:1438])
    config = {**SMALL, "partition": {"name": "file", "path": str(path)}, "events": [event]}
    with pytest.raises(ConfigError) as caught:
        rayfl.run({**config, "output": {"root": str(tmp_path / "runs")}})
    assert str(caught.value) == f"events.0.clients: {message}"


def test_the_command_line_says_a_line_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = owners(tmp_path, ["a"] * 2000)
    arguments = ["partition.name=file", f"partition.path={path}", "execution.backend=inline"]
    monkeypatch.setattr(
        "sys.argv", ["rayfl", "run", "digits-demo", *arguments, f"output.root={tmp_path / 'r'}"]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {path}:1440: there is no training sample 1438; they are numbered 0 to 1437\n"
    )
    assert not list((tmp_path / "r").glob("*"))
