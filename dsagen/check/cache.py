"""Caches for tests: rows quantised as writers do, placed by the record's byte map into a pool full of poison."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from dsagen.families.kv_cache import reference
from dsagen.families.kv_cache.reference import encode, power_of_two, write_tokens
from dsagen.kv_format import KvFormat, ScaleKind
from dsagen.kv_rule import COPY

__all__ = ["ScaleRule", "allocate_cache", "encode", "natural_rule", "power_of_two", "quantise_rows", "write_tokens"]


class ScaleRule(StrEnum):
    """How a writer chooses a group's scale: the least power of two at or above amax / 448, or amax / 448 itself."""

    POW2 = "pow2"
    RAW = "raw"


def natural_rule(record: KvFormat) -> ScaleRule:
    """The most demanding rule that the record's scales allow."""
    return ScaleRule.RAW if record.scale_kind is ScaleKind.FP32 else ScaleRule.POW2


def quantise_rows(record: KvFormat, x: Tensor, rule: ScaleRule) -> dict[str, Tensor]:
    """Bytes uint8 [tokens, segment bytes] by segment name, of bf16 rows x [tokens, d_qk].

    Scales are those of FlashMLA's tests (POW2: clamped to at least 1e-4 before rounding up; FP4: amax / 6 in e4m3)
    or of engines that store amax / 448 (RAW). The padding that some records keep behind their scales is not a segment.
    """
    rule_id = "pow2_scale_floor" if rule is ScaleRule.POW2 else "normal_floor"
    if record.scale_kind is ScaleKind.E4M3:
        rule_id = "e4m3_scale_floor"
    return reference.quantise_rows(record, x, rule_id if record.scale_groups else COPY)


def allocate_cache(
    record: KvFormat, pages: int, page_size: int, device: torch.device | str, extra_bytes: int = 0
) -> dict[str, Tensor]:
    """Cache tensors [pages, page_size, 1, columns] by name, page stride the writer's default plus `extra_bytes`.

    Every byte is poison: 0xFF (a NaN in each element type) in even pages, 0x7F (NaN in e4m3, huge in fp32 and bf16) in
    odd ones, padding included.
    """
    caches = {}
    for tensor in record.tensors:
        stride_bytes = record.default_page_stride_bytes(page_size, tensor.name) + extra_bytes
        pool = torch.empty((pages, stride_bytes), dtype=torch.uint8, device=device)
        pool[0::2] = 0xFF
        pool[1::2] = 0x7F
        shape = (pages, page_size, 1, tensor.logical_stride_bytes)
        rows = pool.as_strided(shape, (stride_bytes, tensor.logical_stride_bytes, tensor.logical_stride_bytes, 1))
        dtype: torch.dtype = getattr(torch, tensor.dtypes[0])
        caches[tensor.name] = rows.view(dtype)
    return caches
