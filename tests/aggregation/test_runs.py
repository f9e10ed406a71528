"""Whole runs with aggregation rules: against plain loops, with clients that lie, with every method, stopped
and resumed, on any number of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray

import rayfl
from rayfl import cli
from rayfl.aggregation import AGGREGATIONS
from rayfl.algorithms import ALGORITHMS, Algorithm, Mixing, Plan
from rayfl.config import load
from rayfl.config.kinds import KINDS
from rayfl.errors import ConfigError
from rayfl.local import LocalObjective, Outcome, Start
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.rounds import Round, train
from rayfl.training import LocalWork, TrainedBlock
from tests.runs import METHODS, Run, assert_same
from tests.servers.test_hierarchy import EPOCHS, GROUPS, LR, Data, last, load_initial
from tests.servers.test_rounds import _break, _servers

Vector = NDArray[np.float64]
ROUNDS = 3
KRUM = {"name": "krum", "f": 1, "m": 3}


@pytest.fixture
def softmax(settings: dict[str, Any]) -> dict[str, Any]:
    """Softmax regression, whole gradients."""
    training = {"epochs": EPOCHS, "batch_size": 1000, "lr": LR}
    return {**settings, "model": "linear", "training": training, "rounds": ROUNDS}


# --- against plain loops ---------------------------------------------------------------------------------


def median(rows: list[Vector]) -> Vector:
    return np.asarray(np.median(rows, axis=0), np.float64)


def multi_krum(rows: list[Vector]) -> Vector:
    """KRUM."""
    far = [sorted(float(np.sum((a - b) ** 2)) for b in rows) for a in rows]
    scores = [sum(each[1 : len(rows) - 2]) for each in far]
    return np.asarray(np.mean([rows[i] for i in np.argsort(scores)[:3]], axis=0))


@pytest.mark.parametrize(("rule", "reference"), [("median", median), (KRUM, multi_krum)])
def test_a_run_of_fedavg(
    softmax: dict[str, Any], rule: Any, reference: Callable[[list[Vector]], Vector]
) -> None:
    data, w = Data(softmax), load_initial(softmax)
    for _ in range(ROUNDS):
        w = reference([data.local(i, w) for i in range(len(GROUPS))])
    found = last(rayfl.run({**softmax, "aggregation": rule})).models
    np.testing.assert_allclose(found, w[None], rtol=0, atol=2e-6)


def test_a_rule_within_every_cluster(softmax: dict[str, Any]) -> None:
    """Clusters of four, three and two clients."""
    clustered = {**softmax, "algorithm": "pacfl", "clustering": {"grouping": "planted"}}
    data, models = Data(softmax), [load_initial(softmax)] * 3
    for _ in range(ROUNDS):
        for k in range(3):
            models[k] = median([data.local(i, models[k]) for i, g in enumerate(GROUPS) if g == k])
    found = last(rayfl.run({**clustered, "aggregation": "median"})).models
    np.testing.assert_allclose(found, models, rtol=0, atol=2e-6)


def test_the_global_server_still_averages(softmax: dict[str, Any]) -> None:
    """The rule is the local servers'; the GPS averages their models by samples, here in every round."""
    edges = [0, 1, 2, 0, 1, 2, 0, 1, 0]
    tree = {**softmax, "algorithm": "hierfavg", "hierarchy": {"edges": edges, "global_every": 1}}
    data, w = Data(softmax), load_initial(softmax)
    of = [[i for i, e in enumerate(edges) if e == edge] for edge in range(3)]
    for _ in range(ROUNDS):
        local = [median([data.local(i, w) for i in ids]) for ids in of]
        w = np.average(local, axis=0, weights=[sum(data.sizes[i] for i in ids) for ids in of])
    found = last(rayfl.run({**tree, "aggregation": "median"})).models
    np.testing.assert_allclose(found, [w] * 3, rtol=0, atol=2e-6)


def test_a_server_step_gets_what_the_rule_made(softmax: dict[str, Any]) -> None:
    """FedAvgM: ``v <- beta v + (median - w)``, ``w <- w + eta v``."""
    method = {"name": "fedavgm", "server_lr": 0.5, "beta": 0.9}
    data, w = Data(softmax), load_initial(softmax)
    v = np.zeros_like(w)
    for _ in range(ROUNDS):
        v = 0.9 * v + (median([data.local(i, w) for i in range(len(GROUPS))]) - w)
        w = w + 0.5 * v
    found = last(rayfl.run({**softmax, "algorithm": method, "aggregation": "median"})).models
    np.testing.assert_allclose(found, w[None], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", ["median", KRUM, {"name": "norm_clipping", "bound": 0.5}])
def test_clients_that_send_updates(
    rule: Any, softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the model itself they are what models are."""
    settings = {**softmax, "aggregation": rule}
    plain = last(rayfl.run(settings)).models
    plan = Algorithm.plan
    monkeypatch.setattr(
        ALGORITHMS["fedavg"], "plan", lambda self, *given: replace(plan(self, *given), updates=True)
    )
    np.testing.assert_allclose(last(rayfl.run(settings)).models, plain, rtol=0, atol=2e-6)


# --- clients that lie ------------------------------------------------------------------------------------

LIARS = 37
"""A client with this number of training samples lies: of 41, four are for its tests."""


class Lying(LocalObjective):
    """Some clients send their update times a factor, or anything."""

    name: Literal["lying"] = "lying"
    factor: float = -20.0

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        rows = block.rows.clone()
        for row in np.flatnonzero(start.sizes == LIARS).tolist():
            rows[row] = start.models[row] + self.factor * (block.rows[row] - start.models[row])
        return Outcome(rows, start.state, start.server)


@pytest.fixture
def lying() -> Any:
    yield
    KINDS["local"].withdraw("lying")


def tasks(*kinds: tuple[list[int], int, int]) -> dict[str, Any]:
    """For each kind: labels, how many clients are honest, how many lie."""
    found = []
    for labels, honest, liars in kinds:
        found.append({"labels": labels, "clients": honest, "samples": 40})
        found += [{"labels": labels, "clients": liars, "samples": LIARS + 4}] if liars else []
    return {"name": "tasks", "tasks": found, "foreign": 0.0}


def robust(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    training = {"epochs": 5, "batch_size": 10, "lr": 0.1}
    return {**settings, "rounds": 8, "training": training, "local": Lying(), **more}


RESISTS = {
    "median": "median",
    "trimmed_mean": {"name": "trimmed_mean", "share": 0.3},
    "krum": {"name": "krum", "f": 3},
    "multi_krum": {"name": "krum", "f": 3, "m": 5},
    "geometric_median": {"name": "geometric_median", "iterations": 8},
}


def test_a_mean_collapses_and_rules_do_not(settings: dict[str, Any], lying: None) -> None:
    """Three of eleven clients lie about what they have learnt."""
    federation = robust(settings, partition=tasks((list(range(10)), 8, 3)))

    def accuracy(rule: Any, **more: Any) -> float:
        result = rayfl.run({**federation, "aggregation": rule, **more})
        assert (result.clients["n"] == LIARS).sum() == 3
        return float(result.summary["accuracy_mean"])

    assert accuracy("mean", local=Lying(factor=1.0)) > 90
    assert accuracy("mean") < 30
    for name, rule in RESISTS.items():
        # Krum takes the model of a single client, with 36 samples: 82 % without liars.
        assert accuracy(rule) > (60 if name == "krum" else 80), name


def test_pacfl_finds_planted_clusters_and_the_median_withstands_liars(
    settings: dict[str, Any], lying: None
) -> None:
    """A liar among five and one among four clients."""
    labels = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    federation = robust(
        settings,
        partition=tasks((labels[0], 4, 1), (labels[1], 3, 1)),
        algorithm="pacfl",
        clustering={"n_clusters": 2},
    )
    found = rayfl.run({**federation, "aggregation": "median"})
    clusters = found.clients["cluster"].to_numpy()
    assert len(set(clusters[:5])) == len(set(clusters[5:])) == 1
    assert clusters[0] != clusters[5]
    assert found.summary["accuracy_mean"] > 85
    assert rayfl.run(federation).summary["accuracy_mean"] < 60


# --- with every method -----------------------------------------------------------------------------------

REFUSED = {"solo", "sub_fedavg", "qfedavg", "mtl", "pacfl, mtl", "mt_hfl, fednova", "mt_hfl, scaffold"} | {
    "pacfl, scaffold"
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_rule_or_refuses_it(method: str, settings: dict[str, Any]) -> None:
    """Overlapping rows (FLT on a graph, FLIS (DC)), mixtures (FedSoft), and layers that stay with clients
    among them. With a share of zero the rule is the unweighted mean."""
    given = {**settings, "algorithm": method, **METHODS[method], "aggregation": "trimmed_mean"}
    if method in REFUSED:
        with pytest.raises(ConfigError, match=r"aggregation.name: 'trimmed_mean' makes no sense with"):
            load(given)
        return
    rows = rayfl.run({**given, "rounds": 2}).rounds
    assert np.isfinite(rows["train_loss"]).all()


@pytest.mark.parametrize("method", ["fedavg", "pacfl", "cfl", "lg_fedavg", "fedadam"])
def test_of_clients_of_one_size_a_rule_that_takes_all_is_the_mean(
    method: str, settings: dict[str, Any]
) -> None:
    """To rounding."""
    one_size = {
        "name": "tasks",
        "tasks": [{"labels": [k, k + 1], "clients": 2, "samples": 30} for k in (0, 4, 7)],
    }
    given = {**settings, "algorithm": method, **METHODS[method], "partition": one_size, "rounds": 2}
    plain = last(rayfl.run(given)).models
    untrimmed = {**given, "aggregation": {"name": "trimmed_mean", "share": 0.0}}
    np.testing.assert_allclose(last(rayfl.run(untrimmed)).models, plain, rtol=0, atol=1e-6)


def test_bytes_are_those_of_the_mean(run: Run) -> None:
    """Clients send their model either way."""
    tables = [
        run(
            "rounds=1", algorithm="mt_hfl", hierarchy={"common_layers": 1}, aggregation=rule
        ).result.communication
        for rule in ("mean", "median")
    ]
    assert tables[0].equals(tables[1])
    assert tables[0]["bytes"].sum() > 0


# --- the same everywhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["median", KRUM, "geometric_median"])
def test_stopped_and_resumed(rule: Any, settings: dict[str, Any]) -> None:
    settings = {**settings, "algorithm": "fedadam", "aggregation": rule}
    whole = rayfl.run({**settings, "rounds": 4})
    half = rayfl.run({**settings, "rounds": 2})
    resumed = rayfl.resume(half.path, ["rounds=4"])
    assert resumed.summary["models_sha256"] == whole.summary["models_sha256"]


@pytest.mark.parametrize("rule", ["median", KRUM, "geometric_median"])
def test_blocks_do_not_matter(rule: Any, run: Run) -> None:
    """The plain loop gives each client the same bits, whichever clients share its block; so do rules."""
    first, *others = (run(f"execution.block_size={size}", aggregation=rule).bits for size in (1, 3, 8))
    assert others == [first, first]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("method", "rule", "actors"),
    [
        ("mt_hfl, edges", "median", 2),
        ("fedadam", KRUM, 3),
        ("flt", "geometric_median", 2),
        ("pacfl", "trimmed_mean", 1),
    ],
)
def test_ray_is_inline(
    method: str, rule: Any, actors: int, settings: dict[str, Any], ray_cluster: None
) -> None:
    given = {**settings, "algorithm": method, **METHODS[method], "aggregation": rule, "rounds": 2}
    on_ray = {"backend": "ray", "actors": actors, "cpus_per_actor": 0.5}
    inline = rayfl.run(given)
    assert_same(inline, rayfl.run({**given, "execution": {**given["execution"], **on_ray}}))


@pytest.mark.parametrize("rule", ["median", {"name": "krum", "f": 0, "m": 2}, "geometric_median"])
def test_a_tolerated_failure_is_left_out(rule: Any, settings: dict[str, Any]) -> None:
    settings["training"]["engine"] = "loop"  # no client's last bit depends on who shares its block
    aggregation = load({"aggregation": rule}).aggregation
    backend = InlineBackend()
    try:
        servers, federation, host = _servers(settings, backend, tolerate=1)

        def trained(clients: list[int]) -> NDArray[np.float32]:
            cohort = np.array(clients)
            servers.models = [host.spec.initial()]
            mixing = Mixing(sp.csr_array(federation.sizes[cohort][None, :].astype(np.float64)))
            plan = Plan(cohort, cohort * 0, cohort * 0)
            train(servers, Round(0, plan, LocalWork(1, 10, 0.1), mixing, aggregation=aggregation))
            model: NDArray[np.float32] = servers.models[0]
            return model

        without = trained([0, 1, 3])
        _break(backend, {2})
        np.testing.assert_array_equal(trained([0, 1, 2, 3]), without)
    finally:
        backend.close()


# --- refusals, and rules of one's own --------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and standard error of ``rayfl`` and these words."""
    monkeypatch.setattr(sys, "argv", ["rayfl", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["partition.clients=6"],
            "error: aggregation.f: 2 needs 7 clients (2 f + 3), but 6 contribute to a mod",
        ),
        (
            ["training.participation=0.5", "partition.clients=12"],
            "but 6 contribute to a model; use at most 1",
        ),
        (
            ["partition.clients=9", "events=[{name: leave, round: 1, clients: [0, 1, 2]}]"],
            "but 6 contribute to a model",
        ),
        (
            ["local=scaffold", "partition.clients=9"],
            "error: aggregation.name: 'krum' makes no sense with local",
        ),
    ],
)
def test_refused_before_anything_starts(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "digits-demo", "algorithm=fedavg", "aggregation={name: krum, f: 2}", "partition.name=iid"]
    code, line = told(monkeypatch, capsys, *words, "execution.backend=inline", *given)
    assert (code, line.count("\n")) == (2, 1)
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_cluster_that_is_too_small_is_one_line(settings: dict[str, Any]) -> None:
    """That PACFL finds a cluster of two cannot be known before."""
    given = {**settings, "algorithm": "pacfl", **METHODS["pacfl"], "aggregation": {"name": "krum", "f": 1}}
    with pytest.raises(ConfigError, match=r"aggregation.f: 1 needs 5 clients \(2 f \+ 3\), but 2 contribute"):
        rayfl.run(given)


OWN = '''
from typing import Literal

from rayfl.aggregation import Aggregation


class {name}(Aggregation):
    """The middle between the least and the largest value."""

    name: Literal["{name}"] = "{name}"

    def combine(self, values, weights, old):
        return (values.min(axis=0) + values.max(axis=0)) / 2
'''


def test_a_rule_from_a_file_of_one_s_own(
    softmax: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_midrange.py").write_text(OWN.format(name="midrange"))
    try:
        result = rayfl.run({**softmax, "plugins": ["own_midrange.py"], "aggregation": "midrange"})
        assert "middle between" in told_list(monkeypatch, capsys)
    finally:
        AGGREGATIONS.withdraw("midrange")  # type: ignore[attr-defined]
    data, w = Data(softmax), load_initial(softmax)
    for _ in range(ROUNDS):
        rows = [data.local(i, w) for i in range(len(GROUPS))]
        w = (np.min(rows, axis=0) + np.max(rows, axis=0)) / 2
    np.testing.assert_allclose(last(result).models, w[None], rtol=0, atol=2e-6)


def told_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``rayfl list`` says of rules."""
    monkeypatch.setattr(sys, "argv", ["rayfl", "list", "aggregation", "--plugin", "own_midrange.py"])
    with pytest.raises(SystemExit):
        cli.main()
    return " ".join(capsys.readouterr().out.split())
