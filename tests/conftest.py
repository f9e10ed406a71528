"""Fixtures for all tests."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings as hypothesis_settings
from numpy.typing import NDArray

import rayfl
from tests.runs import SMALL, TASKS, Ran, Run

ROOT = Path(__file__).resolve().parents[1]

hypothesis_settings.register_profile("patient", deadline=None)  # a busy machine is no failure
hypothesis_settings.load_profile("patient")

os.environ.setdefault(
    "RAY_worker_niceness", "0"
)  # Ray's is 15: other work on the machine starves its workers
# Tests start hundreds of processes, each of which would compile all of rayfl's sources. This process itself
# writes no bytecode: if a test writes a module twice within a second, Python would load that of the first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = True


BEGUN_FIRST = ("ray", "tests/story/test_story.py")
"""What takes minutes: at the end, the other processes would wait for it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers (``-n``) each takes whole files, but one takes all tests that start Ray in it."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            for scope in reversed(BEGUN_FIRST):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Files(config, log)


def _scope(nodeid: str) -> str:
    """The scheduler is given nothing but names: marks are read from the source."""
    file, _, test = nodeid.partition("::")
    return "ray" if test.partition("[")[0] in _on_ray(file) else file


@cache
def _on_ray(file: str) -> frozenset[str]:
    """The test functions of a file that start Ray in their own process."""
    body = ast.parse((ROOT / file).read_bytes()).body
    every = any(
        isinstance(each, ast.Assign) and ast.unparse(each) == "pytestmark = pytest.mark.ray" for each in body
    )
    found = set()
    for each in body:
        if isinstance(each, ast.FunctionDef):
            marks = {
                name for mark in each.decorator_list for name in re.findall(r"mark\.(\w+)", ast.unparse(mark))
            }
            if (every or "ray" in marks) and "ray_apart" not in marks:
                found.add(each.name)
    return frozenset(found)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose among many cases. Set time limits for a busy machine: slow tests take several times as long
    there, and before a test on Ray begins, several processes import torch.
    """
    _choose_cases(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
        if not item.get_closest_marker("ray"):
            if "ray_cluster" in getattr(item, "fixturenames", ()):
                raise pytest.UsageError(f"{item.nodeid}: starts Ray and is not marked")
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if not item.get_closest_marker("ray_apart") and _scope(item.nodeid) != "ray":
            raise pytest.UsageError(f"{item.nodeid}: write @pytest.mark.ray above the function")


def _choose_cases(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests that are marked ``one_in(n)`` as slow.

    The first case stays. Which others do depends on their names, and so on no order of parameters: in a
    product of parameters every n-th case might always have the same value of one.
    """
    seen = set()
    for item in items:
        mark, test = item.get_closest_marker("one_in"), item.nodeid.partition("[")[0]
        if mark is None or item.get_closest_marker("slow"):
            continue
        if test in seen and crc32(item.nodeid.encode()) % mark.args[0]:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def ray_of_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """No worker finds the Ray of another: where one runs is written into Ray's temporary folder."""
    if os.environ.get("RAY_TMPDIR") or not hasattr(request.config, "workerinput"):
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        yield


RealData = Callable[..., Path]
Dataset = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _source() -> Path | None:
    """The folder with the compact real datasets, if there is one."""
    named = os.environ.get("RAYFL_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if (folder / "unpack.py").is_file() else None


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """No test pulls the plug; what a crash loses is worked out in servers/test_files.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


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


def read(folder: Path, name: str) -> Dataset:
    """Training images as rows of bytes, and their labels."""
    with np.load(folder / f"{name}.npz") as arrays:
        x, y = arrays["x_train"], arrays["y_train"]
        return x.reshape(len(x), -1), y.astype(np.int64)


@pytest.fixture(scope="session")
def fashion(real_data: Callable[[str], Path]) -> Dataset:
    return read(real_data("fashion_mnist"), "fashion_mnist")


@pytest.fixture(scope="session")
def cifar10(real_data: Callable[[str], Path]) -> Dataset:
    return read(real_data("cifar10"), "cifar10")


@pytest.fixture
def forgotten_parts() -> Iterator[None]:
    """For tests with methods of their own, of which other tests of the process should not know."""
    from rayfl import plugins
    from rayfl.config.kinds import KINDS

    added, loaded = {kind: dict(registry._added) for kind, registry in KINDS.items()}, dict(plugins._loaded)
    yield
    for kind, registry in KINDS.items():
        registry._added = added[kind]
    plugins._loaded.clear()  # a later run would take the parts of these modules along
    plugins._loaded.update(loaded)


@pytest.fixture(scope="module", autouse=True)
def plugins_of_the_module() -> Iterator[None]:
    """Later modules of the process run without the plug-ins of this one, which the Ray they share lacks."""
    from rayfl import plugins

    loaded = dict(plugins._loaded)
    yield
    plugins._loaded.clear()
    plugins._loaded.update(loaded)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray with four logical CPUs and GPUs, so that several actors and fractions fit on any machine."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    yield
    ray.shutdown()


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """SIGHUP has its default effect, even if these tests were started by ``nohup``, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A run of three rounds over nine clients in three planted groups, a second or less inline."""
    return {
        "name": "t",
        "rounds": 3,
        "seed": 3,
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": "fedavg",
        "training": {"epochs": 2, "batch_size": 40, "lr": 0.05},
        "execution": {"backend": "inline", "block_size": 2},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run("rounds=1", order={...})``: :data:`SMALL` with other sections and overrides."""
    output = {"root": str(tmp_path_factory.mktemp("runs")), "report": False, "tensorboard": False}
    known: dict[str, Ran] = {}

    def call(*overrides: str, **sections: Any) -> Ran:
        settings = {**SMALL, "output": output, **sections}
        name = repr((overrides, settings))
        if name not in known:
            known[name] = Ran(rayfl.run(settings, overrides))
        return known[name]

    return call
