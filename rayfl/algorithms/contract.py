"""The interface between algorithms and the runtime: plain data, and what servers may ask of clients.

Symbols: ``N`` clients, ``M`` of them in a round's cohort, ``K`` models at the servers, ``P`` parameters of a
model, ``n_i`` training samples of client ``i``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field, field_validator
from typing_extensions import TypeVar

from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.data.events import Outage
from rayfl.errors import ConfigError
from rayfl.evaluation import Scores
from rayfl.local import LocalObjective
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.random import generator
from rayfl.sampling import Sampling
from rayfl.settings import Section
from rayfl.training import Segments, Training
from rayfl.training.reports import Reports

if TYPE_CHECKING:
    from rayfl.coresets.graphs import Graph

Split = Literal["train", "validation", "test"]
"""A part of a client's data."""

Served: TypeAlias = "NDArray[np.int64] | scipy.sparse.csr_array"
"""What each of n clients receives: the number of a model ``(n,)``, or shares of the models ``(n, K)``.

A row of shares stands for the mixture ``sum_k b_k w_k / sum_k b_k``. Shares are not negative, and a row's
sum is positive."""

Kappa = Annotated[int, Field(ge=1)]


class Hierarchy(Section):
    """The servers: local parameter servers (LPS), and a global one (GPS) above them.

    Every cluster has an LPS. With ``edges`` it has one at each edge: an edge server serves nearby clients of
    all clusters (client-edge-cloud). A global round averages all layers over the edges of a cluster, and the
    common layers over all LPSs.
    """

    common_layers: Annotated[int, Field(ge=0)] | Literal["none", "all"] | tuple[str, ...] = Field(
        "none",
        description="layers that the GPS averages over all clusters: the number of first layers, or "
        "names of layers",
    )
    global_every: Kappa | Annotated[tuple[Kappa, ...], Field(min_length=1)] = Field(
        1,
        description="local rounds between two global rounds (kappa); or a list with one number per "
        "edge (without edges: per cluster), whose last number is used for all others",
    )
    edges: (
        Annotated[int, Field(ge=1)]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
        | Path
    ) = Field(
        1,
        description="edge servers: their number (clients are assigned at random), or the edge of each"
        " client as a list or a CSV file with columns 'client' (a number or id) and 'edge'",
    )
    weights: Literal["participated", "population"] = Field(
        "participated",
        description="weight of an LPS in a global round: that of the clients averaged since the last one "
        "(their training samples; with scaffold, mtl and sub_fedavg their number), or all samples that its "
        "clients hold (HierFAVG)",
    )
    lps_actors: int = Field(
        2,
        ge=1,
        description="maximum number of LPS actors; small clusters share one. Results do not depend on it",
    )

    @field_validator("common_layers", mode="before")
    @classmethod
    def _single_name(cls, value: object) -> object:
        if isinstance(value, bool):  # YAML's yes and no are not 1 and 0 layers
            raise ValueError("give 'all', 'none', a number of layers or their names, not true or false")
        return (value,) if isinstance(value, str) and value not in ("none", "all") else value

    @property
    def averages(self) -> bool:
        """Whether the global server averages anything: common layers, or the edges of a cluster."""
        return self.common_layers not in ("none", 0) or self.edges != 1

    def place(self, clients: int, seed: int, names: Sequence[str] | None = None) -> NDArray[np.int64]:
        """The edge of each client ``(N,)``; if drawn, sizes differ by at most one client.

        Args:
            clients: N.
            seed: of the draw.
            names: the user's ids of the clients ``(N,)``; None: they are named by their numbers.

        Raises:
            ConfigError: if not every client has an edge, or there are fewer clients than edges.
        """
        if isinstance(self.edges, int):
            if self.edges > clients:
                raise ConfigError("hierarchy.edges", f"{self.edges} edges for {clients} clients", "use fewer")
            if self.edges == 1:
                return np.zeros(clients, np.int64)
            order = generator(seed, "edges").permutation(clients)
            return np.argsort(order, kind="stable") % self.edges
        if isinstance(self.edges, Path):
            edges = _read_edges(self.edges, [str(n) for n in (range(clients) if names is None else names)])
        else:
            edges = np.array(self.edges, np.int64)
        if len(edges) != clients:
            raise ConfigError(
                "hierarchy.edges", f"names the edges of {len(edges)} clients", f"the partition has {clients}"
            )
        return edges

    def kappa(self, servers: NDArray[np.int64]) -> NDArray[np.int64]:
        """kappa of the given edges (or clusters) ``(n,)``."""
        kappas = np.array([self.global_every] if isinstance(self.global_every, int) else self.global_every)
        return np.asarray(kappas[np.minimum(servers, len(kappas) - 1)], np.int64)

    def common(self, spec: ModelSpec) -> Segments:
        """The common layers as ranges of the flat parameter vector.

        Raises:
            ConfigError: if a layer is not one of the model's.
        """
        if self.common_layers == "none" or self.common_layers == 0:
            return ()
        if self.common_layers == "all":
            return ((0, spec.P),)
        try:
            if isinstance(self.common_layers, int):
                return tuple(spec.segment(first=self.common_layers))
            return tuple(spec.segment(self.common_layers))
        except ConfigError as error:
            raise ConfigError("hierarchy.common_layers", error.what, error.remedy) from None


def _read_edges(path: Path, names: Sequence[str]) -> NDArray[np.int64]:
    """The edges in a CSV file: in the order of its rows, or, if it has a column ``client``, by client."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
        edges = np.array([int(row["edge"]) for row in rows], np.int64)
    except OSError as error:
        raise ConfigError("hierarchy.edges", f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        edges = np.array([-1])
    if not len(edges) or edges.min() < 0:
        raise ConfigError(
            "hierarchy.edges", f"{path} needs a column 'edge' with numbers from 0, one row per client"
        )
    if "client" not in rows[0]:
        return edges
    edge_of = {str(row["client"]).strip(): edge for row, edge in zip(rows, edges, strict=True)}
    missing = [name for name in names if name not in edge_of]
    if missing or len(rows) != len(names):
        problem = (
            f"has no row for client {missing[0]}"
            if missing
            else f"has {len(rows)} rows for {len(names)} clients"
        )
        raise ConfigError("hierarchy.edges", f"{path} {problem}", "one row per client is needed")
    return np.array([edge_of[name] for name in names])


@dataclass(frozen=True)
class GlobalStep:
    """What the GPS averages over the LPSs after a round, and with which weights.

    There are L LPSs. With E edges L is ``K E``, and cluster k at edge e is LPS ``k E + e``.

    Attributes:
        layers: ranges of the parameter vector, each with the group ``(L,)`` in which an LPS averages them.
        due: the LPSs that take part ``(L,)``; the others carry their samples over to their next global step.
        weights: of the LPSs ``(L,)``; None: the weight of an LPS is that of the clients averaged there since
            its last global step (their samples, unless the method averages with other weights).
    """

    layers: tuple[tuple[Segments, NDArray[np.int64]], ...]
    due: NDArray[np.bool_]
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Setup:
    """What an algorithm may know about a run: public facts, no samples.

    Attributes:
        clients: N, all clients that ever take part.
        sizes: n_i, ``(N,)``; 0 for absent clients.
        spec: the model's flat layout.
        rounds: planned number of rounds.
        seed: the run's seed.
        training, hierarchy, clustering: the config sections of these names; in :meth:`Algorithm.mix`
            ``training`` has the epochs, batches and momentum of the round's work.
        local: the clients' local objective.
        order: the order of a client's samples.
        sampling: who is asked to take part in a round.
        edges: the edge of each client ``(N,)``; None for a single one.
        outages: when LPSs cannot reach the GPS.
    """

    clients: int
    sizes: NDArray[np.int64]
    spec: ModelSpec
    rounds: int
    seed: int
    training: Training
    hierarchy: Hierarchy
    clustering: Clustering
    local: LocalObjective
    order: Ordering
    sampling: Sampling
    edges: NDArray[np.int64] | None = None
    outages: tuple[Outage, ...] = ()

    @cached_property
    def present(self) -> NDArray[np.int64]:
        """The ids of the present clients, ascending."""
        return np.flatnonzero(self.sizes > 0)


@dataclass(frozen=True, eq=False)
class Sweep:
    """Cohorts that the sampling has chosen in advance.

    Attributes:
        begun: the round in which they were chosen; -1 before the first.
        waiting: ids of the clients that will take part, in this order ``(n,)``.
    """

    begun: int = -1
    waiting: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def per_client(initial: bool | int | float) -> Any:
    """Declare a state field as an array ``(N, ...)``; new clients get the value ``initial``."""
    return _growing_array("clients", initial)


def per_model(initial: bool | int | float) -> Any:
    """Declare a state field as an array ``(K, ...)``; new models get the value ``initial``."""
    return _growing_array("models", initial)


def _growing_array(axis: str, initial: bool | int | float) -> Any:
    empty = np.full(0, initial)
    return field(default_factory=lambda: empty, metadata={"axis": axis, "initial": initial})


@dataclass(frozen=True)
class ServerState:
    """All that the servers remember between rounds, except the models' parameters.

    A method that remembers more derives its own state: a frozen dataclass whose additional fields are arrays,
    ``scipy.sparse.csr_array``, ``bool``, ``int``, ``float``, ``str``, frozen dataclasses of these, or None
    (``X | None``). Checkpoints write and read the fields by their types. Arrays declared with
    :func:`per_client` and :func:`per_model` grow with the number of clients and of models.
    A class variable ``renamed`` maps former names of fields to the present ones, for older checkpoints.

    Attributes:
        round: rounds completed.
        models: K.
        assignment: the model, or cluster, that each client belongs to, ``(N,)`` in ``range(K)``.
        clustered: whether the clients have been clustered.
        sweep: who takes part in the next rounds, if the sampling chooses for several in advance.
    """

    round: int
    models: int
    assignment: NDArray[np.int64]
    clustered: bool = False
    sweep: Sweep = field(default_factory=Sweep)

    def __post_init__(self) -> None:
        """Extend arrays to new clients and models, with their initial values."""
        for attribute in fields(self):
            if "axis" not in attribute.metadata:
                continue
            size = len(self.assignment) if attribute.metadata["axis"] == "clients" else self.models
            value = getattr(self, attribute.name)
            if len(value) < size:
                added = np.full((size - len(value), *value.shape[1:]), attribute.metadata["initial"])
                object.__setattr__(self, attribute.name, np.concatenate([value, added]))

    @property
    def clusters(self) -> NDArray[np.int64]:
        """The clusters that are compared with planted groups ``(N,)``; by default the assignment."""
        return self.assignment

    @property
    def served(self) -> Served:
        """What each client starts a round from, and is tested with: by default the model of its assignment.

        Methods whose clients start from mixtures of models return rows of shares ``(N, K)``. Rows of absent
        clients may be empty.
        """
        return self.assignment


S = TypeVar("S", bound=ServerState, default=ServerState)
"""The state of a method."""


@dataclass(frozen=True)
class Plan:
    """Who trains in a round.

    Attributes:
        cohort: client ids ``(M,)``, sorted by (group, id); blocks are cut from it in this order.
        start: the model, or the mixture of models, that each client starts from: ``(M,)`` in ``range(K)``, or
            ``(M, K)``.
        group: the local parameter server that each client reports to, ``(M,)``.
        updates: whether the clients send their updates ``w_j - s_j``, where s_j is the model that client j
            started from. Then model ``k`` becomes ``w_k + sum_j a_kj (w_j - s_j) / (sum_j a_kj + b_k)``. For
            clients that contribute to other models than they start from. Running statistics are averaged as
            usual.
    """

    cohort: NDArray[np.int64]
    start: Served
    group: NDArray[np.int64]
    updates: bool = False

    @classmethod
    def nobody(cls) -> Plan:
        """The plan of an empty cohort."""
        empty = np.empty(0, np.int64)
        return cls(cohort=empty, start=empty, group=empty)


@dataclass(frozen=True)
class Mixing:
    """How trained models become the next ones: the mixing matrix A.

    Model ``k`` becomes ``(sum_j a_kj w_j + b_k w_k) / (sum_j a_kj + b_k)`` with ``b_k = sum_j b_kj``, over
    the clients ``j`` that delivered a model (for updates see :class:`Plan`). A row without such clients keeps
    its model. Integer weights such as ``n_i`` make the sums exact to 2^-53.

    Attributes:
        weights: ``a``, ``A`` before its rows are normalised, sparse ``(K', M)``.
        keep: ``b``, the weight that each client adds to the old model (FedNova), sparse ``(K', M)``, with
            entries only where ``weights`` has some; None for zeros.
        parents: the old model ``w_k`` of each new one, ``(K',)``; None if the models stay the same K.
    """

    weights: scipy.sparse.csr_array
    keep: scipy.sparse.csr_array | None = None
    parents: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Regrouping(Generic[S]):
    """New clusters.

    Attributes:
        state: the state with the new number of models and assignment.
        parents: the old model from which each new one starts, ``(K_new,)``.
        clusters: the clustering by signatures that they come from, if any.
        facts: further entries for ``clusters.json``.
        restored: models that are reset to their values before the round's training, ``(R,)``; for
            :meth:`Algorithm.split`. Vectors that the servers keep with them stay as they are.
    """

    state: S
    parents: NDArray[np.int64]
    clusters: Clusters | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    restored: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class RoundReport:
    """The results of a round, in the order of the cohort.

    Attributes:
        losses: mean local training loss ``(M,)``; NaN for clients that failed.
        steps: local steps ``(M,)``.
        reports: the answers to :meth:`Algorithm.reports`, by name ``(M, ...)``; NaN for clients that failed.
        model_changes: how far each model moved ``|w_k' - w_k|``, ``(K,)``; 0 where it was kept.
        seconds: training time of each worker process, by host and process id (``host:1234``).
        failures: client id -> traceback.
        bytes_up, bytes_down: what the cohort sent and received.
        gps_bytes_up, gps_bytes_down: what the LPSs sent to the GPS and received from it.
        remarks: messages for the user -> ids of the clients that they concern.
        scores: tests of the models that the cohort has trained ``(M,)``, if enabled; methods do not see them.
    """

    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    reports: Reports = field(default_factory=dict)
    model_changes: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    seconds: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    gps_bytes_up: int = 0
    gps_bytes_down: int = 0
    remarks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)


class Clients(Protocol):
    """What the servers may ask of the clients besides training.

    Answers are functions of the state, so asking again, for instance after a resume, gives the same answer.
    """

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """The planted group of each client ``(N,)`` if known.

        For diagnosis and for groupings that use them (``planted``), not for methods.
        """
        ...

    def losses(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.float64]:
        """Mean loss in nats of every model on a part of each client's data, ``(n, K)``.

        NaN for clients without such samples.
        """
        ...

    def samples_by_model(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.int64]:
        """For each client and model, how many samples in a part of the client's data the model fits best.

        The best model of a sample has the lowest loss on it (ties: lowest number). Each client downloads all
        models and sends K numbers.

        Returns:
            Counts ``(n, K)``.
        """
        ...

    def local_losses(self, clients: NDArray[np.int64], models: Served) -> NDArray[np.float64]:
        """Mean training loss in nats of the model from which each client would start ``(n,)``.

        That is the servers' model ``models[i]``, or the mixture, with the client's own layers. NaN for
        clients without training samples.
        """
        ...

    def cluster(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64] | None = None,
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> Clusters:
        """Cluster clients by their signatures.

        Args:
            clustering: the settings.
            clients: ids ``(n,)``, ascending; default: all present clients.
            known: for each client the round in which it sent the signature that the servers have ``(n,)``; -1
                for a client that sends one now; default: all send one. Absent clients cannot send.
            has_feature_map: whether the clients have received the feature map before: one value, or one per
                client ``(n,)``.

        Returns:
            The clusters, without distances and tree. Labels ``(N,)`` are -1 for all other clients, and for
            clients without a signature if their number is tolerated.

        Raises:
            RayflError: if the clients are too many for the memory, or too many clients have no signature.
        """
        ...

    def relatedness(self) -> Graph:
        """The graph of the present clients; vertex i is the i-th of ``Setup.present``.

        Neighbours have similar label histograms, which clients send once per stage.
        """
        ...

    def distances(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64],
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids of the clients that have a signature ``(m,)``, ascending, and their distances.

        Distances use ``clustering.measure`` and are condensed ``(m (m - 1) / 2,)``; for at most ``BLOCK``
        clients. ``known`` and ``has_feature_map`` as for :meth:`cluster`.
        """
        ...

    def signatures(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> dict[int, NDArray[np.float32]]:
        """The signatures of ``clients`` ``(n,)`` by id, in their order, without clients that have none.

        Their shapes depend on ``clustering.signature``. ``known`` and ``has_feature_map`` as for
        :meth:`cluster`.
        """
        ...

    def cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cosine similarities of the clients' latest updates, symmetric ``(n, n)`` with ones on the diagonal.

        NaN for clients that never sent an update. Only for algorithms with ``keeps_updates``.
        """
        ...

    def sketches(self, clients: NDArray[np.int64], size: int) -> NDArray[np.float32]:
        """Random projections of the clients' latest updates to ``size`` numbers, ``(n, size)``.

        Raises:
            ValueError: if a client never sent an update.
        """
        ...

    def updates_from(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], size: int
    ) -> NDArray[np.float32]:
        """Train client i from ``models[i]`` as in this round, without averaging.

        Each client downloads its model and sends its update.

        Returns:
            Sketches of the updates ``(n, size)``.
        """
        ...
