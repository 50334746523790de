"""The top-k body, run on the CPU against a stable sort: keys, ties, windows, overflowing buffers, transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from host import COMPILER, HostModelError
from topk_case import (
    HELD,
    LARGE_BUILT,
    SHARED,
    SMALL,
    SMALL_BUILT,
    STREAM_BUILT,
    Block,
    Built,
    Call,
    Pages,
    Resident,
    Split,
    Stream,
    check,
    launch,
    words_of,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

INF, NAN = np.inf, np.nan
ROW = 700
Data = Callable[[np.random.Generator, int], np.ndarray]


def from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def relu_plateau(random: np.random.Generator, n: int) -> np.ndarray:
    return np.maximum(random.standard_normal(n) - 1.2, 0)


def with_nan(random: np.random.Generator, n: int) -> np.ndarray:
    scores = random.standard_normal(n).astype(np.float32)
    scores[random.random(n) < 0.6] = NAN
    return scores


def all_kinds_of_nan(random: np.random.Generator, n: int) -> np.ndarray:
    return from_bits(random.integers(0, 2**22, n) | 0x7FC00000 | random.integers(0, 2, n) << 31)


def with_infinities(random: np.random.Generator, n: int) -> np.ndarray:
    return random.choice(np.array([INF, -INF, 1.0, NAN, -1.0], np.float32), n, p=[0.05, 0.6, 0.1, 0.2, 0.05])


def zeros_of_both_signs(random: np.random.Generator, n: int) -> np.ndarray:
    return random.choice(
        np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45], np.float32), n, p=[0.4, 0.4, 0.05, 0.05, 0.05, 0.05]
    )


DATA: dict[str, Data] = {
    "normal": lambda random, n: random.standard_normal(n),
    "upper 22 bits equal": lambda random, n: from_bits(0x3F900000 | random.integers(0, 1024, n)),
    "upper 11 bits equal": lambda random, n: from_bits(0x3F800000 | random.integers(0, 2**21, n)),
    "one bin for each digit": lambda random, n: from_bits(0x3F912345 + (random.random(n) < 0.3)),
    "negative, upper 22 bits equal": lambda random, n: from_bits(0xBF900000 | random.integers(0, 1024, n)),
    "all bit patterns": lambda random, n: from_bits(random.integers(0, 2**32, n)),
    "constant": lambda random, n: np.full(n, 3.25),
    "ascending": lambda random, n: np.arange(n),
    "descending": lambda random, n: -np.arange(n),
    "two values": lambda random, n: random.choice([1.0, 2.0], n),
    "plateau": relu_plateau,
    "zeros of both signs": zeros_of_both_signs,
    "many NaN": with_nan,
    "only NaN": all_kinds_of_nan,
    "only -inf": lambda random, n: np.full(n, -INF),
    "only +inf": lambda random, n: np.full(n, INF),
    "infinities": with_infinities,
    "a tail of -inf": lambda random, n: np.where(np.arange(n) < n // 3, random.standard_normal(n), -INF),
    "subnormals": lambda random, n: from_bits(random.integers(0, 2**23, n) | random.integers(0, 2, n) << 31),
}
LEVELS_DATA = (
    "normal",
    "upper 22 bits equal",
    "upper 11 bits equal",
    "one bin for each digit",
    "plateau",
    "constant",
    "all bit patterns",
)
# Lists that are never, sometimes and always large enough, digits of other widths, so of other numbers of levels, and
# bitmaps that a row does not fit.
BLOCKS: dict[str, Block] = {
    "small list": SMALL,
    "list of one": Stream(elements=1),
    "ample list": Stream(elements=1024),
    "8-bit digits": Stream(digit_bits=8, elements=32),
    "8-bit digits, ample list, narrow bitmap": Stream(digit_bits=8, elements=1024, threads=32, bitmap_words=32),
    "12-bit digits": Stream(digit_bits=12, elements=100, threads=96, bitmap_words=96),
    "shared": Split(),
    "shared, ample list": Split(elements=1024),
    "shared, 8-bit digits, list of one": Split(digit_bits=8, elements=1, threads=32),
    "held": HELD,
    "held, ample list": Resident(elements=1024, in_flight=4),
    "held, 8-bit digits": Resident(digit_bits=8, threads=32, words=32, in_flight=4, ctas=1),
    "held, 12-bit digits": Resident(digit_bits=12, threads=96, words=8, in_flight=1),
}


BOTH = (SMALL, HELD, SHARED)


def wide(block: Block) -> dict[str, int]:
    """What makes a block hold a row of 1025."""
    return {"words": 24, "in_flight": 3} if isinstance(block, Resident) else {}


def rows_of(kind: str, rows: int = 1, width: int = ROW, seed: int = 5) -> np.ndarray:
    random = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):
        return np.stack([DATA[kind](random, width).astype(np.float32) for _ in range(rows)])


@pytest.mark.parametrize("drops", [False, True], ids=["", "drops -inf"])
@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_data(kind: str, score: str, drops: bool, block: Block) -> None:
    for k in (1, 100, ROW - 1):
        check(Call(rows_of(kind), k, score, drops_neg_inf=drops, misaligned=1, block=block))


@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "upper 22 bits equal",
        "upper 11 bits equal",
        "one bin for each digit",
        "plateau",
        "constant",
        "all bit patterns",
    ],
)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("score", ["fp32", "bf16"])
def test_every_way_through_the_levels(block: str, score: str, kind: str) -> None:
    for k in (7, 350):
        check(Call(rows_of(kind), k, score, block=BLOCKS[block]))


@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["normal", "upper 22 bits equal", "upper 11 bits equal", "many NaN", "constant"])
@pytest.mark.parametrize(
    ("block", "width"), [(SMALL_BUILT, 8_000), (LARGE_BUILT, 30_000), (STREAM_BUILT, 30_000)], ids=str
)
def test_the_kernels_that_are_built(block: Block, width: int, kind: str, score: str) -> None:
    lengths = (width, width // 2 - 3, 2_049, 2_048)
    check(Call(rows_of(kind, 4, width), 2048, score, lengths=lengths, block=block, misaligned=3))


@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("block", [LARGE_BUILT, STREAM_BUILT], ids=str)
def test_a_row_with_more_candidates_than_the_list_that_is_built_holds(block: Block, score: str) -> None:
    # More than 8192 distinct scores under one first digit, and as many equal ones.
    check(Call(from_bits(0x3F800000 + np.random.default_rng(1).permutation(12_000))[None], 2048, score, block=block))
    check(Call(np.full((1, 12_000), 0.5), 4096, score, block=block))


def test_a_row_that_fills_the_block_to_the_last_register() -> None:
    for score, width in (("fp32", 8192 - 3), ("bf16", 16384 - 7)):
        check(Call(rows_of("normal", 3, width), 500, score, block=SMALL_BUILT))
        check(Call(rows_of("constant", 1, width), width - 1, score, block=SMALL_BUILT))
        check(Call(rows_of("only NaN", 1, width), width, score, block=SMALL_BUILT, drops_neg_inf=True))
        check(Call(rows_of("normal", 1, width), width, score, block=SMALL_BUILT, drops_neg_inf=True))


def reported_rows(name: str) -> tuple[np.ndarray, int]:
    """A row and k on which some selection went wrong."""
    random = np.random.default_rng(len(name))
    match name:
        case "8192 scores in one coarse bin":
            return from_bits(0x3F800000 + random.permutation(16_384)[:8192]), 2048
        case "few above many ties":
            return random.permutation(
                np.concatenate([random.random(500) + 2, np.full(3000, 1.0), np.zeros(3000)])
            ), 2048
        case "low 10 bits in a long row":
            return from_bits(0x3F900000 + random.integers(0, 1024, 12_000)), 2048
        case "some NaN":
            return with_nan(random, 3000), 512
        case "only NaN":
            return np.full(3000, NAN), 512
        case "1000 positives among zeros":
            return random.permutation(np.concatenate([random.random(1000) + 1, np.zeros(7192)])), 2048
    raise ValueError(name)


REPORTED = (
    "8192 scores in one coarse bin",
    "few above many ties",
    "low 10 bits in a long row",
    "some NaN",
    "only NaN",
    "1000 positives among zeros",
)


@pytest.mark.parametrize("block", [LARGE_BUILT, STREAM_BUILT], ids=str)
@pytest.mark.parametrize("name", REPORTED)
def test_reported_rows(name: str, block: Block) -> None:
    scores, k = reported_rows(name)
    call = Call(scores[None].astype(np.float32), k, block=block)
    first = check(call)
    assert (first.out >= 0).all() and len(set(first.out[0])) == k
    for seed in (2, 3):
        assert np.array_equal(launch(replace(call, seed=seed)).out, first.out)


@pytest.mark.parametrize(
    ("arch", "kernels"), [("sm_80", 3), ("sm_89", 2), ("sm_100a", 3), ("sm_120a", 2)], ids=lambda value: str(value)
)
def test_other_archs(arch: str, kernels: int) -> None:
    for number in range(kernels):
        check(Call(rows_of("plateau", 2, 5000), 512, block=Built(number), arch=arch))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_lengths_around_k(score: str, drops: bool, block: Block) -> None:
    lengths = (0, 1, 63, 64, 65, 129, ROW, -5, -(2**31), 2**31 - 1)
    for kind in ("normal", "infinities"):
        check(Call(rows_of(kind, len(lengths)), 64, score, lengths=lengths, drops_neg_inf=drops, block=block))


@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("misaligned", range(8))
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_windows_with_nan_outside(misaligned: int, score: str, block: Block) -> None:
    scores = rows_of("normal", 9)
    starts, lengths = (0, 1, 2, 3, 5, 130, ROW - 3, ROW, 17), (200, 77, 40, 39, 300, 129, 50, 10, 41)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, :start] = scores[row, start + length :] = (NAN, INF)[row % 2]
    check(Call(scores, 40, score, lengths, starts, misaligned=misaligned, block=block))


@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_windows_that_leave_the_row_are_bounded_by_it(block: Block) -> None:
    starts, lengths = (-3, ROW + 50, 2**31 - 1, ROW - 10, 100), (500, 5, 2**31 - 1, 2**31 - 1, -1)
    check(Call(rows_of("normal", 5), 40, lengths=lengths, starts=starts, block=block))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 255, 256, 257, 511, 512, 513, 1024, 1025])
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_widths_around_the_blocks(width: int, block: Block) -> None:
    for k in {1, width // 2 + 1, width, width + 1}:
        check(Call(rows_of("two values", 2, width), k, misaligned=2, block=replace(block, **wide(block))))


@pytest.mark.parametrize("size", [1, 2, 5, 48, 64, 1 << 30])
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_pages(size: int, block: Block) -> None:
    random = np.random.default_rng(size)
    lengths = (ROW, 300, 12)
    columns = ROW // size + 3
    table = random.integers(0, 2**31 // size - 1, (5, columns))
    table[1, ::3] = -1
    for pages in (
        Pages(size, table),
        Pages(size, table, table_of_row=(4, 1, 0), starts=(0, 2, 1)),
        # Tables that do not exist, pages past the table's end or before it, pages beyond int32.
        Pages(size, table, table_of_row=(-1, 5, 2)),
        Pages(size, table[:, : columns // 2], starts=(0, -1, 2**31 - 1)),
        Pages(size, np.full((3, columns), 2**31 - 1)),
    ):
        check(Call(rows_of("normal", 3), 128, lengths=lengths, pages=pages, block=block))


@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_candidate_blocks_of_eight_are_pages_of_a_table_per_row(block: Block) -> None:
    blocks = np.random.default_rng(3).permutation(4 * 90).reshape(4, 90)
    result = check(Call(rows_of("plateau", 4), 200, "bf16", pages=Pages(8, blocks), block=block))
    assert result.out[2, 5] == blocks[2, result.raw[2, 5] // 8] * 8 + result.raw[2, 5] % 8


@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_offsets(block: Block) -> None:
    offsets = (0, 1000, -100, 2**31 - 300)
    check(Call(rows_of("normal", 4), 300, lengths=(ROW, 299, ROW, ROW), offsets=offsets, block=block))
    pages = Pages(16, np.arange(4 * 50).reshape(4, 50))
    check(Call(rows_of("normal", 4), 300, offsets=offsets, pages=pages, block=block))


@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_rows_that_are_taken_whole_are_not_read(score: str, block: Block) -> None:
    call = Call(rows_of("normal", 3, 64), 64, score, lengths=(64, 3, 0), unreadable=True, block=block)
    check(call)
    for reads in (replace(call, k=63), replace(call, drops_neg_inf=True)):
        with pytest.raises(HostModelError, match="scores"):
            launch(reads)


@pytest.mark.parametrize("score", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_rows_past_32_bits_of_elements(score: str, block: Block) -> None:
    # The rows before the last are empty, so the memory between them is not needed.
    check(Call(rows_of("normal", 3), 60, score, lengths=(0, 0, ROW), far=True, block=block))


def test_a_full_list_costs_a_sweep_and_no_element() -> None:
    # 64 keys under the first digit fit, 65 do not: then the second digit is counted in the row instead of in the list.
    for under in (64, 65):
        scores = np.full((1, ROW), -1.0, np.float32)
        scores[0, :under] = from_bits(0x3F800000 + np.arange(under))[::-1]
        call = Call(scores, 60, block=SMALL)
        ample = check(replace(call, block=Stream(elements=1024)))
        result = check(call)
        assert np.array_equal(result.raw, ample.raw)


# Blocks of 64 threads guess from 64 vectors of a row, this far apart.
GUESS_ROW, GUESS_K, GUESS_LIST = 2_048, 64, 512
GUESSING = (Stream(elements=GUESS_LIST), Resident(elements=GUESS_LIST, words=32, in_flight=4))


def guess_rows(kind: str) -> np.ndarray:
    """A row whose sample tells the truth, or not: few of it are high, or the rest is, or both and far apart."""
    random = np.random.default_rng(7)
    threads = np.arange(64)
    vectors = threads + threads // 2 % 16 * (GUESS_ROW // 4 // 64) // 16 * 64
    sample = (vectors[:, None] * 4 + np.arange(4)).ravel()
    others = np.setdiff1d(np.arange(GUESS_ROW), sample)
    scores = random.standard_normal(GUESS_ROW)
    if kind == "thin":  # the k-th score is about 0, where keys are far apart
        scores -= np.sort(scores)[-GUESS_K]
    elif kind == "too high":
        scores[sample[:40]] = 100 + np.arange(40)
    elif kind == "too low":
        scores[others] += 10
    elif kind == "beyond":
        scores *= 0.01
        scores[sample[:30]] = 1
        scores[random.choice(others, 100, replace=False)] = 100 * (1 + np.arange(100))
    return scores.astype(np.float32)[None]


@pytest.mark.parametrize("block", GUESSING, ids=["swept", "held"])
def test_a_wrong_guess_costs_time_and_no_element(block: Block) -> None:
    barriers = {}
    for kind in ("true", "thin", "beyond", "too high", "too low"):
        for ordered in (True, False):
            result = check(Call(guess_rows(kind), GUESS_K, block=block, ordered=ordered))
        check(Call(guess_rows(kind), GUESS_K, "bf16", block=block, drops_neg_inf=True))
        barriers[kind] = result.run.barriers
    # Beyond the first digit's reach there are more digits; a list that does not do is thrown away.
    assert barriers["thin"] <= barriers["true"] < min(barriers[kind] for kind in ("beyond", "too high", "too low"))


@pytest.mark.parametrize(
    "block", [Stream(elements=1024), Resident(elements=1024), SHARED], ids=["swept", "held", "shared"]
)
@pytest.mark.parametrize("digit_bits", [8, 11])
def test_numbers_that_share_a_digit_with_what_is_dropped(block: Block, digit_bits: int) -> None:
    # The k-th key is that of -inf or NaN, with fewer numbers than slots above it, some of them next to -inf.
    lowest = np.finfo(np.float32).min
    for nans in (200, ROW - 14):
        scores = np.full((1, ROW), -INF, np.float32)
        scores[0, 5 : 5 + nans] = NAN
        scores[0, -9:] = [lowest, 1, np.nextafter(lowest, np.float32(0)), -1, 0, 2, lowest, INF, 3]
        for score in ("fp32", "bf16"):
            check(Call(scores, 100, score, drops_neg_inf=True, block=replace(block, digit_bits=digit_bits)))


def test_parts_far_into_a_row_that_the_bitmap_does_not_span() -> None:
    for kind in ("upper 22 bits equal", "plateau", "constant", "many NaN"):
        for ordered in (True, False):
            block = Split(parts=5, threads=32, elements=512, bitmap_words=32)
            check(
                Call(rows_of(kind, 2, 9_000), 300, lengths=(9_000, 6_001), block=block, ordered=ordered, misaligned=3)
            )


@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_without_order_the_same_elements_are_selected(block: Block) -> None:
    for kind in ("normal", "plateau", "infinities"):
        for drops in (False, True):
            call = Call(rows_of(kind, 3), 333, lengths=(ROW, 500, 200), block=block, ordered=False, drops_neg_inf=drops)
            check(call)
            check(replace(call, pages=Pages(8, np.arange(3 * 90).reshape(3, 90)), score="bf16"))
            # A row that is taken whole keeps its order.
            assert (np.diff(launch(call).raw[2][:200]) > 0).all() or drops


@pytest.mark.parametrize("block", BOTH, ids=["swept", "held", "shared"])
def test_results_do_not_depend_on_the_schedule(block: Block) -> None:
    call = Call(rows_of("one bin for each digit", 3), 333, lengths=(ROW, 500, 400), block=block)
    first = check(call)
    for seed in range(2, 6):
        again = launch(replace(call, seed=seed))
        assert np.array_equal(first.out, again.out)


def test_the_reference_tells_equal_scores_by_their_bits() -> None:
    # What the other tests lean on: -0 equals +0, and every NaN every other.
    assert words_of(Call(np.array([[-0.0]]), 1))[0, 0] == 0x80000000
    result = check(Call(np.array([[-0.0, 0.0, NAN, -NAN, -INF]]), 4))
    assert result.raw[0].tolist() == [0, 1, 2, 4]
