"""Remarks about the data that the user should read before the results, one line each."""

from __future__ import annotations

import numpy as np

from rayfl.data.base import UNKNOWN, Federation, Samples
from rayfl.data.federation import scarce_strata, strata_of
from rayfl.data.sharded import in_files
from rayfl.units import counted


def remarks(federation: Federation) -> list[str]:
    """Lines about inputs, labels and the server's data, for the start of a run."""
    samples = federation.samples
    checks = (_server_lines, _table_lines, _label_gap_lines, _rare_label_lines, _unknown_word_lines)
    return [*federation.notes, *(line for check in checks for line in check(samples))]


def _server_lines(samples: Samples) -> list[str]:
    if samples.x_server is None:
        return []
    return [
        f"data: the server holds {len(samples.x_server):,} training samples out, which no client has "
        f"(data.server_share); clients share {len(samples.y_train):,}"
    ]


def _table_lines(samples: Samples) -> list[str]:
    """A line on the range of a table's features, and how they are scaled."""
    x, scaling = samples.x_train, samples.scaling
    if x.ndim != 2 or x.dtype.kind != "f" or scaling is None or in_files(x):
        return []
    low, high = (np.asarray(bound, np.float64) for bound in (x.min(axis=0), x.max(axis=0)))
    sizes = f"data: {x.shape[1]} features from {low.min():g} to {high.max():g}"
    if len(scaling.mean) > 1:
        return [f"{sizes}; each is given mean 0 and deviation 1 for the models (data.normalise)"]
    widest, narrowest = (high - low).max(), (high - low).min()
    between = f", their ranges between {narrowest:g} and {widest:g}" if narrowest < widest else ""
    return [f"{sizes}{between}; the models take them with one mean and deviation for all (data.normalise)"]


def _label_gap_lines(samples: Samples) -> list[str]:
    """A line on unused numbers below the largest label, if the data have no names of classes."""
    if samples.targets_train is not None or samples.class_names:
        return []
    present = np.zeros(samples.classes, bool)
    for labels in (samples.y_train, samples.y_test):
        present[labels] = True
    absent = np.flatnonzero(~present)
    if not len(absent):
        return []
    return [
        f"data: labels go up to {samples.classes - 1}, and no sample has label {absent[0]} "
        f"({_more(len(absent))}): the network has {samples.classes} outputs, some without samples; number "
        "labels without gaps to avoid that"
    ]


def _rare_label_lines(samples: Samples) -> list[str]:
    """Lines on labels with no test samples, or too few for their share of the training data, and on labels
    with no training samples."""
    train, test, strata = strata_of(samples)
    trained, tested = np.bincount(train, minlength=strata), np.bincount(test, minlength=strata)
    lines = []
    scarce, absent = scarce_strata(samples), np.flatnonzero((tested == 0) & (trained > 0))
    if len(scarce):
        first = scarce[0]
        share = round(trained[first] / len(train) * len(test))
        lines.append(
            f"data: {counted(int(tested[first]), 'test sample')} of {_name(samples, int(first))}; in "
            f"proportion to the training data there would be {share} ({_more(len(scarce))}): clients are "
            "tested on too few of them, and on the other labels in proportion"
        )
    if len(absent):
        lines.append(
            f"data: no test sample of {_name(samples, int(absent[0]))} ({_more(len(absent))}): no client is "
            "tested on it"
        )
    unseen = np.flatnonzero((tested > 0) & (trained == 0))
    if len(unseen):
        lines.append(
            f"data: no training sample of {_name(samples, int(unseen[0]))} ({_more(len(unseen))}), but "
            f"{tested[unseen].sum():,} test samples: no network can learn to recognise them"
        )
    return lines


def _name(samples: Samples, stratum: int) -> str:
    source, label = divmod(stratum, samples.classes)
    return f"label {label}" + (f" in source {source}" if samples.domain_train is not None else "")


def _more(count: int) -> str:
    return "the only one" if count == 1 else f"the first of {count} such"


def _unknown_word_lines(samples: Samples) -> list[str]:
    """A line on the percentage of words to predict that are not in the vocabulary."""
    targets = samples.targets_test
    if targets is None or UNKNOWN not in samples.vocabulary:
        return []
    share = np.mean(targets[targets >= 0] == samples.vocabulary.index(UNKNOWN))
    return [
        f"data: {100 * share:.1f} % of the words to be predicted are not among the "
        f"{len(samples.vocabulary):,} words of the vocabulary and count as one word, which lowers "
        "perplexities: compare them only for the same vocabulary (data.vocabulary)"
    ]
