"""Planted groups of clients, each with its own labels."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._dealing import Owners, SizedPartition, apportion, by_owner, check_labels
from rayfl.errors import DataError
from rayfl.random import generator
from rayfl.settings import Section


class Task(Section):
    """One group of clients."""

    labels: tuple[int, ...] = Field(min_length=1, description="labels of the task")
    clients: int = Field(ge=1, description="number of clients of the task")
    samples: int | None = Field(
        None,
        ge=1,
        description="mean number of samples per client; default: as many as possible, while the other"
        " tasks' clients get their foreign share (all if foreign is 0)",
    )

    @field_validator("labels")
    @classmethod
    def _labels_once(cls, labels: tuple[int, ...]) -> tuple[int, ...]:
        if min(labels) < 0 or len(set(labels)) < len(labels):
            raise ValueError("labels must be different numbers from 0")
        return labels


class Tasks(SizedPartition):
    """Tasks: groups of clients, each with its own labels and a few samples of other groups' labels.

    MT-HFL (Ali, Arafa 2022, section III): e.g. FMNIST's clothes, shoes and bags for 5, 3 and 2 users of
    2,000, 1,000 and 500 samples, 10 % of them foreign. FLT's scenarios 1, 2 and 4 (Jamali-Rad et al. 2022)
    are groups of equal weight. Tasks may share labels, whose samples are then divided between them in
    proportion to their numbers of clients.

    The planted group of a client is the position of its task in the list. Clients are numbered task by task.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["tasks"] = "tasks"
    tasks: tuple[Task, ...] = Field(min_length=1, description="the tasks: labels, clients, samples")
    foreign: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of each client's samples whose labels belong to other tasks only",
    )

    @model_validator(mode="before")
    @classmethod
    def _count_clients(cls, data: Any) -> Any:
        """If ``clients`` is not given, it is the sum over the tasks."""
        if not isinstance(data, dict) or "clients" in data or not isinstance(data.get("tasks"), list | tuple):
            return data
        counts = [
            task.get("clients") if isinstance(task, dict) else getattr(task, "clients", None)
            for task in data["tasks"]
        ]
        counts = [int(count) if isinstance(count, str) and count.isdecimal() else count for count in counts]
        return {**data, "clients": sum(counts)} if all(isinstance(count, int) for count in counts) else data

    @model_validator(mode="after")
    def _check_clients(self) -> Tasks:
        total = sum(task.clients for task in self.tasks)
        if self.clients != total:
            raise ValueError(
                f"clients is {self.clients}, but the tasks have {total} in total; leave clients out"
            )
        if self.samples is not None:
            raise ValueError(
                "samples: set it for each task: tasks: [{labels: ..., clients: ..., samples: ...}]"
            )
        return self

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels, classes = samples.y_train, samples.classes
        check_labels(labels, classes, self.clients)
        for place, task in enumerate(self.tasks):
            if max(task.labels) >= classes:
                raise DataError(
                    f"partition.tasks[{place}].labels: {max(task.labels)} is not a label of this data; "
                    f"labels lie in range({classes})"
                )
            absent = sorted(set(task.labels) - set(labels[np.isin(labels, task.labels)].tolist()))
            if absent:
                raise DataError(
                    f"partition.tasks[{place}].labels: no training sample has label {absent[0]}; leave it out"
                )
        pools = self._pools(labels, seed)
        owners = np.full(len(labels), -1)
        foreign_sizes: list[NDArray[np.int64]] = []
        first = 0
        for place, (task, pool) in enumerate(zip(self.tasks, pools, strict=True)):
            rng = generator(seed, "partition sizes", place)
            where = f"partition.tasks[{place}]"
            # Without stated sizes, leave twice as many samples as the task's own clients need from others.
            room = len(pool) if task.samples is not None else int(len(pool) / (1 + self.foreign))
            sizes = self.client_sizes(room, task.clients, task.samples, rng, where)
            foreign = np.rint(self.foreign * sizes).astype(np.int64)
            own_sizes = sizes - foreign
            owners[pool[: own_sizes.sum()]] = np.repeat(first + np.arange(task.clients), own_sizes)
            foreign_sizes.append(foreign)
            first += task.clients
        self._deal_foreign(owners, labels, foreign_sizes, seed)
        groups = np.repeat(np.arange(len(self.tasks)), [task.clients for task in self.tasks])
        return Assignment(by_owner(owners, self.clients), groups.astype(np.int64))

    def _pools(self, labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
        """The samples that each task may use, shuffled; disjoint."""
        parts: list[list[NDArray[np.int64]]] = [[] for _ in self.tasks]
        for label in sorted({label for task in self.tasks for label in task.labels}):
            sharing = [place for place, task in enumerate(self.tasks) if label in task.labels]
            members = generator(seed, "partition label", label).permutation(np.flatnonzero(labels == label))
            weights = np.array([self.tasks[place].clients for place in sharing], np.float64)
            ends = np.cumsum(apportion(len(members), weights))
            for place, part in zip(sharing, np.split(members, ends[:-1]), strict=True):
                parts[place].append(part)
        return [
            generator(seed, "partition task", place).permutation(np.concatenate(part))
            for place, part in enumerate(parts)
        ]

    def _deal_foreign(
        self, owners: Owners, labels: NDArray[np.int64], sizes: list[NDArray[np.int64]], seed: int
    ) -> None:
        """Assign foreign samples (``sizes``) to the clients of every task; changes ``owners`` in place.

        Raises:
            DataError: if too few are left.
        """
        firsts = np.cumsum([0, *(len(counts) for counts in sizes)])
        task_labels = {label for task in self.tasks for label in task.labels}
        for place in sorted(range(len(sizes)), key=lambda task: -int(sizes[task].sum())):
            need = int(sizes[place].sum())
            foreign_labels = sorted(task_labels - set(self.tasks[place].labels))
            available = np.flatnonzero((owners < 0) & np.isin(labels, foreign_labels))
            if need > len(available):
                raise DataError(
                    f"partition.foreign: tasks[{place}] needs {need} samples with labels of other tasks, "
                    f"{len(available)} are left; lower foreign or the tasks' samples"
                )
            drawn = generator(seed, "partition foreign", place).permutation(available)[:need]
            owners[drawn] = np.repeat(firsts[place] + np.arange(len(sizes[place])), sizes[place])
