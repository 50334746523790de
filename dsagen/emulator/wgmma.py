"""wgmma.mma_async as operations of the machine: types, shapes, and where its operands lie."""

from __future__ import annotations

import re

from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, items
from dsagen.emulator.syntax import Imm, Instruction, Operand, Reg, Vec

# Rows of A and D; the machine's name of a product gives its dims.
ROWS = 64
# Type of an element -> dims of a product, number as kUnpack of vm/products.h has it.
_TYPES = {"f16": (16, 0), "bf16": (16, 1), "tf32": (8, 2), "e4m3": (32, 3), "e5m2": (32, 4)}
_WHOLE = {"u8": 0, "s8": 1}
# Bits of flags, as WgmmaForm of vm/wgmma.h has them.
_NARROW, A_IN_REGISTERS = 1 << 8, 1 << 9
PATTERN = (
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16|32)(\.satfinite)?\.(f32|f16|s32)"
    rf"\.({'|'.join((*_TYPES, *_WHOLE))})\.({'|'.join((*_TYPES, *_WHOLE))})"
)


def lower_mma_async(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    """One product of a warpgroup; Unsupported for types, shapes or operands that do not go together."""
    columns, dims, saturates, to, a_type, b_type = int(match[1]), int(match[2]), match[3], match[4], match[5], match[6]
    whole = a_type in _WHOLE
    if columns % 8 or not 8 <= columns <= 256 or (whole and columns > 24 and columns % 16):
        raise Unsupported
    if (whole and b_type not in _WHOLE) or whole != (to == "s32") or (saturates and not whole):
        raise Unsupported
    d, a, b, adds, *rest = ins.operands
    in_registers = isinstance(a, Vec)
    transposes = 0
    if not whole:
        _require_types(dims, to, a_type, b_type)
        negates, transposes = _modifiers(rest, halves=dims == 16, in_registers=in_registers)
        flags = (
            _TYPES[a_type][1]
            | _TYPES[b_type][1] << 4
            | (_NARROW if to == "f16" else 0)
            | negates << 10
            | transposes << 11
        )
    elif dims != 32 or rest:
        raise Unsupported
    else:
        flags = _WHOLE[a_type] | _WHOLE[b_type] << 4 | (saturates is not None) << 13
    results = items(d)
    if len(results) != columns // (4 if to == "f16" else 2) or not all(isinstance(item, Reg) for item in results):
        raise Unsupported
    # D is added to in place, so it is a source that stays alive.
    args = [lowering.source(item, 32) for item in results]
    args += _operand_a(lowering, a)
    args += [lowering.source(b, 64), lowering.predicate(adds)]
    name = "wgmma_bytes_k32" if whole else f"wgmma_k{dims}"
    return [Op(name, args, imm=columns, flags=flags | (A_IN_REGISTERS if in_registers else 0))]


def results_of(op: Op) -> int:
    """How many of a product's operands are accumulators."""
    return op.imm // (4 if op.flags & _NARROW else 2)


def _require_types(dims: int, to: str, a_type: str, b_type: str) -> None:
    if _TYPES[a_type][0] != dims or b_type not in _TYPES or _TYPES[b_type][0] != dims:
        raise Unsupported
    if (dims < 32 and a_type != b_type) or (to == "f16" and a_type in ("bf16", "tf32")):
        raise Unsupported


def _modifiers(rest: list[Operand], *, halves: bool, in_registers: bool) -> tuple[bool, int]:
    """Whether the product is negated, and the bits for A and B transposed. Only 16-bit types come transposed."""
    count = 2 + (0 if not halves else 1 if in_registers else 2)
    values = [item.value for item in rest if isinstance(item, Imm)]
    if len(rest) != count or len(values) != count:
        raise Unsupported
    scales, transposes = values[:2], values[2:]
    if any(scale not in (1, -1) for scale in scales) or any(value not in (0, 1) for value in transposes):
        raise Unsupported
    a, b = ([0, 0, *transposes])[-2:] if not in_registers else (0, (transposes or [0])[0])
    return scales[0] * scales[1] < 0, a | b << 1


def _operand_a(lowering: Lowering, a: Operand) -> list[Arg]:
    if not isinstance(a, Vec):
        return [lowering.source(a, 64)]
    if len(a.items) != 4:
        raise Unsupported
    return [lowering.source(item, 32) for item in a.items]
