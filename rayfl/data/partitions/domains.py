"""Every client has data of one source."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._dealing import (
    Draws,
    SizedPartition,
    by_owner,
    check_labels,
    dirichlet_owners,
    evenly,
    only_with,
)
from rayfl.errors import DataError
from rayfl.random import generator


class Domains(SizedPartition):
    """Domains: every client has samples of one source of the data, IID or Dirichlet within it.

    For data with domains: synthetic tasks, mixes of datasets (MIX-4 of PACFL, Vahidian et al. 2023). The
    planted group of a client is its domain. Clients are numbered domain by domain.
    """

    name: Literal["domains"] = "domains"
    clients_per_domain: tuple[int, ...] | None = Field(
        None, min_length=1, description="number of clients of every domain; by default spread evenly"
    )
    labels: Literal["iid", "dirichlet"] = Field("iid", description="how labels are divided within a domain")
    alpha: float = Field(0.5, gt=0, le=1e6, description="concentration of the Dirichlet distribution")
    attempts: int = Field(50, ge=1, le=10_000, description="maximum number of Dirichlet draws")

    @override
    def needs_classes(self) -> bool:
        return self.labels != "iid"

    @model_validator(mode="before")
    @classmethod
    def _count_clients(cls, data: Any) -> Any:
        """If only ``clients_per_domain`` is given, ``clients`` is the sum."""
        if not isinstance(data, dict) or "clients" in data:
            return data
        counts = data.get("clients_per_domain")
        if not isinstance(counts, list | tuple) or not all(isinstance(count, int) for count in counts):
            return data
        return {**data, "clients": sum(counts)}

    @model_validator(mode="after")
    def _check_settings(self) -> Domains:
        counts = self.clients_per_domain
        if counts is not None and (min(counts) < 1 or sum(counts) != self.clients):
            raise ValueError(
                f"clients_per_domain must be numbers from 1 that add up to clients={self.clients}"
            )
        if self.labels == "dirichlet" and self.sizes != "equal":
            raise ValueError("labels=dirichlet decides the sizes of the clients itself; leave sizes out")
        for setting in ("alpha", "attempts"):
            only_with(self, setting, self.labels == "dirichlet", "it is used with labels=dirichlet")
        return self

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels, domains = samples.y_train, samples.domain_train
        check_labels(labels, samples.classes, self.clients)
        if domains is None:
            raise DataError(
                "partition: domains needs data with domains (data.name=synthetic, or an npz with "
                "domain_train and domain_test)"
            )
        sources = np.unique(domains)
        counts = self._client_counts(len(sources))
        owners = np.full(len(labels), -1)
        first = 0
        for source, clients in zip(sources.tolist(), counts, strict=True):
            rng = generator(seed, "partition domain", source)
            members = rng.permutation(np.flatnonzero(domains == source))
            where = f"partition, domain {source}"
            sizes = self.client_sizes(len(members), clients, self.samples, rng, where)
            members = members[: sizes.sum()]
            if self.labels == "iid":
                owners[members] = first + np.repeat(np.arange(clients), sizes)
            else:
                draws = Draws(self.alpha, self.min_samples, self.attempts)
                owners[members] = first + dirichlet_owners(labels[members], clients, draws, seed, source)
            first += clients
        return Assignment(by_owner(owners, self.clients), np.repeat(sources, counts).astype(np.int64))

    def _client_counts(self, sources: int) -> list[int]:
        """The number of clients of every domain."""
        if self.clients < sources:
            raise DataError(
                f"partition.clients: {self.clients} clients for {sources} domains; use {sources} or more"
            )
        if self.clients_per_domain is None:
            return evenly(self.clients, sources)
        if len(self.clients_per_domain) != sources:
            raise DataError(
                f"partition.clients_per_domain: {len(self.clients_per_domain)} numbers for "
                f"{sources} domains; give {sources}"
            )
        return list(self.clients_per_domain)
