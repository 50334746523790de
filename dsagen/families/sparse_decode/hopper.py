"""Tile geometry of the hopper body: warpgroup products for up to 32 heads in a CTA."""

from __future__ import annotations

from collections.abc import Iterator

from dsagen.arch import WGMMA, Arch
from dsagen.families.sparse_decode.geometry import MAX_STAGES, STAGE_TOKENS, Geometry, common_fields
from dsagen.families.sparse_decode.rows import Caches, Encoding
from dsagen.plan import SmemField, lay_out_smem

BODY = "hopper"
# With more heads the output and the operands in flight leave no registers.
MAX_HEADS = 32
OPERAND_PITCH_BYTES = 128
_OPERAND_DIMS = OPERAND_PITCH_BYTES // 2
# The tensor cores' swizzle counts eight rows from multiples of this.
_OPERAND_ALIGN_BYTES = 1024
_TILE_TOKENS = 64
# A second group of score warps fills what one group waits. With more heads there are registers for it only where the
# probabilities bear the values' scales, so that nothing multiplies those, and with one cache.
_SCORE_WARPS = {True: 8, False: 4}
_TWO_GROUPS_HEADS = 16
# Of a stage a warp issues a copy in some 40 clk, and has some 700 clk of other work. Measured: pairs are fastest.
_PRODUCERS, _STAGE_SHARES = 4, 2


def _registers(heads_n: int, two_groups: bool) -> tuple[int, int, int]:
    """What value, score and producer warps have."""
    if not two_groups:
        return (128, 208, 48)
    return (104, 112, 48) if heads_n <= _TWO_GROUPS_HEADS else (112, 112, 32)


def takes(caches: Caches, heads_n: int, arch: Arch) -> bool:
    """Whether the body reads these rows: values of 512 dims that are part of them."""
    return (
        arch.mma_class == WGMMA
        and heads_n <= MAX_HEADS
        and caches.d_v == 512
        and not any(rows.encoding.values_apart for rows in caches.each)
        and fitting_geometry(caches, heads_n, arch) is not None
    )


def shapes(caches: Caches, heads_n: int) -> Iterator[Geometry]:
    """Geometries to try, best first, whether or not they fit. Rows are skipped by whole stages (`warp_blocks` 2)."""
    two_groups = heads_n <= _TWO_GROUPS_HEADS or (caches.probability_copies > 1 and caches.extra is None)
    for stages in range(MAX_STAGES, 3 if two_groups else 2, -1):
        yield Geometry(
            heads_n=heads_n,
            tile_tokens=_TILE_TOKENS,
            stages=stages,
            warp_blocks=STAGE_TOKENS // 16,
            score_warps=_SCORE_WARPS[two_groups],
            producers=_PRODUCERS,
            stage_shares=_STAGE_SHARES,
            bulk=True,
            registers=_registers(heads_n, two_groups),
        )


def fitting_geometry(caches: Caches, heads_n: int, arch: Arch) -> Geometry | None:
    """The geometry with the most stages that fits, or None."""
    for geometry in shapes(caches, heads_n):
        if smem_fields(caches, geometry)[1] <= arch.smem_optin_bytes:
            return geometry
    return None


def smem_fields(caches: Caches, geometry: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """Members of the shared-memory struct with offsets, operands first, and its size in bytes."""
    g = geometry
    pieces = caches.d_qk // _OPERAND_DIMS
    query = (pieces * g.heads_n, OPERAND_PITCH_BYTES)
    note = f"query image: {pieces} pieces of {_OPERAND_DIMS} dims, one row per head, swizzled"
    extra_note = "the same in the order of the second cache's rows"
    return lay_out_smem(
        (
            SmemField("query", "u8", query, note, _OPERAND_ALIGN_BYTES),
            *([SmemField("extra_query", "u8", query, extra_note, _OPERAND_ALIGN_BYTES)] if caches.two_formats else []),
            SmemField(
                "probability",
                "u8",
                (g.probability_buffers, caches.probability_copies * g.heads_n, OPERAND_PITCH_BYTES),
                "16-bit probabilities [head][token], swizzled, one copy per scale group that they carry",
                _OPERAND_ALIGN_BYTES,
            ),
            SmemField("rows", "u8", (g.stages, STAGE_TOKENS, caches.pitch_bytes), "ring of raw cache rows", 128),
            *common_fields(caches, g, block_groups=g.score_warps),
            SmemField("reference", "float", (g.heads_n,), "softmax reference of a head"),
            SmemField("followed", "float", (g.score_warps // 4, g.heads_n), "that of a group's sums"),
        )
    )


def query_pitch_bytes(_d_qk: int) -> int:
    """Distance between head rows of a piece of the query image."""
    return OPERAND_PITCH_BYTES


def probability_pitch_bytes(_heads_n: int) -> int:
    """Distance between heads' rows of probabilities."""
    return OPERAND_PITCH_BYTES


def operands(encoding: Encoding, row: str) -> tuple[str, str]:
    """The C++ type that makes operands of an encoding's rows, and its header."""
    name = encoding.template.removeprefix("kv::")
    return f"kv::Wgmma{name}<{row}>", encoding.header.replace("/kv/", "/kv/wgmma_")
