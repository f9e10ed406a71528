"""FedNova: FedAvg with the local objective of that name. Wang et al., NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class FedNova(Algorithm):
    """FedAvg corrected for the number of local steps that each client made.

    Clients with more samples make more steps, so plain averaging favours them twice: by their weight and by
    the length of their update. FedNova divides each update by the number of its steps before averaging, and
    scales the mean by the weighted mean number of steps.

    This is short for ``algorithm: fedavg`` with ``local: fednova``. Other methods take the same objective:
    ``algorithm: pacfl`` with ``local: fednova``.

    Symbols:
        tau_i, local steps: ``training.epochs`` times ``n_i / training.batch_size``, rounded up
        rho, momentum: ``training.momentum``
        eta: ``training.lr``

    Cost:
        As FedAvg. No client state.

    Fails when:
        Sizes differ a lot: the update of a client with few samples then has about the same weight as that of
        one with a thousand. If all clients make equally many steps this is FedAvg, bit for bit.

    Shown by:
        - experiments/curricula/README.md: 10 % with FedNova, 22 % with FedProx
        - tests/local/test_fednova.py::test_equal_steps_are_fedavg_bit_for_bit
    """

    name: Literal["fednova"] = "fednova"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fednova"}}
