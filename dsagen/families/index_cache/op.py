"""Launch arithmetic of the index cache's ops: grid, floor, and a text that shows them. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from dsagen.arch import Arch
from dsagen.families.index_cache.geometry import moved_bytes, rows_per_block
from dsagen.families.index_cache.guards import LAUNCH_GUARDS
from dsagen.families.kv_cache.guards import COUNT_GUARD
from dsagen.index_format import index_format
from dsagen.plan import KernelPlan
from dsagen.quantity import quantity


def blocks_for(plan: KernelPlan, rows: int) -> int:
    """CTAs of a launch for so many keys."""
    record = index_format(str(plan.variant.axis("keys")))
    return -(-rows // rows_per_block(plan.variant.kernel, record, plan.variant.axis_int("dim")))


def key_traffic_bytes(plan: KernelPlan) -> int:
    """Bytes that one key moves through memory, read or written once each."""
    axes = dict(plan.variant.axes)
    record, dim = index_format(str(axes["keys"])), plan.variant.axis_int("dim")
    return moved_bytes(plan.variant.kernel, record, dim, str(axes.get("rows", "bf16")))


def explain_call(plans: Iterable[KernelPlan], rows: int, arch: Arch) -> str:
    """What a call of each of the ops takes and is checked for, for people."""
    values = {"rows": rows}
    fits = COUNT_GUARD.holds(values)
    verdict = "holds" if fits else "refuses"
    lines = [f"shape: {quantity(rows, 'key')}", f"  [{COUNT_GUARD.guard_id}] {COUNT_GUARD.expression}  {verdict}"]
    measured = next(iter(arch.figures), None)
    for plan in plans if fits else ():
        traffic = key_traffic_bytes(plan) * rows
        seconds = None if measured is None else traffic / measured.dram_read_bytes_per_second
        floor = "" if seconds is None else f", {1e6 * seconds:.2f} us at the least"
        lines.append(f"{plan.variant.kernel}: {plan.slug}")
        lines.append(f"  grid: {blocks_for(plan, rows)} CTAs; {traffic} B of traffic{floor}; workspace: 0 B")
    lines.append("stores and loads of pages: 16 B where pages start at multiples of 16 B, else 4 B")
    rest = [guard for guard in LAUNCH_GUARDS if guard is not COUNT_GUARD]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in rest)]
    return "\n".join(lines)
