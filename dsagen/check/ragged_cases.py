"""Conformance cases of the indexer's logits over keys in one piece, as data: windows, gaps, forms of rows, contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.indexer_cases import HEADS, Contents, Probe

PREFIX = "ragged"


class Windows(StrEnum):
    """Which keys tokens see."""

    DRAWN = "drawn"  # anywhere
    PROMPTS = "prompts"  # of several prompts one behind the other, each token one key more than the one before
    EDGES = "edges"  # of lengths around what a tile holds, at starts of no multiple
    BEYOND = "beyond"  # some begin before the first key, end behind the last, or are turned round
    EMPTY = "empty"  # all of them, in each way
    WHOLE = "whole"  # every key
    APART = "apart"  # neighbours see the first keys and the last


@dataclass(frozen=True)
class RaggedCase:
    """One call. `heads` None: the spec's own; `max_window` None: rows of a column for each key.

    `key_gap` bytes lie between keys; `strided` gives every other tensor gaps; `short_sums` as of the paged cases.
    """

    op: ClassVar[str] = "indexer_logits"

    name: str
    tokens: int = 7
    keys: int = 300
    max_window: int | None = None
    key_gap: int = 0
    heads: int | None = None
    contents: Contents = Contents.INTEGER
    windows: Windows = Windows.DRAWN
    fill: bool = False
    unscored: int = 0
    strided: bool = False
    probe: Probe = Probe.PLAIN
    short_sums: bool = False

    @property
    def rows(self) -> int:
        """Rows of scores."""
        return self.tokens

    @property
    def columns(self) -> int:
        """Columns of them."""
        return self.keys if self.max_window is None else self.max_window


def ragged_cases(tier: Tier, keeps_nan: bool, short_sums: bool = False) -> tuple[RaggedCase, ...]:
    """The cases of a tier; names begin with `ragged.`. `keeps_nan`: NaN codes are NaN to the kernel;
    `short_sums` as of a case.
    """
    cases = [*_contents_cases(keeps_nan), *_window_cases(), *_place_cases(), *_shape_cases(), *_probe_cases()]
    if tier == "full":
        cases += _large_cases()
    return tuple(replace(case, short_sums=short_sums) for case in cases)


def _contents_cases(keeps_nan: bool) -> Iterator[RaggedCase]:
    for contents in Contents:
        if contents is not Contents.NAN_KEYS or keeps_nan:
            yield RaggedCase(f"{PREFIX}.contents.{contents}", contents=contents)


def _window_cases() -> Iterator[RaggedCase]:
    for windows, fill, most in product(Windows, (False, True), (None, 90)):
        form = f"{'.compressed' if most else ''}{'.fill' if fill else ''}"
        yield RaggedCase(f"{PREFIX}.window.{windows}{form}", 19, 200, most, windows=windows, fill=fill)
    for unscored, fill in ((64, False), (150, True)):
        yield RaggedCase(f"{PREFIX}.unscored.{unscored}", 12, unscored=unscored, fill=fill)
    # More passes over keys than a block counts at a time.
    yield RaggedCase(f"{PREFIX}.window.many", 600, 130, windows=Windows.BEYOND, heads=128)


def _place_cases() -> Iterator[RaggedCase]:
    for gap in (0, 4, 16):
        yield RaggedCase(f"{PREFIX}.place.gap{gap}", keys=270, key_gap=gap, contents=Contents.NORMAL)
    yield RaggedCase(f"{PREFIX}.place.strided", contents=Contents.NORMAL, strided=True, key_gap=48)
    yield RaggedCase(f"{PREFIX}.place.strided.compressed", max_window=131, strided=True, fill=True)


def _shape_cases() -> Iterator[RaggedCase]:
    for heads in HEADS:
        yield RaggedCase(f"{PREFIX}.shape.heads{heads}", 35, 150, heads=heads, windows=Windows.PROMPTS)
    for tokens, keys in ((1, 1), (1, 64), (3, 5000)):
        yield RaggedCase(f"{PREFIX}.shape.{tokens}x{keys}", tokens, keys, windows=Windows.WHOLE)


def _probe_cases() -> Iterator[RaggedCase]:
    for probe in (Probe.REPEATED, Probe.GRAPH, Probe.ALONE):
        yield RaggedCase(f"{PREFIX}.{probe}", 9, 700, contents=Contents.NORMAL, probe=probe, fill=True)


def _large_cases() -> Iterator[RaggedCase]:
    for tokens, keys, most in ((4096, 8192, None), (512, 32768, None), (256, 131072, 32768)):
        name = f"{PREFIX}.large.{tokens}x{keys}"
        yield RaggedCase(name, tokens, keys, most, contents=Contents.NORMAL, windows=Windows.PROMPTS)
    yield RaggedCase(f"{PREFIX}.large.repeated", 64, 9000, contents=Contents.NORMAL, probe=Probe.REPEATED)
