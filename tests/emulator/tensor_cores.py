"""How tensor cores of an H200 sum products up, to the bit: what records of calibration/ are held to.

Every summand, and what they are added to, keeps so many bits below the largest exponent, and loses the rest. The
exponent of a product is the sum of its factors', though its significand may come near 4; that of a subnormal factor is
that of the smallest normal number, and 0 has none. A sum that is stored as fp32 keeps fewer bits below its own leading
one, and is cut off there as well.
"""

from __future__ import annotations

import numpy as np

# Bits that are kept of summands, and of an fp32 sum: the products of wgmma, and those of mma.sync but of fp8.
KEPT = {"e4m3": (13, 13), "e5m2": (13, 13), "bf16": (25, 23), "f16": (25, 23), "tf32": (25, 23)}
_LEAST = {"e4m3": -6, "e5m2": -14, "bf16": -126, "f16": -14, "tf32": -126, "f32": -126}
_NONE = -(1 << 16)


def exponents(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Of each number of a type, far below all others of 0."""
    return np.where(numbers == 0, _NONE, np.maximum(np.frexp(numbers)[1] - 1, _LEAST[kind]))


def cut_off(numbers: np.ndarray, leading: np.ndarray, bits: int) -> np.ndarray:
    """What is left of numbers with so many bits below these exponents."""
    unit = np.ldexp(1.0, leading - bits)
    return np.trunc(numbers / unit) * unit


def summed(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_type: str, b_type: str, bits: int) -> np.ndarray:
    """a b^T + c before it is stored, in fp64 which holds all of it: a [.., m, k], b [.., n, k], c [.., m, n]."""
    summands = np.concatenate([a[..., :, None, :] * b[..., None, :, :], c[..., None]], -1)
    of_products = exponents(a, a_type)[..., :, None, :] + exponents(b, b_type)[..., None, :, :]
    leading = np.concatenate([of_products, exponents(c, "f32")[..., None]], -1).max(-1, keepdims=True)
    return cut_off(summands, np.maximum(leading, -300), bits).sum(-1)


def stored(sums: np.ndarray, bits: int) -> np.ndarray:
    """As fp32."""
    return cut_off(sums, np.frexp(sums)[1] - 1, bits).astype(np.float32)
