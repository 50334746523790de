"""The hopper body of the indexer's logits, as nvcc emits it: right for every width, in every order of warps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decode import Kernel
from indexer import EmulatedIndexer, hopper_kernel, problem, scores_of, spec_of
from planted import a_race, faulty, said

from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.check.indexer_run import LogitsRun
from dsagen.emulator import DEVICE
from dsagen.runtime.api import load
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
# Rings that go round, pages that begin anywhere among a warp's keys, a last tile of few keys; then pages that start at
# multiples of 4 bytes, and of one key.
TILES = LogitsCase("tiles", 2, 3, 1500, page_size=61, pad_bytes=12, lengths=Lengths.PER_REQUEST, fill=True)
WORDS = LogitsCase("words", 3, 2, 300, page_size=5, lengths=Lengths.STRIDED, strided=True, unscored=64, wild=True)
WIDE = LogitsCase("wide", 2, 2, 900, page_size=48, lengths=Lengths.WHOLE, wild=True)
SINGLE = LogitsCase("single", 2, 1, 200, page_size=1, pad_bytes=12, contents=Contents.NAN_KEYS)
# Dims, heads and scores. 24 heads are an odd number of tiles, 72 have zeros beside them, 128 are two full parts.
SHAPES = ((128, 16, "fp32"), (32, 24, "bf16"), (64, 72, "fp32"), (128, 128, "bf16"))


# Of keys whose blocks have scales: parts of 32 heads, two of 24 in rows that 40 do not fill, and one part of fewer.
BLOCK_SHAPES = (
    ("mxfp8", 128, 64, "fp32"), ("mxfp4", 128, 40, "bf16"), ("mxfp4", 64, 72, "fp32"), ("mxfp4", 32, 16, "bf16"),
)  # fmt: skip


def indexer(
    heads: int = 16, dim: int = 128, scores: str = "fp32", seed: int = 0, sms: int = 1, keys: str = "fp8"
) -> EmulatedIndexer:
    kernel = hopper_kernel(heads, dim, scores, keys=keys)
    return EmulatedIndexer(spec_of("sm_90a", heads, dim, scores, keys), kernel, seed, "random" if seed else None, sms)


@pytest.mark.parametrize(("dim", "heads", "scores"), SHAPES)
def test_it_is_held_to_the_reference(dim: int, heads: int, scores: str) -> None:
    kernel = indexer(heads, dim, scores, seed=heads)
    drawn = [replace(WIDE, contents=contents, short_sums=True) for contents in (Contents.NORMAL, Contents.LARGE)]
    for case in (TILES, WORDS, SINGLE, WIDE, replace(WIDE, contents=Contents.SPECIAL), *drawn):
        assert problem(case, kernel) == ""


@pytest.mark.parametrize(("keys", "dim", "heads", "scores"), BLOCK_SHAPES)
def test_keys_of_scaled_blocks_are_held_to_the_reference(keys: str, dim: int, heads: int, scores: str) -> None:
    kernel = indexer(heads, dim, scores, seed=heads, keys=keys)
    single = SINGLE if keys == "mxfp8" else replace(SINGLE, contents=Contents.INTEGER)
    # Their products are exact, and sums those of fp32.
    for case in (
        TILES,
        WORDS,
        single,
        replace(WIDE, contents=Contents.NORMAL),
        replace(WIDE, contents=Contents.SPECIAL),
    ):
        assert problem(case, kernel) == "", case


def test_tokens_past_what_the_image_holds_read_the_keys_again() -> None:
    case = LogitsCase("units", 2, 5, 300, lengths=Lengths.PER_REQUEST, unscored=100)
    assert problem(case, indexer(128, scores="bf16", seed=5, sms=2)) == ""


@pytest.mark.parametrize(("sms", "keys"), [(1, 64), (1, 96), (2, 200), (3, 300)])
def test_calls_of_few_keys_have_small_tiles(sms: int, keys: int) -> None:
    """Tiles of 32 keys, of which a warp has 8, and of 64; pages that end within them."""
    case = LogitsCase("few", 1, 3, keys, page_size=12, lengths=Lengths.PER_REQUEST, fill=True)
    for changed in (case, replace(case, pad_bytes=4, batch=2, wild=True, unscored=20)):
        assert problem(changed, indexer(24, seed=keys, sms=sms)) == ""


def test_golden_logits() -> None:
    with np.load(VECTORS / "indexer_paged_fp8.npz") as data:
        pool, want = torch.from_numpy(data["pool"]), torch.from_numpy(data["logits_f64"])
        stride, page_size = int(data["page_stride_bytes"]), int(data["page_size"])
        cache = pool.as_strided((len(pool), page_size, 1, 132), (stride, 132, 132, 1))
        rest = [torch.from_numpy(data[name]) for name in ("weights_f32", "context_lens", "block_table")]
        q = torch.from_numpy(data["q_e4m3"])
    out = torch.full(want.shape, 5.0)
    indexer(heads=32).indexer_logits(q, cache, *rest, out=out, unscored_up_to=0, fill_neg_inf=True)
    assert out.isneginf().equal(want.isneginf())
    finite = want.isfinite()
    assert float((out[finite].double() - want[finite]).abs().max()) < 2.0**-10 * float(want[finite].abs().max())


def test_scores_depend_on_neither_schedule_nor_number_of_sms() -> None:
    case = replace(WIDE, contents=Contents.NORMAL, short_sums=True)
    first = scores_of(case, indexer())
    # With 10 and more SMs there are fewer tiles of 128 keys, and of 64, than blocks.
    for seed, schedule, sms in ((1, "random", 1), (2, "priorities", 2), (3, "random", 10), (4, "random", 20)):
        assert scores_of(case, replace(indexer(seed=seed, sms=sms), schedule=schedule)).equal(first)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_accesses_of_shared_memory_meet_in_no_bank(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSAGEN_INDEXER_LOGITS_BODY", "hopper")
    launches: list[EmulatedLaunch] = []
    options = EmulatorOptions(races=False, counters=True, observe=launches.append)
    kernels = load(spec_of("sm_90a", 16, dim), device=DEVICE, emulator=options)
    case = LogitsCase("counters", 33, 2, 256, lengths=Lengths.WHOLE)
    LogitsRun(case, lambda _: kernels, torch.device("cpu"), 7).run()
    (launch,) = launches
    counters = launch.counts.measured
    assert counters is not None and "hopper" in launch.symbol
    assert counters.shared_read_conflicts == 0
    # Of q 16 bytes a thread, a word at a time: rows of 32 dims have fewer places than a warp has words.
    assert counters.shared_written_conflicts == 0 or dim == 32
    assert counters.bulk_bytes == 33 * 256 * (dim + 4)
    # 2 tiles of two products, for each of 2 tokens and step of 32 dims.
    assert counters.instructions["tensor"] == 33 * 2 * 2 * 2 * dim // 32


# ---- planted faults -------------------------------------------------------------------------------------------------

PLANTED = LogitsCase("planted", 2, 2, 600, page_size=61, pad_bytes=12, lengths=Lengths.WHOLE, wild=True)
# Pages of whole warps' keys, which one lane copies.
PLANTED_WHOLE = replace(PLANTED, page_size=64, pad_bytes=16)
FAR = 1 << 29  # bytes between pages
# The case and how its copies begin, after a page's number is known.
FORMS = pytest.mark.parametrize(
    ("case", "base"), [(PLANTED, "(holds ? {} : 0)"), (PLANTED_WHOLE, "{}")], ids=["keys", "whole_page"]
)


def complaint(wrong: Kernel, case: LogitsCase = PLANTED, page_stride_bytes: int | None = None) -> str:
    subject = replace(indexer(), kernel=wrong, page_stride_bytes=page_stride_bytes)
    return said(lambda: problem(case, subject))


@FORMS
def test_the_kernel_is_right_as_it_is(case: LogitsCase, base: str) -> None:
    assert problem(case, indexer()) == ""
    assert problem(case, replace(indexer(), page_stride_bytes=FAR)) == ""


@FORMS
def test_a_page_out_of_bounds(case: LogitsCase, base: str) -> None:
    then = "    const u8* base" if case is PLANTED else "    ptx::store_shared_4"
    held = "const bool holds = of_page {};\n" + then
    wrong = faulty(hopper_kernel(16), held.format("< p.pool_pages"), held.format("!= kNoPage"))
    assert problem(replace(case, wild=False), replace(indexer(), kernel=wrong)) == ""
    assert re.search(r"read of \d+ bytes at global address \w+: \d+ bytes \w+ .*buffer", complaint(wrong, case))


def test_a_page_s_scales_that_are_not_awaited() -> None:
    wrong = faulty(hopper_kernel(16), "own_keys * (kRowBytes + 4)", "own_keys * kRowBytes")
    assert complaint(wrong, PLANTED_WHOLE) != ""


def test_rows_that_no_page_holds_are_not_read() -> None:
    wrong = faulty(hopper_kernel(16), "if (mask == kAll) {", "if (true) {")
    assert re.search(r"read of 16 bytes at shared byte \d+, not written before", complaint(wrong))


def test_a_tile_that_is_taken_before_it_lands() -> None:
    wrong = faulty(hopper_kernel(16), "ptx::mbarrier_wait(landed(slot), parity);", "")
    assert re.search(r"read of \d+ bytes at shared byte \d+, not written before \(or an asynch", complaint(wrong))


def test_a_copy_longer_than_its_page() -> None:
    wrong = faulty(hopper_kernel(16), "if (p.page_size - offset < keys) keys = p.page_size - offset;", "")
    assert complaint(wrong, WIDE) != ""


@FORMS
def test_a_page_offset_in_32_bits(case: LogitsCase, base: str) -> None:
    line = f"const u8* base = p.k_cache + {base};"
    wrong = faulty(
        hopper_kernel(16),
        line.format("static_cast<i64>(of_page) * p.page_stride_bytes"),
        line.format("static_cast<i32>(of_page * static_cast<u32>(p.page_stride_bytes))"),
    )
    # Within 2 GiB it is right.
    assert problem(case, replace(indexer(), kernel=wrong)) == ""
    assert re.search(r"read of \d+ bytes at global address", complaint(wrong, case, page_stride_bytes=FAR))


@pytest.mark.parametrize(
    ("line", "without"),
    [
        ("      if (!first) ptx::block_sync();  // all warps are done with the image\n", ""),
        ("      ptx::fence_proxy_async();  // products read the image\n", ""),
    ],
)
def test_an_image_that_products_do_not_see(line: str, without: str) -> None:
    wrong = faulty(hopper_kernel(16), line, without)
    assert a_race(complaint(wrong), r"shared bytes \d+ to \d+") or "fence.proxy.async" in complaint(wrong)


BEFORE = ("q", "k_cache", "weights", "context_lens", "block_table", "out")


def test_nothing_is_touched_before_the_grid_before_has_ended() -> None:
    wrong = faulty(hopper_kernel(16), "    ptx::grid_dependency_wait();\n", "")
    assert problem(PLANTED, replace(indexer(), kernel=wrong, written_before=())) == ""
    for name in BEFORE:
        subject = replace(indexer(), kernel=wrong, written_before=(name,))
        early = rf"buffer {name}, which the grid before writes, ahead of griddepcontrol\.wait"
        assert re.search(early, said(lambda subject=subject: problem(PLANTED, subject)))
