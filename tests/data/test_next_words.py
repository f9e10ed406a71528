"""Texts of one's own whose next words are predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.commands.newcomers import assign_newcomers
from rayfl.data.arrays import next_words
from rayfl.data.datasets.ag_news import encode
from rayfl.errors import ConfigError, DataError
from rayfl.study.plan import hashed_settings

WORDS = 12


def texts(n: int = 60, length: int = 7) -> np.ndarray:
    """Texts of 2 to ``length`` words, padded with 0; each word follows from the one before."""
    rng = np.random.default_rng(0)
    x = np.zeros((n, length), np.int64)
    for row in x:
        words = int(rng.integers(2, length + 1))
        row[:words] = (rng.integers(1, WORDS) + 3 * np.arange(words)) % (WORDS - 1) + 1
    return x


def test_inputs_and_targets_are_those_of_articles() -> None:
    """By the code of AG News, which reads lists of words."""
    x = texts()
    names = [str(i) for i in range(WORDS)]
    articles = [[str(word) for word in row if word] for row in x]
    inputs, targets = next_words(x, "x")
    expected_inputs, expected_targets = encode(articles, names, x.shape[1] - 1)
    np.testing.assert_array_equal(inputs, expected_inputs)
    np.testing.assert_array_equal(targets, expected_targets)
    assert (inputs.dtype, targets.dtype) == (np.int32, np.int64)


def settings(tmp_path: Path, **data: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {"test_fraction": 0.2, "tokens": True, "predict": "words", **data},
        "partition": {"name": "iid", "clients": 4, "validation": 0},
        "model": {"name": "module", "target": "tests.models.test_own_texts:Next", "task": "words"},
        "training": {"engine": "loop", "epochs": 3, "batch_size": 5, "lr": 5.0},
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
    }


def run(given: dict[str, Any], x: np.ndarray, y: np.ndarray) -> rayfl.Result:
    data = given.pop("data")
    return rayfl.run(given, [f"data.{name}={value}" for name, value in data.items()], data=(x, y))


def test_a_run_learns_what_follows(tmp_path: Path) -> None:
    """Each word determines the next one."""
    x = texts()
    result = run(settings(tmp_path), x, np.arange(len(x)) % 3)
    assert result.summary["accuracy_mean"] > 90
    assert result.summary["perplexity_mean"] < WORDS / 2
    assert result.clients["perplexity_last"].notna().all()


def test_words_that_the_model_does_not_know_are_not_predicted(tmp_path: Path) -> None:
    x = texts()
    result = run(settings(tmp_path), x, np.arange(len(x)) % 3)
    assert result.predict(x[:, :-1], client=0).shape == (60, 6)
    for wrong, line in (
        (x[:, :-1] + 80, "predict: inputs hold word 91; the model knows words 0 to 11"),
        (x[:, :-1] - 80, "predict: x holds -80; tokens are numbers from 0"),
        (x[:, :-1] + 0.5, "predict: x has shape .* and type float64; tokens are integers"),
    ):
        with pytest.raises((ConfigError, DataError), match=line):
            result.predict(wrong, client=0)


def test_topics_are_for_partitions(tmp_path: Path) -> None:
    x, topics = texts(), np.arange(60) % 3
    given = settings(tmp_path)
    given["partition"] = {"name": "label_skew", "clients": 3, "rho": 0.4}
    overrides = [f"data.{name}={value}" for name, value in given.pop("data").items()]
    view = rayfl.partition(given, overrides, data=(x, topics), measures=["emd"])
    assert view.federation.samples.task == "words"
    assert view.clients[["class_0", "class_1", "class_2"]].gt(0).sum(axis=1).max() < 3


def test_texts_without_topics_and_their_newcomers(tmp_path: Path) -> None:
    x = texts()
    result = run(settings(tmp_path), x, np.zeros(len(x), np.int64))
    new = {"y_train": np.zeros(10, np.int64), "y_test": np.zeros(10, np.int64)}
    new |= {"client_train": np.zeros(10, np.int64), "client_test": np.zeros(10, np.int64)}
    np.savez(tmp_path / "new.npz", x_train=x[:10], x_test=x[10:20], **new)
    frame = assign_newcomers(result.path, tmp_path / "new.npz", epochs=1)
    assert frame["accuracy"].iloc[0] > 90
    assert 1 < frame["perplexity_finetuned"].iloc[0] < WORDS / 2
    np.savez(tmp_path / "new.npz", x_train=x[:10] + 80, x_test=x[10:20], **new)
    with pytest.raises(DataError, match="has word 91; the run's model knows words 0 to 11"):
        assign_newcomers(result.path, tmp_path / "new.npz", epochs=1)


@pytest.mark.parametrize(
    ("change", "y", "error", "message"),
    [
        ({"tokens": False}, 0, ConfigError, "predict=words is for texts; add tokens=true"),
        ({}, 0.5, DataError, "y_train is an array of float64.*holds the topic of each text, an integer"),
        ({"predict": "word"}, 0, ConfigError, r"data\.predict: .*'class' or 'words'"),
    ],
)
def test_mistakes(
    change: dict[str, Any], y: float, error: type[Exception], message: str, tmp_path: Path
) -> None:
    x = texts()
    with pytest.raises(error, match=message):
        run(settings(tmp_path, **change), x, np.full(len(x), y))


def test_texts_of_one_word_are_refused(tmp_path: Path) -> None:
    x = texts()
    x[::10, 1:] = 0
    with pytest.raises(DataError, match=r"of \d+ texts have fewer than two words.*leave them out"):
        run(settings(tmp_path), x, np.zeros(len(x), np.int64))


def test_keys_of_studies_of_earlier_versions_stay_the_same(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=texts(), y=np.zeros(60, np.int64))
    config = rayfl.load({"data": {"name": "npz", "path": str(tmp_path / "d.npz"), "test_fraction": 0.2}})
    assert "predict" not in hashed_settings(config, config.model_dump(mode="json"))["data"]
