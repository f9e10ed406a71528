"""The matrix A of a round: its parts for each block, and its rows without the clients that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.aggregation import Aggregation
from rayfl.algorithms import Mixing, Plan
from rayfl.clients.jobs import BlockMixing
from rayfl.errors import ConfigError, type_of
from rayfl.local import LocalObjective


def check(mixing: Mixing, method: str, models: int, clients: int) -> Mixing:
    """Check the matrix that a method returned for a round.

    Args:
        mixing: the matrix A.
        method: the method's name, for the message.
        models: K, the number of models.
        clients: M, the size of the cohort.

    Raises:
        ConfigError: if the shape is not ``(K', M)``, an entry is not finite, or the sum of a row with entries
            is not positive, so that the row cannot be normalised.
    """
    rows = models if mixing.parents is None else len(mixing.parents)
    parents = np.asarray(() if mixing.parents is None else mixing.parents)
    if parents.size and (parents.ndim != 1 or parents.dtype.kind not in "iu"):
        what = f"parents is {type_of(mixing.parents)}"
        raise ConfigError(f"{method}.mix", what, "expected the numbers of models, as integers")
    if parents.size and not (parents.min() >= 0 and parents.max() < models):
        wrong = parents.min() if parents.min() < 0 else parents.max()
        raise ConfigError(f"{method}.mix", f"parents holds {wrong}", f"expected 0 to {models - 1}")
    matrices = {"weights": mixing.weights, "keep": mixing.keep}
    for name, matrix in matrices.items():
        if name == "keep" and matrix is None:
            continue
        if not sp.issparse(matrix):
            remedy = "expected a scipy.sparse.csr_array"
            raise ConfigError(f"{method}.mix", f"{name} is {type_of(matrix)}", remedy)
        if matrix.shape != (rows, clients):
            remedy = f"expected {(rows, clients)}: a row per model, a column per client of the cohort"
            raise ConfigError(f"{method}.mix", f"{name} have shape {matrix.shape}", remedy)
        if not np.isfinite(matrix.data).all():
            raise ConfigError(f"{method}.mix", f"{name} are not finite")
    sums: NDArray[np.float64] = np.asarray(mixing.weights.sum(axis=1), np.float64).ravel()
    if mixing.keep is not None:
        sums = sums + np.asarray(mixing.keep.sum(axis=1), np.float64).ravel()
    bad_rows = np.flatnonzero((np.diff(mixing.weights.tocsr().indptr) > 0) & ~(sums > 0))
    if len(bad_rows):
        what = f"the weights of model {bad_rows[0]} sum to {sums[bad_rows[0]]:g}"
        raise ConfigError(f"{method}.mix", what, "expected a positive sum: rows are divided by it")
    return mixing


def check_rule(mixing: Mixing, rule: Aggregation) -> Mixing:
    """Refuse a matrix whose rows mean nothing to an aggregation rule.

    Raises:
        ConfigError: if a model keeps a part of its old values, a weight is negative, or the rule's settings
            do not fit the number of clients that contribute to a model.
    """
    if rule.is_mean:
        return mixing
    if mixing.keep is not None:
        what = f"{rule.name!r} makes no sense with an average that keeps a part of the old model"
        raise ConfigError("aggregation.name", what, "it must be 'mean'")
    if (mixing.weights.data < 0).any():
        what = f"{rule.name!r} makes no sense with negative weights"
        raise ConfigError("aggregation.name", what, "it must be 'mean'")
    weights = mixing.weights.tocsr()
    clients = np.bincount(weights.tocoo().coords[0], weights.data != 0, minlength=weights.shape[0])
    for count in np.unique(clients[clients > 0]).astype(np.int64).tolist():
        rule.check(count)
    return mixing


def block_mixings(mixing: Mixing, blocks: Sequence[slice]) -> list[BlockMixing]:
    """The part of A of every block."""
    weights = mixing.weights.tocsc()
    keep = None if mixing.keep is None else mixing.keep.tocsc()
    parts = []
    for block in blocks:
        indices = weights.indices[weights.indptr[block.start] : weights.indptr[block.stop]]
        rows: NDArray[np.int64] = np.unique(indices).astype(np.int64)
        kept = None if keep is None else _dense(keep, rows, block)
        parts.append(BlockMixing(rows, _dense(weights, rows, block), kept))
    return parts


def _dense(matrix: sp.csc_array, rows: NDArray[np.int64], block: slice) -> NDArray[np.float64]:
    """``matrix[rows, block]`` as an array ``(R, B)``; all entries of these columns must be in ``rows``."""
    first, last = matrix.indptr[block.start], matrix.indptr[block.stop]
    columns = np.repeat(
        np.arange(block.stop - block.start), np.diff(matrix.indptr[block.start : block.stop + 1])
    )
    dense = np.zeros((len(rows), block.stop - block.start))
    dense[np.searchsorted(rows, matrix.indices[first:last]), columns] = matrix.data[first:last]
    return dense


def without(
    mixing: Mixing, plan: Plan, failures: Mapping[int, str], local: LocalObjective | None = None
) -> Mixing:
    """A without the columns of the clients that failed; with ``local``, the objective reweights the
    others.
    """
    if not failures:
        return mixing
    failed = np.isin(plan.cohort, list(failures))

    def drop(matrix: sp.csr_array) -> sp.csr_array:
        coo = matrix.tocoo()
        delivered = ~failed[coo.coords[1]]
        entries = coo.data[delivered], (coo.coords[0][delivered], coo.coords[1][delivered])
        return sp.csr_array(entries, shape=matrix.shape)

    keep = None if mixing.keep is None else drop(mixing.keep)
    remaining = replace(mixing, weights=drop(mixing.weights), keep=keep)
    if local is None or keep is None:
        return remaining
    scaled = sp.csr_array(remaining.weights.multiply(scales(remaining, local)[:, None]))
    return replace(remaining, weights=scaled, keep=sp.csr_array(keep + remaining.weights - scaled))


def scales(mixing: Mixing, local: LocalObjective) -> NDArray[np.float64]:
    """The factor of each row of A, without the clients that failed ``(K,)``."""
    factors = np.ones(mixing.weights.shape[0])
    if mixing.keep is None:
        return factors
    for row in np.flatnonzero(np.diff(mixing.weights.indptr)):
        weights, keep = (matrix[[row]].toarray().ravel() for matrix in (mixing.weights, mixing.keep))
        nonzero = weights != 0
        factors[row] = local.rescaled(weights[nonzero], keep[nonzero])
    return factors
