"""``rayfl newcomers``: clients that come after a run has ended find their cluster, and are tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.algorithms import Regrouping, ServerState
from rayfl.config import Config
from rayfl.data import Federation, Ragged, Samples, read_npz
from rayfl.errors import DataError, RayflError
from rayfl.evaluation import accuracy
from rayfl.local.sgd import SGD
from rayfl.runtime import session
from rayfl.runtime.asking import Asking
from rayfl.runtime.backend import Backend, InlineBackend
from rayfl.runtime.checkpoint import Checkpoint, checkpoints
from rayfl.runtime.driver import block_rule, setup_of, stage_of
from rayfl.runtime.jobs import HostSpec
from rayfl.runtime.rundir import RunDirectory
from rayfl.runtime.servers import Round, Servers
from rayfl.runtime.states import ClientStates


def welcome(path: Path | str, data: Path, epochs: int = 5) -> pd.DataFrame:
    """Assign newcomers to the clusters of a run, as it ended or was stopped; fine-tune and test them.

    Args:
        path: the run directory.
        data: an .npz file with ``x_train``, ``y_train``, ``x_test``, ``y_test``, and ``client_train`` and
            ``client_test``, the number of the newcomer (from 0) that each sample belongs to; without the
            latter two all samples are one newcomer's.
        epochs: of fine-tuning; 0 for none.

    Returns:
        A row a newcomer: ``client`` (its id, after those of the run), ``n``, ``cluster`` (one that the run
        does not have if it founds its own), ``model`` (if the method lets it use another than its cluster's),
        ``accuracy`` in percent with the model that it is given, adapted as the run's clients do before a test
        (Per-FedAvg), and ``accuracy_finetuned``. It is written to ``newcomers.csv`` in the run directory.

    Raises:
        DataError: if the file does not fit the run's data.
        RayflError: if the run has no checkpoint.
    """
    directory = RunDirectory.open(path)
    config = directory.config
    found = checkpoints(directory.path / "checkpoints")
    if not found:
        raise RayflError(f"{directory.path}: has no checkpoint yet; let the run finish first")
    saved = Checkpoint.load(found[-1])
    stages, host = session.build(config, directory.scaling)
    # A run that was stopped has not seen all of its own events.
    old = stages[stage_of(stages, saved.state.round - 1)].federation
    federation = with_newcomers(old, data)
    backend = InlineBackend()
    try:
        backend.start((federation,), host)
        frame = _welcome(config, host, backend, saved, federation, old.clients, epochs, old.samples)
    finally:
        backend.close()
    directory.write_frame("newcomers.csv", frame)
    return frame


def with_newcomers(old: Federation, data: Path) -> Federation:
    """The federation with further clients, whose samples follow the old ones.

    Raises:
        DataError: if the samples are not of the same kind as the run's.
    """
    own, new = old.samples, read_npz(data, data.stem)
    if own.label_maps is not None:
        raise DataError(f"{data}: the run's clients see labels differently; newcomers cannot be added to it")
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
    samples = replace(
        own,
        x_train=np.concatenate([own.x_train, new.x_train]),
        y_train=np.concatenate([own.y_train, new.y_train]),
        x_test=np.concatenate([own.x_test, new.x_test]),
        y_test=np.concatenate([own.y_test, new.y_test]),
        domain_train=None,
        domain_test=None,
    )
    nobody = [np.empty(0, np.int32)] * count
    return Federation(
        samples,
        _appended(old.train, [np.flatnonzero(train == c) + len(own.x_train) for c in range(count)]),
        _appended(old.validation, nobody),
        _appended(old.test, [np.flatnonzero(test == c) + len(own.x_test) for c in range(count)]),
    )


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


def _appended(lists: Ragged, more: Sequence[NDArray[np.integer]]) -> Ragged:
    return Ragged.of([*lists, *more])


def _welcome(
    config: Config,
    host: HostSpec,
    backend: Backend,
    saved: Checkpoint,
    federation: Federation,
    first: int,
    epochs: int,
    samples: Samples,
) -> pd.DataFrame:
    algorithm = config.algorithm
    newcomers = np.arange(first, federation.clients)
    edges = config.hierarchy.place(first, config.seed)
    edges = np.concatenate([edges, (newcomers - first) % (edges.max() + 1)])  # dealt in turn
    servers = Servers(
        backend,
        host.spec,
        federation,
        block_size=block_rule(config, federation, host),
        batch_size=config.evaluation.batch_size,
        edges=edges,
    )
    setup = setup_of(config, federation, host.spec, servers.edges)
    servers.models = [backend.put(row) for row in saved.models]
    servers.states = ClientStates.restore(backend, saved.state_clients, saved.state_rows)
    servers.updates = ClientStates.restore(backend, saved.update_clients, saved.update_rows)
    state = algorithm.grow(setup, saved.state)
    work = config.training.work(max(0, state.round - 1), config.rounds)

    def turn(round: int) -> Round:
        work = algorithm.work(setup, replace(state, round=min(round, config.rounds - 1)))
        return Round.nobody(work, round)

    clients = Asking(
        servers, federation, 0, config.seed, state.round, turn, lambda transfer: None, public=samples
    )
    state = _taken(servers, algorithm.join(setup, state, newcomers, clients))
    models = algorithm.tested_with(setup, state, clients)
    tests = federation.test.take(newcomers)
    frame = pd.DataFrame(
        {
            "client": newcomers,
            "n": federation.sizes[newcomers],
            "cluster": state.assignment[newcomers],
        }
    )
    local = SGD()
    if models is not state.assignment:
        frame["model"] = models[newcomers]
    # Where the run's clients adapt their models before every test, that is also how they train on.
    adaptation = algorithm.adaptation(setup, state)
    if adaptation is None:
        correct = servers.evaluate(models, (), local)[0][newcomers]
    else:
        correct, _, _ = servers.adapt(Round.nobody(adaptation, state.round), newcomers, models[newcomers])
    frame["accuracy"] = accuracy(correct, tests.sizes)
    if epochs:
        tuning = Round.nobody(replace(adaptation or work, epochs=epochs), state.round)
        correct, _, _ = servers.adapt(tuning, newcomers, models[newcomers])
        frame["accuracy_finetuned"] = accuracy(correct, tests.sizes)
    return frame


def _taken(servers: Servers, outcome: ServerState | Regrouping) -> ServerState:
    if isinstance(outcome, ServerState):
        return outcome
    servers.inherit(outcome.parents)
    return outcome.state
