"""The engines on another kind of CPU, compiled by two processes at once, and where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAIN = """
import torch
torch.set_num_threads(1)
from rayfl.training.loop import LoopEngine
from rayfl.training.batched import BatchedEngine
from tests.training.test_terms import PLAIN, make_case, make_terms, train, truth_of

for case in ("lenet5", "mlp"):
    spec, sizes = make_case(case)
    terms = make_terms(("mask",), spec, sizes)
    truth = truth_of(spec, PLAIN, sizes, terms)
    for engine in (LoopEngine, BatchedEngine):
        block = train(engine, spec, PLAIN, sizes, terms)
        truth.check(block)
    print(hash(block.rows.numpy().tobytes()))
"""
"""Convolutions, thin products, softmax: all kernels."""


def start(**environment: str) -> subprocess.Popen[str]:
    """A fresh process; equal results print equal lines."""
    root = Path(__file__).parents[2]
    inherited = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment = {**inherited, "PYTHONHASHSEED": "0", "PYTHONPATH": str(root), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN], env=environment, stdout=pipe, stderr=pipe, text=True, cwd=root
    )


def answer(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.splitlines()


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    both = [start(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    answers = [answer(process) for process in both]
    assert len(answers[0]) == 2
    assert answers[0] == answers[1] == answer(start(NUMBA_CACHE_DIR=str(tmp_path)))  # and from the cache
    assert list(tmp_path.rglob("*.nbc"))


def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    """A file stands where the home should be: nobody, not even root, can make a folder there."""
    home = tmp_path / "home"
    home.write_text("")
    assert len(answer(start(HOME=str(home)))) == 2


@pytest.mark.parametrize(
    "kind",
    [
        {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    ],
    ids=str,
)
def test_another_kind_of_cpu(kind: dict[str, str], tmp_path: Path) -> None:
    assert len(answer(start(NUMBA_CACHE_DIR=str(tmp_path), **kind))) == 2
