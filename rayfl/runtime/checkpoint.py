"""Checkpoints: the complete state after a round, written atomically, as safetensors and JSON (no pickle)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rayfl.algorithms import ServerState
from rayfl.errors import RayflError
from rayfl.runtime.rundir import clean
from rayfl.runtime.states import Rows

_BLOCK = 256
"""Updates in one file."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped.

    Attributes:
        state: the algorithm's state; ``state.round`` rounds are complete.
        models: ``(K, P)`` float32.
        state_clients, state_rows: client states: ids ``(n,)`` and rows ``(n, S)``.
        vectors: the servers' own vectors, ``(K, Q)``; empty for methods without.
        update_clients, update_rows: the clients' latest updates ``(n,)`` and ``(n, P)``, likewise; they are
            written and read a few at a time.
        arrays: what the driver keeps (best and last accuracies), by name.
        tables: rows of the tables so far (rounds, communication, cluster timeline), JSON values.
        gathered: the weight that took part in each model since its last global step, ``(layers, K, 1 or P)``.
    """

    state: ServerState
    models: NDArray[np.float32]
    state_clients: NDArray[np.int64]
    state_rows: NDArray[np.float32]
    vectors: NDArray[np.float32]
    update_clients: NDArray[np.int64]
    update_rows: NDArray[np.float32] | Rows
    arrays: Mapping[str, NDArray[np.generic]]
    tables: Mapping[str, Any]
    gathered: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 1)))

    def save(self, folder: Path, keep: int) -> Path:
        """Write to ``folder/round-00012`` and remove all but the newest ``keep``."""
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"round-{self.state.round:05d}"
        part = folder / f".part-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        tensors: dict[str, NDArray[Any]] = {
            "models": self.models,
            "assignment": self.state.assignment,
            "states.clients": self.state_clients,
            "states.rows": self.state_rows,
            "vectors": self.vectors,
            "gathered": self.gathered,
            "updates.clients": self.update_clients,
            **{f"extra.{name}": value for name, value in self.state.extra.items()},
            **{f"driver.{name}": value for name, value in self.arrays.items()},
        }
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, part / "arrays.safetensors")
        for start in range(0, len(self.update_clients), _BLOCK):
            rows = np.ascontiguousarray(self.update_rows[start : start + _BLOCK])
            save_file({"rows": rows}, _updates(part, start))
        head = {"round": self.state.round, "models": self.state.models, "clustered": self.state.clustered}
        (part / "state.json").write_text(json.dumps({**head, "tables": clean(self.tables)}))
        for path in part.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read one.

        Raises:
            RayflError: if it is not readable.
        """
        try:
            head = json.loads((path / "state.json").read_text())
            tensors = load_file(path / "arrays.safetensors")
            updates = len(tensors["updates.clients"])
            for start in range(0, updates, _BLOCK):
                with safe_open(_updates(path, start), "numpy") as file:
                    file.get_slice("rows")
        except Exception as error:
            raise RayflError(f"{path}: not a readable checkpoint ({error})") from None

        def named(prefix: str) -> dict[str, NDArray[np.generic]]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        state = ServerState(
            head["round"], head["models"], tensors["assignment"], head["clustered"], named("extra.")
        )
        return cls(
            state,
            tensors["models"],
            tensors["states.clients"],
            tensors["states.rows"],
            tensors["vectors"],
            tensors["updates.clients"],
            Rows(updates, partial(_read_updates, path)),
            named("driver."),
            head["tables"],
            tensors.get("gathered", np.zeros((0, 0, 1))),
        )


def _updates(folder: Path, start: int) -> Path:
    """The file with the updates from this place on."""
    return folder / f"updates-{start:07d}.safetensors"


def _read_updates(folder: Path, start: int, stop: int) -> NDArray[np.float32]:
    found = []
    for first in range(start - start % _BLOCK, stop, _BLOCK):
        with safe_open(_updates(folder, first), "numpy") as file:
            rows = file.get_slice("rows")
            found.append(rows[max(start - first, 0) : min(stop - first, _BLOCK)])
    return np.concatenate(found) if found else np.empty((0, 0), np.float32)


def round_of(path: Path) -> int:
    """How many rounds a checkpoint has complete."""
    return int(path.name.removeprefix("round-"))


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"round-\d{5,}", p.name))


def models_hash(models: NDArray[np.float32], state_rows: NDArray[np.float32]) -> str:
    """SHA-256 of the final models and client states: equal hashes are equal bits."""
    digest = hashlib.sha256(np.ascontiguousarray(models).tobytes())
    digest.update(np.ascontiguousarray(state_rows).tobytes())
    return digest.hexdigest()
