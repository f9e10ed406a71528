"""The parameters of C clients side by side, and the SGD step that is fused into their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rayfl.training.batched.linear_kernels import descend
from rayfl.training.device import on_gpu
from rayfl.training.work import LocalWork, Segments

THIN = 32
"""Samples of a product up to which the compiled loop is at least as fast as the library. It has no lower
bound: a short batch is padded to the longest batch in the same call, and for most clients the choice of
kernel must not depend on that."""

_LEAST_WEIGHTS = 4096
"""Number of weights below which the overhead of calling the compiled loop exceeds its gain."""


@dataclass(frozen=True)
class Sgd:
    """``v = m v + g + lambda w + mu (w - w_start) + offset``, ``w -= eta v``, as ``torch.optim.SGD``.

    Attributes:
        lr: eta.
        momentum: m.
        weight_decay: lambda.
        proximal: mu of FedProx.
        inner_lr: alpha of Per-FedAvg: every other gradient only determines the point where the next one is
            taken.
        frozen: the part of the model that stays as it is.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    inner_lr: float = 0.0
    frozen: Segments = ()

    @classmethod
    def of(cls, work: LocalWork) -> Sgd:
        """The step for the work of a round."""
        return cls(
            work.lr, work.momentum, work.weight_decay, work.proximal, work.inner_lr, tuple(work.frozen)
        )


@dataclass
class _Tensors:
    """The tensors that belong to a parameter, each ``(C, *shape)`` (a ``target`` that all share, ``(1,
    *shape)``); None if not needed, at no cost. ``kept`` is the mask in bytes, for the compiled loop."""

    weights: torch.Tensor
    velocity: torch.Tensor | None
    target: torch.Tensor | None
    offset: torch.Tensor | None
    mask: torch.Tensor | None
    kept: torch.Tensor | None
    ahead: torch.Tensor | None

    def narrow(self, clients: int) -> _Tensors:
        return self.each(lambda _, tensor: tensor[:clients])

    def each(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> _Tensors:
        """Apply a function to every tensor that is present, given its name."""
        return _Tensors(
            function("weights", self.weights),
            *(
                None if tensor is None else function(name, tensor)
                for name, tensor in (
                    ("velocity", self.velocity),
                    ("target", self.target),
                    ("offset", self.offset),
                    ("mask", self.mask),
                    ("kept", self.kept),
                    ("ahead", self.ahead),
                )
            ),
        )


class Parameter:
    """One tensor of the model for C clients, ``(C, *shape)``, contiguous so that products write into it.

    Args:
        value: the tensor.
        sgd: the step.
        offset: added to every gradient, ``(C, *shape)``.
        mask: multiplied into the tensor, now and after every step, ``(C, *shape)``; of zeros and ones.
        alike: whether all clients have the same value now.
        frozen: whether it stays as it is; the mask still holds.

    Attributes:
        value: where the next gradient is taken: the weights, or those that Per-FedAvg looks ahead to.
        lr: eta of the coming step.
        looking_ahead: whether the coming gradient is the first of a step of Per-FedAvg.
        frozen: whether it stays as it is: layers then need not compute its gradient.
    """

    def __init__(
        self,
        value: torch.Tensor,
        sgd: Sgd,
        offset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        alike: bool = False,
        frozen: bool = False,
    ) -> None:
        self.frozen = frozen
        if frozen:
            sgd, offset = Sgd(sgd.lr), None
        self._sgd, self.lr, self.looking_ahead = sgd, sgd.lr, False
        if mask is not None:
            value.mul_(mask)
        # lambda w + mu (w - w_start) = (lambda + mu) (w - target). A difference, because the product
        # w (1 - eta mu) would be rounded: by a third of a percent of eta mu if that is 1e-5.
        self._decay = sgd.weight_decay + sgd.proximal
        # One target for all stays in the cache while the clients' weights pass through it.
        start = value[:1] if alike and mask is None and not on_gpu(value) else value
        thin = value.dim() == 3 and value[0].numel() >= _LEAST_WEIGHTS and not on_gpu(value)
        self._all = self._active = _Tensors(
            value,
            velocity=torch.zeros_like(value) if sgd.momentum else None,
            target=start * (sgd.proximal / self._decay) if sgd.proximal else None,
            offset=offset,
            mask=mask,
            kept=mask.to(torch.uint8) if mask is not None and thin else None,
            ahead=torch.empty_like(value) if sgd.inner_lr else None,
        )
        self.value = value

    def move(self, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by the copy that ``copy`` makes of it, given its name."""
        self._all = self._active = self._all.each(copy)
        self.value = self._all.weights

    def narrow(self, clients: int) -> None:
        """Train only the first ``clients`` from now on."""
        self._active = self._all.narrow(clients)
        self.value = self._active.weights

    def prepare(self, lr: float, looking_ahead: bool) -> None:
        """Set a pass's learning rate, and whether the pass is the first of a step of Per-FedAvg.

        After this the pass depends only on the tensors, not on earlier passes.
        """
        self.lr, self.looking_ahead = lr, looking_ahead
        ahead = self._active.ahead
        self.value = self._active.weights if looking_ahead or ahead is None else ahead

    def descend(self, gradient: torch.Tensor) -> None:
        """One SGD step along ``gradient`` ``(C, *shape)``."""
        tensors = self._active
        if self.frozen:
            return
        if self.looking_ahead:
            assert tensors.ahead is not None
            torch.add(tensors.weights, gradient, alpha=-self._sgd.inner_lr, out=tensors.ahead)
            self._apply_mask(tensors.ahead)
        elif tensors.velocity is None:
            shrink = self._shrink()
            if shrink != 1:
                tensors.weights.mul_(shrink)
            tensors.weights.add_(gradient, alpha=-self.lr)
            if tensors.offset is not None:
                tensors.weights.add_(tensors.offset, alpha=-self.lr)
            self._apply_mask(tensors.weights)
        else:
            self._step_along(tensors.velocity.mul_(self._sgd.momentum).add_(gradient))

    def descend_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """One SGD step along the gradient ``left @ right``, which is never formed without momentum.

        Args:
            left: ``(C, m, k)``.
            right: ``(C, k, n)``, for a parameter ``(C, m, n)``.
        """
        tensors = self._active
        if self.frozen:
            return
        if self.looking_ahead:
            assert tensors.ahead is not None
            torch.baddbmm(tensors.weights, left, right, alpha=-self._sgd.inner_lr, out=tensors.ahead)
            self._apply_mask(tensors.ahead)
        elif tensors.velocity is None and _thin(left, right):
            pull = self.lr * self._decay
            keep = 1 - pull if tensors.target is None else 1.0
            _add_product(tensors.weights, left, right, keep, -self.lr, tensors, pull)
        elif tensors.velocity is None:
            tensors.weights.baddbmm_(left, right, beta=self._shrink(), alpha=-self.lr)
            if tensors.offset is not None:
                tensors.weights.add_(tensors.offset, alpha=-self.lr)
            self._apply_mask(tensors.weights)
        elif _thin(left, right):
            _add_product(tensors.velocity, left, right, self._sgd.momentum, 1.0)
            self._step_along(tensors.velocity)
        else:
            self._step_along(tensors.velocity.baddbmm_(left, right, beta=self._sgd.momentum))

    def descend_rows(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """One SGD step along a gradient with few nonzero rows.

        Args:
            rows: the nonzero rows ``(n,)``, counted through all clients: row ``r`` of client ``c`` is
                ``c * m + r``; a row may come several times.
            gradient: ``(n, k)``, for a parameter ``(C, m, k)``.
        """
        tensors = self._active
        if self.frozen:
            return
        if self.looking_ahead or tensors.velocity is not None or on_gpu(rows):
            # On a GPU adding up in place would depend on the order of threads; accumulation does not.
            dense = torch.zeros_like(tensors.weights)
            dense.flatten(0, 1).index_put_((rows,), gradient, accumulate=True)
            self.descend(dense)
            return
        shrink = self._shrink()
        if shrink != 1:
            tensors.weights.mul_(shrink)
        tensors.weights.flatten(0, 1).index_add_(0, rows, gradient, alpha=-self.lr)
        if tensors.offset is not None:
            tensors.weights.add_(tensors.offset, alpha=-self.lr)
        self._apply_mask(tensors.weights)

    def _shrink(self) -> float:
        """Weight decay and the proximal term, before the gradient: move the weights if there is a target.

        Returns:
            The factor by which the caller has to multiply the weights; 1 if they were moved.
        """
        if self._active.target is None:
            return 1 - self.lr * self._decay
        self._active.weights.lerp_(self._active.target, self.lr * self._decay)
        return 1.0

    def _step_along(self, velocity: torch.Tensor) -> None:
        """``velocity`` is ``m v + g`` so far: add the other gradient terms, and take the step."""
        tensors = self._active
        if tensors.target is not None:
            velocity.add_(tensors.weights - tensors.target, alpha=self._decay)
        elif self._decay:
            velocity.add_(tensors.weights, alpha=self._decay)
        if tensors.offset is not None:
            velocity.add_(tensors.offset)
        tensors.weights.add_(velocity, alpha=-self.lr)
        self._apply_mask(tensors.weights)

    def _apply_mask(self, weights: torch.Tensor) -> None:
        """After a step: set masked weights to zero."""
        if self._active.mask is not None:
            weights.mul_(self._active.mask)


def _thin(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the compiled loop takes the product ``(C, m, k) (C, k, n)``."""
    weights = left.shape[1] * right.shape[2]
    return not on_gpu(right) and right.shape[1] <= THIN and weights >= _LEAST_WEIGHTS


def _add_product(
    total: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    keep: float,
    scale: float,
    tensors: _Tensors | None = None,
    pull: float = 0.0,
) -> None:
    """``total`` becomes ``keep total``, pulled towards the target, plus ``scale (left @ right + offset)``,
    then masked.

    Args:
        total: ``(C, m, n)``.
        left: ``(C, m, k)``.
        right: ``(C, k, n)``.
        keep: factor of ``total``.
        scale: factor of what is added.
        tensors: of the parameter, of which target, offset and mask are used; None: none of them.
        pull: how far towards the target, as a fraction of the distance.
    """
    target, offset, mask = (None,) * 3 if tensors is None else (tensors.target, tensors.offset, tensors.kept)
    descend(
        total.numpy(),
        left.transpose(1, 2).contiguous().numpy(),
        right.contiguous().numpy(),
        np.float32(keep),
        np.float32(scale),
        None if target is None else target.numpy(),
        np.float32(pull),
        None if offset is None else offset.numpy(),
        None if mask is None else mask.numpy(),
    )
