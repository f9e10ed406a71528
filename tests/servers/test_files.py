"""The boundary to the disk, and checkpoints: crash before every change, flip a bit, fill the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rayfl import files
from rayfl.api import Result, resume, run
from rayfl.errors import ConfigError, Damaged, DiskError, OtherFormat, RayflError
from rayfl.events import Note, RoundDone, RunEvent, Stopped
from rayfl.servers import checkpoint as checkpoint_module
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from tests.algorithms.fakes import Remembering
from tests.runs import METHODS, assert_same


class Crash(BaseException):
    """The machine goes down."""


class Disk:
    """Counts the changes of the disk and fails at one of them.

    Args:
        at: which change fails (0-based); -1 for none.
        error: how; a crash also cuts in half what was written and not synced.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int = -1, error: BaseException | None = None
    ) -> None:
        self.at, self.error = at, error or Crash()
        self.log: list[tuple[str, Path]] = []
        monkeypatch.setattr(files, "watch", self.watch)

    def watch(self, action: str, path: Path) -> None:
        if len(self.log) == self.at:
            if isinstance(self.error, Crash):
                self._undo()
            raise self.error
        self.log.append((action, path))

    def _undo(self) -> None:
        for place, (action, path) in enumerate(self.log):
            synced = any(what == "sync" and other == path for what, other in self.log[place + 1 :])
            if action == "write" and not synced and path.is_file():
                os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def small(settings: dict[str, Any]) -> dict[str, Any]:
    """Two rounds with all kinds of files."""
    output = {**settings["output"], "checkpoint_every": 1, "keep_checkpoints": 1, "tensorboard": True}
    method = "mt_hfl, scaffold"
    return {**settings, "algorithm": method, **METHODS[method], "rounds": 2, "output": output}


def _changes(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Result, int]:
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        return run(small), len(disk.log)


def _run(tmp_path: Path) -> Path:
    (path,) = sorted(tmp_path.glob("t-*"), key=lambda p: p.stat().st_mtime)[-1:]
    return path


def test_a_file_and_its_name_are_on_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/dev/fd/{descriptor}")))
    files.write(tmp_path / "x", "text")
    part, folder = synced
    assert Path(part).parent == tmp_path
    assert folder == str(tmp_path)


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    name = "'Z\\u00fcrich'"
    code = f"import pathlib, rayfl.files as f; f.write(pathlib.Path({str(tmp_path)!r}, 'x'), iter([{name}]))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=ascii_only)
    assert (tmp_path / "x").read_text(encoding="utf-8") == "Zürich"


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_before_any_change_of_the_disk_loses_nothing(
    part: int, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every seventh change, and with ``slow`` of all of them: crash, resume, compare."""
    expected, changes = _changes(small, monkeypatch)
    assert changes > 40
    for at in range(changes):
        if (at % 7 == 3) == bool(part):
            continue
        for other in tmp_path.glob("t-*"):
            if other != expected.path:
                shutil.rmtree(other)
        with monkeypatch.context() as patch:
            Disk(patch, at)
            with pytest.raises(Crash):
                run(small)
        left = [path for path in tmp_path.glob("t-*") if path != expected.path]
        if left and (left[0] / "config.yaml").is_file():
            assert_same(expected, resume(left[0]))
            assert not [p for p in left[0].rglob(".part*") if p.is_dir()]


@pytest.mark.parametrize("at", [2, 9, 25, -9])
def test_a_full_disk_ends_a_run_in_one_line_and_the_run_goes_on_when_there_is_room(
    at: int, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, changes = _changes(small, monkeypatch)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    events: list[RunEvent] = []
    with monkeypatch.context() as patch:
        disk = Disk(patch, at % changes, full)

        def watch(action: str, path: Path) -> None:
            if len(disk.log) >= disk.at and action in ("write", "append", "make"):
                raise full  # and it stays full
            disk.log.append((action, path))

        patch.setattr(files, "watch", watch)
        with pytest.raises(DiskError, match="cannot be written: No space left on device") as raised:
            run(small, on_event=events.append)
    assert "\n" not in str(raised.value)
    left = [path for path in tmp_path.glob("t-*") if path != expected.path]
    if left:
        assert isinstance(events[-1], Stopped)
        assert_same(expected, resume(left[0]))


def test_a_run_whose_directory_is_deleted_ends_in_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    def delete(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            shutil.rmtree(_run(tmp_path))

    with pytest.raises(DiskError, match="No such file"):
        run(settings, on_event=delete)


# -- checkpoints -------------------------------------------------------------------------------------------


def _checkpoint(round: int, **changes: Any) -> Checkpoint:
    state = Remembering(round, 2, np.array([0, 1, 1]), True, memory=np.arange(3.0))
    rows = [{"round": r, "loss": float(r)} for r in range(round)]
    values: dict[str, Any] = {
        "state": state,
        "models": np.full((2, 4), round, np.float32),
        "state_clients": np.array([1, 2]),
        "state_rows": np.zeros((2, 3), np.float32),
        "vectors": np.full((2, 5), 7, np.float32),
        "update_clients": np.array([2]),
        "update_rows": np.full((1, 4), 8, np.float32),
        "arrays": {"last": np.array([np.nan, 1.0])},
        "tables": {"rounds": rows, "seconds": 1.5},
        "settings": {"seed": 3},
    }
    return Checkpoint(**{**values, **changes})


def _tell(checkpoint: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's manifest, as another version would have written them."""
    manifest = checkpoint / "manifest.json"
    told = {**json.loads(manifest.read_text()), **changes}
    manifest.write_text(json.dumps(checkpoint_module._sealed(told)))


def _flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(bytes(data))


def test_what_a_checkpoint_costs_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    sizes = []
    for number in range(1, 40):
        path = _checkpoint(number).save(tmp_path, keep=2)
        sizes.append(sum(p.stat().st_size for p in path.iterdir()))
    assert max(sizes) - min(sizes) < 16  # digits of numbers
    assert Checkpoint.load(checkpoints(tmp_path)[0]).tables["rounds"] == _checkpoint(38).tables["rounds"]
    assert Checkpoint.load(checkpoints(tmp_path)[1]).tables == _checkpoint(39).tables


@pytest.mark.parametrize("name", ["arrays.safetensors", "updates-0000000.safetensors", "state.json"])
@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
def test_a_flipped_bit_is_found_and_the_older_checkpoint_is_taken(
    name: str, place: float, tmp_path: Path
) -> None:
    for number in (1, 2):
        _checkpoint(number).save(tmp_path, keep=2)
    _flip(tmp_path / "round-00002" / name, place)
    with pytest.raises(Damaged, match=f"damaged .{name} is not what was written"):
        Checkpoint.load(tmp_path / "round-00002")
    found, wrong = Checkpoint.newest(tmp_path)
    assert found is not None
    assert found.state.round == 1
    assert "going back to round-00001" in wrong[0]
    _checkpoint(2).save(tmp_path, keep=1)  # the damaged one does not count as the newest
    again, wrong = Checkpoint.newest(tmp_path)
    assert again is not None
    assert again.state.round == 2
    assert not wrong


def test_a_flipped_bit_in_the_history_is_found(tmp_path: Path) -> None:
    for number in (1, 20):
        _checkpoint(number).save(tmp_path, keep=2)
    _flip(tmp_path / "history" / "rounds.jsonl", 0.8)
    found, wrong = Checkpoint.newest(tmp_path)
    assert found is not None
    assert found.state.round == 1
    assert len(wrong) == 1


def test_where_no_checkpoint_is_sound_it_is_said_how_to_begin_anew(tmp_path: Path) -> None:
    _checkpoint(1).save(tmp_path / "checkpoints", keep=2)
    _flip(tmp_path / "checkpoints" / "history" / "rounds.jsonl", 0.1)
    with pytest.raises(
        Damaged, match=rf"no checkpoint is sound; start again with: rayfl run {tmp_path}/config"
    ):
        Checkpoint.newest(tmp_path / "checkpoints")


def test_any_flipped_bit_in_a_manifest_is_found(tmp_path: Path) -> None:
    """Also in the name of an entry that earlier formats lack; but for the name of the hash."""
    path = _checkpoint(1).save(tmp_path, keep=1)
    manifest, harmless = path / "manifest.json", []
    sound = manifest.read_bytes()
    assert b'"clients"' in sound
    for place in range(0, len(sound), 2):
        flipped = bytes([sound[place] ^ 1])
        manifest.write_bytes(sound[:place] + flipped + sound[place + 1 :])
        try:
            found = Checkpoint.load(path)
        except Damaged:
            continue
        _assert_equal(found, _checkpoint(1))
        harmless.append(place)
    name = sound.rindex(b"sha256")
    assert harmless == [place for place in range(name, name + len("sha256")) if not place % 2]


def test_after_a_flipped_bit_in_the_settings_the_older_checkpoint_is_taken(settings: dict[str, Any]) -> None:
    settings["output"]["checkpoint_every"] = 2
    path = run(settings).path
    (path / "summary.json").unlink()  # as if it had been stopped
    manifest = path / "checkpoints" / "round-00003" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"seed": 3', '"seed": 2'))
    assert manifest.read_text() != text
    notes: list[RunEvent] = []
    assert_same(run(settings), resume(path, on_event=notes.append))
    (line,) = (event.text for event in notes if isinstance(event, Note) and "damaged" in event.text)
    assert "(manifest.json is not what was written): going back to round-00002" in line


@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter", "gone"])
@pytest.mark.parametrize("short", [1 << 16, 1])
def test_a_damaged_table_is_written_again_and_all_checkpoints_are_sound(
    damage: str, short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them share it; a long one is looked at when it has grown by an eighth."""
    monkeypatch.setattr(checkpoint_module, "_SHORT", short)
    for number in (20, 21):
        _checkpoint(number).save(tmp_path, keep=3)
    table = tmp_path / "history" / "rounds.jsonl"
    if damage == "flipped":
        _flip(table, 0.1)
    elif damage == "longer":
        files.append(table, "half a li")
    elif damage == "shorter":
        files.truncate(table, 100)
    else:
        table.unlink()
    _checkpoint(24).save(tmp_path, keep=3)
    for path, number in zip(checkpoints(tmp_path), (20, 21, 24), strict=True):
        assert Checkpoint.load(path).tables == _checkpoint(number).tables


@pytest.mark.parametrize("short", [1 << 16, 1])
def test_a_long_table_is_read_again_only_when_it_has_grown_much(
    short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_SHORT", short)
    looks, read = [], checkpoint_module._TablePart._read

    def counted(self: Any, path: Path) -> list[str]:
        looks.append(self.bytes)
        return read(self, path)

    monkeypatch.setattr(checkpoint_module._TablePart, "_read", counted)
    for number in range(100, 150):
        _checkpoint(number).save(tmp_path, keep=1)
    assert len(looks) == 50 if short > 1 else len(looks) <= 1 + 5  # 1.125 ** 5 > 150 / 100


@pytest.mark.parametrize("damage", ["manifest", "file", "all"])
def test_what_is_no_checkpoint_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    path = _checkpoint(1).save(tmp_path, keep=2)
    manifest = path / "manifest.json"
    if damage == "manifest":
        manifest.unlink()
    elif damage == "file":
        (path / "arrays.safetensors").unlink()
    else:
        for file in path.iterdir():
            file.write_bytes(b"half")
    with pytest.raises(RayflError, match="not a readable checkpoint") as raised:
        Checkpoint.newest(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("format", [2, 99, "4"])
def test_a_checkpoint_of_another_format_is_refused_in_one_line(format: object, tmp_path: Path) -> None:
    """Nor is an older checkpoint taken, or this one put aside: the version that wrote it can go on."""
    _checkpoint(1).save(tmp_path, keep=2)
    _tell(_checkpoint(2).save(tmp_path, keep=2), format=format)
    with pytest.raises(
        OtherFormat, match=f"has format {format!r}, and .* reads 3 to 5; resume with"
    ) as raised:
        Checkpoint.newest(tmp_path)
    assert "\n" not in str(raised.value)
    assert [path.name for path in checkpoints(tmp_path)] == ["round-00001", "round-00002"]


@pytest.mark.parametrize("format", [3, 4])
def test_checkpoints_of_the_formats_before_are_read(
    format: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large arrays lay with the others; no rows of clients were shared."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "FORMAT", format)
        if format == 3:
            patch.setattr(checkpoint_module, "_LARGE", 1 << 60)
        old = _large(1).save(tmp_path, keep=2)
    assert bool(list(old.glob("*.npy"))) == (format == 4)
    manifest = json.loads((old / "manifest.json").read_text())
    assert manifest.pop("clients") == {}
    del manifest["sha256"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    new = _large(2).save(tmp_path, keep=2)
    assert len(list(new.glob("*.npy"))) == 3
    for path, number in ((old, 1), (new, 2)):
        _assert_equal(Checkpoint.load(path), _large(number))


# -- large arrays ------------------------------------------------------------------------------------------

N = 1 << 18
"""Clients: more than 1 MB of each number of theirs."""


def _large(round: int, **changes: Any) -> Checkpoint:
    """Last accuracies change from one checkpoint to the next, the best and the clients' clusters do not."""
    state = Remembering(round, 2, np.arange(N) % 2, True, memory=np.arange(3.0))
    arrays = {"last": np.full(N, float(round)), "best": np.arange(float(N))}
    return _checkpoint(round, **{"state": state, "arrays": arrays, **changes})


def _assert_equal(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.state.round == expected.state.round
    np.testing.assert_array_equal(found.state.assignment, expected.state.assignment)
    np.testing.assert_array_equal(found.models, expected.models)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, values in expected.arrays.items():
        assert type(found.arrays[name]) is np.ndarray
        np.testing.assert_array_equal(found.arrays[name], values, strict=True)


LINKED = {"driver.best.npy", "state.assignment.npy", "updates-0000000.safetensors"}
"""What does not change."""


def _files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.iterdir()}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_what_has_not_changed_is_not_written_again_and_those_kept_share_nothing(
    keep: int, tmp_path: Path
) -> None:
    written = [_files(_large(number).save(tmp_path, keep=keep)) for number in range(1, 7)]
    for number, new in enumerate(written):
        same = {name for name in new if number >= keep and new[name] == written[number - keep][name]}
        assert same == (LINKED if number >= keep else set())
    left = [_files(path) for path in checkpoints(tmp_path)]
    assert len(left) == keep
    assert len({inode for each in left for inode in each.values()}) == sum(map(len, left))
    for path, number in zip(checkpoints(tmp_path), range(7 - keep, 7), strict=True):
        _assert_equal(Checkpoint.load(path), _large(number))


def test_what_was_read_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    path = _large(1).save(tmp_path, keep=1)
    best: Any = Checkpoint.load(path).arrays["best"]
    best[:] = 7
    _assert_equal(Checkpoint.load(path), _large(1))


def test_a_file_that_has_rotted_is_not_linked_to(tmp_path: Path) -> None:
    first = _large(1).save(tmp_path, keep=1)
    _flip(first / "driver.best.npy")
    with pytest.raises(Damaged, match=r"damaged .driver\.best\.npy is not what was written"):
        Checkpoint.load(first)
    _assert_equal(Checkpoint.load(_large(2).save(tmp_path, keep=1)), _large(2))


def test_where_there_are_no_links_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    for number in (1, 2):
        _assert_equal(Checkpoint.load(_large(number).save(tmp_path, keep=1)), _large(number))


def test_a_crash_before_any_change_of_the_disk_leaves_a_sound_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _large(1).save(tmp_path / "counted", keep=1)
        disk = Disk(patch)
        _large(2).save(tmp_path / "counted", keep=1)
    assert {path.name for action, path in disk.log if action == "link"} == LINKED
    for at in range(len(disk.log)):
        folder = tmp_path / str(at)
        _large(1).save(folder, keep=1)
        with monkeypatch.context() as patch:
            Disk(patch, at)
            with pytest.raises(Crash):
                _large(2).save(folder, keep=1)
        found, wrong = Checkpoint.newest(folder)
        assert found is not None
        assert not wrong
        _assert_equal(found, _large(found.state.round))
        again = _large(3).save(folder, keep=1)
        _assert_equal(Checkpoint.load(again), _large(3))
        shutil.rmtree(folder)


def test_a_half_written_checkpoint_does_not_count_and_the_next_one_removes_it(tmp_path: Path) -> None:
    """As a process that was killed leaves it."""
    _checkpoint(1).save(tmp_path, keep=2)
    shutil.copytree(tmp_path / "round-00001", tmp_path / ".part-123")
    assert len(checkpoints(tmp_path)) == 1
    _checkpoint(2).save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history", "round-00001", "round-00002"]


def test_of_two_checkpoints_one_is_of_an_earlier_round(tmp_path: Path) -> None:
    """The last one may be written twice: in the rounds, and when clients have been tested at the end."""
    for round in (1, 2, 3, 3):
        _checkpoint(round).save(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["round-00002", "round-00003"]


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, files that a resumed run has mapped keep the folder of their checkpoint there."""
    settings["output"]["keep_checkpoints"] = 1
    path = run(settings).path
    notes: list[str] = []

    def watch(action: str, path: Path) -> None:
        if action == "remove" and path.is_dir() and path.name.endswith("round-00003"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    def listen(event: RunEvent) -> None:
        if isinstance(event, Note) and "removed" in event.text:
            notes.append(event.text)

    with monkeypatch.context() as patch:
        patch.setattr(files, "watch", watch)
        resumed = resume(path, ["rounds=6"], listen)
    assert_same(run(settings, ["rounds=6"]), resumed)
    (line,) = notes
    assert line.startswith(
        f"{path}/checkpoints/round-00003 cannot be removed: Directory not empty; it is tried"
    )
    assert [found.name for found in checkpoints(path / "checkpoints")] == ["round-00006"]
    assert list((path / "checkpoints").glob(".part-*"))
    resume(path, ["rounds=7"])
    assert not list((path / "checkpoints").glob(".part-*"))


def test_one_that_is_replaced_by_another_of_its_round_is_there_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``keep_checkpoints: 1`` nothing else is left."""
    _checkpoint(1).save(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        _checkpoint(1).save(tmp_path, keep=1)
    for at in range(len(disk.log)):
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            Disk(patch, at)
            _checkpoint(1).save(tmp_path, keep=1)
        found, _ = Checkpoint.newest(tmp_path)
        assert found is not None
        assert found.state.round == 1


def test_a_run_goes_on_only_with_the_settings_that_it_was_begun_with(settings: dict[str, Any]) -> None:
    path = run(settings).path
    changed = yaml.safe_load((path / "config.yaml").read_text()) | {"rounds": 5}
    (path / "config.yaml").write_text(yaml.safe_dump({**changed, "seed": 4}))
    with pytest.raises(ConfigError, match=r"seed: is 4, but the run was begun with 3; restore"):
        resume(path)
    (path / "config.yaml").write_text(yaml.safe_dump(changed))
    assert resume(path).summary["rounds"] == 5


@pytest.mark.parametrize(("rounds", "error"), [(5, OtherFormat), (2, ConfigError)])
def test_a_refused_resume_leaves_what_describes_the_run_as_it_was(
    rounds: int, error: type[RayflError], settings: dict[str, Any]
) -> None:
    """The messages send users to these files: which version wrote the run, and how many rounds it has."""
    path = run(settings).path
    (path / "summary.json").unlink()  # as if it had been stopped
    if error is OtherFormat:
        _tell(checkpoints(path / "checkpoints")[-1], format=99)
    environment = json.loads((path / "environment.json").read_text())
    environment["versions"]["rayfl"] = "0.0.9"
    (path / "environment.json").write_text(json.dumps(environment))
    described = [path / "environment.json", path / "config.yaml"]
    before = [file.read_bytes() for file in described]
    with pytest.raises(error):
        resume(path, [f"rounds={rounds}"])
    assert [file.read_bytes() for file in described] == before
    if error is ConfigError:
        assert resume(path).summary["rounds"] == settings["rounds"]


def test_atomic_writes_leave_the_old_file_when_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    files.write(path, "old")
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        files.write(path, "same")
    files.write(path, "old")
    for at in range(len(disk.log) - 1):  # behind the last but one it is renamed
        with monkeypatch.context() as patch:
            Disk(patch, at, OSError("full"))
            with pytest.raises(DiskError, match="full"):
                files.write(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
