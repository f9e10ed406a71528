"""Settings of data that would change nothing are refused in a line, by the command line with exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl import cli
from rayfl.config import load
from rayfl.config.reading import reload
from rayfl.config.text import dump
from rayfl.data import DATASETS
from rayfl.data.held_out import read
from rayfl.errors import ConfigError

IMAGES = np.arange(20 * 16, dtype=np.float32).reshape(20, 4, 4)
LABELS = np.arange(20) % 2


def saved(folder: Path, x: Any = IMAGES) -> Path:
    path = folder / "own.npz"
    np.savez(path, x_train=x, y_train=LABELS, x_test=x, y_test=LABELS)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "digits"}, "scikit-learn"),
        ({"name": "synthetic"}, "random numbers"),
        ({"name": "npz", "path": "x.npz"}, "data.path"),
        ({"name": "table", "path": "x.csv"}, "data.path"),
        ({"name": "sharded", "path": "x"}, "data.path"),
        ({"name": "leaf", "folder": "x"}, "data.folder"),
        ({"name": "python", "target": "x:y"}, "data.target"),
    ],
)
def test_a_root_of_what_is_not_downloaded(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load({"data": {**data, "root": "/data"}})
    assert str(raised.value) == f"data: root would change nothing; the samples come from {message}"
    assert load({"data": data}).data.root is None


def test_an_earlier_run_with_such_a_root_goes_on(tmp_path: Path) -> None:
    settings = load({"data": {"name": "digits"}}).to_dict()
    settings["data"]["root"] = "/data"
    (tmp_path / "config.yaml").write_text(dump(settings))
    assert reload(tmp_path / "config.yaml").data.root is None


@pytest.mark.parametrize(
    "data",
    [
        {"name": "npz", "path": "x.npz"},
        {"name": "table", "path": "x.csv", "label": "y", "test_path": "y.csv"},
        {"name": "image_folder", "root": "x"},
        {"name": "huggingface", "path": "x", "test_split": "test"},
    ],
    ids=lambda data: data["name"],
)
def test_a_seed_where_no_test_samples_are_drawn(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        load({"data": {**data, "seed": 3}})
    told = "data: seed 3 would change nothing; it is used with test_fraction"
    assert str(raised.value) == told
    without = {name: value for name, value in data.items() if not name.startswith("test_")}
    load({"data": {**without, "seed": 3, "test_fraction": 0.2}})


@pytest.mark.parametrize("x", [IMAGES, IMAGES.reshape(20, 16)], ids=["grey images", "features"])
def test_a_layout_of_what_has_no_channels(x: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, x)
    with pytest.raises(ConfigError, match=r"data\.layout: hwc would change nothing: .*x_train has shape"):
        DATASETS["npz"](path=path, layout="hwc").load(tmp_path)
    DATASETS["npz"](path=path).load(tmp_path)
    DATASETS["npz"](path=saved(tmp_path, IMAGES[..., None]), layout="hwc").load(tmp_path)


def test_a_layout_and_statistics_of_texts(tmp_path: Path) -> None:
    path = saved(tmp_path, IMAGES.reshape(20, 16).astype(np.int64))
    with pytest.raises(ConfigError, match=r"data\.layout: chw would change nothing: .* has texts"):
        DATASETS["npz"](path=path, layout="chw", tokens=True).load(tmp_path)
    texts = DATASETS["npz"](path=path, tokens=True, normalise="server", server_share=2)
    with pytest.raises(
        ConfigError, match=r"data\.normalise: own has words, which have no mean; leave it out"
    ):
        read(texts, tmp_path, texts.public_samples, 0)


def test_an_expert_of_clients_that_are_not_ordered() -> None:
    partition = {"name": "difficulty", "clients": 5, "expert": "logistic"}
    with pytest.raises(ConfigError) as raised:
        load({"partition": {**partition, "ordered": 0}})
    told = "partition: expert logistic would change nothing; with ordered=0 nothing is assigned by difficulty"
    assert str(raised.value) == told
    load({"partition": {**partition, "ordered": 0.1}})


def test_the_command_line_says_a_line_and_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "data.name=npz",
        f"data.path={saved(tmp_path)}",
        "data.layout=chw",
        "execution.backend=inline",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rayfl", "run", "digits-demo", "model.name=mlp", *settings])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.layout: chw would change nothing" in line
