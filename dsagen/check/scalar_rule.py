"""A write rule in plain Python, one group at a time: what the torch reference is held to."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from dsagen.dtype import E4M3
from dsagen.kv_rule import Rounding, WriteRule


def scalar_group(rule: WriteRule, x: Sequence[float]) -> tuple[float, list[int]]:
    """The scale of a group of finite numbers, and their codes."""
    scale = scalar_scale(rule, max(abs(value) for value in x))
    inverse = fp32(1.0 / scale)
    units = [fp32(value * inverse) if rule.by_reciprocal else fp32(value / scale) for value in x]
    return scale, [scalar_code(rule, value) for value in units]


def scalar_code(rule: WriteRule, value: float) -> int:
    """The code of a number in units of its scale."""
    code = rule.values.encode(value)
    sign = 1 << (rule.values.bits - 1)
    below = (code & ~sign) - 1
    if rule.ties_down and below >= 0:
        distances = [abs(rule.values.decode(c) - min(abs(value), rule.values.largest)) for c in (below, below + 1)]
        code -= int(distances[0] == distances[1])
    return code if rule.zero_has_sign or code & ~sign else 0


def scalar_scale(rule: WriteRule, amax: float) -> float:
    """The scale of a group with that largest magnitude."""
    amax = max(amax, fp32(rule.amax_floor))
    quotient = fp32(amax * fp32(1.0 / rule.most)) if rule.multiplies else fp32(amax / rule.most)
    quotient = max(quotient, fp32(rule.scale_floor))
    match rule.rounding:
        case Rounding.POW2:
            mantissa, exponent = math.frexp(quotient)
            return math.ldexp(1.0, exponent - (mantissa == 0.5))
        case Rounding.E4M3:
            return E4M3.decode(E4M3.encode(quotient))
    return quotient


def fp32(value: float) -> float:
    """The nearest fp32 number. Of a quotient or product of two fp32 numbers in fp64 it is the correctly rounded one."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
