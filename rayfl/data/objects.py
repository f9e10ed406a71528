"""Data and partitions given as Python objects, and the settings that describe them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.data.own import as_arrays
from rayfl.errors import DataError
from rayfl.given import keep
from rayfl.plugins import target_of

_ARRAYS = frozenset({"x", "y", "x_train", "y_train", "x_test", "y_test"})


def dataset_of(thing: object) -> dict[str, Any] | None:
    """The settings of a dataset for arrays, PyTorch datasets, or a function that returns them.

    Arrays and PyTorch datasets are written to a file below :func:`~rayfl.given.data_root`, named after its
    content.

    Raises:
        DataError: if it has no test part.
    """
    if callable(thing) and not hasattr(thing, "__getitem__"):
        return {"name": "python", "target": target_of(thing)}
    if isinstance(thing, Mapping) and not _ARRAYS & set(thing):
        return None  # these are settings
    if not (isinstance(thing, (Mapping, tuple, list)) or hasattr(thing, "__getitem__")):
        return None
    arrays, layout = as_arrays(thing, "data")
    if "x_train" not in arrays:
        raise DataError("data: has no test part; expected (x_train, y_train, x_test, y_test)")
    written = io.BytesIO()
    np.savez(written, **arrays)  # type: ignore[arg-type]
    return {"name": "npz", "path": keep(written.getvalue(), ".npz"), "layout": layout}


def partition_of(thing: object) -> dict[str, Any] | None:
    """The settings of a partition for a list of each client's training samples, or a function.

    Raises:
        DataError: if a client has none.
    """
    if callable(thing):
        return {"name": "python", "target": target_of(thing)}
    if isinstance(thing, str) or not isinstance(thing, Sequence):
        return None
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "client"])
    for client, samples in enumerate(thing):
        if not np.size(samples):
            raise DataError(f"partition: client {client} has no samples; leave it out")
        writer.writerows([sample, client] for sample in np.asarray(samples).reshape(-1).tolist())
    return {"name": "file", "path": keep(text.getvalue().encode(), ".csv")}
