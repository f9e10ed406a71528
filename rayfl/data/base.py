"""Types of the data: samples are stored once, and clients are lists of indices into them.

All arrays here are NumPy arrays: all workers of a node read a :class:`Federation` from Ray's object store
without a copy, and a client takes only the memory of its indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rayfl.data.scaling import GivenScaling, Normalise, Scaling
from rayfl.errors import ConfigError, DataError
from rayfl.losses.base import IGNORED, Task
from rayfl.settings import Section

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "<unknown>"
"""The entry of a vocabulary for all words that are not in it."""

Part = Literal["train", "test"]
"""The training or the test part of a dataset."""

TestedOn = Literal["test", "validation", "common"]
"""On what a client is tested: its own test samples, its validation samples, or all test samples there are."""

ServerShare = Union[  # noqa: UP007
    Annotated[float, Field(ge=0, lt=1)], Annotated[int, Field(ge=1, strict=True)], Literal["auto"]
]
"""Training samples that the server holds out: a fraction, a number, or as many as it needs (``auto``)."""


Names = NDArray[np.str_]
"""The user's ids of the clients ``(N,)``."""


@dataclass(frozen=True)
class Column:
    """Further information about every sample that can define clients, such as its hospital or writer.

    Attributes:
        values: the distinct values as text ``(V,)``, in the order of :func:`in_order`.
        train: the position in ``values`` of each training sample's value ``(n,)``, int32.
        test: the same for test samples; None if unknown.
    """

    values: Names
    train: NDArray[np.int32]
    test: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Numbering:
    """Maps numbers of samples in the source to positions, for tables that name samples by these numbers.

    Attributes:
        train: for each sample of the source its position among the training samples, -1 if it is not one.
        test: the same for test samples; None: they are numbered by position.
        split: whether the numbers of ``test`` refer to the same source as those of ``train``, because one
            source was split into two parts.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64] | None = None
    split: bool = False


def in_order(ids: Sequence[str]) -> list[str]:
    """Sort ids of clients in the order in which clients are numbered: integers by value, else as text."""
    numbers = all(text.isascii() and text.isdecimal() for text in ids)
    return sorted(ids, key=(lambda text: (int(text), text)) if numbers else None)


def called(names: Names | None, client: int) -> str:
    """The name of a client in messages: its own id, or its number."""
    return str(client) if names is None else repr(str(names[client]))


@dataclass(frozen=True)
class Samples:
    """A dataset in memory.

    Attributes:
        name: for reports.
        x_train, x_test: ``(n, C, H, W)`` images (uint8 pixels stay uint8 until they are on the device),
            ``(n, D)`` features (float32) or pixels (uint8), or ``(n, L)`` words of texts (int32, positions
            in ``vocabulary``).
        y_train, y_test: class labels ``(n,)``, int64, in ``range(classes)``.
        classes: number of classes.
        domain_train, domain_test: for data from several sources or distributions (synthetic tasks, mixes of
            datasets) the source of each sample ``(n,)``, int64; None otherwise.
        class_names: for reports; may be empty.
        targets_train, targets_test: targets other than the class: for texts the word that follows each word,
            ``(n, L)`` int64, :data:`IGNORED` after the end of a text; or numbers ``(n, K)`` float32, and
            then all samples are of class 0. None otherwise. Partitions and signatures use the class of a
            text (its topic).
        vocabulary: for texts, the words that a model knows and predicts.
        label_maps: ``(V, classes)``, int64, or None. Clients may see the same samples under other labels
            (CFL's swapped and permuted labels, drift): row ``v`` contains the new label of each label; row 0
            is the identity. Sample ``i`` of a part of ``n`` samples, seen through map ``v``, has the
            *virtual id* ``v * n + i``; without maps ids are plain indices. Read samples by the ids of
            clients only through :meth:`inputs`, :meth:`labels`, :meth:`targets` and :meth:`domains`.
        x_server: inputs ``(s, ...)`` that the server holds out and no client has
            (:mod:`rayfl.data.held_out`); None if there are none.
        scaling: how inputs are scaled for models (:meth:`Dataset.normalised`); None: images with their own
            mean and deviation, everything else unchanged.
        columns: further information about the samples, by name. Used by partitions only.
        numbering: the numbers of the samples in their source; None: their positions. Used by partitions only.
        stored: the clients that come with the data, if any. Used by partitions only.

    Raises:
        DataError: if ``label_maps`` is not such a table, or the virtual ids do not fit in 31 bits.
    """

    name: str
    x_train: NDArray[np.generic]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.generic]
    y_test: NDArray[np.int64]
    classes: int
    domain_train: NDArray[np.int64] | None = None
    domain_test: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    targets_train: NDArray[np.int64] | NDArray[np.float32] | None = None
    targets_test: NDArray[np.int64] | NDArray[np.float32] | None = None
    vocabulary: tuple[str, ...] = ()
    label_maps: NDArray[np.int64] | None = None
    x_server: NDArray[np.generic] | None = None
    scaling: Scaling | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    numbering: Numbering | None = None
    stored: Stored | None = None

    def __post_init__(self) -> None:
        if self.label_maps is not None:
            self._check_maps(self.label_maps)

    def _check_maps(self, maps: NDArray[np.int64]) -> None:
        where = f"dataset {self.name}: label_maps"
        if maps.ndim != 2 or not len(maps) or maps.shape[1] != self.classes or maps.dtype.kind not in "iu":
            raise DataError(
                f"{where} has shape {maps.shape} and type {maps.dtype}; expected integers (V, {self.classes})"
            )
        if maps.min() < 0 or maps.max() >= self.classes:
            raise DataError(f"{where} holds labels outside range({self.classes})")
        if not np.array_equal(maps[0], np.arange(self.classes)):
            raise DataError(f"{where}: the first map must leave the labels as they are")
        if self.targets_train is not None or self.targets_test is not None:
            raise DataError(f"{where} need data whose models predict labels; those of {self.name} do not")
        most = max(len(self.x_train), len(self.x_test))
        if len(maps) * most > np.iinfo(np.int32).max:
            raise DataError(
                f"{where}: {len(maps)} maps of {most} samples are more than 2^31 - 1 ids; "
                f"use at most {np.iinfo(np.int32).max // most} different maps or fewer samples"
            )

    def inputs(self, part: Part, ids: NDArray[np.integer]) -> NDArray[np.generic]:
        """The inputs of samples by their (virtual) ids, ``(len(ids), ...)``."""
        x = self.x_train if part == "train" else self.x_test
        inputs: NDArray[np.generic] = x.take(self._plain_ids(len(x), ids), axis=0)
        return inputs

    def labels(self, part: Part, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """The labels of samples by their (virtual) ids, ``(len(ids),)``."""
        y = self.y_train if part == "train" else self.y_test
        maps = self.label_maps
        values = y[ids] if maps is None else maps[ids // len(y), y[ids % len(y)]]
        labels: NDArray[np.int64] = values.astype(np.int64, copy=False)
        return labels

    def targets(self, part: Part, ids: NDArray[np.integer]) -> NDArray[np.int64] | NDArray[np.float32]:
        """The targets of samples by their (virtual) ids, ``(n, ...)``: labels, numbers or next words."""
        targets = self.targets_train if part == "train" else self.targets_test
        return self.labels(part, ids) if targets is None else targets[ids]

    def domains(self, part: Part, ids: NDArray[np.integer]) -> NDArray[np.int64] | None:
        """The sources of samples by their (virtual) ids, ``(len(ids),)``, if the data have sources."""
        domain = self.domain_train if part == "train" else self.domain_test
        return None if domain is None else domain[self._plain_ids(len(domain), ids)]

    def public(self, count: int, rng: np.random.Generator) -> NDArray[np.generic]:
        """Inputs of ``count`` random samples of the server (all, if it has fewer), in their original order.

        Raises:
            DataError: if the server has none.
        """
        if not count:
            return self.x_train[:0]
        if self.x_server is None:
            raise DataError(f"{self.name}: the server has no samples of its own; set data.server_share")
        chosen = rng.choice(len(self.x_server), min(count, len(self.x_server)), replace=False)
        inputs: NDArray[np.generic] = self.x_server[np.sort(chosen)]
        return inputs

    def _plain_ids(self, count: int, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        return ids if self.label_maps is None else ids % count

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, ``(C, H, W)``, ``(D,)`` or ``(L,)``."""
        return tuple(self.x_train.shape[1:])

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: of classes, of words in the vocabulary, or of numbers to predict."""
        if self.numeric and self.targets_train is not None:
            return int(self.targets_train.shape[1])
        return len(self.vocabulary) if self.task == "words" else self.classes

    @property
    def numeric(self) -> bool:
        """Whether models predict numbers rather than classes or words."""
        return self.targets_train is not None and self.targets_train.dtype == np.float32

    @property
    def tokens(self) -> bool:
        """Whether the inputs are positions in a vocabulary, for an embedding."""
        return self.x_train.dtype == np.int32

    @property
    def task(self) -> Task:
        """The task of a model of these samples: ``numbers``, ``texts`` or ``words``."""
        if not self.tokens:
            return "numbers"
        return "texts" if self.targets_train is None or self.numeric else "words"


_SORTED_AT_ONCE = 1 << 24
"""Number of values that are sorted together."""

_LOW_32_BITS = (1 << 32) - 1


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The offsets ``(L + 1,)`` of lists of these sizes ``(L,)``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def pieces(ends: NDArray[np.int64], lists: slice, together: int) -> Iterator[slice]:
    """Divide lists into pieces: consecutive lists with at most ``together`` values in total, or a single one.

    Args:
        ends: the index after the last value of each list, ascending ``(L,)``.
        lists: the range of lists to divide.
        together: the limit.

    Yields:
        The range of lists of each piece.
    """
    first = lists.start
    while first < lists.stop:
        begin = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, begin + together, side="right"))
        yield slice(first, min(max(last, first + 1), lists.stop))
        first = max(last, first + 1)


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths in two arrays: list ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[NDArray[np.integer]] | Ragged) -> Ragged:
        """Pack L index arrays ``(n_i,)``."""
        if isinstance(lists, Ragged):
            return lists
        offsets = _offsets(np.array([len(part) for part in lists], dtype=np.int64))
        values = np.concatenate(lists) if len(lists) else np.empty(0, np.int32)
        return cls(values.astype(np.int32, copy=False), offsets)

    @classmethod
    def ascending(cls, values: NDArray[np.int32], sizes: NDArray[np.int64]) -> Ragged:
        """Lists of these sizes ``(L,)`` from ``values`` ``(n,)``, each sorted."""
        lists = cls(np.empty_like(values), _offsets(sizes))
        for piece in lists.pieces(_SORTED_AT_ONCE):
            part = slice(lists.offsets[piece.start], lists.offsets[piece.stop])
            # One sort for all lists, by list and value.
            keys = np.repeat(np.arange(piece.start, piece.stop) << 32, sizes[piece]) | values[part]
            keys.sort()
            lists.values[part] = keys & _LOW_32_BITS
        return lists

    @classmethod
    def empty(cls, count: int) -> Ragged:
        """Make ``count`` empty lists."""
        return cls(np.empty(0, np.int32), np.zeros(count + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[i] for i in range(len(self)))

    def take(self, which: NDArray[np.integer]) -> Ragged:
        """The lists ``which`` ``(l,)``, in this order."""
        sizes = self.sizes_of(which)
        offsets = _offsets(sizes)
        shift = np.repeat(self.offsets[which] - offsets[:-1], sizes)
        return Ragged(self.values[np.arange(offsets[-1]) + shift], offsets)

    def pieces(self, together: int) -> Iterator[slice]:
        """Divide all lists into pieces, see :func:`pieces`."""
        return pieces(self.offsets[1:], slice(0, len(self)), together)

    def among(self, which: NDArray[np.integer]) -> Ragged:
        """The lists ``which`` ``(l,)``, ascending and without duplicates; returns self if these are all."""
        return self if len(which) == len(self) else self.take(which)

    def sizes_of(self, which: NDArray[np.integer]) -> NDArray[np.int64]:
        """The lengths ``(l,)`` of the lists ``which``, without reading the others."""
        sizes: NDArray[np.int64] = self.offsets[which + 1] - self.offsets[which]
        return sizes

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The length of every list."""
        sizes = np.diff(self.offsets)
        sizes.flags.writeable = False  # the array is shared
        return sizes

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """The arrays that store the lists."""
        return self.values, self.offsets

    def __getstate__(self) -> dict[str, Any]:
        """Only the arrays; the sizes follow from them."""
        return {"values": self.values, "offsets": self.offsets}


class Ranges(Ragged):
    """Lists of consecutive numbers: list ``i`` is ``range(offsets[i], offsets[i + 1])``.

    Only the offsets are stored; values are computed when they are accessed.
    """

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def of_sizes(cls, sizes: NDArray[np.int64]) -> Ranges:
        """Consecutive lists of these sizes ``(L,)``."""
        return cls(_offsets(sizes))

    @property
    def values(self) -> NDArray[np.int32]:
        """The values of all lists ``(n,)``."""
        return np.arange(self.offsets[0], self.offsets[-1], dtype=np.int32)

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return np.arange(self.offsets[i], self.offsets[i + 1], dtype=np.int32)

    def take(self, which: NDArray[np.integer]) -> Ragged:
        """The lists ``which`` ``(l,)``, in this order."""
        offsets = _offsets(self.sizes_of(which))
        shift = np.repeat(self.offsets[which] - offsets[:-1], np.diff(offsets))
        return Ragged((np.arange(offsets[-1]) + shift).astype(np.int32), offsets)

    def __getstate__(self) -> dict[str, Any]:
        return {"offsets": self.offsets}

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """The arrays that store the lists."""
        return (self.offsets,)


@dataclass(frozen=True)
class Stored:
    """Clients that are defined by the data, in order.

    Attributes:
        train: indices of the training samples of each client.
        test: indices of each client's own test samples; None: no client has any.
        names: the ids of the clients ``(N,)``; None: their numbers.
    """

    train: Ragged
    test: Ragged | None = None
    names: Names | None = None


@dataclass(frozen=True)
class Federation:
    """A dataset divided among ``N`` clients.

    Attributes:
        samples: the data, stored once.
        train, validation: per client, ids of training samples (see :class:`Samples`: indices, or virtual ids
            if clients see labels differently); disjoint within a client.
        test: per client, ids of test samples: those that the partition gave it, or samples that follow its
            label distribution. Clients may share test samples.
        groups: the planted (ground-truth) group of each client ``(N,)``, int64, or None if there is none.
        names: the user's ids of the clients ``(N,)``, or None: clients are named by their numbers.
        notes: messages for the user about the division, a line each.
    """

    samples: Samples
    train: Ragged
    validation: Ragged
    test: Ragged
    groups: NDArray[np.int64] | None = None
    names: Names | None = None
    notes: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        """Number of clients N."""
        return len(self.train)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training samples of each client, ``n_i``, ``(N,)``."""
        return self.train.sizes

    @property
    def predictions(self) -> NDArray[np.int64]:
        """Number of predictions on which each client is tested ``(N,)``: one per test sample, or per word."""
        return self.predictions_on("test")

    def predictions_on(self, on: TestedOn) -> NDArray[np.int64]:
        """Number of predictions per client when tested on these samples ``(N,)``; see :attr:`predictions`."""
        if on == "common":
            all_tests = self.common_tests(0)
            return np.full(self.clients, self.predictions_of(Ragged.of([all_tests]), "test")[0])
        if on == "validation":
            return self.predictions_of(self.validation, "train")
        return self.predictions_of(self.test, "test")

    def predictions_of(self, lists: Ragged, part: Part) -> NDArray[np.int64]:
        """How many predictions there are for each list of samples ``(n,)``: one per sample, or per word."""
        samples = self.samples
        targets = samples.targets_train if part == "train" else samples.targets_test
        if targets is None or samples.numeric:
            return lists.sizes
        words = (targets[lists.values] != IGNORED).sum(axis=1)
        word_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(words)])
        return np.diff(word_offsets[lists.offsets])

    def tested_on(self, on: TestedOn, client: int) -> tuple[Part, NDArray[np.int32]]:
        """The part of the data and the ids of the samples ``(n,)`` that a client is tested on.

        The client sees the common test samples through the same label map as its own.
        """
        if on == "validation":
            return "train", self.validation[client]
        if on == "test":
            return "test", self.test[client]
        return "test", self.common_tests(self.label_maps(np.array([client]))[0])

    def label_maps(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of :attr:`Samples.label_maps` through which each client sees its samples ``(n,)``."""
        first, tested = self.test.offsets[:-1][clients], self.test.sizes[clients] > 0
        rows = np.zeros(len(clients), np.int64)
        rows[tested] = self.test.values[first[tested]] // len(self.samples.y_test)
        return rows

    def common_tests(self, label_map: int) -> NDArray[np.int32]:
        """The ids of all test samples, seen through row ``label_map`` of :attr:`Samples.label_maps`."""
        count = len(self.samples.y_test)
        return np.arange(label_map * count, (label_map + 1) * count, dtype=np.int32)


@dataclass(frozen=True)
class MoreSamples:
    """Samples of newcomers, which the run has not seen, as its dataset reads them.

    Attributes:
        x: inputs ``(n, ...)``.
        y: labels ``(n,)``, int64, numbered as in the run.
        columns: further information about each sample, as text ``(n,)``, by name.
        targets: numbers to predict ``(n, K)`` float32; None if labels are predicted.
        test: which samples are for tests ``(n,)``; None: the source does not define that.
    """

    x: NDArray[np.generic]
    y: NDArray[np.int64]
    columns: Mapping[str, Names]
    targets: NDArray[np.float32] | None = None
    test: NDArray[np.bool_] | None = None


_SAMPLES_FOR_SCALING = 2000
"""Number of samples that is enough for a mean and a standard deviation."""


class Dataset(Section):
    """A source of samples, chosen by name; subclasses are files of ``rayfl/data/datasets``."""

    name: str = ""
    elsewhere: ClassVar[str] = ""
    """The setting that names the source of the samples, such as ``data.path``, if that is not ``root``."""

    root: Path | None = Field(
        None, description="folder of downloaded datasets; by default $RAYFL_DATA, else ~/.cache/rayfl"
    )
    normalise: Normalise = Field(
        "pooled",
        description="mean and deviation that inputs are normalised with, per channel or feature; pooled: "
        "those of all clients' training samples; server: of the server's samples; none: no normalisation "
        "(pixels in 0..1, features as they are); or numbers: {mean: [..], std: [..]}",
    )
    server_share: ServerShare = Field(
        "auto",
        description="training samples that the server holds out, so that no client has them: a "
        "fraction; a number, at most a tenth of them; auto: as many as the method needs, at "
        "most a tenth",
    )

    @model_validator(mode="after")
    def _refuse_unused_root(self) -> Dataset:
        if self.elsewhere and self.root is not None:
            raise ValueError(f"root would change nothing; the samples come from {self.elsewhere}")
        return self

    @classmethod
    def needs_settings(cls) -> bool:
        """Whether it has required settings besides its name, as datasets in files have."""
        return any(field.is_required() for field in cls.model_fields.values())

    def load(self, root: Path) -> Samples:
        """Read the dataset.

        Args:
            root: the folder of downloaded datasets.

        Raises:
            DataError: if it is missing (one line that says how to get it) or broken.
        """
        raise NotImplementedError

    def normalised(self, samples: Samples) -> Samples:
        """Samples with the scaling that ``normalise`` specifies.

        Raises:
            ConfigError: if the given numbers do not fit the samples, or ``server`` is set for words.
        """
        if isinstance(self.normalise, GivenScaling):
            return replace(samples, scaling=Scaling.given(samples, self.normalise))
        if self.normalise == "server" and samples.tokens:
            raise ConfigError(
                "data.normalise", f"{samples.name} has words, which have no mean", "leave it out"
            )
        fitted_on = samples.x_server if self.normalise == "server" else samples.x_train
        scaling = Scaling.none(samples) if self.normalise == "none" else Scaling.of(samples, fitted_on)
        return replace(samples, scaling=scaling)

    @property
    def public_samples(self) -> int:
        """Number of the server's samples that ``normalise`` uses."""
        return _SAMPLES_FOR_SCALING if self.normalise == "server" else 0

    def prepare(self, root: Path) -> str:
        """Download what :meth:`load` needs to ``root``, under a file lock; return a line on what was done."""
        return "nothing to download"

    def available(self, root: Path) -> bool:
        """Whether :meth:`load` would find its files, without reading them."""
        return True

    def remedy(self, root: Path) -> str:
        """What users do if the files are missing."""
        return f"rayfl prepare {self.name}"

    def own_files(self, root: Path) -> Sequence[Path]:
        """The files that users have put into ``root`` themselves, and may change."""
        return ()

    def read_more(self, path: Path, own: Samples) -> MoreSamples | None:
        """Read samples of newcomers from a file or folder like the run's; None if this dataset cannot, and an
        .npz file is needed.

        Args:
            path: the file or folder.
            own: the run's samples.

        Raises:
            DataError: if it cannot be read, or contains something unknown to the run, such as a new class.
        """
        return None

    def inputs_of(self, frame: pd.DataFrame) -> NDArray[np.float32]:
        """The inputs ``(n, D)`` of rows of a table like the run's, before they are normalised.

        Raises:
            DataError: if a column is missing, or a cell contains something unknown to the run.
            ConfigError: if this dataset is not a table.
        """
        what = f"got a table, but the run's data are {self.name}"
        raise ConfigError("predict", what, "give an array (n, *shape)")


@dataclass(frozen=True)
class Assignment:
    """The result of a partition.

    Attributes:
        clients: indices of the training samples of each client (plain, never virtual).
        groups: the planted group of each client ``(N,)``, if groups were planted.
        label_map: the row of ``label_maps`` through which each client sees its samples, ``(N,)``; None:
            labels are unchanged.
        label_maps: ``(V, classes)``, as in :class:`Samples`; used with ``label_map``.
        test: indices of each client's own test samples; None: test samples that follow its labels.
        names: the user's ids of the clients ``(N,)``, each once; None: clients are named by their numbers.
        notes: messages for the user about the division, a line each.
    """

    clients: list[NDArray[np.integer]] | Ragged
    groups: NDArray[np.int64] | None = None
    label_map: NDArray[np.int64] | None = None
    label_maps: NDArray[np.int64] | None = None
    test: list[NDArray[np.integer]] | Ragged | None = None
    names: Names | None = None
    notes: tuple[str, ...] = ()


TestSamples: TypeAlias = int | Literal["auto", "all", "whole_labels"]
"""Values of ``partition.test_samples``."""


class Partition(Section):
    """A way to divide training data among clients, chosen by name; subclasses are files of
    ``rayfl/data/partitions``.
    """

    name: str = ""

    clients: int = Field(100, ge=1, description="number of clients N")
    validation: float = Field(
        0.1, ge=0, lt=1, description="fraction of each client's samples kept for validation"
    )
    test_samples: TestSamples = Field(
        "auto",
        description="maximum number of test samples per client: a number >= 1, 'all' that follow its "
        "label distribution, or 'auto' (all, unless the clients together would hold more "
        "than 20 million). 'whole_labels': all test samples of every label that it has, in "
        "whatever proportion (code of FLIS and PACFL)",
    )

    def check(self) -> None:
        """Refuse settings that are wrong for any data, before data are read.

        Raises:
            ConfigError, DataError
        """

    def assign(self, samples: Samples, seed: int) -> Assignment:
        """Divide the training samples ``range(len(samples.y_train))`` among the clients.

        Every client gets at least one sample, and no sample is assigned twice. Most partitions use only
        labels and domains; those that divide by similarity or difficulty also use the inputs.

        Raises:
            DataError: if the request is impossible for these samples (one line; the number of attempts is
                bounded).
        """
        raise NotImplementedError
