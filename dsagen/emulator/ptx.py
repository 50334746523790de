"""PTX text as data: kernels and functions with instructions, parameters and variables, registers and labels resolved.

Register names are unique after parsing: a name that an inner `{ }` declares again is another register. Labels become
numbers. Everything is kept with its line, and with the CUDA line that `.loc` gave last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from dsagen.emulator.scan import FUNCTION, NAME, Piece, Scanner, body, integer, real, split
from dsagen.emulator.syntax import (
    Addr,
    Call,
    Imm,
    Instruction,
    Kernel,
    Module,
    Neg,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Sym,
    Variable,
    Vec,
)
from dsagen.errors import EmulatorError

_TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4}
_TYPE_BYTES |= {"s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}
_MOST_VARIABLE_BYTES = 1 << 31
_REG = re.compile(r"\.reg\s*\.(\w+)\s+(.*)\Z", re.DOTALL | re.ASCII)
_VARIABLE = re.compile(
    rf"(?:\.(?:visible|extern|weak|common)\s+)*\.(?P<space>shared|global|const|local|param)\s*"
    rf"(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+(?P<align>\d+)\s*)?(?:\.v(?P<vector>[24])\s*)?\.(?P<type>\w+)\s+"
    rf"(?P<name>{NAME})\s*(?P<dims>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<init>.*))?\Z",
    re.DOTALL | re.ASCII,
)
_PARAM = re.compile(
    rf"\.param\s*(?:\.align\s+(?P<align>\d+)\s*)?\.(?P<type>\w+)\s+(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    rf"(?P<name>{NAME})\s*(?:\[\s*(?P<count>\d+)\s*\])?",
    re.ASCII,
)
_CLUSTER = re.compile(r"\.reqnctapercluster\s+(\d{1,9})(?:\s*,\s*(\d{1,9}))?(?:\s*,\s*(\d{1,9}))?", re.ASCII)
_GUARD = re.compile(rf"@(!?)\s*({NAME})\s+", re.ASCII)
_OPCODE = re.compile(r"([a-z][\w.:]*)\s*(.*)\Z", re.DOTALL | re.ASCII)
_SYMBOL = re.compile(NAME + r"(?:\.[xyzw])?\Z", re.ASCII)
_SUM = re.compile(rf"({NAME}|-?\d\w*)\s*([-+])\s*(-?\w+)\Z", re.ASCII)
_COUNTED = re.compile(rf"({NAME})<\s*(\d+)\s*>\Z", re.ASCII)
_PLAIN = re.compile(NAME + r"\Z", re.ASCII)
_ITEM = re.compile(rf"generic\s*\(\s*({NAME})\s*\)|({NAME})", re.ASCII)
_SILENT_DIRECTIVES = (".pragma", ".callprototype", ".alias", ".maxnreg", ".loc")


@dataclass
class _Scope:
    names: dict[str, Reg] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix -> count, bits
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)  # name -> name that is unique in the module
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # label -> labels of .branchtargets


def parse(text: str) -> Module:
    """The module of a PTX text; EmulatorError names the line that is not understood."""
    module = Module()
    scanner = Scanner(text)
    pieces = scanner.pieces()
    numbers = count()
    for piece in pieces:
        if piece.kind == "open":
            list(body(pieces, piece.line))
        elif piece.kind == "close":
            raise EmulatorError(f"PTX line {piece.line}: a }} that closes nothing")
        elif piece.kind == "statement":
            function = FUNCTION.match(piece.text)
            if function is not None:
                _function(module, function, piece, pieces, numbers)
            elif (variable := parse_variable(piece)) is not None:
                module.variables.append(variable)
            elif not piece.text.startswith(_SILENT_DIRECTIVES):
                raise EmulatorError(f"PTX line {piece.line}: {piece.text[:60]!r} is not understood")
    module.target, module.files = scanner.target, scanner.files
    return module


def _function(
    module: Module, header: re.Match[str], piece: Piece, pieces: Iterator[Piece], numbers: Iterator[int]
) -> None:
    name, is_entry = header["name"], header["kind"] == "entry"
    parser = _BodyParser(name, header, piece.line, numbers)
    if not piece.text.endswith("{"):
        # A declaration: the body may come later, or never.
        parser.kernel.refusal = "it has no body"
        if not is_entry:
            module.functions.setdefault(name, parser.kernel)
        return
    found = module.kernels if is_entry else module.functions
    if name in found and not found[name].refusal:
        raise EmulatorError(f"PTX line {piece.line}: {name} is defined twice")
    parser.kernel.cluster = _cluster(piece.text)
    found[name] = parser.parse(body(pieces, piece.line))


def _cluster(header: str) -> tuple[int, int, int] | None:
    """The extents of .reqnctapercluster."""
    match = _CLUSTER.search(header)
    if match is None:
        return None
    x, y, z = (int(extent or 1) for extent in match.groups())
    return x, y, z


def parse_variable(piece: Piece) -> Variable | None:
    """A variable's declaration, or None for another directive."""
    match = _VARIABLE.match(piece.text)
    if match is None:
        return None
    if match["type"] not in _TYPE_BYTES:
        raise EmulatorError(f"PTX line {piece.line}: variables of type .{match['type']} are not handled")
    unit = _TYPE_BYTES[match["type"]] * int(match["vector"] or 1)
    size, dynamic = unit, False
    for dim in re.findall(r"\[\s*(\d*)\s*\]", match["dims"], re.ASCII):
        size, dynamic = size * int(dim[:20] or 0), dynamic or dim == ""
    align = _alignment(match["align"], unit, piece.line)
    if size > _MOST_VARIABLE_BYTES:
        raise EmulatorError(f"PTX line {piece.line}: variable {match['name']} takes {size} bytes, more than 2 GiB")
    variable = Variable(match["name"], match["space"], align, size, dynamic)
    if match["init"] is None:
        return variable
    initial, addresses = _initial_bytes(match["init"], _TYPE_BYTES[match["type"]], piece.line)
    if len(initial) > size and not dynamic:
        raise EmulatorError(f"PTX line {piece.line}: {len(initial)} bytes initialise {size} of {match['name']}")
    size = max(size, len(initial))
    return replace(variable, size_bytes=size, initial=initial.ljust(size, b"\0"), addresses=addresses)


def _alignment(text: str | None, unit: int, line: int) -> int:
    align = int(text) if text and len(text) < 8 else 0 if text else unit
    if align < 1 or align & (align - 1) or align > 1 << 20:
        raise EmulatorError(f"PTX line {line}: .align {text} is no power of two")
    return align


def _initial_bytes(text: str, unit: int, line: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    """The bytes of an initialiser, and the addresses that are only known once everything has its place."""
    out = bytearray()
    addresses = []
    for item in filter(None, (part.strip() for part in re.split("[{},]", text))):
        value = integer(item)
        double = real(item)
        symbol, _, addend = item.partition("+")
        name = _ITEM.fullmatch(symbol.strip())
        offset = integer(addend.strip()) if addend else 0
        if value is None and double is not None and unit == 8:
            value = double
        if value is None and name is not None and offset is not None and unit == 8:
            addresses.append((len(out), name[1] or name[2], offset))
            value = 0
        if value is None:
            raise EmulatorError(f"PTX line {line}: initialiser {item[:60]!r} is neither a number nor a 64-bit address")
        out += (value & ((1 << 8 * unit) - 1)).to_bytes(unit, "little")
    return bytes(out), tuple(addresses)


class _BodyParser:
    """Reads the body of one entry or function."""

    def __init__(self, name: str, header: re.Match[str], line: int, numbers: Iterator[int]) -> None:
        self.kernel = Kernel(name)
        self._numbers = numbers
        self._scopes = [_Scope()]
        # Branches before their labels are known: index of the instruction, names, scopes around it.
        self._branches: list[tuple[int, tuple[str, ...], tuple[_Scope, ...]]] = []
        self._last_label = ""
        is_entry = header["kind"] == "entry"
        self.kernel.params = self._params(header["params"] or "", line, is_entry)
        if not is_entry:
            self.kernel.results = self._params(header["results"] or "", line, is_entry)
            if ".reg" in (header["params"] or "") + (header["results"] or ""):
                self.kernel.refusal = "its parameters are registers"

    def _params(self, text: str, line: int, is_entry: bool) -> list[Param]:
        offset, params = 0, []
        for match in _PARAM.finditer(text):
            if match["type"] not in _TYPE_BYTES:
                raise EmulatorError(f"PTX line {line}: parameters of type .{match['type']} are not handled")
            unit = _TYPE_BYTES[match["type"]]
            size, align = unit * int((match["count"] or "1")[:20]), _alignment(match["align"], unit, line)
            if size > 1 << 16:
                raise EmulatorError(f"PTX line {line}: parameter {match['name']} takes {size} bytes, more than 64 KiB")
            offset = -(-offset // align) * align
            # Results of all functions have the same names.
            name = match["name"] if is_entry else f"{self.kernel.name}:{match['name']}"
            self._scopes[0].variables[match["name"]] = name
            params.append(Param(name, offset, size, align))
            offset += size
        return params

    def parse(self, pieces: Iterator[Piece]) -> Kernel:
        """The kernel, with all branches resolved."""
        for piece in pieces:
            if piece.kind == "open":
                self._scopes.append(_Scope())
            elif piece.kind == "close":
                self._scopes.pop()
            elif piece.kind == "label":
                self._label(piece)
            elif piece.text.startswith("."):
                self._directive(piece)
            else:
                self._instruction(piece)
        self._resolve_branches()
        return self.kernel

    def _label(self, piece: Piece) -> None:
        labels = self._scopes[-1].labels
        if piece.text in labels:
            raise EmulatorError(f"PTX line {piece.line}: label {piece.text} stands here a second time")
        labels[piece.text] = next(self._numbers)
        self._last_label = piece.text
        self.kernel.labels[labels[piece.text]] = len(self.kernel.instructions)

    def _directive(self, piece: Piece) -> None:
        reg = _REG.match(piece.text)
        if reg is not None:
            if reg[1] not in (*_TYPE_BYTES, "pred"):
                raise EmulatorError(f"PTX line {piece.line}: registers of type .{reg[1]} are not handled")
            bits = 0 if reg[1] == "pred" else 8 * _TYPE_BYTES[reg[1]]
            for name in re.split(r"\s*,\s*", reg[2].strip()):
                self._declare(name, bits, piece.line)
            return
        variable = parse_variable(piece)
        if variable is not None:
            unique = f"{self.kernel.name}:{variable.name}:{len(self.kernel.variables)}"
            self._scopes[-1].variables[variable.name] = unique
            self.kernel.variables.append(replace(variable, name=unique))
        elif piece.text.startswith(".branchtargets"):
            names = piece.text.removeprefix(".branchtargets").split(",")
            self._scopes[-1].tables[self._last_label] = tuple(name.strip() for name in names)
        elif not piece.text.startswith(_SILENT_DIRECTIVES):
            raise EmulatorError(f"PTX line {piece.line}: {piece.text[:60]!r} inside a kernel is not handled")

    def _declare(self, name: str, bits: int, line: int) -> None:
        counted = _COUNTED.match(name)
        if counted is not None:
            self._scopes[-1].ranges[counted[1]] = (int(counted[2][:9]), bits)
        elif _PLAIN.match(name) is not None:
            self._scopes[-1].names[name] = Reg(next(self._numbers), name, bits)
        else:
            raise EmulatorError(f"PTX line {line}: {name[:60]!r} is no name of a register")

    def _find(self, name: str) -> Reg | None:
        for scope in reversed(self._scopes):
            found = scope.names.get(name)
            if found is not None:
                return found
            stem = name.rstrip("0123456789")
            many, bits = scope.ranges.get(stem, (0, 0))
            if stem != name and len(name) - len(stem) < 10 and int(name[len(stem) :]) < many:
                scope.names[name] = Reg(next(self._numbers), name, bits)
                return scope.names[name]
        return None

    def _instruction(self, piece: Piece) -> None:
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
        call = None
        if parts[1] in ("call", "call.uni"):
            call = self._call(parts[2], piece.line)
        elif parts[2]:
            operands = tuple(self._operand(item, piece.line) for item in split(parts[2]))
        if parts[1] in ("bra", "bra.uni") and operands and isinstance(operands[0], Sym):
            self._branches.append((len(self.kernel.instructions), (operands[0].name,), tuple(self._scopes)))
        if parts[1] in ("brx.idx", "brx.idx.uni"):
            names = self._table(operands, piece.line)
            self._branches.append((len(self.kernel.instructions), names, tuple(self._scopes)))
        instruction = Instruction(parts[1], operands, guard, negated, piece.line, piece.location, call=call)
        self.kernel.instructions.append(instruction)

    def _call(self, text: str, line: int) -> Call:
        parts = [part.strip() for part in split(text)]
        groups: list[tuple[Operand, ...]] = []
        callee: Operand | None = None
        for part in parts:
            if part.startswith("(") and part.endswith(")"):
                inside = part[1:-1].strip()
                groups.append(tuple(self._operand(item, line) for item in split(inside)) if inside else ())
                if callee is None:
                    continue
                break
            if callee is not None:
                break
            callee = self._operand(part, line)
            # Results stand before the name.
            groups = groups or [()]
        if callee is None:
            raise EmulatorError(f"PTX line {line}: {text[:60]!r} names no function")
        return Call(callee, groups[0], groups[1] if len(groups) > 1 else ())

    def _table(self, operands: tuple[Operand, ...], line: int) -> tuple[str, ...]:
        """The labels of an indexed branch."""
        name = operands[-1].name if operands and isinstance(operands[-1], Sym) else ""
        for scope in reversed(self._scopes):
            if name in scope.tables:
                return scope.tables[name]
        raise EmulatorError(f"PTX line {line}: there is no .branchtargets {name}")

    def _operand(self, text: str, line: int) -> Operand:
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith("{") and text.endswith("}"):
            return Vec(tuple(self._operand(item, line) for item in split(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            return self._address(text[1:-1].strip(), line)
        if text.startswith("!"):
            reg = self._find(text[1:].strip())
            if reg is None or reg.bits != 0:
                raise EmulatorError(f"PTX line {line}: {text[:60]!r} names no predicate")
            return Neg(reg)
        first, bar, second = text.partition("|")
        if bar:
            return Pair(self._operand(first, line), self._operand(second, line))
        atom = self._atom(text)
        if atom is None and (total := _SUM.match(text)) is not None:
            base, offset = self._atom(total[1]), integer(total[3])
            if isinstance(base, Sym) and offset is not None:
                atom = Sym(base.name, -offset if total[2] == "-" else offset)
        if atom is None:
            raise EmulatorError(f"PTX line {line}: operand {text[:60]!r} is not understood")
        return atom

    def _atom(self, text: str) -> Reg | Imm | Sym | None:
        if _SYMBOL.match(text) is not None:
            return self._find(text) or Sym(self._symbol(text))
        value = integer(text)
        if value is not None:
            return Imm(value)
        value = real(text)
        return Imm(value, real=True) if value is not None else None

    def _symbol(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope.variables:
                return scope.variables[name]
        return name

    def _address(self, text: str, line: int) -> Addr:
        place, *beside = split(text)
        if beside:
            vector = self._operand(beside[0], line)
            if len(beside) > 1 or not isinstance(vector, Vec):
                raise EmulatorError(f"PTX line {line}: address [{text[:60]}] is not understood")
            return replace(self._address(place.strip(), line), coordinates=vector.items)
        base, offset = self._atom(text), 0
        if base is None and (total := _SUM.match(text)) is not None:
            base = self._atom(total[1])
            distance = integer(total[3])
            if distance is None or not -(1 << 31) <= distance < 1 << 31:
                base = None
            else:
                offset = -distance if total[2] == "-" else distance
        if base is None:
            raise EmulatorError(f"PTX line {line}: address [{text[:60]}] is not understood")
        return Addr(base, offset)

    def _resolve_branches(self) -> None:
        for index, names, scopes in self._branches:
            old = self.kernel.instructions[index]
            found = []
            for name in names:
                target = next((scope.labels[name] for scope in reversed(scopes) if name in scope.labels), None)
                if target is None:
                    raise EmulatorError(f"PTX line {old.line}: there is no label {name}")
                found.append(target)
            if old.opcode.startswith("brx"):
                self.kernel.instructions[index] = replace(old, targets=tuple(found))
            else:
                self.kernel.instructions[index] = replace(old, target=found[0])
