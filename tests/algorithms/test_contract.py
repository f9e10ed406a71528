"""What methods of kinds that rayfl does not have yet need of the contract, each against a plain loop: noise
and clipping (DP-FedAvg), clients that start from models of earlier rounds (FedAsync, FedBuff), clients that
train several times in a round (Ditto, FedRep), and losses that look at other networks (MOON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import nn

from rayfl.algorithms import ALGORITHMS, Algorithm, Clients, Mixing, Plan, RoundReport, ServerState, Setup
from rayfl.api import run
from rayfl.config import load
from rayfl.data import Samples
from rayfl.data.held_out import read
from rayfl.data.server import ServerData
from rayfl.local import LocalObjective, Outcome, Start, Train
from rayfl.models import ModelSpec
from rayfl.random import generator
from rayfl.server_step import Averaged, ServerStep, Vectors
from rayfl.training import NO_TERMS, Guides, LocalWork, Seen, Terms, TrainedBlock, complement
from rayfl.training.batches import Batches
from rayfl.training.reports import ClientReport, Reports, Trained, UpdateLengths
from rayfl.training.server import AtServer, ServerTraining
from tests.servers.test_hierarchy import EPOCHS, GROUPS, LR, Data, last, load_initial

pytestmark = pytest.mark.usefixtures("forgotten_parts")

Vector = NDArray[np.float64]
ROUNDS = 3


@pytest.fixture
def softmax(settings: dict[str, Any]) -> dict[str, Any]:
    """Softmax regression, whole gradients."""
    training = {"epochs": EPOCHS, "batch_size": 1000, "lr": LR}
    return {**settings, "model": "linear", "training": training, "rounds": ROUNDS}


# --- DP-FedAvg (McMahan et al. 2018): each client's update clipped, noise at the server ----------------


@dataclass(frozen=True)
class Noise(ServerStep):
    """``w <- mean + sigma z``."""

    sigma: float
    seed: int
    round: int

    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[Vector, Vectors]:
        z = generator(self.seed, "noise", self.round, averaged.model).normal(size=averaged.mean.shape)
        return averaged.mean + self.sigma * z, {}


class Noisy(Algorithm):
    name: Literal["noisy", "dp_fedavg"] = "noisy"
    sigma: float = 0.01
    models: int = 1

    def initial(self, setup: Setup) -> tuple[int, ...]:
        return (0,) * self.models

    def begin(self, setup: Setup) -> ServerState:
        return ServerState(0, self.models, np.arange(setup.clients) % self.models)

    def server_step(self, setup: Setup, state: ServerState) -> ServerStep:
        return Noise(self.sigma, setup.seed, state.round)


class DPFedAvg(Noisy):
    name: Literal["dp_fedavg"] = "dp_fedavg"
    mixes_by_reports: ClassVar[bool] = True
    clip: float = 0.2

    def reports(self, setup: Setup, state: ServerState) -> Mapping[str, ClientReport]:
        return {"lengths": UpdateLengths()}

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        """Of a client whose update is too long, a part counts as the old model."""
        clipped = np.minimum(1, self.clip / np.nan_to_num(reports["lengths"], nan=1))
        entries, shape = (plan.group, np.arange(len(clipped))), (state.models, len(clipped))
        kept = sp.csr_array((1 - clipped, entries), shape=shape)
        return Mixing(sp.csr_array((clipped, entries), shape=shape), keep=kept)


def test_clipping_and_noise(softmax: dict[str, Any]) -> None:
    data, w = Data(softmax), load_initial(softmax)
    for t in range(ROUNDS):
        updates = [data.local(i, w) - w for i in range(len(GROUPS))]
        assert max(np.linalg.norm(d) for d in updates) > 0.2
        clipped = [d * min(1, 0.2 / np.linalg.norm(d)) for d in updates]
        w = w + np.mean(clipped, axis=0) + 0.01 * generator(3, "noise", t, 0).normal(size=w.shape)
    found = last(run({**softmax, "algorithm": DPFedAvg()})).models
    np.testing.assert_allclose(found, w[None], rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", [Noisy, DPFedAvg])  # sums are sent, or trained rows
def test_no_two_models_get_the_same_noise(softmax: dict[str, Any], method: type[Noisy]) -> None:
    quiet, loud = (
        last(run({**softmax, "rounds": 1, "algorithm": method(models=3, sigma=sigma)})).models
        for sigma in (0.0, 1.0)
    )
    noise = loud.astype(np.float64) - quiet
    for k in range(3):
        wanted = generator(3, "noise", 0, k).normal(size=noise.shape[1])
        np.testing.assert_allclose(noise[k], wanted, atol=1e-5)


# --- FedAsync (Xie et al. 2019): the next client to arrive started some rounds ago ---------------------

STALE = 2
ALPHA = 0.6


class FedAsync(Algorithm):
    """Client ``t`` arrives in round t, from the model of ``t % (STALE + 1)`` rounds before.

    Model s is that of s rounds ago. ``w <- (1 - a) w + a w_i`` with ``a = alpha / (1 + staleness)``.
    """

    name: Literal["fedasync"] = "fedasync"

    def initial(self, setup: Setup) -> tuple[int, ...]:
        return (0,) * (STALE + 1)

    def cohort(
        self, setup: Setup, state: ServerState, clients: Clients
    ) -> tuple[ServerState, NDArray[np.int64]]:
        return state, np.array([state.round % setup.clients])

    def plan(self, setup: Setup, state: ServerState, cohort: NDArray[np.int64]) -> Plan:
        return Plan(cohort, cohort % (STALE + 1), np.zeros_like(cohort))

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        a, shape = ALPHA / (1 + plan.cohort % (STALE + 1)), (STALE + 1, 1)
        weights, keep = (sp.csr_array((values, ([0], [0])), shape=shape) for values in (a, 1 - a))
        return Mixing(weights, keep=keep, parents=np.maximum(np.arange(STALE + 1) - 1, 0))

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        return replace(super().end(setup, state, plan, report), models=STALE + 1)


def test_clients_that_start_from_earlier_models(softmax: dict[str, Any]) -> None:
    data, ring = Data(softmax), [load_initial(softmax)] * (STALE + 1)
    for t in range(5):
        stale = t % (STALE + 1)
        a = ALPHA / (1 + stale)
        ring = [(1 - a) * ring[0] + a * data.local(t, ring[stale]), *ring[:-1]]
    found = last(run({**softmax, "rounds": 5, "algorithm": FedAsync()})).models
    np.testing.assert_allclose(found, ring, rtol=0, atol=2e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01


# --- FedBuff (Nguyen et al. 2022): updates from earlier models are added to the present one -------------


def arrived(t: int) -> NDArray[np.int64]:
    """The buffer of round t: three clients, client i from the model of ``i % (STALE + 1)`` rounds before."""
    return np.unique((np.arange(3) * 2 + t) % len(GROUPS))


class FedBuff(FedAsync):
    """``w <- w + sum_i s_i (w_i - w_{t - tau_i}) / sum_i s_i`` with ``s_i = 1 / sqrt(1 + tau_i)``."""

    name: Literal["fedasync", "fedbuff"] = "fedbuff"
    waits: bool = False

    def cohort(
        self, setup: Setup, state: ServerState, clients: Clients
    ) -> tuple[ServerState, NDArray[np.int64]]:
        return state, arrived(state.round)

    def plan(self, setup: Setup, state: ServerState, cohort: NDArray[np.int64]) -> Plan:
        return replace(super().plan(setup, state, cohort), updates=True)

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        s, shape = (1 + plan.start) ** -0.5, (STALE + 1, len(plan.cohort))
        entries = np.zeros_like(plan.cohort), np.arange(len(plan.cohort))
        parents = np.maximum(np.arange(STALE + 1) - 1, 0)
        return Mixing(sp.csr_array((s, entries), shape=shape), parents=parents)


class LateFedBuff(FedBuff):
    """The same, with A known only after training: trained rows are sent."""

    name: Literal["fedasync", "fedbuff", "late_fedbuff"] = "late_fedbuff"
    mixes_by_reports: ClassVar[bool] = True


@pytest.mark.parametrize("method", [FedBuff, LateFedBuff])
def test_updates_are_added_to_the_present_model(softmax: dict[str, Any], method: type[Algorithm]) -> None:
    data, ring = Data(softmax), [load_initial(softmax)] * (STALE + 1)
    for t in range(5):
        stale = arrived(t) % (STALE + 1)
        updates = [data.local(i, ring[k]) - ring[k] for i, k in zip(arrived(t), stale, strict=True)]
        ring = [ring[0] + np.average(updates, axis=0, weights=(1 + stale) ** -0.5), *ring[:-1]]
    found = last(run({**softmax, "rounds": 5, "algorithm": method()})).models
    np.testing.assert_allclose(found, ring, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", ["fedavg", "qfedavg"])
def test_updates_of_clients_that_start_from_their_model(
    method: str, softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding averaged updates is averaging models; running statistics of BatchNorm are averaged as usual."""
    layers = nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)
    settings = {**softmax, "algorithm": method, "model": nn.Sequential(*layers), "rounds": 2}
    plain = last(run(settings)).models
    plan = Algorithm.plan
    monkeypatch.setattr(
        ALGORITHMS[method], "plan", lambda self, *given: replace(plan(self, *given), updates=True)
    )
    np.testing.assert_allclose(last(run(settings)).models, plain, rtol=0, atol=2e-6)


# --- Ditto (Li et al. 2021, Algorithm 1): the common model, then the client's own beside it -------------


class Beside(LocalObjective):
    """``v <- v - eta (grad F_i(v) + lambda (v - w))``, w as received."""

    name: Literal["beside"] = "beside"
    personal: ClassVar[bool] = True
    lam: float = 0.3

    def state_size(self, spec: ModelSpec) -> int:
        return spec.P

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        shared = train(start.work, start.models)
        fresh = torch.from_numpy(start.fresh)[:, None]
        own = torch.where(fresh, start.models, start.state)
        work = replace(start.work, proximal=self.lam, phase=1)
        mine = train(work, own, Terms(offset=self.lam * (own - start.models)))
        return shared, Outcome(shared.rows, mine.rows, start.server)

    def client_model(self, model: torch.Tensor, state: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
        return state


class Ditto(Algorithm):
    name: Literal["ditto"] = "ditto"
    objectives: ClassVar[tuple[str, ...] | None] = ("beside",)
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "beside"}}


def test_two_models_trained_by_each_client(softmax: dict[str, Any]) -> None:
    data, w = Data(softmax), load_initial(softmax)
    own = [w] * len(GROUPS)
    for _ in range(ROUNDS):
        for i, v in enumerate(own):
            for _ in range(EPOCHS):  # whole gradients; of the term that pulls to w, too
                v = v - LR * (data.gradient(i, v) + 0.3 * (v - w))
            own[i] = v
        w = np.average([data.local(i, w) for i in range(len(GROUPS))], axis=0, weights=data.sizes)
    result = run({**softmax, "algorithm": Ditto(), "local": Beside()})
    np.testing.assert_allclose(last(result).models, w[None], rtol=0, atol=2e-5)
    for i, v in enumerate(own):
        found = np.concatenate([p.detach().numpy().ravel() for p in result.model(client=i).parameters()])
        np.testing.assert_allclose(found, v, rtol=0, atol=2e-5)
        assert np.abs(v - w).max() > 0.01


# --- FedRep (Collins et al. 2021, Algorithm 1): the head with the body held, then the body -----------------


class HeadFirst(LocalObjective):
    name: Literal["head_first"] = "head_first"
    head: tuple[str, ...] = ("fc2",)
    head_epochs: int = 3

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        head = tuple(start.spec.segment(self.head))
        body = complement(head, start.spec.P)
        first = train(replace(start.work, epochs=self.head_epochs, frozen=body), start.models)
        block = train(replace(start.work, frozen=head, phase=1), first.rows)
        return block, self.finish(start, block)


class FedRep(Algorithm):
    name: Literal["fedrep"] = "fedrep"
    objectives: ClassVar[tuple[str, ...] | None] = ("head_first",)
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "head_first"}}

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        assert isinstance(setup.local, HeadFirst)
        return replace(super().work(setup, state), personal=tuple(setup.spec.segment(setup.local.head)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.fc1(x.flatten(1)).tanh()
        logits: torch.Tensor = self.fc2(hidden)
        return logits


def test_a_part_of_the_model_after_another(softmax: dict[str, Any]) -> None:
    """Against PyTorch with ``requires_grad`` and whole gradients in double precision."""
    settings = {**softmax, "algorithm": FedRep(), "local": HeadFirst(), "model": Network()}
    data, body = Data(softmax), load_initial(settings)
    module, heads = Network().double(), [body[64 * 5 + 5 :]] * len(GROUPS)
    body = body[: 64 * 5 + 5]

    def descend(part: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
        for _ in range(epochs):
            loss = nn.functional.cross_entropy(module(x), y)
            gradients = torch.autograd.grad(loss, list(part.parameters()))
            with torch.no_grad():
                for p, g in zip(part.parameters(), gradients, strict=True):
                    p -= LR * g

    for _ in range(ROUNDS):
        bodies = []
        for i in range(len(GROUPS)):
            x, y = torch.from_numpy(data.x[i]), torch.from_numpy(data.y[i].argmax(1))
            nn.utils.vector_to_parameters(
                torch.from_numpy(np.concatenate([body, heads[i]])), module.parameters()
            )
            descend(module.fc2, x, y, 3)
            descend(module.fc1, x, y, EPOCHS)
            trained = nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()
            bodies.append(trained[: len(body)])
            heads[i] = trained[len(body) :]
        body = np.average(bodies, axis=0, weights=data.sizes)
    result = run(settings)
    for i, head in enumerate(heads):
        found = np.concatenate([p.detach().numpy().ravel() for p in result.model(client=i).parameters()])
        np.testing.assert_allclose(found, np.concatenate([body, head]), rtol=0, atol=1e-4)


# --- MOON (Li et al. 2021, Algorithm 1): features near the received model's, far from the last own ------


class Contrast(LocalObjective):
    name: Literal["contrast"] = "contrast"
    mu: float = 2.0
    temperature: float = 0.5

    def state_size(self, spec: ModelSpec) -> int:
        return spec.P

    def terms(self, start: Start) -> Terms:
        fresh = torch.from_numpy(start.fresh)[:, None]
        return Terms(
            guides=Guides((start.models, torch.where(fresh, start.models, start.state)), self.contrast)
        )

    def contrast(self, own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        near, far = (
            nn.functional.cosine_similarity(own.features, other.features) / self.temperature
            for other in others
        )
        return self.mu * nn.functional.softplus(far - near)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        return Outcome(block.rows, block.rows.clone(), start.server)


class MOON(Algorithm):
    name: Literal["moon"] = "moon"
    objectives: ClassVar[tuple[str, ...] | None] = ("contrast",)
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "contrast"}}


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_loss_that_looks_at_other_networks(softmax: dict[str, Any], engine: str) -> None:
    """Against PyTorch with the paper's formula and whole gradients in double precision."""
    settings = {**softmax, "algorithm": MOON(), "local": Contrast(), "model": Network()}
    settings["training"] = {**softmax["training"], "engine": engine}
    data, w = Data(softmax), load_initial(settings)
    own, glob, prev = (Network().double() for _ in range(3))
    last_model: list[Vector | None] = [None] * len(GROUPS)

    def features(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = network.fc1(x).tanh()
        return found / found.norm(dim=1, keepdim=True)

    def put(network: nn.Module, vector: Vector) -> None:
        nn.utils.vector_to_parameters(torch.from_numpy(vector), network.parameters())

    for _ in range(ROUNDS):
        trained = []
        for i in range(len(GROUPS)):
            x, y = torch.from_numpy(data.x[i]), torch.from_numpy(data.y[i].argmax(1))
            before = last_model[i]
            for network, vector in ((own, w), (glob, w), (prev, w if before is None else before)):
                put(network, vector.copy())
            for _ in range(EPOCHS):
                z = features(own, x)
                near, far = ((z * features(n, x).detach()).sum(1) / 0.5 for n in (glob, prev))
                term = -torch.log(near.exp() / (near.exp() + far.exp()))
                loss = nn.functional.cross_entropy(own(x), y) + 2.0 * term.mean()
                gradients = torch.autograd.grad(loss, list(own.parameters()))
                with torch.no_grad():
                    for p, g in zip(own.parameters(), gradients, strict=True):
                        p -= LR * g
            trained.append(nn.utils.parameters_to_vector(own.parameters()).detach().numpy().copy())
            last_model[i] = trained[-1]
        w = np.average(trained, axis=0, weights=data.sizes)
    found = last(run(settings)).models[0]
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-4)
    plain = last(run({**settings, "local": Contrast(mu=0.0)})).models[0]
    assert np.abs(plain - w).max() > 0.01


class FailsOnce(Beside):
    """The second training of clients with ``size`` samples starts from NaN."""

    name: Literal["beside", "fails_once"] = "fails_once"
    size: int = 0

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        def broken(work: LocalWork, models: torch.Tensor, terms: Terms = NO_TERMS) -> TrainedBlock:
            if work.phase:
                models = models.clone()
                models[torch.from_numpy(start.sizes == self.size)] = float("nan")
            return train(work, models, terms)

        return super().train(start, broken)


class FailingDitto(Ditto):
    name: Literal["ditto", "failing_ditto"] = "failing_ditto"
    objectives: ClassVar[tuple[str, ...] | None] = ("fails_once",)
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fails_once"}}


def test_a_client_that_fails_in_its_second_training_has_failed(softmax: dict[str, Any]) -> None:
    data, w = Data(softmax), load_initial(softmax)
    size = next(n for n in data.sizes if data.sizes.count(n) == 1)
    there = [i for i in range(len(GROUPS)) if data.sizes[i] != size]
    execution = {**softmax.get("execution", {}), "tolerate_failures": 1}
    settings = {**softmax, "rounds": 1, "execution": execution}
    result = run({**settings, "algorithm": FailingDitto(), "local": FailsOnce(size=size)})
    mean = np.average([data.local(i, w) for i in there], axis=0, weights=[data.sizes[i] for i in there])
    np.testing.assert_allclose(last(result).models, mean[None], rtol=0, atol=2e-5)


# --- FedDF (Lin et al. 2020, Algorithm 1): the server distils its clients' models into their average ------


@dataclass(frozen=True)
class Logits(ClientReport):
    """What each trained model says of the server's samples ``(B, s, C)``."""

    combined = True

    data: ServerData
    inputs: NDArray[np.generic] | None = field(default=None, compare=False)

    def prepare(self, samples: Samples, seed: int) -> Logits:
        return replace(self, inputs=self.data.draw(samples, seed))

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        assert self.inputs is not None
        x = trained.batches.inputs(self.inputs)
        return np.stack([trained.outputs(row, x).cpu().numpy() for row in trained.rows])


@dataclass(frozen=True)
class Distil(ServerTraining):
    """Steps on ``KL(softmax(mean of the clients' logits) || student)``."""

    data: ServerData
    steps: int
    lr: float
    inputs: NDArray[np.generic] | None = field(default=None, compare=False)

    def prepare(self, samples: Samples, seed: int) -> Distil:
        return replace(self, inputs=self.data.draw(samples, seed))

    def train(self, at: AtServer) -> None:
        assert self.inputs is not None
        x = at.batches.inputs(self.inputs)
        teacher = torch.from_numpy(at.reports["logits"].mean(axis=0)).to(x).softmax(1)
        parameters = list(at.module.parameters())
        for batch in at.shuffled(len(x), len(x), self.steps):
            logs = at.module(x[batch]).log_softmax(1)
            loss = nn.functional.kl_div(logs, teacher[batch], reduction="batchmean")
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.data -= self.lr * g


SERVER_SAMPLES = 100


class FedDF(Algorithm):
    name: Literal["feddf"] = "feddf"
    steps: int = 4
    lr: float = 0.5

    @property
    def public_samples(self) -> int:
        return SERVER_SAMPLES

    def reports(self, setup: Setup, state: ServerState) -> Mapping[str, ClientReport]:
        return {"logits": Logits(ServerData(samples=SERVER_SAMPLES))}

    def server_training(self, setup: Setup, state: ServerState) -> ServerTraining:
        return Distil(ServerData(samples=SERVER_SAMPLES), self.steps, self.lr)


def distilled(data: Data, w: Vector, clients: Sequence[int], x: Vector) -> Vector:
    """A round of FedDF with softmax regression, in NumPy."""

    def logits(v: Vector) -> Vector:
        matrix, bias = v[:-10].reshape(10, -1), v[-10:]
        return np.asarray(x @ matrix.T + bias)

    def softmax_of(z: Vector) -> Vector:
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return np.asarray(e / e.sum(axis=1, keepdims=True))

    locals_ = [data.local(i, w) for i in clients]
    w = np.average(locals_, axis=0, weights=[data.sizes[i] for i in clients])
    teacher = softmax_of(np.mean([logits(v) for v in locals_], axis=0))
    for _ in range(4):
        delta = (softmax_of(logits(w)) - teacher) / len(x)
        w = w - 0.5 * np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)])
    return w


def public_inputs(settings: dict[str, Any]) -> Vector:
    config = load(settings)
    samples = read(config.data, Path(), config.public_samples, config.seed)
    drawn = ServerData(samples=SERVER_SAMPLES).draw(samples, config.seed)
    x = Batches(samples, torch.device("cpu")).inputs(drawn)
    return np.asarray(x.reshape(len(x), -1).double().numpy())


def test_training_at_the_server(softmax: dict[str, Any]) -> None:
    settings = {
        **softmax,
        "algorithm": FedDF(),
        "data": {**softmax.get("data", {}), "server_share": SERVER_SAMPLES},
    }
    data, w, x = Data(settings), load_initial(settings), public_inputs(settings)
    for _ in range(ROUNDS):
        w = distilled(data, w, range(len(GROUPS)), x)
    found = last(run(settings)).models
    np.testing.assert_allclose(found, w[None], rtol=0, atol=5e-5)
    plain = last(run({**settings, "algorithm": FedDF(steps=0)})).models
    assert np.abs(plain - found).max() > 1e-3
