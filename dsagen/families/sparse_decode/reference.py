"""Sparse decode in fp64, straight from the format record: what every kernel of the family is held to.

Rows are gathered by the record's byte map and dequantised without rounding (code times scale in fp64); softmax and both
products are fp64 too. Runs on any torch device, in chunks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, ElementType
from dsagen.kv_format import KvFormat, Segment

# Dequantised rows held at once. Large enough for full-rate batched products on a GPU.
CHUNK_BYTES_CPU = 1 << 28
CHUNK_BYTES_DEVICE = 1 << 30

Caches = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Source:
    """A cache and the lists that select from it, as in `sparse_decode_reference`."""

    record: KvFormat
    caches: Caches
    indices: Tensor
    topk_length: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """KV heads of the cache."""
        named = self.caches if isinstance(self.caches, Mapping) else {"": self.caches}
        return min(int(cache.shape[2]) for cache in named.values())

    def of_kv_head(self, head: int) -> Source:
        """What one KV head's query heads see, as a source with one KV head.

        A page of several KV heads is one of page_size x kv_heads rows: those of a token side by side where that is how
        they lie, else those of each KV head.
        """
        named = self.caches if isinstance(self.caches, Mapping) else {self.record.cache_tensor().name: self.caches}
        pages, page_size, kv_heads = next(iter(named.values())).shape[:3]
        by_token = all(rows_go_by_token(cache) for cache in named.values())
        ordered = {name: cache if by_token else cache.transpose(1, 2) for name, cache in named.items()}
        flat = {name: cache.view(pages, page_size * kv_heads, 1, -1) for name, cache in ordered.items()}
        ids = (self.indices[:, :, head] if self.indices.ndim == 4 else self.indices).long()
        slot = ids % page_size * kv_heads + head if by_token else head * page_size + ids % page_size
        # Ids that name no token stay what they are.
        ids = torch.where((ids >= 0) & (ids < pages * page_size), ids // page_size * page_size * kv_heads + slot, -1)
        lengths = self.topk_length
        return Source(
            self.record, flat, ids, lengths[..., head] if lengths is not None and lengths.ndim == 3 else lengths
        )

    def selected(self, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(rows fp64 [n, topk, row_dims], which count) of query tokens; rows that do not count are zero."""
        ids = self.indices[b, s].long()
        pool_tokens = min(tensor.tokens for tensor in cache_tensors(self.record, self.caches).values())
        live = _live_columns(self.indices, self.topk_length)[b, s, None]
        valid = (ids >= 0) & (ids < pool_tokens) & (torch.arange(ids.shape[1], device=ids.device) < live)
        x = read_tokens(self.record, self.caches, ids.masked_fill(~valid, 0).flatten())
        # Whatever lies at id 0 stands in for masked columns: zero it, since 0 * NaN is NaN.
        return x.view(*ids.shape, self.record.row_dims).masked_fill_(~valid.unsqueeze(2), 0.0), valid


@dataclass(frozen=True)
class DecodeReference:
    """Exact results: `out` fp64 [rows, heads, d_v], `lse` fp64 [rows, heads], `peak` the largest finite |logit|.

    `spread`, where asked for, is like `out`: the root of the sum of squares of what each token adds to it, in which
    independent errors of the probabilities show, however much of the sum cancels.
    """

    out: Tensor
    lse: Tensor
    peak: float
    spread: Tensor | None = None


@dataclass(frozen=True)
class CacheBytes:
    """One cache tensor as bytes: `flat` uint8 from the first byte of page 0 to the last byte of the last page."""

    flat: Tensor
    pages: int
    page_size: int
    page_stride_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that ids can address."""
        return self.pages * self.page_size

    @classmethod
    def of(cls, cache: Tensor) -> CacheBytes:
        """View of a [pages, page_size, 1, columns] tensor whose pages have adjacent bytes."""
        rows = cache.view(torch.uint8)
        pages, page_size, _, row_bytes = rows.shape
        stride = rows.stride(0) if pages > 1 else page_size * row_bytes
        length = (pages - 1) * stride + page_size * row_bytes
        return cls(rows.as_strided((length,), (1,)), pages, page_size, stride)

    def words(self, segment: Segment, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The pool as machine words, and which of them hold a segment of some tokens: int64 [ids, words of a token]."""
        section_bytes = segment.section_bytes_per_token * self.page_size
        row = (
            segment.size_bytes,
            self.page_stride_bytes,
            section_bytes,
            segment.token_stride_bytes,
            segment.offset_bytes,
        )
        word_bytes = math.gcd(8, self.flat.numel(), self.flat.storage_offset(), *row)
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
        page, slot = ids // self.page_size, ids % self.page_size
        first = page * self.page_stride_bytes + slot * segment.token_stride_bytes + section_bytes + segment.offset_bytes
        steps = torch.arange(segment.size_bytes // word_bytes, device=ids.device)
        return self.flat.view(dtype), (first // word_bytes).unsqueeze(1) + steps


def rows_go_by_token(cache: Tensor) -> bool:
    """Whether the rows of a token's KV heads lie side by side in a cache [pages, page_size, kv_heads, columns]."""
    return cache.shape[1] == 1 or cache.stride(1) >= cache.shape[2] * cache.shape[3]


def cache_tensors(record: KvFormat, caches: Caches) -> Mapping[str, CacheBytes]:
    """The record's tensors by name; a lone tensor is taken for a format that has one."""
    named = {record.cache_tensor().name: caches} if isinstance(caches, Tensor) else caches
    return {tensor.name: CacheBytes.of(named[tensor.name]) for tensor in record.tensors}


def read_tokens(record: KvFormat, caches: Caches, ids: Tensor) -> Tensor:
    """fp64 [ids, row_dims]: tokens at int64 `ids` (page * page_size + slot, all in the pool), dequantised exactly."""
    tensors = cache_tensors(record, caches)
    rows = torch.empty(ids.numel(), record.row_dims, dtype=torch.float64, device=ids.device)
    for segment in record.data_segments:
        columns = slice(segment.first_dim, segment.first_dim + segment.count)
        rows[:, columns] = _decode(segment.element, _segment_bytes(tensors[segment.tensor], segment, ids))
    if record.scale_groups:
        segment = record.segment("scales")
        scales = _decode(segment.element, _segment_bytes(tensors[segment.tensor], segment, ids))
        grouped = rows[:, : record.scaled_dims].view(-1, record.scale_groups, record.scale_group_dims)
        grouped *= scales.unsqueeze(2)
    return rows


def sparse_decode_reference(
    q: Tensor,
    record: KvFormat,
    caches: Caches,
    indices: Tensor,
    *,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    lse_base: str | int = "e",
    empty_lse: float = math.inf,
    rows: Tensor | None = None,
    extra: Source | None = None,
    with_spread: bool = False,
) -> DecodeReference:
    """Attention of each query token over the tokens that its index row selects.

    caches [pages, page_size, kv_heads, columns]; q [batch, s_q, heads, d_qk], of whose heads each KV head has an equal
    share, in order; with several KV heads indices may be [batch, s_q, kv_heads, topk] and topk_length [batch, s_q,
    kv_heads], else all KV heads have the same. indices int [batch, s_q, topk], page * page_size + slot; topk_length int
    [batch] or [batch, s_q]; attn_sink [heads], a natural-log logit that takes weight and gives no value. An id that is
    negative, at or past the pool, or in a column at or past the length selects nothing; equal ids count as often as
    they occur.
    `extra` is a second cache with lists of its own: both select for the same softmax. A row that selects nothing gives
    out 0 and lse `empty_lse`, whatever the sink. The sink is not part of lse, which is in base e or 2. `rows` int64
    picks some of the batch * s_q query tokens; by default all are computed in order.
    """
    sources = [Source(record, caches, indices, topk_length), *([extra] if extra else [])]
    if rows is None:
        rows = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    kv_heads = sources[0].kv_heads
    if kv_heads == 1:
        found = _attend_all(q, sources, sm_scale, rows, with_spread)
    else:
        shares = q.chunk(kv_heads, 2)
        seen = ([source.of_kv_head(head) for source in sources] for head in range(kv_heads))
        parts = [_attend_all(share, own, sm_scale, rows, with_spread) for share, own in zip(shares, seen, strict=True)]
        out, lse = torch.cat([part.out for part in parts], 1), torch.cat([part.lse for part in parts], 1)
        spread = torch.cat([part.spread for part in parts if part.spread is not None], 1) if with_spread else None
        found = DecodeReference(out, lse, max(part.peak for part in parts), spread)
    out, lse = found.out, found.lse
    empty = lse == -math.inf
    if attn_sink is not None:
        factor = (1 / (1 + torch.exp(attn_sink.double() - lse))).masked_fill(empty, 0.0).unsqueeze(2)
        out *= factor
        if found.spread is not None:
            found.spread.mul_(factor)
    lse = (lse / math.log(2) if lse_base == 2 else lse).masked_fill(empty, empty_lse)
    return DecodeReference(out, lse, found.peak, found.spread)


def _attend_all(q: Tensor, sources: list[Source], sm_scale: float, rows: Tensor, with_spread: bool) -> DecodeReference:
    """Results without a sink for some query tokens, natural lse -inf for those that select nothing; one KV head."""
    s_q, record = q.shape[1], sources[0].record
    out = torch.empty(rows.numel(), q.shape[2], record.d_v, dtype=torch.float64, device=q.device)
    lse = torch.empty(rows.numel(), q.shape[2], dtype=torch.float64, device=q.device)
    spread = torch.empty_like(out) if with_spread else None
    peaks = [torch.zeros((), dtype=torch.float64, device=q.device)]
    budget = CHUNK_BYTES_DEVICE if q.is_cuda else CHUNK_BYTES_CPU
    step = max(1, budget // (8 * record.row_dims * sum(source.indices.shape[2] for source in sources)))
    for first in range(0, rows.numel(), step):
        part = rows[first : first + step]
        b, s = part // s_q, part % s_q
        chunk = slice(first, first + part.numel())
        selected = [source.selected(b, s) for source in sources]
        x, valid = (torch.cat(p, 1) if len(sources) > 1 else p[0] for p in zip(*selected, strict=True))
        probability, lse[chunk], peak = _softmax(q[b, s].double() * sm_scale, x[..., : record.d_qk], valid)
        values = x[..., record.first_value : record.first_value + record.d_v]
        out[chunk] = torch.bmm(probability, values)
        if spread is not None:
            spread[chunk] = torch.bmm(probability.square(), values.square()).sqrt()
        peaks.append(peak)
    return DecodeReference(out, lse, float(torch.stack(peaks).max()), spread)


def combine_reference(
    lse_accum: Tensor,
    o_accum: Tensor,
    *,
    attn_sink: Tensor | None = None,
    lse_base: str | int = "e",
    empty_lse: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Merge of splits: (out fp64 [rows, heads, d_v], lse fp64 [rows, heads]).

    lse_accum [rows, splits, heads] is base 2, -inf for a split without tokens, whose part of o_accum
    [rows, splits, heads, d_v] counts for nothing even where it holds NaN.
    """
    partial = lse_accum.double() * math.log(2)
    total = torch.logsumexp(partial, 1)
    empty = total == -math.inf
    weight = torch.exp(partial - total.masked_fill(empty, 0.0).unsqueeze(1))
    values = o_accum.double().masked_fill((weight == 0).unsqueeze(3), 0.0)
    out = torch.einsum("rsh,rshd->rhd", weight, values)
    if attn_sink is not None:
        out *= (1 / (1 + torch.exp(attn_sink.double() - total))).masked_fill(empty, 0.0).unsqueeze(2)
    lse = (total / math.log(2) if lse_base == 2 else total).masked_fill(empty, empty_lse)
    return out, lse


def _live_columns(indices: Tensor, topk_length: Tensor | None) -> Tensor:
    """int64 [batch, s_q]: columns of each index row that count."""
    batch, s_q, topk = indices.shape
    if topk_length is None:
        return torch.full((batch, s_q), topk, device=indices.device)
    per_token = topk_length.long() if topk_length.ndim == 2 else topk_length.long().unsqueeze(1)
    return per_token.expand(batch, s_q).clamp(0, topk)


def _softmax(q: Tensor, keys: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, natural lse with -inf for empty rows, largest finite |logit|) of scaled q [n, heads, d_qk]."""
    logits = torch.bmm(q, keys.transpose(1, 2))
    peak = logits.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    logits.masked_fill_(~valid.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(logits, 2)
    return torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(2)), lse, peak


def _segment_bytes(cache: CacheBytes, segment: Segment, ids: Tensor) -> Tensor:
    """uint8 [ids, bytes of the segment in a token]."""
    words, where = cache.words(segment, ids)
    return words[where].view(torch.uint8)


def _decode(element: ElementType, data: Tensor) -> Tensor:
    """fp64 [n, elements] of packed bytes [n, bytes]; the even element of an FP4 pair has the low four bits."""
    plain = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn}.get(element)
    if plain is not None:
        return data.view(plain).float().double()
    codes = torch.stack((data & 15, data >> 4), 2).flatten(1) if element is E2M1 else data
    return _decode_table(element).to(data.device)[codes.long()]


@cache
def _decode_table(element: ElementType) -> Tensor:
    return torch.tensor([element.decode(code) for code in range(1 << element.bits)], dtype=torch.float64)
