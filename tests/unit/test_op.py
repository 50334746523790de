"""Launch arithmetic of sparse decode: every part of the work exactly once, splits, workspace, page division."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.choice import candidates, choose, explain_choice
from dsagen.families.sparse_decode.op import DecodeShape, partition
from dsagen.families.sparse_decode.schedule import SplitLoad, choose_splits, split_cost_us
from dsagen.family import family_of_op
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas
from dsagen.spec import load_spec


def main_plan(spec_name="v32_h16"):
    cell = next(c for c in expand(load_spec(spec_name)).cells if c.role == "main")
    return family_of_op("sparse_decode").plan(cell.variant)


PLAN = main_plan()
PLAN_128 = main_plan("v32_h128")


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5), s_q=st.integers(1, 3), heads=st.integers(1, 128), topk=st.integers(1, 3000), data=st.data()
)
def test_every_row_group_and_tile_is_worked_on_once(batch, s_q, heads, topk, data):
    shape = DecodeShape(batch, s_q, heads, topk)
    tiles = -(-topk // PLAN_128.constant("kTileTokens"))
    splits = data.draw(st.integers(1, tiles))
    part = partition(shape, PLAN_128, 132, "off", splits)
    seen = Counter()
    for cta in range(part.main_ctas):
        row, split, group = part.item(cta)
        seen.update((row, group, tile) for tile in part.tiles_of(split))
    assert part.num_splits == splits
    assert set(seen.values()) == {1}
    assert len(seen) == batch * s_q * part.head_groups * tiles
    assert list(part.tiles_of(0)) == list(range(0, tiles, splits))
    assert part.head_groups * part.group_heads >= heads
    assert (part.head_groups - 1) * part.group_heads < heads, "the last group is empty"
    assert part.group_heads <= PLAN_128.variant.axis_int("n")


def test_more_than_256_splits():
    tile_tokens = PLAN.constant("kTileTokens")
    part = partition(DecodeShape(1, 1, 16, 300 * tile_tokens), PLAN, 132, "off", 300)
    assert part.num_splits == 300
    assert part.main_ctas == 300
    assert {part.item(cta)[1] for cta in range(300)} == set(range(300))


def test_workspace_follows_the_partition():
    unsplit = partition(DecodeShape(3, 2, 16, 2048), PLAN, 132, "off", 1)
    assert (unsplit.workspace_bytes, unsplit.combine_ctas) == (0, 0)
    part = partition(DecodeShape(3, 2, 17, 2048), PLAN_128, 132, "off", 5)
    assert part.lse_accum_bytes == 3 * 2 * 5 * 17 * 4
    assert part.o_accum_bytes == part.lse_accum_bytes * 512
    assert part.o_accum_offset_bytes % 256 == 0
    assert 0 <= part.o_accum_offset_bytes - part.lse_accum_bytes < 256
    assert part.workspace_bytes == part.o_accum_offset_bytes + part.o_accum_bytes
    assert part.combine_ctas == 3 * 2 * 17


def test_batch_and_query_tokens_past_16_bits():
    part = partition(DecodeShape(70_000, 1, 16, 64), PLAN, 132, "off")
    assert (part.rows, part.main_ctas) == (70_000, 70_000)
    assert partition(DecodeShape(1, 70_000, 128, 64), PLAN_128, 132, "off").main_ctas == 70_000 * 2


@pytest.mark.parametrize("topk", [1, 64, 65, 130, 512, 513, 2048])
def test_batch_invariant_splits_depend_on_the_width_alone(topk):
    shapes = [(1, 1, 16), (128, 1, 16), (7, 3, 16)]
    splits = {
        partition(DecodeShape(b, s, h, topk), PLAN, sms, "batch_invariant").num_splits
        for b, s, h in shapes
        for sms in (48, 132)
    }
    assert len(splits) == 1
    assert 1 <= splits.pop() <= -(-topk // PLAN.constant("kTileTokens"))


def test_an_explicit_split_count_wins_over_the_mode():
    for mode in ("off", "batch_invariant"):
        part = partition(DecodeShape(1, 1, 16, 2048), PLAN, 132, mode, 3)
        assert (part.num_splits, part.untuned) == (3, False)


def test_the_cost_model_splits_small_batches_and_not_large_ones():
    few, many = (partition(DecodeShape(b, 1, 16, 2048), PLAN, 132, "off") for b in (1, 132 * resident_ctas(PLAN)))
    assert few.num_splits > 1
    assert many.num_splits == 1
    assert few.untuned and many.untuned
    assert partition(DecodeShape(0, 1, 16, 2048), PLAN, 132, "off").num_splits == 1


@settings(max_examples=200, deadline=None)
@given(
    units=st.integers(1, 2000),
    row_tiles=st.integers(1, 200),
    tile_us=st.floats(0.1, 10),
    sms=st.integers(1, 200),
    resident=st.integers(1, 4),
)
def test_no_split_count_is_cheaper_than_the_chosen_one(units, row_tiles, tile_us, sms, resident):
    load = SplitLoad(units, row_tiles, tile_us, sms, resident, partial_bytes=units * 32768)
    chosen = choose_splits(load)
    assert 1 <= chosen <= row_tiles
    cost = split_cost_us(load, chosen)
    assert all(cost <= split_cost_us(load, n) * (1 + 1e-9) for n in range(1, row_tiles + 1))


PAGE_SIZES = [1, 2, 3, 48, 61, 64, 69, 256, 576, (1 << 30) - 1, 1 << 30]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_division_is_exact(page_size):
    multiplier, shift = page_divisor(page_size)
    draw = random.Random(page_size)
    last = (1 << 31) - 1
    dividends = [0, 1, last - 1, last, *(draw.randrange(1 << 31) for _ in range(20_000))]
    # Wrong quotients would show next to multiples of the page size first.
    for _ in range(5_000):
        multiple = draw.randrange(last // page_size + 1) * page_size
        dividends += [n for n in (multiple - 1, multiple, multiple + 1) if 0 <= n <= last]
    assert multiplier * last < 1 << 64
    assert all(n * multiplier >> (31 + shift) == n // page_size for n in dividends)


@settings(max_examples=300, deadline=None)
@given(page_size=st.integers(1, 1 << 30), n=st.integers(0, (1 << 31) - 1))
def test_page_division_of_any_size(page_size, n):
    multiplier, shift = page_divisor(page_size)
    assert multiplier * n < 1 << 64
    assert n * multiplier >> (31 + shift) == n // page_size


@pytest.mark.parametrize(
    ("sizes", "splits", "named"),
    [
        ((-1, 1, 16, 64), None, "batch: -1"),
        ((1, True, 16, 64), None, "s_q: expected a whole number, found True"),
        ((1, 1, 16, 0), None, "topk: 0 is outside 1.."),
        ((1, 1, 16, 2.0), None, "topk: expected a whole number"),
        ((1, 1, 16, 64), 0, "num_splits: 0"),
        ((1 << 31, 1, 16, 64), None, "batch: 2147483648"),
    ],
)
def test_sizes_out_of_range_are_named(sizes, splits, named):
    with pytest.raises(GuardError, match=named.replace(".", r"\.")):
        partition(DecodeShape(*sizes), PLAN, 132, "off", splits)


def judge(batch=1, topk=2048, num_splits=None, plans=(PLAN,)):
    return candidates(plans, DecodeShape(batch, 1, 16, topk), (2048, 0), 132, "off", num_splits)


def test_choice_refuses_what_the_guards_refuse():
    assert choose(judge()).plan is PLAN
    with pytest.raises(GuardError, match=r"^\[SD-06\] topk: 4096 columns, the spec declares topk 2048"):
        choose(judge(topk=4096))
    with pytest.raises(GuardError, match=r"^\[SD-04\] num_splits 64: .*Use num_splits <= "):
        choose(judge(topk=130, num_splits=64))
    with pytest.raises(GuardError, match=r"^\[SD-08\] grid: "):
        choose(judge(batch=(1 << 31) - 1, num_splits=2))


def test_choice_lists_every_candidate_that_was_refused():
    with pytest.raises(GuardError) as caught:
        choose(judge(topk=4096, plans=(PLAN, PLAN_128)))
    text = str(caught.value)
    assert PLAN.slug in text and PLAN_128.slug in text
    assert text.count("[SD-06]") == 2


def test_explain_shows_guards_partition_and_that_it_is_untuned():
    shape = DecodeShape(1, 1, 16, 2048)
    text = explain_choice(judge(), shape)
    assert f"chosen: {PLAN.slug}" in text
    assert "[SD-04] num_splits <= all_tiles" in text
    assert "untuned" in text
    assert "workspace: " in text
    assert "untuned" not in explain_choice(judge(num_splits=2), shape)
    refused = explain_choice(judge(topk=4096), shape)
    assert "chosen: none" in refused and "raise `topk` in the spec" in refused
