"""The base of partitions by super-clusters of classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.heterogeneity.super_clusters import Linkage, Proximity, class_super_clusters
from rayfl.data.partitions._dealing import Owners, apportion, by_owner, check_labels, only_with
from rayfl.errors import ConfigError, DataError


class SuperClusterPartition(Partition):
    """Every client belongs to one super-cluster of classes and has samples of its classes only.

    Vahidian, thesis 5.2.2 and 5.3.1. Super-clusters get clients in proportion to their numbers of samples
    (largest remainder, at least one). The planted group of a client is its super-cluster; clients are
    numbered super-cluster by super-cluster. All samples are used.
    """

    classes_only: ClassVar[bool] = True

    super_clusters: tuple[tuple[int, ...], ...] | None = Field(
        None,
        min_length=1,
        description="the labels of each super-cluster, e.g. [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]]; by default "
        "found in the data",
    )
    n_super_clusters: int | None = Field(None, ge=1, description="number of super-clusters to find")
    threshold: float | None = Field(
        None,
        ge=0,
        description="merge classes up to this angle (degrees); smaller: more super-clusters",
    )
    proximity: Proximity = Field("vector_angle_min", description="the angle between two classes")
    linkage: Linkage = Field("average", description="linkage of the hierarchical clustering of the classes")
    p: int = Field(3, ge=1, description="number of singular vectors per class")
    samples_per_class: int | None = Field(
        1000, ge=1, description="maximum number of samples per class used to find super-clusters; null: all"
    )

    @field_validator("super_clusters")
    @classmethod
    def _labels_once(cls, clusters: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        labels = [label for cluster in clusters or () for label in cluster]
        if clusters is not None and not all(clusters):
            raise ValueError("every super-cluster must have a label")
        if labels and (min(labels) < 0 or len(set(labels)) < len(labels)):
            raise ValueError("labels must be different numbers from 0, each in one super-cluster")
        return clusters

    @model_validator(mode="after")
    def _check_settings(self) -> SuperClusterPartition:
        ways = {
            "super_clusters": self.super_clusters,
            "n_super_clusters": self.n_super_clusters,
            "threshold": self.threshold,
        }
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} are given; one of them says what the super-clusters are"
            )
        for setting in ("proximity", "linkage", "p", "samples_per_class"):
            only_with(
                self,
                setting,
                self.super_clusters is None,
                "super_clusters are given, so none are searched for",
            )
        return self

    def find(self, samples: Samples) -> tuple[tuple[int, ...], ...]:
        """The super-clusters: as given, or found in the data.

        Raises:
            ConfigError: if more are to be found than there are classes.
            DataError: if those given are not super-clusters of these data, or the data have no angles
                between classes.
        """
        if self.super_clusters is not None:
            _check_given(self.super_clusters, samples)
            return self.super_clusters
        try:
            return class_super_clusters(
                samples,
                self.p,
                self.proximity,
                self.linkage,
                self.n_super_clusters,
                self.threshold,
                self.samples_per_class,
            ).clusters
        except ConfigError as error:
            raise ConfigError("partition.n_super_clusters", error.what, error.remedy) from None
        except DataError as error:
            raise DataError(
                f"partition: {error}; state the labels of each in partition.super_clusters"
            ) from None

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        clusters = self.find(samples)
        members = [np.flatnonzero(np.isin(labels, cluster)) for cluster in clusters]
        counts = share_clients(self.clients, [len(cluster_members) for cluster_members in members])
        owners = np.full(len(labels), -1)
        first = 0
        for place, (cluster_members, count) in enumerate(zip(members, counts, strict=True)):
            try:
                owners[cluster_members] = first + self.deal(labels[cluster_members], count, place, seed)
            except DataError as error:
                raise DataError(f"{error} (super-cluster {sorted(clusters[place])})") from None
            first += count
        groups = np.repeat(np.arange(len(clusters)), counts).astype(np.int64)
        return Assignment(by_owner(owners, self.clients), groups)

    def deal(self, labels: NDArray[np.int64], clients: int, place: int, seed: int) -> Owners:
        """Deal the samples of one super-cluster to its clients 0, 1, ...

        Args:
            labels: of the super-cluster's samples ``(n,)``.
            clients: number of its clients.
            place: its index, part of the key of the draws.
            seed: the other part of the key.

        Returns:
            The owner of each sample ``(n,)``.

        Raises:
            DataError: if that is impossible.
        """
        raise NotImplementedError


def share_clients(clients: int, sizes: Sequence[int]) -> list[int]:
    """The number of clients of every super-cluster, in proportion to ``sizes``, but at least one.

    Raises:
        DataError: if there are fewer clients than super-clusters.
    """
    if clients < len(sizes):
        raise DataError(
            f"partition.clients: {clients} clients for {len(sizes)} super-clusters; use {len(sizes)} or more"
        )
    counts: list[int] = apportion(clients, np.array(sizes, np.float64)).tolist()
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] = 1
    return counts


def _check_given(clusters: tuple[tuple[int, ...], ...], samples: Samples) -> None:
    named = {label for cluster in clusters for label in cluster}
    if max(named) >= samples.classes:
        raise DataError(
            f"partition.super_clusters: {max(named)} is not a label of this data; "
            f"labels lie in range({samples.classes})"
        )
    present = set(np.unique(samples.y_train).tolist())
    if named - present:
        raise DataError(
            f"partition.super_clusters: label {min(named - present)} has no training sample; leave it out"
        )
    if present - named:
        raise DataError(
            f"partition.super_clusters: label {min(present - named)} is in none "
            f"({len(present - named)} such labels); every label must be in one"
        )
