"""Launch arithmetic of top-k: what a call's sizes must be, and a text that shows it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dsagen.families.topk.guards import CAPACITY_GUARD, LAUNCH_GUARDS, ROWS_GUARD
from dsagen.plan import KernelPlan

SIZE_GUARDS = (CAPACITY_GUARD, ROWS_GUARD)
# Candidate blocks hold this many consecutive indices each.
CANDIDATE_BLOCK = 8


@dataclass(frozen=True)
class TopkShape:
    """Run-time sizes of a call: `k` slots for each of `rows` rows, in an op whose capacity is `capacity` slots."""

    rows: int
    k: int
    capacity: int

    @property
    def values(self) -> dict[str, int]:
        """What the guards of sizes read."""
        return {"rows": self.rows, "k": self.k, "topk_capacity": self.capacity}


def explain_call(plan: KernelPlan, shape: TopkShape) -> str:
    """Which kernel a call takes and what is checked, for people."""
    values = shape.values
    fits = all(guard.holds(values) for guard in SIZE_GUARDS)
    lines = [f"shape: {shape.rows} rows, k {shape.k}", "candidates:", f"  {plan.slug}: {'fits' if fits else 'refused'}"]
    for guard in SIZE_GUARDS:
        read = "  ".join(f"{name}={values[name]}" for name in guard.names)
        verdict = "holds" if guard.holds(values) else f"refuses: {guard.message.format(**values)}"
        lines.append(f"    [{guard.guard_id}] {guard.expression}  {read}  {verdict}")
    of_call = [guard for guard in LAUNCH_GUARDS if guard not in SIZE_GUARDS]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in of_call)]
    if not fits:
        return "\n".join([*lines, "chosen: none"])
    return "\n".join([*lines, f"chosen: {plan.slug}", f"grid: {shape.rows} CTAs, one a row", "workspace: 0 B"])
