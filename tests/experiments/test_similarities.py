"""MT-HFL's similarities without training: ``experiments/mt_hfl/similarities.py``."""

from __future__ import annotations

import numpy as np

from experiments.mt_hfl import similarities
from rayfl.data import Samples


def test_users_of_a_task_are_alike() -> None:
    users = similarities.tasks(([0, 1, 2], 2), ([7, 8, 9], 3), samples=100)
    r = similarities.similarities("digits-demo", users, [0, 1])
    assert r.shape == (2, 5, 5)
    np.testing.assert_array_equal(r, r.transpose(0, 2, 1))
    np.testing.assert_array_equal(r.diagonal(axis1=1, axis2=2), 1)
    alike = np.equal.outer([0, 0, 1, 1, 1], [0, 0, 1, 1, 1])
    assert r[:, alike].mean() > r[:, ~alike].mean() + 0.2


def test_classes_of_the_second_dataset_come_after_those_of_the_first(tmp_path, monkeypatch) -> None:
    class Two:
        def __init__(self, images: int) -> None:
            self.images = images

        def load(self, root):
            x, y = np.full((self.images, 2, 2, 3), self.images, np.uint8), np.arange(self.images) % 4
            return Samples("two", x, y, x[:4], y[:4], 4)

    sets = {"cifar10": lambda: Two(8), "cifar100": lambda: Two(12)}
    monkeypatch.setattr(similarities, "DATASETS", sets)
    with np.load(similarities.both_datasets(tmp_path)) as file:
        assert file["y_train"].tolist() == [*[0, 1, 2, 3] * 2, *[4, 5, 6, 7] * 3]
        assert (file["x_train"][:, 0, 0, 0] == [8] * 8 + [12] * 12).all()
        assert file["y_test"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_cell_is_a_mean_with_its_deviation() -> None:
    assert similarities._cell(np.array([0.5, 0.7])) == "0.60 ± 0.14"
    assert similarities._cell(np.array([0.5])) == "0.50 ± 0.00"
