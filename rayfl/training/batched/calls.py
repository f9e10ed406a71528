"""How many clients train in one call. Imports no PyTorch: plans of memory need it, too."""

CACHE_BYTES, MEMORY_BYTES = 1 << 22, 1 << 26
"""Models that train together should fit in a core's share of the cache. At least eight share the overhead of
a call, unless they are too large for that."""

SWEET_BYTES = 1 << 23
"""What the clients of a call may take with all their vectors, where a layer's weights, targets and offsets
pass through the cache in every step. Measured from 0.7 to 6 MB a client: at 8 MB a step costs least, at
twice as much up to twice the time, since the cores of a machine share the last level of the cache."""

CUDA_BYTES = 1 << 29
"""On a GPU call overhead matters more than the cache: models of up to this many bytes train together."""


def clients_in_a_call(parameters: int, device: str = "cpu") -> int:
    """How many clients train in one call, by the number of parameters of the model."""
    size = 4 * max(1, parameters)
    least, together = max(1, min(8, MEMORY_BYTES // size)), CUDA_BYTES if device == "cuda" else CACHE_BYTES
    return max(least, min(256, together // size))


def clients_in_the_cache(parameters: int, vectors: float) -> int:
    """How many clients train in one call on a CPU, if a step reads more of each than its weights.

    Args:
        parameters: of the model.
        vectors: of the model's size that a step reads for each client: its weights, an offset, ...
    """
    size = 4 * max(1, parameters) * vectors
    least = max(1, min(8, int(SWEET_BYTES / size)))
    return max(least, min(256, int(CACHE_BYTES / size)))
