"""Conformance cases of decode steps, as data: lengths around k, pages, tokens of a request, layers that share ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any, ClassVar

from dsagen.check.cases import Tier
from dsagen.check.indexer_cases import Contents, Lengths

PREFIX = "step"
REPEATS = 5
PAGE_SIZES = (1, 5, 61, 64)
# Columns of the window, where the spec has a second cache; the selection is from the latter.
WINDOW, WINDOW_TOKENS = 40, 90


# Blocks of 8 keys that each token of a step with candidate blocks may have.
CANDIDATE_BLOCKS = 12


class Selects(StrEnum):
    """What a layer attends to."""

    ALL = "all"  # the best of all keys
    AGAIN = "again"  # what the layer before it selected
    CHOOSE = "choose"  # the best of all keys, and from here on there are candidate blocks
    USE = "use"  # the best of the keys in these


# Layers of a step whose indexer's results several share, and those of V4.1, in the order of the model.
SHARED = (Selects.ALL, Selects.AGAIN, Selects.AGAIN)
CHOSEN = (Selects.CHOOSE, Selects.USE)
CHOSEN_SHARED = (Selects.CHOOSE, Selects.AGAIN, Selects.USE, Selects.AGAIN)
EVERY_KIND = (Selects.ALL, Selects.AGAIN, *CHOSEN_SHARED, Selects.USE, Selects.AGAIN)


class Probe(StrEnum):
    """How a step is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # with ids in order, equal to the bit
    GRAPH = "graph"  # captured, replayed with other contents, lengths and tables


@dataclass(frozen=True)
class StepCase:
    """One step. With INTEGER contents scores are exact, and only what a sort of them selects is no NaN in the KV cache.

    `kv_page_size` None: both caches have the same pages. `layers` say what each selects, in turn; each that selects has
    queries and weights of its own, and they share index keys. `candidate_blocks` are those of a token, where layers
    choose any. `k` is at most what the spec has columns for, which a check raises as far as it takes. Launches overlap
    where the arch has that, unless `overlap` leaves it to the plan, which few requests do not. `short_sums` as of the
    indexer's cases.
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
    layers: tuple[Selects, ...] = (Selects.ALL,)
    candidate_blocks: int | None = None
    probe: Probe = Probe.PLAIN
    overlap: bool = True
    short_sums: bool = False

    def __post_init__(self) -> None:
        scoring = [layer for layer in self.layers if layer is not Selects.AGAIN]
        assert self.layers[0] is not Selects.AGAIN, "a first layer has nothing to attend to again"
        # What a step leaves of scores is the last layer's; those of others are known where they are exact.
        exact = self.contents is Contents.INTEGER
        assert exact or scoring in ([Selects.ALL], list(CHOSEN)), "scores of each layer have to be known"
        chosen = scoring.count(Selects.CHOOSE)
        assert chosen == (self.candidate_blocks is not None), "blocks are for layers of which one chooses them"

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.next_n


def step_cases(
    tier: Tier, short_sums: bool = False, with_candidates: bool = False, with_counts: bool = False
) -> tuple[StepCase, ...]:
    """The cases of a tier; names begin with `step.`, with `step.candidates.` where layers choose blocks, and with
    `step.counted.` where scores are counted as they are made.
    """
    cases = [*_length_cases(), *_page_cases(), *_shape_cases(), *_probe_cases()]
    cases += _candidate_cases() if with_candidates else ()
    cases += _counted_cases() if with_counts else ()
    if tier == "full":
        cases += _large_counted_cases() if with_counts else ()
        cases += _large_cases()
        cases += _large_candidate_cases() if with_candidates else ()
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
    yield StepCase(f"{PREFIX}.layers", 2, 2, layers=SHARED)
    yield StepCase(f"{PREFIX}.apart", 2, width=150, overlap=False)


def _probe_cases() -> Iterator[StepCase]:
    """Repeats and captured graphs."""
    for probe in (Probe.REPEATED, Probe.GRAPH):
        yield StepCase(f"{PREFIX}.{probe}", 3, 2, 250, k=100, contents=Contents.NORMAL, layers=SHARED[:2], probe=probe)


def _large_cases() -> Iterator[StepCase]:
    """Sizes that are served."""
    for batch, next_n, width in ((1, 1, 131072), (16, 1, 32768), (64, 2, 8192)):
        for contents in (Contents.INTEGER, Contents.NORMAL):
            name = f"{PREFIX}.large.b{batch}.n{next_n}.{width}.{contents}"
            yield StepCase(name, batch, next_n, width, 2048, pad_bytes=192, contents=contents)
    yield StepCase(
        f"{PREFIX}.large.graph", 8, 2, 16384, 2048, contents=Contents.NORMAL, layers=SHARED, probe=Probe.GRAPH
    )


# Longer rows than a block holds, of either dtype of scores.
_SHARED_WIDTHS = (33_000, 66_000)


def _counted_cases() -> Iterator[StepCase]:
    """Rows that blocks share, if no clusters hold them: one beside a token that sees no key, a request's tokens."""
    for width in _SHARED_WIDTHS:
        yield StepCase(f"{PREFIX}.counted.one_long.{width}", 2, 1, width, lengths=Lengths.ONE_LONG)
    yield StepCase(f"{PREFIX}.counted.next_n2", 1, 2, 33_000, 200, lengths=Lengths.PER_REQUEST, page_size=61)


def _large_counted_cases() -> Iterator[StepCase]:
    """Several such rows, again and again, and captured."""
    for probe in (Probe.REPEATED, Probe.GRAPH):
        more: dict[str, Any] = {"contents": Contents.NORMAL, "layers": SHARED[:2], "probe": probe}
        yield StepCase(f"{PREFIX}.counted.large.{probe}", 3, 1, 70_000, 2048, **more)
    yield StepCase(f"{PREFIX}.counted.large.b16", 16, 1, 70_000, 2048, contents=Contents.NORMAL)
    # Longer than clusters hold.
    yield StepCase(f"{PREFIX}.counted.large.past_clusters", 2, 1, 530_000, 2048, lengths=Lengths.ONE_LONG)


def _candidate_cases() -> Iterator[StepCase]:
    """Layers that choose blocks and layers that select inside of them."""
    prefix = f"{PREFIX}.candidates"

    def case(name: str, batch: int = 3, next_n: int = 1, width: int = 300, **more: Any) -> StepCase:
        given = {"layers": CHOSEN, "candidate_blocks": CANDIDATE_BLOCKS, **more}
        return StepCase(f"{prefix}.{name}", batch, next_n, width, **given)

    for lengths in (Lengths.EDGES, Lengths.BEYOND, Lengths.EMPTY, Lengths.PER_REQUEST, Lengths.WHOLE):
        yield case(f"lengths.{lengths}", 4, 2, 200, lengths=lengths)
    # Blocks of 8 that end behind the keys that the step is for, which longer lengths would show.
    yield case("lengths.beyond.width203", 4, 2, 203, lengths=Lengths.BEYOND)
    yield case("contents.normal", next_n=2, contents=Contents.NORMAL, layers=CHOSEN_SHARED)
    # Pages of index keys that blocks lie across, and pages of one block and of some of the KV cache.
    for size, kv_size in ((5, 24), (64, 8), (8, 64)):
        yield case(f"page.{size}.kv{kv_size}", 2, 2, page_size=size, kv_page_size=kv_size, pad_bytes=48)
    # The newest block alone; fewer keys in blocks than are selected; as many blocks as there are, and more.
    for blocks in (1, 5, 38, 60):
        yield case(f"blocks{blocks}", 2, candidate_blocks=blocks)
    for k in (1, 200):
        yield case(f"k{k}", 2, k=k)
    yield case("next_n4", 2, 4, 150)
    yield case("splits", 2, k=90, num_splits=3)
    yield case("layers", 2, 2, layers=EVERY_KIND)
    yield case("apart", 2, width=150, candidate_blocks=12, overlap=False)
    for probe in (Probe.REPEATED, Probe.GRAPH):
        more: dict[str, Any] = {"contents": Contents.NORMAL, "layers": CHOSEN_SHARED, "probe": probe}
        yield case(f"{probe}", 3, 2, 250, k=100, candidate_blocks=20, **more)


def _large_candidate_cases() -> Iterator[StepCase]:
    """Sizes that are served: 2048 blocks."""
    for batch, next_n, width in ((1, 1, 131072), (16, 1, 32768), (32, 2, 20480)):
        for contents in (Contents.INTEGER, Contents.NORMAL):
            name = f"{PREFIX}.candidates.large.b{batch}.n{next_n}.{width}.{contents}"
            more: dict[str, Any] = {"contents": contents, "layers": CHOSEN, "candidate_blocks": 2048}
            yield StepCase(name, batch, next_n, width, 512, pad_bytes=192, **more)
    yield StepCase(
        f"{PREFIX}.candidates.large.graph", 8, 2, 32768, 512, contents=Contents.NORMAL, layers=CHOSEN_SHARED,
        candidate_blocks=2048, probe=Probe.GRAPH,
    )  # fmt: skip
