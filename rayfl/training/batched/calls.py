"""How many clients train in one call. Imports no PyTorch, because the planning of memory needs it, too."""

CACHE_BYTES, MEMORY_BYTES = 1 << 22, 1 << 26
"""Models that train together should fit in ``CACHE_BYTES``, a core's share of the cache. At least eight share
the overhead of a call, unless they take more than ``MEMORY_BYTES``."""

SWEET_BYTES = 1 << 23
"""As ``MEMORY_BYTES``, if targets or offsets pass through the cache in every step, too: bytes of all vectors
of the clients in a call. Measured with 0.7 to 6 MB per client: a step is fastest at 8 MB, and takes up to
twice the time at 16 MB, since the cores of a machine share the last level of the cache."""

CUDA_BYTES = 1 << 29
"""On a GPU call overhead matters more than the cache: models of up to this many bytes train together."""


def clients_in_a_call(parameters: int, device: str = "cpu") -> int:
    """How many clients train in one call, by the number of parameters of the model."""
    size = 4 * max(1, parameters)
    least, budget = max(1, min(8, MEMORY_BYTES // size)), CUDA_BYTES if device == "cuda" else CACHE_BYTES
    return max(least, min(256, budget // size))


def clients_in_the_cache(parameters: int, vectors: float) -> int:
    """How many clients train in one call on a CPU, if a step reads more of each than its weights.

    Args:
        parameters: of the model.
        vectors: of the model's size that a step reads for each client: its weights, an offset, ...
    """
    size = 4 * max(1, parameters) * vectors
    least = max(1, min(8, int(SWEET_BYTES / size)))
    return max(least, min(256, int(CACHE_BYTES / size)))
