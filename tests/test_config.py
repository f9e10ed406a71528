"""Reading configurations: what is right round-trips, what is wrong is one line that helps."""

from __future__ import annotations

import string
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from rayfl.algorithms import ALGORITHMS
from rayfl.config import (
    Config,
    describe_preset,
    json_schema,
    load,
    presets,
    reload,
    variant,
    with_overrides,
)
from rayfl.config.text import parse
from rayfl.config.words import sections
from rayfl.data import DATASETS, PARTITIONS
from rayfl.errors import ConfigError
from rayfl.models import MODELS


def refusal(source: Any, *overrides: str) -> str:
    """The one line with which a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    text = str(caught.value)
    assert text.isprintable()  # one line
    return text


# --- unknown names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainin.lr=0.1", "trainin: no such setting; did you mean 'training'?"),
        ("ronds=3", "ronds: no such setting; did you mean 'rounds'?"),
        ("training.momentun=0.1", "training.momentun: no such setting in training; did you mean 'momentum'?"),
        (
            "clustering.n_cluster=3",
            "clustering.n_cluster: no such setting in clustering; did you mean 'n_clusters'?",
        ),
        ("model.hiden=[3]", "model.hiden: no such setting in model (mlp); did you mean 'hidden'?"),
        (
            "clustering.signature.per_clas=true",
            "clustering.signature.per_clas: no such setting in clustering.signature (subspace); "
            "did you mean 'per_class'?",
        ),
        (
            "partition={name: tasks, tasks: [{labels: [1], clients: 1}, {label: [2], clients: 3}]}",
            "partition.tasks.1.label: no such setting in partition.tasks.1 (and 1 more mistake); "
            "did you mean 'labels'?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(override, line):
    assert refusal({}, override) == line


def test_an_unknown_key_with_nothing_near_names_all():
    line = refusal({}, "training.zzz=1")
    assert line.endswith("valid: " + ", ".join(sorted(load({}).training.__class__.model_fields)))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("partition.alpha=0.1", "partition.alpha: no such setting in partition (label_skew); "),
        ("algorithm.sampled=true", "algorithm.sampled: no such setting in algorithm (fedavg); solo has it"),
        ("data.clusters=2", "data.clusters: no such setting in data (digits); synthetic has it"),
        (
            "clustering.signature.q=5",
            "clustering.signature.q: no such setting in clustering.signature (subspace); spectrum has it",
        ),
    ],
)
def test_a_setting_of_another_part_names_that_part(override, line):
    assert refusal({}, override).startswith(line)


def test_several_parts_may_have_the_setting():
    assert refusal({}, "partition.alpha=0.1").endswith("difficulty, dirichlet, domains, sc_dirichlet have it")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm=pacf", "algorithm: no algorithm named 'pacf'; did you mean 'pacfl'?"),
        ("algorithm.name=fedavgg", "algorithm: no algorithm named 'fedavgg'; did you mean 'fedavg'?"),
        ("data=mnits", "data: no data named 'mnits'; did you mean 'mnist'?"),
        ("model=resnet", "model: no model named 'resnet'; did you mean 'resnet9'?"),
        ("partition=dirichlett", "partition: no partition named 'dirichlett'; did you mean 'dirichlet'?"),
        (
            "clustering.signature=spectrun",
            "clustering.signature: no signature named 'spectrun'; did you mean 'spectrum'?",
        ),
        ("clustering.features=pcaa", "clustering.features: no features named 'pcaa'; did you mean 'pca'?"),
        ("model=3", "model: got 3; expected one of " + ", ".join(MODELS)),
    ],
)
def test_an_unknown_part(override, line):
    assert refusal({}, override) == line


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=0", "rounds: got 0; expected an integer >= 1"),
        ("rounds=ten", "rounds: got 'ten'; expected an integer >= 1"),
        ("rounds=1.5", "rounds: got 1.5; expected an integer >= 1"),
        ("rounds=", "rounds: got nothing; expected an integer >= 1"),
        ("seed=-1", "seed: got -1; expected an integer >= 0"),
        ("training.participation=10", "training.participation: got 10; expected a number > 0 and <= 1"),
        ("training.participation=0", "training.participation: got 0; expected a number > 0 and <= 1"),
        ("training.momentum=1", "training.momentum: got 1; expected a number >= 0 and < 1"),
        ("training.lr=nan", "training.lr: got 'nan'; expected a finite number > 0"),
        ("training.lr=.inf", "training.lr: got inf; expected a finite number > 0"),
        ("training.lr=0,1", "training.lr: got '0,1'; expected a number > 0"),
        ("training.lr.x=3", "training.lr: got a section; expected a number > 0"),
        (
            "training.schedule=linear",
            "training.schedule: got 'linear'; expected 'constant', 'exponential', 'cosine' or 'inverse'",
        ),
        ("output.report=maybe", "output.report: got 'maybe'; expected true or false"),
        (
            "algorithm={name: cfl, sketch: 100}",
            "algorithm.sketch: got 100; expected an integer >= 0 and a multiple of 8",
        ),
        ("output.root=3", "output.root: got 3; expected a path"),
        ("execution.address=3", "execution.address: got 3; expected text or null"),
        (
            "execution.clients_per_actor=0",
            "execution.clients_per_actor: got 0; expected an integer >= 1 or null",
        ),
        ("execution.backend=Ray", "execution.backend: got 'Ray'; expected 'ray' or 'inline'"),
        ("name=a b", "name: got 'a b'; expected text that matches ^[A-Za-z0-9._-]+$"),
        ("model.hidden=10", "model.hidden: got 10; expected a list with an integer >= 1 each"),
        ("model.hidden=[10,0]", "model.hidden.1: got 0; expected an integer >= 1"),
        (
            "partition=tasks",
            "partition.tasks: missing; expected a list with a section with labels, clients, ",
        ),
        ("data=npz", "data.path: missing; expected a path"),
        (  # that the list has no valid item is not the mistake
            "partition={name: tasks, tasks: [{labels: [0]}]}",
            "partition.tasks.0.clients: missing; expected an integer >= 1",
        ),
        # unions
        ("execution.actors=many", "execution.actors: got 'many'; expected an integer >= 1 or 'auto'"),
        ("execution.actors=0", "execution.actors: got 0; expected an integer >= 1 or 'auto'"),
        ("execution.block_size=-1", "execution.block_size: got -1; expected an integer >= 1 or 'auto'"),
        (
            "hierarchy.common_layers=1.5",
            "hierarchy.common_layers: got 1.5; expected an integer >= 0, 'none', 'all' or a list with text ",
        ),
        (
            "hierarchy.common_layers=[fc1, 3]",
            "hierarchy.common_layers: got ['fc1', 3]; expected an integer >= 0, 'none', 'all' or a list",
        ),
        (
            "hierarchy.common_layers=yes",
            "hierarchy.common_layers: give 'all', 'none', a number of ",
        ),
        # sections
        ("training=fast", "training: got 'fast'; expected a section with participation, epochs, "),
        ("hierarchy=none", "hierarchy: got 'none'; expected a section with common_layers, "),
        # what does not fit together
        ("clustering={threshold: 1, n_clusters: 2}", "clustering: threshold and n_clusters are both given; "),
        ("sampling=curriculum", "config: sampling 'curriculum' has nothing to choose where all clients take"),
        ("clustering.proximity=principal", "clustering: no proximity 'principal'; did you mean "),
        ("clustering.proximity=relevance", "clustering: proximity 'relevance' cannot compare signatures "),
    ],
)
def test_a_wrong_value_says_what_would_be_right(override, line):
    assert refusal({}, override).startswith(line)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=yes", "rounds: got True; expected an integer >= 1"),
        ("seed=off", "seed: got False; expected an integer >= 0"),
        ("training.lr=on", "training.lr: got True; expected a number > 0"),
        ("execution.actors=true", "execution.actors: got True; expected an integer >= 1 or 'auto'"),
        (
            "algorithm={name: lg_fedavg, local_layers: true}",
            "algorithm.local_layers: got True; expected an integer >= 0 or 'auto'",
        ),
        ("model.hidden=[16, true]", "model.hidden: got True; expected a list with an integer >= 1 each"),
        (
            "events=[{name: leave, round: yes, clients: [1]}]",
            "events.0.round: got True; expected an integer >= 1",
        ),
    ],
)
def test_yes_is_no_number(override, line):
    assert refusal({}, override) == line


def test_yes_is_yes_where_that_is_asked():
    assert load({}, ["algorithm={name: solo, sampled: on}"]).algorithm.sampled is True


def test_null_has_no_bounds():
    assert (
        refusal({}, "evaluation.coreset=1") == "evaluation.coreset: got 1; expected an integer >= 4 or null"
    )


def test_the_number_of_other_mistakes_is_told():
    assert refusal({}, "rounds=0", "seed=-1").endswith("(and 1 more mistake); expected an integer >= 0")
    assert "(and 2 more mistakes)" in refusal({}, "rounds=0", "seed=-1", "training.lr=-1")


def test_what_a_part_computes_from_a_mistake_is_not_blamed():
    # partition.clients is the sum over the tasks, and nobody wrote it
    line = refusal({}, "partition={name: tasks, tasks: [{labels: [1], clients: 0}]}")
    assert line.startswith("partition.tasks.0.clients: got 0")


def test_keys_that_are_no_text():
    assert refusal({1: 2}).startswith("1: no such setting; valid: algorithm")
    assert refusal({"training": {None: 2}}).startswith("training.None: no such setting in training")


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
    assert load({}, ["data.root='~'"]).data.root == tmp_path
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


def test_overrides_leave_the_source_alone():
    source = {"training": {"lr": 0.1}, "model": {"name": "mlp", "hidden": [3]}}
    before = yaml.safe_dump(source)
    overrides = ["training.lr=0.5", "model.hidden=[9]", "algorithm=mt_hfl", "model.name=linear"]
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


# --- defaults of algorithms ----------------------------------------------------------------------------


def test_an_algorithm_brings_defaults_for_other_sections():
    config = load({"algorithm": "mt_hfl"})
    assert config.clustering.signature.name == "spectrum"
    assert config.clustering.measure == "relevance"
    assert config.hierarchy.common_layers == 1
    assert load({}).hierarchy.common_layers == "none"
    assert load({}, ["algorithm=mt_hfl"]) == config == load({"algorithm": {"name": "mt_hfl"}})


def test_the_user_wins_over_an_algorithms_defaults():
    config = load({"algorithm": "mt_hfl", "clustering": {"n_clusters": 3}, "hierarchy": {"global_every": 2}})
    assert config.clustering.signature.name == "spectrum"  # merged under the user's
    assert (config.hierarchy.common_layers, config.hierarchy.global_every) == (1, 2)
    config = load(config.to_dict(), ["hierarchy.common_layers=all"])
    assert config.hierarchy.common_layers == "all"
    config = load({"algorithm": "mt_hfl", "clustering": {"signature": {"q": 7}}})
    assert (config.clustering.signature.name, config.clustering.signature.q) == ("spectrum", 7)
    assert load({"algorithm": "mt_hfl", "clustering": {"signature": "spectrum"}}) == load(
        {"algorithm": "mt_hfl"}
    )


def test_another_signature_than_the_algorithms_drops_its_settings():
    config = load(
        {"algorithm": "mt_hfl"}, ["clustering.signature=subspace", "clustering.proximity=principal_angle"]
    )
    assert (config.clustering.signature.name, config.clustering.signature.p) == ("subspace", 3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_variants_for_comparison(name):
    first = load("digits-demo", ["rounds=3"])
    other = variant("digits-demo", ["rounds=3"], name)
    assert other.algorithm.name == name
    for section in ("data", "partition", "model", "training", "evaluation", "seed", "rounds"):
        assert getattr(other, section) == getattr(first, section)
    assert other.clustering.n_clusters == (3 if "clustering" in ALGORITHMS[name].takes else None)
    assert other.hierarchy.global_every == (3 if "hierarchy" in ALGORITHMS[name].takes else 1)
    own = {"mt_hfl": "spectrum", "random_clustering": "spectrum", "flis_hc": "predictions"}
    own |= {"flt": "centroids", "pca_km_hc": "centroids"}
    assert other.clustering.signature.name == own.get(name, "subspace")
    assert variant("digits-demo", ["algorithm=solo", "rounds=3"], name) == other


def test_a_variant_keeps_no_settings_of_the_first_algorithm():
    source = {"algorithm": {"name": "solo", "sampled": True}}
    assert variant(source, [], "fedavg").algorithm == ALGORITHMS["fedavg"]()
    with pytest.raises(ConfigError, match="no algorithm named 'fedav'; did you mean 'fedavg'"):
        variant(source, [], "fedav")


def test_a_variant_leaves_out_what_means_nothing_to_it():
    # The preset compares subspaces in degrees, has momentum, and is PACFL's.
    other = variant("pacfl-fmnist", [], "flis_hc").clustering
    assert (other.signature.name, other.proximity, other.threshold) == ("predictions", "cosine", None)
    assert variant("pacfl-fmnist", ["clustering.threshold=0.1"], "flis_hc").clustering.threshold == 0.1
    assert variant("pacfl-fmnist", [], "fedavg").clustering == load({}).clustering
    assert variant("pacfl-fmnist", [], "per_fedavg").training.momentum == 0
    assert variant("pacfl-fmnist", [], "fedprox").training.momentum == 0.5
    with pytest.raises(ConfigError, match=r"momentum 0\.9 makes no sense with per_fedavg"):
        variant("pacfl-fmnist", ["training.momentum=0.9"], "per_fedavg")
    source = {"algorithm": "pacfl", "clustering": {"signature": {"p": 5}, "threshold": 6, "n_clusters": None}}
    assert variant(source, [], "pacfl").clustering.signature.p == 5
    assert variant(source, [], "mt_hfl").clustering.signature.name == "spectrum"


def test_a_baseline_does_not_inherit_the_encoder():
    """FLT and PCA+kM+HC send centroids alike; of what, and what the server does to them, is theirs."""
    source = {"algorithm": "flt", "clustering": {"features": {"name": "conv_ae", "latent": 64}}}
    source["clustering"] |= {"signature": {"name": "centroids", "k": 7}, "embedding": {"name": "umap"}}
    baseline = variant(source, [], "pca_km_hc").clustering
    assert (baseline.features.name, baseline.embedding.name) == ("client_pca", "none")
    assert (baseline.grouping, baseline.linkage, baseline.signature.k) == ("hierarchical", "ward", 7)
    assert variant(source, [], "flt").clustering.features.latent == 64
    assert variant(source, ["clustering.features=client_pca"], "flt").clustering.features.name == "client_pca"


# --- settings that would do nothing --------------------------------------------------------------------

CLUSTERERS = "flis_hc, flt, mt_hfl, pacfl, pca_km_hc, random_clustering"


@pytest.mark.parametrize(
    ("source", "override", "line"),
    [
        (
            {"algorithm": "cfl"},
            "hierarchy.common_layers=1",
            "hierarchy.common_layers: would do nothing with cfl; leave it out, or take an algorithm that "
            f"uses it: {CLUSTERERS.replace('flt', 'flt, hierfavg, ifca')}",
        ),
        (
            {"algorithm": "fedsem"},
            "hierarchy.global_every=5",
            "hierarchy.global_every: would do nothing with ",
        ),
        (
            {},
            "hierarchy={common_layers: [fc1], global_every: 5}",
            "hierarchy.common_layers: would do nothing",
        ),
        (
            {"algorithm": "ifca"},
            "clustering.n_clusters=4",
            "clustering.n_clusters: would do nothing with ifca; leave it out, or take an algorithm that uses "
            f"it: {CLUSTERERS}",
        ),
        (
            {"algorithm": "flis_dc"},
            "clustering.signature.p=4",
            "clustering.signature: would do nothing with ",
        ),
        ({"algorithm": "solo", "clustering": {"every": 3}}, "rounds=2", "clustering.every: would do nothing"),
        ("digits-demo", "hierarchy.global_every=5", ""),
    ],
)
def test_settings_of_sections_that_the_method_does_not_use_are_refused(source, override, line):
    if line:
        assert refusal(source, override).startswith(line)
    else:
        load(source, [override])


def test_servers_are_there_whatever_the_method():
    assert load({"algorithm": "solo"}, ["hierarchy.lps_actors=1"]).hierarchy.lps_actors == 1


def test_another_algorithm_drops_what_it_does_not_use():
    """The source spoke of its own algorithm; what is said beside the new one's name is meant for it."""
    assert load("digits-demo", ["algorithm=fedavg"]).clustering == load({}).clustering
    assert load("digits-demo", ["algorithm=ifca"]).hierarchy == load("digits-demo").hierarchy
    assert refusal("digits-demo", "algorithm=fedavg", "clustering.n_clusters=4").startswith(
        "clustering.n_clusters: would do nothing with fedavg; "
    )
    assert load(load("digits-demo"), ["algorithm.name=fedavg"]).hierarchy == load({}).hierarchy


def test_a_comparison_speaks_of_sections_that_not_all_use():
    changes = ["clustering.n_clusters=4", "hierarchy={common_layers: 2, global_every: 2, lps_actors: 1}"]
    other = variant("digits-demo", changes, "fedavg")
    assert other.clustering == load({}).clustering
    assert other.hierarchy == load({}, ["hierarchy.lps_actors=1"]).hierarchy
    assert variant("digits-demo", changes, "ifca").hierarchy == load("digits-demo", changes).hierarchy
    with pytest.raises(ConfigError, match="did you mean 'threshold'"):
        variant("digits-demo", ["clustering.treshold=3"], "fedavg")


@pytest.mark.parametrize("preset", presets())
def test_every_preset_can_be_compared_with_every_method(preset):
    for name in ALGORITHMS:
        assert load(variant(preset, [], name)).algorithm.name == name


def test_runs_from_before_can_be_read(tmp_path):
    settings = load("digits-demo").to_dict() | {"algorithm": "fedavg"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert refusal(path).startswith("clustering.signature: would do nothing")
    assert reload(path) == load("digits-demo", ["algorithm=fedavg"])


# --- round trips ---------------------------------------------------------------------------------------


def reread(config: Config, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("name", presets())
def test_presets(name, tmp_path):
    path = presets()[name]
    config = load(name)
    assert config == load(path) == load(str(path))
    assert config.name == name
    assert len(describe_preset(path)) > 20
    assert not describe_preset(path).startswith("#")
    assert reread(config, tmp_path) == config
    assert load(config) == config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_config_of_every_algorithm_round_trips(name, tmp_path):
    config = load({"algorithm": name}, ["training.lr=1e-5", "output.root=a b/ü", "name='1e5'"])
    assert reread(config, tmp_path) == config


PARTS = [
    (section, name)
    for section, parts in {"data": DATASETS, "partition": PARTITIONS, "model": MODELS}.items()
    for name in parts
]
REQUIRED = {
    "npz": {"path": "a.npz"},
    "leaf": {"folder": "leaf"},
    "file": {"path": "owners.csv"},
    "column": {"column": "hospital"},
    "huggingface": {"path": "csv", "data_files": {"train": "a.csv", "test": "b.csv"}, "test_split": "test"},
    "image_folder": {"root": "images"},
    "table": {"path": "a.csv", "label": "y", "exclude": ["id"]},
    "python": {"target": "mine:load", "kwargs": {"n": 3, "names": ["a"]}},
    "tasks": {"tasks": [{"labels": [0, 1], "clients": 2}]},
}


@pytest.mark.parametrize(("section", "name"), PARTS)
def test_a_config_of_every_part_round_trips(section, name, tmp_path):
    config = load({section: {"name": name, **REQUIRED.get(name, {})}})
    assert getattr(config, section).name == name
    assert reread(config, tmp_path) == config


@given(
    lr=st.floats(1e-300, 1e300),
    name=st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=12),
    layers=st.one_of(
        st.integers(0, 9), st.sampled_from(["all", "none"]), st.lists(st.text(max_size=5), max_size=3)
    ),
)
@example(lr=1e-05, name="1e5", layers=["1e-3", "yes", "null", "~"])
@example(lr=1.0, name="0x1", layers=["2020-01-01", "1_0e1", "", "\x85"])
def test_any_values_round_trip(lr, name, layers):
    hierarchy = {"common_layers": layers}
    config = load({"name": name, "algorithm": "mt_hfl", "training": {"lr": lr}, "hierarchy": hierarchy})
    again = load(yaml_mapping(config.to_yaml()))
    assert again == config


def yaml_mapping(text: str) -> dict[str, Any]:
    return dict(parse(text))


def test_a_config_is_frozen():
    config = load({})
    with pytest.raises(ValidationError, match="frozen"):
        config.rounds = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.training.lr = 3.0


# --- JSON schema ---------------------------------------------------------------------------------------


@cache
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(json_schema())


def valid(settings: Any) -> bool:
    return bool(validator().is_valid(settings))


@pytest.mark.parametrize("name", presets())
def test_the_schema_takes_the_presets(name):
    assert valid(yaml.safe_load(presets()[name].read_text()))
    assert valid(load(name).to_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"trainin": {}},
        {"training": {"lr": 0}},
        {"training": {"lrr": 1}},
        {"algorithm": "pacf"},
        {"algorithm": {"name": "pacf"}},
        {"data": "npz"},  # needs a path
        {"execution": {"actors": "many"}},
        {"execution": {"actors": 0}},
        {"model": {"name": "mlp", "hidden": [0]}},
    ],
)
def test_the_schema_refuses_what_load_refuses(settings):
    assert not valid(settings)
    refusal(settings)


def test_the_schema_takes_short_forms_and_unnamed_parts():
    assert valid({"algorithm": "solo", "model": {"hidden": [3]}, "clustering": {"signature": "spectrum"}})


# --- any typo ------------------------------------------------------------------------------------------


def _keys(section: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Every dotted key of the default config, and the section that it belongs to."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in section.model_fields.items():
        found[prefix + name] = section
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) and sections(field.annotation):
            found |= _keys(type(default), f"{prefix}{name}.")
    return found


KEYS = _keys(Config)


@st.composite
def typos(draw: st.DrawFn) -> str:
    """A known dotted key with one character changed, inserted or removed, that is no other known key."""
    key = draw(st.sampled_from(sorted(KEYS)))
    place = draw(st.integers(0, len(key)))
    kind = draw(st.sampled_from(["insert", "change", "remove"]))
    letter = draw(st.sampled_from(string.ascii_letters + string.digits + "_-. []{}:'#&*!?é\u200b"))
    kept = key[place:] if kind == "insert" else key[place + 1 :]
    return key[:place] + ("" if kind == "remove" else letter) + kept


@given(typo=typos(), value=st.sampled_from(["1", "0.5", "auto", "[1]", "{}", "", "{a: 1}", "digits", "null"]))
@example(typo="training..lr", value="1")
@example(typo="roundz", value="null")
def test_any_single_character_typo_is_refused(typo, value):
    if typo.strip() in KEYS:
        return
    with pytest.raises(ConfigError) as caught:
        load({}, [f"{typo}={value}"])
    assert str(caught.value).isprintable()


@given(
    key=st.sampled_from(sorted(KEYS)),
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_any_value_is_taken_or_refused_in_one_line(key, value):
    settings: Any = value
    for part in reversed(key.split(".")):
        settings = {part: settings}
    config = loaded_or_one_line(settings)
    if config is not None:
        assert load(yaml_mapping(config.to_yaml())) == config


def loaded_or_one_line(source: Any) -> Config | None:
    """The config, or None if it was refused as it should."""
    text = ""
    try:
        return load(source)
    except ConfigError as error:
        text = str(error)
    assert text
    assert text.isprintable()
    return None


@given(st.text(max_size=40))
@example("a: &a [*a]")
@example("training: &a {x: *a}")
@example("? [a]\n: 1")
@example("{[a]: 1}")
@example("=")
@example("<<: 3")
@example('"a\\nb": 1')
def test_any_text_is_a_config_or_refused_in_one_line(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        loaded_or_one_line(path)


# --- small methods -------------------------------------------------------------------------------------


def test_the_block_size_is_a_matter_of_config_alone():
    def size(cohort: int, **execution: Any) -> int:
        return load({"execution": execution}).execution.clients_per_block(cohort)

    assert [size(c) for c in (1, 16, 17, 32, 33, 1024, 100_000)] == [1, 1, 2, 2, 3, 64, 64]
    assert size(100, block_size=7) == 7
    tiny = load({}).execution
    assert [tiny.clients_per_block(c, 48_000) for c in (1, 16, 100, 1000)] == [1, 4, 25, 250]
    assert tiny.clients_per_block(1000, 1e6) == 63  # 63 * 1e6 is worth a message
    assert size(1000, clients_per_actor=5) == 5
    assert size(10, clients_per_actor=5) == 1
    assert size(10, block_size=100, clients_per_actor=1) == 1


def test_every_setting_has_a_description():
    missing = [
        key
        for key, section in KEYS.items()
        if key.split(".")[-1] != "name" and not section.model_fields[key.split(".")[-1]].description
    ]
    assert missing == []
