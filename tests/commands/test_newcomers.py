"""Clients that come after a run: they find the cluster of their like, and bad files are refused."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import pdist
from typer.testing import CliRunner

import rayfl
from rayfl.cli import app
from rayfl.clustering.newcomers import fit_by_distances, fit_by_means
from rayfl.commands.newcomers import Owners, assign_newcomers, read_newcomers, with_newcomers
from rayfl.config import load
from rayfl.data import DATASETS
from rayfl.data.server import ServerData
from rayfl.errors import ConfigError, DataError, Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from rayfl.signatures.features.pca import PCA
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from rayfl.units import size

PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10
GROUPS = [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)]
CFL = {"name": "cfl", "criteria": {"eps1": 10.0, "eps2": 0.01, "min_size": 3}}
METHODS: dict[str, dict[str, Any]] = {
    "pacfl": {"algorithm": "pacfl", "clustering": {"n_clusters": 3}},
    "mt_hfl": {"algorithm": "mt_hfl", "clustering": {"n_clusters": 3}},
    "flis_hc": {"algorithm": "flis_hc", "clustering": {"n_clusters": 3}},
    "fedsem": {"algorithm": {"name": "fedsem", "clusters": 3}},
    "ifca": {"algorithm": {"name": "ifca", "clusters": 6}, "rounds": 8},
    "flis_dc": {"algorithm": {"name": "flis_dc", "beta": 0.5}},
    "pca_km_hc": {"algorithm": "pca_km_hc", "clustering": {"n_clusters": 3, "features": "pca"}},
    "planted groups, which newcomers do not tell": {
        "algorithm": "pacfl",
        "clustering": {"grouping": "planted"},
    },
    "pacfl at two edges": {
        "algorithm": "pacfl",
        "clustering": {"n_clusters": 3},
        "hierarchy": {"edges": 2},
    },
    "pacfl, by way of representatives": {
        "algorithm": "pacfl",
        "clustering": {"n_clusters": 3, "exact_up_to": 6},
    },
    "flt, on subspaces": {
        "algorithm": "flt",
        "clustering": {
            "signature": "subspace",
            "features": "identity",
            "embedding": "none",
            "proximity": "principal_angle",
            "gamma": "auto",
        },
    },
    "cfl": {"algorithm": CFL},
    "fedavg": {"algorithm": "fedavg"},
}


def write(path: Path, groups: list[tuple[int, ...]], **changes: Any) -> Path:
    """A newcomer of each group: 40 of its digits to train on and 30 to be tested on."""
    samples = DATASETS["digits"]().load(Path())
    rng = np.random.default_rng(1)
    train, test = [], []
    for labels in groups:
        ids = rng.permutation(np.flatnonzero(np.isin(samples.y_train, labels)))
        train.append(ids[:40])
        test.append(ids[40:70])
    arrays: dict[str, Any] = {
        "x_train": samples.x_train[np.concatenate(train)],
        "y_train": samples.y_train[np.concatenate(train)],
        "x_test": samples.x_train[np.concatenate(test)],
        "y_test": samples.y_train[np.concatenate(test)],
        "client_train": np.repeat(np.arange(len(groups)), 40),
        "client_test": np.repeat(np.arange(len(groups)), 30),
    }
    arrays |= changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


@pytest.fixture(scope="module")
def runs() -> dict[str, Path]:
    """What is finished, by its settings."""
    return {}


@pytest.fixture
def finished(
    settings: dict[str, Any], runs: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., rayfl.Result]:
    """A copy of a run of four rounds."""

    def go(**sections: Any) -> rayfl.Result:
        name = repr(sections)
        if name not in runs:
            output = {**settings["output"], "root": str(tmp_path_factory.mktemp("runs"))}
            training = {**settings["training"], "batch_size": 10}  # so that models learn in four rounds
            given = {**settings, "rounds": 4, "training": training, "output": output, **sections}
            runs[name] = rayfl.run(given).path
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return rayfl.Result(shutil.copytree(runs[name], folder / runs[name].name))

    return go


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
def test_newcomers_find_their_like(method: str, finished: Any, tmp_path: Path) -> None:
    result = finished(**METHODS[method])
    frame = assign_newcomers(result.path, write(tmp_path / "new.npz", GROUPS), epochs=2)
    assert frame["client"].tolist() == [9, 10, 11]
    assert frame["n"].tolist() == [40, 40, 40]
    clients = result.clients
    for newcomer, group in zip(frame.itertuples(), (0, 1, 2), strict=True):
        like = clients[clients["group"] == group]["cluster"]
        assert newcomer.cluster in set(like), "a cluster that clients of the same kind use"
    assert not frame["new_cluster"].any()
    assert frame["accuracy"].mean() > (60 if method == "fedavg" else 85)
    assert frame["accuracy_finetuned"].mean() > 80
    pd.testing.assert_frame_equal(pd.read_csv(result.path / "newcomers.csv"), frame, check_dtype=False)


def test_a_newcomer_unlike_everybody_founds_a_cluster(finished: Any, tmp_path: Path) -> None:
    tasks = [{"labels": [0, 1], "clients": 4}, {"labels": [2, 3], "clients": 4}]
    partition = {"name": "tasks", "tasks": tasks}
    result = finished(algorithm="pacfl", clustering={"threshold": 12.0}, partition=partition)
    assert result.summary["clusters"] == 2
    frame = assign_newcomers(result.path, write(tmp_path / "new.npz", [(0, 1), (6, 7)]), epochs=0)
    assert frame["cluster"].tolist() == [0, 2]
    assert frame["new_cluster"].tolist() == [False, True]
    assert frame["distance"].isna().tolist() == frame["usual"].isna().tolist() == [False, True]
    assert "accuracy_finetuned" not in frame


def test_without_owners_there_is_one_newcomer(finished: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "new.npz", GROUPS[:1], client_train=None, client_test=None)
    run, said = finished().path, []
    assert assign_newcomers(run, path, epochs=0, say=said.append)["n"].tolist() == [40]
    assert said == []
    assign_newcomers(run, path, epochs=0, say=said.append)
    assert said == ["newcomers.csv of an earlier call is replaced"]


def test_newcomers_adapt_as_the_runs_clients_do(finished: Any, tmp_path: Path) -> None:
    """One epoch of plain SGD at alpha, by hand; fine-tuning is more of it, whatever training.lr is."""
    alpha = 0.2
    result = finished(algorithm={"name": "per_fedavg", "alpha": alpha, "beta": 0.1})
    path = write(tmp_path / "new.npz", GROUPS)
    one, five, none = (assign_newcomers(result.path, path, epochs=k) for k in (1, 5, 0))
    assert one["accuracy_finetuned"].tolist() == one["accuracy"].tolist() == none["accuracy"].tolist()
    assert five["accuracy_finetuned"].mean() > five["accuracy"].mean()

    config = RunDirectory(result.path).config
    stages, host = build(config)
    new = read_newcomers(config, stages[0].federation.samples, path)
    federation = with_newcomers(stages, 4, new)[-1].federation
    batches = Batches(federation.samples, torch.device("cpu"))
    start = torch.from_numpy(Checkpoint.load(checkpoints(result.path / "checkpoints")[-1]).models)
    engine = LoopEngine(host.spec, batches, config.seed)
    work = LocalWork(epochs=1, batch_size=10, lr=alpha)
    model = engine.train(work, 3, [9], [federation.train[9]], start).rows[0]
    host.spec.load(engine.module, model)
    x, y = batches.test(federation.test[9])
    right = engine.module.eval()(x).argmax(1) == y
    assert one["accuracy"][0] == pytest.approx(100 * right.float().mean().item())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", ["fedavg", "cfl", "pacfl", "mt_hfl", "flis_hc", "ifca", "pca_km_hc"])
def test_others_in_the_file_change_nothing_for_a_newcomer(method: str, finished: Any, tmp_path: Path) -> None:
    """Alone, with noise, with 2,000 white images: models see what they saw in training."""
    result = finished(**METHODS[method])
    alone = assign_newcomers(result.path, write(tmp_path / "new.npz", GROUPS), epochs=1)
    rng = np.random.default_rng(2)
    for other in (rng.integers(0, 256, (40, 1, 8, 8)), np.full((2000, 1, 8, 8), 255)):
        own = np.load(tmp_path / "new.npz")
        more = {
            f"{name}_{part}": np.concatenate(
                [own[f"{name}_{part}"], what.astype(own[f"{name}_{part}"].dtype)]
            )
            for part in ("train", "test")
            for name, what in (
                ("x", other),
                ("y", np.zeros(len(other))),
                ("client", np.full(len(other), len(GROUPS))),
            )
        }
        np.savez(tmp_path / "more.npz", **more)
        found = assign_newcomers(result.path, tmp_path / "more.npz", epochs=1)
        pd.testing.assert_frame_equal(found[:3], alone)


def test_the_run_itself_stays_as_it_was(finished: Any, tmp_path: Path) -> None:
    result = finished(**METHODS["pacfl"])
    before = {p.name: p.read_bytes() for p in result.path.glob("*.csv")}
    assign_newcomers(result.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
    after = {p.name: p.read_bytes() for p in result.path.glob("*.csv") if "newcomers" not in p.name}
    assert after == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": np.zeros((40, 5), np.float32), "x_test": np.zeros((30, 5), np.float32)},
            "the run's are",
        ),
        ({"y_train": np.full(40, 11)}, "has label 11; the run's model knows labels 0 to 9"),
        ({"client_train": np.full(40, 1)}, "newcomer 0 has no sample in client_train"),
        ({"client_train": np.zeros(3, int)}, "client_train must hold 40 numbers"),
        ({"client_test": None}, "has client_train but no client_test; both name the newcomer"),
        ({"client_train": None}, "has client_test but no client_train; both name the newcomer"),
        ({"client_train": np.array([{}] * 40)}, "client_train must hold 40 numbers"),
        ({"client_train": np.full(40, 2**63, np.uint64)}, "client_train must hold 40 numbers"),
        ({"client_train": np.arange(40) * 10**12}, "newcomer 1 has no sample in client_train"),
    ],
)
def test_files_that_do_not_fit(changes: dict[str, Any], message: str, finished: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "new.npz", GROUPS[:1], **changes)
    with pytest.raises(DataError, match=message):
        assign_newcomers(finished().path, path)


@pytest.mark.parametrize("owners", [Owners("hospital"), Owners(test_fraction=0.5)])
def test_what_a_file_of_arrays_says_itself_is_not_given(
    owners: Owners, finished: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "new.npz", GROUPS[:1])
    with pytest.raises(ConfigError, match=r"for tables and folders; an .npz file has client_train"):
        assign_newcomers(finished().path, path, owners=owners)


def test_no_run_no_newcomers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        assign_newcomers(tmp_path, write(tmp_path / "new.npz", GROUPS))


def test_newcomers_of_a_run_stopped_before_an_event_meet_the_clients_that_are_there(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Clients that would have joined later have no cluster yet: newcomers must not be taken to theirs."""
    events = [
        {"name": "leave", "round": 4, "group": 0},
        {"name": "join", "round": 4, "clients": 1, "group": 2},
    ]
    whole = {**settings, **METHODS["pacfl"], "rounds": 6}
    config = load({**whole, "events": events})
    stages, host = build(config)
    directory, backend, stopping = RunDirectory.create(config), InlineBackend(), []

    def watch(event: RunEvent) -> None:
        stopping.extend([True] if isinstance(event, BlockDone) and event.round == 2 else [])

    with pytest.raises(Interrupted):
        Driver(config, stages, backend, directory, host, watch, lambda: bool(stopping)).run()
    backend.close()
    frame = assign_newcomers(directory.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
    assert frame["client"].tolist() == [9, 10, 11]
    assert frame["cluster"].tolist() == [0, 1, 2]
    assert frame["accuracy"].min() > 50


@pytest.mark.parametrize("method", ["pca_km_hc", "flis_hc"])
def test_the_servers_own_samples_are_those_of_the_run(
    method: str, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature map, or the samples that models predict, must not change because of newcomers' data."""
    seen: list[np.ndarray[Any, Any]] = []
    fit, draw = PCA.fit, ServerData.draw

    def fitted(self: PCA, x: Any, key: int = 0) -> Any:
        seen.append(x)
        return fit(self, x, key)

    def drawn(self: ServerData, *args: Any) -> Any:
        seen.append(draw(self, *args))
        return seen[-1]

    monkeypatch.setattr(PCA, "fit", fitted)
    monkeypatch.setattr(ServerData, "draw", drawn)
    result = finished(**METHODS[method])
    assign_newcomers(result.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
    first, *others = seen
    assert others
    for other in others:
        np.testing.assert_array_equal(first, other)


# --- how well they fit, what it costs, and what else they could have -----------------------------------


def noise(path: Path, **changes: Any) -> Path:
    """The three of :func:`write`, then one whose pixels are pure noise."""
    write(path, GROUPS)
    rng, found = np.random.default_rng(5), {}
    with np.load(path) as content:
        for part in ("train", "test"):
            x = rng.integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
            found[f"x_{part}"] = np.concatenate([content[f"x_{part}"], x])
            found[f"y_{part}"] = np.concatenate([content[f"y_{part}"], rng.integers(0, 10, 40)])
            found[f"client_{part}"] = np.concatenate([content[f"client_{part}"], np.full(40, 3)])
    np.savez(path, **{**found, **changes})
    return path


@pytest.mark.parametrize("method", ["pacfl", "mt_hfl", "pca_km_hc", "flt", "cfl", "ifca"])
def test_who_is_far_from_its_cluster_is_marked(method: str, finished: Any, tmp_path: Path) -> None:
    sections = METHODS.get(method, {"algorithm": method})
    if method == "flt":
        sections = {
            "algorithm": "flt",
            "clustering": {"features": "pca", "embedding": "none", "gamma": "auto"},
        }
    frame = assign_newcomers(finished(**sections).path, noise(tmp_path / "new.npz"), epochs=0, local_epochs=0)
    placed = ~frame["new_cluster"]
    assert frame["far"][placed].tolist() == [False, False, False, True][: placed.sum()]
    assert placed[:3].all()
    assert (frame["distance"] < frame["next_distance"])[:3].all()
    assert "accuracy_local" not in frame


def test_the_command_warns_of_it(finished: Any, tmp_path: Path) -> None:
    path = finished(**METHODS["fedsem"]).path
    arguments = [
        "newcomers",
        str(path),
        str(noise(tmp_path / "new.npz")),
        "--epochs",
        "0",
        "--local-epochs",
        "2",
    ]
    shown = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert re.search(
        r"warning: newcomer 12 lies [0-9.]+ from cluster \d, whose members lie within 0.\d+ \(loss\)", shown
    )
    assert "newcomer 9 lies" not in shown
    sent = 4 * 3 * PARAMETERS  # each downloads the three models to choose among
    assert f"sent: 0 B up, {size(4 * sent)} down" in shown
    assert re.search(r"accuracy global [0-9.]+ %, accuracy local [0-9.]+ %", shown)


def test_the_fit_by_hand() -> None:
    """Clients 0, 1, 2 at 0, 1, 3 are cluster 4; client 3 at 10 alone is cluster 7. At 2 and 30 come two."""
    at = np.array([0.0, 1, 3, 10, 2, 30])
    condensed = pdist(at[:, None])
    labels, new = np.array([4, 4, 4, 7, 4, 4]), np.arange(6) > 3
    fit = fit_by_distances("x", condensed, labels, new)
    assert fit.distance.tolist() == pytest.approx([4 / 3, 86 / 3])
    assert fit.next_distance.tolist() == [8, 20]
    assert fit.usual.tolist() == [2.5, 2.5]  # of client 2: 3 and 2 from the others
    assert fit.far.tolist() == [False, True]
    by_means = fit_by_means([np.array([[x]]) for x in at[:4]], labels[:4], [np.array([[2.0]])], np.array([7]))
    assert by_means.distance.tolist() == [8]
    assert by_means.next_distance.tolist() == pytest.approx([2 / 3])
    assert by_means.usual.tolist() == pytest.approx([5 / 3])  # of client 2; cluster 7 has one member
    assert by_means.far.tolist() == [True]


def test_of_a_damaged_checkpoint_the_one_before_is_used(finished: Any, tmp_path: Path) -> None:
    result, path = finished(**METHODS["pacfl"]), write(tmp_path / "new.npz", GROUPS)
    *_, before, newest = checkpoints(result.path / "checkpoints")
    whole = shutil.copytree(result.path, tmp_path / result.path.name)
    shutil.rmtree(whole / "checkpoints" / newest.name)
    state = newest / "state.json"
    state.write_bytes(state.read_bytes()[:-9])
    said: list[str] = []
    found = assign_newcomers(result.path, path, epochs=0, say=said.append)
    pd.testing.assert_frame_equal(found, assign_newcomers(whole, path, epochs=0))
    assert [line.endswith(f"going back to {before.name}") for line in said] == [True]
    assert newest.is_dir()
    shown = CliRunner().invoke(app, ["newcomers", str(result.path), str(path), "--epochs", "0"]).output
    assert "warning: " in shown


def test_the_global_model_and_training_alone(finished: Any, tmp_path: Path) -> None:
    """By hand: the mean of three clusters' models by their samples, and plain SGD from w_0."""
    result = finished(**METHODS["pacfl"])
    path = write(tmp_path / "new.npz", GROUPS)
    frame = assign_newcomers(result.path, path, epochs=0, local_epochs=3)

    config = RunDirectory(result.path).config
    stages, host = build(config)
    federation = with_newcomers(stages, 4, read_newcomers(config, stages[0].federation.samples, path))[
        -1
    ].federation
    batches = Batches(federation.samples, torch.device("cpu"))
    saved = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
    sizes = stages[0].federation.sizes
    weights = [sizes[saved.state.assignment == k].sum() for k in range(3)]
    average = np.average(saved.models.astype(np.float64), axis=0, weights=weights).astype(np.float32)
    engine = LoopEngine(host.spec, batches, config.seed)
    work = LocalWork(epochs=3, batch_size=10, lr=0.05)
    for at, client in enumerate((9, 10, 11)):
        start = torch.from_numpy(host.spec.initial()[None])
        alone = engine.train(work, 3, [client], [federation.train[client]], start).rows[0]
        for column, model in (("accuracy_global", torch.from_numpy(average)), ("accuracy_local", alone)):
            host.spec.load(engine.module, model)
            x, y = batches.test(federation.test[client])
            right = engine.module.eval()(x).argmax(1) == y
            assert frame[column][at] == pytest.approx(100 * right.float().mean().item())
    assert (frame["accuracy"] > frame["accuracy_global"]).all()


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        ("pacfl", 3 * 64, PARAMETERS),
        ("fedavg", 0, PARAMETERS),
        ("ifca", 0, 6 * PARAMETERS),
        ("fedsoft", 2, 2 * PARAMETERS),
        ("flis_hc", PARAMETERS, 2 * PARAMETERS),
    ],
)
def test_bytes_of_three_newcomers(method: str, up: int, down: int, finished: Any, tmp_path: Path) -> None:
    result = finished(**METHODS.get(method, {"algorithm": method}))
    assign_newcomers(result.path, write(tmp_path / "new.npz", GROUPS), 0, 0)
    sent = pd.read_csv(result.path / "newcomers_communication.csv").groupby("direction")["bytes"].sum()
    assert sent.to_dict() == {name: 3 * 4 * count for name, count in (("down", down), ("up", up)) if count}


# --- data of other kinds -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cfl", "ifca"])
def test_clients_that_see_labels_differently(method: str, finished: Any, tmp_path: Path) -> None:
    """Two groups that permute all labels, each in its own way, and a newcomer of each."""
    result = finished(
        **METHODS[method] | {"rounds": 8},
        partition={"name": "relabelled", "clients": 8, "clusters": 2, "relabel": "permute"},
        training={"epochs": 3, "batch_size": 10, "lr": 0.1},
    )
    federation = build(RunDirectory(result.path).config)[0][0].federation
    maps, count = federation.samples.label_maps, len(federation.samples.x_train)
    assert maps is not None
    path = write(tmp_path / "new.npz", [tuple(range(10))] * 2)
    with np.load(path) as content:
        arrays = dict(content)
    for part in ("train", "test"):
        for newcomer, like in enumerate((0, 7)):
            theirs = arrays[f"client_{part}"] == newcomer
            own = maps[federation.train[like][0] // count]
            arrays[f"y_{part}"][theirs] = own[arrays[f"y_{part}"][theirs]]
    np.savez(path, **arrays)
    frame = assign_newcomers(result.path, path, epochs=0, local_epochs=0)
    clients = result.clients
    for newcomer, group in zip(frame.itertuples(), (0, 1), strict=True):
        assert newcomer.cluster in set(clients[clients["group"] == group]["cluster"])
    assert frame["accuracy"].min() > 60
    assert frame["accuracy_global"].max() < 60


def test_the_ids_of_old_clients_name_the_samples_that_they_had(finished: Any, tmp_path: Path) -> None:
    """With label maps an id holds the number of samples, which newcomers change."""
    partition = {"name": "relabelled", "clients": 4, "clusters": 2}
    result = finished(partition=partition)
    config = RunDirectory(result.path).config
    stages, _ = build(config)
    old = stages[0].federation
    new = read_newcomers(config, old.samples, write(tmp_path / "new.npz", GROUPS[:1]))
    now = with_newcomers(stages, 4, new)[-1].federation
    for client in range(4):
        for part, lists in (("train", "train"), ("train", "validation"), ("test", "test")):
            before, after = getattr(old, lists)[client], getattr(now, lists)[client]
            for read in ("inputs", "labels"):
                np.testing.assert_array_equal(
                    getattr(old.samples, read)(part, before), getattr(now.samples, read)(part, after)
                )


def test_layout_and_size_of_the_runs_own_data(finished: Any, tmp_path: Path) -> None:
    """Images of two channels, the last axis of the file: nothing but data.layout says so."""
    path = write(tmp_path / "new.npz", GROUPS)
    with np.load(path) as content:
        arrays = dict(content)
    for part in ("train", "test"):
        x = arrays[f"x_{part}"].transpose(0, 2, 3, 1)
        arrays[f"x_{part}"] = np.concatenate([x, 255 - x], axis=3)
    np.savez(path, **arrays)
    data = {"name": "npz", "path": str(path), "layout": "hwc", "size": 12}
    result = finished(data=data, partition={"name": "iid", "clients": 3})
    frame = assign_newcomers(result.path, path, epochs=0, local_epochs=0)
    assert frame["n"].tolist() == [40, 40, 40]
