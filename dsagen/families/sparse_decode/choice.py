"""Choosing the kernel for a run-time shape: each candidate judged by its guards, and a text that shows how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsagen.errors import GuardError
from dsagen.families.sparse_decode.choice_table import ChoiceRow, Decision
from dsagen.families.sparse_decode.guards import ARGUMENT_GUARDS, LAUNCH_GUARDS
from dsagen.families.sparse_decode.op import (
    CLUSTER_SPLITS,
    DecodePartition,
    DecodeShape,
    Determinism,
    can_join,
    partition,
)
from dsagen.guard import Guard, check, require_int
from dsagen.plan import KernelPlan

_SHAPE_NAMES = frozenset(
    {
        "num_splits",
        "all_tiles",
        "topk",
        "topk_capacity",
        "extra_topk",
        "extra_topk_capacity",
        "main_ctas",
        "combine_ctas",
        "launches",
        "can_join",
    }
)
# Guards that a shape and a partition decide; the others read tensors.
SHAPE_GUARDS: tuple[Guard, ...] = tuple(guard for guard in LAUNCH_GUARDS if _SHAPE_NAMES.issuperset(guard.names))
TENSOR_GUARDS: tuple[Guard, ...] = tuple(guard for guard in LAUNCH_GUARDS if guard not in SHAPE_GUARDS)
# Limits of index rows, which no kernel alters. Their messages name what was given: tensors by a call, widths by a plan.
COLUMN_GUARDS: tuple[Guard, ...] = tuple(guard for guard in SHAPE_GUARDS if "topk" in guard.expression)
TENSOR_NAMES: Mapping[str, str] = {"SD-06": "indices", "SD-16": "extra_indices"}
_WIDTH_NAMES: Mapping[str, str] = {"SD-06": "topk", "SD-16": "extra_topk"}


NO_DECISION = Decision()


@dataclass(frozen=True)
class Candidate:
    """One main kernel for a shape: its partition, the values its guards read, and the messages of those that failed.

    `row` is the row of a choice table that it was made of, None for one as the cost model has it.
    """

    plan: KernelPlan
    partition: DecodePartition
    values: dict[str, int]
    refusals: tuple[str, ...]
    row: ChoiceRow | None = None


def candidates(
    plans: Sequence[KernelPlan],
    shape: DecodeShape,
    capacities: tuple[int, int],
    sm_count: int,
    determinism: Determinism,
    num_splits: int | None = None,
    decision: Decision = NO_DECISION,
    launches: int | None = None,
) -> tuple[Candidate, ...]:
    """Judge each main kernel, in the given order of preference; `capacities` are those of both caches' index rows.

    First comes what the tables decided, with the row's splits unless `num_splits` gives others. `launches` 1 asks for
    one launch where a kernel can do that for the shape, 2 forbids it, None leaves it to tables and cost model.
    GuardError for sizes with which there is nothing to judge.
    """
    if require_int("topk", shape.topk) < 1 or require_int("extra_topk", shape.extra_topk) < 0:
        check_columns((shape.topk, shape.extra_topk), capacities, _WIDTH_NAMES)
    judged, row = [], decision.row
    for plan in plans if row is not None else ():
        if row is not None and plan.slug == row.kernel:
            splits = row.num_splits if num_splits is None else num_splits
            joins = launches is None and row.launches == 1 and splits == row.num_splits
            joins |= launches == 1 and can_join(plan, shape) and splits in CLUSTER_SPLITS
            why = f"measured ({row.place})"
            given = why if num_splits is None else "given by the caller"
            part = partition(shape, plan, sm_count, determinism, splits, joins, given)
            judged.append(_judge(plan, part, shape, capacities, row))
    for plan in plans:
        part = partition(shape, plan, sm_count, determinism, num_splits, False if launches == 2 else None)
        if launches == 1 and can_join(plan, shape) and part.num_splits in CLUSTER_SPLITS:
            part = partition(shape, plan, sm_count, determinism, num_splits, True)
        judged.append(_judge(plan, part, shape, capacities))
    return tuple(judged)


def judge_choice(
    plan: KernelPlan,
    shape: DecodeShape,
    capacities: tuple[int, int],
    sm_count: int,
    choice: tuple[int, int],
) -> Candidate:
    """A kernel with given (num_splits, launches), whatever tables and cost model say."""
    part = partition(shape, plan, sm_count, "off", choice[0], choice[1] == 1, "being measured")
    return _judge(plan, part, shape, capacities)


def _judge(
    plan: KernelPlan,
    part: DecodePartition,
    shape: DecodeShape,
    capacities: tuple[int, int],
    row: ChoiceRow | None = None,
) -> Candidate:
    values = {
        "num_splits": part.num_splits,
        "tile_tokens": plan.constant("kTileTokens"),
        "all_tiles": part.row_tiles,
        "columns": shape.topk + shape.extra_topk,
        **_column_values((shape.topk, shape.extra_topk), capacities),
        "main_ctas": part.main_ctas,
        "combine_ctas": part.combine_ctas,
        "launches": 1 if part.one_launch else 2,
        "can_join": int(can_join(plan, shape)),
    }
    refusals = tuple(_refusal(guard, values) for guard in SHAPE_GUARDS if not guard.holds(values))
    return Candidate(plan, part, values, refusals, row)


def check_columns(widths: tuple[int, int], capacities: tuple[int, int], names: Mapping[str, str]) -> None:
    """Refuse index rows wider than the spec's, or empty ones; `names` gives a guard's argument by its id."""
    for guard in COLUMN_GUARDS:
        check([guard], _column_values(widths, capacities), name=names[guard.guard_id])


def first_fitting(judged: Sequence[Candidate]) -> Candidate | None:
    """The first candidate that no guard refuses, which is the one to take."""
    return next((candidate for candidate in judged if not candidate.refusals), None)


def choose(judged: Sequence[Candidate]) -> Candidate:
    """The first candidate that no guard refuses; GuardError with each one's refusal otherwise."""
    chosen = first_fitting(judged)
    if chosen is not None:
        return chosen
    if len(judged) == 1:
        raise GuardError(f"{judged[0].refusals[0]} ({judged[0].plan.slug})")
    listed = "\n  ".join(f"{candidate.refusals[0]} ({candidate.plan.slug})" for candidate in judged)
    raise GuardError(f"sparse_decode: no kernel takes this shape:\n  {listed}")


def explain_choice(
    judged: Sequence[Candidate],
    shape: DecodeShape,
    decision: Decision = NO_DECISION,
    launched: KernelPlan | None = None,
) -> str:
    """What was weighed and what came of it, for people; `launched` is the form of the choice that a step's plan has."""
    width = f"topk {shape.topk}" + (f" + {shape.extra_topk} of the second cache" if shape.extra_topk else "")
    lines = [f"shape: batch {shape.batch}, s_q {shape.s_q}, heads {shape.heads}, {width}", "candidates:"]
    for candidate in judged:
        origin = f" by {candidate.row.place}" if candidate.row is not None else ""
        lines.append(f"  {candidate.plan.slug}{origin}: {'refused' if candidate.refusals else 'fits'}")
        lines += [f"    {_guard_row(guard, candidate)}" for guard in SHAPE_GUARDS]
    if decision.row is not None:
        lines.append(f"choice table: {decision.row.place}: {decision.row.describe()}")
    lines += [f"choice table: not taken: {reason}" for reason in decision.ignored]
    of_call = (*TENSOR_GUARDS, *ARGUMENT_GUARDS)
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in of_call)]
    chosen = first_fitting(judged)
    if chosen is None:
        return "\n".join([*lines, "chosen: none"])
    part = chosen.partition
    lines += [
        f"chosen: {(launched or chosen.plan).slug}",
        f"partition: {part.head_groups} head group(s) of up to {part.group_heads} heads, {part.num_splits} split(s) of "
        f"up to {len(part.tiles_of(0))} of {part.row_tiles} tiles; {part.main_ctas} CTAs, "
        + (f"in clusters of {part.cluster} that combine" if part.one_launch else f"combine {part.combine_ctas}"),
        f"splits: {part.why}" + (" (untuned: no row of a choice table covers it)" if part.untuned else ""),
        f"workspace: {part.workspace_bytes} B",
    ]
    return "\n".join(lines)


def _guard_row(guard: Guard, candidate: Candidate) -> str:
    read = "  ".join(f"{name}={candidate.values[name]}" for name in guard.names)
    refusal = _refusal(guard, candidate.values).removeprefix(f"[{guard.guard_id}] ")
    verdict = "holds" if guard.holds(candidate.values) else f"refuses: {refusal}"
    return f"[{guard.guard_id}] {guard.expression}  {read}  {verdict}"


def _refusal(guard: Guard, values: Mapping[str, int]) -> str:
    return guard.failure({**values, "name": _WIDTH_NAMES.get(guard.guard_id, "")})


def _column_values(widths: tuple[int, int], capacities: tuple[int, int]) -> dict[str, int]:
    values = {"topk": widths[0], "topk_capacity": capacities[0]}
    return {**values, "extra_topk": widths[1], "extra_topk_capacity": capacities[1]}
