"""``rayfl newcomers``: assign clients that join after a run to clusters, fine-tune their models, and test
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.algorithms import Plan, Regrouping, Served
from rayfl.backend import Backend
from rayfl.clients.jobs import HostSpec
from rayfl.config import Config
from rayfl.data import Federation, Ragged, Samples, read_npz
from rayfl.data.arrays import Predicted
from rayfl.data.base import MoreSamples, Names, called, in_order
from rayfl.data.datasets._images import ImageDataset
from rayfl.data.events import Stage
from rayfl.data.own import draw_test_mask
from rayfl.errors import ConfigError, DataError
from rayfl.evaluation import Ledger, Transfer, accuracy, perplexity
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.sampling.uniform import Uniform
from rayfl.servers import building, hooks, testing
from rayfl.servers.building import servers_of, setup_of, stage_of
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.queries import ClientQueries
from rayfl.servers.records import shares_of
from rayfl.servers.rounds import Round
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork, complement, length

PLACED = (
    "client", "name", "n", "cluster", "new_cluster", "model",
    "distance", "next_distance", "usual", "measure", "far",
)  # fmt: skip
"""The columns about the assignment of a newcomer; the others are tests."""


@dataclass(frozen=True)
class Owners:
    """How the samples of a table or folder are divided among newcomers, and into training and test samples.

    Attributes:
        column: name of the column with each sample's newcomer; None: that of ``partition.name=column``, else
            all samples belong to one newcomer.
        test_fraction: fraction of each newcomer's samples for tests, at least one if it has two or more;
            used only if the source has no test part.
        seed: of the draw of test samples.
    """

    column: str | None = None
    test_fraction: float = 0.25
    seed: int = 0


def assign_newcomers(
    path: Path | str,
    data: Path,
    epochs: int = 5,
    local_epochs: int | None = None,
    owners: Owners = Owners(),
    say: Callable[[str], None] = warnings.warn,
) -> pd.DataFrame:
    """Assign newcomers to the clusters of a finished or stopped run; fine-tune and test them.

    Args:
        path: the run directory.
        data: an .npz file with ``x_train``, ``y_train``, ``x_test``, ``y_test``, and ``client_train`` and
            ``client_test``, the number of the newcomer (from 0) that each sample belongs to, or its id as
            text; without the latter two all samples belong to one newcomer. Colour images have the axes of
            ``data.layout`` if the run's data do; labels are as the newcomers see them. Or a table or folder
            of images like those of the run, with ``owners``.
        epochs: of fine-tuning; 0 for none.
        local_epochs: of training alone; 0 for none. By default as many as a client of the run has had on
            average.
        owners: how the samples of a table or folder are divided among newcomers.
        say: called with a line for each damaged checkpoint, of which an older one is used then, and if the
            results of an earlier call are replaced.

    Returns:
        One row per newcomer. The table is written to ``newcomers.csv`` in the run directory:

        - ``client``: its number, after those of the run; ``name``: its id, if the file has ids; ``n``:
          training samples;
        - ``cluster``, and ``new_cluster``: whether the newcomer has founded this cluster;
        - ``model``, if the method lets it use another model than its cluster's;
        - ``distance`` to its cluster, ``next_distance`` to the nearest other cluster, ``usual``, the largest
          distance of a member of the cluster to the cluster, ``measure``, what a distance is (see
          ``fit`` of the method), and ``far``: whether the distance is more than three times the usual;
        - ``accuracy`` in percent with the model that it receives, adapted as the run's clients do before a
          test (Per-FedAvg), and ``accuracy_finetuned``;
        - ``accuracy_global``: with the average of all clusters' models, each weighted by the training samples
          of the clients that use it; ``accuracy_local``: with a model that it has trained alone from w_0.
        - the other measures of the loss, with the same endings: ``rmse``, ``rmse_finetuned``...; ``loss`` if
          there are no accuracies; ``perplexity`` of next words.

        The bytes sent to assign them, also by old clients, and to give them their models are written to
        ``newcomers_communication.csv``, with the columns of ``communication.csv``.

    Raises:
        DataError: if the file does not fit the run's data.
        RayflError: if the run has no checkpoint.
    """
    directory = RunDirectory.open(path)
    config = directory.config
    if not checkpoints(directory.path / "checkpoints"):  # before the data are read
        raise directory.without_checkpoint()
    stages, host = building.build(config, directory.scaling, reading=True)
    directory.verify(stages)
    setup = setup_of(config, stages[0].federation, host.spec)
    kind = type(config.algorithm.begin(setup))
    saved, notes = Checkpoint.newest(directory.path / "checkpoints", kind, reading=True)
    assert saved is not None, "there are checkpoints"
    for note in notes:
        say(note)
    # A run that was stopped has not reached all of its events.
    stages = stages[: stage_of(stages, saved.state.round - 1) + 1]
    new = read_newcomers(config, stages[0].federation.samples, data, owners)
    stages = with_newcomers(stages, saved.state.round, new)
    backend = InlineBackend()
    try:
        backend.start(tuple(stage.federation for stage in stages), host)
        newcomers = _Newcomers(config, host, backend, saved, stages)
        frame = newcomers.assign()
        if new.names is not None:
            frame.insert(1, "name", new.names.tolist())
        newcomers.add_tests(frame, epochs, local_epochs)
    finally:
        backend.close()
    if (directory.path / "newcomers.csv").exists():
        say("newcomers.csv of an earlier call is replaced")
    directory.write_frame("newcomers.csv", frame)
    directory.write_frame("newcomers_communication.csv", Ledger().add(*newcomers.transfers).to_frame())
    directory.republish()
    return frame


@dataclass(frozen=True)
class NewSamples:
    """The samples of B newcomers.

    Attributes:
        samples: of the newcomers alone.
        train, test: the positions of each newcomer's samples, ``B`` arrays.
        names: their ids ``(B,)``, if the file has ids and not numbers.
    """

    samples: Samples
    train: list[NDArray[np.int64]]
    test: list[NDArray[np.int64]]
    names: Names | None = None


def read_newcomers(
    config: Config,
    run_samples: Samples,
    data: Path,
    owners: Owners = Owners(),
) -> NewSamples:
    """Read the samples of newcomers, as the run's own data are read.

    Raises:
        DataError: if the samples are not of the same kind as the run's, ``run_samples``.
        ConfigError: if ``owners`` would change nothing.
    """
    more = None if data.suffix == ".npz" else config.data.read_more(data, run_samples)
    if more is None:
        if owners != Owners():
            what = "a column and a fraction for tests are for tables and folders"
            raise ConfigError(
                str(data), what, "an .npz file has client_train, client_test and its own test part"
            )
        tokens = bool(getattr(config.data, "tokens", False))
        predict: Predicted = getattr(config.data, "predict", "class")
        new = read_npz(data, data.stem, getattr(config.data, "layout", "auto"), tokens, predict)
        if isinstance(config.data, ImageDataset):
            new = config.data.reshaped(new)
        train, test, names = _owners_in_file(data, new)
    else:
        new, train, test, names = _divide(
            data, more, run_samples, _owner_ids(config, data, more, owners), owners
        )
    if run_samples.tokens and len(new.vocabulary) > len(run_samples.vocabulary):
        top = len(new.vocabulary) - 1
        raise DataError(
            f"{data}: has word {top}; the run's model knows words 0 to {len(run_samples.vocabulary) - 1}"
        )
    if new.shape != run_samples.shape or new.x_train.dtype != run_samples.x_train.dtype:
        raise DataError(
            f"{data}: samples {new.shape} of {new.x_train.dtype}; the run's are {run_samples.shape} of "
            f"{run_samples.x_train.dtype}"
        )
    if new.numeric != run_samples.numeric or (run_samples.numeric and new.outputs != run_samples.outputs):
        kinds = [f"{s.outputs} numbers per sample" if s.numeric else "classes" for s in (new, run_samples)]
        raise DataError(f"{data}: y holds {kinds[0]}; the run's model predicts {kinds[1]}")
    for targets in (new.targets_train, new.targets_test):
        if targets is not None and new.numeric:
            try:
                config.loss.check(np.asarray(targets, np.float32))
            except ConfigError as error:
                raise DataError(f"{data}: {error.what}") from None
    top = int(max(new.y_train.max(), new.y_test.max()))
    if top >= run_samples.classes:
        raise DataError(
            f"{data}: has label {top}; the run's model knows labels 0 to {run_samples.classes - 1}"
        )
    count = int(max(train.max(), test.max())) + 1
    for name, owned in (("client_train", train), ("client_test", test)):
        # n samples belong to at most n newcomers, so it is enough to check the first n + 1.
        missing = np.setdiff1d(np.arange(min(count, len(owned) + 1)), owned)
        if len(missing):
            where = name if more is None else f"its {'training' if name == 'client_train' else 'test'} part"
            raise DataError(f"{data}: newcomer {called(names, missing[0])} has no sample in {where}")
    lists = [[np.flatnonzero(owned == c) for c in range(count)] for owned in (train, test)]
    return NewSamples(new, lists[0], lists[1], names)


def _owner_ids(config: Config, data: Path, more: MoreSamples, owners: Owners) -> Names:
    """The newcomer of each sample of a table or folder, by its id ``(n,)``.

    Raises:
        DataError: if there is no such column, or it is empty for a sample.
    """
    column = owners.column or getattr(config.partition, "column", None)
    if column is None:
        return np.zeros(len(more.y), np.int64).astype(str)
    if column not in more.columns:
        available = ", ".join(sorted(more.columns)) or "none"
        raise DataError(f"{data}: has no column {column!r} with each sample's newcomer; columns: {available}")
    ids = more.columns[column]
    empty = np.flatnonzero(ids == "")
    if len(empty):
        raise DataError(f"{data}: column {column!r} is empty for sample {empty[0]}")
    return ids


def _divide(
    data: Path, more: MoreSamples, run_samples: Samples, ids: Names, owners: Owners
) -> tuple[Samples, NDArray[np.int64], NDArray[np.int64], Names]:
    """Training and test samples, the newcomer of each of them, and the newcomers' ids."""
    names = np.array(in_order(np.unique(ids).tolist()))
    number = pd.Index(names).get_indexer(pd.Index(ids)).astype(np.int64)
    test = more.test
    if test is None:
        test = draw_test_mask(number, owners.test_fraction, owners.seed, str(data), least=1)
    targets = more.targets
    samples = Samples(
        data.stem,
        more.x[~test],
        more.y[~test],
        more.x[test],
        more.y[test],
        run_samples.classes,
        targets_train=None if targets is None else targets[~test],
        targets_test=None if targets is None else targets[test],
    )
    return samples, number[~test], number[test], names


def with_newcomers(stages: Sequence[Stage], round: int, new: NewSamples) -> tuple[Stage, ...]:
    """The stages with additional clients, whose samples follow the old ones, and a stage in which they join.

    Args:
        stages: of the run so far.
        round: how many rounds are complete.
        new: the newcomers' samples.
    """
    run_samples, count = stages[0].federation.samples, len(new.train)
    samples = replace(
        run_samples,
        x_train=np.concatenate([run_samples.x_train, new.samples.x_train]),
        y_train=np.concatenate([run_samples.y_train, new.samples.y_train]),
        x_test=np.concatenate([run_samples.x_test, new.samples.x_test]),
        y_test=np.concatenate([run_samples.y_test, new.samples.y_test]),
        domain_train=None,
        domain_test=None,
        targets_train=_concatenated(run_samples.targets_train, new.samples.targets_train),
        targets_test=_concatenated(run_samples.targets_test, new.samples.targets_test),
    )
    train_count, test_count = len(run_samples.x_train), len(run_samples.x_test)
    no_samples = [np.empty(0, np.int64)] * count
    numbers = np.arange(count) + stages[0].federation.clients
    new_names = numbers.astype(str) if new.names is None else new.names

    def extended(
        old: Federation, new_train: Sequence[NDArray[np.int64]], new_test: Sequence[NDArray[np.int64]]
    ) -> Federation:
        return Federation(
            samples,
            _append(old.train, new_train, train_count, len(samples.x_train)),
            _append(old.validation, no_samples, train_count, len(samples.x_train)),
            _append(old.test, new_test, test_count, len(samples.x_test)),
            names=None if old.names is None else np.concatenate([old.names, new_names]),
        )

    before = [
        replace(
            stage,
            federation=extended(stage.federation, no_samples, no_samples),
            active=np.concatenate([stage.active, np.zeros(count, np.bool_)]),
        )
        for stage in stages
    ]
    last = stages[-1]
    federation = extended(
        last.federation, [ids + train_count for ids in new.train], [ids + test_count for ids in new.test]
    )
    return (*before, Stage(round, federation, federation.sizes > 0, joined=numbers))


def _owners_in_file(
    data: Path, samples: Samples
) -> tuple[NDArray[np.int64], NDArray[np.int64], Names | None]:
    """The newcomer of each training and test sample, and the newcomers' ids if the file has such."""
    owner_arrays = []
    with np.load(data, allow_pickle=False) as content:
        given = [name for name in ("client_train", "client_test") if name in content]
        if len(given) == 1:  # without both, all samples are of one newcomer
            other = "client_test" if given == ["client_train"] else "client_train"
            raise DataError(f"{data}: has {given[0]} but no {other}; both name the newcomer of each sample")
        for name, count in (("client_train", len(samples.y_train)), ("client_test", len(samples.y_test))):
            try:
                owners = np.asarray(content[name]) if name in content else np.zeros(count, np.int64)
            except ValueError:  # objects, which may be code
                owners = np.empty(0)
            is_text = owners.shape == (count,) and owners.dtype.kind == "U"
            is_integer = owners.shape == (count,) and owners.dtype.kind in "iu"
            if not is_text and (not is_integer or owners.astype(np.int64).min() < 0):
                raise DataError(
                    f"{data}: {name} must hold {count} numbers from 0, one per sample, or ids as text"
                )
            owner_arrays.append(owners if is_text else owners.astype(np.int64))
    kinds = {owners.dtype.kind for owners in owner_arrays}
    if "U" not in kinds:
        return owner_arrays[0], owner_arrays[1], None
    if len(kinds) > 1:
        raise DataError(f"{data}: client_train and client_test must both hold numbers, or both ids as text")
    names = np.array(in_order(np.unique(np.concatenate(owner_arrays)).tolist()))
    index = pd.Index(names)
    train, test = (index.get_indexer(pd.Index(owners)).astype(np.int64) for owners in owner_arrays)
    return train, test, names


def _concatenated(old: NDArray[Any] | None, new: NDArray[Any] | None) -> NDArray[Any] | None:
    return None if old is None or new is None else np.concatenate([old, new])


def _append(lists: Ragged, added: Sequence[NDArray[np.integer]], old_count: int, new_count: int) -> Ragged:
    """Convert (virtual) ids among ``old_count`` samples to ids among ``new_count``, and append more lists."""
    maps, ids = np.divmod(lists.values, old_count)
    values = [part for part in added if len(part)]
    sizes = np.array([len(part) for part in added], np.int64)
    return Ragged(
        np.concatenate([maps * new_count + ids, *values]).astype(np.int32),
        np.concatenate([lists.offsets, lists.offsets[-1] + np.cumsum(sizes)]),
    )


class _Newcomers:
    """B newcomers, and the servers in the state in which the run left them.

    Args:
        config: of the run.
        host: what clients run.
        backend: executes the work; started.
        saved: the run's last checkpoint.
        stages: see :func:`with_newcomers`.
    """

    def __init__(
        self, config: Config, host: HostSpec, backend: Backend, saved: Checkpoint, stages: Sequence[Stage]
    ) -> None:
        self.config, self.host, self.saved, self.stages = config, host, saved, stages
        self.federation, self.ids = stages[-1].federation, stages[-1].joined
        servers = self.servers = servers_of(config, host, backend, self.federation, len(self.ids))
        servers.models = [backend.put(row) for row in saved.models]
        states, updates = saved.stored.get("states"), saved.stored.get("updates")
        servers.states = ClientStates.restore(backend, saved.state_clients, saved.state_rows, states)
        servers.updates = ClientStates.restore(backend, saved.update_clients, saved.update_rows, updates)
        self.setup = setup_of(config, self.federation, host.spec, servers.edges)
        self.state_before = config.algorithm.grow(self.setup, saved.state)  # before they are assigned
        self.state = self.state_before
        self.transfers: list[Transfer] = []

    def assign(self) -> pd.DataFrame:
        """Assign them; the columns up to ``far`` of :func:`assign_newcomers`."""
        algorithm, ids, before = self.config.algorithm, self.ids, self.state_before
        joined = algorithm.join(self.setup, before, ids, self._queries(self.transfers.append))
        state = hooks.moved(algorithm, self.setup, "join", joined, before.models)
        founded = np.zeros(len(ids), np.bool_)
        if isinstance(state, Regrouping):
            self.servers.inherit(state.parents)
            parents, state = state.parents, state.state
            founded = parents[state.assignment[ids]] != state.assignment[ids]
        self.state = state
        self.transfers.append(self._downloads())
        clients = self._queries()
        self.models = algorithm.tested_with(self.setup, state, clients)
        frame = pd.DataFrame(
            {
                "client": ids,
                "n": self.federation.sizes[ids],
                "cluster": state.assignment[ids],
                "new_cluster": founded,
            }
        )
        if self.models is not state.assignment:
            for name, values in shares_of(self.models).items():
                frame[name] = values[ids]
        fit = algorithm.fit(self.setup, state, ids, clients)
        if fit is not None:
            for name in ("distance", "next_distance", "usual", "measure", "far"):
                frame[name] = getattr(fit, name)
        return frame

    def add_tests(self, frame: pd.DataFrame, epochs: int, local_epochs: int | None) -> None:
        """Test them, see :func:`assign_newcomers`; adds the columns after those of :data:`PLACED`."""
        config, saved, rounds = self.config, self.saved, self.state_before.round
        models = self.models
        # If the run's clients adapt their models before every test, fine-tuning does the same work.
        adaptation = hooks.adaptation(config.algorithm, self.setup, self.state)
        self._test(frame, "", models, adaptation)
        if epochs:
            work = adaptation or config.training.work(max(0, rounds - 1), config.rounds)
            if adaptation is None:
                work = config.local.finetuning(work, self.host.spec) or work
            self._test(frame, "_finetuned", models, replace(work, epochs=epochs))
        sizes = self.stages[-2].federation.sizes[: len(saved.state.assignment)]
        weights = self.servers.weights(saved.state.served, sizes)
        # Newcomers may have founded clusters since, which no client of the run uses.
        average = self._add_model(_average(saved.models, weights[: len(saved.models)]))
        self._test(frame, "_global", average, adaptation)
        alone_epochs = round(rounds * config.training.epochs * config.training.participation)
        alone_epochs = max(1, alone_epochs) if local_epochs is None else local_epochs
        if alone_epochs:
            untrained = self._add_model(self.host.permute(self.host.spec.initial()))
            work = replace(config.training.work(0, config.rounds), epochs=alone_epochs)
            self._test(frame, "_local", untrained, work)

    def _queries(self, account: Callable[[Transfer], None] = lambda transfer: None) -> ClientQueries:
        return ClientQueries(self.config, self.servers, self.stages, self.state_before, account)

    def _add_model(self, vector: NDArray[np.float32]) -> NDArray[np.int64]:
        """Give the servers another model ``(P,)``; returns its number, repeated for each client ``(N,)``."""
        number = len(self.servers.models) // self.servers.edge_count
        self.servers.models += [self.servers.backend.put(vector)] * self.servers.edge_count
        return np.full(self.setup.clients, number)

    def _test(self, frame: pd.DataFrame, ending: str, models: Served, work: LocalWork | None) -> None:
        """Test the newcomers and add columns with this ending. ``models`` are those of all clients, which
        newcomers first train with ``work`` if it is given.
        """
        if work is None:
            score = testing.evaluate(self.servers, models, clients=self.ids)
        else:
            # with the settings of the last round, as the run's own clients are tested
            number, stage = max(0, self.state_before.round - 1), len(self.stages) - 1
            last = Round.without_clients(work, number, stage, self.config.order)
            score = testing.adapt(self.servers, last, self.ids, models[self.ids]).scores["test"]
        loss, sizes = self.config.loss, self.federation.predictions[self.ids]
        if loss.accurate:
            frame[f"accuracy{ending}"] = accuracy(score.correct, sizes)
        else:
            frame[f"loss{ending}"] = score.losses / sizes
        if self.federation.samples.task == "words":
            frame[f"perplexity{ending}"] = perplexity(score.losses, sizes)
        for name, values in loss.measured(score.sums, sizes).items():
            frame[f"{name}{ending}"] = values

    def _downloads(self) -> Transfer:
        """The bytes of the models that newcomers receive: one each, or all among which they choose."""
        algorithm, state = self.config.algorithm, self.state
        setup = replace(self.setup, sampling=Uniform())  # without it, a sampling may ask other clients, too
        models = state.assignment[self.ids]
        plan = Plan(self.ids, models, models)
        count = hooks.downloads(algorithm, setup, state, plan)
        size = 4 * length(complement(hooks.work(algorithm, setup, state).personal, setup.spec.P))
        return Transfer(state.round, "client_lps", "down", "model", count * size)


def _average(models: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """The average ``(P,)`` of models ``(K, P)`` with weights ``(K,)``."""
    total = np.zeros(models.shape[1])
    for weight, model in zip(weights.tolist(), models, strict=True):
        if weight:
            total += weight * model
    return np.asarray(total / weights.sum(), np.float32)
