"""Tile geometry of the mma_sync body: how many heads, tokens, warps and stages fit an arch's shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsagen.arch import WGMMA, Arch
from dsagen.families.sparse_decode.rows import Caches, odd_pitch_bytes
from dsagen.plan import SmemField, lay_out_smem, round_up

MAX_HEADS_PER_CTA = 64
EVEN_DEAL_HEADS = 32
MAX_STAGES = 8
VALUE_WARPS = 8
MMA_TOKENS = 16  # tokens of one MMA row block


@dataclass(frozen=True)
class Geometry:
    """Sizes of one main kernel.

    `heads_n` is the padded head count of a CTA. A score warp takes `warp_blocks` blocks of 16 tokens; the score warps
    that this leaves over share the heads. `bulk` rows arrive by bulk copies (sm_90+), others by 16-byte asynchronous
    copies; `stage_shares` producers bring a stage together. `groups_together` scale groups of a score run side by side,
    which takes registers. `registers` is what value, score and producer warps have after moving registers (sm_90a and
    newer); None: an even deal.
    """

    heads_n: int
    tile_tokens: int
    stages: int
    warp_blocks: int = 1
    score_warps: int = 4
    value_warps: int = VALUE_WARPS
    producers: int = 2
    stage_shares: int = 1
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


def probability_pitch_bytes(heads_n: int) -> int:
    """Distance between tokens' rows of probabilities; 64 heads are swizzled instead of padded, which would not fit."""
    return 128 if heads_n == 64 else odd_pitch_bytes(2 * heads_n)


def query_pitch_bytes(d_qk: int) -> int:
    """Distance between head rows of the query image (16-bit elements)."""
    return odd_pitch_bytes(2 * d_qk)


def smem_fields(caches: Caches, geometry: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """Members of the shared-memory struct with offsets, and its size in bytes."""
    g = geometry
    query = (g.heads_n, query_pitch_bytes(caches.d_qk))
    extra_query = (SmemField("extra_query", "u8", query, "the same in the order of the second cache's rows"),)
    probability = (g.probability_buffers, caches.probability_copies, g.tile_tokens, probability_pitch_bytes(g.heads_n))
    note = "16-bit probabilities [token][head], one copy per scale group that they carry"
    common = common_fields(caches, g, g.tile_tokens // MMA_TOKENS // g.warp_blocks)
    barriers = sum(field.ctype == "u64" for field in common)
    return lay_out_smem(
        (
            *common[:barriers],
            SmemField("query", "u8", query, "query image, one row per head"),
            *(extra_query if caches.two_formats else ()),
            SmemField("rows", "u8", (g.stages, STAGE_TOKENS, caches.pitch_bytes), "ring of raw cache rows", 128),
            SmemField("probability", "u8", probability, note, 128),
            *common[barriers:],
        )
    )


def common_fields(caches: Caches, geometry: Geometry, block_groups: int) -> tuple[SmemField, ...]:
    """What every body has beside its rows and operands: barriers and addresses, then what warps tell each other.

    `block_groups`: how many score warps have tokens of their own.
    """
    g = geometry
    addresses = (g.producers, caches.address_parts * STAGE_TOKENS // g.stage_shares)
    return (
        SmemField("landed", "u64", (g.stages,), "barriers: the rows of a stage have arrived"),
        SmemField("freed", "u64", (g.stages,), "barriers: score and value warps are done with a stage"),
        SmemField("filled", "u64", (g.probability_buffers,), "barriers: the probabilities of a tile are complete"),
        SmemField("drained", "u64", (g.probability_buffers,), "barriers: the value warps are done with them"),
        SmemField("finished", "u64", (1,), "barrier: the output factors are complete"),
        SmemField("addresses", "u64", addresses, "row addresses of the stage being started"),
        SmemField("valid", "u32", (g.stages,), "masks of a stage's rows with a valid id"),
        SmemField("raised", "u32", (g.probability_buffers,), "whether O shrinks before the tile is added"),
        SmemField("shrink", "float", (g.probability_buffers, g.heads_n), "by how much"),
        SmemField("head_scale", "float", (g.heads_n, 2), "logit factor and softmax reference of a head"),
        SmemField("head_value", "float", (g.heads_n,), "at the end: output factor of a head"),
        SmemField("block_value", "float", (block_groups, g.heads_n), "per score group: column maximum, later sum"),
    )


def preferred_shapes(caches: Caches, heads_n: int, arch: Arch) -> Iterator[Geometry]:
    """Geometries to try for a head count, best first, whether or not they fit."""
    # With more than 32 heads the value warps hold more output than an even deal of registers leaves them.
    many = heads_n > EVEN_DEAL_HEADS
    full, hopper = heads_n == MAX_HEADS_PER_CTA, arch.mma_class == WGMMA
    raw_keys = all(rows.encoding.raw_keys for rows in caches.each)
    registers = _moved_registers(caches, heads_n, arch)
    if many and registers is None:
        return
    # Narrow scale groups have few matrix steps each, so that more of them have to run side by side.
    together = 2 if registers and not many else 1
    if registers and (full or not many) and any(rows.encoding.narrow_groups for rows in caches.each):
        together *= 2
    if hopper and 16 < heads_n <= EVEN_DEAL_HEADS and all(rows.encoding.heavy_keys for rows in caches.each):
        # Two score warps a scheduler; with at most 16 heads others are what waits.
        for stages in range(MAX_STAGES, 4, -1):
            yield Geometry(heads_n, 128, stages, score_warps=8, bulk=True, registers=(104, 120, 24))
    # Two token blocks a warp halve its head tiles, and with them the query fragments that it holds.
    warp_blocks = 2 if full or (many and not hopper) else 1
    tiles: tuple[tuple[int, int, int], ...] = ((64, 2, 4), (64, 1, 4), (32, 2, 3), (32, 1, 3), (32, 1, 2))
    if many and not raw_keys:
        # Unscaled keys come straight from matrix loads, whose registers do not fit beside a 64-token tile.
        tiles = tiles[2:]
    for tile_tokens, buffers, least_stages in tiles:
        for stages in range(MAX_STAGES, least_stages - 1, -1):
            yield Geometry(
                heads_n=heads_n,
                tile_tokens=tile_tokens,
                stages=stages,
                warp_blocks=warp_blocks,
                value_warps=_value_warps(caches.d_v),
                probability_buffers=buffers,
                groups_together=together,
                bulk=arch.has_bulk_copy,
                registers=registers,
            )


def _value_warps(d_v: int) -> int:
    """Warps that value dims are dealt to, 32 or a multiple each."""
    return VALUE_WARPS if d_v % (32 * VALUE_WARPS) == 0 else VALUE_WARPS // 2


def _moved_registers(caches: Caches, heads_n: int, arch: Arch) -> tuple[int, int, int] | None:
    """Registers of value, score and producer warps where they move; None: an even deal."""
    if not arch.has_setmaxnreg or _value_warps(caches.d_v) != VALUE_WARPS:
        return None
    if heads_n <= EVEN_DEAL_HEADS:
        return (128, 232, 24)
    hopper, raw_keys = arch.mma_class == WGMMA, all(rows.encoding.raw_keys for rows in caches.each)
    # Found by compiling without spills; on sm_90a 64 scaled heads also ran 1.35 times slower with the first deal.
    full = heads_n == MAX_HEADS_PER_CTA
    return (176, 136, 24) if full and not (hopper and raw_keys) else (168, 152, 24)


def fitting_geometry(caches: Caches, heads_n: int, arch: Arch) -> Geometry | None:
    """The preferred geometry for a head count, or None when no shape fits the arch."""
    for geometry in preferred_shapes(caches, heads_n, arch):
        if smem_fields(caches, geometry)[1] <= arch.smem_optin_bytes:
            return geometry
    return None


def most_heads(caches: Caches, arch: Arch) -> int:
    """The most heads, in steps of 8, that a CTA may have on an arch; 0 where not even 8 fit."""
    counts = range(MAX_HEADS_PER_CTA, 0, -8)
    return next((count for count in counts if fitting_geometry(caches, count, arch) is not None), 0)


def heads_per_cta(caches: Caches, heads: int, arch: Arch, kv_heads: int = 1) -> int | None:
    """Padded heads of a CTA when `heads` are dealt to the fewest groups that fit; None when none does."""
    most = most_heads(caches, arch)
    return round_up(deal_heads(heads, kv_heads, most)[1], 8) if most else None


def deal_heads(heads: int, kv_heads: int, most: int) -> tuple[int, int]:
    """(groups that share a KV head's query heads, heads of a group): the fewest groups of at most `most` heads.

    The last group of all may have fewer. With several KV heads groups are equal, so that no group is of two of them.
    """
    each = heads // kv_heads
    groups = -(-each // most)
    while kv_heads > 1 and each % groups:
        groups += 1
    return groups, -(-each // groups)
