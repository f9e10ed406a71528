"""The local Ray of the tests of the runtime."""

from tests.runtime.conftest import ray_cluster

__all__ = ["ray_cluster"]
