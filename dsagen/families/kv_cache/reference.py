"""Writing and reading cache rows in torch: what every kernel of the family is held to. Runs on any torch device.

Codes are found by torch's casts and by comparison with midpoints, powers of two by frexp, and places by the byte map.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, UE4M3, UE8M0, ElementType
from dsagen.families.kv_cache.geometry import scale_pad_bytes
from dsagen.families.sparse_decode.reference import CacheBytes, read_tokens
from dsagen.kv_format import KvFormat
from dsagen.kv_rule import Rounding, WriteRule, write_rule

_E4M3_MAX = 448.0
_TORCH_DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn}
# Rows decoded at once.
_CHUNK_ROWS = 1 << 16

Caches = Mapping[str, Tensor]
Segments = Mapping[str, Tensor]


def quantise_rows(record: KvFormat, x: Tensor, rule_id: str) -> dict[str, Tensor]:
    """Bytes uint8 [rows, segment bytes] by segment name, of bf16, fp16 or fp32 rows x [rows, d_qk].

    A group with a NaN, and an e4m3 group with an infinity, becomes a NaN scale over codes 0x7F (e2m1: zeros).
    """
    rule, segments = write_rule(record, rule_id), {}
    if rule is not None:
        grouped = x[:, : record.scaled_dims].float().reshape(-1, record.scale_groups, record.scale_group_dims)
        scale = group_scales(rule, grouped.abs().amax(2))
        units = grouped * (1.0 / scale).unsqueeze(2) if rule.by_reciprocal else grouped / scale.unsqueeze(2)
        units = torch.where(scale.isnan().unsqueeze(2), torch.nan, units).flatten(1)
        segments["scales"] = encode(record.segment("scales").element, scale)
        segments["values"] = encode(rule.values, units)
    for segment in record.data_segments:
        if segment.name not in segments:
            part = x[:, segment.first_dim : segment.first_dim + segment.count]
            segments[segment.name] = encode(segment.element, part)
    return segments


def group_scales(rule: WriteRule, amax: Tensor) -> Tensor:
    """fp32 scales of groups with those largest magnitudes."""
    # As a tensor: on a device torch multiplies by the reciprocal of a number that it divides by.
    most = torch.tensor(rule.most, device=amax.device)
    if rule.amax_floor:
        amax = amax.clamp_min(rule.amax_floor)
    scale = amax * (1.0 / most) if rule.multiplies else amax / most
    if rule.scale_floor:
        scale = scale.clamp_min(rule.scale_floor)
    match rule.rounding:
        case Rounding.E4M3:
            return scale.clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn).float()
        case Rounding.POW2:
            mantissa, exponent = torch.frexp(scale.masked_fill(~scale.isfinite(), 1.0))
            power = power_of_two(exponent - (mantissa == 0.5).int())
            return torch.where(scale.isfinite(), power, torch.nan)
    return torch.where(scale.isfinite(), scale, torch.nan)


def write_reference(record: KvFormat, caches: Caches, x: Tensor, slots: Tensor, rule_id: str) -> None:
    """Store rows x [rows, d_qk] at int slots [rows]; a slot that is negative, or past the pool, takes nothing."""
    tokens = min(CacheBytes.of(cache).tokens for cache in caches.values())
    kept = (slots >= 0) & (slots < tokens)
    segments = quantise_rows(record, x[kept], rule_id)
    write_tokens(record, caches, slots[kept].long(), segments)
    clear_padding(record, caches, slots[kept].long())


def clear_padding(record: KvFormat, caches: Caches, ids: Tensor) -> None:
    """Zero the bytes that some records keep behind a token's scales."""
    for byte in range(scale_pad_bytes(record)):
        scales = record.segment("scales")
        pool = CacheBytes.of(caches[scales.tensor])
        page, slot = ids // pool.page_size, ids % pool.page_size
        first = page * pool.page_stride_bytes + scales.section_bytes_per_token * pool.page_size
        pool.flat[first + slot * scales.token_stride_bytes + scales.size_bytes + byte] = 0


def read_reference(record: KvFormat, caches: Caches, slots: Tensor) -> Tensor:
    """bf16 [rows, d_qk] of int slots [rows]: code times scale in fp32, rounded to bf16; zeros without a slot."""
    tokens = min(CacheBytes.of(cache).tokens for cache in caches.values())
    rows = torch.zeros(slots.numel(), record.d_qk, dtype=torch.bfloat16, device=slots.device)
    kept = ((slots >= 0) & (slots < tokens)).nonzero().flatten()
    for first in range(0, kept.numel(), _CHUNK_ROWS):
        part = kept[first : first + _CHUNK_ROWS]
        # The product is exact in fp64, so this is the one rounding to fp32 and the one to bf16.
        rows[part] = read_tokens(record, caches, slots[part].long()).float().bfloat16()
    return rows


def table_slots(
    block_table: Tensor, row_starts: Tensor, token_starts: Tensor | None, page_size: int, rows: int
) -> Tensor:
    """int64 slots [rows] that a block table means, -1 where it has none; row by row, in Python."""
    table, starts = block_table.tolist(), row_starts.tolist()
    first = [0] * len(table) if token_starts is None else token_starts.tolist()
    slots = [-1] * rows
    for request, pages in enumerate(table):
        for row in range(max(starts[request], 0), min(starts[request + 1], rows)):
            position = first[request] + row - starts[request]
            column = position // page_size
            if 0 <= position < 1 << 31 and column < len(pages) and pages[column] >= 0:
                slots[row] = pages[column] * page_size + position % page_size
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)


def convert_reference(
    source: KvFormat, source_caches: Caches, target: KvFormat, caches: Caches, from_slots: Tensor, to_slots: Tensor
) -> None:
    """Copy tokens between two layouts, segment by segment; a slot that either pool lacks is left out."""
    held = torch.ones_like(from_slots, dtype=torch.bool)
    for slots, pools in ((from_slots, source_caches), (to_slots, caches)):
        held &= (slots >= 0) & (slots < min(CacheBytes.of(pool).tokens for pool in pools.values()))
    segments = {}
    for segment in source.segments:
        words, where = CacheBytes.of(source_caches[segment.tensor]).words(segment, from_slots[held].long())
        segments[segment.name] = words[where].contiguous().view(torch.uint8)
    write_tokens(target, caches, to_slots[held].long(), segments)


def write_tokens(record: KvFormat, caches: Caches, ids: Tensor, segments: Segments) -> None:
    """Place the segments' bytes [ids, bytes] at int64 `ids` (page * page_size + slot), each of them once."""
    for segment in record.segments:
        words, where = CacheBytes.of(caches[segment.tensor]).words(segment, ids)
        words[where] = segments[segment.name].contiguous().view(words.dtype)


def encode(element: ElementType, values: Tensor) -> Tensor:
    """uint8 [n, bytes] of values [n, elements]: nearest, ties to even; eight bits and fewer saturate.

    NaN is 0x7F, in e2m1 +0, and 0x7FFF where a number is rounded to 16 bits; numbers that need no rounding keep theirs.
    """
    if element is E2M1:
        return _encode_fp4(values)
    if element is UE8M0:
        return (values.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    if element in (E4M3, UE4M3):
        codes = values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
        return torch.where(values.isnan(), 0x7F, codes)
    dtype = _TORCH_DTYPES[element]
    rounded = values.to(dtype).contiguous()
    if values.dtype is not dtype and dtype.itemsize == 2:
        rounded = torch.where(
            values.isnan(), torch.tensor(0x7FFF, dtype=torch.int16, device=values.device), rounded.view(torch.int16)
        )
    return rounded.contiguous().view(torch.uint8)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for whole exponents in -126 .. 127, made of bits since exp2 and pow may round on a device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _encode_fp4(values: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code; what rounds to zero keeps its sign."""
    magnitudes, even_wins = (table.to(values.device) for table in _fp4_midpoints())
    size = values.abs().unsqueeze(-1)
    above = (size > magnitudes) | ((size == magnitudes) & even_wins)
    codes = above.sum(-1).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    codes = codes.masked_fill(values.isnan(), 0)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@cache
def _fp4_midpoints() -> tuple[Tensor, Tensor]:
    """Boundaries between neighbouring magnitudes, and whether a tie goes up."""
    steps = [E2M1.decode(code) for code in range(8)]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(steps)])
    return middles, torch.tensor([code % 2 == 1 for code in range(7)])
