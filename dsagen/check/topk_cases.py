"""Conformance cases of top-k, as data: scores and shapes that selections are known to go wrong on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier

PREFIX = "topk"
REPEATS = 100
# Slots that cases ask for at most; kernels do not depend on it.
MOST_SLOTS = 4096
# A row further from the first than 32 bits of elements reach.
FAR_ROW_ELEMENTS = (1 << 32) + 64
PEER_ROWS, PEER_SLOTS, PEER_WIDTHS = (1, 32, 2050), (512, 1024, 2048, 3000), (20_000, 300_000)
PAGE_SIZES = (1, 2, 5, 48, 64, 256)


class Scores(StrEnum):
    """What a row holds."""

    NORMAL = "normal"
    LOW_10_BITS = "low_10_bits"  # the upper 22 bits of an fp32 are equal
    LOW_21_BITS = "low_21_bits"  # the upper 11 are: all keys share the first digit
    ONE_BIN = "one_bin"  # two adjacent numbers: one bin for each digit but the last
    CONSTANT = "constant"
    ASCENDING = "ascending"
    DESCENDING = "descending"
    TWO_VALUES = "two_values"
    PLATEAU = "plateau"  # some positive, the rest exactly 0
    ZEROS = "zeros"  # of both signs, and subnormals
    ANY_BITS = "any_bits"  # every bit pattern, NaN and infinities among them
    SOME_NAN = "some_nan"
    ALL_NAN = "all_nan"
    ALL_NEG_INF = "all_neg_inf"
    NEG_INF_TAIL = "neg_inf_tail"
    INFINITIES = "infinities"


class Windows(StrEnum):
    """Which part of a row counts."""

    WHOLE = "whole"
    LENGTHS = "lengths"  # from 0 to the width, those around k among them, and negative ones
    BOTH = "both"  # starts too; outside there is NaN and +inf


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
    GRAPH = "graph"  # captured, replayed with other scores and lengths


@dataclass(frozen=True)
class TopkCase:
    """One run of the op. `misaligned` is by how many elements the first row is off; `far` puts rows 2^32 apart."""

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
    far: bool = False
    probe: Probe = Probe.PLAIN


def topk_cases(tier: Tier) -> tuple[TopkCase, ...]:
    """The cases of a tier; names begin with `topk.`."""
    cases = (*data_cases(), *window_cases(), *id_cases(), *probe_cases())
    return cases if tier == "quick" else (*cases, *peer_cases(), *large_cases())


def data_cases() -> Iterator[TopkCase]:
    """Every kind of scores, in rows longer than any buffer; with and without what is dropped."""
    for scores, k, drops in product(Scores, (1, 512, 2048), (False, True)):
        name = f"{PREFIX}.data.{scores}.k{k}{'.drop' if drops else ''}"
        yield TopkCase(name, 5, 40_000, k, scores, drop_neg_inf=drops, misaligned=1)


def window_cases() -> Iterator[TopkCase]:
    """Windows of every alignment, widths around vectors and blocks, k as large as it gets."""
    for windows, misaligned in product((Windows.LENGTHS, Windows.BOTH), range(8)):
        name = f"{PREFIX}.window.{windows}.{misaligned}"
        yield TopkCase(name, 40, 6000 + misaligned, 512, windows=windows, misaligned=misaligned)
    for width in (1, 3, 4095, 4096, 4097, 8192, 16385):
        yield TopkCase(f"{PREFIX}.width.{width}", 9, width, 100, Scores.TWO_VALUES, Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.width.0", 3, 0, 64)
    yield TopkCase(f"{PREFIX}.most_slots", 9, 20_000, MOST_SLOTS, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.window.drop", 40, 6000, 512, Scores.INFINITIES, Windows.BOTH, drop_neg_inf=True)


def id_cases() -> Iterator[TopkCase]:
    """Every transform, and page sizes that are and are not powers of two."""
    for ids, size in product((Ids.PAGED, Ids.MAPPED), PAGE_SIZES):
        yield TopkCase(f"{PREFIX}.ids.{ids}.{size}", 33, 5000, 512, Scores.PLATEAU, Windows.LENGTHS, ids, size)
    for ids in (Ids.BLOCKS, Ids.OFFSET):
        yield TopkCase(f"{PREFIX}.ids.{ids}", 33, 5000, 512, Scores.PLATEAU, Windows.LENGTHS, ids)


def probe_cases() -> Iterator[TopkCase]:
    """Repeats that must agree to the bit, and captured graphs."""
    for scores in (Scores.PLATEAU, Scores.LOW_10_BITS, Scores.NORMAL):
        yield TopkCase(f"{PREFIX}.repeated.{scores}", 16, 30_000, 2048, scores, probe=Probe.REPEATED)
    for ids in (Ids.LOGICAL, Ids.PAGED):
        yield TopkCase(f"{PREFIX}.graph.{ids}", 16, 50_000, 2048, windows=Windows.LENGTHS, ids=ids, probe=Probe.GRAPH)


def peer_cases() -> Iterator[TopkCase]:
    """Rows, slots and widths of vLLM's grid, with data that defeats a coarse first digit."""
    for rows, k, width in product(PEER_ROWS, PEER_SLOTS, PEER_WIDTHS):
        if rows * width <= 1 << 28:
            for scores in (Scores.NORMAL, Scores.LOW_10_BITS):
                name = f"{PREFIX}.peer.{scores}.rows{rows}.width{width}.k{k}"
                yield TopkCase(name, rows, width, k, scores, Windows.LENGTHS)


def large_cases() -> Iterator[TopkCase]:
    """Long rows, many rows, and rows past 32-bit offsets."""
    for scores in (Scores.NORMAL, Scores.LOW_21_BITS, Scores.CONSTANT):
        yield TopkCase(f"{PREFIX}.large.long.{scores}", 2, 5_000_000, 2048, scores, misaligned=3)
    yield TopkCase(f"{PREFIX}.large.rows", 70_000, 700, 512, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.large.batch", 4096, 32_768, 2048, windows=Windows.LENGTHS)
    yield TopkCase(f"{PREFIX}.large.far", 2, 40_000, 2048, far=True)
