"""What an algorithm may ask of the clients between rounds, answered by the client actors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms.contract import Split
from rayfl.clustering import cosines
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.coresets.clients import client_graph
from rayfl.coresets.graphs import Graph
from rayfl.data import Federation, Samples
from rayfl.evaluation import Transfer
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.runtime.backend import Ref, Task
from rayfl.runtime.servers import Round, Servers
from rayfl.runtime.signing import Trainee, cluster_clients, sign_clients
from rayfl.runtime.states import pack_rows
from rayfl.training import Segments

HISTOGRAM = "histogram"
"""The kind of transfer of label histograms; the servers keep them as long as the data are the same."""

_TILE = 128
"""Updates in a block of the cosine matrix."""


class Asking:
    """The :class:`~rayfl.algorithms.contract.Clients` of a run.

    Args:
        servers: the models and the latest updates.
        federation, stage: the data now.
        seed: the run's seed.
        round: the coming round.
        turn: the work of a round (by its number) without average, for clients that train on.
        account: told what is sent.
        personal: the ranges of the model that are the client's own, if any.
        public: the samples from which the servers draw their own; default: the federation's.
        local: the local objective, which may make a client's model its own.
    """

    def __init__(
        self,
        servers: Servers,
        federation: Federation,
        stage: int,
        seed: int,
        round: int,
        turn: Callable[[int], Round],
        account: Callable[[Transfer], None],
        personal: Segments = (),
        public: Samples | None = None,
        local: LocalObjective = SGD(),  # noqa: B008 (frozen)
    ) -> None:
        self.servers, self.federation, self.stage = servers, federation, stage
        self.seed, self.round, self.turn, self.account = seed, round, turn, account
        self.backend, self.groups, self.personal = servers.backend, federation.groups, personal
        self.public, self.local = public, local

    def losses(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.float64]:
        """Mean loss of every model on a part of each client's data ``(n, K)``."""
        ids = {
            "train": self.federation.train,
            "validation": self.federation.validation,
            "test": self.federation.test,
        }[split]
        return self.servers.losses(clients, ids, "test" if split == "test" else "train")

    def own_losses(self, clients: NDArray[np.int64], models: NDArray[np.int64]) -> NDArray[np.float64]:
        """Mean training loss of each client under the one model that it would start from ``(n,)``."""
        return self.servers.own_losses(
            clients, models, self.federation.train, "train", self.personal, self.local
        )

    def cluster(
        self,
        clustering: Clustering,
        senders: NDArray[np.int64] | None = None,
        again: bool = False,
        whole: bool = False,
    ) -> Clusters:
        """Cluster all clients that are there; labels ``(N,)``, -1 for the others.

        Args:
            clustering: the settings.
            senders: those whose signatures the servers do not have yet; default: all.
            again: whether everybody has the feature map from the time before.
            whole: with the distances and the tree, if the clients are few enough.
        """
        present = np.flatnonzero(self.federation.sizes > 0)
        clusters, transfers = cluster_clients(
            self.backend,
            self.federation,
            clustering,
            self.seed,
            self.round,
            self.servers.block_size(len(present)),
            ids=present,
            trained=self._trainee(clustering),
            stage=self.stage,
            whole=whole,
            senders=senders,
            again=again,
            public=self.public,
        )
        for transfer in transfers:
            self.account(transfer)
        return spread(clusters, present, self.federation.clients)

    def relatedness(self) -> Graph:
        """The graph of the clients that are there, each joined with those of like label histograms.

        They send these: a number for each label.
        """
        size = 4 * self.federation.samples.classes * int((self.federation.sizes > 0).sum())
        self.account(Transfer(self.round, "client_lps", "up", HISTOGRAM, size))
        if self.servers.graph is None or self.servers.graph[0] is not self.federation:
            vectors = histograms(self.federation)[self.federation.sizes > 0]
            self.servers.graph = (self.federation, client_graph(vectors))  # once a stage
        return self.servers.graph[1]

    def signatures(
        self, clustering: Clustering, clients: NDArray[np.int64], senders: NDArray[np.int64] | None = None
    ) -> list[NDArray[np.float32]]:
        """The signatures of some clients, of which ``senders`` (default: all) send theirs now."""
        signatures, transfers = sign_clients(
            self.backend,
            self.federation,
            clustering,
            self.seed,
            self.round,
            self.servers.block_size(len(clients)),
            clients,
            self._trainee(clustering),
            self.stage,
            senders,
            self.public,
        )
        for transfer in transfers:
            self.account(transfer)
        return signatures

    def _trainee(self, clustering: Clustering) -> Trainee | None:
        """What clients train for signatures of trained models: w_0, as in round 0.

        So signatures are functions of the data, and those of newcomers compare with those of old clients.
        """
        if not clustering.signature.trained:
            return None
        return Trainee(self.backend.put(self.servers.spec.initial()), self.turn(0).work)

    def cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cosine similarities of the clients' latest updates ``(n, n)``, in tiles on the client actors."""
        known = np.array([c in self.servers.updates for c in clients.tolist()], np.bool_)
        found = np.full((len(clients), len(clients)), np.nan)
        found[np.ix_(known, known)] = self._cosines(clients[known])
        np.fill_diagonal(found, 1.0)
        return found

    def _cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        blocks, found = self._blocks(clients), np.zeros((len(clients), len(clients)))
        pairs = list(itertools.combinations_with_replacement(range(len(blocks)), 2))
        tasks = [Task("apply", (cosines.tile, blocks[i], blocks[j]), 1.0, returns=2) for i, j in pairs]
        for index, (_, ref) in self.backend.run(tasks):
            rows, columns = (slice(k * _TILE, (k + 1) * _TILE) for k in pairs[index])
            tile = self.backend.get(ref)
            found[rows, columns] = tile
            found[columns, rows] = tile.T
        return np.triu(found) + np.triu(found, 1).T  # a product's two halves may round differently

    def _blocks(self, clients: NDArray[np.int64]) -> list[Ref]:
        """Their latest updates, in blocks of ``_TILE`` rows."""
        blocks = []
        for first in range(0, len(clients), _TILE):
            refs, places = self.servers.updates.locate(clients[first : first + _TILE].tolist(), 0)
            if None in places:
                raise ValueError("a client that never sent an update has no row")
            blocks.append(self.backend.call(pack_rows, places, *refs))
        return blocks

    def sketches(self, clients: NDArray[np.int64], size: int) -> NDArray[np.float32]:
        """Sketches of the clients' latest updates ``(n, size)``."""
        return self._sketched(self._blocks(clients), size)

    def updates_from(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], size: int
    ) -> NDArray[np.float32]:
        """Sketches of the updates that clients would make from these models ``(n, size)``.

        Every client downloads its model and sends the update.
        """
        _, _, updates = self.servers.adapt(self.turn(self.round), clients, models)
        sent = 4 * self.servers.spec.P * len(clients)
        self.account(Transfer(self.round, "client_lps", "down", "model", sent))
        self.account(Transfer(self.round, "client_lps", "up", "update", sent))
        return self._sketched([rows for _, rows in updates], size)

    def _sketched(self, blocks: list[Ref], size: int) -> NDArray[np.float32]:
        tasks = [Task("apply", (cosines.sketch, rows, size, self.seed), 1.0, returns=2) for rows in blocks]
        found: list[NDArray[np.float32]] = [np.empty((0, size), np.float32)] * len(tasks)
        for index, (_, ref) in self.backend.run(tasks):
            found[index] = self.backend.get(ref)
        return np.concatenate(found)


def histograms(federation: Federation) -> NDArray[np.float64]:
    """The share of each label in the training data of each client ``(N, classes)``."""
    train, samples = federation.train, federation.samples
    owners = np.repeat(np.arange(len(train)), train.sizes)
    cells = owners * samples.classes + samples.labels("train", train.values)
    counts = np.bincount(cells, minlength=len(train) * samples.classes).reshape(len(train), samples.classes)
    return np.asarray(counts / np.maximum(1, train.sizes)[:, None], np.float64)


def spread(clusters: Clusters, present: NDArray[np.int64], clients: int) -> Clusters:
    """Clusters of those present as clusters of all N: label -1, and no relatives, for the others."""
    if len(present) == clients:
        return clusters
    labels, graph = np.full(clients, -1, np.int64), clusters.graph
    labels[present] = clusters.labels
    if graph is not None:
        entries = graph.tocoo()
        where = present[entries.coords[0]], present[entries.coords[1]]
        graph = sp.csr_array((entries.data, where), shape=(clients, clients))
    return replace(clusters, labels=labels, graph=graph)
