"""Run directories, checkpoints and the resource arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.torch import load_file

from rayfl import rundir
from rayfl.api import resume, run, run_once
from rayfl.config import Config, load
from rayfl.errors import ConfigError, RayflError
from rayfl.events import Note, RoundDone, RunEvent, Stopped
from rayfl.models import ModelSpec
from rayfl.report import write_report
from rayfl.report.files import RunFiles
from rayfl.rundir import RunDirectory
from rayfl.runtime import connection
from rayfl.runtime.resources import Available, Node, ResourcePlan, plan_resources
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.records import Records
from tests.algorithms.fakes import Remembering
from tests.runs import assert_same


def test_a_run_directory_holds_what_it_promises(settings: dict[str, Any]) -> None:
    config = load(settings, ["output.report=true", "output.tensorboard=true", "algorithm=mt_hfl"])
    result = run(config)
    names = {path.name.split(".out")[0] for path in result.path.iterdir()}
    assert names >= {
        "config.yaml", "environment.json", "rounds.csv", "clients.csv", "clusters.json", "communication.csv",
        "checkpoints", "models", "report.html", "summary.json", "events",
    }  # fmt: skip
    assert load(result.path / "config.yaml") == load(config, ["training.engine=batched"])  # what auto chose
    assert len(pd.read_csv(result.path / "rounds.csv")) == config.rounds == len(result.rounds)
    assert result.clients["n"].tolist() == build(config)[0][0].federation.sizes.tolist()
    assert result.clusters["timeline"][0]["round"] == 0
    assert result.communication["bytes"].sum() == result.summary["bytes_up"] + result.summary["bytes_down"]
    stages, host = build(config)
    federation = stages[0].federation
    spec: ModelSpec = host.spec
    final = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
    for k, vector in enumerate(final.models):
        module = spec.build()
        module.load_state_dict(load_file(result.path / "models" / f"model_{k}.safetensors"))
        np.testing.assert_array_equal(spec.flatten(module), vector)
    assert federation.clients == 9


def test_models_of_fewer_rounds_do_not_stay(settings: dict[str, Any]) -> None:
    """A run that goes on may end with fewer models."""
    path = run(settings).path
    (path / "models" / "model_7.safetensors").write_bytes(b"")
    resume(path, [f"rounds={settings['rounds'] + 1}"])
    assert [file.name for file in (path / "models").iterdir()] == ["model_0.safetensors"]


def test_evaluation_at_its_cadence_and_always_at_the_end(settings: dict[str, Any]) -> None:
    rounds = run(settings, ["rounds=5", "evaluation.every=2"]).rounds
    assert rounds["accuracy_mean"].notna().tolist() == [False, True, False, True, True]


def test_a_refused_run_leaves_nothing_behind(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer 'conv9'"):
        run(settings, ["algorithm=pacfl", "hierarchy.common_layers=conv9"])
    with pytest.raises(ConfigError, match="10 clusters of 9 clients; use"):  # known only when the clients are
        run(settings, ["algorithm=pacfl", "clustering.n_clusters=10"])
    assert list(tmp_path.iterdir()) == []
    for given, left in ((tmp_path / "new" / "runs", []), (tmp_path / "empty" / "runs", ["empty"])):
        if left:
            given.parent.mkdir()  # what was there before stays
        with pytest.raises(ConfigError, match="10 clusters of 9 clients; use at most 9"):
            run(settings, ["algorithm=pacfl", "clustering.n_clusters=10", f"output.root={given}"])
        assert [path.name for path in tmp_path.iterdir()] == left


def test_two_processes_cannot_write_one_run(settings: dict[str, Any]) -> None:
    result = run(settings)
    with RunDirectory(result.path).locked(), pytest.raises(RayflError, match="another process"):
        resume(result.path, ["rounds=4"])


def test_more_rounds_go_on_from_the_end(settings: dict[str, Any]) -> None:
    first = run(settings)
    seconds = first.summary["seconds"]
    result = resume(first.path, ["rounds=5"])
    assert result.summary["seconds"] > seconds  # of both sessions
    assert RunFiles.read(result.path).headline()["seconds"] == result.summary["seconds"]
    whole = run(settings, ["rounds=5"])
    assert result.summary["models_sha256"] == whole.summary["models_sha256"]
    assert len(result.rounds) == 5


def test_a_resumed_run_keeps_its_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be changed"):
        resume(run(settings).path, ["training.lr=1"])


def _stopped(settings: dict[str, Any], *overrides: str) -> Path:
    """A run with one complete round."""
    root = Path(settings["output"]["root"])
    before = set(root.iterdir())

    def stop(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        run(settings, overrides, on_event=stop)
    (path,) = set(root.iterdir()) - before
    return path


@pytest.mark.parametrize(("name", "value"), [("block_size", 3), ("clients_per_actor", 2), ("fan_in", 2)])
def test_a_resumed_run_keeps_the_order_of_its_sums(name: str, value: int, settings: dict[str, Any]) -> None:
    """Whether the command says otherwise or the file; unchanged it may be said."""
    path = _stopped(settings)
    described = (path / "config.yaml").read_text()
    line = rf"execution\.{name}: is {value}, but the run was begun with (2|null|None)"
    with pytest.raises(ConfigError, match=line):
        resume(path, [f"execution.{name}={value}"])
    changed = yaml.safe_load(described)
    changed["execution"][name] = value
    (path / "config.yaml").write_text(yaml.safe_dump(changed))
    with pytest.raises(ConfigError, match=line):
        resume(path)
    (path / "config.yaml").write_text(described)
    assert_same(run(settings), resume(path, ["execution.block_size=2", "execution.fan_in=null"]))


def test_a_run_goes_on_in_its_directory_with_other_actors(settings: dict[str, Any]) -> None:
    """As ``rayfl run --resume`` and studies do it, which name all settings of ``execution``."""
    here = load(settings, ["execution.fan_in=2", "execution.clients_per_actor=3"])
    there = load(here, ["execution.wait=7", "execution.deadline=90", "execution.cpus_per_actor=0.5"])

    def stop(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        run_once(here, "once", stop)
    assert_same(run(here), run_once(there, "once"))


def test_a_run_that_moves_to_another_device_says_so(settings: dict[str, Any]) -> None:
    notes: list[str] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, Note) and "round differently" in event.text:
            notes.append(event.text)

    path = _stopped(settings)
    resume(path, ["execution.wait=7"], listen)
    assert not notes
    resume(path, ["rounds=4", "execution.gpus_per_actor=0.5"], listen)
    (line,) = notes
    assert line.startswith("clients trained on CPUs, and now train on a GPU where there is one")
    resume(path, ["rounds=5"], listen)
    assert len(notes) == 1


def _checkpoint(round: int) -> Checkpoint:
    state = Remembering(round, 2, np.array([0, 1, 1]), True, memory=np.arange(3.0))
    return Checkpoint(
        state, np.ones((2, 4), np.float32), np.array([1, 2]), np.zeros((2, 3), np.float32),
        np.full((2, 5), 7, np.float32), np.array([2]), np.full((1, 4), 8, np.float32),
        {"last": np.array([np.nan, 1.0])}, {"rounds": [{"round": 0, "loss": float("nan")}]},
    )  # fmt: skip


def test_checkpoints_round_trip_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 30):
        _checkpoint(number).save(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["round-00002", "round-00030"]
    back, saved = Checkpoint.load(checkpoints(tmp_path)[-1], Remembering), _checkpoint(30)
    assert (back.state.round, back.state.models, back.state.clustered) == (30, 2, True)
    np.testing.assert_array_equal(back.state.assignment, saved.state.assignment)
    np.testing.assert_array_equal(back.state.memory, saved.state.memory)
    np.testing.assert_array_equal(back.models, saved.models)
    for name in ("state_clients", "state_rows", "vectors", "update_clients", "update_rows"):
        np.testing.assert_array_equal(getattr(back, name), getattr(saved, name))
    np.testing.assert_array_equal(back.arrays["last"], saved.arrays["last"])
    assert back.tables["rounds"] == [{"round": 0, "loss": None}]


def plan(config: Config, available: Available) -> ResourcePlan:
    block = config.execution.clients_per_block(config.training.cohort(100))
    return plan_resources(config, 100, block, 1000, 10**6, available)


def test_an_actor_must_fit_on_one_node() -> None:
    apart = Available((Node(4, 0), Node(0, 1)), 64e9)
    assert apart.room(1, 0) == 4
    assert apart.room(1, 0.5) == 0
    with pytest.raises(ConfigError, match=r"no node has 1 CPUs and 0\.5 GPUs"):
        plan(load({}, ["execution.actors=1", "execution.gpus_per_actor=0.5"]), apart)
    assert Available((Node(4, 1), Node(1, 1)), 64e9).room(1, 0.5) == 3


PLENTY = Available((Node(8, 1),), memory=64e9)


@pytest.mark.parametrize(
    ("overrides", "actors"),
    [
        ([], 8),  # as many as there are CPUs: there are 15 blocks
        (["execution.cpus_per_actor=2"], 4),
        (["execution.cpus_per_actor=0.1", "execution.block_size=50"], 2),
        (["execution.gpus_per_actor=0.25"], 4),
        (["execution.clients_per_actor=20"], 5),
        (["execution.actors=3"], 3),
    ],
)
def test_actors_follow_from_what_there_is(overrides: list[str], actors: int) -> None:
    planned = plan(load({}, overrides), PLENTY)
    assert planned.actors == actors
    assert planned.cpus <= 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["execution.actors=20"],
            "20 actors of 1 CPU need 20, there are 8.*cpus_per_actor=0.4 or .*actors=8",
        ),
        (
            ["execution.clients_per_actor=1"],
            "100 actors of 1 CPU.*cpus_per_actor=0.08 or .*clients_per_actor=13",
        ),
        (["execution.gpus_per_actor=2"], "1 actor of 2 GPU needs 2, there are 1.*gpus_per_actor=1 would fit"),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(load({}, overrides), PLENTY)


@pytest.mark.parametrize("remedy", ["execution.cpus_per_actor=0.4", "execution.actors=8"])
def test_the_remedy_does_fit(remedy: str) -> None:
    settings = ["execution.actors=20", remedy]
    assert plan(load({}, settings), PLENTY).cpus <= 8


def test_memory_is_part_of_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r" each do not fit in 1\.00 GB"):
        plan(load({}, ["execution.actors=8"]), Available((Node(8, 0),), 1e9))


@pytest.mark.parametrize(("actors", "looks"), [("1", 2), ("2", 3), ("auto", 3)])
def test_a_run_waits_for_what_the_one_before_gives_back(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, actors: str, looks: int
) -> None:
    """Two CPUs, of which none, then one, then both are free again."""
    free = iter([0.0, 1.0, 2.0])
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}},
        {"NodeID": "b", "Alive": False, "Resources": {"CPU": 8.0}},
    ]
    monkeypatch.setattr(connection.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(connection, "this_cluster", lambda *_: Available((Node(next(free), 0.0),), 1e12))
    config = load(
        settings, ["execution.backend=ray", "execution.block_size=auto", f"execution.actors={actors}"]
    )
    assert connection.available(config).cpus == looks - 1


def test_a_run_does_not_wait_for_ever(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RELEASE_TIMEOUT", 0.1)
    nodes = [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr(connection.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(connection, "this_cluster", lambda *_: Available((Node(1.0, 0.0),), 1e12))
    assert connection.available(load(settings, ["execution.backend=ray"])).cpus == 1


@pytest.mark.parametrize(("rise", "again"), [("null", False), ("1e-9", True), ("1e9", False)])
def test_longer_updates_make_clusters_anew(settings: dict[str, Any], rise: str, again: bool) -> None:
    changes = ["algorithm=pacfl", "clustering.max_flags=0", f"clustering.flag_update={rise}", "rounds=6"]
    timeline = json.loads((run(load(settings, changes)).path / "clusters.json").read_text())["timeline"]
    assert (len(timeline) > 1) == again


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 9999], ids=repr)
def test_a_damaged_json_file_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(RayflError, match=r"summary.json: is damaged \(.*\); delete it and resume"):
        RunDirectory(tmp_path).read_json("summary.json")


def test_a_resumed_run_stays_where_it_is(tmp_path):
    run = RunDirectory.create(load({}, [f"output.root={tmp_path}"]))
    with pytest.raises(ConfigError, match=r"output.root: cannot be changed in a resumed run"):
        resume(run.path, ["output.root=/elsewhere"])


def test_a_folder_with_the_name_of_a_table_is_refused_before_anything_starts(
    settings: dict[str, Any],
) -> None:
    run_path = run(settings).path
    (run_path / "rounds.csv").unlink()
    (run_path / "rounds.csv").mkdir()
    events: list[RunEvent] = []
    with pytest.raises(RayflError, match=r"rounds.csv: is not a regular file; remove it"):
        resume(run_path, on_event=events.append)
    assert not events


_AS_OWNER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
"""Starts a program that has no more rights to root's files than their owner has to its own."""


def test_files_without_permissions_are_named(tmp_path: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read all files here: there is no setpriv to give that right up")
    for name in ("unreadable", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rounds.csv").touch()
    (tmp_path / "unreadable" / "rounds.csv").chmod(0)
    (tmp_path / "kept").chmod(0o555)
    script = (
        "from rayfl.rundir import RunDirectory\n"
        "from rayfl.errors import RayflError\n"
        "checks = {'unreadable': 'check_files', 'kept': 'check_writable'}\n"
        "for name, check in checks.items():\n"
        "    try: getattr(RunDirectory(name), check)()\n"
        "    except RayflError as error: print(error)\n"
    )
    start = _AS_OWNER if os.geteuid() == 0 else []
    answer = subprocess.run(
        [*start, sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines() == [
        "unreadable/rounds.csv: cannot be read; change its permissions",
        "kept: cannot be written to; change its permissions",
    ]


def test_a_ledger_with_text_for_a_number_is_left_out(settings: dict[str, Any]) -> None:
    path = run(settings).path
    ledger = path / "communication.csv"
    ledger.write_text(ledger.read_text().replace("\n0,", "\n0x,", 1))
    (missing,) = RunFiles.read(path).missing
    assert missing.startswith("communication.csv (unreadable: Unable to parse string")
    assert "Not in this report: communication.csv" in write_report(path).read_text()


def test_an_undone_round_leaves_no_shares_in_the_table_of_clients(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedSoft's shares change in each round; here the second one fails after its tests."""
    record_round = Records.round

    def fail_once(self: Records, row: dict[str, Any]) -> dict[str, Any]:
        if row["round"] == 1:
            raise KeyError("stop")
        return record_round(self, row)

    settings["algorithm"] = {"name": "fedsoft", "clusters": 3}
    monkeypatch.setattr(Records, "round", fail_once)
    with pytest.raises(KeyError):
        run({**settings, "seed": 7})
    (stopped,) = Path(settings["output"]["root"]).glob("*seed7*")
    one_round = run({**settings, "seed": 7, "rounds": 1}).path
    tables = [RunDirectory(path).read_frame("clients.csv") for path in (stopped, one_round)]
    shares = [frame[[name for name in frame if name.startswith("share_")]] for frame in tables]
    assert shares[0].shape == (9, 3)
    pd.testing.assert_frame_equal(*shares)


def test_what_repeats_is_not_to_be_resumed(settings: dict[str, Any]) -> None:
    events: list[RunEvent] = []
    with pytest.raises(RayflError, match="the training loss is"):
        run(settings, ["training.lr=1e30"], on_event=events.append)
    (stopped,) = (event for event in events if isinstance(event, Stopped))
    assert stopped.repeats


def test_the_latest_run_is_that_which_began_last(settings: dict[str, Any], tmp_path: Path) -> None:
    """Not the one whose owner or mode was changed last, nor the one that was copied last."""
    old, new = run({**settings, "seed": 1}), run({**settings, "seed": 2})
    (old.path / "config.yaml").chmod(0o640)
    assert RunDirectory.latest(new.path.parent).path == new.path
    moved = tmp_path / "copied"
    for path in (new.path, old.path):  # as rsync -a does
        shutil.copytree(path, moved / path.name)
    assert RunDirectory.latest(moved).path.name == new.path.name


def test_a_pipe_in_a_run_directory_is_not_read_for_ever(tmp_path):
    os.mkfifo(tmp_path / "rounds.csv")
    os.mkfifo(tmp_path / "clusters.json")
    missing = RunFiles.read(tmp_path).missing
    assert "clusters.json (unreadable: [Errno 22] it is not a regular file)" in missing
    assert "rounds.csv (unreadable: [Errno 22] it is not a regular file)" in missing
    (tmp_path / "round-00001").mkdir()
    os.mkfifo(tmp_path / "round-00001" / "manifest.json")
    with pytest.raises(RayflError, match="not a readable checkpoint"):
        Checkpoint.newest(tmp_path)


def test_many_rows_are_written_as_pandas_writes_them(tmp_path: Path) -> None:
    count = 2 * rundir._MANY_ROWS
    rng = np.random.default_rng(0)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-20, 20, count)
    values[:6] = [np.nan, -0.0, 0.0, np.inf, -np.inf, 15.0]
    frame = pd.DataFrame({"client": np.arange(count), "group": pd.NA, "some, of it": values, "none": np.nan})
    named = frame.assign(name=[f'"{k}", {k}' for k in range(count)], single=values.astype(np.float32))
    for table, by_arrow in ((frame, True), (named, False), (frame[:5], False)):
        numbers = all(rundir._arrow_array(table[name]) is not None for name in table)
        assert (numbers and len(table) >= rundir._MANY_ROWS) == by_arrow
        RunDirectory(tmp_path).write_frame("t.csv", table)
        assert (tmp_path / "t.csv").read_text() == table.to_csv(index=False)
