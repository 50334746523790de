"""Faults that were planted in the CUDA text of top-k's kernels, each of which the emulator names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import topk_rows as topk
from decode import Kernel
from planted import a_race, faulty, said
from topk_rows import Call, Scores, make_call, problem

from dsagen.arch import arch as arch_row
from dsagen.families.topk.family import COUNT, SELECT, split_variants

pytestmark = pytest.mark.compile

ARCH, SCORE = "sm_90a", "fp32"
CALL = make_call(Scores(topk.normal), SCORE)
FAR = 1 << 29  # elements between rows, 2 GiB


def shared(role: str) -> Kernel:
    """One of the two kernels for rows that several blocks share."""
    return next(topk.compiled(v) for v in split_variants(SCORE, arch_row(ARCH)) if v.kernel == role)


def of_parts(call: Call, select: Kernel) -> str:
    return problem(call, select, count=shared(COUNT))


def test_a_column_past_the_page_table() -> None:
    # Rows have elements on 148 pages, and tables of 20.
    call = replace(CALL, table=CALL.table[:, :20].contiguous())
    kernel = topk.kernel(SCORE, ARCH)
    assert problem(call, kernel) == ""
    wrong = faulty(kernel, "if (column < 0 || column >= p.table_columns) return -1;", "if (column < 0) return -1;")
    assert problem(CALL, wrong) == ""
    assert re.search(
        r"read of 4 bytes .* \d+ bytes past the end of buffer page_table", said(lambda: problem(call, wrong))
    )


def test_a_row_offset_in_32_bits() -> None:
    kernel = topk.kernel(SCORE, ARCH)
    assert problem(CALL, kernel, row_stride=FAR) == ""
    wrong = faulty(
        kernel, "static_cast<i64>(row) * p.row_stride", "static_cast<i32>(row * static_cast<u32>(p.row_stride))"
    )
    # Within 2^31 elements it is right.
    assert problem(CALL, wrong) == ""
    assert re.search(r"read of 16 bytes at global address", said(lambda: problem(CALL, wrong, row_stride=FAR)))


def test_a_barrier_that_is_missing() -> None:
    # Threads write the indices that others have put into slots.
    behind = "    for (u32 slot = thread; slot < count; slot += 2 * kThreads) {"
    wrong = faulty(topk.kernel(SCORE, ARCH), f"    ptx::block_sync();\n{behind}", behind)
    assert a_race(said(lambda: problem(CALL, wrong)), r"shared bytes \d+ to \d+")


def test_ends_of_a_row_that_are_not_stored() -> None:
    # Of a row's last 16 bytes its window has four; what lies behind is NaN, and the copy leaves them all out.
    kernel = topk.resident_kernel(SCORE, ARCH)
    assert problem(CALL, kernel) == ""
    wrong = faulty(kernel, "!row.whole(side)) row.store(side, words);", "!row.whole(side)) {}")
    assert re.search(r"read of 16 bytes at shared byte \d+, not written before", said(lambda: problem(CALL, wrong)))


@cache
def careless_select() -> Kernel:
    """It does not say how many of a part's places are taken, and leaves its counters as they are."""
    return faulty(
        shared(SELECT),
        "for (u32 i = count + thread; i < slots; i += kThreads) best.list[i] = -1;", "",
        "if (thread < 2) counters[thread] = 0;", "",
    )  # fmt: skip


def test_a_workspace_that_holds_what_an_earlier_call_left() -> None:
    # No part has as many as it may name, and all of them tie, so that no list has room for the row.
    call = make_call(Scores(topk.equal, k=4096), SCORE)
    assert of_parts(call, shared(SELECT)) == ""
    message = said(lambda: of_parts(call, careless_select()))
    assert re.search(r"of buffer lists at byte \d+, which nobody has written", message)


def test_a_workspace_that_is_not_cleared() -> None:
    assert of_parts(CALL, careless_select()) == " left in the workspace: counters"


def test_a_fence_that_is_missing() -> None:
    # The block that finishes last reads what the others have listed.
    behind = "      list.set_note(1, "
    wrong = faulty(shared(SELECT), f"      ptx::fence_device();\n{behind}", behind)
    assert a_race(said(lambda: of_parts(CALL, wrong)), r"bytes \d+ to \d+ of buffer lists")
