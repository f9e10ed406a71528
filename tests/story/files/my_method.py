"""A method of one's own: clients whose model was worse than average when they last took part count double."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy.sparse as sp
from my_report import StartLosses
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Mixing, Plan, RoundReport, ServerState, Setup, per_client
from rayfl.training.reports import ClientReport, Reports


@dataclass(frozen=True)
class BehindState(ServerState):
    """Who was behind."""

    behind: NDArray[np.bool_] = per_client(False)


class CatchUp(Algorithm[BehindState]):
    """Clients that are behind count more."""

    name: Literal["catch_up"] = "catch_up"
    factor: float = Field(2.0, gt=0, description="how much more a client counts that is behind")

    def begin(self, setup: Setup) -> BehindState:
        """One model, and no client is behind."""
        return BehindState(round=0, models=1, assignment=np.zeros(setup.clients, np.int64))

    def reports(self, setup: Setup, state: BehindState) -> dict[str, ClientReport]:
        """The loss of the model that a client received."""
        return {"losses": StartLosses()}

    def mix(self, setup: Setup, state: BehindState, plan: Plan, reports: Reports) -> Mixing:
        """FedAvg's weights times the factor."""
        mixing = super().mix(setup, state, plan, reports)
        factors = np.where(state.behind[plan.cohort], self.factor, 1.0)
        return replace(mixing, weights=sp.csr_array(mixing.weights.multiply(factors)))

    def end(self, setup: Setup, state: BehindState, plan: Plan, report: RoundReport) -> BehindState:
        """Remember who was behind."""
        losses, behind = report.reports["losses"], state.behind.copy()
        behind[plan.cohort] = losses > np.nanmean(losses)
        return super().end(setup, replace(state, behind=behind), plan, report)
