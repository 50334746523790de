"""Launch arithmetic of the cache ops: grid, floor, and a text that shows them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsagen.arch import Arch
from dsagen.families.kv_cache.geometry import ROW_TYPES, THREADS, moved_bytes, other_layout
from dsagen.families.kv_cache.guards import COUNT_GUARD, LAUNCH_GUARDS
from dsagen.kv_format import KvFormat, kv_format
from dsagen.plan import KernelPlan
from dsagen.quantity import quantity

ROWS_PER_BLOCK = THREADS // 32


@dataclass(frozen=True)
class RowsShape:
    """Run-time size of a call."""

    rows: int

    @property
    def blocks(self) -> int:
        """CTAs of the launch."""
        return -(-self.rows // ROWS_PER_BLOCK)


def row_traffic_bytes(plan: KernelPlan) -> int:
    """Bytes that one row moves through memory, read or written once each."""
    axes = dict(plan.variant.axes)
    if plan.variant.kernel == "convert":
        return 2 * kv_format(str(axes["to"])).record_bytes
    record = kv_format(str(axes["kv"]))
    row_type = ROW_TYPES[str(axes.get("rows", "bf16"))]
    return moved_bytes(record, row_type.bytes_for(record.d_qk))


def converts(record: KvFormat) -> bool:
    """Whether the format has a second layout to convert from."""
    return other_layout(record) is not None


def explain_call(plans: Iterable[KernelPlan], shape: RowsShape, arch: Arch) -> str:
    """What a call of each of the ops takes and is checked for, for people."""
    values = {"rows": shape.rows}
    fits = COUNT_GUARD.holds(values)
    verdict = "holds" if fits else "refuses"
    lines = [f"shape: {quantity(shape.rows, 'row')}", f"  [{COUNT_GUARD.guard_id}] {COUNT_GUARD.expression}  {verdict}"]
    measured = next(iter(arch.figures), None)
    for plan in plans if fits else ():
        traffic = row_traffic_bytes(plan) * shape.rows
        seconds = None if measured is None else traffic / measured.dram_read_bytes_per_second
        floor = "" if seconds is None else f", {1e6 * seconds:.2f} us at the least"
        lines.append(f"{plan.variant.kernel}: {plan.slug}")
        lines.append(f"  grid: {shape.blocks} CTAs, a warp a row; {traffic} B of traffic{floor}; workspace: 0 B")
    rest = [guard for guard in LAUNCH_GUARDS if guard is not COUNT_GUARD]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in rest)]
    return "\n".join(lines)
