"""How many blocks of a kernel an SM holds at once."""

from __future__ import annotations

from dsagen.arch import SMEM_RESERVED_PER_BLOCK_BYTES
from dsagen.arch import arch as arch_row
from dsagen.plan import KernelPlan


def resident_ctas(plan: KernelPlan) -> int:
    """CTAs of a kernel that one SM holds at once, by shared memory, threads and the register cap."""
    arch = arch_row(plan.variant.arch)
    return max(
        1,
        min(
            arch.max_blocks_per_sm,
            arch.smem_per_sm_bytes // (plan.smem_bytes + SMEM_RESERVED_PER_BLOCK_BYTES),
            arch.max_threads_per_sm // plan.threads,
            arch.registers_per_sm // (plan.threads * plan.registers_cap),
        ),
    )
