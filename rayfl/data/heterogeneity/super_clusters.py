"""Super-clusters of classes: which classes of a dataset have similar data (thesis 5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.angles import ANGLES
from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import matrix, refuse_texts
from rayfl.errors import ConfigError, DataError
from rayfl.linalg import leading_eigenpairs, one_thread

Proximity = Literal["vector_angle_min", "principal_angle", "vector_angle_sum"]
Linkage = Literal["average", "complete", "single"]
Array = NDArray[np.float64]

_RANK_TOLERANCE = 1e-10
"""A direction belongs to a class if its squared singular value exceeds this share of the largest."""


@dataclass(frozen=True)
class SuperClusters:
    """Groups of classes.

    Attributes:
        clusters: the classes of each super-cluster, ascending; super-clusters are sorted by their smallest
            class.
        classes: the classes that have samples, ascending ``(C',)``; the others belong to no super-cluster.
        angles: between these classes, in degrees ``(C', C')``.
        linkage: SciPy's linkage matrix of these angles ``(C' - 1, 4)``.
    """

    clusters: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...]
    angles: Array
    linkage: Array


def class_angles(
    samples: Samples, p: int = 3, proximity: Proximity = "vector_angle_min", per_class: int | None = None
) -> tuple[tuple[int, ...], Array]:
    """The angles between the classes of a dataset.

    The columns of ``Q_c`` (features x samples) are the training samples of class c, not centred; ``U_c`` are
    its first p left singular vectors. Classes are compared like clients in PACFL (Eq. 5.1 is
    ``principal_angle``, Eq. 5.2 ``vector_angle_sum``; the thesis' figures show ``vector_angle_min``).

    Args:
        samples: the dataset.
        p: number of singular vectors per class.
        proximity: a name of :data:`rayfl.angles.ANGLES`.
        per_class: use at most this many samples of a class, evenly spaced in the dataset; None: all.

    Returns:
        The classes that have samples, and the angles between them ``(C', C')``, degrees, diagonal 0.

    Raises:
        DataError: if the samples are texts, or all samples of a class are zero.
    """
    refuse_texts(samples, f"the angle between classes ({proximity})")
    present = np.unique(samples.y_train).tolist()
    bases = []
    for label in present:
        members = np.flatnonzero(samples.y_train == label)
        if per_class is not None and len(members) > per_class:
            members = members[np.linspace(0, len(members) - 1, per_class).astype(np.intp)]
        x = matrix(samples.x_train[members]).astype(np.float64)
        if not x.any():
            raise DataError(f"super-clusters: all samples of class {label} are zero and span no subspace")
        bases.append(leading_eigenpairs(x, p, _RANK_TOLERANCE)[1])
    angles = np.zeros((len(present), len(present)))
    with one_thread():
        for i, j in zip(*np.triu_indices(len(present), 1), strict=True):
            angles[i, j] = angles[j, i] = ANGLES[proximity](bases[i].T @ bases[j], p)
    return tuple(present), angles


def class_super_clusters(
    samples: Samples,
    p: int = 3,
    proximity: Proximity = "vector_angle_min",
    linkage: Linkage = "average",
    n: int | None = None,
    threshold: float | None = None,
    per_class: int | None = None,
) -> SuperClusters:
    """Group the classes of a dataset by hierarchical clustering of the angles between them.

    Args:
        samples, p, proximity, per_class: as for :func:`class_angles`.
        linkage: of the hierarchical clustering.
        n: number of super-clusters.
        threshold: instead of ``n``, merge up to this angle in degrees; a smaller angle gives more
            super-clusters. With neither, the tree is cut where the height of the next merge, divided by that
            of the last one made, is largest (into at least two super-clusters).

    Raises:
        ConfigError: if n and threshold are both given, or n exceeds the number of classes.
        DataError: as :func:`class_angles`.
    """
    if n is not None and threshold is not None:
        raise ConfigError("super-clusters", "both a number and a threshold are given", "give one of them")
    present, angles = class_angles(samples, p, proximity, per_class)
    if n is not None and not 1 <= n <= len(present):
        raise ConfigError(
            "super-clusters", f"{n} super-clusters of {len(present)} classes", f"use 1 to {len(present)}"
        )
    if len(present) == 1:
        return SuperClusters((present,), present, angles, np.empty((0, 4)))
    from scipy.cluster.hierarchy import cut_tree, fcluster  # deferred: client actors do not need it
    from scipy.cluster.hierarchy import linkage as link
    from scipy.spatial.distance import squareform

    tree = np.asarray(link(squareform(angles), linkage), np.float64)
    if threshold is not None:
        labels = fcluster(tree, threshold, "distance").tolist()
    else:
        count = largest_gap(tree) if n is None else n
        labels = cut_tree(tree, [count]).ravel().tolist()
    clusters = {
        tuple(c for c, assigned in zip(present, labels, strict=True) if assigned == label)
        for label in set(labels)
    }
    return SuperClusters(tuple(sorted(clusters)), present, angles, tree)


def largest_gap(tree: Array) -> int:
    """The number of clusters (at least 2) at which the ratio of the next merge height to the last one is
    largest; ``tree`` is SciPy's linkage matrix ``(C - 1, 4)``.
    """
    heights = tree[:, 2]
    clusters = np.arange(2, len(heights) + 1)
    if len(clusters) == 0:
        return 2
    last_heights, next_heights = heights[len(heights) - clusters], heights[len(heights) - clusters + 1]
    return int(
        clusters[np.argmax(next_heights / np.maximum(last_heights, 1e-9 * max(float(heights[-1]), 1e-300)))]
    )
