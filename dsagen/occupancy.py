"""How many blocks of a kernel an SM holds at once, and how many clusters a device."""

from __future__ import annotations

from dataclasses import dataclass

from dsagen.arch import SMEM_RESERVED_PER_BLOCK_BYTES
from dsagen.arch import arch as arch_row
from dsagen.plan import KernelPlan


@dataclass(frozen=True)
class ResourceUse:
    """One resource of an SM: what a block takes of it, what there is, and how many blocks that allows."""

    name: str
    unit: str
    per_block: int
    per_sm: int

    @property
    def allows(self) -> int:
        """Blocks that fit by this resource."""
        return self.per_sm // self.per_block


def resources(plan: KernelPlan) -> tuple[ResourceUse, ...]:
    """What bounds the blocks of a kernel on one SM: shared memory with the driver's share, the register cap, .."""
    arch = arch_row(plan.variant.arch)
    return (
        ResourceUse("shared memory", "B", plan.smem_bytes + SMEM_RESERVED_PER_BLOCK_BYTES, arch.smem_per_sm_bytes),
        ResourceUse("registers", "", plan.threads * plan.registers_cap, arch.registers_per_sm),
        ResourceUse("threads", "", plan.threads, arch.max_threads_per_sm),
        ResourceUse("blocks", "", 1, arch.max_blocks_per_sm),
    )


def resident_ctas(plan: KernelPlan) -> int:
    """CTAs of a kernel that one SM holds at once, by shared memory, threads and the register cap."""
    return max(1, min(use.allows for use in resources(plan)))


def assumed_at_once(sm_count: int, cluster: int) -> int:
    """Clusters of `cluster` CTAs, one to an SM, that a device of so many SMs holds at once, where there is none to ask.

    SMs come in groups of several sizes, so that some are left over: an H200 has 15 clusters of 8 and 32 of 4.
    """
    return max(0, sm_count // cluster - 1)
