"""The flat layout: round trips, buffers, layers, and initialisation that no process disturbs."""

import hashlib
import pickle
import subprocess
import sys
import warnings
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.errors import ConfigError
from rayfl.models.base import Model
from rayfl.models.flat import ModelSpec
from rayfl.models.lenet5 import LeNet5
from rayfl.models.mlp import Mlp
from rayfl.models.resnet9 import ResNet9

BATCH_NORM = ModelSpec.of(LeNet5(batch_norm=True), (1, 28, 28), 10, seed=3)
SMALL = ModelSpec.of(Mlp(hidden=(3,)), (2,), 2, seed=3)  # fc1 3x2 + 3, fc2 2x3 + 2


def test_layout_by_hand():
    assert SMALL.names == ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    assert SMALL.shapes == ((3, 2), (3,), (2, 3), (2,))
    assert SMALL.slices == (slice(0, 6), slice(6, 9), slice(9, 15), slice(15, 17))
    assert (SMALL.P, SMALL.n_parameters, SMALL.nbytes) == (17, 17, 68)
    assert SMALL.layers == {"fc1": [(0, 9)], "fc2": [(9, 17)]}


def test_load_puts_every_number_in_its_place():
    module = SMALL.build()
    SMALL.load(module, np.arange(17, dtype=np.float32))
    assert module.get_parameter("fc1.weight").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert module.get_parameter("fc1.bias").tolist() == [6, 7, 8]
    assert module.get_parameter("fc2.weight").tolist() == [[9, 10, 11], [12, 13, 14]]
    assert module.get_parameter("fc2.bias").tolist() == [15, 16]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_round_trip_keeps_storage(as_tensor: bool):
    rng = np.random.default_rng(0)
    vector = rng.random(BATCH_NORM.P, dtype=np.float32)
    module = BATCH_NORM.build()
    before = [parameter.data_ptr() for parameter in module.parameters()]
    BATCH_NORM.load(module, torch.from_numpy(vector) if as_tensor else vector)
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
    assert np.array_equal(BATCH_NORM.flatten(module), vector)
    out = torch.zeros(2, BATCH_NORM.P)
    BATCH_NORM.store(module, out[1])  # a row of a block's matrix
    assert torch.equal(out[1], torch.from_numpy(vector))
    assert not out[0].any()


def test_read_only_arrays_load_silently_and_stay_as_they_are():
    vector = SMALL.initial(9)
    vector.flags.writeable = False
    copy = vector.copy()
    module = SMALL.build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SMALL.load(module, vector)
    with torch.no_grad():
        module.get_parameter("fc1.bias").add_(1.0)
    assert np.array_equal(vector, copy)


def test_buffers_follow_the_parameters_and_belong_to_their_layer():
    # Regression: published code never aggregates the running statistics of BatchNorm.
    n = 44_426 + 2 * 6 + 2 * 16
    assert BATCH_NORM.n_parameters == n
    assert BATCH_NORM.P - n == 2 * 6 + 2 * 16
    assert BATCH_NORM.names[-4:] == (
        "norm1.running_mean", "norm1.running_var", "norm2.running_mean", "norm2.running_var",
    )  # fmt: skip
    # conv1: 6*25 + 6, then norm1's 6 + 6; conv2: 16*6*25 + 16, then norm2's 16 + 16
    assert BATCH_NORM.layers["conv1"] == [(0, 168), (n, n + 12)]
    assert BATCH_NORM.layers["conv2"] == [(168, 168 + 2416 + 32), (n + 12, n + 44)]
    module = BATCH_NORM.build()
    module.train()(torch.rand(4, 1, 28, 28) + 5.0)
    vector = BATCH_NORM.flatten(module)
    assert np.array_equal(vector[n : n + 6], module.get_buffer("norm1.running_mean").numpy())
    assert vector[n : n + 6].any()


def test_layers_divide_the_vector():
    for spec in (SMALL, BATCH_NORM, ModelSpec.of(ResNet9(), (3, 32, 32), 10, seed=0)):
        count = np.zeros(spec.P, int)
        for layer in spec.layers:
            count += spec.mask([layer])
        assert (count == 1).all()


def test_segment_and_mask():
    assert SMALL.segment(first=1) == SMALL.segment(["fc1"]) == [(0, 9)]
    assert SMALL.segment(["fc2", "fc1"]) == SMALL.segment(first=2) == [(0, 17)]
    assert SMALL.segment(first=0) == SMALL.segment([]) == []
    assert SMALL.mask(["fc2"]).tolist() == [False] * 9 + [True] * 8
    assert SMALL.mask(first=1).tolist() == [True] * 9 + [False] * 8


def test_unknown_layers_are_refused():
    with pytest.raises(ConfigError, match=r"mlp has no layer 'fc3'; did you mean 'fc"):
        SMALL.segment(["fc3"])
    with pytest.raises(ConfigError, match="mlp has 2 layers, not 3"):
        SMALL.mask(first=3)
    with pytest.raises(ValueError, match="either"):
        SMALL.segment()
    with pytest.raises(ValueError, match="either"):
        SMALL.segment(["fc1"], first=1)


def test_state_dict_loads_into_the_module():
    vector = BATCH_NORM.initial(5)
    module = BATCH_NORM.build()
    module.load_state_dict(BATCH_NORM.to_state_dict(vector))
    assert np.array_equal(BATCH_NORM.flatten(module), vector)


@pytest.mark.parametrize(
    "wrong", [np.zeros(16, np.float32), np.zeros(17), torch.zeros(17, dtype=torch.float64)]
)
def test_wrong_vectors_are_refused(wrong):
    with pytest.raises(ValueError, match="needed"):
        SMALL.load(SMALL.build(), wrong)


def test_a_foreign_module_is_refused():
    with pytest.raises(ValueError, match="not a mlp"):
        SMALL.flatten(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="shape"):
        SMALL.flatten(Mlp(hidden=(3,)).build((5,), 2))


def test_initialisation_depends_on_its_key_alone():
    torch.manual_seed(1)
    first = SMALL.initial()
    torch.manual_seed(2)
    torch.rand(7)
    assert np.array_equal(SMALL.initial(), first)
    assert np.array_equal(SMALL.initial(3), first)
    assert np.array_equal(SMALL.flatten(SMALL.build()), first)
    assert not np.array_equal(SMALL.initial(4), first)
    assert not np.array_equal(SMALL.initial(index=1), first)


def test_initialisation_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    SMALL.initial()
    SMALL.build()
    ModelSpec.of(Mlp(), (2,), 2, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_initialisation_is_equal_in_another_process():
    code = (
        "import hashlib, pickle, sys, torch; torch.rand(3);"
        "spec = pickle.loads(sys.stdin.buffer.read());"
        "print(hashlib.sha256(spec.initial().tobytes()).hexdigest())"
    )
    spec = pickle.dumps(BATCH_NORM)
    there = subprocess.run([sys.executable, "-c", code], input=spec, capture_output=True, check=True)
    assert there.stdout.decode().strip() == hashlib.sha256(BATCH_NORM.initial().tobytes()).hexdigest()


def test_the_spec_is_small_and_survives_pickling():
    blob = pickle.dumps(BATCH_NORM)
    assert len(blob) < 3000
    assert pickle.loads(blob) == BATCH_NORM


class Overlapping(Mlp):
    name: Literal["mlp"] = "mlp"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"a": ("fc1",), "b": ("fc1", "fc2")}


class Incomplete(Mlp):
    name: Literal["mlp"] = "mlp"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"fc1": ("fc1",)}


class Doubles(Model):
    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"fc": ("0",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], classes)).double()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Overlapping(), "two layers"),
        (Incomplete(), r"tensors in no layer: fc2\.weight"),
        (Doubles(), "float64"),
    ],
)
def test_a_broken_declaration_is_refused(model: Model, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelSpec.of(model, (2,), 2, seed=0)
