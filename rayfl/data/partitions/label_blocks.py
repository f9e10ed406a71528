"""Every client has the labels of one block; labels mean the same for all clients."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._dealing import SizedPartition, check_labels, evenly
from rayfl.data.partitions.tasks import Task, Tasks
from rayfl.errors import DataError


class LabelBlocks(SizedPartition):
    """Label blocks: the labels in order are cut into blocks, and every client has samples of one block.

    With two clients it is the congruent control of CFL (Sattler, Mueller, Samek 2020, section VI-B): one has
    the labels 0-4, the other 5-9. One model serves both, so no cluster should be split: all clients are in
    one planted group, unless ``planted`` is set to ``blocks``. Clients are numbered block by block.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["label_blocks"] = "label_blocks"
    clients: int = Field(2, ge=1, description="number of clients N; they are spread evenly over the blocks")
    blocks: int = Field(2, ge=1, description="number of blocks")
    planted: Literal["one", "blocks"] = Field(
        "one",
        description="one: all clients are one planted group, since one model serves them; blocks: one"
        " group per block",
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        check_labels(samples.y_train, samples.classes, self.clients)
        labels = np.unique(samples.y_train)
        most = min(len(labels), self.clients)
        if self.blocks > most:
            raise DataError(
                f"partition.blocks: {len(labels)} labels and {self.clients} clients do not make "
                f"{self.blocks} blocks; use at most {most}"
            )
        blocks = np.array_split(labels, self.blocks)
        tasks = tuple(
            Task(labels=tuple(block.tolist()), clients=clients, samples=self.samples)
            for block, clients in zip(blocks, evenly(self.clients, self.blocks), strict=True)
        )
        by_block = Tasks(
            tasks=tasks,
            clients=self.clients,
            sizes=self.sizes,
            spread=self.spread,
            min_samples=self.min_samples,
        )
        try:
            assignment = by_block.assign(samples, seed)
        except DataError as error:
            raise DataError(str(error).replace("partition.tasks[", "partition, block [")) from None
        assert assignment.groups is not None
        return Assignment(
            assignment.clients,
            assignment.groups if self.planted == "blocks" else np.zeros_like(assignment.groups),
        )
