"""The instantiation matrix of a deployment: every cell, kept or refused with a reason, before anything compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsagen.arch import arch as arch_row
from dsagen.errors import SpecError
from dsagen.family import Cell, family_of_op
from dsagen.plan import KernelPlan
from dsagen.slug import symbols_for

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec


@dataclass(frozen=True)
class Matrix:
    """All cells of a spec, in op, arch, role order."""

    spec_name: str
    cells: tuple[Cell, ...]

    @property
    def refused(self) -> tuple[Cell, ...]:
        """Cells that cannot be built."""
        return tuple(cell for cell in self.cells if not cell.kept)

    def plans(self) -> tuple[KernelPlan, ...]:
        """Plans of the kept cells, each variant once; GuardError from a plan that breaks a limit."""
        plans: dict[str, KernelPlan] = {}
        for cell in self.cells:
            if cell.variant is not None and cell.kept and cell.variant.slug not in plans:
                plans[cell.variant.slug] = family_of_op(cell.op).plan(cell.variant)
        symbols_for(plans)  # two kernels that would share a symbol are an error here
        return tuple(plans.values())

    def reasons(self) -> dict[str, str]:
        """Why the body of a kept cell was taken, by the kernel's slug, where a cell says so."""
        return {cell.variant.slug: cell.why for cell in self.cells if cell.variant is not None and cell.why}

    def require_complete(self) -> None:
        """SpecError that lists every refused cell's reason once, if there is one."""
        reasons = dict.fromkeys(f"{cell.op} on {cell.arch}: {cell.refusal}" for cell in self.refused)
        if reasons:
            listed = "\n  ".join(reasons)
            raise SpecError(f"{self.spec_name}: not everything that it declares can be built:\n  {listed}")


def require_list(archs: object, known: Sequence[str]) -> None:
    """SpecError for archs that are neither None nor a list of some; `known` are what there is."""
    if archs is not None and (isinstance(archs, str | bytes) or not isinstance(archs, Sequence) or not archs):
        raise SpecError(f"archs: expected a list such as {list(known)}, or None for all of them, found {archs!r}")


def expand(spec: DeploymentSpec, archs: Sequence[str] | None = None) -> Matrix:
    """List the cells of a spec for its archs, or for the given ones among them.

    Raises SpecError for an arch that the spec does not declare, and for what is no list of archs.
    """
    require_list(archs, spec.archs)
    wanted = spec.archs if archs is None else tuple(dict.fromkeys(arch_row(name).name for name in archs))
    undeclared = [name for name in wanted if name not in spec.archs]
    if undeclared:
        raise SpecError(
            f"{spec.name}: arch {undeclared[0]} is not among its archs ({', '.join(spec.archs)}): "
            f"add it to `archs` in the spec"
        )
    cells = [cell for op in spec.ops for name in wanted for cell in family_of_op(op).expand(spec, arch_row(name))]
    return Matrix(spec.name, tuple(cells))
