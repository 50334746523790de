"""PTX text as data: kernels with their instructions, parameters and variables, registers and labels resolved.

Register names are unique after parsing: a name that an inner `{ }` declares again is another register. Labels become
numbers. Everything is kept with its line, and with the CUDA line that `.loc` gave last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsagen.errors import EmulatorError

_TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4}
_TYPE_BYTES |= {"s32": 4, "f32": 4, "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}
_NAME = r"[A-Za-z_$%][\w$]*"
_TOKEN = re.compile(r"\s+|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
# These end with their line.
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file|version|target|address_size|section)\b")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)\Z", re.DOTALL)
_VARIABLE = re.compile(
    rf"(?P<link>(?:\.(?:visible|extern|weak|common)\s+)*)\.(?P<space>shared|global|const|local)\s+"
    rf"(?:\.align\s+(?P<align>\d+)\s+)?(?:\.v(?P<vector>[24])\s+)?\.(?P<type>\w+)\s+(?P<name>{_NAME})"
    r"\s*(?P<dims>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<init>.*))?\Z",
    re.DOTALL,
)
_PARAM = re.compile(
    rf"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    rf"(?P<name>{_NAME})\s*(?:\[(?P<count>\d+)\])?"
)
_FUNCTION = re.compile(rf"(?:\.(?:visible|extern|weak)\s+)*\.(entry|func)\s+(?:\([^)]*\)\s*)?({_NAME})")
_GUARD = re.compile(rf"@(!?)\s*({_NAME})\s+")
_OPCODE = re.compile(r"([a-z][\w.:]*)\s*(.*)\Z", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\Z")


@dataclass(frozen=True)
class Reg:
    """A register of some bits, 0 for a predicate."""

    number: int
    name: str
    bits: int

    @property
    def slots(self) -> int:
        """Rows of 32 bits that it takes."""
        return -(-self.bits // 32)


@dataclass(frozen=True)
class Imm:
    """A literal as bits: an integer as written (may be negative), a 0f or 0d one as its bit pattern."""

    value: int


@dataclass(frozen=True)
class Sym:
    """A variable, a parameter, a special register or a label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Addr:
    """What stands in brackets."""

    base: Reg | Imm | Sym
    offset: int


@dataclass(frozen=True)
class Vec:
    """What stands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, `a|b`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Neg:
    """A negated predicate source."""

    reg: Reg


@dataclass(frozen=True)
class Sink:
    """A result that nobody wants, `_`."""


Operand = Reg | Imm | Sym | Addr | Vec | Pair | Neg | Sink


@dataclass(frozen=True)
class Instruction:
    """One instruction; `target` is the label's number of a branch."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    guard_negated: bool
    line: int
    cuda_line: int
    target: int = -1


@dataclass(frozen=True)
class Variable:
    """A module or kernel variable. `initial` holds its bytes where it has an initialiser."""

    name: str
    space: str
    align: int
    size_bytes: int
    dynamic: bool
    initial: bytes | None


@dataclass(frozen=True)
class Param:
    """A kernel parameter at its offset in the argument block."""

    name: str
    offset: int
    size_bytes: int


@dataclass
class Kernel:
    """An entry: instructions in order, `labels` gives the index of the instruction that a label stands before."""

    name: str
    params: list[Param] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    registers: int = 0

    @property
    def param_bytes(self) -> int:
        """Size of the argument block."""
        return max((param.offset + param.size_bytes for param in self.params), default=0)


@dataclass
class Module:
    """All kernels and module variables of a PTX text."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)


@dataclass
class _Scope:
    names: dict[str, Reg] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix -> count, bits
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    kind: str  # "statement", "label", "open", "close"
    text: str
    line: int
    cuda_line: int


def parse(text: str) -> Module:
    """The module of a PTX text; EmulatorError names the line that is not understood."""
    module = Module()
    pieces = _pieces(text)
    for piece in pieces:
        function = _FUNCTION.match(piece.text)
        if piece.kind == "statement" and function is not None:
            if piece.text.endswith("{"):
                body = _body(pieces, piece.line)
                if function[1] == "entry":
                    module.kernels[function[2]] = _KernelParser(function[2], piece).parse(body)
        elif piece.kind == "statement" and (variable := parse_variable(piece)) is not None:
            module.variables.append(variable)
        elif piece.kind == "open":
            list(_body(pieces, piece.line))
    return module


def _pieces(text: str) -> Iterator[_Piece]:
    """Statements, labels and braces. A function's header comes with its opening brace, whatever lies between."""
    at, line, cuda_line, size = 0, 1, 0, len(text)
    while True:
        while (blank := _TOKEN.match(text, at)) is not None:
            line += text.count("\n", at, blank.end())
            at = blank.end()
        if at >= size:
            return
        if text[at] in "{}":
            yield _Piece("open" if text[at] == "{" else "close", text[at], line, cuda_line)
            at += 1
            continue
        if _LINE_DIRECTIVE.match(text, at) is not None:
            end = text.find("\n", at)
            end = size if end < 0 else end
            loc = _LOC.match(text, at)
            if loc is not None:
                # Line 0 means none in particular.
                cuda_line = int(loc[2]) or cuda_line
            if text.startswith(".section", at):
                # Debug data, without semicolons.
                end = text.find("}", at) + 1
                if end == 0:
                    raise EmulatorError(f"PTX line {line}: .section without an end")
                line += text.count("\n", at, end)
            at = end
            continue
        label = _LABEL.match(text, at)
        if label is not None:
            yield _Piece("label", label[1], line, cuda_line)
            at = label.end()
            continue
        end = _statement_end(text, at, line)
        body = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text[at:end], flags=re.DOTALL)
        yield _Piece("statement", body.strip(), line, cuda_line)
        line += text.count("\n", at, end)
        at = end + 1 if text[end - 1] != "{" else end


def _statement_end(text: str, at: int, line: int) -> int:
    """Where the statement ends: at its semicolon, or past the brace that opens a function."""
    semicolon = text.find(";", at)
    if _FUNCTION.match(text, at) is not None:
        brace = text.find("{", at)
        if brace >= 0 and (semicolon < 0 or brace < semicolon):
            return brace + 1
    if semicolon < 0:
        raise EmulatorError(f"PTX line {line}: no semicolon after {text[at : at + 60]!r}")
    return semicolon


def _body(pieces: Iterator[_Piece], line: int) -> Iterator[_Piece]:
    """The pieces up to the brace that closes the one already seen."""
    depth = 1
    for piece in pieces:
        depth += (piece.kind == "open") - (piece.kind == "close")
        if depth == 0:
            return
        yield piece
    raise EmulatorError(f"PTX line {line}: its {{ is never closed")


def parse_variable(piece: _Piece) -> Variable | None:
    """A variable's declaration, or None for another directive."""
    match = _VARIABLE.match(piece.text)
    if match is None:
        return None
    if match["type"] not in _TYPE_BYTES:
        raise EmulatorError(f"PTX line {piece.line}: variables of type .{match['type']} are not handled")
    unit = _TYPE_BYTES[match["type"]] * int(match["vector"] or 1)
    count, dynamic = 1, False
    for dim in re.findall(r"\[\s*(\d*)\s*\]", match["dims"]):
        count, dynamic = count * int(dim or 0), dynamic or dim == ""
    initial = None
    if match["init"] is not None:
        initial = _initial_bytes(match["init"], _TYPE_BYTES[match["type"]], unit * count, piece.line)
    align = int(match["align"] or unit)
    return Variable(match["name"], match["space"], align, unit * count, dynamic, initial)


def _initial_bytes(text: str, unit: int, size: int, line: int) -> bytes:
    out = bytearray()
    for item in re.findall(r"[^\s{},]+", text):
        value = parse_literal(item)
        if value is None:
            raise EmulatorError(f"PTX line {line}: initialiser {item!r} is no number, which is all that is handled")
        out += (value & ((1 << 8 * unit) - 1)).to_bytes(unit, "little")
    return bytes(out.ljust(size, b"\0"))


def parse_literal(text: str) -> int | None:
    """A number's value or bit pattern; None for other text."""
    if text[:2] in ("0f", "0F", "0d", "0D") and len(text) in (10, 18):
        return int(text[2:], 16)
    if _NUMBER.match(text) is None:
        return None
    digits = text.removesuffix("U")
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    if digits[:2] in ("0x", "0X", "0b", "0B"):
        return sign * int(digits, 0)
    return sign * int(digits, 8 if digits.startswith("0") and len(digits) > 1 else 10)


class _KernelParser:
    """Reads the body of one entry."""

    def __init__(self, name: str, header: _Piece) -> None:
        self.kernel = Kernel(name)
        self._scopes = [_Scope()]
        self._label_count = 0
        # Branches before their labels are known: index of the instruction, name, scopes around it.
        self._branches: list[tuple[int, str, tuple[_Scope, ...]]] = []
        offset = 0
        for match in _PARAM.finditer(header.text):
            if match["type"] not in _TYPE_BYTES:
                raise EmulatorError(f"PTX line {header.line}: parameters of type .{match['type']} are not handled")
            size = _TYPE_BYTES[match["type"]] * int(match["count"] or 1)
            align = int(match["align"] or _TYPE_BYTES[match["type"]])
            offset = -(-offset // align) * align
            self.kernel.params.append(Param(match["name"], offset, size))
            offset += size

    def parse(self, body: Iterator[_Piece]) -> Kernel:
        """The kernel, with all branches resolved."""
        for piece in body:
            if piece.kind == "open":
                self._scopes.append(_Scope())
            elif piece.kind == "close":
                self._scopes.pop()
            elif piece.kind == "label":
                number = self._scopes[-1].labels.setdefault(piece.text, self._label_count)
                self._label_count += 1
                self.kernel.labels[number] = len(self.kernel.instructions)
            elif piece.text.startswith("."):
                self._directive(piece)
            else:
                self._instruction(piece)
        self._resolve_branches()
        return self.kernel

    def _directive(self, piece: _Piece) -> None:
        reg = _REG.match(piece.text)
        if reg is not None:
            if reg[1] not in (*_TYPE_BYTES, "pred"):
                raise EmulatorError(f"PTX line {piece.line}: registers of type .{reg[1]} are not handled")
            bits = 0 if reg[1] == "pred" else 8 * _TYPE_BYTES[reg[1]]
            for name in re.split(r"\s*,\s*", reg[2].strip()):
                self._declare(name, bits)
            return
        variable = parse_variable(piece)
        if variable is not None:
            self.kernel.variables.append(variable)
        elif not piece.text.startswith((".pragma", ".branchtargets", ".callprototype", ".param")):
            raise EmulatorError(
                f"PTX line {piece.line}: directive {piece.text.split()[0]} inside a kernel is not handled"
            )

    def _declare(self, name: str, bits: int) -> None:
        counted = re.match(rf"({_NAME})<(\d+)>\Z", name)
        if counted is not None:
            self._scopes[-1].ranges[counted[1]] = (int(counted[2]), bits)
        else:
            self._scopes[-1].names[name] = self._new(name, bits)

    def _new(self, name: str, bits: int) -> Reg:
        self.kernel.registers += 1
        return Reg(self.kernel.registers - 1, name, bits)

    def _find(self, name: str) -> Reg | None:
        for scope in reversed(self._scopes):
            found = scope.names.get(name)
            if found is not None:
                return found
            stem = name.rstrip("0123456789")
            count, bits = scope.ranges.get(stem, (0, 0))
            if stem != name and int(name[len(stem) :]) < count:
                scope.names[name] = self._new(name, bits)
                return scope.names[name]
        return None

    def _instruction(self, piece: _Piece) -> None:
        text, guard, negated = piece.text, None, False
        match = _GUARD.match(text)
        if match is not None:
            guard, negated = self._find(match[2]), match[1] == "!"
            if guard is None or guard.bits != 0:
                raise EmulatorError(f"PTX line {piece.line}: guard {match[2]} is no declared predicate")
            text = text[match.end() :]
        parts = _OPCODE.match(text)
        if parts is None:
            raise EmulatorError(f"PTX line {piece.line}: {text[:60]!r} is no instruction")
        operands: tuple[Operand, ...] = ()
        if parts[1].startswith("call"):
            operands = ()
        elif parts[2]:
            operands = tuple(self._operand(item, piece.line) for item in _split(parts[2]))
        if parts[1] in ("bra", "bra.uni") and operands and isinstance(operands[0], Sym):
            self._branches.append((len(self.kernel.instructions), operands[0].name, tuple(self._scopes)))
        instruction = Instruction(parts[1], operands, guard, negated, piece.line, piece.cuda_line)
        self.kernel.instructions.append(instruction)

    def _operand(self, text: str, line: int) -> Operand:
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vec(tuple(self._operand(item, line) for item in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1], line)
        if text.startswith("!"):
            reg = self._find(text[1:].strip())
            if reg is None:
                raise EmulatorError(f"PTX line {line}: {text} names no register")
            return Neg(reg)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first, line), self._operand(second, line))
        base = self._atom(text)
        if base is not None:
            return base
        raise EmulatorError(f"PTX line {line}: operand {text!r} is not understood")

    def _atom(self, text: str) -> Reg | Imm | Sym | None:
        value = parse_literal(text)
        if value is not None:
            return Imm(value)
        if re.fullmatch(_NAME + r"(?:\.[xyzw])?", text):
            return self._find(text) or Sym(text)
        sum_of = re.fullmatch(rf"({_NAME})\s*\+\s*(-?\w+)", text)
        offset = parse_literal(sum_of[2]) if sum_of else None
        return Sym(sum_of[1], offset) if sum_of and offset is not None else None

    def _address(self, text: str, line: int) -> Addr:
        match = re.fullmatch(rf"\s*({_NAME}|-?\d\w*)\s*(?:\+\s*(-?\w+)\s*)?", text)
        base = self._atom(match[1]) if match else None
        offset = parse_literal(match[2]) if match and match[2] else 0
        if base is None or offset is None:
            raise EmulatorError(f"PTX line {line}: address [{text}] is not understood")
        return Addr(base, offset)

    def _resolve_branches(self) -> None:
        for index, name, scopes in self._branches:
            target = next((scope.labels[name] for scope in reversed(scopes) if name in scope.labels), None)
            old = self.kernel.instructions[index]
            if target is None:
                raise EmulatorError(f"PTX line {old.line}: there is no label {name}")
            self.kernel.instructions[index] = Instruction(
                old.opcode, old.operands, old.guard, old.guard_negated, old.line, old.cuda_line, target
            )


def _split(text: str) -> list[str]:
    """Operands at the commas outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return parts
