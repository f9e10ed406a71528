"""Files and overrides: how they are read, and what is refused."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rayfl.config import Config, load, presets, with_overrides
from rayfl.config.changes import changes
from rayfl.config.text import parse
from rayfl.config.variants import variant
from rayfl.errors import ArgumentError, ConfigError
from rayfl.models import MODELS
from tests.config.common import refusal

# --- files ---------------------------------------------------------------------------------------------


def test_yaml_errors_give_the_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rounds: 3\ntraining:\n  lr: [0.1\nseed: 1\n")
    assert refusal(path).startswith(f"{path}:4:5: not YAML: ")
    path.write_text("rounds: 3\n\ttraining: 1\n")
    assert refusal(path).startswith(f"{path}:2:1: not YAML: found character '\\t'")


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training:\n  lr: 0.1\n  epochs: 1\n  lr: 0.2\n")
    assert refusal(path) == f"{path}:4:3: not YAML: 'lr' is given twice"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{on: 1, yes: 2}", "'yes' is the same key as 'on'"),
        ("{1: 2, 0x1: 3}", "'0x1' is the same key as '1'"),
    ],
)
def test_keys_that_are_equal_to_yaml_are_refused(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem):
        parse(text)
    assert parse("{1: 2, '1': 3}") == {1: 2, "1": 3}


def test_aliases_make_no_small_file_huge(tmp_path):
    """A billion values from twelve lines, in a setting, in merged maps, and a value that holds itself."""
    lists = ["a0: &a0 x"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    merges = ["a0: &a0 {x: 1}"]
    merges += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    path = tmp_path / "own.yaml"
    for lines in (lists, merges):
        path.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=r"own.yaml:1:1: not YAML: aliases repeat .* at most 100,000"):
            load(path)
    path.write_text("training: &a {lr: *a}")
    with pytest.raises(ConfigError, match=r"own.yaml:1:11: not YAML: it contains itself"):
        load(path)


def test_integers_are_bounded_even_where_a_setting_is_not():
    line = "rounds: an integer of 87 bits is too large; expected at most 2147483647"
    with pytest.raises(ConfigError, match=line):
        load({}, [f"rounds={10**26}"])
    with pytest.raises(ConfigError, match=r"model.hidden: 3000000000 is too large"):
        load({}, ["model.hidden=[10, 3000000000]"])
    assert load({}, [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    for value in ("0x" + "f" * 9999, f"[0x{'f' * 9999}]"):
        with pytest.raises(ConfigError, match="seed: got an integer of thousands of digits"):
            load({}, [f"seed={value}"])


def test_paths_are_expanded_and_can_be_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({}, ["output.root=~/runs"]).output.root == tmp_path / "runs"
    assert load({}, ["data.name=cifar10", "data.root='~'"]).data.root == tmp_path
    (tmp_path / "own.yaml").write_text("rounds: 3")
    assert load("~/own.yaml").rounds == 3
    with pytest.raises(ConfigError, match=r"output.root: '\\x00' cannot be a path"):
        load({}, ['output.root="\\0"'])
    for long in ("x" * 256, "x/" * 3000):
        with pytest.raises(ConfigError, match=r"output.root: 'x.*'... is too long for a path"):
            load({}, [f"output.root={long}"])


def test_merge_keys_still_work(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training: &t {lr: 0.5}\nevaluation: {every: 2}\n")
    assert load(path).training.lr == 0.5
    path.write_text("training:\n  <<: {lr: 0.5, epochs: 2}\n  <<: {momentum: 0.1}\n  lr: 0.25\n")
    assert load(path).training.lr == 0.25


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\x00", "not YAML: "),
        (b"- 1\n- 2\n", "holds a list; expected 'section: settings' lines"),
        (b"just text\n", "holds a str; "),
        (b"seed: 2020-13-45\n", "not YAML: "),
        (b"seed: " + b"[" * 20_000, "not YAML: "),
        (b"seed: !!python/object/apply:os.getpid []\n", "not YAML: "),
    ],
)
def test_what_is_no_config_file(tmp_path, content, expected):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    line = refusal(path)
    assert line.startswith(str(path))
    assert expected in line


def test_missing_files_and_presets(tmp_path):
    assert refusal(tmp_path / "no.yaml") == (
        f"{tmp_path / 'no.yaml'}: no such file; name a preset or an existing file"
    )
    assert refusal("digits-dem") == "digits-dem: no such preset; did you mean 'digits-demo'?"
    assert refusal("zzz").endswith("; valid: " + ", ".join(presets()))
    assert "no such file" in refusal(tmp_path)  # a folder
    assert refusal("x" * 5000).startswith("xxx")  # longer than a file name may be


def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# nothing yet\n")
    assert load(path) == Config()
    path.write_text("training:\n  # lr: 0.1\nalgorithm: mt_hfl\nclustering:\nhierarchy:\n")
    assert load(path) == load({"algorithm": "mt_hfl"})


# --- overrides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["training", "training.lr", "=3", "rounds: 3", ".lr=3", "training..lr=3", "training.=3", ""]
)
def test_what_is_no_override(text):
    assert refusal({}, text) == f"{text}: not an override; expected key=value, e.g. training.lr=0.1"


@pytest.mark.parametrize("value", ["[1", "{a", "'x", "!!python/object:x 3", "2020-13-45"])
def test_a_value_that_is_not_yaml(value):
    assert refusal({}, f"training.lr={value}").startswith(f"training.lr: {value!r} is not a YAML value; ")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E3", 1e3), ("-.5e-1", -0.05), ("1.5e+2", 150), ("2", 2)],
)
def test_numbers_as_people_write_them(text, value, tmp_path):
    assert with_overrides({}, [f"a.b={text}", f"c=[{text}, x]"]) == {"a": {"b": value}, "c": [value, "x"]}
    (tmp_path / "a.yaml").write_text(f"training: {{lr: {text}}}\n")
    if value > 0:
        assert load(tmp_path / "a.yaml").training.lr == value


def test_numbers_to_base_60_are_text():
    """YAML 1.1 reads 2:4 as 124: somebody who meant 2-4 actors would wait for 124."""
    assert with_overrides({}, ["a=2:4", "b=[1:30.5]"]) == {"a": "2:4", "b": ["1:30.5"]}
    assert "2:4" in refusal({}, "execution.actors=2:4")
    named = load({}, ["name=x", "output.root=1:30"])
    assert load(parse(named.to_yaml())) == named


def test_quoted_text_stays_text():
    assert load({}, ["name='1e5'"]).name == "1e5"
    assert load({}, ["name='7'"]).name == "7"
    assert load({}, ["rounds=1e1"]).rounds == 10


def test_nested_overrides_and_lists():
    config = load({}, ["model.hidden=[8,4]", "execution.actors=2", "output.root=a/b", "training.lr=0.5"])
    assert config.model.hidden == (8, 4)
    assert config.execution.actors == 2
    assert config.output.root == Path("a/b")
    assert load(config, ["training.lr=0.25"]).training.lr == 0.25
    assert load({}, ["rounds=1", "rounds=2"]).rounds == 2  # the last one counts


LEAVES_AND_JOINS = {
    "data": "digits",
    "rounds": 5,
    "events": [{"name": "leave", "round": 2, "clients": [1]}, {"name": "join", "round": 3, "clients": [1]}],
}


def test_an_item_of_a_list_is_set_by_its_place():
    before = load(LEAVES_AND_JOINS)
    leave, join = load(before, ["events.1.round=4"]).events
    assert (leave, join.round) == (before.events[0], 4)
    assert load(LEAVES_AND_JOINS, ["events.0={name: join, round: 1, clients: [2]}"]).events[0].clients == (2,)
    drift = ["events.0.name=drift", "events.0.kind=group", "events.0.round=1", "events.0.fraction=0.5"]
    assert load(LEAVES_AND_JOINS, drift).events[0].clients is None  # said of the leave that was there
    assert load({"model": {"name": "mlp", "hidden": (8, 4)}}, ["model.hidden.1=2"]).model.hidden == (8, 2)
    assert before == load(LEAVES_AND_JOINS)
    early = load(before, ["events.0.round=1"])
    assert early.events[0].round == 1
    assert changes(early, before, ["events.0.round=1"]) == ("round=1",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("events.2.round=3", "events is a list of 2 items; its items are events.0 to events.1"),
        ("events.last.round=3", "events is a list of 2 items"),
        ("events.round=3", "events.round: events is a list of 2 items"),
        ("events.-1.round=3", "events is a list of 2 items"),
        ("events.0.rond=3", "did you mean 'round'?"),
    ],
)
def test_a_place_that_a_list_does_not_have(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(LEAVES_AND_JOINS, [override])


def test_an_override_drops_the_setting_that_it_excludes():
    """A threshold gives way to a number of clusters, and the other way round; both at once are refused."""
    source = {"algorithm": "pacfl", "clustering": {"threshold": 6}}
    assert load(source, ["clustering.n_clusters=2"]).clustering.threshold is None
    assert (
        load({**source, "clustering": {"n_clusters": 2}}, ["clustering.threshold=6"]).clustering.n_clusters
        is None
    )
    assert load(source, ["clustering.n_clusters=null"]).clustering.threshold == 6
    with pytest.raises(ConfigError, match="both given"):
        load(source, ["clustering.n_clusters=2", "clustering.threshold=6"])


def test_overrides_leave_the_source_alone():
    source = {"training": {"lr": 0.1}, "model": {"name": "mlp", "hidden": [3]}}
    before = yaml.safe_dump(source)
    overrides = ["training.lr=0.5", "model.hidden=[9]", "algorithm=mt_hfl", "model.name=mlp"]
    load(source, overrides)
    with_overrides(source, overrides)
    assert yaml.safe_dump(source) == before


def test_naming_a_part_anew_drops_the_old_settings():
    source = {"model": {"name": "mlp", "hidden": [3]}}
    assert load(source, ["model=linear"]).model == MODELS["linear"]()
    assert load(source, ["model.name=linear"]).model == MODELS["linear"]()
    assert load(source, ["model={name: mlp}"]).model == MODELS["mlp"]()
    # the same name again is no change
    assert load(source, ["model=mlp"]).model.hidden == (3,)
    assert load(source, ["model.name=mlp"]).model.hidden == (3,)


def test_the_short_form_is_the_long_one():
    short = load({"algorithm": "solo", "model": "linear", "data": "digits", "partition": "iid"})
    long = load(
        {k: {"name": v} for k, v in {"algorithm": "solo", "model": "linear", "data": "digits"}.items()}
    )
    assert short == load(long, ["partition=iid"])
    assert load({"algorithm": "solo"}, ["algorithm.sampled=true"]).algorithm.sampled


def test_settings_without_a_name_belong_to_the_default_part():
    source = {"algorithm": "pacfl", "partition": {"clients": 7}}
    config = load(source, ["clustering.signature.p=5", "model.hidden=[5]"])
    assert (config.partition.name, config.partition.clients) == ("label_skew", 7)
    assert (config.clustering.signature.name, config.clustering.signature.p) == ("subspace", 5)
    assert (config.model.name, config.model.hidden) == ("mlp", (5,))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["partition.clients=6", "partition=iid"], {"name": "iid", "clients": 6}),
        (["partition=iid", "partition.clients=6"], {"name": "iid", "clients": 6}),
        (["partition.clients=6", "partition='iid'"], {"name": "iid", "clients": 6}),
        (
            ["partition.clients=6", "partition.name=dirichlet", "partition.alpha=0.1"],
            {"name": "dirichlet", "clients": 6, "alpha": 0.1},
        ),
        # Of two names the last one counts.
        (["partition=iid", "partition=shards"], {"name": "shards", "clients": 100}),
        (["partition=iid", "partition.clients=9", "partition=iid"], {"name": "iid", "clients": 9}),
        (["partition={name: iid}", "partition.clients=9", "partition=iid"], {"name": "iid", "clients": 9}),
        # A whole section is meant as it stands.
        (["partition.clients=6", "partition={name: iid, clients: 7}"], {"name": "iid", "clients": 7}),
    ],
)
def test_what_is_said_of_a_part_holds_for_the_part_that_is_named(
    overrides: list[str], expected: dict[str, Any]
) -> None:
    """In whichever order they stand; of a comparison's other methods too."""
    for config in (load("digits-demo", overrides), variant("digits-demo", overrides, "fedavg")):
        assert {name: getattr(config.partition, name) for name in expected} == expected


def test_a_setting_that_a_later_section_replaces_is_refused() -> None:
    """It would have no effect."""
    for section in ("{}", "{name: iid}", "{name: label_skew, rho: 0.5}"):
        with pytest.raises(
            ConfigError, match=r"^partition\.clients: has no effect, since partition=\{"
        ) as caught:
            load("digits-demo", ["partition.clients=6", f"partition={section}"])
        assert "\n" not in str(caught.value)
    config = load("digits-demo", ["partition={name: iid}", "partition.clients=6"])
    assert (config.partition.name, config.partition.clients) == ("iid", 6)
    nested = load("pacfl-fmnist", ["clustering.signature.p=4", "clustering.signature={name: subspace, p: 5}"])
    assert nested.clustering.signature.p == 5


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["partition={name: iid, clients: 7}", "partition={clients: 6}"], "partition=iid"),
        (["partition=iid", "partition={clients: 7}"], "partition=iid"),
        (["clustering={signature: {p: 5}}", "clustering={signature: {k: 1}}"], "clustering.signature.p"),
        (["clustering={signature: {p: 5}}", "clustering.signature={k: 1}"], "clustering.signature.p"),
        (["clustering.signature.p=5", "clustering={signature: {k: 1}}"], "clustering.signature.p"),
        (["partition={name: iid, clients: 7}", "partition=shards"], "partition.clients"),
        (["partition={clients: 7}", "partition=shards"], "partition.clients"),
        (["data={test_fraction: 0.1}", "data={normalise: none}"], "data.test_fraction"),
        (["model.name={a: 1}", "model=mlp"], "model.a"),
    ],
)
def test_a_section_that_a_later_one_replaces_is_refused(overrides: list[str], setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(setting)}: has no effect, since .* comes later"):
        load("digits-demo", overrides)


def test_a_section_may_be_given_again_whole() -> None:
    clusters = ["algorithm={name: ifca, clusters: 2}", "algorithm={name: ifca, clusters: 3}"]
    assert load("digits-demo", clusters).algorithm.clusters == 3  # type: ignore[attr-defined]
    assert load("digits-demo", [clusters[0], "algorithm=ifca"]).algorithm.clusters == 2  # type: ignore[attr-defined]
    named = load("digits-demo", ["partition={clients: 7}", "partition.name=iid"]).partition
    assert (named.name, named.clients) == ("iid", 7)
    short = [
        "algorithm=pacfl",
        "clustering={signature: {name: subspace}}",
        "clustering={signature: subspace}",
    ]
    assert load("digits-demo", short).clustering.signature.name == "subspace"


@pytest.mark.parametrize("first", ["partition=iid", "partition={name: iid}", "partition={}"])
def test_a_setting_of_a_part_whose_name_is_replaced_is_refused(first: str) -> None:
    expected = (
        r"^partition\.validation: has no effect, since partition=shards comes later and replaces the part"
    )
    with pytest.raises(ConfigError, match=expected):
        load("digits-demo", [first, "partition.validation=0.2", "partition=shards"])


def test_an_item_of_a_list_that_a_later_list_replaces_is_refused() -> None:
    events = "events=[{name: leave, round: 2, clients: [0]}]"
    with pytest.raises(ConfigError, match=r"^events\.0\.round: has no effect, since events=\[\.\.\.\] comes"):
        load("digits-demo", [events, "events.0.round=3", "events=[{name: leave, round: 1, clients: [1]}]"])
    assert load("digits-demo", [events, "events.0.round=3"]).events[0].round == 3


def test_a_setting_that_the_named_part_lacks_is_refused_wherever_it_stands() -> None:
    for overrides in (["partition.rho=0.3", "partition=iid"], ["partition=iid", "partition.rho=0.3"]):
        with pytest.raises(ConfigError, match=r"partition\.rho: no such setting in partition \(iid\)"):
            load("digits-demo", overrides)


@pytest.mark.parametrize("part", ["data", "partition", "model"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"a": (1, 2), "b": {"c": [True, None, "x"]}}, {"a": [1, 2], "b": {"c": [True, None, "x"]}}),
        ({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}, {"a": 3, "b": 0.5, "c": True}),
        ({"path": Path("/x")}, {"path": "/x"}),
        ({"a": datetime.date(2020, 1, 1)}, r"a is of type date; .* \(a date: quote it\)"),
        ({"a": [1.0, float("inf")]}, r"a\.1 is inf; config.yaml has finite numbers only"),
        ({"a": {1: 2}}, "a has the key 1; config.yaml has text only"),
        ({"a": np.arange(3)}, "a is of type ndarray"),
        ({"a": len}, "a is of type builtin_function_or_method"),
        ({"a": b"x"}, "a is of type bytes"),
    ],
)
def test_arguments_of_own_functions_are_those_that_a_resumed_run_has(
    part: str, given: dict[str, Any], kept: dict[str, Any] | str
) -> None:
    own = {"name": "module" if part == "model" else "python", "target": "mine:it", "kwargs": given}
    if isinstance(kept, str):
        with pytest.raises(ConfigError, match=rf"^{part}\.kwargs: {kept}"):
            load({part: own})
        return
    config = load({part: own})
    assert getattr(config, part).kwargs == kept
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [([{"rounds": 2}], "a dict"), ({"rounds": 2}, "a dict"), ([3], "an int"), (5, "an int")],
)
def test_overrides_are_texts(overrides: Any, kind: str) -> None:
    with pytest.raises(ArgumentError, match=rf"overrides: got {kind}; expected texts, such as \["):
        load("digits-demo", overrides)
    assert load("digits-demo", (text for text in ["rounds=2"])).rounds == 2  # type: ignore[arg-type]
