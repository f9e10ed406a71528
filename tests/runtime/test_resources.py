"""The resource arithmetic: what cannot fit is refused before anything of it exists."""

from __future__ import annotations

import pytest

from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.models.flat import ModelSpec
from rayfl.runtime.resources import Available, Node, plan_resources
from rayfl.servers import building
from rayfl.servers.building import check_model


def test_a_model_beyond_the_memory_is_refused_before_it_is_built():
    config = load("digits-demo", ["model=mlp", "model.hidden=[1000000000]"])
    with pytest.raises(ConfigError, match=r"model: 75,000,000,010 parameters need 1.20 TB to train one"):
        building.build(config)
    with pytest.raises(ConfigError, match=r"model: 'mlp' cannot be built"):
        ModelSpec.of(
            load({}, ["model=mlp", "model.hidden=[2000000000, 2000000000, 7]"]).model, (2**31,), 10, 0
        )


def test_the_bound_of_a_model_is_the_memory():
    check_model(10, 160.0)
    with pytest.raises(ConfigError, match="at most 10 parameters fit"):
        check_model(11, 160.0)


def test_it_says_how_much_lands_at_one_local_server():
    """6,400 blocks of a model of 10^6 parameters, flat and in a tree."""
    node = Available((Node(64.0, 0.0),), 1e13)
    settings = {"training": {"participation": 1.0}}
    for fan_in, sums, said in ((None, 6400, True), (80, 80, False)):
        config = load({**settings, "execution": {"block_size": 1, "fan_in": fan_in}})
        plan = plan_resources(config, 6400, 1, 10**6, 0, node)
        assert plan.sums == sums
        assert plan.sums_gb == pytest.approx(0.008 * sums)
        assert any("51.2 GB" in line and "fan_in" in line for line in plan.lines()) == said
