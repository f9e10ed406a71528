"""Convert data from a user's code to arrays, or refuse them with an error of one line."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.data.arrays import Layout, Predicted, is_column
from rayfl.data.base import Numbering
from rayfl.errors import ConfigError, DataError, nearest, one_line, type_of
from rayfl.plugins import broken, resolve
from rayfl.random import generator, key
from rayfl.settings import Section

Arrays = dict[str, NDArray[np.generic]]
EXPECTED = (
    "expected (x, y) or (x_train, y_train, x_test, y_test), a dictionary of these, or one or two datasets of "
    "PyTorch"
)


def call(target: str, kwargs: Mapping[str, Any], section: str, *args: Any) -> Any:
    """Call a user's function, or create an instance of a user's class.

    Args:
        target: ``module:name``, see :func:`rayfl.plugins.resolve`.
        kwargs: its keyword arguments.
        section: the section of the config, for errors.
        args: its first arguments.

    Raises:
        ConfigError: if there is no such function, or it does not take these arguments.
        DataError: if it raises an error; with file and line.
    """
    function = resolve(target, f"{section}.target")
    if not callable(function):
        raise ConfigError(
            f"{section}.target", f"{target} is {type_of(function)}", "expected a function or a class"
        )
    with contextlib.suppress(ValueError):  # some functions in C have no signature
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{section}.kwargs", f"{target}: {error}") from None
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise DataError(f"{section}: {target}: {broken(error, target)}") from None


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and PyTorch; restore their state afterwards."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    global_seed = key(seed, "own code") % 2**32
    random.seed(global_seed)
    np.random.seed(global_seed)  # noqa: NPY002
    torch.manual_seed(global_seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def as_arrays(returned: Any, where: str) -> tuple[Arrays, Layout]:
    """Convert what a user's function returned to arrays.

    Args:
        returned: the function's result.
        where: the function, for errors.

    Returns:
        The arrays by their names in an .npz file (``x`` and ``y`` if there is no test part yet), and the
        layout of their images, ``auto`` if unknown.

    Raises:
        DataError: if it cannot be converted.
    """
    if isinstance(returned, Mapping):
        return _arrays_in_mapping(returned, where), "auto"
    if isinstance(returned, (tuple, list)):
        if len(returned) == 4:
            names = ("x_train", "y_train", "x_test", "y_test")
            return {n: _array(v, f"{where}: {n}") for n, v in zip(names, returned, strict=True)}, "auto"
        if len(returned) == 2 and all(map(_is_dataset, returned)):
            (x, y, layout), (x_test, y_test, test_layout) = (
                _read_items(part, f"{where}: {name}")
                for part, name in zip(returned, ("train", "test"), strict=True)
            )
            if layout != test_layout:
                raise DataError(f"{where}: train and test hold images of different kinds")
            return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}, layout
        if len(returned) == 2 and not any(map(_is_dataset, returned)):
            return {n: _array(v, f"{where}: {n}") for n, v in zip("xy", returned, strict=True)}, "auto"
        kinds = ", ".join(type(part).__name__ for part in returned[:6])
        raise DataError(f"{where} returned {len(returned)} things ({kinds}); {EXPECTED}")
    if _is_dataset(returned):
        x, y, layout = _read_items(returned, where)
        return {"x": x, "y": y}, layout
    raise DataError(f"{where} returned {type_of(returned)}; {EXPECTED}")


class Divided(Protocol):
    """A dataset that may draw its test samples itself."""

    @property
    def test_fraction(self) -> float | None:
        """Fraction of each class, or of each value of ``test_by``, for tests; None: none are drawn."""

    @property
    def test_by(self) -> str | None:
        """The name of a column."""

    @property
    def seed(self) -> int:
        """Seed of the draw."""


TestBy = Annotated[
    str | None,
    Field(
        min_length=1,
        description="a column, such as that of the clients: test_fraction of the samples of each of its "
        "values, at least one where there are two; by default of each class",
    ),
]


def with_test_part(arrays: Arrays, source: Divided, where: str) -> tuple[Arrays, Numbering | None]:
    """Return arrays with a test part: the existing one, or one that is drawn.

    Args:
        arrays: of :func:`as_arrays`; next to ``x`` and ``y``, other names are columns.
        source: whether and how to draw.
        where: the source, for errors.

    Returns:
        The arrays, and the numbering of the divided samples (None if nothing was divided).

    Raises:
        ConfigError: if there is neither a test part nor a fraction, or both.
        DataError: if there are too few samples.
    """
    if "x" not in arrays:
        for name in ("test_fraction", "test_by"):
            if getattr(source, name) is not None:
                raise ConfigError(f"data.{name}", f"{where} has a test part", "leave the setting out")
        return arrays, None
    if source.test_fraction is None:
        raise ConfigError(
            "data.test_fraction", f"{where} has no test part", "say what fraction to take, e.g. 0.2"
        )
    y, undivided = arrays["y"], {key: arrays[key] for key in arrays if key == "class_names"}
    if not y.ndim:
        raise DataError(f"{where}: y is a single number; expected one for each sample of x")
    arrays = {key: arrays[key] for key in arrays if key not in undivided}
    for name, values in arrays.items():
        if values.ndim == 0 or len(values) != len(y):
            raise DataError(f"{where}: {name} has shape {values.shape}, y has shape {y.shape}")
    numeric = y.dtype.kind == "f" or (y.ndim > 1 and y.shape[1] > 1)
    labels = np.zeros(len(y), np.int64) if numeric or not len(y) else y.reshape(len(y), -1)[:, 0]
    test = draw_tests(source, labels, {n: v for n, v in arrays.items() if n not in ("x", "y")}, where)
    parts = {
        f"{n}_{part}": v[mask] for n, v in arrays.items() for part, mask in (("train", ~test), ("test", test))
    }
    return parts | undivided, split_numbering(test)


def check_seed(dataset: Section) -> None:
    """Refuse a seed for drawing test samples if none are drawn.

    Raises:
        ValueError: for pydantic, which reports it as an error of the config.
    """
    seed, fraction, by = (getattr(dataset, name) for name in ("seed", "test_fraction", "test_by"))
    if fraction is None and by is not None:
        raise ValueError("test_by would change nothing; it is used with test_fraction")
    if fraction is None and seed != type(dataset).model_fields["seed"].default:
        raise ValueError(f"seed {seed} would change nothing; it is used with test_fraction")


def check_predicted(tokens: bool, predict: Predicted) -> None:
    """Refuse to predict the words of samples that are no texts.

    Raises:
        ValueError: for pydantic, which reports it as an error of the config.
    """
    if predict == "words" and not tokens:
        raise ValueError("predict=words is for texts; add tokens=true")


def draw_tests(
    source: Divided, labels: NDArray[np.generic], columns: Mapping[str, NDArray[np.generic]], where: str
) -> NDArray[np.bool_]:
    """Draw which samples are for tests ``(n,)``.

    Args:
        source: how to draw; with a fraction.
        labels: of the samples ``(n,)``.
        columns: of the samples, ``(n,)`` each.
        where: the source, for errors.

    Raises:
        ConfigError: if there is no such column.
        DataError: if no test sample would be drawn.
    """
    assert source.test_fraction is not None
    if source.test_by is None:
        return draw_test_mask(labels, source.test_fraction, source.seed, where)
    if source.test_by not in columns:
        what = f"{where} has no column {source.test_by!r}"
        raise ConfigError("data.test_by", what, nearest(source.test_by, columns) if columns else "")
    values = np.asarray(columns[source.test_by]).reshape(len(labels), -1)[:, 0]
    return draw_test_mask(values, source.test_fraction, source.seed, where, least=1)


def draw_test_mask(
    labels: NDArray[np.generic], fraction: float, seed: int, where: str, least: int = 0
) -> NDArray[np.bool_]:
    """Draw which samples are for tests ``(n,)``: a fraction of each class, but never all samples of a class.

    Args:
        labels: ``(n,)``.
        fraction: of the samples of each class.
        seed: of the draw.
        where: the source, for errors.
        least: test samples of a class that has more samples than these.

    Raises:
        DataError: if no test sample would be drawn; its message names ``where``.
    """
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((generator(seed, "test fraction").random(len(labels)), classes))
    starts = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - starts[classes[order]]
    wanted = np.maximum(np.rint(fraction * counts), least)
    test_mask: NDArray[np.bool_] = rank < np.minimum(wanted, counts - 1)[classes]
    if not test_mask.any():
        raise DataError(f"{where}: a fraction of {fraction:g} of {len(labels)} samples leaves no test sample")
    return test_mask


def split_numbering(test: NDArray[np.bool_]) -> Numbering:
    """The numbering of a source of which the samples in the mask ``test`` ``(n,)`` were taken for tests."""
    train, tests = np.cumsum(~test) - 1, np.cumsum(test) - 1
    return Numbering(np.where(test, -1, train), np.where(test, tests, -1), split=True)


def _arrays_in_mapping(returned: Mapping[Any, Any], where: str) -> Arrays:
    required = {"x_train", "y_train", "x_test", "y_test"}
    undivided = {"x", "y"} <= set(returned)
    missing = [] if undivided else sorted(required - set(returned))
    if missing:
        raise DataError(f"{where} returned a dictionary without {', '.join(missing)}; {EXPECTED}")
    allowed_names = {*required, "domain_train", "domain_test", "class_names"}
    arrays = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not (undivided or name in allowed_names or is_column(name)):
            raise DataError(
                f"{where} returned a dictionary with {name!r}; columns are called <name>_train, <name>_test"
            )
        arrays[name] = _array(value, f"{where}: {name}")
    return arrays


def _array(value: Any, where: str) -> NDArray[np.generic]:
    """Convert an array, tensor, list or table column to an array.

    Raises:
        DataError: if it cannot be converted, contains objects, or has masked values.
    """
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise DataError(f"{where} has masked values; fill them in, or leave the samples out")
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except Exception as error:
        raise DataError(f"{where} is not an array ({one_line(error)})") from None
    if array.dtype.kind == "O" and array.ndim == 1 and all(isinstance(item, str) for item in array):
        array = array.astype(str)
    if array.dtype.kind not in "uifbU" or array.ndim == 0:
        raise DataError(
            f"{where} is {type_of(value)}{_odd_entry(array)}; expected an array of numbers, or texts"
        )
    return array


def _odd_entry(array: NDArray[np.generic]) -> str:
    """``, entry 3 of which is nothing (None)``: the first that is no text where others are; else empty."""
    if array.dtype.kind != "O" or array.ndim != 1 or not any(isinstance(item, str) for item in array):
        return ""
    place = next(k for k, item in enumerate(array) if not isinstance(item, str))
    return f", entry {place} of which is {type_of(array[place])}"


def _is_dataset(value: Any) -> bool:
    """Whether it is a dataset, or was meant to be one."""
    if isinstance(value, (np.ndarray, tuple, list, str, bytes, Mapping)) or hasattr(value, "detach"):
        return False
    if type(value).__module__.startswith("pandas"):
        return False
    return hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__")


def _read_items(dataset: Any, where: str) -> tuple[NDArray[np.generic], NDArray[np.generic], Layout]:
    """All inputs ``(n, ...)`` and targets of a map-style dataset, and the layout of its images.

    Targets are integers ``(n,)``, or numbers ``(n, K)``.
    """
    kind = type(dataset).__name__
    if type(dataset).__module__.startswith("torch.utils.data") and kind == "DataLoader":
        raise DataError(f"{where} is a DataLoader; return its dataset")
    if not (hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__")):
        raise DataError(
            f"{where} is a {kind}, which has no length or no items by number; expected a map-style dataset"
        )
    tensors = getattr(dataset, "tensors", None)
    as_they_are = type(dataset).__getitem__.__module__.startswith("torch.utils.data")  # not transformed
    if as_they_are and isinstance(tensors, tuple) and len(tensors) == 2:
        x, y = (_array(part, f"{where}: {name}") for name, part in zip("xy", tensors, strict=True))
        return x, y, "chw" if x.ndim == 4 else "auto"
    try:
        count = len(dataset)
    except (Exception, SystemExit) as error:
        raise DataError(f"{where}: {broken(error, kind)}") from None
    if not count:
        raise DataError(f"{where} is a {kind} without samples")
    inputs: NDArray[np.generic] | None = None
    targets: list[NDArray[np.generic]] = []
    layout: Layout = "auto"
    for i in range(count):
        try:
            item = dataset[i]
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: sample {i}: {broken(error, kind)}") from None
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            what = f"{len(item)} things" if isinstance(item, (tuple, list)) else type_of(item)
            raise DataError(f"{where}: sample {i} is {what}; expected (input, label)")
        x, sample_layout = _item_input(item[0], f"{where}: sample {i}")
        if inputs is None:
            inputs, layout = np.empty((count, *x.shape), x.dtype), sample_layout
        if x.shape != inputs.shape[1:] or x.dtype != inputs.dtype:
            raise DataError(
                f"{where}: sample {i} is {x.dtype} {x.shape}, sample 0 is {inputs.dtype} {inputs.shape[1:]}; "
                "they must be equal"
            )
        inputs[i] = x
        target = _item_target(item[1])
        if target is None or (
            targets and (target.shape, target.dtype) != (targets[0].shape, targets[0].dtype)
        ):
            shown = one_line(ValueError(repr(item[1])))[:60]
            several = targets and targets[0].ndim
            expected = f"{len(targets[0])} numbers, like sample 0" if several else "an integer from 0"
            raise DataError(
                f"{where}: sample {i} has the label {shown} ({type(item[1]).__name__}); expected {expected}"
            )
        targets.append(target)
    assert inputs is not None
    return inputs, np.stack(targets), layout if inputs.ndim == 4 else "auto"


def _item_input(value: Any, where: str) -> tuple[NDArray[np.generic], Layout]:
    """The input of one sample, and the layout of its channels, by the conventions of Pillow and PyTorch."""
    if type(value).__module__.startswith("PIL."):
        image = value if value.mode in ("L", "RGB") else value.convert("RGB")
        return np.asarray(image), "hwc"
    array = _array(value, f"{where}: its input")
    return array, "chw" if hasattr(value, "detach") else "auto"


def _item_target(value: Any) -> NDArray[np.generic] | None:
    """The target of one sample: a class, int64 ``()``, or numbers ``(K,)`` float32; None if it is neither."""
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except Exception:
        return None
    if array.size == 1 and array.dtype.kind in "ui":
        return array.reshape(()).astype(np.int64)
    numeric = array.dtype.kind == "f" or (array.size > 1 and array.dtype.kind in "uib")
    return array.reshape(-1).astype(np.float32) if numeric and array.size and array.ndim < 2 else None
