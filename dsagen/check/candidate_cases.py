"""Conformance cases of the indexer's logits in candidate blocks, as data: lists, blocks, places of keys, contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.indexer_cases import HEADS, Contents, Lengths, LogitsCase, Probe

PREFIX = "candidates"


class Lists(StrEnum):
    """What lists of blocks hold."""

    DRAWN = "drawn"  # some that the token sees, each once, and slots without one, in any order
    SORTED = "sorted"  # those that it sees, rising, then slots without one
    WILD = "wild"  # any int32: blocks twice, of other tokens or of no table, negative numbers of all kinds
    EMPTY = "empty"  # no block at all


@dataclass(frozen=True)
class CandidateCase:
    """One call: keys, lengths and contents of `call`, and a list of `slots` for each token."""

    op: ClassVar[str] = "indexer_logits"

    name: str
    call: LogitsCase = field(default_factory=lambda: LogitsCase(""))
    slots: int = 21
    block_size: int = 8
    lists: Lists = Lists.DRAWN

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

    @property
    def columns(self) -> int:
        """Columns of scores."""
        return self.slots * self.block_size


def candidate_cases(tier: Tier, keeps_nan: bool) -> tuple[CandidateCase, ...]:
    """The cases of a tier; names begin with `candidates.`. `keeps_nan`: NaN codes are NaN to the kernel."""
    cases = [*_contents_cases(keeps_nan), *_list_cases(), *_place_cases(), *_shape_cases(), *_probe_cases()]
    if tier == "full":
        cases += _large_cases()
    return tuple(cases)


def _contents_cases(keeps_nan: bool) -> Iterator[CandidateCase]:
    for contents in Contents:
        if contents is not Contents.NAN_KEYS or keeps_nan:
            call = LogitsCase("", next_n=2, contents=contents)
            yield CandidateCase(f"{PREFIX}.contents.{contents}", call)


def _list_cases() -> Iterator[CandidateCase]:
    for lists, size in product(Lists, (8, 16)):
        call = LogitsCase("", 3, 3, 200)
        yield CandidateCase(f"{PREFIX}.list.{lists}.block{size}", call, 17, size, lists)
    for lengths in Lengths:
        yield CandidateCase(f"{PREFIX}.length.{lengths}", LogitsCase("", 9, 2, 192, lengths=lengths), 30)
    # More tokens than a block counts at a time.
    yield CandidateCase(f"{PREFIX}.list.many", LogitsCase("", 400, 1, 130), 3, lists=Lists.SORTED)


def _place_cases() -> Iterator[CandidateCase]:
    for page, pad, size in product((5, 8, 64, 256), (0, 4), (8, 16)):
        call = LogitsCase("", 2, 2, 270, page, pad, contents=Contents.NORMAL)
        yield CandidateCase(f"{PREFIX}.place.page{page}.pad{pad}.block{size}", call, block_size=size)
    call = LogitsCase("", 4, 3, contents=Contents.NORMAL, strided=True, pad_bytes=48)
    yield CandidateCase(f"{PREFIX}.place.strided", call)
    yield CandidateCase(f"{PREFIX}.place.wild", LogitsCase("", 4, 2, page_size=5, wild=True), lists=Lists.SORTED)


def _shape_cases() -> Iterator[CandidateCase]:
    for heads in HEADS:
        yield CandidateCase(f"{PREFIX}.shape.heads{heads}", LogitsCase("", 2, 3, heads=heads))
    for next_n in (1, 8):
        call = LogitsCase("", 2, next_n, 150, lengths=Lengths.PER_REQUEST)
        yield CandidateCase(f"{PREFIX}.shape.next_n{next_n}", call)
    for slots in (1, 8, 9, 700):
        yield CandidateCase(f"{PREFIX}.shape.slots{slots}", LogitsCase("", 2, 1, 6000), slots, lists=Lists.SORTED)


def _probe_cases() -> Iterator[CandidateCase]:
    for probe in (Probe.REPEATED, Probe.GRAPH, Probe.ALONE):
        call = LogitsCase("", 5, 2, 700, contents=Contents.NORMAL, probe=probe)
        yield CandidateCase(f"{PREFIX}.{probe}", call, 60)


def _large_cases() -> Iterator[CandidateCase]:
    for batch, next_n, width in ((1, 1, 131072), (16, 2, 32768), (64, 1, 16384)):
        call = LogitsCase("", batch, next_n, width, contents=Contents.NORMAL, lengths=Lengths.WHOLE)
        yield CandidateCase(f"{PREFIX}.large.b{batch}.n{next_n}.{width}", call, 2048)
