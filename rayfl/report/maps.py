"""Clients as points in the plane; similar clients are near one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import pdist, squareform

from rayfl.angles import ANGLES
from rayfl.clustering.plane import DIGITS, METHODS, MapMethod, classical, largest_axes
from rayfl.report.files import RunFiles, numbers
from rayfl.units import counted

__all__ = [
    "DIGITS",
    "Map",
    "Step",
    "change",
    "classical",
    "map_of",
    "matrix_of",
    "principal",
    "spread",
    "steps_of",
    "when",
    "who",
]

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

MOST_NUMBERS = 120_000
"""The largest amount of data about clients over time on a page: a label counts 1, a changing position 8."""


def principal(rows: ArrayLike) -> Array:
    """The first two principal components ``(N, 2)`` of rows ``(N, D)``; equal to classical scaling of
    Euclidean distances.
    """
    matrix = np.asarray(rows, np.float64)
    centred = matrix - matrix.mean(axis=0)
    return np.asarray(centred @ largest_axes(*np.linalg.eigh(centred.T @ centred)))


def spread(places: Array) -> Array:
    """Positions between -1 and 1, ``(N, 2)``; clients at the same position are spread around it in a
    spiral.
    """
    placed = np.isfinite(places).all(axis=1)
    positions = np.full(places.shape, np.nan)
    if not placed.any():
        return positions
    centred = places[placed] - places[placed].mean(axis=0)
    extent = float(np.abs(centred).max()) or 1.0
    centred = centred / extent
    _, which, counts = np.unique(np.round(centred, 2), axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(which.ravel(), kind="stable")
    rank = np.empty(len(which), np.int64)
    rank[order] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    radius = np.sqrt(rank) * min(0.03, 0.5 / np.sqrt(len(which)))
    angle = rank * np.pi * (3 - np.sqrt(5))  # the golden angle fills a disc evenly
    positions[placed] = centred + radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
    return positions


def aligned(places: Array, target: Array) -> Array:
    """Rotate, mirror, shift and scale positions ``(N, 2)`` to be as close as possible to others of the same
    clients ``(N, 2)``.
    """
    both = np.isfinite(places).all(axis=1) & np.isfinite(target).all(axis=1)
    if both.sum() < 2:
        return places
    a, b = places[both], target[both]
    u, sizes, v = np.linalg.svd((a - a.mean(axis=0)).T @ (b - b.mean(axis=0)))
    scale = sizes.sum() / (((a - a.mean(axis=0)) ** 2).sum() or 1.0)
    return np.asarray((places - a.mean(axis=0)) @ u @ v * scale + b.mean(axis=0))


def change(before: Labels, after: Labels) -> str:
    """What happened to the clusters, as text; empty if nothing. -1 means a client without a cluster."""
    both = (before >= 0) & (after >= 0)
    arrived, left = int(((before < 0) & (after >= 0)).sum()), int(((before >= 0) & (after < 0)).sum())
    words = [f"{arrived:,} joined"] * bool(arrived) + [f"{left:,} left"] * bool(left)
    if both.any():
        old, i = np.unique(before[both], return_inverse=True)
        new, j = np.unique(after[both], return_inverse=True)
        shared = np.zeros((len(old), len(new)), np.int64)
        np.add.at(shared, (i, j), 1)
        heir, parent = shared.argmax(axis=1), shared.argmax(axis=0)
        merged = len(old) - len(np.unique(heir))
        split = len(new) - len(np.unique(parent))
        unmoved = shared[linear_sum_assignment(-shared)].sum()
        words += [f"{merged} merged"] * bool(merged) + [f"{split} split off"] * bool(split)
        moved = int(shared.sum() - unmoved)
        words += [f"{counted(moved, 'client')} moved"] * bool(moved)
    return ", ".join(words)


@dataclass(frozen=True)
class Step:
    """A clustering in time: when, as text, and the labels of all clients ``(N,)``."""

    when: str
    labels: Labels
    places: Array | None = None
    placed_by: MapMethod = "mds"


def steps_of(run: RunFiles) -> list[Step]:
    """The clusterings of a run that differ from the one before or have positions (evenly spaced ones if there
    are many); if there are none, the clusters at the end. Absent clients have the label -1.
    """
    count = len(run.clients) or max((len(e.get("labels") or ()) for e in run.timeline), default=0)
    steps: list[Step] = []
    for entry in run.timeline:
        labels = entry.get("labels")
        if not isinstance(labels, list) or len(labels) != count:
            continue
        places = _places(entry.get("map"), count)
        method: MapMethod = "umap" if places is not None and entry["map"].get("by") == "umap" else "mds"
        clusters = np.asarray(labels, np.int64)
        if count == len(run.clients):
            clusters = np.where(run.absent_at(entry), -1, clusters)
        step = Step(when(entry) + (f" ({who(entry)})" if who(entry) else ""), clusters, places, method)
        if not steps or places is not None or not np.array_equal(steps[-1].labels, step.labels):
            steps.append(step)
    last = numbers(run.clients, "cluster")
    if not steps and last is not None:
        clusters = np.where(run.absent_at_end | np.isnan(last), -1, last).astype(np.int64)
        steps.append(Step("at the end", clusters))
    moving = sum(step.places is not None for step in steps) > 1
    moving = moving or any(((step.labels < 0) != (steps[0].labels < 0)).any() for step in steps)
    most = max(2, MOST_NUMBERS // max(1, count * (9 if moving else 1)))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(np.intp)) if steps else ()
    return [steps[i] for i in chosen]


def _places(saved_map: Any, count: int) -> Array | None:
    if (
        not isinstance(saved_map, dict)
        or len(saved_map.get("x", ())) != count
        or len(saved_map.get("y", ())) != count
    ):
        return None
    return np.array([saved_map["x"], saved_map["y"]], dtype=np.float64).T


def when(entry: Mapping[str, Any]) -> str:
    """``before training``, ``before round 3`` or ``after round 3``, counted from 1."""
    round = entry.get("round")
    if not isinstance(round, int) or round < 0 or (round == 0 and entry.get("when") == "before"):
        return "before training"
    return f"{entry.get('when', 'round')} {'round ' if 'when' in entry else ''}{round + 1}"


def who(entry: Mapping[str, Any]) -> str:
    """Which clients an entry of the timeline is about, if not all: ``5 newcomers``."""
    joined, returned = (len(entry.get(name) or ()) for name in ("newcomers", "returned"))
    words = [counted(joined, "newcomer")] * bool(joined) + [f"{returned:,} returned"] * bool(returned)
    return ", ".join(words)


@dataclass(frozen=True)
class Map:
    """Positions of clients ``(T, N, 2)``, with T = 1 if they do not change, and what makes clients close."""

    places: Array
    meaning: str


def map_of(run: RunFiles, steps: Sequence[Step]) -> Map | None:
    """Positions of the clients, from the best information that the run has kept.

    In this order: the distances between their signatures; their shares of labels; the clusters to which they
    have belonged. None if all clients would have the same position.
    """
    if any(step.places is not None for step in steps):
        positions: list[Array] = []
        latest, method = next((step.places, step.placed_by) for step in steps if step.places is not None)
        for step in steps:
            latest = latest if step.places is None else aligned(step.places, latest)
            positions.append(latest)
        still = all(places is positions[0] for places in positions)
        all_places = np.array([spread(places) for places in (positions[:1] if still else positions)])
        return Map(all_places, f"distances between signatures, by {METHODS[method]}")
    shares = _label_shares(run)
    if shares is not None:
        return Map(
            spread(principal(np.sqrt(shares)))[None],
            "shares of labels among a client's training samples (square roots, principal components)",
        )
    places = together([step.labels for step in steps])
    what = "clusters over time: clients that have always been in the same one lie around the same point"
    return None if places is None else Map(places[None], what)


@dataclass(frozen=True)
class Matrix:
    """Distances ``(n, n)`` between some clients ``(n,)``, and what they are."""

    clients: list[int]
    distances: Array
    meaning: str


def matrix_of(run: RunFiles) -> Matrix | None:
    """The distances that a run has kept of its latest clustering by signatures; None if there are none."""
    for entry in reversed(run.timeline):
        excerpt = entry.get("excerpt")
        if not isinstance(excerpt, dict):
            continue
        clients, distances = excerpt.get("clients") or [], excerpt.get("distances") or []
        valid = all(isinstance(i, int) and 0 <= i < len(run.clients) for i in clients)
        if not valid or len(clients) < 2 or len(distances) != len(clients) * (len(clients) - 1) // 2:
            return None
        proximity = run.setting("clustering.proximity")
        meaning = RELATED if excerpt.get("related") else between_signatures(proximity)
        return Matrix(clients, squareform(np.asarray(distances, np.float64)), f"{meaning}, {when(entry)}")
    return None


RELATED = "being related (0) or not (1)"
"""What 0 and 1 mean in a matrix of a graph."""


def between_signatures(proximity: str | None) -> str:
    """What distances are, with their unit: ``distance between signatures (principal_angle, in degrees)``."""
    unit = ", in degrees" if proximity in ANGLES else ""
    return "distance between signatures" + (f" ({proximity}{unit})" if proximity else "")


def together(labels: Sequence[Labels]) -> Array | None:
    """Positions of clients; clients that share a cluster in more of the clusterings are closer.

    None if all clients always share a cluster, or if there are too many distinct histories.
    """
    if not labels or not len(labels[0]):
        return None
    kinds, which = np.unique(np.array(labels).T, axis=0, return_inverse=True)
    if not 1 < len(kinds) <= 1000:
        return None
    return spread(classical(squareform(pdist(kinds, "hamming")))[which.ravel()])


def _label_shares(run: RunFiles) -> Array | None:
    """The share of each label among a client's training samples ``(N, C)``."""
    names = [name for name in run.labels.columns if name.startswith("class_")]
    if len(run.labels) != len(run.clients) or len(names) < 2:
        return None
    counts = run.labels[names].to_numpy(np.float64)
    sizes = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, sizes, out=np.zeros_like(counts), where=sizes > 0)
    return shares if np.ptp(shares, axis=0).max() > 0 else None
