"""Whose mean and deviation inputs are normalised with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.config import load
from rayfl.data import DATASETS, Dataset, Samples
from rayfl.data.scaling import GivenScaling, Scaling
from rayfl.data.server import ServerData
from rayfl.errors import ConfigError, Damaged
from rayfl.rundir import RunDirectory

RNG = np.random.default_rng(4)


def samples(x: np.ndarray) -> Samples:
    y = np.arange(len(x)) % 2
    return Samples("mine", x, y, x[:4], y[:4], 2)


def images(count: int = 30) -> np.ndarray:
    return RNG.integers(0, 256, (count, 3, 4, 5), dtype=np.uint8)


def table(count: int = 9000) -> np.ndarray:
    """Features of very different sizes; the last one never changes."""
    x = RNG.normal([40.0, 5e4, 0.3, 7.0], [10.0, 2e4, 0.1, 0.0], (count, 4))
    return x.astype(np.float32)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "rounds": 2,
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [16]},
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path / "runs"), "report": False, "tensorboard": False},
    }


def test_every_feature_of_a_table_has_its_own_mean_and_deviation() -> None:
    x = table()
    scaling = Scaling.of(samples(x))
    seen = scaling.apply(x)
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(seen.std(axis=0), [1, 1, 1, 0], atol=1e-3)
    np.testing.assert_allclose(scaling.mean, x.mean(axis=0, dtype=np.float64))


def test_a_channel_that_never_changes_has_a_deviation_of_1() -> None:
    """A pixel of a test image that is 0.01 brighter must not become 10,000."""
    x = images() / np.float32(255)
    x[:, 1] = 0.3
    scaling = Scaling.of(samples(x))
    assert scaling.std[1] == 1.0
    assert np.abs(scaling.apply(x + np.float32(0.01))[:, 1]).max() < 0.02


@pytest.mark.parametrize("x", [table(), images()])
def test_undone_scaling_gives_what_is_stored(x: np.ndarray) -> None:
    scaling = Scaling.of(samples(x))
    np.testing.assert_allclose(scaling.undo(scaling.apply(x)), x, rtol=1e-4, atol=1e-3)


def test_the_noise_that_models_predict_is_noise_to_them() -> None:
    """Of features with units, too."""
    data = replace(samples(table()), scaling=Scaling.of(samples(table())))
    noise = ServerData(source="noise", samples=2000).draw(data, 0)
    seen = Scaling.of(samples(table())).apply(noise)
    np.testing.assert_allclose(seen.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(seen.std(axis=0), 1, atol=0.1)


def test_pixels_in_rows_are_pixels() -> None:
    """The same statistics, bit for bit, as of the images that they were."""
    x = RNG.integers(0, 256, (50, 1, 6, 7), dtype=np.uint8)
    assert Scaling.of(samples(x.reshape(50, 42))) == Scaling.of(samples(x))


def test_none_and_given() -> None:
    data = samples(images())
    plain = DATASETS["digits"](normalise="none").normalised(data).scaling
    assert plain == Scaling(1 / 255, (0.0,), (1.0,))
    given = {"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.25]}
    scaling = DATASETS["digits"](normalise=given).normalised(data).scaling
    assert scaling is not None
    expected = (data.x_train[0, 1] / 255 - 0.4) / 0.2
    np.testing.assert_allclose(scaling.apply(data.x_train)[0, 1], expected, atol=1e-5)
    with pytest.raises(ConfigError, match="2 means for 3 channels; give 3 or one"):
        Scaling.given(data, GivenScaling(mean=(0.5, 0.5), std=(1.0, 1.0)))
    grey = replace(data, x_train=data.x_train[:, :1], x_test=data.x_test[:, :1])
    with pytest.raises(ConfigError, match=r"2 means for 1 channel; give one$"):
        Scaling.given(grey, GivenScaling(mean=(0.5, 0.5), std=(1.0, 1.0)))


@pytest.mark.parametrize(
    ("normalise", "message"),
    [
        ("polled", "data.normalise"),
        ({"mean": [0.5]}, "data.normalise.std: missing"),
        ({"mean": [0.5], "std": [0]}, "data.normalise.std"),
        ({"mean": [0.5, 1], "std": [1]}, "mean has 2 numbers, std 1"),
    ],
)
def test_what_is_no_normalisation_is_refused(normalise: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"data": {"name": "digits", "normalise": normalise}})


def test_every_dataset_says_whose_statistics_it_takes() -> None:
    """Drawn features keep their size; all else is standardised over all clients unless the config says no."""
    normalise = {name: part.model_fields["normalise"].default for name, part in DATASETS.items()}
    assert {name for name, value in normalise.items() if value != "pooled"} == {"synthetic"}
    assert Dataset().normalise == "pooled"


def write(path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    cut = len(x) * 4 // 5
    np.savez(path, x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    return path


def test_pixels_in_rows_train_as_the_images_do(settings: dict[str, Any], tmp_path: Path) -> None:
    """Before, uint8 (n, 64) was not scaled at all: a first loss of hundreds where images have 2.3."""
    digits = DATASETS["digits"]().load(Path())
    x, y = digits.x_train[:500], digits.y_train[:500]
    summaries = []
    for name, shape in (("images", (-1, 8, 8)), ("rows", (-1, 64))):
        path = write(tmp_path / f"{name}.npz", x.reshape(shape), y)
        result = rayfl.run({**settings, "data": {"name": "npz", "path": str(path)}})
        summaries.append(result.summary["models_sha256"])
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_tables_of_any_size_train(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Digits as a table of numbers, some of them in the thousands; one column constant."""
    digits = DATASETS["digits"]().load(Path())
    x = digits.x_train[:500].reshape(-1, 64).astype(kind) * np.where(np.arange(64) % 3, 1, 50).astype(kind)
    path = write(tmp_path / "table.npz", x, digits.y_train[:500])
    said: list[str] = []

    def first_loss(normalise: str) -> float:
        data = {"name": "npz", "path": str(path), "normalise": normalise}
        config = {**settings, "data": data}
        result = rayfl.run(config, on_event=lambda e: said.append(getattr(e, "text", "")))
        return float(result.rounds["train_loss"][0])

    assert first_loss("pooled") < np.log(10) + 0.5
    assert any(line.startswith("data: 64 features from 0 to 12750; each") for line in said)
    assert first_loss("none") > 100, "as it was, if so asked"
    assert any("ranges between 0 and 12750; the models take them with one" in line for line in said)


def test_a_run_keeps_its_scaling(settings: dict[str, Any], tmp_path: Path) -> None:
    """It is read from the run directory, whatever the dataset's file says now."""
    x, y = table(200), np.arange(200) % 2
    path = write(tmp_path / "table.npz", x, y)
    config = {**settings, "data": {"name": "npz", "path": str(path)}}
    whole = rayfl.run({**config, "rounds": 4}).summary["models_sha256"]
    half = rayfl.run(config)
    assert half.scaling == Scaling.of(samples(x[:160]))
    assert rayfl.resume(half.path, ["rounds=4"]).summary["models_sha256"] == whole
    directory = RunDirectory.open(half.path)
    other = replace(half.scaling, mean=(half.scaling.mean[0] + 1, *half.scaling.mean[1:]))
    directory.write_scaling(other)
    assert rayfl.resume(half.path, ["rounds=5"]).scaling == other
    assert directory.scaling == other


def test_other_numbers_than_were_written_are_refused(settings: dict[str, Any]) -> None:
    """A single digit would change all results without notice. Earlier versions wrote no hash."""
    run = rayfl.run({**settings, "rounds": 1})
    file = run.path / "normalisation.json"
    written = json.loads(file.read_text())
    changed = {**written, "std": [1.5 * value for value in written["std"]]}
    file.write_text(json.dumps(changed))
    with pytest.raises(Damaged, match=r"normalisation.json: is damaged \(its numbers are not those"):
        rayfl.resume(run.path, ["rounds=2"])
    del changed["sha256"]
    file.write_text(json.dumps(changed))
    assert rayfl.resume(run.path, ["rounds=2"]).scaling.std == tuple(changed["std"])
