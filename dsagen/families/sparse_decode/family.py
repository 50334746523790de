"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsagen.arch import MAX_REGISTERS_PER_THREAD, Arch
from dsagen.arch import arch as arch_row
from dsagen.families.sparse_decode.geometry import (
    STAGE_TOKENS,
    Encoding,
    Geometry,
    encoding_of,
    fitting_geometry,
    heads_per_cta,
    odd_pitch_bytes,
    probability_pitch_bytes,
    query_pitch_bytes,
    row_bytes,
    smem_fields,
)
from dsagen.families.sparse_decode.guards import ARGUMENT_GUARDS, LAUNCH_GUARDS, PLAN_GUARDS
from dsagen.families.sparse_decode.params import COMBINE_PARAMS, MAIN_PARAMS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.kv_format import KvFormat, kv_format
from dsagen.plan import KernelPlan, TypeAlias, Variant, checked, lay_out_params, round_up

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "sparse_decode"
BODY = "mma_sync"
COMBINE_REGISTERS = 128
# Log2 units by which a score may exceed the softmax reference before the reference is raised. bf16 and fp32 have the
# range for far more; this leaves it to the scales.
LAZY_THRESHOLD = 16.0

_MAIN_BODY = "sparse_decode::MmaSync<Constants, SharedStorage, Encoding, RowCopy, Params>"
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
    "row_bytes": "Constants::kRowBytes",
    "row_pitch_bytes": "Constants::kRowPitchBytes",
}


class SparseDecode:
    """Sparse decode: the main kernel of body `mma_sync`, and the combine of its splits."""

    name = NAME
    ops: tuple[str, ...] = ("sparse_decode",)
    guards: tuple[Guard, ...] = PLAN_GUARDS + LAUNCH_GUARDS + ARGUMENT_GUARDS

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """The main kernel and the combine; both are refused when the spec needs what is not built."""
        refusals = _refusals(spec)
        fmt = kv_format(spec.kv.format_id)
        encoding = encoding_of(fmt)
        if isinstance(encoding, str):
            refusals.append(encoding)
        if refusals:
            return tuple(Cell(NAME, role, arch.name, None, "; ".join(refusals)) for role in ("main", "combine"))
        assert isinstance(encoding, Encoding)
        heads_n = heads_per_cta(fmt, encoding, spec.heads, arch)
        if heads_n is None:
            reason = f"{fmt.format_id}: not even 8 heads and two 16-token stages fit {arch.smem_optin_bytes} B"
            return (Cell(NAME, "main", arch.name, None, reason),)
        main = Variant(NAME, "main", BODY, arch.name, _main_axes(fmt, heads_n, arch))
        combine = Variant(NAME, "combine", "portable", arch.name, (("dv", fmt.d_v),))
        return (Cell(NAME, "main", arch.name, main), Cell(NAME, "combine", arch.name, combine))

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a main or combine variant; GuardError names the limit that it breaks."""
        return _plan_combine(variant) if variant.kernel == "combine" else plan_main(variant)


FAMILY = SparseDecode()


def _refusals(spec: DeploymentSpec) -> list[str]:
    """What the spec declares and this family does not build yet."""
    if spec.extra_kv is None:
        return []
    return [f"extra_kv ({spec.extra_kv.format_id}): a second cache in the same softmax is not built yet"]


def _main_axes(fmt: KvFormat, heads_n: int, arch: Arch) -> tuple[tuple[str, str | int], ...]:
    return (
        ("kv", fmt.format_id),  # row bytes, placement and scale kind: loads and operand recipes
        ("dqk", fmt.d_qk),  # length of the score loop
        ("dv", fmt.d_v),  # output registers
        ("n", heads_n),  # MMA columns, registers and shared memory
        ("smem", arch.smem_class),  # stages and tile
    )


def plan_main(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """The main kernel's plan; `geometry` overrides the preferred one (for measuring others)."""
    arch, fmt = arch_row(variant.arch), kv_format(str(variant.axis("kv")))
    encoding = encoding_of(fmt)
    if isinstance(encoding, str):
        raise ValueError(encoding)
    heads_n = variant.axis_int("n")
    chosen = geometry or fitting_geometry(fmt, encoding, heads_n, arch) or Geometry(heads_n, 32, 2)
    fields, smem_bytes = smem_fields(fmt, encoding, chosen)
    params, params_bytes = lay_out_params(MAIN_PARAMS)
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
        "row_bytes": row_bytes(fmt),
        "row_pitch_bytes": odd_pitch_bytes(row_bytes(fmt)),
    }
    check(PLAN_GUARDS, values, variant.slug)
    return KernelPlan(
        variant=variant,
        constants=_main_constants(fmt, chosen, registers_cap),
        types=(
            TypeAlias("Encoding", encoding.cpp, encoding.header),
            TypeAlias("RowCopy", "tile::RowCopy<Constants>", _ROW_COPY_HEADERS[chosen.bulk]),
            TypeAlias("Body", _MAIN_BODY, "sparse_decode/mma_sync.cuh"),
        ),
        threads=threads,
        min_blocks_per_sm=1,
        registers_cap=registers_cap,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid="batch * s_q * num_splits * head_groups",
        overlaps_previous=False,
        guards=checked(PLAN_GUARDS, values, _C_NAMES),
        budget=_budget(fmt, encoding, chosen, smem_bytes, arch, registers_cap),
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


def _main_constants(fmt: KvFormat, g: Geometry, registers: int) -> tuple[tuple[str, int | float], ...]:
    rope = fmt.segment("rope") if fmt.has_segment("rope") else None
    nope_dims = fmt.d_qk - rope.count if rope else fmt.d_qk
    return (
        ("kTileTokens", g.tile_tokens),
        ("kStageTokens", STAGE_TOKENS),
        ("kStages", g.stages),
        ("kScoreWarps", g.score_warps),
        ("kValueWarps", g.value_warps),
        ("kProducers", g.producers),
        ("kWarpBlocks", g.warp_blocks),
        ("kGroupsTogether", g.groups_together),
        ("kProbabilityBuffers", g.probability_buffers),
        ("kCompiledRegisters", registers),
        ("kValueRegisters", g.registers[0] if g.registers else 0),
        ("kScoreRegisters", g.registers[1] if g.registers else 0),
        ("kProducerRegisters", g.registers[2] if g.registers else 0),
        ("kHeads", g.heads_n),
        ("kNopeDims", nope_dims),
        ("kRopeDims", fmt.d_qk - nope_dims),
        ("kRopeOffsetBytes", rope.offset_bytes if rope else 0),
        ("kValueDims", fmt.d_v),
        ("kRowBytes", row_bytes(fmt)),
        ("kRowPitchBytes", odd_pitch_bytes(row_bytes(fmt))),
        ("kQueryPitchBytes", query_pitch_bytes(fmt)),
        ("kProbabilityPitchBytes", probability_pitch_bytes(g.heads_n)),
        ("kLazyThreshold", LAZY_THRESHOLD),
    )


def _budget(
    fmt: KvFormat, encoding: Encoding, g: Geometry, smem_bytes: int, arch: Arch, registers_cap: int
) -> tuple[tuple[str, str], ...]:
    flops = 2 * g.heads_n * (fmt.d_qk + fmt.d_v)
    output_registers = fmt.d_v * g.heads_n // (32 * g.value_warps)
    roles = f"{g.value_warps} value, {g.score_warps} score and {g.producers} producer warps"
    moved = f", after moving {g.registers[0]} / {g.registers[1]} / {g.registers[2]}" if g.registers else ""
    tile = f"tiles of {g.tile_tokens} tokens, {g.stages} stages of {STAGE_TOKENS} rows"
    return (
        ("shape", f"{g.heads_n} heads, {tile}, {roles}"),
        ("shared memory", f"{smem_bytes} of {arch.smem_optin_bytes} B"),
        ("registers", f"{registers_cap} a thread{moved}; {output_registers} of a value warp's hold the output"),
        ("row buffers", f"{g.stages * STAGE_TOKENS * row_bytes(fmt)} B of rows"),
        ("work per token", f"{flops} FLOP, {row_bytes(fmt)} B of cache: {flops / row_bytes(fmt):.0f} FLOP/B"),
        ("probability copies", f"{encoding.probability_copies}"),
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
