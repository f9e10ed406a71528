"""Reduced precision: forward and backward passes in bfloat16, everything else in float32.

Mixed precision is that of :class:`torch.autocast`: matrix products and convolutions, forwards and
backwards, compute in bfloat16. Parameters, gradients, momentum, losses, and all sums over steps and clients
stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rayfl.errors import ConfigError

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "bf16"]

_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
"""CPU features, as Linux names them, that provide instructions for bfloat16; the last is ARM's."""


def forward(
    network: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    precision: Precision,
    cached: bool = True,
) -> torch.Tensor:
    """The outputs of a network, ``(B, ...)``, for a loss in float32.

    Args:
        network: a module, or a function that calls one.
        x: samples ``(B, ...)``.
        precision: of products and convolutions.
        cached: whether a weight that is used several times is rounded once. Then the gradients of all its
            uses are added in bfloat16, as :class:`torch.autocast` does it.
    """
    if precision == "float32":
        return network(x)
    import torch

    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=cached), _computable(x.device):
        outputs = network(x)
    return outputs.float()


@contextmanager
def _computable(device: torch.device) -> Iterator[None]:
    """Keep oneDNN out of bfloat16 on CPUs for which it has none.

    Without AVX-512 PyTorch computes products and convolutions by itself, but calls oneDNN for an ``nn.LSTM``,
    which fails (``could not create a primitive descriptor``). PyTorch's own LSTM then takes its place.
    """
    import torch

    switch = torch.backends.mkldnn
    if device.type != "cpu" or not switch.enabled or _onednn_has_bf16():
        yield
        return
    switch.enabled = False  # type: ignore[assignment]  # a property, to which PyTorch gives another type
    try:
        yield
    finally:
        switch.enabled = True  # type: ignore[assignment]


@cache
def _onednn_has_bf16() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def check_device(precision: Precision, device: torch.device) -> None:
    """Check that a device computes in this precision.

    Raises:
        ConfigError: for a GPU that does not.
    """
    import torch

    if precision == "float32" or device.type != "cuda":
        return
    # PyTorch emulates bfloat16 on older GPUs, which takes longer than float32.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        message = f"{torch.cuda.get_device_name(device)} does not compute in bf16"
        raise ConfigError(
            "training.precision", message, "use float32, or a GPU of compute capability 8.0 or higher"
        )


def remarks(precision: Precision, device: str, cpu: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What the user should know before a run in reduced precision starts on this machine.

    Args:
        precision: of the run.
        device: ``cpu``, ``cuda`` or ``auto``.
        cpu: file that describes the CPU; if it cannot be read, there are no remarks.
    """
    if precision == "float32" or device != "cpu":
        return []
    try:
        lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    features = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    if not features or _CPU_FLAGS & set(features[0]):
        return []
    return [
        "training.precision: this CPU has no instructions for bf16, so training is slower than in float32, "
        "not faster"
    ]
