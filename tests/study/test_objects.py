"""Studies that are given from Python: a config as the base, parts and arrays among the settings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl import plugins
from rayfl.config.reading import load, own_settings, presets
from rayfl.config.text import dump
from rayfl.data.events import Leave
from rayfl.errors import ConfigError, RayflError
from rayfl.study.file import StudyFile, read, take
from rayfl.study.objects import plain_content
from rayfl.study.plan import plan, points, resolved, tuned_names

PARTS = """
from typing import Literal

import numpy as np
from torch import nn

from rayfl.algorithms.fedavg import FedAvg
from rayfl.clustering.config import SIGNATURES


class Halved(FedAvg):
    '''FedAvg under another name, with a setting.'''

    name: Literal["halved"] = "halved"
    rate: float = 0.5


class Centres(SIGNATURES["centroids"]):
    '''Centroids under another name.'''

    name: Literal["centres"] = "centres"


class Net(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.body = nn.Linear(int(np.prod(shape)), width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""

SMALL: dict[str, Any] = {
    "rounds": 1,
    "training.batch_size": 20,
    "execution.backend": "inline",
    "output": {"root": "runs", "report": False, "tensorboard": False},
}


METHODS = {"A": {"algorithm": "fedavg"}}


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


def configs(**content: Any) -> dict[str, rayfl.Config]:
    """The config of every method, at the first point of the grid."""
    study = take(plain_content({"name": "s", "methods": METHODS, **content}), Path.cwd())
    return {label: resolved(study, label, points(study)[0], 3) for label in study.methods}


def test_a_config_as_the_base(parts: Any) -> None:
    """A method without an algorithm has the base's, here a user's class; others have all but its defaults."""
    base = rayfl.Config(algorithm=parts.Halved(rate=0.1), rounds=7)
    content = plain_content({"name": "s", "base": base, "methods": METHODS})
    assert content["base"] == {"algorithm": base.algorithm.model_dump(), "rounds": 7}
    assert content["plugins"] == ["study_parts"]
    found = configs(base=base, methods={"A": {}, "B": {"algorithm": "pacfl"}})
    assert found["A"].algorithm == base.algorithm
    assert [config.rounds for config in found.values()] == [7, 7]
    assert found["B"].clustering == load({"algorithm": "pacfl"}).clustering


def test_parts_at_any_depth(parts: Any) -> None:
    """Their plug-ins are named, so that other processes can read the copy of the study."""
    clustering = {"proximity": "min_distance", "signature": parts.Centres()}
    leave = Leave(round=1, clients=(0,))
    for where in ({"base": {"clustering": clustering}}, {"settings": {"clustering": clustering}}):
        content = {"methods": {"A": {"algorithm": "pacfl"}}, **where}
        assert plain_content(content)["plugins"] == ["study_parts"]
        assert configs(**content)["A"].clustering.signature == parts.Centres()
    dotted = {"clustering.proximity": "min_distance", "clustering.signature": parts.Centres}
    found = configs(methods={"A": {"algorithm": "pacfl", **dotted}})["A"]
    assert found.clustering.signature.name == "centres"
    assert configs(settings={"events": (leave,), "rounds": 3})["A"].events == (leave,)
    tune = {"training.lr": [0.1, 0.2], "settings": {"model": parts.Net}}
    assert plain_content({"tune": tune})["tune"]["settings"]["model.target"] == "study_parts:Net"


def test_a_part_in_a_section_is_a_plugin_of_a_run(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the workers of Ray would not know the part."""
    monkeypatch.setattr(plugins, "_loaded", {})
    load({"algorithm": "pacfl", "clustering": {"proximity": "min_distance", "signature": parts.Centres()}})
    assert [plugin.module for plugin in plugins.loaded()] == ["study_parts"]


def test_an_object_replaces_all_of_its_section(parts: Any) -> None:
    """As in ``rayfl.run``: settings that belong to what it replaces would not fit it."""
    wide = {"model": {"name": "module", "target": "study_parts:Net", "kwargs": {"width": 9}}}
    at = {"grid": {"net": {"own": {"model": parts.Net}}}, "settings": wide}
    method = {"methods": {"A": {"algorithm": "fedavg", "model": parts.Net}}, "base": load(wide)}
    for content in ({"settings": {"model": parts.Net}, "base": wide}, at, method):
        assert configs(**content)["A"].model == load({}, model=parts.Net).model
    beside = {"model.kwargs": {"width": 9}, "model": parts.Net}
    assert configs(settings=beside)["A"].model.kwargs == {"width": 9}  # type: ignore[attr-defined]
    x, y, *_ = arrays()
    settings = {"data": (x, y), "data.test_fraction": 0.25}
    base = {"data": {"name": "npz", "path": "a.npz", "layout": "csv"}}
    data = configs(base=base, settings=settings)["A"].data
    assert data == load({}, data=(x, y), overrides=["data.test_fraction=0.25"]).data


def test_a_class_is_the_name_of_a_method_whose_settings_can_be_chosen(parts: Any) -> None:
    content = {"methods": {"A": {"algorithm": parts.Halved}}, "tune": {"algorithm.rate": [0.1, 0.2]}}
    study = take(plain_content({"name": "s", **content}), Path.cwd())
    assert tuned_names(study, "A") == ["algorithm.rate"]


@pytest.mark.parametrize(
    ("given", "all_plugins"),
    [((), ["study_parts"]), (["other", "study_parts"], ["other", "study_parts"]), (3, 3)],
)
def test_classes_become_plugins_beside_those_given(parts: Any, given: Any, all_plugins: Any) -> None:
    content = {"name": "s", "plugins": given, "methods": {"A": {"algorithm": parts.Halved}}}
    assert plain_content(content)["plugins"] == all_plugins


def test_own_settings_make_the_same_config() -> None:
    """Of every preset, for its own algorithm and for others, to which nothing else is passed on."""
    for name in presets():
        config = load(name)
        own = own_settings(config)
        assert own != config.to_dict()
        assert load(own) == config
        for algorithm in ("fedavg", "pacfl"):
            assert load(own, [f"algorithm={algorithm}"]) == load(config, [f"algorithm={algorithm}"])
    assert own_settings(load({"algorithm": "flt", "rounds": 3})).keys() == {"algorithm", "rounds"}


def test_settings_as_the_base(parts: Any, tmp_path: Path) -> None:
    """Nested or dotted, also in a file; plug-ins are looked for next to it."""
    base = {"rounds": 7, "data.size": 4, "training": {"lr": 0.5}, "plugins": ["study_parts.py"]}
    (tmp_path / "sub").mkdir()
    (tmp_path / "study_parts.py").rename(tmp_path / "sub" / "study_parts.py")
    file = tmp_path / "sub" / "study.yaml"
    file.write_text(dump({"name": "s", "base": base, "methods": {"A": {}, "B": {"algorithm": "halved"}}}))
    study = read(file)
    config = resolved(study, "A", {}, 0)
    assert (config.rounds, config.data.size) == (7, 4)
    assert (config.training.lr, config.algorithm.name) == (0.5, "fedavg")
    assert config.plugins == (str(tmp_path / "sub" / "study_parts.py"),)
    assert resolved(study, "B", {}, 0).algorithm.name == "halved"


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


CIRCULAR: dict[str, Any] = {"rounds": 1}
CIRCULAR["partition"] = CIRCULAR
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"base": 3}, "base: got 3; expected text or a section"),
        ({"base": CIRCULAR}, "base: partition: contains itself, or is nested too deeply"),
        ({"claims": ENDLESS}, "claims: contains itself, or is nested too deeply"),
        ({"grid": {"training.lr": ENDLESS}}, "grid: contains itself, or is nested too deeply"),
        ({"base": {"lr": 1}}, "base: lr: no such setting; did you mean 'training.lr'?"),
        ({"base": {"training": {"lr": object()}}}, "base: training.lr: got <object "),
        ({"base": {"algorithm": np}}, "base: algorithm: got "),
        ({"base": {"training.lr": 1, "training": {"lr": 2}}}, "base.training.lr: is given twice, dotted and"),
        ({"base": Leave(round=1, clients=(0,))}, "base: got Leave(...); expected a preset, a file"),
        ({"settings": rayfl.Config()}, "settings: got Config(...); expected settings; only the base may be"),
        ({"methods": {"A": rayfl.Config()}}, "methods.A: got Config(...); expected settings"),
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


def test_a_study_file_made_in_python_has_no_objects() -> None:
    with pytest.raises(ConfigError, match=r"^base: model: got <class '.*'> \(type\); expected text, numbers"):
        StudyFile(name="s", base={"model": Path}, methods=METHODS)
