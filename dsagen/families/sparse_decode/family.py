"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from dsagen import knobs
from dsagen.arch import MAX_REGISTERS_PER_THREAD, Arch
from dsagen.arch import arch as arch_row
from dsagen.dependent import dependent_cell, has_chain, plan_either
from dsagen.families.sparse_decode import geometry as portable
from dsagen.families.sparse_decode import hopper
from dsagen.families.sparse_decode.choice_table import read_tables
from dsagen.families.sparse_decode.geometry import (
    STAGE_TOKENS,
    Geometry,
    deal_heads,
    heads_per_cta,
    most_heads,
)
from dsagen.families.sparse_decode.guards import ARGUMENT_GUARDS, DEAL_GUARD, LAUNCH_GUARDS, PLAN_GUARDS
from dsagen.families.sparse_decode.op import Determinism
from dsagen.families.sparse_decode.params import COMBINE_PARAMS, main_params
from dsagen.families.sparse_decode.rows import Caches, Encoding, cache_rows
from dsagen.family import Cell
from dsagen.guard import Guard, check, failures
from dsagen.kv_format import kv_format
from dsagen.plan import KernelPlan, TypeAlias, Variant, checked, lay_out_params, round_up

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "sparse_decode"
BODY = "mma_sync"
COMBINE_REGISTERS = 128
# Of each body of the main kernel the module with its geometry, its name and its header.
_BODIES: dict[str, tuple[ModuleType, str, str]] = {
    BODY: (portable, "MmaSync", "sparse_decode/mma_sync.cuh"),
    hopper.BODY: (hopper, "Hopper", "sparse_decode/hopper.cuh"),
}
_ROW, _EXTRA_ROW = "Constants", "sparse_decode::ExtraRow<Constants>"
_SHARED_ROW_COPY_HEADER = "prims/tile/copy_rows_shared.cuh"
_ROW_COPY_HEADERS = {False: "prims/tile/copy_rows_async.cuh", True: "prims/tile/copy_rows_bulk.cuh"}
# A plan guard's names in the generated unit; names that are not here are printed as numbers.
_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "stages": "Constants::kStages",
    "tile_tokens": "Constants::kTileTokens",
    "producers": "Constants::kProducers",
    "tile_stages": "Constants::kTileTokens / Constants::kStageTokens",
    "heads_n": "Constants::kHeads",
    "d_qk": "(Constants::kNopeDims + Constants::kRopeDims)",
    "d_v": "Constants::kValueDims",
    "row_bytes": "Constants::kRowBytes",
    "row_pitch_bytes": "Constants::kRowPitchBytes",
}


DIMS_GUARD = next(guard for guard in PLAN_GUARDS if guard.guard_id == "SD-18")


class SparseDecode:
    """Sparse decode: the main kernel in each body that may be taken, and the combine of its splits."""

    name = NAME
    ops: tuple[str, ...] = ("sparse_decode",)
    guards: tuple[Guard, ...] = (*PLAN_GUARDS, DEAL_GUARD, *LAUNCH_GUARDS, *ARGUMENT_GUARDS)

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """The main kernel and the combine; both are refused when the spec needs what is not built."""
        caches = caches_of(spec.kv.format_id, spec.extra_kv.format_id if spec.extra_kv else None)
        if isinstance(caches, str):
            return _refused(caches, arch)
        dims = failures([DIMS_GUARD], {"d_qk": caches.d_qk, "d_v": caches.d_v})
        if dims:
            return _refused(dims[0], arch)
        heads_n = heads_per_cta(caches, spec.heads, arch, spec.kv_heads)
        if heads_n is None:
            formats = " with ".join(rows.record.format_id for rows in caches.each)
            reason = f"{formats}: not even 8 heads and two 32-token stages fit {arch.smem_optin_bytes} B"
            return (Cell(NAME, "main", arch.name, None, reason),)
        deal = failures([DEAL_GUARD], _deal(caches, spec, arch))
        if deal:
            return _refused(deal[0], arch)
        several = spec.kv_heads > 1
        axes = main_axes(caches, heads_n, arch, several)
        takes_hopper = not several and hopper.takes(caches, heads_n, arch)
        bodies = main_bodies(axes, arch, spec.determinism) if takes_hopper else {BODY: ""}
        mains = [Variant(NAME, "main", body, arch.name, axes) for body in bodies]
        combine = Variant(NAME, "combine", "portable", arch.name, (("dv", caches.d_v),))
        cells = tuple(Cell(NAME, "main", arch.name, main, why=bodies[main.body]) for main in mains)
        # The hopper body begins while the grid before ends, whatever that is.
        alone = [cell for cell, main in zip(cells, mains, strict=True) if main.body != hopper.BODY]
        dependent = tuple(map(dependent_cell, alone)) if has_chain(spec, arch) else ()
        return (*cells, Cell(NAME, "combine", arch.name, combine), *dependent)

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a main or combine variant; GuardError names the limit that it breaks."""
        return plan_either(variant, _plan_combine if variant.kernel == "combine" else plan_main)


FAMILY = SparseDecode()


def _refused(reason: str, arch: Arch) -> tuple[Cell, ...]:
    return tuple(Cell(NAME, role, arch.name, None, reason) for role in ("main", "combine"))


def _deal(caches: Caches, spec: DeploymentSpec, arch: Arch) -> dict[str, int]:
    """What DEAL_GUARD reads."""
    most, each = most_heads(caches, arch), spec.heads // spec.kv_heads
    return {
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "heads_each": each,
        "most_heads": most,
        "kv_head_groups": deal_heads(spec.heads, spec.kv_heads, most)[0],
        "least_groups": -(-each // most),
    }


def caches_of(format_id: str, extra_format_id: str | None = None) -> Caches | str:
    """The rows of one or two formats as a kernel sees them, or why none reads them."""
    main = cache_rows(kv_format(format_id))
    extra = None if extra_format_id is None else cache_rows(kv_format(extra_format_id))
    if isinstance(main, str):
        return main
    return extra if isinstance(extra, str) else Caches(main, extra)


def has_kv_heads(variant: Variant) -> bool:
    """Whether a main kernel reads caches of several KV heads."""
    return dict(variant.axes).get("kvh") is not None


def variant_caches(variant: Variant) -> Caches:
    """The rows that a main kernel reads; ValueError for a format without an encoding."""
    extra = dict(variant.axes).get("xkv")
    caches = caches_of(str(variant.axis("kv")), None if extra is None else str(extra))
    if isinstance(caches, str):
        raise ValueError(caches)
    return caches


def main_bodies(axes: tuple[tuple[str, str | int], ...], arch: Arch, determinism: Determinism) -> Mapping[str, str]:
    """Bodies of the main kernel where both take its rows, the preferred one first, each with the reason for it: what
    DSAGEN_SPARSE_DECODE_BODY asks for, else `hopper`, and `mma_sync` behind it where a choice table names that kernel.
    """
    wanted = knobs.SPARSE_DECODE_BODY.get()
    if wanted is not None:
        return {wanted: f"{knobs.SPARSE_DECODE_BODY.name} asks for it"}
    found = {hopper.BODY: f"preferred to {BODY}"}
    # A table reads the batch, and two bodies differ in the last bits.
    if determinism == "off" and read_tables().names(Variant(NAME, "main", BODY, arch.name, axes).slug):
        found[BODY] = "a choice table names it"
    return found


def with_all_bodies(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells with a main kernel of each body that takes its rows, the preferred one first: what there is to choose
    from.
    """
    found: list[Cell] = []
    for cell in cells:
        main = cell.variant if (cell.op, cell.role) == (NAME, "main") and cell.kept else None
        if main is None:
            found.append(cell)
            continue
        takes_hopper = not has_kv_heads(main) and hopper.takes(
            variant_caches(main), main.axis_int("n"), arch_row(main.arch)
        )
        for body in (hopper.BODY, BODY) if takes_hopper else (main.body,):
            found.append(replace(cell, variant=replace(main, body=body), why=""))
    return tuple(dict.fromkeys(found))


def main_axes(
    caches: Caches, heads_n: int, arch: Arch, several_kv_heads: bool = False
) -> tuple[tuple[str, str | int], ...]:
    """The compile-time axes of a main kernel."""
    # Row bytes, placement and scale kind: loads and operand recipes.
    kv: tuple[tuple[str, str | int], ...] = (("kv", caches.main.record.format_id),)
    if caches.extra is not None:
        kv += (("xkv", caches.extra.record.format_id),)  # the same of the second cache, and a list of its own
    if several_kv_heads:
        kv += (("kvh", "many"),)  # rows and lists of a CTA begin at its KV head's; how many there are is an argument
    return (
        *kv,
        ("dqk", caches.d_qk),  # length of the score loop
        ("dv", caches.d_v),  # output registers
        ("n", heads_n),  # MMA columns, registers and shared memory
        ("smem", arch.smem_class),  # stages and tile
    )


def plan_main(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """The main kernel's plan; `geometry` overrides the preferred one (for measuring others)."""
    arch, caches = arch_row(variant.arch), variant_caches(variant)
    heads_n = variant.axis_int("n")
    module = _BODIES[variant.body][0]
    chosen = geometry or module.fitting_geometry(caches, heads_n, arch) or Geometry(heads_n, 32, 2)
    fields, smem_bytes = module.smem_fields(caches, chosen)
    has_part, has_extra = caches.main.part_bytes > 0, caches.extra is not None
    extra_has_part = caches.extra is not None and caches.extra.part_bytes > 0
    kv_heads = has_kv_heads(variant)
    params, params_bytes = lay_out_params(main_params(has_part, has_extra, extra_has_part, kv_heads))
    threads = chosen.threads
    registers_cap = compiled_registers(threads, arch)
    values = {
        "smem_bytes": smem_bytes,
        "smem_optin_bytes": arch.smem_optin_bytes,
        "threads": threads,
        "registers_cap": registers_cap,
        "registers_per_sm": arch.registers_per_sm,
        "stages": chosen.stages,
        "tile_tokens": chosen.tile_tokens,
        "producers": chosen.producers,
        "tile_stages": chosen.tile_tokens // STAGE_TOKENS,
        "moved_registers": moved_registers(chosen),
        "compiled_registers": registers_cap * threads,
        "spare_heads": chosen.score_warps * 16 * chosen.warp_blocks // chosen.tile_tokens,
        "heads_n": heads_n,
        "d_qk": caches.d_qk,
        "d_v": caches.d_v,
        "row_bytes": caches.main.row_bytes,
        "row_pitch_bytes": caches.main.pitch_bytes,
    }
    check(PLAN_GUARDS, values, variant.slug)
    return KernelPlan(
        variant=variant,
        constants=_main_constants(caches, chosen, registers_cap, module),
        types=_main_types(caches, chosen, variant.body, kv_heads),
        threads=threads,
        min_blocks_per_sm=1,
        registers_cap=registers_cap,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid="batch * s_q * num_splits * head_groups",
        overlaps_previous=variant.body == hopper.BODY,
        guards=checked(PLAN_GUARDS, values, _C_NAMES),
        budget=_budget(caches, chosen, smem_bytes, arch, registers_cap),
        moves_registers=chosen.registers is not None,
    )


def compiled_registers(threads: int, arch: Arch) -> int:
    """Registers of a thread that ptxas may use: the SM's, dealt evenly to warps in fours, in steps of 8."""
    warps = round_up(threads // 32, 4)
    return min(MAX_REGISTERS_PER_THREAD, arch.registers_per_sm // (32 * warps) // 8 * 8)


def moved_registers(geometry: Geometry) -> int:
    """Registers of a CTA after setmaxnreg, 0 where none move. More than were compiled in would never be granted."""
    if geometry.registers is None:
        return 0
    value, score, producer = geometry.registers
    producers = geometry.threads // 32 - geometry.value_warps - geometry.score_warps
    return 32 * (value * geometry.value_warps + score * geometry.score_warps + producer * producers)


def _main_types(caches: Caches, g: Geometry, body: str, kv_heads: bool) -> tuple[TypeAlias, ...]:
    def encoding(name: str, encoding: Encoding, row: str) -> TypeAlias:
        if body == hopper.BODY:
            return TypeAlias(name, *hopper.operands(encoding, row))
        return TypeAlias(name, encoding.cpp(row), encoding.header)

    def row_copy(name: str, row: str, header: str) -> TypeAlias:
        if body == hopper.BODY:
            return TypeAlias(name, f"tile::SharedRowCopy<{row}, {g.stage_shares}>", _SHARED_ROW_COPY_HEADER)
        return TypeAlias(name, f"tile::RowCopy<{row}>", header)

    types = [
        encoding("Encoding", caches.main.encoding, _ROW),
        row_copy("RowCopy", _ROW, _ROW_COPY_HEADERS[g.bulk]),
    ]
    if caches.extra is not None and caches.two_formats:
        types += [
            encoding("ExtraEncoding", caches.extra.encoding, _EXTRA_ROW),
            row_copy("ExtraRowCopy", _EXTRA_ROW, "sparse_decode/source.cuh"),
        ]
    _, name, header = _BODIES[body]
    extra = ", ExtraEncoding, ExtraRowCopy" if caches.two_formats else ""
    cpp = f"sparse_decode::{name}<Constants, SharedStorage, Encoding, RowCopy, Params{extra}>"
    if not kv_heads:
        return (*types, TypeAlias("Body", cpp, header))
    around = "sparse_decode::OfKvHead<Constants, SharedStorage, OneKvHead, Params>"
    return (*types, TypeAlias("OneKvHead", cpp, header), TypeAlias("Body", around, "sparse_decode/kv_heads.cuh"))


def _main_constants(
    caches: Caches, g: Geometry, registers: int, body: ModuleType
) -> tuple[tuple[str, int | float], ...]:
    return (
        ("kTileTokens", g.tile_tokens),
        ("kStageTokens", STAGE_TOKENS),
        ("kStages", g.stages),
        ("kScoreWarps", g.score_warps),
        ("kValueWarps", g.value_warps),
        ("kProducers", g.producers),
        *((("kStageShares", g.stage_shares),) if body is hopper else ()),
        ("kWarpBlocks", g.warp_blocks),
        ("kGroupsTogether", g.groups_together),
        ("kProbabilityBuffers", g.probability_buffers),
        ("kCompiledRegisters", registers),
        ("kValueRegisters", g.registers[0] if g.registers else 0),
        ("kScoreRegisters", g.registers[1] if g.registers else 0),
        ("kProducerRegisters", g.registers[2] if g.registers else 0),
        ("kHeads", g.heads_n),
        ("kSources", 1 if caches.extra is None else 2),
        *caches.main.constants(),
        *(caches.extra.constants("kExtra") if caches.extra is not None and caches.two_formats else ()),
        ("kValueDims", caches.d_v),
        ("kQueryPitchBytes", body.query_pitch_bytes(caches.d_qk)),
        ("kProbabilityPitchBytes", body.probability_pitch_bytes(g.heads_n)),
        ("kLazyThreshold", min(rows.encoding.lazy_threshold for rows in caches.each)),
    )


def _budget(
    caches: Caches, g: Geometry, smem_bytes: int, arch: Arch, registers_cap: int
) -> tuple[tuple[str, str], ...]:
    flops = 2 * g.heads_n * (caches.d_qk + caches.d_v)
    output_registers = caches.d_v * g.heads_n // (32 * g.value_warps)
    roles = f"{g.value_warps} value, {g.score_warps} score and {g.producers} producer warps"
    moved = f", after moving {g.registers[0]} / {g.registers[1]} / {g.registers[2]}" if g.registers else ""
    tile = f"tiles of {g.tile_tokens} tokens, {g.stages} stages of {STAGE_TOKENS} rows"
    per_token = [(rows.record.format_id, rows.record.record_bytes) for rows in caches.each]
    work = "; ".join(
        f"{flops} FLOP, {size} B of cache{f' ({name})' if len(per_token) > 1 else ''}: {flops / size:.0f} FLOP/B"
        for name, size in per_token
    )
    return (
        ("shape", f"{g.heads_n} heads, {tile}, {roles}"),
        ("shared memory", f"{smem_bytes} of {arch.smem_optin_bytes} B"),
        ("registers", f"{registers_cap} a thread{moved}; {output_registers} of a value warp's hold the output"),
        ("row buffers", f"{g.stages * STAGE_TOKENS * max(rows.image_bytes for rows in caches.each)} B of rows"),
        ("work per token", work),
        ("probability copies", f"{caches.probability_copies}"),
    )


def _plan_combine(variant: Variant) -> KernelPlan:
    arch = arch_row(variant.arch)
    params, params_bytes = lay_out_params(COMBINE_PARAMS)
    threads = variant.axis_int("dv") // 4
    values = {"threads": threads, "registers_cap": COMBINE_REGISTERS, "registers_per_sm": arch.registers_per_sm}
    guards = tuple(guard for guard in PLAN_GUARDS if guard.guard_id == "K-02")
    check(guards, values, variant.slug)
    return KernelPlan(
        variant=variant,
        constants=(("kValueDims", variant.axis_int("dv")),),
        types=(TypeAlias("Body", "sparse_decode::Combine<Constants, Params>", "sparse_decode/combine.cuh"),),
        threads=threads,
        min_blocks_per_sm=1,
        registers_cap=COMBINE_REGISTERS,
        smem=(),
        smem_bytes=0,
        params=params,
        params_bytes=params_bytes,
        grid="batch * s_q * heads",
        overlaps_previous=arch.has_pdl,
        guards=checked(guards, values, _C_NAMES),
        budget=(("work", f"reads num_splits x {4 * variant.axis_int('dv')} B per query token and head"),),
    )
