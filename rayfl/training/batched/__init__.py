"""Training many clients at once: layers whose leading dimension is the client."""

from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.network import Unsupported

__all__ = ["BatchedEngine", "Unsupported"]
