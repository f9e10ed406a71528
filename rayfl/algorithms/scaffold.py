"""SCAFFOLD: FedAvg with the local objective of that name. Karimireddy et al., ICML 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class Scaffold(Algorithm):
    """FedAvg with control variates that correct the drift of each client.

    Each client keeps a control variate c_i, an estimate of its own gradient, and the server keeps their mean
    c. A local step follows ``g - c_i + c`` in place of the gradient g, so it moves towards the optimum of all
    clients and not towards its own. After local training the client updates c_i from the distance that it
    moved.

    This is short for ``algorithm: fedavg`` with ``local: scaffold``. Other methods take the same objective:
    ``algorithm: pacfl`` with ``local: scaffold``.

    Symbols:
        eta_l, local learning rate: ``training.lr``
        K, local steps: ``training.epochs`` times ``n_i / training.batch_size``, rounded up
        S, cohort: ``training.participation``

    Cost:
        2 P parameters down and 2 P up for each client of the cohort: a model and a variate. The state of a
        client is P parameters, that of the server P for each model.

    Fails when:
        Clients take part rarely: their variates are then old. Learning rates that suit FedAvg may be too
        high. Methods in which clients change their models (IFCA, FedSEM, FLIS (DC)) refuse it.

    Shown by:
        - experiments/curricula/README.md: a loss that is not finite at FedAvg's rate
        - tests/local/test_scaffold.py::test_methods_without_a_fixed_model_for_c_refuse_it
        - old variates: reasoned, not measured
    """

    name: Literal["scaffold"] = "scaffold"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "scaffold"}}
