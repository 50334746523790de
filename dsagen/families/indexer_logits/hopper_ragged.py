"""Sizes and plan of the hopper body for keys in one piece: products of as many tokens as have 128 rows of q."""

from __future__ import annotations

from dataclasses import dataclass

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.families.indexer_logits.forms import parts_of
from dsagen.families.indexer_logits.geometry import SCORE_CPP, block_values, resource_lines
from dsagen.families.indexer_logits.guards import HOPPER_RAGGED_PLAN_GUARDS
from dsagen.families.indexer_logits.hopper import QUERY_ALIGN_BYTES, QUERY_PITCH_BYTES
from dsagen.families.indexer_logits.params import params_of
from dsagen.guard import check
from dsagen.index_format import index_format
from dsagen.plan import KernelPlan, SmemField, TypeAlias, Variant, checked, lay_out_params, lay_out_smem

# Formats that it is built for: keys whose blocks have scales become 16-bit operands, which are not built.
KEYS = ("fp8",)
# Warpgroups, in two pairs whose members take turns.
GROUPS = 4
# Keys of a tile, two products of 64: what a barrier costs is shared by both.
TILE_KEYS = 128
# Of a product: 64 accumulators and 32 weights of 128 leave as many registers for all else.
MOST_COLUMNS = 128
REGISTERS = 128
# Tiles that are on the way ahead of the one that is multiplied, and so many more that groups may be apart.
AHEAD, SLACK = 3, 3
# Whether groups of a pair take turns, so that one multiplies while the other one sums.
TAKES_TURNS = True
# Of so many tiles of 8 columns one has its relu from an addition, in the pipe of sums; 0: none has.
ADDED_OF = 4

_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "heads": "Constants::kHeads",
    "columns": "Constants::kColumns",
    "queries": "Constants::kQueries",
    "dim": "Body::kDim",
    "stages": "Constants::kStages",
    "ahead": "Constants::kAhead",
}


@dataclass(frozen=True)
class HopperRaggedGeometry:
    """A block of `groups` warpgroups, each with `queries` tokens, and a ring of `stages` tiles that all multiply."""

    dim: int
    heads: int
    queries: int
    groups: int
    stages: int
    ahead: int
    takes_turns: bool
    added_of: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups

    @property
    def columns(self) -> int:
        """Of a group's products: its rows of q, one a token and head."""
        return self.queries * self.heads

    @property
    def query_rows(self) -> int:
        """Rows of q of a unit."""
        return self.groups * self.columns


def preferred_geometry(dim: int, heads: int) -> HopperRaggedGeometry:
    """As many tokens a group as a product has columns for."""
    queries = max(1, MOST_COLUMNS // heads)
    return HopperRaggedGeometry(dim, heads, queries, GROUPS, AHEAD + SLACK, AHEAD, TAKES_TURNS, ADDED_OF)


def smem_fields(g: HopperRaggedGeometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct, operands first, and its size in bytes."""
    key_tile = (g.stages, TILE_KEYS * QUERY_PITCH_BYTES)
    return lay_out_smem(
        (
            SmemField(
                "query",
                "u8",
                (g.query_rows, QUERY_PITCH_BYTES),
                "q, a row a token and head, swizzled",
                QUERY_ALIGN_BYTES,
            ),
            SmemField("keys", "u8", key_tile, "codes of tiles, a row a key, swizzled", QUERY_ALIGN_BYTES),
            SmemField("scales", "u32", (g.stages, TILE_KEYS), "their scales"),
            SmemField("windows", "u32", (g.groups * g.queries, 4), "each token's first key, keys, and key 0's score"),
            SmemField("landed", "u64", (g.stages,), "barriers: a tile's copies have arrived"),
            SmemField("freed", "u64", (g.stages,), "barriers: all warps are done with a tile"),
            SmemField("turns", "u64", (g.groups,), "barriers: the other group of a pair has multiplied"),
            SmemField("warp_sums", "u32", (3, 32), "of a prefix sum over the block, three sets"),
            SmemField("found", "u32", (4,), "where the block's span begins: unit and tile"),
        )
    )


def plan_hopper_ragged(variant: Variant, geometry: HopperRaggedGeometry | None = None) -> KernelPlan:
    """The kernel's plan; `geometry` overrides the preferred one (for tests and for measuring others)."""
    arch, record = arch_row(variant.arch), index_format(str(variant.axis("keys")))
    g = geometry or preferred_geometry(variant.axis_int("dim"), variant.axis_int("heads"))
    (fields, smem_bytes), (params, params_bytes) = smem_fields(g), lay_out_params(params_of(record, "ragged"))
    values = _guard_values(g, arch, smem_bytes)
    check(HOPPER_RAGGED_PLAN_GUARDS, values, variant.slug)
    body = "indexer_logits::HopperRagged<Constants, SharedStorage, Score, Params>"
    return KernelPlan(
        variant=variant,
        constants=(
            ("kWarps", 4 * g.groups),
            ("kTileKeys", TILE_KEYS),
            ("kStages", g.stages),
            ("kAhead", g.ahead),
            ("kDim", g.dim),
            ("kHeads", g.heads),
            ("kQueries", g.queries),
            ("kColumns", g.columns),
            ("kQueryRows", g.query_rows),
            ("kQueryPitchBytes", QUERY_PITCH_BYTES),
            ("kTakesTurns", int(g.takes_turns)),
            ("kAddedOf", g.added_of),
        ),
        types=(
            TypeAlias("Score", SCORE_CPP[str(variant.axis("score"))], "indexer_logits/store.cuh"),
            TypeAlias("Body", body, "indexer_logits/hopper_ragged.cuh"),
        ),
        threads=g.threads,
        min_blocks_per_sm=1,
        registers_cap=REGISTERS,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid=f"min(SMs, tiles of {TILE_KEYS} keys)",
        overlaps_previous=True,
        guards=checked(HOPPER_RAGGED_PLAN_GUARDS, values, _C_NAMES),
        budget=(
            ("shape", f"{g.groups} warpgroups of {g.queries} tokens, products of 64 keys and {g.columns} columns"),
            ("ring", f"{g.stages} tiles of {TILE_KEYS} keys, {g.ahead} ahead"),
            ("image of q", f"{g.query_rows} rows of {QUERY_PITCH_BYTES} B, a row a token and head"),
            *resource_lines(arch, smem_bytes, REGISTERS, record, g.dim),
        ),
        parts=parts_of(variant.kernel),
    )


def _guard_values(g: HopperRaggedGeometry, arch: Arch, smem_bytes: int) -> dict[str, int]:
    return {
        **block_values(arch, smem_bytes, g.threads, REGISTERS, 1),
        "dim": g.dim,
        "heads": g.heads,
        "stages": g.stages,
        "queries": g.queries,
        "columns": g.columns,
        "ahead": g.ahead,
    }
