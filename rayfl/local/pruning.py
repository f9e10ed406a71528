"""Pruning of Sub-FedAvg: candidate masks, their distance, the rule, and networks of reduced size.

Vahidian's thesis, chapter 4. All functions are pure and work on flat vectors and masks ``(P,)``, True where a
number is kept. What may be pruned:

- *unstructured*: the entries of weight tensors (convolutions, linear layers), which have two dimensions or
  more; never biases, the scale and shift of a normalisation, or running statistics;
- *structured*: whole channels of convolutions that are followed by a BatchNorm, by its scale ``|gamma|`` (Liu
  et al. 2017); a channel is its filter, its bias, its normalisation with the running statistics, and the
  weights of the next layer that read it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from rayfl.models import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

Mask = NDArray[np.bool_]

# Masks ---------------------------------------------------------------------------------------------------


def prunable(spec: ModelSpec, fully_connected: bool = False) -> Mask:
    """Which of the ``P`` parameters unstructured pruning may remove.

    Args:
        spec: the model's layout.
        fully_connected: only the weights of linear layers (two dimensions), as Sub-FedAvg (Hy) does.
    """
    mask = np.zeros(spec.P, np.bool_)
    for place, shape in _parameters(spec):
        mask[place] = len(shape) == 2 if fully_connected else len(shape) >= 2
    return mask


def unstructured(
    spec: ModelSpec,
    vector: NDArray[np.float32],
    mask: Mask,
    share: float,
    fully_connected: bool = False,
    per_layer: bool = False,
) -> Mask:
    """A candidate mask ``(P,)``: ``mask`` without the lowest ``share`` of the surviving |weights|.

    Args:
        spec: the model's layout.
        vector: the trained model ``(P,)``.
        mask: the current mask ``(P,)``.
        share: r_us, the share of the surviving prunable weights, in [0, 1); weights strictly below this
            quantile (interpolated, as NumPy's) are pruned.
        fully_connected: see :func:`prunable`.
        per_layer: one quantile for each weight tensor, as in the authors' code; otherwise one for all, as in
            the text.

    Raises:
        ValueError: if the share is not in [0, 1).
    """
    prunable_mask = prunable(spec, fully_connected)
    magnitude, result = np.abs(vector), mask.copy()
    places = [place for place, _ in _parameters(spec)] if per_layer else [slice(0, spec.P)]
    for place in places:
        result[place] &= _mask_above_quantile(magnitude[place], mask[place] & prunable_mask[place], share)
    return result


def pruned(mask: Mask, where: Mask) -> float:
    """The share of the prunable entries (``where``) that are pruned."""
    entries = np.count_nonzero(where)
    return 1 - np.count_nonzero(mask & where) / entries if entries else 0.0


def emptied(spec: ModelSpec, before: Mask, after: Mask) -> list[str]:
    """Names of the weight tensors of which ``before`` kept something and ``after`` keeps nothing."""
    names = [spec.names[k] for k, _ in enumerate(_parameters(spec))]
    return [
        name
        for name, (place, shape) in zip(names, _parameters(spec), strict=True)
        if len(shape) >= 2 and before[place].any() and not after[place].any()
    ]


def distance(first: Mask, second: Mask, where: Mask | None = None) -> float:
    """Hamming distance of two masks ``(n,)`` (of weights, or of channels): the share of differing entries.

    Args:
        first, second: the masks.
        where: the entries that count ``(n,)``; None for all.

    Raises:
        ValueError: if the masks have different shapes.
    """
    if first.shape != second.shape:
        raise ValueError(f"masks of shapes {first.shape} and {second.shape}; expected equal shapes")
    differing, entries = first != second, first.size if where is None else np.count_nonzero(where)
    if where is not None:
        differing &= where
    return np.count_nonzero(differing) / entries if entries else 0.0


def next_share(pruned: float, target: float, step: float) -> float:
    """The share of the survivors to prune now, such that the last step does not overshoot the target.

    Args:
        pruned: the share that is pruned already.
        target: p, the share to be pruned in the end.
        step: r, the maximum share of the survivors to prune at a time.
    """
    return min(step, max(0.0, target - pruned) / (1 - pruned)) if pruned < 1 else 0.0


@dataclass(frozen=True)
class Rule:
    """When a client prunes (Algorithms 10 and 11).

    Attributes:
        accuracy: Acc_th, the minimum validation accuracy, in [0, 1].
        target: p, the share to be pruned in the end.
        distance: epsilon, the minimum Hamming distance between the candidates of the first and last epoch:
            1e-4 for Sub-FedAvg (Un), 0.05 for (Hy).
    """

    accuracy: float
    target: float
    distance: float

    def allows(self, accuracy: float, pruned: float, distance: float) -> bool:
        """Whether the candidate of the last epoch is applied.

        Args:
            accuracy: validation accuracy of the trained model.
            pruned: the share that is pruned already.
            distance: between the candidates.
        """
        return accuracy >= self.accuracy and pruned < self.target and distance >= self.distance


# Channels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """A convolution whose channels can be pruned, its BatchNorm, and the next layer that has weights."""

    conv: str
    norm: str
    next: str
    channels: int


def gammas(spec: ModelSpec, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """The entries of a vector or mask ``(P,)`` at the scales of all prunable channels, ``(K,)``.

    Channels are counted through the convolutions in forward order; LeNet-5 has K = 6 + 16. In a mask these
    entries tell which channels are kept.

    Raises:
        ValueError: if the network is not a chain, or has no convolution with a BatchNorm.
    """
    places = _slices_by_name(spec)
    return np.concatenate([values[places[f"{stage.norm}.weight"]] for stage in _stages(spec)])


def structured(
    spec: ModelSpec, vector: NDArray[np.float32], channels: Mask, share: float, per_layer: bool = False
) -> Mask:
    """Candidate mask of channels ``(K,)``: prunes the lowest ``share`` of the surviving ``|gamma|``.

    Decision: a convolution always keeps its channel with the largest scale; otherwise nothing would pass.

    Args:
        spec: the model's layout.
        vector: the trained model ``(P,)``.
        channels: the channels that are kept now ``(K,)``.
        share: r_s, in [0, 1); channels strictly below this quantile of the whole network are pruned.
        per_layer: one quantile for each layer, as in the authors' code.

    Raises:
        ValueError: if the network has no such channels (see :func:`gammas`), or for a bad share.
    """
    scale = np.abs(gammas(spec, vector))
    bounds = np.cumsum([0, *(stage.channels for stage in _stages(spec))])
    layers = [slice(a, b) for a, b in itertools.pairwise(bounds.tolist())]
    result = channels.copy()
    for part in layers if per_layer else [slice(0, len(scale))]:
        result[part] &= _mask_above_quantile(scale[part], channels[part], share)
    for part in layers:
        if channels[part].any() and not result[part].any():
            best = np.argmax(np.where(channels[part], scale[part], -1))
            result[part][best] = True
    return result


def expand(spec: ModelSpec, channels: Mask) -> Mask:
    """The mask ``(P,)`` of kept channels ``(K,)``.

    A pruned channel loses its filter and bias, its BatchNorm, and the weights of the next layer that read it.
    That includes the running statistics, because a client without the channel has none to contribute to the
    average. Training does not mask them, and without the scale they have no effect.

    Raises:
        ValueError: if the channels are not those of the network.
    """
    mask, places = np.ones(spec.P, np.bool_), _slices_by_name(spec)
    shapes = dict(zip(spec.names, spec.shapes, strict=True))
    for stage, kept_channels in _channels_by_stage(spec, channels):
        for name, place in places.items():
            if name.rpartition(".")[0] in (stage.conv, stage.norm):
                mask[place].reshape(stage.channels, -1)[~kept_channels] = False
        outputs = shapes[f"{stage.next}.weight"][0]
        # A convolution reads (channels, K, K), a linear layer (channels, height, width), flattened.
        read = mask[places[f"{stage.next}.weight"]].reshape(outputs, stage.channels, -1)
        read[:, ~kept_channels] = False
    return mask


def shrink(spec: ModelSpec, vector: NDArray[np.float32], channels: Mask) -> nn.Sequential:
    """The network without the pruned channels: smaller tensors, the same outputs as the masked one.

    Args:
        spec: the layout of the whole model.
        vector: the model ``(P,)``; the mask of the channels is applied here, other masks before.
        channels: the channels that are kept ``(K,)``, at least one per convolution.

    Returns:
        A chain of the same layers in training mode, with the same names but ``_`` in place of dots.

    Raises:
        ValueError: if the channels are not those of the network, or a convolution keeps none.
    """
    from torch import nn

    full_model = spec.build()
    spec.load(full_model, np.where(expand(spec, channels), vector, np.float32(0)))
    kept_out: dict[str, Mask] = {}
    kept_in: dict[str, Mask] = {}
    for stage, kept_channels in _channels_by_stage(spec, channels):
        if not kept_channels.any():
            raise ValueError(f"{stage.conv} keeps no channel")
        kept_out[stage.conv] = kept_out[stage.norm] = kept_in[stage.next] = kept_channels
    result = nn.Sequential()
    for name, leaf in _chain(full_model):
        smaller = _shrunk_layer(leaf, kept_out.get(name), kept_in.get(name))
        # Names of modules must not contain dots, as those of nested layers do.
        result.add_module(name.replace(".", "_"), smaller)
    return result


def conv_flops(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Floating-point operations of all convolutions for one sample: ``2 K^2 C_in C_out H_out W_out`` each.

    A multiplication and an addition for every weight and output pixel, without the bias, normalisation and
    pooling, as the thesis counts (section 4.4.2). Zeros inside a tensor save nothing.

    Args:
        module: the network; ``shrink`` gives one without its pruned channels.
        shape: of one sample ``(C, H, W)``.
    """
    import torch
    from torch import nn

    total = 0

    def count(conv: nn.Module, inputs: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = cast(torch.Tensor, conv.weight)
        total += 2 * weight[0].numel() * output[0].numel()

    hooks = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Conv2d)]
    training = module.training
    try:
        with torch.no_grad():
            device = next(iter(module.parameters()), torch.zeros(0)).device
            module.eval()(torch.zeros(1, *shape, device=device))
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return total


# Inside --------------------------------------------------------------------------------------------------


def _mask_above_quantile(magnitude: NDArray[np.floating], alive: Mask, share: float) -> Mask:
    """False for ``alive`` entries strictly below the ``share`` quantile of the alive ones, else True."""
    if not 0 <= share < 1:
        raise ValueError(f"a share of {share:g} cannot be pruned; it must lie in [0, 1)")
    count = int(np.count_nonzero(alive))
    if not count:
        return np.ones_like(alive)
    # No value lies between the two around the quantile, so it is enough to compare with one of them. NumPy
    # selects one value in single precision ten times as fast as two, or one in double precision. Entries that
    # are not alive become zeros and come first: a product takes a third of the time of a selection by index.
    # With many zeros the alive ones are selected by index after all, since NumPy takes up to fifty times as
    # long to partition equal values.
    place = (count - 1) * share
    first, n_dead = math.floor(place), len(alive) - count
    if 4 * n_dead > len(alive):
        partitioned, n_dead = magnitude.take(np.flatnonzero(alive)), 0
    else:
        partitioned = np.multiply(magnitude, alive)
    partitioned.partition(n_dead + first)
    lower = float(partitioned[n_dead + first])
    past = place > first and _quantile_exceeds(
        lower, float(partitioned[n_dead + first + 1 :].min()), place - first
    )
    keep = magnitude > np.float32(lower) if past else magnitude >= np.float32(lower)
    keep |= ~alive
    return keep


def _quantile_exceeds(lower: float, upper: float, share: float) -> bool:
    """Whether the point between two values, interpolated as NumPy's quantile does, is above the lower one."""
    gap = upper - lower
    return (lower + gap * share if share < 0.5 else upper - gap * (1 - share)) > lower


def _slices_by_name(spec: ModelSpec) -> dict[str, slice]:
    return dict(zip(spec.names, spec.slices, strict=True))


def _parameters(spec: ModelSpec) -> list[tuple[slice, tuple[int, ...]]]:
    """Place and shape of each parameter; buffers come after them in the vector."""
    pairs = zip(spec.slices, spec.shapes, strict=True)
    return [(place, shape) for place, shape in pairs if place.stop <= spec.n_parameters]


def _chain(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a network in forward order, by their names."""
    from torch import nn

    if type(module) is nn.Sequential:
        prefix = f"{name}." if name else ""
        return [leaf for n, child in module.named_children() for leaf in _chain(child, prefix + n)]
    if any(True for _ in module.children()):
        raise ValueError(f"{name or 'the network'} is not a chain of layers: channels cannot be pruned")
    return [(name, module)]


def _stages(spec: ModelSpec) -> list[_Stage]:
    from torch import nn

    leaves = _chain(spec.outline())
    weighted = [(name, leaf) for name, leaf in leaves if isinstance(leaf, nn.Conv2d | nn.Linear)]
    stages = []
    for (name, conv), (norm_name, norm) in itertools.pairwise(leaves):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and norm.affine:
            later = [n for n, _ in weighted[1 + [n for n, _ in weighted].index(name) :]]
            grouped = [n for n, m in weighted if isinstance(m, nn.Conv2d) and m.groups > 1]
            if not later or name in grouped or later[0] in grouped:
                raise ValueError(f"the channels of {name} cannot be pruned: no plain layer reads them")
            stages.append(_Stage(name, norm_name, later[0], conv.out_channels))
    if not stages:
        raise ValueError(
            f"{spec.model.name_of()} has no convolution with a BatchNorm whose channels to prune"
        )
    return stages


def _channels_by_stage(spec: ModelSpec, channels: Mask) -> list[tuple[_Stage, Mask]]:
    """Each convolution with its own part of the channels ``(K,)``."""
    stages = _stages(spec)
    ends = np.cumsum([stage.channels for stage in stages])
    if channels.shape != (ends[-1],):
        raise ValueError(f"channels: a mask of {ends[-1]} is needed, not one of shape {channels.shape}")
    return list(zip(stages, np.split(channels, ends[:-1]), strict=True))


def _shrunk_layer(leaf: nn.Module, kept_out: Mask | None, kept_in: Mask | None) -> nn.Module:
    """A layer with fewer outputs, inputs, or both; the layer itself if nothing is cut."""
    import torch

    if kept_out is None and kept_in is None:
        return leaf
    state = {name: tensor.clone() for name, tensor in leaf.state_dict().items()}
    if kept_out is not None:
        rows = torch.from_numpy(kept_out)
        state = {name: tensor[rows] if tensor.dim() else tensor for name, tensor in state.items()}
    if kept_in is not None:
        weight = state["weight"]
        read = weight.reshape(len(weight), len(kept_in), -1)[:, torch.from_numpy(kept_in)]
        state["weight"] = (
            read.flatten(1) if weight.dim() == 2 else read.view(len(weight), -1, *weight.shape[2:])
        )
    smaller = _resized_layer(leaf, state["weight"])
    smaller.load_state_dict(state)
    return smaller


def _resized_layer(leaf: nn.Module, weight: torch.Tensor) -> nn.Module:
    """A layer with the settings of ``leaf`` and the sizes of ``weight``."""
    from torch import nn

    if isinstance(leaf, nn.Conv2d):
        return nn.Conv2d(
            weight.shape[1],
            weight.shape[0],
            cast(tuple[int, int], leaf.kernel_size),
            cast(tuple[int, int], leaf.stride),
            cast(tuple[int, int], leaf.padding),
            cast(tuple[int, int], leaf.dilation),
            bias=leaf.bias is not None,
            padding_mode=leaf.padding_mode,
        )
    if isinstance(leaf, nn.Linear):
        return nn.Linear(weight.shape[1], weight.shape[0], bias=leaf.bias is not None)
    assert isinstance(leaf, nn.BatchNorm2d)
    return nn.BatchNorm2d(len(weight), leaf.eps, leaf.momentum, track_running_stats=leaf.track_running_stats)
