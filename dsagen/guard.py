"""Guards: limits stated once, and enforced as a Python error, a static_assert, a row of `explain` and a test.

An expression is a small subset of Python over integer and boolean names: comparisons (chains too), `and`, `or`, `not`,
`+ - * // %`, unary minus, integer literals and parentheses. It prints to C, where `//` becomes `/`; names are therefore
expected to be non-negative.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Literal

from dsagen.errors import GuardError

When = Literal["plan", "build", "load", "launch"]
Value = int | bool

# Above this a number is told by its length.
_MOST_BITS = 256
# What operators are in C.
_BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%",
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


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
    def _code(self) -> CodeType:
        # A call has dozens of guards, so they are not walked. The tree holds nothing but the language of guards.
        return compile(ast.Expression(self._tree), f"<guard {self.guard_id}>", "eval")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names that the expression reads, in order of first use."""
        return tuple(dict.fromkeys(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)))

    def __reduce__(self) -> tuple[type[Guard], tuple[str, When, str, str]]:
        # Without what is derived: code has no other form.
        return type(self), (self.guard_id, self.when, self.expression, self.message)

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Evaluate with the given values; KeyError for a name without one."""
        try:
            return bool(eval(self._code, {"__builtins__": {}}, values))
        except NameError as error:
            raise KeyError(error.name) from None

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


def rename(error: GuardError, names: Mapping[str, str]) -> GuardError:
    """The error in the words of a caller: each name of an argument replaced by the one that the caller has for it.

    Only where a message says it as a name: ahead of everything, before a method or an index, and beside its device or
    memory.
    """
    word = rf"(?:{'|'.join(sorted(names, key=len, reverse=True))})\b"
    pattern = rf"(?<=\] ){word}|(?<=that of ){word}|\b{word}(?=\.\w|\[| is on )"
    return GuardError(re.sub(pattern, lambda found: names[found[0]], str(error)))


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
            return f"({sub(left)} {_BINARY[type(op)]} {sub(right)})"
        case ast.BoolOp(op=op, values=parts):
            joiner = " && " if isinstance(op, ast.And) else " || "
            return "(" + joiner.join(sub(part) for part in parts) + ")"
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            operands = [sub(operand) for operand in (left, *rights)]
            pairs = zip(operands, ops, operands[1:], strict=False)
            tests = [f"{a} {_COMPARE[type(op)]} {b}" for a, op, b in pairs]
            return tests[0] if len(tests) == 1 else "(" + " && ".join(tests) + ")"
    raise ValueError(f"guard {guard_id}: {ast.unparse(node)!r} is outside the guard language")
