"""Configs are frozen, come back as they were written, and have a JSON schema."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.algorithms import ALGORITHMS
from rayfl.config import Config, load
from rayfl.data import DATASETS, PARTITIONS
from rayfl.errors import ConfigError
from rayfl.models import MODELS
from tests.config.common import KEYS, refusal, reread, valid, yaml_mapping

# --- round trips ---------------------------------------------------------------------------------------


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
    "sharded": {"path": "a"},
    "leaf": {"folder": "leaf"},
    "file": {"path": "owners.csv"},
    "column": {"column": "hospital"},
    "huggingface": {"path": "csv", "data_files": {"train": "a.csv", "test": "b.csv"}, "test_split": "test"},
    "image_folder": {"root": "images"},
    "table": {"path": "a.csv", "label": "y", "exclude": ["id"]},
    "python": {"target": "mine:load", "kwargs": {"n": 3, "names": ["a"]}},
    "tasks": {"tasks": [{"labels": [0, 1], "clients": 2}]},
    "module": {"target": "mynet:MyNet", "kwargs": {"width": 3, "names": ["a"]}, "layers": {"all": ["fc"]}},
    "timm": {"arch": "resnet18"},
    "transformers": {"arch": "vit"},
}


@pytest.mark.parametrize(("section", "name"), PARTS)
def test_a_config_of_every_part_round_trips(section, name, tmp_path):
    config = load({section: {"name": name, **REQUIRED.get(name, {})}})
    assert getattr(config, section).name == name
    assert reread(config, tmp_path) == config


@given(
    lr=st.floats(1e-300, 3e38),
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


def test_a_config_is_frozen():
    config = load({})
    with pytest.raises(ValidationError, match="frozen"):
        config.rounds = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.training.lr = 3.0


def test_a_config_built_in_python_is_refused_like_one_that_is_read():
    for settings in ({"rounds": -1}, {"training": {"lrr": 1}}, {"algorithm": "fedav"}, {"rounnds": 3}):
        with pytest.raises(ConfigError) as built:
            Config(**settings)
        assert str(built.value) == refusal(settings)
    with pytest.raises(ConfigError, match=r"^iid: spread 2\.0 would change nothing"):
        PARTITIONS["iid"](spread=2.0)


# --- JSON schema ---------------------------------------------------------------------------------------


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


# --- small methods -------------------------------------------------------------------------------------


def test_the_block_size_is_a_matter_of_config_alone():
    def size(cohort: int, **execution: Any) -> int:
        return load({"execution": execution}).execution.clients_per_block(cohort)

    assert [size(c) for c in (1, 16, 17, 32, 33, 1024, 100_000)] == [1, 1, 2, 2, 3, 64, 64]
    assert size(100, block_size=7) == 7
    tiny = load({}).execution
    assert [tiny.clients_per_block(c, 48_000) for c in (1, 16, 100, 1000)] == [1, 4, 25, 250]
    assert tiny.clients_per_block(1000, 1e6) == 63  # 63 * 1e6 is worth a message
    # Of large cohorts 64, or as many as are worth a message together; no preset has so many.
    assert [tiny.clients_per_block(c, 48_200) for c in (3000, 10_000, 10**6)] == [375, 208, 208]
    assert [tiny.clients_per_block(c, 1e6) for c in (1024, 10_000)] == [64, 64]
    assert size(1000, clients_per_actor=5) == 5
    assert size(10, clients_per_actor=5) == 1
    assert size(10, block_size=100, clients_per_actor=1) == 1
    for there in ({"device": "cuda"}, {"gpus_per_actor": 0.5}, {"gpus_per_actor": "auto"}):
        gpu = load({"execution": there}).execution
        assert [gpu.clients_per_block(c, 5.3e7) for c in (1, 10, 480, 4800)] == [1, 3, 120, 76]
        assert gpu.clients_per_block(480, 1e12) == 30
    on_cpus = load({"execution": {"device": "cpu", "gpus_per_actor": 0.5}}).execution
    assert on_cpus.clients_per_block(10, 5.3e7) == 1


def test_every_setting_has_a_description():
    missing = [
        key
        for key, section in KEYS.items()
        if key.split(".")[-1] != "name" and not section.model_fields[key.split(".")[-1]].description
    ]
    assert missing == []
