"""Sizes of the logits kernel: warps, tiles of keys, the ring that they pass through, and the image of q."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsagen.arch import SMEM_RESERVED_PER_BLOCK_BYTES, Arch
from dsagen.families.topk.geometry import DIGIT_BITS
from dsagen.index_format import INDEX_FORMATS, IndexFormat
from dsagen.plan import SmemField, lay_out_smem

# How the portable body reads the codes of a format.
CODES_CPP: Mapping[str, str] = {
    "fp8": "indexer_logits::Fp8Codes",
    "mxfp8": "indexer_logits::Mxfp8Codes",
    "mxfp4": "indexer_logits::Mxfp4Codes",
}
SCORE_CPP: Mapping[str, str] = {"fp32": "indexer_logits::Fp32Score", "bf16": "indexer_logits::Bf16Score"}
# Where kernels for keys in a form find them, and the header that has it.
PLACES_CPP: Mapping[str, tuple[str, str]] = {
    "paged": ("PagedKeys", "key_places.cuh"),
    "blocks": ("PagedKeys", "key_places.cuh"),
    "ragged": ("ContiguousKeys", "key_places.cuh"),
    "candidates": ("CandidateKeys", "candidates.cuh"),
}
DIMS = (32, 64, 128)
MOST_HEADS = 128
HEAD_STEP = 8
MOST_NEXT_N = 8
WARPS = 4
# Keys of a tile, in blocks of 16: their A operands take 8 registers a block and 32 dims.
BLOCKS = 4
# Rows of q that an image holds, one a token and head. Tokens whose rows do not fit together read the keys again.
QUERY_ROWS = 128
# Counts of a token's scores by the first digit of their keys, a word for each.
COUNT_BYTES = 4 << DIGIT_BITS
# Tokens that they are kept of: one has room beside the rings of two blocks.
COUNTED_TOKENS = 1
# Registers of a thread where an SM holds two blocks.
REGISTERS = 255
# Of the ring, where shared memory has room.
MOST_STAGES = 4


@dataclass(frozen=True)
class Geometry:
    """A block of `warps`, each with its own ring of `stages` tiles of 16 `blocks` keys; `per_sm` blocks on an SM."""

    dim: int
    row_bytes: int  # codes of a key
    stages: int
    per_sm: int
    warps: int = WARPS
    blocks: int = BLOCKS
    query_rows: int = QUERY_ROWS
    counted: int = 0  # tokens of a unit whose scores are counted

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def tile_keys(self) -> int:
        """Keys that a warp scores at a time."""
        return 16 * self.blocks

    @property
    def query_pitch_bytes(self) -> int:
        """Distance between rows of the image: an odd multiple of 16, so that a matrix load meets each bank once."""
        return 2 * self.dim + 16


def preferred_geometry(dim: int, arch: Arch, record: IndexFormat = INDEX_FORMATS["fp8"], counted: int = 0) -> Geometry:
    """Two blocks on an SM where both fit, each with as deep a ring as leaves room for the other.

    A block waits at the start of a unit, while the other one goes on. Of `counted` tokens of a unit scores are counted.
    """
    row_bytes = record.code_bytes(dim)
    choices = [
        Geometry(dim, row_bytes, stages, per_sm, counted=counted)
        for per_sm in (2, 1)
        for stages in range(MOST_STAGES, 0, -1)
    ]
    return next((g for g in choices if _fits(g, arch)), choices[-1])


def _fits(g: Geometry, arch: Arch) -> bool:
    size = smem_fields(g)[1]
    on_sm = g.per_sm * (size + SMEM_RESERVED_PER_BLOCK_BYTES)
    return size <= arch.smem_optin_bytes and on_sm <= arch.smem_per_sm_bytes


def block_values(arch: Arch, smem_bytes: int, threads: int, registers_cap: int, per_sm: int) -> dict[str, int]:
    """What the guards read of a block's share of an SM, of a plan of either body."""
    return {
        "smem_bytes": smem_bytes,
        "smem_optin_bytes": arch.smem_optin_bytes,
        "threads": threads,
        "registers_cap": registers_cap,
        "registers_per_sm": arch.registers_per_sm,
        "per_sm": per_sm,
    }


def resource_lines(
    arch: Arch, smem_bytes: int, registers_cap: int, record: IndexFormat, dim: int
) -> tuple[tuple[str, str], ...]:
    """The end of a plan's budget: what a block takes, and what a key costs at the least."""
    return (
        ("shared memory", f"{smem_bytes} of {arch.smem_optin_bytes} B"),
        ("registers", f"{registers_cap} a thread"),
        ("floor", f"{record.record_bytes(dim)} B of memory traffic a key, and {2 * dim} FLOP a key and head"),
    )


def smem_fields(g: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct and its size in bytes."""
    ring = (g.warps, g.stages)
    counts = (
        SmemField("counts", "u32", (g.counted, COUNT_BYTES // 4), "of each token's scores, by their first digit"),
    )
    return lay_out_smem(
        (
            SmemField("keys", "u8", (*ring, g.tile_keys * g.row_bytes), "codes of each warp's tiles", align_bytes=128),
            SmemField("scales", "u32", (*ring, g.tile_keys), "their scales"),
            SmemField("held", "u32", (*ring, g.tile_keys // 32), "a bit for each key that a page holds"),
            SmemField("query", "u8", (g.query_rows, g.query_pitch_bytes), "operands of q, a row a token and head"),
            SmemField("weights", "u32", (g.query_rows,), "of the same rows, fp32"),
            SmemField("warp_sums", "u32", (3, 32), "of a prefix sum over the block, three sets"),
            SmemField("found", "u32", (4,), "where the block's span begins: unit and tile"),
            *(counts if g.counted else ()),
        )
    )
