"""Conformance cases of decode steps, as data: lengths around k, pages, tokens of a request, layers that share ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.check.indexer_cases import Contents, Lengths

PREFIX = "step"
REPEATS = 5
PAGE_SIZES = (1, 5, 61, 64)
# Columns of the window, where the spec has a second cache; the selection is from the latter.
WINDOW, WINDOW_TOKENS = 40, 90


class Probe(StrEnum):
    """How a step is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # with ids in order, equal to the bit
    GRAPH = "graph"  # captured, replayed with other contents, lengths and tables


@dataclass(frozen=True)
class StepCase:
    """One step. With INTEGER contents scores are exact, and only what a sort of them selects is no NaN in the KV cache.

    `kv_page_size` None: both caches have the same pages. `layers` past the first reuse its ids. `k` is at most what the
    spec has columns for, which a check raises as far as it takes. `short_sums` as of the indexer's cases.
    """

    op: ClassVar[str] = "decode_step"

    name: str
    batch: int = 3
    next_n: int = 1
    width: int = 300
    k: int = 64
    page_size: int = 64
    kv_page_size: int | None = None
    pad_bytes: int = 0
    contents: Contents = Contents.INTEGER
    lengths: Lengths = Lengths.PER_TOKEN
    num_splits: int | None = None
    layers: int = 1
    probe: Probe = Probe.PLAIN
    short_sums: bool = False

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.next_n


def step_cases(tier: Tier, short_sums: bool = False) -> tuple[StepCase, ...]:
    """The cases of a tier; names begin with `step.`."""
    cases = [*_length_cases(), *_page_cases(), *_shape_cases(), *_probe_cases()]
    if tier == "full":
        cases += _large_cases()
    return tuple(replace(case, short_sums=short_sums) for case in cases)


def _length_cases() -> Iterator[StepCase]:
    """Lengths of every kind, around k among them."""
    for lengths in (Lengths.EDGES, Lengths.BEYOND, Lengths.EMPTY, Lengths.PER_REQUEST, Lengths.WHOLE):
        yield StepCase(f"{PREFIX}.lengths.{lengths}", 4, 2, 200, lengths=lengths)
    yield StepCase(f"{PREFIX}.contents.normal", next_n=2, contents=Contents.NORMAL)


def _page_cases() -> Iterator[StepCase]:
    """Page sizes that are and are not powers of two, for both caches and for each."""
    for size in PAGE_SIZES:
        yield StepCase(f"{PREFIX}.page.{size}", 2, page_size=size, pad_bytes=48)
    for size, kv_size in ((64, 5), (5, 64)):
        yield StepCase(f"{PREFIX}.page.{size}.kv{kv_size}", 2, 2, page_size=size, kv_page_size=kv_size)


def _shape_cases() -> Iterator[StepCase]:
    """Tokens of a request, widths of a selection, splits, layers."""
    for next_n, lengths in product((1, 4), (Lengths.PER_TOKEN, Lengths.PER_REQUEST)):
        yield StepCase(f"{PREFIX}.next_n{next_n}.{lengths}", 2, next_n, 150, lengths=lengths)
    for k in (1, 200, 400):
        yield StepCase(f"{PREFIX}.k{k}", 2, k=k)
    yield StepCase(f"{PREFIX}.splits", 2, k=200, num_splits=3)
    yield StepCase(f"{PREFIX}.layers", 2, 2, layers=3)


def _probe_cases() -> Iterator[StepCase]:
    """Repeats and captured graphs."""
    for probe in (Probe.REPEATED, Probe.GRAPH):
        yield StepCase(f"{PREFIX}.{probe}", 3, 2, 250, k=100, contents=Contents.NORMAL, layers=2, probe=probe)


def _large_cases() -> Iterator[StepCase]:
    """Sizes that are served."""
    for batch, next_n, width in ((1, 1, 131072), (16, 1, 32768), (64, 2, 8192)):
        for contents in (Contents.INTEGER, Contents.NORMAL):
            name = f"{PREFIX}.large.b{batch}.n{next_n}.{width}.{contents}"
            yield StepCase(name, batch, next_n, width, 2048, pad_bytes=192, contents=contents)
    yield StepCase(f"{PREFIX}.large.graph", 8, 2, 16384, 2048, contents=Contents.NORMAL, layers=3, probe=Probe.GRAPH)
