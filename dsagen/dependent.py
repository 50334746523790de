"""Dependent launches: forms of kernels that begin while the kernel before them ends, and wait for it inside.

Programmatic dependent launch hides most of the gap between two kernels of a chain. A kernel with such a form runs the
body of the one by itself behind `griddepcontrol.wait`, so what either of them computes is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.family import Cell
from dsagen.plan import KernelPlan, TypeAlias, Variant
from dsagen.spec_defaults import STEP_OPS

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

CHAIN_OPS = STEP_OPS
# Where the form stands among the roles of its op.
ROLE_PREFIX = "dependent_"
# From so many requests on the launches of a step overlap unless a plan is told otherwise. Measured on an H200, steps of
# V3.2 over 128 K keys, with overlapping launches and without, us: 39.1 and 37.7 for 1 request, 129.9 and 122.6 for 16,
# 644 and 652 for 128. The limit lies between the latter two.
LEAST_REQUESTS = 64
_AXIS = ("launch", "dependent")
_BODY, _ALONE = "Body", "BodyAlone"
_AROUND, _HEADER = f"tile::AfterGrid<{_ALONE}>", "prims/tile/after_grid.cuh"


def has_chain(spec: DeploymentSpec, arch: Arch) -> bool:
    """Whether a spec's decode steps may overlap their launches on an arch."""
    paged = spec.index is not None and "paged" in spec.index.forms
    return arch.has_pdl and paged and set(CHAIN_OPS) <= set(spec.ops)


def dependent_cell(cell: Cell) -> Cell:
    """The cell of a kernel's dependent form."""
    assert cell.variant is not None, "a refused kernel has no other form"
    variant = replace(cell.variant, axes=(*cell.variant.axes, _AXIS))
    return replace(cell, role=ROLE_PREFIX + cell.role, variant=variant)


def is_dependent(variant: Variant) -> bool:
    """Whether a variant is the dependent form of another."""
    return _AXIS in variant.axes


def alone(variant: Variant) -> Variant:
    """The variant whose body this one runs, which is itself where it has no dependent launch."""
    return replace(variant, axes=tuple(axis for axis in variant.axes if axis != _AXIS))


def plan_either(variant: Variant, plan_alone: Callable[[Variant], KernelPlan]) -> KernelPlan:
    """The plan of a variant of either form; `plan_alone` makes those of kernels by themselves."""
    plan = plan_alone(alone(variant))
    if plan.variant == variant:
        return plan
    types = tuple(replace(alias, name=_ALONE) if alias.name == _BODY else alias for alias in plan.types)
    return replace(plan, variant=variant, types=(*types, TypeAlias(_BODY, _AROUND, _HEADER)), overlaps_previous=True)
