"""The difficulty of samples, judged by an expert model.

The data package does not train networks, so the expert is a model from scikit-learn. Losses of any other
model can be read from a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.data.arrays import fingerprint
from rayfl.data.base import Samples
from rayfl.errors import DataError, one_line
from rayfl.given import data_root
from rayfl.random import generator, key

Kind = Literal["mlp", "logistic"]
_HIDDEN: dict[Kind, tuple[int, ...]] = {"mlp": (200,), "logistic": ()}
_LEARNING_RATE: dict[Kind, float] = {"mlp": 1e-3, "logistic": 1e-2}
_EPOCHS = 10
_MOST_SAMPLES = 10_000
"""Maximum number of training samples of an expert: more take longer, but hardly change the ranking."""
_LEAST_CACHED = 5_000
"""Losses of at least this many samples are cached on disk; fewer are computed quickly."""
_UNKNOWN_CLASS_LOSS = 50.0
"""The loss of a sample whose class the expert has never seen: larger than all others."""


def given_losses(path: Path, samples: Samples) -> NDArray[np.float64]:
    """Losses of the clients' training samples ``(n,)`` from a ``.npy`` file, larger for harder samples.

    The file contains a loss for each training sample of the dataset, including those that the server holds
    out, since these depend on the seed.

    Raises:
        DataError: if the file contains something else.
    """
    with_clients = _held_by_clients(samples)
    held_out = len(with_clients) - int(with_clients.sum())
    remark = f" (the {held_out} that the server holds too: data.server_share)" if held_out else ""
    return read_losses(path, len(with_clients), remark)[with_clients]


def read_losses(path: Path, count: int, remark: str = "") -> NDArray[np.float64]:
    """Losses ``(count,)`` from a ``.npy`` file, one per training sample, larger for harder samples.

    Args:
        path: the file.
        count: expected number of losses.
        remark: a remark on that number, for errors.

    Raises:
        DataError: if the file contains something else.
    """
    where = f"partition.losses: {path}"
    if not path.expanduser().is_file():
        raise DataError(f"{where}: there is no such file; expected a .npy with one loss per training sample")
    try:
        losses = np.load(path.expanduser(), allow_pickle=False)
    except Exception as error:  # broken bytes make NumPy raise nearly anything
        raise DataError(f"{where}: cannot be read as .npy ({one_line(error)})") from error
    if not isinstance(losses, np.ndarray) or losses.shape != (count,) or losses.dtype.kind not in "uif":
        contents = f"shape {losses.shape}" if isinstance(losses, np.ndarray) else "several arrays"
        raise DataError(
            f"{where}: holds {contents}; expected {count} numbers, one per training sample{remark}"
        )
    if not np.isfinite(losses).all():
        raise DataError(f"{where}: holds NaN or infinity; every loss must be finite")
    return losses.astype(np.float64)


def _held_by_clients(samples: Samples) -> NDArray[np.bool_]:
    """Which training samples of the dataset are divided among clients; the server holds out the others."""
    numbering = samples.numbering
    if numbering is None:
        return np.ones(len(samples.y_train), np.bool_)
    places = numbering.train
    if numbering.split and numbering.test is not None:
        places = places[numbering.test < 0]
    return places >= 0


def expert_losses(samples: Samples, kind: Kind) -> NDArray[np.float64]:
    """The cross-entropy of every training sample under an expert ``(n,)``; cached for large datasets.

    Two experts are trained, each on (at most 10,000 samples of) a random half of the data, and each scores
    the other half, so that no sample counts as easy because it was memorised. The result depends only on the
    data. It is cached below :func:`rayfl.data.data_root` if that folder is writable.
    """
    if len(samples.y_train) < _LEAST_CACHED:
        return _compute_losses(samples, kind)
    source = Path(__file__).read_bytes() + version("scikit-learn").encode()  # other code, other losses
    digest = hashlib.sha256(source).hexdigest()[:8]
    file = data_root() / f"difficulty-{kind}-{fingerprint(samples)}-{digest}.npy"
    try:
        return read_losses(file, len(samples.y_train))
    except DataError:  # missing or broken: compute and write it again
        losses = _compute_losses(samples, kind)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            np.save(out, losses)
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return losses


def _compute_losses(samples: Samples, kind: Kind) -> NDArray[np.float64]:
    halves = np.array_split(generator(0, "expert").permutation(len(samples.y_train)), 2)
    losses = np.zeros(len(samples.y_train))
    for number, (learn, score) in enumerate((halves, halves[::-1])):
        if len(learn) and len(score):
            losses[score] = _losses_of_half(
                samples, kind, learn[:_MOST_SAMPLES], score, key(0, "expert", number) % 2**32
            )
    return losses


def _losses_of_half(
    samples: Samples, kind: Kind, learn: NDArray[np.int64], score: NDArray[np.int64], seed: int
) -> NDArray[np.float64]:
    """The losses of ``score`` under a model trained on ``learn``."""
    from sklearn.exceptions import ConvergenceWarning  # deferred: it takes a second
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits

    y = samples.y_train
    trained_classes = np.unique(y[learn])
    if len(trained_classes) < 2:
        return np.where(y[score] == trained_classes[0], 0.0, _UNKNOWN_CLASS_LOSS)
    inputs = _flat_inputs(samples, learn)
    mean, deviation = inputs.mean(axis=0), max(float(inputs.std()), 1e-6)
    batch = min(max(1, len(learn) // 50), 200)  # 50 steps an epoch or more, also with few samples
    model = MLPClassifier(
        _HIDDEN[kind],
        batch_size=batch,
        learning_rate_init=_LEARNING_RATE[kind],
        max_iter=_EPOCHS,
        random_state=seed,
    )
    losses = np.full(len(score), _UNKNOWN_CLASS_LOSS)
    # One thread: the order of sums, and so the last bits, depends on the number of threads.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit((inputs - mean) / deviation, y[learn])
        for start in range(0, len(score), _MOST_SAMPLES):
            part = score[start : start + _MOST_SAMPLES]
            probabilities = model.predict_proba((_flat_inputs(samples, part) - mean) / deviation)
            place = np.minimum(np.searchsorted(trained_classes, y[part]), len(trained_classes) - 1)
            label_probabilities = probabilities[np.arange(len(part)), place]
            is_trained = trained_classes[place] == y[part]
            losses[start : start + _MOST_SAMPLES][is_trained] = -np.log(
                np.maximum(label_probabilities[is_trained], 1e-20)
            )
    return losses


def _flat_inputs(samples: Samples, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    x = samples.x_train[ids].reshape(len(ids), -1).astype(np.float32)
    return x / np.float32(255) if samples.x_train.dtype == np.uint8 else x
