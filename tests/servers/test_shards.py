"""Rows of clients in files: the same bits as in memory, whatever happens to the disk; little is written."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rayfl import files
from rayfl.api import Result, client_models, resume, run
from rayfl.backend import Backend
from rayfl.errors import Damaged, DiskError
from rayfl.events import CheckpointSaved, Note, RoundDone, RunEvent
from rayfl.runtime.inline import InlineBackend
from rayfl.servers import driver
from rayfl.servers import states as states_module
from rayfl.servers.checkpoint import CLIENTS, Checkpoint, checkpoints, collect, models_hash
from rayfl.servers.shards import Shards
from rayfl.servers.states import ClientStates, Rows
from tests.runs import METHODS, assert_same
from tests.servers.test_files import Crash, Disk, _flip

KEEPING = ["solo", "lg_fedavg", "sub_fedavg", "cfl", "mtl", "mt_hfl, scaffold"]
"""Methods whose clients keep something, of all kinds: own layers, masks, variates, and updates."""


def keeping(settings: dict[str, Any], method: str, memory: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A run whose clients may take this share of the memory; with 0 all of it goes to files at once."""
    own = {"algorithm": method, **METHODS[method]}
    execution = {**settings["execution"], "state_memory": memory, **changes.pop("execution", {})}
    return {**settings, **own, "execution": execution, **changes}


def shards(result: Result | Path) -> dict[str, Path]:
    """The files by name."""
    path = result if isinstance(result, Path) else result.path
    return {file.name: file for file in (path / "checkpoints" / CLIENTS).glob("*")}


def named(path: Path) -> set[str]:
    """Those that a checkpoint needs."""
    return {shard.name for stored in Checkpoint.load(path).stored.values() for shard in stored.files}


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", KEEPING)
def test_a_run_whose_states_do_not_fit_gives_the_same(method: str, settings: dict[str, Any]) -> None:
    whole, spilled = (run(keeping(settings, method, memory)) for memory in (0.25, 0.0))
    assert_same(whole, spilled)
    assert not shards(whole)
    newest = Checkpoint.load(checkpoints(spilled.path / "checkpoints")[-1])
    assert newest.stored
    found = {name for path in checkpoints(spilled.path / "checkpoints") for name in named(path)}
    assert shards(spilled).keys() == found, "no other file is left"
    before = Checkpoint.load(checkpoints(whole.path / "checkpoints")[-1])
    np.testing.assert_array_equal(np.asarray(newest.state_rows), before.state_rows, strict=True)
    np.testing.assert_array_equal(np.asarray(newest.update_rows), np.asarray(before.update_rows), strict=True)
    assert newest.state_clients.tolist() == before.state_clients.tolist()


@pytest.mark.parametrize("every", [0, 1])
def test_a_stopped_run_goes_on_with_the_same_bits(every: int, settings: dict[str, Any]) -> None:
    """Also with more memory, and then less again."""
    output = {**settings["output"], "checkpoint_every": every}
    config = keeping(settings, "mt_hfl, scaffold", rounds=5, output=output)
    whole = run({**config, "execution": {**config["execution"], "state_memory": 0.25}})

    def stop(event: RunEvent) -> None:
        if isinstance(event, RoundDone) and event.round == 1:
            raise KeyError("stop")

    paths = set(whole.path.parent.iterdir())
    with pytest.raises(KeyError):
        run(config, on_event=stop)
    (path,) = set(whole.path.parent.iterdir()) - paths
    assert shards(path)
    resume(path, ["rounds=4", "execution.state_memory=0.25"])
    assert_same(whole, resume(path, ["rounds=5", "execution.state_memory=0"]))


def test_files_that_nobody_needs_are_looked_for_only_when_some_were_written(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in every round of a run with thousands of them."""
    looked: list[int] = []
    monkeypatch.setattr(driver, "collect", lambda *of: looked.append(1) or collect(*of))
    run(keeping(settings, "mt_hfl, scaffold", 0.25, rounds=4))
    assert len(looked) == 1
    run(keeping(settings, "mt_hfl, scaffold", 0.0, rounds=4))
    assert len(looked) == 1 + 4


@pytest.mark.slow
def test_a_crash_before_any_change_of_the_disk_loses_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every change of files of rows, and the one after them."""
    output = {**settings["output"], "keep_checkpoints": 1}
    config = keeping(settings, "mt_hfl, scaffold", rounds=2, output=output)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        expected = run(config)
    moments = [at for at, (_, path) in enumerate(disk.log) if CLIENTS in path.parts]
    assert len(moments) > 8
    for at in (*moments, moments[-1] + 1):
        for other in tmp_path.glob("t-*"):
            if other != expected.path:
                shutil.rmtree(other)
        with monkeypatch.context() as patch:
            Disk(patch, at)
            with pytest.raises(Crash):
                run(config)
        (left,) = (path for path in tmp_path.glob("t-*") if path != expected.path)
        assert_same(expected, resume(left))
        assert shards(left).keys() == named(checkpoints(left / "checkpoints")[-1])


@pytest.mark.parametrize("round", [0, 1])
def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on_when_there_is_room(
    round: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows of this round are written."""
    config = keeping(settings, "mt_hfl, scaffold")
    expected, full, seen = run(config), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), [0, 0]

    def listen(event: RunEvent) -> None:
        seen[0] += isinstance(event, RoundDone)

    def watch(action: str, path: Path) -> None:
        seen[1] += seen[0] == round and CLIENTS in path.parts and action == "write"
        if seen[1] and action in ("write", "append", "make"):
            raise full  # and it stays full

    with monkeypatch.context() as patch:
        patch.setattr(files, "watch", watch)
        with pytest.raises(
            DiskError, match=r"clients/.part\d+ cannot be written: No space left on device"
        ) as raised:
            run(config, on_event=listen)
    assert "\n" not in str(raised.value)
    left = [path for path in tmp_path.glob("t-*") if path != expected.path]
    assert len(left) == round, "of a run without a round nothing is left"
    for path in left:
        assert_same(expected, resume(path))


def _crashed_after(rounds: int, config: dict[str, Any]) -> Path:
    """The machine goes down when the checkpoint of this round is complete."""

    def crash(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved) and event.rounds == rounds:
            raise Crash

    root = Path(config["output"]["root"])
    before = set(root.glob("t-*"))
    with pytest.raises(Crash):
        run(config, on_event=crash)
    (path,) = set(root.glob("t-*")) - before
    return path


def test_a_flipped_bit_is_named_and_a_checkpoint_that_does_not_need_the_file_is_taken(
    settings: dict[str, Any],
) -> None:
    config = keeping(settings, "mt_hfl, scaffold", rounds=4)
    expected, path = run(config), _crashed_after(3, config)
    older, newer = map(named, checkpoints(path / "checkpoints"))
    (victim,) = newer - older
    _flip(shards(path)[victim], 0.9)
    events: list[RunEvent] = []
    assert_same(expected, resume(path, on_event=events.append))
    (line,) = (event.text for event in events if isinstance(event, Note) and "damaged" in event.text)
    assert "round-00003: needs" in line
    assert f"{CLIENTS}/{victim}: damaged (states of clients are not what was written)" in line
    assert "going back to round-00002" in line


def test_where_all_checkpoints_need_the_damaged_file_it_is_said(settings: dict[str, Any]) -> None:
    found = run(keeping(settings, "mt_hfl, scaffold"))
    both = set.intersection(*map(named, checkpoints(found.path / "checkpoints")))
    _flip(shards(found)[min(both)], 0.9)
    with pytest.raises(
        Damaged, match=rf"{min(both)}: damaged .*no checkpoint is sound; start again"
    ) as raised:
        resume(found.path, ["rounds=4"])
    assert "\n" not in str(raised.value)


def test_models_of_clients_are_made_of_rows_in_files(settings: dict[str, Any]) -> None:
    whole, spilled = (run(keeping(settings, "lg_fedavg", memory)) for memory in (0.25, 0.0))
    models = [dict(client_models(each.path, [1, 8])) for each in (whole, spilled)]
    for client in (1, 8):
        for name, values in models[0][client].items():
            np.testing.assert_array_equal(values, models[1][client][name], strict=True)


def test_published_runs_go_on_elsewhere(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_STAGING", str(tmp_path / "staging"))
    root = f"file://{tmp_path}/there"
    config = keeping(settings, "mt_hfl, scaffold", output={**settings["output"], "root": root})

    def stop(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        run(config, on_event=stop)
    (there,) = (tmp_path / "there").iterdir()
    shutil.rmtree(tmp_path / "staging")
    assert named(there / "checkpoints" / "round-00001") == shards(there).keys()
    found = resume(f"{root}/{there.name}")
    assert_same(run(keeping(settings, "mt_hfl, scaffold", 0.25)), found)
    assert shards(there).keys() == shards(found).keys()


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_as_inline(settings: dict[str, Any], ray_cluster: None) -> None:
    """The first round inline, the next two on Ray, the last inline again."""
    expected = run(keeping(settings, "mt_hfl, scaffold", 0.25, rounds=4))
    path = run(keeping(settings, "mt_hfl, scaffold", rounds=1)).path
    before = named(path / "checkpoints" / "round-00001")
    ray = ["execution.backend=ray", "execution.actors=2", "execution.cpus_per_actor=0.5"]
    resume(path, ["rounds=3", *ray])
    assert named(path / "checkpoints" / "round-00003") - before
    assert_same(expected, resume(path, ["rounds=4", "execution.backend=inline"]))


# -- the store ---------------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Any:
    inline = InlineBackend()
    yield inline
    inline.close()


def _checked(states: ClientStates, known: dict[int, NDArray[np.float32]], backend: Backend) -> None:
    clients, rows = states.fetch(backend)
    assert clients.tolist() == sorted(known)
    for client, row in zip(clients.tolist(), rows, strict=True):
        np.testing.assert_array_equal(row, known[client])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("budget", "every"), [(0, 0), (2000, 0), (2000, 3), (1 << 30, 5)])
def test_rows_are_the_latest_wherever_they_are(
    budget: int, every: int, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dictionary; copies are left alone, files of either are not removed, and few are left."""
    monkeypatch.setattr(states_module, "WHOLE", 1000)
    monkeypatch.setattr(states_module, "SIZE", 400)
    monkeypatch.setattr(states_module, "PACK", 16)
    monkeypatch.setattr(states_module, "_SMALL_FILE_BYTES", 200)
    monkeypatch.setattr(states_module, "_MAX_SMALL_FILES", 4)
    folder, rng = Shards(tmp_path / "rows", budget), np.random.default_rng(0)
    states, known = ClientStates(folder), dict[int, NDArray[np.float32]]()
    for turn in range(80):
        copy, before = states.copy(), dict(known)
        clients = np.sort(rng.choice(90, 8, replace=False))
        rows, valid = rng.random((8, 5)).astype(np.float32), rng.random(8) < 0.9
        states.update(clients, rows, valid)
        states.pack(backend)
        states.spill(backend)
        known |= dict(zip(clients[valid].tolist(), rows[valid], strict=True))
        if every and turn % every == 0:
            ids, saved, stored = states.save(backend)
            assert (stored is None) == (len(known) * 20 <= 1000 and not states.names)
            again = ClientStates.restore(backend, ids, saved, stored, folder)
            _checked(again, known, backend)
        _checked(states, known, backend)
        _checked(copy, before, backend)
        folder.collect(states.names)
        assert {path.name for path in (tmp_path / "rows").glob("*")} == states.names
    assert sum(states._held.values()) <= 2 * len(states) + 16
    assert len(states.names) < 40


def test_what_is_written_is_what_has_changed(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 clients, 20 in each of 300 rounds with a checkpoint each: half as much again for packing."""
    monkeypatch.setattr(states_module, "WHOLE", 0)
    monkeypatch.setattr(states_module, "_SMALL_FILE_BYTES", 0)
    folder, rng, sizes = Shards(tmp_path / "rows"), np.random.default_rng(0), list[int]()
    states, write = ClientStates(folder), folder.write

    def counted(rows: NDArray[np.float32]) -> Any:
        sizes.append(len(rows))
        return write(rows)

    monkeypatch.setattr(folder, "write", counted)
    states.update(np.arange(1000), np.zeros((1000, 50), np.float32))
    states.save(backend)
    first, most = sum(sizes), 0
    for _ in range(300):
        sizes.clear()
        states.update(rng.choice(1000, 20, replace=False), rng.random((20, 50), np.float32))
        states.pack(backend)
        states.save(backend)
        folder.collect(states.names)
        most, first = max(most, sum(sizes)), first + sum(sizes)
    assert first <= 1000 + 1.5 * 20 * 300
    assert most <= 400, "and never much at once"
    size = sum(path.stat().st_size for path in (tmp_path / "rows").iterdir())
    assert size <= 2256 * (50 * 4 + 128)


def test_a_damaged_file_is_found_before_its_rows_are_copied(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "PACK", 1)
    states = ClientStates(Shards(tmp_path / "rows", 0))
    for round in range(2):
        states.update([round, *range(5, 10)], np.random.default_rng(round).random((6, 5), np.float32))
        states.spill(backend)
    states.pack(backend)
    for path in (tmp_path / "rows").iterdir():
        _flip(path, 0.99)
    states.update([2, *range(5, 10)], np.zeros((6, 5), np.float32))
    states.update([3, *range(5, 10)], np.zeros((6, 5), np.float32))
    with pytest.raises(Damaged, match=r"npy: damaged .states of clients are not what was written"):
        states.pack(backend)


def test_a_file_that_is_gone_is_named(tmp_path: Path, backend: Backend) -> None:
    states = ClientStates(Shards(tmp_path / "rows", 0))
    states.update([3], np.zeros((1, 5), np.float32))
    states.spill(backend)
    (path,) = (tmp_path / "rows").iterdir()
    path.unlink()
    with pytest.raises(Damaged, match=rf"{path.name}: cannot be read \(No such file or directory\)"):
        states.fetch(backend)


def test_a_file_that_cannot_be_removed_is_left_to_the_next_time(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives one that is still open another name, and refuses to remove that."""
    states = ClientStates(Shards(tmp_path / "rows", 0))
    states.update([3], np.zeros((1, 5), np.float32))
    states.spill(backend)
    folder = Shards(tmp_path / "rows")
    (tmp_path / "rows" / ".nfs0001").touch()

    def watch(action: str, path: Path) -> None:
        if path.name == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(files, "watch", watch)
        folder.collect(states.names)
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {*states.names, ".nfs0001"}
    folder.collect(states.names)
    assert {path.name for path in (tmp_path / "rows").iterdir()} == states.names


def test_the_hash_of_the_models_holds_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of all clients may be more than the memory."""
    rows = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    models, alive, most = np.ones((2, 5), np.float32), list[weakref.ref[Any]](), [0]

    def read(start: int, stop: int) -> NDArray[np.float32]:
        found = rows[start:stop].copy()
        alive.append(weakref.ref(found))
        most[0] = max(most[0], sum(each() is not None for each in alive))
        return found

    monkeypatch.setattr("rayfl.servers.states.SIZE", 40)  # two rows
    assert models_hash(models, Rows(len(rows), read)) == models_hash(models, rows)
    assert len(alive) > 6
    assert most[0] <= 2
