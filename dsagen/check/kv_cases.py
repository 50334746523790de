"""Conformance cases of the cache ops, as data: contents that quantisers go wrong on, and places of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import ClassVar

from dsagen.check.cases import Tier
from dsagen.families.kv_cache.op import converts
from dsagen.spec import DeploymentSpec

PREFIX = "kv"
REPEATS = 20
PAGE_SIZES = (1, 2, 5, 48, 64, 256)
# A page stride at which a handful of pages leaves 32 bits of bytes.
FAR_PAD_BYTES = 1 << 28
FAR_PAGES = 18


class Action(StrEnum):
    """What a case calls."""

    WRITE = "write"
    READ = "read"  # by slots
    TABLE = "table"  # a read by a block table
    CONVERT = "convert"


class Contents(StrEnum):
    """What rows hold; pools that are read hold random bytes, so every code and scale."""

    NORMAL = "normal"
    MAGNITUDES = "magnitudes"  # each 16 dims at another power of two, subnormals among them
    ZEROS = "zeros"  # of both signs
    TIES = "ties"  # multiples of a quarter
    LARGE = "large"  # up to the largest number of the dtype
    SPECIAL = "special"  # some NaN and infinities


class Probe(StrEnum):
    """How the op is run."""

    PLAIN = "plain"
    REPEATED = "repeated"  # equal to the bit
    GRAPH = "graph"  # captured, replayed with other contents and slots


@dataclass(frozen=True)
class KvCase:
    """One call. `pad_bytes` lie behind each page; `apart` passes rotary dims in a tensor of their own."""

    op: ClassVar[str] = "kv_cache"

    name: str
    action: Action
    extra: bool = False
    rows: int = 150
    pages: int = 40
    page_size: int = 5
    pad_bytes: int = 0
    contents: Contents = Contents.NORMAL
    wide_slots: bool = True
    apart: bool = False
    probe: Probe = Probe.PLAIN


def kv_cases(spec: DeploymentSpec, tier: Tier) -> tuple[KvCase, ...]:
    """The cases of a tier for a spec's caches; names begin with `kv.`."""
    cases: list[KvCase] = []
    for extra, record in ((False, spec.kv_format), (True, spec.extra_kv_format)):
        if record is None:
            continue
        prefix = f"{PREFIX}.{'extra' if extra else 'main'}"
        actions = [action for action in Action if action is not Action.CONVERT or converts(record)]
        cases += contents_cases(prefix, extra, record.d_rope > 0)
        for action in actions:
            cases += place_cases(prefix, extra, action)
            cases += probe_cases(prefix, extra, action)
            if tier == "full":
                cases += large_cases(prefix, extra, action)
    return tuple(cases)


def contents_cases(prefix: str, extra: bool, has_rope: bool) -> Iterator[KvCase]:
    """Writes of every kind of rows, with rotary dims in the rows and apart."""
    for contents, apart in product(Contents, (False, True) if has_rope else (False,)):
        name = f"{prefix}.write.{contents}{'.apart' if apart else ''}"
        yield KvCase(name, Action.WRITE, extra, contents=contents, apart=apart)


def place_cases(prefix: str, extra: bool, action: Action) -> Iterator[KvCase]:
    """Page sizes that are and are not powers of two, padded pages, slots of both widths, few rows."""
    for size, padded in product(PAGE_SIZES, (0, 48)):
        name = f"{prefix}.{action}.page{size}{'.padded' if padded else ''}"
        pages = -(-230 // size) + 1
        yield KvCase(name, action, extra, 200, pages, size, padded, wide_slots=padded == 0)
    for rows in (1, 3, 5):
        yield KvCase(f"{prefix}.{action}.rows{rows}", action, extra, rows)


def probe_cases(prefix: str, extra: bool, action: Action) -> Iterator[KvCase]:
    """Repeats that must agree to the bit, and captured graphs."""
    for probe in (Probe.REPEATED, Probe.GRAPH):
        yield KvCase(f"{prefix}.{action}.{probe}", action, extra, 300, 80, pad_bytes=32, probe=probe)


def large_cases(prefix: str, extra: bool, action: Action) -> Iterator[KvCase]:
    """Many rows, and pools past 32-bit byte offsets."""
    yield KvCase(f"{prefix}.{action}.large.rows", action, extra, 200_000, 4000, 64)
    yield KvCase(f"{prefix}.{action}.large.far", action, extra, 60, FAR_PAGES, 4, FAR_PAD_BYTES)
