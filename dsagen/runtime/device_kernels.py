"""The kernels of a deployment for one device, by op and role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsagen.dependent import ROLE_PREFIX, alone
from dsagen.plan import KernelPlan
from dsagen.runtime.driver import DeviceFacts
from dsagen.runtime.sparse_decode import OP


@dataclass(frozen=True)
class DeviceKernels:
    """What a deployment runs on one device: plans by op and role, each in order of preference."""

    ordinal: int
    facts: DeviceFacts
    arch: str
    by_role: Mapping[tuple[str, str], tuple[KernelPlan, ...]]

    @property
    def plans(self) -> tuple[KernelPlan, ...]:
        """All of them."""
        return tuple(plan for plans in self.by_role.values() for plan in plans)

    @property
    def mains(self) -> tuple[KernelPlan, ...]:
        """The main kernels of sparse decode."""
        return self.by_role[OP, "main"]

    def dependent(self, plan: KernelPlan) -> KernelPlan | None:
        """The form of a kernel that begins while the one before it ends, None where there is none."""
        op = plan.variant.family
        forms = [
            form
            for (of, role), plans in self.by_role.items()
            if of == op and role.startswith(ROLE_PREFIX)
            for form in plans
        ]
        return next((form for form in forms if alone(form.variant) == plan.variant), None)

    @property
    def combine(self) -> KernelPlan:
        """The combine of sparse decode."""
        return self.by_role[OP, "combine"][0]
