"""``rayfl newcomers``: clients that come after a run has ended find their cluster, and are tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.algorithms import Algorithm, Plan, Regrouping, ServerState, Setup
from rayfl.algorithms.base import only_asked
from rayfl.backend import Backend
from rayfl.clients.jobs import HostSpec
from rayfl.config import Config
from rayfl.data import Federation, Ragged, Samples, read_npz
from rayfl.data.datasets._images import ImageDataset
from rayfl.data.events import Stage
from rayfl.errors import DataError, RayflError
from rayfl.evaluation import Ledger, Transfer, accuracy
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers import building, testing
from rayfl.servers.building import block_rule, setup_of, stage_of
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.models import Servers
from rayfl.servers.queries import Asking
from rayfl.servers.rounds import Round
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork, complement, length


def welcome(path: Path | str, data: Path, epochs: int = 5, local_epochs: int | None = None) -> pd.DataFrame:
    """Assign newcomers to the clusters of a run, as it ended or was stopped; fine-tune and test them.

    Args:
        path: the run directory.
        data: an .npz file with ``x_train``, ``y_train``, ``x_test``, ``y_test``, and ``client_train`` and
            ``client_test``, the number of the newcomer (from 0) that each sample belongs to; without the
            latter two all samples are one newcomer's. Colour images have the axes of ``data.layout`` if the
            run's data do; labels are as the newcomers see them.
        epochs: of fine-tuning; 0 for none.
        local_epochs: of training alone; 0 for none. By default as many as a client of the run has had on
            average.

    Returns:
        A row a newcomer. It is written to ``newcomers.csv`` in the run directory:

        - ``client``: its id, after those of the run; ``n``: training samples;
        - ``cluster``, and ``new_cluster``: whether it has founded that;
        - ``model``, if the method lets it use another than its cluster's;
        - ``distance`` to its cluster, ``next_distance`` to the nearest other cluster, ``usual``, the largest
          distance of a member of the cluster to the cluster, ``measure``, what a distance is (see
          ``fit`` of the method), and ``far``: whether the distance is more than three times the usual;
        - ``accuracy`` in percent with the model that it is given, adapted as the run's clients do before a
          test (Per-FedAvg), and ``accuracy_finetuned``;
        - ``accuracy_global``: with the average of all clusters' models, each weighted by the training samples
          of the clients that use it; ``accuracy_local``: with a model that it has trained alone from w_0.

        What was sent to assign them, by old clients too, and to give them their models is written to
        ``newcomers_communication.csv``, in the columns of ``communication.csv``.

    Raises:
        DataError: if the file does not fit the run's data.
        RayflError: if the run has no checkpoint.
    """
    directory = RunDirectory.open(path)
    config = directory.config
    found = checkpoints(directory.path / "checkpoints")
    if not found:
        raise RayflError(f"{directory.path}: has no checkpoint yet; let the run finish first")
    stages, host = building.build(config, directory.scaling)
    setup = setup_of(config, stages[0].federation, host.spec)
    saved = Checkpoint.load(found[-1], type(config.algorithm.begin(setup)))
    # A run that was stopped has not seen all of its own events.
    stages = stages[: stage_of(stages, saved.state.round - 1) + 1]
    new = read_newcomers(config, stages[0].federation.samples, data)
    stages = with_newcomers(stages, saved.state.round, new)
    backend = InlineBackend()
    transfers: list[Transfer] = []
    try:
        backend.start(tuple(stage.federation for stage in stages), host)
        frame = _welcome(config, host, backend, saved, stages, epochs, local_epochs, transfers.append)
    finally:
        backend.close()
    directory.write_frame("newcomers.csv", frame)
    directory.write_frame("newcomers_communication.csv", Ledger().add(*transfers).to_frame())
    return frame


@dataclass(frozen=True)
class NewSamples:
    """The samples of B newcomers.

    Attributes:
        samples: theirs alone.
        train, test: the places in these of each one's, ``B`` arrays.
    """

    samples: Samples
    train: list[NDArray[np.int64]]
    test: list[NDArray[np.int64]]


def read_newcomers(config: Config, own: Samples, data: Path) -> NewSamples:
    """Read the file of newcomers, as the run's own data are read.

    Raises:
        DataError: if its samples are not of the same kind as the run's, ``own``.
    """
    new = read_npz(data, data.stem, getattr(config.data, "layout", "auto"))
    if isinstance(config.data, ImageDataset):
        new = config.data.reshaped(new)
    if new.shape != own.shape or new.x_train.dtype != own.x_train.dtype:
        raise DataError(
            f"{data}: samples {new.shape} of {new.x_train.dtype}; the run's are {own.shape} of "
            f"{own.x_train.dtype}"
        )
    top = int(max(new.y_train.max(), new.y_test.max()))
    if top >= own.classes:
        raise DataError(f"{data}: has label {top}; the run's model knows labels 0 to {own.classes - 1}")
    train, test = _owners(data, new)
    count = int(max(train.max(), test.max())) + 1
    for name, owners in (("client_train", train), ("client_test", test)):
        # Of n samples one of the first n + 1 newcomers has none.
        missing = np.setdiff1d(np.arange(min(count, len(owners) + 1)), owners)
        if len(missing):
            raise DataError(f"{data}: newcomer {missing[0]} has no sample in {name}")
    lists = [[np.flatnonzero(owners == c) for c in range(count)] for owners in (train, test)]
    return NewSamples(new, *lists)


def with_newcomers(stages: Sequence[Stage], round: int, new: NewSamples) -> tuple[Stage, ...]:
    """The stages with further clients, whose samples follow the old ones, and one more in which they join.

    Args:
        stages: of the run so far.
        round: how many rounds are complete.
        new: the newcomers' samples.
    """
    own, count = stages[0].federation.samples, len(new.train)
    samples = replace(
        own,
        x_train=np.concatenate([own.x_train, new.samples.x_train]),
        y_train=np.concatenate([own.y_train, new.samples.y_train]),
        x_test=np.concatenate([own.x_test, new.samples.x_test]),
        y_test=np.concatenate([own.y_test, new.samples.y_test]),
        domain_train=None,
        domain_test=None,
    )
    train, test = len(own.x_train), len(own.x_test)
    nobody = [np.empty(0, np.int64)] * count

    def extended(
        old: Federation, its_train: Sequence[NDArray[np.int64]], its_test: Sequence[NDArray[np.int64]]
    ) -> Federation:
        return Federation(
            samples,
            _appended(old.train, its_train, train, len(samples.x_train)),
            _appended(old.validation, nobody, train, len(samples.x_train)),
            _appended(old.test, its_test, test, len(samples.x_test)),
        )

    before = [
        replace(
            stage,
            federation=extended(stage.federation, nobody, nobody),
            active=np.concatenate([stage.active, np.zeros(count, np.bool_)]),
        )
        for stage in stages
    ]
    last = stages[-1]
    federation = extended(
        last.federation, [ids + train for ids in new.train], [ids + test for ids in new.test]
    )
    newcomers = np.arange(count) + last.federation.clients
    return (*before, Stage(round, federation, federation.sizes > 0, joined=newcomers))


def _owners(data: Path, samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The newcomer of each training and test sample."""
    found = []
    with np.load(data, allow_pickle=False) as content:
        for name, count in (("client_train", len(samples.y_train)), ("client_test", len(samples.y_test))):
            try:
                owners = np.asarray(content[name]) if name in content else np.zeros(count, np.int64)
            except ValueError:  # objects, which may be code
                owners = np.empty(0)
            whole = owners.shape == (count,) and owners.dtype.kind in "iu"
            if not whole or owners.astype(np.int64).min() < 0:
                raise DataError(f"{data}: {name} must hold {count} numbers from 0, one a sample")
            found.append(owners.astype(np.int64))
    return found[0], found[1]


def _appended(lists: Ragged, more: Sequence[NDArray[np.integer]], before: int, now: int) -> Ragged:
    """Lists of (virtual) ids of ``before`` samples, as those of ``now``, and more lists behind them."""
    maps, ids = np.divmod(lists.values, before)
    values = [part for part in more if len(part)]
    sizes = np.array([len(part) for part in more], np.int64)
    return Ragged(
        np.concatenate([maps * now + ids, *values]).astype(np.int32),
        np.concatenate([lists.offsets, lists.offsets[-1] + np.cumsum(sizes)]),
    )


def _welcome(
    config: Config,
    host: HostSpec,
    backend: Backend,
    saved: Checkpoint,
    stages: Sequence[Stage],
    epochs: int,
    local_epochs: int | None,
    account: Callable[[Transfer], None],
) -> pd.DataFrame:
    algorithm, stage = config.algorithm, len(stages) - 1
    federation, newcomers = stages[stage].federation, stages[stage].joined
    edges = config.hierarchy.place(int(newcomers[0]), config.seed)
    edges = np.concatenate([edges, (newcomers - newcomers[0]) % (edges.max() + 1)])  # dealt in turn
    servers = Servers(
        backend,
        host.spec,
        federation,
        block_size=block_rule(config, federation, host),
        tolerate=config.execution.tolerate_failures,
        batch_size=config.evaluation.batch_size,
        edges=edges,
    )
    setup = setup_of(config, federation, host.spec, servers.edges)
    servers.models = [backend.put(row) for row in saved.models]
    servers.states = ClientStates.restore(backend, saved.state_clients, saved.state_rows)
    servers.updates = ClientStates.restore(backend, saved.update_clients, saved.update_rows)
    old = algorithm.grow(setup, saved.state)
    work = config.training.work(max(0, old.round - 1), config.rounds)

    def turn(round: int) -> Round:
        work = algorithm.work(setup, replace(old, round=min(round, config.rounds - 1)))
        return Round.nobody(work, round, stage)

    def ask(account: Callable[[Transfer], None]) -> Asking:
        return Asking(servers, stages, stage, config.seed, old.round, turn, account)

    state = algorithm.join(setup, old, newcomers, ask(account))
    founded = np.zeros(len(newcomers), np.bool_)
    if isinstance(state, Regrouping):
        servers.inherit(state.parents)
        parents, state = state.parents, state.state
        founded = parents[state.assignment[newcomers]] != state.assignment[newcomers]
    account(_downloads(algorithm, setup, old, state, newcomers))
    clients = ask(lambda transfer: None)
    models = algorithm.tested_with(setup, state, clients)
    frame = pd.DataFrame(
        {
            "client": newcomers,
            "n": federation.sizes[newcomers],
            "cluster": state.assignment[newcomers],
            "new_cluster": founded,
        }
    )
    if models is not state.assignment:
        frame["model"] = models[newcomers]
    fit = algorithm.fit(setup, state, newcomers, clients)
    if fit is not None:
        for name in ("distance", "next_distance", "usual", "measure", "far"):
            frame[name] = getattr(fit, name)

    def accuracies(models: NDArray[np.int64], work: LocalWork | None) -> NDArray[np.float64]:
        """Of the newcomers with these models ``(B,)``, after that work."""
        if work is None:
            everyone = np.zeros(setup.clients, np.int64)
            everyone[newcomers] = models
            correct, _ = testing.evaluate(servers, everyone, clients=newcomers)
        else:
            correct, _, _ = testing.adapt(servers, Round.nobody(work, old.round, stage), newcomers, models)
        return accuracy(correct, federation.test.sizes[newcomers])

    # Where the run's clients adapt their models before every test, that is also how they train on.
    adaptation = algorithm.adaptation(setup, state)
    frame["accuracy"] = accuracies(models[newcomers], adaptation)
    if epochs:
        frame["accuracy_finetuned"] = accuracies(
            models[newcomers], replace(adaptation or work, epochs=epochs)
        )
    everybody = np.full(len(newcomers), len(servers.models) // servers.places)
    members = np.arange(len(saved.state.assignment))
    places = servers.at(saved.state.assignment, members)
    average = _average(saved.models, places, stages[stage - 1].federation.sizes[members])
    servers.models += [backend.put(average)] * servers.places
    frame["accuracy_global"] = accuracies(everybody, adaptation)
    alone = round(old.round * config.training.epochs * config.training.participation)
    alone = max(1, alone) if local_epochs is None else local_epochs
    if alone:
        servers.models += [backend.put(host.hide(host.spec.initial()))] * servers.places
        first = config.training.work(0, config.rounds)
        frame["accuracy_local"] = accuracies(everybody + 1, replace(first, epochs=alone))
    return frame


def _downloads(
    algorithm: Algorithm, setup: Setup, old: ServerState, state: ServerState, newcomers: NDArray[np.int64]
) -> Transfer:
    """The bytes of the models that newcomers receive: one each, or all among which they choose."""
    models = state.assignment[newcomers]
    plan = Plan(newcomers, models, models)
    count = algorithm.downloads(setup, old, plan) - only_asked(setup, old, plan)
    size = 4 * length(complement(algorithm.work(setup, state).personal, setup.spec.P))
    return Transfer(old.round, "client_lps", "down", "model", count * size)


def _average(
    models: NDArray[np.float32], used: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The average ``(P,)`` of models ``(K, P)`` by the training samples of the clients that use them.

    Args:
        models: rows.
        used: the row of each client ``(N,)``.
        sizes: its training samples ``(N,)``.
    """
    weights = np.bincount(used, sizes.astype(np.float64), minlength=len(models))
    total = np.zeros(models.shape[1])
    for weight, model in zip(weights.tolist(), models, strict=True):
        if weight:
            total += weight * model
    return np.asarray(total / weights.sum(), np.float32)
