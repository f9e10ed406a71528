"""Synthetic(alpha, beta): users whose labels come from linear models of their own.

Drawn as by ``data/synthetic/generate_synthetic.py`` of https://github.com/litian96/fair_flearn, the code of
Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020; there alpha = beta =
1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEATURES, CLASSES = 60, 10


def load(
    users: int = 100, alpha: float = 1.0, beta: float = 1.0, seed: int = 0
) -> dict[str, NDArray[np.generic]]:
    """The samples of all users.

    User k has ``y = argmax(W_k x + b_k)`` with ``W_k, b_k ~ N(u_k, 1)``, ``u_k ~ N(0, alpha)``, and
    ``x ~ N(v_k, Sigma)`` with ``v_k ~ N(B_k, 1)``, ``B_k ~ N(0, beta)``, ``Sigma_jj = j^-1.2``. As in that
    code, alpha and beta are standard deviations, and a user has 50 samples and a log-normal number more.

    Args:
        users: number of users.
        alpha: how much the users' models differ.
        beta: how much their inputs differ.
        seed: of the draw.

    Returns:
        ``x`` ``(n, 60)``, ``y`` ``(n,)``, and ``user`` ``(n,)``.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(4, 2, users).astype(int) + 50
    scale = np.arange(1, FEATURES + 1) ** -0.6
    x, y = [], []
    for size in sizes:
        model_mean, input_mean = rng.normal(0, alpha), rng.normal(0, beta)
        weights, bias = rng.normal(model_mean, 1, (FEATURES, CLASSES)), rng.normal(model_mean, 1, CLASSES)
        inputs = rng.normal(input_mean, 1, FEATURES) + scale * rng.standard_normal((size, FEATURES))
        x.append(inputs)
        y.append(np.argmax(inputs @ weights + bias, axis=1))
    return {
        "x": np.concatenate(x).astype(np.float32),
        "y": np.concatenate(y),
        "user": np.repeat(np.arange(users), sizes),
    }
