"""Leading eigenpairs of a client's data, independent of the signs that LAPACK chooses and of the number of
threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import scipy
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController


@functools.cache
def libraries() -> ThreadpoolController:
    """The thread pools of this process, with SciPy's own BLAS; libraries loaded later are not limited."""
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the linear algebra inside with one BLAS thread.

    A matrix product split among threads is summed in another order, so its last bits would depend on the
    number of cores.
    """
    with libraries().limit(limits=1, user_api="blas"):
        yield


def fix_signs(vectors_DQ: NDArray[np.float64]) -> NDArray[np.float64]:
    """Flip the columns of ``(D, Q)`` so that the entry of largest magnitude is positive.

    The sign of a singular vector or eigenvector is arbitrary. Among entries of nearly the same magnitude
    the first one decides, so that the result does not depend on rounding.
    """
    if vectors_DQ.size == 0:
        return vectors_DQ
    magnitude = np.abs(vectors_DQ)
    place = np.argmax(magnitude >= (1 - 1e-6) * magnitude.max(axis=0), axis=0)
    return np.where(vectors_DQ[place, np.arange(vectors_DQ.shape[1])] < 0, -vectors_DQ, vectors_DQ)


def leading_eigenpairs(
    x: NDArray[np.float64], count: int, tiny: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest eigenvalues of ``x^T x`` and their eigenvectors.

    The eigenvectors are the right singular vectors of ``x``, which are the left singular vectors of the
    data matrix whose columns are the samples; the eigenvalues are the squared singular values. They come
    from the smaller of the two Gram matrices, ``x^T x`` and ``x x^T``.

    Args:
        x: samples ``(n, D)``.
        count: maximum number of eigenpairs.
        tiny: eigenvalues up to ``tiny`` times the largest are dropped: their eigenvectors are rounding.

    Returns:
        Eigenvalues ``(q,)`` in falling order and eigenvectors ``(D, q)``, orthonormal, signs fixed;
        ``q <= min(count, n, D)``, and 0 if all samples are zero.
    """
    samples, features = x.shape
    size = min(samples, features)
    count = min(count, size)
    with one_thread():
        gram = x.T @ x if features <= samples else x @ x.T
        values, vectors = scipy.linalg.eigh(gram, subset_by_index=(size - count, size - 1))
        values, vectors = values[::-1], vectors[:, ::-1]
        keep = values > tiny * values[0]
        values, vectors = values[keep], vectors[:, keep]
        if features > samples:
            vectors = (x.T @ vectors) / np.sqrt(values)
    return values, fix_signs(vectors)
