"""The resource arithmetic: what cannot fit is refused before anything of it exists."""

from __future__ import annotations

import pytest

from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.models.flat import ModelSpec
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
