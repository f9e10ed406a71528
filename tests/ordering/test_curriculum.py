"""Scores against losses worked out by hand, orders, and the batches that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from rayfl.data import IGNORED, Samples
from rayfl.errors import ConfigError
from rayfl.models import MODELS, ModelSpec
from rayfl.ordering import ORDERINGS, Arrival, Ordering
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine

SPEC = ModelSpec.of(MODELS["linear"](), (1,), 2, 0)


def order(**fields: Any) -> Ordering:
    return ORDERINGS["curriculum"](**fields)


class Table:
    """Clients whose samples have a known loss.

    A model is a number c. A sample z of class 0 has the logits (0, c z), so its loss is log(1 + e^(c z)),
    and it is taken for class 1 if c z > 0.
    """

    def __init__(self, *clients: Sequence[float]) -> None:
        self.z = [torch.tensor(z, dtype=torch.float64) for z in clients]
        self.asked: list[tuple[float, list[int]]] = []

    @classmethod
    def of_losses(cls, *clients: Sequence[float]) -> Table:
        """With these losses under the model 1."""
        return cls(*[[math.log(math.expm1(loss)) for loss in losses] for losses in clients])

    def logits(self, model: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append((float(model[0]), list(rows)))
        z = torch.cat([self.z[row] for row in rows])
        return torch.stack([torch.zeros_like(z), float(model[0]) * z], 1), torch.zeros(len(z)).long()

    def arrival(
        self,
        models: Sequence[float] | None = None,
        states: Sequence[float | None] | None = None,
        **work: Any,
    ) -> Arrival:
        """Clients that received these models (default: 1), and kept these (None: it is fresh)."""
        models = [1.0] * len(self.z) if models is None else models
        states = [None] * len(self.z) if states is None else states
        return Arrival(
            spec=SPEC,
            work=LocalWork(**{"epochs": 2, "batch_size": 2, "lr": 0.1, **work}),
            round=0,
            seed=0,
            clients=np.arange(10, 10 + len(self.z)),
            sizes=np.array([len(z) for z in self.z]),
            models=torch.tensor(models)[:, None],
            same=np.unique(models, return_inverse=True)[1],
            state=torch.tensor([0.0 if s is None else s for s in states])[:, None],
            fresh=np.array([s is None for s in states]),
            logits=self.logits,
        )


def test_global_scores_by_hand():
    """Losses 1, 2, 4: 1/loss is 1, 0.5, 0.25 of 1.75. Losses 3, 1: 1/3 and 1 of 4/3."""
    one, two = order().scores(Table.of_losses([1.0, 2.0, 4.0], [3.0, 1.0]).arrival())
    np.testing.assert_allclose(one, [4 / 7, 2 / 7, 1 / 7])
    np.testing.assert_allclose(two, [1 / 4, 3 / 4])


def test_local_scores_look_at_the_client_s_own_model():
    """Under c = -1 what was hard is easy. A fresh client has only the model that it received."""
    table = Table([-1.0, 2.0, 0.5])
    arrival = table.arrival(states=[-1.0])
    assert np.argsort(order().scores(arrival)[0]).tolist() == [1, 2, 0]
    assert np.argsort(order(score="local").scores(arrival)[0]).tolist() == [0, 2, 1]
    losses = [math.log1p(math.exp(-z)) for z in (-1.0, 2.0, 0.5)]
    easiness = [1 / loss for loss in losses]
    np.testing.assert_allclose(
        order(score="local").scores(arrival)[0], np.array(easiness) / sum(easiness), rtol=1e-12
    )


def test_both_scores_take_the_mean_of_the_losses():
    """z = 3: log(1 + e^3) = 3.0486 and log(1 + e^-6) = 0.0025, mean 1.5255; z = -1: 0.3133 and 2.1269."""
    (scores,) = order(score="both").scores(Table([3.0, -1.0]).arrival(states=[-2.0]))
    means = np.array([(3.0485874 + 0.0024757) / 2, (0.3132617 + 2.1269280) / 2])
    np.testing.assert_allclose(scores, (1 / means) / (1 / means).sum(), rtol=1e-6)


def test_scores_by_prediction():
    """Of z = -1, 2, -3 the model 1 takes the second for class 1, the model -1 the others."""
    table = Table([-1.0, 2.0, -3.0])
    found = {
        score: order(score=score).scores(table.arrival(states=[-1.0]))[0].tolist()
        for score in ("global_prediction", "local_prediction", "both_prediction")
    }
    assert found["global_prediction"] == [1, 0, 1]
    assert found["local_prediction"] == [0, 1, 0]
    assert found["both_prediction"] == [0, 0, 0]
    assert order(score="both_prediction").scores(table.arrival(states=[0.5]))[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("score", "fallback"),
    [
        ("local", "global"),
        ("both", "global"),
        ("local_prediction", "global_prediction"),
        ("both_prediction", "global_prediction"),
    ],
)
def test_a_fresh_client_falls_back_on_the_model_received(score, fallback):
    """Bit for bit, also in a block with one that is not fresh."""
    table = Table([-1.0, 2.0, 0.5], [0.3, -0.2], [1.0, -4.0, 2.0])
    plain = order(score=fallback).scores(table.arrival())
    for states in ([None, None, None], [None, -1.0, None]):
        found = order(score=score).scores(table.arrival(states=states))
        for row in (0, 2):
            assert found[row].tolist() == plain[row].tolist()
    assert found[1].tolist() != plain[1].tolist()


def test_clients_of_one_model_share_a_forward_pass():
    table = Table([1.0], [2.0, 3.0], [4.0], [5.0])
    order().visits(table.arrival(models=[1.0, 2.0, 1.0, 2.0]))
    assert table.asked == [(1.0, [0, 2]), (2.0, [1, 3])]
    table.asked.clear()
    order(score="local").visits(table.arrival(states=[None, 7.0, None, 8.0]))
    assert table.asked == [(1.0, [0, 2]), (7.0, [1]), (8.0, [3])]
    table.asked.clear()
    order(order="random").visits(table.arrival())
    assert table.asked == []


@pytest.mark.parametrize("which", ["curriculum", "anti"])
def test_step_t_visits_the_first_of_the_order(which):
    """Ten samples, B = 2, two epochs: T = 10 steps; linear, a = 0.8, b = 0.2: g = 2, 3, ..., 9, 10, 10."""
    z = np.array([0.9, -0.3, 0.1, 0.5, -0.7, 0.3, -0.1, 0.7, -0.9, -0.5])
    ranked = np.argsort(z if which == "curriculum" else -z)
    table = Table(z.tolist())
    seen = []
    for round in range(40):
        (batches,) = order(order=which).visits(replace(table.arrival(), round=round))
        assert len(batches) == 10
        for g, batch in zip([2, 3, 4, 5, 6, 7, 8, 9, 10, 10], batches, strict=True):
            assert len(set(batch.tolist())) == 2
            assert set(batch.tolist()) <= set(ranked[:g].tolist())
        assert sorted(batches[0].tolist()) == sorted(ranked[:2].tolist())
        seen.append(np.concatenate(batches[8:]))
    assert set(np.concatenate(seen).tolist()) == set(range(10))


def test_anti_is_the_ranking_backwards():
    """With b so small that the first step has a batch of one: the easiest, and the hardest."""
    table = Table([0.5, -2.0, 3.0, 1.0])
    for which, first in (("curriculum", 1), ("anti", 2)):
        (batches,) = order(order=which, b=0.01).visits(table.arrival(batch_size=1))
        assert batches[0].tolist() == [first]


def test_random_order_uses_all_samples_in_the_end_and_few_at_first():
    table = Table(np.linspace(-1, 1, 20).tolist())
    firsts, all_of_them = set(), set()
    for round in range(200):
        (batches,) = order(order="random").visits(replace(table.arrival(), round=round))
        firsts |= set(batches[0].tolist())
        early = set(np.concatenate(batches[:2]).tolist())
        assert len(early) <= 5  # g(0) = 4, g(1) = 5
        all_of_them |= set(np.concatenate(batches).tolist())
    assert firsts == all_of_them == set(range(20))


@pytest.mark.parametrize("a", [0.1, 1.0])
def test_b_of_one_leaves_nothing_out(a):
    """Every step of every order draws from all samples: the pacing and a mean nothing."""
    arrival = Table(np.linspace(-1, 1, 20).tolist()).arrival(epochs=50)
    for which in ("curriculum", "anti", "random"):
        (batches,) = order(order=which, a=a, b=1.0, pacing="quadratic").visits(arrival)
        (same,) = order(order=which, a=0.5, b=1.0, pacing="root").visits(arrival)
        assert [b.tolist() for b in batches] == [b.tolist() for b in same]
        assert set(np.concatenate(batches[:50]).tolist()) == set(range(20))


def test_a_client_s_visits_do_not_depend_on_its_block():
    table = Table([0.1, 0.5, -0.4], np.linspace(-1, 1, 15).tolist(), [0.2])
    together = order().visits(table.arrival())
    for row in range(3):
        arrival = table.arrival()
        alone = replace(
            arrival,
            clients=arrival.clients[row : row + 1],
            sizes=arrival.sizes[row : row + 1],
            models=arrival.models[row : row + 1],
            same=arrival.same[:1],
            fresh=arrival.fresh[:1],
            state=arrival.state[:1],
            logits=lambda model, rows, row=row: table.logits(model, [row]),
        )
        (mine,) = order().visits(alone)
        assert [b.tolist() for b in mine] == [b.tolist() for b in together[row]]
    later = order().visits(replace(table.arrival(), round=1))
    assert [b.tolist() for b in later[1]] != [b.tolist() for b in together[1]]


def test_as_many_steps_as_shuffled_epochs_and_two_batches_each_for_per_fedavg():
    table = Table([0.0] * 7, [0.0], [0.0] * 4)
    assert [len(own) for own in order().visits(table.arrival(epochs=3))] == [12, 3, 6]
    # Steps of two batches: 7 samples make 2 steps an epoch, 1 and 4 samples one.
    assert [len(own) for own in order().visits(table.arrival(epochs=3, inner_lr=0.1))] == [12, 6, 6]


def test_losses_that_are_not_finite_are_the_hardest():
    (scores,) = order().scores(Table([1.0, math.nan, -1.0, math.inf]).arrival())
    assert np.isfinite(scores).all()
    assert np.argsort(-scores, kind="stable").tolist() == [2, 0, 1, 3]


def test_texts_are_scored_by_the_mean_over_their_words():
    """Two texts of two words and of one; what stands behind the end counts for nothing."""
    logits = torch.zeros(2, 3, 2)  # (n, words, L)
    logits[0, 1, 0] = 2.0  # the first word is right, the second a guess among three
    logits[1, 0, 0] = 2.0
    logits[1, :, 1] = torch.tensor([9.0, -9.0, 0.0])  # nobody asks
    targets = torch.tensor([[1, 2], [1, IGNORED]])
    arrival = replace(Table([0.0, 0.0]).arrival(), logits=lambda model, rows: (logits, targets))
    right, wrong = math.log(2 + math.e**2) - 2, math.log(2 + math.e**2)
    losses = np.array([(right + math.log(3)) / 2, wrong])
    np.testing.assert_allclose(order().scores(arrival)[0], (1 / losses) / (1 / losses).sum(), rtol=1e-6)
    assert order(score="global_prediction").scores(arrival)[0].tolist() == [0.5, 0.0]


# --- the expert ----------------------------------------------------------------------------------------


def expert_file(path: Path, spec: ModelSpec, vector: np.ndarray) -> Path:
    save_file({n: t.clone() for n, t in spec.to_state_dict(torch.from_numpy(vector)).items()}, path)
    return path


def test_an_expert_tells_wrong_labels_from_right_ones(tmp_path):
    """Digits of which a tenth is mislabelled: with a model of the right labels nearly all come last."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    bad = np.zeros(len(y), np.bool_)
    bad[::10] = True
    spec = ModelSpec.of(MODELS["mlp"](hidden=[16]), (64,), 10, 0)

    def trained(labels: np.ndarray, epochs: int) -> tuple[Batches, torch.Tensor]:
        batches = Batches(Samples("d", x, labels, x, labels, 10), torch.device("cpu"))
        start = torch.from_numpy(spec.initial()[None].copy())
        work = LocalWork(epochs=epochs, batch_size=20, lr=0.2)
        return batches, LoopEngine(spec, batches, 0).train(work, 0, [0], [np.arange(len(y))], start).rows[0]

    _, model = trained(y, 3)
    file = expert_file(tmp_path / "model_0.safetensors", spec, model.numpy())
    batches, _ = trained(np.where(bad, (y + 1) % 10, y), 0)
    module = spec.build().eval()

    def logits(vector: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        spec.load(module, vector)
        inputs, targets = batches.train(np.arange(len(y)))
        with torch.inference_mode():
            return module(inputs), targets

    start = torch.from_numpy(spec.initial()[None].copy())
    arrival = replace(
        Table([0.0]).arrival(batch_size=10),
        spec=spec,
        models=start,
        sizes=np.array([len(y)]),
        logits=logits,
    )
    ordering = order(score="expert", expert=file)
    ordering.check(spec)
    (scores,) = ordering.scores(arrival)
    ranking = np.argsort(-scores)
    assert bad[ranking[: len(y) // 2]].mean() < 0.01
    assert bad[ranking[-180:]].mean() > 0.8
    (batches_of_one,) = ordering.visits(arrival)
    assert not bad[batches_of_one[0]].any()
    (untrained,) = order().scores(arrival)
    assert bad[np.argsort(-untrained)[: len(y) // 2]].mean() > 0.05


def test_an_expert_is_read_anew_when_the_file_changes(tmp_path):
    z, file = Table([1.0, -1.0]), tmp_path / "model.safetensors"
    arrival = replace(z.arrival(), logits=lambda model, rows: z.logits(model[1:2] - model[:1], rows))
    easy = []
    for sign in (1.0, -1.0):
        expert_file(file, SPEC, np.array([0.0, sign, 0.0, 0.0], np.float32))
        easy.append(int(order(score="expert", expert=file).scores(arrival)[0].argmax()))
    assert easy == [1, 0]


def test_experts_that_will_not_do(tmp_path):
    """One line each: where, what, what would be right."""

    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            order(score="expert", expert=path).check(SPEC)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("order.expert: ")
        assert "rayfl expert trains one" in str(caught.value)
        return str(caught.value)

    assert "there is no file" in refusal(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    assert "is not a safetensors file" in refusal(tmp_path / "text.safetensors")
    wide = ModelSpec.of(MODELS["linear"](), (3,), 2, 0)
    file = expert_file(tmp_path / "wide.safetensors", wide, wide.initial())
    assert "another architecture, its fc1.weight is (2, 3) instead of (2, 1)" in refusal(file)
    deep = ModelSpec.of(MODELS["mlp"](hidden=[4]), (1,), 2, 0)
    order(score="expert", expert=expert_file(tmp_path / "deep.safetensors", deep, deep.initial())).check(deep)
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert "its fc1.weight is missing instead of" in refusal(tmp_path / "other.safetensors")


def test_an_expert_and_its_score_go_together(tmp_path):
    for fields in ({"score": "expert"}, {"expert": tmp_path / "x"}, {"score": "local", "expert": "x"}):
        with pytest.raises(ConfigError, match="the setting expert"):
            order(**fields)
    assert order(score="expert", expert="x.safetensors").expert.is_absolute()
