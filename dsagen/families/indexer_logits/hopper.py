"""Sizes and plan of the hopper body over keys in pages: warpgroup products of e4m3, or of bf16 that MX codes become."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsagen.arch import SMEM_RESERVED_PER_BLOCK_BYTES, Arch
from dsagen.arch import arch as arch_row
from dsagen.families.indexer_logits.forms import BLOCKS, COUNTED, FORMS, parts_of
from dsagen.families.indexer_logits.geometry import (
    CODES_CPP,
    COUNT_BYTES,
    MOST_NEXT_N,
    SCORE_CPP,
    block_values,
    resource_lines,
)
from dsagen.families.indexer_logits.guards import HOPPER_PLAN_GUARDS
from dsagen.families.indexer_logits.params import params_of
from dsagen.families.topk.geometry import DIGIT_BITS
from dsagen.guard import check
from dsagen.index_format import INDEX_FORMATS, IndexFormat, index_format
from dsagen.plan import KernelPlan, SmemField, TypeAlias, Variant, checked, lay_out_params, lay_out_smem, round_up

BODY = "hopper"
# Formats that it is built for.
KEYS = ("fp8", "mxfp8", "mxfp4")
# Of the two products whose operands a warp holds at a time.
WARP_KEYS = 32
TILE_KEYS = 4 * WARP_KEYS
# Of calls with so few keys that blocks would have nothing to do: the fewest that a warp's copy and product are worth.
LEAST_TILE_KEYS = 32
WARPS = 4
PER_SM = 3
REGISTERS = 168
# Of a product: accumulators of more, for two of them, would leave no registers; operands of 16 bits take twice as many.
MOST_COLUMNS, MOST_HALF_COLUMNS = 64, 32
# Rows of the image are what the tensor cores' swizzle spans, and groups of eight begin at multiples of the second.
QUERY_PITCH_BYTES, QUERY_ALIGN_BYTES = 128, 1024
# Rows of 128 B that the image has room for. Tokens with more read the keys again; products take longer then.
MOST_QUERY_ROWS = 256
# At most, of a warp. Two stages of 4 KB, 100 KB of three blocks, keep memory busy; where q leaves room for more, a
# block of a call with few keys asks for all of its own at once.
_RING_BYTES = 16384
_MOST_STAGES = 8
# That memory is kept busy by: counts of more tokens than leave room for them are not worth fewer.
_LEAST_STAGES = 2
# A plan guard's names in the generated unit; names that are not here are printed as numbers.
_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "heads": "Constants::kHeads",
    "token_rows": "Constants::kRows",
    "query_rows": "Constants::kQueryRows",
    "dim": "Body::kDim",
    "stages": "Constants::kMostStages",
    "token_bytes": "Constants::kTokenBytes",
    "operands_bytes": "Constants::kOperandBytes",
}


@dataclass(frozen=True)
class HopperGeometry:
    """A block of `warps`, each with a ring of up to `stages` times 32 keys, and an image of `query_rows` rows of q.

    Both share `shared_bytes`: what a call's tokens leave is the rings'. A key has `row_bytes` of codes. A row of q has
    `operand_bytes` a dim, and takes a row in each of the image's parts. `count_bytes` behind the rows of each token
    count its scores.
    """

    dim: int
    heads: int
    stages: int
    query_rows: int
    row_bytes: int
    operand_bytes: int
    shared_bytes: int
    count_bytes: int = 0
    warps: int = WARPS
    per_sm: int = PER_SM

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def parts(self) -> int:
        """Products that share a token's heads."""
        return -(-self.heads // (MOST_COLUMNS if self.operand_bytes == 1 else MOST_HALF_COLUMNS))

    @property
    def image_parts(self) -> int:
        """Rows of the image that a row of q takes, each in a part of its own."""
        return image_parts(self.dim, self.operand_bytes)

    @property
    def rows(self) -> int:
        """Rows of the image that a token takes: a row a head, and zeros to make equal parts of them."""
        return round_up(self.heads, 8 * self.parts)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the image, counts of its scores included."""
        return self.image_parts * self.rows * QUERY_PITCH_BYTES + self.count_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of codes that a stage of all rings has."""
        return self.warps * WARP_KEYS * self.row_bytes

    def stages_for(self, tokens: int) -> int:
        """Stages of each ring in a call whose units have so many tokens."""
        return min(self.stages, (self.shared_bytes - tokens * self.token_bytes) // self.stage_bytes)

    @property
    def weight_words(self) -> int:
        """Words between the weights of two tokens; lanes take those of two tiles of 8 rows at a time."""
        return self.parts * round_up(self.rows // self.parts, 16)

    @property
    def most_tokens(self) -> int:
        """Tokens of a unit."""
        return min(MOST_NEXT_N, self.query_rows // self.rows)


def sums_e4m3(plan: KernelPlan) -> bool:
    """Whether a plan's products sum e4m3 codes as they are: at twice the rate of f16, and in 13 bits."""
    return plan.variant.body == BODY and not index_format(str(plan.variant.axis("keys"))).is_block_scaled


def image_parts(dim: int, operand_bytes: int) -> int:
    """Rows of 128 B that a row of q takes."""
    return -(-dim * operand_bytes // QUERY_PITCH_BYTES)


def preferred_geometry(dim: int, heads: int, arch: Arch, record: IndexFormat = INDEX_FORMATS["fp8"]) -> HopperGeometry:
    """As deep a ring, where q is one token's, as leaves room for as many blocks on the SM as registers allow."""
    row_bytes, operand_bytes = record.code_bytes(dim), 2 if record.is_block_scaled else 1
    rows = min(MOST_QUERY_ROWS // image_parts(dim, operand_bytes), heads * MOST_NEXT_N)
    most = min(_MOST_STAGES, _RING_BYTES // (WARP_KEYS * row_bytes))
    choices = [HopperGeometry(dim, heads, stages, rows, row_bytes, operand_bytes, 0) for stages in range(most, 0, -1)]
    fitting = (g for g in choices if g.token_bytes + g.stages * g.stage_bytes <= _room_bytes(g, arch))
    g = next(fitting, choices[-1])
    return replace(g, shared_bytes=_room_bytes(g, arch))


def counted_geometry(dim: int, heads: int, arch: Arch, record: IndexFormat) -> HopperGeometry:
    """As `preferred_geometry`, with room for counts, of as many tokens as leave two stages of the ring."""
    g = preferred_geometry(dim, heads, arch, record)
    most = [replace(g, count_bytes=COUNT_BYTES, query_rows=n * g.rows) for n in range(g.most_tokens, 0, -1)]
    sized = [replace(g, shared_bytes=_room_bytes(g, arch)) for g in most]
    found = next((g for g in sized if g.stages_for(g.most_tokens) >= _LEAST_STAGES), sized[-1])
    return replace(found, stages=found.stages_for(1))


def _room_bytes(g: HopperGeometry, arch: Arch) -> int:
    """What a block has for q and codes beside all else."""
    most = arch.smem_per_sm_bytes // g.per_sm - SMEM_RESERVED_PER_BLOCK_BYTES
    beside = smem_fields(replace(g, shared_bytes=0))[1]
    return (most - beside) // QUERY_ALIGN_BYTES * QUERY_ALIGN_BYTES


def smem_fields(g: HopperGeometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct, operands first, and its size in bytes."""
    ring = (g.warps, g.stages)
    note = "q, a row a token and head, swizzled; then codes of each warp's keys"
    return lay_out_smem(
        (
            SmemField("operands", "u8", (g.shared_bytes,), note, QUERY_ALIGN_BYTES),
            SmemField("scales", "u32", (*ring, WARP_KEYS), "their scales"),
            SmemField("held", "u32", ring, "a bit for each key that a page holds"),
            SmemField("landed", "u64", ring, "barriers: a tile's copies have arrived"),
            SmemField("weights", "u32", (g.most_tokens * g.weight_words,), "of the rows of q, fp32"),
            SmemField("limits", "u32", (MOST_NEXT_N,), "keys that each token of the unit is scored for"),
            SmemField("warp_sums", "u32", (3, 32), "of a prefix sum over the block, three sets"),
            SmemField("found", "u32", (4,), "where the block's span begins: unit and tile"),
        )
    )


def plan_hopper(variant: Variant, geometry: HopperGeometry | None = None) -> KernelPlan:
    """The kernel's plan; `geometry` overrides the preferred one (for tests and for measuring others)."""
    arch, record = arch_row(variant.arch), index_format(str(variant.axis("keys")))
    counts = variant.kernel == COUNTED
    prefer = counted_geometry if counts else preferred_geometry
    g = geometry or prefer(variant.axis_int("dim"), variant.axis_int("heads"), arch, record)
    fields, smem_bytes = smem_fields(g)
    params, params_bytes = lay_out_params(params_of(record, FORMS[variant.kernel], counts))
    values = {
        **block_values(arch, smem_bytes, g.threads, REGISTERS, g.per_sm),
        "dim": g.dim,
        "heads": g.heads,
        "stages": g.stages,
        "query_rows": g.query_rows,
        "tokens": g.most_tokens,
        "token_rows": g.rows,
        "token_bytes": g.token_bytes,
        "stage_bytes": g.stage_bytes,
        "operands_bytes": g.shared_bytes,
    }
    check(HOPPER_PLAN_GUARDS, values, variant.slug)
    key_bytes = record.record_bytes(g.dim)
    return KernelPlan(
        variant=variant,
        constants=(
            ("kWarps", g.warps),
            ("kTileKeys", TILE_KEYS),
            ("kLeastTileKeys", LEAST_TILE_KEYS),
            ("kMostStages", g.stages),
            ("kDim", g.dim),
            ("kRowBytes", g.row_bytes),
            ("kHeads", g.heads),
            ("kParts", g.parts),
            ("kRows", g.rows),
            ("kQueryRows", g.query_rows),
            ("kQueryPitchBytes", QUERY_PITCH_BYTES),
            ("kMostTokens", g.most_tokens),
            ("kTokenBytes", g.token_bytes),
            ("kOperandBytes", g.shared_bytes),
            ("kWeightWords", g.weight_words),
            *((("kDigitBits", DIGIT_BITS),) if counts else ()),
        ),
        types=(
            _score_of(variant),
            TypeAlias("Operands", _operands_cpp(record), "indexer_logits/hopper_operands.cuh"),
            TypeAlias(
                "Body",
                "indexer_logits::Hopper<Constants, SharedStorage, Operands, Score, Params>",
                "indexer_logits/hopper.cuh",
            ),
        ),
        threads=g.threads,
        min_blocks_per_sm=g.per_sm,
        registers_cap=REGISTERS,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid=f"min({g.per_sm} x SMs, tiles of {LEAST_TILE_KEYS} keys)",
        overlaps_previous=True,
        guards=checked(HOPPER_PLAN_GUARDS, values, _C_NAMES),
        budget=(
            (
                "shape",
                f"{TILE_KEYS} keys a tile, {LEAST_TILE_KEYS} where there are few, {g.warps // 4} warpgroup, "
                f"{g.per_sm} blocks on an SM",
            ),
            ("ring", f"up to {g.stages} tiles of {WARP_KEYS * key_bytes} B a warp"),
            (
                "image of q",
                f"up to {g.query_rows} rows of {g.image_parts * QUERY_PITCH_BYTES} B, a row a token and head",
            ),
            ("q and codes", f"{g.shared_bytes} B"),
            *(
                (("counts", f"{g.count_bytes} B behind q of each token, of {g.most_tokens} at the most"),)
                if counts
                else ()
            ),
            *resource_lines(arch, smem_bytes, REGISTERS, record, g.dim),
        ),
        parts=parts_of(variant.kernel),
    )


def _score_of(variant: Variant) -> TypeAlias:
    score = SCORE_CPP[str(variant.axis("score"))]
    if variant.kernel != BLOCKS:
        return TypeAlias("Score", score, "indexer_logits/store.cuh")
    return TypeAlias("Score", f"indexer_logits::WithBlockEpilogue<{score}, Params>", "indexer_logits/hopper_blocks.cuh")


def _operands_cpp(record: IndexFormat) -> str:
    if not record.is_block_scaled:
        return "indexer_logits::CodeOperands<Constants>"
    return f"indexer_logits::HalfOperands<Constants, {CODES_CPP[record.format_id]}>"
