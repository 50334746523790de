"""`dsagen explain --html`: a spec's kernels as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dsagen.arch import DeviceFigures, arch
from dsagen.cli.charts import Point, Roof, memory_map, roofline, share_bar
from dsagen.cli.drawing import WARP, guard_lines, launch_lines, pipeline_lines, register_shares
from dsagen.cli.selection import Selection, describe_spec
from dsagen.limits import BUILD_GUARDS, CALL_RULES, LOAD_GUARDS
from dsagen.occupancy import resident_ctas, resources

if TYPE_CHECKING:
    from dsagen.evidence import EvidenceRow, RungStatus
    from dsagen.guard import Guard
    from dsagen.plan import KernelPlan

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6677; --line: #d5dbe4; --back: #fff; --accent: #0b62c4;
  --roof: #b4232a; --panel: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ef; --soft: #9aa5b5; --line: #364051; --back: #12161d;
  --accent: #6cb0ff; --roof: #ff8a80; --panel: #1a202a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 40px 0 4px; overflow-wrap: anywhere; }
h2 code { font-size: inherit; } h3 { font-size: 14px; margin: 20px 0 6px; } p { margin: 4px 0; color: var(--soft); }
nav { margin: 16px 0; padding: 12px 16px; background: var(--panel); border-radius: 8px; overflow-wrap: anywhere; }
nav a { display: block; color: var(--accent); text-decoration: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th { font-weight: 600; text-align: left; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre, td.code { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { margin: 0; padding: 12px; background: var(--panel); border-radius: 8px; overflow-x: auto; }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; font-size: 14px; }
svg { display: block; max-width: 100%; } svg text { font-size: 12px; fill: var(--ink); }
svg.chart, svg.bar { width: 840px; } svg.share { width: 240px; height: 12px; }
.grid { stroke: var(--line); } .roof { fill: none; stroke: var(--roof); stroke-width: 2; }
svg text.roof-label { fill: var(--roof); } .dot { fill: var(--accent); }
.leader { fill: none; stroke: var(--soft); stroke-width: 0.5; } svg text.box-label { fill: #111; }
.share-back { fill: var(--line); } .share-front { fill: var(--accent); }
.refused { color: var(--roof); }
"""


def page(
    selection: Selection,
    registers: Mapping[str, int | None],
    launch_guards: Mapping[str, Sequence[Guard]],
    rungs: Mapping[str, RungStatus],
    rows: Mapping[str, Sequence[EvidenceRow]],
) -> str:
    """The page of one spec; registers, guards, rungs and benchmark rows are by slug."""
    name, plans = selection.spec.name, selection.matrix.plans()
    refused = "".join(
        f'<p class="refused">refused: {escape(cell.op)} {escape(cell.role)} on {escape(cell.arch)}: '
        f"{escape(cell.refusal)}</p>"
        for cell in selection.matrix.refused
    )
    links = "".join(f'<a href="#{escape(plan.slug)}"><code>{escape(plan.slug)}</code></a>' for plan in plans)
    sections = "".join(
        _kernel(plan, registers[plan.slug], launch_guards[plan.slug], rungs[plan.slug], rows.get(plan.slug, ()))
        for plan in plans
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(name)}: kernels</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(name)}</h1><p>{escape(describe_spec(selection.spec))}</p>"
        f"{refused}<nav>{links}</nav>{sections}{_rules()}</body></html>\n"
    )


def _kernel(
    plan: KernelPlan,
    registers: int | None,
    guards: Sequence[Guard],
    status: RungStatus,
    rows: Sequence[EvidenceRow],
) -> str:
    launch = "".join(f"<p>{escape(line)}</p>" for line in launch_lines(plan, registers))
    parts = [
        f'<section id="{escape(plan.slug)}"><h2><code>{escape(plan.slug)}</code></h2>',
        f"<p>{escape(str(status))}</p>{launch}",
        _measured(plan, rows),
        _occupancy(plan),
        _budget(plan),
        _memory(plan),
        _pipeline(plan),
        _arguments(plan),
        _plan_guards(plan),
        _folded("Guards checked at launch", f"<pre>{escape(chr(10).join(guard_lines(guards)))}</pre>")
        if guards
        else "",
        "</section>",
    ]
    return "".join(parts)


def _occupancy(plan: KernelPlan) -> str:
    count = resident_ctas(plan)
    rows = [
        [
            escape(use.name),
            share_bar(count * use.per_block, use.per_sm),
            f"{count * use.per_block} of {use.per_sm} {use.unit}",
            f"room for {use.allows}",
        ]
        for use in resources(plan)
    ]
    total = plan.threads * plan.registers_cap
    roles = [
        [
            f"registers of {escape(role)}",
            share_bar(warps * WARP * registers, total),
            f"{warps} warps x {WARP} x {registers}",
            f"{warps * WARP * registers} of {total}",
        ]
        for role, warps, registers in register_shares(plan)
    ]
    return f"<h3>Of a multiprocessor: {count} block{'s' if count > 1 else ''} at once</h3>{_table((), rows + roles)}"


def _budget(plan: KernelPlan) -> str:
    return f"<h3>Budget</h3>{_table((), [[escape(a), escape(b)] for a, b in plan.budget])}" if plan.budget else ""


def _memory(plan: KernelPlan) -> str:
    if not plan.smem:
        return ""
    rows = [
        [
            f"{field.offset_bytes}",
            f"{field.size_bytes}",
            f"<code>{escape(field.ctype)} {escape(field.name)}{''.join(f'[{n}]' for n in field.extents)}</code>",
            escape(field.note),
        ]
        for field in plan.smem
    ]
    title = f"Shared memory, {plan.smem_bytes} B to scale"
    table = _table(("offset", "bytes", "member", ""), rows, numbers=(0, 1))
    return f"<h3>{title}</h3>{memory_map(plan)}{_folded('Members', table)}"


def _pipeline(plan: KernelPlan) -> str:
    lines = pipeline_lines(plan)
    return f"<h3>Pipeline</h3><pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _arguments(plan: KernelPlan) -> str:
    rows = [
        [str(field.offset_bytes), f"<code>{escape(field.declaration)}</code>", escape(field.note)]
        for field in plan.params
    ]
    table = _table(("offset", "argument", ""), rows, numbers=(0,))
    return _folded(f"Argument block, {plan.params_bytes} B", table)


def _plan_guards(plan: KernelPlan) -> str:
    rows = [
        [
            f"<code>{escape(guard.guard_id)}</code>",
            f"<code>{escape(guard.expression)}</code>",
            escape(", ".join(f"{name} {value}" for name, value in guard.values)),
        ]
        for guard in plan.guards
    ]
    return _folded("Guards that held when this was planned", _table((), rows))


def _rules() -> str:
    """What holds for every kernel, once at the end."""
    rules = [f"[{rule}]  {text}" for rule, text in CALL_RULES.items()]
    texts = [
        ("Guards checked on each compiled kernel", guard_lines(BUILD_GUARDS)),
        ("Guards checked on each loaded kernel", guard_lines(LOAD_GUARDS)),
        ("What each call is held to besides", rules),
    ]
    folded = "".join(_folded(title, f"<pre>{escape(chr(10).join(lines))}</pre>") for title, lines in texts)
    return f"<h2>Of every kernel</h2>{folded}"


# ---- measurements


def _measured(plan: KernelPlan, rows: Sequence[EvidenceRow]) -> str:
    """Roof line and table of each recorded benchmark; a word where there is none."""
    if not rows:
        return "<h3>Measured</h3><p>No benchmark of this kernel is recorded.</p>"
    figures = {found.device: found for found in arch(plan.variant.arch).figures}
    measured = "".join(_benchmark(row, figures.get(row.device)) for row in rows)
    return f"{measured}<p>Times are those of whole calls in which the kernel takes part.</p>"


def _benchmark(row: EvidenceRow, ceilings: DeviceFigures | None) -> str:
    cases = [
        case for case in row.figures.get("cases", ()) if isinstance(case, dict) and isinstance(case.get("case"), dict)
    ]
    title = f"Measured on {row.device}, {row.date[:10]}, {row.toolchain}, driver {row.driver}, spec {row.spec}"
    charts = _compute_chart(cases, ceilings, title) + _memory_chart(cases, ceilings, title)
    peers = list(dict.fromkeys(str(p.get("label")) for case in cases for p in _peers(case)))
    header = ("case", "GPU us", "floor us", "x floor", "TB/s", "TFLOP/s", *peers)
    table = _table(header, [_case_cells(case, peers) for case in cases], numbers=range(1, len(header)))
    note = "" if ceilings else "<p>No ceilings were measured on this device, so no roof is drawn.</p>"
    return f"<h3>{escape(title)}</h3>{note}{charts}{_folded('Cases', table)}"


def _compute_chart(cases: Sequence[Mapping[str, Any]], ceilings: DeviceFigures | None, title: str) -> str:
    points = []
    for case in cases:
        flops, rate = _number(case.get("tflops_per_s")), _number(case.get("tb_per_s"))
        if flops > 0 and rate > 0:
            points.append(Point(flops / rate, flops, f"{_case_name(case)}: {flops:.3g} TFLOP/s"))
    roofs = []
    if ceilings:
        memory, matrix = ceilings.dram_read_bytes_per_second / 1e12, ceilings.bf16_flops_per_second / 1e12
        roofs = [
            Roof(lambda x: x * memory, f"{memory:.2f} TB/s"),
            Roof(lambda x: matrix, f"{matrix:.0f} TFLOP/s"),
        ]
    return roofline(points, roofs, "FLOP per byte of cache", "TFLOP/s", f"Roofline. {title}")


def _memory_chart(cases: Sequence[Mapping[str, Any]], ceilings: DeviceFigures | None, title: str) -> str:
    """For kernels that only move data: the rate over how much a call moves."""
    points = []
    for case in cases:
        rate, time_us = _number(case.get("tb_per_s")), _number(case.get("gpu_us"))
        if rate > 0 and time_us > 0 and "tflops_per_s" not in case:
            points.append(Point(rate * time_us, rate, f"{_case_name(case)}: {rate:.3g} TB/s"))
    roofs = []
    if ceilings:
        memory = ceilings.dram_read_bytes_per_second / 1e12
        roofs = [Roof(lambda x: memory, f"{memory:.2f} TB/s from DRAM")]
    return roofline(points, roofs, "MB read by a call", "TB/s", f"Memory roof. {title}")


def _case_name(case: Mapping[str, Any]) -> str:
    """A case by what tells it from the others."""
    parts = case["case"]
    if "contest" in parts:
        return f"{parts.get('workloads')} workloads: {parts.get('group')}"
    if "cache_rows" in parts:
        return f"{parts.get('action')} of {parts['cache_rows']} rows, {parts.get('format_id')}"
    if "requests" in parts:
        blocks = f", {parts['selects']} blocks" if "selects" in parts else ""
        return f"step of {parts['requests']} x {parts.get('next_n')}, {parts.get('context')} keys{blocks}"
    if "rows" in parts:
        return f"{parts['rows']} x {parts.get('width')}, k {parts.get('k')}, {parts.get('mode')}"
    return f"batch {parts.get('batch')}" + (f" x {parts['s_q']}" if parts.get("s_q", 1) != 1 else "")


def _case_cells(case: Mapping[str, Any], peers: Sequence[str]) -> list[str]:
    time_us, floor_us = _number(case.get("gpu_us")), _number(case.get("floor_us"))
    ratio = time_us / floor_us if floor_us > 0 else 0.0
    by_label = {str(peer.get("label")): _number(peer.get("gpu_us")) for peer in _peers(case)}
    values = [time_us, floor_us, ratio, _number(case.get("tb_per_s")), _number(case.get("tflops_per_s"))]
    numbers = [
        f"{value:.3g}" if value > 0 else "" for value in [*values, *(by_label.get(label, 0.0) for label in peers)]
    ]
    return [escape(_case_name(case)), *numbers]


def _peers(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [peer for peer in case.get("peers", ()) if isinstance(peer, dict)]


def _number(value: object) -> float:
    """A figure of a record; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


# ---- pieces


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of cells that are HTML already; header texts are not."""
    right = set(numbers)
    kind = dict.fromkeys(right, ' class="number"')
    head = "".join(f"<th{kind.get(n, '')}>{escape(text)}</th>" for n, text in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{kind.get(n, '')}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
