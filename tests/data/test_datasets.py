"""Datasets: those that come with the package, those of torchvision, and the synthetic one."""

from __future__ import annotations

import bz2
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rayfl.data import DATASETS, fingerprint, write_npz
from rayfl.data.datasets import _torchvision
from rayfl.data.datasets._images import pad, to_channels
from rayfl.errors import ConfigError, DataError
from rayfl.settings import summary
from rayfl.torchvision_shim import torchvision_datasets, torchvision_models

TORCHVISION = ("cifar10", "cifar100", "emnist", "fashion_mnist", "mnist", "stl10", "svhn", "usps")


def test_all_datasets_are_found_and_described() -> None:
    assert set(DATASETS) >= {*TORCHVISION, "digits", "leaf", "mix", "npz", "synthetic"}
    for name, dataset in DATASETS.items():
        assert len(summary(dataset)) > 20, name
        assert all(field.description for key, field in dataset.model_fields.items() if key != "name"), name


def test_importing_the_data_room_imports_neither_torchvision_nor_torch() -> None:
    code = "import sys, rayfl.data; print(sorted({'torch', 'torchvision', 'sklearn'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torchvision_can_be_imported() -> None:
    assert torchvision_datasets().CIFAR10.base_folder == "cifar-10-batches-py"
    assert torchvision_models().resnet18(num_classes=3).fc.out_features == 3


# --- images ---------------------------------------------------------------------------------------------


def test_digits(tmp_path: Path) -> None:
    samples = DATASETS["digits"]().load(tmp_path)
    assert samples.x_train.dtype == np.uint8
    assert samples.x_train.flags.c_contiguous
    assert samples.shape == (1, 8, 8)
    assert len(samples.y_train) + len(samples.y_test) == 1797
    everything = np.concatenate([samples.y_train, samples.y_test])
    expected = np.rint(0.2 * np.bincount(everything)).astype(int)
    np.testing.assert_array_equal(np.bincount(samples.y_test), expected)
    assert set(np.unique(samples.x_train)) <= {round(level * 255 / 16) for level in range(17)}
    assert samples.x_train.max() == 255
    assert fingerprint(samples) == fingerprint(DATASETS["digits"]().load(tmp_path))


def test_digits_can_be_padded_and_coloured(tmp_path: Path) -> None:
    plain = DATASETS["digits"]().load(tmp_path)
    samples = DATASETS["digits"](size=11, channels=3).load(tmp_path)
    assert samples.shape == (3, 11, 11)
    for channel in range(3):
        np.testing.assert_array_equal(samples.x_test[:, channel, 1:9, 1:9], plain.x_test[:, 0])
    assert samples.x_test.sum() == 3 * plain.x_test.astype(np.int64).sum()  # zeros elsewhere
    with pytest.raises(DataError, match="images of 8x8 do not fit in 7x7"):
        DATASETS["digits"](size=7).load(tmp_path)


def test_grey_is_luma() -> None:
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8).reshape(4, 3, 1, 1)
    np.testing.assert_array_equal(to_channels(colours, 1).ravel(), [76, 150, 29, 255])
    floats = to_channels(colours.astype(np.float32) / 255, 1)
    assert floats.dtype == np.float32
    np.testing.assert_allclose(floats.ravel(), [0.299, 0.587, 0.114, 1.0], rtol=1e-6)
    with pytest.raises(DataError, match="4 channels"):
        to_channels(np.zeros((1, 4, 2, 2), np.uint8), 3)


def test_padding_lies_on_all_sides() -> None:
    framed = pad(np.ones((1, 1, 28, 28), np.uint8), 32)
    assert framed[0, 0, 2:30, 2:30].all()
    assert framed.sum() == 28 * 28


# --- torchvision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_missing_dataset_is_one_line_with_both_ways_out(name: str, tmp_path: Path) -> None:
    dataset = DATASETS[name]()
    assert not dataset.available(tmp_path)
    with pytest.raises(DataError) as caught:
        dataset.load(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(tmp_path), f"`rayfl prepare {name}`", "data.name=npz data.path=file.npz"):
        assert part in message


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


@pytest.mark.parametrize(
    ("name", "settings", "prefix"),
    [
        ("mnist", {}, ("MNIST/raw/train", "MNIST/raw/t10k")),
        ("fashion_mnist", {}, ("FashionMNIST/raw/train", "FashionMNIST/raw/t10k")),
        (
            "emnist",
            {"split": "letters"},
            ("EMNIST/raw/emnist-letters-train", "EMNIST/raw/emnist-letters-test"),
        ),
        (
            "emnist",
            {"split": "balanced"},
            ("EMNIST/raw/emnist-balanced-train", "EMNIST/raw/emnist-balanced-test"),
        ),
        (
            "emnist",
            {"split": "digits"},
            ("EMNIST/raw/emnist-digits-train", "EMNIST/raw/emnist-digits-test"),
        ),
    ],
)
def test_torchvisions_idx_layout_is_read(
    name: str, settings: dict[str, str], prefix: tuple[str, str], tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = np.arange(5)
    emnist = name == "emnist"
    for part in prefix:
        path = tmp_path / f"{part}-images-idx3-ubyte"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            idx(images.transpose(0, 2, 1) if emnist else images)
        )  # EMNIST's files are transposed
        first = 1 if settings.get("split") == "letters" else 0
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels + first))
    dataset = DATASETS[name](**settings)
    assert dataset.available(tmp_path)
    samples = dataset.load(tmp_path)
    np.testing.assert_array_equal(samples.x_train[:, 0], images)
    assert samples.x_train.flags.c_contiguous
    np.testing.assert_array_equal(samples.y_test, labels)
    assert samples.classes == {"letters": 26, "balanced": 47}.get(settings.get("split", ""), 10)
    assert len(samples.class_names) == samples.classes

    path = tmp_path / f"{prefix[0]}-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"is broken .*rayfl prepare") as caught:
        dataset.load(tmp_path)
    assert "\n" not in str(caught.value)
    path.unlink()
    assert not dataset.available(tmp_path)


def test_torchvisions_usps_is_read(tmp_path: Path) -> None:
    pixels = " ".join(f"{i + 1}:{1 if i == 17 else -1}" for i in range(256))
    for file in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / file).write_bytes(bz2.compress(f"4 {pixels}\n10 {pixels}\n".encode()))
    samples = DATASETS["usps"](size=32).load(tmp_path)
    np.testing.assert_array_equal(samples.y_train, [3, 9])
    assert samples.shape == (1, 32, 32)
    assert samples.x_train[0, 0, 8 + 1, 8 + 1] == 255
    assert samples.x_train[0].sum() == 255


class FakeTorchvision:
    """Stands for ``torchvision.datasets``: a CIFAR10 that writes files and may fail half-way."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.downloads = 0
        self.folders: list[Path] = []

    def CIFAR10(self, root: str, download: bool, train: bool) -> SimpleNamespace:
        assert download
        assert socket.getdefaulttimeout() is not None
        self.folders.append(Path(root))
        (Path(root) / "half").write_bytes(b"...")
        self.downloads += train
        if not train and self.failure is not None:
            raise self.failure
        return SimpleNamespace(
            data=np.full((20, 32, 32, 3), 7, np.uint8), targets=[i % 10 for i in range(20)]
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorchvision:
    made = FakeTorchvision()
    monkeypatch.setattr(_torchvision, "torchvision_datasets", lambda: made)
    return made


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_prepare_downloads_once(fake: FakeTorchvision, tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    dataset = DATASETS["cifar10"]()
    assert "downloaded" in dataset.prepare(root)
    assert visible(root) == ["cifar10.npz"]
    assert "already" in dataset.prepare(root)
    assert fake.downloads == 1
    samples = dataset.load(root)
    assert samples.shape == (3, 32, 32)
    assert samples.class_names[8] == "ship"
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    "failure",
    [
        OSError("<urlopen error [Errno -3] Temporary failure\nin name resolution>"),
        RuntimeError("File corrupted."),
    ],
)
def test_a_failed_download_leaves_nothing_and_names_the_way_out(
    failure: Exception, fake: FakeTorchvision, tmp_path: Path
) -> None:
    fake.failure = failure
    dataset = DATASETS["cifar10"]()
    with pytest.raises(DataError) as caught:
        dataset.prepare(tmp_path)
    assert "\n" not in str(caught.value)
    assert "data.name=npz data.path=file.npz" in str(caught.value)
    assert " ".join(str(failure).split()) in str(caught.value)
    assert visible(tmp_path) == []
    assert not dataset.available(tmp_path)
    assert socket.getdefaulttimeout() is None
    fake.failure = None
    dataset.prepare(tmp_path)
    assert dataset.available(tmp_path)


def test_what_a_killed_download_left_is_removed(fake: FakeTorchvision, tmp_path: Path) -> None:
    left = tmp_path / ".cifar10-abc.download" / "cifar-10-batches-py"
    left.mkdir(parents=True)
    other = tmp_path / ".cifar100-abc.download"  # perhaps under way
    other.mkdir()
    assert not DATASETS["cifar10"]().available(tmp_path)
    DATASETS["cifar10"]().prepare(tmp_path)
    assert visible(tmp_path) == [other.name, "cifar10.npz"]


def test_callers_that_prepare_at_once_download_once(fake: FakeTorchvision, tmp_path: Path) -> None:
    threads = [threading.Thread(target=DATASETS["cifar10"]().prepare, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.downloads == 1


def test_emnist_prepares_all_splits_with_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[str] = []

    def emnist(root: str, download: bool, train: bool, split: str) -> SimpleNamespace:
        folders.append(root)
        return SimpleNamespace(data=np.zeros((3, 28, 28), np.uint8), targets=np.array([1, 2, 3]))

    monkeypatch.setattr(_torchvision, "torchvision_datasets", lambda: SimpleNamespace(EMNIST=emnist))
    DATASETS["emnist"]().prepare(tmp_path)
    assert visible(tmp_path) == ["emnist_balanced.npz", "emnist_digits.npz", "emnist_letters.npz"]
    assert len(set(folders)) == 1
    np.testing.assert_array_equal(DATASETS["emnist"](split="letters").load(tmp_path).y_train, [0, 1, 2])
    np.testing.assert_array_equal(DATASETS["emnist"](split="balanced").load(tmp_path).y_train, [1, 2, 3])


def test_prepare_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        DATASETS["mnist"]().prepare(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    samples = DATASETS["digits"]().load(tmp_path)
    samples.y_train[0] = 10
    write_npz(tmp_path / "usps.npz", samples)
    with pytest.raises(DataError, match="labels go up to 10"):
        DATASETS["usps"]().load(tmp_path)
    write_npz(tmp_path / "usps.npz", replace(samples, class_names=()))
    with pytest.raises(DataError, match="labels beyond its 10 classes"):
        DATASETS["usps"]().load(tmp_path)


def test_digits_and_synthetic_need_no_download(tmp_path: Path) -> None:
    for name in ("digits", "synthetic"):
        assert DATASETS[name]().available(tmp_path)
        assert DATASETS[name]().prepare(tmp_path) == "nothing to download"


# --- mixes ----------------------------------------------------------------------------------------------


def test_mix_puts_datasets_side_by_side(tmp_path: Path) -> None:
    mix = DATASETS["mix"](sources=("digits", "usps"), size=16, channels=1)
    assert not mix.available(tmp_path)
    digits = DATASETS["digits"](size=16).load(tmp_path)
    usps = DATASETS["digits"](size=16).load(tmp_path)
    write_npz(tmp_path / "usps.npz", usps)
    assert mix.available(tmp_path)
    samples = mix.load(tmp_path)
    n = len(digits.y_train)
    assert samples.classes == 20
    assert samples.domain_train is not None
    assert samples.domain_test is not None
    np.testing.assert_array_equal(samples.domain_train, np.repeat([0, 1], n))
    np.testing.assert_array_equal(samples.y_train[n:], usps.y_train + 10)
    np.testing.assert_array_equal(samples.x_test[: len(digits.y_test)], digits.x_test)
    assert samples.class_names[13] == "usps 3"
    np.testing.assert_array_equal(samples.domain_test, samples.y_test // 10)


def test_mix_says_in_its_name_what_is_not_as_in_mix_4() -> None:
    mix = DATASETS["mix"]
    assert mix().title(["a", "b"]) == "a+b"  # type: ignore[attr-defined]
    replaced = mix(sources=("cifar10", "emnist_letters", "fashion_mnist", "usps"))
    assert replaced.title(["x"]) == "x (MIX-4 with svhn replaced by emnist_letters)"  # type: ignore[attr-defined]
    assert [part.stem() for part in replaced.parts()][1] == "emnist_letters"  # type: ignore[attr-defined]
    fewer = mix(sources=("cifar10", "fashion_mnist", "usps"))
    assert fewer.title(["x"]) == "x (MIX-4 without svhn)"  # type: ignore[attr-defined]
    another = mix(sources=("digits", "usps"))
    assert another.title(["digits", "usps"]) == "digits+usps"  # type: ignore[attr-defined]


def test_mix_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        DATASETS["mix"](sources=("cifar_10",))
    with pytest.raises(ConfigError, match="named twice"):
        DATASETS["mix"](sources=("usps", "usps"))
    with pytest.raises(ConfigError, match="not an image dataset"):
        DATASETS["mix"](sources=("synthetic",))


# --- synthetic ------------------------------------------------------------------------------------------


def cell_means(x: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> np.ndarray:
    return np.array([[x[(domains == k) & (labels == c)].mean(0) for c in range(4)] for k in range(3)])


@pytest.mark.parametrize("shift", ["means", "labels", "both"])
def test_synthetic_sources_differ_as_asked(shift: str, tmp_path: Path) -> None:
    dataset = DATASETS["synthetic"](samples=12_000, separation=3, noise=1, shift=shift)
    samples = dataset.load(tmp_path)
    assert samples.x_train.dtype == np.float32
    assert samples.shape == (16,)
    assert samples.domain_train is not None
    assert samples.domain_test is not None
    cells = samples.domain_train * 4 + samples.y_train
    np.testing.assert_array_equal(np.bincount(cells), np.full(12, 1000))

    means = cell_means(samples.x_train, samples.y_train, samples.domain_train)
    assert np.abs(np.linalg.norm(means, axis=2) - 3).max() < 0.2
    shared = max(np.linalg.norm(means[k, (c + k) % 4] - means[0, c]) for k in range(3) for c in range(4))
    same_name = min(np.linalg.norm(means[k, c] - means[0, c]) for k in (1, 2) for c in range(4))
    assert (shared < 0.5) == (shift == "labels")
    assert same_name > 1
    # Test samples follow the same distribution.
    test_means = cell_means(samples.x_test, samples.y_test, samples.domain_test)
    assert np.linalg.norm(test_means - means, axis=2).max() < 0.8
    spread = samples.x_train - means[samples.domain_train, samples.y_train]
    assert abs(spread.std() - 1) < 0.02


def test_synthetic_depends_on_its_seed_alone(tmp_path: Path) -> None:
    def mark(**settings: object) -> str:
        return fingerprint(DATASETS["synthetic"](samples=50, test_size=20, **settings).load(tmp_path))

    assert mark() == mark()
    assert mark() != mark(seed=1)


def test_synthetic_samples_that_do_not_fit_are_not_drawn(tmp_path: Path) -> None:
    for size in ({"test_size": 2**31 - 1}, {"samples": 2**31 - 1}, {"features": 2**31 - 1}):
        with pytest.raises(DataError, match=r"need [0-9,.]+ GB, .* are free; choose smaller sizes"):
            DATASETS["synthetic"](**{"features": 10_000, **size}).load(tmp_path)


def test_synthetic_labellings_must_be_possible() -> None:
    with pytest.raises(ConfigError, match="renamed in 2 ways, not 3"):
        DATASETS["synthetic"](classes=2, clusters=3, shift="labels")


# --- real data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "stem", "shape", "train", "test"),
    [
        ("fashion_mnist", {}, "fashion_mnist", (1, 28, 28), [6000] * 10, [1000] * 10),
        ("cifar10", {}, "cifar10", (3, 32, 32), [5000] * 10, [1000] * 10),
        (
            "usps",
            {},
            "usps",
            (1, 16, 16),
            [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644],
            [359, 264, 198, 166, 200, 160, 170, 147, 166, 177],
        ),
        ("emnist", {"split": "letters"}, "emnist_letters", (1, 28, 28), [1200] * 26, [200] * 26),
    ],
)
def test_real_data(
    name: str,
    settings: dict[str, str],
    stem: str,
    shape: tuple[int, ...],
    train: list[int],
    test: list[int],
    real_data: Callable[..., Path],
) -> None:
    root = real_data(stem)
    dataset = DATASETS[name](**settings)
    assert dataset.available(root)
    samples = dataset.load(root)
    assert samples.shape == shape
    assert samples.x_train.dtype == np.uint8
    assert samples.x_train.flags.c_contiguous
    np.testing.assert_array_equal(np.bincount(samples.y_train), train)
    np.testing.assert_array_equal(np.bincount(samples.y_test), test)
    assert len(samples.class_names) == samples.classes == len(train)
    # Nearest class mean, far above chance: images and labels belong together.
    rows = samples.x_train.reshape(len(samples.x_train), -1)
    means = np.array(
        [rows[samples.y_train == c][:200].astype(np.float32).mean(0) for c in range(samples.classes)]
    )
    probe = samples.x_test.reshape(len(samples.x_test), -1)[::10].astype(np.float32)
    guess = (np.square(means).sum(1) - 2 * probe @ means.T).argmin(1)
    assert (guess == samples.y_test[::10]).mean() > 2.3 / samples.classes


def test_real_letters_are_upright(real_data: Callable[..., Path]) -> None:
    samples = DATASETS["emnist"](split="letters").load(real_data("emnist_letters"))
    mean_l = samples.x_train[samples.y_train == samples.class_names.index("l")].mean(axis=(0, 1))
    ink_x, ink_y = mean_l.sum(0), mean_l.sum(1)

    def width(ink: np.ndarray) -> float:
        places = np.arange(28)
        centre = (ink * places).sum() / ink.sum()
        return float(np.sqrt((ink * (places - centre) ** 2).sum() / ink.sum()))

    assert width(ink_y) > 1.15 * width(ink_x)  # an l is higher than wide


def test_real_mix(real_data: Callable[..., Path]) -> None:
    samples = DATASETS["mix"](sources=("cifar10", "fashion_mnist", "usps")).load(
        real_data("cifar10", "fashion_mnist", "usps")
    )
    assert samples.shape == (3, 32, 32)
    assert samples.classes == 30
    assert samples.domain_train is not None
    np.testing.assert_array_equal(np.bincount(samples.domain_train), [50_000, 60_000, 7_291])
