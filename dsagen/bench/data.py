"""Inputs of sparse-decode benchmarks: a large random KV pool and distinct random ids, never zeros.

A pool repeats a random template until it has the wanted number of tokens: addresses are distinct, so caches and TLBs
see the real size, while only the template's values have to be drawn. Every sequence of every input set selects from a
region of its own as long as the pool has room for that; then regions are reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dsagen.check.cache import allocate_cache, natural_rule, quantise_rows, write_tokens
from dsagen.errors import SpecError
from dsagen.families.sparse_decode.reference import Source
from dsagen.kv_format import KvFormat, kv_format

# 5.5 GB of V32 records: 256 sequences of 32K tokens.
POOL_TOKENS = 8 << 20
TEMPLATE_TOKENS = 1 << 16

# Gives scores of V32 rows a standard deviation of about 1.4: a softmax that is neither flat nor one-hot.
_Q_DEVIATION = 8.0

# Of rows that a writer quantises: the same for them.
_ROW_DEVIATION = 0.175

# Random keys drawn at once while ids are selected: 512 MB of fp32.
_MAX_KEYS = 1 << 27


@dataclass(frozen=True)
class DecodeCase:
    """One sparse-decode shape: `batch` sequences of `kv_tokens` cached tokens, `s_q` query tokens each.

    `heads` are the query heads on this rank, `topk` the ids of each query token, `page_size` the tokens of a page.
    `extra_format` and `extra_topk` are those of a second cache of as many tokens and as large pages, None without one.
    Raises SpecError for a shape that cannot be drawn.
    """

    kv_format: str
    heads: int
    batch: int
    s_q: int
    topk: int
    kv_tokens: int
    page_size: int
    extra_format: str | None = None
    extra_topk: int | None = None

    def __post_init__(self) -> None:
        kv_format(self.kv_format)
        for name in ("heads", "batch", "s_q", "topk", "kv_tokens", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")
        for name in ("topk", "extra_topk"):
            columns = getattr(self, name) or 0
            if columns > self.kv_tokens:
                raise SpecError(
                    f"{name} {columns} > kv_tokens {self.kv_tokens}: a query cannot select that many distinct tokens; "
                    f"use {name} <= {self.kv_tokens}"
                )

    @property
    def record(self) -> KvFormat:
        """The KV format's record."""
        return kv_format(self.kv_format)

    @property
    def extra_record(self) -> KvFormat | None:
        """The second cache's record."""
        return None if self.extra_format is None else kv_format(self.extra_format)

    @property
    def columns(self) -> int:
        """Ids of each query token, of both caches."""
        return self.topk + (self.extra_topk or 0)

    @property
    def width(self) -> str:
        """The index rows in words, such as "128 + 512"."""
        return f"{self.topk} + {self.extra_topk}" if self.extra_topk else str(self.topk)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what the case does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def queries(self) -> int:
        """Query tokens of one call."""
        return self.batch * self.s_q

    @property
    def kv_bytes(self) -> int:
        """Bytes of the selected cache rows of one call."""
        extra = self.extra_record
        extra_bytes = (self.extra_topk or 0) * extra.record_bytes if extra else 0
        return self.queries * (self.topk * self.record.record_bytes + extra_bytes)

    @property
    def io_bytes(self) -> int:
        """Bytes of q, out, lse and the ids of one call."""
        per_head = (self.record.d_qk + self.record.d_v) * 2 + 4
        return self.queries * (self.heads * per_head + self.columns * 4)

    @property
    def flops(self) -> int:
        """Floating-point operations of one call: two for each multiply-add of both products."""
        return 2 * self.queries * self.heads * self.columns * (self.record.d_qk + self.record.d_v)


@dataclass(frozen=True)
class KvPool:
    """A paged cache and, if asked for, the same tokens as bf16.

    `caches` are the format's tensors [pages, page_size, 1, columns] by name. `k_cache_bf16` is bf16 [tokens, 1, 576]:
    code times scale, rounded once; of formats of 576 dims only.
    """

    caches: Mapping[str, Tensor]
    k_cache_bf16: Tensor | None
    tokens: int

    @property
    def k_cache(self) -> Tensor:
        """The tensor with the values."""
        return next(iter(self.caches.values()))


@dataclass(frozen=True)
class DecodeInputs:
    """One input set of a case.

    `q` bf16 [batch, s_q, heads, d_qk]; `k_cache`, `kpe_cache` and `k_cache_bf16` of the KvPool, shared by all sets;
    `indices` int32 [batch, s_q, topk], physical token ids (page * page_size + offset); `extra` the second cache with
    its own; `sm_scale` multiplies the scores.
    """

    q: Tensor
    k_cache: Tensor
    k_cache_bf16: Tensor | None
    indices: Tensor
    sm_scale: float
    kpe_cache: Tensor | None = None
    extra: Source | None = None


def make_pool(
    format_id: str,
    tokens: int = POOL_TOKENS,
    page_size: int = 64,
    *,
    device: str | torch.device = "cuda",
    seed: int = 1,
    with_bf16: bool = True,
    template_tokens: int = TEMPLATE_TOKENS,
) -> KvPool:
    """A random cache of `tokens` tokens; raises SpecError for an unknown format or a partly filled page."""
    if tokens < page_size or tokens % page_size:
        below = max(1, tokens // page_size) * page_size
        raise SpecError(f"a pool of {tokens} tokens does not fill pages of {page_size}: use {below} tokens")
    record = kv_format(format_id)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    rows = min(template_tokens, tokens)
    if format_id == "bf16":
        template = _normal((rows, record.d_qk), generator, 0.3).bfloat16()
    elif record.family == "v32":
        template = _quantised_rows(record, rows, generator)
    else:
        return KvPool(_paged_pool(record, tokens, page_size, rows, generator), None, tokens)
    cache = _repeat(template, tokens)
    bf16 = None
    if with_bf16:
        plain = cache if format_id == "bf16" else _repeat(dequantise_rows(record, template), tokens)
        bf16 = plain.view(tokens, 1, record.d_qk)
    return KvPool({record.tensors[0].name: cache.view(tokens // page_size, page_size, 1, -1)}, bf16, tokens)


def _paged_pool(
    record: KvFormat, tokens: int, page_size: int, rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Tensors of a pool: pages with what a writer of the format makes of normal rows, repeated."""
    pages, device = -(-rows // page_size), generator.device
    template = allocate_cache(record, pages, page_size, device)
    x = _normal((pages * page_size, record.d_qk), generator, _ROW_DEVIATION).bfloat16()
    ids = torch.arange(pages * page_size, device=device)
    write_tokens(record, template, ids, quantise_rows(record, x, natural_rule(record)))
    return {name: _repeat_pages(cache, tokens // page_size) for name, cache in template.items()}


def _repeat_pages(cache: Tensor, pages: int) -> Tensor:
    """The tensor's pages again and again, with their padding."""
    stride = cache.stride(0)
    whole = torch.as_strided(cache, (cache.shape[0], stride), (stride, 1))
    return _repeat(whole, pages).as_strided((pages, *cache.shape[1:]), cache.stride())


def decode_inputs(
    case: DecodeCase, pool: KvPool, sets: int, *, seed: int = 0, extra_pool: KvPool | None = None
) -> list[DecodeInputs]:
    """`sets` input sets of a case on the pool's device; raises SpecError where a pool does not fit the case."""
    _check_pool(case, case.record, pool)
    generator = torch.Generator(device=pool.k_cache.device)
    generator.manual_seed(seed)
    d_qk = case.record.d_qk
    indices = _physical_ids(case, case.topk, pool, sets, generator)
    extra_indices, extra = None, case.extra_record
    if extra is not None and case.extra_topk:
        if extra_pool is None:
            raise SpecError(f"the case has a second cache ({extra.format_id}) and there is no pool for it: make one")
        _check_pool(case, extra, extra_pool)
        extra_indices = _physical_ids(case, case.extra_topk, extra_pool, sets, generator)
    inputs = []
    for index in range(sets):
        q = _normal((case.batch, case.s_q, case.heads, d_qk), generator, _Q_DEVIATION).bfloat16()
        source = None
        if extra is not None and extra_pool is not None and extra_indices is not None:
            source = Source(extra, extra_pool.caches, extra_indices[index].contiguous())
        tensors = list(pool.caches.values())
        inputs.append(
            DecodeInputs(
                q=q,
                k_cache=tensors[0],
                k_cache_bf16=pool.k_cache_bf16,
                indices=indices[index].contiguous(),
                sm_scale=float(d_qk**-0.5),
                kpe_cache=tensors[1] if len(tensors) > 1 else None,
                extra=source,
            )
        )
    return inputs


def _physical_ids(case: DecodeCase, topk: int, pool: KvPool, sets: int, generator: torch.Generator) -> Tensor:
    """int32 [sets, batch, s_q, topk]: distinct tokens of each sequence's own region of the pool."""
    ids = distinct_ids(sets * case.queries, case.kv_tokens, topk, generator)
    regions = pool.tokens // case.kv_tokens
    region = torch.arange(sets * case.batch, device=generator.device).view(sets, case.batch, 1, 1) % regions
    return (ids.view(sets, case.batch, case.s_q, topk) + region * case.kv_tokens).to(torch.int32)


def dequantise_rows(record: KvFormat, rows: Tensor) -> Tensor:
    """bf16 [tokens, d_qk] of uint8 [tokens, record bytes] in an interleaved format with fp32 scales and bf16 RoPE."""
    codes = _segment(record, rows, "values").contiguous().view(torch.float8_e4m3fn).float()
    scales = _segment(record, rows, "scales").contiguous().view(torch.float32)
    values = codes.view(rows.shape[0], record.scale_groups, record.scale_group_dims) * scales.unsqueeze(-1)
    rope = _segment(record, rows, "rope").contiguous().view(torch.bfloat16)
    return torch.cat([values.flatten(1).bfloat16(), rope], dim=1)


def _quantised_rows(record: KvFormat, tokens: int, generator: torch.Generator) -> Tensor:
    """uint8 [tokens, record bytes]: valid e4m3 codes, arbitrary (not power-of-two) positive fp32 scales, bf16 RoPE."""
    device = generator.device
    rows = torch.empty(tokens, record.record_bytes, dtype=torch.uint8, device=device)
    codes = _normal((tokens, record.segment("values").count), generator, 1.5).clamp(-6, 6).to(torch.float8_e4m3fn)
    exponents = torch.rand((tokens, record.scale_groups), device=device, generator=generator) * 3 - 5
    rope = _normal((tokens, record.segment("rope").count), generator, 0.3).bfloat16()
    _segment(record, rows, "values").copy_(codes.view(torch.uint8))
    _segment(record, rows, "scales").copy_(torch.exp2(exponents).view(torch.uint8))
    _segment(record, rows, "rope").copy_(rope.view(torch.uint8))
    return rows


def _segment(record: KvFormat, rows: Tensor, name: str) -> Tensor:
    segment = record.segment(name)
    return rows[:, segment.offset_bytes : segment.offset_bytes + segment.size_bytes]


def _normal(shape: tuple[int, ...], generator: torch.Generator, deviation: float) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator) * deviation


def _repeat(template: Tensor, tokens: int) -> Tensor:
    return template.repeat(-(-tokens // template.shape[0]), 1)[:tokens]


def distinct_ids(rows: int, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, topk]: in each row distinct ids below `tokens`, in random order."""
    ids = torch.empty(rows, topk, dtype=torch.int64, device=generator.device)
    step = max(1, _MAX_KEYS // tokens)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        keys = torch.rand(count, tokens, device=generator.device, generator=generator)
        ids[first : first + count] = keys.topk(topk, dim=-1).indices
    return ids


def _check_pool(case: DecodeCase, record: KvFormat, pool: KvPool) -> None:
    if case.kv_tokens > pool.tokens:
        raise SpecError(
            f"kv_tokens {case.kv_tokens} is more than the pool's {pool.tokens} tokens: make a larger pool or shorten "
            "the sequences"
        )
    page_size, columns = pool.k_cache.shape[1], pool.k_cache.shape[3]
    wanted = (case.page_size, record.tensors[0].columns)
    if (page_size, columns) != wanted:
        raise SpecError(
            f"the pool has pages of {page_size} tokens x {columns} columns, the case needs {wanted[0]} x {wanted[1]} "
            f"({record.format_id})"
        )
