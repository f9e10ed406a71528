"""Whose model is tested, on what: by plain PyTorch, and where two of them must be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.config import load
from rayfl.data import Federation, TestedOn
from rayfl.errors import ClientError
from rayfl.evaluation import METRICS
from rayfl.evaluation.protocols import columns, prefix
from rayfl.models import ModelSpec
from rayfl.random import orders
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from tests.runs import METHODS, SMALL, Run

EVERYTHING = {"local": True, "common": True}
PLACES: tuple[TestedOn, ...] = ("test", "validation", "common")


def trained(
    spec: ModelSpec, start: np.ndarray, federation: Federation, round: int, client: int
) -> np.ndarray:
    """One client's two epochs of SGD with momentum, as anybody would write them."""
    own = federation.train[client]
    x, y = Batches(federation.samples, torch.device("cpu")).train(own)
    module = spec.build()
    spec.load(module, torch.from_numpy(start))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    size = SMALL["training"]["batch_size"]
    for epoch in orders(SMALL["seed"], round, [client], [len(own)], 2)[0]:
        for at in range(0, len(epoch), size):
            batch = epoch[at : at + size].copy()
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    return spec.flatten(module)


def percent_right(
    spec: ModelSpec, model: np.ndarray, federation: Federation, client: int, on: TestedOn
) -> float:
    """Accuracy in percent: of a client's samples, or of all test samples with the labels that it sees."""
    samples = federation.samples
    batches = Batches(samples, torch.device("cpu"))
    if on == "common":
        count = len(samples.y_test)
        x, y = batches.test(np.arange(count))
        if samples.label_maps is not None:
            y = torch.from_numpy(samples.label_maps[federation.test[client][0] // count][samples.y_test])
    else:
        x, y = (
            batches.test(federation.test[client])
            if on == "test"
            else batches.train(federation.validation[client])
        )
    module = spec.build().eval()
    spec.load(module, torch.from_numpy(model))
    with torch.no_grad():
        return 100 * float((module(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("partition", ["label_skew", "relabelled"])
def test_equal_to_a_plain_loop(run: Run, partition: str) -> None:
    """Two rounds of FedAvg in which all take part."""
    sections = {"partition": {"name": partition, "clients": 4, "validation": 0.2}, "evaluation": EVERYTHING}
    ran = run("rounds=2", **sections).result
    stages, host = build(load({**SMALL, **sections}))
    federation, spec = stages[0].federation, host.spec
    server, weights = spec.initial(), federation.sizes / federation.sizes.sum()
    for round in range(2):
        own = [trained(spec, server, federation, round, client) for client in range(4)]
        server = (weights @ np.stack(own).astype(np.float64)).astype(np.float32)
        for on in PLACES:
            for model, models in (("served", [server] * 4), ("local", own)):
                percent = [percent_right(spec, m, federation, client, on) for client, m in enumerate(models)]
                begin = prefix(on, model)  # type: ignore[arg-type]
                assert ran.rounds[f"{begin}accuracy_mean"][round] == pytest.approx(np.mean(percent))
                assert ran.rounds[f"{begin}accuracy_worst10"][round] == pytest.approx(min(percent))
                if round == 1:
                    last = ran.clients[f"{begin}accuracy_last"]
                    assert last.tolist() == pytest.approx(percent)
                    assert ran.summary[f"{begin}accuracy_mean"] == pytest.approx(np.mean(percent))
    assert ran.clients["local_round"].tolist() == [1] * 4
    assert ran.rounds["local_clients"].tolist() == [4, 4]


ONE = ["fedavg", "solo", "lg_fedavg", "per_fedavg", "sub_fedavg", "mtl", "fedprox", "mt_hfl, scaffold"]


@pytest.mark.parametrize("method", ONE)
def test_of_a_single_client_the_local_model_is_the_served_one(run: Run, method: str) -> None:
    """Whatever the method does with it before a test: own layers, masks, adaptation."""
    sections = {"algorithm": method, **METHODS[method], "evaluation": EVERYTHING}
    sections["training"] = {**SMALL["training"], "momentum": 0.0}
    sections["partition"] = {"name": "iid", "clients": 1, "validation": 0.2}
    for section in ("clustering", "hierarchy"):
        sections.pop(section, None)
    ran = run(**sections).result
    for on in PLACES:
        for metric in METRICS:
            served, local = (ran.rounds[f"{prefix(on, model)}{metric}"] for model in ("served", "local"))  # type: ignore[arg-type]
            assert served.tolist() == local.tolist() or served.isna().all()


@pytest.mark.parametrize("method", ["solo", "mtl", "sub_fedavg"])
def test_who_is_tested_with_what_it_trained_has_one_accuracy(run: Run, method: str) -> None:
    sections = {"algorithm": method, **METHODS[method], "evaluation": EVERYTHING}
    sections["training"] = {**SMALL["training"], "momentum": 0.0, "participation": 0.3}
    clients = run("rounds=2", **sections).result.clients
    some = clients[clients["local_round"] >= 0]
    assert (len(some) < len(clients)) == (method != "solo")  # of SOLO all train
    for on in PLACES:
        np.testing.assert_array_equal(
            some[f"{prefix(on)}accuracy_last"], some[f"{prefix(on, 'local')}accuracy_last"]
        )
    assert clients.loc[clients["local_round"] < 0, "local_accuracy_last"].isna().all()


def test_an_accuracy_is_kept_until_the_client_trains_again(run: Run) -> None:
    settings = {
        "training": {**SMALL["training"], "participation": 0.25},
        "evaluation": {**EVERYTHING, "every": 2},
    }
    short, long = (run(f"rounds={rounds}", **settings).result for rounds in (1, 3))
    assert long.rounds["local_accuracy_mean"].notna().tolist() == [False, True, True]
    before, after = (ran.clients.set_index("client") for ran in (short, long))
    kept = before.index[(before["local_round"] >= 0) & (before["local_round"] == after["local_round"])]
    assert len(kept)
    assert (before.loc[kept, "local_accuracy_last"] == after.loc[kept, "local_accuracy_last"]).all()
    has = after["local_round"] >= 0
    assert long.rounds["local_clients"].iloc[-1] == has.sum() < len(after)
    assert long.summary["local_accuracy_mean"] == pytest.approx(after["local_accuracy_last"][has].mean())


def test_clients_that_failed_have_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LoopEngine.train

    def train(self: LoopEngine, work: Any, round: int, ids: Any, *others: Any) -> Any:
        block = original(self, work, round, ids, *others)
        row = {place for place, client in enumerate(ids) if client == 2 and round != 1}
        block.rows[list(row)] = float("nan")
        return replace(block, failures=dict.fromkeys(row, "Traceback\nValueError: boom"))

    monkeypatch.setattr(LoopEngine, "train", train)
    execution = {**SMALL["execution"], "tolerate_failures": 1}
    never = run("rounds=1", evaluation=EVERYTHING, execution=execution).result
    once = run("rounds=3", evaluation=EVERYTHING, execution=execution).result
    assert never.clients["local_round"].tolist() == [0, 0, -1, *[0] * 5]
    assert np.isnan(never.clients["local_accuracy_last"][2])
    assert never.summary["local_clients"] == 7
    assert once.clients["local_round"].tolist() == [2, 2, 1, *[2] * 5]
    assert never.clients["rounds_trained"].tolist() == [1, 1, 0, *[1] * 5]
    assert once.clients["rounds_trained"].tolist() == [3, 3, 1, *[3] * 5]


def test_rounds_in_which_each_client_trained_are_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original, trained = LoopEngine.train, list[int]()

    def train(self: LoopEngine, work: Any, round: int, ids: Any, *others: Any) -> Any:
        trained.extend(map(int, ids))
        return original(self, work, round, ids, *others)

    monkeypatch.setattr(LoopEngine, "train", train)
    result = run("rounds=5", name="counted", training={**SMALL["training"], "participation": 0.4}).result
    counts = result.clients["rounds_trained"]
    assert counts.tolist() == np.bincount(trained, minlength=len(counts)).tolist()
    assert counts.sum() == result.rounds["clients"].sum()
    assert counts.nunique() > 1


@pytest.mark.parametrize("algorithm", ["fedavg", "per_fedavg"])
def test_clients_that_cannot_adapt_are_tested_without_that(
    algorithm: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether before a test, after the last round or right after training."""
    original, notes = LoopEngine.train, list[tuple[int, list[int], str]]()

    def train(self: LoopEngine, work: Any, round: int, ids: Any, *others: Any) -> Any:
        block = original(self, work, round, ids, *others)
        row = {place for place, client in enumerate(ids) if client == 2 and work.epochs != 2}
        block.rows[list(row)] = float("nan")
        return replace(block, failures=dict.fromkeys(row, "Traceback\nValueError: boom"))

    def told(self: Driver, round: int, ids: list[int], text: str) -> None:
        notes.append((round, ids, text))

    asked: dict[str, Any] = {"algorithm": algorithm, "evaluation": {**EVERYTHING, "finetune_epochs": 3}}
    if algorithm == "per_fedavg":
        asked["training"] = {**SMALL["training"], "momentum": 0}
    plain = run("rounds=2", **asked).result
    monkeypatch.setattr(LoopEngine, "train", train)
    with pytest.raises(ClientError, match="client 2"):
        run("rounds=2", **asked, name="another")  # results are kept by their settings
    asked["execution"] = {**SMALL["execution"], "tolerate_failures": 1}
    monkeypatch.setattr("rayfl.servers.driver.Driver._remark", told)
    result = run("rounds=2", **asked).result
    assert result.summary["models_sha256"] == plain.summary["models_sha256"]
    assert result.rounds["failures"].tolist() == [0, 0]
    there = result.clients["client"] != 2
    for name in ("accuracy_last", "accuracy_finetuned", "local_accuracy_last"):
        assert result.clients[name].notna().all()
        assert (result.clients[name][there] == plain.clients[name][there]).all()
    words = "failed while adapting its model, so it is tested without adaptation: ValueError: boom"
    assert {(round, *ids, text) for round, ids, text in notes} == (
        {(1, 2, words)} if algorithm == "fedavg" else {(0, 2, words), (1, 2, words)}
    )


def test_after_an_event_all_begin_again(run: Run) -> None:
    events = [{"name": "leave", "round": 2, "clients": [1]}]
    training = {**SMALL["training"], "participation": 0.4}
    ran = run("rounds=3", events=events, evaluation=EVERYTHING, training=training).result
    rounds = ran.clients["local_round"]
    assert set(rounds) == {-1, 2}
    assert rounds[1] == -1
    assert ran.rounds["local_clients"].iloc[-1] == (rounds == 2).sum()
    assert np.isnan(ran.clients["common_accuracy_last"][1])


def test_tests_change_no_model(run: Run) -> None:
    without = run(evaluation={"validation": False, "finetune_epochs": 1})
    assert not set(columns(PLACES, ("served", "local"))) & set(without.result.rounds.columns)
    assert not {"local_round", "validation_accuracy_last"} & set(without.result.clients.columns)
    every = run(evaluation={**EVERYTHING, "finetune_epochs": 1})
    assert without.bits == every.bits
    for on in PLACES:
        assert every.summary[f"{prefix(on, 'finetuned')}accuracy_mean"] is not None
    assert every.summary["finetuned_accuracy_mean"] == without.summary["finetuned_accuracy_mean"]


def test_without_validation_samples_none_are_tested(run: Run) -> None:
    partition = {**SMALL["partition"], "validation": 0}
    ran = run(partition=partition)
    assert not [name for name in (*ran.result.rounds.columns, *ran.summary) if "validation" in name]
    assert ran.summary["accuracy_mean_best_test"] == ran.result.rounds["accuracy_mean"].max()


def test_each_of_the_servers_models_is_tested_once_on_the_common_samples(run: Run) -> None:
    sections = {"algorithm": {"name": "ifca", "clusters": 2}, "evaluation": EVERYTHING}
    clients = run(**sections).result.clients
    found = clients.groupby("cluster")["common_accuracy_last"].nunique()
    assert set(found) == {1}


def test_models_on_common_samples_are_planned_a_few_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = {"algorithm": "solo", "partition": {"name": "relabelled", "clients": 6, "clusters": 2}}
    whole = run(**solo, evaluation=EVERYTHING).result.clients
    monkeypatch.setattr("rayfl.servers.testing._COMMON_SAMPLES", 1)
    pieces = run("seed=3", **solo, evaluation=EVERYTHING).result.clients
    assert whole["common_accuracy_last"].tolist() == pieces["common_accuracy_last"].tolist()
    assert whole["common_accuracy_last"].nunique() > 2
