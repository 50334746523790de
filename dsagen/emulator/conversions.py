"""cvt between floating-point formats, and all its qualifiers."""

from __future__ import annotations

import re

from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported
from dsagen.emulator.syntax import Instruction, Operand, Reg, Vec

# As enum Kind of vm/numerics.h, with the bits that an element takes in a register.
_KINDS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 8, "e3m2": 8,
    "ue8m0": 8, "u8": 8, "s8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64,
}  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_SMALL = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
# As enum Rounding there; the second name rounds to whole numbers.
_ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4, "rs": 5, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
_FLAGS = {"relu": 1 << 13, "satfinite": 1 << 14, "sat": 1 << 15, "ftz": 1 << 16}
_TO_WHOLE = 1 << 17
_PACK = re.compile(r"cvt\.pack\.sat\.([us])(2|4|8|16)\.s32(\.b32)?\Z")


def lower_conversion(lowering: Lowering, ins: Instruction) -> list[Op]:
    """The operations of a cvt; Unsupported where PTX has no such one."""
    pack = _PACK.match(ins.opcode)
    if pack is not None:
        return _pack(lowering, ins, pack)
    *qualifiers, to, from_ = ins.opcode.split(".")[1:]
    to, elements = _elements(to)
    from_, from_elements = _elements(from_)
    elements = max(elements, from_elements)
    if to not in _KINDS or from_ not in _KINDS or not _exists(to, from_, elements):
        raise Unsupported
    flags = _NUMBERS[from_] | _NUMBERS[to] << 5 | elements << 18
    for qualifier in qualifiers:
        if qualifier in _ROUNDINGS:
            flags |= _ROUNDINGS[qualifier] << 10
            flags |= _TO_WHOLE if qualifier.endswith("i") else 0
        elif qualifier in _FLAGS:
            flags |= _FLAGS[qualifier]
        else:
            raise Unsupported
    args = [lowering.destination(ins.operands[0], _KINDS[to] * elements)]
    sources = list(ins.operands[1:])
    random = sources.pop() if "rs" in qualifiers else None
    values = _sources(sources, elements if from_ == "f32" else 1)
    args += [lowering.source(value, _KINDS[from_] * (1 if from_ == "f32" else elements)) for value in values]
    if random is not None:
        args.append(lowering.source(random, 32))
    return [Op("cvt_any", args, flags=flags), *_sign_extension(ins.operands[0], to)]


def _elements(kind: str) -> tuple[str, int]:
    if kind[-2:] in ("x2", "x4"):
        return kind[:-2], int(kind[-1])
    return kind, 1


def _exists(to: str, from_: str, elements: int) -> bool:
    if elements == 1:
        return not {to, from_} & {*_SMALL, "ue8m0"} and from_ != "tf32" and (to != "tf32" or from_ == "f32")
    if to in _SMALL:
        return from_ == "f32" or (elements == 2 and from_ == "f16")
    if to == "ue8m0":
        return elements == 2 and from_ in ("f32", "bf16")
    if from_ == "ue8m0":
        return to == "bf16"
    return elements == 2 and ((to in ("f16", "bf16") and from_ == "f32") or (to == "f16" and from_ in _SMALL))


def _sources(sources: list[Operand], count: int) -> list[Operand]:
    if len(sources) == 1 and isinstance(sources[0], Vec):
        sources = list(sources[0].items)
    if len(sources) != count:
        raise Unsupported
    return sources


def _sign_extension(to: Operand, kind: str) -> list[Op]:
    """Signed results fill the register, which may be wider than their type."""
    if isinstance(to, Reg) and kind in ("s8", "s16") and to.bits == 32:
        return [Op("cvt_s32_s16", [Arg("def", to), Arg("use", to)])]
    return []


def _pack(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    """Two integers, saturated, below those that c has already."""
    d, a, b, *rest = ins.operands
    if len(rest) != (match[3] is not None) or (match[2] == "16") == bool(rest):
        raise Unsupported
    args = [lowering.destination(d, 32), lowering.source(a, 32), lowering.source(b, 32)]
    args.append(lowering.source(rest[0] if rest else a, 32))
    return [Op("cvt_pack", args, imm=int(match[2]), flags=int(match[1] == "s"))]
