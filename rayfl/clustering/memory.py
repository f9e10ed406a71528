"""How much memory a clustering may use, and a refusal with figures if that is not enough."""

from __future__ import annotations

from rayfl.clustering.proximity import BLOCK
from rayfl.errors import RayflError
from rayfl.units import size

BYTES_PER_PAIR = 20
"""Peak memory per pair of up to ``BLOCK`` clients: the distance, SciPy's copy of it, and temporaries."""
LEAN_BYTES_PER_PAIR = 10
"""Peak memory per pair of more clients: the distance in single precision, in its tile and in the condensed
form, and the memory of the workers (4.6 GB were measured for 30,000 clients on two workers)."""
RELATION_BYTES_PER_PAIR = 16
"""Additional memory per pair for an exchange of signatures: two relations."""


def bytes_per_pair(clients: int) -> int:
    """Peak memory per pair of clients."""
    return BYTES_PER_PAIR if clients <= BLOCK else LEAN_BYTES_PER_PAIR


def check_memory(clients: int, available: int, per_pair: int) -> None:
    """Refuse a population whose distances would not fit in ``available`` bytes.

    Raises:
        RayflError: one line with the figures and what would fit.
    """
    needed = per_pair * clients * (clients - 1) // 2
    if needed > available:
        fits = int((2 * available / per_pair) ** 0.5)
        raise RayflError(
            f"clustering: the distances of {clients:,} clients need {size(needed)}, "
            f"{size(available)} are free; up to {fits:,} clients would fit (signatures that need no "
            f"exchange are clustered by representatives above clustering.exact_up_to={fits}), "
            "and the groupings planted, random, single and singletons need no distances"
        )
