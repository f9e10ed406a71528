"""``rayfl partition``: what it says, what it writes, and that it trains nothing."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from rich.console import Console

import rayfl
from rayfl import cli
from rayfl.config import load
from rayfl.data.heterogeneity.distances import MEASURES, average_distance
from rayfl.errors import ConfigError, DataError
from rayfl.report import partition
from rayfl.report.page import render
from rayfl.servers import building
from tests.report.reading import charts, choices, rows, titles, values

TASKS = "partition.name=tasks"
TWO_TASKS = [TASKS, "partition.tasks=[{labels: [0, 1], clients: 3}, {labels: [7, 8, 9], clients: 2}]"]
DIGITS = {"name": "mine", "data": "digits"}


def view(*arguments: Any, **settings: Any) -> partition.PartitionView:
    """The one view of a config without events."""
    (found,) = partition.views(*arguments, **settings)
    return found


def text_of(found: partition.PartitionView) -> str:
    console = Console(file=io.StringIO(), width=150)
    partition.show(found, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_summary_counts_what_clients_have() -> None:
    found = view(load(DIGITS, [*TWO_TASKS, "partition.validation=0"]), ["emd"])
    facts = found.summary()
    y = found.federation.samples.y_train
    assert facts["clients"] == 5
    assert facts["groups"] == 2
    assert facts["unused_samples"] == int((~np.isin(y, [0, 1, 7, 8, 9])).sum())
    assert [row["labels"] for row in facts["group_rows"]] == [[0, 1], [7, 8, 9]]
    held = [int(np.isin(y, own).sum()) for own in ([0, 1], [7, 8, 9])]
    assert [row["samples"] for row in facts["group_rows"]] == held
    assert facts["sizes"]["n"]["max"] == max(len(part) for part in found.federation.train)
    assert facts["sizes"]["validation"] == {"min": 0, "median": 0, "max": 0}
    assert facts["labels_per_client"] == {"min": 2, "median": 2, "max": 3}
    assert facts["measures"]["emd"]["across"] == 1  # the groups have no label in common
    assert facts["measures"]["emd"]["within"] < 0.3


def test_every_measure_is_that_of_the_federation() -> None:
    found = view(load(DIGITS, ["partition.clients=12"]))
    assert [part.measure.name for part in found.measured] == sorted(MEASURES)
    for part in found.measured:
        assert part.average == average_distance(found.federation, part.measure, seed=0)
        assert f"{part.average.mean:.4g}" in text_of(found)


def test_files(tmp_path: Path) -> None:
    found = view(load(DIGITS, TWO_TASKS), ["emd", "cka"])
    written = partition.write(found, tmp_path / "new" / "folder")
    assert [path.name for path in written] == [
        "partition.json",
        "clients.csv",
        "classes.png",
        "distances.csv",
        "distances.png",
        "index.html",
    ]
    folder = written[0].parent
    assert json.loads(written[0].read_text()) == json.loads(json.dumps(found.summary()))
    clients = pd.read_csv(folder / "clients.csv")
    np.testing.assert_array_equal(clients["n"], found.federation.sizes)
    pairs = pd.read_csv(folder / "distances.csv")
    assert list(pairs.columns) == ["client", "other", "emd", "cka"]
    assert len(pairs) == 10
    assert pairs["emd"].mean() == pytest.approx(found.summary()["measures"]["emd"]["mean"])
    for name in ("classes.png", "distances.png"):
        image = imread(folder / name)
        assert min(image.shape[:2]) > 200
        assert image.std() > 0.05  # not blank


def test_the_page_has_the_numbers_of_the_tables(tmp_path: Path) -> None:
    found = view(load(DIGITS, TWO_TASKS), ["emd", "cka"])
    page = partition.write(found, tmp_path)[-1].read_text()
    assert titles(page) == ["Labels", "Planted groups", "Sizes", "Map of clients", "Distances", "Clients"]
    data = values(page)["data"]["clients"]
    assert data["n"] == found.federation.sizes.tolist()
    assert [data[f"class {label}"] for label in range(10)] == found.counts.T.tolist()
    shares = 100 * found.counts / found.counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(charts(page)["Labels"]["option"]["matrix"], shares, atol=0.51)
    assert ["1", "2", str(found.groups()[1]["samples"]), "7, 8, 9"] in rows(page)
    matrices = choices(charts(page)["Distances"], "measure")
    assert list(matrices) == ["emd", "cka"]
    dark = [matrices[name]["visualMap"]["inRange"]["color"][0] for name in matrices]
    assert dark[0] < dark[1]  # emd: least is dark; cka, a similarity: most is
    assert sorted(matrices["emd"]["xAxis"]["data"]) == ["0", "1", "2", "3", "4"]


def test_many_clients_are_abridged_and_sampled_and_it_says_so(tmp_path: Path) -> None:
    changes = [
        "data={name: synthetic, samples: 30000}",
        "partition.name=iid",
        "partition.clients=10000",
    ]
    found = view(load({"name": "many"}, changes), ["emd"], compare=50)
    text = text_of(found)
    assert "10,000 clients" in text
    assert "12 of 10,000 clients" in text
    assert "50 clients drawn from 10,000: 1,225 pairs" in text
    assert found.summary()["measures"]["emd"]["sampled"]
    assert len(text.splitlines()) < 50
    assert len(pd.read_csv(partition.write(found, tmp_path)[1])) == 10_000


def test_classes_have_their_names(tmp_path: Path) -> None:
    first = view(load(DIGITS, TWO_TASKS), ["emd"])
    for names, shown in ((tuple("abcdefghij"), True), (tuple(f"class {i}" for i in range(10)), False)):
        samples = replace(first.federation.samples, class_names=names)
        federation = replace(first.federation, samples=samples)
        found = replace(first, stage=replace(first.stage, federation=federation))
        (headings,) = (line for line in text_of(found).splitlines() if line.startswith("┃client┃"))
        assert headings.replace(" ", "").endswith("┃".join(names if shown else "0123456789") + "┃")
        data = values(partition.write(found, tmp_path / names[0])[-1].read_text())["data"]["clients"]
        assert [data[f"class {name}"] for name in names] == found.counts.T.tolist()
        assert data["main label"] == [names[i] for i in found.counts.argmax(axis=1)]


def test_names_of_classes_are_no_mathematics(tmp_path: Path) -> None:
    first = view(load(DIGITS, TWO_TASKS), ["emd"])
    samples = replace(first.federation.samples, class_names=tuple(f"$_$ {i}" for i in range(10)))
    federation = replace(first.federation, samples=samples)
    partition.write(replace(first, stage=replace(first.stage, federation=federation)), tmp_path)
    assert (tmp_path / "classes.png").is_file()


def test_numbers_to_predict_are_no_classes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((40, 6), np.float32)
    y = x.sum(axis=1, keepdims=True)
    np.savez(tmp_path / "numbers.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    changes = [f"data={{name: npz, path: '{tmp_path / 'numbers.npz'}'}}", "loss=mse", "model=mlp"]
    found = view(load({"partition": {"name": "iid", "clients": 4}}, changes), ["emd", "mmd"])
    text = text_of(found)
    assert "4 clients, numbers to predict, no planted groups" in text
    assert "labels" not in text.replace("emd compares labels", "")
    assert "emd compares labels, and these samples have numbers to predict" in text
    assert found.measured[1].average is not None
    files = [path.name for path in partition.write(found, tmp_path / "out")]
    assert files == ["partition.json", "clients.csv", "distances.csv", "distances.png", "index.html"]
    page = (tmp_path / "out/index.html").read_text()
    assert "Labels" not in titles(page)
    assert set(values(page)["data"]["clients"]) == {"client", "n", "validation", "test"}


def test_many_classes_are_told_in_words() -> None:
    changes = ["data={name: synthetic, classes: 30}", "partition={name: label_skew, clients: 20, rho: 0.1}"]
    text = text_of(view(load({"name": "wide"}, changes), ["emd"]))
    assert "most frequent labels" in text
    assert "labels a client: 3 / 3 / 3" in text


def test_a_measure_that_is_not_defined_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    x = np.zeros((40, 6), np.float32)
    y = np.arange(40) % 2
    np.savez(tmp_path / "dark.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    changes = [f"data={{name: npz, path: '{tmp_path / 'dark.npz'}'}}", "partition={name: iid, clients: 4}"]
    found = view(load({"name": "dark"}, changes), ["cka", "emd"])
    assert "not defined here: client 0: measure cka: all samples" in text_of(found)
    written = partition.write(found, tmp_path / "out")
    assert [path.name for path in written][-3:-1] == ["distances.csv", "distances.png"]
    assert list(pd.read_csv(tmp_path / "out" / "distances.csv").columns) == ["client", "other", "emd"]


def test_a_single_client_has_no_distances(tmp_path: Path) -> None:
    found = view(load(DIGITS, ["partition={name: iid, clients: 1}"]), ["emd", "cka"])
    assert text_of(found).count("a distance needs two clients, there is one") == 1
    assert [path.name for path in partition.write(found, tmp_path)][-2] == "classes.png"


def test_every_stage_is_what_the_run_will_have(tmp_path: Path) -> None:
    events = [
        {"name": "join", "round": 2, "clients": 1},
        {"name": "leave", "round": 3, "clients": [0]},
        {"name": "drift", "round": 3, "clients": [3], "kind": "permuted_labels"},
    ]
    config = load({**DIGITS, "rounds": 5, "events": events}, TWO_TASKS)
    stages, _ = building.build(config)
    found = partition.views(config, ["emd"])
    assert [each.stage_count for each in found] == [3, 3, 3]
    assert [each.present.tolist() for each in found] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4]]
    assert [each.folder for each in found] == ["", "round-2", "round-3"]
    for each, stage in zip(found, stages, strict=True):
        federation = stage.federation
        np.testing.assert_array_equal(each.federation.train.values, federation.train.values)
        for row, client in zip(each.counts, each.present.tolist(), strict=True):
            y = federation.samples.labels("train", federation.train[client])
            np.testing.assert_array_equal(row, np.bincount(y, minlength=10))
        assert each.measured[0].average is not None
        assert each.measured[0].average.clients == each.summary()["clients"] == stage.active.sum()
        assert not each.measured[0].average.sampled
    assert (found[1].counts[3] != found[2].counts[2]).any()  # client 3, before and after
    for each, heading in zip(
        found,
        (
            "stage 1 of 3 (at first)",
            "stage 2 of 3 (after 2 rounds: 1 join)",
            "(after 3 rounds: 1 leave, 1 drift)",
        ),
        strict=True,
    ):
        assert heading in text_of(each)
        written = partition.write(each, tmp_path / each.folder)
        assert pd.read_csv(written[1])["client"].tolist() == each.present.tolist()
        facts = json.loads(written[0].read_text())
        assert facts["after_rounds"] == each.stage.round
        assert facts["sizes"]["n"]["min"] > 0
    assert facts["drifted"] == [3]
    assert pd.read_csv(tmp_path / "round-3" / "distances.csv")["client"].tolist() == [1, 1, 1, 2, 2, 3]
    with pytest.raises(ConfigError, match=r"events\.0\.round: it would happen after 2 of 1 round"):
        partition.views(load({**DIGITS, "rounds": 1, "events": events[:1]}))


def test_from_python(tmp_path: Path) -> None:
    events = [{"name": "leave", "round": 3, "clients": [0]}]
    mine = {**DIGITS, "rounds": 5, "events": events}
    first = rayfl.partition(mine, TWO_TASKS, measures=["emd"])
    assert first.clients["n"].tolist() == first.federation.sizes.tolist()
    matrix = first.distances("emd")
    assert matrix.index.tolist() == matrix.columns.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(matrix.to_numpy(), first.measured[0].values)
    assert first.write(tmp_path / "p.html").read_text() == render(partition.page_of(first))
    shown = first._repr_html_()
    for text in (
        "tasks partition of digits, seed 0, stage 1 of 2",
        "planted groups",
        "other group",
        "emd",
    ):
        assert text in shown
    assert rayfl.partition(mine, TWO_TASKS, measures=["emd"], stage=2).present.tolist() == [1, 2, 3, 4]
    for stage in (0, 3):
        with pytest.raises(ConfigError, match=rf"^stage: got {stage}; this config has 2 stages, from 1"):
            rayfl.partition(mine, TWO_TASKS, measures=["emd"], stage=stage)
    with pytest.raises(ConfigError, match=r"^measure: 'emb' was not measured; did you mean 'emd'"):
        first.distances("emb")


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"^measures: no measure 'emdd'; did you mean 'emd'"):
        view(load(DIGITS), ["emdd"])
    with pytest.raises(ConfigError, match=r"^compare: got 1"):
        view(load(DIGITS), compare=1)
    with pytest.raises(DataError, match="2000 clients for 1438 training samples"):
        view(load(DIGITS, ["partition.clients=2000"]))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = view(load(DIGITS, TWO_TASKS), ["emd"])
    with pytest.raises(ConfigError, match=r"^out: .* cannot be written"):
        partition.write(found, tmp_path / "file" / "below")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rayfl", "partition", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(str(caught.value.code or 0)), captured.out, captured.err

    code, out, _ = call("digits-demo", "--measures", "emd, cka")
    assert code == 0
    assert "written: partition-digits-demo/distances.png" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["partition-digits-demo"]
    code, _, err = call("digits-demo", "partition={name: shards, clients: 20, shards_per_client: 100}")
    assert code == 2
    assert err.count("\n") == 1
    assert "need 2000 samples, there are 1438" in err
    assert call("digits-demo", "--measures", "nothing")[0] == 2
