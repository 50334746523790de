"""What a PTX text says, as data: operands, instructions, variables, kernels, modules."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsagen.emulator.scan import Location


@dataclass(frozen=True)
class Reg:
    """A register of some bits, 0 for a predicate. The number is unique in the module."""

    number: int
    name: str
    bits: int

    @property
    def slots(self) -> int:
        """Rows of 32 bits that it takes."""
        return -(-self.bits // 32)


@dataclass(frozen=True)
class Imm:
    """A literal as bits: an integer as written (may be negative), a 0f or 0d one as its bit pattern.

    `real`: it was written with a decimal point, and the bits are those of the double.
    """

    value: int
    real: bool = False


@dataclass(frozen=True)
class Sym:
    """A variable, a parameter, a function, a special register or a label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Addr:
    """What stands in brackets; beside a tensor map there are coordinates."""

    base: Reg | Imm | Sym
    offset: int
    coordinates: tuple[Operand, ...] = ()


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
class Call:
    """A call: a function's name or the register with its address, and the variables that carry values."""

    callee: Operand
    results: tuple[Operand, ...]
    arguments: tuple[Operand, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction; `target` is the label's number of a branch, `targets` those of an indexed one."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    guard_negated: bool
    line: int
    location: Location
    target: int = -1
    targets: tuple[int, ...] = ()
    call: Call | None = None

    @property
    def cuda_line(self) -> int:
        """The line in the CUDA source, 0 where none is known."""
        return self.location.line


@dataclass(frozen=True)
class Variable:
    """A variable. `initial` holds its bytes where it has an initialiser, `addresses` what else belongs in them:
    byte offset, name, addend.
    """

    name: str
    space: str
    align: int
    size_bytes: int
    dynamic: bool = False
    initial: bytes | None = None
    addresses: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True)
class Param:
    """A parameter at its offset in the argument block; of a function, it is memory of each thread."""

    name: str
    offset: int
    size_bytes: int
    align: int = 1


@dataclass
class Kernel:
    """An entry or a function: instructions in order, `labels` gives the index of what a label stands before."""

    name: str
    params: list[Param] = field(default_factory=list)
    results: list[Param] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    # CTAs of a cluster in x, y and z, where the text demands them.
    cluster: tuple[int, int, int] | None = None
    # Why a call of it cannot run, empty where it can.
    refusal: str = ""

    @property
    def param_bytes(self) -> int:
        """Size of the argument block."""
        return max((param.offset + param.size_bytes for param in self.params), default=0)


@dataclass
class Module:
    """All kernels, functions and module variables of a PTX text, the target and the source files by number."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    functions: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    target: str = ""
    files: dict[int, str] = field(default_factory=dict)
