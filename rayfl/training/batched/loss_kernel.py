"""Softmax, cross-entropy and its gradient in one pass, compiled by Numba.

For small batches the overhead of torch's separate operations exceeds their arithmetic: ten samples with ten
classes are 100 numbers. Measured 1.5 times (5,000 samples, 10 classes) to 40 times (10 samples) as fast.

Each sample is reduced independently of the rest of the batch, and each sum has a fixed order.
"""

from __future__ import annotations

import numpy as np

from rayfl.training.batched.jit import jit

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)

# e^x = 2^n e^r with n = round(x / ln 2) and r = x - n ln 2, in two parts so that nothing is lost; e^r by the
# polynomial of Cephes (Moshier 1984, expf), which is right to 1e-7. Numba has no exponential for vectors.
_PER_LN2 = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C5, _C4, _C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C2, _C1, _C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LEAST = np.float32(-87)  # e^x is the least normal number here
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


@jit(fastmath={"contract", "reassoc", "nsz"})
def cross_entropy(logits, labels, weights, loss, gradient):  # type: ignore[no-untyped-def]
    """Weighted cross-entropy (natural log) of each client, and its gradient. NaN stays NaN.

    Args:
        logits: ``(C, B, K)`` float32, like all arrays here C-contiguous.
        labels: ``(C, B)`` int64.
        weights: ``(C, B)`` float32; samples of weight 0 are not looked at.
        loss: ``(C,)`` float32, written: ``sum_b weight_b (log sum_k e^z_k - z_label)``.
        gradient: ``(C, B, K)``, written: ``weight_b (softmax - one-hot)``.
    """
    clients, samples, classes = logits.shape
    for c in range(clients):
        total = 0.0
        for b in range(samples):
            z, g, weight, label = logits[c, b], gradient[c, b], weights[c, b], labels[c, b]
            if weight == 0:
                g[:] = _ZERO
                continue
            most = z[0]
            for k in range(1, classes):
                most = z[k] if z[k] > most else most
            whole = _ZERO
            for k in range(classes):
                x = z[k] - most
                x = _LEAST if x < _LEAST else x
                n = np.floor(x * _PER_LN2 + _HALF)
                r = x - n * _LN2_HIGH - n * _LN2_LOW
                p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
                power = np.int32((np.int32(n) + _BIAS) << _MANTISSA).view(np.float32)
                e = (p * r * r + r + _ONE) * power
                g[k] = e
                whole += e
            # Compilers may add in another order: in float32 the logarithm might drown in the largest logit.
            behind = np.float64(most) - np.float64(z[label])
            total += weight * (np.log(whole) + behind)
            share = weight / whole
            for k in range(classes):
                g[k] *= share
            g[label] -= weight
        loss[c] = total
