"""Conformance cases of the index cache's ops, as data: contents that quantisers go wrong on, places of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.kv_cases import Contents, Probe

PREFIX = "index"
REPEATS = 20
PAGE_SIZES = (1, 2, 5, 61, 64, 256)
# Behind each page: none, so that pages start at multiples of 4 B or of 16 B as their size has it, and both kinds.
PADS = (0, 4, 192)
# A page stride at which a handful of pages leaves 32 bits of bytes.
FAR_PAD_BYTES = 1 << 28
FAR_PAGES = 18


class Action(StrEnum):
    """What a case calls."""

    WRITE = "write"
    GATHER = "gather"


@dataclass(frozen=True)
class IndexCacheCase:
    """One call. `pad_bytes` lie behind each page; `spare_keys` have no slot; `strided` gives outputs gaps."""

    op: ClassVar[str] = "index_cache"

    name: str
    action: Action
    rows: int = 150
    pages: int = 40
    page_size: int = 5
    pad_bytes: int = 0
    contents: Contents = Contents.NORMAL
    wide_slots: bool = True
    spare_keys: int = 0
    strided: bool = False
    probe: Probe = Probe.PLAIN


def index_cases(tier: Tier) -> tuple[IndexCacheCase, ...]:
    """The cases of a tier; names begin with `index.`."""
    cases: list[IndexCacheCase] = [*contents_cases(), *shape_cases()]
    for action in Action:
        cases += place_cases(action)
        cases += probe_cases(action)
        if tier == "full":
            cases += large_cases(action)
    return tuple(cases)


def contents_cases() -> Iterator[IndexCacheCase]:
    """Writes of every kind of keys."""
    for contents in Contents:
        yield IndexCacheCase(f"{PREFIX}.write.{contents}", Action.WRITE, contents=contents, pad_bytes=4)


def shape_cases() -> Iterator[IndexCacheCase]:
    """Fewer slots than keys, few keys, outputs with gaps."""
    yield IndexCacheCase(f"{PREFIX}.write.spare_keys", Action.WRITE, spare_keys=37)
    yield IndexCacheCase(f"{PREFIX}.write.narrow_slots", Action.WRITE, wide_slots=False, pad_bytes=192)
    yield IndexCacheCase(f"{PREFIX}.gather.strided", Action.GATHER, strided=True)
    for action, rows in product(Action, (1, 3, 17)):
        yield IndexCacheCase(f"{PREFIX}.{action}.rows{rows}", action, rows)


def place_cases(action: Action) -> Iterator[IndexCacheCase]:
    """Page sizes that are and are not powers of two, page strides of 16 and of 4 bytes."""
    for size, pad in product(PAGE_SIZES, PADS):
        yield IndexCacheCase(f"{PREFIX}.{action}.page{size}.pad{pad}", action, 200, -(-230 // size) + 1, size, pad)


def probe_cases(action: Action) -> Iterator[IndexCacheCase]:
    """Repeats that must agree to the bit, and captured graphs."""
    for probe in (Probe.REPEATED, Probe.GRAPH):
        yield IndexCacheCase(f"{PREFIX}.{action}.{probe}", action, 300, 80, pad_bytes=32, probe=probe)


def large_cases(action: Action) -> Iterator[IndexCacheCase]:
    """Many keys, and pools past 32-bit byte offsets."""
    yield IndexCacheCase(f"{PREFIX}.{action}.large.rows", action, 200_000, 4000, 64)
    yield IndexCacheCase(f"{PREFIX}.{action}.large.far", action, 60, FAR_PAGES, 4, FAR_PAD_BYTES)
