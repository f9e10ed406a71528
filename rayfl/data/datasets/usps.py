"""USPS (Le Cun et al. 1990; Hull 1994): digits of the US Postal Service."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Usps(TorchvisionDataset):
    """USPS: digits of postal codes, 7,291 and 2,007 grey images of 16x16, 10 classes."""

    name: Literal["usps"] = "usps"
    torchvision_name: ClassVar[str] = "USPS"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    @override
    def layout(self) -> tuple[str, ...]:
        return ("usps.bz2", "usps.t.bz2")
