"""How to write a method: the base class of all algorithms. Its defaults are FedAvg (McMahan et al. 2017).

**The idea.** Every aggregation is ``W_new = A W``: the rows of ``W`` are the models trained in a round; row
``k`` of the mixing matrix ``A`` defines how output model ``k`` is averaged. A method never sees a model. It
defines who trains from which model, and what ``A`` is; the runtime trains, multiplies and stores the models.
An aggregation rule other than the mean (:mod:`rayfl.aggregation`) replaces the product, row by row.

**The round.** Each step is a hook, a method of :class:`Algorithm`; override those that your method changes::

    join, drift      clients joined, or their data changed               a model for them, or new clusters
    recluster        before a round                                      new clusters, if they are due
    cohort, select   who takes part; which model each client chooses     ids; the state with their choice
    plan, work       who starts from which model; epochs, rates          Plan, LocalWork
      reports        what clients report of their trained models         ClientReport -> arrays (M, ...)
      mix            A, from the plan (and the reports)                  Mixing
      server_step    what each server does with its average              ServerStep, with vectors it keeps
      server_training  training with the server's samples afterwards     ServerTraining
      global_step    what the GPS averages over the servers              GlobalStep
    end, split       after the round                                     the state, new clusters

Hooks are pure functions of a frozen state: two calls give the same answer. Take random numbers from
``rayfl.random.generator(setup.seed, "purpose", state.round)``. Then a killed run resumes bit for bit.

**State.** What a method remembers is a frozen dataclass (:class:`ServerState`); hooks return a changed copy.
Checkpoints write and read its fields; nothing has to be registered.

**A method in one file.** Clients whose model was worse than average when they last took part count double::

    from __future__ import annotations

    from dataclasses import dataclass, replace
    from typing import Literal

    import numpy as np
    import scipy.sparse as sp
    from numpy.typing import NDArray
    from pydantic import Field

    from rayfl.algorithms import Algorithm, Mixing, Plan, RoundReport, ServerState, Setup, per_client
    from rayfl.training.reports import ClientReport, Reports, Trained

    @dataclass(frozen=True)
    class BehindState(ServerState):
        behind: NDArray[np.bool_] = per_client(False)  # (N,)

    @dataclass(frozen=True)
    class StartLosses(ClientReport):
        floats = 1  # each client sends one number, which the ledger counts

        def compute(self, trained: Trained) -> NDArray[np.floating]:
            return trained.mean_losses(trained.start)  # (B,) of a block of B clients

    class CatchUp(Algorithm[BehindState]):
        name: Literal["catch_up"] = "catch_up"
        factor: float = Field(2.0, gt=0, description="weight of clients that are behind")

        def begin(self, setup: Setup) -> BehindState:
            return BehindState(round=0, models=1, assignment=np.zeros(setup.clients, np.int64))

        def reports(self, setup: Setup, state: BehindState) -> dict[str, ClientReport]:
            return {"losses": StartLosses()}

        def mix(self, setup: Setup, state: BehindState, plan: Plan, reports: Reports) -> Mixing:
            mixing = super().mix(setup, state, plan, reports)
            factors = np.where(state.behind[plan.cohort], self.factor, 1.0)  # (M,)
            return replace(mixing, weights=sp.csr_array(mixing.weights.multiply(factors)))

        def end(self, setup: Setup, state: BehindState, plan: Plan, report: RoundReport) -> BehindState:
            losses, behind = report.reports["losses"], state.behind.copy()
            behind[plan.cohort] = losses > np.nanmean(losses)  # NaN of clients that failed
            return super().end(setup, replace(state, behind=behind), plan, report)

To mix by what clients report in the same round, set ``mixes_by_reports``
(:class:`~rayfl.algorithms.qfedavg.QFedAvg`). A server optimizer is a :class:`~rayfl.server_step.ServerStep`
(:class:`~rayfl.algorithms.fedadam.FedAdam`). Clients start from mixtures of models if ``served`` of the
state is a matrix of shares (:class:`~rayfl.algorithms.fedsoft.FedSoft`). Ask for signatures, losses and
updates of clients through :class:`~rayfl.algorithms.contract.Clients`, an argument of the hooks before and
after a round.
``tests/algorithms/test_guide.py`` runs the method above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast

import numpy as np
import scipy
from numpy.typing import NDArray

from rayfl.algorithms.contract import (
    Clients,
    GlobalStep,
    Mixing,
    Plan,
    Regrouping,
    RoundReport,
    S,
    Served,
    ServerState,
    Setup,
    Split,
    Sweep,
)
from rayfl.clustering.newcomers import Fit
from rayfl.errors import ConfigError, type_of
from rayfl.local import weights_of, work_of
from rayfl.models import ModelSpec
from rayfl.plugins import is_own
from rayfl.sampling import Candidates, Sampling
from rayfl.server_step import ServerStep
from rayfl.settings import Section
from rayfl.training import LocalWork, complement
from rayfl.training.reports import ClientReport, Reports
from rayfl.training.server import ServerTraining

if TYPE_CHECKING:
    from rayfl.coresets.graphs import Graph


_MAX_COMPARED_USERS = 20
"""Maximum number of users per model whose losses the newcomers' losses are compared with."""


class Algorithm(Section, Generic[S]):
    """Base class of all methods: a frozen set of parameters and pure functions.

    ``defaults`` holds what the method sets in other config sections unless the user sets it.
    """

    name: str = ""

    defaults: ClassVar[Mapping[str, Any]] = {}

    uses_sampling: ClassVar[bool] = True
    """Whether ``sampling`` draws the cohorts; otherwise any sampling but ``uniform`` is refused."""

    selects: ClassVar[bool] = False
    """Whether clients choose among the models (:meth:`select`); before a test all clients choose."""

    keeps_updates: ClassVar[bool] = False
    """Whether the servers keep every client's latest update ``w_i - w`` (``Clients.cosines``)."""

    mixes_by_reports: ClassVar[bool] = False
    """Whether :meth:`mix` needs the reports: then A is known only after training."""

    objectives: ClassVar[tuple[str, ...] | None] = None
    """The local objectives that make sense with the method; None for all."""

    takes_momentum: ClassVar[bool] = True
    """Whether ``training.momentum`` makes sense with the method."""

    takes_aggregation: ClassVar[bool] = True
    """Whether an aggregation rule other than the mean makes sense with the method: not if nothing is
    averaged, or if the old model is a part of the average."""

    takes: ClassVar[tuple[str, ...]] = ()
    """Which of the config sections ``clustering`` and ``hierarchy`` the method uses."""

    def __class_getitem__(cls, state: Any) -> type[Algorithm[Any]]:
        """Make ``Algorithm[SeenState]`` visible to type checkers only.

        pydantic would create a class for it, which could not be sent to another process.
        """
        return cls

    @property
    def public_samples(self) -> int:
        """Number of samples that the method needs at the server, in addition to those for signatures."""
        return 0

    def check(self, spec: ModelSpec) -> None:
        """Refuse a model that does not fit the method's settings, before anything starts.

        Raises:
            ConfigError
        """

    def initial(self, setup: Setup) -> tuple[int, ...]:
        """The K initial models, as numbers of random initialisations; equal numbers give equal models."""
        return (0,)

    def begin(self, setup: Setup) -> S:
        """The state before round 0."""
        # Methods with their own state class override this.
        return cast("S", ServerState(0, len(self.initial(setup)), np.zeros(setup.clients, np.int64)))

    def grow(self, setup: Setup, state: S) -> S:
        """The state for ``setup.clients`` clients; the new ones have not been assigned a model yet."""
        n_newcomers = setup.clients - len(state.assignment)
        return replace(state, assignment=np.concatenate([state.assignment, np.zeros(n_newcomers, np.int64)]))

    def join(
        self, setup: Setup, state: S, newcomers: NDArray[np.int64], clients: Clients
    ) -> S | Regrouping[S]:
        """Assign models to clients that have joined, ``newcomers`` ``(n,)``.

        By default clients choose a model where the method lets them (``selects``); otherwise they get model
        0.
        """
        return self.select(setup, state, newcomers, clients) if self.selects else state

    def fit(self, setup: Setup, state: S, newcomers: NDArray[np.int64], clients: Clients) -> Fit | None:
        """How well ``newcomers`` ``(n,)`` fit the models that :meth:`join` assigned; None if unknown.

        By default the loss is compared: on the newcomers' training data, and on test data of the models'
        current users (at most ``_MAX_COMPARED_USERS`` per model). Neither has been trained on.
        """
        users = np.setdiff1d(setup.present, newcomers)
        newcomer_models, user_models = state.assignment[newcomers], state.assignment[users]
        models = np.union1d(newcomer_models, user_models)
        compared_users = [users[user_models == model][:_MAX_COMPARED_USERS] for model in models.tolist()]
        user_losses = clients.losses(np.concatenate(compared_users), "test")
        ends = np.cumsum([len(ids) for ids in compared_users])[:-1]
        losses_by_model = [
            rows[:, m] for m, rows in zip(models.tolist(), np.split(user_losses, ends), strict=True)
        ]
        return Fit.of(
            "loss", clients.losses(newcomers, "train")[:, models], losses_by_model, models, newcomer_models
        )

    def drift(
        self, setup: Setup, state: S, drifted: NDArray[np.int64], clients: Clients
    ) -> S | Regrouping[S]:
        """The state, or new clusters, after the data of clients ``drifted`` ``(n,)`` have changed."""
        return state

    def recluster(self, setup: Setup, state: S, clients: Clients) -> Regrouping[S] | None:
        """New clusters before the next round; None if they are not due."""
        return None

    def cohort(self, setup: Setup, state: S, clients: Clients) -> tuple[S, NDArray[np.int64]]:
        """Draw the clients that take part by ``sampling``; return the next state and their ids, ascending."""
        return sample_cohort(setup, state, clients, self.select if self.selects else None)

    def select(self, setup: Setup, state: S, who: NDArray[np.int64], clients: Clients) -> S:
        """Let the clients ``who`` ``(n,)`` choose their models."""
        return state

    def plan(self, setup: Setup, state: S, cohort: NDArray[np.int64]) -> Plan:
        """Each client of ``cohort`` ``(M,)`` starts from what it is served, and reports to its model's
        LPS."""
        group = state.assignment[cohort]
        order = np.lexsort((cohort, group))
        return Plan(cohort[order], state.served[cohort[order]], group[order])

    def work(self, setup: Setup, state: S) -> LocalWork:
        """The local work of the round: E epochs of SGD on the local objective."""
        return work_of(setup.local, setup.training.work(state.round, setup.rounds))

    def downloads(self, setup: Setup, state: S, plan: Plan) -> int:
        """Number of models that clients download in a round.

        A mixture counts as one model, which the server forms; methods whose clients form it themselves
        override this. Clients that choose download every model. Clients that only report a loss
        (:func:`only_asked`) count, too.
        """
        models_each = state.models if self.selects else 1
        return (len(plan.cohort) + only_asked(setup, state, plan)) * models_each

    def reports(self, setup: Setup, state: S) -> Mapping[str, ClientReport]:
        """What clients report after training besides their losses, by name.

        The answers are passed to :meth:`end`, and to :meth:`mix` if the method ``mixes_by_reports``.
        """
        return {}

    def mix(self, setup: Setup, state: S, plan: Plan, reports: Reports) -> Mixing:
        """Average within each group, with the weights of the local objective (FedAvg: n_i).

        Args:
            setup, state, plan: of the round.
            reports: the answers to :meth:`reports` if the method ``mixes_by_reports``, else empty.
        """
        return average(setup, plan, plan.group, state.models)

    def server_step(self, setup: Setup, state: S) -> ServerStep | None:
        """What each LPS does with the average, before the GPS sees it."""
        return None

    def server_training(self, setup: Setup, state: S) -> ServerTraining | None:
        """How servers train their models on samples of the server, after all averages of the round; None for
        no such training.
        """
        return None

    def global_step(self, setup: Setup, state: S) -> GlobalStep | None:
        """What the GPS averages over the LPSs after the round, as configured in ``hierarchy``.

        None for methods that do not use that section.
        """
        return every_kappa_rounds(setup, state) if "hierarchy" in self.takes else None

    def end(self, setup: Setup, state: S, plan: Plan, report: RoundReport) -> S:
        """The state after the round."""
        return replace(state, round=state.round + 1)

    def split(self, setup: Setup, state: S, clients: Clients) -> Regrouping[S] | None:
        """New clusters after a round, based on its results; ``state`` is the result of :meth:`end`."""
        return None

    def diagnose(self, setup: Setup, state: S, clients: Clients) -> list[dict[str, Any]]:
        """Rows for ``diagnostics.csv``: what the method reports about a round."""
        return []

    def tested_with(self, setup: Setup, state: S, clients: Clients) -> Served:
        """The model, or the mixture of models, that each client uses and is tested with, ``(N,)`` or ``(N,
        K)``; by default the one that the client starts training from.
        """
        return state.served

    @property
    def permutes(self) -> bool:
        """Whether clients permute all that they send, by a permutation that the servers do not know."""
        return False

    def adaptation(self, setup: Setup, state: S) -> LocalWork | None:
        """What each client does with its model before a test (test-time adaptation); by default nothing."""
        return None


def average(setup: Setup, plan: Plan, rows: NDArray[np.int64], models: int) -> Mixing:
    """Each client contributes to one model, ``rows[j]``, with the weight of its local objective.

    Args:
        setup, plan: of the round.
        rows: the output model of each client of the cohort, ``(M,)``.
        models: K.
    """
    columns, shape = np.arange(len(plan.cohort)), (models, len(plan.cohort))
    weights, keep = weights_of(setup.local, setup.sizes[plan.cohort], rows, setup.training)
    keep_matrix = None if keep is None else scipy.sparse.csr_array((keep, (rows, columns)), shape=shape)
    return Mixing(scipy.sparse.csr_array((weights, (rows, columns)), shape=shape), keep=keep_matrix)


def only_asked(setup: Setup, state: ServerState, plan: Plan) -> int:
    """Number of clients that download their model to report its loss, and then do not take part."""
    if state.sweep.begun not in (-1, state.round):  # their cohort was chosen in an earlier round
        return 0
    present = len(setup.present)
    sampling = setup.sampling
    asked: object = sampling.asked(present, setup.training.cohort(present), state.round, setup.rounds)
    if not isinstance(asked, (int, np.integer)):
        expected = "expected the number of clients that report a loss"
        raise ConfigError(f"{sampling.name}.asked", f"returned {type_of(asked)}", expected)
    return max(0, int(asked) - len(plan.cohort))


def every_kappa_rounds(setup: Setup, state: ServerState) -> GlobalStep | None:
    """The global step every kappa rounds.

    The GPS averages the common layers of ``hierarchy`` over all LPSs, and the other layers over the edges of
    each cluster.
    """
    hierarchy, edges = setup.hierarchy, setup.edges
    n_edges = 1 if edges is None else int(edges.max()) + 1
    cluster, edge = np.divmod(np.arange(state.models * n_edges), n_edges)
    common = hierarchy.common(setup.spec)
    layers = [(common, np.zeros_like(cluster))] if common else []
    cluster_layers = complement(common, setup.spec.P)
    if cluster_layers and n_edges > 1:
        layers.append((cluster_layers, cluster))
    if not layers:
        return None
    servers = cluster if edges is None else edge
    unreachable = [o.servers for o in setup.outages if o.round <= state.round < o.round + o.rounds]
    due = (state.round + 1) % hierarchy.kappa(servers) == 0
    due &= ~np.isin(servers, np.array([server for some in unreachable for server in some], np.int64))
    weights = None
    if hierarchy.weights == "population":
        server_of_client = state.assignment * n_edges + (0 if edges is None else edges)
        weights = np.bincount(server_of_client, setup.sizes, minlength=len(cluster)).astype(np.float64)
    return GlobalStep(tuple(layers), due, weights)


def sample_cohort(
    setup: Setup, state: S, clients: Clients | None = None, select: Callable[..., S] | None = None
) -> tuple[S, NDArray[np.int64]]:
    """The ids of the clients sampled in a round, ascending: ``max(1, round(rho N))`` of those present.

    A sampling that chooses for several rounds in advance leaves a queue in the state; the next clients are
    taken from it. Clients that left are removed from the queue; clients that joined take part when the
    sampling chooses again.

    Args:
        setup, state, clients: as for :meth:`Algorithm.cohort`.
        select: :meth:`Algorithm.select` of a method whose clients choose their models. Before they report
            losses they choose again, so that their choice for the last test has no influence.
    """

    def losses() -> NDArray[np.float64]:
        assert clients is not None
        chosen = state if select is None else select(setup, state, setup.present, clients)
        return clients.local_losses(setup.present, chosen.served[setup.present])

    def relatedness() -> Graph:
        assert clients is not None
        return clients.relatedness()

    present = setup.present
    candidates = Candidates(
        ids=present,
        count=setup.training.cohort(len(present)),
        sizes=_of_present(setup.sizes, present),
        labels=_of_present(state.assignment, present),
        round=state.round,
        rounds=setup.rounds,
        seed=setup.seed,
        losses=losses,
        relatedness=relatedness,
    )
    begun, waiting = state.sweep.begun, state.sweep.waiting
    waiting = waiting[setup.sizes[waiting] > 0]
    if not len(waiting):
        begun, waiting = state.round, _sampled(setup.sampling, candidates)
    sweep = Sweep(begun, waiting[candidates.count :])
    return replace(state, sweep=sweep), np.sort(waiting[: candidates.count])


def _sampled(sampling: Sampling, candidates: Candidates) -> NDArray[np.int64]:
    """The participants that a sampling chooses; those of a user's sampling are checked.

    Raises:
        ConfigError: unless they are ids of present clients, each once.
    """
    chosen = sampling.cohort(candidates)
    if is_own(sampling):
        return chosen
    where = f"{sampling.name}.cohort"
    if (
        not isinstance(chosen, np.ndarray)
        or chosen.ndim != 1
        or (chosen.size and chosen.dtype.kind not in "iu")
    ):
        raise ConfigError(where, f"returned {type_of(chosen)}", "expected an array of ids (n,)")
    if not len(chosen):
        raise ConfigError(where, "returned nobody", "expected at least one client")
    places = np.searchsorted(candidates.ids, chosen).clip(max=len(candidates.ids) - 1)
    absent = chosen[candidates.ids[places] != chosen]
    if len(absent):
        raise ConfigError(where, f"there is no client {absent[0]} now", "choose from candidates.ids")
    ids, counts = np.unique(chosen, return_counts=True)
    if len(ids) < len(chosen):
        raise ConfigError(where, f"client {ids[counts.argmax()]} is chosen twice", "choose each once")
    return chosen


def _of_present(values: NDArray[np.int64], present: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of the present clients; not copied if all clients are present."""
    return values if len(present) == len(values) else values[present]


def choose_by_loss(state: S, who: NDArray[np.int64], clients: Clients, split: Split) -> S:
    """Each client of ``who`` ``(n,)`` takes the model with the lowest loss on a part of its data.

    Ties: the lowest number. See :func:`losses_on` for clients without data of that part.
    """
    if state.models == 1:
        return state
    losses = losses_on(split, who, clients)
    has_losses = ~np.isnan(losses).all(axis=1)
    assignment = state.assignment.copy()
    assignment[who[has_losses]] = np.nanargmin(losses[has_losses], axis=1)
    return replace(state, assignment=assignment)


def losses_on(split: Split, who: NDArray[np.int64], clients: Clients) -> NDArray[np.float64]:
    """Mean loss of every model on a part of each client's data ``(n, K)``.

    A client without validation samples uses its training samples instead.
    """
    losses = clients.losses(who, split)
    missing = np.isnan(losses).all(axis=1)
    if split == "validation" and missing.any():
        losses[missing] = clients.losses(who[missing], "train")
    return losses
