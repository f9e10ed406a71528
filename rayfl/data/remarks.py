"""What a user should know of the data before a run's numbers are read, a line each."""

from __future__ import annotations

from rayfl.data.base import Federation, Samples


def remarks(federation: Federation) -> list[str]:
    """Lines about inputs, for the start of a run."""
    return [*_server(federation.samples), *_table(federation.samples)]


def _server(samples: Samples) -> list[str]:
    if samples.x_server is None:
        return []
    return [
        f"data: the server holds {len(samples.x_server):,} training samples out, which no client has "
        f"(data.server_share); clients share {len(samples.y_train):,}"
    ]


def _table(samples: Samples) -> list[str]:
    """The range of a table's features, and how models take them."""
    x, scaling = samples.x_train, samples.scaling
    if x.ndim != 2 or x.dtype.kind != "f" or scaling is None:
        return []
    low, high = x.min(axis=0), x.max(axis=0)
    sizes = f"data: {x.shape[1]} features from {low.min():g} to {high.max():g}"
    if len(scaling.mean) > 1:
        return [f"{sizes}; each is given mean 0 and deviation 1 for the models (data.normalise)"]
    widest, narrowest = (high - low).max(), (high - low).min()
    between = f", their ranges between {narrowest:g} and {widest:g}" if narrowest < widest else ""
    return [f"{sizes}{between}; the models take them with one mean and deviation for all (data.normalise)"]
