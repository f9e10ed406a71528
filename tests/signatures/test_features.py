import pickle

import numpy as np
import pytest

from rayfl.clustering.config import FEATURES
from rayfl.errors import DataError
from rayfl.signatures.features.identity import Identity
from rayfl.signatures.features.pca import PCA
from rayfl.signatures.features.resnet18 import ResNet18


def test_all_feature_maps_are_found():
    assert {"identity", "pca", "resnet18"} <= set(FEATURES)


def test_identity_flattens_images_only():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    features = Identity().fit(np.empty((0, 3, 2, 2))).apply(x)
    assert np.array_equal(features, np.arange(24).reshape(2, 12))
    assert Identity().public_samples == 0


def test_pca_projects_on_the_directions_of_most_energy():
    public = np.array([[0, 3, 0], [0, 0, 2], [1, 0, 0]], np.float32)
    features = PCA(dim=2).fit(public).apply(np.array([[5.0, 6.0, 7.0]]))
    assert np.allclose(features, [[6, 7]])
    assert features.dtype == np.float32


def test_centred_pca_ignores_the_mean_and_uncentred_does_not():
    rng = np.random.default_rng(0)
    public = rng.normal(size=(50, 4)) * [1, 2, 3, 4]
    shift = np.array([100.0, 0, 0, 0])
    centred = PCA(dim=2, centred=True)
    assert np.allclose(
        centred.fit(public).apply(public), centred.fit(public + shift).apply(public + shift), atol=1e-3
    )
    uncentred = PCA(dim=1).fit(public + shift)
    assert np.abs(uncentred.components[:, 0]).argmax() == 0


def test_pca_features_of_all_dimensions_keep_inner_products():
    x = np.random.default_rng(1).normal(size=(30, 6))
    features = PCA(dim=6).fit(x).apply(x)
    assert np.allclose(features @ features.T, x @ x.T, atol=1e-4)


def test_pca_travels_and_refuses_what_does_not_fit():
    fitted = PCA(dim=2).fit(np.random.default_rng(2).normal(size=(9, 5)))
    x = np.ones((1, 5))
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).apply(x), fitted.apply(x))
    with pytest.raises(DataError, match="fitted on 5 features; these have 4"):
        fitted.apply(np.ones((1, 4)))
    with pytest.raises(DataError):
        PCA().fit(np.empty((0, 5)))
    with pytest.raises(DataError, match="do not vary"):
        PCA(centred=True).fit(np.ones((4, 5)))


def test_missing_resnet_weights_are_one_line_that_names_an_alternative(tmp_path):
    with pytest.raises(DataError, match="features 'pca'") as caught:
        ResNet18(weights=tmp_path / "none.pth").fit(np.empty((0, 3, 32, 32)))
    assert "\n" not in str(caught.value)


def test_resnet_with_local_weights_turns_images_into_512_features(tmp_path):
    torch = pytest.importorskip("torch")
    from rayfl.torchvision_shim import torchvision_models

    torch.manual_seed(0)
    path = tmp_path / "weights.pth"
    torch.save(torchvision_models().resnet18().state_dict(), path)
    fitted = ResNet18(weights=path, size=32, batch=2).fit(np.empty((0, 3, 32, 32)))
    x = np.random.default_rng(0).random((3, 3, 32, 32), dtype=np.float32)
    features = fitted.apply(x)
    assert features.shape == (3, 512)
    assert features.std(axis=0).max() > 0  # depends on the image
    copy = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(copy.apply(x), features)
    assert fitted.apply(x[:, :1]).shape == (3, 512)  # grey
    with pytest.raises(DataError, match=r"use clustering\.features=pca"):
        fitted.apply(np.ones((2, 784), np.float32))
