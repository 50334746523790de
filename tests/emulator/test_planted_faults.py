"""Faults that were planted in the CUDA text of sparse decode, each of which the emulator names."""

from __future__ import annotations

import re
from dataclasses import replace

import decode
import planted
import pytest
from planted import faulty

from dsagen.check.cases import DecodeCase, Lengths

pytestmark = pytest.mark.compile

CASE = DecodeCase("planted", batch=1, s_q=1, kv_tokens=640, topk=500, page_size=64, wild_ids=True)
STRIDE = 1 << 30  # ten pages in 10 GiB


def said(case: DecodeCase, splits: int = 1, **options: object) -> str:
    return planted.said(lambda: decode.run(case, "v32", 16, "sm_90a", splits, **options))  # type: ignore[arg-type]


def test_an_id_out_of_bounds() -> None:
    main = faulty(
        decode.main_kernel("v32", 16, "sm_90a"), "return id >= 0 && static_cast<u32>(id) < tokens;", "return true;"
    )
    assert re.search(r"read of 656 bytes at global address \w+: \d+ bytes \w+ .*buffer", said(CASE, main=main))


def test_a_workspace_that_holds_what_an_earlier_call_left() -> None:
    # The last split has no tiles, so that nobody writes its partial; unguarded, it is read.
    case = replace(CASE, lengths=Lengths.PER_REQUEST, topk=128)
    combine = faulty(
        decode.combine_kernel(512, "sm_90a"),
        "ptx::ballot(first_lse != -kInfinity)",
        "ptx::ballot(lane < splits)",
    )
    assert decode.problem(case, "v32", decode.run(case, "v32", 16, "sm_90a", 4)) == ""
    assert "of buffer o_accum at byte" in said(case, 4, combine=combine)


def test_rows_that_are_not_zeroed() -> None:
    main = faulty(
        decode.main_kernel("v32", 16, "sm_90a"),
        "if ((wanted & ~mask) != 0) zero_rows(rows, wanted & ~mask, lane);",
        "",
    )
    assert re.search(r"read of 16 bytes at shared byte \d+, not written before", said(CASE, main=main))


def test_a_row_offset_in_32_bits() -> None:
    kernel = decode.main_kernel("v32", 16, "sm_90a")
    assert decode.problem(CASE, "v32", decode.run(CASE, "v32", 16, "sm_90a", page_stride_bytes=STRIDE)) == ""
    main = faulty(
        kernel,
        "static_cast<i64>(index) * page_stride_bytes",
        "static_cast<i64>(static_cast<i32>(index * static_cast<u32>(page_stride_bytes)))",
    )
    # Within 2 GiB it is right.
    assert decode.problem(CASE, "v32", decode.run(CASE, "v32", 16, "sm_90a", main=main)) == ""
    assert re.search(r"read of 656 bytes at global address", said(CASE, main=main, page_stride_bytes=STRIDE))


def test_a_barrier_that_is_missing() -> None:
    # The sums of the heads are read by other warps than wrote them.
    finish = "    if (warp * 32 + lane < C::kHeads) finish_head("
    main = faulty(decode.main_kernel("v32", 16, "sm_90a"), f"    sync();\n{finish}", finish)
    assert planted.a_race(said(CASE, main=main), r"shared bytes \d+ to \d+")
