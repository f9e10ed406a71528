"""The cache of compiled code heals itself, whatever became of its files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from rayfl.training.ahead import kernels, sound
from rayfl.training.batched.jit import jit


def _add(x: float, y: float) -> float:
    return x + 2 * y


def _compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    return jit(fastmath=False)(_add)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage", [_cut, _flip, lambda data: b"", lambda data: b"garbage" * 9, lambda data: data[:40]]
)
def test_damaged_files_are_compiled_and_written_again(
    kind: str, damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _compiled(tmp_path, monkeypatch)(1.0, 2.0) == 5
    (path,) = tmp_path.rglob(f"*.{kind}")
    assert sound(path)
    path.write_bytes(damage(path.read_bytes()))
    assert not sound(path)
    again = _compiled(tmp_path, monkeypatch)
    assert again(1.0, 2.0) == 5
    assert sum(again.stats.cache_misses.values()) == 1
    healed = _compiled(tmp_path, monkeypatch)
    assert healed(1.0, 2.0) == 5
    assert sum(healed.stats.cache_hits.values()) == 1


def test_a_cache_that_numba_wrote_itself_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no digest: one of an older version, for instance."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    assert numba.njit(cache=True, fastmath=False, error_model="numpy", nogil=True)(_add)(1.0, 2.0) == 5
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernels().mkdir()
    files = [*(tmp_path / "numba").rglob("*.nb[ci]")]
    assert len(files) == 2
    for path in files:
        shutil.copy(path, kernels())
    found = _compiled(tmp_path, monkeypatch)
    assert found(1.0, 2.0) == 5
    assert not found.stats.cache_hits


def test_a_full_disk_is_no_reason_not_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    assert _compiled(tmp_path, monkeypatch)(np.float64(1), np.float64(2)) == 5
