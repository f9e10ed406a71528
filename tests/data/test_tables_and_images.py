"""Tables and folders of images: what becomes of them, and what is refused in a line that says where."""

from __future__ import annotations

from functools import partial
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

COLOURS = ["red", "blue", "red", "green"]


def frame(rows: int = 40) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "age": np.arange(rows) / 2,
            "colour": (COLOURS * rows)[:rows],
            "smokes": [i % 3 == 0 for i in range(rows)],
            "hospital": [f"h{i % 4}" for i in range(rows)],
            "outcome": ["ill" if i % 2 else "healthy" for i in range(rows)],
        }
    )


def table(path: Path, data: pd.DataFrame | str | None = None, **settings: Any) -> Samples:
    if isinstance(data, str):
        path.write_text(data)
    else:
        (frame() if data is None else data).to_csv(path, index=False)
    defaults = {"label": "outcome", "exclude": ["hospital"], "test_fraction": 0.2}
    return load(path, **defaults | settings)


def load(path: Path, **settings: Any) -> Samples:
    given = {name: value for name, value in settings.items() if value is not None}
    return DATASETS["table"](path=path, **given).load(Path("nowhere"))


# --- tables ---------------------------------------------------------------------------------------------


def test_numbers_categories_and_classes(tmp_path: Path) -> None:
    found = table(tmp_path / "people.csv")
    assert (found.name, found.classes, found.class_names) == ("people", 2, ("healthy", "ill"))
    assert found.shape == (5,)  # age, blue, green, red, smokes
    assert found.numbering is not None
    place = found.numbering.train
    for row, person in enumerate(frame().itertuples()):
        at = place[row]
        x = found.x_train[at] if at >= 0 else found.x_test[found.numbering.test[row]]  # type: ignore[index]
        y = found.y_train[at] if at >= 0 else found.y_test[found.numbering.test[row]]  # type: ignore[index]
        one_hot = [person.colour == name for name in ("blue", "green", "red")]
        assert x.tolist() == [person.age, *map(float, one_hot), float(person.smokes)]
        assert found.class_names[y] == person.outcome
    assert np.bincount(found.y_test).tolist() == [4, 4]
    assert fingerprint(found) == fingerprint(table(tmp_path / "people.csv"))


def test_clients_by_an_excluded_column_or_by_a_table_of_owners(tmp_path: Path) -> None:
    found = table(tmp_path / "people.csv", test_fraction=0.4)
    by_hospital = PARTITIONS["column"](column="hospital").assign(found, 0)
    assert by_hospital.names is not None
    assert by_hospital.names.tolist() == ["h0", "h1", "h2", "h3"]
    assert by_hospital.test is not None
    (tmp_path / "owners.csv").write_text("hospital,client\nh0,north\nh1,north\nh2,south\nh3,south\n")
    owners = PARTITIONS["file"](path=tmp_path / "owners.csv", by="hospital")
    regions = owners.assign(found, 0)
    assert regions.names is not None
    assert regions.names.tolist() == ["north", "south"]
    for part, of in ((regions.clients, by_hospital.clients), (regions.test, by_hospital.test)):
        assert part is not None
        assert sorted(part[0].tolist()) == sorted([*of[0].tolist(), *of[1].tolist()])
    for text, message in (
        ("hospital,client\nh0,a\nh9,b\n", "owners.csv:3: the dataset has no hospital 'h9'"),
        ("hospital,client\nh0,a\nh0,b\n", "owners.csv:3: hospital 'h0' belongs to 'a' already"),
        ("sample,client\n0,a\n", "has no column 'hospital', only sample, client"),
    ):
        (tmp_path / "owners.csv").write_text(text)
        with pytest.raises(DataError) as caught:
            owners.assign(found, 0)
        assert message in str(caught.value)


def people(sizes: dict[str, int]) -> pd.DataFrame:
    """Patients, so many of each hospital."""
    hospitals = [name for name, size in sizes.items() for _ in range(size)]
    return frame(len(hospitals)).assign(hospital=hospitals)


def test_a_fraction_of_each_client_leaves_nobody_without_tests(tmp_path: Path) -> None:
    """But clients with a single sample, which may be left out."""
    sizes = {"big": 40, "pair": 2, "three": 3, "one": 1, "lone": 1}
    found = table(tmp_path / "people.csv", people(sizes), test_by="hospital")
    column = found.columns["hospital"]
    assert column.test is not None
    tests = dict(zip(column.values.tolist(), np.bincount(column.test, minlength=5).tolist(), strict=True))
    assert tests == {"big": 8, "pair": 1, "three": 1, "one": 0, "lone": 0}
    with pytest.raises(DataError, match=r"client 'lone' has no .*data.test_by.*partition.min_test_samples=1"):
        PARTITIONS["column"](column="hospital").assign(found, 0)
    tested = PARTITIONS["column"](column="hospital", min_test_samples=1).assign(found, 0)
    assert tested.names is not None
    assert tested.names.tolist() == ["big", "pair", "three"]
    assert tested.test is not None
    assert [len(part) for part in tested.test] == [8, 1, 1]
    (note, *_) = tested.notes
    assert note.startswith(
        "partition: 2 of 5 values of hospital have fewer than 1 test sample and are left out: "
    )
    assert "'lone', 'one' (partition.min_test_samples)" in note
    with pytest.raises(DataError, match="min_test_samples: clients are not tested on samples of their own"):
        PARTITIONS["column"](column="hospital", min_test_samples=1, tests="labels").assign(found, 0)


def test_predicted_classes_have_the_names_of_the_table(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "people.csv", index=False)
    config = {
        "rounds": 1,
        "data": {
            "name": "table",
            "path": str(tmp_path / "people.csv"),
            "label": "outcome",
            "exclude": ["hospital"],
        },
        "partition": {"name": "iid", "clients": 3},
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
    }
    result = rayfl.run(config, ["data.test_fraction=0.4"])
    assert result.class_names == ("healthy", "ill")
    features = [[20.0, 0.0, 1.0, 0.0, 1.0]]  # age; blue, green, red; smokes
    assert result.predict(np.array(features, np.float32), client=0).tolist()[0] in (0, 1)

    people = frame()
    rows = people.iloc[[5, 2, 11]][["smokes", "colour", "age"]]  # fewer columns and values, in another order
    expected = [
        [p.age, *(float(p.colour == c) for c in ("blue", "green", "red")), float(p.smokes)]
        for p in rows.itertuples()
    ]
    inputs = rayfl.load(result.path / "config.yaml").data.inputs_of(rows)
    assert inputs.tolist() == expected
    assert result.predict(rows, client=0).tolist() == result.predict(inputs, client=0).tolist()
    assert result.predict(rows[:0], client=0).tolist() == []
    for wrong, message in (
        (rows.drop(columns="age"), "the table: has no column 'age'"),
        (rows.replace({"colour": {rows["colour"].iloc[1]: "pink"}}), "row 2: column 'colour' is 'pink'"),
        (rows.assign(age=[1.0, np.nan, 2.0]), "the table: row 2: column 'age' is empty"),
        (rows.assign(age=["1", "old", "2"]), "the table: row 2: column 'age' is 'old'; expected a number"),
    ):
        with pytest.raises(DataError) as caught:
            result.predict(wrong, client=0)
        assert message in str(caught.value)


def test_a_column_that_is_not_there_cannot_divide_the_tests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.test_by: .* no column 'hopsital'; did you mean 'hospital'"):
        table(tmp_path / "people.csv", test_by="hopsital")
    with pytest.raises(ConfigError, match="table: test_by would change nothing"):
        table(
            tmp_path / "people.csv", test_by="hospital", test_fraction=None, test_path=tmp_path / "people.csv"
        )


def test_arrays_and_folders_are_divided_by_client_too(tmp_path: Path) -> None:
    who = np.repeat(["a", "b", "c"], [20, 2, 2])
    np.savez(
        tmp_path / "mine.npz",
        x=np.arange(48.0, dtype=np.float32).reshape(24, 2),
        y=np.arange(24) % 2,
        who=who,
    )
    found = DATASETS["npz"](path=tmp_path / "mine.npz", test_fraction=0.25, test_by="who").load(tmp_path)
    column = found.columns["who"]
    assert column.test is not None
    assert np.bincount(column.test).tolist() == [5, 1, 1]
    with pytest.raises(ConfigError, match=r"data.test_by: .* has no column 'whom'; did you mean 'who'"):
        DATASETS["npz"](path=tmp_path / "mine.npz", test_fraction=0.25, test_by="whom").load(tmp_path)


@pytest.mark.parametrize(
    "ids", [["007", "7", "1E2", "100"], ["1.50", "1.5", "2", "x"], ["true", "TRUE", "NA", "None"]]
)
def test_ids_of_clients_are_the_text_in_the_file(ids: list[str], tmp_path: Path) -> None:
    """Though all of them could be numbers, or nothing."""
    data = frame().assign(hospital=ids * 10)
    found = PARTITIONS["column"](column="hospital").assign(table(tmp_path / "people.csv", data), 0)
    assert found.names is not None
    assert sorted(found.names.tolist()) == sorted(ids)
    (tmp_path / "owners.csv").write_text("hospital,client\n" + "".join(f"{name},{name}\n" for name in ids))
    owners = PARTITIONS["file"](path=tmp_path / "owners.csv", by="hospital")
    same = owners.assign(table(tmp_path / "people.csv", data), 0)
    assert [part.tolist() for part in same.clients] == [part.tolist() for part in found.clients]


def test_whole_numbers_beside_gaps_are_whole_numbers(tmp_path: Path) -> None:
    """pandas writes them as floats."""
    data = frame().assign(hospital=[1.0, 2.0, np.nan, 10.0] * 10)
    column = table(tmp_path / "people.csv", data).columns["hospital"]
    assert column.values.tolist() == ["", "1", "10", "2"]


def test_row_numbers_that_pandas_writes_are_no_feature(tmp_path: Path) -> None:
    """Of a table in the order of its classes they would say all."""
    frame().to_csv(tmp_path / "people.csv")
    with pytest.raises(
        DataError, match=r"column 1 has no name, .*index=False.* or add 'Unnamed: 0' to exclude"
    ):
        load(tmp_path / "people.csv", label="outcome", exclude=["hospital"], test_fraction=0.2)
    exclude = ["hospital", "Unnamed: 0"]
    found = load(tmp_path / "people.csv", label="outcome", exclude=exclude, test_fraction=0.2)
    assert found.shape == (5,)


def test_a_column_without_a_client_or_that_is_a_feature_is_no_division(tmp_path: Path) -> None:
    """The message says which row, counted as in the file, and what would be right."""
    data = frame()
    data.loc[9, "hospital"] = ""
    by_hospital = PARTITIONS["column"](column="hospital")
    found = table(tmp_path / "people.csv", data)
    assert found.numbering is not None
    assert found.numbering.train[9] not in (-1, 9)
    with pytest.raises(
        DataError, match=r"hospital: sample 9 \(counted from 0\) of people: the client is empty"
    ):
        by_hospital.assign(found, 0)
    feature = table(tmp_path / "people.csv", exclude=[])
    with pytest.raises(DataError, match=r"no column 'hospital'; it has no columns for clients \(whole"):
        by_hospital.assign(feature, 0)


def test_a_second_table_and_listed_categories(tmp_path: Path) -> None:
    data = frame()
    data["code"] = np.arange(40) % 3 * 10 + 5
    data[30:].to_csv(tmp_path / "test.csv", index=False)
    found = table(
        tmp_path / "train.csv",
        data[:30],
        test_path=tmp_path / "test.csv",
        test_fraction=None,
        categorical=["code"],  # text always is
        label="hospital",
        exclude=["outcome"],
    )
    assert len(found.y_train) == 30
    assert len(found.y_test) == 10
    assert found.shape == (8,)
    assert found.x_train[:, 5:].argmax(axis=1).tolist() == (np.arange(30) % 3).tolist()
    assert found.numbering is None
    assert found.classes == 4


def test_whole_numbers_are_classes_in_their_order(tmp_path: Path) -> None:
    data = frame().assign(outcome=[[10, 9, 7][i % 3] for i in range(40)])
    found = table(tmp_path / "a.csv", data)
    assert found.class_names == ("7", "9", "10")


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame().to_parquet(tmp_path / "people.parquet")
    settings = {"label": "outcome", "exclude": ["hospital"], "test_fraction": 0.2}
    assert fingerprint(load(tmp_path / "people.parquet", **settings)) == fingerprint(
        table(tmp_path / "p.csv")
    )


def test_parquet_without_pyarrow_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"Parquet needs pyarrow: pip install 'rayfl\[parquet\]'"):
        load(tmp_path / "a.parquet", label="y", test_fraction=0.2)


def test_a_run_on_a_table_by_hospital(tmp_path: Path) -> None:
    table(tmp_path / "people.csv", frame(200))
    config = {
        **SMALL,
        "data": {
            "name": "table",
            "path": str(tmp_path / "people.csv"),
            "label": "outcome",
            "exclude": ["hospital"],
            "test_fraction": 0.3,
        },
        "partition": {"name": "column", "column": "hospital"},
        "output": {"root": str(tmp_path / "runs"), "report": False},
    }
    result = rayfl.run(config)
    assert result.clients["name"].tolist() == ["h0", "h1", "h2", "h3"]
    assert result.clients["test_samples"].sum() == 60


HEAD = "age,colour,hospital,outcome\n"
ROWS = "".join(f"{i},{COLOURS[i % 4]},h{i % 2},{'ill' if i % 2 else 'ok'}\n" for i in range(8))
BAD_TABLES: dict[str, tuple[str | pd.DataFrame, dict[str, Any], str]] = {
    "empty file": ("", {}, "people.csv: the file is empty"),
    "no rows": (HEAD, {}, "people.csv: has no rows"),
    "no such label": (HEAD + ROWS, {"label": "outcom"}, "has no column 'outcom', only age, colour"),
    "no such column to exclude": (HEAD + ROWS, {"exclude": ["ward"]}, "has no column 'ward'"),
    "label excluded": (HEAD + ROWS, {"exclude": ["outcome"]}, "column 'outcome' is the label"),
    "a category that is excluded": (
        HEAD + ROWS,
        {"categorical": ["hospital"]},
        "column 'hospital' is the label or",
    ),
    "no features": (HEAD + ROWS, {"exclude": ["age", "colour", "hospital"]}, "has no column for a feature"),
    "missing number": (
        HEAD + "1,red,h0,ok\n,red,h0,ill\n" + ROWS,
        {},
        "people.csv:3: column 'age' has no value",
    ),
    "missing text": (
        HEAD + "1,red,h0,ok\n2,NA,h0,ill\n" + ROWS,
        {},
        "people.csv:3: column 'colour' has no value",
    ),
    "missing label": (
        HEAD + "1,red,h0,ok\n\n2,red,h0,\n" + ROWS,
        {},
        "people.csv:4: column 'outcome' has no label (empty, or a word such as NA or None)",
    ),
    "infinity": (HEAD + "inf,red,h0,ok\n" + ROWS, {}, "people.csv:2: column 'age' is inf; expected a finite"),
    "too large a number": (HEAD + "1e300,red,h0,ok\n" + ROWS, {}, "people.csv:2: column 'age' is 1e+300"),
    "text among numbers": (
        HEAD + ROWS + "12a,red,h0,ok\n",
        {},
        "people.csv:10: column 'age' is '12a', where most",
    ),
    "text among numbers, beside categories": (
        HEAD + ROWS + "12a,red,h0,ok\n",
        {"categorical": ["colour"]},
        "people.csv:10: column 'age' is '12a', where most",
    ),
    "fractions for labels": (HEAD + ROWS, {"label": "age2"}, "has no column 'age2'"),
    "float labels": (frame(), {"label": "age"}, "people.csv:3: column 'age' is 0.5; a label is a class"),
    "a class for each row": (
        frame().assign(name=[f"p{i}" for i in range(40)]),
        {"label": "name"},
        "column 'name' has 40 different values in 40 rows",
    ),
    "one class": (frame().assign(outcome="ill"), {}, "column 'outcome' is 'ill' in all rows; expected two"),
    "too many values": (
        frame(1200).assign(colour=[f"c{i}" for i in range(1200)]),
        {},
        "column 'colour' has 1,200 different values, at most 1,000 can be one-hot",
    ),
    "two columns of a name": (
        "age,age,outcome\n1,2,ill\n",
        {"exclude": None},
        "people.csv: has two columns 'age'",
    ),
    "too many cells": (HEAD + "1,red,h0,ok,5\n", {}, "people.csv: a row has more cells than the header"),
    "semicolons": (
        (HEAD + ROWS).replace(",", ";"),
        {},
        "people.csv: its columns seem to be separated by ';'; expected commas, and points in numbers",
    ),
    "semicolons and decimal commas": (
        "age;weight, height;outcome\n" + "31;80,5;ill\n32;81,5;ok\n" * 3,
        {"exclude": []},
        "people.csv: its columns seem to be separated by ';'",
    ),
    "tabs": (
        (HEAD + ROWS).replace(",", "\t"),
        {},
        "its columns seem to be separated by tabs; expected commas",
    ),
    "bars": ((HEAD + ROWS).replace(",", "|"), {}, "its columns seem to be separated by '|'; expected commas"),
    "too small a fraction": (HEAD + ROWS, {"test_fraction": 0.01}, "leaves no test sample"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_wrong_table_is_refused_in_a_line(tmp_path: Path, kind: str) -> None:
    data, settings, message = BAD_TABLES[kind]
    with pytest.raises(DataError) as caught:
        table(tmp_path / "people.csv", data, **settings)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)
    assert "people.csv" in str(caught.value)


def test_other_separators_may_stand_in_names_and_texts(tmp_path: Path) -> None:
    """Also where header and rows have equally many of them, if there are more columns by commas."""
    head, row = '"age;y",colour;tint,outcome\n', "{0},{1};{1},{2}\n"
    rows = "".join(row.format(i, COLOURS[i % 4], "ill" if i % 2 else "ok") for i in range(8))
    found = table(tmp_path / "people.csv", head + rows, exclude=[], test_fraction=0.5)
    assert found.x_train.shape[1] == 1 + len(set(COLOURS))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_missing_columns_are_noticed_without_reading_the_table(kind: str, tmp_path: Path) -> None:
    """So before Ray starts. What else is wrong with a table is said when it is read."""
    path = tmp_path / f"people.{kind}"
    if kind == "csv":
        frame().to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        frame().to_parquet(path)
    good: dict[str, Any] = {"path": path, "label": "outcome", "exclude": ["hospital"], "test_fraction": 0.2}
    assert DATASETS["table"](**good).available(tmp_path)
    for wrong in ({"label": "outcom"}, {"exclude": ["ward"]}, {"categorical": ["ages"]}):
        with pytest.raises(DataError, match=r"has no column '(outcom|ward|ages)'"):
            DATASETS["table"](**{**good, **wrong}).available(tmp_path)
    path.write_bytes(b"\xff\xfe broken")
    assert DATASETS["table"](**good).available(tmp_path)


def test_a_test_table_without_a_column_is_refused(tmp_path: Path) -> None:
    frame().drop(columns="age").to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"test\.csv: has no column 'age'"):
        table(tmp_path / "a.csv", test_path=tmp_path / "test.csv", test_fraction=None)
    with pytest.raises(ConfigError, match="give one of the two"):
        table(tmp_path / "a.csv", test_path=tmp_path / "test.csv")
    with pytest.raises(ConfigError, match="give one of the two"):
        table(tmp_path / "a.csv", test_fraction=None)


# --- folders of images ----------------------------------------------------------------------------------


def picture(path: Path, value: int, mode: str = "L", size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def pictures(folder: Path, each: int = 5, parts: bool = False) -> Path:
    for part in ("train", "test") if parts else ("",):
        for label, name in enumerate(("cat", "dog")):
            for i in range(each):
                picture(folder / part / name / f"site{i % 2}" / f"{i}.png", 100 * label + i)
    return folder


def images(root: Path, **settings: Any) -> Samples:
    return DATASETS["image_folder"](root=root, **settings).load(root)


def test_a_folder_of_images_is_read_in_order(tmp_path: Path) -> None:
    found = images(pictures(tmp_path / "pets", parts=True))
    assert found.x_train.shape == (10, 1, 4, 6)
    assert found.x_train.dtype == np.uint8
    # By path: site0/0, site0/2, site0/4, site1/1, site1/3.
    assert found.x_train[:, 0, 0, 0].tolist() == [0, 2, 4, 1, 3, 100, 102, 104, 101, 103]
    assert found.y_train.tolist() == [0] * 5 + [1] * 5
    assert (found.name, found.class_names, found.numbering) == ("pets", ("cat", "dog"), None)
    by_folder = PARTITIONS["column"](column="folder").assign(found, 0)
    assert by_folder.names is not None
    assert by_folder.names.tolist() == ["site0", "site1"]
    assert by_folder.clients[0].tolist() == [0, 1, 2, 5, 6, 7]


def test_a_fraction_of_each_class_and_owners_by_file(tmp_path: Path) -> None:
    root = pictures(tmp_path / "pets")
    found = images(root, test_fraction=0.2)
    assert np.bincount(found.y_test).tolist() == [1, 1]
    assert fingerprint(found) == fingerprint(images(root, test_fraction=0.2))
    rows = [
        f"{name}/site{i % 2}/{i}.png,{'even' if i % 2 == 0 else 'odd'}"
        for name in ("cat", "dog")
        for i in range(5)
    ]
    (tmp_path / "owners.csv").write_text("file,client\n" + "\n".join(rows) + "\n")
    dealt = PARTITIONS["file"](path=tmp_path / "owners.csv", by="file", tests="labels").assign(found, 0)
    assert dealt.names is not None
    for name, part in zip(dealt.names, dealt.clients, strict=True):
        assert {int(v) % 100 % 2 for v in found.x_train[part][:, 0, 0, 0]} == {0 if name == "even" else 1}
    # By place: in the order of all paths, whichever part they are in.
    places = "".join(f"{i},{i % 5}\n" for i in range(10))
    (tmp_path / "places.csv").write_text("sample,client\n" + places)
    dealt = PARTITIONS["file"](path=tmp_path / "places.csv", tests="labels").assign(found, 0)
    assert {int(v) % 100 for v in found.x_train[dealt.clients[1]][:, 0, 0, 0]} == {2}


def test_sizes_and_colours(tmp_path: Path) -> None:
    root = pictures(tmp_path / "pets")
    picture(root / "cat" / "red.jpg", 255, "RGB", (9, 9))
    found = images(root, test_fraction=0.2, size=8)
    assert found.shape == (3, 8, 8)
    grey = images(root, test_fraction=0.2, size=8, channels=1)
    assert grey.shape == (1, 8, 8)
    with pytest.raises(DataError, match=r"0\.png: is 4x6, the first image is 9x9; set data\.size to scale"):
        images(root, test_fraction=0.2)


def test_each_client_may_have_a_folder_of_classes(tmp_path: Path) -> None:
    for number, place in enumerate(
        ("ann/cat/0", "ann/cat/new/1", "ann/dog/0", "bob/dog/0", "cy/cat/0", "cy/dog/0")
    ):
        picture(tmp_path / "pets" / f"{place}.png", 20 * number)
    load_pets = partial(images, tmp_path / "pets", folders="client/class")
    found = load_pets(test_fraction=0.4)
    assert found.class_names == ("cat", "dog")
    pixels = np.concatenate([found.x_train, found.x_test])[:, 0, 0, 0].tolist()
    labels = np.concatenate([found.y_train, found.y_test]).tolist()
    assert dict(zip(pixels, labels, strict=True)) == {0: 0, 20: 0, 40: 1, 60: 1, 80: 0, 100: 1}
    by_client = load_pets(test_fraction=0.4, test_by="client")
    column = by_client.columns["client"]
    assert column.test is not None
    assert sorted(column.values[column.train].tolist()) == ["ann", "ann", "bob", "cy"]
    assert column.values[column.test].tolist() == ["ann", "cy"]
    clients = PARTITIONS["column"](column="client", min_test_samples=1).assign(by_client, 0)
    assert clients.names is not None
    assert clients.names.tolist() == ["ann", "cy"]
    assert set(found.columns) == {"file", "client", "folder"}

    for part, place in (("train", "ann/cat/0"), ("train", "bob/dog/0"), ("test", "ann/dog/0")):
        picture(tmp_path / "parts" / part / f"{place}.png", 5)
    parts = images(tmp_path / "parts", folders="client/class")
    assert (parts.y_train.tolist(), parts.y_test.tolist()) == ([0, 1], [1])
    picture(tmp_path / "parts" / "test" / "bob" / "bird" / "0.png", 5)
    with pytest.raises(DataError, match=r"test/bob/bird: there is no class 'bird' in .*train"):
        images(tmp_path / "parts", folders="client/class")
    (tmp_path / "pets" / "dan").mkdir()
    with pytest.raises(DataError, match="pets/dan: has no folders; expected one for each class"):
        load_pets(test_fraction=0.4)
    (tmp_path / "pets" / "dan" / "cat").mkdir()
    with pytest.raises(DataError, match="pets/dan/cat: holds no image"):
        load_pets(test_fraction=0.4)


def test_a_wrong_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    def refused(root: Path, **settings: Any) -> str:
        with pytest.raises((DataError, ConfigError)) as caught:
            images(root, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such folder" in refused(tmp_path / "none", test_fraction=0.2)
    (tmp_path / "empty").mkdir()
    assert "has no folders; expected one for each class" in refused(tmp_path / "empty", test_fraction=0.2)
    pictures(tmp_path / "only" / "train")
    assert "has a folder 'train' but no folder 'test'" in refused(tmp_path / "only")
    both = pictures(tmp_path / "both", parts=True)
    assert "has a folder test; leave the fraction out" in refused(both, test_fraction=0.2)
    picture(both / "test" / "cow" / "0.png", 0)
    assert "there is no class 'cow' in" in refused(both)
    root = pictures(tmp_path / "pets")
    assert "has no folders train and test; say what fraction" in refused(root)
    (root / "cat" / "0.png").write_text("no image")
    assert "cat/0.png: cannot be read as an image (" in refused(root, test_fraction=0.2)
    whole = (root / "cat" / "site0" / "2.png").read_bytes()
    (root / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    assert "cat/0.png: cannot be read as an image (" in refused(root, test_fraction=0.2)
    (root / "cat" / "0.png").unlink()
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(root / "cat" / "0.png")
    assert "cat/0.png: has pixels of kind 'I;16'" in refused(root, test_fraction=0.2)
    (root / "cat" / "0.png").unlink()
    (root / "ant").mkdir()
    assert "ant: holds no image" in refused(root, test_fraction=0.2)
    one = tmp_path / "one"
    picture(one / "cat" / "0.png", 0)
    assert "has the class 'cat' only" in refused(one, test_fraction=0.2)
