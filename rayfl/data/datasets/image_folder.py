"""Your own images, a folder for each class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.arrays import column_of
from rayfl.data.base import Dataset, Samples
from rayfl.data.own import drawn, split_numbering
from rayfl.data.pictures import Opened, read_pictures
from rayfl.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class ImageFolder(Dataset):
    """Image folder: ``class/file.png``, as torchvision has it, below ``train/`` and ``test/`` or for both.

    Classes are numbered in the order of their names, images in the order of their paths. Without folders
    ``train`` and ``test``, ``test_fraction`` of each class are the test samples. Folders below a class are
    looked into. Clients can be told apart by the columns ``file``, an image's path below ``root``, and
    ``folder``, the folder in which it lies below its class (``partition.name=column`` or ``file``).
    """

    name: Literal["image_folder"] = "image_folder"
    root: Path = Field(description="the folder")
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="fraction of each class for tests, if there is no folder test"
    )
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

    @override
    def available(self, root: Path) -> bool:
        return self.root.is_dir()

    @override
    def load(self, root: Path) -> Samples:
        if not self.root.is_dir():
            raise DataError(f"{self.root}: there is no such folder")
        parts = {name: (self.root / name).is_dir() for name in ("train", "test")}
        if parts["train"] != parts["test"]:
            has, lacks = ("train", "test") if parts["train"] else ("test", "train")
            raise DataError(f"{self.root}: has a folder {has!r} but no folder {lacks!r}")
        if parts["train"] and self.test_fraction is not None:
            raise ConfigError(
                "data.test_fraction", f"{self.root} has a folder test", "leave the fraction out"
            )
        if not parts["train"] and self.test_fraction is None:
            raise ConfigError(
                "data.test_fraction",
                f"{self.root} has no folders train and test",
                "say what fraction to take",
            )
        folders = [self.root / "train", self.root / "test"] if parts["train"] else [self.root]
        found = [_images(folder) for folder in folders]
        classes = sorted(found[0])
        others = sorted({name for each in found[1:] for name in each} - set(classes))
        if others:
            raise DataError(f"{folders[1] / others[0]}: there is no class {others[0]!r} in {folders[0]}")
        if len(classes) < 2:
            raise DataError(f"{folders[0]}: has the class {classes[0]!r} only; expected two folders or more")
        files: list[Path] = []
        labels: list[int] = []
        below: list[str] = []
        for folder, by_class in zip(folders, found, strict=True):
            for label, name in enumerate(classes):
                images = by_class.get(name, [])
                files += images
                labels += [label] * len(images)
                below += [path.parent.relative_to(folder / name).as_posix() for path in images]
        y = np.array(labels, np.int64)
        if self.test_fraction is None:
            tests = np.arange(len(y)) >= sum(map(len, found[0].values()))
        else:
            tests = drawn(y, self.test_fraction, self.seed, str(self.root))
        x = read_pictures([(str(path), _opener(path)) for path in files], self.size, self.channels)
        texts = {"file": np.array([path.relative_to(self.root).as_posix() for path in files])}
        if any(folder != "." for folder in below):
            texts["folder"] = np.array(below)
        return Samples(
            self.root.resolve().name,
            x[~tests],
            y[~tests],
            x[tests],
            y[tests],
            len(classes),
            class_names=tuple(classes),
            columns={name: column_of(text[~tests], text[tests]) for name, text in texts.items()},
            numbering=None if self.test_fraction is None else split_numbering(tests),
        )


def _images(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, by their paths.

    Raises:
        DataError: if there is no class, or one without images.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise DataError(f"{folder}: has no folders; expected one for each class, with its images")
    found = {}
    for each in classes:
        images = [path for path in each.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        if not images:
            raise DataError(f"{each}: holds no image ({', '.join(SUFFIXES)})")
        found[each.name] = sorted(images, key=lambda path: path.relative_to(folder).as_posix())
    return found


def _opener(path: Path) -> Opened:
    from PIL import Image

    return partial(Image.open, path)
