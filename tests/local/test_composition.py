"""Local objectives with methods that cluster: the same at the limits, and within each cluster by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.algorithms.test_identities import GROUPS, P, Run, run, same, same_curves

__all__ = ["run"]

OBJECTIVES: list[Any] = [
    {"name": "fedprox", "mu": 0.2},
    "fednova",
    "scaffold",
    {"name": "mtl", "lam": 0.2},
]


@pytest.mark.parametrize("local", OBJECTIVES)
def test_one_cluster_is_the_flat_method(run: Run, local: Any):
    for participation in (1.0, 0.4):
        overrides = [f"training.participation={participation}"]
        one = run("pacfl", "clustering.threshold=1e6", *overrides, local=local)
        flat = run("fedavg", *overrides, local=local)
        assert same(one.models, flat.models)
        assert same(one.last.vectors, flat.last.vectors)
        assert same(one.states, flat.states)
        same_curves(one, flat)


def test_scaffold_starts_as_fedavg_bit_for_bit(run: Run):
    """c = c_i = 0, and all clients have as many samples: the same models, and other ones from then on."""
    even = {"name": "iid", "clients": 8, "samples": 100}
    for rounds, equal in ((1, True), (2, False)):
        ran, flat = (run("fedavg", f"rounds={rounds}", partition=even, local=o) for o in ("scaffold", "sgd"))
        assert same(ran.models, flat.models) == equal


@pytest.mark.parametrize("local", OBJECTIVES)
def test_no_common_layers_is_plain_clustered_training(run: Run, local: Any):
    tree = run("mt_hfl", "hierarchy.common_layers=none", "clustering.n_clusters=3", local=local)
    oracle = run("pacfl", "clustering.grouping=planted", local=local)
    assert same(tree.models, oracle.models)
    plain = run("pacfl", "clustering.grouping=planted")
    # The clients of a task have equally many samples, so there FedNova is FedAvg.
    assert same(tree.models, plain.models) == (local == "fednova")


def test_each_cluster_has_its_own_c(run: Run):
    """c of a cluster is the mean of its members' c_i, whoever took part."""
    ran = run("pacfl", "clustering.grouping=planted", "training.participation=0.6", local="scaffold")
    assert ran.last.vectors.shape == (3, P)
    groups = np.array(GROUPS)
    known = ran.last.state_clients
    for group in range(3):
        members = groups[known] == group
        mean = ran.states[members].astype(np.float64).sum(axis=0) / (groups == group).sum()
        np.testing.assert_allclose(ran.last.vectors[group], mean, atol=1e-6)


def test_fednova_is_normalised_within_the_clusters(run: Run):
    """Alone in its cluster nobody is normalised: that is SOLO, however many steps each takes."""
    alone = run("pacfl", "clustering.threshold=0", local="fednova")
    assert same(alone.models, run("solo").states)


def test_common_layers_are_averaged_whatever_the_objective(run: Run):
    from tests.algorithms.test_identities import FC1

    for local in OBJECTIVES:
        tree = run("mt_hfl", "hierarchy={common_layers: 1}", "clustering.n_clusters=3", local=local)
        assert same(tree.models[0, :FC1], tree.models[1, :FC1])
        assert same(tree.models[0, :FC1], tree.models[2, :FC1])
        assert np.isfinite(tree.models).all()
