"""Clients that come after a run: they find the cluster of their like, and bad files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rayfl
from rayfl.config import load
from rayfl.data import DATASETS
from rayfl.data.server import ServerData
from rayfl.errors import ConfigError, DataError
from rayfl.runtime.backend import InlineBackend
from rayfl.runtime.checkpoint import Checkpoint, checkpoints
from rayfl.runtime.driver import Driver, Event, Interrupted
from rayfl.runtime.newcomers import welcome, with_newcomers
from rayfl.runtime.rundir import RunDirectory
from rayfl.runtime.session import build
from rayfl.signatures.features.pca import PCA
from rayfl.training import Batches, LocalWork, LoopEngine

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


@pytest.fixture
def finished(settings: dict[str, Any]):  # type: ignore[no-untyped-def]
    def go(**sections: Any) -> rayfl.Result:
        return rayfl.run({**settings, "rounds": 4, **sections})

    return go


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_find_their_like(method: str, finished: Any, tmp_path: Path) -> None:
    result = finished(**METHODS[method])
    frame = welcome(result.path, write(tmp_path / "new.npz", GROUPS), epochs=2)
    assert frame["client"].tolist() == [9, 10, 11]
    assert frame["n"].tolist() == [40, 40, 40]
    clients = result.clients
    for newcomer, group in zip(frame.itertuples(), (0, 1, 2), strict=True):
        like = clients[clients["group"] == group]["cluster"]
        assert newcomer.cluster in set(like), "a cluster that clients of the same kind use"
    assert frame["accuracy"].mean() > (60 if method == "fedavg" else 85)
    assert frame["accuracy_finetuned"].mean() > 80
    pd.testing.assert_frame_equal(pd.read_csv(result.path / "newcomers.csv"), frame, check_dtype=False)


def test_a_newcomer_unlike_everybody_founds_a_cluster(finished: Any, tmp_path: Path) -> None:
    tasks = [{"labels": [0, 1], "clients": 4}, {"labels": [2, 3], "clients": 4}]
    partition = {"name": "tasks", "tasks": tasks}
    result = finished(algorithm="pacfl", clustering={"threshold": 12.0}, partition=partition)
    assert result.summary["clusters"] == 2
    frame = welcome(result.path, write(tmp_path / "new.npz", [(0, 1), (6, 7)]), epochs=0)
    assert frame["cluster"].tolist() == [0, 2]
    assert "accuracy_finetuned" not in frame


def test_without_owners_there_is_one_newcomer(finished: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "new.npz", GROUPS[:1], client_train=None, client_test=None)
    assert welcome(finished().path, path, epochs=0)["n"].tolist() == [40]


def test_newcomers_adapt_as_the_runs_clients_do(finished: Any, tmp_path: Path) -> None:
    """One epoch of plain SGD at alpha, by hand; fine-tuning is more of it, whatever training.lr is."""
    alpha = 0.2
    result = finished(algorithm={"name": "per_fedavg", "alpha": alpha, "beta": 0.1})
    path = write(tmp_path / "new.npz", GROUPS)
    one, five, none = (welcome(result.path, path, epochs=k) for k in (1, 5, 0))
    assert one["accuracy_finetuned"].tolist() == one["accuracy"].tolist() == none["accuracy"].tolist()
    assert five["accuracy_finetuned"].mean() > five["accuracy"].mean()

    config = RunDirectory(result.path).config
    stages, host = build(config)
    federation = with_newcomers(stages[0].federation, path)
    batches = Batches(federation.samples, torch.device("cpu"))
    start = torch.from_numpy(Checkpoint.load(checkpoints(result.path / "checkpoints")[-1]).models)
    engine = LoopEngine(host.spec, batches, config.seed)
    work = LocalWork(epochs=1, batch_size=10, lr=alpha)
    model = engine.train(work, 4, [9], [federation.train[9]], start).rows[0]
    host.spec.load(engine.module, model)
    x, y = batches.test(federation.test[9])
    right = engine.module.eval()(x).argmax(1) == y
    assert one["accuracy"][0] == pytest.approx(100 * right.float().mean().item())


@pytest.mark.parametrize("method", ["fedavg", "cfl"])
def test_others_in_the_file_change_nothing_for_a_newcomer(method: str, finished: Any, tmp_path: Path) -> None:
    """Alone, with noise, with 2,000 white images: models see what they saw in training."""
    result = finished(**METHODS[method])
    alone = welcome(result.path, write(tmp_path / "new.npz", GROUPS), epochs=1)
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
        pd.testing.assert_frame_equal(welcome(result.path, tmp_path / "more.npz", epochs=1)[:3], alone)


def test_the_run_itself_stays_as_it_was(finished: Any, tmp_path: Path) -> None:
    result = finished(**METHODS["pacfl"])
    before = {p.name: p.read_bytes() for p in result.path.glob("*.csv")}
    welcome(result.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
    after = {p.name: p.read_bytes() for p in result.path.glob("*.csv") if p.name != "newcomers.csv"}
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
        ({"client_train": np.array([{}] * 40)}, "client_train must hold 40 numbers"),
        ({"client_train": np.full(40, 2**63, np.uint64)}, "client_train must hold 40 numbers"),
        ({"client_train": np.arange(40) * 10**12}, "newcomer 1 has no sample in client_train"),
    ],
)
def test_files_that_do_not_fit(changes: dict[str, Any], message: str, finished: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "new.npz", GROUPS[:1], **changes)
    with pytest.raises(DataError, match=message):
        welcome(finished().path, path)


def test_no_run_no_newcomers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        welcome(tmp_path, write(tmp_path / "new.npz", GROUPS))


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

    def watch(event: Event) -> None:
        stopping.extend([True] if event.kind == "blocks" and event.data["round"] == 2 else [])

    with pytest.raises(Interrupted):
        Driver(config, stages, backend, directory, host, watch, lambda: bool(stopping)).run()
    backend.close()
    frame = welcome(directory.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
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
    welcome(result.path, write(tmp_path / "new.npz", GROUPS), epochs=0)
    first, second = seen
    np.testing.assert_array_equal(first, second)
