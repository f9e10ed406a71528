"""What a process tells PyTorch before it trains on a GPU, seen through a pretended one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfl.training.device import CONTEXT_BYTES, open_device, out_of_memory, tensor_share

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A second GPU of 16 GiB, current; the calls that change something, in order."""
    calls: list[Any] = []
    cuda, cudnn, matmul = torch.cuda, torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * GIB))
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda *call: calls.append(("share", *call)))
    monkeypatch.setattr(cuda, "Stream", lambda device: ("stream of", device))
    monkeypatch.setattr(cuda, "set_stream", lambda stream: calls.append(stream))
    yield calls
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_is_numbered_and_gets_a_stream(name: str, gpu: list[Any]) -> None:
    device = open_device(name)
    assert device == torch.device("cuda", 1)
    assert gpu == [("stream of", device)]


def test_a_share_of_the_memory_holds_the_context_too(gpu: list[Any]) -> None:
    device = open_device("cuda", 0.25)
    assert gpu[0] == ("share", 0.25 - 0.5 / 16, device)
    assert gpu[1] == ("stream of", device)


@pytest.mark.parametrize("share", [0.0, 1.0, 2.0])
def test_whole_gpus_have_no_limit(share: float, gpu: list[Any]) -> None:
    open_device("cuda", share)
    assert len(gpu) == 1


def test_the_arithmetic_is_float32_and_repeats(gpu: list[Any]) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.allow_tf32 = matmul.allow_tf32 = cudnn.benchmark = True  # the first is PyTorch's default
    cudnn.deterministic = False
    open_device("cuda")
    assert [cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark] == [False] * 3
    assert cudnn.deterministic
    assert torch.get_float32_matmul_precision() == "highest"


def test_on_a_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch, gpu: list[Any]) -> None:
    before = torch.backends.cudnn.allow_tf32
    assert open_device("cpu", 0.5) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto", 0.5) == torch.device("cpu")
    assert gpu == []
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.parametrize("actors", [2, 4, 10])
@pytest.mark.parametrize("total", [16 * GIB, 80 * GIB])
def test_all_shares_and_contexts_fit_together(actors: int, total: int) -> None:
    share = tensor_share(1 / actors, total)
    assert actors * (share * total + CONTEXT_BYTES) <= total * (1 + 1e-9)


def test_at_least_half_of_a_share_is_for_tensors() -> None:
    assert tensor_share(0.1, 4 * GIB) == 0.05


def test_memory_runs_out_in_several_words() -> None:
    def chained() -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("tried to allocate")
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        except RuntimeError as error:
            return error

    assert out_of_memory(torch.OutOfMemoryError("tried to allocate"))
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert out_of_memory(chained())
    assert not out_of_memory(ValueError("the training loss is nan"))
    assert not out_of_memory(None)
