"""A kernel as the bytes that the machine runs."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsagen.emulator.allocate import Slots, allocate
from dsagen.emulator.calls import CallGraph, function_addresses
from dsagen.emulator.lower import lower
from dsagen.emulator.operations import LOCAL_WINDOW, PARAM_WINDOW, SHARED_RESERVE, Arg, Const, Op
from dsagen.emulator.scan import Location
from dsagen.emulator.syntax import Kernel, Module, Reg, Variable
from dsagen.emulator.wgmma_flow import refuse_misuse
from dsagen.errors import EmulatorError

# Module variables lie here, each on its own page; buffers must stay clear.
VARIABLES_BASE = 0x6F00_0000_0000
_PAGE = 4096
_MOST_OPERANDS = 0x7FFF
# The first slots take results that nobody wants; predicates 0 and 1 are false and true, 2 is such a place.
_TRASH_SLOTS, _FIRST_PREDICATE, _TRASH_PREDICATE = 2, 3, 2
_INSTRUCTION = struct.Struct("<HhIiI")
_PRELOAD = struct.Struct("<III")


@dataclass(frozen=True)
class ModuleVariable:
    """A .global or .const variable: its address and its bytes at launch."""

    name: str
    address: int
    initial: bytes
    writable: bool


@dataclass(frozen=True)
class RegisterPlace:
    """Where a register is from operation `first` to `last`: its slot, or for a predicate (`bits` 0) its number."""

    slot: int
    bits: int
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """Code and operand list of one kernel, and what a launch has to provide."""

    entry: str
    code: bytes
    args: array[int]
    ptx_lines: array[int]
    cuda_lines: array[int]
    preloads: bytes
    unknown: tuple[str, ...]
    slots: int
    predicates: int
    param_bytes: int
    static_shared_bytes: int
    local_bytes: int
    variables: tuple[ModuleVariable, ...]
    registers: Mapping[str, Sequence[RegisterPlace]]
    target: str
    cluster: tuple[int, int, int] | None
    # PTX line -> where its CUDA line lies and was inlined, where that is not the kernel's own text.
    places: dict[int, str]

    @property
    def instructions(self) -> int:
        """Instructions of the machine."""
        return len(self.ptx_lines)


def assemble(module: Module, entry: str, numbers: Mapping[str, int]) -> Program:
    """The program of a kernel; `numbers` gives the number of each machine instruction."""
    kernel = module.kernels.get(entry)
    if kernel is None:
        raise EmulatorError(f"there is no kernel {entry!r} in the PTX; it has {', '.join(module.kernels) or 'none'}")
    graph = CallGraph(module, kernel)
    symbols, layout = _place_variables(graph)
    ops = lower(graph, symbols)
    refuse_misuse(ops)
    constants = _constants(ops)
    slots = allocate(ops, constants.end)
    predicates = _predicates(ops)
    if max(slots.end, len(predicates) + _FIRST_PREDICATE) > _MOST_OPERANDS:
        raise EmulatorError(f"kernel {entry} needs {slots.end} slots, the machine has {_MOST_OPERANDS}")
    unknown: list[str] = []
    code, args = bytearray(), array("H")
    for op in ops:
        first = len(args)
        args.extend(_encode(arg, slots, constants, predicates) for arg in op.args)
        imm = op.imm
        if op.name in ("unknown", "misuse"):
            imm = len(unknown)
            unknown.append(op.text)
        guard = 0
        if op.guard is not None:
            guard = predicates[op.guard.number] + 1
            guard = -guard if op.guard_negated else guard
        code += _INSTRUCTION.pack(numbers[op.name], guard, first, _signed(imm), op.flags)
    return Program(
        entry,
        bytes(code),
        args,
        array("I", [op.line for op in ops]),
        array("I", [op.cuda_line for op in ops]),
        constants.preloads,
        tuple(unknown),
        slots.end,
        len(predicates) + _FIRST_PREDICATE,
        kernel.param_bytes,
        layout.shared_bytes,
        layout.local_bytes,
        layout.variables,
        _register_places(ops, slots, predicates),
        module.target,
        kernel.cluster,
        _places(graph),
    )


def _places(graph: CallGraph) -> dict[int, str]:
    """A text for each PTX line whose CUDA line was inlined or lies in another file than the kernel."""
    files = graph.module.files
    out: dict[int, str] = {}
    own = next((at.callers[-1][0] if at.callers else at.file for at in _locations(graph.kernel) if at.line), 0)

    def name(file: int, line: int) -> str:
        return f"line {line}" + (f" of {Path(files.get(file, '')).name}" if file != own else "")

    for function in (graph.kernel, *graph.functions):
        for instruction in function.instructions:
            at = instruction.location
            if at.callers or (at.line and at.file != own):
                chain = [name(at.file, at.line), *(name(file, line) for file, line in at.callers)]
                out[instruction.line] = ", inlined at ".join(chain)
    return out


def _locations(kernel: Kernel) -> Iterator[Location]:
    return (instruction.location for instruction in kernel.instructions)


def lower_kernel(module: Module, kernel: Kernel) -> list[Op]:
    """The operations of a kernel and of the functions that it reaches, before slots are given out."""
    graph = CallGraph(module, kernel)
    return lower(graph, _place_variables(graph)[0])


@dataclass(frozen=True)
class _Layout:
    shared_bytes: int
    local_bytes: int
    variables: tuple[ModuleVariable, ...]


def _place_variables(graph: CallGraph) -> tuple[dict[str, int], _Layout]:
    """Addresses of everything with a name, static shared variables first and dynamic ones past them."""
    symbols = {param.name: PARAM_WINDOW + param.offset for param in graph.kernel.params}
    symbols |= function_addresses(graph.module)
    everything = list(graph.module.variables)
    for function in (graph.kernel, *graph.functions):
        everything += function.variables
    for function in graph.functions:
        for param in (*function.params, *function.results):
            everything.append(Variable(param.name, "param", param.align, param.size_bytes))
    shared = local = 0
    address = VARIABLES_BASE
    placed: list[tuple[Variable, int]] = []
    dynamic: list[Variable] = []
    for variable in everything:
        if variable.space == "shared" and variable.dynamic:
            dynamic.append(variable)
        elif variable.space == "shared":
            shared = _round_up(shared, variable.align)
            symbols[variable.name] = SHARED_RESERVE + shared
            shared += variable.size_bytes
        elif variable.space in ("local", "param"):
            local = _round_up(local, variable.align)
            symbols[variable.name] = LOCAL_WINDOW + local
            local += variable.size_bytes
        else:
            placed.append((variable, address))
            symbols[variable.name] = address
            address = _round_up(address + variable.size_bytes + 1, max(_PAGE, variable.align))
    shared = _round_up(shared, max((variable.align for variable in dynamic), default=1))
    symbols |= {variable.name: SHARED_RESERVE + shared for variable in dynamic}
    variables = tuple(_with_addresses(variable, at, symbols) for variable, at in placed)
    return symbols, _Layout(shared, _round_up(local, 16), variables)


def _with_addresses(variable: Variable, address: int, symbols: Mapping[str, int]) -> ModuleVariable:
    data = bytearray(variable.initial if variable.initial is not None else bytes(variable.size_bytes))
    for offset, name, addend in variable.addresses:
        if name not in symbols:
            raise EmulatorError(f"variable {variable.name} holds the address of {name}, which the PTX does not define")
        struct.pack_into("<Q", data, offset, symbols[name] + addend & 0xFFFF_FFFF_FFFF_FFFF)
    return ModuleVariable(variable.name, address, bytes(data), variable.space == "global")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class _Constants:
    of: dict[Const, int]
    end: int
    preloads: bytes


def _constants(ops: Sequence[Op]) -> _Constants:
    """Slots of all constants, and what fills them."""
    of: dict[Const, int] = {}
    end = _TRASH_SLOTS
    preloads = bytearray()
    for op in ops:
        for arg in op.args:
            if not isinstance(arg.what, Const) or arg.what in of:
                continue
            of[arg.what] = end
            for n, word in enumerate(arg.what.words):
                preloads += _PRELOAD.pack(end + n, arg.what.special if n == 0 else 0, word)
            end += len(arg.what.words)
    return _Constants(of, end, bytes(preloads))


def _predicates(ops: Sequence[Op]) -> dict[int, int]:
    """Numbers of predicates by register."""
    of: dict[int, int] = {}
    for op in ops:
        candidates = [arg.what for arg in op.args] + [op.guard]
        for reg in candidates:
            if isinstance(reg, Reg) and reg.bits == 0:
                of.setdefault(reg.number, len(of) + _FIRST_PREDICATE)
    return of


def _register_places(ops: Sequence[Op], slots: Slots, predicates: Mapping[int, int]) -> dict[str, list[RegisterPlace]]:
    """Places of all registers by name; names in braces may be those of several."""
    out: dict[str, list[RegisterPlace]] = {}
    seen: set[int] = set()
    for op in ops:
        for reg in (*(arg.what for arg in op.args), op.guard):
            if not isinstance(reg, Reg) or reg.number in seen:
                continue
            seen.add(reg.number)
            first, last = slots.spans.get(reg.number, (-1, len(ops)))
            slot = predicates[reg.number] if reg.bits == 0 else slots.of[reg.number]
            out.setdefault(reg.name, []).append(RegisterPlace(slot, reg.bits, first, last))
    return out


def _encode(arg: Arg, slots: Slots, constants: _Constants, predicates: Mapping[int, int]) -> int:
    if isinstance(arg.what, Const):
        return constants.of[arg.what]
    if isinstance(arg.what, Reg):
        if arg.what.bits == 0:
            return predicates[arg.what.number] | (0x8000 if arg.negated else 0)
        return slots.of[arg.what.number]
    if arg.role == "trash":
        return 0 if arg.what == 1 else _TRASH_PREDICATE
    return arg.what


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
