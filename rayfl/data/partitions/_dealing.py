"""Functions that assign samples to clients: owner arrays, client sizes, Dirichlet proportions.

A partition determines the *owner* of each sample ``(n,)``: a client, or -1 for none. So no sample can be
assigned twice.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rayfl.data.base import Partition, Ragged
from rayfl.errors import DataError
from rayfl.random import generator

Owners = NDArray[np.int64]


def by_owner(owners: Owners, clients: int) -> Ragged:
    """The samples of each client, ascending.

    Raises:
        DataError: if a client has none.
    """
    sizes = np.bincount(owners[owners >= 0], minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DataError(
            f"partition: {len(empty)} of {clients} clients (the first is {empty[0]}) would have no sample; "
            "use fewer clients"
        )
    dealt = np.flatnonzero(owners >= 0)
    keys = (owners[dealt] << 32) | dealt
    keys.sort()
    keys &= (1 << 32) - 1
    return Ragged(keys.astype(np.int32), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def check_labels(labels: NDArray[np.int64], classes: int, clients: int) -> None:
    """Refuse labels that no partition can divide.

    Raises:
        DataError: if there are fewer samples than clients, or a label outside ``range(classes)``.
    """
    if len(labels) < clients:
        raise DataError(f"partition.clients: {clients} clients for {len(labels)} training samples; use fewer")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"partition: the labels run from {labels.min()} to {labels.max()}; "
            f"they must lie in range({classes})"
        )


def only_with(partition: Partition, setting: str, used: bool, remedy: str) -> None:
    """Refuse a setting that was changed but is not used.

    Raises:
        ValueError: for pydantic, which reports it as an error of the config.
    """
    if not used and getattr(partition, setting) != type(partition).model_fields[setting].default:
        raise ValueError(f"{setting} {getattr(partition, setting)} would change nothing; {remedy}")


def evenly(total: int, parts: int) -> list[int]:
    """Divide ``total`` into ``parts`` integers that differ by at most one, the larger ones first."""
    return [total // parts + (place < total % parts) for place in range(parts)]


class SizedPartition(Partition):
    """A partition whose clients may have different numbers of samples."""

    samples: int | None = Field(
        None, ge=1, description="mean number of samples per client; default: all samples are used"
    )
    sizes: Literal["equal", "lognormal", "power"] = Field(
        "equal", description="distribution of the number of samples over clients"
    )
    spread: float = Field(
        1.0, ge=0, le=10, description="lognormal: standard deviation of the logarithm; power: exponent delta"
    )
    min_samples: int = Field(1, ge=1, description="minimum number of samples per client")

    @model_validator(mode="after")
    def _spread_of_sizes(self) -> SizedPartition:
        only_with(self, "spread", self.sizes != "equal", "it is used with sizes=lognormal or power")
        return self

    def client_sizes(
        self, available: int, clients: int, samples: int | None, rng: np.random.Generator, where: str
    ) -> NDArray[np.int64]:
        """The number of samples of each client, ``(clients,)``.

        Args:
            available: number of samples.
            clients: number of clients that share them.
            samples: mean number of samples per client; None: all samples are used.
            rng: draws the lognormal sizes.
            where: the setting, for errors.

        Raises:
            DataError: if there are too few samples.
        """
        least = self.min_samples
        mean_size = least if samples is None else samples
        if mean_size < least:
            raise DataError(
                f"{where}: a mean of {mean_size} samples is below min_samples={least}; raise it to {least}"
            )
        if mean_size * clients > available:
            raise DataError(
                f"{where}: {clients} clients with {mean_size} samples each need {mean_size * clients}, "
                f"there are {available}; use fewer clients or samples"
            )
        total = available if samples is None else samples * clients
        rest = total - clients * least
        return least + apportion(rest, client_weights(rest, clients, self.sizes, self.spread, rng))


def client_weights(
    total: int, clients: int, sizes: str, spread: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Weights by which the clients share ``total`` samples, ``(clients,)``.

    - ``equal``: 1;
    - ``lognormal``: ``exp(spread * z)``, z standard normal;
    - ``power``: ``exp(beta m^spread)`` for the m-th client, ``beta`` such that their sum is ``total``
      (FLT, Jamali-Rad et al. 2022, Algorithm 4, where ``spread`` is delta and ``min_samples`` alpha).
    """
    if sizes == "lognormal":
        weights: NDArray[np.float64] = np.exp(spread * rng.standard_normal(clients))
        return weights
    if sizes == "power" and total > 0:
        ranks = np.arange(1, clients + 1, dtype=np.float64) ** spread
        ranks /= ranks[-1]
        low, high = -1e6, np.log(total)  # at `high` the last client alone takes everything
        for _ in range(200):
            beta = (low + high) / 2
            low, high = (beta, high) if np.exp(beta * ranks).sum() < total else (low, beta)
        weights = np.exp(high * ranks)
        return weights
    return np.ones(clients)


def apportion(total: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights`` with sum ``total``, by largest remainder."""
    quotas = weights * (total / weights.sum())
    counts: NDArray[np.int64] = np.floor(quotas).astype(np.int64)
    remaining = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:remaining]] += 1
    return counts


def shard_owners(
    labels: NDArray[np.int64],
    clients: int,
    shards_per_client: int,
    rng: np.random.Generator,
    size: int | None = None,
) -> Owners:
    """Sort by label, cut into shards, give each client the same number.

    McMahan et al. 2017, section 3.

    Args:
        labels: of all samples ``(n,)``.
        clients: number of them.
        shards_per_client: number of shards of each.
        rng: draws the order of equal labels, and whose the shards are.
        size: of a shard; shards that are left, and the last samples, are nobody's. None: as large as they can
            be, and if samples cannot be cut evenly, the first shards have one more.

    Raises:
        DataError: if there are more shards than samples.
    """
    shards = clients * shards_per_client
    needed = shards * (size or 1)
    if needed > len(labels):
        of_size, or_smaller = (f" of {size}", " or a smaller shard_size") if size else ("", "")
        raise DataError(
            f"partition: {clients} clients with {shards_per_client} shards{of_size} need {needed} "
            f"samples, there are {len(labels)}; use fewer clients or shards_per_client{or_smaller}"
        )
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if size is None:
        sizes = len(labels) // shards + (np.arange(shards) < len(labels) % shards)
    else:
        sizes = np.full(len(labels) // size, size)
    owner_of_shard = rng.permutation(len(sizes)) // shards_per_client
    owner_of_shard[owner_of_shard >= clients] = -1
    owners = np.full(len(labels), -1)
    owners[by_label[: sizes.sum()]] = np.repeat(owner_of_shard, sizes)
    return owners


def label_skew_owners(labels: NDArray[np.int64], clients: int, each: int, rng: np.random.Generator) -> Owners:
    """Every client has ``each`` random labels; the samples of a label are divided evenly among its clients.

    Raises:
        DataError: if a label has fewer samples than owners.
    """
    present = np.unique(labels)
    has_label = draw_labels(clients, len(present), min(each, len(present)), rng)
    owners = np.full(len(labels), -1)
    for place, label in enumerate(present):
        holders = np.flatnonzero(has_label[:, place])
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(holders) > len(members):
            raise DataError(
                f"partition: label {label} has {len(members)} samples for {len(holders)} clients; "
                "use fewer clients or a smaller rho"
            )
        if len(holders):
            owners[members] = rng.permutation(holders)[np.arange(len(members)) % len(holders)]
    return owners


def draw_labels(clients: int, labels: int, each: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw which labels each client has, ``(clients, labels)``, ``each`` in every row.

    The labels are random, except that a few random clients divide a permutation of all labels among them, so
    that every label is used if ``clients * each >= labels``.
    """
    chosen = np.argsort(rng.random((clients, labels)), axis=1)[:, :each]
    sharing = rng.permutation(clients)[: -(-labels // each)]
    shared = np.arange(len(sharing) * each).reshape(len(sharing), each) % labels
    chosen[sharing] = rng.permutation(labels)[shared]
    has_label = np.zeros((clients, labels), bool)
    np.put_along_axis(has_label, chosen, True, axis=1)
    return has_label


class Draws(NamedTuple):
    """How Dirichlet proportions are drawn.

    Attributes:
        alpha: concentration; small is skewed.
        min_samples: draws in which a client has fewer samples are rejected.
        attempts: maximum number of draws.
        capped: a client that has its fair share ``n / clients`` gets nothing of the remaining classes (as in
            NIID-Bench's code).
    """

    alpha: float
    min_samples: int
    attempts: int
    capped: bool = False


def dirichlet_owners(
    labels: NDArray[np.int64], clients: int, draws: Draws, seed: int, group: int = 0
) -> Owners:
    """Deal every class in proportions drawn from ``Dir(alpha)`` over the clients.

    Hsu, Qi, Brown 2019 (arXiv:1909.06335); Li et al. 2022, NIID-Bench, ``p_k ~ Dir(beta)``.

    Args:
        labels: ``(n,)``; all samples are dealt.
        clients: number of clients.
        draws: their distribution, and how many there may be.
        seed, group: the key of the draws.

    Raises:
        DataError: if no draw was accepted; the message suggests settings that would work.
    """
    alpha, min_samples, attempts, capped = draws
    if len(labels) < clients * min_samples:
        raise DataError(
            f"partition.min_samples: {clients} clients with {min_samples} samples each need "
            f"{clients * min_samples}, there are {len(labels)}; use fewer clients or a smaller min_samples"
        )
    best = 0
    for attempt in range(attempts):
        owners = _draw_dirichlet(labels, clients, alpha, capped, generator(seed, "partition", group, attempt))
        fewest = int(np.bincount(owners, minlength=clients).min())
        if fewest >= min_samples:
            return owners
        best = max(best, fewest)

    remedies = [f"min_samples={best}"] if best else []
    for doubling in range(1, 13):
        rng = generator(seed, "partition", group, attempts + doubling)
        owners = _draw_dirichlet(labels, clients, alpha * 2**doubling, capped, rng)
        if np.bincount(owners, minlength=clients).min() >= min_samples:
            remedies.append(f"alpha={alpha * 2**doubling:g}")
            break
    raise DataError(
        f"partition.alpha: in {attempts} draws of Dir({alpha:g}) over {clients} clients the smallest client "
        f"had at most {best} samples, not {min_samples}; {' or '.join(remedies) or 'fewer clients'} would do"
    )


def _draw_dirichlet(
    labels: NDArray[np.int64], clients: int, alpha: float, capped: bool, rng: np.random.Generator
) -> Owners:
    owners = np.empty(len(labels), np.int64)
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        if capped:
            open_clients = sizes < len(labels) / clients
            shares = shares * open_clients
            if shares.sum() <= 0:  # all mass was on clients that are full
                shares = open_clients.astype(np.float64)
        ends = np.floor(np.cumsum(shares) / shares.sum() * len(members)).astype(np.int64)
        ends[-1] = len(members)
        counts = np.diff(ends, prepend=0)
        owners[members] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return owners
