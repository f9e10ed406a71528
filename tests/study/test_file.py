"""Study files: what they may say, and what is wrong with them in one line before anything runs."""

from __future__ import annotations

import copy
import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl import plugins
from rayfl.algorithms import ALGORITHMS
from rayfl.config import Config
from rayfl.config.reading import item
from rayfl.config.text import dump, parse
from rayfl.errors import ConfigError, RayflError
from rayfl.study import prepare, read, take
from rayfl.study.file import points_of, seeds_of
from rayfl.study.plan import plan
from rayfl.study.study import check_folder, folder_of

GOOD = """
name: who-profits
base: digits-demo
settings: {rounds: 3}
methods:
  FedAvg: {algorithm: fedavg}
  PACFL: {algorithm: pacfl, clustering.threshold: 6}
  "PACFL, few": {algorithm: pacfl, clustering.n_clusters: 2}
grid: {training.lr: [0.1, 0.3]}
tune: {training.batch_size: [8, 16], on: validation, seeds: [100]}
seeds: 0-2
report: {columns: [accuracy_mean, rounds_to: 80], by: [training.lr]}
expected: [{source: "thesis, Table 3.4", figures: {FedAvg: 77.3}, within: 3}]
claims:
  - PACFL.accuracy_mean - FedAvg.accuracy_mean > 10
  - {claim: 'PACFL, few[lr=0.1].accuracy_mean > 5', source: nobody}
sizes:
  smoke: {settings: {rounds: 1}, seeds: 0, only: [FedAvg], tune: false, claims: []}
"""


def changed(**changes: Any) -> dict[str, Any]:
    """The good file with some entries replaced; ``...`` leaves one out. Nested ones by ``a__b``."""
    values = copy.deepcopy(parse(GOOD))
    for path, value in changes.items():
        node, keys = values, path.split("__")
        for key in keys[:-1]:
            node = node[key]
        if value is ...:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value
    return dict(values)


def test_a_study_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(GOOD)
    study = read(path)
    assert study.seeds == (0, 1, 2)
    assert study.axes == {"training.lr": {"0.1": {"training.lr": 0.1}, "0.3": {"training.lr": 0.3}}}
    assert study.tune is not None
    assert study.tune.space == {"training.batch_size": [8, 16]}
    assert study.report.names == ("accuracy_mean", "rounds_to_80")
    prepared = prepare(study)
    assert len(prepared.runs) == 3 * 2 * 3
    assert len(prepared.statements) == 2 * 1 + 2  # one figure at two points, two claims
    assert len(prepared.candidates) == 3 * 2


@pytest.mark.parametrize(
    ("axis", "points", "at"),
    [("clustering.max_flags", [None, 3], None), ("evaluation.common", [True, False], False)],
)
def test_a_claim_may_name_a_point_that_is_no_number(
    axis: str, points: list[Any], at: Any, tmp_path: Path
) -> None:
    study = {
        "name": "s",
        "settings": {"data": "digits"},
        "methods": {"PACFL": {"algorithm": "pacfl"}},
        "grid": {axis: points},
        "seeds": 0,
        "claims": [{"claim": "PACFL.accuracy_mean > 0", "at": {axis: at}}],
    }
    assert len(prepare(take(study, tmp_path)).statements) == 1


def of_methods(study: dict[str, Any], folder: Path, **options: Any) -> dict[str, Config]:
    """The configs of a study's runs by method, for the first point and seed."""
    return {run.method: run.config for run in reversed(plan(take(study, folder, **options)))}


SEVERAL: dict[str, Any] = {
    "name": "several",
    "base": "digits-demo",
    "settings": {"algorithm.clusters": 7},
    "methods": {
        "IFCA": {"algorithm": "ifca"},
        "IFCA, 2": {"algorithm": {"name": "ifca", "clusters": 2}, "training.lr": 0.5},
        "FedAvg": {"algorithm": "fedavg"},
    },
    "seeds": 0,
}


def test_a_setting_of_an_algorithm_is_for_all_methods_that_have_it(tmp_path: Path) -> None:
    """The base names another algorithm."""
    configs = of_methods(SEVERAL, tmp_path)
    assert [configs[label].algorithm.clusters for label in ("IFCA", "IFCA, 2")] == [7, 2]  # type: ignore[attr-defined]
    sized = {**SEVERAL, "sizes": {"few": {"settings": {"algorithm": {"clusters": 3}}}}}
    assert of_methods(sized, tmp_path, size="few")["IFCA"].algorithm.clusters == 3  # type: ignore[attr-defined]


def test_overrides_are_for_all_runs_also_where_a_method_has_its_own_value(tmp_path: Path) -> None:
    configs = of_methods(SEVERAL, tmp_path, settings=["training.lr=0.25", "algorithm.clusters=3"])
    assert [config.training.lr for config in configs.values()] == [0.25] * 3
    assert [configs[label].algorithm.clusters for label in ("IFCA", "IFCA, 2")] == [3, 3]  # type: ignore[attr-defined]
    assert of_methods(SEVERAL, tmp_path, settings="training.lr=0.25")["IFCA, 2"].training.lr == 0.25
    nested = {**SEVERAL, "settings": {}, "methods": {"A": {"algorithm": "fedavg", "training": {"lr": 0.5}}}}
    training = of_methods(nested, tmp_path, settings=["training.lr=0.25"])["A"].training
    assert (training.lr, training.epochs) == (0.25, 3)  # the base's epochs
    cut = {**SEVERAL, "settings": {}, "methods": {"PACFL": {"algorithm": "pacfl", "clustering.threshold": 6}}}
    clustering = of_methods(cut, tmp_path, settings=["clustering.n_clusters=2"])["PACFL"].clustering
    assert (clustering.threshold, clustering.n_clusters) == (None, 2)


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        # An override replaces what the file says, wherever in the file.
        (
            {"partition": "dirichlet", "partition.clients": 8, "partition.alpha": 0.1},
            ["partition={name: dirichlet, clients: 30}"],
            {"partition.clients": 30, "partition.alpha": 0.5},
        ),
        ({"partition": {"clients": 8}}, ["partition=iid"], {"partition.name": "iid", "partition.clients": 8}),
        ({"partition": "iid", "partition.clients": 8}, ["partition=shards"], {"partition.clients": 100}),
        (
            {"partition": "dirichlet", "partition.clients": 8},
            ["partition.clients=6", "partition=iid"],
            {"partition.name": "iid", "partition.clients": 6},
        ),
        (
            {"events": [{"name": "leave", "round": 2, "clients": 3}], "events.0.round": 4},
            ["events=[{name: leave, round: 5, clients: 3}]"],
            {"events.0.round": 5},
        ),
        # In braces it replaces a section, as for a single run.
        ({"training": {"epochs": 7}}, ["training={lr: 1}"], {"training.lr": 1, "training.epochs": 5}),
        ({}, ["training.lr=1", "training={lr: 3}", "training.lr=2"], {"training.lr": 2}),
    ],
)
def test_overrides_of_a_study_mean_what_they_mean_for_a_run(
    settings: dict[str, Any], overrides: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    study = {**SEVERAL, "settings": settings, "methods": {"FedAvg": {}}}
    config = of_methods(study, tmp_path, settings=overrides)["FedAvg"].to_dict()
    for path, value in expected.items():
        node: Any = config
        for key in path.split("."):
            node = item(node, key)
        assert node == value
    again = parse(dump(take(study, tmp_path, settings=overrides).content()))
    assert of_methods(again, tmp_path)["FedAvg"].to_dict() == config  # the copy with the results


def test_a_method_may_name_its_algorithm_by_a_path(tmp_path: Path) -> None:
    methods = {
        "IFCA": {"algorithm.name": "ifca"},
        "IFCA, 2": {"algorithm.name": "ifca", "algorithm.clusters": 2},
    }
    configs = of_methods({**SEVERAL, "methods": methods}, tmp_path)
    assert [configs[label].algorithm.clusters for label in methods] == [7, 2]  # type: ignore[attr-defined]
    study = {**SEVERAL, "settings": {}, "methods": {"A": {"algorithm.name": "ifac"}}}
    with pytest.raises(RayflError, match=r"^methods\.A: algorithm: .*did you mean 'ifca'"):
        of_methods(study, tmp_path)


@pytest.fixture
def no_plugins_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(ALGORITHMS, "_added", {})


OWN_ALGORITHM = """
from typing import Literal

from rayfl.algorithms.base import Algorithm


class {0}(Algorithm):
    name: Literal["{0}"] = "{0}"
"""


@pytest.mark.usefixtures("no_plugins_stay")
def test_plugins_of_the_base_and_of_the_study(tmp_path: Path) -> None:
    """Methods without an algorithm have that of the base, which is a plug-in here."""
    for name in ("study_one", "study_two"):
        (tmp_path / f"{name}.py").write_text(OWN_ALGORITHM.format(name))
    base = {"plugins": [str(tmp_path / "study_one.py")], "algorithm": "study_one", "data": "digits"}
    (tmp_path / "base.yaml").write_text(dump(base))
    methods: dict[str, Any] = {"A": {}, "B": {"algorithm": "fedavg"}}
    study = {"name": "s", "base": "base.yaml", "methods": methods, "seeds": 0}
    assert [run.config.algorithm.name for run in plan(take(study, tmp_path))] == ["study_one", "fedavg"]
    methods["B"] = {"algorithm": "study_two"}
    runs = plan(take({**study, "plugins": ["study_two.py"]}, tmp_path))
    assert [run.config.algorithm.name for run in runs] == ["study_one", "study_two"]


def test_runs_of_a_study_write_no_report_where_only_their_folder_is_changed(tmp_path: Path) -> None:
    for override, report in (("{root: elsewhere}", False), ("{root: elsewhere, report: true}", True)):
        (config,) = of_methods(
            {**SEVERAL, "settings": {}, "methods": {"FedAvg": {}}}, tmp_path, settings=[f"output={override}"]
        ).values()
        assert (config.output.root, config.output.report) == (Path("elsewhere"), report)


def test_some_methods_may_be_run_alone(tmp_path: Path) -> None:
    """On the clients of all methods; what the study's folder holds is the same study."""
    methods = {"FedAvg": {"algorithm": "fedavg"}, "FLIS": {"algorithm": "flis_dc"}}
    content = {
        **SEVERAL,
        "settings": {},
        "methods": methods,
        "sizes": {"all": {}, "flis": {"only": ["FLIS"]}},
    }
    whole = {run.method: run.key for run in plan(take(content, tmp_path))}
    for study, label in (
        (take(content, tmp_path, only=["FedAvg"]), "FedAvg"),
        (take({**content, "only": ["FedAvg"]}, tmp_path), "FedAvg"),
        (take({**content, "only": ["FedAvg"]}, tmp_path, "all"), "FedAvg"),
        (take({**content, "only": ["FedAvg"]}, tmp_path, "flis"), "FLIS"),
    ):
        again = take(parse(dump(study.content())), tmp_path)
        for each in (study, again):
            assert [(run.method, run.key) for run in plan(each)] == [(label, whole[label])]
    sized = take({**content, "only": ["FedAvg"]}, tmp_path, "flis", only=["FedAvg"])  # in place of the file's
    assert [*sized.methods] == ["FedAvg"]
    assert take({**content, "only": ["FedAvg"]}, tmp_path).part == ("FedAvg",)
    assert take({**content, "only": ["FedAvg"]}, tmp_path, "all").part == ("all",)
    claims = ["FLIS.ari > 0", "FedAvg.ari > 0", "FedAvg.ari > FLIS.ari"]
    part = take({**content, "claims": claims}, tmp_path, only=["FedAvg"])
    assert [each.claim for each in part.claims] == claims[1:2]
    assert part.claims_left_out == [claims[0], claims[2]]
    assert take(part.content(), tmp_path).claims_left_out == part.claims_left_out
    assert "only" not in take(content, tmp_path).model_fields_set


def test_figures_and_reference_of_methods_that_are_left_out_are_told_and_kept(tmp_path: Path) -> None:
    """A published figure with a tolerance is a claim, too."""
    expected = [
        {"source": "x", "within": 3, "figures": {"FedAvg": 91.5, "PACFL": {0.1: 93, 0.3: 92}}},
        {"source": "y", "figures": {"PACFL": 90}},
        {"source": "z", "within": 1.5, "figures": {"PACFL": 1}, "column": "ari"},
    ]
    values = changed(expected=expected, claims=[], report={"reference": "PACFL"})
    part = take(values, tmp_path, only=["FedAvg"])
    left_out = ["PACFL.accuracy_mean ~ 93 +- 3", "PACFL.accuracy_mean ~ 92 +- 3", "PACFL.ari ~ 1 +- 1.5"]
    assert part.claims_left_out == left_out
    assert [each.figures for each in part.expected] == [{"FedAvg": 91.5}]
    assert part.report.reference is None
    again = take(parse(dump(part.content())), tmp_path)
    assert again.claims_left_out == left_out
    whole = take({**part.content(), "only": []}, tmp_path)
    assert whole.expected == take(values, tmp_path).expected
    assert whole.report.reference == "PACFL"
    assert whole.claims_left_out == []


def test_the_copy_of_a_part_is_that_part(tmp_path: Path) -> None:
    """With another folder of results than the whole study, and without figures for points of other sizes."""
    figures = {"FedAvg": {0.1: 77.3, 0.3: 80}, "PACFL": {0.3: 80}}
    sizes = {"one": {"grid": {"training.lr": [0.1]}, "settings": {"rounds": 1}, "tune": False}}
    values = changed(expected=[{"source": "x", "figures": figures, "within": 1}], sizes=sizes, claims=[])
    study = take(values, tmp_path, "one", only=["FedAvg", "PACFL"], seeds="5", settings=["training.epochs=1"])
    again = take(parse(dump(study.content())), tmp_path)
    assert folder_of(again) == folder_of(study)
    assert folder_of(study) != folder_of(take(values, tmp_path))
    assert prepare(again, check_data=False).statements == prepare(study, check_data=False).statements
    assert again.columns == study.columns
    assert again.part == ("one", "FedAvg", "PACFL", "seeds5", "training.epochs=1")
    assert take(again.content(), tmp_path, seeds="6").part == (*again.part, "seeds6")
    elsewhere = ["output.root=/elsewhere", "output={root: /elsewhere}"]  # the same runs, kept elsewhere
    assert take(values, tmp_path, settings=elsewhere[:1]).part == ()
    assert take(values, tmp_path, settings=[*elsewhere[1:], "rounds=3"]).part == ("rounds=3",)


def test_the_copy_may_be_run_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(dump(changed(sizes={"x": {"settings": {"rounds": 1}}})))
    for study in (read("s.yaml"), read("s.yaml", "x", only=["FedAvg"])):
        folder_of(study).mkdir(parents=True)
        (copied := folder_of(study) / "study.yaml").write_text(dump(study.content()))
        again = read(copied)
        assert folder_of(again) == folder_of(study)
        check_folder(folder_of(again), again)
        assert dump(again.content()) == copied.read_text()
        copied.write_text(copied.read_text() + "# mine\n")
        with pytest.raises(RayflError, match=r"study\.yaml would replace the study file"):
            check_folder(folder_of(again), read(copied))


def test_numbers_of_numpy_may_be_in_a_study(tmp_path: Path) -> None:
    methods = {"A": {"algorithm": "fedavg", "training.lr": np.float64(0.1)}}
    study = take({**SEVERAL, "settings": {}, "methods": methods}, tmp_path)
    assert plan(take(parse(dump(study.content())), tmp_path))[0].config.training.lr == 0.1


def test_a_setting_of_a_size_may_be_for_some_points_of_an_axis(tmp_path: Path) -> None:
    grid = {"pace": {"slow": {"training.lr": 0.01}, "as set": {}}}
    sizes = {"x": {"settings": {"training.lr": 0.3}}}
    study = {**SEVERAL, "settings": {}, "methods": {"A": {}}, "grid": grid, "sizes": sizes}
    assert [run.config.training.lr for run in plan(take(study, tmp_path, "x"))] == [0.01, 0.3]


def test_names_that_yaml_reads_as_true_and_false(tmp_path: Path) -> None:
    text = "grid: {m: {on: {training.lr: 0.1}, off: {training.lr: 0.2}}}\nclaims: ['A[m=on].ari > 0']\n"
    text += "methods: {A: {}}\nname: s\nsizes: {q: {tune: {training.momentum: [0.1, 0.2], on: validation}}}\n"
    study = take(parse(text.replace("m=on", "m=true")), tmp_path, "q")
    assert list(study.axes["m"]) == ["true", "false"]
    assert study.tune is not None
    assert study.tune.on == "validation"
    again = take(parse(dump(study.content())), tmp_path)
    assert prepare(again, check_data=False).statements == prepare(study, check_data=False).statements


def test_an_override_of_what_a_named_axis_sets_is_refused(tmp_path: Path) -> None:
    grid = {"pace": {"slow": {"training": {"lr": 0.01}}, "fast": {"training": {"lr": 0.3}}}}
    with pytest.raises(RayflError, match=r"^training\.lr: is set by the axis pace; change it"):
        take({**SEVERAL, "grid": grid}, tmp_path, settings=["training.lr=0.1"])


def test_a_part_of_the_methods_may_not_use_an_axis(tmp_path: Path) -> None:
    methods = {"FedAvg": {"algorithm": "fedavg"}, "PACFL": {"algorithm": "pacfl"}}
    study = {**SEVERAL, "settings": {}, "methods": methods, "grid": {"clustering.threshold": [3, 6]}}
    for only in ([], ["FedAvg"]):
        prepare(take(study, tmp_path, only=only), check_data=False)


def test_a_point_may_name_another_part_than_the_settings(tmp_path: Path) -> None:
    settings = {"model": {"name": "mlp", "hidden": [64]}}
    grid = {"net": {"mlp": {}, "linear": {"model": "linear"}}}
    study = {**SEVERAL, "settings": settings, "methods": {"FedAvg": {}}, "grid": grid}
    assert [run.config.model.name for run in plan(take(study, tmp_path))] == ["mlp", "linear"]
    grid = {
        "net": {"iid": {"partition": "iid"}, "skewed": {"partition": {"name": "dirichlet", "alpha": 0.1}}}
    }
    study = {**SEVERAL, "settings": {}, "methods": {"FedAvg": {}}, "grid": grid}
    runs = plan(take(study, tmp_path, settings=["partition.clients=9"]))
    assert [(r.config.partition.name, r.config.partition.clients) for r in runs] == [
        ("iid", 9),
        ("dirichlet", 9),
    ]


def test_settings_of_a_size_replace_those_of_the_study(tmp_path: Path) -> None:
    settings = {"partition": "dirichlet", "partition.clients": 8, "clustering.threshold": 3}
    of_size = {"partition": {"name": "dirichlet", "clients": 30}, "clustering.n_clusters": 2}
    study = {
        **SEVERAL,
        "settings": settings,
        "methods": {"PACFL": {"algorithm": "pacfl"}},
        "sizes": {"big": {"settings": of_size}},
    }
    config = of_methods(study, tmp_path, size="big")["PACFL"]
    assert config.partition.clients == 30
    assert (config.clustering.threshold, config.clustering.n_clusters) == (None, 2)


@pytest.mark.parametrize(
    ("settings", "of_size", "expected"),
    [
        (
            {"clustering.threshold": 3},
            {"clustering.n_clusters": None},
            {"clustering.threshold": 3, "clustering.n_clusters": None},
        ),
        (
            {"clustering.threshold": 3},
            {"clustering.n_clusters": 2, "clustering.threshold": None},
            {"clustering.n_clusters": 2, "clustering.threshold": None},
        ),
        (
            {"partition": "iid", "partition.clients": 8},
            {"partition": "iid"},
            {"partition.clients": 8, "partition": "iid"},
        ),
        (
            {"partition.name": "iid", "partition.clients": 8},
            {"partition": "iid"},
            {"partition.clients": 8, "partition": "iid"},
        ),
        (
            {"partition.clients": 8, "training.lr": 1},
            {"partition.name": "iid"},
            {"partition.clients": 8, "training.lr": 1, "partition.name": "iid"},
        ),
        (
            {"partition": "dirichlet", "partition.clients": 8},
            {"partition.name": "iid"},
            {"partition.name": "iid"},
        ),
    ],
)
def test_what_a_size_keeps_of_the_settings(
    settings: dict[str, Any], of_size: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    study = {**SEVERAL, "settings": settings, "sizes": {"x": {"settings": of_size}}}
    assert take(study, tmp_path, "x").settings == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("partition=iid", {"algorithm": "fedavg", "training": {"lr": 1}}),
        ("training.lr=3", {"algorithm": "fedavg"}),
        ("training={epochs: 3}", {"algorithm": "fedavg"}),
        ("training.epochs=3", {"algorithm": "fedavg", "training": {"lr": 1}}),
        ("local.mu=1", {"algorithm": "fedavg", "training": {"lr": 1}}),
    ],
)
def test_an_override_leaves_out_what_methods_say_of_it_and_nothing_else(
    override: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Of methods that are not run, too: the clients' data are those of all methods."""
    methods = {label: {"algorithm": "fedavg", "training": {"lr": 1}} for label in "AB"}
    methods |= {"C": {"algorithm": "fedavg", "training.lr": 1}}
    study = {**SEVERAL, "settings": {}, "methods": methods}
    taken = take(study, tmp_path, only=["A"], settings=[override]).all_methods
    assert taken["A"] == taken["B"] == expected
    assert taken["C"] == {"algorithm": "fedavg", **({"training.lr": 1} if "training" in expected else {})}


@pytest.mark.parametrize("seeds", [0, "0", [0]])
def test_a_part_of_the_seeds_is_a_part_of_the_study(seeds: Any, tmp_path: Path) -> None:
    study = take(SEVERAL | {"seeds": "0-2"}, tmp_path, seeds=seeds)
    assert study.seeds == (0,)
    assert study.part == (f"seeds{seeds}",)


def test_a_part_of_the_grid_keeps_what_the_settings_say_of_it(tmp_path: Path) -> None:
    content = {
        "name": "s",
        "settings": {"data": "digits", "partition.validation": 0, "partition": {"clients": 7}},
        "methods": {"FedAvg": {"algorithm": "fedavg"}},
        "grid": {"skew": {"a": {"partition": {"name": "dirichlet", "alpha": 1}}, "b": {"partition": "iid"}}},
        "seeds": 0,
    }
    partitions = [run.config.partition for run in plan(take(content, tmp_path))]
    assert [(each.name, each.clients, each.validation) for each in partitions] == [
        ("dirichlet", 7, 0),
        ("iid", 7, 0),
    ]


def test_a_column_with_a_number_may_be_in_quotes(tmp_path: Path) -> None:
    study = take(parse(GOOD.replace("rounds_to: 80", '"rounds_to: 80", "local_bytes_to: 7.5"')), tmp_path)
    assert study.report.names == ("accuracy_mean", "rounds_to_80", "local_bytes_to_7.5")


def test_a_size_replaces_what_it_names(tmp_path: Path) -> None:
    study = take(parse(GOOD), tmp_path, "smoke")
    assert study.seeds == (0,)
    assert list(study.methods) == ["FedAvg"]
    assert study.settings == {"rounds": 1}
    assert study.tune is None
    assert study.claims == ()
    assert study.grid == {"training.lr": [0.1, 0.3]}


def test_a_size_may_have_columns_of_its_own(tmp_path: Path) -> None:
    sizes = {"few": {"report": {"columns": [{"local_rounds_to": 75}]}}, "more": {}}
    study = take(changed(sizes=sizes), tmp_path, "few")
    assert (study.report.names, study.report.by) == (("local_rounds_to_75",), ())
    assert take(changed(sizes=sizes), tmp_path, "more").report == take(changed(), tmp_path).report


def test_a_size_changes_settings_of_one_method(tmp_path: Path) -> None:
    methods = {
        "near": {"algorithm": "fedprox", "local": {"mu": 0.1}, "training.lr": 0.3},
        "far": {"algorithm": "fedprox", "local.mu": 0.01},
    }
    sizes = {"few": {"methods": {"near": {"local.mu": 0.2, "training": {"momentum": 0.5}}}}, "whole": {}}
    values = {"name": "s", "methods": methods, "settings": {"training.lr": 0.1}, "seeds": [0], "sizes": sizes}
    near, far = plan(take(values, tmp_path, "few"))
    t = near.config.training
    assert (near.config.local.mu, t.momentum, t.lr) == (0.2, 0.5, 0.3)
    whole = plan(take(values, tmp_path, "whole"))
    assert far.key == whole[1].key
    assert (whole[0].config.local.mu, whole[0].config.training.momentum) == (0.1, 0.0)
    again = take(parse(dump(take(values, tmp_path, "few").content())), tmp_path)
    assert [run.key for run in plan(again)] == [near.key, far.key]


def test_a_size_may_give_a_method_another_algorithm(tmp_path: Path) -> None:
    methods = {"A": {"algorithm": "fedprox", "local.mu": 0.1}}
    sizes = {name: {"methods": {"A": {"algorithm": name}}} for name in ("fedavg", "fedprox")}
    values = {"name": "s", "methods": methods, "seeds": [0], "sizes": sizes}
    assert plan(take(values, tmp_path, "fedavg"))[0].config.local.name == "sgd"
    assert plan(take(values, tmp_path, "fedprox"))[0].config.local.mu == 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("of_size", "message"),
    [
        ({"methods": {"A": {"training.lrr": 1}}}, "sizes.x.methods.A: training.lrr: no such"),
        ({"methods": {"A": {"algorithm": "fedavgg"}}}, "sizes.x.methods.A: algorithm: no algorithm"),
        ({"settings": {"training": {"lr": -1}}}, "sizes.x.settings: training.lr: got -1"),
        ({"methods": {"A": {"training.lr": 1}}}, "methods.B: training.lrr: no such"),
    ],
)
def test_a_mistake_in_a_size_is_located_there(of_size: dict[str, Any], message: str, tmp_path: Path) -> None:
    methods = {"A": {"algorithm": "fedavg"}}
    if message.startswith("methods.B"):
        methods["B"] = {"algorithm": "fedprox", "training.lrr": 1}
    values = {"name": "s", "methods": methods, "seeds": [0], "sizes": {"x": of_size}}
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        plan(take(values, tmp_path, "x"))


def test_a_size_adds_to_nested_settings(tmp_path: Path) -> None:
    settings = {"training": {"epochs": 5, "momentum": 0.5}, "partition": {"name": "dirichlet", "alpha": 0.3}}
    sizes = {"smoke": {"settings": {"training": {"epochs": 1}, "partition": {"name": "iid"}, "rounds": 2}}}
    study = take(changed(settings=settings, sizes=sizes), tmp_path, "smoke")
    assert study.settings == {
        "training.momentum": 0.5,
        "training.epochs": 1,
        "partition.name": "iid",  # another part has other settings
        "rounds": 2,
    }


def test_published_figures_are_claimed_with_all_their_digits(tmp_path: Path) -> None:
    expected = [{"source": "x", "column": "bytes_up", "figures": {"FedAvg": 1234567}, "within": 0.1}]
    prepared = prepare(take(changed(expected=expected, claims=[]), tmp_path), check_data=False)
    assert prepared.statements[0][0].claim == "FedAvg.bytes_up ~ 1234567 +- 0.1"


def test_files_are_looked_for_beside_the_study(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rounds: 7\n")
    (tmp_path / "my_plugin.py").write_text("")
    study = take(changed(base="base.yaml", plugins=["my_plugin.py"]), tmp_path)
    assert study.base == str(tmp_path / "base.yaml")
    assert study.plugins == (str(tmp_path / "my_plugin.py"),)


@pytest.mark.parametrize(
    ("given", "seeds"),
    [(3, (3,)), ("0-2", (0, 1, 2)), ("0, 3,7-8", (0, 3, 7, 8)), ([1, "4-5"], (1, 4, 5))],
)
def test_seeds_as_people_write_them(given: Any, seeds: tuple[int, ...]) -> None:
    assert seeds_of(given) == seeds


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [(3, "1 seed (3)"), ("0-4,7", "6 seeds (0-4, 7)"), ([9, 2, 8], "3 seeds (2, 8-9)")],
)
def test_a_study_says_how_much_it_combines(tmp_path: Path, seeds: Any, expected: str) -> None:
    assert take(changed(seeds=seeds), tmp_path).extent == f"3 methods x 2 points of the grid x {expected}"


BAD: list[tuple[dict[str, Any], str]] = [
    (changed(settings={3: 4}), "settings: the key 3 is not text; put it in quotes"),
    (changed(sizes={1: {}}), "sizes: the key 1 is not text"),
    (changed(sizes={"s": {"methods": {"FedAvg": {2: 1}}}}), "sizes.s.methods.FedAvg: the key 2 is not text"),
    ({**changed(), True: 3}, "study: the key true is not text; YAML reads on, yes, off and no as"),
    (changed(grid={3: [1, 2]}), "grid: the key 3 is not text"),
    (changed(sizes={"s": {True: 1}}), "sizes.s: the key true is not text; YAML reads on"),
    (changed(settings={"training": {None: 4}}), "settings.training: the key null is not text"),
    (changed(grid={"a": {"x": {3: 4}}}, report={}, claims=[]), "grid.a.x: the key 3 is not text"),
    (changed(name=False), "name: got false; expected text; YAML reads on"),
    (
        changed(claims=["FedAvg.accuracy_mean > 100"], report={}),
        "claims: 'FedAvg.accuracy_mean > 100': can never hold; its percentages add up to between 0 and 100",
    ),
    (
        changed(claims=["PACFL.accuracy_mean - 0.5 * FedAvg.accuracy_mean >= -50"], report={}),
        "holds whatever the runs give; its percentages add up to between -50 and 100",
    ),
    (
        changed(claims=["FedAvg.accuracy_mean > 10", "FedAvg.accuracy_mean   > 1e1"], report={}),
        "claims: 'FedAvg.accuracy_mean   > 1e1': is given twice; leave one out",
    ),
    (
        changed(claims=[], expected=[{"source": "p", "figures": {"FedAvg": 70}, "within": 200}]),
        "holds whatever the runs give",
    ),
    (
        changed(claims=["FedAvg[lr=0.1].ari > FedAvg.ari"]),
        "FedAvg[lr=0.1].ari > FedAvg.ari' at training.lr=0.1: can never hold; its numbers cancel out",
    ),
    (
        changed(claims=["FedAvg[lr=0.3].ari > FedAvg.ari"]),  # not the first point
        "FedAvg[lr=0.3].ari > FedAvg.ari' at training.lr=0.3: can never hold; its numbers cancel out",
    ),
    (
        changed(claims=[{"claim": "FedAvg[lr=0.1].ari > 0", "at": {"lr": 0.3}}]),
        "'FedAvg[lr=0.1].ari > 0': at: training.lr is 0.1 in brackets; leave it out of at or of the claim",
    ),
    (
        changed(claims=["FedAvg.accuracy_mean > 0.9"], report={}),
        "'FedAvg.accuracy_mean > 0.9': accuracy_mean is in percent, and 0.9 is below 1 %; such as 90",
    ),
    (changed(report={"columns": [{"rounds_to": 0.8}]}), "{rounds_to: 0.8}; expected rounds_to or bytes_to"),
    (
        changed(settings={"rounds": "many"}, grid={"training.lr": [-1, 0.1]}),
        "settings: rounds: got 'many' (and 1 more mistake)",
    ),
    (changed(tune={"training.momentum": [-1, 0.5]}), "tune: training.momentum: got -1; expected"),
    (changed(report={"by": ["training.lr"] * 2}), "report.by: training.lr is named twice"),
    (
        changed(expected=[{"source": "p", "figures": {"FedAvg": figures}} for figures in (70, {0.1: 71})]),
        "expected: 'p' gives two figures of FedAvg; leave one out",
    ),
    (
        changed(sizes={"smoke": {"claims": ["Solo.ari > 3"]}}),
        "sizes.smoke: claims: 'Solo.ari > 3': no method 'Solo'",
    ),
    (
        changed(sizes={"smoke": {"grid": {"training.lr": [9]}}}, claims=["FedAvg[lr=0.1].ari > 0"]),
        "sizes.smoke: claims: 'FedAvg[lr=0.1].ari > 0': training.lr has no point '0.1'",
    ),
    (
        changed(
            sizes={"smoke": {"grid": {"training.lr": [9]}}},
            claims=[{"claim": "FedAvg.ari > 0", "at": {"lr": 0.1}}],
        ),
        "sizes.smoke: claims: 'FedAvg.ari > 0': at: training.lr has no point '0.1'",
    ),
    (
        changed(methods__Again={"algorithm.name": "fedavg"}, tune=...),
        "methods: FedAvg and Again have the same settings; leave one out, or an override that replaces what",
    ),
    (
        changed(grid={"clusters": {"few": {"evaluation.every": 2}}}, claims=[], expected=[], report={}),
        "grid.clusters: tables have a number of this name; name the axis otherwise, such as clusters_set",
    ),
    (changed(name=...), "name: missing"),
    (changed(name="a/b"), "name: 'a/b' cannot be the name of a folder; expected at most 80"),
    (changed(name=""), "name: '' cannot be the name of a folder"),
    (changed(nmae=1), "nmae: no such setting"),
    (changed(methods=...), "methods: missing"),
    (changed(methods={}), "methods: there are none; expected labels with settings"),
    (changed(methods={3: {"algorithm": "fedavg"}}), "methods: the key 3 is not text; put it in quotes"),
    (changed(methods={"A": "fedavg"}), "methods: expected settings, such as A: {algorithm: fedavg}"),
    (changed(methods__FedAvg=[1]), "methods.FedAvg: got [1]; expected a section"),
    (changed(sizes={"smoke": {"setings": {}}}), "sizes.smoke.setings: no such setting in sizes.smoke; did"),
    (
        changed(methods__FedAvg={"algorithm": "fedagv"}),
        "methods.FedAvg: algorithm: no algorithm named 'fedagv'; did",
    ),
    (changed(methods__FedAvg={"algorithm": 3}), "methods.FedAvg.algorithm: expected the name"),
    (changed(methods__FedAvg={"algorithm.name": ["ifca"]}), "methods.FedAvg.algorithm: expected the name"),
    (changed(methods__FedAvg={"algorithm.name": ""}), "methods.FedAvg.algorithm: expected the name"),
    (changed(methods__FedAvg={"algorithm.name": None}), "methods.FedAvg.algorithm: expected the name"),
    (
        changed(methods__FedAvg={"algorithm": {"name": "ifca"}, "algorithm.name": "fedavg"}),
        "methods.FedAvg: names two algorithms, ifca and fedavg",
    ),
    (
        changed(only=["FedAvg"], grid={"execution.actors": [1, 2]}, report={}, claims=[]),
        "grid.execution.actors: 1 and 2 are the same for all methods",
    ),
    (changed(methods__FedAvg={"algorithm": "fedavg", "training.lrr": 1}), "methods.FedAvg: training.lrr"),
    (changed(methods__FedAvg={"algorithm": "fedavg", "training.momentum": -1}), "expected a number >= 0"),
    (changed(methods__FedAvg={"algorithm": "fedavg", "clustering.threshold": 3}), "would do nothing"),
    (changed(methods={'a"b': {}}), "cannot be a label"),
    (changed(methods={"a  b": {}}), "several spaces in a row"),
    (
        changed(methods__FedAvg={"algorithm": {"name": ["pacfl"]}}),
        "methods.FedAvg.algorithm: expected the name",
    ),
    (changed(grid={"low": {"x": {"rounds": 3}}}), "tables have a column of this name"),
    (changed(base="no-such-preset"), "base: no-such-preset: no such preset"),
    (changed(base="missing.yaml"), "no such file"),
    (changed(plugins=["missing_plugin.py"]), "missing_plugin.py: no such file"),
    (changed(settings={"rounds": 0}), "settings: rounds: got 0; expected an integer >= 1"),
    (changed(settings={"data.name": "mnits"}), "no data named 'mnits'"),
    (changed(settings=[1]), "settings"),
    (changed(seeds="0-"), "seeds: '0-' is not a seed"),
    (changed(seeds=[0, 0]), "seeds: expected one or more different seeds"),
    (changed(seeds=[-1]), "seeds"),
    (changed(seeds=[0, 2**63]), "different seeds from 0 to"),
    (changed(seeds="4-1"), "is not a range of seeds; did you mean 1-4?"),
    (changed(seeds="0-1000000"), "'0-1000000' is 1,000,001 seeds; at most 10,000"),
    (changed(claims=["FedAvg.accuracy_mean > 1e999"]), "1e999 is too large"),
    (changed(claims=["FedAvg.accuracy_mean ~ 3 +- 1e400"]), "1e400 is too large"),
    (changed(seeds=True), "is not a seed"),
    (changed(grid={"alpha": [1]}), "grid.alpha: is not a setting"),
    (changed(grid={"training.lr": []}), "grid.training.lr: expected a list of values"),
    (changed(grid={"training.lr": [0.1, 0.1]}), "a value is listed twice"),
    (changed(grid={"training.lr": {"low": 0.1}}), "grid.training.lr.low: expected settings"),
    (changed(report={"by": ["lr"]}), "report.by: the grid has no 'lr'; valid: training.lr"),
    (changed(report={"columns": ["acuracy_mean"]}), "no run has a number named 'acuracy_mean'; did you mean"),
    (changed(report={"columns": ["acc"]}), "named 'acc'; such as accuracy_mean, accuracy_worst10"),
    (changed(report={"columns": ["accuracy"]}), "named 'accuracy'; did you mean 'accuracy_mean'?"),
    (changed(report={"columns": ["ari", "ari"]}), "report: columns: ari is named twice"),
    (changed(report={"columns": [{"rounds_to": 800}]}), "{rounds_to: 800}; expected rounds_to or bytes_to"),
    (
        changed(report={"columns": [{"rounds_to": "accuracy"}]}),
        "{rounds_to: accuracy}; expected rounds_to or",
    ),
    (changed(report={"columns": ["rounds_to: accuracy"]}), "{rounds_to: accuracy}; expected rounds_to or"),
    (changed(report={"columns": [{}]}), "{}; expected rounds_to or bytes_to"),
    (changed(report={"columns": [{"rounds_to": 50, "bytes_to": 60}]}), "{rounds_to: 50, bytes_to: 60}; exp"),
    (changed(report={"columns": [{"hours_to": 50}]}), "{hours_to: 50}; expected rounds_to or bytes_to"),
    (changed(sizes={"smoke": {"only": ["PACLF"]}}), "sizes.smoke.only: no method 'PACLF'; did you mean"),
    (changed(sizes={"s": {"methods": {"PACLF": {}}}}), "sizes.s.methods: no method 'PACLF'; did you mean"),
    (changed(sizes={"s": {"methods": ["PACFL"]}}), "sizes.s.methods: "),
    (changed(sizes={"s": {"methods": {"PACFL": {"seed": 1}}}}), "sizes.s.methods.PACFL.seed: all"),
    (
        changed(sizes={"s": {"methods": {"PACFL": {"data": "digits"}}}}),
        "sizes.s.methods.PACFL.data: the data",
    ),
    (changed(sizes={"s": {"methods": {"PACFL": "pacfl"}}}), "sizes.s.methods.PACFL: "),
    (changed(claims=["FedAvg.ari * 2 > 1"]), "columns are multiplied by numbers only, which stand first"),
    (changed(report={"reference": "FedAgv"}), "report.reference: no method 'FedAgv'; did you mean 'FedAvg'?"),
    (changed(tune={"on": "test", "training.lr": [1]}), "tune.on: got 'test'"),
    (changed(tune={"on": "validation"}), "names no setting to choose"),
    (changed(tune={"training.lr": [1]}), "training.lr is also in settings or grid"),
    (changed(tune={"training.momentum": [0.5], "seeds": [0]}), "tune.seeds: 0 is one of the study's seeds"),
    (changed(tune={"training.momentum": 0.5}), "expected a list of values, or a distribution"),
    (changed(tune={"training.momentum": {"normal": [0, 1]}}), "expected one of uniform"),
    (changed(tune={"training.momentum": {"uniform": [1, 0]}}), "expected low < high"),
    (changed(tune={"training.momentum": {"loguniform": [0, 1]}}), "expected 0 < low < high"),
    (
        changed(tune={"training.momentum": {"uniform": [0, 1]}}),
        "tune: samples: a search draws that many points; set it to 2 or more",
    ),
    (
        changed(tune={"training.momentum": [0.1, 0.2], "scheduler": "asha"}),
        "tune: samples: a search draws that many points; set it to 2 or more",
    ),
    (changed(tune={"training.momentun": [0.5]}), "training.momentun"),
    (changed(tune={"training.momentum": [0.5], "metric": "acuracy_mean"}), "tune.metric: no run has"),
    (
        changed(tune={"training.momentum": [0.5], "metric": "loss_mean"}),
        "lower values of loss_mean are better",
    ),
    (changed(tune={"partition.clients": [5, 6]}), "the data are the same for all methods"),
    (changed(tune={"training.momentum": [0.5], "settings": {"seed": 3}}), "set tune.seeds instead"),
    (changed(tune={"training.momentum": {"uniform": [0, 1]}, "samples": 10**9}), "tune.samples: got"),
    (changed(tune={"training.momentum": [i / 9999 for i in range(9999)]}), "runs that choose settings"),
    (changed(grid={"training.momentum": [i / 10001 for i in range(10001)]}, report={}), "10,001 points of"),
    (changed(seeds=["200-10199"]), "60,000 runs are too many; at most 10,000"),
    (changed(methods__FedAvg={"algorithm": "fedavg", "training.lr": 0.5}), "training.lr is an axis"),
    (changed(grid={"training.lr": [0.1], "speed": {"high": {"training": {"lr": 1}}}}), "is an axis"),
    (changed(methods__FedAvg={"algorithm": "fedavg", "seed": 3}), "methods.FedAvg.seed: all methods"),
    (changed(settings={"seed": 3}), "settings.seed: set the study's seeds"),
    (changed(settings={"algorithm": "pacfl"}), "settings.algorithm: set the algorithm of each method"),
    (changed(grid={"who": {"x": {"algorithm": {"name": "pacfl"}}}}), "set the algorithm of each method"),
    (changed(grid={"state": {"x": {"rounds": 3}}}), "tables have a column of this name"),
    (changed(grid={"who": {"a\nb": {"rounds": 3}}}), "cannot name a point"),
    (changed(grid={"training.lr": [datetime.date(2020, 1, 1)]}), "expected text, numbers"),
    (changed(settings={"training.momentum": datetime.date(2020, 1, 1)}), "got 2020-01-01 (date)"),
    (
        changed(settings={"training.momentum": 0.1, "training": {"momentum": 0.2}}),
        "settings.training.momentum: is given twice, dotted and nested",
    ),
    (
        changed(methods={"A": {"algorithm": "pacfl", "clustering": {"beta": 1}, "clustering.beta": 2}}),
        "methods.A.clustering.beta: is given twice",
    ),
    (
        changed(sizes={"x": {"settings": {"training": {"lr": 1}, "training.lr": 2}}}),
        "sizes.x.settings.training.lr: is given twice",
    ),
    (changed(sizes={"s": {"report": {"by": ["nope"]}}}), "sizes.s: report.by: the grid has no 'nope'"),
    (
        changed(sizes={"s": {"expected": [{"source": "x", "figures": {"Z": 1}}]}}),
        "sizes.s: expected: no method 'Z'",
    ),
    (
        changed(methods={False: {}}),
        "methods: the key false is not text; YAML reads on, yes, off and no as true and false",
    ),
    (changed(tune={"training.momentum": [0.1], "settings": {"data": "mnist"}}), "the data are those of the"),
    (changed(tune={"training.momentum": [0.1, 0.2], "samples": 5}), "samples: has no effect"),
    (changed(tune={"output.report": [True, False]}), "tune: its settings change no run of any method"),
    (
        changed(tune={"training.epochs": {"uniform": [1, 3]}, "samples": 2}),
        "tune: training.epochs: is a whole number for FedAvg, but others would be drawn, such as 2.24",
    ),
    (
        changed(claims=[{"claim": "PACFL.ari > 0", "at": {"training.lr": 0.1, "lr": 0.3}}]),
        "at: names training.lr twice",
    ),
    (
        changed(claims=["PACFL.local_accuracy_mean > 3"], methods__FedAvg={"evaluation.local": True}),
        "no run of PACFL measures local_accuracy_mean; add to settings, or to methods.PACFL: evaluation",
    ),
    (
        changed(report={"columns": ["rmse_mean"]}),
        "no run measures rmse_mean, since the loss is cross_entropy",
    ),
    (
        changed(claims=["FedAvg.pruned_weights_mean > 3"]),
        "no run of FedAvg measures pruned_weights_mean; only with local.name=sub_fedavg",
    ),
    (
        changed(report={"columns": ["pruned_channels_mean"]}),
        "no run measures pruned_channels_mean; only with local.name=sub_fedavg",
    ),
    (
        changed(claims=["PACFL.fallbacks > 3"]),
        "no run of PACFL measures fallbacks; add to settings, or to methods.PACFL: a method that may test",
    ),
    (
        changed(report={"columns": ["newcomers"]}),
        "no run measures newcomers; add to the study's settings: ",
    ),
    (
        changed(
            claims=["PACFL.accuracy_mean_best_validation > 3"],
            settings={"partition.validation": 0.1, "evaluation.validation": False},
            tune=...,
        ),
        "no run of PACFL measures accuracy_mean_best_validation; add to settings, or to methods.PACFL: "
        "evaluation.validation=true",
    ),
    (changed(methods={" FedAvg": {}}), "spaces at either end"),
    (changed(methods={"x" * 1000: {}}), "is too long for a label"),
    (changed(name=".."), "name: '..' cannot be"),
    (changed(name="x" * 81), "at most 80 letters"),
    (changed(sizes={"../x": {}}), "sizes: '../x' cannot be the name of a size"),
    (changed(expected=[{"source": "x", "figures": {"FedAvg": {0.7: 1}}}]), "the grid has no point '0.7'"),
    (changed(claims=["PACFL.accuracy_mean"]), "it compares nothing"),
    (changed(claims=["PACLF.accuracy_mean > 3"]), "no method 'PACLF'; did you mean 'PACFL'?"),
    (changed(claims=["PACFL.accuracy > 3"]), "no run has a number named 'accuracy'"),
    (changed(claims=["PACFL.accuracy_mean ~ 3"]), "~ takes a tolerance"),
    (changed(claims=["PACFL.accuracy_mean ~ 3 +- 0"]), "its tolerance is 0; such as ~ 77.3 +- 3"),
    (changed(claims=["7 < PACFL.accuracy_mean < 80"]), "a claim has one comparison: write two claims"),
    (
        changed(claims=["PACFL.accuracy_mean - PACFL.bytes_up > 3"]),
        "compares accuracy_mean (%) and bytes_up (bytes); give the numbers of one a factor",
    ),
    (
        changed(claims=["PACFL.rounds_to_50 > FedAvg.bytes_up"]),
        "compares rounds_to_50 (rounds) and bytes_up (bytes)",
    ),
    (
        changed(claims=["PACFL.rounds_to > 3"]),
        "named 'rounds_to'; name an accuracy in %, such as rounds_to_80",
    ),
    (
        changed(expected=[{"source": "x", "figures": {"FedAvg": True}}]),
        "the figure of FedAvg is true; expected",
    ),
    (
        changed(expected=[{"source": "x", "figures": {"FedAvg": 3}, "within": True}]),
        "expected.0.within: got true; expected a number > 0",
    ),
    (
        changed(expected=[{"source": "x", "figures": {"FedAvg": 3}, "column": {"rounds": 80}}]),
        "expected.0.column: got {rounds: 80}; expected rounds_to or bytes_to",
    ),
    (changed(claims=["PACFL.accuracy_mean >> 3"]), "'>> 3' is not a comparison; one of > < >= <= ~"),
    (changed(claims=["PACFL.accuracy_mean > = 3"]), "'> = 3' is not a comparison; one of > < >= <= ~"),
    (changed(claims=["PACFL.accuracy_mean > 3 4"]), "'4' is unexpected"),
    (changed(claims=["PACFL.accuracy_mean - > 3"]), "no method '> 3'"),
    (changed(claims=["3 > 2"]), "it names no method"),
    (changed(claims=["PACFL[lr=7].accuracy_mean > 3"]), "training.lr has no point '7'; valid: 0.1, 0.3"),
    (
        changed(grid={"algorithm.power": [0, 1]}, claims=[]),
        "grid.algorithm.power: a setting of an algorithm cannot be an axis",
    ),
    (changed(claims=["PACFL[mu=7].accuracy_mean > 3"]), "the grid has no axis 'mu'"),
    (changed(claims=["PACFL[lr=0.1.accuracy_mean > 3"]), "a bracket is not closed"),
    (changed(claims=[{"claim": "PACFL.ari > 0", "at": {"training.lr": 9}}]), "has no point '9'"),
    (changed(claims=[{"claim": "PACFL.ari > 0", "form": 1}]), "claims.0.form: no such setting"),
    (changed(expected=[{"figures": {"FedAvg": 1}}]), "expected.0.source: missing"),
    (
        changed(expected=[{"source": "x", "figures": {}}]),
        "expected.0.figures: is empty; expected at least one",
    ),
    (changed(tune={"training.lr": [0.1, 0.10]}), "tune: training.lr: a value is listed twice"),
    (changed(expected=[{"source": "x", "figures": {"FedAgv": 1}}]), "no method 'FedAgv'"),
    (changed(expected=[{"source": "x", "figures": {"FedAvg": 1}, "column": "acc"}]), "named 'acc'"),
    (
        changed(
            grid={"training.lr": [0.1, 1], "partition.alpha": [0.1, 0.3]},
            expected=[{"source": "x", "figures": {"FedAvg": {0.1: 77}}}],
        ),
        "'0.1' is a point of training.lr and partition.alpha; name a point of every axis",
    ),
    (
        changed(tune={"training.momentum": [0.5], "metric": "rmse_mean"}),
        "lower values of rmse_mean are better",
    ),
    (
        changed(tune={"training.momentum": [0.5], "metric": "r2_mean"}),
        "runs of FedAvg measure no r2_mean: its loss is cross_entropy; choose accuracy_mean",
    ),
    (
        changed(tune={"training.momentum": [0.5]}, settings={"evaluation.validation": False}),
        "FedAvg has evaluation.validation=false",
    ),
    (
        changed(settings={"algorithm.clusterz": 3}),
        "settings: algorithm.clusterz: no method has such a setting",
    ),
    (
        changed(
            grid={"model.name": ["mlp", "linear"]}, methods__FedAvg={"model": {"name": "linear"}}, report={}
        ),
        "methods.FedAvg: model is an axis of the grid",
    ),
    (
        changed(settings={"model.name": "mlp"}, tune={"model.name": ["mlp", "linear"]}),
        "tune: model is also in settings or grid",
    ),
    (changed(methods__FedAvg={"data": {"seed": 1}}), "methods.FedAvg.data.seed: the data are the same"),
    (changed(methods__FedAvg={"events": []}), "methods.FedAvg.events: the data are the same"),
    (
        changed(grid={"k": {"two": {"algorithm.clusters": 2}}}),
        "grid.k: algorithm.clusters: a setting of an algorithm cannot be an axis",
    ),
    (
        changed(tune={"training.momentum": [0.5], "settings": {"training": {"momentum": 0.1}}}),
        "settings.training.momentum: is chosen by tune; leave it out here",
    ),
    (
        changed(
            grid={"pace": {"a": {"training": {"momentum": 0.5}}}},
            tune={"training.momentum": [0.1]},
            report={},
        ),
        "training.momentum is also in settings or grid",
    ),
    (
        changed(settings={"training": {"momentum": 0.5}}, tune={"training.momentum": [0.1]}),
        "training.momentum is also in settings or grid",
    ),
    (
        changed(
            grid={"a": {"x": {"training.epochs": 1}}, "b": {"y": {"training": {"epochs": 2}}}}, report={}
        ),
        "training.epochs is also set by the axis a; leave it out",
    ),
    (
        changed(grid={"pace": {n: {"training.lr": 0.1} for n in "ab"}}, report={}, claims=[]),
        "grid.pace: a and b are the same for all methods",
    ),
    (
        changed(
            grid={"clustering.max_flags": [1, 2]},
            methods={"A": {"algorithm": "fedavg"}},
            report={},
            claims=[],
            expected=[],
            sizes={},
        ),
        "grid.clustering.max_flags: 1 and 2 are the same for all methods",
    ),
    (
        changed(grid={"execution.actors": [1, 2]}, report={}, claims=[]),
        "grid.execution.actors: 1 and 2 are the same for all methods; leave one out: its settings change no",
    ),
    (changed(only=["FedAgv"]), "only: no method 'FedAgv'; did you mean 'FedAvg'?"),
    (
        changed(methods__FedAvg={"algorithm": "fedavg", "partition": {"name": "iid"}}),
        "methods.FedAvg.partition: the data are the same for all methods; vary them in grid",
    ),
]


def test_a_long_claim_is_refused_in_a_short_line(tmp_path: Path) -> None:
    with pytest.raises(RayflError) as raised:
        prepare(take(changed(claims=["x" * 10_000]), tmp_path), check_data=False)
    assert len(str(raised.value)) < 500


def test_points_of_the_grid_may_be_numbers_in_figures(tmp_path: Path) -> None:
    figures = {"FedAvg": {0.1: 77.3, 0.3: 80}}
    expected = [{"source": "x", "figures": figures, "within": 1}]
    prepared = prepare(take(changed(expected=expected, claims=[]), tmp_path), check_data=False)
    assert [claim.at for claim, _ in prepared.statements] == [{"training.lr": "0.1"}, {"training.lr": "0.3"}]


def test_a_size_may_have_fewer_points_than_the_figures(tmp_path: Path) -> None:
    sizes = {"one": {"grid": {"training.lr": [0.1]}}}
    expected = [{"source": "x", "figures": {"FedAvg": {0.1: 77.3, 0.3: 80}}}]
    study = take(changed(expected=expected, sizes=sizes, claims=[]), tmp_path, "one")
    assert list(study.axes["training.lr"]) == ["0.1"]
    none = take(
        changed(expected=[{**expected[0], "figures": {"FedAvg": {0.3: 80}}}], sizes=sizes), tmp_path, "one"
    )
    prepare(take(parse(dump(none.content())), tmp_path), check_data=False)  # its copy has no figures left
    sizes["one"]["expected"] = expected  # the same, as the size's own
    study = take(changed(sizes=sizes, claims=[]), tmp_path, "one")
    copy = take(parse(dump(study.content())), tmp_path)
    assert copy.expected[0].figures == {"FedAvg": {"0.1": 77.3}}
    sizes["one"]["expected"] = [{**expected[0], "figures": {"FedAvg": {0.2: 80}}}]
    with pytest.raises(ConfigError, match=r"expected: FedAvg: the grid has no point '0.2'"):
        take(changed(sizes=sizes, claims=[]), tmp_path, "one")
    sizes["one"]["expected"] = [{**expected[0], "figures": {"FedAvg": {0.3: 80}}}]
    grid = {"training.lr": [0.1, 0.3], "training.momentum": [0.3, 0.5]}
    with pytest.raises(ConfigError, match=r"'0.3' is a point of training.lr and training.momentum"):
        take(changed(grid=grid, sizes=sizes, expected=[], claims=[], report={}), tmp_path, "one")


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (
            {"FedAvg": 910},
            "expected: FedAvg: 910 is no percentage, which accuracy_mean is; expected 0 to 100",
        ),
        ({"FedAvg": {0.1: 77.3, 0.3: -1}}, "expected: FedAvg: -1 is no percentage"),
        ({"FedAvg": {0.1: 0.773, 0.3: 0.81}}, "expected: all figures of 'x' are below 1"),
    ],
)
def test_figures_that_are_no_percentages_are_refused(
    figures: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(take(changed(expected=[{"source": "x", "figures": figures}]), tmp_path), check_data=False)
    assert text in str(raised.value)
    losses = [{"source": "x", "column": "loss_mean", "figures": {"FedAvg": {0.1: 0.7, 0.3: 0.6}}}]
    prepare(take(changed(expected=losses), tmp_path), check_data=False)
    one = [{"source": "x", "column": "finetuned_accuracy_mean", "figures": {"FedAvg": 0.5}}]  # may be right
    settings = {"evaluation.finetune_epochs": 1}
    prepare(take(changed(expected=one, settings=settings), tmp_path), check_data=False)
    tuned = [{**one[0], "figures": {"FedAvg": {0.1: 0.7, 0.3: 0.6}}}]
    with pytest.raises(ConfigError, match="are below 1, but finetuned_accuracy_mean is in percent"):
        prepare(take(changed(expected=tuned, settings=settings), tmp_path), check_data=False)


def test_losses_determine_what_a_table_may_name(tmp_path: Path) -> None:
    values = changed(
        methods={"A": {}}, settings={"loss": "mse"}, tune=..., expected=..., claims=..., sizes=...
    )
    prepare(take({**values, "report": {}}, tmp_path), check_data=False)  # the default columns
    prepare(take({**values, "report": {"columns": ["rmse_mean", "loss_mean"]}}, tmp_path), check_data=False)
    for column in ("accuracy_mean", "rounds_to_80", "validation_accuracy_worst10"):
        given = {**values, "report": {"columns": [column]}, "settings": {"loss": "mse"}}
        with pytest.raises(
            ConfigError, match=f"no run measures {column}, since the loss is mse; such as rmse"
        ):
            prepare(take(given, tmp_path), check_data=False)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "values",
    [
        {"claims": [{"claim": "FedAvg.accuracy_mean > 10", "source": source} for source in "AB"]},
        {"claims": "FedAvg.accuracy_mean > 10"},
        {"claims": {"claim": "FedAvg.accuracy_mean > 10", "source": "A"}},
        {"claims": [], "sizes": {"s": {"claims": "FedAvg.accuracy_mean > 10"}}},
        {"claims": ["FedAvg.accuracy_mean ~ 77.3 +- 3"]},  # also an expected figure
        {"claims": ["FedAvg[lr=0.1].ari >= FedAvg.ari"]},  # as good as anywhere
        {"claims": [{"claim": "FedAvg[lr=0.1].ari > 0", "at": {"lr": 0.1}}]},  # the same twice
        {"claims": ["0.01 * FedAvg.accuracy_mean > 0.9", "FedAvg.accuracy_worst10 < 0.5"]},
        {"claims": [], "grid": {"training.lr": {0.1: {"training.lr": 0.1}, 1: {"training.lr": 1}}}},
    ],
)
def test_what_looks_like_a_mistake_but_is_none(values: dict[str, Any], tmp_path: Path) -> None:
    values = {**changed(report={}), **values}
    assert prepare(take(values, tmp_path), check_data=False).runs


@pytest.mark.parametrize(("values", "text"), BAD, ids=[text for _, text in BAD])
def test_a_bad_study_is_refused_in_a_line(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(RayflError) as raised:
        prepare(take(values, tmp_path), check_data=False)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"size": "smok"}, "size: the study has no size 'smok'; did you mean 'smoke'?"),
        ({"only": ["PACFLL"]}, "only: no method 'PACFLL'; did you mean 'PACFL'?"),
        ({"seeds": "x"}, "seeds: 'x' is not a seed"),
        ({"settings": ["rounds"]}, "rounds: not an override"),
        ({"settings": ["seed=3"]}, "settings.seed: set the study's seeds"),
        ({"settings": ["training.lr=3"]}, "training.lr: is an axis of the grid"),
        ({"settings": ["training.momentum=[1"]}, "training.momentum: '[1' is not a YAML value"),
        ({"settings": ["training={lr: 3}"]}, "training.lr: is an axis of the grid"),
        ({"settings": ["training.batch_size=3"]}, "training.batch_size: is chosen by tune"),
        ({"settings": ["partition.clients=3", "partition={name: iid}"]}, "partition.clients: has no effect"),
        (
            {"settings": ["algorithm.clusterz=3"]},
            "settings: algorithm.clusterz: no method has such a setting",
        ),
        ({"settings": 3}, 'settings: got an int; expected a list of texts, such as ["rounds=5"]'),
        ({"only": None}, "only: got nothing (None); expected a list of texts"),
        ({"only": ["FedAvg", 3]}, "only: got a list; expected a list of texts"),
        ({"size": 1}, "size: got an int; expected a size of the study"),
        (
            {"size": "slow", "sizes": {"slow": {"settings": {"training": {"lr": 0.01}}}}},
            "sizes.slow.settings.training.lr: has no effect, since it is set by the axis training.lr",
        ),
        (
            {"size": "x", "sizes": {"x": {"settings": {"rounds": 1}, "grid": {"training.lr": 0.1}}}},
            "grid.training.lr: expected a list of values",
        ),
        ({"settings": ["rounds=2026-02-30"]}, "rounds: '2026-02-30' is not a YAML value"),
    ],
)
def test_bad_options_are_refused_in_a_line(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    values = {key: arguments.pop(key) for key in ("sizes",) if key in arguments}
    with pytest.raises(RayflError) as raised:
        prepare(take(parse(GOOD) | values, tmp_path, **arguments), check_data=False)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "study: is empty"),
        ("[1, 2]", "study: is a list"),
        ("a: [1", "not YAML"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_study_at_all(content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RayflError) as raised:
        read(path)
    assert text in str(raised.value)


def test_a_search_by_what_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.study.preparation.find_spec", lambda name: None)
    tune = {"training.momentum": {"uniform": [0, 0.9]}, "search": "optuna", "samples": 2}
    with pytest.raises(RayflError, match=r"optuna is not installed; pip install 'rayfl\[optuna\]'"):
        prepare(take(changed(tune=tune), tmp_path), check_data=False)


def test_only_some_methods_keep_the_claims_about_them(tmp_path: Path) -> None:
    study = take(parse(GOOD), tmp_path, only=["PACFL, few"])
    assert [claim.claim for claim in study.claims] == ["PACFL, few[lr=0.1].accuracy_mean > 5"]
    assert study.expected == ()


def test_values_that_differ_late_are_two_points() -> None:
    assert list(points_of("partition.alpha", [0.1, 0.30000001, 0.30000002, 1e-05])) == [
        "0.1",
        "0.30000001",
        "0.30000002",
        "1e-05",
    ]
