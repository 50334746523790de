"""How a writer of index keys chooses scales and rounds values: the rules of each index-key format, exact to the bit.

Writers differ as those of KV caches do (`kv_rule`), and the same name means the same arithmetic there. In MXFP4 they
differ in ties as well, and none keeps the sign of what rounds to zero.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from dsagen.dtype import E2M1, E4M3
from dsagen.errors import SpecError
from dsagen.index_format import IndexFormat
from dsagen.kv_rule import SMALL, Rounding, WriteRule


def _fp4(rule_id: str, amax_floor: float, scale_floor: float, ties_down: bool) -> WriteRule:
    return WriteRule(rule_id, E2M1, amax_floor, scale_floor, Rounding.POW2, ties_down=ties_down, zero_has_sign=False)


_POW2 = WriteRule("pow2_amax_floor", E4M3, SMALL, 0.0, Rounding.POW2)
# By format; of each the first is what a spec takes unless it names one.
_RULES: Mapping[str, tuple[WriteRule, ...]] = {
    "fp8": (
        _POW2,
        WriteRule("amax_floor", E4M3, SMALL, 0.0, Rounding.NONE),
        WriteRule("amax_floor_reciprocal", E4M3, SMALL, 0.0, Rounding.NONE, by_reciprocal=True),
        WriteRule("amax_floor_multiply", E4M3, SMALL, 0.0, Rounding.NONE, multiplies=True),
    ),
    "mxfp8": (_POW2,),
    "mxfp4": (
        _fp4("pow2_amax_floor", SMALL, 0.0, ties_down=False),
        _fp4("pow2_amax_floor_ties_down", SMALL, 0.0, ties_down=True),
        _fp4("pow2_scale_floor", 0.0, SMALL, ties_down=False),
        _fp4("pow2_scale_floor_ties_down", 0.0, SMALL, ties_down=True),
    ),
}
# Names of all formats' rules, each once.
INDEX_RULES: tuple[str, ...] = tuple(dict.fromkeys(rule.rule_id for rules in _RULES.values() for rule in rules))


def index_rules_of(record: IndexFormat) -> tuple[str, ...]:
    """The rules by which index keys of that format can be written, the default first."""
    return tuple(rule.rule_id for rule in _RULES[record.format_id])


def default_index_rule(record: IndexFormat) -> str:
    """The rule that a spec takes unless it names one."""
    return index_rules_of(record)[0]


def index_rule(record: IndexFormat, rule_id: str) -> WriteRule:
    """The rule of that id for that format; SpecError, with what is allowed, where the format is not written so."""
    for rule in _RULES[record.format_id]:
        if rule.rule_id == rule_id:
            return rule
    allowed = index_rules_of(record)
    close = [] if rule_id in INDEX_RULES else difflib.get_close_matches(str(rule_id), allowed, n=1, cutoff=0.6)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise SpecError(f"{record.format_id} index keys are not written by it{hint}: allowed are {', '.join(allowed)}")
