"""Conformance cases of sparse decode, as data: shapes that other kernels are tested with, and what breaks kernels.

A case says nothing of heads or formats; those come from the spec that is checked. `tile_tokens` of its kernel decides
the widths that force a number of splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import ClassVar, Literal

Tier = Literal["quick", "full"]
TIERS: tuple[Tier, ...] = ("quick", "full")

# (tokens of a sequence, index columns, page size) of FlashMLA's decode tests, April and September generations.
APRIL_SHAPES = (
    (512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61),
    (2046, 2048, 2), (2046, 2048, 64), (2046, 2048, 576),
)  # fmt: skip
SEPTEMBER_SHAPES = (
    (512, 64, 5), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 1), (2046, 2048, 64), (2046, 2048, 576),
)  # fmt: skip
CORNER_SHAPES = ((512, 64, 61), (650, 576, 53))
PEER_SHAPES = tuple(dict.fromkeys(APRIL_SHAPES + SEPTEMBER_SHAPES))
PEER_BATCHES = (4, 74, 321)
PEER_QUERIES = (1, 3)
FIXED_LENGTH_BATCH = 74
CORNER_BATCHES = (1, 4, 74, 321)
CORNER_QUERIES = 3

# Shapes of the second cache, in turn.
EXTRA_SHAPES = ((512, 64, 5), (1024, 576, 2), (512, 64, 69), (1024, 512, 123), (2046, 640, 1), (512, 100, 64))
# Columns of all index rows beyond which a case gets a short one, so that no case grows much.
MOST_EXTRA_COLUMNS = 1 << 17

REPEATS = 20
# More than the 256 splits that a byte could count.
MANY_SPLITS = 300
# Past the 65535 that the y and z extents of a grid allow.
MANY_ROWS = 70000
# Byte offsets past 2^32, so past every 32-bit rule.
FAR_POOL_BYTES = 5 << 30


class Ids(StrEnum):
    """What an index row holds."""

    RANDOM = "random"  # distinct tokens of the request, some columns invalid
    ALL_INVALID = "all_invalid"
    ONE_VALID = "one_valid"
    LAST_VALID = "last_valid"  # only the last live column
    DUPLICATES = "duplicates"  # five tokens, again and again
    SHARED = "shared"  # every query token has the same row


class Lengths(StrEnum):
    """Whether topk_length is given, and its shape."""

    NONE = "none"
    PER_REQUEST = "per_request"
    PER_TOKEN = "per_token"


class Values(StrEnum):
    """What the selected tokens and the queries hold."""

    NORMAL = "normal"  # small keys, an almost flat softmax
    PEAKED = "peaked"  # logits with a deviation of about 4
    MIXED_SCALES = "mixed_scales"  # every code; scale groups of 2^-13, 2^7 and arbitrary ones in each token
    WILD_SCALES = "wild_scales"  # the same, dealt at random, so that a group changes from token to token
    SUBNORMAL = "subnormal"  # subnormal codes only
    RAMP_UP = "ramp_up"  # logits grow by 2^5 in log2 units every 64 columns
    RAMP_DOWN = "ramp_down"
    HUGE = "huge"  # |logit| about 1e4
    NAN_SELECTED = "nan_selected"  # some selected tokens hold NaN in a code, a scale or a rotary element


class Probe(StrEnum):
    """How the op is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # 20 times, equal to the bit
    GRAPH = "graph"  # captured, replayed with other contents
    SIDE_STREAM = "side_stream"
    OTHER_DEVICE = "other_device"  # while another device is current
    BATCH_INVARIANT = "batch_invariant"  # each request alone gives the bits that it gave in the batch


# Values whose magnitude is not about 1, or whose logits are so large that their fp32 rounding shows.
ROUGH_VALUES = frozenset(
    {Values.MIXED_SCALES, Values.WILD_SCALES, Values.SUBNORMAL, Values.RAMP_UP, Values.RAMP_DOWN, Values.HUGE}
)


@dataclass(frozen=True)
class ExtraCase:
    """What the second cache of a case has of its own; the rest is as in the case."""

    kv_tokens: int
    topk: int
    page_size: int
    ids: Ids = Ids.RANDOM
    lengths: Lengths = Lengths.NONE


@dataclass(frozen=True)
class DecodeCase:
    """One run of the op. `kv_tokens` are the tokens of a request, `topk` the columns of an index row.

    `varying`: requests have lengths of 1 .. kv_tokens. `empty_requests`: some have no token. `wild_ids`: invalid ids
    are not only -1, and lengths may exceed the row or be negative. `sink`: attn_sink is given, some of it infinite.
    `strided`: q, indices, lengths and outputs are parts of larger tensors. `padded_pages`: a spare row behind each
    page. `num_splits` forces the split count. `lse` is (base, value of an empty row). `sample_rows` bounds how many
    query tokens are compared; 0 compares all. `extra` is the second cache, which a spec without one does not get.
    Of specs with several KV heads: `own_lists` gives each KV head a list and, where lengths are per token, a length of
    its own; `by_kv_head` lets pages hold the rows of each KV head one after the other.
    """

    op: ClassVar[str] = "sparse_decode"

    name: str
    batch: int
    s_q: int
    kv_tokens: int
    topk: int
    page_size: int
    ids: Ids = Ids.RANDOM
    lengths: Lengths = Lengths.NONE
    values: Values = Values.PEAKED
    varying: bool = False
    empty_requests: bool = False
    wild_ids: bool = False
    sink: bool = False
    strided: bool = False
    padded_pages: bool = False
    num_splits: int | None = None
    lse: tuple[Literal["e", 2], Literal["+inf", "-inf"]] | None = None
    probe: Probe = Probe.PLAIN
    sample_rows: int = 0
    extra: ExtraCase | None = None
    own_lists: bool = False
    by_kv_head: bool = False

    @property
    def extra_topk(self) -> int:
        """Columns of the second cache's index rows, 0 where the call leaves it out."""
        return self.extra.topk if self.extra else 0

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.s_q


def decode_cases(
    tier: Tier,
    tile_tokens: int,
    record_bytes: int,
    keeps_nan: bool = True,
    two_caches: bool = False,
    kv_heads: int = 1,
) -> tuple[DecodeCase, ...]:
    """The cases of a tier for a kernel with tiles of `tile_tokens` and cache records of `record_bytes`.

    `keeps_nan` False leaves out NaN in selected tokens, for kernels that declare to read NaN codes as numbers.
    `two_caches`: the kernel has a second cache, which then is in most cases, and in some of its own. Several `kv_heads`
    have lists of their own in every other case, and every other two cases pages by KV head.
    """
    cases = _one_cache_cases(tier, tile_tokens, record_bytes * kv_heads, keeps_nan)
    if two_caches:
        cases = tuple(with_extra(cases)) + tuple(extra_cases(tile_tokens))
    return cases if kv_heads == 1 else tuple(with_kv_heads(cases))


def _one_cache_cases(tier: Tier, tile_tokens: int, record_bytes: int, keeps_nan: bool) -> tuple[DecodeCase, ...]:
    adversarial = tuple(
        case for case in adversarial_cases(tile_tokens) if keeps_nan or case.values is not Values.NAN_SELECTED
    )
    probes = tuple(probe_cases())
    if tier == "quick":
        peers = tuple(case for case in peer_cases() if case.batch == PEER_BATCHES[0] and case.s_q == PEER_QUERIES[-1])
        return peers + adversarial + probes
    return (*peer_cases(), *corner_cases(), *adversarial, *probes, *large_cases(record_bytes))


def peer_cases() -> Iterator[DecodeCase]:
    """FlashMLA's lists: every shape with each batch and s_q, with and without lengths, varying and fixed requests."""
    for (kv_tokens, topk, page_size), batch, s_q, lengths in product(
        PEER_SHAPES, PEER_BATCHES, PEER_QUERIES, (Lengths.NONE, Lengths.PER_REQUEST)
    ):
        name = f"peer.b{batch}.sq{s_q}.kv{kv_tokens}.topk{topk}.page{page_size}.length_{lengths}"
        case = DecodeCase(
            name,
            batch,
            s_q,
            kv_tokens,
            topk,
            page_size,
            lengths=lengths,
            values=Values.NORMAL,
            varying=True,
            sink=True,
            strided=True,
            padded_pages=True,
        )
        yield case
        if batch == FIXED_LENGTH_BATCH:
            yield replace(case, name=f"{name}.fixed", varying=False, values=Values.PEAKED)


def corner_cases() -> Iterator[DecodeCase]:
    """FlashMLA's corners: nothing selected, requests without tokens, with and without sink."""
    for (kv_tokens, topk, page_size), batch, invalid, empty, sink in product(
        CORNER_SHAPES, CORNER_BATCHES, (False, True), (False, True), (False, True)
    ):
        flags = f"{'.all_invalid' if invalid else ''}{'.empty' if empty else ''}{'.sink' if sink else ''}"
        yield DecodeCase(
            f"corner.b{batch}.kv{kv_tokens}.topk{topk}.page{page_size}{flags}",
            batch,
            CORNER_QUERIES,
            kv_tokens,
            topk,
            page_size,
            ids=Ids.ALL_INVALID if invalid else Ids.RANDOM,
            lengths=Lengths.PER_REQUEST if empty else Lengths.NONE,
            values=Values.NORMAL,
            varying=True,
            empty_requests=empty,
            sink=sink,
            strided=True,
            padded_pages=True,
        )


def adversarial_cases(tile_tokens: int) -> Iterator[DecodeCase]:
    """What is known to break kernels of this kind."""
    base = DecodeCase("", batch=3, s_q=2, kv_tokens=700, topk=200, page_size=64, sink=True, wild_ids=True)
    for ids in (Ids.ALL_INVALID, Ids.ONE_VALID, Ids.LAST_VALID, Ids.DUPLICATES):
        for lengths in (Lengths.NONE, Lengths.PER_TOKEN):
            yield replace(base, name=f"ids.{ids}.length_{lengths}", ids=ids, lengths=lengths)
    for topk in (1, 2, 63, 64, 65, 100, 127, 2047):
        yield replace(
            base, name=f"width.topk{topk}", topk=topk, kv_tokens=max(300, topk + 1), lengths=Lengths.PER_TOKEN
        )
    for page_size in (1, 2, 3, 5, 48, 61, 64, 69, 123, 256, 576):
        case = replace(base, name=f"page.{page_size}", page_size=page_size, strided=True, padded_pages=True)
        yield replace(case, lengths=Lengths.PER_REQUEST, varying=True)
    for values in ROUGH_VALUES_IN_ORDER:
        shared = values in (Values.RAMP_UP, Values.RAMP_DOWN)
        case = replace(base, values=values, ids=Ids.SHARED if shared else Ids.RANDOM, topk=640, sink=False)
        yield replace(case, name=f"values.{values}")
        yield replace(case, name=f"values.{values}.splits3", num_splits=3)
    yield replace(base, name="values.nan_selected", values=Values.NAN_SELECTED, batch=4, topk=300, sink=False)
    nan_split = replace(base, values=Values.NAN_SELECTED, batch=4, topk=tile_tokens * 3, sink=False, num_splits=3)
    yield replace(nan_split, name="values.nan_selected.splits3")
    for num_splits in (1, 2, 3, 7, 8, 32, MANY_SPLITS):
        # The last tile is short, and requests shorter than the row leave splits without a token.
        topk = tile_tokens * num_splits - 5
        case = replace(base, topk=topk, kv_tokens=topk + 64, num_splits=num_splits, lengths=Lengths.PER_TOKEN)
        yield replace(case, name=f"splits.{num_splits}")
    empty = replace(base, topk=tile_tokens * 4, num_splits=4, ids=Ids.ALL_INVALID)
    yield replace(empty, name="splits.4.all_invalid")
    yield replace(empty, name="splits.4.one_valid", ids=Ids.ONE_VALID)
    yield replace(empty, name="splits.4.last_valid", ids=Ids.LAST_VALID, strided=True, page_size=61)
    for base_of_lse, value in (("e", "-inf"), (2, "+inf"), (2, "-inf")):
        lse: tuple[Literal["e", 2], Literal["+inf", "-inf"]] = (base_of_lse, value)  # type: ignore[assignment]
        case = replace(base, lse=lse, empty_requests=True, lengths=Lengths.PER_REQUEST)
        yield replace(case, name=f"lse.base_{base_of_lse}.empty_{value}")
        yield replace(case, name=f"lse.base_{base_of_lse}.empty_{value}.splits2", num_splits=2, topk=tile_tokens * 2)


def probe_cases() -> Iterator[DecodeCase]:
    """Ways of running that a serving process uses."""
    base = DecodeCase(
        "", batch=7, s_q=2, kv_tokens=1500, topk=1100, page_size=64, sink=True, lengths=Lengths.PER_REQUEST
    )
    for probe in Probe:
        if probe is not Probe.PLAIN:
            yield replace(base, name=f"run.{probe}", probe=probe)
    yield replace(base, name="run.graph.splits5", probe=Probe.GRAPH, num_splits=5)
    yield replace(base, name="run.repeated.splits5", probe=Probe.REPEATED, num_splits=5)
    yield replace(base, name="run.repeated.one_row", probe=Probe.REPEATED, batch=1, s_q=1)


def with_extra(cases: Iterable[DecodeCase]) -> Iterator[DecodeCase]:
    """The cases with a second cache: each with the next of the peers' shapes, every fourth without one."""
    lengths = (Lengths.NONE, Lengths.PER_REQUEST, Lengths.PER_TOKEN)
    for number, case in enumerate(cases):
        kv_tokens, topk, page_size = EXTRA_SHAPES[number % len(EXTRA_SHAPES)]
        if number % 4 == 3 or case.name.startswith("large."):
            yield case
            continue
        ids = case.ids if case.ids in (Ids.ALL_INVALID, Ids.SHARED, Ids.DUPLICATES) else Ids.RANDOM
        if case.rows * topk > MOST_EXTRA_COLUMNS:
            kv_tokens, topk = 512, 64
        yield replace(case, extra=ExtraCase(kv_tokens, topk, page_size, ids, lengths[number % 3]))


def with_kv_heads(cases: Iterable[DecodeCase]) -> Iterator[DecodeCase]:
    """The cases for several KV heads, with shared and own lists and both orders of rows in turn."""
    for number, case in enumerate(cases):
        shared = Ids.SHARED in (case.ids, case.extra.ids if case.extra else None)
        yield replace(case, own_lists=number % 2 == 0 and not shared, by_kv_head=number // 2 % 2 == 0)


def extra_cases(tile_tokens: int) -> Iterator[DecodeCase]:
    """What only two caches have: one of them empty, either way, and splits that the border between them crosses."""
    base = DecodeCase("", batch=3, s_q=2, kv_tokens=300, topk=128, page_size=61, sink=True, wild_ids=True)
    extra = ExtraCase(700, 200, 5)
    none, shared = Ids.ALL_INVALID, Ids.SHARED
    yield replace(base, name="extra.left_out")
    yield replace(base, name="extra.none_valid", extra=replace(extra, ids=none))
    yield replace(base, name="extra.main_none_valid", ids=none, extra=extra)
    yield replace(base, name="extra.neither_valid", ids=none, extra=replace(extra, ids=none))
    yield replace(base, name="extra.one_valid", ids=none, extra=replace(extra, ids=Ids.ONE_VALID))
    both = replace(extra, lengths=Lengths.PER_TOKEN)
    yield replace(base, name="extra.lengths", lengths=Lengths.PER_REQUEST, extra=both, padded_pages=True, strided=True)
    for topk, other in ((1, 1), (63, 65), (128, 100), (65, 511), (200, 1), (1, 200)):
        part = ExtraCase(max(300, other + 1), other, 69)
        yield replace(base, name=f"extra.width.{topk}_{other}", topk=topk, extra=part)
    for num_splits in (2, 3, 5, 8):
        part = ExtraCase(4 * tile_tokens + 70, 4 * tile_tokens - 3, 2, lengths=Lengths.PER_TOKEN)
        wide = replace(base, topk=3 * tile_tokens + 5, kv_tokens=4 * tile_tokens, num_splits=num_splits)
        yield replace(wide, name=f"extra.splits.{num_splits}", extra=part, lengths=Lengths.PER_TOKEN)
    rising = replace(base, values=Values.RAMP_UP, ids=shared, topk=200, sink=False)
    yield replace(rising, name="extra.ramp_up", extra=ExtraCase(700, 400, 64, shared))
    yield replace(rising, name="extra.ramp_down", values=Values.RAMP_DOWN, extra=ExtraCase(700, 100, 64, shared))


def large_cases(record_bytes: int) -> Iterator[DecodeCase]:
    """Sizes at which 32-bit arithmetic and grid extents fail."""
    tokens = FAR_POOL_BYTES // record_bytes
    far = DecodeCase("", batch=1, s_q=3, kv_tokens=tokens, topk=2000, page_size=64)
    yield replace(far, name="large.far_pool")
    yield replace(far, name="large.far_pool.page61", page_size=61, kv_tokens=tokens // 61 * 61)
    rows = DecodeCase("", batch=MANY_ROWS, s_q=1, kv_tokens=8, topk=5, page_size=4, sample_rows=512)
    yield replace(rows, name="large.batch")
    yield replace(rows, name="large.s_q", batch=1, s_q=MANY_ROWS, kv_tokens=4096)
    yield replace(rows, name="large.batch.splits2", topk=129, kv_tokens=160, num_splits=2, sample_rows=128)


ROUGH_VALUES_IN_ORDER = tuple(values for values in Values if values in ROUGH_VALUES)
