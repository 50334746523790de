"""Instructions of a kernel as operations of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from dsagen.emulator.forms import find_form
from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, constant
from dsagen.emulator.ptx import Imm, Instruction, Kernel, Operand, Pair, Sink
from dsagen.emulator.rules import find_rule


def lower(kernel: Kernel, symbols: Mapping[str, int]) -> list[Op]:
    """All operations of a kernel, one list in order; branch targets stay labels' numbers, in Op.target."""
    lowering = Lowering(symbols)
    starts: list[int] = []
    ops: list[Op] = []
    for instruction in kernel.instructions:
        starts.append(len(ops))
        ops += lower_instruction(lowering, instruction)
    # Falling off the end leaves the kernel.
    starts.append(len(ops))
    ops.append(Op("exit"))
    for op in ops:
        if op.target >= 0:
            op.imm = starts[kernel.labels[op.target]]
    return ops


def lower_instruction(lowering: Lowering, instruction: Instruction) -> list[Op]:
    """The operations of one instruction; one that fails when it runs where the machine lacks it."""
    try:
        form = find_form(instruction.opcode)
        if form is not None:
            function, match = form
            ops = function(lowering, instruction, match)
        else:
            ops = [_from_rule(lowering, instruction)]
    except (Unsupported, IndexError, ValueError):
        # A wrong number of operands counts as a form that is not there.
        ops = [Op("unknown", text=instruction.opcode)]
    for op in ops:
        op.guard, op.guard_negated = instruction.guard, instruction.guard_negated
        op.line, op.cuda_line = instruction.line, instruction.cuda_line
    return ops


def _from_rule(lowering: Lowering, instruction: Instruction) -> Op:
    found = find_rule(instruction.opcode)
    if found is None:
        raise Unsupported
    rule, name, kinds = found
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
