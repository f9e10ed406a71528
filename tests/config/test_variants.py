"""What an algorithm brings and what it does not use; configs to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import yaml

from rayfl.algorithms import ALGORITHMS
from rayfl.config import load, reload, transfer, variant
from rayfl.errors import ConfigError
from tests.config.common import refusal

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
    robust = {"algorithm": "pacfl", "aggregation": {"name": "trimmed_mean", "share": 0.2}}
    assert variant(robust, [], "ifca").aggregation == load(robust).aggregation
    assert variant(robust, [], "solo").aggregation.name == "mean"
    with pytest.raises(ConfigError, match="'median' makes no sense with solo"):
        variant(robust, ["aggregation=median"], "solo")
    source = {"algorithm": "pacfl", "clustering": {"signature": {"p": 5}, "threshold": 6, "n_clusters": None}}
    assert variant(source, [], "pacfl").clustering.signature.p == 5
    assert variant(source, [], "mt_hfl").clustering.signature.name == "spectrum"


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"per_fedavg"}))
@pytest.mark.parametrize("preset", ["pacfl-fmnist", "flt-scenario1", "mthfl-cifar10", "subfedavg-cifar10"])
def test_another_algorithm_is_the_same_alone_and_in_a_comparison(preset, name):
    """Alone, PCA+kM+HC had FLT's encoder and graph, and FLT was refused with PACFL's proximities."""
    expected = variant(preset, [], name)
    assert load(preset, [f"algorithm={name}"]) == expected
    assert load(preset, algorithm=ALGORITHMS[name]()) == expected
    # A complete config names all defaults; whether a file named them, too, is not known.
    complete = load(load(preset), [f"algorithm={name}"])
    assert complete.model_copy(update={"hierarchy": expected.hierarchy}) == expected
    if preset != "mthfl-cifar10":  # names global_every: 1, MT-HFL's default
        assert complete == expected


def test_momentum_is_left_out_in_comparisons_only():
    assert variant("pacfl-fmnist", [], "per_fedavg").training.momentum == 0
    assert "momentum 0.5 makes no sense" in refusal("pacfl-fmnist", "algorithm=per_fedavg")


def test_a_local_objective_belongs_to_its_algorithm():
    source = {"algorithm": "fedprox", "local": {"mu": 0.1}}
    assert load(source, ["algorithm=fedavg"]).local.name == "sgd"
    assert load({**source, "local": {"name": "fedprox", "mu": 0.1}}, ["algorithm=fedavg"]).local.name == "sgd"
    chosen = {"algorithm": "pacfl", "local": {"name": "fedprox", "mu": 0.1}}  # not PACFL's own
    assert load(chosen, ["algorithm=flt"]).local.mu == 0.1
    proximal = load(load({"algorithm": "fedsoft"}), ["algorithm=fedprox"])
    assert proximal.local == load({"algorithm": "fedprox"}).local
    without = {"local": "fedprox", "clustering": {"n_clusters": 4, "threshold": None}}  # for any algorithm
    config = load(without, ["algorithm=pacfl"])
    assert (config.local.name, config.clustering.n_clusters) == ("fedprox", 4)


def test_parts_do_not_bring_back_what_is_left_out():
    alone = load("pacfl-fmnist", ["algorithm=flt", "clustering.gamma=1.0"])
    assert load("pacfl-fmnist", ["algorithm=flt"], clustering={"gamma": 1.0}) == alone
    assert load("pacfl-fmnist", algorithm=ALGORITHMS["flt"](), clustering={"gamma": 1.0}) == alone


@pytest.mark.parametrize("local", ["scaffold", {"name": "scaffold"}])
def test_a_method_with_a_required_setting_can_be_chosen(local):
    class Required(ALGORITHMS["fedavg"]):  # type: ignore[misc, name-defined]
        name: Literal["required"] = "required"
        rate: float
        defaults: ClassVar[Mapping[str, Any]] = {"local": local}

    kept = transfer.transferred({"algorithm": "fedavg", "local": "sgd", "rounds": 3}, Required)
    assert kept == {"algorithm": "fedavg", "rounds": 3}
    assert transfer.transferred({"algorithm": "fedavg", "local": "fedprox"}, Required)["local"] == "fedprox"


def test_the_algorithm_of_the_source_keeps_all_its_settings():
    overrides = ["clustering.threshold=7", "algorithm=pacfl"]
    assert load("pacfl-fmnist", overrides).clustering.proximity == "vector_angle_min"
    other = load("pacfl-fmnist", ["algorithm=flt", "clustering.gamma=1.0"]).clustering
    assert (other.signature.name, other.gamma, other.threshold) == ("centroids", 1.0, None)


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


def test_runs_from_before_can_be_read(tmp_path):
    settings = load("digits-demo").to_dict() | {"algorithm": "fedavg"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert refusal(path).startswith("clustering.signature: would do nothing")
    assert reload(path) == load("digits-demo", ["algorithm=fedavg"])


def test_the_config_of_a_run_is_not_empty(tmp_path):
    """An empty file of a user means the defaults; that of a run has been damaged."""
    path = tmp_path / "config.yaml"
    path.touch()
    assert load(path) == load({})
    with pytest.raises(ConfigError, match=r"config\.yaml: is empty; it held the settings of a run"):
        reload(path)
