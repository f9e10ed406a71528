"""Networks with BatchNorm and skip connections: the engine that ``auto`` takes against the plain loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.data import Samples
from rayfl.models import MODELS, ModelSpec
from rayfl.training.batches import Batches
from rayfl.training.engine import ENGINES, Engine, choose_engine
from rayfl.training.work import LocalWork

CLIENTS, SAMPLES, CLASSES = 10, 100, 10


class SkipNet(nn.Module):
    """A convolution, a residual block and a classifier, with BatchNorm: 16 channels."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width)
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images ``(B, C, H, W)``."""
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 2)
        inner = functional.relu(self.norm1(self.first(x)))
        x = functional.relu(x + self.norm2(self.second(inner)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Case:
    """A network on images: 10 clients with 100 images each, one epoch, in one block.

    Attributes:
        network: for tables.
        model: the ``model`` section.
        shape: of an image ``(C, H, W)``.
        batch_size: of local training.
    """

    network: str
    model: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, int, int] = (3, 32, 32)
    batch_size: int = 32


_OWN = {"name": "module", "target": f"{__name__}:SkipNet"}
CASES = (
    Case("skip", _OWN),
    Case("skip, 8 x 8 grey", _OWN, (1, 8, 8), 10),
    Case("resnet18", {"name": "torchvision"}),
    Case("resnet18, cifar stem", {"name": "torchvision", "stem": "cifar"}),
)


def run(rounds: int, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Measure the two engines in turns, in this process and on one thread.

    Args:
        rounds: measured rounds of each engine.
        say: called with one line per round.

    Returns:
        One row per network: the ``engine``, median CPU seconds per round of the engine and of the loop, and
        the median of the paired ratios (above 1: faster than the loop).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_measure(case, rounds, say) for case in CASES]
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    settings = dict(case.model)
    spec = ModelSpec.of(MODELS[settings.pop("name")](**settings), case.shape, CLASSES, 0)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * SAMPLES, *case.shape), dtype=np.uint8)
    y = rng.integers(0, CLASSES, len(x))
    batches = Batches(Samples("random", x, y, x[:1], y[:1], CLASSES), torch.device("cpu"))
    name, _ = choose_engine(spec)
    engines = {each: ENGINES[each](spec, batches, 0) for each in ("loop", name)}
    seconds: dict[str, list[float]] = {each: [] for each in engines}
    for number in range(rounds + 1):  # the first warms up
        for each, engine in engines.items():
            took = _round(engine, case, number)
            if number:
                seconds[each].append(took)
        if number:
            taken = ", ".join(f"{each} {times[-1]:.2f}" for each, times in seconds.items())
            say(f"{case.network} {number}/{rounds}: {taken} s")
    ratios = [loop / own for loop, own in zip(seconds["loop"], seconds[name], strict=True)]
    return {
        "network": case.network,
        "parameters": spec.n_parameters,
        "engine": name,
        "loop_cpu_seconds": statistics.median(seconds["loop"]),
        "cpu_seconds": statistics.median(seconds[name]),
        "ratio": statistics.median(ratios),
    }


def _round(engine: Engine, case: Case, number: int) -> float:
    """CPU seconds of a round."""
    indices = [np.arange(SAMPLES * c, SAMPLES * (c + 1)) for c in range(CLIENTS)]
    start = torch.from_numpy(engine.spec.initial()).expand(CLIENTS, -1)
    work, before = LocalWork(1, case.batch_size, 0.01), time.process_time()
    failures = engine.train(work, number, range(CLIENTS), indices, start).failures
    if failures:
        raise RuntimeError(next(iter(failures.values())))
    return time.process_time() - before
