"""Guards: limits stated once, and enforced as a Python error, a static_assert, a row of `explain` and a test.

An expression is a small subset of Python over integer and boolean names: comparisons (chains too), `and`, `or`, `not`,
`+ - * // %`, unary minus, integer literals and parentheses. It prints to C, where `//` becomes `/`; names are therefore
expected to be non-negative.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dsagen.errors import GuardError

When = Literal["plan", "build", "load", "launch"]
Value = int | bool

# Above this a number is told by its length.
_MOST_BITS = 256
_BINARY: dict[type[ast.operator], tuple[Callable[[int, int], int], str]] = {
    ast.Add: (operator.add, "+"),
    ast.Sub: (operator.sub, "-"),
    ast.Mult: (operator.mul, "*"),
    ast.FloorDiv: (operator.floordiv, "/"),
    ast.Mod: (operator.mod, "%"),
}
_COMPARE: dict[type[ast.cmpop], tuple[Callable[[int, int], bool], str]] = {
    ast.Lt: (operator.lt, "<"),
    ast.LtE: (operator.le, "<="),
    ast.Gt: (operator.gt, ">"),
    ast.GtE: (operator.ge, ">="),
    ast.Eq: (operator.eq, "=="),
    ast.NotEq: (operator.ne, "!="),
}


@dataclass(frozen=True)
class Guard:
    """One limit.

    `guard_id` is printed in brackets in front of every message. `when` says at which stage all names are known.
    `message` is a format string over the expression's names (and any other names given at the check) that says the
    field, its value, the limit and the way out.
    """

    guard_id: str
    when: When
    expression: str
    message: str

    def __post_init__(self) -> None:
        self.names  # noqa: B018 - parses, so that a malformed guard fails where it is defined

    @cached_property
    def _tree(self) -> ast.expr:
        try:
            tree = ast.parse(self.expression, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"guard {self.guard_id}: {self.expression!r} is not an expression: {error}") from None
        _print_c(tree, {}, self.guard_id)
        return tree

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names that the expression reads, in order of first use."""
        return tuple(dict.fromkeys(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)))

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Evaluate with the given values; KeyError for a name without one."""
        return bool(_evaluate(self._tree, values))

    def failure(self, values: Mapping[str, object]) -> str:
        """The complete message, id included."""
        return f"[{self.guard_id}] {self.message.format(**{name: _printable(values[name]) for name in values})}"

    def to_c(self, c_names: Mapping[str, str]) -> str:
        """The expression in C++, each name replaced by its C++ expression from `c_names`, literals as they are."""
        return _print_c(self._tree, c_names, self.guard_id)


def check(guards: Iterable[Guard], values: Mapping[str, Value], context: str = "", **message_only: object) -> None:
    """Raise GuardError for the first guard that does not hold; `context` (a slug, say) is appended in parentheses."""
    for guard in guards:
        if not guard.holds(values):
            suffix = f" ({context})" if context else ""
            raise GuardError(guard.failure({**values, **message_only}) + suffix)


def require_int(name: str, value: object) -> int:
    """The value as it is; GuardError for anything but an int, bool included."""
    if not isinstance(value, int) or isinstance(value, bool):
        found = f"{value!r} ({type(value).__name__})"
        raise GuardError(f"[T-12] {name}: expected a whole number, found {found}: pass an int")
    return value


def require_bool(name: str, value: object) -> bool:
    """The value as it is; GuardError for anything but a bool."""
    if not isinstance(value, bool):
        found = f"{value!r} ({type(value).__name__})"
        raise GuardError(f"[T-12] {name}: expected True or False, found {found}: pass a bool")
    return value


def _printable(value: object) -> object:
    """The value, or words for an integer of more digits than Python prints."""
    too_long = isinstance(value, int) and value.bit_length() > _MOST_BITS
    return _LongNumber(value.bit_length()) if too_long and isinstance(value, int) else value


class _LongNumber:
    """An integer in words, whatever the format asks for."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def __format__(self, spec: str) -> str:
        return f"an integer of {self._bits} bits"


def failures(guards: Iterable[Guard], values: Mapping[str, Value], **message_only: object) -> list[str]:
    """Messages of all guards that do not hold."""
    return [g.failure({**values, **message_only}) for g in guards if not g.holds(values)]


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Value:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)][0](_evaluate(left, values), _evaluate(right, values))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(_evaluate(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            operands = [_evaluate(operand, values) for operand in (left, *rights)]
            return all(_COMPARE[type(op)][0](a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False))
    raise ValueError(f"not allowed in a guard: {ast.dump(node)}")


def _print_c(node: ast.expr, c_names: Mapping[str, str], guard_id: str) -> str:
    def sub(part: ast.expr) -> str:
        return _print_c(part, c_names, guard_id)

    match node:
        case ast.Constant(value=bool() as value):
            return "true" if value else "false"
        case ast.Constant(value=int() as value):
            return str(value)
        case ast.Name(id=name):
            return c_names.get(name, name)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"!({sub(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-({sub(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return f"({sub(left)} {_BINARY[type(op)][1]} {sub(right)})"
        case ast.BoolOp(op=op, values=parts):
            joiner = " && " if isinstance(op, ast.And) else " || "
            return "(" + joiner.join(sub(part) for part in parts) + ")"
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            operands = [sub(operand) for operand in (left, *rights)]
            pairs = zip(operands, ops, operands[1:], strict=False)
            tests = [f"{a} {_COMPARE[type(op)][1]} {b}" for a, op, b in pairs]
            return tests[0] if len(tests) == 1 else "(" + " && ".join(tests) + ")"
    raise ValueError(f"guard {guard_id}: {ast.unparse(node)!r} is outside the guard language")
