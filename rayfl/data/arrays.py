"""Convert users' arrays to :class:`Samples`: checked once, in one layout, with a fingerprint."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import Column, Samples, in_order
from rayfl.data.sharded import ShardedArray
from rayfl.errors import ConfigError, DataError, one_line, type_of
from rayfl.given import shown_path
from rayfl.losses.base import IGNORED

Predicted = Literal["class", "words"]
"""What models predict of texts: their class, or the word after each word."""

Layout = Literal["auto", "hwc", "chw"]
_REQUIRED = ("x_train", "y_train", "x_test", "y_test")
_ALWAYS_ACCEPTED = 1000
"""Labels and domains below this number are accepted for any number of samples."""
_MOST_WORDS = 1_000_000
"""Largest vocabulary: tokens are below this number."""
_OPTIONAL = ("domain_train", "domain_test", "class_names")


def as_inputs(x: NDArray[np.generic], where: str, layout: Layout = "auto") -> NDArray[np.generic]:
    """Convert inputs to the layout that models take, contiguous.

    Args:
        x: features ``(n, D)``, grey images ``(n, H, W)``, or images ``(n, H, W, C)`` or ``(n, C, H, W)``.
        where: what ``x`` is, for errors.
        layout: of images with four axes; ``auto``: the axis of length 1 or 3 is that of the channels.

    Returns:
        ``(n, C, H, W)``: uint8 if ``x`` holds integers, else float32; or ``(n, D)``: uint8 (pixels in rows)
        if ``x`` is uint8, else float32 (a table, in which integers are ordinary numbers).

    Raises:
        ConfigError: if a layout is given for other inputs than images with four axes.
        DataError: if the shape, the type or the values are not supported.
    """
    if x.dtype.kind not in "uif":
        raise DataError(f"{where} has type {x.dtype}; expected uint8 pixels or floats")
    if x.shape[:1] == (0,):
        raise DataError(f"{where} has no samples")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise DataError(
            f"{where} has shape {x.shape}; expected (n, D), (n, H, W), (n, H, W, C) or (n, C, H, W)"
        )
    if layout != "auto" and x.ndim != 4:
        _refuse_layout(layout, f"{where} has shape {x.shape}")
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            raise DataError(f"{where} holds NaN or infinity (as float32); every value must be finite")
    if x.ndim == 2:
        return np.ascontiguousarray(x, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)
    if x.ndim == 3:
        x = x[:, None]
    elif layout == "hwc" or (layout == "auto" and _channels_last(x.shape, where)):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind == "f":
        return np.ascontiguousarray(x, dtype=np.float32)
    least, most = (0, 255) if x.dtype == np.uint8 else _range(x)
    if least < 0 or most > 255:
        raise DataError(f"{where} holds integers from {least} to {most}; pixels must lie in 0..255")
    return np.ascontiguousarray(x, dtype=np.uint8)


def _refuse_layout(layout: Layout, what: str) -> NoReturn:
    raise ConfigError(
        "data.layout",
        f"{layout} would change nothing: {what}",
        "leave it out; it is for images (n, H, W, C) or (n, C, H, W)",
    )


def as_tokens(x: NDArray[np.generic], where: str) -> NDArray[np.int32]:
    """Convert texts ``(n, L)`` to int32.

    Raises:
        DataError: if they are not integers from 0 to ``_MOST_WORDS - 1``.
    """
    if x.dtype.kind not in "ui" or x.ndim != 2 or 0 in x.shape:
        raise DataError(
            f"{where} has shape {x.shape} and type {x.dtype}; tokens are integers of shape (n, L)"
        )
    least, most = _range(x)
    if least < 0 or most >= _MOST_WORDS:
        wrong = least if least < 0 else most
        raise DataError(f"{where} holds {wrong}; tokens are numbers from 0 to {_MOST_WORDS - 1:,}")
    return np.ascontiguousarray(x, dtype=np.int32)


def next_words(texts: NDArray[np.generic], where: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Divide texts into inputs and targets: each word, and the word that follows it.

    Args:
        texts: tokens ``(n, L + 1)``, 0 after the end of a text.
        where: for errors.

    Returns:
        Inputs ``(n, L)``: each text without its last word. Targets ``(n, L)``: the word after each word,
        :data:`~rayfl.losses.base.IGNORED` where there is none.

    Raises:
        DataError: for a text of fewer than two words, in which there is nothing to predict.
    """
    used = texts != 0
    lengths = np.where(used.any(axis=1), texts.shape[1] - used[:, ::-1].argmax(axis=1), 0)
    if short := int((lengths < 2).sum()):
        raise DataError(
            f"{where}: {short:,} of {len(texts):,} texts have fewer than two words, so there is nothing to "
            "predict; leave them out"
        )
    place = np.arange(texts.shape[1] - 1)
    follows = place < lengths[:, None] - 1
    inputs = np.where(follows, texts[:, :-1], 0).astype(np.int32)
    return inputs, np.where(follows, texts[:, 1:], IGNORED).astype(np.int64)


def _range(values: NDArray[np.generic]) -> tuple[int, int]:
    """The smallest and the largest of whole numbers of any shape."""
    return int(values.min()), int(values.max())


def _channels_last(shape: tuple[int, ...], where: str) -> bool:
    first, last = shape[1] in (1, 3), shape[3] in (1, 3)
    if first == last:
        raise DataError(
            f"{where} has shape {shape}: which axis holds the channels? set data.layout to hwc or chw"
        )
    return last


def as_labels(y: NDArray[np.generic], count: int, where: str) -> NDArray[np.int64]:
    """Convert labels or domains ``(n,)`` or ``(n, 1)`` to int64 ``(n,)``.

    Raises:
        DataError: if they are not ``count`` integers of at least 0.
    """
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "uib":
        how = "; number them: numpy.unique(y, return_inverse=True)[1]" if y.dtype.kind in "USO" else ""
        raise DataError(
            f"{where} has shape {y.shape} and type {y.dtype}; expected integers of shape (n,){how}"
        )
    if len(y) != count:
        raise DataError(f"{where} has {len(y)} entries for {count} samples; the lengths must be equal")
    least, most = _range(y)
    if least < 0 or most > np.iinfo(np.int32).max:
        wrong = least if least < 0 else most
        floats = (
            "; numbers to predict are floats: y.astype(float)"
            if where.endswith(("y_train", "y_test"))
            else ""
        )
        raise DataError(f"{where} holds {wrong}; labels and domains count from 0{floats}")
    return np.ascontiguousarray(y, dtype=np.int64)


def as_targets(
    y: NDArray[np.generic], count: int, where: str
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Convert ``y`` to classes ``(n,)`` and None; or, if it contains floats or several targets per sample, to
    zeros ``(n,)`` and numbers ``(n, K)``.

    Raises:
        DataError: if ``y`` is neither, or does not have ``count`` entries.
    """
    several = y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "uib"
    if not (several or (y.dtype.kind == "f" and y.ndim in (1, 2) and y.size)):
        return as_labels(y, count, where), None
    if len(y) != count:
        raise DataError(f"{where} has {len(y)} entries for {count} samples; the lengths must be equal")
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(y.reshape(len(y), -1), dtype=np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{where} holds NaN or infinity (as float32); every value must be finite")
    return np.zeros(len(y), np.int64), numbers


def check_counted(largest: int, samples: int, where: str) -> None:
    """Refuse labels or domains that are ids rather than numbers from 0: tables have a row for each number.

    Args:
        largest: the largest of them.
        samples: number of samples.
        where: what they are, for errors.

    Raises:
        DataError: if there are far more numbers than samples.
    """
    if largest >= max(samples, _ALWAYS_ACCEPTED):
        raise DataError(
            f"{where} go up to {largest} for {samples} samples; number them 0, 1, 2, ... without gaps"
        )


def read_npz(
    path: Path, name: str, layout: Layout = "auto", tokens: bool = False, predict: Predicted = "class"
) -> Samples:
    """Read a dataset with a test part from an npz file.

    Args:
        path: a file with ``x_train``, ``y_train``, ``x_test``, ``y_test`` as :func:`as_inputs` and
            :func:`as_labels` take them, and optionally ``domain_train`` and ``domain_test`` (both or
            none), ``class_names``, and columns that partitions may use, integers or text: for example
            ``hospital_train`` ``(n,)``, and ``hospital_test`` if it is known.
        name: the dataset's name, for reports.
        layout: see :func:`as_inputs`.
        tokens, predict: whether ``x`` holds texts, and what is predicted, see :func:`of_arrays`.

    Raises:
        DataError: if the file is missing, unreadable, or its contents are wrong; one line.
    """
    arrays = read_arrays(path)
    if "x" in arrays:
        raise DataError(f"{path}: has no test part; expected {', '.join(_REQUIRED)}")
    return of_arrays(arrays, name, shown_path(path), layout, tokens, predict)


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of an npz file by their names, as :func:`read_npz` describes them.

    Returns:
        The arrays of both parts, or ``x``, ``y`` and their columns if the file has no test part.

    Raises:
        DataError: if the file is missing, unreadable, or lacks an array; one line.
    """
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise DataError(f"{path}: {what}; expected an .npz with {', '.join(_REQUIRED)}")
    try:
        arrays = _load_npz(path)
    except Exception as error:  # broken bytes make zip, zlib and NumPy raise nearly anything
        raise DataError(f"{path}: cannot be read as .npz ({one_line(error)})") from error
    missing = [key for key in _REQUIRED if key not in arrays]
    if missing and not ("x" in arrays and "y" in arrays):
        alternative = ", or x and y" if len(missing) == len(_REQUIRED) else ""
        raise DataError(f"{path}: has no {', '.join(missing)}; expected {', '.join(_REQUIRED)}{alternative}")
    return arrays


def of_arrays(
    arrays: Mapping[str, NDArray[np.generic]],
    name: str,
    where: str,
    layout: Layout = "auto",
    tokens: bool = False,
    predict: Predicted = "class",
) -> Samples:
    """Make a dataset from arrays.

    Args:
        arrays: by name, as :func:`read_npz` describes them: inputs ``(n, ...)`` and labels ``(n,)``; unknown
            names are ignored.
        name: the dataset's name, for reports.
        where: the source of the arrays, for errors.
        layout: see :func:`as_inputs`.
        tokens: whether ``x`` holds texts: integers from 0 ``(n, L)``, 0 for padding.
        predict: ``words`` for the word after each word of a text, see :func:`next_words`; ``y`` is then the
            texts' topic, or group, for partitions.

    Raises:
        DataError: if they do not fit together.
    """
    if tokens and layout != "auto":
        _refuse_layout(layout, f"{where} has texts")
    x_train, x_test = (
        as_tokens(arrays[key], f"{where}: {key}")
        if tokens
        else as_inputs(arrays[key], f"{where}: {key}", layout)
        for key in ("x_train", "x_test")
    )
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise DataError(
            f"{where}: x_train is {x_train.dtype} {x_train.shape[1:]} a sample, x_test {x_test.dtype} "
            f"{x_test.shape[1:]}; they must be equal"
        )
    words = max(_range(x_train)[1], _range(x_test)[1]) + 1 if tokens else 0
    targets_train: NDArray[np.int64] | NDArray[np.float32] | None
    targets_test: NDArray[np.int64] | NDArray[np.float32] | None
    y_train, targets_train = as_targets(arrays["y_train"], len(x_train), f"{where}: y_train")
    y_test, targets_test = as_targets(arrays["y_test"], len(x_test), f"{where}: y_test")
    kinds = [None if t is None else t.shape[1:] for t in (targets_train, targets_test)]
    if kinds[0] != kinds[1]:
        first, second = (f"{y.dtype} of shape {y.shape}" for y in (arrays["y_train"], arrays["y_test"]))
        raise DataError(
            f"{where}: y_train is {first}, y_test {second}; both hold classes (integers of shape (n,)), or "
            "both as many numbers a sample"
        )
    domains: list[NDArray[np.int64] | None] = [None, None]
    if ("domain_train" in arrays) != ("domain_test" in arrays):
        raise DataError(f"{where}: has only one of domain_train and domain_test; give both or none")
    if "domain_train" in arrays:
        domains[0] = as_labels(arrays["domain_train"], len(x_train), f"{where}: domain_train")
        domains[1] = as_labels(arrays["domain_test"], len(x_test), f"{where}: domain_test")
    total = len(x_train) + len(x_test)
    if domains[0] is not None and domains[1] is not None:
        check_counted(int(max(domains[0].max(), domains[1].max())), total, f"{where}: domains")
    class_names = tuple(str(label) for label in arrays.get("class_names", np.empty(0)).reshape(-1))
    label_count = int(max(y_train.max(), y_test.max())) + 1
    check_counted(label_count - 1, total, f"{where}: labels")
    if class_names and len(class_names) < label_count:
        raise DataError(
            f"{where}: labels go up to {label_count - 1}, but there are {len(class_names)} class_names; give "
            "one for each label from 0"
        )
    classes = max(label_count, len(class_names))
    if predict == "words":
        if targets_train is not None:
            expected = "with data.predict=words it holds the topic of each text, an integer"
            raise DataError(f"{where}: y_train is {type_of(arrays['y_train'])}; {expected}")
        x_train, targets_train = next_words(x_train, f"{where}: x_train")
        x_test, targets_test = next_words(x_test, f"{where}: x_test")
    samples = Samples(
        name, x_train, y_train, x_test, y_test, classes, domains[0], domains[1], class_names,
        targets_train=targets_train, targets_test=targets_test,
        vocabulary=tuple(map(str, range(words))),
    )  # fmt: skip
    columns = {}
    for key in arrays:
        column = key.removesuffix("_train")
        train = as_column(arrays[key], len(x_train)) if is_column(key) and column != key else None
        if train is None:
            continue
        tests, test_values = None, arrays.get(f"{column}_test")
        if test_values is not None:
            tests = as_column(test_values, len(x_test))
            if tests is None:
                what = f"has shape {test_values.shape} and type {test_values.dtype}"
                what = "holds objects" if test_values.dtype.kind == "O" else what
                raise DataError(
                    f"{where}: {column}_test {what}; expected integers or text of shape "
                    f"({len(x_test)},), as {key} has them for the training samples"
                )
        columns[column] = column_of(train, tests)
    return replace(samples, columns=columns) if columns else samples


def checked(samples: Samples, where: str) -> Samples:
    """The samples that a user's own dataset has loaded, with labels as int64.

    Args:
        samples: as loaded; inputs that are read when they are needed are not looked at.
        where: who loaded them, for errors.

    Raises:
        DataError: if they do not fit together.
    """
    converted: dict[str, Any] = {}
    sample_types = {}
    for part in ("train", "test"):
        x, y, targets, domain = (
            getattr(samples, f"{name}_{part}") for name in ("x", "y", "targets", "domain")
        )
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise DataError(f"{where}: x_{part} is {type_of(x)}; expected an array")
        if not len(x):
            raise DataError(f"{where}: x_{part} has no samples")
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and not np.isfinite(x).all():
            raise DataError(f"{where}: x_{part} holds NaN or infinity; every value must be finite")
        sample_types[part] = f"{_KINDS.get(x.dtype.kind, x.dtype)} of shape {tuple(x.shape[1:])}"
        for name, values in (("y", y), ("domain", domain)):
            if values is None and name == "domain":
                continue
            if not isinstance(values, np.ndarray):
                raise DataError(f"{where}: {name}_{part} is {type_of(values)}; expected an array of integers")
            converted[f"{name}_{part}"] = as_labels(values, len(x), f"{where}: {name}_{part}")
        most = int(converted[f"y_{part}"].max())
        if most >= samples.classes:
            raise DataError(
                f"{where}: y_{part} holds {most}, and classes is {samples.classes}; labels count from 0"
            )
        if targets is not None and len(targets) != len(x):
            raise DataError(f"{where}: targets_{part} has {len(targets)} entries for {len(x)} samples")
        if isinstance(targets, np.ndarray) and targets.dtype.kind == "f":  # as given arrays are converted
            converted[f"targets_{part}"] = as_targets(targets, len(x), f"{where}: targets_{part}")[1]
    if sample_types["train"] != sample_types["test"]:
        raise DataError(
            f"{where}: samples of x_train are {sample_types['train']}, those of x_test "
            f"{sample_types['test']}; they must be equal"
        )
    for name in ("targets", "domain"):
        given = [getattr(samples, f"{name}_{part}") is not None for part in ("train", "test")]
        if len(set(given)) > 1:
            raise DataError(f"{where}: has only one of {name}_train and {name}_test; give both or none")
    samples = replace(samples, **converted)
    check_classes(samples, where)
    return samples


_KINDS = {"f": "floats", "i": "integers", "u": "unsigned integers"}


def check_classes(samples: Samples, where: str) -> None:
    """Refuse classification data with a single class, on which every model is right.

    Raises:
        DataError
    """
    if samples.task != "words" and not samples.numeric and samples.classes < 2:
        raise DataError(f"{where}: all training samples have label 0; expected two classes or more")


def is_column(key: str) -> bool:
    """Whether an array of this name is a column: further information about each sample."""
    return key.endswith(("_train", "_test")) and key not in (*_REQUIRED, *_OPTIONAL)


def as_column(values: NDArray[np.generic], count: int) -> NDArray[np.generic] | None:
    """Convert values to a column of integers or text ``(n,)``; None if that is not possible.

    Args:
        values: ``(n,)`` or ``(n, 1)``; floats must be whole numbers.
        count: n.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (count,) or values.dtype.kind not in "iuUbf":
        return None
    if values.dtype.kind == "f":
        if not (np.isfinite(values) & (values == np.floor(values))).all():
            return None
        return values.astype(np.int64)
    return values


def column_of(train: NDArray[np.generic], test: NDArray[np.generic] | None) -> Column:
    """Make a :class:`Column` from integers or text ``(n,)`` of the training samples and, if known, the test
    samples.
    """
    import pandas as pd

    parts = [train] if test is None else [train, test]
    codes, ids = pd.factorize(np.concatenate([np.asarray(part).astype(str) for part in parts]))
    values = np.array(in_order([str(each) for each in ids]))
    places = pd.Index(values).get_indexer(pd.Index(ids))[codes].astype(np.int32)
    return Column(values, places[: len(train)], None if test is None else places[len(train) :])


def _load_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    if not (zipfile.is_zipfile(path) or path.suffix == ".npy"):
        raise ValueError("it is not an .npz file, or incomplete")  # NumPy would take it for a pickle
    content = np.load(path, allow_pickle=False)
    if isinstance(content, np.ndarray):
        raise ValueError("it holds a single array")
    with content:
        undivided = "x" in content and not any(key in content for key in _REQUIRED)
        standard_names = ("x", "y", "class_names") if undivided else (*_REQUIRED, *_OPTIONAL)
        arrays = {key: content[key] for key in standard_names if key in content}
        for key in content:
            if key in standard_names or not (undivided or is_column(key)):
                continue
            try:
                values = content[key]
            except Exception:  # pickled objects, which are not loaded, or broken data
                values = np.empty(0, np.object_)
            column = as_column(values, len(values)) if values.ndim else None
            if column is not None or not undivided:  # of_arrays refuses a test column that does not fit
                arrays[key] = values if column is None else column
        return arrays


def write_npz(path: Path, samples: Samples) -> None:
    """Write a dataset (not its columns) to a file for :func:`read_npz`; it appears complete or not at all."""
    arrays: dict[str, NDArray[np.generic]] = {key: getattr(samples, key) for key in _REQUIRED}
    if samples.numeric and samples.targets_train is not None and samples.targets_test is not None:
        arrays |= {"y_train": samples.targets_train, "y_test": samples.targets_test}
    if samples.domain_train is not None and samples.domain_test is not None:
        arrays |= {"domain_train": samples.domain_train, "domain_test": samples.domain_test}
    if samples.class_names:
        arrays["class_names"] = np.array(samples.class_names)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def fingerprint(samples: Samples) -> str:
    """16 hexadecimal digits (of a SHA-256) that identify the contents of a dataset, without names."""
    digest = hashlib.sha256(str(samples.classes).encode())
    for key in (*_REQUIRED, "domain_train", "domain_test", "targets_train", "targets_test", "label_maps"):
        array = getattr(samples, key)
        if array is not None:
            digest.update(f"{key} {array.dtype.str} {array.shape}".encode())
            sharded = isinstance(array, ShardedArray)
            digest.update(array.fingerprint() if sharded else np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
