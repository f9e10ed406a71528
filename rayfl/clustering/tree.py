"""CFL's parameter tree: the models before and after every split, and the updates by which clients were split.

Sattler, Mueller, Samek, *Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints*, 2019, Algorithm 4 and Eq. 47.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering import cosines
from rayfl.clustering.newcomers import Fit

Ask: TypeAlias = Callable[[NDArray[np.intp], NDArray[np.int64]], NDArray[np.float32]]
"""Updates of clients ``(m,)`` from nodes ``(m,)``."""


@dataclass(frozen=True)
class ParameterTree:
    """K nodes, each with a model; at first only the root.

    Attributes:
        parent: parent of each node ``(K,)``, -1 for the root.
        sent: sketches of the updates at the splits ``(R, q)``.
        edge: the child node to which each of these updates went ``(R,)``.
    """

    parent: NDArray[np.int64] = field(default_factory=lambda: np.array([-1]))
    sent: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    edge: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def split(
        self, node: int, halves: Sequence[NDArray[np.float32]]
    ) -> tuple[ParameterTree, tuple[int, int]]:
        """Give a leaf two children; return the tree and their numbers.

        ``halves``: the sketches of the updates of each half ``(m, q)``.
        """
        children = len(self.parent), len(self.parent) + 1
        sent = [self.sent, *halves] if len(self.sent) else [*halves]
        edge = np.repeat(children, [len(half) for half in halves])
        tree = ParameterTree(
            np.append(self.parent, [node, node]), np.concatenate(sent), np.concatenate([self.edge, edge])
        )
        return tree, children

    def path(self, node: int) -> list[int]:
        """The nodes from this one up to the root, both included."""
        nodes = [node]
        while self.parent[nodes[-1]] >= 0:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes

    def down(self, node: int, update: NDArray[np.float32]) -> int:
        """The child whose members include the most similar update (Algorithm 4); ``update`` is a sketch
        ``(q,)``.

        The paper assigns the maxima ``a0`` and ``a1`` to the edges to ``v1`` and ``v2``, but the children are
        ``v0`` and ``v1``. Ties: ``v1``, as in the paper.
        """
        v0, v1 = np.flatnonzero(self.parent == node)
        a0, a1 = (cosines.tile(update[None], self.sent[self.edge == v]).max() for v in (v0, v1))
        return int(v0 if a0 > a1 else v1)

    def walk(self, walkers: int, ask: Ask) -> NDArray[np.int64]:
        """The leaves that clients reach from the root ``(n,)``, one step after the other (Algorithm 4).

        Args:
            walkers: n.
            ask: trains walkers ``(m,)`` from nodes ``(m,)``; returns sketches of their updates ``(m, q)``.
        """
        nodes = np.zeros(walkers, np.int64)
        while len(walking := np.flatnonzero(np.isin(nodes, self.parent))):
            updates = ask(walking, nodes[walking])
            nodes[walking] = [self.down(*step) for step in zip(nodes[walking].tolist(), updates, strict=True)]
        return nodes

    def best_on_the_way(self, leaf: int, losses: NDArray[np.float64]) -> int:
        """The node of least loss ``(K,)`` on the way from the root to a leaf; ties: nearest to the leaf."""
        nodes = self.path(leaf)
        return nodes[int(np.argmin(losses[nodes]))]

    def fit(self, updates: NDArray[np.float32], nodes: NDArray[np.int64]) -> Fit:
        """How well newcomers fit the children that they went to.

        The distance is one minus the cosine to the most similar update of the child; for its members, to the
        most similar update of the other members.

        Args:
            updates: sketches of the newcomers' updates from the parent nodes ``(B, q)``.
            nodes: the children that they went to ``(B,)``, never the root.
        """
        parents = self.parent[nodes]
        children = np.flatnonzero(np.isin(self.parent, parents))
        distances, members = np.full((len(nodes), len(children)), np.inf), []
        for column, child in enumerate(children.tolist()):
            child_updates, comparable = self.sent[self.edge == child], parents == self.parent[child]
            distances[comparable, column] = 1 - cosines.tile(updates[comparable], child_updates).max(axis=1)
            similarities = cosines.tile(child_updates, child_updates) - 2 * np.eye(len(child_updates))
            members.append(1 - similarities.max(axis=1) if len(child_updates) > 1 else np.empty(0))
        return Fit.of("1 - cosine of updates", distances, members, children, nodes)
