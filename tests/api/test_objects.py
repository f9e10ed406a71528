"""Objects that Python users give in place of settings."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rayfl
from rayfl import plugins
from rayfl.data.objects import dataset_of
from rayfl.errors import ConfigError, DataError

SMALL = {
    "rounds": 1,
    "training": {"epochs": 1, "batch_size": 20},
    "execution": {"backend": "inline"},
    "output": {"root": "runs", "report": False, "tensorboard": False},
}


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 5)).astype(np.float32), np.arange(60) % 3
    return {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}


def test_arrays_and_lists_of_samples(arrays):
    owners = [range(10), [10, 11, 12], np.arange(13, 40)]
    result = rayfl.run(SMALL, data=tuple(arrays.values()), partition=owners)
    assert result.clients["n"].tolist() == [9, 3, 24]  # a tenth is held out for validation
    np.savez("same.npz", **arrays)
    same = rayfl.run(SMALL, data={"name": "npz", "path": "same.npz"}, partition=owners)
    assert result.summary["models_sha256"] == same.summary["models_sha256"]
    assert rayfl.load(SMALL, data=arrays) == rayfl.load(SMALL, data=tuple(arrays.values()))
    parts = [(arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in ("train", "test")]
    tensors = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts]
    other = rayfl.run(SMALL, data=tensors, partition=owners)
    assert other.summary["models_sha256"] == same.summary["models_sha256"]


def test_a_dictionary_of_samples_by_the_ids_of_the_clients(arrays):
    owners = {"st. mary": range(10), "Köln": np.arange(10, 40)}
    result = rayfl.run(SMALL, data=tuple(arrays.values()), partition=owners)
    assert dict(zip(result.clients["name"], result.clients["n"], strict=True)) == {"Köln": 27, "st. mary": 9}
    settings = rayfl.load(SMALL, data=tuple(arrays.values()), partition={"clients": 3})
    assert settings.partition.name == "label_skew"  # a dictionary of anything else
    with pytest.raises(ConfigError, match="partition: two clients have the id '5'"):
        rayfl.load(SMALL, data=tuple(arrays.values()), partition={5: range(10), "5": range(10, 40)})
    with pytest.raises(ConfigError, match="partition: a client has a set; expected a list or array"):
        rayfl.load(SMALL, data=tuple(arrays.values()), partition={"a": {1, 2}, "b": {3}})
    for empty in (range(0), []):
        with pytest.raises(ConfigError, match="partition: client a has no samples"):
            rayfl.load(SMALL, partition={"a": empty})
    twice = (
        r"^given partition, entry 11: training sample 9 belongs to '0' already \(given partition, entry 10\)"
    )
    with pytest.raises(DataError, match=twice):
        rayfl.run(SMALL, data=tuple(arrays.values()), partition=[range(10), range(9, 40)])
    with pytest.raises(ConfigError, match="partition: names no client; expected the places"):
        rayfl.load(SMALL, partition=[])


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs=5):
        super().__init__()
        self.map = nn.Linear(inputs, 3)

    def forward(self, x):
        return self.map(x)
"""


def test_settings_beside_an_object_are_kept(arrays):
    """Those of a section without a name; a named one is another dataset or partition."""
    settings = {**SMALL, "data": {"normalise": "none"}, "partition": {"validation": 0.5}}
    given = {"data": tuple(arrays.values()), "partition": [range(20), range(20, 40)]}
    config = rayfl.load(settings, **given)
    assert (config.data.normalise, config.partition.validation) == ("none", 0.5)
    with pytest.raises(ConfigError, match=r"data.nonsense: no such setting"):
        rayfl.load({**SMALL, "data": {"nonsense": 1}}, **given)
    other = rayfl.load({**SMALL, "data": "digits", "partition": {"name": "iid", "clients": 9}}, **given)
    assert (other.data.name, other.partition.name) == ("npz", "file")


def test_a_network_is_a_class_or_has_been_built(arrays, monkeypatch):
    Path("given_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setattr(plugins, "_loaded", {})
    net = importlib.import_module("given_net").Net
    both = {"data": tuple(arrays.values()), "partition": [range(20), range(20, 40)]}
    assert rayfl.load(SMALL, model=net).model.target == "given_net:Net"
    torch.manual_seed(3)
    built = net()
    result = rayfl.run(SMALL, ["training.lr=1e-30"], model=built, **both)
    assert [plugin.module for plugin in plugins.loaded()] == ["given_net"]
    torch.testing.assert_close(result.client_model(0)["map.weight"], built.map.weight.detach())
    again = rayfl.resume(result.path, ["rounds=2"])
    torch.testing.assert_close(again.client_model(0)["map.weight"], built.map.weight.detach())


@pytest.mark.parametrize(
    ("section", "thing", "expected"),
    [
        ("data", (np.zeros((3, 2)), np.zeros(3, int)), "data.test_fraction: data has no test part"),
        ("data", (1, 2, 3), "data: returned 3 things"),
        ("data", object(), "data: got .*; expected a dataset: its name, settings or object"),
        ("partition", object(), "partition: got .*; expected a partition"),
        ("partition", [[0], [0]], "sample 0"),
        ("partition", [[0], []], "partition: client 1 has no samples"),
        ("data", [], "data: returned 0 things"),
        ("data", (np.ma.masked_equal(np.eye(9), 1), *[np.arange(9)] * 3), "x_train has masked values; fill"),
        ("partition", lambda labels, rng: [[0]], "other processes cannot import it"),
    ],
)
def test_what_is_no_data_is_refused(arrays, section, thing, expected):
    with pytest.raises((ConfigError, DataError), match=expected) as caught:
        rayfl.run(SMALL, **{"data": tuple(arrays.values()), section: thing})
    assert "\n" not in str(caught.value)


def test_a_mistake_in_arrays_names_them_and_not_the_file_that_they_are_kept_in(arrays):
    x, y, x_test, y_test = arrays.values()
    with pytest.raises(DataError, match=rf"^data: y_train has 3 entries for {len(x)} samples"):
        rayfl.run(SMALL, data=(x, y[:3], x_test, y_test))


def test_arrays_without_a_test_part_are_divided_as_asked(arrays):
    x, y, *_ = arrays.values()
    divided = rayfl.run(SMALL, ["data.test_fraction=0.25", "partition.clients=2"], data={"x": x, "y": y})
    assert divided.clients["n"].sum() < 31  # of 40; some are held out for validation
    np.savez("whole.npz", x=x, y=y)
    settings = {"name": "npz", "path": "whole.npz", "test_fraction": 0.25}
    same = rayfl.run(SMALL, ["partition.clients=2"], data=settings)
    assert divided.summary["models_sha256"] == same.summary["models_sha256"]


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (normed, r"model: PyTorch cannot write the network .*parametrized.*; give its class, or a function"),
        (
            lambda: torch.jit.script(nn.Linear(5, 3)),
            "model: PyTorch cannot write the network .*; give its class",
        ),
        (lambda: nn.Linear(5, 3, device="meta"), r"model: weight has no values \(device meta\); build"),
    ],
)
def test_a_network_that_cannot_be_written_is_refused(arrays, network, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        rayfl.run(SMALL, data=tuple(arrays.values()), partition=[range(20), range(20, 40)], model=network())
    assert "\n" not in str(caught.value)


def test_a_function_builds_what_cannot_be_written(arrays):
    both = {"data": tuple(arrays.values()), "partition": [range(20), range(20, 40)]}
    model = rayfl.run(SMALL, model=normed, **both).client_model(0)
    assert "parametrizations.weight.original0" in model


SCRIPT = """
import numpy as np
import rayfl
from rayfl import plugins
from rayfl.algorithms.fedavg import FedAvg
from typing import Literal

class Mine(FedAvg):
    "My method."
    name: Literal["mine"] = "mine"
    strength: float = 0.5

def images():
    rng = np.random.default_rng(0)
    return rng.standard_normal((40, 5)), np.arange(40) % 2, rng.standard_normal((20, 5)), np.arange(20) % 2

def owners(labels, rng):
    return {"anna": np.flatnonzero(labels == 0), "ben": np.flatnonzero(labels == 1)}

if __name__ == "__main__":
    config = {"rounds": 1, "execution": {"backend": BACKEND}, "output": {"report": False}}
    result = rayfl.run(config, algorithm=Mine(strength=0.25), data=images, partition=owners)
    print(result.path)
"""


@pytest.mark.parametrize(
    "backend",
    ["inline", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray, pytest.mark.ray_apart])],
)
def test_a_script_gives_what_it_defines_itself(tmp_path, backend):
    (tmp_path / "script.py").write_text(SCRIPT.replace("BACKEND", repr(backend)))
    environment = {**os.environ, "PYTHONPATH": str(Path(rayfl.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    path = Path(ran.stdout.strip().splitlines()[-1])
    assert (path / "plugins" / "script.py").is_file()
    assert json.loads((path / "plugins.json").read_text())["plugins"][0]["module"] == "script"
    assert "strength: 0.25" in (path / "config.yaml").read_text()
    assert "anna" in (path / "clients.csv").read_text()


def test_settings_that_begin_with_x_are_settings():
    assert dataset_of({"name": "own", "xmax": 3}) is None
    assert dataset_of({"": 3}) is None


def test_settings_that_contain_themselves_are_refused():
    settings = {"rounds": 1}
    settings["partition"] = settings
    with pytest.raises(ConfigError, match=r"^partition: contains itself"):
        rayfl.load(settings)


def test_clients_with_lists_of_lists_are_refused():
    for samples in ([[0], [1, 2]], [0, [1, 2]]):
        with pytest.raises(
            ConfigError, match=r"^partition: client 1 has lists of lists; expected the places"
        ):
            rayfl.load({"partition": [[3, 4], samples]})
