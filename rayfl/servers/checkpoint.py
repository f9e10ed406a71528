"""Checkpoints: the complete state after a round, as safetensors and JSON (no pickle), verified when read.

```
checkpoints/
  round-00010/ round-00020/    manifest.json: format, the run's settings, SHA-256 and length of every file,
                               and of the manifest itself
                               arrays.safetensors, *.npy (each array of more than 1 MB),
                               updates-*.safetensors, state.json
  clients/                     rows of clients (states, updates) that are too large for a copy in every
                               checkpoint; a manifest names those that belong to it, with their SHA-256
  history/<table>.jsonl        tables that only grow, one row per line; a manifest says how many lines belong
                               to it
  damaged-round-00030/         a checkpoint that failed verification
```

A checkpoint is written under a temporary name and renamed when it is complete and on the disk; only then are
older ones removed. The cost of a checkpoint does not grow with the number of rounds. Files that have not
changed since the checkpoint that will be removed are verified and hard-linked, not written again. The
checkpoints that remain share only ``clients/`` and ``history/``, so damage to any other file affects a single
checkpoint; a damaged table is written again by the run that has its rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rayfl import files
from rayfl.algorithms import ServerState
from rayfl.errors import Damaged, DiskError, OtherFormat
from rayfl.rundir import clean
from rayfl.servers.serialisation import flatten, restore
from rayfl.servers.shards import Shard, Shards, Stored, digest, header
from rayfl.servers.states import Rows

FORMAT = 5
"""Changes when checkpoints are written in another way."""

_READABLE = (3, 4, FORMAT)
"""Formats that can be read. In 3 all arrays are in one file; up to 4 each checkpoint has all client rows."""

_FORMATS = f"{_READABLE[0]} to {_READABLE[-1]}"

CLIENTS = "clients"
"""The folder of client rows, next to the checkpoints."""

_LARGE = 1 << 20
"""Arrays of at least this many bytes are written to separate files."""

_UPDATES_PER_FILE = 256
"""Client updates per file."""

_SHORT = 1 << 16
"""Tables of fewer bytes are read again at every checkpoint."""

_SEAL = "sha256"
"""The entry of a manifest with its own hash. Later formats must keep it, or they appear damaged here."""

_PART = ".part-"
"""Prefix of folders that are not checkpoints: those being written, and remains of removed ones."""

_NAME = re.compile(r"round-(\d{5,})(~?)")
"""The name of a checkpoint; with ``~`` it is being replaced by another one of the same round."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue as if it had never stopped.

    Attributes:
        state: the algorithm's state; ``state.round`` rounds are complete.
        models: ``(K, P)`` float32.
        state_clients, state_rows: client states: ids ``(n,)`` and rows ``(n, S)``, which are read a few at a
            time if they are in files.
        vectors: the servers' vectors of the local objective, ``(K, Q)``; empty for methods without them.
        update_clients, update_rows: the clients' latest updates: ids ``(n,)`` and rows ``(n, P)``, which are
            written and read a few at a time.
        arrays: what the driver keeps (best and last accuracies), by name.
        tables: JSON values; lists are tables that only grow (rounds, communication, cluster timeline).
        gathered: the weight that took part in each model since its last global step, ``(layers, K, 1 or P)``.
        memories: the memory of a server step for each model ``(K, V, n)``; empty for methods without one.
        settings: the settings that must not change when the run is resumed.
        stored: where the client states (``states``) and latest updates (``updates``) are, if in files.
    """

    state: ServerState
    models: NDArray[np.float32]
    state_clients: NDArray[np.int64]
    state_rows: NDArray[np.float32] | Rows
    vectors: NDArray[np.float32]
    update_clients: NDArray[np.int64]
    update_rows: NDArray[np.float32] | Rows
    arrays: Mapping[str, NDArray[np.generic]]
    tables: Mapping[str, Any]
    gathered: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 1)))
    memories: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    settings: Mapping[str, Any] | None = None
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def save(self, folder: Path, keep: int, say: Callable[[str], None] = lambda text: None) -> Path:
        """Write to ``folder/round-00012`` and remove all but the newest ``keep``.

        Args:
            folder: of the checkpoints; no other process may write to it.
            keep: how many.
            say: called with a line if an old checkpoint cannot be removed; the next call tries again.

        Raises:
            DiskError: for example if the disk is full; earlier checkpoints are not affected.
        """
        final = folder / f"round-{self.state.round:05d}"
        part = folder / f"{_PART}{os.getpid()}"
        paths = [path for path in checkpoints(folder) if round_of(path) <= self.state.round]
        earlier_manifests = [manifest for path in paths if (manifest := _manifest(path)) is not None]
        files.make(folder)
        files.remove(part)
        for leftover in sorted(folder.glob(f"{_PART}*")):  # left by a killed process or _discard
            with contextlib.suppress(DiskError):
                files.remove(leftover)
        files.make(folder / "history")
        files.make(part)
        try:
            grown = {name: rows for name, rows in self.tables.items() if isinstance(rows, list)}
            earlier_history = earlier_manifests[-1]["history"] if earlier_manifests else {}
            history = {
                name: _TablePart(**earlier_history.get(name, {})).extended(_table_path(folder, name), rows)
                for name, rows in grown.items()
            }
            manifest = {
                "format": FORMAT,
                "round": self.state.round,
                "settings": self.settings,
                "history": {name: vars(written) for name, written in history.items()},
                "clients": {
                    name: [asdict(shard) for shard in stored.files] for name, stored in self.stored.items()
                },
                "files": self._write(part, _next_to_remove(folder, keep)),
            }
            files.write(part / "manifest.json", json.dumps(_sealed(clean(manifest)), indent=1))
            files.sync(folder / "history")
        except BaseException:
            files.remove(part)
            raise
        if final.exists():
            former = final.with_name(f"{final.name}~")
            if former.exists():  # left over from a crash
                _discard(former, say)
            files.rename(final, former)
        files.rename(part, final)
        present = checkpoints(folder)
        replaced = [path for path in present if path != final and round_of(path) == self.state.round]
        remaining = [path for path in present if path not in replaced]
        for old in [*remaining[:-keep], *replaced]:
            _discard(old, say)
        collect(folder)
        return final

    def _write(self, part: Path, earlier: Path | None) -> dict[str, Any]:
        """Write the files; returns the length and SHA-256 of each, by name.

        Args:
            part: the folder to write to.
            earlier: another checkpoint; files that are the same there are linked.
        """
        from safetensors.numpy import save

        earlier_files: dict[str, Any] = (
            {} if earlier is None else (_manifest(earlier) or {"files": {}})["files"]
        )
        written: dict[str, Any] = {}

        def put(name: str, *content: Any) -> None:
            written[name] = _write_or_link(part / name, content, earlier, earlier_files)

        state = flatten(self.state)
        tensors: dict[str, NDArray[Any]] = {
            "models": self.models,
            "states.clients": self.state_clients,
            "states.rows": np.empty((0, 0), np.float32) if "states" in self.stored else self.state_rows[:],
            **{f"{name}.at": stored.at for name, stored in self.stored.items()},
            "vectors": self.vectors,
            "gathered": self.gathered,
            "memories": self.memories,
            "updates.clients": self.update_clients,
            **{f"state.{name}": value for name, value in state.arrays.items()},
            **{f"driver.{name}": value for name, value in self.arrays.items()},
        }
        tensors = {k: np.asarray(v, v.dtype.newbyteorder("="), order="C") for k, v in tensors.items()}
        for name, array in tensors.items():
            if array.nbytes >= _LARGE:
                put(f"{name}.npy", header(array), array.reshape(-1).view(np.uint8))
        put("arrays.safetensors", save({k: v for k, v in tensors.items() if v.nbytes < _LARGE}))
        loose = 0 if "updates" in self.stored else len(self.update_clients)
        for start in range(0, loose, _UPDATES_PER_FILE):
            rows = np.ascontiguousarray(self.update_rows[start : start + _UPDATES_PER_FILE])
            put(_updates_path(part, start).name, save({"rows": rows}))
        scalars = {name: value for name, value in self.tables.items() if not isinstance(value, list)}
        put("state.json", json.dumps({"state": state.values, "tables": clean(scalars)}).encode())
        return written

    @classmethod
    def load(cls, path: Path, kind: type[ServerState] | None = None) -> Checkpoint:
        """Read a checkpoint and verify it.

        Args:
            path: of the checkpoint.
            kind: the class of the method's state, that of ``algorithm.begin(setup)``; None to read only the
                fields that all states have.

        Raises:
            Damaged: if it is not what was written.
            OtherFormat: if another version wrote it.
            StateError: if the state is not of that class.
        """
        from safetensors.numpy import load_file

        manifest = _manifest(path)
        if manifest is None:
            _refuse(path)
        for name, expected in manifest["files"].items():
            try:
                actual = digest(path / name)
            except OSError as error:
                raise Damaged(f"{path}: not a readable checkpoint ({name}: {error.strerror})") from None
            if actual != expected:
                raise Damaged(f"{path}: damaged ({name} is not what was written)")
        shards = Shards(path.parent / CLIENTS)
        try:
            history = {
                name: _TablePart(**written).read(_table_path(path.parent, name))
                for name, written in manifest["history"].items()
            }
            head = json.loads((path / "state.json").read_text())
            tensors = load_file(path / "arrays.safetensors")
            for name in manifest["files"]:
                if name.endswith(".npy"):
                    # Pages are read when they are needed; what is written to them stays in memory.
                    mapped = np.load(path / name, mmap_mode="c", allow_pickle=False)
                    tensors[name.removesuffix(".npy")] = np.asarray(mapped)
            stored = {
                name: Stored(shards, row_files, tensors.pop(f"{name}.at"))
                for name, row_files in _client_shards(manifest).items()
            }
        except Damaged:
            raise
        except Exception as error:
            raise Damaged(f"{path}: not a readable checkpoint ({error})") from None
        for shard in dict.fromkeys(shard for stored_rows in stored.values() for shard in stored_rows.files):
            try:
                shards.verify(shard)
            except Damaged as error:
                raise Damaged(f"{path}: needs {error}") from None
        rows = {name: Rows(stored_rows.at.shape[1], stored_rows.read) for name, stored_rows in stored.items()}

        def named(prefix: str) -> dict[str, NDArray[np.generic]]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        arrays = named("state.")
        if kind is None:
            state = restore(ServerState, arrays, head["state"], exact=False)
        else:
            state = restore(kind, arrays, head["state"])
        return cls(
            state,
            tensors["models"],
            tensors["states.clients"],
            rows.get("states", tensors["states.rows"]),
            tensors["vectors"],
            tensors["updates.clients"],
            rows.get("updates", Rows(len(tensors["updates.clients"]), partial(_read_updates, path))),
            named("driver."),
            {**head["tables"], **history},
            tensors["gathered"],
            tensors["memories"],
            manifest["settings"],
            stored,
        )

    @classmethod
    def newest(
        cls, folder: Path, kind: type[ServerState] | None = None, reading: bool = False
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest sound checkpoint, if there is one, and a line about each damaged later one.

        Damaged checkpoints are renamed, so that they do not count as newer than checkpoints written later.

        Args:
            folder: of the checkpoints.
            kind: as for :meth:`load`.
            reading: for those who do not hold the run's lock: rename nothing, and read a checkpoint again
                that is replaced meanwhile.

        Raises:
            Damaged: if there are checkpoints, but none is sound.
            OtherFormat, StateError: as :meth:`load`.
        """
        errors: list[Damaged] = []
        damaged_paths: list[Path] = []
        paths = checkpoints(folder)
        for path in reversed(paths):
            try:
                checkpoint = cls._load_settled(path, kind) if reading else cls.load(path, kind)
            except Damaged as error:
                errors.append(error)
                damaged_paths.append(path)
                continue
            for damaged_path in () if reading else damaged_paths:
                aside = damaged_path.with_name(f"damaged-{damaged_path.name.rstrip('~')}")
                files.remove(aside)
                files.rename(damaged_path, aside)
            return checkpoint, [f"{error}: going back to {path.name}" for error in errors]
        if errors and reading and checkpoints(folder) != paths:  # others have taken their place
            return cls.newest(folder, kind, reading)
        if errors:
            remedy = f"no checkpoint is sound; start again with: rayfl run {folder.parent / 'config.yaml'}"
            raise Damaged(f"{errors[0]}; {remedy}")
        return None, []

    @classmethod
    def _load_settled(cls, path: Path, kind: type[ServerState] | None) -> Checkpoint:
        """As :meth:`load`, but if the checkpoint is replaced while it is read, read the new one."""
        while True:
            before = _manifest(path)
            try:
                return cls.load(path, kind)
            except Damaged:
                if _manifest(path) == before:
                    raise


@dataclass(frozen=True)
class _TablePart:
    """The part of a table's file that belongs to a checkpoint.

    Attributes:
        lines, bytes: the length of this part.
        chain: a chained SHA-256: of each line together with the hash of the lines before it.
    """

    lines: int = 0
    bytes: int = 0
    chain: str = ""

    def extended(self, path: Path, rows: Sequence[Any]) -> _TablePart:
        """Extend the file to contain ``rows``, of which it already has the first ``lines``. Any other
        contents are removed; a damaged file is written again.
        """
        files.truncate(path, self.bytes)
        lines = _json_lines(rows[self.lines :])
        longer = self._with_lines(lines)
        if self._is_intact(path, longer.bytes):
            if lines:
                files.append(path, "".join(lines), durably=True)
            return longer
        lines = _json_lines(rows)
        files.write(path, lines)
        return _TablePart()._with_lines(lines)

    def _with_lines(self, lines: Sequence[str]) -> _TablePart:
        """This part with more lines."""
        added = sum(len(line.encode()) for line in lines)
        return _TablePart(self.lines + len(lines), self.bytes + added, _chain_hash(self.chain, lines))

    def _is_intact(self, path: Path, size: int) -> bool:
        """Whether the file, which will have this size, holds what was written.

        The length is always compared. The contents are read while the file is short, and later whenever it
        has grown by an eighth, so that the cost of a checkpoint does not grow with the number of rounds.
        """
        actual_size = path.stat().st_size if path.is_file() else 0
        if actual_size != self.bytes:
            return False
        if self.bytes >= _SHORT and int(math.log(size, 1.125)) == int(math.log(self.bytes, 1.125)):
            return True
        try:
            self._read(path)
        except Damaged:
            return False
        return True

    def read(self, path: Path) -> list[Any]:
        """Read the rows.

        Raises:
            Damaged: if they are not those that were written.
        """
        return [json.loads(line) for line in self._read(path)]

    def _read(self, path: Path) -> list[str]:
        if not self.lines:
            return []
        try:
            with files.regular(path).open("rb") as file:
                text = file.read(self.bytes)
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
        lines = text.decode(errors="replace").splitlines(keepends=True)
        if len(lines) != self.lines or _chain_hash("", lines) != self.chain:
            raise Damaged(f"{path}: damaged (it is not what was written)")
        return lines


def _json_lines(rows: Sequence[Any]) -> list[str]:
    return [json.dumps(clean(row)) + "\n" for row in rows]


def _chain_hash(chain: str, lines: Sequence[str]) -> str:
    for line in lines:
        chain = hashlib.sha256((chain + line).encode()).hexdigest()
    return chain


def _table_path(folder: Path, name: str) -> Path:
    return folder / "history" / f"{name}.jsonl"


def _next_to_remove(folder: Path, keep: int) -> Path | None:
    """The checkpoint to remove once another one is complete; None if there are fewer than ``keep``."""
    paths = checkpoints(folder)
    return paths[-keep] if len(paths) >= keep else None


def _discard(path: Path, say: Callable[[str], None]) -> None:
    """Remove a checkpoint that is no longer needed; if that fails, a later :meth:`Checkpoint.save` does it.

    On NFS a folder cannot be removed while a process has a file in it mapped, as a resumed run may have until
    it ends. The folder is renamed first, so that its remains are not taken for a checkpoint.
    """
    aside = path.with_name(f"{_PART}{path.name}")
    try:
        files.rename(path, aside)
        files.remove(aside)
    except DiskError as error:
        say(f"{path} cannot be removed: {error.why}; it is tried again at the next checkpoint")


def _write_or_link(
    path: Path, content: Sequence[Any], earlier: Path | None, earlier_files: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a file, or link to the file of this name in another checkpoint if it has the same contents.

    Args:
        path: of the file.
        content: its contents in pieces, as buffers.
        earlier: the folder of the other checkpoint.
        earlier_files: length and SHA-256 of the files in ``earlier``, by name.

    Returns:
        Length and SHA-256 of the file.
    """
    sha256 = hashlib.sha256()
    for piece in content:
        sha256.update(piece)
    entry = {"bytes": sum(memoryview(piece).nbytes for piece in content), "sha256": sha256.hexdigest()}
    if earlier is not None and earlier_files.get(path.name) == entry:
        old = earlier / path.name
        try:
            same = digest(old) == entry
        except OSError:
            same = False
        if same and files.link(old, path):
            return entry
    with files.writing(path), path.open("wb") as file:
        for piece in content:
            file.write(piece)
    return entry


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None if this version cannot read it."""
    try:
        manifest = _manifest_as_written(path)
        valid = manifest["format"] in _READABLE and _is_sealed(manifest)
        valid = valid and {"files", "history", "settings", "round"} <= set(manifest)
        valid = valid and all(isinstance(manifest[key], dict) for key in ("files", "history"))
        _client_shards(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return dict(manifest) if valid else None


def _client_shards(manifest: Mapping[str, Any]) -> dict[str, tuple[Shard, ...]]:
    """The files of client rows that belong to a checkpoint, by kind (``states``, ``updates``)."""
    return {name: tuple(Shard(**e) for e in entries) for name, entries in manifest.get("clients", {}).items()}


def _manifest_as_written(path: Path) -> Any:
    return json.loads(files.regular(path / "manifest.json").read_text())


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the hash of all its other entries."""
    entries = {name: value for name, value in manifest.items() if name != _SEAL}
    return {**entries, _SEAL: hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()}


def _is_sealed(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is what was written; earlier versions wrote no hash of it."""
    return _SEAL not in manifest or manifest == _sealed(manifest)


def _refuse(path: Path) -> NoReturn:
    """Raise an error that explains why :func:`_manifest` returned None."""
    unreadable = Damaged(f"{path}: not a readable checkpoint (no manifest of formats {_FORMATS})")
    try:
        manifest = _manifest_as_written(path)
        number, sealed = manifest["format"], _is_sealed(manifest)
    except (OSError, ValueError, TypeError, KeyError):
        raise unreadable from None
    if not sealed:
        raise Damaged(f"{path}: damaged (manifest.json is not what was written)")
    if number not in _READABLE:
        raise OtherFormat(
            f"{path}: has format {number!r}, and this version of rayfl reads {_FORMATS}; resume with the "
            "version that wrote it (environment.json in the run directory says which), or begin a new run"
        )
    raise unreadable


def _updates_path(folder: Path, start: int) -> Path:
    """The name of the file that holds the updates from this position on."""
    return folder / f"updates-{start:07d}.safetensors"


def _read_updates(folder: Path, start: int, stop: int) -> NDArray[np.float32]:
    from safetensors import safe_open

    chunks = []
    for first in range(start - start % _UPDATES_PER_FILE, stop, _UPDATES_PER_FILE):
        with safe_open(_updates_path(folder, first), "numpy") as file:
            rows = file.get_slice("rows")
            chunks.append(rows[max(start - first, 0) : min(stop - first, _UPDATES_PER_FILE)])
    return np.concatenate(chunks) if chunks else np.empty((0, 0), np.float32)


def round_of(path: Path) -> int:
    """The number of complete rounds of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (round_of(path), not path.name.endswith("~")))


def collect(folder: Path, live: Collection[str] = (), shards: Shards | None = None) -> None:
    """Remove the files of client rows that no checkpoint needs.

    Args:
        folder: of the checkpoints.
        live: the names of the files that the run itself needs.
        shards: the run's folder of files, whose ``grown`` is updated.
    """
    shards = shards or Shards(folder / CLIENTS)
    if not shards.folder.is_dir():
        shards.grown = False
        return
    manifests = [manifest for path in checkpoints(folder) if (manifest := _manifest(path)) is not None]
    needed = [shard for manifest in manifests for some in _client_shards(manifest).values() for shard in some]
    shards.collect({*(shard.name for shard in needed), *live})


def models_hash(models: NDArray[np.float32], state_rows: NDArray[np.float32] | Rows) -> str:
    """SHA-256 of the final models ``(K, P)`` and client states ``(n, S)``: equal hashes mean equal bits."""
    sha256 = hashlib.sha256()
    pieces = state_rows.pieces() if isinstance(state_rows, Rows) else (state_rows,)
    for rows in itertools.chain((models,), pieces):  # in pieces: together they may exceed the memory
        sha256.update(np.ascontiguousarray(rows).reshape(-1).data)  # without a copy
    return sha256.hexdigest()
