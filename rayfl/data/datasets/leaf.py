"""LEAF: a benchmark for federated settings (Caldas et al. 2018, arXiv:1812.01097)."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.arrays import check_counted
from rayfl.data.base import Part, Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.errors import DataError, one_line

_KEYS = ("users", "num_samples", "user_data")
_FEMNIST = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


class Leaf(ImageDataset):
    """LEAF's files: data with users, from disk, as its preprocessing writes them (FEMNIST, synthetic).

    A folder with ``train/*.json`` and ``test/*.json`` (or ``data/train``, ``data/test``), made for instance
    by ``./preprocess.sh -s niid --sf 0.05 -k 0 -t sample`` in LEAF's ``data/femnist``. Each file contains
    ``users``, ``num_samples`` and ``user_data``: for each user its inputs ``x``, lists of numbers of equal
    length, and labels ``y``. Users are the domains of the samples, numbered in the order of their names;
    with the partition ``natural`` every client is a user. If all pixels are multiples of 1/255, images are
    stored as bytes.
    """

    elsewhere: ClassVar[str] = "data.folder"

    name: Literal["leaf"] = "leaf"
    folder: Path = Field(description="folder with train/*.json and test/*.json")
    shape: tuple[Annotated[int, Field(ge=1)], ...] | Literal["auto"] = Field(
        "auto",
        description="shape of an input: [D] for features, [H, W] or [C, H, W] for images; auto: 784 "
        "numbers are 28x28 pixels, others features",
    )
    classes: int | None = Field(None, ge=1, description="number of classes; by default the largest label + 1")

    @override
    def available(self, root: Path) -> bool:
        return all(self._files(part) for part in ("train", "test"))

    @override
    def load(self, root: Path) -> Samples:
        users: dict[str, dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]] = {}
        for part in ("train", "test"):
            users[part] = self._read(part)
        names = {name: place for place, name in enumerate(sorted(users["train"] | users["test"]))}
        parts = [_stacked(users[part], names, self._part_folder(part)) for part in ("train", "test")]
        (inputs, y_train, domain_train), (tests, y_test, domain_test) = parts
        if inputs.shape[1:] != tests.shape[1:]:
            raise DataError(
                f"{self.folder}: inputs have {inputs.shape[1]} numbers in train, {tests.shape[1]} in test; "
                "they must be equal"
            )
        largest = int(max(y_train.max(), y_test.max()))
        check_counted(largest, len(y_train) + len(y_test), f"{self.folder}: labels")
        classes = self.classes or largest + 1
        if largest >= classes:
            raise DataError(f"{self.folder}: labels go up to {largest}, data.classes is {classes}")
        shape = self._shape(inputs.shape[1])
        x_train, x_test = _pixels(shape, inputs, tests)
        class_names = _FEMNIST if classes == len(_FEMNIST) and len(shape) == 3 else ()
        return self.reshaped(
            Samples(
                self.name, x_train, y_train, x_test, y_test, classes, domain_train, domain_test, class_names
            )
        )

    def _part_folder(self, part: str) -> Path:
        root = self.folder.expanduser()
        return root / part if (root / part).is_dir() else root / "data" / part

    def _files(self, part: str) -> list[Path]:
        return sorted(self._part_folder(part).glob("*.json"))

    def _shape(self, length: int) -> tuple[int, ...]:
        """``(D,)`` or ``(C, H, W)`` of an input of ``length`` numbers."""
        if self.shape == "auto":
            return (1, 28, 28) if length == 784 else (length,)
        shape = (1, *self.shape) if len(self.shape) == 2 else self.shape
        if math.prod(shape) != length or len(shape) not in (1, 3):
            raise DataError(
                f"data.shape: {list(self.shape)} does not fit the {length} numbers of an input "
                f"in {self.folder}"
            )
        return shape

    def _read(self, part: Part) -> dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """The inputs and labels of each user of a part; users without samples are left out."""
        files = self._files(part)
        if not files:
            raise DataError(
                f"dataset leaf: there is no {part}/*.json in {self.folder}; write them with LEAF's "
                "preprocess.sh (-t sample) and set data.folder to its folder 'data'"
            )
        arrays_by_user: dict[str, list[tuple[NDArray[np.float32], NDArray[np.int64]]]] = {}
        for file in files:
            for user, content in _read_users(file).items():
                arrays = _user_arrays(content, f"{file}: user {user}")
                if len(arrays[1]):
                    arrays_by_user.setdefault(user, []).append(arrays)
        if not arrays_by_user:
            raise DataError(f"{files[0].parent}: no user has a sample")
        return {
            user: _joined(pieces, f"{files[0].parent}: user {user}")
            for user, pieces in arrays_by_user.items()
        }


def _read_users(file: Path) -> dict[str, Any]:
    """The ``user_data`` of a file, for the users in its list ``users``."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({one_line(error)})") from error
    missing = [key for key in _KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{file}: has no {', '.join(missing)}; LEAF's files hold {', '.join(_KEYS)}")
    users, sizes, data = (content[key] for key in _KEYS)
    if not isinstance(users, list) or not isinstance(sizes, list) or not isinstance(data, dict):
        raise DataError(f"{file}: users and num_samples must be lists, user_data a mapping")
    if len(users) != len(sizes):
        raise DataError(f"{file}: {len(users)} users but {len(sizes)} num_samples")
    for user, size in zip(users, sizes, strict=True):
        entry = data.get(user) if isinstance(user, str) else None
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), list) for key in "xy"):
            raise DataError(f"{file}: user_data has no lists x and y of user {user!r}")
        if not len(entry["x"]) == len(entry["y"]) == size:
            raise DataError(
                f"{file}: user {user} has {len(entry['x'])} inputs, {len(entry['y'])} labels and "
                f"num_samples {size}; they must be equal"
            )
    return {user: data[user] for user in users}


def _user_arrays(content: dict[str, list[Any]], where: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """``(n, D)`` inputs and ``(n,)`` labels of a user."""
    if not content["y"]:
        return np.empty((0, 0), np.float32), np.empty(0, np.int64)
    try:
        x = np.array(content["x"])
        y = np.array(content["y"])
    except ValueError as error:  # lists of different lengths
        raise DataError(f"{where}: inputs must be lists of numbers of one length") from error
    if x.ndim != 2 or x.dtype.kind not in "uif" or not x.shape[1]:
        raise DataError(
            f"{where}: inputs must be lists of numbers of one length; texts and image names are not read"
        )
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{where}: holds NaN or infinity (as float32); every value must be finite")
    if y.ndim != 1 or y.dtype.kind not in "ui" or y.min() < 0:
        raise DataError(f"{where}: labels must be integers from 0")
    return x, y.astype(np.int64)


def _joined(
    pieces: list[tuple[NDArray[np.float32], NDArray[np.int64]]], where: str
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if len({x.shape[1] for x, _ in pieces}) > 1:
        raise DataError(f"{where}: its inputs differ in length from file to file")
    return np.concatenate([x for x, _ in pieces]), np.concatenate([y for _, y in pieces])


def _stacked(
    users: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]], names: dict[str, int], folder: Path
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """All inputs, labels and users, ordered by user."""
    order = sorted(users, key=lambda user: names[user])
    lengths = {users[user][0].shape[1]: user for user in order}
    if len(lengths) > 1:
        (a, first), (b, second) = list(lengths.items())[:2]
        raise DataError(f"{folder}: inputs of {first} have {a} numbers, of {second} {b}; they must be equal")
    return (
        np.concatenate([users[user][0] for user in order]),
        np.concatenate([users[user][1] for user in order]),
        np.repeat([names[user] for user in order], [len(users[user][1]) for user in order]).astype(np.int64),
    )


def _pixels(shape: tuple[int, ...], *parts: NDArray[np.float32]) -> list[NDArray[np.generic]]:
    """Images as bytes if all pixels are k/255; features as they are."""
    if len(shape) == 3 and all(_are_bytes(part) for part in parts):
        return [np.rint(part * 255).astype(np.uint8).reshape(-1, *shape) for part in parts]
    return [part.reshape(-1, *shape) for part in parts]


def _are_bytes(pixels: NDArray[np.float32]) -> bool:
    if pixels.min() < 0 or pixels.max() > 1:
        return False
    scaled = pixels * np.float32(255)
    return bool(np.abs(scaled - np.rint(scaled)).max() < 1e-2)
