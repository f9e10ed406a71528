"""What is wrong with a config is one line that helps."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayfl.config import Config, load
from rayfl.errors import ConfigError, nearest
from rayfl.models import MODELS
from tests.config.common import KEYS, refusal, yaml_mapping

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


def test_the_last_part_of_a_dotted_name_alone_names_the_whole():
    assert refusal({}, "lr=0.1") == "lr: no such setting; did you mean 'training.lr'?"
    names = "'training.batch_size' or 'evaluation.batch_size'"
    assert refusal({}, "batch_size=8") == f"batch_size: no such setting; did you mean {names}?"


def test_of_many_names_those_like_it_are_shown_and_the_rest_is_counted():
    many = [f"accuracy_{i}" for i in range(60)] + [f"a_very_long_loss_{i}" for i in range(60)]
    found = nearest("loss", many)
    assert found.startswith("valid: a_very_long_loss_0, ")
    assert found.endswith(" and 80 more")
    assert nearest("nothing", ["synthetic", "digits"]) == "valid: digits, synthetic"
    assert nearest("x", []) == "there are none"


def test_an_unknown_key_with_nothing_near_names_all():
    line = refusal({}, "training.zzz=1")
    assert line.endswith("valid: " + ", ".join(sorted(load({}).training.__class__.model_fields)))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("partition.alpha=0.1", "partition.alpha: no such setting in partition (label_skew); "),
        (
            "algorithm.sampled=true",
            "algorithm.sampled: no such setting in algorithm (fedavg); solo has it (set algorithm=solo)",
        ),
        (
            "data.clusters=2",
            "data.clusters: no such setting in data (digits); synthetic has it (set data=synthetic)",
        ),
        (
            "clustering.signature.q=5",
            "clustering.signature.q: no such setting in clustering.signature (subspace); "
            "spectrum has it (set clustering.signature=spectrum)",
        ),
    ],
)
def test_a_setting_of_another_part_names_that_part(override, line):
    assert refusal({}, override).startswith(line)


def test_several_parts_may_have_the_setting():
    in_list = refusal({}, "events=[{name: join, round: 1, clients: 2, labels: [1]}]")
    assert in_list == "events.0.labels: no such setting in events.0 (join); drift has it"
    assert refusal({}, "partition.alpha=0.1").endswith(
        "difficulty, dirichlet, domains, sc_dirichlet have it (set partition=NAME)"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm=pacf", "algorithm: no algorithm named 'pacf'; did you mean 'pacfl'?"),
        ("algorithm.name=fedavgg", "algorithm: no algorithm named 'fedavgg'; did you mean 'fedavg'?"),
        ("data=mnits", "data: no data named 'mnits'; did you mean 'mnist'?"),
        (
            "model=my_net:Net",
            "model: no model named 'my_net:Net'; for your own class or function give model=module "
            "model.target=my_net:Net",
        ),
        (
            "data={name: 'd.py:read'}",
            "data: no data named 'd.py:read'; for your own class or function give data=python "
            "data.target=d.py:read",
        ),
        ("model=resnet", "model: no model named 'resnet'; did you mean 'resnet9'?"),
        ("partition=dirichlett", "partition: no partition named 'dirichlett'; did you mean 'dirichlet'?"),
        (
            "clustering.signature=spectrun",
            "clustering.signature: no signature named 'spectrun'; did you mean 'spectrum'?",
        ),
        ("clustering.features=pcaa", "clustering.features: no features named 'pcaa'; did you mean 'pca'?"),
    ],
)
def test_an_unknown_part(override, line):
    assert refusal({}, override) == line


def test_a_number_is_no_part():
    names = ", ".join(MODELS)  # now: other tests may have added models of their own
    assert refusal({}, "model=3") == f"model: got 3; expected one of {names}"


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=0", "rounds: got 0; expected an integer >= 1"),
        ("rounds=ten", "rounds: got 'ten'; expected an integer >= 1"),
        ("rounds=1.5", "rounds: got 1.5; expected an integer >= 1"),
        ("rounds=", "rounds: got nothing; expected an integer >= 1"),
        ("seed=-1", "seed: got -1; expected an integer >= 0"),
        (f"seed={2**63}", f"seed: got {2**63}; expected an integer >= 0 and <= {2**63 - 1}"),
        ("training.participation=10", "training.participation: got 10; expected a number > 0 and <= 1"),
        ("training.participation=0", "training.participation: got 0; expected a number > 0 and <= 1"),
        ("training.momentum=1", "training.momentum: got 1; expected a number >= 0 and < 1"),
        ("training.lr=nan", "training.lr: got 'nan'; expected a finite number > 0"),
        ("training.lr=.inf", "training.lr: got inf; expected a finite number > 0"),
        ("training.lr=1e308", "training.lr: 1e+308 is too large; expected at most 3e+38"),
        ("algorithm={name: qfedavg, q: 1e300}", "algorithm.q: 1e+300 is too large; expected at most 3e+38"),
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
        (
            "execution.gpus_per_actor=1.5",
            "execution: gpus_per_actor: got 1.5; expected whole GPUs, or a share below 1",
        ),
        (
            "execution.gpus_per_actor=1e-5",
            "execution: gpus_per_actor: got 1e-05; the smallest share that Ray accepts is",
        ),
        (
            "execution.cpus_per_actor=1e-5",
            "execution: cpus_per_actor: got 1e-05; the smallest share that Ray accepts is",
        ),
        ("output.root=S3://bucket/runs", "output.root: got S3://bucket/runs; did you mean s3://bucket/runs?"),
        ("output.root=gs:bucket/runs", "output.root: got gs:bucket/runs; did you mean gs://bucket/runs?"),
        ("output.root=az://runs", "output.root: az://runs is on unknown storage; valid: s3, gs"),
        (
            "execution.servers_on==x",
            "execution.servers_on: got '=x'; expected a custom resource such as stays, a label such as role=",
        ),
        (
            "execution.servers_on=CPU",
            "execution: servers_on: CPU is one of Ray's built-in resources",
        ),
        ("execution.address=3", "execution.address: got 3; expected text or null"),
        (
            "execution.clients_per_actor=0",
            "execution.clients_per_actor: got 0; expected an integer >= 1 or null",
        ),
        ("execution.backend=Ray", "execution.backend: got 'Ray'; expected 'ray' or 'inline'"),
        ("name=a b", "name: got 'a b'; expected text that matches ^[A-Za-z0-9._-]+$"),
        ("model.hidden=10", "model.hidden: got 10; expected a list of items, each an integer >= 1"),
        ("model.hidden=[10,0]", "model.hidden.1: got 0; expected an integer >= 1"),
        (
            "partition=tasks",
            "partition.tasks: missing; expected a list of at least one item, each a section with labels, ",
        ),
        ("data=npz", "data.path: missing; expected a path"),
        (  # that the list has no valid item is not the mistake
            "partition={name: tasks, tasks: [{labels: [0]}]}",
            "partition.tasks.0.clients: missing; expected an integer >= 1",
        ),
        # unions
        (
            "execution.actors=many",
            "execution.actors: got 'many'; expected an integer >= 1, 'auto' or a range such as 2-64",
        ),
        (
            "execution.actors=0",
            "execution.actors: got 0; expected an integer >= 1, 'auto' or a range such as 2-64",
        ),
        ("execution.block_size=-1", "execution.block_size: got -1; expected an integer >= 1 or 'auto'"),
        (
            "hierarchy.common_layers=1.5",
            "hierarchy.common_layers: got 1.5; expected an integer >= 0, 'none', 'all' or a list of items, ",
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
        (
            "sampling=curriculum",
            "config: sampling 'curriculum' would do nothing if all clients take",
        ),
        ("clustering.proximity=principal", "clustering: no proximity 'principal'; did you mean "),
        ("clustering.proximity=relevance", "clustering: proximity 'relevance' cannot compare signatures "),
    ],
)
def test_a_wrong_value_says_what_would_be_right(override, line):
    assert refusal({}, override).startswith(line)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["algorithm=fedsoft", "sampling=curriculum"], "sampling 'curriculum' would do nothing with fedsoft"),
        (
            ["algorithm=ifca", "hierarchy={common_layers: 1, weights: population}"],
            "hierarchy.weights 'population' counts the clients of each model, but clients of ifca outside",
        ),
    ],
)
def test_what_does_nothing_or_is_not_known_with_a_method_is_refused(overrides, line):
    assert refusal({}, "training.participation=0.5", *overrides).startswith(f"config: {line}")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=yes", "rounds: got True; expected an integer >= 1"),
        ("seed=off", "seed: got False; expected an integer >= 0"),
        ("training.lr=on", "training.lr: got True; expected a number > 0"),
        (
            "execution.actors=true",
            "execution.actors: got True; expected an integer >= 1, 'auto' or a range such as 2-64",
        ),
        (
            "algorithm={name: lg_fedavg, local_layers: true}",
            "algorithm.local_layers: got True; expected an integer >= 0 or 'auto'",
        ),
        ("model.hidden=[16, true]", "model.hidden: got True; expected a list of items, each an integer >= 1"),
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
    assert refusal({1: 2}).startswith("1: no such setting; valid: aggregation, algorithm")
    assert refusal({"training": {None: 2}}).startswith("training.None: no such setting in training")


# --- any typo ------------------------------------------------------------------------------------------


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
