"""The shapes that are tuned for, and the choices that are tried for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dsagen.bench.cases import KV_TOKENS, PAGE_SIZE, decode_cases, decode_widths
from dsagen.bench.data import DecodeCase
from dsagen.errors import SpecError
from dsagen.families.sparse_decode.choice import judge_choice
from dsagen.families.sparse_decode.op import DecodeShape, can_join, split_load, tiles_of
from dsagen.families.sparse_decode.schedule import split_cost_us
from dsagen.plan import KernelPlan
from dsagen.spec import DeploymentSpec

# Query tokens that are tuned for by default: what a decode step of a serving engine has.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Split counts whose CTAs take more rounds over the device than this are not tried.
MOST_ROUNDS = 2
_SHAPE = re.compile(r"(\d{1,9})(?:x(\d{1,9}))?(?::(\d{1,9})(?:\+(\d{1,9}))?)?", re.ASCII)


@dataclass(frozen=True)
class Choice:
    """A main kernel, how many splits, and launches of a call."""

    slug: str
    num_splits: int
    launches: int


def tuned_cases(spec: DeploymentSpec, shapes: str | None = None) -> list[DecodeCase]:
    """The cases of a spec, by widths and then by query tokens.

    `shapes` is such as "1,16:2048,4x2:128+512": batch, x query tokens, : columns, + columns of the second cache. By
    default those of BATCHES with the columns that `dsagen bench` measures. SpecError for what is no shape, for one that
    the spec does not take, and for a spec whose calls are not measured or that takes nothing from tables.
    """
    if "sparse_decode" not in spec.ops:
        raise SpecError(f"{spec.name}: tune is for sparse_decode, and its ops are {', '.join(spec.ops)}: leave it out")
    if spec.determinism == "batch_invariant":
        raise SpecError(
            f"{spec.name}: determinism batch_invariant: neither kernel nor splits may depend on the batch, so no table "
            "is read: leave it out"
        )
    decode_cases(spec)  # which refuses specs whose inputs it does not draw
    widths = decode_widths(spec)
    if shapes is None:
        wanted = [(batch, 1, *width) for width in widths for batch in BATCHES]
    else:
        wanted = [shape for part in shapes.split(",") for shape in _parse(spec, part.strip(), widths)]
    cases = [
        DecodeCase(
            kv_format=spec.kv.format_id,
            heads=spec.heads,
            batch=batch,
            s_q=s_q,
            topk=topk,
            kv_tokens=max(KV_TOKENS, topk, extra),
            page_size=PAGE_SIZE,
            extra_format=spec.extra_kv.format_id if extra and spec.extra_kv else None,
            extra_topk=extra or None,
        )
        for batch, s_q, topk, extra in wanted
    ]
    # A row of a table speaks of query tokens, so one case of equally many is enough.
    unique = {(case.topk, case.extra_topk or 0, case.queries): case for case in reversed(cases)}
    return [unique[key] for key in sorted(unique)]


def _parse(spec: DeploymentSpec, text: str, widths: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise SpecError(f"--shapes: {text!r} is no shape: expected BATCH[xS_Q][:TOPK[+EXTRA_TOPK]], such as 16x2:2048")
    batch, s_q = int(found[1]), int(found[2] or 1)
    columns = [(int(found[3]), int(found[4] or 0))] if found[3] else list(widths)
    for name, value, least, most in (
        ("batch", batch, 1, (1 << 31) - 1),
        ("s_q", s_q, 1, (1 << 31) - 1),
        *(("topk", topk, 1, spec.topk) for topk, _ in columns),
        *(("extra_topk", extra, 0, spec.extra_topk) for _, extra in columns),
    ):
        if not least <= value <= most:
            raise SpecError(f"--shapes: {text!r}: {name} {value} is outside {least}..{most} for {spec.name}")
    return [(batch, s_q, *width) for width in columns]


def shape_of(case: DecodeCase) -> DecodeShape:
    """The run-time shape of a case."""
    return DecodeShape(case.batch, case.s_q, case.heads, case.topk, case.extra_topk or 0)


def choices(shape: DecodeShape, plans: Sequence[KernelPlan], sm_count: int) -> list[Choice]:
    """What is tried for a shape: every kernel with each split count that may pay, those first that the cost model finds
    cheapest, in two launches and, where a kernel can do that, in one. The first is what is taken without a table.
    """
    ranked: list[tuple[int, int, int, Choice]] = []
    for place, plan in enumerate(plans):
        for rank, splits in enumerate(_split_counts(shape, plan, sm_count)):
            for launches in (2, 1) if splits > 1 and can_join(plan, shape) else (2 if splits > 1 else 1,):
                judged = judge_choice(plan, shape, (shape.topk, shape.extra_topk), sm_count, (splits, launches))
                if not judged.refusals:
                    ranked.append((rank, place, -launches, Choice(plan.slug, splits, launches)))
    return [choice for *_, choice in sorted(ranked, key=lambda row: row[:3])]


def _split_counts(shape: DecodeShape, plan: KernelPlan, sm_count: int) -> list[int]:
    """The smallest count for each length of the longest split, cheapest first, without those of too many rounds."""
    tiles = sum(tiles_of(shape, plan))
    groups = judge_choice(plan, shape, (shape.topk, shape.extra_topk), sm_count, (1, 1)).partition
    load = split_load(shape, plan, sm_count, tiles, groups.head_groups)
    counts = sorted({-(-tiles // length) for length in range(1, tiles + 1)})
    most = MOST_ROUNDS * load.resident_ctas * sm_count
    kept = [count for count in counts if count == 1 or load.units * count <= most]
    return sorted(kept, key=lambda count: split_cost_us(load, count))
