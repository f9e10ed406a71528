"""The interface of a signature: what a client computes from its data and sends to the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.errors import DataError
from rayfl.settings import Section

if TYPE_CHECKING:  # torch is slow to import, and most signatures do not need it
    from rayfl.training.reports import ClientReport


class Signature(Section):
    """What a client reveals, chosen by name; subclasses are files of ``rayfl/signatures``.

    A signature is computed in one step, by :meth:`compute`, at each client. Signatures with
    ``needs_exchange`` have a second step: every client receives all signatures and answers with one row of
    relations (:meth:`relate`). This costs each client N - 1 times :meth:`floats` numbers down, and N up.

    Attributes:
        name: how users choose it.
        proximities: the proximities that can compare such signatures; the first is the default.
        needs_exchange: whether :meth:`relate` is part of the protocol.
        trained: whether it describes a model that the client trains first (:meth:`report`), not the data.
        uses_features: whether it uses the output of the feature map.
        padded: whether zeros may be appended to a shorter signature, to compare it as a vector with longer
            ones. Otherwise all must be equally long.
    """

    proximities: ClassVar[tuple[str, ...]] = ()
    needs_exchange: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    uses_features: ClassVar[bool] = True
    padded: ClassVar[bool] = False

    name: str

    @property
    def vectors(self) -> int | None:
        """Number of vectors in a signature of a client with enough data; None: it varies."""
        return None

    def compute(self, x: NDArray[np.floating], y: NDArray[Any], key: int = 0) -> NDArray[np.float32]:
        """The signature of one client's data.

        Args:
            x: samples ``(n, D)``, raw pixels in [0, 1] or the output of a feature map.
            y: class labels ``(n,)``; of numeric targets these numbers ``(n, K)``.
            key: key of this client's random numbers (:func:`rayfl.random.key` of the seed and the client id),
                for signatures that draw some.

        Raises:
            DataError: if the signature cannot be computed from these data (no samples, not finite).
        """
        raise NotImplementedError(f"{type(self).__name__} is not a signature of data")

    @property
    def public_samples(self) -> int:
        """Number of the server's samples that the signature uses."""
        return 0

    def report(self) -> ClientReport:
        """The report about the client's trained model, for signatures that are ``trained``."""
        raise NotImplementedError(f"{type(self).__name__} is not a signature of trained models")

    def floats(self, signature: NDArray[np.floating]) -> int:
        """How many numbers the client sends to the server for a signature ``(D, p)``, for the communication
        ledger.
        """
        return int(signature.size)

    def relate(
        self, x: NDArray[np.floating], own: NDArray[np.floating], others: Sequence[NDArray[np.floating]]
    ) -> NDArray[np.float64]:
        """The second step, at client i: its relation ``r(i, j)`` to every client j, ``(N,)``.

        Args:
            x: the client's samples ``(n, D)``, as given to :meth:`compute`.
            own: its own signature.
            others: the signatures of all N clients in the order of their ids, including its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no second step")

    def relate_all(
        self,
        clients: Iterable[tuple[NDArray[np.floating], NDArray[np.floating]]],
        others: Sequence[NDArray[np.floating]],
    ) -> NDArray[np.float64]:
        """:meth:`relate` for a block of B clients, ``(B, N)``; subclasses may compute it faster.

        Args:
            clients: for each its samples ``(n, D)`` and its own signature, read one after the other.
            others: as of :meth:`relate`.
        """
        return np.stack([self.relate(x, own, others) for x, own in clients])


def sample_matrix(x: ArrayLike) -> NDArray[np.float64]:
    """Samples as a finite float64 matrix ``(n, D)``.

    Raises:
        DataError: if it is not a matrix, has no rows, or holds NaN or infinity.
    """
    matrix = np.asarray(x, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] == 0:
        raise DataError(f"a signature needs samples (n, D) with n >= 1, not an array {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise DataError("a signature cannot be computed: the samples hold NaN or infinity")
    return matrix
