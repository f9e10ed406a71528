"""FLIS (DC): overlapping clusters of clients whose models make similar predictions, formed again in every
round.

Morafah, Vahidian, Wang, Lin, "FLIS: clustered federated learning via inference similarity for non-IID data
distribution", 2022; thesis section 3.3, Algorithm 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm, choose_by_loss
from rayfl.algorithms.contract import Clients, Mixing, Plan, RoundReport, ServerState, Setup, Split
from rayfl.clustering.predictions import inference_similarities, joint_clusters
from rayfl.data.server import ServerData
from rayfl.training.reports import ClientReport, Predictions, Reports


class FLISDC(Algorithm):
    """Overlapping clusters of clients whose models predict alike, formed in every round.

    In each round the server applies every trained model to samples that it holds. Each participant gets a
    cluster of all participants whose models predict like its own, and their mean is one of the next models.
    In the next round each client downloads all of these models and takes the one that fits its data best.

    1. The server compares the predictions B_i, ``A_ij = <B_i, B_j>_F / (|B_i| |B_j|)``.
    2. Participant i has the cluster ``{j : A_ij >= beta}``. The models of its members, averaged by n_j, are
       one of the n cluster models.
    3. A client takes the model with the least loss on a held-out part of its own data (``selection``). The
       thesis uses test data here, which would bias the tests. A client too small to hold anything out uses
       its training data. All clients choose again before a test.

    Symbols:
        beta: ``algorithm.beta``
        the server's samples: ``algorithm.server_data``, ``data.server_share``
        n, participants: ``training.participation``

    Cost:
        n models down (n P parameters) and one up for each participant. The server keeps n models. No client
        state.

    Fails when:
        The cohort is small: only the kinds of clients that took part have a model in the next round. beta = 0
        is FedAvg; beta = 1 averages only models that predict the same.

    Shown by:
        - experiments/flis/server_data.yaml: served models, compared with FLIS (HC)
        - tests/algorithms/test_flis.py::test_dc_with_beta_of_zero_is_fedavg
        - tests/algorithms/test_flis.py::test_dc_with_beta_of_one_averages_nobody
    """

    classes_only: ClassVar[bool] = True

    name: Literal["flis_dc"] = "flis_dc"
    selects: ClassVar[bool] = True
    mixes_by_reports: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")

    beta: float = Field(
        0.9, ge=0, le=1, description="clients with at least this similarity are averaged (beta)"
    )
    server_data: ServerData = Field(
        ServerData(), description="the server's samples, which the models predict"
    )
    selection: Split = Field(
        "validation", description="the part of its data on which a client chooses a model"
    )

    @property
    def public_samples(self) -> int:
        """Number of samples that the models predict."""
        return self.server_data.public_samples

    def select(
        self, setup: Setup, state: ServerState, who: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """The cluster model of least loss on held-out data."""
        return choose_by_loss(state, who, clients, self.selection)

    def reports(self, setup: Setup, state: ServerState) -> Mapping[str, ClientReport]:
        """The inference similarities of the participants."""
        return {"similarities": InferenceSimilarities(self.server_data)}

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        """One row per participant: the clients whose models predict like its own, weighted by n_j."""
        from scipy.spatial.distance import squareform

        joint = joint_clusters(squareform(reports["similarities"], checks=False), self.beta)
        weights = joint * setup.sizes[plan.cohort].astype(np.float64)
        return Mixing(scipy.sparse.csr_array(weights), parents=plan.group)

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        """A participant uses its own cluster's model; other clients get model 0 until they choose again."""
        assignment = np.zeros_like(state.assignment)
        assignment[plan.cohort] = np.arange(len(plan.cohort))
        return super().end(
            setup, replace(state, models=len(plan.cohort), assignment=assignment), plan, report
        )


@dataclass(frozen=True)
class InferenceSimilarities(Predictions):
    """``A_ij`` of all trained models, ``(M, M)``."""

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """Compare the predictions of all blocks."""
        from scipy.spatial.distance import squareform

        similarities = squareform(inference_similarities(np.concatenate(blocks)))
        np.fill_diagonal(similarities, 1.0)
        return similarities
