"""Floating-point formats in exact arithmetic: values of codes, and codes of rounded values."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

# A finite value with its sign (zero has one), or what is not finite.
Number = tuple[int, Fraction] | float
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Format:
    """Exponent and mantissa bits, the largest finite code, and what NaN is; `infinity` where the next code is that."""

    exponent: int
    mantissa: int
    largest: int
    nan: int
    infinity: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def value(self, code: int) -> Number:
        sign, magnitude = code >> (self.bits - 1) & 1, code & ((1 << (self.bits - 1)) - 1)
        if magnitude > self.largest:
            is_infinity = self.infinity and magnitude == self.largest + 1
            return math.copysign(math.inf, -sign or 1) if is_infinity else math.nan
        field, rest = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        whole = rest if field == 0 else rest + (1 << self.mantissa)
        return sign, whole * Fraction(2) ** (max(field, 1) - self.bias - self.mantissa)

    def code(self, number: Number, mode: str = "rn", *, finite: bool = False, relu: bool = False) -> int:
        """The code of a number, rounded once."""
        if isinstance(number, float):
            if math.isnan(number):
                return self.nan
            sign, magnitude = int(number < 0), None
        else:
            sign, magnitude = number
        if relu and sign:
            return 0
        found = self.largest + 1 if magnitude is None else self._nearest(magnitude, sign, mode)
        if found > self.largest:
            stays = finite or not self.infinity
            inward = magnitude is not None and (mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign))
            found = self.largest if stays or inward else self.largest + 1
        return sign << (self.bits - 1) | found

    def _nearest(self, magnitude: Fraction, sign: int, mode: str) -> int:
        exponent = 1 - self.bias
        if magnitude:
            guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
            guess -= magnitude < Fraction(2) ** guess
            exponent = max(exponent, guess)
        scaled = magnitude / Fraction(2) ** (exponent - self.mantissa)
        steps, rest = scaled.numerator // scaled.denominator, scaled % 1
        up = {
            "rn": rest > HALF or (rest == HALF and steps % 2 == 1), "rna": rest >= HALF, "rz": False,
            "rm": rest > 0 and sign == 1, "rp": rest > 0 and sign == 0,
        }[mode]  # fmt: skip
        return ((exponent + self.bias - 1) << self.mantissa) + steps + up


F16 = Format(5, 10, 0x7BFF, 0x7FFF)
BF16 = Format(8, 7, 0x7F7F, 0x7FFF)
TF32 = Format(8, 10, 0x3FBFF, 0x3FFFF)
F32 = Format(8, 23, 0x7F7FFFFF, 0x7FFFFFFF)
F64 = Format(11, 52, (0x7FE << 52) | ((1 << 52) - 1), 0x7FF8 << 48)
E4M3 = Format(4, 3, 0x7E, 0x7F, infinity=False)
E5M2 = Format(5, 2, 0x7B, 0x7F)
E2M1 = Format(2, 1, 7, 7, infinity=False)
E2M3 = Format(2, 3, 0x1F, 0x1F, infinity=False)
E3M2 = Format(3, 2, 0x1F, 0x1F, infinity=False)
FORMATS = {
    "f16": F16, "bf16": BF16, "tf32": TF32, "f32": F32, "f64": F64, "e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1,
    "e2m3": E2M3, "e3m2": E3M2,
}  # fmt: skip


def as_float(number: Number) -> float:
    """The nearest double."""
    if isinstance(number, float):
        return number
    sign, magnitude = number
    return math.copysign(float(magnitude), -sign or 1)


def of_float(value: float) -> Number:
    """A double as a number."""
    if math.isnan(value) or math.isinf(value):
        return value
    return int(math.copysign(1, value) < 0), abs(Fraction(value))


def _zero_sign(x: int, y: int, mode: str) -> int:
    return x if x == y else int(mode == "rm")


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    """The exact sum; the sign of a zero is that of the rounding mode."""
    if isinstance(a, float) or isinstance(b, float):
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        return a if isinstance(a, float) else b
    total = (-a[1] if a[0] else a[1]) + (-b[1] if b[0] else b[1])
    if total == 0:
        return _zero_sign(a[0], b[0], mode) if a[1] == b[1] == 0 else int(mode == "rm"), Fraction(0)
    return int(total < 0), abs(total)


def negative(a: Number) -> Number:
    return -a if isinstance(a, float) else (1 - a[0], a[1])


def multiply(a: Number, b: Number) -> Number:
    """The exact product."""
    if isinstance(a, float) or isinstance(b, float):
        if (not isinstance(a, float) and a[1] == 0) or (not isinstance(b, float) and b[1] == 0):
            return math.nan
        signs = [math.copysign(1, x) if isinstance(x, float) else 1 - 2 * x[0] for x in (a, b)]
        is_nan = any(isinstance(x, float) and math.isnan(x) for x in (a, b))
        return math.nan if is_nan else signs[0] * signs[1] * math.inf
    return a[0] ^ b[0], a[1] * b[1]


def divide(a: Number, b: Number) -> Number:
    """The exact quotient."""
    x, y = as_float(a), as_float(b)
    if math.isnan(x) or math.isnan(y) or (math.isinf(x) and math.isinf(y)):
        return math.nan
    sign = int(math.copysign(1, x) != math.copysign(1, y))
    if math.isinf(x):
        return math.copysign(math.inf, -sign or 1)
    if math.isinf(y):
        return sign, Fraction(0)
    assert not isinstance(a, float)
    assert not isinstance(b, float)
    if b[1] == 0:
        return math.nan if a[1] == 0 else math.copysign(math.inf, -sign or 1)
    return sign, a[1] / b[1]


def float_code(value: float) -> int:
    """The bits of a double."""
    return int.from_bytes(struct.pack("<d", value), "little")
