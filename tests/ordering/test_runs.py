"""Whole runs with curricula: identities bit for bit, other methods on top, the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rayfl
from rayfl.api import Result, resume
from rayfl.config import load
from rayfl.errors import ConfigError, Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from tests.runs import SMALL, Run
from tests.training.bounds import rounding

CURRICULUM = {"name": "curriculum"}
P = 64 * 6 + 6 + 6 * 10 + 10

# --- identities ----------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """:data:`SMALL`, with outputs in a folder of the test's own."""
    output = {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1}
    return {**SMALL, "output": output}


def test_shuffled_is_fedavg_and_a_curriculum_is_not(run: Run):
    plain = run()
    assert run(order="shuffled").bits == plain.bits
    others = [run(order={**CURRICULUM, "order": which}).bits for which in ("curriculum", "anti", "random")]
    assert len({plain.bits, *others}) == 4


def test_random_with_all_samples_from_the_start_knows_neither_pacing_nor_score(run: Run):
    random = {**CURRICULUM, "order": "random", "b": 1.0}
    plain = run(order=random)
    for other in ({"a": 0.1}, {"pacing": "step"}, {"score": "both"}, {"score": "global_prediction"}):
        found = run(order={**random, **other})
        assert found.bits == plain.bits
        assert found.states.size == 0


def test_with_whole_batches_every_order_is_fedavg(run: Run):
    """A batch of all samples at every step: the same gradients, summed in another order."""
    smooth: dict[str, Any] = {"training": {**SMALL["training"], "batch_size": 2000}, "model": "linear"}
    plain = run(**smooth)
    bound = rounding(int(plain.result.clients["n"].max()), steps=2 * len(plain.result.rounds))
    for which in ("curriculum", "anti", "random"):
        found = run(**smooth, order={**CURRICULUM, "order": which})
        np.testing.assert_allclose(found.models, plain.models, rtol=0, atol=bound)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("score", "fallback"),
    [
        ("local", "global"),
        ("both", "global"),
        ("local_prediction", "global_prediction"),
        ("both_prediction", "global_prediction"),
    ],
)
def test_the_first_round_of_scores_that_look_back_is_global(run: Run, score: str, fallback: str):
    first, plain = (run("rounds=1", order={**CURRICULUM, "score": s}) for s in (score, fallback))
    assert first.bits == plain.bits
    assert (first.states.shape, plain.states.size) == ((8, P), 0)
    assert run(order={**CURRICULUM, "score": score}).bits != run(order={**CURRICULUM, "score": fallback}).bits


def test_what_a_client_keeps_is_the_model_that_it_trained(run: Run):
    """One round of FedAvg: the mean of the kept models, weighted by n_i, is the server's."""
    first = run("rounds=1", order={**CURRICULUM, "score": "local"})
    sizes = first.result.clients["n"].to_numpy()
    np.testing.assert_allclose(np.average(first.states, axis=0, weights=sizes), first.models[0], atol=1e-6)


def test_every_engine_trains_the_same_curriculum(run: Run):
    """One round without ReLUs: later scores differ by rounding, and then samples may change places."""
    for score in ("global", "global_prediction"):
        loop, batched = (
            run("rounds=1", f"training.engine={e}", model="linear", order={**CURRICULUM, "score": score})
            for e in ("loop", "batched")
        )
        steps = 2 * -(-int(loop.result.clients["n"].max()) // 10)
        np.testing.assert_allclose(batched.models, loop.models, rtol=0, atol=rounding(64, steps))


# --- other methods -------------------------------------------------------------------------------------


def test_fedprox_without_its_term_and_fednova_with_equal_clients_are_fedavg(run: Run):
    plain = run(order=CURRICULUM)
    assert run(order=CURRICULUM, local={"name": "fedprox", "mu": 0.0}).bits == plain.bits
    assert run(order=CURRICULUM, local={"name": "fedprox", "mu": 0.5}).bits != plain.bits
    even = {"name": "iid", "clients": 8}
    nova, same = (
        run(
            partition=even,
            order=CURRICULUM,
            local=local,
            model="linear",
            training={**SMALL["training"], "batch_size": 200},
        )
        for local in ("fednova", "sgd")
    )
    bound = rounding(200, steps=4 * len(nova.result.rounds))  # two epochs of two steps
    np.testing.assert_allclose(nova.models, same.models, rtol=0, atol=bound)


def test_scaffold_starts_as_fedavg_and_shares_the_client_state(run: Run):
    """c = c_i = 0 in the first round, so clients train the same models; each keeps c_i beside its own."""
    plain = {**SMALL["training"], "momentum": 0.0}
    order = {**CURRICULUM, "score": "local"}
    first = run("rounds=1", order=order, local="scaffold", training=plain)
    fedavg = run("rounds=1", order=order, training=plain)
    assert (first.states.shape, fedavg.states.shape) == ((8, 2 * P), (8, P))
    np.testing.assert_array_equal(first.states[:, P:], fedavg.states)
    later, without = (
        run("rounds=2", order=order, local=local, training=plain) for local in ("scaffold", "sgd")
    )
    assert later.states[:, P:].tobytes() != without.states.tobytes()


def test_pacfl_with_one_cluster_is_fedavg_with_more_it_is_not(run: Run):
    def pacfl(clusters: int) -> Any:
        return run(algorithm="pacfl", clustering={"n_clusters": clusters}, order=CURRICULUM)

    assert pacfl(1).bits == run(order=CURRICULUM).bits
    assert pacfl(3).models.shape == (3, P)
    shuffled = run(algorithm="pacfl", clustering={"n_clusters": 3})
    assert pacfl(3).bits != shuffled.bits


@pytest.mark.parametrize("algorithm", ["per_fedavg", "lg_fedavg", "sub_fedavg", "cfl", "ifca"])
def test_curricula_go_with_other_algorithms(run: Run, algorithm: str):
    own = {"momentum": 0.0} if algorithm in ("per_fedavg", "ifca") else {}
    partition = {"name": "iid", "clients": 8, "validation": 0.2}
    curricula = [
        run(
            "rounds=2",
            algorithm=algorithm,
            partition=partition,
            training={**SMALL["training"], **own},
            order=order,
        )
        for order in ("shuffled", {**CURRICULUM, "score": "both"})
    ]
    assert curricula[0].bits != curricula[1].bits
    assert curricula[1].states.shape[1] == curricula[0].states.shape[1] + P


# --- the same everywhere -------------------------------------------------------------------------------


def assert_same(first: Result, second: Result) -> None:
    """Equal in every bit and table; seconds aside."""
    assert first.summary["models_sha256"] == second.summary["models_sha256"]
    one, other = (result.rounds.drop(columns="seconds") for result in (first, second))
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    pd.testing.assert_frame_equal(first.communication, second.communication, check_exact=True)


EVERYTHING = {
    "order": {**CURRICULUM, "score": "both"},
    "sampling": {"name": "curriculum", "b": 0.5},
    "local": "scaffold",
    "training": {**SMALL["training"], "participation": 0.5, "momentum": 0.0, "engine": "auto"},
    "rounds": 4,
}
"""Both curricula, and two kinds of client state beside each other."""


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopped_and_resumed_is_uninterrupted(settings: dict[str, Any], stop: int):
    settings = {**settings, **EVERYTHING}
    config = load(settings)
    directory = RunDirectory.create(config)
    stages, host = build(config)
    trained: list[bool] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == stop and event.done == 1:
            trained.append(True)

    backend = InlineBackend()
    try:
        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, watch, lambda: bool(trained)).run()
    finally:
        backend.close()
    assert len(RunDirectory(directory.path).read_frame("rounds.csv")) == stop
    resumed = resume(directory.path)
    uninterrupted = rayfl.run(settings)
    assert_same(resumed, uninterrupted)
    assert uninterrupted.rounds["clients"].tolist() == [4, 4, 1, 4]  # K = 4, then 5 = 4 + 1, then 8


@pytest.mark.slow
@pytest.mark.ray
def test_ray_is_inline(settings: dict[str, Any], ray_cluster: None):
    settings = {**settings, **EVERYTHING}
    execution = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    assert_same(rayfl.run(settings), rayfl.run({**settings, "execution": execution}))


# --- the expert ----------------------------------------------------------------------------------------


def test_the_final_model_of_a_run_is_an_expert(run: Run, settings: dict[str, Any]):
    """From the same initialisation: s_E is not s_G, and the model of no training is s_G in round 0."""
    teacher = run("rounds=5")
    order = {
        **CURRICULUM,
        "score": "expert",
        "expert": str(teacher.result.path / "models/model_0.safetensors"),
    }
    taught = run(order=order)
    assert taught.bits != run(order=CURRICULUM).bits
    assert taught.states.size == 0
    assert taught.summary["models_sha256"] == rayfl.run({**settings, "order": order}).summary["models_sha256"]


def test_the_expert_s_file_may_be_gone_when_the_run_is_over(
    run: Run, settings: dict[str, Any], tmp_path: Path
):
    model = run().result.path / "models/model_0.safetensors"
    file = tmp_path / "expert.safetensors"
    file.write_bytes(model.read_bytes())
    done = rayfl.run({**settings, "order": {**CURRICULUM, "score": "expert", "expert": str(file)}})
    file.unlink()
    assert Path(done.config.order.expert) == file  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", ["missing", "architecture"])
def test_experts_are_refused_before_anything_starts(
    run: Run, settings: dict[str, Any], tmp_path: Path, other: str
):
    file = tmp_path / "none.safetensors"
    if other == "architecture":
        file = run().result.path / "models/model_0.safetensors"
        settings["model"] = {"name": "mlp", "hidden": [7]}
    with pytest.raises(ConfigError) as caught:
        rayfl.run({**settings, "order": {**CURRICULUM, "score": "expert", "expert": str(file)}})
    assert str(caught.value).startswith("order.expert: ")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("t-*"))
    with pytest.raises(ConfigError, match="needs the setting expert, a model's file") as caught:
        load({**settings, "order": {**CURRICULUM, "score": "expert"}})
    assert "\n" not in str(caught.value)
