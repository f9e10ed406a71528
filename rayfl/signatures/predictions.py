"""FLIS's signature: the predictions of a client's trained model on the server's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rayfl.data.server import ServerData
from rayfl.signatures.base import Signature

if TYPE_CHECKING:
    from rayfl.training.reports import ClientReport


class Predictions(Signature):
    """Predictions on the server's samples, by a model that the client trains first (FLIS)."""

    proximities: ClassVar[tuple[str, ...]] = ("cosine",)
    trained: ClassVar[bool] = True
    uses_features: ClassVar[bool] = False
    classes_only: ClassVar[bool] = True

    name: Literal["predictions"] = "predictions"
    data: ServerData = Field(ServerData(), description="what the models predict")

    @property
    def public_samples(self) -> int:
        """Number of samples that the models predict."""
        return self.data.public_samples

    def report(self) -> ClientReport:
        """The predictions."""
        from rayfl.training.reports import Predictions  # deferred: it needs torch

        return Predictions(self.data)
