"""Instructions whose operations a row of the rules cannot describe: moves, conversions, memory, matrices, barriers."""

from __future__ import annotations

import re
from collections.abc import Callable

from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, items
from dsagen.emulator.syntax import Addr, Instruction, Pair, Reg, Sink, Sym, Vec

Form = Callable[[Lowering, Instruction, re.Match[str]], list[Op]]

_SPACES = {"": 0, "global": 1, "shared": 2, "local": 3, "param": 4, "const": 5}
_BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32}
_BITS |= {"s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}
# Parts of ld and st that do not change what they do here.
_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "nc", "ca", "cg", "cs"}
_ORDERS |= {"lu", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L2::64B", "L2::128B"}
_ORDERS |= {"L2::256B"}
_ATOMS = {"add": 0, "min.s": 1, "max.s": 2, "min.u": 3, "max.u": 4, "and": 5, "or": 6, "xor": 7, "exch": 8, "cas": 9}
_ATOMS |= {"inc": 10, "dec": 11, "add.f": 12}
_BOOLEANS = {None: 0, "and": 1, "or": 2, "xor": 3}
_UNSIGNED_COMPARES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BARRIER_RESULTS = {"and.pred": 2, "or.pred": 3, "popc.u32": 4}


def _mov(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    to, value = ins.operands
    bits = _BITS[match[1]]
    if isinstance(value, Sym) and value.name in ("%clock", "%clock_hi", "%clock64", "%globaltimer"):
        return [Op("clock", [lowering.destination(to, bits)], imm=bits)]
    if isinstance(to, Vec):
        each = bits // len(to.items)
        args = [lowering.destination(item, each) for item in to.items] + [lowering.source(value, bits)]
        return [Op("unpack", args, imm=each, flags=len(to.items))]
    if isinstance(value, Vec):
        each = bits // len(value.items)
        args = [lowering.destination(to, bits), *(lowering.source(item, each) for item in value.items)]
        return [Op("pack", args, imm=each, flags=len(value.items))]
    return [Op(f"mov_b{bits}", [lowering.destination(to, bits), lowering.source(value, bits)])]


def _setp(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    compare, boolean, kind = match[1], match[2], match[3]
    compare = _UNSIGNED_COMPARES.get(compare, compare)
    kind = kind.replace("b", "u")
    first, *rest = ins.operands
    p, q = (first.first, first.second) if isinstance(first, Pair) else (first, Sink())
    bits = int(kind[1:])
    args = [lowering.predicate_result(p), lowering.predicate_result(q)]
    args += [lowering.source(rest[0], bits), lowering.source(rest[1], bits)]
    if boolean is not None:
        args.append(lowering.predicate(rest[2]))
    return [Op(f"setp_{compare}_{kind}", args, flags=_BOOLEANS[boolean])]


def _cvt_integer(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    saturate, to_type, from_type = match[1] or "", match[2], match[3]
    to, value = ins.operands
    to_bits, from_bits = _BITS[to_type], _BITS[from_type]
    name = "cvt_" + ("sat_" if saturate else "") + f"{to_type}_{from_type}"
    ops = [Op(name, [lowering.destination(to, to_bits), lowering.source(value, from_bits)])]
    # Signed results fill the register, which may be wider than their type.
    if isinstance(to, Reg) and to_type in ("s8", "s16") and to.bits == 32:
        ops.append(Op("cvt_s32_s16", [Arg("def", to), Arg("use", to)]))
    return ops


def _cvta(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    args = [lowering.destination(ins.operands[0], 64), lowering.source(ins.operands[1], 64)]
    if match[2] == "shared":
        return [Op("cvta_shared", args, imm=1 if match[1] else 0)]
    return [Op("mov_b64", args)]


def _memory_parts(opcode: str, orders: set[str]) -> tuple[str, int, str]:
    """Space, elements and type of ld.* or st.*."""
    space, count = "", 1
    *parts, kind = opcode.split(".")[1:]
    for part in parts:
        name = part.split("::")[0]
        if name in _SPACES and part not in ("shared::cluster",):
            space = name
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part not in orders:
            raise Unsupported
    if kind not in _BITS:
        raise Unsupported
    return space, count, kind


def _memory_flags(space: str, kind: str, count: int, *, wide: bool, register_bits: int = 32) -> int:
    log_bytes = {8: 0, 16: 1, 32: 2, 64: 3}
    return (
        _SPACES[space]
        | log_bytes[_BITS[kind]] << 3
        | count << 5
        | (kind[0] == "s") << 9
        | wide << 10
        | log_bytes[register_bits] << 11
    )


def _ld(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    space, count, kind = _memory_parts(ins.opcode, _ORDERS)
    base, offset, wide = lowering.base(ins.operands[1])
    targets = items(ins.operands[0])
    if len(targets) != count:
        raise Unsupported
    registers = [target for target in targets if isinstance(target, Reg)]
    bits = registers[0].bits if registers else _BITS[kind]
    if bits == 0 or any(register.bits != bits for register in registers) or bits < _BITS[kind]:
        raise Unsupported
    args = [lowering.destination(target, 64 if bits == 64 else 32) for target in targets]
    flags = _memory_flags(space, kind, count, wide=wide, register_bits=bits)
    return [Op("ld", [*args, base], imm=offset, flags=flags)]


def _st(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    space, count, kind = _memory_parts(ins.opcode, _ORDERS)
    base, offset, wide = lowering.base(ins.operands[0])
    values = items(ins.operands[1])
    if len(values) != count:
        raise Unsupported
    args = [lowering.source(value, _BITS[kind]) for value in values]
    return [Op("st", [base, *args], imm=offset, flags=_memory_flags(space, kind, count, wide=wide))]


def _atom(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    parts = ins.opcode.split(".")[1:]
    kind = parts.pop()
    operation = parts.pop()
    space = ""
    for part in parts:
        name = part.split("::")[0]
        if name in ("global", "shared"):
            space = name
        elif part not in _ORDERS and part != "acq_rel":
            raise Unsupported
    bits = _BITS.get(kind, 0)
    key = f"{operation}.{kind[0]}" if operation in ("min", "max") else operation
    key = "add.f" if operation == "add" and kind in ("f32", "f64") else key
    if key not in _ATOMS or bits not in (32, 64) or kind in ("f16x2", "bf16x2"):
        raise Unsupported
    operands = list(ins.operands)
    to = operands.pop(0) if match[1] == "atom" else Sink()
    base, offset, wide = lowering.base(operands[0])
    values = [lowering.source(value, bits) for value in operands[1:]]
    args = [lowering.destination(to, bits), base, values[0], values[-1]]
    flags = _memory_flags(space, kind, 1, wide=wide) | _ATOMS[key] << 16
    return [Op("atom", args, imm=offset, flags=flags)]


def _matrix(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    count, transposed, shared = int(match[2]), match[3] is not None, match[4] is not None
    flags = (2 if shared else 0) | count << 3 | transposed << 6
    if len(items(ins.operands[0 if match[1] == "ld" else 1])) != count:
        raise Unsupported
    if match[1] == "ld":
        args = [lowering.destination(item, 32) for item in items(ins.operands[0])]
        return [Op("ldmatrix", args + lowering.address(ins.operands[1], wide=not shared), flags=flags)]
    args = [lowering.source(item, 32) for item in items(ins.operands[1])]
    return [Op("stmatrix", lowering.address(ins.operands[0], wide=not shared) + args, flags=flags)]


def _mma(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    d, a, b, c = (items(operand) for operand in ins.operands)
    if (len(d), len(a), len(b), len(c)) != (4, int(match[1]) // 4, int(match[1]) // 8, 4):
        raise Unsupported
    args = [lowering.destination(item, 32) for item in d]
    args += [lowering.source(item, 32) for item in (*a, *b, *c)]
    return [Op(f"mma_k{match[1]}_{match[2]}", args)]


def _copy_async(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    size = ins.operands[2]
    value = getattr(size, "value", 0)
    if value not in (4, 8, 16) or len(ins.operands) > 4 or not isinstance(ins.operands[0], Addr):
        raise Unsupported
    args = lowering.address(ins.operands[0], wide=False) + lowering.address(ins.operands[1], wide=True)
    return [Op("copy_async", [*args, lowering.source(ins.operands[-1], 32)], imm=value)]


def _bar(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    aligned = match[1] == "bar" or match[3] is not None
    operands = list(ins.operands)
    result, vote = Arg("trash", 1), Arg("raw", 0)
    mode = {"sync": 0, "arrive": 1}.get(match[2], 0)
    if match[2] == "red":
        mode = _BARRIER_RESULTS[match[4]]
        to = operands.pop(0)
        result = lowering.destination(to, 32) if mode == 4 else lowering.predicate_result(to)
        vote = lowering.predicate(operands.pop())
    counted = len(operands) > 1
    count = lowering.source(operands[1], 32) if counted else Arg("raw", 0)
    return [
        Op("bar", [result, lowering.source(operands[0], 32), count, vote], flags=mode | counted << 4 | aligned << 5)
    ]


def _bra(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    return [Op("bra", target=ins.target)]


def _brx(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    if not ins.targets:
        raise Unsupported
    return [Op("branch_table", [lowering.source(ins.operands[0], 32)], flags=len(ins.targets), targets=ins.targets)]


def _isspacep(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    args = [lowering.predicate_result(ins.operands[0]), lowering.source(ins.operands[1], 64)]
    return [Op("isspacep", args, imm=_SPACES[match[1]])]


_FORMS: tuple[tuple[re.Pattern[str], Form], ...] = tuple(
    (re.compile(pattern + r"\Z"), form)
    for pattern, form in (
        (r"mov\.([busf](?:16|32|64))", _mov),
        (
            r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?"
            r"\.([bus](?:16|32|64)|f32|f64)",
            _setp,
        ),
        (r"cvt(\.sat)?\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))", _cvt_integer),
        (r"cvta(\.to)?\.(global|shared|local|const|param)(?:::\w+)?\.u64", _cvta),
        (r"ld\.[\w.:]+", _ld),
        (r"st\.[\w.:]+", _st),
        (r"(atom|red)\.[\w.:]+", _atom),
        (r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(\.shared(?:::cta)?)?\.b16", _matrix),
        (r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(b?f16)\.\2\.f32", _mma),
        (r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::\d+B)?", _copy_async),
        (r"(bar|barrier)(?:\.cta)?\.(sync|arrive|red)(\.aligned)?(?:\.(and\.pred|or\.pred|popc\.u32))?", _bar),
        (r"bra(?:\.uni)?", _bra),
        (r"brx\.idx(?:\.uni)?", _brx),
        (r"isspacep\.(global|shared|local|param)(?:::\w+)?", _isspacep),
    )
)


def find_form(opcode: str) -> tuple[Form, re.Match[str]] | None:
    """The function that lowers an opcode, with the match of its pattern."""
    for pattern, form in _FORMS:
        match = pattern.match(opcode)
        if match is not None:
            return form, match
    return None
