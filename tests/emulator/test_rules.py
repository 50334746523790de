"""Every form that the rules accept leads to an instruction that the machine has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from dsagen.emulator.forms import find_form
from dsagen.emulator.library import load_library
from dsagen.emulator.lower import lower_instruction
from dsagen.emulator.operations import Lowering
from dsagen.emulator.ptx import parse
from dsagen.emulator.rules import RULES, Rule, find_rule

_PARSER: Any = re._parser  # type: ignore[attr-defined]


def texts(pattern: Any, groups: dict[int, str]) -> Iterator[tuple[str, dict[int, str]]]:
    """Texts that a parsed pattern matches, with what its groups hold; repetitions of none and one."""
    if len(pattern) == 0:
        yield "", groups
        return
    (kind, value), rest = pattern[0], pattern[1:]
    for first, held in pieces(str(kind), value, groups):
        for second, then in texts(rest, held):
            yield first + second, then


def pieces(kind: str, value: Any, groups: dict[int, str]) -> Iterator[tuple[str, dict[int, str]]]:
    if kind == "LITERAL":
        yield chr(value), groups
    elif kind == "IN":
        # A class of letters is written out; of one like \w a letter stands for all.
        letters = [chr(code) for name, code in value if str(name) == "LITERAL"]
        yield from ((letter, groups) for letter in (letters if all(str(n) == "LITERAL" for n, _ in value) else ["x"]))
    elif kind == "BRANCH":
        for branch in value[1]:
            yield from texts(branch, groups)
    elif kind == "SUBPATTERN":
        for text, held in texts(value[3], groups):
            yield text, ({**held, value[0]: text} if value[0] else held)
    elif kind == "MAX_REPEAT":
        low, _, part = value
        if low == 0:
            yield "", groups
        yield from texts(part, groups)
    elif kind == "GROUPREF":
        yield groups[value], groups
    elif kind == "AT":
        yield "", groups
    else:
        raise AssertionError(kind)


def opcodes(pattern: re.Pattern[str]) -> list[str]:
    found = [text for text, _ in texts(_PARSER.parse(pattern.pattern), {})]
    assert found
    assert all(pattern.match(text) for text in found)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern.pattern)
def test_rules_name_instructions(rule: Rule) -> None:
    numbers = load_library().numbers
    for opcode in opcodes(rule.pattern):
        found = find_rule(opcode)
        assert found is not None
        # A row that an earlier one or a function hides would never be used.
        assert found[0] is rule
        assert find_form(opcode) is None
        assert found[1] in numbers, opcode


_INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]


def test_conversions_and_comparisons_name_instructions() -> None:
    lines = [f"cvt{sat}.{d}.{s} {reg(d)}, {reg(s)};" for sat, d, s in product(("", ".sat"), _INTEGERS, _INTEGERS)]
    compares = ("eq", "ne", "lt", "le", "gt", "ge")
    kinds = ("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
    lines += [f"setp.{c}.{k} %p1, {reg(k)}, {reg(k)};" for c, k in product(compares, kinds)]
    lines += [f"setp.{c}.f32 %p1, %r1, %r1;" for c in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")]
    header = ".visible .entry k() {.reg .pred %p<2>; .reg .b16 %h<2>; .reg .b32 %r<2>; .reg .b64 %d<2>;"
    kernel = parse(header + "\n".join(lines) + "}").kernels["k"]
    numbers, lowering = load_library().numbers, Lowering({})
    for instruction in kernel.instructions:
        for op in lower_instruction(lowering, instruction):
            assert op.name != "unknown", instruction.opcode
            assert op.name in numbers, instruction.opcode


def reg(kind: str) -> str:
    return {"8": "%h1", "16": "%h1", "32": "%r1", "64": "%d1"}[kind[1:]]
