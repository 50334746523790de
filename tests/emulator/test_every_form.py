"""No form without a micro-kernel: what the files of conftest.MICRO launched has every row and every instruction.

It runs behind them in one process, and counts as skipped where not all of them ran there.
"""

from __future__ import annotations

import re
import struct
from functools import cache

import micro
import pytest

from dsagen.emulator.forms import _FORMS
from dsagen.emulator.launch import _program
from dsagen.emulator.library import load_library
from dsagen.emulator.rules import RULES
from dsagen.errors import EmulatorError

_OPCODE = re.compile(r"(?:^|[;{}:\s])([a-z]\w*(?:\.[\w:]+)*)(?=[\s;])")
# What stands for instructions that the machine does not have.
NO_INSTRUCTION = {"unknown"}


@cache
def launched() -> tuple[frozenset[str], frozenset[int]]:
    """Opcodes, and the machine's instructions by number, of all kernels that were launched."""
    opcodes: set[str] = set()
    numbers: set[int] = set()
    for text in micro.LAUNCHED:
        try:
            code = _program(text, "k", None).code
        except EmulatorError:
            continue
        opcodes.update(_OPCODE.findall(text))
        numbers.update(struct.unpack_from("<H", code, at)[0] for at in range(0, len(code), 16))
    return frozenset(opcodes), frozenset(numbers)


@pytest.fixture(autouse=True)
def all_have_run(micro_tests_that_did_not_pass: list[str]) -> None:
    if micro_tests_that_did_not_pass:
        pytest.skip(f"{len(micro_tests_that_did_not_pass)} did not pass in this process")


def test_every_instruction_of_the_machine_was_launched() -> None:
    _, numbers = launched()
    missing = {name for name, number in load_library().numbers.items() if number not in numbers}
    assert missing - NO_INSTRUCTION == set()


def test_every_row_of_the_rules_was_launched() -> None:
    opcodes, _ = launched()
    patterns = [rule.pattern for rule in RULES] + [pattern for pattern, _ in _FORMS]
    assert [p.pattern for p in patterns if not any(p.match(opcode) for opcode in opcodes)] == []
