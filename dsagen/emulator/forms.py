"""Instructions whose operations a row of the rules cannot describe: moves, conversions, memory, matrices, barriers."""

from __future__ import annotations

import re
from dataclasses import replace

from dsagen.emulator.async_forms import ASYNC_FORMS, Form
from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, constant, items
from dsagen.emulator.syntax import Imm, Instruction, Neg, Pair, Reg, Sink, Sym, Vec
from dsagen.emulator.wgmma import PATTERN as WGMMA
from dsagen.emulator.wgmma import lower_mma_async

_SPACES = {"": 0, "global": 1, "shared": 2, "local": 3, "param": 4, "const": 5}
_SPACES["shared::cluster"] = 6
_BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32}
_BITS |= {"s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128}
# Parts of ld, st and atom that do not change what they do here.
_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "nc", "mmio"}
_ORDERS |= {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B"}
_ORDERS |= {f"{level}::evict_{how}" for level in ("L1", "L2") for how in ("normal", "unchanged", "first", "last")}
_CLOCKS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_CACHE_HINT = "L2::cache_hint"
_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
# As enum Type of vm/atomics.cpp.
_ATOM_TYPES = {"f32": 2, "f64": 3, "f16": 4, "bf16": 5, "f16x2": 6, "bf16x2": 7}
_BOOLEANS = {None: 0, "and": 1, "or": 2, "xor": 3}
_UNSIGNED_COMPARES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BARRIER_RESULTS = {("and", "pred"): 2, ("or", "pred"): 3, ("popc", "u32"): 4}


def _mov(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    to, value = ins.operands
    bits = _BITS[match[1]]
    if isinstance(value, Sym) and value.name in _CLOCKS:
        return [Op("clock", [lowering.destination(to, bits)], imm=bits)]
    if isinstance(value, Sym) and value.name == "%gridid" and bits == 64:
        return [Op("mov_b64", [lowering.destination(to, 64), Arg("use", constant(1, 64))])]
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


# What an access orders (vm::Semantics), by the word for it; volatile ones are relaxed.
_SEMANTICS = {"relaxed": 1, "volatile": 1, "acquire": 2, "release": 3, "acq_rel": 4}


def _order_flags(opcode: str, default: int) -> int:
    """Semantics and scope of an access; `default` are those of one that names none. The device is the default scope."""
    parts = opcode.split(".")
    semantics = next((_SEMANTICS[part] for part in parts if part in _SEMANTICS), default)
    return semantics << 13 | ("cta" not in parts) << 24


def _memory_parts(opcode: str) -> tuple[str, int, str, int]:
    """Space, elements and type of ld.* or st.*, and how many operands there are: one more with a cache policy."""
    space, count, operands = "", 1, 2
    *parts, kind = opcode.split(".")[1:]
    for part in parts:
        name = part.split("::")[0]
        if part == "shared::cluster":
            space = part
        elif name in _SPACES:
            space = name
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part == _CACHE_HINT:
            operands = 3
        elif part not in _ORDERS:
            raise Unsupported
    if kind not in _BITS or count * _BITS[kind] > (128 if kind == "b128" else 256):
        raise Unsupported
    return space, count, kind, operands


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
    space, count, kind, operands = _memory_parts(ins.opcode)
    base, offset, wide = lowering.base(ins.operands[1])
    targets = items(ins.operands[0])
    if len(targets) != count or len(ins.operands) != operands:
        raise Unsupported
    if kind == "b128":
        # Two halves, and put together.
        halves = [lowering.temporary(64), lowering.temporary(64)]
        flags = _memory_flags(space, "b64", 2, wide=wide, register_bits=64) | _order_flags(ins.opcode, 0)
        whole = [lowering.destination(targets[0], 128), *(Arg("use", half) for half in halves)]
        load = Op("ld", [*(Arg("def", half) for half in halves), base], imm=offset, flags=flags)
        return [load, Op("pack", whole, imm=64, flags=2)]
    registers = [target for target in targets if isinstance(target, Reg)]
    bits = registers[0].bits if registers else max(_BITS[kind], 16)
    if bits not in (16, 32, 64) or any(register.bits != bits for register in registers) or bits < _BITS[kind]:
        raise Unsupported
    args = [lowering.destination(target, 64 if bits == 64 else 32) for target in targets]
    flags = _memory_flags(space, kind, count, wide=wide, register_bits=bits)
    return [Op("ld", [*args, base], imm=offset, flags=flags | _order_flags(ins.opcode, 0))]


def _ldu(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    return _ld(lowering, replace(ins, opcode=f"ld.{match[1]}"), match)


def _st(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    space, count, kind, operands = _memory_parts(ins.opcode)
    base, offset, wide = lowering.base(ins.operands[0])
    values = items(ins.operands[1])
    if len(values) != count or len(ins.operands) != operands:
        raise Unsupported
    args = [lowering.source(value, _BITS[kind]) for value in values]
    order = _order_flags(ins.opcode, 0)
    if kind == "b128":
        halves = [lowering.temporary(64), lowering.temporary(64)]
        flags = _memory_flags(space, "b64", 2, wide=wide) | order
        parts = Op("unpack", [*(Arg("def", half) for half in halves), args[0]], imm=64, flags=2)
        return [parts, Op("st", [base, *(Arg("use", half) for half in halves)], imm=offset, flags=flags)]
    return [Op("st", [base, *args], imm=offset, flags=_memory_flags(space, kind, count, wide=wide) | order)]


def _atom(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    space, operation, count, kind, hint = _atom_parts(ins.opcode)
    bits = _BITS.get(kind, 0)
    type_ = _ATOM_TYPES.get(kind, int(kind[0] == "s"))
    if not _atom_exists(operation, kind, bits, count):
        raise Unsupported
    operands = list(ins.operands)
    if hint:
        operands.pop()
    to = items(operands.pop(0)) if match[1] == "atom" else (Sink(),) * count
    base, offset, wide = lowering.base(operands[0])
    values = [items(operand) for operand in operands[1:]]
    if len(values) != (2 if operation == "cas" else 1) or any(len(group) != count for group in (to, *values)):
        raise Unsupported
    results = [lowering.destination(target, bits) for target in to]
    args = [results[0], base, *results[1:]]
    for group in (values[0], values[-1]):
        args += [lowering.source(value, bits) for value in group]
    # 128 bits count as two elements of 64.
    wholes = bits == 128
    flags = _memory_flags(space, "b64" if wholes else f"b{bits}", 2 if wholes else count, wide=wide)
    flags |= _order_flags(ins.opcode, 1)
    return [Op("atom", args, imm=offset, flags=flags | wholes << 9 | _ATOMS.index(operation) << 16 | type_ << 20)]


def _atom_parts(opcode: str) -> tuple[str, str, int, str, bool]:
    """Space, operation, elements and type, in whatever order they stand, and whether there is a cache policy."""
    space, operation, count, kind, hint = "", "", 1, "", False
    for part in opcode.split(".")[1:]:
        name = part.split("::")[0]
        if part == "shared::cluster":
            space = part
        elif name in ("global", "shared"):
            space = name
        elif part in _ATOMS:
            operation = part
        elif part in _BITS:
            kind = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part == _CACHE_HINT:
            hint = True
        elif part not in _ORDERS and part != "noftz":
            raise Unsupported
    return space, operation, count, kind, hint


def _atom_exists(operation: str, kind: str, bits: int, count: int) -> bool:
    if operation in ("cas", "exch") and bits in (16, 32, 64, 128):
        return kind[0] == "b" and kind not in _ATOM_TYPES and count == 1 and (bits != 16 or operation == "cas")
    if kind in _ATOM_TYPES:
        return operation == "add" or (operation in ("min", "max") and kind not in ("f32", "f64"))
    return operation != "" and bits in (32, 64) and count == 1


_MATRIX_FORMS = {"m8n8": 0, "m8n16": 1, "m16n16": 2}
_PACKINGS = {"b8": 0, "b8x16.b4x16_p64": 1, "b8x16.b6x16_p32": 2}


def _matrix(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    store, form, count, kind = match[1] == "st", match[2], int(match[3]), match[6]
    transposed, shared = match[4] is not None, match[5] is not None
    registers = items(ins.operands[1 if store else 0])
    flags = (2 if shared else 0) | count << 3 | transposed << 6 | _MATRIX_FORMS[form] << 7
    name = f"{match[1]}matrix"
    if kind != "b16":
        flags |= _PACKINGS[kind] << 9
    # 16 x 16 comes transposed only, packed rows of 16 never do; bytes are not stored.
    if (kind == "b16") != (form == "m8n8") or (kind != "b16" and (store or transposed != (form == "m16n16"))):
        raise Unsupported
    if form == "m8n16" and kind == "b8":
        raise Unsupported
    if len(registers) != (2 * count if form == "m16n16" else count) or len(registers) > 4:
        raise Unsupported
    if store:
        args = lowering.address(ins.operands[0], wide=not shared)
        return [Op(name, args + [lowering.source(item, 32) for item in registers], flags=flags)]
    args = [lowering.destination(item, 32) for item in registers]
    return [Op(name, args + lowering.address(ins.operands[1], wide=not shared), flags=flags)]


# Type of A or B -> elements in a register, number as in kUnpack of vm/matrix.cpp.
_MMA_TYPES = {"f16": (2, 0), "bf16": (2, 1), "tf32": (1, 2), "e4m3": (4, 3), "e5m2": (4, 4), "e2m1": (4, 5)}
_MMA_TYPES |= {"e2m3": (4, 6), "e3m2": (4, 7), "s8": (4, 0), "u8": (4, 0)}
_MMA_DIMS = {1: (4, 8), 2: (8, 16), 4: (16, 32)}


def _mma(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    dims, kind, satfinite, to, a_type, b_type = int(match[1]), match[2], match[3], match[4], match[5], match[6]
    width, a_number = _MMA_TYPES[a_type]
    b_width, b_number = _MMA_TYPES[b_type]
    whole = a_type in ("s8", "u8")
    small = {a_type, b_type} & {"e2m1", "e2m3", "e3m2"}
    if b_width != width or (width < 4 and a_type != b_type) or dims not in _MMA_DIMS[width] or match[7] != to:
        raise Unsupported
    if whole != (b_type in ("s8", "u8")) or whole != (to == "s32") or (to == "f16" and a_type in ("bf16", "tf32")):
        raise Unsupported
    if (small and not kind) or (kind and (dims != 32 or whole)) or (satfinite and not whole):
        raise Unsupported
    results, halves = 2 if to == "f16" else 4, dims // (4 * width)
    d, a, b, c = (items(operand) for operand in ins.operands)
    if (len(d), len(a), len(b), len(c)) != (results, 2 * halves, halves, results):
        raise Unsupported
    args = [lowering.destination(item, 32) for item in d]
    args += [lowering.source(item, 32) for item in (*a, *b, *c)]
    if whole:
        flags = (a_type == "s8") | (b_type == "s8") << 1 | (satfinite is not None) << 2
        return [Op(f"mma_bytes_k{dims}", args, flags=flags)]
    return [Op(f"mma_k{dims}_w{width}", args, flags=a_number | b_number << 4 | (to == "f16") << 8)]


def _copy_async(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    to, source, size, *rest = ins.operands
    if match[2] is not None:
        # What the cache makes of it is no matter here.
        rest.pop()
    value = size.value if isinstance(size, Imm) else 0
    if value not in ((4, 8, 16) if match[1] == "ca" else (16,)) or len(rest) > 1:
        raise Unsupported
    args = lowering.address(to, wide=False) + lowering.address(source, wide=True)
    ignored = rest[0] if rest else size
    if isinstance(ignored, Neg) or (isinstance(ignored, Reg) and ignored.bits == 0):
        # Where the predicate holds, nothing is read and zeros are written.
        bytes_ = lowering.temporary(32)
        choice = [Arg("def", bytes_), Arg("use", constant(0, 32)), Arg("use", constant(value, 32))]
        op = Op("copy_async", [*args, Arg("use", bytes_)], imm=value)
        return [Op("selp_b32", [*choice, lowering.predicate(ignored)]), op]
    return [Op("copy_async", [*args, lowering.source(ignored, 32)], imm=value)]


def _bar(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    aligned = match[1] == "bar" or match[3] is not None
    operands = list(ins.operands)
    result, vote = Arg("trash", 1), Arg("raw", 0)
    mode = {"sync": 0, "arrive": 1}.get(match[2], 0)
    if match[2].startswith("red"):
        mode = _BARRIER_RESULTS[match[2].removeprefix("red."), match[4]]
        to = operands.pop(0)
        result = lowering.destination(to, 32) if mode == 4 else lowering.predicate_result(to)
        vote = lowering.predicate(operands.pop())
    elif match[4] is not None:
        raise Unsupported
    counted = len(operands) > 1
    if not 1 <= len(operands) <= 2 or (mode == 1 and not counted):
        raise Unsupported
    count = lowering.source(operands[1], 32) if counted else Arg("raw", 0)
    return [
        Op("bar", [result, lowering.source(operands[0], 32), count, vote], flags=mode | counted << 4 | aligned << 5)
    ]


def _create_policy(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    """A cache policy: nobody looks at it."""
    return [Op("mov_b64", [lowering.destination(ins.operands[0], 64), Arg("use", constant(0, 64))])]


def _bra(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    return [Op("bra", target=ins.target)]


def _brx(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    if not ins.targets:
        raise Unsupported
    return [Op("brx", [lowering.source(ins.operands[0], 32)], flags=len(ins.targets), targets=ins.targets)]


def _isspacep(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    args = [lowering.predicate_result(ins.operands[0]), lowering.source(ins.operands[1], 64)]
    return [Op("isspacep", args, imm=_SPACES[match[1]])]


_FORMS: tuple[tuple[re.Pattern[str], Form], ...] = tuple(
    (re.compile(pattern + r"\Z"), form)
    for pattern, form in (
        *ASYNC_FORMS,
        (r"mov\.([busf](?:16|32|64)|b128)", _mov),
        (
            r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?"
            r"\.([bus](?:16|32|64)|f32|f64)",
            _setp,
        ),
        (r"cvt(\.sat)?\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))", _cvt_integer),
        (r"cvta(\.to)?\.(global|shared|local|const|param)(?:::\w+)?\.u64", _cvta),
        (r"ld\.[\w.:]+", _ld),
        (r"ldu\.([\w.:]+)", _ldu),
        (r"st\.[\w.:]+", _st),
        (r"(atom|red)\.[\w.:]+", _atom),
        (
            r"(ld|st)matrix\.sync\.aligned\.(m8n8|m8n16|m16n16)\.x([124])(\.trans)?(\.shared(?:::cta)?)?"
            r"\.(b16|b8|b8x16\.b4x16_p64|b8x16\.b6x16_p32)",
            _matrix,
        ),
        (
            r"mma\.sync\.aligned\.m16n8k(4|8|16|32)\.row\.col(\.kind::f8f6f4)?(\.satfinite)?\.(f32|f16|s32)"
            rf"\.({'|'.join(_MMA_TYPES)})\.({'|'.join(_MMA_TYPES)})\.(f32|f16|s32)",
            _mma,
        ),
        (WGMMA, lower_mma_async),
        (
            r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(\.L2::cache_hint)?(?:\.L2::(?:64|128|256)B)?",
            _copy_async,
        ),
        (r"(bar|barrier)(?:\.cta)?\.(sync|arrive|red\.and|red\.or|red\.popc)(\.aligned)?(?:\.(pred|u32))?", _bar),
        (r"createpolicy\.(?:fractional|range|cvt)[\w.:]*\.b64", _create_policy),
        (r"bra(?:\.uni)?", _bra),
        (r"brx\.idx(?:\.uni)?", _brx),
        (r"isspacep\.(shared::cluster|global|shared|local|param|const)(?:::(?:cta|entry|func))?", _isspacep),
    )
)


def find_form(opcode: str) -> tuple[Form, re.Match[str]] | None:
    """The function that lowers an opcode, with the match of its pattern."""
    for pattern, form in _FORMS:
        match = pattern.match(opcode)
        if match is not None:
            return form, match
    return None
