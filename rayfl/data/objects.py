"""Convert data and partitions that users pass as Python objects to settings of a config."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.data.own import as_arrays
from rayfl.errors import DataError, type_of
from rayfl.given import keep
from rayfl.plugins import target_of

_ARRAY_NAMES = frozenset({"x", "y", "x_train", "y_train", "x_test", "y_test"})


def dataset_of(thing: object) -> dict[str, Any] | None:
    """The settings of a dataset for arrays, PyTorch datasets, or a function that returns them.

    Arrays and PyTorch datasets are written to a file below :func:`~rayfl.given.data_root`, named after its
    content. Without a test part they need ``data.test_fraction``.

    Raises:
        DataError: if it is nothing of the kind.
    """
    if isinstance(thing, type) or (callable(thing) and not hasattr(thing, "__getitem__")):
        return {"name": "python", "target": target_of(thing)}
    if isinstance(thing, Mapping) and not _ARRAY_NAMES & set(thing):
        return None  # these are settings
    if not (isinstance(thing, (Mapping, tuple, list)) or hasattr(thing, "__getitem__")):
        return None
    if hasattr(thing, "columns"):
        remedy = "write it to a file, and give data={'name': 'table', 'path': FILE, 'label': COLUMN}"
        raise DataError(f"data: is {type_of(thing)}; {remedy}")
    arrays, layout = as_arrays(thing, "data")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return {"name": "npz", "path": keep(buffer.getvalue(), ".npz"), "layout": layout}


def partition_of(thing: object) -> dict[str, Any] | None:
    """The settings of a partition for lists of each client's training samples, or for a function.

    Args:
        thing: a function; or indices of samples, as a list with an array per client, or a mapping from the
            clients' ids to arrays, ranges or lists.

    Returns:
        The settings; None for anything else, such as a mapping that contains settings.

    Raises:
        DataError: if there are no clients, a client has no samples, or its entry is not an array of indices.
    """
    if callable(thing):
        return {"name": "python", "target": target_of(thing)}
    if isinstance(thing, Mapping) and any(isinstance(each, (set, frozenset)) for each in thing.values()):
        raise DataError("partition: a client has a set; expected a list or array of its training samples")
    if isinstance(thing, Mapping) and thing and all(map(_is_array, thing.values())):
        entries: Iterable[tuple[Any, Any]] = thing.items()
    elif isinstance(thing, Sequence) and not isinstance(thing, str):
        entries = enumerate(thing)
    else:
        return None
    if not thing:
        raise DataError("partition: names no client; expected the places of each client's training samples")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["sample", "client"])
    ids: set[str] = set()
    for client, samples in entries:
        name = str(client).strip()
        try:
            places = np.asarray(samples)
        except ValueError:  # lists of different lengths, or too many in each other
            raise DataError(
                f"partition: client {client} has lists of lists; expected the places of its training samples"
            ) from None
        if name in ids:
            raise DataError(f"partition: two clients have the id {name!r}")
        ids.add(name)
        if not places.size:
            raise DataError(f"partition: client {client} has no samples; leave it out")
        if not places.ndim or places.dtype.kind not in "iuf":
            what = f"an array of {places.dtype}" if places.ndim else type(samples).__name__
            raise DataError(
                f"partition: client {client} has {what}; expected the places of its training samples, "
                "integers (masks: numpy.flatnonzero(mask))"
            )
        writer.writerows([sample, client] for sample in places.reshape(-1).tolist())
    return {"name": "file", "path": keep(buffer.getvalue().encode(), ".csv")}


def _is_array(thing: object) -> bool:
    if isinstance(thing, (list, tuple)):
        return all(isinstance(each, (int, np.integer)) for each in thing)
    return isinstance(thing, range) or hasattr(thing, "__array__")
