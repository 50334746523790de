"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.dependent import dependent_cell, has_chain, plan_either
from dsagen.families.topk.geometry import (
    MOST_THREADS,
    RESIDENT_SHAPES,
    SCORE_CPP,
    STREAM_THREADS,
    Geometry,
    ResidentGeometry,
    cluster_geometry,
    cluster_smem,
    resident_geometry,
    resident_smem,
    stream_smem,
    sweeping_geometry,
)
from dsagen.families.topk.guards import CLUSTER_GUARDS, LAUNCH_GUARDS, PLAN_GUARDS, RESIDENT_GUARDS, SELECT_GUARDS
from dsagen.families.topk.params import PARAMS, SPLIT_PARAMS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.plan import KernelPlan, SmemField, TypeAlias, Variant, checked, lay_out_params

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "topk"
RESIDENT, STREAM, SPLIT, CLUSTER = "row_resident", "row_stream", "row_split", "row_cluster"
# Kernels of row_split, in the order of their launches.
COUNT, SELECT = "count", "select"
# 1024 threads of them are all that an SM has.
MOST_REGISTERS = 64

# A plan guard's names in the generated unit; names that are not here are printed as numbers.
_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "digit_bits": "Body::kDigitBits",
    "key_bits": "Body::kKeyBits",
    "vector_scores": "Body::Vector::kElements",
    "row_scores": "Body::kRowScores",
    "words": "Body::kWords",
    "in_flight": "Constants::kInFlight",
    "bitmap_words": "Constants::kBitmapWords",
    "elements": "Constants::kElements",
    "sampled": "Constants::kSampled",
    "at_once": "Constants::kAtOnce",
}
_GRIDS = {SPLIT: "rows * parts", CLUSTER: "rows * cluster"}


class TopK:
    """Exact top-k, portable bodies."""

    name = NAME
    ops: tuple[str, ...] = ("topk",)
    guards: tuple[Guard, ...] = PLAN_GUARDS + LAUNCH_GUARDS

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """The kernels that select from scores of the spec's dtype, for rows of every length."""
        assert spec.scores is not None, "a spec with the op has a dtype of scores"
        variants = [resident_variant(spec.scores, arch, threads) for threads, *_ in RESIDENT_SHAPES[arch.smem_class]]
        variants += [stream_variant(spec.scores, arch, threads) for threads in STREAM_THREADS]
        variants += split_variants(spec.scores, arch)
        if arch.has_clusters:
            variants.append(cluster_variant(spec.scores, arch))
        cells = tuple(Cell(NAME, variant.kernel, arch.name, variant) for variant in variants)
        return (*cells, *_dependent(cells)) if has_chain(spec, arch) else cells

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""
        plans = {RESIDENT: plan_resident, STREAM: plan_stream, SPLIT: plan_split, CLUSTER: plan_cluster}
        return plan_either(variant, plans[variant.body])


FAMILY = TopK()


def _dependent(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Forms for decode steps of the kernels that few rows take: many take long, next to the gap before a launch."""
    return tuple(dependent_cell(cell) for cell in cells if cell.variant is not None and _is_of_few_rows(cell.variant))


def _is_of_few_rows(variant: Variant) -> bool:
    if variant.body == RESIDENT:
        return variant.axis_int("threads") == MOST_THREADS
    return variant.kernel == COUNT or variant.body == CLUSTER


def resident_variant(score: str, arch: Arch, threads: int) -> Variant:
    """The kernel that holds a row in shared memory."""
    axes: tuple[tuple[str, str | int], ...] = (
        ("score", score),  # bits of a key, scores in a word
        ("threads", threads),  # shared memory, scores of a row
        ("smem", arch.smem_class),  # shared memory, scores of a row
    )
    return Variant(NAME, "main", RESIDENT, arch.name, axes)


def stream_variant(score: str, arch: Arch, threads: int) -> Variant:
    """The kernel that sweeps a row in global memory."""
    axes: tuple[tuple[str, str | int], ...] = (
        ("score", score),  # bytes of a load, bits of a key
        ("threads", threads),  # blocks that an SM has at once
    )
    return Variant(NAME, "main", STREAM, arch.name, axes)


def split_variants(score: str, arch: Arch) -> tuple[Variant, ...]:
    """The kernels that share a row among blocks."""
    axes: tuple[tuple[str, str | int], ...] = (("score", score),)  # bytes of a load, bits of a key
    return tuple(Variant(NAME, kernel, SPLIT, arch.name, axes) for kernel in (COUNT, SELECT))


def cluster_variant(score: str, arch: Arch) -> Variant:
    """The kernel whose blocks share a row in clusters, each with a part in shared memory."""
    axes: tuple[tuple[str, str | int], ...] = (
        ("score", score),  # bits of a key, scores in a word
        ("smem", arch.smem_class),  # shared memory, scores of a part
    )
    return Variant(NAME, "main", CLUSTER, arch.name, axes)


def plan_resident(variant: Variant, geometry: ResidentGeometry | None = None) -> KernelPlan:
    """Plan of row_resident; `geometry` overrides that of the axes (for tests and for measuring others)."""
    smem_class, threads = variant.axis_int("smem"), variant.axis_int("threads")
    g = geometry or resident_geometry(str(variant.axis("score")), smem_class, threads)
    values = {"row_scores": g.row_scores, "words": g.words}
    budget = (
        ("shape", f"rows of up to {g.row_scores} scores by {g.threads} threads"),
        ("row sweeps", "one in global memory; then as row_stream's, in shared memory"),
    )
    constants = (("kWords", g.words),)
    copy = "bulk" if arch_row(variant.arch).has_bulk_copy else "async"
    types = (
        TypeAlias("Copy", f"topk::RowCopy<Constants, {g.batches}>", f"topk/row_copy_{copy}.cuh"),
        TypeAlias(
            "Body",
            f"topk::RowResident<Constants, SharedStorage, Score, Copy, {g.batches}, Params>",
            f"topk/{RESIDENT}.cuh",
        ),
    )
    return _plan(variant, g, RESIDENT_GUARDS, values, constants, resident_smem(g), types, budget)


def plan_stream(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """Plan of row_stream; `geometry` overrides the preferred one (for tests and for measuring others)."""
    g = geometry or sweeping_geometry(str(variant.axis("score")), variant.arch, variant.axis_int("threads"))
    budget = (
        ("shape", f"a row by {g.threads} threads, {g.levels} digits of up to {g.digit_bits} bits"),
        ("row sweeps", f"one and a sample as a rule, at most {g.levels + 2}"),
    )
    types = (TypeAlias("Body", "topk::RowStream<Constants, SharedStorage, Score, Params>", f"topk/{STREAM}.cuh"),)
    return _plan(variant, g, SELECT_GUARDS, {}, (), stream_smem(g), types, budget)


def plan_split(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """Plan of a kernel of row_split; `geometry` overrides the preferred one (for tests and for measuring others)."""
    g = geometry or sweeping_geometry(str(variant.axis("score")), variant.arch)
    cpp = {COUNT: "SplitCount", SELECT: "SplitSelect"}[variant.kernel]
    budget = (
        ("shape", f"a part of a row by {g.threads} threads"),
        ("row sweeps", f"one by each kernel where {g.elements} elements suffice after the first digit"),
    )
    types = (TypeAlias("Body", f"topk::{cpp}<Constants, SharedStorage, Score, Params>", f"topk/{SPLIT}.cuh"),)
    return _plan(variant, g, SELECT_GUARDS, {}, (), stream_smem(g), types, budget)


def plan_cluster(variant: Variant, geometry: ResidentGeometry | None = None) -> KernelPlan:
    """Plan of row_cluster; `geometry` overrides that of the axes (for tests and for measuring others)."""
    g = geometry or cluster_geometry(str(variant.axis("score")), variant.axis_int("smem"))
    values = {"row_scores": g.row_scores, "words": g.words}
    budget = (
        ("shape", f"a part of a row, up to {g.row_scores} scores, by {g.threads} threads"),
        ("row sweeps", "one in global memory, one in shared memory where the list has room after the first digit"),
    )
    constants = (("kWords", g.words),)
    types = (
        TypeAlias(
            "Body",
            f"topk::RowCluster<Constants, SharedStorage, Score, {g.batches}, Params>",
            f"topk/{CLUSTER}.cuh",
        ),
    )
    # There is one block on an SM in any case, for want of shared memory.
    registers = arch_row(variant.arch).registers_per_sm // g.threads
    return _plan(variant, g, CLUSTER_GUARDS, values, constants, cluster_smem(g), types, budget, registers)


def _plan(
    variant: Variant,
    g: Geometry,
    guards: tuple[Guard, ...],
    values: Mapping[str, int],
    constants: tuple[tuple[str, int], ...],
    smem: tuple[tuple[SmemField, ...], int],
    types: tuple[TypeAlias, ...],
    budget: tuple[tuple[str, str], ...],
    registers: int = MOST_REGISTERS,
) -> KernelPlan:
    arch = arch_row(variant.arch)
    splits = variant.body == SPLIT
    (fields, smem_bytes), (params, params_bytes) = smem, lay_out_params(SPLIT_PARAMS if splits else PARAMS)
    all_values = {
        "smem_bytes": smem_bytes,
        "smem_optin_bytes": arch.smem_optin_bytes,
        "threads": g.threads,
        "registers_cap": registers,
        "registers_per_sm": arch.registers_per_sm,
        "digit_bits": g.digit_bits,
        "key_bits": g.key_bits,
        "vector_scores": g.vector_scores,
        "in_flight": g.in_flight,
        "bitmap_words": g.bitmap_words,
        "elements": g.elements,
        "sampled": g.sampled,
        "at_once": g.at_once,
        "bins": 1 << g.digit_bits,
        "search_threads": g.search_threads,
        **values,
    }
    check(guards, all_values, variant.slug)
    return KernelPlan(
        variant=variant,
        constants=(
            ("kThreads", g.threads),
            ("kDigitBits", g.digit_bits),
            ("kInFlight", g.in_flight),
            ("kElements", g.elements),
            ("kBitmapWords", g.bitmap_words),
            ("kRivals", g.rivals),
            ("kSampled", g.sampled),
            ("kAtOnce", g.at_once),
            ("kGuessShift", g.guess_shift),
            *constants,
        ),
        types=(TypeAlias("Score", SCORE_CPP[g.score], "topk/score.cuh"), *types),
        threads=g.threads,
        min_blocks_per_sm=arch.registers_per_sm // (g.threads * registers),
        registers_cap=registers,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid=_GRIDS.get(variant.body, "rows"),
        overlaps_previous=variant.kernel == SELECT and arch.has_pdl,
        guards=checked(guards, all_values, _C_NAMES),
        budget=(
            *budget,
            ("shared memory", f"{smem_bytes} of {arch.smem_optin_bytes} B"),
            ("registers", f"{registers} a thread"),
        ),
    )
