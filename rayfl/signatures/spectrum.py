"""MT-HFL's signature: the leading spectrum of a client's Gram matrix, related by an exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.linalg import leading_eigenpairs, one_thread
from rayfl.random import generator
from rayfl.signatures.base import Signature, sample_matrix

BLOCK = 256
"""How many users' eigenvectors are projected at a time; bounds the memory of :meth:`Spectrum.relate`."""

KEPT = 1 << 23
"""Up to this many numbers, the eigenvectors of all users are kept in double precision for the next user."""

MANY = 32
"""If the others have this many eigenvectors per sample of a user, the user's samples are decomposed first."""


class Spectrum(Signature):
    """The q leading eigenpairs of the Gram matrix of the client's features (MT-HFL).

    Ali and Arafa, "Data similarity-based one-shot clustering for multi-task hierarchical federated learning",
    Algorithm 2: ``G_i = Phi(X_i)^T Phi(X_i) / n_i`` has eigenpairs ``(lambda_i, V_i)``. Users exchange only
    ``V_i``. User i then measures how much its own data vary along the directions of user j, ``lhat_k = |G_i
    v_k^(j)|`` (Eq. 2), compares that with its own eigenvalues, ``l_k = min(lambda_k, lhat_k) / max(lambda_k,
    lhat_k)`` (Eq. 3), and reports the geometric mean ``r(i, j) = (prod_k l_k)^(1/q)`` (Eq. 4). The server
    averages both directions (Eq. 5, ``relevance``).

    The signature is an array ``(D + 1, q')``: the eigenvalues in row 0, the eigenvectors below. The paper
    discards "extremely small" eigenvalues; here eigenvalues up to ``tiny`` times the largest are dropped with
    their eigenvectors, so ``q' <= q``. Two users are compared along the first ``min(q'_i, q'_j)``.

    ``noise`` is added to the exchanged eigenvectors, which the paper leaves open. They are not normalised
    again: the noise adds to ``lhat_k`` only its own projection on ``G_i``, whereas normalising would lower
    every ``lhat_k``. On Fashion-MNIST's three tasks (10 users, entries of an eigenvector about 0.04) clusters
    stay exact up to a noise of 0.05 and are lost at 0.3.
    """

    proximities: ClassVar[tuple[str, ...]] = ("relevance",)
    needs_exchange: ClassVar[bool] = True

    name: Literal["spectrum"] = "spectrum"
    q: int = Field(5, ge=1, description="number of exchanged eigenvectors (q)")
    tiny: float = Field(1e-6, ge=0, lt=1, description="drop eigenvalues below this share of the largest")
    noise: float = Field(0.0, ge=0, description="standard deviation of noise on exchanged eigenvectors")

    def compute(self, x: NDArray[np.floating], y: NDArray[np.integer], key: int = 0) -> NDArray[np.float32]:
        """Eigenvalues (row 0) above eigenvectors, ``(D + 1, q')``; the noise depends on ``key`` alone.

        Raises:
            DataError: if there are no samples or they are not finite.
        """
        samples = sample_matrix(x)
        values, vectors = leading_eigenpairs(samples, self.q, self.tiny)
        if self.noise:
            draws = generator(key, "spectrum noise").standard_normal(vectors.shape)
            vectors = vectors + self.noise * draws
        return np.vstack([values / len(samples), vectors]).astype(np.float32)

    def floats(self, signature: NDArray[np.floating]) -> int:
        """``D q'``: the eigenvalues stay with the client."""
        return int(signature[1:].size)

    def relate(
        self, x: NDArray[np.floating], own: NDArray[np.floating], others: Sequence[NDArray[np.floating]]
    ) -> NDArray[np.float64]:
        """``r(i, j)`` for every user j, ``(N,)``, in [0, 1]; 0 if nothing can be compared.

        ``G_i V`` is computed as ``X^T (X V) / n``, for many users at a time, without forming ``G_i``. With
        many users, ``|G_i V|`` is computed from the singular values ``S`` and the right singular vectors
        ``W`` of ``X`` as ``|S^2 W V| / n``, since ``W^T`` preserves lengths: one product instead of two.
        """
        row: NDArray[np.float64] = self.relate_all([(x, own)], others)[0]
        return row

    @override
    def relate_all(
        self,
        clients: Iterable[tuple[NDArray[np.floating], NDArray[np.floating]]],
        others: Sequence[NDArray[np.floating]],
    ) -> NDArray[np.float64]:
        """:meth:`relate` of several users; the others' eigenvectors are put side by side once, if that takes
        little memory.
        """
        fits = sum(other[1:].size for other in others) <= KEPT
        cached = list(_stacked_eigenvectors(others)) if fits else None
        directions = sum(other.shape[1] for other in others)
        rows = []
        with one_thread():
            for x, own in clients:
                samples, values = sample_matrix(x), own[0].astype(np.float64)
                gram = _length_preserving_gram(samples) if directions >= MANY * len(samples) else None
                row = [
                    _geometric_mean_ratios(values, _projected_lengths(samples, gram, vectors), counts)
                    for vectors, counts in cached or _stacked_eigenvectors(others)
                ]
                rows.append(np.concatenate([np.zeros(0), *row]))
        return np.stack(rows)


def _length_preserving_gram(samples: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """``S^2 W / n`` of samples ``(n, D)``: its products with vectors have the same lengths as those of ``G``.

    None if there are more samples than dimensions: then the decomposition takes longer than it saves.
    """
    if len(samples) > samples.shape[1]:
        return None
    _, singular, right = np.linalg.svd(samples, full_matrices=False)
    scaled: NDArray[np.float64] = (singular**2 / len(samples))[:, None] * right
    return scaled


def _projected_lengths(
    samples: NDArray[np.float64], gram: NDArray[np.float64] | None, vectors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``|G v|`` of each column v of the vectors ``(D, V)``; ``gram``: of :func:`_length_preserving_gram`."""
    products = samples.T @ (samples @ vectors) / len(samples) if gram is None else gram @ vectors
    lengths: NDArray[np.float64] = np.linalg.norm(products, axis=0)
    return lengths


def _stacked_eigenvectors(
    others: Sequence[NDArray[np.floating]],
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """The eigenvectors of :data:`BLOCK` users at a time ``(D, sum q_j)``, and how many each has."""
    for start in range(0, len(others), BLOCK):
        block = others[start : start + BLOCK]
        vectors = np.concatenate([other[1:] for other in block], axis=1).astype(np.float64)
        yield vectors, np.array([other.shape[1] for other in block], np.int64)


def _geometric_mean_ratios(
    eigenvalues: NDArray[np.float64], projected_lengths: NDArray[np.float64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Eqs. 3 and 4 of MT-HFL for several users ``(n,)``, over the eigenvalues that both users kept.

    Args:
        eigenvalues: of the user that compares ``(q,)``.
        projected_lengths: of the n users' projected eigenvectors, one user after the other.
        counts: how many each of them has ``(n,)``.
    """
    means, firsts = np.zeros(len(counts)), np.cumsum(counts) - counts
    for count in np.unique(counts).tolist():  # nearly always there is only one
        n_common = min(len(eigenvalues), count)
        if n_common == 0:
            continue
        users = np.flatnonzero(counts == count)
        lengths = projected_lengths[firsts[users, None] + np.arange(n_common)]
        ratios = np.minimum(eigenvalues[:n_common], lengths) / np.maximum(eigenvalues[:n_common], lengths)
        positive = (ratios > 0).all(axis=1)
        means[users[positive]] = np.exp(np.log(ratios[positive]).mean(axis=1))
    return means
