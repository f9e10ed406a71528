"""A method's matrix A is looked at before it is used: a wrong one is a line, not a wrong average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import rayfl
from rayfl.algorithms import Mixing
from rayfl.algorithms.fedavg import FedAvg
from rayfl.errors import ConfigError
from rayfl.servers.mixing import check

GOOD = sp.csr_array(np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]))
NO_ROW = sp.csr_array(np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))


def test_what_methods_give_is_taken() -> None:
    for mixing in (
        Mixing(GOOD),
        Mixing(NO_ROW),  # a model without clients stays as it is
        Mixing(GOOD, keep=sp.csr_array(-0.5 * GOOD.toarray())),  # FedNova's may be negative
    ):
        assert check(mixing, "own", 2, 3) is mixing
    split = Mixing(GOOD, parents=np.array([0, 0]))
    assert check(split, "own", 1, 3) is split


@pytest.mark.parametrize(
    ("mixing", "text"),
    [
        (Mixing(sp.csr_array(np.ones((2, 4)))), r"own.mix: weights have shape \(2, 4\); expected \(2, 3\)"),
        (Mixing(sp.csr_array(np.ones((1, 3)))), r"own.mix: weights have shape \(1, 3\)"),
        (Mixing(GOOD, parents=np.array([0])), r"own.mix: weights have shape \(2, 3\); expected \(1, 3\)"),
        (Mixing(GOOD, keep=sp.csr_array(np.ones((3, 3)))), r"own.mix: keep have shape \(3, 3\)"),
        (Mixing(np.ones((2, 3))), r"own.mix: weights is an array of float64 \(2, 3\); expected a scipy"),  # type: ignore[arg-type]
        (Mixing(sp.csr_array(GOOD * np.nan)), "own.mix: weights are not finite"),
        (Mixing(sp.csr_array(-GOOD)), "own.mix: the weights of model 0 sum to -3; expected a positive sum"),
        (Mixing(GOOD, keep=sp.csr_array(-GOOD)), "own.mix: the weights of model 0 sum to 0"),
    ],
)
def test_a_wrong_matrix_is_a_line(mixing: Mixing, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(mixing, "own", 2, 3)


def test_a_run_says_which_method_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_wide(self: FedAvg, setup: Any, state: Any, plan: Any, reports: Any) -> Mixing:
        return Mixing(sp.csr_array(np.ones((1, len(plan.cohort) + 1))))

    monkeypatch.setattr(FedAvg, "mix", too_wide)
    settings = {
        "rounds": 1,
        "partition": {"name": "iid", "clients": 4},
        "execution": {"backend": "inline"},
        "output": {"root": str(tmp_path), "report": False},
    }
    with pytest.raises(ConfigError, match=r"fedavg.mix: weights have shape \(1, 5\); expected \(1, 4\)"):
        rayfl.run(settings)
