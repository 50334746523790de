"""Faults that were planted in the CUDA text of the cache ops, each of which is named.

They have neither a workspace nor a barrier: every warp has a token of its own.
"""

from __future__ import annotations

import re

import pytest
import torch
from cache_rows import Caches, copied, kernel, read, same_bytes, write
from planted import a_race, faulty, said

from dsagen.check.cache import allocate_cache
from dsagen.families.kv_cache.reference import read_reference, write_reference
from dsagen.kv_format import kv_format
from dsagen.kv_rule import default_rule

pytestmark = pytest.mark.compile

RECORD = kv_format("v32")
RULE = default_rule(RECORD)
PAGES, PAGE = 3, 5
FAR = 1 << 30  # bytes between pages
WRITE = {"kv": RECORD.format_id, "rule": RULE, "rows": "bf16"}
ROWS = torch.randn(7, RECORD.d_qk, generator=torch.Generator().manual_seed(1)).bfloat16()
# A token each, but for one that is skipped and one just past the pool.
SLOTS = torch.tensor([3, -1, 14, 7, 0, PAGES * PAGE, 11])


def pools() -> Caches:
    return allocate_cache(RECORD, PAGES, PAGE, "cpu")


def test_a_slot_out_of_bounds() -> None:
    wrong = faulty(kernel("write", "sm_90a", **WRITE), "if (!pages.holds(slot)) return;", "")
    caches, wanted = pools(), pools()
    inside = SLOTS.clamp(0, PAGES * PAGE - 1).unique()
    write(wrong, RECORD, caches, ROWS[: len(inside)], inside)
    write_reference(RECORD, wanted, ROWS[: len(inside)], inside, RULE)
    assert same_bytes(caches, wanted)
    message = said(lambda: write(wrong, RECORD, pools(), ROWS, SLOTS))
    assert re.search(r"write of \d+ bytes at global address \w+: \d+ bytes \w+ .*buffer", message)


def test_a_column_past_the_block_table() -> None:
    select = kernel("read", "sm_90a", kv=RECORD.format_id)
    wrong = faulty(select, "if (column >= static_cast<u32>(p.table_columns)) return kNone;", "")
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    # Eleven rows, one more than the table has tokens for.
    by_table = {"block_table": table, "row_starts": torch.tensor([0, 11], dtype=torch.int32)}
    rows = read(select, RECORD, pools(), 11, **by_table)
    assert bool((rows[10] == 0).all())
    message = said(lambda: read(wrong, RECORD, pools(), 11, **by_table))
    assert re.search(r"read of 4 bytes .* 0 bytes past the end of buffer block_table", message)


def test_rows_without_a_slot_that_are_not_zeroed() -> None:
    select = kernel("read", "sm_90a", kv=RECORD.format_id)
    wrong = faulty(select, "if (!pages.holds(slot)) return zero(out, lane);", "if (!pages.holds(slot)) return;")
    caches, every = pools(), torch.arange(PAGES * PAGE)
    write_reference(RECORD, caches, ROWS.repeat(3, 1)[: len(every)], every, RULE)
    for of, zeroed in ((select, True), (wrong, False)):
        out = torch.full((len(SLOTS), RECORD.d_qk), torch.nan, dtype=torch.bfloat16)
        read(of, RECORD, caches, len(SLOTS), SLOTS, out=out)
        assert torch.equal(out, read_reference(RECORD, caches, SLOTS)) is zeroed
        assert bool(out[[1, 5]].isnan().all()) is not zeroed


def test_a_token_that_keeps_what_an_earlier_one_left() -> None:
    """The padding behind the scales of a token is part of what is compared."""
    record = kv_format("v4")
    rule = default_rule(record)
    select = kernel("write", "sm_90a", kv=record.format_id, rule=rule, rows="bf16")
    padding = "if (lane < C::kScalePadBytes) ptx::store_global_1("
    wrong = faulty(select, padding, "if (false) ptx::store_global_1(")
    rows, slots = torch.randn(2, record.d_qk).bfloat16(), torch.tensor([4, 1])
    caches = allocate_cache(record, PAGES, PAGE, "cpu")
    wanted = copied(caches)
    write_reference(record, wanted, rows, slots, rule)
    write(wrong, record, caches, rows, slots)
    assert not same_bytes(caches, wanted)
    write(select, record, caches, rows, slots)
    assert same_bytes(caches, wanted)


def test_a_page_offset_in_32_bits() -> None:
    select = kernel("write", "sm_90a", **WRITE)
    wrong = faulty(
        select, "page * page_stride_bytes +", "static_cast<i32>(page * static_cast<u32>(page_stride_bytes)) +"
    )
    near, wanted = pools(), pools()
    write(wrong, RECORD, near, ROWS, SLOTS)
    write_reference(RECORD, wanted, ROWS, SLOTS, RULE)
    assert same_bytes(near, wanted)
    far = pools()
    write(select, RECORD, far, ROWS, SLOTS, page_stride_bytes=FAR)
    assert same_bytes(far, wanted)
    message = said(lambda: write(wrong, RECORD, pools(), ROWS, SLOTS, page_stride_bytes=FAR))
    assert re.search(r"write of \d+ bytes at global address", message)


def test_two_warps_at_one_token() -> None:
    wrong = faulty(
        kernel("write", "sm_90a", **WRITE),
        "static_cast<i64>(ptx::block_index()) * kWarps + thread / 32;",
        "static_cast<i64>(ptx::block_index()) * kWarps;",
    )
    assert a_race(said(lambda: write(wrong, RECORD, pools(), ROWS, SLOTS)), r"bytes \d+ to \d+ of buffer k_cache")
