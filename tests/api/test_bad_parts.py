"""Parts of a user's own that return what they must not: a line before they do harm, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import rayfl
from rayfl.aggregation.base import Aggregation
from rayfl.algorithms import Algorithm, Plan, Regrouping
from rayfl.algorithms.fedavg import FedAvg
from rayfl.clustering.embeddings.base import Embedding
from rayfl.config import load
from rayfl.data.base import Assignment, Dataset, Partition, Samples
from rayfl.data.base import Ragged as Lists
from rayfl.errors import ClientError, ConfigError, DataError
from rayfl.local import LocalObjective
from rayfl.losses import Loss
from rayfl.models import Model
from rayfl.ordering import Ordering
from rayfl.sampling import Sampling
from rayfl.server_step import ServerStep
from rayfl.servers import hooks
from rayfl.settings import check_methods
from rayfl.signatures.base import Signature
from rayfl.training import Terms
from rayfl.training.guides import Guides
from rayfl.training.reports import ClientReport, Trained, UpdateLengths

# What follows has no types: it does what types would refuse.


class NoState(FedAvg):
    name: Literal["bad_state"] = "bad_state"

    def begin(self, setup):
        return None


class Strangers(FedAvg):
    name: Literal["bad_cohort"] = "bad_cohort"

    def cohort(self, setup, state, clients):
        return state, np.array([99])


class Unsorted(FedAvg):
    name: Literal["bad_order"] = "bad_order"

    def cohort(self, setup, state, clients):
        return state, np.array([1, 0])


class NoModel(FedAvg):
    name: Literal["bad_plan"] = "bad_plan"

    def plan(self, setup, state, cohort):
        return Plan(cohort, np.full(len(cohort), 7), np.zeros(len(cohort), int))


class ShortRule(Aggregation):
    name: Literal["bad_rule"] = "bad_rule"

    def combine(self, values):
        return values[0]


class NotFinite(Aggregation):
    name: Literal["bad_rule_nan"] = "bad_rule_nan"

    def combine(self, values, weights, old):
        return old * np.nan


class Sends(LocalObjective):
    name: Literal["bad_sends"] = "bad_sends"
    what: str

    def finish(self, start, block):
        outcome, rows = super().finish(start, block), block.rows
        mistakes: dict[str, dict[str, Any]] = {
            "numpy": {"rows": rows.numpy()},
            "nan": {"rows": rows * torch.nan},
            "server": {"server": rows[:, :1]},
            "server, NaN": {"server": rows[:, :3] * torch.nan},
            "kept": {"kept": rows[:, :3]},
            "bytes": {"bytes_up": 5},
        }
        return replace(outcome, **mistakes.get(self.what, {}))

    def begin(self, start):
        models = start.models
        return {"begin": models.numpy(), "begin, float64": models.double()}.get(self.what)

    def terms(self, start):
        return Terms(offset=torch.full_like(start.models, torch.nan)) if self.what == "terms" else Terms()

    def weights(self, sizes, rows, training):
        return sizes * (np.nan if self.what == "weights" else 1.0), None

    def state_size(self, spec):
        return None if self.what == "none" else 0

    def server_size(self, spec):
        return 0.5 if self.what == "half" else 3 if self.what.startswith("server") else 0


class Orders(Ordering):
    name: Literal["bad_order"] = "bad_order"
    what: str

    def state_size(self, spec):
        return 2

    def visits(self, arrival):
        return 5 if self.what == "visits" else None

    def keep(self, rows):
        return rows[:, : 3 if self.what == "keep" else 2]


class Three(Model):
    name: Literal["bad_outputs"] = "bad_outputs"

    @property
    def layers(self):
        return {"fc": ("1",)}

    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


class Unused(LocalObjective):
    name: Literal["bad_unused"] = "bad_unused"

    def client_model(self, model, state, spec):
        return model


class Attribute(FedAvg):
    name: Literal["bad_attribute"] = "bad_attribute"
    default: ClassVar[Any] = {"training": {"momentum": 0.9}}


class Setting(FedAvg):
    name: Literal["bad_setting"] = "bad_setting"
    selects: bool = True


class Constructed(FedAvg):
    name: Literal["bad_constructor"] = "bad_constructor"

    def __init__(self, factor):
        super().__init__()


class Asks(FedAvg):
    name: Literal["bad_asks"] = "bad_asks"

    def mix(self, setup, state, plan, reports):
        return reports["size"]


class AsksForAnother(FedAvg):
    name: Literal["bad_asks_another"] = "bad_asks_another"
    mixes_by_reports: ClassVar[bool] = True

    def reports(self, setup, state):
        return {"size": UpdateLengths()}

    def mix(self, setup, state, plan, reports):
        return reports["sizes"]


class Reweighs(Aggregation):
    name: Literal["bad_reweighs"] = "bad_reweighs"

    def reweigh(self, gram, weights):
        return weights, "none"

    def combine(self, values, weights, old):
        return old


class NoProximity(Signature):
    name: Literal["bad_proximity"] = "bad_proximity"
    proximities: ClassVar[Any] = "euclidean"

    def compute(self, *given):
        return None


class Objective(LocalObjective):
    name: Literal["bad_local"] = "bad_local"
    what: str

    def work(self, work):
        return None if self.what == "work" else work

    def weights(self, sizes, rows, training):
        return sizes if self.what == "weights" else super().weights(sizes, rows, training)

    def terms(self, start):
        models = start.models
        mistakes = {
            "terms": {},
            "offset": Terms(offset=models[:, :3]),
            "array": Terms(offset=models.numpy()),
            "guides": Terms(guides=Guides((models,), lambda own, others, targets: own.features.sum())),
        }
        return mistakes.get(self.what) if self.what in mistakes else super().terms(start)

    def finish(self, start, block):
        return block.rows if self.what == "finish" else super().finish(start, block)

    def train(self, start, train):
        block, outcome = super().train(start, train)
        if self.what == "rows":
            return block, replace(outcome, rows=outcome.rows[:, :3])
        if self.what == "state":
            return block, replace(outcome, state=outcome.rows)
        return block if self.what == "train" else (block, outcome)


class Finishes(LocalObjective):
    name: Literal["bad_finish"] = "bad_finish"

    def finish(self, start, block):
        return replace(super().finish(start, block), state=block.rows)


class Other(Objective):
    name: Literal["bad_arguments_local"] = "bad_arguments_local"

    def terms(self, begin, x):
        return None


@dataclass(frozen=True)
class BadStep(ServerStep):
    what: str

    def vectors(self):
        return {"v": 0.0}

    def apply(self, averaged, vectors):
        if self.what == "nothing":
            return None
        if self.what == "nan":
            return averaged.mean * np.nan, vectors
        return (averaged.mean[:3], vectors) if self.what == "model" else (averaged.mean, {})


class Steps(FedAvg):
    name: Literal["bad_steps"] = "bad_steps"
    what: str

    def server_step(self, setup, state):
        return BadStep(self.what)


class Nobody(Sampling):
    name: Literal["bad_nobody"] = "bad_nobody"


class NoMethod(Sampling):
    name: Literal["bad_no_method"] = "bad_no_method"
    cohort: ClassVar[int] = 3


class Chance(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x.flatten(1)), 0.5))


class Dense(FedAvg):
    name: Literal["bad_mix"] = "bad_mix"

    def mix(self, setup, state, plan, reports):
        return np.ones((1, len(plan.cohort)))


class Facts(LocalObjective):
    name: Literal["bad_facts"] = "bad_facts"
    facts: ClassVar[tuple[str, ...]] = ("far", "n")
    what: str

    def state_size(self, spec):
        return 1

    def client_facts(self, states, spec):
        return {"far": {"far": states[0, 0]}, "other": {"near": states[:, 0]}}.get(self.what)


class FarFacts(Facts):
    name: Literal["bad_far"] = "bad_far"
    facts: ClassVar[tuple[str, ...]] = ("far",)


class Regroups(FedAvg):
    name: Literal["bad_clusters"] = "bad_clusters"
    what: str

    def recluster(self, setup, state, clients):
        if self.what == "state":
            return Regrouping(None, np.zeros(2, int))
        count = setup.clients - (self.what == "clients")
        assignment = np.full(count, {"model": 2, "negative": -1}.get(self.what, 0))
        parents = np.zeros(3 if self.what == "parents" else 2, int)
        return Regrouping(replace(state, models=2, assignment=assignment), parents)


class Selects(FedAvg):
    name: Literal["bad_choice"] = "bad_choice"

    def select(self, setup, state, who, clients):
        return replace(state, assignment=np.zeros(len(who), int))  # of the cohort, not of all clients


class EndsInList(FedAvg):
    name: Literal["bad_list"] = "bad_list"

    def end(self, setup, state, plan, report):
        return replace(super().end(setup, state, plan, report), assignment=[0] * setup.clients)


class Descends(FedAvg):
    name: Literal["bad_parents"] = "bad_parents"

    def mix(self, setup, state, plan, reports):
        return replace(super().mix(setup, state, plan, reports), parents=np.array([5]))


class Misspelt(FedAvg):
    name: Literal["bad_name"] = "bad_name"

    def mixx(self, setup, state, plan, reports):
        return None


class Short(FedAvg):
    name: Literal["bad_arguments"] = "bad_arguments"

    def mix(self, setup, state, plan):
        return super().mix(setup, state, plan, {})


class NoWork(FedAvg):
    name: Literal["bad_work"] = "bad_work"

    def work(self, setup, state):
        super().work(setup, state)


RETURNS: dict[str, dict[str, Any]] = {
    "initial, number": {"initial": 0},
    "initial, none": {"initial": ()},
    "work, overlap": {"work": {"personal": ((0, 9), (5, 12))}},
    "work, beyond": {"work": {"frozen": ((0, 10**9),)}},
    "work, names": {"work": {"personal": ("fc",)}},
    "work, list": {"work": {"personal": [(0, 9)]}},
    "adaptation": {"adaptation": 3},
    "downloads": {"downloads": -1},
    "downloads, none": {"downloads": None},
    "diagnose": {"diagnose": {"x": 1}},
}
"""What the hooks of :class:`Hooks` return."""


class Hooks(FedAvg):
    """One of the hooks returns what ``RETURNS`` says."""

    name: Literal["bad_hooks"] = "bad_hooks"
    what: str

    @property
    def returns(self):
        return RETURNS[self.what]

    def initial(self, setup):
        return self.returns.get("initial", (0,))

    def work(self, setup, state):
        return replace(super().work(setup, state), **self.returns.get("work", {}))

    def adaptation(self, setup, state):
        return self.returns.get("adaptation")

    def downloads(self, setup, state, plan):
        return self.returns.get("downloads", 4)

    def diagnose(self, setup, state, clients):
        return self.returns.get("diagnose", [])


class Asks7(Sampling):
    name: Literal["bad_asked"] = "bad_asked"

    def asked(self, clients, count, round, rounds):
        return None

    def cohort(self, candidates):
        return candidates.ids


class OwnModel(LocalObjective):
    name: Literal["bad_own_model"] = "bad_own_model"
    personal: ClassVar[bool] = True

    def state_size(self, spec):
        return 1

    def client_model(self, model, state, spec):
        return state


class Number(FedAvg):
    name: Literal["bad_answers"] = "bad_answers"

    def reports(self, setup, state):
        return {"x": 3}


class NoStep(FedAvg):
    name: Literal["bad_step"] = "bad_step"

    def server_step(self, setup, state):
        return 0.1


class Forgets(FedAvg):
    name: Literal["bad_end"] = "bad_end"

    def end(self, setup, state, plan, report):
        super().end(setup, state, plan, report)


class Stays(FedAvg):
    """Would train the same round for ever."""

    name: Literal["bad_round"] = "bad_round"

    def end(self, setup, state, plan, report):
        return state


class Splits(FedAvg):
    name: Literal["bad_split"] = "bad_split"

    def split(self, setup, state, clients):
        return state


class Ragged(Signature):
    name: Literal["bad_lengths"] = "bad_lengths"
    proximities: ClassVar[tuple[str, ...]] = ("euclidean",)

    def compute(self, x, y, key=0):
        return 1 + x[: 200 + y[0], 0]


class NoSignature(Signature):
    name: Literal["bad_signature"] = "bad_signature"
    proximities: ClassVar[tuple[str, ...]] = ("euclidean",)

    def compute(self, x, y, key=0):
        return None


@dataclass(frozen=True)
class Long(ClientReport):
    def compute(self, trained: Trained) -> NDArray[np.floating]:
        return np.zeros(77)


class Reports(FedAvg):
    name: Literal["bad_report"] = "bad_report"

    def reports(self, setup, state):
        return {"long": Long()}


class Scalar(Loss):
    name: Literal["bad_loss"] = "bad_loss"

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)


class Constant(Loss):
    name: Literal["bad_gradient"] = "bad_gradient"

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(outputs))


class Judges(Scalar):
    name: Literal["bad_right"] = "bad_right"

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).float()


class Empty(Loss):
    name: Literal["bad_empty"] = "bad_empty"


class Broken(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)).sub(1e9).sqrt()


class Anybody(Sampling):
    name: Literal["bad_sampling"] = "bad_sampling"

    def cohort(self, candidates):
        return np.array([50, 60])


class Chosen(Sampling):
    """Returns what the test says."""

    name: Literal["bad_chosen"] = "bad_chosen"
    what: str = ""

    def cohort(self, candidates):
        return {
            "nothing": None,
            "list": [1, 2],
            "floats": np.array([1.0]),
            "nobody": np.empty(0, int),
            "twice": np.array([2, 1, 2]),
        }[self.what]


class Loaded(Dataset):
    """Loads what the test says."""

    name: Literal["bad_loaded"] = "bad_loaded"
    what: str = ""

    def load(self, root):
        x, y = np.ones((200, 6), np.float32), np.arange(200) % 3
        whole = Samples("x", x, y, x[:60], y[:60], 3)
        changes = {
            "fewer inputs": {"x_train": x[:150]},
            "fewer tests": {"x_test": x[:30]},
            "label": {"y_test": np.where(y[:60] == 2, 7, y[:60])},
            "floats": {"y_train": y.astype(np.float32)},
            "list": {"y_train": y.tolist()},
            "features": {"x_test": x[:60, :4]},
            "NaN": {"x_train": np.where(x == 1, np.nan, x)},
            "empty": {"x_test": x[:0], "y_test": y[:0]},
            "targets": {"targets_train": np.ones((200, 1), np.float32)},
            "short": {
                "targets_train": np.ones((100, 1), np.float32),
                "targets_test": np.ones((60, 1), np.float32),
            },
        }
        return replace(whole, **changes[self.what])


class Embeds(Embedding):
    """Returns what the test says."""

    name: Literal["bad_embedding"] = "bad_embedding"
    what: str = ""

    def embed(self, signatures, key=0):
        return {"few": signatures[:-1], "nothing": None, "NaN": [s * np.nan for s in signatures]}[self.what]


class NaNSignature(Signature):
    name: Literal["bad_nan_signature"] = "bad_nan_signature"
    proximities: ClassVar[tuple[str, ...]] = ("principal_angle", "vector_angle_min")

    def compute(self, x, y, key=0):
        return np.full((5, 2), np.nan, np.float32)


class Unbuilt(Model):
    name: Literal["bad_model"] = "bad_model"


class Arrays(Dataset):
    name: Literal["bad_data"] = "bad_data"

    def load(self, root):
        return np.zeros((3, 4))


class Raises(Dataset):
    name: Literal["bad_source"] = "bad_source"

    def load(self, root):
        return {}["x"]


class Given(Partition):
    """Returns what the test says."""

    name: Literal["bad_partition"] = "bad_partition"
    what: str = ""

    def assign(self, samples, seed):
        lists = [np.arange(5), np.arange(5, 10)]
        return {
            "a list": lists,
            "floats": Assignment([np.array([0.5]), lists[1]]),
            "strangers": Assignment([np.array([10**7]), lists[1]]),
            "nothing": Assignment([np.empty(0, int), lists[1]]),
            "twice": Assignment([np.arange(6), lists[1]]),
            "stranger in a Ragged": Assignment(Lists.of([np.array([10**7]), lists[1]])),
            "groups": Assignment(lists, groups=np.array([0])),
            "texts": Assignment(lists, groups=np.array(["a", "b"])),
            "tests": Assignment(lists, test=[np.arange(10)]),
            "names": Assignment(lists, names=np.array(["a"])),
            "one name": Assignment(lists, names=np.array(["a", "a"])),
        }[self.what]


class Unusual(Dataset):
    name: Literal["good_data"] = "good_data"

    def load(self, root):
        x, y = np.ones((90, 5), np.int32), np.zeros(90, np.int64)
        words = np.ones((90, 5), np.int64)
        targets = {"targets_train": words, "targets_test": words[:30]}
        return Samples("x", x, y, x[:30], y[:30], 1, vocabulary=("", "a"), **targets)


class Widths(Dataset):
    name: Literal["good_widths"] = "good_widths"

    def load(self, root):
        x, y = np.random.default_rng(0).random((90, 5)), np.arange(90) % 3
        return Samples("x", x.astype(np.float32), y, x[:30], y[:30], 3)


class Signs(Embedding):
    name: Literal["good_embedding"] = "good_embedding"

    def embed(self, signatures, key=0):
        return [np.sign(s).astype(np.int8) for s in signatures]


class Counts(Partition):
    name: Literal["good_partition"] = "good_partition"
    clients: int | None = None

    def assign(self, samples, seed):
        return Assignment(Lists.of([np.arange(30), np.arange(30, 60), np.arange(60, 90)]))


CENTROIDS: dict[str, Any] = {"signature": "centroids", "proximity": "min_distance", "n_clusters": 2}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "begin": (
        {"algorithm": NoState()},
        r"bad_state.begin: returned nothing \(None\); expected a ServerState",
    ),
    "cohort": ({"algorithm": Strangers()}, r"bad_cohort.cohort: there is no client 99 now"),
    "order": ({"algorithm": Unsorted()}, r"bad_order.cohort: the ids are not ascending"),
    "plan": ({"algorithm": NoModel()}, r"bad_plan.plan: start holds 7; expected 0 to 0"),
    "report": ({"algorithm": Reports()}, r"Long: compute returned shape \(77,\) for 1 clients"),
    "loss": ({"loss": Scalar()}, r"bad_loss.each: returned shape \(\); expected a tensor \(3,\)"),
    "mix": ({"algorithm": Dense()}, r"bad_mix.mix: returned an array of float64 \(1, 4\); expected a Mixing"),
    "arguments": (
        {"algorithm": Short()},
        r"algorithm: bad_arguments.mix takes \(setup, state, plan\); expected \(setup, state, plan, rep",
    ),
    "clusters, model": (
        {"algorithm": Regroups(what="model")},
        r"bad_clusters.recluster: assignment holds 2; expected 0 to 1",
    ),
    "facts": ({"local": Facts(what="far")}, "bad_facts.facts: 'n' is a number of rayfl; choose another"),
    "facts, scalar": (
        {"local": FarFacts(what="far")},
        "bad_far.client_facts: far is .* for 2 clients; expected",
    ),
    "facts, other": (
        {"local": FarFacts(what="other")},
        "bad_far.client_facts: returned 'near', which is not in facts; add it there",
    ),
    "facts, none": (
        {"local": FarFacts(what="none")},
        r"bad_far.client_facts: returned nothing \(None\); expected a dictionary",
    ),
    "clusters, negative": (
        {"algorithm": Regroups(what="negative")},
        r"bad_clusters.recluster: assignment holds -1; expected 0 to 1",
    ),
    "clusters, clients": (
        {"algorithm": Regroups(what="clients")},
        r"bad_clusters.recluster: assignment has \d+ entries for \d+ clients; give one for each",
    ),
    "clusters, state": (
        {"algorithm": Regroups(what="state")},
        r"bad_clusters.recluster: returned nothing \(None\); expected a ServerState",
    ),
    "select": (
        {"algorithm": Selects(), "training": {"participation": 0.5}},
        r"bad_choice.select: assignment has \d+ entries for \d+ clients; give one for each",
    ),
    "end, list": (
        {"algorithm": EndsInList()},
        r"bad_list.end: assignment is a list; expected integers",
    ),
    "parents": ({"algorithm": Descends()}, r"bad_parents.mix: parents holds 5; expected 0 to 0"),
    "clusters, parents": (
        {"algorithm": Regroups(what="parents")},
        r"bad_clusters.recluster: parents is an array of int64 \(3,\); expected one parent per model \(2,\)",
    ),
    "misspelt": (
        {"algorithm": Misspelt()},
        r"algorithm: bad_name.mixx is no method of Algorithm; did you mean mix\? Names of helpers begin with",
    ),
    "rule": (
        {"aggregation": ShortRule()},
        r"aggregation: bad_rule.combine takes \(values\); expected \(values, weights, old\)",
    ),
    "rule, NaN": (
        {"aggregation": NotFinite()},
        r"bad_rule_nan.combine: returned numbers that are not finite, of numbers that are",
    ),
    "objective": (
        {"local": Other(what="arguments")},
        r"local: bad_arguments_local.terms takes \(begin, x\); expected \(start\)",
    ),
    "objective, work": ({"local": Objective(what="work")}, r"bad_local.work: returned nothing \(None\)"),
    "objective, terms": (
        {"local": Objective(what="terms")},
        r"bad_local.terms: returned a dict; expected a Terms",
    ),
    "objective, finish": (
        {"local": Objective(what="finish")},
        r"bad_local.finish: returned a Tensor of float32 \(.*\); expected an Outcome",
    ),
    "objective, train": (
        {"local": Objective(what="train")},
        r"bad_local.train: returned a TrainedBlock; expected \(TrainedBlock, Outcome\)",
    ),
    "objective, rows": (
        {"local": Objective(what="rows")},
        r"bad_local.train: clients send a Tensor of float32 \(1, 3\); expected their models, a tensor",
    ),
    "objective, state": (
        {"local": Objective(what="state")},
        r"bad_local.train: clients keep a Tensor of float32 \(1, \d+\); expected their states, a tensor",
    ),
    "objective, state from finish": (
        {"local": Finishes()},
        r"bad_finish.finish: clients keep a Tensor of float32 \(1, \d+\); expected their states, a tensor",
    ),
    "objective, NumPy": (
        {"local": Sends(what="numpy")},
        r"bad_sends.finish: clients send an array of float32 \(1, \d+\); expected their models, a tensor",
    ),
    "objective, NaN": (
        {"local": Sends(what="nan")},
        r"bad_sends.finish: a client sends numbers that are not finite",
    ),
    "objective, server": (
        {"local": Sends(what="server")},
        r"bad_sends.finish: clients add to the server's vector a Tensor of float32 \(1, 1\); "
        r"expected their numbers, a tensor \(1, 3\)",
    ),
    "objective, server, NaN": (
        {"local": Sends(what="server, NaN")},
        r"bad_sends.finish: a client sends numbers that are not finite",
    ),
    "objective, kept": (
        {"local": Sends(what="kept")},
        r"bad_sends.finish: kept is a Tensor of float32 \(1, 3\); expected their parameters, 0 or 1, a t",
    ),
    "objective, bytes": (
        {"local": Sends(what="bytes")},
        r"bad_sends.finish: bytes_up is an int; expected the bytes of each client, an array \(1,\)",
    ),
    "objective, begin": (
        {"local": Sends(what="begin")},
        r"bad_sends.begin: returned an array of float32 \(1, \d+\); expected the models to train, a tensor",
    ),
    "objective, begin, float64": (
        {"local": Sends(what="begin, float64")},
        r"bad_sends.begin: returned a Tensor of float64 \(1, \d+\); expected the models to train, a tensor",
    ),
    "order, visits": (
        {"order": Orders(what="visits")},
        r"bad_order.visits: returned an int; expected one entry for each of the 1 clients, or None",
    ),
    "order, keep": (
        {"order": Orders(what="keep")},
        r"bad_order.keep: returned a Tensor of float32 \(1, 3\); expected a tensor \(1, 2\), by state_size",
    ),
    "loss, right": (
        {"loss": Judges()},
        r"bad_right.right: returned a Tensor of float32 \(3,\); expected a tensor of bool \(3,\)",
    ),
    "model, outputs": (
        {"model": Three()},
        r"model: forward returns shape \(2, 3\) for 2 samples; expected logits of shape \(2, 10\)",
    ),
    "reports and SCAFFOLD": (
        {"algorithm": AsksForAnother(), "local": "scaffold"},
        r"local.name: 'scaffold' sends more than models, and bad_asks_another mixes them one by one",
    ),
    "objective, NaN in its terms": (
        {"local": Sends(what="terms")},
        r"bad_sends.terms: offset: has numbers that are not finite",
    ),
    "objective, NaN in weights": (
        {"local": Sends(what="weights")},
        r"bad_sends.weights: returned weights that are not finite",
    ),
    "objective, no size": (
        {"local": Sends(what="none")},
        r"bad_sends.state_size: returned nothing \(None\); expected a whole number, 0 or more",
    ),
    "objective, half a size": (
        {"local": Sends(what="half")},
        r"bad_sends.server_size: returned 0.5; expected a whole number, 0 or more",
    ),
    "objective, its own models": (
        {"local": Unused()},
        r"bad_unused.client_model is called only if personal is true; add personal: ClassVar\[bool\] = True",
    ),
    "attribute": (
        {"algorithm": Attribute()},
        r"bad_attribute.default is no attribute of Algorithm; expected defaults: ClassVar\[Any\] = .",
    ),
    "attribute without its kind": (
        {"algorithm": Setting()},
        r"algorithm: bad_setting.selects is no setting; write selects: ClassVar\[Any\] = .",
    ),
    "constructor": (
        {"algorithm": Constructed("x")},
        r"algorithm: bad_constructor has its own __init__, which does not take its settings; settings are",
    ),
    "mix without reports": (
        {"algorithm": Asks()},
        r"bad_asks.mix: has no reports, such as 'size'; set mixes_by_reports: ClassVar\[bool\] = True in",
    ),
    "mix with another report": (
        {"algorithm": AsksForAnother()},
        r"bad_asks_another.mix: there is no report 'sizes'; did you mean 'size'\?",
    ),
    "step, NaN": (
        {"algorithm": Steps(what="nan")},
        r"BadStep.apply: returned numbers that are not finite, of numbers that are",
    ),
    "rule, weights": (
        {"aggregation": Reweighs()},
        r"bad_reweighs.reweigh: returned an array of float64 \(4,\) and a str; expected weights \(4,\) and",
    ),
    "signature, proximities": (
        {"algorithm": "pacfl", "clustering": {"signature": NoProximity()}},
        r"clustering: bad_proximity.proximities is 'euclidean'; expected some of principal_angle, .* such as",
    ),
    "objective, offset": (
        {"local": Objective(what="offset")},
        r"bad_local.terms: offset: a tensor \(1, \d+\) is needed, not a Tensor of float32 \(1, 3\)",
    ),
    "objective, array": (
        {"local": Objective(what="array")},
        r"bad_local.terms: offset: a tensor \(1, \d+\) is needed, not an array of float32 \(1, \d+\)",
    ),
    "step, model": (
        {"algorithm": Steps(what="model")},
        r"BadStep.apply: model: returned an array of float64 \(3,\); expected a model \(\d+,\) and its v",
    ),
    "step, vectors": (
        {"algorithm": Steps(what="vectors")},
        r"BadStep.apply: v: returned nothing \(None\); expected a model \(\d+,\) and its vectors",
    ),
    "step, nothing": (
        {"algorithm": Steps(what="nothing")},
        r"BadStep.apply: returned nothing \(None\); expected a model",
    ),
    "objective, weights": (
        {"local": Objective(what="weights")},
        r"bad_local.weights: returned an array of int64 \(4,\); expected weights \(M,\)",
    ),
    "no cohort": (
        {"sampling": Nobody(), "training": {"participation": 0.5}},
        r"sampling: bad_nobody.cohort is missing in class Nobody",
    ),
    "no method": (
        {"sampling": NoMethod()},
        r"sampling: bad_no_method.cohort is of type int; expected a method",
    ),
    "chance": (
        {"model": Chance},
        r"model: forward returns different outputs for the same samples in evaluation; draw",
    ),
    "work": ({"algorithm": NoWork()}, r"bad_work.work: returned nothing \(None\); expected a LocalWork"),
    "initial, number": (
        {"algorithm": Hooks(what="initial, number")},
        r"bad_hooks.initial: returned an int; expected a Sequence",
    ),
    "initial, none": (
        {"algorithm": Hooks(what="initial, none")},
        r"bad_hooks.initial: returned \(\); expected one integer or more, such as \(0,\)",
    ),
    "work, overlap": (
        {"algorithm": Hooks(what="work, overlap")},
        r"bad_hooks.work: personal is \(\(0, 9\), \(5, 12\)\); expected pairs \(start, stop\) from 0 to",
    ),
    "work, beyond": (
        {"algorithm": Hooks(what="work, beyond")},
        r"bad_hooks.work: frozen is \(\(0, 1000000000\),\); expected pairs",
    ),
    "work, names": (
        {"algorithm": Hooks(what="work, names")},
        r"bad_hooks.work: personal is \('fc',\); .* overlaps: tuple\(setup.spec.segment\(layers\)\)",
    ),
    "work, list": (
        {"algorithm": Hooks(what="work, list")},
        r"bad_hooks.work: personal is a list; expected pairs",
    ),
    "adaptation": (
        {"algorithm": Hooks(what="adaptation")},
        r"bad_hooks.adaptation: returned an int; expected a LocalWork",
    ),
    "downloads": (
        {"algorithm": Hooks(what="downloads")},
        r"bad_hooks.downloads: returned -1; expected the number of models, 0 or more",
    ),
    "downloads, none": (
        {"algorithm": Hooks(what="downloads, none")},
        r"bad_hooks.downloads: returned nothing \(None\); expected the number of models",
    ),
    "diagnose": (
        {"algorithm": Hooks(what="diagnose")},
        r"bad_hooks.diagnose: returned a dict; expected a list of dictionaries, one for each row",
    ),
    "asked": (
        {"sampling": Asks7(), "training": {"participation": 0.5}},
        r"bad_asked.asked: returned nothing \(None\); expected the number of clients that report a loss",
    ),
    "own model": (
        {"local": OwnModel()},
        r"bad_own_model.client_model: returned a Tensor of float32 \(1,\); expected a model",
    ),
    "reports": ({"algorithm": Number()}, r"bad_answers.reports: 'x' is an int; expected a ClientReport"),
    "step": ({"algorithm": NoStep()}, r"bad_step.server_step: returned a float; expected a ServerStep"),
    "end": ({"algorithm": Forgets()}, r"bad_end.end: returned nothing \(None\); expected a ServerState"),
    "round": (
        {"algorithm": Stays()},
        r"bad_round.end: returned a state with round=0 after round 0; expected round=1",
    ),
    "split": ({"algorithm": Splits()}, r"bad_split.split: returned a ServerState; expected a Regrouping"),
    "signature": (
        {"algorithm": "pacfl", "clustering": {"signature": NoSignature(), "proximity": "euclidean"}},
        r"bad_signature.compute: returned nothing \(None\); expected an array of numbers",
    ),
    "signatures, lengths": (
        {"algorithm": "pacfl", "clustering": {"signature": Ragged(), "proximity": "euclidean"}},
        r"bad_lengths.compute: the signature of client 0 has \d+ numbers, that of client \d has \d+; all",
    ),
    "gradient": ({"loss": Constant()}, r"bad_gradient.each: returned a loss through which no gradient flows"),
    "no loss": ({"loss": Empty()}, r"loss: bad_empty.each is missing in class Empty"),
    "NaN": ({"model": Broken}, r"model: forward returns NaN or infinity for inputs between 0 and 1"),
    "sampling": (
        {"sampling": Anybody(), "training": {"participation": 0.5}},
        r"bad_sampling.cohort: there is no client 50 now",
    ),
    "model": ({"model": Unbuilt()}, r"model: bad_model.build is missing in class Unbuilt"),
    "data": (
        {"data": Arrays()},
        r"data: bad_data: load returned an array of float64 \(3, 4\); expected rayfl.data.Samples",
    ),
    "source": ({"data": Raises()}, r"test_bad_parts.py:\d+: KeyError: 'x'"),
    "list": ({"partition": Given(what="a list")}, r"assign returned a list; expected an Assignment"),
    "floats": ({"partition": Given(what="floats")}, r"clients: client 0 has an array of float64 \(1,\); exp"),
    "sample": ({"partition": Given(what="strangers")}, r"clients: client 0 has sample 10000000 of 0 to 1437"),
    "empty": ({"partition": Given(what="nothing")}, r"bad_partition: client 0 has no training sample"),
    "twice": ({"partition": Given(what="twice")}, r"training sample 5 is given out twice"),
    "Ragged": (
        {"partition": Given(what="stranger in a Ragged")},
        r"clients: client 0 has sample 10000000 of 0 to",
    ),
    "groups": ({"partition": Given(what="groups")}, r"groups is an array of int64 \(1,\); expected integers"),
    "texts": (
        {"partition": Given(what="texts")},
        r"groups is an array of <U1 \(2,\); expected int",
    ),
    "tests": (
        {"partition": Given(what="tests")},
        r"bad_partition: test has 1 lists for 2 clients",
    ),
    "names": (
        {"partition": Given(what="names")},
        r"names is an array of <U1 \(1,\); expected an",
    ),
    "one name": ({"partition": Given(what="one name")}, r"names: a is the name of several clients"),
    "loaded, fewer inputs": (
        {"data": Loaded(what="fewer inputs")},
        r"data: bad_loaded: load: y_train has 200 entries for 150 samples; the lengths must be equal",
    ),
    "loaded, fewer tests": ({"data": Loaded(what="fewer tests")}, r"y_test has 60 entries for 30 samples"),
    "loaded, label": ({"data": Loaded(what="label")}, r"y_test holds 7, and classes is 3; labels count"),
    "loaded, floats": (
        {"data": Loaded(what="floats")},
        r"y_train has shape \(200,\) and type float32",
    ),
    "loaded, list": ({"data": Loaded(what="list")}, r"y_train is a list; expected an array of integers"),
    "loaded, features": (
        {"data": Loaded(what="features")},
        r"of x_train are floats of shape \(6,\), those of x_test floats of shape \(4,\); they must be equal",
    ),
    "loaded, NaN": ({"data": Loaded(what="NaN")}, r"x_train holds NaN or infinity; every value must be"),
    "loaded, empty": ({"data": Loaded(what="empty")}, r"bad_loaded: load: x_test has no samples"),
    "loaded, targets": ({"data": Loaded(what="targets")}, r"only one of targets_train and targets_test"),
    "loaded, short": ({"data": Loaded(what="short")}, r"targets_train has 100 entries for 200 samples"),
    "sampled, nothing": (
        {"sampling": Chosen(what="nothing"), "training": {"participation": 0.5}},
        r"bad_chosen.cohort: returned nothing \(None\); expected an array of ids \(n,\)",
    ),
    "sampled, list": (
        {"sampling": Chosen(what="list"), "training": {"participation": 0.5}},
        r"bad_chosen.cohort: returned a list; expected an array of ids",
    ),
    "sampled, floats": (
        {"sampling": Chosen(what="floats"), "training": {"participation": 0.5}},
        r"bad_chosen.cohort: returned an array of float64 \(1,\); expected an array of ids",
    ),
    "sampled, nobody": (
        {"sampling": Chosen(what="nobody"), "training": {"participation": 0.5}},
        r"bad_chosen.cohort: returned nobody; expected at least one client",
    ),
    "sampled, twice": (
        {"sampling": Chosen(what="twice"), "training": {"participation": 0.5}},
        r"bad_chosen.cohort: client 2 is chosen twice; choose each once",
    ),
    **{
        f"embedded, {what}": (
            {"algorithm": "pacfl", "clustering": {**CENTROIDS, "embedding": Embeds(what=what)}},
            rf"bad_embedding.embed: {message}",
        )
        for what, message in {
            "few": "returned 3 signatures of 4 clients; expected one of each",
            "nothing": r"returned nothing \(None\); expected a list of arrays",
            "NaN": r"returned an array of float\d+ \(.*\) for the signature of client 0; expected finite",
        }.items()
    },
    **{
        f"NaN signature, {proximity}": (
            {"algorithm": "pacfl", "clustering": {"signature": NaNSignature(), "proximity": proximity}},
            r"client 0: bad_nan_signature.compute returned NaN or infinity",
        )
        for proximity in ("principal_angle", "vector_angle_min")
    },
}


def test_parts_as_they_should_be_are_taken() -> None:
    """Further arguments with defaults, any number of them, a static method."""

    class Rule(Aggregation):
        name: Literal["good_rule"] = "good_rule"

        def combine(self, *given, more=1):
            return given[2]

        @staticmethod
        def reweigh(gram, weights):
            return weights, 0.0

    check_methods(Rule, Aggregation)


def test_ordinary_names_mixins_and_constructors_with_settings_are_taken() -> None:
    class Mixin:
        default = 3

    class Mine(Mixin, FedAvg):
        name: Literal["good_mixin"] = "good_mixin"
        objective: str = "x"  # a setting: only class attributes can be misspelt

        def __init__(self, **settings):
            super().__init__(**settings)

    class Masked(LocalObjective):
        name: Literal["good_mask"] = "good_mask"
        mask: float = 0.5
        personal: ClassVar[bool] = True

        def client_model(self, model, state, spec):
            return model

    check_methods(Mine, Algorithm)
    check_methods(Masked, LocalObjective)


def test_own_data_that_are_unusual_are_taken(tmp_path: Path, forgotten_parts: None) -> None:
    """Texts of one topic, floats of two widths, signs as an embedding, a partition that counts for itself."""

    rest = {
        "rounds": 1,
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
    }
    iid = {"name": "iid", "clients": 4}
    rayfl.run({"partition": iid, "model": {"name": "lstm"}, **rest}, data=Unusual())
    rayfl.run({"model": "linear", **rest}, data=Widths(), partition=Counts())
    clustering = {**CENTROIDS, "embedding": Signs()}
    rayfl.run({"partition": iid, "algorithm": "pacfl", "clustering": clustering, **rest})


def test_reports_that_are_missing_are_missing_keys() -> None:
    """So that a method may ask for a report that it can do without."""
    with pytest.raises(KeyError, match=r"bad_asks.mix: has no reports"):
        hooks._Answers({}, Asks())["size"]
    with pytest.raises(KeyError, match=r"there is no report 'size'; bad_asks_another.reports returns none"):
        hooks._Answers({}, AsksForAnother())["size"]


def test_an_algorithm_as_an_object_leaves_out_what_it_does_not_use() -> None:
    """As one that is named by an override; what is given beside it is not left out."""
    given: Any = {"algorithm": FedAvg()}
    for config in (load("digits-demo", **given), load("digits-demo", ["algorithm=fedavg"])):
        assert config.algorithm == FedAvg()
        assert config.clustering.n_clusters is None
    with pytest.raises(ConfigError, match="n_clusters: would do nothing with fedavg"):
        load("digits-demo", **given, clustering={"n_clusters": 2})


@pytest.mark.parametrize("kind", BAD)
def test_one_line(kind: str, forgotten_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts, message = BAD[kind]
    settings = {
        "rounds": 1,
        "partition": {"name": "iid", "clients": 4},
        "execution": {"backend": "inline", "block_size": 1},
        "output": {"root": "runs", "report": False, "tensorboard": False},
    }
    run: Callable[..., Any] = rayfl.run
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        run({key: value for key, value in settings.items() if key not in parts}, **parts)
    assert "\n" not in str(caught.value)


def test_a_term_of_guides_is_one_number_per_sample(forgotten_parts: None, tmp_path: Path) -> None:
    """A single number would count once for each sample."""
    settings = {
        "rounds": 1,
        "partition": {"name": "iid", "clients": 4},
        "execution": {"backend": "inline", "block_size": 1},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
    }
    with pytest.raises(ClientError, match=r"guides: the term is a Tensor; expected one number per sample"):
        rayfl.run(settings, local=Objective(what="guides"))
