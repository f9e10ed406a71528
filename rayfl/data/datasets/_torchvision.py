"""The base of the datasets that torchvision can download."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.data.arrays import as_inputs, as_labels, read_npz, write_npz
from rayfl.data.base import Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.errors import DataError, one_line
from rayfl.torchvision_shim import torchvision_datasets

_NETWORK_TIMEOUT_S = 60.0
_OFFLINE = "data.name=npz data.path=file.npz (with x_train, y_train, x_test, y_test)"


class TorchvisionDataset(ImageDataset):
    """Base of datasets stored in ``root``, as one npz file or in torchvision's own layout.

    If both exist, the npz file is read. :meth:`prepare` writes it, because a single file can be written
    atomically, and reading it needs no unpickling.
    """

    torchvision_name: ClassVar[str]
    """Name of the class in ``torchvision.datasets``."""
    names: ClassVar[tuple[str, ...]]
    """Class names, in the order of the labels."""

    def stem(self) -> str:
        """Name of the npz file without its ending."""
        return self.name

    def layout(self) -> tuple[str, ...]:
        """The files of torchvision's layout, relative to ``root``."""
        raise NotImplementedError

    def arguments(self, train: bool) -> dict[str, object]:
        """The arguments of torchvision's class that choose the training or the test set."""
        return {"train": train}

    def adapt(
        self, x: NDArray[np.generic], y: NDArray[np.generic]
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Correct torchvision's images ``(n, ...)`` and labels ``(n,)`` if needed."""
        return x, y

    def class_names(self) -> tuple[str, ...]:
        """Class names, in the order of the labels."""
        return self.names

    def variants(self) -> Sequence[TorchvisionDataset]:
        """The variants of this dataset that the same download contains."""
        return (self,)

    @override
    def available(self, root: Path) -> bool:
        return self._npz_path(root).is_file() or all((root / file).is_file() for file in self.layout())

    @override
    def load(self, root: Path) -> Samples:
        if not self.available(root):
            raise DataError(
                f"dataset {self.stem()} is not in {root} (neither {self.stem()}.npz nor {self.layout()[0]}); "
                f"download it with `rayfl prepare {self.name}` or use {_OFFLINE}"
            )
        if self._npz_path(root).is_file():
            samples = read_npz(self._npz_path(root), self.stem())
        else:
            try:
                samples = self._read(root, download=False)
            except Exception as error:  # garbage makes torchvision raise nearly anything
                raise DataError(
                    f"dataset {self.stem()} in {root} is broken ({one_line(error)}); "
                    f"delete {self.layout()[0]} and run `rayfl prepare {self.name}` or use {_OFFLINE}"
                ) from error
        names = self.class_names()
        if samples.classes > len(names):
            raise DataError(f"dataset {self.stem()} in {root} has labels beyond its {len(names)} classes")
        return self.reshaped(replace(samples, classes=len(names), class_names=names))

    @override
    def prepare(self, root: Path) -> str:
        """Download the dataset with torchvision and write it to ``root/<stem>.npz``, unless it is there.

        Raises:
            DataError: if the network or the disk fails; no partial files remain.
        """
        message = f"{self.name}: already in {root}"
        if all(variant.available(root) for variant in self.variants()):
            return message  # even if the folder cannot be written to
        from filelock import FileLock

        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f".{self.name}.lock"):
                missing = [variant for variant in self.variants() if not variant.available(root)]
                if not missing:
                    return message
                for left_by_a_kill in root.glob(f".{self.name}-*.download"):
                    shutil.rmtree(left_by_a_kill)
                with (
                    tempfile.TemporaryDirectory(".download", f".{self.name}-", root) as scratch,
                    _network_timeout(_NETWORK_TIMEOUT_S),
                ):
                    for variant in missing:
                        write_npz(variant._npz_path(root), variant._read(Path(scratch), download=True))
        except _torchvision_errors() as error:
            raise DataError(
                f"dataset {self.name} could not be downloaded to {root} ({one_line(error)}); "
                f"without a network use {_OFFLINE}"
            ) from error
        return f"{self.name}: downloaded to {root}"

    def _npz_path(self, root: Path) -> Path:
        return root / f"{self.stem()}.npz"

    def _read(self, root: Path, download: bool) -> Samples:
        """Read (and download) torchvision's layout in ``root``."""
        source = getattr(torchvision_datasets(), self.torchvision_name)
        parts: list[tuple[NDArray[np.generic], NDArray[np.int64]]] = []
        for train in (True, False):
            data = source(root=str(root), download=download, **self.arguments(train))
            labels = data.targets if hasattr(data, "targets") else data.labels
            x, y = self.adapt(np.asarray(data.data), np.asarray(labels))
            parts.append((as_inputs(x, self.stem()), as_labels(y, len(x), self.stem())))
        (x_train, y_train), (x_test, y_test) = parts
        names = self.class_names()
        return Samples(self.stem(), x_train, y_train, x_test, y_test, len(names), class_names=names)


def _torchvision_errors() -> tuple[type[Exception], ...]:
    """The exceptions that torchvision's download and readers raise when the network or a file fails."""
    from http.client import HTTPException

    return (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        HTTPException,
        pickle.UnpicklingError,
        tarfile.TarError,
        zipfile.BadZipFile,
    )


@contextlib.contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    """Context manager that sets a timeout for sockets, since torchvision's downloads set none."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)
