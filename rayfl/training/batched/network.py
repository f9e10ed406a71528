"""The models of many clients side by side, and a step of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.data import IGNORED
from rayfl.losses import CrossEntropy, Loss
from rayfl.models import ModelSpec
from rayfl.training.batched import dropout, layers
from rayfl.training.batched.dropout import Draw
from rayfl.training.batched.layers import Step
from rayfl.training.batched.loss_kernel import cross_entropy
from rayfl.training.batched.parameters import Parameter, Sgd
from rayfl.training.batched.reading import Unsupported, read
from rayfl.training.device import on_gpu
from rayfl.training.guides import Guides


class Network:
    """The parameters of many clients side by side; subclasses implement the step.

    Attributes:
        draws: what a step's dropouts draw, in order.
        counts: whether a step needs to know how many samples of a client are not padding.
        guided: whether the loss may use other models.
        parameters, buffers: by their names in the module; valid after :meth:`load`.
    """

    draws: Sequence[Draw] = ()
    counts = False
    guided = False

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._parameter_names = {name for name, _ in spec.outline().named_parameters()}
        self._values: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def load(
        self,
        models: torch.Tensor,
        rows: torch.Tensor,
        sgd: Sgd,
        offset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        guides: Guides | None = None,
    ) -> None:
        """Copy the models of C clients, so that each tensor is contiguous. On a CPU the memory of the last C
        clients is reused: for a large model, new memory costs more than copying.

        Args:
            models: ``(>= C, P)``.
            rows: which of them, ``(C,)``.
            sgd: the step.
            offset: added to the gradients, shaped as ``models``; entries of buffers are ignored.
            mask: 0 where a weight is held at zero, of the same shape.
            guides: of these C clients.

        Raises:
            Unsupported: for guides, if the network does not support losses that use other models.
        """
        if guides is not None and not self.guided:
            raise Unsupported("its kernels have no losses that look at other models")
        names = self._parameter_names
        self._values = self._gather_tensors(models, rows, into=self._values)
        offsets = self._gather_tensors(offset, rows, names) if offset is not None else {}
        masks = self._gather_tensors(mask, rows, names) if mask is not None else {}
        alike, frozen = models.stride(0) == 0, self.spec.frozen(sgd.frozen)
        self.parameters = {
            n: Parameter(value, sgd, offsets.get(n), masks.get(n), alike, n in frozen)
            for n, value in self._values.items()
            if n in names
        }
        self.buffers = {n: value for n, value in self._values.items() if n not in names}

    def move(self, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by the copy that ``copy`` makes of it, given a unique name."""
        for name, parameter in self.parameters.items():
            parameter.move(partial(_copy_named, copy, name))
            self._values[name] = parameter.value
        for name, buffer in self.buffers.items():
            self.buffers[name] = self._values[name] = copy(f"buffer {name}", buffer)

    def release(self) -> None:
        """Free the memory of the models and of the last step's intermediate results."""
        self._values, self.parameters, self.buffers = {}, {}, {}

    def _gather_tensors(
        self,
        vectors: torch.Tensor,
        rows: torch.Tensor,
        names: Collection[str] | None = None,
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Copy the tensors (only those in ``names``) of some rows of flat vectors, ``(C, *shape)`` each; the
        memory of the tensors ``into`` is reused where they fit."""
        tensors = {}
        for name, shape, place in zip(self.spec.names, self.spec.shapes, self.spec.slices, strict=True):
            if names is None or name in names:
                old = into.get(name)
                fits = old is not None and len(old) == len(rows) and not on_gpu(vectors)
                out = old.view(len(rows), -1) if old is not None and fits else None
                tensors[name] = torch.index_select(vectors[:, place], 0, rows, out=out).view(
                    len(rows), *shape
                )
        return tensors

    def prepare(self, lr: float, looking_ahead: bool) -> None:
        """Set a pass's learning rate, and whether the pass is the first of a step of Per-FedAvg."""
        for parameter in self.parameters.values():
            parameter.prepare(lr, looking_ahead)

    def narrow(self, clients: int) -> None:
        """Train only the first ``clients`` from now on."""
        for parameter in self.parameters.values():
            parameter.narrow(clients)

    def store(
        self, models: torch.Tensor, rows: torch.Tensor | None = None, which: torch.Tensor | None = None
    ) -> None:
        """Put the models back where :meth:`load` took them.

        Args:
            models: ``(>= C, P)``, written.
            rows: rows of ``models`` to write, ``(C,)``; None: ``models`` has C rows, in order.
            which: positions of the clients to store, ``(c,)``, if not all C; then ``rows`` is ``(c,)``.
        """
        for name, place in zip(self.spec.names, self.spec.slices, strict=True):
            values = self._values[name].flatten(1)
            if rows is None:
                models[:, place].copy_(values)
            else:
                models[:, place].index_copy_(0, rows, values if which is None else values[which])

    def factors(self, x: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        """What the step's dropouts multiply by, ``(C, B, *shape)`` each, for samples ``x`` ``(C, B, ...)``:
        drawn beforehand, or now.
        """
        if step.factors is not None:
            return step.factors
        factors = [torch.empty((*x.shape[:2], *draw.shape), device=x.device) for draw in self.draws]
        dropout.fill(factors, self.draws, step)
        return factors

    def lengths(self) -> NDArray[np.float64]:
        """Euclidean norm of each client's model including buffers, ``(C,)``; NaN if a number is NaN."""
        norms = torch.stack([torch.linalg.vector_norm(v.flatten(1), dim=1) for v in self._values.values()])
        lengths: NDArray[np.float64] = torch.linalg.vector_norm(norms.double(), dim=0).cpu().numpy()
        return lengths

    def step(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, step: Step) -> torch.Tensor:
        """One SGD step of every client.

        Args:
            x: samples ``(C, B, ...)``.
            y: targets ``(C, B)``, or of every word ``(C, B, L)``.
            weights: weight of each sample in its client's loss ``(C, B)``: ``1 / b`` for the b samples of
                the batch, 0 for padding.
            step: what layers need to know about it.

        Returns:
            The clients' losses before the step, ``(C,)``.
        """
        raise NotImplementedError


class BatchedNetwork(Network):
    """Batched layers read from the network's forward pass, with hand-written backward passes.

    Attributes:
        reading: the layers.

    Raises:
        Unsupported: if something that it computes has no batched counterpart.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.reading = read(spec)
        self.draws = [
            Draw(leaf.shape, leaf.p, tuple(range(1 + len(leaf.shape)))) for leaf in self._dropouts()
        ]
        self.counts = any(isinstance(leaf.layer, layers.BatchNorm) for leaf in self.reading.leaves)

    def _dropouts(self) -> list[layers.Dropout]:
        """Those that draw, in the order of the plain loop."""
        leaves = (leaf.layer for leaf in self.reading.leaves)
        return [leaf for leaf in leaves if isinstance(leaf, layers.Dropout) and leaf.p < 1]

    @override
    def load(
        self,
        models: torch.Tensor,
        rows: torch.Tensor,
        sgd: Sgd,
        offset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        guides: Guides | None = None,
    ) -> None:
        super().load(models, rows, sgd, offset, mask, guides)
        self._bind()

    @override
    def move(self, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().move(copy)
        self._bind()

    @override
    def release(self) -> None:
        super().release()
        self.reading = read(self.spec)  # layers keep what their backward passes need

    @property
    def root(self) -> layers.Chain:
        """All layers."""
        return self.reading.root

    def _bind(self) -> None:
        for leaf in self.reading.leaves:
            names, parameters, buffers = leaf.names.items(), self.parameters, self.buffers
            leaf.layer.bind(
                {role: parameters[name] for role, name in names if name in parameters},
                {role: buffers[name] for role, name in names if name in buffers},
            )
        self.root.settle()

    @override
    def step(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, step: Step) -> torch.Tensor:
        if self.draws:
            for layer, factors in zip(self._dropouts(), self.factors(x, step), strict=True):
                layer.factors = factors
        logits = self.root.forward(x, step)
        loss, delta = loss_of(self.spec.loss, logits, *predictions(y, weights))
        self.root.backward(delta, False)
        return loss


def loss_of(
    loss: Loss, outputs: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted loss of each client ``(C,)``, and its gradient ``(C, B, K)``: by autograd, or by hand.

    Args:
        loss: what the clients minimise.
        outputs: ``(C, B, K)``.
        y: targets ``(C, B, ...)``.
        weights: of the predictions ``(C, B)``; 0 for padding.
    """
    if type(loss) in _BY_HAND:
        return _BY_HAND[type(loss)](loss, outputs, y, weights)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        sample_losses = loss.each(leaf.flatten(0, 1), y.flatten(0, 1)).view(weights.shape)
        losses = (sample_losses * weights).sum(1)
        (delta,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), delta


def _smoothed_cross_entropy(
    loss: CrossEntropy, logits: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a cross-entropy: linear in the target distribution, so smoothing is a separate
    term."""
    losses, delta = _plain_cross_entropy(logits, y, weights)
    if loss.label_smoothing:
        labels, shares = y.unsqueeze(2), loss.label_smoothing * weights
        gaps = logits.gather(2, labels).squeeze(2) - logits.mean(2)
        losses = losses + (gaps * shares).sum(1)
        delta.sub_((shares / logits.shape[2]).unsqueeze(2))
        delta.scatter_add_(2, labels, shares.unsqueeze(2))
    return losses, delta


_BY_HAND: dict[type[Loss], Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    CrossEntropy: _smoothed_cross_entropy
}
"""Losses with a hand-written gradient, which is faster than autograd and equal to it."""


def _plain_cross_entropy(
    logits: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted cross-entropy of each client ``(C,)``, and its gradient ``(C, B, K)``."""
    if not on_gpu(logits):
        loss, delta = logits.new_empty(len(logits)), torch.empty(logits.shape)
        inputs = logits.contiguous(), y.contiguous(), weights.contiguous()
        cross_entropy(*(tensor.numpy() for tensor in (*inputs, loss, delta)))
        return loss, delta
    delta, labels = torch.log_softmax(logits, 2), y.unsqueeze(2)
    loss = -(delta.gather(2, labels).squeeze(2) * weights).sum(1)
    # The gradient of the loss with respect to the logits: (softmax - one-hot) * weight.
    delta.exp_()
    delta.scatter_add_(2, labels, delta.new_full((), -1.0).expand(labels.shape))
    return loss, delta.mul_(weights.unsqueeze(2))


def predictions(y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and weights of all predictions of a step.

    A text has one prediction for each word; all words of the batch with a target have the same weight, as in
    PyTorch's cross-entropy. If no word has a target, all weights are 0: such a batch changes nothing.

    Args:
        y: ``(C, B)``; words ``(C, B, L)`` with :data:`IGNORED` where nothing is to be predicted; or numbers
            ``(C, B, K)``, one prediction per sample.
        weights: of the samples ``(C, B)``; 0 for padding.

    Returns:
        Targets and weights ``(C, B)`` or ``(C, B * L)``.
    """
    if y.dim() == 2 or y.is_floating_point():
        return y, weights
    counted = (y != IGNORED) & (weights > 0).unsqueeze(2)
    shares = counted / counted.sum((1, 2), keepdim=True).clamp_min(1)
    return y.clamp_min(0).flatten(1), shares.flatten(1)


def _copy_named(
    copy: Callable[[str, torch.Tensor], torch.Tensor], name: str, kind: str, tensor: torch.Tensor
) -> torch.Tensor:
    return copy(f"{kind} of {name}", tensor)
