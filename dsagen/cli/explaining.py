"""`dsagen explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.drawing import plan_lines
from dsagen.cli.selection import Selection, arch_option, describe_spec, json_option, select
from dsagen.cli.table import echo_json, echo_lines

if TYPE_CHECKING:
    from dsagen.guard import Guard
    from dsagen.plan import KernelPlan


@click.command()
@click.argument("spec", metavar="SPEC")
@arch_option
@json_option
def explain(spec: str, archs: tuple[str, ...], as_json: bool) -> None:
    """Show what each kernel of SPEC is: axes, launch, shared memory, arguments and every guard.

    Needs neither a GPU nor a toolkit.
    """
    (selection,) = select([spec], archs)
    if as_json:
        echo_json(_selection_json(selection))
        return
    lines = [f"{selection.spec.name}: {describe_spec(selection.spec)}"]
    for cell in selection.matrix.refused:
        lines.append(f"  refused: {cell.op} {cell.role} on {cell.arch}: {cell.refusal}")
    for plan in selection.matrix.plans():
        lines += ["", *plan_lines(plan, _launch_guards(plan), _registers(plan))]
    echo_lines(lines)


def _launch_guards(plan: KernelPlan) -> Sequence[Guard]:
    """What the family checks at launch; stated for its main kernel."""
    from dsagen.family import families

    if plan.variant.kernel != "main":
        return ()
    return [guard for guard in families()[plan.variant.family].guards if guard.when != "plan"]


def _registers(plan: KernelPlan) -> int | None:
    """Registers of the compiled kernel, None when the store has none."""
    from dsagen.build import Store
    from dsagen.render import render

    entry = Store.open().lookup(render(plan))
    return None if entry is None else int(entry.report["registers"])


def _selection_json(selection: Selection) -> dict[str, Any]:
    refused = [
        {"op": cell.op, "role": cell.role, "arch": cell.arch, "reason": cell.refusal}
        for cell in selection.matrix.refused
    ]
    variants = [
        {
            "slug": plan.slug,
            "symbol": plan.symbol,
            "plan": plan.to_json(),
            "registers": _registers(plan),
            "launch_guards": [
                {"guard_id": guard.guard_id, "when": guard.when, "expression": guard.expression}
                for guard in _launch_guards(plan)
            ],
        }
        for plan in selection.matrix.plans()
    ]
    return {"spec": selection.spec.to_mapping(), "refused": refused, "variants": variants}
