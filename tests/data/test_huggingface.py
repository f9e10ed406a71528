"""What the library ``datasets`` reads from local files, if it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rayfl
from rayfl.data import DATASETS, PARTITIONS, Samples, fingerprint
from rayfl.errors import ConfigError, DataError
from tests.data.test_own_partitions import SMALL
from tests.data.test_tables_and_images import frame, pictures
from tests.data.test_tables_and_images import load as load_table


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, if it is there, without a network and with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets")


def load(folder: Path, **settings: Any) -> Samples:
    return DATASETS["huggingface"](root=folder / "cache", **settings).load(folder)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TABLE = {"label": "outcome", "exclude": ["hospital"], "test_fraction": 0.2}


def test_without_the_library_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(tmp_path, path="csv", test_fraction=0.2) == (
        "data: huggingface needs its library: pip install 'rayfl[huggingface]'"
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_is_that_of_the_part_table(library: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"people.{kind}"
    frame().to_csv(path, index=False) if kind == "csv" else frame().to_parquet(path)
    found = load(tmp_path, path=kind, data_files=str(path), **TABLE)
    plain = load_table(path, **TABLE)
    assert fingerprint(found) == fingerprint(plain)
    assert found.class_names == plain.class_names
    by_hospital = PARTITIONS["column"](column="hospital").assign(found, 0)
    assert by_hospital.names is not None
    assert by_hospital.names.tolist() == ["h0", "h1", "h2", "h3"]


def test_splits_of_several_files(library: Any, tmp_path: Path) -> None:
    frame()[:30].to_csv(tmp_path / "a.csv", index=False)
    frame()[30:].to_csv(tmp_path / "b.csv", index=False)
    files = {"train": str(tmp_path / "a.csv"), "test": str(tmp_path / "b.csv")}
    settings: dict[str, Any] = {**TABLE, "test_fraction": None, "test_split": "test"}
    found = load(tmp_path, path="csv", data_files=files, **settings)
    assert (len(found.y_train), len(found.y_test)) == (30, 10)
    assert found.numbering is None


def test_a_folder_of_images_has_names_for_its_classes(library: Any, tmp_path: Path) -> None:
    root = tmp_path / "pets"
    for name in ("cat", "dog"):
        for i in range(5):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (6, 4), 100 * (name == "dog") + i).save(root / name / f"{i}.png")
    found = load(tmp_path, path="imagefolder", data_dir=root, test_fraction=0.2)
    assert found.class_names == ("cat", "dog")
    assert found.x_train.shape == (8, 1, 4, 6)
    np.testing.assert_array_equal(found.x_train[:, 0, 0, 0] >= 100, found.y_train == 1)
    assert fingerprint(found) == fingerprint(
        DATASETS["image_folder"](root=root, test_fraction=0.2).load(root)
    )
    assert load(tmp_path, path="imagefolder", data_dir=root, test_fraction=0.2, size=8).shape == (1, 8, 8)


def test_arrays_beside_columns_and_a_saved_dataset(library: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((20, 3, 3)).astype(np.float32)
    columns = {
        "pixels": x.tolist(),
        "label": [i % 3 for i in range(20)],
        "writer": [i // 5 for i in range(20)],
    }
    features = library.Features(
        {
            "pixels": library.Array2D((3, 3), "float32"),
            "label": library.ClassLabel(names=["a", "b", "c", "d"]),
            "writer": library.Value("int64"),
        }
    )
    data = library.Dataset.from_dict(columns, features=features)
    library.DatasetDict({"train": data, "test": data.select(range(10))}).save_to_disk(tmp_path / "saved")
    found = load(tmp_path, path=str(tmp_path / "saved"), test_split="test")
    np.testing.assert_array_equal(found.x_train[:, 0], x)
    assert (found.classes, found.class_names) == (4, ("a", "b", "c", "d"))
    assert found.y_train.tolist() == columns["label"]
    by_writer = PARTITIONS["column"](column="writer", tests="labels").assign(found, 0)
    assert [len(part) for part in by_writer.clients] == [5] * 4
    data.save_to_disk(tmp_path / "alone")  # without splits
    alone = load(tmp_path, path=str(tmp_path / "alone"), test_fraction=0.25, test_by="writer")
    assert (len(alone.y_train), len(alone.y_test)) == (16, 4)
    with pytest.raises(ConfigError, match=r"data.test_split: .* has no splits; set data.test_fraction"):
        load(tmp_path, path=str(tmp_path / "alone"), test_split="test")


def test_a_run_on_a_parquet_file(library: Any, tmp_path: Path) -> None:
    frame(200).to_parquet(tmp_path / "people.parquet")
    data = {"name": "huggingface", "path": "parquet", "data_files": str(tmp_path / "people.parquet"), **TABLE}
    config = {
        **SMALL,
        "data": {**data, "root": str(tmp_path / "cache")},
        "partition": {"name": "column", "column": "hospital"},
        "output": {"root": str(tmp_path / "runs"), "report": False},
    }
    first, again = rayfl.run(config), rayfl.run(config)
    assert first.clients["name"].tolist() == ["h0", "h1", "h2", "h3"]
    assert first.summary["models_sha256"] == again.summary["models_sha256"]


def test_mistakes_are_refused_in_a_line(library: Any, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    frame().to_csv(path, index=False)
    csv: dict[str, Any] = {"path": "csv", "data_files": str(path)}
    assert "split train: " in refused(tmp_path, path="no-such-folder-nor-dataset", test_fraction=0.2)
    assert "csv: split train: " in refused(tmp_path, **{**csv, "data_files": "none.csv"}, test_fraction=0.2)
    assert "csv: split dev: " in refused(tmp_path, **csv, split="dev", test_fraction=0.2)
    assert "give one of the two" in refused(tmp_path, **csv)
    assert "csv: has no column 'label', only age" in refused(tmp_path, **csv, test_fraction=0.2)
    assert "holds no images or arrays" in refused(tmp_path, **csv, **TABLE, input="age")
    missing = frame()
    missing.loc[3, "age"] = None
    missing.to_csv(path, index=False)
    assert "csv, train row 3: column 'age' is empty" in refused(tmp_path, **csv, **TABLE)
    times = frame().assign(seen=pd.Timestamp("2020-01-01"))
    times.to_parquet(tmp_path / "times.parquet")
    parquet: dict[str, Any] = {"path": "parquet", "data_files": str(tmp_path / "times.parquet")}
    assert "column 'seen' holds times; exclude it" in refused(tmp_path, **parquet, **TABLE)
    ragged = pd.DataFrame({"x": [[1.0, 2.0], [3.0]] * 10, "label": [0, 1] * 10})
    ragged.to_parquet(tmp_path / "ragged.parquet")
    parquet["data_files"] = str(tmp_path / "ragged.parquet")
    assert "column 'x' has shape (1,), row 0 has (2,)" in refused(tmp_path, **parquet, test_fraction=0.2)
    root = pictures(tmp_path / "pets")
    (root / "cat" / "site0" / "0.png").write_bytes(b"no image")
    assert "cannot be read as an image" in refused(
        tmp_path, path="imagefolder", data_dir=root, label="label", test_fraction=0.2
    )
