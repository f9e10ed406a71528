"""Kernels are compiled ahead of the first round, and once on a machine."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from numba.core.dispatcher import Dispatcher

from rayfl.models import MODELS, ModelSpec
from rayfl.training import LocalWork, ahead
from rayfl.training.batched import (
    BatchedEngine,
    client_kernel,
    conv_kernels,
    jit,
    linear_kernels,
    loss_kernel,
    lstm_kernel,
)
from rayfl.training.batched.compile_all import compile_all
from rayfl.training.batches import Batches
from tests.training.test_recurrent import texts

KERNELS = [
    each
    for module in (conv_kernels, linear_kernels, loss_kernel, lstm_kernel)
    for each in vars(module).values()
    if isinstance(each, Dispatcher)
    and each.py_func.__module__ == module.__name__
    # These are called by client_kernel alone, and part of it.
    and each.__name__ not in ("weight_gradient", "input_gradient", "forward_interleaved")
] + [client_kernel.train, client_kernel.outputs]


def test_compiled_ahead_is_what_runs_need(tmp_path: Path) -> None:
    import rayfl

    compile_all()
    assert all(kernel.signatures for kernel in KERNELS)
    before = {kernel: len(kernel.signatures) for kernel in KERNELS}
    x, y = np.zeros((80, 1, 28, 28), np.float32), np.arange(80) % 10
    pruned = {"name": "sub_fedavg", "accuracy": 0, "distance": 0}
    objectives = "sgd", "fedprox", "scaffold", "mtl", pruned
    for model, local in [("lenet5", "sgd"), *(("mlp", each) for each in objectives)]:
        settings: dict[str, Any] = {
            "rounds": 1,
            "model": {"name": model},
            "local": local,
            "partition": {"clients": 2},
            "training": {"engine": "batched"},
            "execution": {"backend": "inline"},
            "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
        }
        rayfl.run(settings, data=(x, y, x, y))
    spec = ModelSpec.of(MODELS["lstm"](embedding=3, hidden=4), (6,), 20, 0)
    engine = BatchedEngine(spec, Batches(texts(6, 20), torch.device("cpu")), 0)
    start = torch.from_numpy(spec.initial()).expand(2, -1)
    assert not engine.train(LocalWork(1, 5, 0.1), 0, [0, 1], [np.arange(9), np.arange(4)], start).failures
    assert {kernel: len(kernel.signatures) for kernel in KERNELS} == before


def test_it_is_started_once_for_a_version_and_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Child:
        def __init__(self, command: list[str], **options: Any) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    assert ahead.begin()
    assert started == [[sys.executable, "-m", "rayfl.training.batched.compile_all"]]
    ahead.stamp().touch()
    assert not ahead.begin()
    assert len(started) == 1
    monkeypatch.setattr(ahead, "_cpu", lambda: "another one")
    assert ahead.begin()
    assert len(started) == 2


def test_one_process_compiles_however_many_runs_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a core and hundreds of megabytes, and a suite or a sweep begins dozens of runs."""
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def waits(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        children.append(real(["sleep", "600"], **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", waits)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    try:
        assert ahead.begin()
        assert not ahead.begin()
        children[0].kill()  # without a stamp: the next run begins again
        children[0].wait()
        assert ahead.begin()
        assert len(children) == 2
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("function", ["fcntl.flock", "os.open"])
def test_where_there_are_no_locks_it_is_started_all_the_same(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    started: list[tuple[int, ...]] = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_start", lambda lock: not started.append(lock))
    monkeypatch.setattr(f"rayfl.training.ahead.{function}", fails)
    assert ahead.begin()
    assert len(started[0]) == (function == "fcntl.flock")


def test_where_nothing_can_be_kept_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    assert not ahead.begin()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert ahead.cache().is_absolute()


def test_another_process_that_compiles_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_for = jit._by_one_process(compiled.append, tmp_path / "kernel.lock", lambda _: False)
    other = FileLock(tmp_path / "kernel.lock")  # a lock is its object's: this one is like another process
    with other:
        waiting = threading.Thread(target=compile_for, args=("waited",))
        waiting.start()
        assert not compiled
    waiting.join()
    assert compiled == ["waited"]

    monkeypatch.setattr(jit, "PATIENCE", 0.01)
    with other:
        compile_for("without the other")
    assert compiled == ["waited", "without the other"]


def test_what_another_process_has_compiled_is_taken_while_it_compiles_for_other_types(tmp_path: Path) -> None:
    compiled: list[str] = []
    looks = iter([False, False, True])
    compile_for = jit._by_one_process(compiled.append, tmp_path / "kernel.lock", lambda _: next(looks))
    with FileLock(tmp_path / "kernel.lock"):
        compile_for("stored")
    assert list(looks) == []  # else it waited for the lock
    assert compiled == ["stored"]


def test_locks_are_no_condition(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiled: list[str] = []
    compile_for = jit._by_one_process(compiled.append, tmp_path / "file" / "kernel.lock", lambda _: False)
    compile_for("anyway")
    assert compiled == ["anyway"]
