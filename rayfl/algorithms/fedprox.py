"""FedProx: FedAvg with the local objective of that name. Li et al., MLSys 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class FedProx(Algorithm):
    """FedAvg with a proximal term that keeps local models near the global one.

    Clients whose data differ drift apart while they train. FedProx adds ``(mu / 2) |w - w_global|^2`` to each
    client's loss, which pulls the local model back to the one that it received. The server averages as in
    FedAvg.

    This is short for ``algorithm: fedavg`` with ``local: fedprox``, which has the settings. Other methods
    take the same objective: ``algorithm: pacfl`` with ``local: fedprox``.

    Symbols:
        mu: ``local.mu``

    Cost:
        As FedAvg. No client state.

    Fails when:
        mu is large: then local models hardly move. With mu = 0 it is FedAvg, bit for bit.

    Shown by:
        - tests/local/test_fedprox.py::test_the_larger_mu_the_nearer_to_the_start
    """

    name: Literal["fedprox"] = "fedprox"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fedprox"}}
