"""Inputs of sparse-decode benchmarks: a large random KV pool and distinct random ids, never zeros.

A pool repeats a random template until it has the wanted number of tokens: addresses are distinct, so caches and TLBs
see the real size, while only the template's values have to be drawn. Every sequence of every input set selects from a
region of its own as long as the pool has room for that; then regions are reused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.errors import SpecError
from dsagen.kv_format import KvFormat, kv_format

BENCH_FORMATS = ("v32", "bf16")

# 5.5 GB of V32 records: 256 sequences of 32K tokens.
POOL_TOKENS = 8 << 20
TEMPLATE_TOKENS = 1 << 16

# Gives scores a standard deviation of about 1.4: a softmax that is neither flat nor one-hot.
_Q_DEVIATION = 8.0

# Random keys drawn at once while ids are selected: 512 MB of fp32.
_MAX_KEYS = 1 << 27


@dataclass(frozen=True)
class DecodeCase:
    """One sparse-decode shape: `batch` sequences of `kv_tokens` cached tokens, `s_q` query tokens each.

    `heads` are the query heads on this rank, `topk` the ids of each query token, `page_size` the tokens of a page.
    Raises SpecError for a shape that cannot be drawn.
    """

    kv_format: str
    heads: int
    batch: int
    s_q: int
    topk: int
    kv_tokens: int
    page_size: int

    def __post_init__(self) -> None:
        if self.kv_format not in BENCH_FORMATS:
            raise SpecError(f"kv_format {self.kv_format!r}: benchmark data exists for {', '.join(BENCH_FORMATS)}")
        for name in ("heads", "batch", "s_q", "topk", "kv_tokens", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")
        if self.topk > self.kv_tokens:
            raise SpecError(
                f"topk {self.topk} > kv_tokens {self.kv_tokens}: a query cannot select that many distinct tokens; "
                f"use topk <= {self.kv_tokens}"
            )

    @property
    def record(self) -> KvFormat:
        """The KV format's record."""
        return kv_format(self.kv_format)

    @property
    def queries(self) -> int:
        """Query tokens of one call."""
        return self.batch * self.s_q

    @property
    def kv_bytes(self) -> int:
        """Bytes of the selected cache rows of one call."""
        return self.queries * self.topk * self.record.record_bytes

    @property
    def io_bytes(self) -> int:
        """Bytes of q, out, lse and the ids of one call."""
        per_head = (self.record.d_qk + self.record.d_v) * 2 + 4
        return self.queries * (self.heads * per_head + self.topk * 4)

    @property
    def flops(self) -> int:
        """Floating-point operations of one call: two for each multiply-add of both products."""
        return 2 * self.queries * self.heads * self.topk * (self.record.d_qk + self.record.d_v)


@dataclass(frozen=True)
class KvPool:
    """A paged cache and, if asked for, the same tokens as bf16.

    `k_cache` is uint8 [pages, page_size, 1, record bytes] for byte formats, bf16 [pages, page_size, 1, 576] for bf16.
    `k_cache_bf16` is bf16 [tokens, 1, 576]: code times scale, rounded once.
    """

    k_cache: Tensor
    k_cache_bf16: Tensor | None
    tokens: int


@dataclass(frozen=True)
class DecodeInputs:
    """One input set of a case.

    `q` bf16 [batch, s_q, heads, 576]; `k_cache` and `k_cache_bf16` as in KvPool, shared by all sets; `indices` int32
    [batch, s_q, topk], physical token ids (page * page_size + offset); `sm_scale` multiplies the scores.
    """

    q: Tensor
    k_cache: Tensor
    k_cache_bf16: Tensor | None
    indices: Tensor
    sm_scale: float


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
    if format_id not in BENCH_FORMATS:
        raise SpecError(f"kv_format {format_id!r}: benchmark data exists for {', '.join(BENCH_FORMATS)}")
    if tokens < page_size or tokens % page_size:
        below = max(1, tokens // page_size) * page_size
        raise SpecError(f"a pool of {tokens} tokens does not fill pages of {page_size}: use {below} tokens")
    record = kv_format(format_id)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    rows = min(template_tokens, tokens)
    if format_id == "bf16":
        template = _normal((rows, record.d_qk), generator, 0.3).bfloat16()
        cache = _repeat(template, tokens)
        bf16 = cache.view(tokens, 1, record.d_qk) if with_bf16 else None
    else:
        template = _quantised_rows(record, rows, generator)
        cache = _repeat(template, tokens)
        dequantised = _repeat(dequantise_rows(record, template), tokens) if with_bf16 else None
        bf16 = dequantised.view(tokens, 1, record.d_qk) if dequantised is not None else None
    return KvPool(cache.view(tokens // page_size, page_size, 1, -1), bf16, tokens)


def decode_inputs(case: DecodeCase, pool: KvPool, sets: int, *, seed: int = 0) -> list[DecodeInputs]:
    """`sets` input sets of a case on the pool's device; raises SpecError where the pool does not fit the case."""
    _check_pool(case, pool)
    device = pool.k_cache.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    d_qk = case.record.d_qk
    ids = _distinct_ids(sets * case.queries, case.kv_tokens, case.topk, generator)
    regions = pool.tokens // case.kv_tokens
    region = torch.arange(sets * case.batch, device=device).view(sets, case.batch, 1, 1) % regions
    physical = (ids.view(sets, case.batch, case.s_q, case.topk) + region * case.kv_tokens).to(torch.int32)
    inputs = []
    for index in range(sets):
        q = _normal((case.batch, case.s_q, case.heads, d_qk), generator, _Q_DEVIATION).bfloat16()
        inputs.append(
            DecodeInputs(
                q=q,
                k_cache=pool.k_cache,
                k_cache_bf16=pool.k_cache_bf16,
                indices=physical[index].contiguous(),
                sm_scale=float(d_qk**-0.5),
            )
        )
    return inputs


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


def _distinct_ids(rows: int, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, topk]: in each row distinct ids below `tokens`, in random order."""
    ids = torch.empty(rows, topk, dtype=torch.int64, device=generator.device)
    step = max(1, _MAX_KEYS // tokens)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        keys = torch.rand(count, tokens, device=generator.device, generator=generator)
        ids[first : first + count] = keys.topk(topk, dim=-1).indices
    return ids


def _check_pool(case: DecodeCase, pool: KvPool) -> None:
    if case.kv_tokens > pool.tokens:
        raise SpecError(
            f"kv_tokens {case.kv_tokens} is more than the pool's {pool.tokens} tokens: make a larger pool or shorten "
            "the sequences"
        )
    page_size, columns = pool.k_cache.shape[1], pool.k_cache.shape[3]
    wanted = (case.page_size, case.record.cache_tensor().columns)
    if (page_size, columns) != wanted:
        raise SpecError(
            f"the pool has pages of {page_size} tokens x {columns} columns, the case needs {wanted[0]} x {wanted[1]} "
            f"({case.kv_format})"
        )
