"""`dsagen explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.completing import complete_specs
from dsagen.cli.drawing import plan_lines
from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import Selection, arch_option, describe_spec, json_option, select
from dsagen.cli.table import echo_json, echo_lines
from dsagen.errors import SpecError, StoreError

if TYPE_CHECKING:
    from dsagen.evidence import EvidenceRow
    from dsagen.guard import Guard
    from dsagen.plan import KernelPlan
    from dsagen.render import RenderedUnit


# Which ops what is told of a call depends on.
_READ_BY = {
    "--topk": ("sparse_decode", "topk"),
    "--width": ("topk", "indexer_logits"),
    "--sms": ("sparse_decode", "topk", "indexer_logits"),
}


@click.command()
@click.argument("spec", metavar="SPEC", shell_complete=complete_specs)
@arch_option
@click.option("--batch", type=click.IntRange(min=1), help="Explain a call of this many requests instead.")
@click.option("--s-q", type=click.IntRange(min=1), show_default="1", help="Query tokens of a request.")
@click.option("--topk", type=click.IntRange(min=1), help="Columns of an index row.  [default: the spec's capacity]")
@click.option("--width", type=click.IntRange(min=0), help="Scores of a row, for topk and indexer_logits.")
@click.option("--sms", type=click.IntRange(min=1), help="Multiprocessors.  [default: those of a device measured]")
@click.option(
    "--html", type=NamedPath(path_type=Path), metavar="FILE", help="Write a page with drawings and rooflines."
)
@json_option
def explain(
    spec: str,
    archs: tuple[str, ...],
    batch: int | None,
    s_q: int | None,
    topk: int | None,
    width: int | None,
    sms: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show what each kernel of SPEC is: axes, launch, shared memory, arguments and every guard.

    With --batch, show which kernel a call of that shape takes, and how it is split, instead. With --html, write a page
    that also has the roofline of recorded benchmarks. Needs neither a GPU nor a toolkit.
    """
    (selection,) = select([spec], archs)
    if batch is None:
        _require_nothing({"--s-q": s_q, "--topk": topk, "--width": width, "--sms": sms})
    if html is not None:
        if batch is not None or as_json:
            raise SpecError("explain --html writes a page of the plans: leave out --batch and --json")
        _write_page(selection, html)
        return
    if batch is not None:
        if as_json:
            raise SpecError("explain --batch prints text only: leave out --json, or leave out --batch for the plans")
        selection.matrix.require_complete()
        _require_read(selection, {"--topk": topk, "--width": width, "--sms": sms})
        s_q = s_q or 1
        rows = batch * s_q
        lines = _decode_lines(selection, batch, s_q, topk, sms) + _topk_lines(selection, rows, topk, width, sms)
        lines += _logits_lines(selection, batch, s_q, width, sms)
        echo_lines(lines + _cache_lines(selection, rows) + _index_cache_lines(selection, rows))
        return
    if as_json:
        echo_json(_selection_json(selection))
        return
    lines, reasons = [f"{selection.spec.name}: {describe_spec(selection.spec)}"], selection.matrix.reasons()
    for cell in selection.matrix.refused:
        lines.append(f"  refused: {cell.op} {cell.role} on {cell.arch}: {cell.refusal}")
    for plan in selection.matrix.plans():
        lines += ["", *plan_lines(plan, _launch_guards(plan), _registers(plan), reasons.get(plan.slug, ""))]
    echo_lines(lines + _spec_guard_lines(selection))


def _require_nothing(options: Mapping[str, int | None]) -> None:
    for name, value in options.items():
        if value is not None:
            raise SpecError(f"explain {name} is about a call: add --batch, or leave it out")


def _require_read(selection: Selection, options: Mapping[str, int | None]) -> None:
    """SpecError for an option of a call that none of the spec's ops reads."""
    for name, value in options.items():
        readers = _READ_BY[name]
        if value is not None and not set(readers) & set(selection.spec.ops):
            raise SpecError(f"explain {name}: {selection.spec.name} has no {' or '.join(readers)}: leave it out")


def _write_page(selection: Selection, path: Path) -> None:
    from dsagen.build import Store
    from dsagen.cli.page import page
    from dsagen.evidence import load_evidence, rung
    from dsagen.render import render

    store = Store.open()
    evidence = load_evidence(store)
    registers, guards, rungs, rows = {}, {}, {}, {}
    for plan in selection.matrix.plans():
        unit = render(plan)
        entry = store.lookup(unit)
        registers[plan.slug] = None if entry is None else int(entry.report["registers"])
        guards[plan.slug] = _launch_guards(plan)
        rungs[plan.slug] = rung(unit, evidence, entry)
        rows[plan.slug] = _benchmarks(evidence, unit, selection.spec.name)
    text = page(selection, registers, guards, rungs, rows)
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"--html {path!s:.200}: cannot be written ({reason}): name a file in an existing folder"
        ) from None
    echo_lines([str(path)])


def _benchmarks(evidence: Iterable[EvidenceRow], unit: RenderedUnit, spec_name: str) -> list[EvidenceRow]:
    """Recorded benchmarks of a kernel: the last of each device for this spec, or for others where it has none."""
    found = sorted((row for row in evidence if row.kind == "benchmark" and row.matches(unit)), key=lambda row: row.date)
    own = [row for row in found if row.spec == spec_name]
    return list({(row.device, row.spec): row for row in own or found}.values())


def _decode_lines(selection: Selection, batch: int, s_q: int, topk: int | None, sms: int | None) -> list[str]:
    """Choice and partition of a sparse-decode call on each arch; none where the spec has no such op."""
    from dsagen import knobs
    from dsagen.arch import arch
    from dsagen.families.sparse_decode.choice import candidates, explain_choice
    from dsagen.families.sparse_decode.choice_table import read_tables
    from dsagen.families.sparse_decode.op import DecodeShape
    from dsagen.render import render

    spec = selection.spec
    shape = DecodeShape(batch, s_q, spec.heads, topk or spec.topk, spec.extra_topk, spec.kv_heads)
    lines: list[str] = []
    for name in _archs_of(selection, "sparse_decode"):
        title, count = _multiprocessors(selection, name, sms)
        lines.append(title)
        if count is not None:
            plans, capacities = _main_plans(selection, "sparse_decode", name), (spec.topk, spec.extra_topk)
            device = next((row.device for row in arch(name).figures), "a device that was not measured")
            decision = read_tables().decide(
                shape, plans, device, lambda plan: render(plan).evidence_hash, spec.determinism
            )
            options = None, decision, knobs.SPARSE_DECODE_LAUNCHES.get()
            judged = candidates(plans, shape, capacities, count, spec.determinism, *options)
            lines.append(explain_choice(judged, shape, decision))
    return lines


def _topk_lines(selection: Selection, rows: int, topk: int | None, width: int | None, sms: int | None) -> list[str]:
    """What a top-k call takes on each arch; none where the spec has no such op."""
    from dsagen import knobs
    from dsagen.families.topk.op import TopkShape, explain_call

    spec, archs = selection.spec, _archs_of(selection, "topk")
    if archs and width is None:
        raise SpecError("explain --batch: which kernel takes a call of topk depends on its rows: give --width")
    lines: list[str] = []
    for name in archs:
        shape = TopkShape(rows, width or 0, topk or spec.selected_topk, spec.most_selected)
        title, count = _multiprocessors(selection, name, sms)
        lines.append(title)
        if count is not None:
            plans = _plans_by_kernel(selection, "topk", name)
            lines.append(explain_call(plans, shape, count, cluster=knobs.TOPK_CLUSTER.get()))
    return lines


def _logits_lines(selection: Selection, batch: int, next_n: int, width: int | None, sms: int | None) -> list[str]:
    """What a call of the indexer takes on each arch; none where the spec has no such op."""
    from dsagen.arch import arch
    from dsagen.families.indexer_logits.forms import COUNTED
    from dsagen.families.indexer_logits.op import LogitsShape, explain_forms

    index, archs = selection.spec.index, _archs_of(selection, "indexer_logits")
    if archs and width is None:
        raise SpecError("explain --batch: what a call of indexer_logits takes depends on its keys: give --width")
    lines: list[str] = []
    for name in archs:
        assert index is not None, "a spec with the op has an index"
        title, count = _multiprocessors(selection, name, sms)
        lines.append(title)
        if count is not None:
            plans = [
                p
                for p in selection.matrix.plans()
                # Only steps count scores.
                if (p.variant.family, p.variant.arch) == ("indexer_logits", name) and p.variant.kernel != COUNTED
            ]
            shape, reasons = LogitsShape(batch, next_n, width or 0, index.heads), selection.matrix.reasons()
            lines.append(explain_forms(plans, shape, count, arch(name), reasons))
    return lines


def _cache_lines(selection: Selection, rows: int) -> list[str]:
    """What calls of the cache ops take on each arch; none where the spec has no such op."""
    from dsagen.arch import arch
    from dsagen.families.kv_cache.op import RowsShape, explain_call

    lines: list[str] = []
    for name in _archs_of(selection, "kv_cache"):
        plans = [p for p in selection.matrix.plans() if (p.variant.family, p.variant.arch) == ("kv_cache", name)]
        lines += [f"{selection.spec.name} on {name}", explain_call(plans, RowsShape(rows), arch(name))]
    return lines


def _index_cache_lines(selection: Selection, rows: int) -> list[str]:
    """What calls of the index cache's ops take on each arch; none where the spec has no such op."""
    from dsagen.arch import arch
    from dsagen.families.index_cache.op import explain_call

    lines: list[str] = []
    for name in _archs_of(selection, "index_cache"):
        plans = [p for p in selection.matrix.plans() if (p.variant.family, p.variant.arch) == ("index_cache", name)]
        lines += [f"{selection.spec.name} on {name}", explain_call(plans, rows, arch(name))]
    return lines


def _archs_of(selection: Selection, op: str) -> list[str]:
    return list(dict.fromkeys(cell.arch for cell in selection.matrix.cells if cell.op == op))


def _multiprocessors(selection: Selection, name: str, sms: int | None) -> tuple[str, int | None]:
    """A title, and the multiprocessors to reckon with: those given, else those of a device of the arch."""
    from dsagen.arch import arch

    measured = next(iter(arch(name).figures), None)
    if sms is None and measured is None:
        return f"{name}: no device of this arch was measured: give its multiprocessors with --sms", None
    count = sms or (measured.sm_count if measured else 0)
    device = f"{measured.device}, " if measured is not None and sms is None else ""
    return f"{selection.spec.name} on {name} ({device}{count} multiprocessors)", count


def _plans_by_kernel(selection: Selection, family: str, arch: str) -> dict[str, list[KernelPlan]]:
    """Kernels that calls take; dependent forms are those of steps."""
    from dsagen.dependent import is_dependent

    found = [p for p in selection.matrix.plans() if (p.variant.family, p.variant.arch) == (family, arch)]
    plans = [plan for plan in found if not is_dependent(plan.variant)]
    return {kernel: [p for p in plans if p.variant.kernel == kernel] for kernel in {p.variant.kernel for p in plans}}


def _main_plans(selection: Selection, family: str, arch: str) -> list[KernelPlan]:
    return _plans_by_kernel(selection, family, arch)["main"]


def _spec_guard_lines(selection: Selection) -> list[str]:
    """The guards that hold a spec before there is a plan to say so."""
    from dsagen.family import families

    plans = selection.matrix.plans()
    planned = {guard.guard_id for plan in plans for guard in plan.guards}
    held = [
        guard
        for name in sorted({plan.variant.family for plan in plans})
        for guard in families()[name].guards
        if guard.when == "plan" and guard.guard_id not in planned
    ]
    return (
        ["", "guards that the spec was held to", *(f"  [{g.guard_id}]  {g.expression}" for g in held)] if held else []
    )


def _launch_guards(plan: KernelPlan) -> Sequence[Guard]:
    """What the family checks at launch; stated for each kernel that a call names, so not for a combine."""
    from dsagen.family import families

    if plan.variant.kernel == "combine":
        return ()
    return [guard for guard in families()[plan.variant.family].guards if guard.when == "launch"]


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
    reasons = selection.matrix.reasons()
    variants = [
        {
            "slug": plan.slug,
            "why": reasons.get(plan.slug, ""),
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
