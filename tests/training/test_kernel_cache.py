"""Compiled code is of the sources that are there, and is shared by all places that have the same ones."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayfl.training import ahead

INNER = """
from rayfl.training.batched.jit import jit

@jit(fastmath=False)
def inner(x):
    return x + {added}
"""
OUTER = """
from inner import inner
from rayfl.training.batched.jit import jit

@jit(fastmath=False)
def outer(x):
    return 10 * inner(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two kernels, of which one calls the other, in place of rayfl's."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "kernels"
    write(path, added=1)
    yield path
    ahead.sources.cache_clear()


def write(folder: Path, added: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "inner.py").write_text(INNER.format(added=added))
    (folder / "outer.py").write_text(OUTER)


def outer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel as a new process has it."""
    monkeypatch.setattr(ahead, "_KERNELS", folder)
    ahead.sources.cache_clear()
    for name in ("inner", "outer"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module.outer


def test_a_change_of_a_kernel_that_others_call_compiles_these_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba alone compares the source of ``outer`` only, and would go on adding 1."""
    assert outer(folder, monkeypatch)(2) == 30
    again = outer(folder, monkeypatch)
    assert again(2) == 30
    assert again.stats.cache_hits
    write(folder, added=5)
    changed = outer(folder, monkeypatch)
    assert changed(2) == 70
    assert not changed.stats.cache_hits


def test_environments_with_another_compiler_have_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One would read what the other writes."""
    first = ahead.kernels()
    monkeypatch.setattr(ahead, "_compiler_version", lambda: "numba 0.1 llvmlite 0.2")
    assert ahead.kernels() != first


def test_the_same_sources_at_another_place_are_not_compiled_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another environment, in a job's folder on a node of Ray, or after an installation anew."""
    assert outer(folder, monkeypatch)(2) == 30
    elsewhere = tmp_path / "elsewhere" / "kernels"
    elsewhere.parent.mkdir()
    shutil.move(folder, elsewhere)
    moved = outer(elsewhere, monkeypatch)
    assert moved(2) == 30
    assert moved.stats.cache_hits
