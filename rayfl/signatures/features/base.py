"""The interface of a feature map: fitted once by the server, applied by every client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section

if TYPE_CHECKING:
    from rayfl.data import Dataset


class Fitted(Protocol):
    """A feature map ready for use; it is pickled to the workers."""

    @property
    def floats(self) -> int:
        """How many numbers the server sends to every client for the map."""
        ...

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """Features ``(n, d)`` of one client's samples ``(n, C, H, W)`` or ``(n, D)``, pixels in [0, 1].

        ``key`` seeds the client's random numbers, for maps that clients adapt to their own samples.
        """
        ...


class FeatureMap(Section):
    """Phi, chosen by name; subclasses are files of ``rayfl/signatures/features``."""

    name: str

    @property
    def public_samples(self) -> int:
        """Number of public samples that :meth:`fit` needs; no client has them."""
        return 0

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples that the map cannot take, before anything starts.

        Args:
            shape: of one sample: ``(C, H, W)`` or ``(D,)``.

        Raises:
            ConfigError
        """

    def remark(self, data: Dataset) -> str:
        """A warning for users whose clients have this dataset; empty for none."""
        return ""

    def again(self) -> FeatureMap:
        """The map for clustering again; by default the same."""
        return self

    def fit(self, x: NDArray[np.floating], key: int = 0) -> Fitted:
        """Prepare the map at the server.

        Args:
            x: public samples ``(s, C, H, W)`` or ``(s, D)``, pixels in [0, 1]; may be empty if
                ``public_samples`` is 0.
            key: key of the random numbers, for maps that draw some.

        Raises:
            DataError: if the map cannot be prepared; one line that names alternatives.
        """
        raise NotImplementedError


def flat(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Samples as rows ``(n, D)``."""
    return x.reshape(len(x), -1)
