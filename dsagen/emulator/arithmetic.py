"""Arithmetic with too many qualifiers for a table: rounding, saturation, carries, comparisons that give numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, constant
from dsagen.emulator.syntax import Instruction, Operand, Pair, Reg, Sink

# As enum Operation of vm/floating.cpp and of vm/halves.cpp.
_WIDE = {"add": 0, "sub": 1, "mul": 2, "fma": 3, "mad": 3, "div": 4, "rcp": 5, "sqrt": 6, "min": 7, "max": 8}
_WIDE |= {"abs": 9, "neg": 10, "rsqrt": 11}
_HALF = {"add": 0, "sub": 1, "mul": 2, "fma": 3, "min": 4, "max": 5, "ex2": 6, "tanh": 7, "abs": 8, "neg": 9}
_SOURCES = {"fma": 3, "mad": 3, "add": 2, "sub": 2, "mul": 2, "div": 2, "min": 2, "max": 2}
_TYPES = {"f32": 32, "f64": 64, "f32x2": 64, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}
_ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
_QUALIFIERS = {"ftz": 1 << 2, "sat": 1 << 3, "NaN": 1 << 4, "xorsign": 1 << 5, "relu": 1 << 6}
_SILENT = ("approx", "full")
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_BOOLEANS = {"and": 1, "or": 2, "xor": 3}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
_PAIR_OPERATIONS = {"add": 0, "min": 1, "max": 2, "sub": 3, "neg": 4}
_ONES = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF, "s16": 0xFFFF, "f32": 0x3F800000}
_ONES |= {"f16": 0x3C00, "bf16": 0x3F80}
_TRUE = Arg("raw", 1)


def lower_arithmetic(lowering: Lowering, ins: Instruction) -> list[Op]:
    """The operations of an instruction; Unsupported where there are none."""
    operation, _, rest = ins.opcode.partition(".")
    special = _SPECIAL.get(operation)
    if special is not None:
        return special(lowering, ins)
    parts = rest.split(".")
    if parts[-1] == "relu":
        # Of integers it stands behind the type.
        return lower_arithmetic(lowering, replace(ins, opcode=".".join((operation, "relu", *parts[:-1]))))
    if parts[-1] in ("u16x2", "s16x2"):
        return _pair_of_integers(lowering, ins, operation, parts)
    if operation in ("min", "max") and parts == ["relu", "s32"]:
        to, a, b = ins.operands
        args = [lowering.destination(to, 32), lowering.source(a, 32), lowering.source(b, 32)]
        return [Op(f"{operation}_relu_s32", args)]
    if parts[-2:-1] == ["f32"] and parts[-1] in ("f16", "bf16"):
        return _mixed(lowering, ins, operation, parts)
    if "cc" in parts:
        return _carry(lowering, ins)
    return [_float(lowering, operation, parts[-1], parts[:-1], ins.operands)]


def _float(lowering: Lowering, operation: str, kind: str, qualifiers: Sequence[str], operands: Sequence[Operand]) -> Op:
    half = kind in ("f16", "bf16", "f16x2", "bf16x2")
    numbers = _HALF if half else _WIDE
    if kind not in _TYPES or operation not in numbers:
        raise Unsupported
    count = len(operands) - 1
    if count != _SOURCES.get(operation, 1) and not (operation in ("min", "max") and count == 3):
        raise Unsupported
    flags = _float_flags(qualifiers, half=half) | count << 7
    if half:
        flags |= kind.startswith("b") | kind.endswith("x2") << 1
    bits = _TYPES[kind]
    args = [lowering.destination(operands[0], bits)]
    args += [lowering.source(value, bits) for value in operands[1:]]
    name = "arithmetic_any_f16" if half else "arithmetic_pair_f32" if kind == "f32x2" else f"arithmetic_{kind}"
    return Op(name, args, imm=numbers[operation], flags=flags)


def _float_flags(qualifiers: Sequence[str], *, half: bool) -> int:
    flags = 0
    for at, qualifier in enumerate(qualifiers):
        if qualifier in _ROUNDINGS and (not half or qualifier == "rn"):
            flags |= _ROUNDINGS[qualifier]
        elif qualifier in _QUALIFIERS:
            flags |= _QUALIFIERS[qualifier]
        elif not (qualifier in _SILENT or (qualifier == "abs" and qualifiers[at - 1] == "xorsign")):
            raise Unsupported
    return flags


def _mixed(lowering: Lowering, ins: Instruction, operation: str, parts: Sequence[str]) -> list[Op]:
    """fp32 arithmetic whose first operands, all but the last, are narrow."""
    if operation not in ("add", "sub", "fma"):
        raise Unsupported
    to, *narrow, last = ins.operands
    wide: list[Operand] = []
    ops = []
    for value in narrow:
        wide.append(lowering.temporary(32))
        args = [lowering.destination(wide[-1], 32), lowering.source(value, 16)]
        ops.append(Op(f"cvt_f32_{parts[-1]}", args))
    return [*ops, _float(lowering, operation, "f32", parts[:-2], (to, *wide, last))]


def _pair_of_integers(lowering: Lowering, ins: Instruction, operation: str, parts: Sequence[str]) -> list[Op]:
    *qualifiers, kind = parts
    if operation not in _PAIR_OPERATIONS or any(qualifier != "relu" for qualifier in qualifiers):
        raise Unsupported
    to, *values = ins.operands
    if len(values) != (1 if operation == "neg" else 2):
        raise Unsupported
    args = [lowering.destination(to, 32), lowering.source(values[0], 32), lowering.source(values[-1], 32)]
    flags = int(kind[0] == "s") | (2 if qualifiers else 0)
    return [Op("add_any_b16x2", args, imm=_PAIR_OPERATIONS[operation], flags=flags)]


# ---- carries --------------------------------------------------------------------------------------------------------

_CARRY = re.compile(r"(addc?|subc?|madc?\.(?:lo|hi))(\.cc)?\.([us])(32|64)\Z")


def _carry(lowering: Lowering, ins: Instruction) -> list[Op]:
    match = _CARRY.match(ins.opcode)
    if match is None:
        raise Unsupported
    operation, bits = match[1], int(match[4])
    carry_out = Arg("def", lowering.carry) if match[2] else Arg("trash", 0)
    carry_in = Arg("use", lowering.carry) if operation.partition(".")[0].endswith("c") else Arg("raw", 0)
    to, *values = ins.operands
    if len(values) != (3 if operation.startswith("mad") else 2):
        raise Unsupported
    args = [lowering.destination(to, bits), carry_out, *(lowering.source(value, bits) for value in values), carry_in]
    if operation.startswith("mad"):
        high = operation.endswith("hi")
        return [Op(f"mad_carry_b{bits}", args, imm=0 if not high else 2 if match[3] == "s" else 1)]
    return [Op(f"add_carry_b{bits}", args, imm=int(operation.startswith("sub")))]


# ---- comparisons ----------------------------------------------------------------------------------------------------

_SETP = re.compile(r"(setp?)\.(\w+)(?:\.(and|or|xor))?(\.ftz)?(?:\.([us]32|[us]16|f32|b?f16|b?f16x2))?\.(\w+)\Z")


def _comparison(lowering: Lowering, ins: Instruction) -> list[Op]:
    """Setp of narrow types and with .ftz, and set of all types."""
    match = _SETP.match(ins.opcode)
    if match is None or (match[1] == "setp") != (match[5] is None):
        raise Unsupported
    compare, kind = match[2], match[6]
    to, a, b, *rest = ins.operands
    if len(rest) != (match[3] is not None):
        raise Unsupported
    condition = lowering.predicate(rest[0]) if rest else _TRUE
    halves = 2 if kind.endswith("x2") else 1
    if match[1] == "setp":
        first, second = (to.first, to.second) if isinstance(to, Pair) else (to, Sink())
        results = [lowering.predicate_result(first), lowering.predicate_result(second)]
        if halves == 1:
            return [_compare(lowering, compare, kind, match, (a, b), results, condition)]
        return [
            _compare(lowering, compare, kind, match, (a, b), [result, Arg("trash", 0)], condition, upper=upper)
            for upper, result in enumerate(results)
        ]
    tests = [lowering.temporary(0) for _ in range(halves)]
    ops = [
        _compare(lowering, compare, kind, match, (a, b), [Arg("def", p), Arg("trash", 0)], condition, upper=upper)
        for upper, p in enumerate(tests)
    ]
    return ops + _numbers(lowering, to, match[5], tests)


def _compare(
    lowering: Lowering, compare: str, kind: str, match: re.Match[str], values: Sequence[Operand],
    results: Sequence[Arg], condition: Arg, upper: int = 0,
) -> Op:  # fmt: skip
    boolean = _BOOLEANS.get(match[3], 0)
    compare = _UNSIGNED.get(compare, compare)
    if compare not in _COMPARES:
        raise Unsupported
    bits = _TYPES.get(kind, 0) or (int(kind[1:]) if kind[1:] in ("16", "32", "64") else 0)
    args = [*results, *(lowering.source(value, bits) for value in values), condition]
    kind = kind.removesuffix("x2")
    if kind in ("f16", "bf16") or match[4] is not None:
        if kind not in ("f16", "bf16", "f32"):
            raise Unsupported
        types = {"f16": 0, "bf16": 1, "f32": 2}[kind]
        flags = boolean | types << 2 | (match[4] is not None) << 4 | upper << 5
        return Op("setp_any", args, imm=_COMPARES.index(compare), flags=flags)
    if bits == 0 or (kind[0] != "f" and compare not in _COMPARES[:6]):
        raise Unsupported
    return Op(f"setp_{compare}_{kind.replace('b', 'u')}", args, flags=boolean)


def _numbers(lowering: Lowering, to: Operand, kind: str, tests: Sequence[Reg]) -> list[Op]:
    """What set writes where a comparison holds: all ones, or 1.0."""
    one = _ONES.get(kind.removesuffix("x2"))
    if one is None or (len(tests) == 2 and kind not in ("f16x2", "bf16x2", "u32", "s32")):
        raise Unsupported
    one_arg, zero = Arg("use", constant(one, 32)), Arg("use", constant(0, 32))
    if len(tests) == 1:
        return [Op("selp_b32", [lowering.destination(to, 32), one_arg, zero, Arg("use", tests[0])])]
    halves = [lowering.temporary(16), lowering.temporary(16)]
    ops = [
        Op("selp_b16", [Arg("def", half), one_arg, zero, Arg("use", test)])
        for half, test in zip(halves, tests, strict=True)
    ]
    pack = [lowering.destination(to, 32), Arg("use", halves[0]), Arg("use", halves[1])]
    return [*ops, Op("pack", pack, imm=16, flags=2)]


_SLCT = re.compile(r"slct(\.ftz)?\.[usbf](16|32|64)\.([sf]32)\Z")


def _slct(lowering: Lowering, ins: Instruction) -> list[Op]:
    match = _SLCT.match(ins.opcode)
    if match is None:
        raise Unsupported
    to, a, b, c = ins.operands
    bits, test = int(match[2]), lowering.temporary(0)
    # A subnormal that is flushed keeps its sign, but -0 counts as not negative.
    compare = [Arg("def", test), Arg("trash", 0), lowering.source(c, 32), Arg("use", constant(0, 32)), _TRUE]
    ops = [Op("setp_any", compare, imm=_COMPARES.index("ge"), flags=2 << 2 | (match[1] is not None) << 4)]
    if match[3] == "s32":
        ops = [Op("setp_ge_s32", compare)]
    values = [lowering.destination(to, bits), lowering.source(a, bits), lowering.source(b, bits)]
    return [*ops, Op(f"selp_b{bits}", [*values, Arg("use", test)])]


# ---- bits -----------------------------------------------------------------------------------------------------------


def _prmt(lowering: Lowering, ins: Instruction) -> list[Op]:
    mode = ins.opcode.removeprefix("prmt.b32.")
    if mode not in _PRMT_MODES:
        raise Unsupported
    to, a, b, c = ins.operands
    args = [lowering.destination(to, 32), *(lowering.source(value, 32) for value in (a, b, c))]
    return [Op("prmt_mode", args, imm=_PRMT_MODES.index(mode))]


def _lop3(lowering: Lowering, ins: Instruction) -> list[Op]:
    """With a predicate that says whether any bit is set."""
    boolean = {"lop3.or.b32": 0, "lop3.and.b32": 1}.get(ins.opcode)
    if boolean is None:
        raise Unsupported
    to, a, b, c, table, q = ins.operands
    if not isinstance(to, Pair):
        raise Unsupported
    # The bits are needed even where the text drops them.
    bits = lowering.temporary(32)
    values = [lowering.source(value, 32) for value in (a, b, c)]
    ops = [Op("lop3_b32", [Arg("def", bits), *values], imm=getattr(table, "value", 0))]
    ops.append(
        Op("lop3_test", [lowering.predicate_result(to.second), Arg("use", bits), lowering.predicate(q)], imm=boolean)
    )
    return [*ops, Op("mov_b32", [lowering.destination(to.first, 32), Arg("use", bits)])]


def _mad24(lowering: Lowering, ins: Instruction) -> list[Op]:
    match = re.match(r"mad24\.(lo|hi)\.([us]32)\Z", ins.opcode)
    if match is None:
        raise Unsupported
    to, a, b, c = ins.operands
    product = lowering.temporary(32)
    factors = [Arg("def", product), lowering.source(a, 32), lowering.source(b, 32)]
    total = [lowering.destination(to, 32), Arg("use", product), lowering.source(c, 32)]
    return [Op(f"mul_24_{match[1]}_{match[2]}", factors), Op("add_b32", total)]


def _absolute_differences(lowering: Lowering, ins: Instruction) -> list[Op]:
    if ins.opcode not in ("vabsdiff4.u32.u32.u32", "vabsdiff4.u32.u32.u32.add"):
        raise Unsupported
    to, *values = ins.operands
    args = [lowering.destination(to, 32), *(lowering.source(value, 32) for value in values)]
    if len(values) != 3:
        raise Unsupported
    return [Op("abs_differences_b8x4", args, imm=int(ins.opcode.endswith("add")))]


_SPECIAL: dict[str, Callable[[Lowering, Instruction], list[Op]]] = {
    "addc": _carry, "subc": _carry, "madc": _carry, "setp": _comparison, "set": _comparison, "slct": _slct,
    "prmt": _prmt, "vabsdiff4": _absolute_differences, "lop3": _lop3, "mad24": _mad24,
}  # fmt: skip
