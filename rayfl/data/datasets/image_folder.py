"""Your own images, a folder for each class, or one for each client with a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.arrays import column_of
from rayfl.data.base import Dataset, MoreSamples, Names, Samples
from rayfl.data.own import TestBy, check_seed, draw_tests, split_numbering
from rayfl.data.pictures import Opened, read_pictures
from rayfl.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


Folders = Literal["class", "client/class"]


class ImageFolder(Dataset):
    """Image folder: ``class/file.png`` as in torchvision, with or without folders ``train/`` and ``test/``.

    With ``folders=client/class``: ``client/class/file.png``; a client may lack classes.

    Classes are numbered in the order of their names, images in the order of their paths. Without folders
    ``train`` and ``test``, ``test_fraction`` of each class are the test samples. Folders below a class are
    searched, too. The partitions ``column`` and ``file`` can use these columns: ``file``, an image's path
    below ``root``; ``folder``, its folder below that of its class; ``client``, with that setting.
    """

    name: Literal["image_folder"] = "image_folder"
    root: Path = Field(description="the folder")
    folders: Folders = Field(
        "class", description="what a folder stands for: a class, or a client with a folder for each class"
    )
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="fraction of each class for tests, if there is no folder test"
    )
    test_by: TestBy = None
    size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="scale all images to this height and width; default: all images must have one size",
    )
    channels: Literal[1, 3] | None = Field(
        None, description="1: grey, 3: colours; default: colours if any image has colours"
    )
    seed: int = Field(0, description="seed of the draw of the test samples")

    @model_validator(mode="after")
    def _refuse_unused_seed(self) -> ImageFolder:
        check_seed(self)
        return self

    @override
    def available(self, root: Path) -> bool:
        return self.root.is_dir()

    @override
    def load(self, root: Path) -> Samples:
        folder = _Folder.read(self.root, self.folders)
        if folder.tests is not None and self.test_fraction is not None:
            raise ConfigError(
                "data.test_fraction", f"{self.root} has a folder test", "leave the fraction out"
            )
        if folder.tests is None and self.test_fraction is None:
            raise ConfigError(
                "data.test_fraction",
                f"{self.root} has no folders train and test",
                "say what fraction to take",
            )
        classes = sorted(folder.classes)
        if len(classes) < 2:
            raise DataError(
                f"{folder.first}: has the class {classes[0]!r} only; expected two classes or more"
            )
        y = folder.labels(classes)
        if self.test_fraction is None:
            assert folder.tests is not None
            tests = folder.tests
        else:
            tests = draw_tests(self, y, folder.columns, str(self.root))
        x = folder.pictures(self.size, self.channels)
        return Samples(
            self.root.resolve().name,
            x[~tests],
            y[~tests],
            x[tests],
            y[tests],
            len(classes),
            class_names=tuple(classes),
            columns={name: column_of(text[~tests], text[tests]) for name, text in folder.columns.items()},
            numbering=None if self.test_fraction is None else split_numbering(tests),
        )

    @override
    def read_more(self, path: Path, own: Samples) -> MoreSamples:
        """Read images from another folder; it must have no classes but the run's, and may lack some."""
        folder, (channels, height, _) = _Folder.read(path, self.folders), own.shape
        unknown = sorted(folder.classes - set(own.class_names))
        if unknown:
            raise DataError(f"{path}: has a class {unknown[0]!r}, which the run's data do not have")
        # If data.size is not set, each image must have the size of the run's images.
        x = folder.pictures(height if self.size is not None else None, 3 if channels == 3 else 1)
        return MoreSamples(x, folder.labels(list(own.class_names)), folder.columns, test=folder.tests)


@dataclass(frozen=True)
class _Folder:
    """The images of a folder that has one folder per class, or ``train`` and ``test`` that have them.

    Attributes:
        root: the folder.
        first: the folder with the training images, ``root`` or ``root/train``.
        files: the ``n`` images, training images first.
        names: the class of each image.
        clients: the client of each image; empty if folders are classes.
        below: the folder of each image below that of its class, ``.`` for none.
        tests: which images are in ``test`` ``(n,)``; None if there is no such folder.
    """

    root: Path
    first: Path
    files: list[Path]
    names: list[str]
    clients: list[str]
    below: list[str]
    tests: NDArray[np.bool_] | None

    @classmethod
    def read(cls, root: Path, kind: Folders) -> _Folder:
        """Find the images.

        Raises:
            DataError
        """
        if not root.is_dir():
            raise DataError(f"{root}: there is no such folder")
        parts = {name: (root / name).is_dir() for name in ("train", "test")}
        if parts["train"] != parts["test"]:
            has, lacks = ("train", "test") if parts["train"] else ("test", "train")
            raise DataError(f"{root}: has a folder {has!r} but no folder {lacks!r}")
        folders = [root / "train", root / "test"] if parts["train"] else [root]
        contents = [_images(folder, kind) for folder in folders]
        trained = {each.name for each in contents[0]}
        extra = [each for content in contents[1:] for each in content if each.name not in trained]
        if extra:
            raise DataError(f"{extra[0].folder}: there is no class {extra[0].name!r} in {folders[0]}")
        found = [each for content in contents for each in content]
        files = [path for each in found for path in each.images]
        names = [each.name for each in found for _ in each.images]
        clients = [each.client for each in found for _ in each.images if each.client]
        below = [path.parent.relative_to(each.folder).as_posix() for each in found for path in each.images]
        tests = None
        if parts["train"]:
            tests = np.arange(len(files)) >= sum(len(each.images) for each in contents[0])
        return cls(root, folders[0], files, names, clients, below, tests)

    @property
    def classes(self) -> set[str]:
        """The names of the classes."""
        return set(self.names)

    def labels(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """The index of each image's class in ``classes`` ``(n,)``."""
        number = {name: place for place, name in enumerate(classes)}
        return np.array([number[name] for name in self.names], np.int64)

    def pictures(self, size: int | None, channels: Literal[1, 3] | None) -> NDArray[np.uint8]:
        """The images, see :func:`~rayfl.data.pictures.read_pictures`."""
        return read_pictures([(str(path), _opener(path)) for path in self.files], size, channels)

    @property
    def columns(self) -> dict[str, Names]:
        """``file`` of each image ``(n,)``; ``client`` and ``folder`` if there are any."""
        texts = {"file": np.array([path.relative_to(self.root).as_posix() for path in self.files])}
        if self.clients:
            texts["client"] = np.array(self.clients)
        if any(folder != "." for folder in self.below):
            texts["folder"] = np.array(self.below)
        return texts


@dataclass(frozen=True)
class _Class:
    """The images of a class, or those of a client that belong to it.

    Attributes:
        name: of the class.
        client: its id; empty if folders are classes.
        folder: with the images.
        images: sorted by path.
    """

    name: str
    client: str
    folder: Path
    images: list[Path]


def _images(folder: Path, kind: Folders) -> list[_Class]:
    """The images of a folder, class by class, or client by client.

    Raises:
        DataError: if there is no class, or one without images.
    """
    if kind == "class":
        return [_class(path) for path in _folders_in(folder, "one for each class, with its images")]
    clients = _folders_in(folder, "one for each client, with one for each class")
    return [
        _class(path, client.name)
        for client in clients
        for path in _folders_in(client, "one for each class, with its images")
    ]


def _folders_in(folder: Path, expected: str) -> list[Path]:
    """The folders in a folder, sorted.

    Raises:
        DataError: if there are none.
    """
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: has no folders; expected {expected}")
    return found


def _class(folder: Path, client: str = "") -> _Class:
    """The images in a folder and below it.

    Raises:
        DataError: if there are none.
    """
    images = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not images:
        raise DataError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    ordered = sorted(images, key=lambda path: path.relative_to(folder).as_posix())
    return _Class(folder.name, client, folder, ordered)


def _opener(path: Path) -> Opened:
    from PIL import Image

    return partial(Image.open, path)
