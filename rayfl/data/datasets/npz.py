"""Your own data, from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.arrays import Layout, Predicted, check_classes, of_arrays, read_arrays
from rayfl.data.base import Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.data.own import TestBy, check_predicted, check_seed, with_test_part
from rayfl.given import shown_path


class Npz(ImageDataset):
    """A file with x_train, y_train, x_test, y_test; optional domain_train, domain_test, class_names.

    Or a file with x and y: then ``test_fraction`` of each class are the test samples.

    Inputs are features ``(n, D)``, grey images ``(n, H, W)`` or images ``(n, H, W, C)`` or
    ``(n, C, H, W)``, as integers 0..255 or floats. ``y`` contains classes, integers from 0 ``(n,)``; or
    numbers to predict, floats ``(n,)`` or several per sample ``(n, K)`` (``loss=mse``; 0 and 1:
    ``loss=bce``). Features in uint8 are pixels in rows; all others are a table, in which each column is
    normalised separately (``normalise``).
    """

    elsewhere: ClassVar[str] = "data.path"

    name: Literal["npz"] = "npz"
    path: Path = Field(description="the .npz file")
    layout: Layout = Field("auto", description="axes of colour images; auto: the axis of length 1 or 3")
    tokens: bool = Field(
        False, description="x holds texts: tokens, integers from 0 of shape (n, L), 0 for padding"
    )
    predict: Predicted = Field(
        "class", description="of texts: their class y; or the word after each word, and y is the text's topic"
    )
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="fraction of each class for tests, if the file has x and y only"
    )
    test_by: TestBy = None
    seed: int = Field(0, description="seed of the draw of the test samples")

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> Npz:
        check_seed(self)
        check_predicted(self.tokens, self.predict)
        return self

    @override
    def available(self, root: Path) -> bool:
        return self.path.expanduser().is_file()

    @override
    def load(self, root: Path) -> Samples:
        path = self.path.expanduser()
        shown = shown_path(path)
        arrays, numbering = with_test_part(read_arrays(path), self, shown)
        samples = of_arrays(arrays, Path(shown).stem, shown, self.layout, self.tokens, self.predict)
        check_classes(samples, shown)
        return self.reshaped(replace(samples, numbering=numbering))
