"""Newcomers in the format of the run's data, and of runs that predict numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import rayfl
from rayfl.cli import app
from rayfl.commands.newcomers import Owners, assign_newcomers, read_newcomers
from rayfl.config import load
from rayfl.data import DATASETS
from rayfl.errors import DataError

COLOURS = ("red", "blue", "green")
Settings = dict[str, Any]


def people(rows: int, first: int = 0, hospitals: int = 3) -> pd.DataFrame:
    """Blood pressure follows age and colour; another ``first`` gives other people."""
    number = np.arange(first, first + rows)
    colour = [COLOURS[i * 7 % 3] for i in number]
    age = (number * 13 % 60) / 30
    return pd.DataFrame(
        {
            "hospital": [f"h{i % hospitals}" for i in range(rows)],
            "age": age,
            "colour": colour,
            "ill": [10 if c == "red" else 2 for c in colour],
            "pressure": age + np.array([c == "blue" for c in colour]),
            "pulse": 1 - age,
        }
    )


@pytest.fixture
def finished(settings: Settings, tmp_path: Path) -> Callable[..., rayfl.Result]:
    """A run on a table of three hospitals."""

    def go(loss: str = "cross_entropy", **data: Any) -> rayfl.Result:
        people(90).to_csv(tmp_path / "people.csv", index=False)
        given = {
            "name": "table",
            "path": str(tmp_path / "people.csv"),
            "test_fraction": 0.3,
            "exclude": ["hospital", "pulse", "pressure"],
            "label": "ill",
            **data,
        }
        return rayfl.run(
            {
                **settings,
                "rounds": 6,
                "data": {key: value for key, value in given.items() if value is not None},
                "partition": {"name": "column", "column": "hospital", "validation": 0},
                "model": {"name": "mlp", "hidden": [16]},
                "training": {"epochs": 4, "batch_size": 10, "lr": 0.3},
                "loss": loss,
            }
        )

    return go


def test_a_table_is_read_as_the_runs(finished: Any, tmp_path: Path) -> None:
    result = finished()
    new = people(40, first=500, hospitals=2).drop(columns=["pulse"])
    new["hospital"] = new["hospital"].replace({"h0": "north", "h1": "south"})
    only = new[(new["colour"] != "red") | (new["hospital"] == "north")]  # fewer values, columns elsewhere
    path = tmp_path / "new.csv"
    only[["ill", "colour", "hospital", "age", "pressure"]].to_csv(path, index=False)
    frame = assign_newcomers(result.path, path, epochs=1, owners=Owners(test_fraction=0.5))
    assert frame["name"].tolist() == ["north", "south"]
    assert frame["client"].tolist() == [3, 4]
    assert (frame["accuracy"] > 95).all(), "they have the features and classes that the model knows"

    config = load(result.path / "config.yaml")
    own = config.data.load(Path())
    more = config.data.read_more(path, own)
    assert more is not None
    for row, person in enumerate(only.itertuples()):
        expected = [person.age, *(float(person.colour == name) for name in ("blue", "green", "red"))]
        assert more.x[row].tolist() == pytest.approx(expected)
        assert own.class_names[more.y[row]] == str(person.ill)


def test_numbers_are_predicted(finished: Any, tmp_path: Path) -> None:
    result = finished("mse", label=None, targets=["pressure", "pulse"], exclude=["hospital", "ill"])
    people(60, first=90, hospitals=2).to_csv(tmp_path / "new.csv", index=False)
    frame = assign_newcomers(result.path, tmp_path / "new.csv", epochs=3)
    for ending in ("", "_finetuned", "_global", "_local"):
        for name in ("loss", "rmse", "mae", "r2"):
            assert np.isfinite(frame[name + ending]).all()
    assert not [name for name in frame.columns if "accuracy" in name]
    # One cluster: its model is the only one.
    config = load(result.path / "config.yaml")
    own = config.data.load(Path())
    new = read_newcomers(config, own, tmp_path / "new.csv")
    assert new.samples.targets_test is not None
    for newcomer, mine in zip(frame.itertuples(), new.test, strict=True):
        errors = result.predict(new.samples.x_test[mine], cluster=0) - new.samples.targets_test[mine]
        assert newcomer.loss == pytest.approx((errors**2).mean(), rel=1e-4)
        assert newcomer.rmse == pytest.approx(np.sqrt((errors**2).mean(0)).mean(), rel=1e-4)
    assert (frame["rmse"] < 0.3).all()

    said = CliRunner().invoke(app, ["newcomers", str(result.path), str(tmp_path / "new.csv"), "--epochs=0"])
    assert said.exit_code == 0, said.output
    assert "2 newcomers: mean loss 0.0" in said.output


def test_several_labels_are_predicted(finished: Any, settings: Settings, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, :3] > 0).astype(np.float32)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "own.npz", **arrays)
    data = {"name": "npz", "path": str(tmp_path / "own.npz")}
    result = rayfl.run({**settings, "data": data, "partition": {"name": "iid", "clients": 3}, "loss": "bce"})
    owner = np.arange(60) % 2
    np.savez(tmp_path / "new.npz", **arrays, client_train=owner, client_test=owner)
    frame = assign_newcomers(result.path, tmp_path / "new.npz", epochs=1)
    assert np.isfinite(frame[["accuracy", "label_accuracy", "f1_macro_finetuned", "f1_micro_local"]]).all(
        None
    )
    np.savez(tmp_path / "wrong.npz", **{**arrays, "y_test": y + 0.5})
    with pytest.raises(DataError, match=r"wrong.npz: 'bce' takes labels 0 and 1; the data have"):
        assign_newcomers(result.path, tmp_path / "wrong.npz")


WRONG: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "a colour": (
        lambda f: f.replace({"colour": {"red": "pink"}}),
        r"csv:2: column 'colour' is 'pink', which",
    ),
    "a class": (
        lambda f: f.replace({"ill": {2: 3}}),
        r"csv:3: column 'ill' is '3', which is not in the run's table",
    ),
    "text": (lambda f: f.assign(age=["old", *f["age"][1:]]), r"csv:2: column 'age' is 'old'; expected a n"),
    "a gap": (lambda f: f.assign(age=[*f["age"][:-1], None]), r"csv:31: column 'age' is empty"),
    "no column": (lambda f: f.drop(columns="age"), r"new.csv: has no column 'age', only hospital, colour"),
    "no owners": (
        lambda f: f.drop(columns="hospital"),
        r"new.csv: has no column 'hospital' with each sample's newcomer",
    ),
    "no owner": (lambda f: f.assign(hospital=["", *f["hospital"][1:]]), r"is empty for sample 0"),
    "one sample": (
        lambda f: f.assign(hospital=["alone", *f["hospital"][1:]]),
        r"new.csv: newcomer 'alone' has no sample in its test part",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_table_is_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    change, expected = WRONG[kind]
    people(90).to_csv(tmp_path / "people.csv", index=False)
    change(people(30)).to_csv(tmp_path / "new.csv", index=False)
    config = load(
        {
            "data": {
                "name": "table",
                "path": str(tmp_path / "people.csv"),
                "test_fraction": 0.3,
                "exclude": ["hospital", "pulse", "pressure"],
                "label": "ill",
            },
            "partition": {"name": "column", "column": "hospital"},
        }
    )
    with pytest.raises(DataError, match=expected) as caught:
        read_newcomers(config, config.data.load(Path()), tmp_path / "new.csv")
    assert "\n" not in str(caught.value)


def picture(path: Path, value: int, size: int = 6, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size), value if mode == "L" else (value,) * 3).save(path)


def test_a_folder_is_read_as_the_runs(settings: Settings, tmp_path: Path) -> None:
    for name, value in (("cat", 10), ("dog", 120), ("emu", 250)):
        for i in range(12):
            picture(tmp_path / "own" / name / f"w{i % 3}" / f"{i}.png", value)
    data = {"name": "image_folder", "root": str(tmp_path / "own"), "test_fraction": 0.3, "size": 6}
    result = rayfl.run(
        {
            **settings,
            "data": data,
            "partition": {"name": "column", "column": "folder", "validation": 0},
            "rounds": 8,
            "training": {"epochs": 4, "batch_size": 5, "lr": 0.1},
        }
    )
    for name, value in (("dog", 120), ("emu", 250)):
        for i in range(8):
            picture(tmp_path / "new" / name / f"n{i % 2}" / f"{i}.png", value, size=7, mode="RGB")
    frame = assign_newcomers(result.path, tmp_path / "new", epochs=0)
    assert frame["name"].tolist() == ["n0", "n1"]
    assert frame["accuracy"].tolist() == [100, 100], "dogs and emus have their numbers in the run"
    for part in ("train", "test"):
        picture(tmp_path / "parts" / part / "dog" / "n" / "a.png", 120)
    assert assign_newcomers(result.path, tmp_path / "parts", epochs=0)["n"].tolist() == [1]
    picture(tmp_path / "new" / "yak" / "n0" / "a.png", 1)
    with pytest.raises(DataError, match="has a class 'yak', which the run's data do not have"):
        assign_newcomers(result.path, tmp_path / "new")


def test_other_datasets_take_npz_files(tmp_path: Path) -> None:
    digits = DATASETS["digits"]()
    assert digits.read_more(tmp_path / "new.csv", digits.load(Path())) is None
