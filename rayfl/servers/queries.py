"""The queries that an algorithm may make to clients between rounds, answered by the client actors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import Served, ServerState, Setup
from rayfl.algorithms.contract import Split
from rayfl.backend import RESULT, Key, Ref, Task
from rayfl.clients.jobs import RELATIONS, SIGNATURES, SignatureJob
from rayfl.clustering import cosines
from rayfl.clustering.cluster import Clusters, refuse
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import BLOCK, VECTOR_DISTANCES
from rayfl.config import Config
from rayfl.coresets.clients import client_graph
from rayfl.coresets.graphs import Graph
from rayfl.data import Federation, Ragged, Samples
from rayfl.data.base import Part, called
from rayfl.data.events import Stage
from rayfl.errors import DataError, RayflError
from rayfl.evaluation import Transfer
from rayfl.random import generator, key
from rayfl.servers import hooks, testing
from rayfl.servers.building import setup_of
from rayfl.servers.models import Servers
from rayfl.servers.rounds import Round
from rayfl.servers.signatures import (
    Grouping,
    SignatureRequest,
    Signatures,
    cluster_blocks,
    cluster_relations,
)
from rayfl.signatures.features.base import Fitted
from rayfl.units import counted

HISTOGRAM = "histogram"
"""The kind of transfer of label histograms; the servers keep them as long as the data do not change."""

_TILE = 128
"""Updates in a block of the cosine matrix."""


@dataclass(frozen=True)
class ClientQueries:
    """Implements :class:`~rayfl.algorithms.contract.Clients`: for a state of a run, for newcomers after a
    run, and for clustering without training.

    Attributes:
        config: the run's config; its algorithm specifies how clients train if a query needs training.
        servers: the models and the clients' latest updates.
        stages: the clients' data, one stage per event, up to now.
        state: of the servers; its round is the next one.
        account: called with each transfer, for the ledger.
        tell: called with a line about clients without a signature, if they are tolerated.
    """

    config: Config
    servers: Servers
    stages: Sequence[Stage]
    state: ServerState
    account: Callable[[Transfer], None]
    tell: Callable[[str], None] = lambda text: None

    @property
    def federation(self) -> Federation:
        """The clients' data as they are now."""
        return self.stages[-1].federation

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """The planted group of each client ``(N,)``, if known."""
        return self.federation.groups

    @cached_property
    def _setup(self) -> Setup:
        return setup_of(self.config, self.federation, self.servers.spec, self.servers.edges)

    def losses(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.float64]:
        """Mean loss of every model on a part of each client's data ``(n, K)``."""
        return testing.losses(self.servers, clients, *self._split_samples(split))

    def samples_by_model(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.int64]:
        """For each client and model, how many samples in a split the model fits best ``(n, K)``.

        Each client downloads all models and sends K numbers.
        """
        counts = testing.samples_by_model(self.servers, clients, *self._split_samples(split))
        down, round = 4 * self.servers.spec.P * counts.size, self.state.round
        self.account(Transfer(round, "client_lps", "down", "model", down))
        self.account(Transfer(round, "client_lps", "up", "report", 4 * counts.size))
        return counts

    def _split_samples(self, split: Split) -> tuple[Ragged, Part]:
        """The samples of all clients in a split, and the part of the data that contains them."""
        ids = {
            "train": self.federation.train,
            "validation": self.federation.validation,
            "test": self.federation.test,
        }[split]
        return ids, "test" if split == "test" else "train"

    def local_losses(self, clients: NDArray[np.int64], models: Served) -> NDArray[np.float64]:
        """Mean training loss of each client under its model, with the layers that it keeps ``(n,)``."""
        personal = hooks.work(self.config.algorithm, self._setup, self.state).personal
        train = self.federation.train
        return testing.local_losses(
            self.servers, clients, models, train, "train", personal, self.config.local
        )

    def cluster(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64] | None = None,
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
        keep_distances: bool = False,
    ) -> Clusters:
        """Cluster clients; labels ``(N,)``, -1 for the others.

        Args:
            clustering, clients, known, has_feature_map: as in the protocol.
            keep_distances: also return the distances and the tree, if there are few enough clients.

        Raises:
            RayflError: before any signature is computed, if there are too many clients (see
                :func:`rayfl.clustering.cluster.refuse`); or if more clients have no signature than may fail.
        """
        federation, backend = self.federation, self.servers.backend
        present = np.flatnonzero(federation.sizes > 0)
        request = self._request(clustering, present if clients is None else clients, known, has_feature_map)
        refuse(clustering, len(request.clients))

        def grouping(request: SignatureRequest) -> Grouping:
            ids, seed = request.clients, self.config.seed
            groups = None if federation.groups is None else federation.groups[ids]
            named = ids if federation.names is None else federation.names[ids]
            return Grouping(clustering, named, groups, seed, keep_distances, map=self.config.output.map)

        if not clustering.needs_signatures:
            task = cluster_blocks(backend, grouping(request), (), 1)
            return backend.get(task).among(request.clients, federation.clients)  # type: ignore[no-any-return]
        signatures = self._signatures(request)
        request, exchanged = signatures.request, clustering.signature.needs_exchange
        if exchanged:
            relations = self._relations(signatures)
            task = cluster_relations(backend, grouping(request), request.received, relations)
        else:
            task = cluster_blocks(
                backend, grouping(request), signatures.refs, len(signatures.jobs[0].clients)
            )
        clusters: Clusters = backend.get(task)
        self._account_signatures(signatures, exchanged)
        return clusters.among(request.clients, federation.clients)

    def distances(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64],
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The clients that have a signature ``(n,)``, and their distances in condensed form ``(n (n - 1) /
        2,)``.
        """
        exact = max(clustering.exact_up_to, len(clients))
        clustering = clustering.model_copy(update={"exact_up_to": exact})
        clusters = self.cluster(clustering, clients, known, has_feature_map, keep_distances=True)
        assert clusters.distances is not None, f"of at most {BLOCK} clients"
        return np.flatnonzero(clusters.labels >= 0), clusters.distances

    def signatures(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> dict[int, NDArray[np.float32]]:
        """The signatures of those ``clients`` ``(n,)`` that have one; the rest as for :meth:`cluster`."""
        answer = self._signatures(self._request(clustering, clients, known, has_feature_map))
        blocks = self.servers.backend.get(list(answer.refs))
        self._account_signatures(answer, exchanged=False)
        ids = answer.request.clients.tolist()
        return dict(zip(ids, itertools.chain.from_iterable(blocks), strict=True))

    def missing_signatures(
        self, clustering: Clustering, clients: NDArray[np.int64]
    ) -> Mapping[int, RayflError]:
        """Those ``clients`` ``(n,)`` whose data give no signature, and why; nothing is sent."""
        return self._compute_signatures(self._request(clustering, clients)).failures if len(clients) else {}

    def _request(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> SignatureRequest:
        """A request for signatures; those sent earlier (``known``) describe the data of their stage."""
        known = np.full(len(clients), -1) if known is None else known
        stage_starts = np.array([stage.round for stage in self.stages])
        sends, now = known < 0, len(self.stages) - 1
        stages = np.where(sends, now, np.maximum(0, np.searchsorted(stage_starts, known, "right") - 1))
        present, received = self.federation.sizes[clients] > 0, None
        if clustering.signature.needs_exchange and not present.all():
            # A client that sent its signature later had received the earlier ones; so of two absent clients,
            # at least one has the signature of the other.
            active = np.array([stage.active[clients] for stage in self.stages])
            sent_at = np.where(sends, self.state.round, known)
            received = (sent_at[:, None] > sent_at) | active[stages].T
        has_map = np.array(np.broadcast_to(has_feature_map, len(clients)), np.bool_)
        return SignatureRequest(clustering, clients, stages, sends, present, has_map, received)

    def _signatures(self, request: SignatureRequest) -> Signatures:
        """The signatures of all clients that have one; clients without one are left out.

        Raises:
            RayflError: the first failure, if more clients fail than may, or all do.
        """
        failures: dict[int, RayflError] = {}
        while True:
            answer = self._compute_signatures(request)
            if not answer.failures:
                break
            failures |= answer.failures
            request = request.without(failures)
            if len(failures) > self.servers.tolerate or not len(request.clients):
                raise failures[min(failures)]
        for client in sorted(failures):
            self.tell(f"round {self.state.round + 1}: {failures[client]}; it is left out of the clustering")
        return answer

    def _compute_signatures(self, request: SignatureRequest) -> Signatures:
        """Have the clients compute their signatures, one block of clients per task."""
        clustering, seed, backend = request.clustering, self.config.seed, self.servers.backend
        signature, fitted = clustering.signature, self._feature_map(clustering)
        objects: dict[Key, Ref] = {}
        work = None
        if signature.trained:
            # Trained from w_0 as in round 0, they depend only on the data, so new and old ones can be
            # compared.
            report = backend.put(signature.report().prepare(self.federation.samples, seed))
            model, work = backend.put(self.servers.spec.initial()), self._local_round(0).work
            objects = {("report", "signature"): report, ("model", 0): model}
        size = self.servers.blocks.size(len(request.clients))
        blocks = [slice(first, first + size) for first in range(0, len(request.clients), size)]
        jobs = [
            SignatureJob(
                request.clients[block],
                signature,
                fitted,
                seed,
                request.stages[block],
                first=block.start,
                work=work,
                order=self.config.order,
            )
            for block in blocks
        ]
        tasks = [Task("signatures", job, objects, (SIGNATURES,), self._cost(job)) for job in jobs]
        blocks_done = backend.run_in_order(tasks)
        floats = np.concatenate([done.report.floats for done in blocks_done])
        failures = {c: error for done in blocks_done for c, error in done.report.failures.items()}
        if clustering.measure in VECTOR_DISTANCES and not signature.padded:
            self._check_lengths(signature.name, np.setdiff1d(request.clients, [*failures]), floats)
        refs = [done.refs[SIGNATURES] for done in blocks_done]
        return Signatures(request, jobs, refs, floats, fitted.floats, failures)

    def _check_lengths(self, name: str, clients: NDArray[np.int64], floats: NDArray[np.int64]) -> None:
        """Refuse signatures of different lengths, whose distances would tell little more than the lengths.

        Raises:
            DataError
        """
        other = np.flatnonzero(floats != floats[:1])
        if len(other):
            first, second = (called(self.federation.names, clients[i]) for i in (0, other[0]))
            raise DataError(
                f"{name}.compute: the signature of client {first} has {counted(floats[0], 'number')}, that "
                f"of client {second} has {floats[other[0]]:,}; all must have equally many"
            )

    def _relations(self, signatures: Signatures) -> list[Ref]:
        """The second step of an exchange: every client receives all signatures and returns a row."""
        all_signatures: dict[Key, Ref] = {
            ("signatures", block): ref for block, ref in enumerate(signatures.refs)
        }
        tasks = [
            Task("relations", job, all_signatures, (RELATIONS,), self._cost(job)) for job in signatures.jobs
        ]
        return [done.refs[RELATIONS] for done in self.servers.backend.run_in_order(tasks)]

    def _cost(self, job: SignatureJob) -> float:
        return float(self.federation.sizes[job.clients].sum())

    def _feature_map(self, clustering: Clustering) -> Fitted:
        """The feature map that the server fits to its own samples and sends to the clients."""
        seed = self.config.seed
        sample = public_sample(self.federation.samples, clustering.features.public_samples, seed)
        return clustering.features.fit(sample, key(seed, "features"))

    def _account_signatures(self, signatures: Signatures, exchanged: bool) -> None:
        for transfer in signatures.transfers(self.state.round, exchanged):
            self.account(transfer)

    def _local_round(self, number: int) -> Round:
        """A round without averaging, with the local work of round ``number`` (at most the last round)."""
        state = replace(self.state, round=min(number, self.config.rounds - 1))
        work = hooks.work(self.config.algorithm, self._setup, state)
        return Round.without_clients(work, number, len(self.stages) - 1, self.config.order)

    def relatedness(self) -> Graph:
        """The graph of the present clients, in which clients with similar label histograms are neighbours.

        Clients send their histograms: one number per label.
        """
        size = 4 * self.federation.samples.classes * int((self.federation.sizes > 0).sum())
        self.account(Transfer(self.state.round, "client_lps", "up", HISTOGRAM, size))
        if self.servers.graph is None or self.servers.graph[0] is not self.federation:
            vectors = histograms(self.federation)[self.federation.sizes > 0]
            self.servers.graph = (self.federation, client_graph(vectors))  # once per stage
        return self.servers.graph[1]

    def cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cosine similarities of the clients' latest updates ``(n, n)``, in tiles on the client actors."""
        has_update = np.array([c in self.servers.updates for c in clients.tolist()], np.bool_)
        similarities = np.full((len(clients), len(clients)), np.nan)
        similarities[np.ix_(has_update, has_update)] = self._cosines(clients[has_update])
        np.fill_diagonal(similarities, 1.0)
        return similarities

    def _cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        blocks, similarities = self._updates(clients), np.zeros((len(clients), len(clients)))
        pairs = list(itertools.combinations_with_replacement(range(len(blocks)), 2))
        tasks = [Task.calling(cosines.tile, blocks[i], blocks[j]) for i, j in pairs]
        for done in self.servers.backend.run(tasks):
            rows, columns = (slice(k * _TILE, (k + 1) * _TILE) for k in pairs[done.task])
            tile = self.servers.backend.get(done.refs[RESULT])
            similarities[rows, columns] = tile
            similarities[columns, rows] = tile.T
        return (
            np.triu(similarities) + np.triu(similarities, 1).T
        )  # the two triangles may be rounded differently

    def sketches(self, clients: NDArray[np.int64], size: int) -> NDArray[np.float32]:
        """Sketches of the clients' latest updates ``(n, size)``."""
        return self._sketched(self._updates(clients), size)

    def updates_from(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], size: int
    ) -> NDArray[np.float32]:
        """Sketches ``(n, size)`` of the updates that clients would make from these models.

        Every client downloads its model and sends its update; the servers compute the sketches.
        """
        this_round = self._local_round(self.state.round)
        updates = testing.adapt(self.servers, this_round, clients, models, on=(), updates=True).updates
        bytes_sent = 4 * self.servers.spec.P * len(clients)
        self.account(Transfer(self.state.round, "client_lps", "down", "model", bytes_sent))
        self.account(Transfer(self.state.round, "client_lps", "up", "update", bytes_sent))
        return self._sketched(updates, size)

    def _updates(self, clients: NDArray[np.int64]) -> list[Ref]:
        """The clients' latest updates, in blocks of ``_TILE`` rows, by reference."""
        blocks = []
        for first in range(0, len(clients), _TILE):
            ids = clients[first : first + _TILE].tolist()
            if any(client not in self.servers.updates for client in ids):
                raise ValueError("a client that never sent an update has no row")
            blocks.append(self.servers.updates.packed(self.servers.backend, ids))
        return blocks

    def _sketched(self, blocks: Sequence[Ref], size: int) -> NDArray[np.float32]:
        tasks = [Task.calling(cosines.sketch, rows, size, self.config.seed) for rows in blocks]
        sketches: list[NDArray[np.float32]] = [np.empty((0, size), np.float32)] * len(tasks)
        for done in self.servers.backend.run(tasks):
            sketches[done.task] = self.servers.backend.get(done.refs[RESULT])
        return np.concatenate(sketches)


def public_sample(samples: Samples, count: int, seed: int) -> NDArray[np.float32]:
    """The server's own samples, to which a feature map is fitted."""
    from rayfl.training.batches import raw_features

    x = samples.public(count, generator(seed, "public sample"))
    return raw_features(x, len(samples.vocabulary), samples.scaling)


def histograms(federation: Federation) -> NDArray[np.float64]:
    """The share of each label in the training data of each client ``(N, classes)``."""
    train, samples = federation.train, federation.samples
    owners = np.repeat(np.arange(len(train)), train.sizes)
    cells = owners * samples.classes + samples.labels("train", train.values)
    counts = np.bincount(cells, minlength=len(train) * samples.classes).reshape(len(train), samples.classes)
    return np.asarray(counts / np.maximum(1, train.sizes)[:, None], np.float64)
