"""Exponentials that a compiled loop can compute for several numbers at once, unlike Numba's own."""

from __future__ import annotations

import numpy as np

from rayfl.training.batched.jit import jit

_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)

# e^x = 2^n e^r with n = round(x / ln 2) and r = x - n ln 2, in two parts so that nothing is lost; e^r by the
# polynomial of Cephes (Moshier 1984, expf), which is accurate to 1e-7.
_PER_LN2 = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C5, _C4, _C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C2, _C1, _C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LEAST = np.float32(-87)  # e^x is the least normal number here
_BIAS, _MANTISSA = np.int32(127), np.int32(23)

# Near zero 1 - e^-2x would lose digits: tanh x = x + x^3 P(x^2), with the polynomial of Cephes' tanhf.
_NEAR = np.float32(0.625)
_T4, _T3 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2)
_T2, _T1, _T0 = np.float32(-5.37397155531e-2), np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)


@jit(fastmath={"contract", "reassoc", "nsz"})
def decay(x):  # type: ignore[no-untyped-def]
    """``e^x`` of a float32 that is not positive; NaN stays NaN."""
    x = _LEAST if x < _LEAST else x
    n = np.floor(x * _PER_LN2 + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    power = np.int32((np.int32(n) + _BIAS) << _MANTISSA).view(np.float32)
    return (p * r * r + r + _ONE) * power


@jit(fastmath={"contract", "reassoc", "nsz"})
def decay_less_one(x):  # type: ignore[no-untyped-def]
    """``e^x - 1`` of a float32 that is not positive, without losing digits near zero; NaN stays NaN."""
    x = _LEAST if x < _LEAST else x
    n = np.floor(x * _PER_LN2 + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    near = p * r * r + r
    power = np.int32((np.int32(n) + _BIAS) << _MANTISSA).view(np.float32)
    return near if n == 0 else (near + _ONE) * power - _ONE


@jit(fastmath={"contract", "reassoc", "nsz"})
def sigmoid(x):  # type: ignore[no-untyped-def]
    """``1 / (1 + e^-x)`` of a float32."""
    e = decay(-abs(x))
    return (e if x < 0 else _ONE) / (_ONE + e)


@jit(fastmath={"contract", "reassoc", "nsz"})
def tanh(x):  # type: ignore[no-untyped-def]
    """``tanh x`` of a float32."""
    size, z = abs(x), x * x
    e = decay(-_TWO * size)
    far = (_ONE - e) / (_ONE + e)
    far = -far if x < 0 else far
    near = ((((_T4 * z + _T3) * z + _T2) * z + _T1) * z + _T0) * z * x + x
    return near if size < _NEAR else far
