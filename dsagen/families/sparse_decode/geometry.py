"""Tile geometry of the mma_sync body: how many heads, tokens, warps and stages fit an arch's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from dsagen.arch import Arch
from dsagen.dtype import BF16, E4M3
from dsagen.kv_format import KvFormat, Layout, ScaleKind
from dsagen.plan import SmemField, lay_out_smem, round_up

MAX_HEADS_PER_CTA = 64
MMA_TOKENS = 16  # tokens of one MMA row block


@dataclass(frozen=True)
class Encoding:
    """The policy header that reads a format's rows, and what the plan must know about it."""

    cpp: str
    header: str
    probability_copies: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of one main kernel. `heads_n` is the padded head count of a CTA."""

    heads_n: int
    tile_tokens: int
    warps: int  # of a team
    stages: int  # of a team
    teams: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps * self.teams


# Preferred first. Four stages keep 84 to 126 KB of rows in flight, which saturates HBM on an H200; two stages suffice
# where the mathematics takes longer than the copies.
_SHAPES = ((64, 8, 4), (64, 8, 3), (64, 8, 2), (32, 8, 4), (32, 8, 3), (32, 8, 2), (16, 4, 4), (16, 4, 3), (16, 4, 2))


def encoding_of(fmt: KvFormat) -> Encoding | str:
    """The encoding that reads a format, or why none does."""
    if fmt.layout is not Layout.INTERLEAVED or len(fmt.tensors) != 1:
        return f"KV format {fmt.format_id}: rows that are split over sections or tensors are not built yet"
    values = fmt.segment("values")
    if values.element is E4M3 and fmt.scale_kind in (ScaleKind.FP32, ScaleKind.FP32_POW2) and fmt.scale_group_dims == 128:
        return Encoding("kv::Fp8Fp32Scale<Constants>", "prims/kv/fp8_fp32_scale.cuh", fmt.scale_groups)
    if values.element is BF16 and fmt.scale_kind is ScaleKind.NONE:
        return Encoding("kv::Bf16<Constants>", "prims/kv/bf16.cuh", 1)
    return f"KV format {fmt.format_id}: {values.element.name} values with {fmt.scale_kind.value} scales are not built yet"


def odd_pitch_bytes(row_bytes: int) -> int:
    """The least odd multiple of 16 that holds a row: consecutive rows then start in different banks."""
    pitch = round_up(row_bytes, 16)
    return pitch if pitch % 32 else pitch + 16


def row_bytes(fmt: KvFormat) -> int:
    """Bytes of a row that are gathered."""
    return fmt.io_stride_bytes


def query_pitch_bytes(fmt: KvFormat) -> int:
    """Distance between head rows of the query image (16-bit elements)."""
    return odd_pitch_bytes(2 * fmt.d_qk)


def smem_fields(fmt: KvFormat, encoding: Encoding, geometry: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """Members of the shared-memory struct with offsets, and its size in bytes."""
    g = geometry
    row_blocks = g.tile_tokens // MMA_TOKENS
    return lay_out_smem(
        (
            SmemField("query", "u8", (g.heads_n, query_pitch_bytes(fmt)), "query image, one row per head"),
            SmemField(
                "rows", "u8", (g.teams, g.stages, g.tile_tokens, odd_pitch_bytes(row_bytes(fmt))), "rings of raw cache rows", 128
            ),
            SmemField(
                "probability",
                "u8",
                (g.teams, encoding.probability_copies, g.tile_tokens, odd_pitch_bytes(2 * g.heads_n)),
                "bf16 probabilities [token][head], one copy per scale group",
            ),
            SmemField("valid", "u32", (g.teams, g.stages, g.warps), "masks of rows with a valid id, one word per gathering warp"),
            SmemField("query_factor", "float", (g.heads_n,), "logit factor of a head"),
            SmemField(
                "head_value", "float", (g.teams, g.heads_n), "shrink of O; at the end softmax reference, then output factor"
            ),
            SmemField(
                "block_value", "float", (g.teams, row_blocks, g.heads_n), "per row block: column maximum, later sum"
            ),
        )
    )


def fitting_geometry(fmt: KvFormat, encoding: Encoding, heads_n: int, arch: Arch) -> Geometry | None:
    """The preferred geometry for a head count, or None when no shape fits the arch's shared memory."""
    for tile_tokens, warps, stages in _SHAPES:
        geometry = Geometry(heads_n, tile_tokens, warps, stages)
        if fmt.d_v % (32 * warps) == 0 and smem_fields(fmt, encoding, geometry)[1] <= arch.smem_optin_bytes:
            return geometry
    return None


def heads_per_cta(fmt: KvFormat, encoding: Encoding, heads: int, arch: Arch) -> int | None:
    """Padded heads of a CTA when `heads` are dealt evenly to the fewest groups that fit; None when none does."""
    for limit in range(MAX_HEADS_PER_CTA, 0, -8):
        if fitting_geometry(fmt, encoding, limit, arch) is not None:
            groups = -(-heads // limit)
            return round_up(-(-heads // groups), 8)
    return None
