"""The device that a process trains on, set up once: arithmetic, memory and stream."""

from __future__ import annotations

import torch

CONTEXT_BYTES = 1 << 29
"""GPU memory that a process uses in addition to its tensors: the CUDA context and the libraries' kernels
(an estimate)."""


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor (of any shape) is on a GPU, so that layers take their GPU paths."""
    return tensor.is_cuda


def open_device(name: str, share: float = 0.0) -> torch.device:
    """Set this process up to train on a device.

    On a GPU, for the whole process:

    - all products use float32. PyTorch's default for *convolutions* is TF32, which keeps 10 bits of the
      mantissa and would silently change results by about 1e-3;
    - cuDNN uses deterministic algorithms, chosen by rule and not by timing, so that a run can be repeated;
    - tensors are limited to the process's share of the memory (:func:`tensor_share`);
    - work goes to a separate stream, because nothing can be recorded on the default stream.

    Args:
        name: ``cpu``, ``cuda``, or ``auto``: a GPU if there is one.
        share: the part of the GPU's memory that this process may use; 0, or 1 and more, for no limit.

    Returns:
        The device. A GPU comes with its index, as on its tensors: the current device among those in
        ``CUDA_VISIBLE_DEVICES``, which is the one that Ray assigned to this process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    products_in_float32()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if 0 < share < 1:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(tensor_share(share, total), device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return device


def products_in_float32() -> None:
    """Turn TF32 off, for this process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def tensor_share(share: float, total: int) -> float:
    """The fraction of a GPU's memory that is left for tensors if a process may use ``share`` of it.

    PyTorch's own limit counts only tensors: four processes with a quarter each would need four times
    :data:`CONTEXT_BYTES` more than the GPU has.

    Args:
        share: of the process, in (0, 1).
        total: the GPU's memory in bytes.

    Returns:
        The share without the context, but at least half of ``share`` on GPUs that are too small for that.
    """
    return max(share / 2, share - CONTEXT_BYTES / total)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that the device is out of memory.

    PyTorch's allocator raises a dedicated type; CUDA and its libraries only say so in the message.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
            return True
        error = error.__cause__ or error.__context__
    return False
