"""Masks by hand, channels of LeNet-5 entry by entry, and smaller networks that answer as the masked ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.local.pruning import (
    Rule,
    conv_flops,
    distance,
    expand,
    gammas,
    next_share,
    prunable,
    pruned,
    shrink,
    structured,
    unstructured,
)
from rayfl.models import MODELS, ModelSpec
from rayfl.random import orders
from rayfl.training import LocalWork, Terms
from rayfl.training.batched import BatchedEngine
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from tests.training.bounds import Truth, assert_within
from tests.training.conftest import make_samples


def make_spec(name: str = "lenet5", shape: tuple[int, ...] = (3, 32, 32), **config: Any) -> ModelSpec:
    return ModelSpec.of(MODELS[name](**config), shape, 10, 0)


LENET = make_spec(batch_norm=True)
PLACES = dict(zip(LENET.names, LENET.slices, strict=True))


def trained(spec: ModelSpec, seed: int = 0) -> np.ndarray:
    """A model no number of which is special: shifts, statistics and all (variances positive)."""
    vector = np.random.default_rng(seed).normal(0, 0.3, spec.P).astype(np.float32)
    for name, place in zip(spec.names, spec.slices, strict=True):
        if name.endswith("running_var"):
            vector[place] = np.abs(vector[place]) + 0.5
    return vector


# --- unstructured ----------------------------------------------------------------------------------------


def test_only_weights_are_prunable():
    """LeNet-5 on CIFAR-10: 450 + 2400 weights of convolutions, 48000 + 10080 + 840 of linear layers."""
    assert prunable(LENET).sum() == 450 + 2400 + 48_000 + 10_080 + 840
    assert prunable(LENET, fully_connected=True).sum() == 48_000 + 10_080 + 840
    for name, place in PLACES.items():
        weight = name.endswith(".weight") and not name.startswith("norm")
        assert prunable(LENET)[place].all() == prunable(LENET)[place].any() == weight
        assert prunable(LENET, True)[place].any() == (weight and name.startswith("fc"))


def test_the_smallest_survivors_are_pruned_by_hand():
    """A 2 x 3 linear model: |w| = 6, 1, 5, 2, 4, 3. Half of them, then half of the rest; biases never."""
    spec = ModelSpec.of(MODELS["linear"](), (3,), 2, 0)
    vector = np.array([6, -1, 5, 2, -4, 3, 0.1, -0.1], np.float32)
    everything = np.ones(8, np.bool_)
    half = unstructured(spec, vector, everything, 0.5)
    assert half.tolist() == [True, False, True, False, True, False, True, True]
    quarter = unstructured(spec, vector, half, 0.5)  # of 6, 5, 4 the median is 5: only 4 lies below
    assert quarter.tolist() == [True, False, True, False, False, False, True, True]
    assert unstructured(spec, vector, half, 0.0).tolist() == half.tolist()
    assert pruned(half, prunable(spec)) == 0.5
    assert pruned(everything, prunable(spec)) == 0
    # What was pruned stays so, whatever its value has become.
    grown = np.where(half, vector, 100).astype(np.float32)
    assert unstructured(spec, grown, half, 0.5).tolist() == quarter.tolist()


@pytest.mark.parametrize("gone", [0.0, 0.2, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_threshold_is_the_quantile_of_the_survivors_however_few(gone: float, share: float) -> None:
    """With ties and zeros among the survivors, too."""
    rng = np.random.default_rng(round(1000 * gone))
    vector = np.round(trained(LENET), 3)
    mask = (rng.random(LENET.P) >= gone) | ~prunable(LENET)
    found = unstructured(LENET, vector * mask, mask, share)
    alive = mask & prunable(LENET)
    threshold = np.quantile(np.abs(vector[alive]).astype(np.float64), share)
    expected = mask & ~(alive & (np.abs(vector) < threshold))
    assert alive.sum() > 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_impossible_shares(share: float):
    with pytest.raises(ValueError, match="share"):
        unstructured(LENET, trained(LENET), np.ones(LENET.P, np.bool_), share)


def test_one_threshold_for_all_or_one_a_layer():
    vector, everything = trained(LENET), np.ones(LENET.P, np.bool_)
    vector[PLACES["fc3.weight"]] *= 0.01
    globally = unstructured(LENET, vector, everything, 0.1)
    per_layer = unstructured(LENET, vector, everything, 0.1, per_layer=True)
    assert not globally[PLACES["fc3.weight"]].all()
    assert globally[PLACES["fc3.weight"]].mean() < 0.1
    for name in ("conv1", "conv2", "fc1", "fc2", "fc3"):
        assert per_layer[PLACES[f"{name}.weight"]].mean() == pytest.approx(0.9, abs=2e-3)
    for mask in (globally, per_layer):
        assert pruned(mask, prunable(LENET)) == pytest.approx(0.1, abs=1e-3)
        assert mask[~prunable(LENET)].all()
    hybrid = unstructured(LENET, vector, everything, 0.1, fully_connected=True)
    assert hybrid[~prunable(LENET, True)].all()


def test_distance_by_hand():
    one, other = np.array([1, 1, 0, 0], np.bool_), np.array([1, 0, 1, 0], np.bool_)
    assert distance(one, other) == 0.5
    assert distance(one, one) == 0
    assert distance(one, ~one) == 1
    with pytest.raises(ValueError, match="expected equal shapes"):
        distance(one, one[:2])


def test_the_rule_needs_all_three():
    rule = Rule(accuracy=0.5, target=0.3, distance=1e-4)
    assert rule.allows(0.5, 0.29, 1e-4)
    assert not rule.allows(0.49, 0.29, 1e-4)
    assert not rule.allows(0.5, 0.3, 1e-4)
    assert not rule.allows(0.5, 0.29, 0.9e-4)


def test_steps_end_at_the_target():
    """10 % of the survivors at a time: 10, 19, 27.1 %, then what is missing to 30 %."""
    share, rounds = 0.0, []
    while share < 0.3 - 1e-12:
        share += (1 - share) * next_share(share, 0.3, 0.1)
        rounds.append(share)
    np.testing.assert_allclose(rounds, [0.1, 0.19, 0.271, 0.3])
    assert next_share(0.5, 0.3, 0.1) == 0
    assert next_share(1.0, 1.0, 0.1) == 0


# --- channels --------------------------------------------------------------------------------------------


def test_channels_are_ranked_over_the_whole_network_by_hand():
    """22 scales, 22 to 1 in conv1 and conv2: the lowest half are those of conv2's last eleven channels."""
    vector = trained(LENET)
    vector[PLACES["norm1.weight"]] = np.arange(22, 16, -1)
    vector[PLACES["norm2.weight"]] = -np.arange(16, 0, -1)  # by absolute value
    assert gammas(LENET, vector).tolist() == [*range(22, 16, -1), *range(-16, 0)]
    everything = np.ones(22, np.bool_)
    half = structured(LENET, vector, everything, 0.5)
    assert half.tolist() == [True] * 11 + [False] * 11
    # The rest again by half: 22 ... 12, whose median is 17, less than all of conv1; conv2 keeps its largest.
    assert structured(LENET, vector, half, 0.5).tolist() == [True] * 7 + [False] * 15
    assert structured(LENET, vector, everything, 0.5, per_layer=True).tolist() == (
        [True] * 3 + [False] * 3 + [True] * 8 + [False] * 8
    )


def test_a_layer_keeps_its_largest_channel():
    vector = trained(LENET)
    vector[PLACES["norm1.weight"]] = 10
    vector[PLACES["norm2.weight"]] = np.r_[0.1, 0.3, 0.2, np.zeros(13)]
    kept = structured(LENET, vector, np.ones(22, np.bool_), 0.9)
    assert kept.tolist() == [True] * 6 + [False, True] + [False] * 14
    assert structured(LENET, vector, kept, 0.9).tolist() == kept.tolist()


def test_a_pruned_channel_entry_by_entry():
    """Channel 1 of conv1 and channel 15 of conv2."""
    channels = np.ones(22, np.bool_)
    channels[[1, 6 + 15]] = False
    mask = expand(LENET, channels)
    expected = {name: np.ones(shape, bool) for name, shape in zip(LENET.names, LENET.shapes, strict=True)}
    for name in ("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias"):
        expected[name][1] = False
    expected["norm1.running_mean"][1] = expected["norm1.running_var"][1] = False
    expected["norm2.running_mean"][15] = expected["norm2.running_var"][15] = False
    expected["conv2.weight"][:, 1] = False
    for name in ("conv2.weight", "conv2.bias", "norm2.weight", "norm2.bias"):
        expected[name][15] = False
    expected["fc1.weight"][:, 375:400] = False  # 25 pixels a channel
    for name, place in PLACES.items():
        assert mask[place].tolist() == expected[name].ravel().tolist(), name
    assert gammas(LENET, mask).tolist() == channels.tolist()
    assert expand(LENET, np.ones(22, np.bool_)).all()


def test_networks_without_such_channels_are_refused():
    with pytest.raises(ValueError, match="no convolution with a BatchNorm"):
        gammas(make_spec(), np.zeros(make_spec().P))
    with pytest.raises(ValueError, match="not a chain"):
        expand(make_spec("resnet9"), np.ones(4, np.bool_))
    with pytest.raises(ValueError, match="a mask of 22"):
        expand(LENET, np.ones(21, np.bool_))
    nothing = np.ones(22, np.bool_)
    nothing[:6] = False
    with pytest.raises(ValueError, match="conv1 keeps no channel"):
        shrink(LENET, trained(LENET), nothing)


# --- smaller networks ------------------------------------------------------------------------------------


def keep(spec: ModelSpec, *kept: list[int]) -> np.ndarray:
    """Channels ``(K,)`` of which those listed for each convolution are kept."""
    widths = [spec.shapes[spec.names.index(f"norm{k}.weight")][0] for k in (1, 2)]
    return np.concatenate([np.isin(np.arange(width), own) for width, own in zip(widths, kept, strict=True)])


@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [
        ("lenet5", {"batch_norm": True}, (3, 32, 32)),
        ("lenet5", {"batch_norm": True}, (1, 28, 28)),
        ("subfedavg_cnn", {}, (1, 28, 28)),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_the_smaller_network_answers_as_the_masked_one(
    name: str, config: dict[str, Any], shape: tuple[int, ...], training: bool
):
    spec = make_spec(name, shape, **config)
    channels = keep(spec, [0, 3, 5], [1, 2, 7])
    vector = trained(spec)
    masked = spec.build()
    spec.load(masked, np.where(expand(spec, channels), vector, 0).astype(np.float32))
    small = shrink(spec, vector, channels)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, *shape)))
    masked, small = masked.double(), small.double()
    with torch.no_grad():
        answers = masked.train(training)(x), small.train(training)(x)
    assert answers[0].std() > 0.1
    torch.testing.assert_close(answers[1], answers[0])
    # And they change together in training: statistics of what was kept.
    for norm, kept in (("norm1", [0, 3, 5]), ("norm2", [1, 2, 7])):
        one, other = masked.get_submodule(norm), small.get_submodule(norm)
        torch.testing.assert_close(other.running_mean, one.running_mean[kept])
        torch.testing.assert_close(other.running_var, one.running_var[kept])
    size = sum(p.numel() for p in small.parameters())
    removed = ~expand(spec, channels)[: spec.n_parameters]
    assert size == spec.n_parameters - removed.sum()


def test_nothing_pruned_is_the_same_network():
    vector = trained(LENET)
    small = shrink(LENET, vector, np.ones(22, np.bool_))
    assert LENET.flatten(small).tobytes() == vector.tobytes()


def test_convolutions_are_counted_by_hand():
    """conv1: 3 x 25 x 6 x 28 x 28, conv2: 6 x 25 x 16 x 10 x 10 multiplications and as many additions."""
    whole = 2 * (75 * 6 * 28 * 28 + 150 * 16 * 10 * 10)
    assert conv_flops(LENET.build(), (3, 32, 32)) == whole == 2 * 592_800
    channels = keep(LENET, [0, 1, 2], list(range(8)))  # 11 of 22, half of each layer
    small = shrink(LENET, trained(LENET), channels).train()
    halved = 2 * (75 * 3 * 28 * 28 + 75 * 8 * 10 * 10)
    assert conv_flops(small, (3, 32, 32)) == halved
    assert small.training
    assert whole / halved == pytest.approx(2.5, abs=0.02)  # the thesis prints 2.4 for half of the channels
    assert conv_flops(make_spec("mlp").build(), (3, 32, 32)) == 0


def test_masked_training_stays_inside_the_smaller_network():
    """A client that trains under the mask ends where one that trains the smaller network ends."""
    samples = make_samples((1, 28, 28), 40, 10)
    spec = make_spec(shape=(1, 28, 28), batch_norm=True)
    channels = keep(spec, [0, 3, 5], [1, 2, 7, 9])
    mask = expand(spec, channels)
    batches = Batches(samples, torch.device("cpu"))
    work = LocalWork(epochs=2, batch_size=4, lr=0.02, momentum=0.5)
    own = np.arange(8)
    terms = Terms(mask=torch.from_numpy(mask[None]))
    start = spec.initial()
    given = work, 0, [0], [own], torch.from_numpy(start[None]), terms
    truth = Truth.of(spec, batches, 0, *given)
    ends = []
    for make in (LoopEngine, BatchedEngine):
        block = make(spec, batches, 0).train(*given)
        truth.check(block)
        assert (block.rows[0].numpy()[: spec.n_parameters][~mask[: spec.n_parameters]] == 0).all()
        ends.append(block.rows[0].numpy())
    small = shrink(spec, start, channels).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=work.lr, momentum=work.momentum)
    x, y = batches.train(own)
    for epoch in orders(0, 0, [0], [len(own)], work.epochs)[0]:
        for at in range(0, len(epoch), work.batch_size):
            batch = epoch[at : at + work.batch_size].copy()
            optimizer.zero_grad()
            nn.functional.cross_entropy(small(x[batch]), y[batch]).backward()
            optimizer.step()
    shrunk = shrink(spec, ends[0], channels)
    one, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (small, shrunk))
    assert_within(float((one - other).norm()), 2 * truth.rows[0])  # both are that near the truth
