"""Sub-FedAvg: FedAvg among clients that each prune a subnetwork of their own (thesis chapter 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class SubFedAvg(Algorithm):
    """Every client prunes its own subnetwork; a parameter is averaged over the clients that kept it.

    After local training a client may remove its smallest weights, if its validation accuracy is high enough
    and the weights that it would remove still change during the round. The server averages each parameter
    over the clients that kept it. The mask makes the model personal, and it saves traffic.

    This is short for ``algorithm: fedavg`` with ``local: sub_fedavg``, which has the settings (see
    :class:`rayfl.local.sub_fedavg.SubFedAvg`). It works within clusters, too: ``algorithm=pacfl
    local=sub_fedavg``.

    Symbols:
        p_us, p_s, target shares: ``local.target``, ``local.channel_target``
        r_us, r_s, shares pruned in a round: ``local.step``, ``local.channel_step``
        epsilon: ``local.distance``, ``local.channel_distance``
        Acc_th: ``local.accuracy``

    Cost:
        P parameters down; up what the client kept, and 1 bit for each weight or channel that can be pruned.
        The state of a client is a model and a mask.

    Fails when:
        Clients have no validation samples, or never reach Acc_th: then nothing is pruned. One threshold for
        all layers may remove a whole layer; the run reports it.

    Shown by:
        - tests/local/test_subfedavg.py::test_not_below_the_accuracy_nor_without_validation_data
        - tests/local/test_subfedavg.py::test_a_layer_that_dies_is_said
    """

    name: Literal["sub_fedavg"] = "sub_fedavg"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "sub_fedavg"}}
    objectives: ClassVar[tuple[str, ...] | None] = ("sub_fedavg",)
