"""What an algorithm may ask of the clients between rounds, answered by the client actors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms.contract import Split
from rayfl.backend import RESULT, Ref, Task
from rayfl.clustering import cosines
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import BLOCK
from rayfl.coresets.clients import client_graph
from rayfl.coresets.graphs import Graph
from rayfl.data import Federation
from rayfl.data.events import Stage
from rayfl.errors import RayflError
from rayfl.evaluation import Transfer
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.servers import testing
from rayfl.servers.models import Servers
from rayfl.servers.rounds import Round
from rayfl.servers.signatures import (
    NoSignature,
    Trainee,
    Wanted,
    check_clients,
    cluster_clients,
    sign_clients,
)
from rayfl.training import Segments

HISTOGRAM = "histogram"
"""The kind of transfer of label histograms; the servers keep them as long as the data are the same."""

_TILE = 128
"""Updates in a block of the cosine matrix."""

Answer = TypeVar("Answer")


class Asking:
    """The :class:`~rayfl.algorithms.contract.Clients` of a run.

    Args:
        servers: the models and the latest updates.
        stages: the data from one event to the next.
        stage: which of them is now.
        seed: the run's seed.
        round: the coming round.
        turn: the work of a round (by its number) without average, for clients that train on.
        account: told what is sent.
        personal: the ranges of the model that are the client's own, if any.
        local: the local objective, which may make a client's model its own.
        tell: told in a line of clients that have no signature, where that is tolerated.
    """

    def __init__(
        self,
        servers: Servers,
        stages: Sequence[Stage],
        stage: int,
        seed: int,
        round: int,
        turn: Callable[[int], Round],
        account: Callable[[Transfer], None],
        personal: Segments = (),
        local: LocalObjective = SGD(),  # noqa: B008 (frozen)
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.servers, self.stages, self.stage = servers, stages, stage
        self.federation = federation = stages[stage].federation
        self.seed, self.round, self.turn, self.account = seed, round, turn, account
        self.backend, self.groups, self.personal = servers.backend, federation.groups, personal
        self.local, self.tell = local, tell

    def losses(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.float64]:
        """Mean loss of every model on a part of each client's data ``(n, K)``."""
        ids = {
            "train": self.federation.train,
            "validation": self.federation.validation,
            "test": self.federation.test,
        }[split]
        return testing.losses(self.servers, clients, ids, "test" if split == "test" else "train")

    def own_losses(self, clients: NDArray[np.int64], models: NDArray[np.int64]) -> NDArray[np.float64]:
        """Mean training loss of each client under the one model that it would start from ``(n,)``."""
        return testing.own_losses(
            self.servers, clients, models, self.federation.train, "train", self.personal, self.local
        )

    def cluster(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64] | None = None,
        known: NDArray[np.int64] | None = None,
        again: bool = False,
        whole: bool = False,
    ) -> Clusters:
        """Cluster clients; labels ``(N,)``, -1 for the others.

        Args:
            clustering: the settings.
            clients: ids, ascending; default: all that are present.
            known: the round in which each sent the signature that the servers have, -1: it sends one now.
            again: whether the clients have the feature map from the time before.
            whole: with the distances and the tree, if the clients are few enough.
        """
        present = np.flatnonzero(self.federation.sizes > 0)

        def ask(who: Wanted) -> tuple[Clusters, list[Transfer]]:
            clusters, transfers = cluster_clients(
                self.backend,
                self.federation,
                clustering,
                self.seed,
                self.round,
                self.servers.block_size(len(who.ids)),
                who=who,
                trained=self._trainee(clustering),
                whole=whole,
                again=again,
            )
            return spread(clusters, who.ids, self.federation.clients), transfers

        return self._answered(ask, self._wanted(present if clients is None else clients, known))

    def distances(
        self, clustering: Clustering, clients: NDArray[np.int64], known: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The clients that have a signature, and the distances of these, condensed."""
        exact = max(clustering.exact_up_to, len(clients))
        clustering = clustering.model_copy(update={"exact_up_to": exact})
        clusters = self.cluster(clustering, clients, known, whole=True)
        assert clusters.distances is not None, f"of at most {BLOCK} clients"
        return np.flatnonzero(clusters.labels >= 0), clusters.distances

    def _wanted(self, ids: NDArray[np.int64], known: NDArray[np.int64] | None) -> Wanted:
        """Signatures of clients: those of now, or of the stages in which they were sent."""
        if known is None:
            known = np.full(len(ids), -1)
        begun = np.array([stage.round for stage in self.stages])
        sends = known < 0
        stages = np.where(sends, self.stage, np.maximum(0, np.searchsorted(begun, known, "right") - 1))
        present = self.federation.sizes[ids] > 0
        if present.all():
            return Wanted(ids, stages, sends)
        # Whoever sent its signature later received those of before; of two absent clients at least one did.
        active = np.array([stage.active[ids] for stage in self.stages])
        when = np.where(sends, self.round, known)
        heard = (when[:, None] > when) | active[stages].T
        return Wanted(ids, stages, sends, present, heard)

    def _answered(self, ask: Callable[[Wanted], tuple[Answer, list[Transfer]]], who: Wanted) -> Answer:
        """An answer of all that have a signature; as many others are left out as may fail.

        Raises:
            RayflError: the first failure, if more do.
        """
        failures: dict[int, RayflError] = {}
        while True:
            try:
                found, transfers = ask(who)
                break
            except NoSignature as error:
                failures |= error.failures
                who = who.without(list(failures))
                if len(failures) > self.servers.tolerate or not len(who.ids):
                    raise failures[min(failures)] from None
        for client in sorted(failures):
            self.tell(f"round {self.round}: {failures[client]}; it is left out of the clustering")
        for transfer in transfers:
            if transfer.bytes:
                self.account(transfer)
        return found

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
        self, clustering: Clustering, clients: NDArray[np.int64], known: NDArray[np.int64] | None = None
    ) -> dict[int, NDArray[np.float32]]:
        """The signatures of those clients that have one; ``known`` as for :meth:`cluster`."""

        def ask(who: Wanted) -> tuple[dict[int, NDArray[np.float32]], list[Transfer]]:
            signatures, transfers = sign_clients(
                self.backend,
                self.federation,
                clustering,
                self.seed,
                self.round,
                self.servers.block_size(len(who.ids)),
                who,
                self._trainee(clustering),
            )
            return dict(zip(who.ids.tolist(), signatures, strict=True)), transfers

        return self._answered(ask, self._wanted(clients, known))

    def without_signature(
        self, clustering: Clustering, clients: NDArray[np.int64], stage: int
    ) -> Mapping[int, RayflError]:
        """Which of some clients will have no signature of their data in a later stage, and why."""
        size, who = self.servers.block_size(max(1, len(clients))), Wanted.of(clients, stage)
        federation = self.stages[stage].federation
        try:
            check_clients(self.backend, federation, clustering, self.seed, self.round, size, who)
        except NoSignature as error:
            return error.failures
        return {}

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
        tasks = [Task.calling(cosines.tile, blocks[i], blocks[j]) for i, j in pairs]
        for done in self.backend.run(tasks):
            rows, columns = (slice(k * _TILE, (k + 1) * _TILE) for k in pairs[done.task])
            tile = self.backend.get(done.refs[RESULT])
            found[rows, columns] = tile
            found[columns, rows] = tile.T
        return np.triu(found) + np.triu(found, 1).T  # a product's two halves may round differently

    def _blocks(self, clients: NDArray[np.int64]) -> list[Ref]:
        """Their latest updates, in blocks of ``_TILE`` rows."""
        blocks = []
        for first in range(0, len(clients), _TILE):
            some = clients[first : first + _TILE].tolist()
            if any(client not in self.servers.updates for client in some):
                raise ValueError("a client that never sent an update has no row")
            blocks.append(self.servers.updates.packed(self.backend, some))
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
        _, _, updates = testing.adapt(self.servers, self.turn(self.round), clients, models)
        sent = 4 * self.servers.spec.P * len(clients)
        self.account(Transfer(self.round, "client_lps", "down", "model", sent))
        self.account(Transfer(self.round, "client_lps", "up", "update", sent))
        return self._sketched([rows for _, rows in updates], size)

    def _sketched(self, blocks: list[Ref], size: int) -> NDArray[np.float32]:
        tasks = [Task.calling(cosines.sketch, rows, size, self.seed) for rows in blocks]
        found: list[NDArray[np.float32]] = [np.empty((0, size), np.float32)] * len(tasks)
        for done in self.backend.run(tasks):
            found[done.task] = self.backend.get(done.refs[RESULT])
        return np.concatenate(found)


def histograms(federation: Federation) -> NDArray[np.float64]:
    """The share of each label in the training data of each client ``(N, classes)``."""
    train, samples = federation.train, federation.samples
    owners = np.repeat(np.arange(len(train)), train.sizes)
    cells = owners * samples.classes + samples.labels("train", train.values)
    counts = np.bincount(cells, minlength=len(train) * samples.classes).reshape(len(train), samples.classes)
    return np.asarray(counts / np.maximum(1, train.sizes)[:, None], np.float64)


def spread(clusters: Clusters, present: NDArray[np.int64], clients: int) -> Clusters:
    """Clusters of some clients as clusters of all N: label -1, and no relatives, for the others."""
    if len(present) == clients:
        return clusters
    labels, graph = np.full(clients, -1, np.int64), clusters.graph
    labels[present] = clusters.labels
    if graph is not None:
        entries = graph.tocoo()
        where = present[entries.coords[0]], present[entries.coords[1]]
        graph = sp.csr_array((entries.data, where), shape=(clients, clients))
    return replace(clusters, labels=labels, graph=graph)
