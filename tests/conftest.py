"""Fixtures for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

RealData = Callable[..., Path]


def _source() -> Path | None:
    """The folder with the compact real datasets, if there is one."""
    named = os.environ.get("RAYFL_TEST_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if (folder / "unpack.py").is_file() else None


@pytest.fixture(scope="session")
def real_data() -> RealData:
    """``real_data("cifar10", "usps")`` is a folder with ``cifar10.npz`` and ``usps.npz``.

    They are unpacked once into a cache outside the repository. The test is skipped where there are no
    real data.
    """

    def unpacked(*names: str) -> Path:
        source = _source()
        if source is None:
            pytest.skip("no real data: there is no ../shared/data/unpack.py and RAYFL_TEST_DATA names none")
        cache = Path(tempfile.gettempdir()) / "rayfl-test-data"
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".lock"):
            for name in names:
                if not (cache / f"{name}.npz").is_file():  # unpack.py moves it there when it is complete
                    arguments = ["--dst", str(cache), "--only", name, "--npz"]
                    subprocess.run([sys.executable, str(source / "unpack.py"), *arguments], check=True)
        return cache

    return unpacked


@pytest.fixture(scope="session")
def real_news() -> Path:
    """A folder in which ``ag_news`` finds its articles; the test is skipped where there are none."""
    source = _source()
    if source is None or not (source / "ag_news").is_dir():
        pytest.skip("no real articles: there is no ../shared/data/ag_news and RAYFL_TEST_DATA names none")
    return source
