"""`dsagen list` and `dsagen schema`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.selection import (
    Selection,
    arch_option,
    cell_text,
    json_option,
    matrix_lines,
    select,
    specs_argument,
)
from dsagen.cli.table import echo_json, echo_lines, markdown
from dsagen.errors import SpecError

if TYPE_CHECKING:
    from dsagen.evidence import RungStatus
    from dsagen.family import Cell

REFUSED = "-"
_MARKDOWN_HEADER = ("spec", "op", "arch", "kernel", "rung", "variant, or why not")


@click.command("list")
@specs_argument(required=False)
@arch_option
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the README's table: shipped evidence only.")
@json_option
def list_variants(specs: tuple[str, ...], archs: tuple[str, ...], as_markdown: bool, as_json: bool) -> None:
    """List every kernel of the SPECs (all shipped ones by default): kept or refused and why, and its highest rung.

    Rungs: planned, compiled (it is in the kernel store), emulated (conformant on the emulator), conformant on a device,
    benchmarked on a device.
    """
    from dsagen.spec import shipped_specs

    if as_markdown and as_json:
        raise SpecError("list prints --markdown or --json, not both: leave one out")
    selections = select(specs or tuple(shipped_specs()), archs)
    if as_markdown:
        echo_lines(support_matrix(selections))
        return
    rungs = _rungs(selections, with_store=True)
    if as_json:
        echo_json({"specs": [_selection_json(selection, rungs) for selection in selections]})
    else:
        echo_lines(matrix_lines(selections, lambda cell: _rung_text(cell, rungs)))


@click.command()
def schema() -> None:
    """Print the JSON schema of a SPEC."""
    from dsagen.spec import json_schema

    echo_json(json_schema())


def support_matrix(selections: Sequence[Selection]) -> list[str]:
    """The matrices as a Markdown table; its rungs come from shipped evidence, so that it is the same everywhere."""
    rungs = _rungs(selections, with_store=False)
    rows = []
    for selection in selections:
        for cell in selection.matrix.cells:
            text = f"`{cell_text(cell)}`" if cell.kept else f"refused: {cell_text(cell)}"
            rows.append((selection.spec.name, cell.op, cell.arch, cell.role, _rung_text(cell, rungs), text))
    return markdown(rows, _MARKDOWN_HEADER)


def _rungs(selections: Sequence[Selection], with_store: bool) -> dict[str, RungStatus]:
    """Rung by slug of every kept cell, from shipped evidence and, if asked, the user's store."""
    from dsagen.build import Store
    from dsagen.evidence import load_evidence, rung
    from dsagen.render import render

    store = Store.open() if with_store else None
    rows = load_evidence(store)
    found: dict[str, RungStatus] = {}
    for plan in (plan for selection in selections for plan in selection.matrix.plans()):
        if plan.slug not in found:
            unit = render(plan)
            found[plan.slug] = rung(unit, rows, store.lookup(unit) if store is not None else None)
    return found


def _rung_of(cell: Cell, rungs: Mapping[str, RungStatus]) -> RungStatus | None:
    return rungs[cell.variant.slug] if cell.variant is not None and cell.kept else None


def _rung_text(cell: Cell, rungs: Mapping[str, RungStatus]) -> str:
    status = _rung_of(cell, rungs)
    return REFUSED if status is None else str(status)


def _selection_json(selection: Selection, rungs: Mapping[str, RungStatus]) -> dict[str, Any]:
    cells = []
    for cell in selection.matrix.cells:
        status = _rung_of(cell, rungs)
        columns = {
            "op": cell.op,
            "role": cell.role,
            "arch": cell.arch,
            "kept": cell.kept,
            "reason": cell.refusal or None,
            "slug": cell.variant.slug if cell.variant is not None else None,
            "rung": status.rung.name.lower() if status is not None else None,
            "devices": list(status.devices) if status is not None else [],
            "note": status.note if status is not None else "",
        }
        cells.append(columns)
    return {"spec": selection.spec.name, "complete": not selection.matrix.refused, "cells": cells}
