"""Element types: how many bits one element takes, what its codes mean, and which torch dtypes carry it.

Decoding here is exact and slow: plain Python, one code at a time. It is what tests and references are held to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from dsagen.errors import SpecError


class NanRule(Enum):
    """Which codes of a floating-point type are not numbers."""

    IEEE = "ieee"  # the largest exponent holds inf (zero mantissa) and NaN
    ALL_ONES = "all_ones"  # only the magnitude of all ones is NaN; there is no inf
    NONE = "none"  # every code is a number


@dataclass(frozen=True)
class ElementType:
    """A binary floating-point type of at most 32 bits.

    `torch_dtypes` names the torch dtypes whose tensors may hold it; sub-byte types travel in bytes.
    """

    name: str
    bits: int
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_rule: NanRule
    torch_dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        fields = int(self.signed) + self.exponent_bits + self.mantissa_bits
        # ue4m3 is an e4m3 byte whose sign bit is never set, so one bit may stay unused.
        if not fields <= self.bits <= fields + 1:
            raise ValueError(f"{self.name}: {self.bits} bits cannot hold {fields} bits of fields")

    @property
    def bytes_per_element(self) -> int:
        """Whole bytes of one element; a sub-byte type raises ValueError."""
        if self.bits % 8:
            raise ValueError(f"{self.name} has {self.bits} bits: no whole number of bytes per element")
        return self.bits // 8

    def bytes_for(self, count: int) -> int:
        """Bytes that `count` packed elements take; a partly filled last byte raises ValueError."""
        if count < 0 or count * self.bits % 8:
            raise ValueError(f"{count} elements of {self.name} ({self.bits} bits) do not fill whole bytes")
        return count * self.bits // 8

    def decode(self, code: int) -> float:
        """The exact value of a code in 0 .. 2**bits - 1; NaN and inf as Python floats."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{code} is no code of {self.name} (0 .. {(1 << self.bits) - 1})")
        magnitude_bits = self.exponent_bits + self.mantissa_bits
        magnitude = code & ((1 << magnitude_bits) - 1)
        negative = self.signed and bool(code >> magnitude_bits & 1)
        if not self.signed and code >> magnitude_bits:
            return math.nan  # the unused bit is set: no writer makes this code
        value = self._decode_magnitude(magnitude)
        return -value if negative else value

    def encode(self, value: float) -> int:
        """The code nearest to a number, of two the even one; for types of at most 8 bits.

        Numbers past the largest saturate, infinities too; what rounds to zero keeps its sign. NaN is the code of all
        ones but the sign. ValueError for a wider type, for NaN where every code is a number, and for a negative number
        where there is no sign.
        """
        if self.bits > 8:
            raise ValueError(f"{self.name} has {self.bits} bits: encoding searches types of at most 8")
        codes = range(1 << (self.exponent_bits + self.mantissa_bits))
        sign = 1 << (self.exponent_bits + self.mantissa_bits)
        if math.isnan(value):
            if self.nan_rule is NanRule.NONE:
                raise ValueError(f"{self.name} has no code for NaN")
            return codes[-1]
        negative = math.copysign(1.0, value) < 0
        if negative and not self.signed:
            raise ValueError(f"{self.name} has no sign: {value} is negative")
        size = min(abs(value), self.largest)
        numbers = [code for code in codes if not math.isnan(self._decode_magnitude(code))]
        nearest = min(numbers, key=lambda code: (abs(self._decode_magnitude(code) - size), code % 2))
        return nearest | (sign if negative else 0)

    @property
    def largest(self) -> float:
        """The largest number of a type of at most 8 bits."""
        values = (self._decode_magnitude(code) for code in range(1 << (self.exponent_bits + self.mantissa_bits)))
        return max(value for value in values if math.isfinite(value))

    def _decode_magnitude(self, magnitude: int) -> float:
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        top = (1 << self.exponent_bits) - 1
        if self.nan_rule is NanRule.IEEE and exponent == top:
            return math.nan if mantissa else math.inf
        if self.nan_rule is NanRule.ALL_ONES and magnitude == (1 << (self.exponent_bits + self.mantissa_bits)) - 1:
            return math.nan
        # A type without mantissa (ue8m0) has no zero and no subnormals: code 0 is 2**-bias.
        if exponent == 0 and self.mantissa_bits:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)


_BYTES = ("uint8", "int8")

BF16 = ElementType("bf16", 16, True, 8, 7, 127, NanRule.IEEE, ("bfloat16",))
FP16 = ElementType("fp16", 16, True, 5, 10, 15, NanRule.IEEE, ("float16",))
FP32 = ElementType("fp32", 32, True, 8, 23, 127, NanRule.IEEE, ("float32",))
E4M3 = ElementType("e4m3", 8, True, 4, 3, 7, NanRule.ALL_ONES, ("float8_e4m3fn", *_BYTES))
E2M1 = ElementType("e2m1", 4, True, 2, 1, 1, NanRule.NONE, _BYTES)
UE8M0 = ElementType("ue8m0", 8, False, 8, 0, 127, NanRule.ALL_ONES, ("float8_e8m0fnu", *_BYTES))
UE4M3 = ElementType("ue4m3", 8, False, 4, 3, 7, NanRule.ALL_ONES, ("float8_e4m3fn", *_BYTES))

ELEMENT_TYPES: dict[str, ElementType] = {t.name: t for t in (BF16, FP16, FP32, E4M3, E2M1, UE8M0, UE4M3)}


def element_type(name: str) -> ElementType:
    """The element type of that name; an unknown one raises SpecError listing all."""
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise SpecError(f"unknown element type {name!r}: known are {', '.join(ELEMENT_TYPES)}") from None
