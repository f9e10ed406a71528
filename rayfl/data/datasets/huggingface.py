"""Datasets of Hugging Face: from the hub, or from your own Parquet, CSV and image files."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.arrays import Layout, as_inputs
from rayfl.data.base import Dataset, Samples
from rayfl.data.own import TestBy, check_seed, draw_tests, split_numbering
from rayfl.data.pictures import Opened, read_pictures
from rayfl.data.tables import require
from rayfl.data.tabular import Encoded, Place, Roles, as_text, encode, labels_of
from rayfl.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image


class HuggingFace(Dataset):
    """Hugging Face: what its library ``datasets`` loads, from the hub or from Parquet, CSV and image files.

    The inputs are the column with images, if there is one; else the column with arrays or lists of numbers;
    else all columns are features, as in ``table``. With images or arrays, ``partition.name=column`` can use
    the other columns. Test samples are the split ``test_split``, or ``test_fraction`` of each class.
    """

    name: Literal["huggingface"] = "huggingface"
    path: str = Field(
        min_length=1,
        description="a dataset of the hub, a folder of files or one that save_to_disk wrote, or csv, "
        "parquet, json, imagefolder with data_files or data_dir",
    )
    subset: str | None = Field(None, description="the dataset's configuration, if it has several")
    data_files: str | tuple[str, ...] | Mapping[str, str] | None = Field(
        None, description="files to read, or the files of each split"
    )
    data_dir: Path | None = Field(None, description="a folder of files to read")
    split: str = Field("train", description="split of the training samples; also parts such as train[:10%]")
    test_split: str | None = Field(None, description="split of the test samples")
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="without a second split: fraction of each class for tests"
    )
    test_by: TestBy = None
    label: str = Field("label", min_length=1, description="the column with the class")
    input: str | None = Field(
        None, description="the column with the images or arrays; default: the only one with images or arrays"
    )
    exclude: tuple[str, ...] = Field((), description="of a table: columns that are not features")
    categorical: tuple[str, ...] | None = Field(
        None, description="of a table: columns of numbers to encode one-hot; those with text always are"
    )
    size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="scale all images to this height and width; default: all images must have one size",
    )
    channels: Literal[1, 3] | None = Field(
        None, description="of images. 1: grey, 3: colours; default: colours if any image has colours"
    )
    layout: Layout = Field("auto", description="axes of arrays with colours; auto: the axis of length 1 or 3")
    seed: int = Field(0, description="seed of the draw of the test samples")

    @model_validator(mode="before")
    @classmethod
    def _make_paths_absolute(cls, data: Any) -> Any:
        """Make names of folders and files absolute, so that the run can be resumed in any folder."""
        if not isinstance(data, dict):
            return data
        path, files = data.get("path"), data.get("data_files")
        if isinstance(path, str) and path in _BUILDERS:
            if files is not None and data.get("data_dir") is None:
                data = {**data, "data_files": _absolute_paths(files)}
        elif isinstance(path, str) and os.path.exists(os.path.expanduser(path)):
            data = {**data, "path": _absolute_paths(path)}
        return data

    @model_validator(mode="after")
    def _refuse_unused_seed(self) -> HuggingFace:
        check_seed(self)
        return self

    @override
    def available(self, root: Path) -> bool:
        return importlib.util.find_spec("datasets") is not None

    @override
    def load(self, root: Path) -> Samples:
        if not self.available(root):
            raise DataError("data: huggingface needs its library: pip install 'rayfl[huggingface]'")
        if (self.test_split is None) == (self.test_fraction is None):
            raise ConfigError(
                "data.test_fraction",
                "either this or data.test_split defines the test samples",
                "give one of the two",
            )
        if self._is_one_part and self.test_split is not None:
            raise ConfigError(
                "data.test_split", f"{self.path} has no splits", "set data.test_fraction in its place"
            )
        parts = [self._load_split(name) for name in (self.split, self.test_split) if name is not None]
        for part in parts:
            if not len(part):
                raise DataError(f"{self.path}: split {part.split} has no samples")
        if len(parts) > 1 and parts[0].features != parts[1].features:
            raise DataError(
                f"{self.path}: {self.split} and {self.test_split} differ in their columns or types; these "
                "must be equal"
            )
        count = len(parts[0])
        kind, column = self._input_kind(parts[0])
        if kind in ("table", "image") and self.layout != "auto":
            raise ConfigError(
                "data.layout", f"{self.layout} would change nothing", "leave it out; it is for arrays"
            )
        if kind == "table":
            encoded = self._encode_table(parts)
            x: NDArray[np.generic] = encoded.x
        else:
            encoded = self._encode_labels(parts, column)
            x = self._pictures(parts, column) if kind == "image" else self._arrays(parts, column)
        if self.test_fraction is None:
            test = np.arange(len(x)) >= count
        else:
            test = draw_tests(self, encoded.y, encoded.columns, self.path)
        return Samples(
            self.path.rstrip("/").rpartition("/")[2] or self.path,
            x[~test],
            encoded.y[~test],
            x[test],
            encoded.y[test],
            len(encoded.class_names),
            class_names=encoded.class_names,
            columns=encoded.part(~test, test),
            numbering=None if self.test_fraction is None else split_numbering(test),
        )

    def _load_split(self, split: str) -> Any:
        """Load a split with the library.

        Raises:
            DataError: if that fails, with the library's message.
        """
        import datasets

        datasets.disable_progress_bars()
        files: Any = list(self.data_files) if isinstance(self.data_files, tuple) else self.data_files
        try:
            if (Path(self.path) / "dataset_dict.json").is_file():
                return datasets.load_from_disk(self.path)[split]
            if self._is_one_part:
                return datasets.load_from_disk(self.path)
            return datasets.load_dataset(
                self.path,
                self.subset,
                data_files=dict(files) if isinstance(files, Mapping) else files,
                data_dir=None if self.data_dir is None else str(self.data_dir),
                split=split,
                cache_dir=None if self.root is None else str(self.root),
            )
        except Exception as error:  # network and files can make the library raise anything
            raise DataError(f"{self.path}: split {split}: {one_line(error)}") from None

    @property
    def _is_one_part(self) -> bool:
        """Whether the folder was written by ``save_to_disk`` of a dataset without splits."""
        return (Path(self.path) / "state.json").is_file() and (
            Path(self.path) / "dataset_info.json"
        ).is_file()

    def _input_kind(self, part: Any) -> tuple[str, str]:
        """The kind of the inputs (``image``, ``array`` or ``table``), and their column ("" for a table)."""
        kinds = {name: kind for name, kind in map(_kind_of, part.features.items()) if name != self.label}
        if self.input is not None:
            self._require_columns(part, self.input)
            if kinds.get(self.input) not in ("image", "array"):
                raise ConfigError("data.input", f"column {self.input!r} holds no images or arrays")
            return kinds[self.input], self.input
        for kind in ("image", "array"):
            names = [name for name in kinds if kinds[name] == kind and name not in self.exclude]
            if len(names) > 1:
                what = f"{self.path} has several columns of {kind}s: {', '.join(names)}"
                raise ConfigError("data.input", what, "name the one that holds the inputs")
            if names:
                return kind, names[0]
        for name, kind in kinds.items():
            if kind == "other" and name not in self.exclude:
                raise DataError(f"{self.path}: column {name!r} holds {part.features[name]}; exclude it")
        return "table", ""

    def _require_columns(self, part: Any, *names: str) -> None:
        import pandas as pd

        require(pd.DataFrame(columns=part.column_names), names, self.path)

    def _row_namer(self, parts: list[Any]) -> Place:
        """A function that returns the place of a row, counted over all splits."""

        def place(row: int) -> str:
            split, local_row = (parts[0], row) if row < len(parts[0]) else (parts[1], row - len(parts[0]))
            return f"{self.path}, {split.split} row {local_row}"

        return place

    def _frame(self, parts: list[Any], names: list[str]) -> pd.DataFrame:
        """A table of these columns with the rows of all splits."""
        import pandas as pd

        frame: pd.DataFrame = pd.concat(
            [part.select_columns(names).to_pandas() for part in parts], ignore_index=True
        )
        return frame

    def _encode_table(self, parts: list[Any]) -> Encoded:
        names = parts[0].column_names
        self._require_columns(parts[0], self.label, *self.exclude)
        plain = [name for name in names if _kind_of((name, parts[0].features[name]))[1] == "plain"]
        roles = Roles(self.label, [name for name in self.exclude if name in plain], self.categorical or ())
        encoded = encode(self._frame(parts, plain), roles, self.path, self._row_namer(parts))
        return Encoded(
            encoded.x, *self._with_class_names(parts, encoded.y, encoded.class_names), encoded.columns
        )

    def _encode_labels(self, parts: list[Any], column: str) -> Encoded:
        """Labels and columns of a dataset of images or arrays, without features."""
        self._require_columns(parts[0], self.label)
        features = parts[0].features
        names = [name for name in features if _kind_of((name, features[name]))[1] == "plain"]
        if self.label not in names:
            raise DataError(
                f"{self.path}: column {self.label!r} holds {features[self.label]}; expected integers or text"
            )
        frame = self._frame(parts, names)
        y, class_names = labels_of(frame[self.label], f"column {self.label!r}", self._row_namer(parts))
        y, class_names = self._with_class_names(parts, y, class_names)
        texts = {name: as_text(frame[name]) for name in names if name != self.label}
        id_columns = {name: text for name, text in texts.items() if text is not None}
        return Encoded(np.empty((len(y), 0), np.float32), y, class_names, id_columns)

    def _with_class_names(
        self, parts: list[Any], y: NDArray[np.int64], numbers: tuple[str, ...]
    ) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Replace the numbers and names of classes by those of the dataset, if it defines them."""
        names = getattr(parts[0].features[self.label], "names", None)
        if names is None:
            return y, numbers
        labels = np.array([int(number) for number in numbers], np.int64)
        if labels.min() < 0:
            row = int((y == 0).argmax())
            raise DataError(f"{self._row_namer(parts)(row)}: column {self.label!r} has no label")
        return labels[y], tuple(map(str, names))

    def _pictures(self, parts: list[Any], column: str) -> NDArray[np.uint8]:
        import datasets

        encoded = [
            part.select_columns([column]).cast_column(column, datasets.Image(decode=False)) for part in parts
        ]
        pictures: list[tuple[str, Opened]] = []
        place_of = self._row_namer(parts)
        for part in encoded:
            for value in part[column]:
                where = place_of(len(pictures))
                if value is None:
                    raise DataError(f"{where}: column {column!r} has no image")
                pictures.append((where, partial(_open, value)))
        return read_pictures(pictures, self.size, self.channels)

    def _arrays(self, parts: list[Any], column: str) -> NDArray[np.generic]:
        if self.size is not None or self.channels is not None:
            raise ConfigError(
                "data.size", f"column {column!r} holds arrays", "size and channels are for images"
            )
        arrays = []
        for part in parts:
            values = part.select_columns([column]).with_format("numpy")[:][column]
            if values.dtype == object:
                shapes = [np.shape(value) for value in values]
                row = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
                raise DataError(
                    f"{self.path}, {part.split} row {row}: column {column!r} has shape {shapes[row]}, row 0 "
                    f"has {shapes[0]}"
                )
            arrays.append(values)
        return as_inputs(np.concatenate(arrays), f"{self.path}: column {column!r}", self.layout)


_BUILDERS = frozenset({"arrow", "csv", "imagefolder", "json", "parquet", "text", "webdataset", "xml"})
"""Values of ``path`` for which the library reads the user's files; they are not folders."""


def _absolute_paths(files: Any) -> Any:
    """Make paths and patterns absolute: one, several, or by split. URLs and other values stay as they are."""
    if isinstance(files, str):
        return files if "://" in files else os.path.join(os.getcwd(), os.path.expanduser(files))
    if isinstance(files, (list, tuple)):
        return [_absolute_paths(each) for each in files]
    return (
        {key: _absolute_paths(each) for key, each in files.items()} if isinstance(files, Mapping) else files
    )


def _kind_of(feature: tuple[str, Any]) -> tuple[str, str]:
    """The name of a column, and its kind: ``image``, ``array`` (of numbers), ``plain`` or ``other``."""
    name, feature_type = feature
    type_name = type(feature_type).__name__
    if type_name == "Image":
        return name, "image"
    if type_name in ("Value", "ClassLabel"):
        return name, "plain"
    if type_name.startswith("Array"):
        return name, "array"
    while type(feature_type).__name__ in ("Sequence", "List", "LargeList"):
        feature_type = feature_type.feature
    numeric = type(feature_type).__name__ == "Value" and feature_type.dtype.startswith(
        ("int", "uint", "float")
    )
    return name, "array" if numeric else "other"


def _open(value: Mapping[str, Any]) -> Image:
    from PIL import Image

    return Image.open(value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"]))
