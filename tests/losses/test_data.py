"""Where numbers to predict come from: arrays, functions, datasets of PyTorch, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rayfl
from rayfl.data import Samples, fingerprint, read_npz, write_npz
from rayfl.data.held_out import hold_out
from rayfl.errors import DataError

CODE = """
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

X = np.random.default_rng(0).random((30, 3), np.float32)
Y = (X @ [1, 2, 3]).astype(np.float32)
TWO = np.stack([Y > 3, Y > 2], axis=1).astype(int)

class Pairs(Dataset):
    def __init__(self, y):
        self.y = y
    def __len__(self):
        return 30
    def __getitem__(self, i):
        return torch.from_numpy(X[i]), self.y(i)

def load():
    return {}
"""
SOURCES: dict[str, tuple[str, int]] = {
    "floats": ("X, Y", 1),
    "a column": ("X, Y[:, None]", 1),
    "labels": ("X, TWO", 2),
    "truths": ("X, TWO > 0", 2),
    "a dictionary": ("dict(x=X, y=TWO)", 2),
    "tensors": ("TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))", 1),
    "a dataset of floats": ("Pairs(lambda i: float(Y[i]))", 1),
    "a dataset of tensors": ("Pairs(lambda i: torch.from_numpy(TWO[i]))", 2),
    "two datasets": ("(Pairs(lambda i: Y[i]), Pairs(lambda i: Y[i]))", 1),
}


def load(code: str, folder: Path, **more: Any) -> Samples:
    file = folder / f"mine_{folder.name}.py"
    file.write_text(CODE.replace("{}", code))
    test = {} if code.startswith("(Pairs") else {"test_fraction": 0.2}
    data = {"name": "python", "target": f"{file}:load", **test, **more}
    return rayfl.load({"data": data, "loss": "mse"}).data.load(folder)


@pytest.mark.parametrize("kind", SOURCES)
def test_numbers_come_as_they_are(kind: str, tmp_path: Path) -> None:
    code, outputs = SOURCES[kind]
    samples = load(code, tmp_path)
    assert samples.numeric
    assert (samples.outputs, samples.classes) == (outputs, 1)
    for targets, y in ((samples.targets_train, samples.y_train), (samples.targets_test, samples.y_test)):
        assert targets is not None
        assert targets.dtype == np.float32
        assert targets.shape == (len(y), outputs)
        assert not y.any()
    if not code.startswith("(Pairs"):
        assert len(samples.y_test) == 6  # a fraction of all, not of each value


BAD = {
    "X, np.where(np.arange(30) == 4, np.nan, Y)": "y_train holds NaN or infinity",
    "Pairs(lambda i: float(Y[i]) if i != 3 else 1)": "sample 3 has the label 1 .int.; expected 1 numbers",
    "Pairs(lambda i: Y[i : i + 2] if i != 29 else Y[:3])": "sample 29 has the label .*; expected 2 numbers",
    "Pairs(lambda i: 'seven')": "sample 0 has the label 'seven' .str.; expected an integer from 0",
    "X, Y[:29]": "y",
}


@pytest.mark.parametrize("code", BAD)
def test_bad_numbers_are_refused_in_a_line(code: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=BAD[code]) as caught:
        load(code, tmp_path)
    assert "\n" not in str(caught.value)


def test_classes_are_not_announced_of_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has numbers to predict and no classes"):
        load("X, Y", tmp_path, classes=3)


def numbers() -> Samples:
    x = np.random.default_rng(0).random((30, 3), np.float32)
    y: NDArray[np.float32] = x[:, :2] * 2
    zeros = np.zeros(30, np.int64)
    return Samples("n", x, zeros, x[:5], zeros[:5], 1, targets_train=y, targets_test=y[:5])


def test_they_are_written_and_read_and_held_out(tmp_path: Path) -> None:
    samples = numbers()
    write_npz(tmp_path / "n.npz", samples)
    assert fingerprint(read_npz(tmp_path / "n.npz", "n")) == fingerprint(samples)
    left = hold_out(samples, 0.2, 0, 0)
    assert left.targets_train is not None
    np.testing.assert_array_equal(left.targets_train, left.x_train[:, :2] * 2)
    np.testing.assert_array_equal(samples.targets("train", np.array([3, 1])), samples.x_train[[3, 1], :2] * 2)
