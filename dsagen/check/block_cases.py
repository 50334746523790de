"""Conformance cases of the indexer's logits with scores of candidate blocks, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase, Probe

PREFIX = "blocks"


@dataclass(frozen=True)
class BlockCase:
    """One call, as `call` says."""

    op: ClassVar[str] = "indexer_logits"

    name: str
    call: LogitsCase = field(default_factory=lambda: LogitsCase(""))

    @property
    def heads(self) -> int | None:
        """None: the spec's own."""
        return self.call.heads

    @property
    def probe(self) -> Probe:
        """How the op is run."""
        return self.call.probe

    @property
    def rows(self) -> int:
        """Rows of scores."""
        return self.call.rows


def block_cases(tier: Tier, keeps_nan: bool, short_sums: bool = False) -> tuple[BlockCase, ...]:
    """The cases of a tier; names begin with `blocks.`. `keeps_nan`: NaN codes are NaN to the kernel; `short_sums` as of
    a case without blocks.
    """
    cases = [*_contents_cases(keeps_nan), *_length_cases(), *_place_cases()]
    cases.append(BlockCase(f"{PREFIX}.graph", LogitsCase("", 5, 2, 700, contents=Contents.NORMAL, probe=Probe.GRAPH)))
    if tier == "full":
        for batch, next_n, width in ((1, 1, 131072), (16, 2, 32768), (64, 1, 16384)):
            call = LogitsCase("", batch, next_n, width, contents=Contents.NORMAL, lengths=Lengths.WHOLE)
            cases.append(BlockCase(f"{PREFIX}.large.b{batch}.n{next_n}.{width}", call))
    return tuple(replace(case, call=replace(case.call, short_sums=short_sums)) for case in cases)


def _contents_cases(keeps_nan: bool) -> Iterator[BlockCase]:
    for contents in Contents:
        if contents is not Contents.NAN_KEYS or keeps_nan:
            yield BlockCase(f"{PREFIX}.contents.{contents}", LogitsCase("", next_n=2, contents=contents))


def _length_cases() -> Iterator[BlockCase]:
    for lengths in Lengths:
        yield BlockCase(f"{PREFIX}.length.{lengths}", LogitsCase("", 9, 2, 192, lengths=lengths))
    # More tokens than a block counts at a time, of rows that no block of 8 keys divides.
    yield BlockCase(f"{PREFIX}.length.many", LogitsCase("", 400, 1, 130))
    yield BlockCase(f"{PREFIX}.length.unscored", LogitsCase("", 9, 2, 189, unscored=64))


def _place_cases() -> Iterator[BlockCase]:
    for page, pad in ((1, 4), (5, 0), (61, 4), (64, 16)):
        call = LogitsCase("", 2, 2, 270, page, pad, contents=Contents.NORMAL)
        yield BlockCase(f"{PREFIX}.place.page{page}.pad{pad}", call)
    call = LogitsCase("", 4, 3, contents=Contents.NORMAL, strided=True, pad_bytes=48)
    yield BlockCase(f"{PREFIX}.place.strided", call)
    yield BlockCase(f"{PREFIX}.place.wild", LogitsCase("", 4, 2, page_size=5, wild=True, fill=True))
