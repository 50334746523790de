"""Launch arithmetic of top-k: which kernels take a call, with how many blocks, and a text that shows it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsagen.families.topk.family import CLUSTER, COUNT, RESIDENT, SELECT, STREAM
from dsagen.families.topk.geometry import CLUSTER_SIZES, SCORE_TYPES, VECTOR_BYTES, WORD_BYTES
from dsagen.families.topk.guards import (
    CAPACITY_GUARD,
    CLUSTER_GUARD,
    FIT_GUARD,
    LAUNCH_GUARDS,
    PARTS_GUARD,
    ROWS_GUARD,
    WIDTH_GUARD,
)
from dsagen.guard import Guard, check
from dsagen.occupancy import assumed_at_once, resident_ctas
from dsagen.plan import KernelPlan, round_up
from dsagen.quantity import quantity

SIZE_GUARDS = (CAPACITY_GUARD, ROWS_GUARD, WIDTH_GUARD)
# Candidate blocks hold this many consecutive indices each.
CANDIDATE_BLOCK = 8
# Scores that are worth a block of their own: two vectors of 16 B for each of 1024 threads.
LEAST_PART_BYTES = 32 * 1024
WORKSPACE_ALIGNMENT_BYTES = 256
_WORD_BYTES = 4

# Clusters that a device holds at once, by their size.
Clusters = Mapping[int, int]
Plans = Mapping[str, Sequence[KernelPlan]]


@dataclass(frozen=True)
class TopkShape:
    """Run-time sizes of a call: `k` slots for each of `rows` rows of `width` scores; the spec allows `capacity` slots.

    `lead` bounds how many scores a window starts behind a multiple of 16 bytes.
    """

    rows: int
    width: int
    k: int
    capacity: int
    lead: int = 0

    @property
    def values(self) -> dict[str, int]:
        """What the guards of sizes read."""
        return {"rows": self.rows, "width": self.width, "k": self.k, "topk_capacity": self.capacity, "lead": self.lead}


@dataclass(frozen=True)
class Split:
    """How rows are shared among blocks, and the workspace for it: offsets in bytes, all of it zeros between calls."""

    parts: int
    part_slots: int
    list_stride: int
    counters_offset_bytes: int
    lists_offset_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Candidate:
    """Kernels in the order of their launches, what refuses them for a call, and the blocks of each launch.

    `why` is the guard that decides, with its verdict; empty for kernels that take every call.
    """

    plans: tuple[KernelPlan, ...]
    refused: bool
    ctas: int
    why: str = ""
    split: Split | None = None
    # CTAs of a cluster.
    cluster: int = 1

    @property
    def workspace_bytes(self) -> int:
        """Workspace of a call."""
        return 0 if self.split is None else self.split.workspace_bytes


def most_lead(score: str) -> int:
    """By how many scores a window can start behind a multiple of 16 bytes."""
    return VECTOR_BYTES * 8 // SCORE_TYPES[score].bits - 1


def assumed_clusters(sm_count: int) -> Clusters:
    """What a device with so many multiprocessors holds, where there is none to ask."""
    return {size: assumed_at_once(sm_count, size) for size in CLUSTER_SIZES}


def candidates(
    plans: Plans, shape: TopkShape, sm_count: int, clusters: Clusters | None = None, cluster: int | None = None
) -> tuple[Candidate, ...]:
    """Every way to run a call, in the order in which they are preferred. `plans` are by kernel name.

    `clusters` is what the device has, `cluster` the only size to take, before all else, or 1 for none.
    """
    clusters = assumed_clusters(sm_count) if clusters is None else clusters
    sizes = [size for size in CLUSTER_SIZES if cluster is None or size == cluster]
    together = [
        _judge_cluster(plan, shape, size, clusters[size])
        for plan in plans["main"]
        if plan.variant.body == CLUSTER
        for size in sizes
    ]
    if cluster is not None:
        return (*together, *_without_clusters(plans, shape, sm_count, []))
    return _without_clusters(plans, shape, sm_count, together)


def _without_clusters(
    plans: Plans, shape: TopkShape, sm_count: int, together: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """All other ways, with those by clusters where blocks that share a row are preferred."""
    fewest_threads_first = sorted(plans["main"], key=lambda plan: plan.threads)
    held = [_judge_resident(plan, shape, sm_count) for plan in fewest_threads_first if plan.variant.body == RESIDENT]
    swept = [Candidate((plan,), False, shape.rows) for plan in fewest_threads_first if plan.variant.body == STREAM]
    split = _judge_split(plans[COUNT][0], plans[SELECT][0], shape, sm_count)
    # An SM that has one row is faster with more threads, one that has several with more blocks, which wait in turn.
    if shape.rows <= sm_count:
        return (*reversed(held), *together, split, *reversed(swept))
    several = [found for found in held if resident_ctas(found.plans[0]) > 1]
    return (*several, *swept, *(found for found in held if found not in several), split, *together)


def choose(
    plans: Plans, shape: TopkShape, sm_count: int, clusters: Clusters | None = None, cluster: int | None = None
) -> Candidate:
    """The first of the `candidates` that fits; GuardError for sizes that none takes."""
    check(SIZE_GUARDS, shape.values)
    judged = candidates(plans, shape, sm_count, clusters, cluster)
    return next(found for found in judged if not found.refused)


def explain_call(
    plans: Plans,
    shape: TopkShape,
    sm_count: int,
    clusters: Clusters | None = None,
    cluster: int | None = None,
    launched: Sequence[KernelPlan] | None = None,
) -> str:
    """Which of the `candidates` a call takes and what is checked, for people.

    `launched` are forms of the choice's kernels that a step's plan has in their place.
    """
    values = shape.values
    lines = [f"shape: {quantity(shape.rows, 'row')} of {quantity(shape.width, 'score')}, k {shape.k}", "sizes:"]
    lines += [f"  {_verdict(guard, values)}" for guard in SIZE_GUARDS]
    lines.append("candidates:")
    judged = candidates(plans, shape, sm_count, clusters, cluster)
    for found in judged:
        verdict = "refused" if found.refused else f"fits, {found.ctas} CTAs"
        size = f" in clusters of {found.cluster}" if found.cluster > 1 else ""
        lines += [f"  {_slugs(found)}{size}: {verdict}", *([f"    {found.why}"] if found.why else [])]
    deciding = (*SIZE_GUARDS, FIT_GUARD, PARTS_GUARD, CLUSTER_GUARD)
    of_call = [guard for guard in LAUNCH_GUARDS if guard not in deciding]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in of_call)]
    if not all(guard.holds(values) for guard in SIZE_GUARDS):
        return "\n".join([*lines, "chosen: none"])
    chosen = next(found for found in judged if not found.refused)
    shared = chosen.split.parts if chosen.split else chosen.cluster
    parts = f", {shared} a row" if shared > 1 else ""
    grid = f"grid: {chosen.ctas} CTAs{parts}"
    names = " + ".join(plan.slug for plan in launched or chosen.plans)
    lead = most_lead(str(chosen.plans[0].variant.axis("score")))
    planned = choose(plans, replace(shape, lead=lead), sm_count, clusters, cluster).workspace_bytes
    anywhere = f" (a plan has {planned} B, for rows that do not start at multiples of {VECTOR_BYTES} B)"
    workspace = f"workspace: {chosen.workspace_bytes} B{anywhere if planned != chosen.workspace_bytes else ''}"
    return "\n".join([*lines, f"chosen: {names}", grid, workspace])


def _slugs(found: Candidate) -> str:
    return " + ".join(plan.slug for plan in found.plans)


def _held_scores(plan: KernelPlan) -> int:
    """Scores that a block of the kernel holds in shared memory."""
    bits = SCORE_TYPES[str(plan.variant.axis("score"))].bits
    return plan.threads * plan.constant("kWords") * WORD_BYTES * 8 // bits


def _judge_resident(plan: KernelPlan, shape: TopkShape, sm_count: int) -> Candidate:
    values = {**shape.values, "row_scores": _held_scores(plan)}
    ctas = min(shape.rows, sm_count * resident_ctas(plan))
    return Candidate((plan,), not FIT_GUARD.holds(values), ctas, _verdict(FIT_GUARD, values))


def _judge_cluster(plan: KernelPlan, shape: TopkShape, cluster: int, clusters: int) -> Candidate:
    vector_scores = most_lead(str(plan.variant.axis("score"))) + 1
    vectors = -(-(shape.width + shape.lead) // vector_scores)
    part = {"part_scores": -(-vectors // cluster) * vector_scores, "row_scores": _held_scores(plan)}
    values = {**shape.values, **part, "cluster": cluster, "clusters": clusters}
    refused, ctas = not CLUSTER_GUARD.holds(values), shape.rows * cluster
    return Candidate((plan,), refused, ctas, _verdict(CLUSTER_GUARD, values), cluster=cluster)


def _judge_split(count: KernelPlan, select: KernelPlan, shape: TopkShape, sm_count: int) -> Candidate:
    row_bytes = shape.width * SCORE_TYPES[str(count.variant.axis("score"))].bits // 8
    parts = min(sm_count // max(shape.rows, 1), row_bytes // LEAST_PART_BYTES)
    values = {**shape.values, "parts": parts, "sm_count": sm_count, "row_bytes": row_bytes}
    why = _verdict(PARTS_GUARD, values)
    if not PARTS_GUARD.holds(values):
        return Candidate((count, select), True, 0, why)
    slots = round_up(shape.k, 4)
    stride = max(round_up(select.constant("kElements"), 4), parts * slots)
    counters = round_up(shape.rows * _WORD_BYTES << select.constant("kDigitBits"), WORKSPACE_ALIGNMENT_BYTES)
    lists = round_up(counters + shape.rows * 2 * _WORD_BYTES, WORKSPACE_ALIGNMENT_BYTES)
    split = Split(parts, slots, stride, counters, lists, lists + shape.rows * stride * _WORD_BYTES)
    return Candidate((count, select), False, shape.rows * parts, why, split)


def _verdict(guard: Guard, values: dict[str, int]) -> str:
    read = "  ".join(f"{name}={values[name]}" for name in guard.names)
    verdict = "holds" if guard.holds(values) else f"refuses: {guard.message.format(**values)}"
    return f"[{guard.guard_id}] {guard.expression}  {read}  {verdict}"
