"""Tile geometry of the mma_sync body: how many heads, tokens, warps and stages fit an arch's shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsagen.arch import WGMMA, Arch
from dsagen.dtype import BF16, E4M3
from dsagen.kv_format import KvFormat, Layout, ScaleKind
from dsagen.plan import SmemField, lay_out_smem, round_up

MAX_HEADS_PER_CTA = 64
BUILT_DIMS = (576, 512)  # d_qk, d_v
EVEN_DEAL_HEADS = 32
MAX_STAGES = 8
MMA_TOKENS = 16  # tokens of one MMA row block


@dataclass(frozen=True)
class Encoding:
    """The policy header that reads a format's rows, and what the plan must know about it."""

    cpp: str
    header: str
    probability_copies: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of one main kernel.

    `heads_n` is the padded head count of a CTA. A score warp takes `warp_blocks` blocks of 16 tokens; the score warps
    that this leaves over share the heads. `bulk` rows arrive by bulk copies (sm_90+), others by 16-byte asynchronous
    copies. `groups_together` scale groups of a score run side by side, which takes registers. `registers` is what
    value, score and producer warps have after moving registers (sm_90a and newer); None: an even deal.
    """

    heads_n: int
    tile_tokens: int
    stages: int
    warp_blocks: int = 1
    score_warps: int = 4
    value_warps: int = 8
    producers: int = 2
    probability_buffers: int = 2
    groups_together: int = 1
    bulk: bool = False
    registers: tuple[int, int, int] | None = None

    @property
    def threads(self) -> int:
        """Threads of a CTA; where registers move, whole warpgroups have one role."""
        producers = round_up(self.producers, 4) if self.registers else self.producers
        return 32 * (self.score_warps + self.value_warps + producers)


STAGE_TOKENS = 32  # one row per producer lane


def encoding_of(fmt: KvFormat) -> Encoding | str:
    """The encoding that reads a format, or why none does."""
    if fmt.layout is not Layout.INTERLEAVED or len(fmt.tensors) != 1:
        return f"KV format {fmt.format_id}: rows that are split over sections or tensors are not built yet"
    if (fmt.d_qk, fmt.d_v) != BUILT_DIMS:
        dims = f"d_qk {fmt.d_qk}, d_v {fmt.d_v}"
        return f"KV format {fmt.format_id}: {dims}: rows other than 512 + 64 RoPE dims are not built yet"
    values = fmt.segment("values")
    has_fp32_scales = fmt.scale_kind in (ScaleKind.FP32, ScaleKind.FP32_POW2)
    if values.element is E4M3 and has_fp32_scales and fmt.scale_group_dims == 128:
        return Encoding("kv::Fp8Fp32Scale<Constants>", "prims/kv/fp8_fp32_scale.cuh", fmt.scale_groups)
    if values.element is BF16 and fmt.scale_kind is ScaleKind.NONE:
        return Encoding("kv::Bf16<Constants>", "prims/kv/bf16.cuh", 1)
    kind = f"{values.element.name} values with {fmt.scale_kind.value} scales"
    return f"KV format {fmt.format_id}: {kind} are not built yet"


def odd_pitch_bytes(row_bytes: int) -> int:
    """The least odd multiple of 16 that holds a row: consecutive rows then start in different banks."""
    pitch = round_up(row_bytes, 16)
    return pitch if pitch % 32 else pitch + 16


def probability_pitch_bytes(heads_n: int) -> int:
    """Distance between tokens' rows of probabilities; 64 heads are swizzled instead of padded, which would not fit."""
    return 128 if heads_n == 64 else odd_pitch_bytes(2 * heads_n)


def row_bytes(fmt: KvFormat) -> int:
    """Bytes of a row that are gathered."""
    return fmt.io_stride_bytes


def query_pitch_bytes(fmt: KvFormat) -> int:
    """Distance between head rows of the query image (16-bit elements)."""
    return odd_pitch_bytes(2 * fmt.d_qk)


def smem_fields(fmt: KvFormat, encoding: Encoding, geometry: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """Members of the shared-memory struct with offsets, and its size in bytes."""
    g = geometry
    block_groups = g.tile_tokens // MMA_TOKENS // g.warp_blocks
    copies = encoding.probability_copies
    return lay_out_smem(
        (
            SmemField("landed", "u64", (g.stages,), "barriers: the rows of a stage have arrived"),
            SmemField("freed", "u64", (g.stages,), "barriers: score and value warps are done with a stage"),
            SmemField("filled", "u64", (g.probability_buffers,), "barriers: the probabilities of a tile are complete"),
            SmemField("drained", "u64", (g.probability_buffers,), "barriers: the value warps are done with them"),
            SmemField("finished", "u64", (1,), "barrier: the output factors are complete"),
            SmemField("addresses", "u64", (g.producers, STAGE_TOKENS), "row addresses of the stage being started"),
            SmemField("query", "u8", (g.heads_n, query_pitch_bytes(fmt)), "query image, one row per head"),
            SmemField(
                "rows", "u8", (g.stages, STAGE_TOKENS, odd_pitch_bytes(row_bytes(fmt))), "ring of raw cache rows", 128
            ),
            SmemField(
                "probability",
                "u8",
                (g.probability_buffers, copies, g.tile_tokens, probability_pitch_bytes(g.heads_n)),
                "bf16 probabilities [token][head], one copy per scale group",
                128,
            ),
            SmemField("valid", "u32", (g.stages,), "masks of a stage's rows with a valid id"),
            SmemField("raised", "u32", (g.probability_buffers,), "whether O shrinks before the tile is added"),
            SmemField("shrink", "float", (g.probability_buffers, g.heads_n), "by how much"),
            SmemField("head_scale", "float", (g.heads_n, 2), "logit factor and softmax reference of a head"),
            SmemField("head_value", "float", (g.heads_n,), "at the end: output factor of a head"),
            SmemField("block_value", "float", (block_groups, g.heads_n), "per score group: column maximum, later sum"),
        )
    )


def preferred_shapes(encoding: Encoding, heads_n: int, arch: Arch) -> Iterator[Geometry]:
    """Geometries to try for a head count, best first, whether or not they fit."""
    # With more than 32 heads the value warps hold more output than an even deal of registers leaves them.
    many, scaled = heads_n > EVEN_DEAL_HEADS, encoding.probability_copies > 1
    if many and not arch.has_setmaxnreg:
        return
    full, hopper = heads_n == MAX_HEADS_PER_CTA, arch.mma_class == WGMMA
    registers = None
    if arch.has_setmaxnreg and not many:
        registers = (128, 232, 24)
    elif arch.has_setmaxnreg:
        # Found by compiling without spills; on sm_90a 64 scaled heads also ran 1.35 times slower with the first deal.
        registers = (176, 136, 24) if full and not (hopper and scaled) else (168, 152, 24)
    # Two token blocks a warp halve its head tiles, and with them the query fragments that it holds.
    warp_blocks = 2 if full or (many and not hopper) else 1
    tiles: tuple[tuple[int, int, int], ...] = ((64, 2, 4), (64, 1, 4), (32, 2, 3), (32, 1, 3), (32, 1, 2))
    if many and not scaled:
        # Unscaled keys come straight from matrix loads, whose registers do not fit beside a 64-token tile.
        tiles = tiles[2:]
    for tile_tokens, buffers, least_stages in tiles:
        for stages in range(MAX_STAGES, least_stages - 1, -1):
            yield Geometry(
                heads_n=heads_n,
                tile_tokens=tile_tokens,
                stages=stages,
                warp_blocks=warp_blocks,
                probability_buffers=buffers,
                groups_together=2 if registers and not many else 1,
                bulk=arch.has_bulk_copy,
                registers=registers,
            )


def fitting_geometry(fmt: KvFormat, encoding: Encoding, heads_n: int, arch: Arch) -> Geometry | None:
    """The preferred geometry for a head count, or None when no shape fits the arch."""
    for geometry in preferred_shapes(encoding, heads_n, arch):
        if smem_fields(fmt, encoding, geometry)[1] <= arch.smem_optin_bytes:
            return geometry
    return None


def heads_per_cta(fmt: KvFormat, encoding: Encoding, heads: int, arch: Arch) -> int | None:
    """Padded heads of a CTA when `heads` are dealt evenly to the fewest groups that fit; None when none does."""
    for limit in range(MAX_HEADS_PER_CTA, 0, -8):
        if fitting_geometry(fmt, encoding, limit, arch) is not None:
            groups = -(-heads // limit)
            return round_up(-(-heads // groups), 8)
    return None
