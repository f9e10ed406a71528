"""Losses that look at other models: against the plain loop in double precision, and against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rayfl.errors import ConfigError
from rayfl.models import MODELS, ModelSpec
from rayfl.training import Guides, LocalWork, Seen, Terms
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.vmap import VmapEngine
from rayfl.training.batches import Batches
from rayfl.training.engine import GuidedEngines
from rayfl.training.loop import LoopEngine
from tests.training.bounds import Truth
from tests.training.test_batched import SGDS, random_samples
from tests.training.test_vmap import IMAGE, ROW, Rows, Skip, spec_of


def contrast(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
    """MOON's: near to the features of the first model, far from those of the second."""
    near, far = (functional.cosine_similarity(own.features, each.features) / 0.5 for each in others)
    return functional.softplus(far - near)


def distil(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with what the first model says."""
    return -(others[0].outputs.softmax(1) * own.outputs.log_softmax(1)).sum(1)


def block(spec: ModelSpec, sizes: list[int]) -> tuple[Batches, list[Any], torch.Tensor, Guides]:
    rng = np.random.default_rng(1)
    indices = [rng.choice(60, n, replace=False) for n in sizes]
    start = torch.from_numpy(np.tile(spec.initial(), (len(sizes), 1)))
    models = [
        torch.from_numpy(np.stack([spec.initial(index=1 + 2 * k + j) for k in range(len(sizes))]))
        for j in (0, 1)
    ]
    batches = Batches(random_samples(spec.shape, 60, spec.classes), torch.device("cpu"))
    return batches, indices, start, Guides(tuple(models), contrast)


@pytest.mark.parametrize("term", [contrast, distil])
@pytest.mark.parametrize(
    ("module", "shape", "sizes"), [(Skip, IMAGE, [9, 6, 3]), (Rows, ROW, [6, 7, 2])], ids=["images", "rows"]
)
@pytest.mark.parametrize("work", [*SGDS, replace(SGDS[0], inner_lr=0.01)], ids=["plain", "momentum", "ahead"])
def test_engines_agree(
    module: Callable[..., nn.Module], shape: tuple[int, ...], sizes: list[int], work: LocalWork, term: Any
) -> None:
    """Networks with BatchNorm: the client's own in training mode, the others in evaluation mode."""
    spec = spec_of(module, shape)
    batches, indices, start, guides = block(spec, sizes)
    terms, ids = Terms(guides=replace(guides, term=term)), range(10, 10 + len(sizes))
    truth = Truth.of(spec, batches, 0, work, 1, ids, indices, start, terms)
    plain = LoopEngine(spec, batches, 0)
    for engine in (plain, VmapEngine(spec, batches, 0, least=1, clients_per_call=2)):
        truth.check(engine.train(work, 1, ids, indices, start, terms))
    without = plain.train(work, 1, ids, indices, start)
    assert (without.rows - truth.block.rows).norm() > 0.01 * float(np.max(truth.moved))


def test_with_other_terms() -> None:
    """Masks, offsets, a proximal term and a frozen layer act as without guides."""
    spec = ModelSpec.of(MODELS["mlp"](), (6,), 3, 0)
    batches, indices, start, guides = block(spec, [7, 4, 9])
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(start.shape, generator=generator) > 0.3).float()
    offset = 0.1 * torch.randn(start.shape, generator=generator)
    frozen = tuple(spec.segment(first=1))
    work = replace(SGDS[1], proximal=0.1, frozen=frozen)
    terms = Terms(offset, mask, guides=guides)
    truth = Truth.of(spec, batches, 0, work, 1, [1, 2, 3], indices, start, terms)
    for engine in (LoopEngine(spec, batches, 0), VmapEngine(spec, batches, 0, least=1)):
        found = engine.train(work, 1, [1, 2, 3], indices, start, terms)
        truth.check(found)
        (first, last), *_ = frozen
        assert torch.equal(found.rows[:, first:last], (start * mask)[:, first:last])


def test_a_step_written_in_pytorch() -> None:
    """One step of gradient descent with all samples, without this package's code."""
    spec = ModelSpec.of(MODELS["mlp"](), (6,), 3, 0)
    batches, indices, start, guides = block(spec, [8, 5])
    work = LocalWork(epochs=1, batch_size=100, lr=0.5)
    for row in (0, 1):
        x, y = batches.train(indices[row])
        modules = [spec.build() for _ in range(3)]
        models = [start[row], guides.models[0][row], guides.models[1][row]]
        for module, model in zip(modules, models, strict=True):
            spec.load(module, model)
        heads = [[p for p in m.modules() if isinstance(p, nn.Linear)][-1] for m in modules]
        caught: dict[int, torch.Tensor] = {}
        for k, each in enumerate(heads):
            each.register_forward_pre_hook(lambda _, given, k=k, caught=caught: caught.update({k: given[0]}))
        outputs = [module(x) for module in modules]
        z = [caught[k] for k in range(3)]
        norm = [each / each.norm(dim=1, keepdim=True) for each in z]
        near, far = ((norm[0] * norm[k].detach()).sum(1) / 0.5 for k in (1, 2))
        extra = -torch.log(near.exp() / (near.exp() + far.exp()))
        loss = functional.cross_entropy(outputs[0], y)
        gradients = torch.autograd.grad(loss + extra.mean(), list(modules[0].parameters()))
        step = torch.cat([g.flatten() for g in gradients])
        found = LoopEngine(spec, batches, 0).train(
            work, 0, [row], [indices[row]], start[row : row + 1],
            Terms(guides=guides.take(torch.tensor([row]))),
        )  # fmt: skip
        torch.testing.assert_close(found.rows[0], start[row] - 0.5 * step)
        assert found.losses[0] == pytest.approx(float(loss), rel=1e-5)  # without the term


def test_which_engine() -> None:
    mlp = ModelSpec.of(MODELS["mlp"](), (6,), 3, 0)
    batches, indices, start, guides = block(mlp, [7, 4])
    assert isinstance(GuidedEngines(mlp, batches, 0).engine(guides), VmapEngine)
    terms = Terms(guides=guides.take(torch.tensor([0])))
    found = BatchedEngine(mlp, batches, 0).train(SGDS[0], 0, [0], indices[:1], start[:1], terms)
    assert "no losses that look at other models" in found.failures[0]  # it is not left out in silence


def test_a_term_that_looks_at_the_batch_is_trained_by_the_loop() -> None:
    """Samples that pad the batches of small clients would be among its negatives."""

    def contrast(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        alike = own.outputs @ others[0].outputs.T
        return -alike.log_softmax(1).diagonal()

    mlp = ModelSpec.of(MODELS["mlp"](), (6,), 3, 0)
    batches, indices, start, guides = block(mlp, [7, 4])
    engines = GuidedEngines(mlp, batches, 0)
    silent = replace(guides, term=lambda own, others, targets: 0 * contrast(own, others, targets))
    assert isinstance(engines.engine(silent), VmapEngine)  # as a weight may be in the first rounds
    guides = replace(guides, term=contrast)
    engine = engines.engine(guides)
    assert isinstance(engine, LoopEngine)
    together = engine.train(SGDS[0], 0, [0, 1], indices, start, Terms(guides=guides)).rows
    apart = Terms(guides=guides.take(torch.tensor([1])))
    assert torch.equal(together[1:], engine.train(SGDS[0], 0, [1], indices[1:], start[1:], apart).rows)


@pytest.mark.parametrize("engine", [LoopEngine, lambda *given: VmapEngine(*given, least=1)])
def test_layers(engine: Any) -> None:
    spec = spec_of(Skip, IMAGE)
    batches, indices, start, guides = block(spec, [9, 6])
    seen: set[tuple[int, ...]] = set()

    def look(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(own.features.shape[1:]))
        return own.features.mean(1) * 0

    trained = engine(spec, batches, 0)
    for layer, width in (("", 4), ("head", 4), ("conv", 100), ("norm1", 100)):
        seen.clear()
        terms = Terms(guides=Guides(guides.models, look, layer))
        assert not trained.train(SGDS[0], 0, [0, 1], indices, start, terms).failures
        assert seen == {(width,)}
    with pytest.raises(ConfigError, match=r"no layer 'haed'.*head"):
        trained.train(SGDS[0], 0, [0, 1], indices, start, Terms(guides=Guides(guides.models, look, "haed")))


def test_models_of_another_block_are_refused() -> None:
    spec = spec_of(Rows, ROW)
    batches, indices, start, guides = block(spec, [6, 7])
    short = Guides((guides.models[0][:1],), contrast)
    with pytest.raises(ValueError, match="guides: a tensor"):
        LoopEngine(spec, batches, 0).train(SGDS[0], 0, [0, 1], indices, start, Terms(guides=short))
