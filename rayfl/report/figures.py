"""Figures for papers and notebooks, drawn by Matplotlib; pages are drawn by :mod:`rayfl.report.charts`.

Colours are those of Okabe and Ito, which are safe for colour-blind readers. Figures are built without pyplot,
so that they can be made in any thread and leave no state.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rayfl.units import byte_unit


@dataclass(frozen=True)
class Theme:
    """The colours of a chart."""

    ink: str
    quiet: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    ink="#1f2328",
    quiet="#6b7280",
    grid="#e5e7eb",
    series=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
)
Draw = Callable[[Any, Theme], None]
"""Draws into matplotlib ``Axes`` with a theme."""


class Picture(Figure):
    """A figure that notebooks show, whether pyplot was imported or not."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
        return buffer.getvalue()


def picture(draw: Draw, width: float = 8.6, height: float = 3.3) -> Picture:
    """A figure with one drawing; ``savefig`` writes it as PDF, SVG or PNG.

    Args:
        draw: what is drawn.
        width, height: in inches.
    """
    style = {
        "axes.axisbelow": True,
        "axes.edgecolor": LIGHT.grid,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": LIGHT.quiet,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "text.color": LIGHT.ink,
        "xtick.color": LIGHT.quiet,
        "ytick.color": LIGHT.quiet,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
    }
    with matplotlib.rc_context(style):
        figure = Picture(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), LIGHT)
    return figure


def result_over_rounds(evaluated: pd.DataFrame, column: str, about: str) -> Draw:
    """A result of the tests, the mean over clients.

    Args:
        evaluated: the rounds with tests, with ``round`` and the column.
        column: with the means.
        about: what they are.
    """

    def draw(axes: Any, theme: Theme) -> None:
        colour = theme.series[0]
        tested = evaluated[evaluated[column].notna()]
        axes.plot(
            tested["round"], tested[column], color=colour, label="mean over clients", **_marker_style(tested)
        )
        _draw_estimates(axes, evaluated, column, colour, "estimate from a few clients")
        axes.legend(loc="best")
        _label_axes(axes, about)

    return draw


def accuracy_over_rounds(evaluated: pd.DataFrame) -> Draw:
    """The mean over clients, in a band from the worst to the best 10 % of them, in percent."""

    def draw(axes: Any, theme: Theme) -> None:
        rounds, colour = evaluated["round"], theme.series[0]
        if {"accuracy_worst10", "accuracy_best10"} <= set(evaluated.columns):
            axes.fill_between(
                rounds, evaluated["accuracy_worst10"], evaluated["accuracy_best10"],
                color=colour, alpha=0.16, linewidth=0, label="worst 10 % to best 10 % of clients",
            )  # fmt: skip
        axes.plot(
            rounds,
            evaluated["accuracy_mean"],
            color=colour,
            label="mean over clients",
            **_marker_style(rounds),
        )
        _draw_estimates(axes, evaluated, "accuracy_mean", colour, "estimate from a few clients")
        if "accuracy_median" in evaluated:
            axes.plot(
                rounds,
                evaluated["accuracy_median"],
                color=theme.quiet,
                linewidth=1,
                linestyle="--",
                label="median",
            )
        axes.legend(loc="lower right")
        _label_axes(axes, "test accuracy (%)")

    return draw


def loss_over_rounds(rounds: pd.DataFrame, evaluated: pd.DataFrame) -> Draw:
    """Training loss of the participants and test loss of all clients."""

    def draw(axes: Any, theme: Theme) -> None:
        frames = ((rounds, "train_loss", "training"), (evaluated, "loss_mean", "test, mean over clients"))
        for colour, (frame, column, label) in zip(theme.series, frames, strict=False):
            if {"round", column} <= set(frame.columns):
                tested = frame[frame[column].notna()]
                axes.plot(tested["round"], tested[column], color=colour, label=label, **_marker_style(tested))
        axes.legend(loc="upper right")
        _label_axes(axes, "loss")

    return draw


def accuracy_histogram(percent: NDArray[np.float64]) -> Draw:
    """Histogram of the clients' accuracies in percent ``(N,)``; the line is their mean."""

    def draw(axes: Any, theme: Theme) -> None:
        tested = percent[~np.isnan(percent)]
        _draw_histogram(axes, theme, tested, np.arange(0, 101, 5), f"{tested.mean():.1f} %")
        axes.set_xlim(0, 100)
        axes.set_xlabel("last test accuracy of the client (%)")

    return draw


def histogram(values: NDArray[np.float64], about: str) -> Draw:
    """Histogram of results of clients ``(N,)``, NaN for those without; the line is their mean.

    Args:
        values: of the clients.
        about: what they are.
    """

    def draw(axes: Any, theme: Theme) -> None:
        finite = values[np.isfinite(values)]
        bins = np.histogram_bin_edges(finite, min(20, max(5, len(finite) // 5)))
        _draw_histogram(axes, theme, finite, bins, f"{finite.mean():.4g}")
        axes.set_xlabel(about)

    return draw


def _draw_histogram(
    axes: Any, theme: Theme, values: NDArray[np.float64], bins: NDArray[Any], mean: str
) -> None:
    axes.hist(values, bins=bins, color=theme.series[0], rwidth=0.9)
    axes.margins(y=0.15)  # room for the text above the bars
    axes.axvline(values.mean(), color=theme.ink, linewidth=1)
    left = values.mean() > (bins[0] + bins[-1]) / 2
    axes.annotate(
        f"mean {mean}", (values.mean(), 0.98), xycoords=("data", "axes fraction"),
        xytext=(-5 if left else 5, 0), textcoords="offset points",
        ha="right" if left else "left", va="top",
    )  # fmt: skip
    axes.set_ylabel("clients")
    axes.yaxis.set_major_locator(_integer_ticks())


def map_of_clients(places: NDArray[np.float64], labels: NDArray[np.int64], meaning: str) -> Draw:
    """Clients at their positions ``(N, 2)``, coloured by cluster ``(N,)``; the legend names at most a dozen
    clusters.
    """

    def draw(axes: Any, theme: Theme) -> None:
        clusters = np.unique(labels[labels >= 0])
        colours = theme.series[:-1]
        for i, cluster in enumerate(clusters.tolist()):
            x, y = places[labels == cluster].T
            look = {"s": 30, "alpha": 0.8, "linewidths": 0, "marker": "osD^v"[i // len(colours) % 5]}
            name = f"cluster {cluster}" if i < 12 else None
            axes.scatter(x, y, color=colours[i % len(colours)], label=name, **look)
        axes.set_aspect("equal", adjustable="datalim")  # a row of clients would be a strip, and cut dots
        axes.margins(0.08)
        axes.set_axis_off()
        axes.set_title(f"near: {meaning}", fontsize=8, color=theme.quiet)
        _legend_below(axes)

    return draw


def threshold_curve(
    thresholds: NDArray[np.float64], counts: NDArray[np.float64], chosen: float | None, clusters: float | None
) -> Draw:
    """Number of clusters over the threshold, and the chosen threshold.

    Args:
        thresholds: ascending, ``(K,)``.
        counts: the number of clusters from each threshold up to the next ``(K,)``; the last holds for all
            above.
        chosen: the threshold used, if there is one.
        clusters: the resulting number of clusters.
    """
    count = len(thresholds)
    if count > 2000:  # all ticks for few clusters, a sparse selection for many
        indices = np.unique(
            np.append(np.linspace(0, count - 1, 1000).astype(np.intp), np.arange(count - 1000, count))
        )
        thresholds, counts = thresholds[indices], counts[indices]
    end = 1.06 * max(float(thresholds[-1]), chosen or 0.0)
    thresholds, counts = np.append(thresholds, end), np.append(counts, counts[-1])

    def draw(axes: Any, theme: Theme) -> None:
        axes.step(thresholds, counts, where="post", color=theme.series[0])
        if counts.max() >= 100:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axes.yaxis.set_major_locator(_integer_ticks())
        words = [] if clusters is None else [f"{clusters:g} cluster" + ("s" if clusters != 1 else "")]
        place: tuple[float, float] | None = None
        if chosen is not None:
            axes.axvline(chosen, color=theme.series[1], linewidth=1.2, linestyle="--")
            words.append(f"at {chosen:.4g}")
            place = (chosen, 0.98)
        elif clusters is not None:
            axes.axhline(clusters, color=theme.series[1], linewidth=1.2, linestyle="--")
        label = "chosen: " + " ".join(words) if words else ""
        if place is not None:
            right = place[0] > (thresholds.min() + thresholds.max()) / 2
            axes.annotate(
                label, place, xycoords=("data", "axes fraction"), xytext=(-6 if right else 6, 0),
                textcoords="offset points", ha="right" if right else "left", va="top", color=theme.series[1],
            )  # fmt: skip
        elif label:
            axes.annotate(
                label, (0.99, 0.95), xycoords="axes fraction", ha="right", va="top", color=theme.series[1]
            )
        axes.set_xlabel("threshold")
        axes.set_ylabel("clusters")

    return draw


TIER_NAMES = {"client_lps": "clients – local server", "lps_gps": "local – global server"}


def communication(ledger: pd.DataFrame) -> Draw:
    """Bytes of each round, by tier and direction; the total must be positive."""
    during = ledger[ledger["round"] >= 0]
    sums = during.groupby(["tier", "direction", "round"], as_index=False)["bytes"].sum()
    unit, scale = byte_unit(float(sums["bytes"].max()))

    def draw(axes: Any, theme: Theme) -> None:
        for i, tier in enumerate(sorted(set(sums["tier"]))):
            colour = theme.series[i % len(theme.series)]
            # Up and down are often equal, so a thin line is drawn over a broad one.
            for direction, look in (("down", {"linewidth": 5, "alpha": 0.3}), ("up", {"linewidth": 1.5})):
                part = sums[(sums["tier"] == tier) & (sums["direction"] == direction)]
                label = f"{TIER_NAMES.get(tier, tier)}, {direction}"
                if len(part):
                    marks = _marker_style(part) if direction == "up" else {}
                    axes.plot(
                        part["round"] + 1, part["bytes"] / scale, color=colour, label=label, **look, **marks
                    )
        axes.set_ylim(0, 1.08 * float(sums["bytes"].max()) / scale)  # the line may be constant
        _legend_below(axes)
        _label_axes(axes, f"{unit} a round")

    return draw


def _draw_estimates(axes: Any, evaluated: pd.DataFrame, column: str, colour: str, label: str = "") -> None:
    """Hollow points for estimates from a few clients."""
    if "estimated_from" not in evaluated or not evaluated["estimated_from"].notna().any():
        return
    estimates = evaluated[evaluated["estimated_from"].notna()]
    estimates = estimates.iloc[:: max(1, len(estimates) // 25)]
    look = {"markerfacecolor": axes.figure.get_facecolor(), "markersize": 5, "linestyle": "none"}
    axes.plot(estimates["round"], estimates[column], "o", color=colour, label=label or "_", **look)


def _marker_style(points: Any) -> dict[str, Any]:
    """Markers when there are so few points that a line alone would hide them."""
    return {"marker": "o", "markersize": 3.5} if len(points) <= 25 else {}


def _integer_ticks() -> MaxNLocator:
    """A few ticks at integers."""
    return MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10])


def _legend_below(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if len(labels) > 1 and max(map(len, labels)) > 20 else min(4, max(1, len(labels)))
    axes.figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def _label_axes(axes: Any, label: str) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(_integer_ticks())
