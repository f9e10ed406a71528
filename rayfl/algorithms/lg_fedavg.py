"""LG-FedAvg: local representations, global heads.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally", 2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import ServerState, Setup
from rayfl.errors import ConfigError
from rayfl.models import ModelSpec
from rayfl.training import LocalWork, Segments


class LGFedAvg(Algorithm):
    """The first layers stay with the client; only the last ones are averaged.

    Each client keeps a representation of its own data, the first layers, and shares the classifier on top of
    it. The shared layers are averaged by n_i as in FedAvg.

    All clients start from the common w_0, the same random initialisation as with every other method. Unlike
    in the paper nothing is warmed up by FedAvg (thesis, section 3.4.5). Without local layers this is FedAvg;
    with all layers local it is SOLO with ``sampled: true``.

    Symbols:
        local layers: ``algorithm.local_layers``

    Cost:
        The shared layers down and up for each participant. The state of a client is its local layers.

    Fails when:
        Clients have too few samples to learn the first layers alone.

    Shown by:
        - reasoned, not measured
    """

    name: Literal["lg_fedavg"] = "lg_fedavg"
    local_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="number of first layers that stay with the client; auto: all but the last two, at"
        " least one",
    )

    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")

    def check(self, spec: ModelSpec) -> None:
        """Refuse more local layers than the model has."""
        self.local(spec)

    def local(self, spec: ModelSpec) -> Segments:
        """The local layers as ranges of the flat parameter vector.

        Raises:
            ConfigError: if the model has fewer layers.
        """
        layers = len(spec.layers)
        # A network of two layers keeps the first; one layer alone must be shared.
        local = max(min(1, layers - 1), layers - 2) if self.local_layers == "auto" else self.local_layers
        try:
            return tuple(spec.segment(first=local))
        except ConfigError as error:
            raise ConfigError("algorithm.local_layers", error.what, error.remedy) from None

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        """FedAvg's work on a model whose first layers are the client's own."""
        return replace(super().work(setup, state), personal=self.local(setup.spec))
