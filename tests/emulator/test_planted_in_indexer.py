"""Faults that were planted in the CUDA text of the indexer's kernel, each of which the emulator names.

It has no workspace. What an earlier use has left in a place is what its ring holds of the tile before.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from decode import Kernel
from indexer import EmulatedIndexer, compiled, problem, spec_of
from planted import a_race, faulty, said

from dsagen.check.indexer_cases import Lengths, LogitsCase

pytestmark = pytest.mark.compile

CASE = LogitsCase("planted", 2, 2, 600, page_size=61, lengths=Lengths.WHOLE, wild=True)
FAR = 1 << 29  # bytes between pages


def kernel() -> Kernel:
    return compiled(spec_of("sm_90a"))


def indexer(of: Kernel | None = None, **options: int) -> EmulatedIndexer:
    return EmulatedIndexer(spec_of("sm_90a"), of or kernel(), **options)  # type: ignore[arg-type]


def complaint(wrong: Kernel, **options: int) -> str:
    return said(lambda: problem(CASE, indexer(wrong, **options)))


def test_the_kernel_is_right_as_it_is() -> None:
    assert problem(CASE, indexer()) == ""
    assert problem(CASE, indexer(page_stride_bytes=FAR)) == ""


def test_a_page_out_of_bounds() -> None:
    wrong = faulty(kernel(), "holds = page < p.pool_pages;", "holds = page != 0xffffffffu;")
    assert problem(replace(CASE, wild=False), indexer(wrong)) == ""
    assert re.search(r"read of 4 bytes at global address \w+: \d+ bytes \w+ .*buffer", complaint(wrong))


def test_rows_that_are_not_zeroed() -> None:
    wrong = faulty(
        kernel(),
        "ptx::copy_async_16(target, source, holds ? 16 : 0);",
        "if (holds) ptx::copy_async_16(target, source, 16);",
    )
    assert re.search(r"read of 16 bytes at shared byte \d+, not written before", complaint(wrong))


def test_a_tile_that_is_taken_before_it_lands() -> None:
    wrong = faulty(kernel(), "ptx::copy_async_wait<C::kStages - 1>();", "ptx::copy_async_wait<C::kStages>();")
    assert re.search(
        r"read of \d+ bytes at shared byte \d+, not written before \(or an asynchronous copy", complaint(wrong)
    )


def test_a_page_offset_in_32_bits() -> None:
    wrong = faulty(
        kernel(),
        "static_cast<i64>(page) * p.page_stride_bytes",
        "static_cast<i32>(page * static_cast<u32>(p.page_stride_bytes))",
    )
    # Within 2 GiB it is right.
    assert problem(CASE, indexer(wrong)) == ""
    assert re.search(r"read of \d+ bytes at global address", complaint(wrong, page_stride_bytes=FAR))


def test_a_barrier_that_is_missing() -> None:
    behind = "#pragma unroll 1\n      for (u32 tile = warp; tile < span.tiles; "
    wrong = faulty(kernel(), f"      ptx::block_sync();\n{behind}", behind)
    found = complaint(wrong)
    # Of two CTAs that run side by side either may be the first to fail: one overtakes keys that have never been there.
    missing = re.search(r"read of 16 bytes at shared byte \d+, not written before", found)
    assert a_race(found, r"shared bytes \d+ to \d+") or missing
