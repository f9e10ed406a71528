"""Training many clients at once: layers whose leading dimension is the client."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfl.training.batched.engine import BatchedEngine
    from rayfl.training.batched.reading import Unsupported

__all__ = ["BatchedEngine", "Unsupported"]


def __getattr__(name: str) -> Any:
    """Import PyTorch only with the engine: the kernels are compiled without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rayfl.training.batched import engine, network

    return getattr(engine if name == "BatchedEngine" else network, name)
