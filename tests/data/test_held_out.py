"""Samples that the server holds out: no client's to train on, none to be tested on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.config import load, on_the_same_data, presets, variant
from rayfl.data import DATASETS, Samples
from rayfl.data.held_out import hold_out, read
from rayfl.data.scaling import Scaling
from rayfl.data.server import ServerData, _family
from rayfl.errors import ConfigError, DataError
from rayfl.random import generator
from rayfl.servers.building import build

PUBLIC = {
    "features pca": {"algorithm": "pacfl", "clustering": {"features": "pca"}},
    "flis_hc": {"algorithm": "flis_hc"},
    "flis_dc": {"algorithm": "flis_dc"},
    "normalise": {"data": {"name": "digits", "normalise": "server"}},
}


def rows(x: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in x}


@pytest.mark.parametrize("method", PUBLIC)
def test_what_the_server_looks_at_is_no_clients(method: str) -> None:
    """Neither training nor validation nor test samples; without the method nothing is held out."""
    federation = build(load(PUBLIC[method]))[0][0].federation
    samples = federation.samples
    own = samples.x_server
    assert own is not None
    assert len(own) == 143, "a tenth, though 2,000 or 2,500 are asked for"
    seen = rows(samples.public(2500, generator(0, "any")))
    held = [samples.x_train[federation.train.values], samples.x_train[federation.validation.values]]
    for x in (*held, samples.x_test[federation.test.values]):
        assert not rows(x) & seen
    whole = DATASETS["digits"]().load(Path())
    assert rows(samples.x_train) | rows(own) == rows(whole.x_train)
    assert build(load({}))[0][0].federation.samples.x_server is None


def test_pca_is_fitted_on_the_servers_samples_and_flis_predicts_them(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from rayfl.signatures.features.pca import PCA

    seen: list[np.ndarray] = []
    fit, draw = PCA.fit, ServerData.draw

    def fitted(self: PCA, x: Any, key: int = 0) -> Any:
        seen.append(np.rint(x * 255).astype(np.uint8))
        return fit(self, x, key)

    def drawn(self: ServerData, *args: Any) -> Any:
        seen.append(draw(self, *args))
        return seen[-1]

    monkeypatch.setattr(PCA, "fit", fitted)
    monkeypatch.setattr(ServerData, "draw", drawn)
    common = ["rounds=1", "execution.backend=inline", "output.report=false", "output.tensorboard=false"]
    common += [f"output.root={tmp_path}"]
    for method in ("features pca", "flis_hc", "flis_dc"):
        config = load(PUBLIC[method], common)
        own = build(config)[0][0].federation.samples.x_server
        assert own is not None
        seen.clear()
        rayfl.run(config)
        assert [rows(x) for x in seen] == [rows(own)]


def test_a_share_a_number_or_what_is_needed() -> None:
    whole = DATASETS["digits"]().load(Path())

    def held(share: Any, public: int) -> int:
        own = hold_out(whole, share, public, 0).x_server
        return 0 if own is None else len(own)

    assert held("auto", 0) == 0
    assert held("auto", 60) == 60
    assert held("auto", 2000) == 143
    assert held(50, 0) == held(50, 2000) == 50
    assert held(9999, 0) == 143
    assert held(0.25, 60) == round(0.25 * len(whole.y_train))
    assert held(0.0, 0) == 0
    assert held(0.9999, 0) == len(whole.y_train) - 1
    with pytest.raises(ConfigError, match=r"data.server_share: 0.0 of 14.. training samples leaves"):
        hold_out(whole, 0.0, 60, 0)
    for seeds in ((0, 0), (0, 1)):
        first, second = (hold_out(whole, 0.1, 0, seed).x_server for seed in seeds)
        assert (rows(first) == rows(second)) == (seeds[0] == seeds[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [1.0, -0.1, "some", -3])
def test_no_share(share: object) -> None:
    with pytest.raises(ConfigError, match=r"data.server_share: got .*; expected a number >= 0 and < 1"):
        load({"data": {"name": "digits", "server_share": share}})


def test_every_source_keeps_a_sample() -> None:
    x, domains = np.arange(40, dtype=np.float32)[:, None], np.arange(40) // 2
    y = np.zeros(40, np.int64)
    samples = Samples("made", x, y, x, y, 1, domains, domains)
    rest = hold_out(samples, 0.9, 0, 0)
    assert sorted(rest.domain_train) == list(range(20))  # type: ignore[arg-type]
    assert rest.x_server is not None
    assert sorted([*rest.x_server[:, 0], *rest.x_train[:, 0]]) == list(range(40))
    np.testing.assert_array_equal(rest.x_train[:, 0] // 2, rest.domain_train)


def test_the_servers_statistics() -> None:
    samples = read(DATASETS["digits"](normalise="server"), Path(), 2000, 0)
    assert samples.scaling == Scaling.of(samples, samples.x_server)
    assert samples.scaling != Scaling.of(samples)


def test_without_samples_of_its_own_the_server_refuses() -> None:
    with pytest.raises(DataError, match=r"no samples of its own; set data.server_share"):
        ServerData().draw(DATASETS["digits"]().load(Path()), 0)
    with pytest.raises(DataError, match="its test images are the clients'"):
        ServerData(source="digits").draw(DATASETS["digits"]().load(Path()), 0)
    of_cars = replace(DATASETS["digits"]().load(Path()), name="digits_cars")  # only EMNIST's share images
    assert len(ServerData(source="digits", samples=9).draw(of_cars, 0)) == 9
    assert _family("emnist_letters") == _family("emnist_balanced") != _family("mnist")


def test_methods_that_are_compared_share_their_data() -> None:
    """FedAvg beside FLIS trains on what FLIS's server leaves: ``--beside`` means the same partition."""
    names = ["fedavg", "flis_hc", "pca_km_hc"]
    federations = [
        build(config)[0][0].federation for config in on_the_same_data([variant({}, [], n) for n in names])
    ]
    for federation in federations[1:]:
        np.testing.assert_array_equal(federation.samples.x_train, federations[0].samples.x_train)
        np.testing.assert_array_equal(federation.train.values, federations[0].train.values)
    alone = build(load({"algorithm": "flis_hc"}))[0][0].federation
    np.testing.assert_array_equal(alone.train.values, federations[0].train.values)
    said = on_the_same_data([load({"data": {"name": "digits", "server_share": 0.3}}), load({})])
    assert [config.data.server_share for config in said] == [0.3, "auto"]


def test_presets_whose_server_needs_data_say_how_many() -> None:
    """So that another algorithm on the same preset trains on the same data."""
    for name in presets():
        config = load(name)
        if config.public_samples:
            assert config.data.server_share != "auto", name
