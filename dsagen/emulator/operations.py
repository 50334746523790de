"""Operations of the machine before slots are given out, and the operands that they take."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsagen.emulator.syntax import Addr, Imm, Neg, Operand, Reg, Sink, Sym, Vec

# As in vm/machine.h; loading the machine compares them.
SHARED_RESERVE = 1024
LOCAL_WINDOW = 0x7200_0000_0000
PARAM_WINDOW = 0x7300_0000_0000

# Special registers, numbered as Cta::load_specials has them.
_AXES = ("x", "y", "z")
SPECIALS: dict[str, int] = {
    **{f"%tid.{axis}": 1 + n for n, axis in enumerate(_AXES)},
    **{f"%ntid.{axis}": 4 + n for n, axis in enumerate(_AXES)},
    **{f"%ctaid.{axis}": 7 + n for n, axis in enumerate(_AXES)},
    **{f"%nctaid.{axis}": 10 + n for n, axis in enumerate(_AXES)},
    "%laneid": 13, "%warpid": 14, "%lanemask_eq": 15, "%lanemask_lt": 16, "%lanemask_le": 17, "%lanemask_gt": 19,
    "%lanemask_ge": 18, "%dynamic_smem_size": 20, "%total_smem_size": 21,
    "%nwarpid": 24,
    # All CTAs say that they run on the same multiprocessor.
    "%smid": 22, "%nsmid": 23,
    "%cluster_ctarank": 26, "%cluster_nctarank": 27,
    **{f"%cluster_ctaid.{axis}": 28 + n for n, axis in enumerate(_AXES)},
    **{f"%cluster_nctaid.{axis}": 31 + n for n, axis in enumerate(_AXES)},
    **{f"%clusterid.{axis}": 34 + n for n, axis in enumerate(_AXES)},
    **{f"%nclusterid.{axis}": 37 + n for n, axis in enumerate(_AXES)},
}  # fmt: skip


# An address in shared memory, to which the rank of the CTA is added.
_SHARED_ADDRESS = 25
_MOST_SHARED_ADDRESS = 1 << 24


class Unsupported(Exception):
    """The machine does not have this form of an instruction."""


@dataclass(frozen=True)
class Const:
    """A value that every warp holds in slots of its own: 32-bit words, of which the first may be special."""

    words: tuple[int, ...]
    special: int = 0


@dataclass(frozen=True)
class Arg:
    """One entry of the operand list. `role` is def, use, raw, or trash; `what` a register, a constant or a number."""

    role: str
    what: Reg | Const | int
    negated: bool = False


@dataclass
class Op:
    """One operation. `target` is a label's number, `targets` are those of a table.

    `callee` is the function of a call or return. `imm` becomes the position that a branch or call goes to, `jumps`
    holds all that may follow; a guard that it keeps is not the instruction's.
    """

    name: str
    args: list[Arg] = field(default_factory=list)
    imm: int = 0
    flags: int = 0
    guard: Reg | None = None
    guard_negated: bool = False
    line: int = 0
    cuda_line: int = 0
    target: int = -1
    targets: tuple[int, ...] = ()
    callee: str = ""
    jumps: list[int] = field(default_factory=list)
    keeps_guard: bool = False
    text: str = ""

    @property
    def parts(self) -> bool:
        """Whether the next operation does not follow, unless a guard says so."""
        return self.name in ("exit", "bra", "brx", "ret") or self.callee != ""


class Lowering:
    """Turns operands of one kernel into entries of the operand list. `symbols` gives each variable's address."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        self._symbols = symbols
        # Registers of its own have negative numbers.
        self._temporaries = 0
        self.carry = self.temporary(0)

    def temporary(self, bits: int) -> Reg:
        """A register that the text does not have."""
        self._temporaries -= 1
        return Reg(self._temporaries, f"temporary {-self._temporaries}", bits)

    def symbol(self, name: str) -> int | None:
        """The address of a variable, parameter or function."""
        return self._symbols.get(name)

    def source(self, operand: Operand, bits: int) -> Arg:
        """A register, number or address that an operation reads as `bits` wide."""
        if isinstance(operand, Reg):
            if operand.bits == 0 or (bits > 32 and operand.bits != bits) or operand.bits == 128 != bits:
                raise Unsupported
            return Arg("use", operand)
        if isinstance(operand, Imm):
            return Arg("use", constant(literal_bits(operand, bits), bits))
        if isinstance(operand, Sym):
            if operand.name == "WARP_SZ":
                return Arg("use", constant(32, bits))
            if operand.name in SPECIALS and bits <= 32:
                return Arg("use", Const((0,), SPECIALS[operand.name]))
            if operand.name in self._symbols:
                address = self._symbols[operand.name]
                value = constant(address + operand.offset, bits)
                is_shared = SHARED_RESERVE <= address < _MOST_SHARED_ADDRESS
                return Arg("use", Const(value.words, _SHARED_ADDRESS) if is_shared else value)
        raise Unsupported

    def destination(self, operand: Operand, bits: int) -> Arg:
        """A register that an operation writes as `bits` wide, or the sink."""
        if isinstance(operand, Sink):
            return Arg("trash", 1)
        if isinstance(operand, Reg) and operand.bits != 0 and max(operand.bits, 32) == max(bits, 32):
            return Arg("def", operand)
        raise Unsupported

    def predicate(self, operand: Operand) -> Arg:
        """A predicate that is read."""
        if isinstance(operand, Neg):
            return Arg("use", operand.reg, negated=True)
        if isinstance(operand, Reg) and operand.bits == 0:
            return Arg("use", operand)
        if isinstance(operand, Imm):
            # Predicate 0 is false, 1 is true.
            return Arg("raw", 1 if operand.value else 0)
        raise Unsupported

    def predicate_result(self, operand: Operand) -> Arg:
        """A predicate that is written, or the sink."""
        if isinstance(operand, Sink):
            return Arg("trash", 0)
        if isinstance(operand, Reg) and operand.bits == 0:
            return Arg("def", operand)
        raise Unsupported

    def address(self, operand: Operand, *, wide: bool) -> list[Arg]:
        """An address of an operation with several: its base and the two halves of its offset."""
        base, offset, is_wide = self.base(operand)
        if wide and not is_wide:
            raise Unsupported
        return [base, Arg("raw", offset & 0xFFFF), Arg("raw", offset >> 16 & 0xFFFF)]

    def base(self, operand: Operand) -> tuple[Arg, int, bool]:
        """An address as base, offset, and whether the base has 64 bits."""
        if not isinstance(operand, Addr):
            raise Unsupported
        if isinstance(operand.base, Reg):
            if operand.base.bits not in (32, 64):
                raise Unsupported
            return Arg("use", operand.base), operand.offset, operand.base.bits == 64
        return self.source(operand.base, 64), operand.offset, True


def literal_bits(literal: Imm, bits: int) -> int:
    """A literal as an instruction of `bits` wide operands takes it: numbers with a decimal point are doubles."""
    if not literal.real or bits == 64:
        return literal.value
    if bits != 32:
        raise Unsupported
    (value,) = struct.unpack("<d", literal.value.to_bytes(8, "little"))
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return 0xFF800000 if value < 0 else 0x7F800000


def constant(value: int, bits: int) -> Const:
    """A number as the words that its register would hold."""
    if bits == 64:
        return Const((value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF))
    return Const((value & 0xFFFFFFFF,))


def items(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector; a lone operand is one."""
    return operand.items if isinstance(operand, Vec) else (operand,)
