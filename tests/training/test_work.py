"""Segments of the flat vector, batches, and the training section."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.config import load
from rayfl.data.scaling import Scaling
from rayfl.errors import ConfigError
from rayfl.training import LocalWork, Training, complement, gather, length, scatter_
from rayfl.training.batches import Batches, raw_features
from tests.training.conftest import make_samples

SIZE = 12


@st.composite
def segments(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Ascending disjoint ranges of range(SIZE), neighbours and empty ones included."""
    edges = sorted(draw(st.lists(st.integers(0, SIZE), max_size=8).filter(lambda e: len(e) % 2 == 0)))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def covered(parts: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for a, b in parts for i in range(a, b)]


@given(segments())
def test_segments_and_their_complement_divide_the_vector(parts):
    rest = complement(parts, SIZE)
    assert sorted(covered(parts) + covered(rest)) == list(range(SIZE))
    assert covered(rest) == sorted(covered(rest))
    assert length(parts) + length(rest) == SIZE
    assert covered(complement(rest, SIZE)) == covered(parts)
    assert all(a < b for a, b in rest)


@given(segments())
def test_gather_then_scatter_changes_nothing_else(parts):
    vector = torch.arange(2.0 * SIZE).reshape(2, SIZE)
    values = gather(vector, parts)
    assert values.tolist() == [[row[i] for i in covered(parts)] for row in vector.tolist()]
    other = torch.full((2, SIZE), -1.0)
    scatter_(other, parts, values)
    inside = set(covered(parts))
    for row in range(2):
        assert other[row].tolist() == [float(vector[row, i]) if i in inside else -1.0 for i in range(SIZE)]
    scatter_(other, complement(parts, SIZE), gather(vector, complement(parts, SIZE)))
    assert torch.equal(other, vector)


def test_gather_copies_and_scatter_writes_into_rows():
    vector = torch.zeros(3, 4)
    taken = gather(vector, ((0, 4),))
    taken += 1
    assert not vector.any()
    scatter_(vector[1], ((1, 2), (3, 4)), torch.tensor([5.0, 6.0]))
    assert vector.tolist() == [[0, 0, 0, 0], [0, 5, 0, 6], [0, 0, 0, 0]]
    assert gather(vector, ()).shape == (3, 0)


# --- batches ---------------------------------------------------------------------------------------------


def test_images_are_standardised_with_the_training_statistics():
    samples = make_samples((3, 5, 5))
    scaling = Scaling.of(samples)
    x = samples.x_train / 255
    np.testing.assert_allclose(scaling.mean, x.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(scaling.std, x.std(axis=(0, 2, 3)))
    batches = Batches(samples, torch.device("cpu"))
    inputs, labels = batches.train(np.array([4, 2, 4]))
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    expected = (x[[4, 2, 4]] - np.reshape(scaling.mean, (-1, 1, 1))) / np.reshape(scaling.std, (-1, 1, 1))
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)
    assert labels.tolist() == samples.y_train[[4, 2, 4]].tolist()
    everything, _ = batches.train(np.arange(80))
    assert everything.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    np.testing.assert_allclose(everything.std(dim=(0, 2, 3), correction=0), 1, atol=1e-5)
    inputs, labels = batches.test(np.array([1]))  # with the training statistics
    np.testing.assert_allclose(inputs.numpy(), everything[1:2].numpy(), atol=1e-6)
    assert labels.tolist() == samples.y_test[[1]].tolist()


def test_without_a_scaling_features_are_taken_as_they_are_and_the_data_stay_untouched():
    samples = make_samples((6,), uint8=False)
    samples = replace(samples, scaling=Scaling.none(samples))
    before = samples.x_train.copy()
    inputs, _ = Batches(samples, torch.device("cpu")).train(np.arange(80))
    assert inputs.numpy().tobytes() == before.tobytes()
    inputs.add_(1)
    assert (samples.x_train == before).all()


def test_integer_features_are_brought_to_0_1():
    samples = make_samples((6,))
    samples = replace(samples, scaling=Scaling.none(samples))
    inputs, _ = Batches(samples, torch.device("cpu")).train(np.arange(80))
    np.testing.assert_allclose(inputs.numpy(), samples.x_train / 255, rtol=1e-6)


def test_a_constant_channel_is_no_division_by_zero():
    samples = make_samples((1, 4, 4))
    samples.x_train[:] = 7
    inputs, _ = Batches(samples, torch.device("cpu")).train(np.arange(3))
    assert torch.isfinite(inputs).all()
    assert inputs.abs().max() < 0.1


def test_read_only_data_will_do(recwarn):
    """As they come from the object store."""
    samples = make_samples((1, 4, 4))
    for array in (samples.x_train, samples.y_train):
        array.flags.writeable = False
    Batches(samples, torch.device("cpu")).train(np.arange(5, dtype=np.int32))
    assert not recwarn.list


def test_raw_features():
    assert raw_features(np.array([[0, 255, 51]], np.uint8)).tolist() == [[0.0, 1.0, np.float32(0.2)]]
    floats = np.array([[-3.0, 700.0]])
    assert raw_features(floats).tolist() == floats.tolist()
    assert raw_features(floats).dtype == np.float32


# --- the training section ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "clients", "count"),
    [(1.0, 10, 10), (0.1, 100, 10), (0.1, 4, 1), (0.001, 100, 1), (0.5, 5, 2), (0.5, 7, 4), (1.0, 1, 1)],
)
def test_cohort(participation, clients, count):
    """max(1, round(rho N)), halves to even as Python rounds."""
    assert Training(participation=participation).cohort(clients) == count


@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [
        ("constant", [0.4, 0.4, 0.4, 0.4]),
        ("exponential", [0.4, 0.2, 0.1, 0.05]),
        ("inverse", [0.4, 0.4 / 1.5, 0.4 / 2, 0.4 / 2.5]),
        ("cosine", [0.4, 0.2 * (1 + math.sqrt(0.5)), 0.2, 0.2 * (1 - math.sqrt(0.5))]),
    ],
)
def test_learning_rates(schedule, by_hand):
    training = Training(lr=0.4, schedule=schedule, decay=0.5)
    assert [training.lr_at(t, 4) for t in range(4)] == pytest.approx(by_hand)


@given(schedule=st.sampled_from(["constant", "exponential", "cosine", "inverse"]), rounds=st.integers(1, 500))
def test_learning_rates_fall_and_stay_positive(schedule, rounds):
    training = Training(lr=0.1, schedule=schedule)
    rates = [training.lr_at(t, rounds) for t in range(rounds)]
    assert rates[0] == 0.1
    assert all(0 < later <= earlier for earlier, later in itertools.pairwise(rates))


def test_a_rate_that_would_grow_is_refused():
    with pytest.raises(ConfigError, match=r"training: decay 1\.5 would make the exponential"):
        load({"training": {"schedule": "exponential", "decay": 1.5}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": -3}, "epochs is -3; expected a finite number, 0 or more"),
        ({"batch_size": 0}, "batch_size is 0; expected a finite number, 1 or more"),
        ({"lr": math.nan}, "lr is nan; expected a finite number, 0 or more"),
        ({"lr": math.inf}, "lr is inf"),
        ({"weight_decay": -0.1, "proximal": 0.1}, "weight_decay is -0.1"),
        ({"inner_lr": -1.0}, "inner_lr is -1"),
        ({"lr_alpha": math.nan}, "lr_alpha is nan"),
        ({"lr_power": math.inf}, "lr_power is inf"),
        ({"snapshot_epoch": -1}, "snapshot_epoch is -1"),
        ({"epochs": 2.5}, "epochs is 2.5; expected a whole number"),
        ({"momentum": 0.5, "inner_lr": 0.1}, "takes no momentum"),
    ],
)
def test_work_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LocalWork(1, 10, 0.1), **changes)
