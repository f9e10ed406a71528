"""USPS (Le Cun et al. 1990; Hull 1994): digits of the US Postal Service."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Usps(TorchvisionDataset):
    """USPS: digits of postal codes, 7,291 and 2,007 grey images of 16x16, 10 classes."""

    name: Literal["usps"] = "usps"
    torchvision_name: ClassVar[str] = "USPS"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def layout(self) -> tuple[str, ...]:  # noqa: D102
        return ("usps.bz2", "usps.t.bz2")
