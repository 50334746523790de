"""Plain tables: aligned columns for a terminal, Markdown for a file, JSON for a script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click


def aligned(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None, indent: int = 0) -> list[str]:
    """Lines with left-aligned columns; the last column is not padded."""
    table = [list(header), *map(list, rows)] if header is not None else [list(row) for row in rows]
    if not table:
        return []
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        " " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def markdown(rows: Iterable[Sequence[str]], header: Sequence[str]) -> list[str]:
    """Lines of a Markdown table; cells must hold no `|`."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def echo_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output."""
    for line in lines:
        click.echo(line)


def echo_json(value: Any) -> None:
    """Print one JSON document on standard output; NaN and infinities, which JSON lacks, become text."""
    click.echo(json.dumps(_without_specials(value), indent=1, allow_nan=False))


def _without_specials(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_specials(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_specials(item) for item in value]
    return value
