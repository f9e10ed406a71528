"""CFL on permuted updates (Sattler et al., section V-B): the server learns norms and angles, not weights.

The clients share a seed that the server does not have. They send ``Pi d_i``, where Pi permutes the P
parameters of an update; the server works on these alone; the clients apply the inverse to the average (Eq.
46).

An elementwise weighted mean, summed one client after another, stays the same bit for bit, and so do the final
models. (A matrix product may not: BLAS uses other kernels for the last few columns, which round about one
number in 10,000 differently. In double precision, rounded to single afterwards, the difference disappears.)
Norms and cosines (Eq. 45) stay the same only up to rounding, since sums over P entries are taken in another
order. They differ by about 1e-7, so a criterion that is met by a smaller margin may be decided differently.

A permutation hides which value belongs to which parameter, not the values themselves.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rayfl.random import generator

Number = TypeVar("Number", bound=np.generic)


def permutation(size: int, seed: int) -> NDArray[np.int64]:
    """Pi as indices ``(size,)``: entry k of ``Pi d`` is entry ``permutation[k]`` of ``d``."""
    return generator(seed, "permutation of updates").permutation(size)


def permute(rows: NDArray[Number], seed: int) -> NDArray[Number]:
    """``Pi d`` of a vector ``(P,)`` or of each row of ``(B, P)``."""
    # np.take keeps rows contiguous, unlike an index, so that sums over clients have the same order
    return np.take(rows, permutation(rows.shape[-1], seed), axis=-1)


def restore(rows: NDArray[Number], seed: int) -> NDArray[Number]:
    """``Pi^-1`` of a vector ``(P,)`` or of each row of ``(B, P)``: the inverse of :func:`permute`."""
    restored = np.empty_like(rows)
    restored[..., permutation(rows.shape[-1], seed)] = rows
    return restored
