"""Conformance cases of top-k, as data: scores and shapes that selections are known to go wrong on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.topk_calls import ORDER

PREFIX = "topk"
REPEATS = 100
# Slots that cases ask for at most; kernels do not depend on it.
MOST_SLOTS = 4096
# A row further from the first than 32 bits of elements reach: 17 GB of fp32, 9 GB of bf16 between two rows.
FAR_ROW_ELEMENTS = (1 << 32) + 64
# An output row that 32-bit byte offsets and signed 32-bit element offsets miss: 9 GB.
FAR_OUT_ELEMENTS = (1 << 31) + 64
PEER_ROWS, PEER_SLOTS, PEER_WIDTHS = (1, 32, 2050), (512, 1024, 2048, 3000), (20_000, 300_000)
# (rows, width) for each way to run a call, in either dtype of scores, on devices of 20 to 188 SMs: blocks that hold a
# row, of two sizes where the device has both, the small ones with more rows than blocks; few long rows, in the shared
# memory of clusters where there are any, or shared by two to many blocks; as many long rows as SMs at most, and more.
BODIES: Mapping[str, tuple[int, int]] = {
    "held_small": (900, 4001),
    "held_short": (20, 6_001),
    "held": (20, 20_001),
    "clustered_short": (3, 40_001),
    "clustered": (3, 100_001),
    "shared_by_three": (44, 100_001),
    "shared_by_six": (20, 70_001),
    "shared": (3, 600_001),
    "swept_alone": (80, 70_001),
    "swept": (200, 70_001),
}
PAGE_SIZES = (1, 2, 5, 48, 61, 64, 69, 256)
# (bits above, bits) of the digits that radix selections use: 11 + 11 + 10 bits, and bytes.
DIGITS = ((0, 11), (11, 11), (22, 10), (0, 8), (8, 8), (16, 8), (24, 8))


class Scores(StrEnum):
    """What a row holds."""

    NORMAL = "normal"
    LOW_10_BITS = "low_10_bits"  # the upper 22 bits of an fp32 are equal
    LOW_14_BITS = "low_14_bits"  # [1, 1 + 2^-9): one bin of an fp16 digit, thousands of distinct scores
    LOW_21_BITS = "low_21_bits"  # the upper 11 are equal: all keys share the first digit
    ONE_DIGIT = "one_digit"  # keys differ in one digit only
    OTHER_DIGITS = "other_digits"  # keys differ in all digits but one: one bin at its level
    ONE_BIN = "one_bin"  # two adjacent numbers: one bin for each digit but the last
    CONSTANT = "constant"
    ASCENDING = "ascending"
    DESCENDING = "descending"
    TWO_VALUES = "two_values"
    PLATEAU = "plateau"  # some positive, the rest exactly 0, as after a ReLU
    FEW_ABOVE_TIES = "few_above_ties"  # 500 above more equals than a row of slots
    ZEROS = "zeros"  # of both signs, and subnormals
    ANY_BITS = "any_bits"  # every bit pattern, NaN and infinities among them
    SOME_NAN = "some_nan"
    ALL_NAN = "all_nan"
    ALL_NEG_INF = "all_neg_inf"
    ALL_POS_INF = "all_pos_inf"
    NEG_INF_TAIL = "neg_inf_tail"
    INFINITIES = "infinities"


BODY_SCORES = (
    Scores.NORMAL,
    Scores.PLATEAU,
    Scores.CONSTANT,
    Scores.TWO_VALUES,
    Scores.FEW_ABOVE_TIES,
    Scores.LOW_10_BITS,
    Scores.LOW_21_BITS,
    Scores.SOME_NAN,
    Scores.ANY_BITS,
)


class Windows(StrEnum):
    """Which part of a row counts. Whatever does not is NaN and +inf, so reading it decides something."""

    WHOLE = "whole"
    LENGTHS = "lengths"  # from 0 to the width, those around k among them, and negative ones
    BOTH = "both"  # starts too
    SHORT = "short"  # no more than k, and negative: rows are taken whole, and all of their scores are NaN


class Ids(StrEnum):
    """What an index becomes."""

    LOGICAL = "logical"
    PAGED = "paged"
    MAPPED = "mapped"  # pages by a table of another row, from another column
    BLOCKS = "blocks"
    OFFSET = "offset"


class Probe(StrEnum):
    """How the op is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # 100 times, equal to the bit
    GRAPH = "graph"  # captured with short rows, replayed with other scores and longer ones, in a memory that changed
    PERMUTED = "permuted"  # the columns in another order: the same scores are selected
    ALONE = "alone"  # each row by itself and in smaller batches: the same result


@dataclass(frozen=True)
class TopkCase:
    """One run of the op.

    `misaligned` is by how many elements the first row is off, `gap` how many lie between rows; `far` puts rows 2^32
    elements apart, `far_out` output rows 2^31. `digit` is (bits above, bits) for scores that need one. Without `extras`
    the call gets neither raw nor counts. `mode` is the promise that is asked for.
    """

    op: ClassVar[str] = "topk"

    name: str
    rows: int
    width: int
    k: int
    scores: Scores = Scores.NORMAL
    windows: Windows = Windows.WHOLE
    ids: Ids = Ids.LOGICAL
    page_size: int = 64
    drop_neg_inf: bool = False
    misaligned: int = 0
    gap: int = 5
    far: bool = False
    far_out: bool = False
    digit: tuple[int, int] = (0, 0)
    extras: bool = True
    mode: str = ORDER
    probe: Probe = Probe.PLAIN

    @property
    def elements(self) -> int:
        """Scores of one call, by which a slow machine may choose."""
        return self.rows * self.width


def topk_cases(tier: Tier, modes: Sequence[str] = (ORDER,)) -> tuple[TopkCase, ...]:
    """The cases of a tier; names begin with `topk.`. Weaker `modes` than order repeat the cases that they can break."""
    cases = (*data_cases(), *digit_cases(), *window_cases(), *layout_cases(), *id_cases(), *probe_cases())
    cases += tuple(body_cases())
    weaker = tuple(mode for mode in modes if mode != ORDER)
    cases += tuple(mode_cases(weaker))
    return cases if tier == "quick" else (*cases, *peer_cases(), *large_cases())


def data_cases() -> Iterator[TopkCase]:
    """Every kind of scores, in rows longer than any buffer; with and without what is dropped."""
    plain = [scores for scores in Scores if scores not in (Scores.ONE_DIGIT, Scores.OTHER_DIGITS)]
    for scores, k, drops in product(plain, (1, 512, 2048), (False, True)):
        name = f"{PREFIX}.data.{scores}.k{k}{'.drop' if drops else ''}"
        yield TopkCase(name, 5, 40_000, k, scores, drop_neg_inf=drops, misaligned=1)


def body_cases() -> Iterator[TopkCase]:
    """For each way to run a call: lists that suffice and that overflow, windows, transforms, repeats, graphs."""
    for body, (rows, width) in BODIES.items():
        name = f"{PREFIX}.body.{body}"
        for scores in BODY_SCORES:
            yield TopkCase(f"{name}.{scores}", rows, width, 2048, scores, misaligned=3)
        for scores in (Scores.NEG_INF_TAIL, Scores.INFINITIES, Scores.ALL_NEG_INF):
            yield TopkCase(f"{name}.{scores}.drop", rows, width, 2048, scores, drop_neg_inf=True)
        for scores in (Scores.NORMAL, Scores.CONSTANT, Scores.LOW_21_BITS):
            # Windows that are taken whole, and parts of them that are empty or have no more than k scores.
            yield TopkCase(f"{name}.{scores}.windows", rows, width, 2048, scores, Windows.BOTH, Ids.PAGED, 61)
        yield TopkCase(f"{name}.short", rows, width, 2048, windows=Windows.SHORT, misaligned=1)
        yield TopkCase(f"{name}.one", rows, width, 1, Scores.TWO_VALUES, gap=0)
        yield TopkCase(f"{name}.most_slots", rows, width, MOST_SLOTS, Scores.PLATEAU, Windows.LENGTHS)
        for scores in (Scores.NORMAL, Scores.CONSTANT):
            yield TopkCase(f"{name}.{scores}.repeated", rows, width, 2048, scores, probe=Probe.REPEATED)
        yield TopkCase(f"{name}.graph", rows, width, 2048, windows=Windows.LENGTHS, probe=Probe.GRAPH)


def digit_cases() -> Iterator[TopkCase]:
    """One bin at each level of the digits in use, and the answer hidden in one level alone."""
    for (above, bits), scores in product(DIGITS, (Scores.ONE_DIGIT, Scores.OTHER_DIGITS)):
        name = f"{PREFIX}.digit.{scores}.{above}_{bits}"
        yield TopkCase(name, 4, 40_000, 2048, scores, digit=(above, bits), misaligned=2)


def window_cases() -> Iterator[TopkCase]:
    """Windows of every alignment, widths around vectors and blocks, k as large as it gets."""
    for windows, misaligned in product((Windows.LENGTHS, Windows.BOTH), range(8)):
        name = f"{PREFIX}.window.{windows}.{misaligned}"
        yield TopkCase(name, 40, 6000 + misaligned, 512, windows=windows, misaligned=misaligned)
    for width in (1, 3, 4095, 4096, 4097, 8192, 16385):
        yield TopkCase(f"{PREFIX}.width.{width}", 9, width, 100, Scores.TWO_VALUES, Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.width.0", 3, 0, 64)
    for k in (1, 64, 2048):
        # Rows that are taken whole are not read: NaN everywhere still gives 0, 1, 2, ...
        yield TopkCase(f"{PREFIX}.window.short.k{k}", 33, 3000, k, windows=Windows.SHORT, misaligned=3)
    yield TopkCase(f"{PREFIX}.most_slots", 9, 20_000, MOST_SLOTS, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.window.drop", 40, 6000, 512, Scores.INFINITIES, Windows.BOTH, drop_neg_inf=True)


def layout_cases() -> Iterator[TopkCase]:
    """Rows with nothing and with much between them, one row and many, an odd number of everything."""
    for gap in (0, 1, 3, 4099):
        # Without a gap an odd width puts every row at another alignment.
        yield TopkCase(f"{PREFIX}.layout.gap{gap}", 17, 9001, 1000, Scores.LOW_14_BITS, Windows.BOTH, gap=gap)
    for rows in (1, 2, 131, 132, 133, 1025):
        # Around a row for each multiprocessor, where the number of blocks of a row changes.
        yield TopkCase(f"{PREFIX}.layout.rows{rows}", rows, 20_001, 512, Scores.PLATEAU, Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.layout.long", 1, 262_147, 2048, Scores.LOW_14_BITS, misaligned=1)
    yield TopkCase(f"{PREFIX}.layout.no_extras", 9, 9001, 512, Scores.PLATEAU, Windows.BOTH, extras=False)


def id_cases() -> Iterator[TopkCase]:
    """Every transform, and page sizes that are and are not powers of two."""
    for ids, size in product((Ids.PAGED, Ids.MAPPED), PAGE_SIZES):
        yield TopkCase(f"{PREFIX}.ids.{ids}.{size}", 33, 5000, 512, Scores.PLATEAU, Windows.LENGTHS, ids, size)
    for ids in (Ids.BLOCKS, Ids.OFFSET):
        yield TopkCase(f"{PREFIX}.ids.{ids}", 33, 5000, 512, Scores.PLATEAU, Windows.LENGTHS, ids)
    for ids in Ids:
        # Indices count from the window's start before they are translated.
        yield TopkCase(f"{PREFIX}.ids.{ids}.started", 33, 5000, 512, Scores.NORMAL, Windows.BOTH, ids, 61)
        yield TopkCase(f"{PREFIX}.ids.{ids}.no_extras", 9, 5000, 512, windows=Windows.BOTH, ids=ids, extras=False)


def probe_cases() -> Iterator[TopkCase]:
    """Repeats that must agree to the bit, captured graphs, other orders of columns and rows."""
    for scores in (Scores.PLATEAU, Scores.LOW_10_BITS, Scores.CONSTANT, Scores.SOME_NAN, Scores.NORMAL):
        yield TopkCase(f"{PREFIX}.repeated.{scores}", 16, 30_000, 2048, scores, probe=Probe.REPEATED)
    for ids in (Ids.LOGICAL, Ids.PAGED):
        yield TopkCase(f"{PREFIX}.graph.{ids}", 16, 50_000, 2048, windows=Windows.LENGTHS, ids=ids, probe=Probe.GRAPH)
    # The longest row needs every buffer and every block that a row can have.
    yield TopkCase(f"{PREFIX}.graph.long", 2, 300_000, 2048, Scores.LOW_14_BITS, Windows.LENGTHS, probe=Probe.GRAPH)
    for scores in (Scores.NORMAL, Scores.PLATEAU, Scores.LOW_10_BITS, Scores.SOME_NAN, Scores.INFINITIES):
        yield TopkCase(f"{PREFIX}.permuted.{scores}", 8, 30_000, 1024, scores, probe=Probe.PERMUTED)
    for scores in (Scores.PLATEAU, Scores.NORMAL):
        name = f"{PREFIX}.alone.{scores}"
        yield TopkCase(name, 12, 30_000, 2048, scores, Windows.LENGTHS, probe=Probe.ALONE)


def mode_cases(modes: Sequence[str]) -> Iterator[TopkCase]:
    """What weaker promises still hold: the values, and for `set` which of equals."""
    for mode in modes:
        chosen = [
            *(case for case in data_cases() if case.k == 2048 and not case.drop_neg_inf),
            *(case for case in window_cases() if case.misaligned in (0, 3) and "window" in case.name),
            *(case for case in layout_cases() if case.extras),
            *(case for case in id_cases() if case.page_size in (61, 64) and case.extras),
            *(case for case in probe_cases() if case.probe is not Probe.ALONE),
            *(case for case in body_cases() if case.windows is not Windows.SHORT),
        ]
        for case in chosen:
            # Without a promised set two runs may differ among equals.
            if not (mode == "off" and case.probe is Probe.REPEATED):
                yield replace(case, name=f"{case.name}.{mode}", mode=mode)


def peer_cases() -> Iterator[TopkCase]:
    """Rows, slots and widths of vLLM's grid, with data that defeats a coarse first digit."""
    for rows, k, width in product(PEER_ROWS, PEER_SLOTS, PEER_WIDTHS):
        if rows * width <= 1 << 28:
            for scores in (Scores.NORMAL, Scores.LOW_10_BITS):
                name = f"{PREFIX}.peer.{scores}.rows{rows}.width{width}.k{k}"
                yield TopkCase(name, rows, width, k, scores, Windows.LENGTHS)


def large_cases() -> Iterator[TopkCase]:
    """Long rows, many rows, and rows past 32-bit offsets."""
    for scores in (Scores.NORMAL, Scores.LOW_21_BITS, Scores.CONSTANT, Scores.PLATEAU, Scores.SOME_NAN):
        yield TopkCase(f"{PREFIX}.large.long.{scores}", 2, 5_000_000, 2048, scores, misaligned=3)
    yield TopkCase(f"{PREFIX}.large.long.windows", 5, 8_000_001, 4096, Scores.LOW_14_BITS, Windows.BOTH, gap=1)
    yield TopkCase(f"{PREFIX}.large.rows", 70_000, 700, 512, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.large.batch", 4096, 32_768, 2048, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.large.repeated", 64, 131_072, 2048, Scores.LOW_14_BITS, probe=Probe.REPEATED)
    yield TopkCase(f"{PREFIX}.large.far", 2, 40_000, 2048, far=True)
    yield TopkCase(f"{PREFIX}.large.far_out", 2, 9000, 2048, far_out=True)
