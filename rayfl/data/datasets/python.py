"""Your own data, from a Python function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.arrays import Layout, Predicted, of_arrays
from rayfl.data.base import Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.data.own import TestBy, as_arrays, call, check_predicted, seeded, with_test_part
from rayfl.errors import DataError
from rayfl.plugins import resolve
from rayfl.settings import Kwargs


class FromPython(ImageDataset):
    """Python: what a function (or class) of yours returns, arrays or datasets of PyTorch.

    It returns one of

    - ``(x_train, y_train, x_test, y_test)``, or a dictionary with these names, and perhaps ``domain_train``,
      ``domain_test``, ``class_names``, and columns such as ``hospital_train`` for ``partition.name=column``;
    - two map-style ``torch.utils.data.Dataset`` of (input, label), for training and for tests;
    - ``(x, y)``, a dictionary with ``x``, ``y`` and columns, or one such dataset; then ``test_fraction`` of
      each class are the test samples.

    Inputs and targets are as in an .npz file (``npz``); tensors and Pillow's images are accepted, too.
    All samples are read once, before the run starts, with the global generators of Python, NumPy and PyTorch
    seeded.
    """

    elsewhere: ClassVar[str] = "data.target"

    name: Literal["python"] = "python"
    target: str = Field(description="module:function or path/to/file.py:function")
    kwargs: Kwargs = Field(default_factory=dict, description="keyword arguments of the function")
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="fraction of each class for tests, if there is no test part"
    )
    test_by: TestBy = None
    classes: int | None = Field(
        None, ge=2, description="number of classes; by default one more than the largest label"
    )
    layout: Layout = Field("auto", description="axes of colour images; auto: the axis of length 1 or 3")
    tokens: bool = Field(
        False, description="x holds texts: tokens, integers from 0 of shape (n, L), 0 for padding"
    )
    predict: Predicted = Field(
        "class", description="of texts: their class y; or the word after each word, and y is the text's topic"
    )
    seed: int = Field(
        0, description="seed of the function's random numbers and of the draw of the test samples"
    )

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> FromPython:
        check_predicted(self.tokens, self.predict)
        return self

    @override
    def available(self, root: Path) -> bool:
        resolve(self.target, "data.target")  # before Ray starts, so that its source is sent to the workers
        return True

    @override
    def load(self, root: Path) -> Samples:
        with seeded(self.seed):
            returned = call(self.target, self.kwargs, "data")
            arrays, layout = as_arrays(returned, self.target)
        arrays, numbering = with_test_part(arrays, self, self.target)
        samples = of_arrays(
            arrays,
            self.target.rpartition(":")[2],
            self.target,
            layout if self.layout == "auto" else self.layout,
            self.tokens,
            self.predict,
        )
        return self.reshaped(replace(checked(samples, self.classes, self.target), numbering=numbering))


def checked(samples: Samples, classes: int | None, where: str) -> Samples:
    """Samples with ``classes`` classes, if given; where classes are predicted, two or more.

    Raises:
        DataError
    """
    if samples.numeric:
        if classes is not None:
            raise DataError(f"{where}: has numbers to predict and no classes; leave data.classes out")
        return samples
    largest = int(max(samples.y_train.max(), samples.y_test.max()))
    if classes is not None and largest >= classes:
        raise DataError(
            f"{where}: has label {largest}; data.classes={classes} are numbered 0 to {classes - 1}"
        )
    present = np.unique(samples.y_train)
    if len(present) < 2 and samples.task != "words":
        raise DataError(
            f"{where}: all training samples have label {present[0]}; expected two classes or more"
        )
    return samples if classes is None else replace(samples, classes=classes)
