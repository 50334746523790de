"""The top-k family: its cells, its plans, what makes a geometry, and which kernels take a call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsagen.arch import ARCHS
from dsagen.arch import arch as arch_row
from dsagen.errors import GuardError
from dsagen.families.topk.family import (
    CLUSTER,
    COUNT,
    FAMILY,
    RESIDENT,
    SELECT,
    SPLIT,
    STREAM,
    cluster_variant,
    plan_cluster,
    plan_resident,
    plan_split,
    plan_stream,
    resident_variant,
    split_variants,
    stream_variant,
)
from dsagen.families.topk.geometry import (
    MOST_THREADS,
    RESIDENT_SHAPES,
    SCORE_TYPES,
    STREAM_THREADS,
    Geometry,
    cluster_geometry,
    resident_geometry,
)
from dsagen.families.topk.guards import CLUSTER_GUARDS, PLAN_GUARDS, RESIDENT_GUARDS, SELECT_GUARDS
from dsagen.families.topk.op import (
    LEAST_PART_BYTES,
    WORKSPACE_ALIGNMENT_BYTES,
    Candidate,
    Plans,
    TopkShape,
    candidates,
    choose,
    explain_call,
    most_lead,
)
from dsagen.family import family_of_op
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas
from dsagen.plan import KernelPlan, Variant
from dsagen.render import render
from dsagen.spec import load_spec

SPEC = {"model": "v32", "heads": 16, "archs": list(ARCHS), "ops": ["topk"]}
SMS = 132
H200 = arch_row("sm_90a")
BYTES = {score: element.bits // 8 for score, element in SCORE_TYPES.items()}


def variants(score: str, arch: str) -> list[Variant]:
    row = arch_row(arch)
    held = [resident_variant(score, row, threads) for threads, *_ in RESIDENT_SHAPES[row.smem_class]]
    swept = [stream_variant(score, row, threads) for threads in STREAM_THREADS]
    clusters = [cluster_variant(score, row)] if row.has_clusters else []
    return [*held, *swept, *split_variants(score, row), *clusters]


def plans(score: str = "fp32", arch: str = "sm_90a") -> dict[str, tuple[KernelPlan, ...]]:
    found: dict[str, tuple[KernelPlan, ...]] = {}
    for variant in variants(score, arch):
        found[variant.kernel] = (*found.get(variant.kernel, ()), FAMILY.plan(variant))
    return found


def chosen(by_role: Plans, rows: int, width: int, k: int = 2048, lead: int = 0) -> Candidate:
    return choose(by_role, TopkShape(rows, width, k, 4096, lead), SMS)


def bodies(found: Candidate) -> list[str]:
    return [plan.variant.body for plan in found.plans]


# ---- cells and plans


@pytest.mark.parametrize("score", SCORE_TYPES)
def test_the_kernels_of_each_arch(score: str) -> None:
    matrix = expand(load_spec({**SPEC, "scores": score}))
    matrix.require_complete()
    assert [cell.variant for cell in matrix.cells] == [variant for arch in ARCHS for variant in variants(score, arch)]
    assert [(cell.arch, cell.role) for cell in matrix.cells] == [
        (arch, variant.kernel) for arch in ARCHS for variant in variants(score, arch)
    ]
    assert len({plan.slug for plan in matrix.plans()}) == len(matrix.plans())


def test_a_spec_may_have_both_ops_and_their_kernels_stay_apart() -> None:
    matrix = expand(load_spec({**SPEC, "ops": ["topk", "sparse_decode"], "archs": ["sm_90a"]}))
    assert [(cell.op, cell.role) for cell in matrix.cells] == [
        *(("topk", role) for role in ("main", "main", "main", "main", COUNT, SELECT, "main")),
        ("sparse_decode", "main"),
        ("sparse_decode", "combine"),
    ]
    assert family_of_op("topk") is FAMILY


def test_heads_and_capacity_need_no_kernel_of_their_own() -> None:
    found = {expand(load_spec({**SPEC, "heads": h, "topk": k})).plans() for h in (8, 128) for k in (1, 4096)}
    assert len(found) == 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("score", SCORE_TYPES)
def test_a_row_lies_in_shared_memory_with_its_bits(score: str, arch: str) -> None:
    row = arch_row(arch)
    for threads, words, in_flight, elements in RESIDENT_SHAPES[row.smem_class]:
        plan = FAMILY.plan(resident_variant(score, row, threads))
        fields = {field.name: field.extents for field in plan.smem}
        scores = threads * words * 4 // BYTES[score]
        assert fields["words"] == (threads * words,) and fields["keys"] == fields["indices"] == (elements,)
        # A bit for each score that the block holds, so that one window has them all.
        assert fields["bitmap"][0] * 32 >= scores
        # bf16 has twice the scores in 16 bytes, and a bit for each in flight.
        assert plan.constant("kInFlight") == in_flight and in_flight * (16 // BYTES[score]) <= 32
        assert plan.grid == "rows" and not plan.overlaps_previous
        bulk = any(alias.header == "topk/row_copy_bulk.cuh" for alias in plan.types)
        assert bulk == row.has_bulk_copy != any(alias.header == "topk/row_copy_async.cuh" for alias in plan.types)


@pytest.mark.parametrize("arch", ARCHS)
def test_shapes_that_hold_a_row_are_smallest_first_and_as_large_as_the_device_allows(arch: str) -> None:
    row = arch_row(arch)
    held = [FAMILY.plan(resident_variant("fp32", row, threads)) for threads, *_ in RESIDENT_SHAPES[row.smem_class]]
    assert [plan.smem_bytes for plan in held] == sorted(plan.smem_bytes for plan in held)
    g = resident_geometry("fp32", row.smem_class, held[-1].threads)
    with pytest.raises(GuardError, match=r"^\[(K-01|TK-13)\]"):
        # One batch more is refused: by the device, or as a third batch.
        plan_resident(held[-1].variant, replace(g, words=g.words + 4 * g.in_flight, bitmap_words=2 * g.bitmap_words))


@pytest.mark.parametrize("arch", ARCHS)
def test_only_the_second_kernel_of_shared_rows_starts_beside_its_predecessor(arch: str) -> None:
    by_role = plans(arch=arch)
    overlapping = [plan.variant.kernel for role in by_role.values() for plan in role if plan.overlaps_previous]
    assert overlapping == ([SELECT] if arch_row(arch).has_pdl else [])
    assert {plan.grid for role in (COUNT, SELECT) for plan in by_role[role]} == {"rows * parts"}
    names = [field.name for field in by_role[COUNT][0].params]
    assert {"parts", "part_slots", "histograms", "counters", "lists", "list_stride"} == set(names) - {
        field.name for field in by_role["main"][0].params
    }


HELD = resident_geometry("fp32", 227, MOST_THREADS)
SWEPT = Geometry("fp32", MOST_THREADS)


@pytest.mark.parametrize(
    ("geometry", "guard_id"),
    [
        (replace(SWEPT, elements=60000), "K-01"),
        (replace(SWEPT, threads=2048), "K-02"),
        (replace(SWEPT, threads=48, bitmap_words=48), "TK-01"),
        (replace(SWEPT, digit_bits=13), "TK-02"),
        (replace(SWEPT, score="bf16", in_flight=5), "TK-10"),
        (replace(SWEPT, in_flight=0), "TK-10"),
        (replace(SWEPT, bitmap_words=4095), "TK-11"),
        (replace(SWEPT, elements=0), "TK-12"),
        (replace(SWEPT, threads=128, elements=4097), "TK-12"),
        (replace(SWEPT, digit_bits=9), "TK-19"),
        (replace(SWEPT, sampled=0), "TK-18"),
        (replace(SWEPT, sampled=256, elements=4096), "TK-18"),
    ],
)
def test_a_plan_that_breaks_a_limit_is_refused_with_the_slug(geometry: Geometry, guard_id: str) -> None:
    for variant, plan in (
        (stream_variant(geometry.score, H200, geometry.threads), plan_stream),
        *((variant, plan_split) for variant in split_variants(geometry.score, H200)),
    ):
        with pytest.raises(GuardError) as raised:
            plan(variant, geometry)
        assert str(raised.value).startswith(f"[{guard_id}] ")
        assert str(raised.value).endswith(f" ({variant.slug})")


@pytest.mark.parametrize(
    ("change", "guard_id"),
    [
        ({"words": 24}, "TK-13"),
        ({"words": 0}, "TK-13"),
        ({"words": 48, "in_flight": 2}, "TK-13"),
        ({"in_flight": 9}, "TK-10"),
        ({"threads": 256, "score": "bf16", "bitmap_words": 256}, "TK-15"),
        ({"threads": 512, "bitmap_words": 768}, "TK-11"),
        ({"elements": 12000}, "K-01"),
    ],
)
def test_a_row_that_does_not_fit_its_block_is_refused(change: dict[str, int | str], guard_id: str) -> None:
    score = str(change.get("score", "fp32"))
    variant = resident_variant(score, H200, MOST_THREADS)
    with pytest.raises(GuardError) as raised:
        plan_resident(variant, replace(HELD, **{"elements": 64, **change}))  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"[{guard_id}] ")
    assert str(raised.value).endswith(f" ({variant.slug})")


@pytest.mark.parametrize(
    ("change", "guard_id"),
    [
        ({"words": 24}, "TK-24"),
        ({"words": 0}, "TK-24"),
        ({"threads": 128, "elements": 4096}, "TK-24"),
        ({"at_once": 17}, "TK-25"),
        ({"threads": 1024, "words": 32, "at_once": 4}, "TK-26"),
        ({"elements": 12000}, "K-01"),
    ],
)
def test_a_part_that_does_not_fit_its_block_is_refused(change: dict[str, int], guard_id: str) -> None:
    variant = cluster_variant("fp32", H200)
    with pytest.raises(GuardError) as raised:
        plan_cluster(variant, replace(cluster_geometry("fp32", 227), **change))  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"[{guard_id}] ")
    assert str(raised.value).endswith(f" ({variant.slug})")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("score", SCORE_TYPES)
def test_every_plan_guard_is_asserted_in_the_unit(score: str, arch: str) -> None:
    assert [g.guard_id for g in PLAN_GUARDS] == [g.guard_id for g in FAMILY.guards if g.when == "plan"]
    for variant in variants(score, arch):
        plan = FAMILY.plan(variant)
        text = render(plan).text
        guards = {RESIDENT: RESIDENT_GUARDS, CLUSTER: CLUSTER_GUARDS}.get(variant.body, SELECT_GUARDS)
        assert [guard.guard_id for guard in plan.guards] == [guard.guard_id for guard in guards]
        for guard in plan.guards:
            assert f'static_assert({guard.c_expression}, "[{guard.guard_id}] {guard.expression}");' in text


# ---- which kernels take a call


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("score", SCORE_TYPES)
def test_of_many_rows_an_sm_has_several(score: str, arch: str) -> None:
    by_role = plans(score, arch)
    word, lead = 4 // BYTES[score], most_lead(score)
    swept = min((plan for plan in by_role["main"] if plan.variant.body == STREAM), key=lambda plan: plan.threads)
    longest = 0
    for plan in by_role["main"]:
        if plan.variant.body != RESIDENT or resident_ctas(plan) == 1:
            continue
        scores = plan.threads * plan.constant("kWords") * word
        for width in (longest + 1, scores):
            found = chosen(by_role, 1000, width)
            assert found.plans == (plan,) and found.workspace_bytes == 0
            assert found.ctas == min(1000, SMS * resident_ctas(plan))
        # A window that starts anywhere needs the room in front of it too.
        assert chosen(by_role, 1000, scores - lead, lead=lead).plans == (plan,)
        assert chosen(by_role, 1000, scores - lead + 1, lead=lead).plans == (swept,)
        longest = scores
    found = chosen(by_role, 1000, longest + 1)
    assert found.plans == (swept,) and found.ctas == 1000 and found.split is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("score", SCORE_TYPES)
def test_of_few_rows_an_sm_has_one(score: str, arch: str) -> None:
    by_role = plans(score, arch)
    held = [plan for plan in by_role["main"] if plan.variant.body == RESIDENT][-1]
    scores = held.threads * held.constant("kWords") * (4 // BYTES[score])
    for rows in (SMS // 2, SMS):
        assert chosen(by_role, rows, scores).plans == (held,)
        (swept,) = chosen(by_role, rows, scores + 1).plans
        assert swept.variant.body == STREAM and swept.threads == MOST_THREADS


@pytest.mark.parametrize(("rows", "threads"), [(1, 1024), (SMS, 1024), (SMS + 1, 256)])
def test_an_sm_with_one_row_gets_the_larger_block(rows: int, threads: int) -> None:
    assert [plan.threads for plan in chosen(plans(), rows, 4096).plans] == [threads]


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_take_no_more_blocks_than_rows(rows: int) -> None:
    found = chosen(plans(), rows, 4096)
    assert (bodies(found), found.ctas) == ([RESIDENT], rows)


@pytest.mark.parametrize(
    ("rows", "width", "cluster"),
    [
        (1, 32769, 8),
        (15, 128 << 10, 8),
        (16, 128 << 10, 4),
        (32, 128 << 10, 4),
        (33, 128 << 10, 1),  # by two CTAs there is no room
        (33, 64 << 10, 2),
        (65, 64 << 10, 2),
        (66, 64 << 10, 1),
        (1, 256 << 10, 8),
        (1, (256 << 10) + 1, 1),
    ],
)
def test_few_long_rows_are_held_by_clusters(rows: int, width: int, cluster: int) -> None:
    found = chosen(plans(), rows, width)
    assert found.cluster == cluster
    if cluster > 1:
        assert (bodies(found), found.ctas, found.workspace_bytes) == ([CLUSTER], rows * cluster, 0)


def test_clusters_are_those_that_the_device_has_at_once_and_that_are_asked_for() -> None:
    by_role, shape = plans(), TopkShape(4, 128 << 10, 2048, 2048)
    few = {8: 3, 4: 4, 2: 66}
    assert choose(by_role, shape, SMS, few).cluster == 4
    assert bodies(choose(by_role, shape, SMS, {8: 3, 4: 3, 2: 66})) == [SPLIT, SPLIT]
    assert bodies(choose(by_role, shape, SMS, cluster=1)) == [SPLIT, SPLIT]
    assert choose(by_role, shape, SMS, cluster=4).cluster == 4
    # One that is asked for comes before a CTA that holds the row by itself.
    short = replace(shape, width=8192)
    assert bodies(choose(by_role, short, SMS)) == [RESIDENT]
    for size in (2, 4, 8):
        found = choose(by_role, short, SMS, cluster=size)
        assert (bodies(found), found.cluster) == ([CLUSTER], size)
    lead = TopkShape(1, 256 << 10, 2048, 2048, lead=1)
    assert bodies(choose(by_role, lead, SMS)) == [SPLIT, SPLIT]
    text = explain_call(by_role, shape, SMS, few)
    assert (
        "in clusters of 8: refused\n    [TK-23] rows <= clusters and part_scores <= row_scores  "
        "rows=4  clusters=3  part_scores=16384  row_scores=32768  refuses: a cluster of 8 CTAs for each row, 4 in "
        "all: the device holds 3 at once, and a CTA 32768 scores of the 16384 that are its part\n" in text
    )
    assert text.endswith(
        f"chosen: {by_role['main'][-1].slug}\ngrid: 16 CTAs, 4 a row\n"
        "workspace: 0 B (a plan has 557312 B, for rows that do not start at multiples of 16 B)"
    )


@pytest.mark.parametrize(
    ("rows", "width", "parts"),
    [
        (1, 128 << 10, 16),  # by the row's bytes
        (1, 4 << 20, 132),  # by the SMs
        (16, 128 << 10, 8),
        (44, 128 << 10, 3),
        (45, 128 << 10, 1),
        (128, 128 << 10, 1),
    ],
)
def test_few_long_rows_are_shared_among_blocks(rows: int, width: int, parts: int) -> None:
    by_role = plans()
    found = choose(by_role, TopkShape(rows, width, 2048, 4096), SMS, cluster=1)
    if parts == 1:
        assert (bodies(found), found.split, found.workspace_bytes) == ([STREAM], None, 0)
        return
    assert [plan.variant.kernel for plan in found.plans] == [COUNT, SELECT]
    assert found.split is not None and (found.split.parts, found.ctas) == (parts, rows * parts)


@pytest.mark.parametrize("score", SCORE_TYPES)
@pytest.mark.parametrize("k", [1, 5, 2048, 4096])
def test_the_workspace_holds_histograms_counters_and_lists(score: str, k: int) -> None:
    by_role, rows, width = plans(score), 7, 1_000_000
    found = chosen(by_role, rows, width, k)
    split = found.split
    assert split is not None
    assert split.parts == min(SMS // rows, width * BYTES[score] // LEAST_PART_BYTES)
    select = by_role[SELECT][0]
    bins = 1 << select.constant("kDigitBits")
    # Part's places are read four at a time, and the list serves both ways.
    assert split.part_slots % 4 == 0 and k <= split.part_slots < k + 4
    assert split.list_stride % 4 == 0
    assert split.list_stride >= max(select.constant("kElements"), split.parts * split.part_slots)
    assert split.counters_offset_bytes >= rows * bins * 4
    assert split.lists_offset_bytes >= split.counters_offset_bytes + rows * 2 * 4
    assert split.workspace_bytes == found.workspace_bytes == split.lists_offset_bytes + rows * split.list_stride * 4
    for offset in (split.counters_offset_bytes, split.lists_offset_bytes):
        assert offset % WORKSPACE_ALIGNMENT_BYTES == 0


@pytest.mark.parametrize(
    ("shape", "guard_id"),
    [
        (TopkShape(1, 100, 0, 64), "TK-04"),
        (TopkShape(1, 100, 65, 64), "TK-04"),
        (TopkShape(2**31, 100, 64, 64), "TK-05"),
        (TopkShape(1, 2**31, 64, 64), "TK-06"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(shape: TopkShape, guard_id: str) -> None:
    with pytest.raises(GuardError, match=rf"^\[{guard_id}\] "):
        choose(plans(), shape, SMS)
    text = explain_call(plans(), shape, SMS)
    assert f"[{guard_id}] " in text and text.endswith("chosen: none")


def test_every_way_of_a_call_is_explained_with_the_guard_that_decides() -> None:
    by_role = plans()
    shape = TopkShape(4, 128 << 10, 2048, 2048)
    judged = candidates(by_role, shape, SMS)
    ways = [[RESIDENT], [RESIDENT], [CLUSTER], [CLUSTER], [CLUSTER], [SPLIT, SPLIT], [STREAM], [STREAM]]
    assert [bodies(found) for found in judged] == ways
    assert [found.refused for found in judged] == [True, True, False, False, True, False, False, False]
    text = explain_call(by_role, shape, SMS, cluster=1)
    assert text.startswith("shape: 4 rows of 131072 scores, k 2048\nsizes:\n  [TK-04] ")
    large = by_role["main"][1].slug
    assert f"  {large}: refused\n    [TK-14] width + lead <= row_scores  " in text
    assert "refuses: rows of 131072 scores, up to 0 behind a multiple of 16 bytes: this kernel holds 32768\n" in text
    assert "[TK-16] 3 <= parts  parts=16  holds" in text
    split = judged[5].split
    assert split is not None
    count, select = by_role[COUNT][0].slug, by_role[SELECT][0].slug
    assert text.endswith(f"chosen: {count} + {select}\ngrid: 64 CTAs, 16 a row\nworkspace: {split.workspace_bytes} B")
