"""Networks from outside for texts: a user's own with an embedding, and those of transformers."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rayfl
from rayfl.config import load
from rayfl.data import DATASETS, Samples
from rayfl.errors import ConfigError, DataError
from rayfl.models import MODELS, ModelSpec
from rayfl.servers.building import build
from rayfl.training import LocalWork
from rayfl.training.batched import BatchedEngine
from rayfl.training.batched.reading import Unsupported, read
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from tests.training.test_recurrent import texts as random_texts

HERE = "tests.models.test_own_texts"
LENGTH, WORDS = 6, 12
TINY = {
    "bert": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "vocab_size": WORDS,
    },
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": WORDS},
}
SURE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Bag(nn.Module):
    """A mean of embeddings."""

    def __init__(self, classes: int, words: int = WORDS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 8), nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == torch.int64
        return self.head(self.embedding(tokens).mean(1))


class Next(Bag):
    """The next word from the one before."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)).transpose(1, 2)


class Recurrent(nn.Module):
    """The next word by an LSTM."""

    def __init__(self, words: int = WORDS, padding: int | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 5, padding_idx=padding), nn.Linear(7, words)
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states).transpose(1, 2)


class LastState(Recurrent):
    """A class by the state behind the last word."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(7, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.lstm(self.embedding(tokens))[0][:, -1]))


STATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[-1]": lambda last: last[-1],
    "[depth - 1]": lambda last: last[len(last) - 1],
    "[-1, :, :]": lambda last: last[-1, :, :],
    "squeeze(0)": lambda last: last.squeeze(0),
    "view": lambda last: last.view(last.shape[1], 7),
    "[0]": lambda last: last[0],
    "[-1, :, :7]": lambda last: last[-1, :, :7],
    "mean(0)": lambda last: last.mean(0),
    "permute": lambda last: last.permute(1, 0, 2).flatten(1),
    "tanh": lambda last: torch.tanh(last)[-1],
}
"""What networks do with ``h_n`` ``(depth, B, 7)``, the last states of an LSTM's layers."""


class HiddenState(nn.Module):
    """A class by the state that the LSTM returns besides those of all words."""

    def __init__(self, classes: int, depth: int = 1, state: str = "[-1]") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 5), nn.Linear(7, classes)
        self.lstm = nn.LSTM(5, 7, num_layers=depth, batch_first=True)
        self.state = STATES[state]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.lstm(self.embedding(tokens))
        return self.head(self.state(last))


class Flat(Bag):
    """The first words of a text, each at its place."""

    def __init__(self, classes: int, words: int = WORDS) -> None:
        super().__init__(classes, words)
        self.head = nn.Linear(8 * LENGTH, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.embedding(tokens)).flatten(1))


def write(path: Path) -> Path:
    """Texts of class 0 have even words, those of class 1 odd ones; then padding."""
    rng = np.random.default_rng(0)
    y = np.arange(80) % 2
    x = rng.integers(1, WORDS // 2, (80, LENGTH)) * 2 + y[:, None] - 2 * (y[:, None] == 1)
    x[x == 0] = 2
    x[::3, 4:] = 0
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    return path


@pytest.fixture
def texts(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run that classifies texts of three clients."""
    return {
        **settings,
        "rounds": 6,
        "data": {"name": "npz", "path": str(write(tmp_path / "texts.npz")), "tokens": True},
        "partition": {"name": "iid", "clients": 3},
        "training": {"epochs": 4, "batch_size": 5, "lr": 0.5},
    }


def own(target: str, **more: Any) -> dict[str, Any]:
    return {"name": "module", "target": f"{HERE}:{target}", "task": "texts", **more}


def test_an_own_network_classifies_texts(texts: dict[str, Any]) -> None:
    result = rayfl.run({**texts, "model": own("Bag")})
    assert result.rounds["accuracy_mean"].iloc[-1] == 100
    assert result.rounds["perplexity_mean"].isna().all()
    x = np.load(texts["data"]["path"])["x_test"]
    assert result.predict(x, client=0).tolist() == np.load(texts["data"]["path"])["y_test"].tolist()
    assert (result.path / "labels.csv").is_file()


@pytest.mark.parametrize(
    ("network", "engine"),
    [("Bag", "vmap"), ("Bag", "batched"), ("Flat", "batched"), ("LastState", "batched")],
)
def test_engines_agree(texts: dict[str, Any], network: str, engine: str) -> None:
    runs = [
        rayfl.run(
            {**texts, "rounds": 1, "model": own(network), "training": {**texts["training"], "engine": e}}
        )
        for e in ("loop", engine)
    ]
    models = [torch.cat([t.flatten() for t in r.model(cluster=0).state_dict().values()]) for r in runs]
    torch.testing.assert_close(models[0], models[1], rtol=1e-4, atol=1e-5)


def assert_batched_is_the_loop(spec: ModelSpec, samples: Samples) -> None:
    """Two clients of different sizes train to the same models in both engines."""
    batches = Batches(samples, torch.device("cpu"))
    start, indices = torch.from_numpy(spec.initial()).expand(2, -1), [np.arange(12), np.arange(20, 25)]
    loop, batched = (
        engine(spec, batches, 0).train(LocalWork(2, 5, 0.5), 0, [0, 1], indices, start)
        for engine in (LoopEngine, BatchedEngine)
    )
    assert not loop.failures
    torch.testing.assert_close(batched.rows, loop.rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 0, -2])
def test_an_own_recurrent_network_trains_in_the_batched_engine(padding: int | None) -> None:
    """Its inputs are words, as those of rayfl's own; the row of the padding learns nothing."""
    model = MODELS["module"](target=f"{HERE}:Recurrent", task="words", kwargs={"padding": padding})
    spec = ModelSpec.of(model, (LENGTH,), WORDS, 0)
    assert choose_engine(spec)[0] == "batched"
    assert_batched_is_the_loop(spec, random_texts(LENGTH, WORDS))


@pytest.mark.parametrize(
    ("depth", "state"),
    [
        (1, "[-1]"),
        (1, "[0]"),
        (1, "squeeze(0)"),
        (1, "view"),
        (2, "[-1]"),
        (2, "[depth - 1]"),
        (3, "[-1, :, :]"),
    ],
)
def test_the_last_state_of_an_lstm_trains_in_the_batched_engine(depth: int, state: str) -> None:
    kwargs = {"depth": depth, "state": state}
    model = MODELS["module"](target=f"{HERE}:HiddenState", task="texts", kwargs=kwargs)
    spec = ModelSpec.of(model, (LENGTH,), 3, 0)
    assert choose_engine(spec)[0] == "batched"
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WORDS, (30, LENGTH)).astype(np.int32), rng.integers(0, 3, 30)
    assert_batched_is_the_loop(spec, Samples("classified", x, y, x, y, 3))


@pytest.mark.parametrize(
    ("depth", "state"),
    [(2, "[0]"), (2, "[-1, :, :7]"), (1, "mean(0)"), (1, "permute"), (2, "tanh"), (1, "tanh")],
)
def test_other_uses_of_the_last_states_are_not_batched(depth: int, state: str) -> None:
    kwargs = {"depth": depth, "state": state}
    model = MODELS["module"](target=f"{HERE}:HiddenState", task="texts", kwargs=kwargs)
    spec = ModelSpec.of(model, (LENGTH,), 3, 0)
    with pytest.raises(Unsupported, match=r"last layer of an LSTM's last states|a mean over something else"):
        read(spec)


def test_methods_with_signatures_take_texts(texts: dict[str, Any]) -> None:
    clustering = {"n_clusters": 2, "features": "identity"}
    result = rayfl.run(
        {**texts, "rounds": 2, "model": own("Bag"), "algorithm": "pacfl", "clustering": clustering}
    )
    assert len(result.rounds) == 2


def test_an_own_network_predicts_words(settings: dict[str, Any], tmp_path: Path) -> None:
    for part, count in (("train", 40), ("test", 10)):
        with (tmp_path / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([(i % 4 + 1, "one two three one two three") for i in range(count)])
    given = {
        **settings,
        "data": {"name": "ag_news", "root": str(tmp_path), "length": 5, "vocabulary": 6},
        "partition": {"name": "iid", "clients": 2},
        "model": own("Next", task="words"),
        "training": {"epochs": 4, "batch_size": 5, "lr": 0.5},
    }
    result = rayfl.run(given)
    assert result.rounds["perplexity_mean"].iloc[-1] < 1.5
    # The same articles, told apart by topic.
    topics = {**given, "data": {**given["data"], "predict": "topic"}, "model": own("Bag"), "rounds": 1}
    assert rayfl.run(topics).rounds["perplexity_mean"].isna().all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "mlp",
            r"model.name: 'mlp' takes images and features; texts has texts to classify; use one of module, t",
        ),
        (
            "lstm",
            r"model.name: 'lstm' takes words; texts has texts to classify; use one of module, transformers",
        ),
        (own("Bag", task="numbers"), r"model.task: 'module' takes images .* set model.task=texts"),
        (
            own("Bag", kwargs={"words": 5}),
            r"model: 'module' does not know word 10 of texts; .* needs 11 words",
        ),
        (own("Next"), r"forward returns shape \(2, 2, 6\) for 2 samples; expected logits of shape \(2, 2\)"),
    ],
)
def test_networks_that_do_not_fit(texts: dict[str, Any], model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(load({**texts, "model": model}))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 3)), r"x_train has shape \(4, 3\) and type float64; tokens are integers of shape"),
        (np.zeros((4, 3, 2), int), r"x_train has shape \(4, 3, 2\)"),
        (np.full((4, 3), -1), r"x_train holds -1; tokens are numbers from 0"),
        (np.full((4, 3), 2**40), r"x_train holds 1099511627776; tokens are numbers from 0 to 999,999"),
    ],
)
def test_what_is_no_text(x: Any, message: str, tmp_path: Path) -> None:
    y = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match=message):
        DATASETS["npz"](path=tmp_path / "a.npz", tokens=True).load(Path())


# --- transformers: pip install 'rayfl[hub]' -------------------------------------------------------------


def transformer(arch: str, task: str, **kwargs: Any) -> Any:
    pytest.importorskip("transformers")
    return MODELS["transformers"](arch=arch, task=task, kwargs={**TINY.get(arch, {}), **kwargs})


def spec_of(model: Any, classes: int = 3) -> ModelSpec:
    spec = ModelSpec.of(model, (LENGTH,), classes, 0)
    model.check(spec.build, spec.shape, spec.classes)
    return spec


@pytest.mark.parametrize("arch", ["bert", "gpt2"])
def test_transformers_classify_texts(arch: str) -> None:
    spec = spec_of(transformer(arch, "texts"))
    module = spec.build().eval()
    x = torch.randint(1, WORDS, (4, LENGTH))
    x[0, 4:] = 0
    logits = module(x)
    assert logits.shape == (4, 3)
    with torch.no_grad():  # padding is not looked at: another number of it changes nothing
        longer = torch.cat([x[:1], torch.zeros(1, 2, dtype=torch.int64)], dim=1)
        torch.testing.assert_close(module(longer), logits[:1], rtol=1e-4, atol=1e-5)
    assert choose_engine(spec)[0] == "loop", "dropout draws random numbers"


def test_without_dropout_clients_train_together_where_that_equals_the_loop() -> None:
    assert choose_engine(spec_of(transformer("bert", "texts", **SURE)))[0] in ("vmap", "loop")


def test_transformers_predict_words() -> None:
    spec = spec_of(transformer("gpt2", "words"), WORDS)
    x = torch.randint(1, WORDS, (4, LENGTH))
    module = spec.build().eval()
    logits = module(x)
    assert logits.shape == (4, WORDS, LENGTH)
    changed = x.clone()
    changed[:, -1] = 1
    torch.testing.assert_close(module(changed)[:, :, :-1], logits[:, :, :-1])
    expected = nn.functional.cross_entropy(logits, x)
    torch.testing.assert_close(spec.loss.mean(logits, x), expected)


def test_transformers_from_a_folder(tmp_path: Path) -> None:
    model = transformer("bert", "texts")
    spec = spec_of(model)
    inner = spec.build().network
    inner.config.save_pretrained(tmp_path)
    save_file(
        {name: t.contiguous() for name, t in inner.state_dict().items()}, tmp_path / "model.safetensors"
    )
    again = MODELS["transformers"](arch=str(tmp_path), task="texts", weights=tmp_path / "model.safetensors")
    np.testing.assert_array_equal(spec_of(again).initial(), spec.flatten(spec.build()))


def test_a_transformer_learns(texts: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    model = {"name": "transformers", "arch": "bert", "task": "texts", "kwargs": {**TINY["bert"], **SURE}}
    result = rayfl.run({**texts, "model": model, "training": {"epochs": 4, "batch_size": 5, "lr": 0.1}})
    assert result.rounds["accuracy_mean"].iloc[-1] > 90


def test_images_for_a_classifier_of_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", type(sys)("transformers"))
    model = MODELS["transformers"](arch="bert", task="texts")
    with pytest.raises(ConfigError, match=r"bert takes texts, not samples of shape \(1, 8, 8\)"):
        model.network((1, 8, 8), 2)
