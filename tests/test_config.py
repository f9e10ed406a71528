"""Every preset: read, written, valid, and comparable with every method."""

from __future__ import annotations

import pytest
import yaml

from rayfl.algorithms import ALGORITHMS
from rayfl.config import describe_preset, load, presets, variant
from tests.config.common import reread, valid


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


@pytest.mark.parametrize("preset", presets())
def test_every_preset_can_be_compared_with_every_method(preset):
    for name in ALGORITHMS:
        assert load(variant(preset, [], name)).algorithm.name == name


@pytest.mark.parametrize("name", presets())
def test_the_schema_takes_the_presets(name):
    assert valid(yaml.safe_load(presets()[name].read_text()))
    assert valid(load(name).to_dict())
