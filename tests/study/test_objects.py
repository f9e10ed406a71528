"""Studies that are given from Python: a config as the base, parts and arrays among the settings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.config.reading import load, own_settings, presets
from rayfl.errors import ConfigError, RayflError
from rayfl.study.file import read, take
from rayfl.study.objects import plain_content
from rayfl.study.plan import plan, resolved

PARTS = """
from typing import Literal

import numpy as np
from torch import nn

from rayfl.algorithms.fedavg import FedAvg


class Halved(FedAvg):
    '''FedAvg under another name, with a setting.'''

    name: Literal["halved"] = "halved"
    rate: float = 0.5


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Linear(int(np.prod(shape)), 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""

SMALL: dict[str, Any] = {
    "rounds": 1,
    "training.batch_size": 20,
    "execution.backend": "inline",
    "output": {"root": "runs", "report": False, "tensorboard": False},
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "study_parts.py").write_text(PARTS)
    importlib.invalidate_caches()
    return importlib.import_module("study_parts")


def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 5)).astype(np.float32), np.arange(60) % 3
    return x[:40], y[:40], x[40:], y[40:]


def test_classes_networks_arrays_and_lists_of_samples(parts: Any) -> None:
    """The runs are those of ``rayfl.run`` with the same objects, and the copy of the study has the same."""
    owners = [range(15), np.arange(15, 40)]
    content = {
        "name": "objects",
        "settings": {**SMALL, "data": arrays(), "partition": owners},
        "methods": {
            "Class": {"algorithm": parts.Halved},
            "Instance": {"algorithm": parts.Halved(rate=0.1)},
        },
        "grid": {
            "network": {"own": {"model": parts.Net}, "mlp": {"model": "mlp"}},
            "training.lr": np.array([0.05]),
        },
        "seeds": range(1, 2),
    }
    study = rayfl.run_study(content, inline=True)
    assert not study.failed
    assert len(study.runs) == 2 * 2
    small = {"rounds": 1, "training": {"batch_size": 20, "lr": 0.05}, "seed": 1, "output": SMALL["output"]}
    run = rayfl.run(
        {**small, "execution": {"backend": "inline"}},
        algorithm=parts.Halved(rate=0.1),
        model=parts.Net,
        data=arrays(),
        partition=owners,
    )
    found = study.result("Instance", seed=1, at={"network": "own"})
    assert found.summary["models_sha256"] == run.summary["models_sha256"]
    assert type(study.model("Class", client=0, seed=1, at={"network": "own"})).__name__ == "Net"
    copy = plan(read(study.folder / "study.yaml"))
    assert {each.key for each in copy} == {*study.runs["key"]}


def test_a_config_as_the_base(parts: Any) -> None:
    """Methods start from it as from a file; one without an algorithm has the base's, here a user's class."""
    base = rayfl.Config(algorithm=parts.Halved(rate=0.1), rounds=7)
    content = plain_content({"name": "s", "base": base, "methods": {"A": {}, "B": {"algorithm": "pacfl"}}})
    assert content["base"] == {"algorithm": base.algorithm.model_dump(), "rounds": 7}
    assert content["plugins"] == ["study_parts"]
    study = take(content, Path.cwd())
    assert resolved(study, "A", {}, 3).algorithm == base.algorithm
    assert [resolved(study, label, {}, 3).rounds for label in "AB"] == [7, 7]
    of_pacfl = load({"algorithm": "pacfl"})
    assert resolved(study, "B", {}, 3).clustering == of_pacfl.clustering


@pytest.mark.parametrize(
    ("given", "all_plugins"),
    [((), ["study_parts"]), (["other", "study_parts"], ["other", "study_parts"]), (3, 3)],
)
def test_classes_become_plugins_beside_those_given(parts: Any, given: Any, all_plugins: Any) -> None:
    content = {"name": "s", "plugins": given, "methods": {"A": {"algorithm": parts.Halved}}}
    assert plain_content(content)["plugins"] == all_plugins


def test_own_settings_make_the_same_config() -> None:
    """Of every preset; and settings of other sections that only its algorithm has by default are left out."""
    for name in presets():
        config = load(name)
        assert load(own_settings(config)) == config
    assert own_settings(load({"algorithm": "flt", "rounds": 3})).keys() == {"algorithm", "rounds"}


def test_settings_as_the_base() -> None:
    study = take({"name": "s", "base": {"rounds": 7, "data": "digits"}, "methods": {"A": {}}}, Path.cwd())
    config = resolved(study, "A", {}, 0)
    assert (config.rounds, config.data.name, config.algorithm.name) == (7, "digits", "fedavg")


def test_lists_of_numpy_and_paths() -> None:
    content = {
        "name": "s",
        "base": Path("some", "base.yaml"),
        "methods": {"A": {"algorithm": "fedavg", "training.epochs": np.int64(2)}},
        "grid": {"training.lr": np.array([0.25, 0.5]), "partition": {np.int64(3): {"partition.clients": 3}}},
        "seeds": np.arange(2),
    }
    assert plain_content(content) == {
        "name": "s",
        "plugins": [],
        "base": str(Path("some", "base.yaml")),
        "methods": {"A": {"algorithm": "fedavg", "training.epochs": 2}},
        "grid": {"training.lr": [0.25, 0.5], "partition": {3: {"partition.clients": 3}}},
        "seeds": [0, 1],
    }


METHODS = {"A": {"algorithm": "fedavg"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"base": 3}, "base: got 3; expected text or a section"),
        ({"base": {"lr": 1}}, "base: lr: no such setting; did you mean 'training.lr'?"),
        ({"base": {"algorithm": np}}, "base: algorithm: got "),
        ({"methods": {"A": {"algorithm": ValueError}}}, "methods.A: algorithm: got "),
        (
            {"methods": {"A": {"algorithm": "fedavg", "model": lambda shape, classes: None}}},
            "methods.A: <lambda>",
        ),
        ({"settings": {"model": lambda shape, classes: None}}, "settings: <lambda>: other processes cannot"),
        ({"grid": {"net": {"one": {"model": lambda shape, classes: None}}}}, "grid.net.one: <lambda>"),
        (
            {"sizes": {"small": {"settings": {"data": np.zeros(3)}}}},
            "sizes.small.settings: data: ",
        ),
        ({"methods": {"A": 3}}, "methods.A: got 3"),
        ({"methods": 3}, "methods: got 3"),
        ({"grid": {"training.lr": np.zeros((2, 2))}}, "grid.training.lr: expected text, numbers"),
    ],
)
def test_what_does_not_fit_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RayflError) as refused:
        rayfl.run_study({"name": "s", "methods": METHODS, **content}, tmp_path / "out", inline=True)
    assert isinstance(refused.value, ConfigError)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
