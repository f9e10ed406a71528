"""What ``rayfl doctor`` finds wrong."""

from __future__ import annotations

import hashlib
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from rayfl import doctor
from rayfl.training import ahead

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    free = [1e12]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2e12, 0, free[0]))
    return free


def test_a_sound_machine_needs_no_remedy(
    space: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    found = list(doctor.checks())
    assert [check.name for check in found] == [
        "disk for runs", "temporary folder", "shared memory", "object store", "compiled code", "Ray's token"
    ]  # fmt: skip
    assert not [check for check in found if check.remedy]


def test_full_disks_and_little_shared_memory_are_named(space: list[float]) -> None:
    space[0] = 1e6
    wrong = {check.name for check in doctor.checks() if check.remedy}
    assert wrong >= {"disk for runs", "temporary folder", "shared memory", "object store"}


def test_a_long_folder_is_replaced_and_said(space: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/" + "x" * 60)
    assert "Ray gets /tmp/rayfl-" in doctor._temporary().found


def test_an_open_token_is_named(tmp_path: Path) -> None:
    path = tmp_path / "auth_token"
    path.write_text("secret")
    path.chmod(0o644)
    assert doctor._token(path).remedy == f"others can read it: chmod 600 {path}"
    path.chmod(0o600)
    assert not doctor._token(path).remedy


def test_damaged_compiled_code_is_named(tmp_path: Path) -> None:
    content = b"code"
    path = tmp_path / "batched_1a2b" / "f.1.nbc"
    path.parent.mkdir()
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert not doctor._cache(tmp_path).remedy
    path.write_bytes(path.read_bytes()[:-1])
    assert doctor._cache(tmp_path).remedy.startswith("1 damaged file: the next run compiles")


def test_compiled_code_of_other_packages_has_no_digest_and_is_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "umap_1a2b" / "f.1.nbc"
    path.parent.mkdir()
    path.write_bytes(b"what Numba writes by itself")
    assert not doctor._cache(tmp_path).remedy


def test_the_kernels_are_where_the_doctor_looks() -> None:
    from rayfl.training.batched import loss_kernel

    folder = Path(loss_kernel.cross_entropy._cache.cache_path)  # type: ignore[attr-defined]
    assert folder.name.startswith(f"{ahead._KERNELS.name}_")
    assert folder.parent == ahead.cache()
