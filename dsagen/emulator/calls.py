"""Calls: which functions a kernel reaches, and the operations that pass values, jump there and come back.

A function exists once. Its parameters and results are memory of each thread at a fixed place, and so is its return
address, a register: a function that could be entered a second time before it returns cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dsagen.emulator.operations import LOCAL_WINDOW, Arg, Lowering, Op, Unsupported, constant
from dsagen.emulator.syntax import Call, Instruction, Kernel, Module, Operand, Pair, Param, Reg, Sym, Vec

FUNCTIONS_BASE = 0x7400_0000_0000
_PRINT, _ASSERT = "vprintf", "__assertfail"
# As enum LibraryFunction of vm/calls.cpp.
_LIBRARY = {_ASSERT: -1, _PRINT: -2}


def function_addresses(module: Module) -> dict[str, int]:
    """The made-up addresses of functions, for pointers to them."""
    return {name: FUNCTIONS_BASE + 16 * number for number, name in enumerate(module.functions)}


@dataclass
class CallGraph:
    """The functions that `kernel` can reach, in the order in which they are laid out."""

    module: Module
    kernel: Kernel
    functions: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pointed = set(_names_taken(self.module)) & set(self.module.functions)
        self._reached: dict[str, set[str]] = {}
        work, seen = [self.kernel], {self.kernel.name}
        while work:
            function = work.pop()
            for name in self._callees(function):
                if name not in seen:
                    seen.add(name)
                    self.functions.append(self.module.functions[name])
                    work.append(self.module.functions[name])

    def _callees(self, function: Kernel) -> list[str]:
        names: list[str] = []
        for instruction in function.instructions:
            if instruction.call is not None:
                names += [target.name for target in self.targets(instruction.call)]
        return names

    def targets(self, call: Call) -> list[Kernel]:
        """The function of a call, or all that a pointer may mean. Those without a body are left out."""
        names = [call.callee.name] if isinstance(call.callee, Sym) else sorted(self._pointed)
        found = [self.module.functions[name] for name in names if name in self.module.functions]
        return [function for function in found if not function.refusal and _fits(function, call)]

    def returns_into(self, function: Kernel, caller: Kernel) -> bool:
        """Whether `function` can call `caller`, so that a call of it may be a recursion."""
        if function.name not in self._reached:
            seen: set[str] = set()
            work = [function]
            while work:
                for name in self._callees(work.pop()):
                    if name not in seen:
                        seen.add(name)
                        work.append(self.module.functions[name])
            self._reached[function.name] = seen
        return caller is function or caller.name in self._reached[function.name]


def _fits(function: Kernel, call: Call) -> bool:
    return len(function.params) == len(call.arguments) and len(function.results) == len(call.results)


def _names_taken(module: Module) -> Iterator[str]:
    """Names of symbols that are used as values."""
    for variable in module.variables:
        yield from (name for _, name, _ in variable.addresses)
    for function in (*module.kernels.values(), *module.functions.values()):
        for instruction in function.instructions:
            yield from _symbols(instruction.operands)


def _symbols(operands: tuple[Operand, ...]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, Sym):
            yield operand.name
        elif isinstance(operand, Vec):
            yield from _symbols(operand.items)
        elif isinstance(operand, Pair):
            yield from _symbols((operand.first, operand.second))


class CallLowering:
    """Lowers the calls and returns of one kernel and its functions."""

    def __init__(self, graph: CallGraph, lowering: Lowering) -> None:
        self._graph, self._lowering = graph, lowering
        self._addresses = function_addresses(graph.module)
        self._return_to = {function.name: lowering.temporary(32) for function in graph.functions}

    def leave(self, function: Kernel) -> Op:
        """What `ret` becomes in a function."""
        return Op("ret", [Arg("use", self._return_to[function.name])], callee=function.name)

    def lower(self, caller: Kernel, instruction: Instruction) -> list[Op]:
        """The operations of a call; where it cannot run, one that says why."""
        call = instruction.call
        assert call is not None
        if isinstance(call.callee, Reg):
            return self._indirect(caller, instruction, call, call.callee)
        name = call.callee.name if isinstance(call.callee, Sym) else "of what is no name"
        if name == _ASSERT and len(call.arguments) == 5:
            return [Op("call", [arg for value in call.arguments for arg in self._place(value)], imm=_LIBRARY[name])]
        if name == _PRINT and len(call.arguments) == 2 and len(call.results) == 1:
            places = (*call.arguments, *call.results)
            return [Op("call", [arg for value in places for arg in self._place(value)], imm=_LIBRARY[name])]
        targets = self._graph.targets(call)
        if not targets:
            return [Op("unknown", text=f"call {name} ({self._refusal(name)})")]
        if self._graph.returns_into(targets[0], caller):
            return [Op("unknown", text=f"call {name} (a recursion: {name} can call {caller.name})")]
        return self._direct(call, targets[0])

    def _refusal(self, name: str) -> str:
        function = self._graph.module.functions.get(name)
        if function is None:
            return "there is no such function"
        return function.refusal or "with another number of parameters than it has"

    def _direct(self, call: Call, function: Kernel) -> list[Op]:
        ops = [self._copy(value, param) for value, param in zip(call.arguments, function.params, strict=True)]
        ops.append(Op("call", [Arg("def", self._return_to[function.name])], callee=function.name))
        ops += [
            self._copy(value, result, back=True) for value, result in zip(call.results, function.results, strict=True)
        ]
        return ops

    def _indirect(self, caller: Kernel, instruction: Instruction, call: Call, pointer: Reg) -> list[Op]:
        """One comparison and call after the other for all that the pointer may mean."""
        done = self._lowering.temporary(0)
        ops = [Op("mov_pred", [Arg("def", done), Arg("raw", 1)], keeps_guard=True)]
        ops.append(Op("mov_pred", [Arg("def", done), Arg("raw", 0)]))
        for function in self._graph.targets(call):
            if self._graph.returns_into(function, caller):
                continue
            here = self._lowering.temporary(0)
            address = Arg("use", constant(self._addresses[function.name], 64))
            ops.append(Op("mov_pred", [Arg("def", here), Arg("raw", 0)], keeps_guard=True))
            ops.append(
                Op("setp_eq_u64", [Arg("def", here), Arg("trash", 0), self._lowering.source(pointer, 64), address])
            )
            ops.append(Op("or_pred", [Arg("def", done), Arg("use", done), Arg("use", here)]))
            for op in self._direct(call, function):
                op.guard, op.keeps_guard = here, True
                ops.append(op)
        text = f"{instruction.opcode} through a pointer (no function of these parameters, or a recursion)"
        ops.append(Op("unknown", text=text, guard=done, guard_negated=True, keeps_guard=True))
        return ops

    def _copy(self, value: Operand, param: Param, *, back: bool = False) -> Op:
        """Between the caller's variable and the function's parameter, both memory of the thread."""
        own = self._place(value)
        other = self._place(Sym(param.name))
        return Op("mov_local", [*other, *own] if back else [*own, *other], imm=param.size_bytes)

    def _place(self, value: Operand) -> list[Arg]:
        """Byte of the thread's memory at which a variable lies, in two halves."""
        address = self._lowering.symbol(value.name) if isinstance(value, Sym) else None
        if address is None or address < LOCAL_WINDOW:
            raise Unsupported
        offset = address - LOCAL_WINDOW
        return [Arg("raw", offset & 0xFFFF), Arg("raw", offset >> 16)]
