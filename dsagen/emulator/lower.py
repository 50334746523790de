"""Instructions of a kernel as operations of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from dsagen.emulator.arithmetic import lower_arithmetic
from dsagen.emulator.calls import CallGraph, CallLowering
from dsagen.emulator.conversions import lower_conversion
from dsagen.emulator.forms import find_form
from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, constant
from dsagen.emulator.rules import Rule, find_rule
from dsagen.emulator.syntax import Imm, Instruction, Kernel, Operand, Pair, Sink


def lower(graph: CallGraph, symbols: Mapping[str, int]) -> list[Op]:
    """All operations of a kernel and of the functions that it reaches, one list in order, with all jumps resolved."""
    lowering = Lowering(symbols)
    calls = CallLowering(graph, lowering)
    labels: dict[int, int] = {}
    entries: dict[str, int] = {}
    ops: list[Op] = []
    for function in (graph.kernel, *graph.functions):
        entries[function.name] = len(ops)
        starts = []
        for instruction in function.instructions:
            starts.append(len(ops))
            ops += _lower(lowering, calls, function, graph.kernel, instruction)
        # Falling off the end leaves.
        starts.append(len(ops))
        ops.append(Op("exit") if function is graph.kernel else calls.leave(function))
        labels |= {number: starts[index] for number, index in function.labels.items()}
    _resolve(ops, labels, entries)
    return ops


def _lower(
    lowering: Lowering, calls: CallLowering, function: Kernel, kernel: Kernel, instruction: Instruction
) -> list[Op]:
    if instruction.call is not None:
        try:
            ops = calls.lower(function, instruction)
        except Unsupported:
            ops = [Op("unknown", text=instruction.opcode)]
        return _placed(ops, instruction)
    if instruction.opcode in ("ret", "ret.uni") and function is not kernel:
        return _placed([calls.leave(function)], instruction)
    return lower_instruction(lowering, instruction)


def _resolve(ops: Sequence[Op], labels: Mapping[int, int], entries: Mapping[str, int]) -> None:
    returns: dict[str, list[int]] = {}
    for at, op in enumerate(ops):
        if op.target >= 0:
            op.imm = labels[op.target]
            op.jumps = [op.imm]
        elif op.name == "brx":
            op.jumps = [labels[target] for target in op.targets]
            op.args += [Arg("raw", half) for to in op.jumps for half in (to & 0xFFFF, to >> 16)]
        elif op.name == "call" and op.callee:
            op.imm = entries[op.callee]
            op.jumps = [op.imm]
            returns.setdefault(op.callee, []).append(at + 1)
    for op in ops:
        if op.name == "ret":
            op.jumps = returns.get(op.callee, [])


def lower_instruction(lowering: Lowering, instruction: Instruction) -> list[Op]:
    """The operations of one instruction; one that fails when it runs where the machine lacks it."""
    try:
        ops = _from_form(lowering, instruction)
    except (Unsupported, LookupError, ValueError):
        # A wrong number of operands counts as a form that is not there.
        ops = [Op("unknown", text=instruction.opcode)]
    return _placed(ops, instruction)


def _placed(ops: list[Op], instruction: Instruction) -> list[Op]:
    """The operations with the guard and the place of their instruction."""
    for op in ops:
        if not op.keeps_guard:
            op.guard, op.guard_negated = instruction.guard, instruction.guard_negated
        op.line, op.cuda_line = instruction.line, instruction.cuda_line
    return ops


def _from_form(lowering: Lowering, instruction: Instruction) -> list[Op]:
    form = find_form(instruction.opcode)
    if form is not None:
        function, match = form
        return function(lowering, instruction, match)
    found = find_rule(instruction.opcode)
    if found is not None:
        # Other numbers of operands may be another form.
        with contextlib.suppress(Unsupported):
            return [_from_rule(lowering, instruction, *found)]
    # Slower ones, which take whatever qualifiers there are.
    operation = instruction.opcode.partition(".")[0]
    return lower_conversion(lowering, instruction) if operation == "cvt" else lower_arithmetic(lowering, instruction)


def _from_rule(lowering: Lowering, instruction: Instruction, rule: Rule, name: str, kinds: list[str]) -> Op:
    op = Op(name, imm=rule.imm, flags=rule.flags)
    operands = list(instruction.operands)
    for kind in kinds:
        _append(lowering, op, kind, operands)
    if operands:
        raise Unsupported
    return op


def _append(lowering: Lowering, op: Op, kind: str, operands: list[Operand]) -> None:
    """Consume the text's next operand for one kind of a rule."""
    kind, _, default = kind.partition("=")
    kind, optional = kind.removesuffix("?"), kind.endswith("?")
    if kind.endswith("|p"):
        operand = operands.pop(0)
        first, second = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())
        op.args += [lowering.destination(first, int(kind[1:3])), lowering.predicate_result(second)]
        return
    if not operands:
        if default:
            op.args.append(Arg("use", constant(int(default), int(kind[1:]))))
            return
        if optional:
            return
        raise Unsupported
    operand = operands.pop(0)
    if kind == "-":
        return
    if kind == "i":
        if not isinstance(operand, Imm):
            raise Unsupported
        op.imm = operand.value
    elif kind == "p":
        op.args.append(lowering.predicate_result(operand))
    elif kind == "q":
        op.args.append(lowering.predicate(operand))
    elif kind in "AG":
        op.args += lowering.address(operand, wide=kind == "G")
    elif kind.startswith("d"):
        op.args.append(lowering.destination(operand, int(kind[1:])))
    else:
        op.args.append(lowering.source(operand, int(kind[1:])))
