"""Engines against the plain loop, and both against the floor: the networks of W1 to W5, those of PyTorch's
tutorial and MNIST example, and others with BatchNorm, tanh and skip connections.

Everything runs in this process on one thread, and all clients of a case in one block; the figure is processor
time. ``rayfl bench W1 W2 W3`` measures whole rounds instead, with Ray, and against a loop in two processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from rayfl.bench import floor
from rayfl.bench.saved import Rows
from rayfl.data import Samples
from rayfl.memory import keep_freed
from rayfl.models import MODELS, Model, ModelSpec
from rayfl.models.lstm import Lstm
from rayfl.training.batched.graphs import WARM_UPS
from rayfl.training.batches import Batches
from rayfl.training.device import open_device
from rayfl.training.engine import ENGINES, Engine, choose_engine, open_engine
from rayfl.training.precision import Precision
from rayfl.training.work import LocalWork

WORDS, LENGTH = 5_002, 20
"""Size of the vocabulary, and number of words in a text."""


class Tutorial(nn.Module):
    """The network of PyTorch's tutorial "Training a classifier", for images of 32 x 32, as written there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, 10)`` of images ``(B, 3, 32, 32)``."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


class MnistExample(nn.Module):
    """The network of PyTorch's example "Basic MNIST", for images of 28 x 28, as written there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities ``(B, 10)`` of images ``(B, 1, 28, 28)``."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = functional.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return functional.log_softmax(x, dim=1)


def published_lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with tanh and average pooling (LeCun et al. 1998), for images of 28 x 28."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)),
    )


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


def resnet9(shape: tuple[int, ...], classes: int) -> nn.Module:
    """rayfl's ResNet-9 with BatchNorm in place of GroupNorm."""
    module = MODELS["resnet9"]().build(shape, classes)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.GroupNorm):
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, nn.BatchNorm2d(part.num_channels))
    return module


class Transformer(nn.Module):
    """Two causal layers of a transformer that predict the next word."""

    mask: Tensor

    def __init__(self, length: int, words: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, words)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Words ``(B, L)`` to logits ``(B, vocabulary, L)``."""
        inner = self.layers(self.embedding(words) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.last(inner)
        return logits.transpose(1, 2)


class Words(Model):
    """The transformer as a model: it takes words."""

    name: Literal["words"] = "words"
    tokens: ClassVar[bool] = True
    layers: ClassVar[dict[str, tuple[str, ...]]] = {
        "embedding": ("embedding", "position"),
        "layers": ("layers",),
        "last": ("last",),
    }

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network for texts ``(L,)``."""
        return Transformer(shape[0], classes)

    def example(
        self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        """See :class:`~rayfl.models.lstm.Lstm`."""
        return Lstm().example(shape, classes, count, rng)


@dataclass(frozen=True)
class Case:
    """A network and what its clients do, all in one block.

    Attributes:
        network: for tables.
        model: the network.
        shape: of an image ``(C, H, W)``, or of a text ``(L,)``.
        classes: number of classes, or of words.
        clients, samples: number of clients, and of samples per client.
        epochs, batch_size, momentum: of local training.
    """

    network: str
    model: Model
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    clients: int = 10
    samples: int = 100
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0

    @property
    def spec(self) -> ModelSpec:
        """The network's layout."""
        return ModelSpec.of(self.model, self.shape, self.classes, 0)

    def data(self) -> Samples:
        """Random samples of all clients."""
        count, rng = self.clients * self.samples, np.random.default_rng(0)
        if self.model.tokens:
            x, targets = self.model.example(self.shape, self.classes, count, rng)
            topics, words = np.zeros(count, np.int64), tuple(map(str, range(self.classes)))
            return Samples(
                "random", x, topics, x[:1], topics[:1], 1,
                targets_train=targets, targets_test=targets[:1], vocabulary=words,
            )  # fmt: skip
        images = rng.integers(0, 256, (count, *self.shape), dtype=np.uint8)
        y = rng.integers(0, self.classes, count)
        return Samples("random", images, y, images[:1], y[:1], self.classes)


def _model(name: str, **settings: Any) -> Model:
    model: Model = MODELS[name].model_validate(settings)
    return model


def _own_model(target: str) -> Model:
    return _model("module", target=f"{__name__}:{target}")


CASES = (
    Case("W1: MLP", _model("mlp", hidden=[200]), (1, 28, 28), 47, 16, 47, 5, 10),
    Case("W2: LeNet-5", _model("lenet5"), (1, 28, 28), 10, 1, 600, 2, 10, 0.5),
    Case("LeNet-5, BatchNorm", _model("lenet5", batch_norm=True), (1, 28, 28), 10, 1, 600, 2, 10, 0.5),
    Case("LeNet-5, tanh", _own_model("published_lenet5"), (1, 28, 28), 10, 1, 600, 2, 10, 0.5),
    Case("PyTorch's MNIST example", _own_model("MnistExample"), (1, 28, 28), 10, 1, 100, 1, 10),
    Case(
        "PyTorch's tutorial",
        _own_model("Tutorial"),
        clients=1,
        samples=600,
        epochs=2,
        batch_size=10,
        momentum=0.5,
    ),
    Case("W3: MLP", _model("mlp", hidden=[32]), (1, 8, 8), 10, 250, 20, 1, 20),
    Case("W4a: ResNet-18, GroupNorm", _model("torchvision", norm="group"), samples=32, clients=2),
    Case("W4b: ResNet-9, BatchNorm", _own_model("resnet9"), samples=32, clients=2),
    Case("W5a: LSTM", Lstm(), (LENGTH,), WORDS, 1, 80, 1, 10),
    Case("W5b: transformer", Words(), (LENGTH,), WORDS, 1, 80, 1, 10),
    Case("skip", _own_model("SkipNet")),
    Case("skip, 8 x 8 grey", _own_model("SkipNet"), (1, 8, 8), batch_size=10),
)
"""W1 to W5 with as many clients in a block as they have in a run, or for W4 with fewer samples; W2 also with
BatchNorm, as Sub-FedAvg trains it, as published, and with networks that are written with functions."""


def run(
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
    saved: Rows | None = None,
    device: str = "cpu",
    precision: Precision = "float32",
) -> list[dict[str, Any]]:
    """Measure: the engines in turns.

    Args:
        rounds: measured rounds of each engine.
        say: called with one line per round.
        saved: rows that are already known; it also keeps rows once they are measured.
        device: ``cpu``, with one thread, or ``cuda``.
        precision: if it is reduced, the engine that ``auto`` chooses for it is measured too.

    Returns:
        One row per network: the ``engine``, median seconds per round of it and of the loop (CPU seconds, on a
        GPU seconds), median of the paired ratios (``ratio``, above 1: faster than the loop), and the
        ``floor_seconds``: what matrix products and convolutions need at the device's
        :func:`rayfl.bench.floor.peak`. In reduced precision also ``reduced_engine``, ``reduced_seconds`` and
        ``reduced_ratio`` (above 1: faster than ``engine`` in float32).
    """
    saved, reduced = saved or Rows(), precision != "float32"
    rows = {row["network"]: row for row in saved.known if ("reduced_ratio" in row) == reduced}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed()  # as the client actors do
    try:
        torch_device = open_device(device)
        top = floor.peak(device=torch_device)
        what = "one core" if torch_device.type == "cpu" else "the device"
        say(f"large products and convolutions reach {top / 1e9:,.0f} billion operations a second on {what}")
        for case in CASES:
            if case.network not in rows:
                rows[case.network] = measure(case, rounds, top, say, torch_device, precision)
                saved.keep(list(rows.values()))
        return [rows[case.network] for case in CASES]
    finally:
        torch.set_num_threads(threads)


def measure(
    case: Case,
    rounds: int,
    top: float,
    say: Callable[[str], None],
    device: torch.device,
    precision: Precision = "float32",
) -> dict[str, Any]:
    """A row of :func:`run`; ``top`` is the device's peak."""
    spec, data = case.spec, case.data()
    batches = Batches(data, device)
    name, _ = choose_engine(spec)
    own_engine, opened = open_engine(name, spec, batches, 0)
    # If auto chooses the loop, both engines are the same, and the ratio shows the error of the measurement.
    engines = {"loop": ENGINES["loop"](spec, batches, 0), "own": own_engine}
    reduced = ""
    if precision != "float32":
        reduced, _ = choose_engine(spec, precision=precision)
        engines["reduced"], reduced_opened = open_engine(reduced, spec, batches, 0, precision=precision)
        reduced = reduced if device.type == "cpu" else reduced_opened
    seconds: dict[str, list[float]] = {label: [] for label in engines}
    # A round may have a single step, and a GPU records steps only once they have come up a few times.
    warm_ups = 1 if device.type == "cpu" else WARM_UPS + 1
    for turn in range(warm_ups + rounds):
        number = turn + 1 - warm_ups  # of the measured rounds
        for label, engine in engines.items():
            took = _round(engine, case, turn)
            if number > 0:
                seconds[label].append(took)
        if number > 0:
            also = f"{reduced} in {precision} {seconds['reduced'][-1]:.3f}, " if reduced else ""
            say(f"{case.network} {number}/{rounds}: loop {seconds['loop'][-1]:.3f}, "
                f"{also}{name} {seconds['own'][-1]:.3f} s")  # fmt: skip
    size = min(case.batch_size, case.samples)
    operations = floor.operations(spec, data, size) * case.clients * case.epochs * case.samples / size
    own_seconds = statistics.median(seconds["own"])
    row = {
        "network": case.network,
        "parameters": spec.n_parameters,
        "engine": name if device.type == "cpu" else opened,
        "loop_seconds": statistics.median(seconds["loop"]),
        "seconds": own_seconds,
        "ratio": _ratio(seconds["loop"], seconds["own"]),
        "gflop": operations / 1e9,
        "floor_seconds": operations / top,
        "times_floor": own_seconds * top / operations,
    }
    if reduced:
        row["reduced_engine"], row["reduced_seconds"] = reduced, statistics.median(seconds["reduced"])
        row["reduced_ratio"] = _ratio(seconds["own"], seconds["reduced"])
    return row


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median of paired ratios."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def _round(engine: Engine, case: Case, number: int) -> float:
    """Seconds of a round: CPU seconds, or on a GPU seconds."""
    device = engine.batches.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    indices = [np.arange(case.samples * c, case.samples * (c + 1)) for c in range(case.clients)]
    start = torch.from_numpy(engine.spec.initial()).to(device).expand(case.clients, -1)
    work = LocalWork(case.epochs, case.batch_size, 0.01, momentum=case.momentum)
    floor.wait(device)
    start_time = clock()
    failures = engine.train(work, number, range(case.clients), indices, start).failures
    if failures:
        raise RuntimeError(next(iter(failures.values())))
    floor.wait(device)
    return clock() - start_time
