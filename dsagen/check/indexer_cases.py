"""Conformance cases of the indexer's logits, as data: windows, places of keys, head counts, and contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier

PREFIX = "logits"
REPEATS = 20
PAGE_SIZES = (1, 2, 5, 61, 64, 69, 256)
HEADS = (8, 24, 64, 72, 128)
# A page stride at which a handful of pages leaves 32 bits of bytes.
FAR_PAD_BYTES = 1 << 28
# Lengths around what a tile holds.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)


class Contents(StrEnum):
    """What q, keys and weights hold."""

    INTEGER = "integer"  # small whole numbers and scales that are powers of two: every sum is exact, in any order
    NORMAL = "normal"  # keys quantised with arbitrary scales, weights of both signs
    LARGE = "large"  # codes up to 448, scales and weights of many magnitudes
    SPECIAL = "special"  # some NaN and infinities among weights and scales
    NAN_KEYS = "nan_keys"  # some NaN codes


class Lengths(StrEnum):
    """How lengths come, and which."""

    PER_TOKEN = "per_token"  # [batch, next_n], each drawn
    PER_REQUEST = "per_request"  # [batch]: the last token's
    STRIDED = "strided"  # a slice of columns of a wider tensor
    EDGES = "edges"  # those of EDGES in turn
    BEYOND = "beyond"  # some negative, some past the width
    EMPTY = "empty"  # 0 and negative ones only
    ONE_LONG = "one_long"  # a long request among empty ones
    WHOLE = "whole"  # each the width


class Probe(StrEnum):
    """How the op is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # equal to the bit
    GRAPH = "graph"  # captured, replayed with other contents, lengths and tables
    ALONE = "alone"  # each request by itself gives the bits that it gives among others


@dataclass(frozen=True)
class LogitsCase:
    """One call. `heads` None: the spec's own. `pad_bytes` lie behind each page.

    `strided` gives every tensor gaps, `wild` adds table entries that name no page. `short_sums`: the kernel's products
    keep 13 bits of their sums, as those of e4m3 codes do.
    """

    op: ClassVar[str] = "indexer_logits"

    name: str
    batch: int = 3
    next_n: int = 1
    width: int = 300
    page_size: int = 64
    pad_bytes: int = 0
    heads: int | None = None
    contents: Contents = Contents.INTEGER
    lengths: Lengths = Lengths.PER_TOKEN
    fill: bool = False
    unscored: int = 0
    strided: bool = False
    wild: bool = False
    probe: Probe = Probe.PLAIN
    short_sums: bool = False

    @property
    def rows(self) -> int:
        """Rows of scores."""
        return self.batch * self.next_n


def logits_cases(tier: Tier, keeps_nan: bool, short_sums: bool = False) -> tuple[LogitsCase, ...]:
    """The cases of a tier; names begin with `logits.`. `keeps_nan`: NaN codes are NaN to the kernel;
    `short_sums` as of a case.
    """
    cases = [*contents_cases(keeps_nan), *window_cases(), *place_cases(), *shape_cases(), *probe_cases()]
    if tier == "full":
        cases += large_cases()
    return tuple(replace(case, short_sums=short_sums) for case in cases)


def contents_cases(keeps_nan: bool) -> Iterator[LogitsCase]:
    """Every kind of contents, two tokens a request."""
    for contents in Contents:
        if contents is not Contents.NAN_KEYS or keeps_nan:
            yield LogitsCase(f"{PREFIX}.contents.{contents}", next_n=2, contents=contents)


def window_cases() -> Iterator[LogitsCase]:
    """Lengths of every kind, with and without -inf behind them, and rows that are left out."""
    for lengths, fill in product(Lengths, (False, True)):
        name = f"{PREFIX}.window.{lengths}{'.fill' if fill else ''}"
        yield LogitsCase(name, 9, 3, 200, lengths=lengths, fill=fill)
    for unscored, lengths in product((64, 150), (Lengths.PER_TOKEN, Lengths.PER_REQUEST)):
        yield LogitsCase(f"{PREFIX}.unscored.{lengths}.{unscored}", 6, 2, lengths=lengths, unscored=unscored)
    yield LogitsCase(f"{PREFIX}.unscored.fill", 6, 2, unscored=150, fill=True)
    # More requests than a block counts at a time, most of them empty.
    yield LogitsCase(f"{PREFIX}.window.many", 400, 1, 130, lengths=Lengths.BEYOND)
    yield LogitsCase(f"{PREFIX}.window.many_empty", 700, 1, 260, lengths=Lengths.ONE_LONG)


def place_cases() -> Iterator[LogitsCase]:
    """Page sizes that are and are not powers of two, page strides of 16 and of 4 bytes, tensors with gaps."""
    for size, pad in product(PAGE_SIZES, (0, 4, 192)):
        yield LogitsCase(f"{PREFIX}.place.page{size}.pad{pad}", 2, 2, 270, size, pad, contents=Contents.NORMAL)
    yield LogitsCase(f"{PREFIX}.place.strided", 4, 3, contents=Contents.NORMAL, strided=True, pad_bytes=48)
    yield LogitsCase(f"{PREFIX}.place.wild", 4, 2, page_size=5, wild=True)


def shape_cases() -> Iterator[LogitsCase]:
    """Head counts and numbers of tokens, alone and past what shares a pass over the keys."""
    for heads in HEADS:
        yield LogitsCase(f"{PREFIX}.shape.heads{heads}", 2, 3, heads=heads)
    for next_n in range(1, 9):
        yield LogitsCase(f"{PREFIX}.shape.next_n{next_n}", 2, next_n, 150, lengths=Lengths.PER_REQUEST)
    for width in (1, 64, 5000):
        yield LogitsCase(f"{PREFIX}.shape.width{width}", 2, 1, width, contents=Contents.NORMAL, lengths=Lengths.WHOLE)


def probe_cases() -> Iterator[LogitsCase]:
    """Repeats and batches that must agree to the bit, and captured graphs."""
    for probe in (Probe.REPEATED, Probe.GRAPH, Probe.ALONE):
        yield LogitsCase(f"{PREFIX}.{probe}", 5, 2, 700, contents=Contents.NORMAL, probe=probe, fill=True)


def large_cases() -> Iterator[LogitsCase]:
    """Sizes that are served, and pools past 32-bit byte offsets."""
    for batch, next_n, width in ((1, 1, 131072), (16, 2, 32768), (64, 1, 32768), (256, 1, 8192), (32, 4, 16384)):
        name = f"{PREFIX}.large.b{batch}.n{next_n}.{width}"
        yield LogitsCase(name, batch, next_n, width, pad_bytes=192, contents=Contents.NORMAL)
    yield LogitsCase(f"{PREFIX}.large.far", 2, 2, 500, pad_bytes=FAR_PAD_BYTES, contents=Contents.NORMAL)
    yield LogitsCase(f"{PREFIX}.large.repeated", 8, 2, 9000, contents=Contents.NORMAL, probe=Probe.REPEATED)
