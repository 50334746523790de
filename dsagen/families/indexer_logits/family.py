"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.families.indexer_logits import hopper, hopper_ragged
from dsagen.families.indexer_logits.bodies import PORTABLE, choose_body
from dsagen.families.indexer_logits.forms import BLOCKS, COUNTED, FORMS, RAGGED, ROLES, parts_of
from dsagen.families.indexer_logits.geometry import (
    CODES_CPP,
    COUNT_BYTES,
    COUNTED_TOKENS,
    MOST_HEADS,
    PLACES_CPP,
    REGISTERS,
    SCORE_CPP,
    Geometry,
    block_values,
    preferred_geometry,
    resource_lines,
    smem_fields,
)
from dsagen.families.indexer_logits.guards import (
    LAUNCH_GUARDS,
    PLAN_GUARDS,
    RAGGED_WARPGROUP_GUARDS,
    WARPGROUP_GUARDS,
)
from dsagen.families.indexer_logits.params import params_of
from dsagen.families.topk.geometry import DIGIT_BITS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.index_format import index_format
from dsagen.plan import KernelPlan, TypeAlias, Variant, checked, lay_out_params

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec, IndexSpec

NAME = "indexer_logits"

# A plan guard's names in the generated unit; names that are not here are printed as numbers.
_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "blocks": "Constants::kBlocks",
    "dim": "Body::kDim",
    "stages": "Constants::kStages",
}


class IndexerLogits:
    """Logits of the indexer over keys in pages, in one piece or in candidate blocks."""

    name = NAME
    ops: tuple[str, ...] = ("indexer_logits",)
    guards: tuple[Guard, ...] = (
        *PLAN_GUARDS,
        *WARPGROUP_GUARDS,
        *RAGGED_WARPGROUP_GUARDS,
        *LAUNCH_GUARDS,
    )

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """A kernel for each form that the spec has keys in, for any number of tokens; and one that counts scores."""
        assert spec.index is not None and spec.scores is not None, "a spec with the op has an index and a score dtype"
        roles = [ROLES[form] for form in spec.index.forms]
        if spec.index.histogram:
            roles.append(COUNTED)
        return tuple(_cell(spec.index, spec.scores, role, arch) for role in roles)

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""
        if variant.body == PORTABLE:
            return plan_main(variant)
        return hopper_ragged.plan_hopper_ragged(variant) if variant.kernel == RAGGED else hopper.plan_hopper(variant)


FAMILY = IndexerLogits()


def _cell(index: IndexSpec, scores: str, role: str, arch: Arch) -> Cell:
    body, why = choose_body(index, FORMS[role], arch)
    # Columns of a product; to the portable body they are a loop.
    heads: tuple[tuple[str, str | int], ...] = () if body == PORTABLE else (("heads", index.heads),)
    axes: tuple[tuple[str, str | int], ...] = (
        ("keys", index.keys),  # how codes become operands
        ("dim", index.dim),  # steps of a product, registers, shared memory
        *heads,
        ("score", scores),  # the conversion and the width of a store
        ("smem", arch.smem_class),  # shared memory: stages of the ring, blocks on an SM
    )
    return Cell(NAME, role, arch.name, Variant(NAME, role, body, arch.name, axes), why=why)


def plan_main(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """The portable kernel's plan; `geometry` overrides the preferred one (for tests and for measuring others)."""
    arch, record = arch_row(variant.arch), index_format(str(variant.axis("keys")))
    counts = variant.kernel == COUNTED
    g = geometry or preferred_geometry(variant.axis_int("dim"), arch, record, COUNTED_TOKENS if counts else 0)
    form = FORMS[variant.kernel]
    (fields, smem_bytes), (params, params_bytes) = smem_fields(g), lay_out_params(params_of(record, form, counts))
    values = {
        **block_values(arch, smem_bytes, g.threads, REGISTERS, g.per_sm),
        "blocks": g.blocks,
        "dim": g.dim,
        "stages": g.stages,
        "query_rows": g.query_rows,
        "most_heads": MOST_HEADS,
    }
    check(PLAN_GUARDS, values, variant.slug)
    body = "indexer_logits::MmaSync<Constants, SharedStorage, Codes, Score, Places, Params>"
    places, places_header = PLACES_CPP[form]
    score = SCORE_CPP[str(variant.axis("score"))]
    if variant.kernel == BLOCKS:
        score = f"indexer_logits::WithBlocks<{score}>"
    return KernelPlan(
        variant=variant,
        constants=(
            ("kWarps", g.warps),
            ("kBlocks", g.blocks),
            ("kTileKeys", g.tile_keys),
            ("kStages", g.stages),
            ("kDim", g.dim),
            ("kRowBytes", g.row_bytes),
            ("kQueryRows", g.query_rows),
            ("kQueryPitchBytes", g.query_pitch_bytes),
            *((("kMostTokens", g.counted), ("kDigitBits", DIGIT_BITS)) if counts else ()),
        ),
        types=(
            TypeAlias("Codes", CODES_CPP[record.format_id], "indexer_logits/codes.cuh"),
            TypeAlias("Places", f"indexer_logits::{places}<Constants, Params>", f"indexer_logits/{places_header}"),
            TypeAlias("Score", score, "indexer_logits/store.cuh"),
            TypeAlias("Body", body, "indexer_logits/mma_sync.cuh"),
        ),
        threads=g.threads,
        min_blocks_per_sm=g.per_sm,
        registers_cap=REGISTERS,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid=f"min({g.per_sm} x SMs, tiles)",
        overlaps_previous=False,
        guards=checked(PLAN_GUARDS, values, _C_NAMES),
        budget=(
            ("shape", f"{g.tile_keys} keys a warp and tile, {g.warps} warps, {g.per_sm} blocks on an SM"),
            ("ring", f"{g.stages} tiles of {g.tile_keys * record.record_bytes(g.dim)} B a warp"),
            ("image of q", f"{g.query_rows} rows of {g.query_pitch_bytes} B, a row a token and head"),
            *((("counts", f"{COUNT_BYTES} B of each token, of {g.counted} at the most"),) if counts else ()),
            *resource_lines(arch, smem_bytes, REGISTERS, record, g.dim),
        ),
        parts=parts_of(variant.kernel),
    )
