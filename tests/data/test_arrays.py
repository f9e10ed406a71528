"""Arrays from files: layouts, checks, and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl.data import DATASETS, Samples, fingerprint, read_npz, write_npz
from rayfl.data.arrays import as_inputs, checked
from rayfl.errors import ConfigError, DataError


def arrays(**changes: object) -> dict[str, object]:
    good = {
        "x_train": np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6),
        "y_train": np.array([0, 1, 2, 0]),
        "x_test": np.zeros((2, 5, 6), np.uint8),
        "y_test": np.array([1, 1]),
    }
    return {key: value for key, value in (good | changes).items() if value is not None}


def write(folder: Path, **changes: object) -> Path:
    np.savez(folder / "file.npz", **arrays(**changes))
    return folder / "file.npz"


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        DATASETS["npz"](path=path, **settings).load(Path("nowhere"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_without_a_test_part_is_divided(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.float64).reshape(12, 2), np.arange(12) % 3
    ward = np.array([f"w{i % 2}" for i in range(12)])
    np.savez(tmp_path / "whole.npz", x=x, y=y, ward=ward, class_names=["a", "b", "c"])
    settings = {"path": tmp_path / "whole.npz", "test_fraction": 0.25}
    samples = DATASETS["npz"](**settings).load(tmp_path)
    test = samples.x_test[:, 0].astype(int) // 2  # each sample's number
    train = samples.x_train[:, 0].astype(int) // 2
    assert sorted([*train, *test]) == list(range(12))
    assert samples.y_test.tolist() == (test % 3).tolist()
    assert sorted(samples.y_test) == [0, 1, 2]
    assert samples.class_names == ("a", "b", "c")
    column = samples.columns["ward"]
    assert column.values[column.train].tolist() == ward[train].tolist()
    assert column.values[column.test].tolist() == ward[test].tolist()
    other = DATASETS["npz"](**settings, seed=1).load(tmp_path)
    assert other.x_test.tolist() != samples.x_test.tolist()
    with pytest.raises(ConfigError, match=r"data\.test_fraction: .*whole.npz has no test part"):
        DATASETS["npz"](path=settings["path"]).load(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.test_fraction: .*file.npz has a test part"):
        DATASETS["npz"](path=write(tmp_path), test_fraction=0.25).load(tmp_path)
    with pytest.raises(DataError, match=r"whole.npz: has no test part; expected x_train"):
        read_npz(settings["path"], "mine")
    np.savez(tmp_path / "whole.npz", x=x, y=y, ward=ward[:3])
    assert "ward has shape (3,), y has shape (12,)" in refusal(**settings)
    np.savez(tmp_path / "whole.npz", x=x)
    assert "has no x_train, y_train, x_test, y_test; expected" in refusal(**settings)


def test_grey_images_get_a_channel_axis(tmp_path: Path) -> None:
    samples = read_npz(write(tmp_path), "mine")
    assert samples.x_train.shape == (4, 1, 5, 6)
    assert samples.x_train.dtype == np.uint8
    assert samples.x_train[1, 0, 2, 3] == 30 + 2 * 6 + 3
    assert samples.classes == 3
    assert samples.y_train.dtype == np.int64
    assert samples.name == "mine"
    assert samples.domain_train is None


def test_channels_last_and_first_give_the_same() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6), dtype=np.uint8)
    last = as_inputs(images.transpose(0, 2, 3, 1), "x")
    np.testing.assert_array_equal(last, images)
    assert last.flags.c_contiguous
    np.testing.assert_array_equal(as_inputs(images, "x"), images)
    np.testing.assert_array_equal(as_inputs(images.transpose(0, 2, 3, 1), "x", "hwc"), images)
    # Four channels are nothing that `auto` knows, but may be named.
    four = np.zeros((2, 4, 7, 8), np.uint8)
    assert as_inputs(four, "x", "chw").shape == (2, 4, 7, 8)
    assert as_inputs(four, "x", "hwc").shape == (2, 8, 4, 7)


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (2, 4, 5, 5)])
def test_unclear_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"which axis holds the channels\? set data\.layout"):
        as_inputs(np.zeros(shape, np.uint8), "x")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.zeros((3, 7), np.float64), np.float32),
        (np.zeros((3, 7), np.uint8), np.uint8),  # pixels in rows
        (np.zeros((3, 7), np.int64), np.float32),  # a table
        (np.zeros((3, 7, 7), np.float64), np.float32),
        (np.full((3, 7, 7), 255, np.int64), np.uint8),
    ],
)
def test_types(given: np.ndarray, expected: type) -> None:
    made = as_inputs(given, "x")
    assert made.dtype == expected
    assert made.max() == given.max()


def test_npz_errors_say_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "none.npz")
    assert "has no x_test, y_test" in refusal(write(tmp_path, x_test=None, y_test=None))
    assert "3 entries for 4 samples" in refusal(write(tmp_path, y_train=np.zeros(3, int)))
    assert "holds -1" in refusal(write(tmp_path, y_train=np.array([0, -1, 0, 0])))
    assert "both hold classes" in refusal(write(tmp_path, y_train=np.zeros(4)))
    assert "both hold classes" in refusal(write(tmp_path, y_train=np.zeros((4, 2), int)))
    assert "they must be equal" in refusal(write(tmp_path, x_test=np.zeros((2, 5, 7), np.uint8)))
    assert "they must be equal" in refusal(write(tmp_path, x_test=np.zeros((2, 5, 6), np.float32)))
    assert "must lie in 0..255" in refusal(write(tmp_path, x_train=np.full((4, 5, 6), 256)))
    assert "NaN or infinity" in refusal(write(tmp_path, x_train=np.full((4, 5, 6), np.nan)))
    assert "NaN or infinity" in refusal(write(tmp_path, x_train=np.full((4, 5, 6), 1e300)))  # as float32
    many = np.array([0, 0, 0, 10**9])
    assert "labels go up to 1000000000 for 6 samples" in refusal(write(tmp_path, y_train=many))
    apart = refusal(write(tmp_path, domain_train=many, domain_test=np.array([0, 0])))
    assert "domains go up to 1000000000 for 6 samples; number them 0, 1, 2" in apart
    assert "holds 9223372036854775813" in refusal(write(tmp_path, y_train=np.full(4, 2**63 + 5, np.uint64)))
    assert "it is a folder" in refusal(tmp_path)
    assert "has type bool" in refusal(write(tmp_path, x_train=np.zeros((4, 5, 6), bool)))
    assert "has shape (4,)" in refusal(write(tmp_path, x_train=np.zeros(4)))
    assert "x_test has no samples" in refusal(write(tmp_path, x_test=np.zeros((0, 5, 6), np.uint8)))
    assert "only one of" in refusal(write(tmp_path, domain_train=np.zeros(4, int)))
    assert "2 class_names" in refusal(write(tmp_path, class_names=np.array(["a", "b"])))
    assert "cannot be read" in refusal(write(tmp_path, x_train=np.array([{}], dtype=object)))
    np.save(tmp_path / "single.npy", np.zeros(3))
    assert "single array" in refusal(tmp_path / "single.npy")
    whole = write(tmp_path).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    assert "it is not an .npz file, or incomplete" in refusal(tmp_path / "half.npz")
    (tmp_path / "page.npz").write_text("<html>not found</html>")
    assert "it is not an .npz file, or incomplete" in refusal(tmp_path / "page.npz")  # no word of pickles
    np.savez_compressed(tmp_path / "bent.npz", **arrays(x_train=np.random.default_rng(0).random((4, 50, 60))))
    bent = bytearray((tmp_path / "bent.npz").read_bytes())
    bent[200:2000] = bytes(1800)
    (tmp_path / "bent.npz").write_bytes(bent)
    assert "cannot be read" in refusal(tmp_path / "bent.npz")
    features = write(tmp_path, x_train=np.zeros((4, 9)), x_test=np.zeros((2, 9)))
    assert "size and channels are for images" in refusal(features, size=32)


def test_npz_dataset_has_all_fields(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        y_train=np.array([[0], [1], [2], [0]], np.uint8),
        class_names=np.array(["a", "b", "c", "d"]),
        domain_train=np.array([0, 1, 1, 0]),
        domain_test=np.array([1, 0]),
    )
    npz = DATASETS["npz"](path=path, size=8, channels=3)
    assert npz.available(Path("nowhere"))
    samples = npz.load(Path("nowhere"))
    assert samples.shape == (3, 8, 8)
    assert samples.classes == 4
    assert samples.class_names == ("a", "b", "c", "d")
    np.testing.assert_array_equal(samples.y_train, [0, 1, 2, 0])
    np.testing.assert_array_equal(samples.domain_train, [0, 1, 1, 0])
    np.testing.assert_array_equal(samples.domain_test, [1, 0])


def test_written_file_is_read_back_and_never_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = DATASETS["synthetic"](samples=20, test_size=10).load(tmp_path)
    named = replace(samples, class_names=("a", "b", "c", "d"))
    write_npz(tmp_path / "new.npz", named)
    again = read_npz(tmp_path / "new.npz", "synthetic")
    assert fingerprint(again) == fingerprint(named)
    assert again.class_names == named.class_names
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]

    def full_disk(file: object, **_: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_npz(tmp_path / "other.npz", named)
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]


def test_fingerprint_sees_every_array_but_not_the_name() -> None:
    samples = Samples(
        "a",
        np.zeros((3, 2), np.float32),
        np.zeros(3, np.int64),
        np.zeros((2, 2), np.float32),
        np.zeros(2, np.int64),
        classes=2,
        domain_train=np.zeros(3, np.int64),
        domain_test=np.zeros(2, np.int64),
    )
    print_ = fingerprint(samples)
    assert len(print_) == 16
    int(print_, 16)
    assert fingerprint(replace(samples, name="b")) == print_
    for field in ("x_train", "y_train", "x_test", "y_test", "domain_train", "domain_test"):
        changed = getattr(samples, field).copy()
        changed[-1] = 1
        assert fingerprint(replace(samples, **{field: changed})) != print_, field
    assert fingerprint(replace(samples, classes=3)) != print_
    assert fingerprint(replace(samples, domain_train=None, domain_test=None)) != print_
    assert fingerprint(replace(samples, x_train=samples.x_train.astype(np.float64))) != print_


@pytest.mark.parametrize("shape", [(20,), (20, 2)])
def test_numbers_of_an_own_dataset_are_converted_as_given_ones(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 3), np.float32), np.zeros(20, np.int64)
    targets = rng.random(shape)  # float64
    found = checked(Samples("mine", x, y, x, y, 1, targets_train=targets, targets_test=targets), "mine")
    assert found.numeric
    assert found.targets_train is not None
    np.testing.assert_array_equal(found.targets_train, targets.reshape(20, -1).astype(np.float32))
