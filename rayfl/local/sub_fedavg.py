"""Sub-FedAvg: every client prunes its own subnetwork, and averages with the clients that kept the same
weights.

Vahidian, Morafah, Lin, ICDCSW 2021; thesis chapter 4, Algorithms 10 (Un) and 11 (Hy).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.errors import ConfigError
from rayfl.local.base import LocalObjective, Outcome, Start
from rayfl.local.pruning import (
    Mask,
    Rule,
    distance,
    emptied,
    expand,
    gammas,
    next_share,
    prunable,
    pruned,
    structured,
    unstructured,
)
from rayfl.models import ModelSpec
from rayfl.training import LocalWork, TrainedBlock, Training

if TYPE_CHECKING:
    import torch

_DEAD_LAYER_REMARK = "lost its last weight to pruning and gives the same output for every input; a lower \
local.target, or local.per_layer=true, avoids that"


class SubFedAvg(LocalObjective):
    """SGD on a masked model; after a round a client may prune more of its weights.

    After E epochs a client has two candidate masks, one from the model after the first epoch and one from the
    model after the last: each prunes the lowest ``step`` of the surviving weights by magnitude. If validation
    accuracy is at least ``accuracy`` (Acc_th), the ``target`` is not reached, and the two candidates differ
    by ``distance`` or more (Hamming), the client applies the last one. The server averages each parameter
    over the clients that kept it; a parameter that no client kept stays as it is.

    *Unstructured* (Un) prunes the weights of all layers. *Hybrid* (Hy) prunes channels by the scale |gamma|
    of their BatchNorm, and the weights of the linear layers; the two are decided independently.

    Clients download the whole model and apply their mask. They send the parameters that they kept, 32 bits
    each, and the mask, 1 bit for every weight or channel that could have been pruned. (The costs of Table
    4.1 are counted in this way, except that there only each pruned weight costs a bit.)

    One threshold for all layers may leave a layer without any weight; the run reports this when it happens.

    Decisions. Validation accuracy is that of the trained model, as in the text (the authors' code takes test
    accuracy after pruning). All clients have equal weight unless ``average: samples`` is set. The tested
    model is the one that the client trained last, as in the authors' code; the thesis' figures cannot be
    reached otherwise. ``tested: server`` tests the server's model under the mask.
    """

    classes_only: ClassVar[bool] = True
    facts: ClassVar[tuple[str, ...]] = ("pruned_weights", "pruned_channels")

    name: Literal["sub_fedavg"] = "sub_fedavg"
    pruning: Literal["unstructured", "hybrid"] = Field(
        "unstructured", description="all weights (Un), or channels and the weights of linear layers (Hy)"
    )
    target: float = Field(
        0.5, ge=0, lt=1, description="p_us: share of the weights pruned in the end (hybrid: of linear layers)"
    )
    step: float = Field(0.1, gt=0, lt=1, description="r_us: share of the surviving weights pruned in a round")
    distance: float = Field(
        1e-4, ge=0, le=1, description="epsilon_us: minimum distance of two masks of weights"
    )
    channel_target: float = Field(
        0.5, ge=0, lt=1, description="p_s: share of the channels pruned in the end (hybrid)"
    )
    channel_step: float = Field(
        0.1, gt=0, lt=1, description="r_s: share of the surviving channels pruned in a round (hybrid)"
    )
    channel_distance: float = Field(
        0.05, ge=0, le=1, description="epsilon_s: minimum distance of two masks of channels (hybrid)"
    )
    accuracy: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Acc_th: minimum validation accuracy for pruning; 0 needs no validation data",
    )
    per_layer: bool = Field(
        False,
        description="rank weights or channels within each layer (authors' code) rather than over all layers",
    )
    average: Literal["clients", "samples"] = Field(
        "clients", description="clients: all clients have the same weight in the average; samples: weight n_i"
    )
    tested: Literal["own", "server"] = Field(
        "own",
        description="own: test the model that a client last trained; server: the server's model under"
        " its mask",
    )

    personal: ClassVar[bool] = True
    masks: ClassVar[bool] = True

    def check(self, spec: ModelSpec, training: Training, validation: float) -> None:
        """Refuse networks without channels to prune, and settings with which nothing would be pruned."""
        if self.pruning == "hybrid":
            try:
                gammas(spec, np.ones(spec.P))
            except ValueError as error:
                remedy = "pruning=unstructured takes every network; lenet5 has model.batch_norm=true"
                raise ConfigError("local.pruning", str(error), remedy) from None
        if self.accuracy and not validation:
            what = "Sub-FedAvg prunes by validation accuracy, and clients have no validation data"
            raise ConfigError(
                "partition.validation", what, "set a share such as 0.1, or local.accuracy=0 to prune anyway"
            )
        distances = {"distance": ("weights", self.distance)}
        if self.pruning == "hybrid":
            distances["channel_distance"] = ("channels", self.channel_distance)
        for setting, (kind, least) in distances.items():
            if training.epochs == 1 and least:
                what = f"with one epoch Sub-FedAvg's two candidate masks are equal: no {kind} are ever pruned"
                raise ConfigError("training.epochs", what, f"use at least 2, or set local.{setting}=0")

    def work(self, work: LocalWork) -> LocalWork:
        """The models after the first epoch are kept."""
        return replace(work, snapshot_epoch=1)

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Weight 1 for each client, or n_i."""
        return (np.ones(len(sizes)) if self.average == "clients" else sizes.astype(np.float64)), None

    def state_size(self, spec: ModelSpec) -> int:
        """The mask; then the client's own model, if that is what is tested."""
        return 2 * spec.P if self.tested == "own" else spec.P

    def held(self, state: torch.Tensor, fresh: NDArray[np.bool_], spec: ModelSpec) -> torch.Tensor | None:
        """The masks ``(B, P)``: all ones for clients that never took part. They are a part of the state."""
        mask = state[:, : spec.P]
        for row in np.flatnonzero(fresh).tolist():
            mask[row] = 1.0
        return mask

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Prune the clients that are good enough (Algorithm 10); they send what they keep."""
        import torch

        spec, first_models = start.spec, block.snapshots
        mask = self.held(start.state, start.fresh, spec)
        assert mask is not None
        assert first_models is not None
        remarks: dict[str, list[int]] = {}
        for row in range(len(mask)):
            if row not in block.failures:
                accuracy = start.test(block.rows[row], row) if self.accuracy else 0.0
                models = first_models[row].cpu().numpy(), block.rows[row].cpu().numpy()
                old = mask[row].cpu().numpy() > 0
                new = self.next_mask(spec, *models, old, accuracy)
                mask[row] = torch.from_numpy(new).to(mask)
                for layer in emptied(spec, old, new):
                    remarks.setdefault(f"{layer} {_DEAD_LAYER_REMARK}", []).append(row)
        state = start.state  # contains the new masks; a separate copy would be read from memory again
        own_models = state[:, spec.P :] if self.tested == "own" else torch.empty_like(block.rows)
        rows = torch.mul(block.rows, mask, out=own_models)
        bytes_up = 4 * mask.sum(dim=1).cpu().numpy().astype(np.int64) + math.ceil(self._mask_bits(spec) / 8)
        bytes_down = np.full(len(mask), spec.nbytes, np.int64)
        return Outcome(
            rows, state, start.server, kept=mask, bytes_up=bytes_up, bytes_down=bytes_down, remarks=remarks
        )

    def next_mask(
        self,
        spec: ModelSpec,
        first: NDArray[np.float32],
        last: NDArray[np.float32],
        mask: Mask,
        accuracy: float,
    ) -> Mask:
        """A client's mask after a round ``(P,)``.

        Args:
            spec: the model's layout.
            first, last: the models after the first and after the last epoch ``(P,)``.
            mask: the mask under which they were trained ``(P,)``.
            accuracy: validation accuracy of ``last`` in [0, 1]; NaN if the client has no validation data:
                then nothing is pruned.
        """
        hybrid = self.pruning == "hybrid"
        if hybrid:
            channels = gammas(spec, mask).astype(np.bool_)
            pruned_share = pruned(channels, np.ones_like(channels))
            share = next_share(pruned_share, self.channel_target, self.channel_step)
            early, late = (structured(spec, m, channels, share, self.per_layer) for m in (first, last))
            rule = Rule(self.accuracy, self.channel_target, self.channel_distance)
            if rule.allows(accuracy, pruned_share, distance(early, late)):
                mask = mask & expand(spec, late)
        # Weights pruned with the channels count towards the target of the linear layers, too.
        prunable_mask = prunable(spec, fully_connected=hybrid)
        pruned_share = pruned(mask, prunable_mask)
        share = next_share(pruned_share, self.target, self.step)
        early, late = (unstructured(spec, m, mask, share, hybrid, self.per_layer) for m in (first, last))
        rule = Rule(self.accuracy, self.target, self.distance)
        return late if rule.allows(accuracy, pruned_share, distance(early, late, prunable_mask)) else mask

    def _mask_bits(self, spec: ModelSpec) -> int:
        """Bits of a mask: one for each weight, or channel, that could have been pruned."""
        if self.pruning == "unstructured":
            return int(prunable(spec).sum())
        return int(prunable(spec, fully_connected=True).sum()) + len(gammas(spec, np.ones(spec.P)))

    def client_model(self, model: torch.Tensor, state: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
        """The model that the client last trained and pruned, or the server's under the client's mask."""
        return state[spec.P :] if self.tested == "own" else model * state

    def client_facts(self, states: NDArray[np.float32], spec: ModelSpec) -> dict[str, NDArray[np.float64]]:
        """Percent of the weights of convolutions and linear layers that are pruned; of the channels too."""
        masks = states[:, : spec.P] > 0
        prunable_mask = prunable(spec)
        facts = {"pruned_weights": np.array([100 * pruned(mask, prunable_mask) for mask in masks])}
        if self.pruning == "hybrid":
            channel_masks = [gammas(spec, mask).astype(np.bool_) for mask in masks]
            facts["pruned_channels"] = np.array(
                [100 * pruned(channels, np.ones_like(channels)) for channels in channel_masks]
            )
        return facts
