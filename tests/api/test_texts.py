"""Runs that predict words: trained, tested and reported word by word."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from rayfl.api import resume, run
from rayfl.config import load
from rayfl.coresets.clients import client_graph, evaluation_coreset
from rayfl.data import IGNORED
from rayfl.errors import ConfigError
from rayfl.servers.building import build
from rayfl.servers.queries import histograms
from rayfl.training.batches import raw_features

HABITS = ("red green blue", "one two three four", "so it goes on", "up and down")


@pytest.fixture
def words(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Four topics, each with a phrase of its own that is repeated: easy to predict, from a tiny file."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("test", 5)):
        rows = []
        for topic, habit in enumerate(HABITS):
            for _ in range(count):
                phrase = habit.split() * 4
                start, length = int(rng.integers(0, 4)), int(rng.integers(3, 11))
                rows.append((topic + 1, " ".join(phrase[start : start + length])))
        with (tmp_path / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return {
        **settings,
        "data": {"name": "ag_news", "root": str(tmp_path), "length": 8},
        "partition": {"name": "domains", "clients": 8},
        "model": {"name": "lstm", "embedding": 8, "hidden": 8},
        "training": {"epochs": 2, "batch_size": 5, "lr": 0.5, "momentum": 0.9},
    }


def test_perplexity_falls_and_is_reported(words: dict[str, Any]) -> None:
    result = run({**words, "rounds": 12})
    perplexity = result.rounds["perplexity_mean"].to_numpy()
    assert perplexity[-1] < 0.7 * perplexity[0]
    assert 1 <= perplexity[-1] < 17  # words are told apart
    assert result.summary["perplexity_mean"] == perplexity[-1]
    assert (result.rounds["accuracy_mean"] <= 100).all()


def test_metrics_are_those_of_words_counted_one_by_one(words: dict[str, Any]) -> None:
    """Apart from the machinery: every client's words through the final model."""
    result = run(words)
    stages, host = build(load(words))
    federation = stages[0].federation
    samples, module = federation.samples, host.spec.build()
    module.load_state_dict(load_file(result.path / "models" / "model_0.safetensors"))
    accuracies, perplexities = [], []
    for test in federation.test:
        right, losses = [], []
        for i in test:
            logits = module(torch.from_numpy(samples.x_test[i : i + 1]).long())[0].detach()
            for place, target in enumerate(samples.targets_test[i].tolist()):  # type: ignore[index]
                if target != IGNORED:
                    right.append(int(logits[:, place].argmax()) == target)
                    losses.append(float(functional.cross_entropy(logits[:, place], torch.tensor(target))))
        accuracies.append(100 * np.mean(right))
        perplexities.append(np.exp(np.mean(losses)))
    last = result.rounds.iloc[-1]
    assert last["accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert last["perplexity_mean"] == pytest.approx(np.mean(perplexities), rel=1e-5)
    assert result.clients["perplexity_last"].to_numpy() == pytest.approx(perplexities, rel=1e-5)


def test_every_client_has_its_perplexity_last_and_best_also_after_a_resume(words: dict[str, Any]) -> None:
    words = {
        **words,
        "partition": {**words["partition"], "clients": 4},
        "training": {**words["training"], "lr": 3.0},
    }
    rounds, best = 6, np.full(4, np.inf)
    for upto in range(1, rounds + 1):
        found = run({**words, "rounds": upto}).clients
        best = np.minimum(best, found["perplexity_last"])
    assert found["perplexity_best"].to_numpy() == pytest.approx(best.to_numpy())
    assert (found["perplexity_best"] < found["perplexity_last"]).any()
    half = run({**words, "rounds": 3})
    resumed = resume(half.path, [f"rounds={rounds}"]).clients
    pd.testing.assert_frame_equal(resumed, found)


def test_the_perplexity_of_a_few_clients_is_weighted_like_their_accuracy(words: dict[str, Any]) -> None:
    """13 clients of one topic, for whom 5 stand, and one each of three others."""
    words = {**words, "rounds": 2, "partition": {"name": "domains", "clients_per_domain": [13, 1, 1, 1]}}
    stages, _ = build(load(words))
    core = evaluation_coreset(client_graph(histograms(stages[0].federation)), 8, seed=words["seed"])
    assert core.weights.max() > 2 * core.weights.min()
    few = run({**words, "evaluation": {"coreset": 8}})
    every = run({**words, "rounds": 1}).clients
    for metric, column in (("perplexity_mean", "perplexity_last"), ("accuracy_mean", "accuracy_last")):
        expected = core.weights @ every[column].to_numpy()[core.ids]
        assert few.rounds[metric][0] == pytest.approx(expected, rel=1e-5)


def test_engines_agree_on_words(words: dict[str, Any]) -> None:
    loop, batched = (run(words, [f"training.engine={name}"]) for name in ("loop", "batched"))
    pd.testing.assert_series_equal(
        loop.rounds["perplexity_mean"], batched.rounds["perplexity_mean"], rtol=1e-3
    )


def test_runs_on_images_have_no_perplexity(settings: dict[str, Any]) -> None:
    result = run({**settings, "rounds": 1})
    assert result.rounds["perplexity_mean"].isna().all()
    assert result.summary["perplexity_mean"] is None
    assert not any("perplexity" in name for name in result.clients)


def test_networks_and_data_of_different_kinds_are_refused(
    words: dict[str, Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"'mlp' takes images and features; ag_news has texts; .* lstm"):
        run({**words, "model": "mlp"})
    with pytest.raises(ConfigError, match=r"'lstm' takes words; digits has other data; use one of .*mlp"):
        run({**settings, "model": "lstm"})


def test_signatures_see_which_words_occur() -> None:
    seen = raw_features(np.array([[3, 1, 3], [2, 0, 0]], np.int32), 5)
    assert seen.tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]]


def test_topics_are_found_from_the_words(words: dict[str, Any]) -> None:
    for method in ("pacfl", "mt_hfl"):
        result = run({**words, "algorithm": method, "clustering": {"n_clusters": 4}, "rounds": 1})
        assert result.summary["ari"] == 1.0, method


def test_real_topics_are_found_from_the_words(words: dict[str, Any], real_news: Path) -> None:
    data = {"name": "ag_news", "root": str(real_news), "vocabulary": 500, "length": 20, "test_size": 100}
    more = {"data": data, "partition": {"name": "domains", "clients": 20}, "rounds": 1}
    training = {"epochs": 1, "batch_size": 400, "lr": 0.1, "engine": "loop"}
    method = {"algorithm": "pacfl", "clustering": {"proximity": "principal_angle", "n_clusters": 4}}
    assert run({**words, **more, **method, "training": training}).summary["ari"] == 1.0
