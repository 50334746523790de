"""How a writer chooses a group's scale and rounds its values: the declared rules, each one exact to the bit.

amax is the largest magnitude of a group; all arithmetic is fp32, each step rounded to nearest even. `most` is the
largest number of the values' type (448 for e4m3, 6 for e2m1).

    quotient  t = amax / most, or amax * fp32(1 / most)
    floor     of amax before it, of t after it, or none
    scale     t itself, the least power of two at or above it, or t rounded to e4m3
    code      x / scale, or x * fp32(1 / scale), to the nearest code, ties to even or down, saturating

Writers differ in each of these, and a reader cannot tell: a rule is declared, like the format.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

from dsagen.dtype import E2M1, E4M3, ElementType
from dsagen.errors import SpecError
from dsagen.kv_format import KvFormat, ScaleKind

COPY = "copy"
# Rounded to fp32 they are the constants of the rules' arithmetic.
SMALL = 1e-4
_LEAST_NORMAL = 2.0**-126
_LEAST_E4M3 = 2.0**-9


class Rounding(StrEnum):
    """What becomes of the quotient."""

    NONE = "none"
    POW2 = "pow2"  # the least power of two at or above it
    E4M3 = "e4m3"  # nearest, ties to even


@dataclass(frozen=True)
class WriteRule:
    """One rule. Floors of 0 are none; `multiplies` is of the quotient, `by_reciprocal` of the codes.

    `ties_down` takes the smaller of two codes that are as near, in place of the even one; `zero_has_sign` is whether
    what rounds to zero keeps its sign.
    """

    rule_id: str
    values: ElementType
    amax_floor: float
    scale_floor: float
    rounding: Rounding
    multiplies: bool = False
    by_reciprocal: bool = False
    ties_down: bool = False
    zero_has_sign: bool = True

    @property
    def most(self) -> float:
        """Largest number of the values' type."""
        return self.values.largest

    @property
    def scale_kinds(self) -> tuple[ScaleKind, ...]:
        """Kinds of scale that hold what the rule makes, exactly."""
        if self.rounding is Rounding.E4M3:
            return (ScaleKind.E4M3,)
        powers = (ScaleKind.FP32_POW2, ScaleKind.UE8M0) if self.rounding is Rounding.POW2 else ()
        return (ScaleKind.FP32, *powers)

    def serves(self, record: KvFormat) -> bool:
        """Whether a cache of that format can be written by it."""
        if not record.scale_groups:
            return False
        return record.segment("values").element is self.values and record.scale_kind in self.scale_kinds


_RULES = (
    WriteRule("normal_floor", E4M3, 0.0, _LEAST_NORMAL, Rounding.NONE),
    WriteRule("normal_floor_reciprocal", E4M3, 0.0, _LEAST_NORMAL, Rounding.NONE, by_reciprocal=True),
    WriteRule("amax_floor", E4M3, SMALL, 0.0, Rounding.NONE),
    WriteRule("amax_floor_multiply", E4M3, SMALL, 0.0, Rounding.NONE, multiplies=True),
    WriteRule("pow2_scale_floor", E4M3, 0.0, SMALL, Rounding.POW2),
    WriteRule("pow2_amax_floor", E4M3, SMALL, 0.0, Rounding.POW2),
    WriteRule("e4m3_scale_floor", E2M1, 0.0, _LEAST_E4M3, Rounding.E4M3),
)
WRITE_RULES: dict[str, WriteRule] = {rule.rule_id: rule for rule in _RULES}

# What the engines that made a family its own use; elsewhere the first that serves.
_DEFAULTS = {"v4": "pow2_amax_floor"}


def rules_of(record: KvFormat) -> tuple[str, ...]:
    """The rules by which a cache of that format can be written; `copy` alone where it has no scales."""
    if not record.scale_groups:
        return (COPY,)
    return tuple(rule.rule_id for rule in _RULES if rule.serves(record))


def default_rule(record: KvFormat) -> str:
    """The rule that a spec takes unless it names one."""
    return _DEFAULTS.get(record.family, rules_of(record)[0])


def write_rule(record: KvFormat, rule_id: str) -> WriteRule | None:
    """The rule of that id, None for `copy`; SpecError, with what is allowed, where the format cannot be written so."""
    allowed = rules_of(record)
    if rule_id not in allowed:
        known = rule_id in (COPY, *WRITE_RULES)
        close = [] if known else difflib.get_close_matches(str(rule_id), allowed, n=1, cutoff=0.6)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SpecError(f"format {record.format_id} is not written by it{hint}: allowed are {', '.join(allowed)}")
    return WRITE_RULES.get(rule_id)
