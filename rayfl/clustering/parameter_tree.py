"""CFL's parameter tree: what every split left behind, and how a newcomer finds its cluster.

Sattler et al., section V-C. A node is a cluster: its members ``c_v`` and its stationary parameters
``theta*_v``. The edge from a node to a child keeps the updates that the child's members sent just before the
split, ``Delta_e`` (Eq. 47). The tree is a value: each change makes a new one, which shares the arrays with
the old.

The cached updates are the one part that grows with the clients, ``m P`` numbers a level. They may as well be
sketches (:func:`rayfl.clustering.cosines.sketch`) or permuted
(:mod:`rayfl.clustering.permutation`), as long as a newcomer's update is treated alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering import cosines
from rayfl.errors import DataError

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Node:
    """A cluster that existed at some time.

    Attributes:
        members: ids of its clients ``(n,)``, rising.
        parameters: ``theta*_v`` ``(P,)``; of a leaf, its model so far.
        parent: index of the node that was split; -1 for the root.
        children: indices of the halves ``(v_0, v_1)``; empty for a leaf.
        updates: ``Delta_e`` of the edge from the parent, ``(n, q)``: a row for each client that was a member
            at the split, in the order of their ids; ``(0, 0)`` for the root.
    """

    members: Ids
    parameters: Rows
    parent: int = -1
    children: tuple[int, ...] = ()
    updates: Rows = field(default_factory=lambda: np.empty((0, 0), np.float32))


@dataclass(frozen=True, eq=False)
class ParameterTree:
    """The clusters of a run of CFL; ``nodes[0]`` is the root, children come after their parents."""

    nodes: tuple[Node, ...]

    @classmethod
    def start(cls, members: Iterable[int], parameters: Rows) -> ParameterTree:
        """Before any split: all clients at the root."""
        return cls((Node(_ids(members), _fixed(parameters)),))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The clusters of now, in rising order."""
        return tuple(v for v, node in enumerate(self.nodes) if not node.children)

    def leaf_of(self, client: int) -> int:
        """The cluster that a client is in.

        Raises:
            KeyError: if it is in none.
        """
        for leaf in self.leaves:
            if client in self.nodes[leaf].members:
                return leaf
        raise KeyError(client)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to ``node``."""
        path = [node]
        while self.nodes[path[-1]].parent >= 0:
            path.append(self.nodes[path[-1]].parent)
        return tuple(reversed(path))

    def with_parameters(self, node: int, parameters: Rows) -> ParameterTree:
        """The tree with another model at a node."""
        return self._with({node: replace(self.nodes[node], parameters=_fixed(parameters))})

    def with_member(self, leaf: int, client: int) -> ParameterTree:
        """The tree after a newcomer has joined a leaf, and with it all clusters that the leaf came from.

        Raises:
            ValueError: if ``leaf`` is no leaf or the client is in the tree already.
        """
        if self.nodes[leaf].children or client in self.nodes[0].members:
            raise ValueError(
                f"client {client} cannot join node {leaf}: it is no leaf, or the client is a member"
            )
        grown = {v: self.nodes[v] for v in self.path(leaf)}
        return self._with(
            {v: replace(node, members=_ids([*node.members.tolist(), client])) for v, node in grown.items()}
        )

    def split(
        self,
        leaf: int,
        halves: tuple[Sequence[int] | Ids, Sequence[int] | Ids],
        updates: tuple[Rows, Rows],
        parameters: Rows,
    ) -> ParameterTree:
        """The tree after a leaf was split; both halves start from its stationary parameters.

        Args:
            leaf: which.
            halves: ids of the two halves, in rising order.
            updates: the last updates of the members of each ``(n_0, q)``, ``(n_1, q)``, in that order.
            parameters: ``theta*`` ``(P,)``, from which these updates were made.

        Raises:
            ValueError: if it is no leaf, the halves are not its members, or updates are missing.
        """
        node, theta = self.nodes[leaf], _fixed(parameters)
        members = [_ids(half) for half in halves]
        if node.children or not np.array_equal(np.sort(np.concatenate(members)), node.members):
            raise ValueError(f"node {leaf} has children already, or the halves are not its members")
        if not all(len(half) for half in members) or any(
            not np.array_equal(ids, half) or len(rows) != len(half)
            for ids, half, rows in zip(members, halves, updates, strict=True)
        ):
            raise ValueError("each half needs members in rising order and an update of every one")
        first = len(self.nodes)
        children = tuple(
            Node(half, theta, leaf, (), _fixed(rows)) for half, rows in zip(members, updates, strict=True)
        )
        parent = replace(node, parameters=theta, children=(first, first + 1))
        return ParameterTree((*self._with({leaf: parent}).nodes, *children))

    def to_arrays(self) -> tuple[dict[str, NDArray[np.generic]], str]:
        """The tree as arrays by name, and its shape as JSON: for a checkpoint."""
        arrays: dict[str, NDArray[np.generic]] = {
            "parameters": np.stack([node.parameters for node in self.nodes])
        }
        for v, node in enumerate(self.nodes):
            arrays[f"members.{v}"], arrays[f"updates.{v}"] = node.members, node.updates
        shape = [{"parent": node.parent, "children": list(node.children)} for node in self.nodes]
        return arrays, json.dumps({"nodes": shape})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], shape: str) -> ParameterTree:
        """The inverse of :meth:`to_arrays`, bit for bit.

        Raises:
            DataError: if an array is missing.
        """
        try:
            return cls(
                tuple(
                    Node(
                        _ids(np.asarray(arrays[f"members.{v}"], np.int64).tolist()),
                        _fixed(np.asarray(arrays["parameters"][v], np.float32)),
                        int(node["parent"]),
                        tuple(int(child) for child in node["children"]),
                        _fixed(np.asarray(arrays[f"updates.{v}"], np.float32)),
                    )
                    for v, node in enumerate(json.loads(shape)["nodes"])
                )
            )
        except (KeyError, IndexError) as error:
            raise DataError(f"the parameter tree is incomplete: {error} is missing") from None

    def _with(self, changed: Mapping[int, Node]) -> ParameterTree:
        return ParameterTree(tuple(changed.get(v, node) for v, node in enumerate(self.nodes)))


@dataclass(frozen=True, eq=False)
class Walk:
    """A newcomer's way from the root to a leaf.

    Attributes:
        path: the nodes that it passed.
        similarities: at each node but the last, the greatest similarity to an update on the edges to
            ``(v_0, v_1)``.
    """

    path: tuple[int, ...]
    similarities: tuple[tuple[float, float], ...]

    @property
    def leaf(self) -> int:
        """Its cluster."""
        return self.path[-1]


def walk(tree: ParameterTree, train: Callable[[Rows], Rows]) -> Walk:
    """Algorithm 4: from the root to a leaf, always to the child that holds the single most similar update.

    As printed the algorithm compares ``a_0`` with the updates of ``v_1``, and ``a_1`` with those of ``v_2``,
    which is not there; here ``a_0`` belongs to ``v_0``. Of equal similarities ``v_1`` is taken, as printed.

    Args:
        tree: whose leaf is sought.
        train: gives the newcomer's update ``(q,)`` after training from parameters ``(P,)``, as it would have
            sent it (permuted or sketched if the cached ones are).
    """
    path, similarities = [0], []
    while children := tree.nodes[path[-1]].children:
        update = np.asarray(train(tree.nodes[path[-1]].parameters))[None, :]
        a0, a1 = (float(cosines.tile(update, tree.nodes[child].updates).max()) for child in children)
        similarities.append((a0, a1))
        path.append(children[0] if a0 > a1 else children[1])
    return Walk(tuple(path), tuple(similarities))


def best_model(tree: ParameterTree, node: int, score: Callable[[Rows], float]) -> int:
    """Of the models on the way from the root to ``node``, the one that a client should use.

    A split that made things worse is thereby undone for this client: its parent's model is still there
    (section II-A). Of equal scores the most specialised model is taken.

    Args:
        tree: the models.
        node: the client's cluster, usually a leaf.
        score: of parameters ``(P,)``, larger is better, e.g. accuracy on the client's validation data.

    Returns:
        The index of the node.
    """
    path = tree.path(node)
    scores = [score(tree.nodes[v].parameters) for v in path]
    return path[max(range(len(path)), key=lambda depth: (scores[depth], depth))]


def _ids(members: Iterable[int] | Ids) -> Ids:
    ids = np.sort(np.asarray(list(members), np.int64))
    ids.flags.writeable = False
    return ids


def _fixed(values: Rows) -> Rows:
    """A view that cannot be written through."""
    view = np.asarray(values, np.float32).view()
    view.flags.writeable = False
    return view
