"""What ops of torch have in common: out variants, options by position or name, and no gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsagen.runtime.tensors import require_no_grad


def into(op: Callable[..., Any], required: int, *outputs: str) -> Callable[..., None]:
    """The op's out variant, which returns nothing and takes outputs behind its required arguments."""
    first = required + len(outputs)

    def run(*values: Any, **named: Any) -> None:
        op(*values[:required], *values[first:], **dict(zip(outputs, values[required:first], strict=False)), **named)

    return run


def parameters(schema: str) -> tuple[str, ...]:
    """Names of a schema's parameters that have defaults, in order."""
    return tuple(part.rpartition(" ")[2].partition("=")[0] for part in schema.split(", ") if "=" in part)


def by_name(names: tuple[str, ...], rest: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Options by name, of which some came by position."""
    return {**dict(zip(names, rest, strict=False)), **named}


def refuse_grad(*values: Any, **named: Any) -> None:
    """Refuse tensors that require grad, which no op here gives: all that tracing asks of an op without results."""
    for value in (*values, *named.values()):
        if isinstance(value, Tensor):
            require_no_grad("an input", value)
