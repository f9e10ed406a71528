"""The networks of the head-to-head comparison, in PyTorch alone: every system trains these same modules.

FedJAX uses the same layers in Haiku, see ``clients/run_fedjax.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 200) -> nn.Module:
    """One hidden layer on flattened images (W1, W3)."""
    inputs = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def mlp32(shape: tuple[int, ...], classes: int) -> nn.Module:
    """:func:`mlp` with 32 hidden units."""
    return mlp(shape, classes, 32)


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 without padding, for images of 28 x 28 (W2) or, with three channels, 32 x 32.

    The latter is the CNN of PyTorch's "60 minute blitz" and of BlazeFL's benchmark.
    """
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def dropout_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 3 x 3 convolutions (32, 64), pooling and a dense layer of 128, with dropout.

    The CNN of "Adaptive Federated Optimization" (Reddi et al. 2021) for EMNIST: FLUTE uses it for FEMNIST,
    pfl's benchmark for CIFAR-10.
    """
    side = (shape[1] - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


class Residual(nn.Module):
    """Two 3 x 3 convolutions with normalisation and a skip connection (ResNet's basic block)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, H, W)`` to ``(B, outputs, H / stride, W / stride)``."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.skip(x))


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 as torchvision builds it, its BatchNorm replaced by GroupNorm with 32 groups (W4)."""
    blocks: list[nn.Module] = []
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        blocks += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


class ResNet9(nn.Module):
    """ResNet-9 with BatchNorm, for images of 32 x 32 (W4)."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
            parts = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            return nn.Sequential(*parts, *([nn.MaxPool2d(2)] if pool else []))

        self.conv1, self.conv2 = layer(shape[0], 64), layer(64, 128, pool=True)
        self.res1 = nn.Sequential(layer(128, 128), layer(128, 128))
        self.conv3, self.conv4 = layer(128, 256, pool=True), layer(256, 512, pool=True)
        self.res2 = nn.Sequential(layer(512, 512), layer(512, 512))
        self.head = nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, C, 32, 32)`` to logits ``(B, classes)``."""
        x = self.conv2(self.conv1(x))
        x = self.conv4(self.conv3(x + self.res1(x)))
        logits: Tensor = self.head(x + self.res2(x))
        return logits


class Lstm(nn.Module):
    """Two layers of LSTM that predict the next word (W5): as rayfl's ``lstm``."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.last = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Words ``(B, L)`` to logits ``(B, classes, L)``."""
        logits: Tensor = self.last(self.lstm(self.embedding(words))[0])
        return logits.transpose(1, 2)


class Transformer(nn.Module):
    """Two causal layers of a transformer that predict the next word (W5)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.position = nn.Parameter(0.02 * torch.randn(shape[0], width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, classes)
        mask = nn.Transformer.generate_square_subsequent_mask(shape[0])
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Words ``(B, L)`` to logits ``(B, classes, L)``."""
        inner = self.layers(self.embedding(words) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.last(inner)
        return logits.transpose(1, 2)


NETWORKS = {
    "mlp": mlp,
    "mlp32": mlp32,
    "lenet5": lenet5,
    "dropout_cnn": dropout_cnn,
    "resnet18": resnet18,
    "resnet9": ResNet9,
    "lstm": Lstm,
    "transformer": Transformer,
}
"""By name: called with the shape of a sample and the number of classes."""


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with the weights of seed 0, so that all systems start from the same ones."""
    torch.manual_seed(0)
    return fresh(name, shape, classes)


def fresh(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with random weights, for methods that start from several."""
    return NETWORKS[name](tuple(shape), classes)
