"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.families.kv_cache.geometry import (
    CODES_CPP,
    MIN_BLOCKS_PER_SM,
    ROW_TYPES,
    SCALE_CPP,
    THREADS,
    WARP_DIMS,
    Constants,
    convert_constants,
    format_constants,
    moved_bytes,
    other_layout,
    write_constants,
)
from dsagen.families.kv_cache.guards import LAUNCH_GUARDS, PLAN_GUARDS
from dsagen.families.kv_cache.params import CONVERT_PARAMS, READ_PARAMS, WRITE_PARAMS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.kv_format import KvFormat, kv_format
from dsagen.kv_rule import write_rule
from dsagen.plan import KernelPlan, ParamField, TypeAlias, Variant, checked, lay_out_params

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "kv_cache"
BODY = "warp_rows"
REGISTERS = 64
# Suffix of the roles that serve the second cache.
EXTRA = "_extra"

_C_NAMES = {
    "threads": "Body::kThreads",
    "value_dims": "Constants::kValueDims",
}


class KvCache:
    """Writers, readers and layout converters of the spec's caches, portable body: a warp a row."""

    name = NAME
    ops: tuple[str, ...] = ("kv_cache",)
    guards: tuple[Guard, ...] = PLAN_GUARDS + LAUNCH_GUARDS

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """A writer and a reader for each cache, and a converter where its format has two layouts."""
        assert spec.kv_write is not None, "a spec with the op has how rows are written"
        caches = [("", spec.kv_format, spec.kv_write.rule)]
        if spec.extra_kv_format is not None:
            caches.append((EXTRA, spec.extra_kv_format, str(spec.kv_write.extra_rule)))
        apart = next((record for _, record, _ in caches if record.first_value), None)
        if apart is not None:
            why = f"{apart.format_id}: keys and values are stored as they are, each in its tensor: no kernel is needed"
            return tuple(Cell(NAME, role, arch.name, None, why) for role in ("write", "read"))
        return tuple(
            Cell(NAME, role + suffix, arch.name, Variant(NAME, role, BODY, arch.name, axes))
            for suffix, record, rule in caches
            for role, axes in cache_axes(record, rule, spec.kv_write.rows)
        )

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""
        return {"write": plan_write, "read": plan_read, "convert": plan_convert}[variant.kernel](variant)


FAMILY = KvCache()


def cache_axes(record: KvFormat, rule: str, rows: str) -> Iterator[tuple[str, tuple[tuple[str, str | int], ...]]]:
    """Kernel and axes of what serves one cache."""
    kv = ("kv", record.format_id)  # places of segments, codes and scales
    yield "write", (kv, ("rule", rule), ("rows", rows))  # arithmetic of the scale; loads of a row
    yield "read", (kv,)
    other = other_layout(record)
    if other is not None:
        yield "convert", (("from", other.format_id), ("to", record.format_id))  # places in both


def plan_write(variant: Variant) -> KernelPlan:
    """The writer's plan."""
    record = kv_format(str(variant.axis("kv")))
    rule, row_type = write_rule(record, str(variant.axis("rule"))), ROW_TYPES[str(variant.axis("rows"))]
    types = (
        *_codecs(record),
        TypeAlias("Rows", CODES_CPP[row_type], "prims/kv/codes.cuh"),
        TypeAlias("Body", "kv_cache::WriteRows<Constants, Codes, Scale, Rows, Params>", "kv_cache/write.cuh"),
    )
    constants = format_constants(record) + write_constants(record, rule)
    moved = moved_bytes(record, row_type.bytes_for(record.d_qk))
    return _plan(variant, types, constants, WRITE_PARAMS, moved, _shape_values(record))


def plan_read(variant: Variant) -> KernelPlan:
    """The reader's plan."""
    record = kv_format(str(variant.axis("kv")))
    types = (
        *_codecs(record),
        TypeAlias("Body", "kv_cache::ReadRows<Constants, Codes, Scale, Params>", "kv_cache/read.cuh"),
    )
    moved = moved_bytes(record, 2 * record.d_qk)
    return _plan(variant, types, format_constants(record), READ_PARAMS, moved, _shape_values(record))


def plan_convert(variant: Variant) -> KernelPlan:
    """The converter's plan."""
    source, target = kv_format(str(variant.axis("from"))), kv_format(str(variant.axis("to")))
    body = TypeAlias("Body", "kv_cache::ConvertRows<Constants, Params>", "kv_cache/convert.cuh")
    moved = moved_bytes(source, target.record_bytes)
    return _plan(variant, (body,), convert_constants(source, target), CONVERT_PARAMS, moved, None)


def _codecs(record: KvFormat) -> tuple[TypeAlias, ...]:
    values = record.segment("values").element
    return (
        TypeAlias("Codes", CODES_CPP[values], "prims/kv/codes.cuh"),
        TypeAlias("Scale", SCALE_CPP[record.scale_kind], "prims/kv/scales.cuh"),
    )


def _shape_values(record: KvFormat) -> dict[str, int]:
    return {"value_dims": record.segment("values").count, "group_dims": record.scale_group_dims or WARP_DIMS}


def _plan(
    variant: Variant,
    types: tuple[TypeAlias, ...],
    constants: Constants,
    members: tuple[ParamField, ...],
    moved: int,
    shape: dict[str, int] | None,
) -> KernelPlan:
    arch = arch_row(variant.arch)
    params, params_bytes = lay_out_params(members)
    values = {
        "threads": THREADS,
        "registers_cap": REGISTERS,
        "min_blocks": MIN_BLOCKS_PER_SM,
        "registers_per_sm": arch.registers_per_sm,
        **(shape or {}),
    }
    guards = [guard for guard in PLAN_GUARDS if set(guard.names) <= set(values)]
    check(guards, values, variant.slug)
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
        grid=f"ceil(rows / {THREADS // 32})",
        overlaps_previous=False,
        guards=checked(guards, values, _C_NAMES),
        budget=(
            ("shape", f"a row by a warp, {THREADS // 32} rows a block"),
            ("registers", f"{REGISTERS} a thread"),
            ("floor", f"{moved} B of memory traffic a row"),
        ),
    )
