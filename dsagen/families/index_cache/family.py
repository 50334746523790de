"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.families.index_cache.geometry import (
    MIN_BLOCKS_PER_SM,
    ROWS_CPP,
    THREADS,
    Constants,
    codes_cpp,
    gather_constants,
    moved_bytes,
    rows_per_block,
    scale_dims,
    write_constants,
)
from dsagen.families.index_cache.guards import LAUNCH_GUARDS, PLAN_GUARDS
from dsagen.families.index_cache.params import GATHER_PARAMS, WRITE_PARAMS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.index_format import index_format
from dsagen.index_rule import index_rule
from dsagen.plan import KernelPlan, ParamField, TypeAlias, Variant, checked, lay_out_params

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "index_cache"
BODY = "lane_pieces"
REGISTERS = 64

_C_NAMES = {"threads": "Body::kThreads", "dim": "Constants::kDim", "scale_dims": "Constants::kScaleDims"}


class IndexCache:
    """The writer of a spec's index keys and the gather that reads them, portable body: 16 dims or bytes a lane."""

    name = NAME
    ops: tuple[str, ...] = (NAME,)
    guards: tuple[Guard, ...] = PLAN_GUARDS + LAUNCH_GUARDS

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """The writer by the spec's rule, and the gather."""
        assert spec.index is not None and spec.index_write is not None, "a spec with the op has both"
        keys: tuple[tuple[str, str | int], ...] = (
            ("keys", spec.index.keys),  # codes, scales, places
            ("dim", spec.index.dim),  # lanes of a key
        )
        # Arithmetic of the scale and of codes; loads of a row.
        writes = (("rule", spec.index_write.rule), ("rows", spec.index_write.rows))
        return tuple(
            Cell(NAME, role, arch.name, Variant(NAME, role, BODY, arch.name, axes))
            for role, axes in (("write", keys + writes), ("gather", keys))
        )

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""
        return {"write": plan_write, "gather": plan_gather}[variant.kernel](variant)


FAMILY = IndexCache()


def plan_write(variant: Variant) -> KernelPlan:
    """The writer's plan."""
    record, dim = index_format(str(variant.axis("keys"))), variant.axis_int("dim")
    rule, rows = index_rule(record, str(variant.axis("rule"))), str(variant.axis("rows"))
    types = (
        TypeAlias("Codes", codes_cpp(rule), "index_cache/codes.cuh"),
        TypeAlias("Rows", ROWS_CPP[rows], "prims/kv/codes.cuh"),
        TypeAlias("Body", "index_cache::WriteKeys<Constants, Codes, Rows, Params>", "index_cache/write.cuh"),
    )
    shape = {"dim": dim, "scale_dims": scale_dims(record, dim)}
    return _plan(variant, types, write_constants(record, dim, rule), WRITE_PARAMS, shape)


def plan_gather(variant: Variant) -> KernelPlan:
    """The gather's plan."""
    record, dim = index_format(str(variant.axis("keys"))), variant.axis_int("dim")
    body = TypeAlias("Body", "index_cache::GatherKeys<Constants, Params>", "index_cache/gather.cuh")
    return _plan(variant, (body,), gather_constants(record, dim), GATHER_PARAMS, {})


def _plan(
    variant: Variant,
    types: tuple[TypeAlias, ...],
    constants: Constants,
    members: tuple[ParamField, ...],
    shape: dict[str, int],
) -> KernelPlan:
    arch, role = arch_row(variant.arch), variant.kernel
    record, dim = index_format(str(variant.axis("keys"))), variant.axis_int("dim")
    params, params_bytes = lay_out_params(members)
    values = {
        "threads": THREADS,
        "registers_cap": REGISTERS,
        "min_blocks": MIN_BLOCKS_PER_SM,
        "registers_per_sm": arch.registers_per_sm,
        **shape,
    }
    guards = [guard for guard in PLAN_GUARDS if set(guard.names) <= set(values)]
    check(guards, values, variant.slug)
    per_block = rows_per_block(role, record, dim)
    moved = moved_bytes(role, record, dim, str(dict(variant.axes).get("rows", "bf16")))
    return KernelPlan(
        variant=variant,
        constants=constants,
        types=types,
        threads=THREADS,
        min_blocks_per_sm=MIN_BLOCKS_PER_SM,
        registers_cap=REGISTERS,
        smem=(),
        smem_bytes=0,
        params=params,
        params_bytes=params_bytes,
        grid=f"ceil(rows / {per_block})",
        overlaps_previous=False,
        guards=checked(guards, values, _C_NAMES),
        budget=(
            ("shape", f"a key by {THREADS // per_block} lanes, {per_block} keys a block"),
            ("registers", f"{REGISTERS} a thread"),
            ("floor", f"{moved} B of memory traffic a key"),
        ),
    )
