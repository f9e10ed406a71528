"""When CFL splits a cluster: each criterion by hand, in norms and in relative units."""

from __future__ import annotations

import numpy as np
import pytest

from rayfl.clustering.bipartition import Bipartition
from rayfl.clustering.splitting import AbsoluteCriteria, RelativeCriteria, SplitCriteria, UpdateNorms, decide
from rayfl.errors import ConfigError

SIMILARITIES = np.array([0.8, -0.2, 0.1])  # 01, 02, 12
CRITERIA = AbsoluteCriteria(eps1=0.4, eps2=1.6, gamma_max=0.5)


def norms(
    each: tuple[float, ...] = (1.7, 1.0, 0.5), mean: float = 0.3, rounds: int = 1, reference: float = 2.0
) -> UpdateNorms:
    return UpdateNorms(mean, np.array(each), np.ones(len(each)), reference, rounds)


def halves(
    criteria: SplitCriteria = CRITERIA,
    seen: UpdateNorms | None = None,
    values: np.ndarray | None = SIMILARITIES,
) -> Bipartition | None:
    return decide(criteria, [4, 7, 9], values, norms() if seen is None else seen)


def test_a_split_needs_every_criterion():
    found = halves()  # a_cross = 0.1, so gamma_max has to be below sqrt(0.45) = 0.67
    assert found is not None
    assert (found.first.tolist(), found.second.tolist()) == ([4, 7], [9])
    assert halves(seen=norms(mean=0.4)) is None  # Eq. 32 is strict
    assert halves(seen=norms((1.6, 1.0, 0.5))) is None  # Eq. 33 too
    noisy = CRITERIA.model_copy(update={"gamma_max": 0.68})
    assert noisy.met(norms())
    assert halves(noisy) is None
    sizes = [CRITERIA.model_copy(update={"min_size": size}) for size in (3, 4)]
    assert [halves(criteria) is not None for criteria in sizes] == [True, False]
    late = CRITERIA.model_copy(update={"first_round": 20})
    assert [halves(late, norms(rounds=r)) is not None for r in (19, 20)] == [False, True]


def test_the_bipartition_is_not_asked_for_where_the_norms_decide():
    assert halves(seen=norms(mean=1.0), values=None) is None
    assert halves(seen=norms((1.0, 1.0, 1.0)), values=None) is None
    with pytest.raises(ValueError, match="similarities of 3 clients are needed"):
        halves(values=None)


def test_equal_updates_across_are_never_split():
    assert halves(AbsoluteCriteria(), values=np.ones(3)) is None


def test_bad_criteria():
    assert halves(seen=norms((9.0, 1.0, 0.5))) is not None
    with pytest.raises(ValueError, match="expected a norm for each of 3 clients, got 2"):
        halves(seen=norms((9.0, 1.0)))
    for wrong in ({"gamma_max": 1.0}, {"eps1": -1}, {"min_size": 1}, {"linkage": "average"}, {"patience": 0}):
        with pytest.raises(ConfigError):
            AbsoluteCriteria(**wrong)


def test_relative_norms_by_hand():
    """Orthogonal updates of lengths 3 and 4, weighted 1 : 1, have a mean of length 2.5."""
    seen = UpdateNorms(1.0, np.array([3.0, 4.0]), np.ones(2), 8.0, 1)
    assert seen.relative == pytest.approx((1 / 2.5, 0.5))
    weighted = UpdateNorms(1.0, np.array([3.0, 4.0]), np.array([30.0, 10.0]), 8.0, 1)
    assert weighted.relative[0] == pytest.approx(1 / np.hypot(9 / 4, 1))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_relative_norms_do_not_depend_on_the_scale_of_updates(scale: float):
    """What the paper's thresholds do: here lies why they do not carry over from one dataset to another."""
    seen = UpdateNorms(0.3 * scale, scale * np.array([1.7, 1.0, 0.5]), np.ones(3), 2.0 * scale, 1)
    # 0.3 / (2.035 / 3) = 0.44 and 1.7 / 2 = 0.85
    for eps1, eps2, met in ((0.45, 0.84, True), (0.44, 0.84, False), (0.45, 0.86, False)):
        criteria = RelativeCriteria(eps1=eps1, eps2=eps2)
        assert criteria.met(seen) == met
    assert CRITERIA.met(seen) == (scale == 1)


def test_defaults_are_those_of_the_units():
    absolute, relative = AbsoluteCriteria(), RelativeCriteria()
    assert (absolute.eps1, absolute.eps2, absolute.patience) == (0.4, 1.6, 1)
    assert (relative.eps1, relative.eps2, relative.patience) == (0.75, 0.5, 3)
    given = RelativeCriteria(eps1=0.6)
    assert (given.eps1, given.eps2) == (0.6, 0.5)
    assert RelativeCriteria.model_validate(given.model_dump()) == given


def test_before_the_first_update_nothing_is_met():
    nothing = UpdateNorms(np.nan, np.full(2, np.nan), np.ones(2), 0.0, 1)
    assert np.isnan(nothing.relative).all()
    assert not RelativeCriteria().met(nothing)
