"""MTL: FedAvg's rounds, in which every client keeps a model of its own. Smith et al., NeurIPS 2017."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class MTL(Algorithm):
    """Every client has its own model, pulled towards the mean of all.

    Clients do not share a model but stay near each other: each minimises its own loss plus ``(lambda / 2) |w
    - w_mean|^2``. The server sends the mean of the clients' latest models. Tests use the client's own model.

    This is short for ``algorithm: fedavg`` with ``local: mtl``, which has the settings (see
    :class:`rayfl.local.mtl.MTL`). ``algorithm: pacfl`` with ``local: mtl`` pulls towards the means of
    clusters.

    Symbols:
        lambda: ``local.lam``
        2 lambda_2: ``training.weight_decay``

    Cost:
        As FedAvg. The state of a client is a model, P parameters.

    Fails when:
        Most clients are unrelated: then the mean of all is a poor guide, and a strong pull costs accuracy
        (87.5 % with lambda 0.001, 83.8 % with 0.1 on CIFAR-10 with two shards for each client). lambda = 0 is
        SOLO.

    Shown by:
        - experiments/subfedavg/README.md: four values of lambda
    """

    name: Literal["mtl"] = "mtl"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "mtl"}}
    objectives: ClassVar[tuple[str, ...] | None] = ("mtl",)
