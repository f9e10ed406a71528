"""Data: datasets and partitions by name, and the federation that is built from one of each."""

from __future__ import annotations

from rayfl.data.arrays import fingerprint, read_npz, write_npz
from rayfl.data.base import Assignment, Dataset, Federation, Partition, Ragged, Samples, TestedOn
from rayfl.data.events import Event, Stage, build_stages
from rayfl.data.federation import build_federation, describe
from rayfl.data.objects import dataset_of, partition_of
from rayfl.given import data_root
from rayfl.losses.base import IGNORED
from rayfl.settings import Registry

DATASETS = Registry("dataset", "rayfl.data.datasets", Dataset, dataset_of)
PARTITIONS = Registry("partition", "rayfl.data.partitions", Partition, partition_of)

__all__ = [
    "DATASETS",
    "IGNORED",
    "PARTITIONS",
    "Assignment",
    "Dataset",
    "Event",
    "Federation",
    "Partition",
    "Ragged",
    "Samples",
    "Stage",
    "TestedOn",
    "build_federation",
    "build_stages",
    "data_root",
    "describe",
    "fingerprint",
    "read_npz",
    "write_npz",
]
