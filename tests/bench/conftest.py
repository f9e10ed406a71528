"""Ray for the benches."""

from tests.runtime.conftest import ray_cluster  # noqa: F401 (a fixture)
