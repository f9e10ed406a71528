"""Clients by a function of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Samples, in_order
from rayfl.data.own import call, seeded
from rayfl.data.partitions._dealing import Owners
from rayfl.data.partitions._own import OwnPartition, fault
from rayfl.errors import DataError, type_of
from rayfl.plugins import resolve
from rayfl.random import generator
from rayfl.settings import Kwargs

_EXPECTED = "expected a list with the samples of each client, or a dictionary from ids to samples"


class FromPython(OwnPartition):
    """Python: your own function gets the labels of the training samples and assigns the samples to clients.

    It is called as ``deal(labels, rng, **kwargs)`` with the labels ``(n,)`` and a NumPy generator keyed by
    the run's seed. It returns a list with the positions of each client's samples, or a dictionary from the
    clients' ids to positions; or a tuple of two of these, the second with the positions of test samples. The
    clients of a dictionary keep their ids.
    """

    name: Literal["python"] = "python"
    target: str = Field(description="module:function or path/to/file.py:function")
    kwargs: Kwargs = Field(default_factory=dict, description="keyword arguments of the function")

    @override
    def check(self) -> None:
        resolve(self.target, "partition.target")  # before Ray starts, so that its source is sent to workers

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        numbers = samples.targets_train if samples.numeric else None
        labels = (samples.y_train if numbers is None else numbers).copy()
        with seeded(seed):
            returned = call(self.target, self.kwargs, "partition", labels, generator(seed, "own partition"))
        test_part = None
        if (
            isinstance(returned, tuple)
            and len(returned) == 2
            and all(isinstance(d, (list, Mapping)) for d in returned)
        ):
            returned, test_part = returned
        names, lists = self._clients(returned)
        train = self._owners(lists, names, len(labels), "training")
        if test_part is None:
            return self.assignment(train, None, names)
        test_names, test_lists = self._clients(test_part)
        tests_by_name = dict(zip(test_names.tolist(), test_lists, strict=True))
        unknown = sorted(set(tests_by_name) - set(names.tolist()))
        if unknown:
            raise DataError(f"partition: {self.target}: client {unknown[0]!r} has test samples only")
        client_tests = [tests_by_name.get(name, []) for name in names.tolist()]
        test = self._owners(client_tests, names, len(samples.y_test), "test")
        return self.assignment(train, test, names)

    def _clients(self, dealt: object) -> tuple[NDArray[np.str_], list[object]]:
        """The ids of the clients, in order, and the samples of each."""
        if isinstance(dealt, Mapping):
            by_name = {str(name).strip(): lists for name, lists in dealt.items()}
            if len(by_name) < len(dealt):
                stripped = [str(name).strip() for name in dealt]
                name = next(name for name in stripped if stripped.count(name) > 1)
                raise DataError(f"partition: {self.target} returned two clients with the id {name!r}")
        elif isinstance(dealt, Sequence) and not isinstance(dealt, str):
            by_name = {str(number): lists for number, lists in enumerate(dealt)}
        else:
            raise DataError(f"partition: {self.target} returned {type_of(dealt)}; {_EXPECTED}")
        if not by_name:
            raise DataError(f"partition: {self.target} returned no client; {_EXPECTED}")
        names = in_order(list(by_name))
        for name in names:
            if fault(name):
                raise DataError(f"partition: {self.target}: {fault(name)}")
        return np.array(names), [by_name[name] for name in names]

    def _owners(self, lists: list[object], names: NDArray[np.str_], count: int, part: str) -> Owners:
        """The client of each sample ``(count,)``, -1 for none."""
        owners = np.full(count, -1, np.int64)
        for client, samples in enumerate(lists):
            where = f"partition: {self.target}: client {str(names[client])!r}"
            try:
                places = np.asarray(samples)
            except ValueError:
                places = np.empty((0, 0))
            if places.ndim == 1 and not len(places):
                places = places.astype(np.int64)
            if places.ndim != 1 or places.dtype.kind not in "ui":
                what = (
                    f"{places.dtype} {places.shape}"
                    if isinstance(samples, np.ndarray)
                    else type(samples).__name__
                )
                raise DataError(f"{where} has {what}; expected the places of its {part} samples, integers")
            if len(places) and (places.min() < 0 or places.max() >= count):
                wrong = places.min() if places.min() < 0 else places.max()
                raise DataError(
                    f"{where}: there is no {part} sample {wrong}; they are numbered 0 to {count - 1}"
                )
            taken = places[owners[places] >= 0]
            if len(taken):
                owner = str(names[owners[taken[0]]])
                raise DataError(f"{where}: {part} sample {taken[0]} belongs to {owner!r} already")
            ascending = np.sort(places)
            twice = ascending[1:][ascending[1:] == ascending[:-1]]
            if len(twice):
                raise DataError(f"{where} has {part} sample {twice[0]} twice")
            owners[places] = client
        return owners
