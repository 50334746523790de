"""Writing and gathering index keys in torch: what every kernel of the family is held to. Runs on any torch device.

Codes of e2m1 are found by distance from every number of the type, powers of two by frexp, places by the format record.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.dtype import E2M1
from dsagen.families.kv_cache.reference import encode, group_scales
from dsagen.index_format import SCALE_WORD_BYTES, UNUSED_SCALE_BYTE, IndexFormat
from dsagen.index_rule import index_rule
from dsagen.kv_rule import WriteRule


def quantise_keys(record: IndexFormat, x: Tensor, rule_id: str) -> tuple[Tensor, Tensor]:
    """(codes uint8 [keys, code bytes], scale words uint8 [keys, 4]) of bf16, fp16 or fp32 keys x [keys, dim].

    A block with a NaN or an infinity becomes a NaN scale over codes 0x7F (e2m1: zeros).
    """
    rule, (keys, dim) = index_rule(record, rule_id), x.shape
    count = record.scale_count(dim)
    blocks = x.float().reshape(keys, count, dim // count)
    scale = group_scales(rule, blocks.abs().amax(2))
    units = blocks * (1.0 / scale).unsqueeze(2) if rule.by_reciprocal else blocks / scale.unsqueeze(2)
    units = torch.where(scale.isnan().unsqueeze(2), torch.nan, units).flatten(1)
    words = torch.full((keys, SCALE_WORD_BYTES), UNUSED_SCALE_BYTE, dtype=torch.uint8, device=x.device)
    stored = encode(record.scale, scale)
    words[:, : stored.shape[1]] = stored
    return _codes(rule, units), words


def write_reference(record: IndexFormat, cache: Tensor, x: Tensor, slots: Tensor, rule_id: str) -> None:
    """Store keys x [keys, dim] at int slots [keys or fewer] of a cache [pages, page_size, 1, bytes].

    The first keys have the slots that there are; a slot that is negative, or past the pool, takes nothing.
    """
    pages, page_size = cache.shape[:2]
    kept = (slots >= 0) & (slots < pages * page_size)
    codes, words = quantise_keys(record, x[: slots.numel()][kept], rule_id)
    code_at, word_at = _places(record, cache, x.shape[1], slots[kept].long())
    flat = _bytes(cache)
    flat[code_at], flat[word_at] = codes, words


def gather_reference(record: IndexFormat, cache: Tensor, dim: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [rows, code bytes], scale words uint8 [rows, 4]) of int slots [rows]; zeros without a slot."""
    pages, page_size = cache.shape[:2]
    codes = torch.zeros(slots.numel(), record.code_bytes(dim), dtype=torch.uint8, device=cache.device)
    words = torch.zeros(slots.numel(), SCALE_WORD_BYTES, dtype=torch.uint8, device=cache.device)
    kept = (slots >= 0) & (slots < pages * page_size)
    code_at, word_at = _places(record, cache, dim, slots[kept].long())
    codes[kept], words[kept] = _bytes(cache)[code_at], _bytes(cache)[word_at]
    return codes, words


def _codes(rule: WriteRule, units: Tensor) -> Tensor:
    """uint8 [n, bytes] of values [n, dim] in units of their scales."""
    if rule.values is not E2M1:
        return encode(rule.values, units)
    steps = torch.tensor([E2M1.decode(code) for code in range(8)], dtype=torch.float64, device=units.device)
    distance = (units.double().abs().unsqueeze(-1) - steps).abs()
    lower = distance.argmin(-1)
    upper = 7 - distance.flip(-1).argmin(-1)
    codes = lower if rule.ties_down else torch.where(lower % 2 == 0, lower, upper)
    signed = torch.signbit(units) & ((codes > 0) | rule.zero_has_sign)
    codes = (codes | signed.long() << 3).masked_fill(units.isnan(), 0).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _places(record: IndexFormat, cache: Tensor, dim: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """int64 indices into the cache's storage: of the codes [slots, code bytes] and of the scale words [slots, 4]."""
    page_size, device = cache.shape[1], cache.device
    page, offset = slots // page_size, slots % page_size
    start: Tensor = page * cache.stride(0) + int(cache.storage_offset())
    codes = start + offset * record.code_bytes(dim)
    words = start + record.scale_byte(dim, page_size, 0) + offset * SCALE_WORD_BYTES
    return (
        codes.unsqueeze(1) + torch.arange(record.code_bytes(dim), device=device),
        words.unsqueeze(1) + torch.arange(SCALE_WORD_BYTES, device=device),
    )


def _bytes(cache: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
