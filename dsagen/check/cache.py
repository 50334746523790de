"""Caches for tests: rows quantised as writers do, placed by the record's byte map into a pool full of poison."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, UE4M3, UE8M0, ElementType
from dsagen.families.sparse_decode.reference import CacheBytes
from dsagen.kv_format import KvFormat, ScaleKind

_FP8_MAX, _FP4_MAX = 448.0, 6.0
_MIN_SCALE = 1e-4
_TORCH_DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn}

Segments = Mapping[str, Tensor]


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
    segments: dict[str, Tensor] = {}
    values = x.float()
    if record.scale_groups:
        grouped = values[:, : record.scaled_dims].reshape(-1, record.scale_groups, record.scale_group_dims)
        scale = _scales(record, grouped.abs().amax(2), rule)
        segments["scales"] = encode(record.segment("scales").element, scale)
        values = torch.cat(((grouped / scale.unsqueeze(2)).flatten(1), values[:, record.scaled_dims :]), 1)
    for segment in record.data_segments:
        segments[segment.name] = encode(
            segment.element, values[:, segment.first_dim : segment.first_dim + segment.count]
        )
    return segments


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


def write_tokens(record: KvFormat, caches: Mapping[str, Tensor], ids: Tensor, segments: Segments) -> None:
    """Place the segments' bytes [ids, bytes] at int64 `ids` (page * page_size + slot), each of them once."""
    for segment in record.segments:
        words, where = CacheBytes.of(caches[segment.tensor]).words(segment, ids)
        words[where] = segments[segment.name].contiguous().view(words.dtype)


def encode(element: ElementType, values: Tensor) -> Tensor:
    """uint8 [n, bytes] of fp32 values [n, elements]: nearest, ties to even, saturating; scales must be exact."""
    if element is E2M1:
        return _encode_fp4(values)
    if element is UE8M0:
        return (values.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    if element in (E4M3, UE4M3):
        return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
    return values.to(_TORCH_DTYPES[element]).contiguous().view(torch.uint8)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for whole exponents in -126 .. 127, made of bits since exp2 and pow may round on a device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _scales(record: KvFormat, amax: Tensor, rule: ScaleRule) -> Tensor:
    if record.scale_kind is ScaleKind.E4M3:
        return (amax / _FP4_MAX).clamp(2.0**-9, _FP8_MAX).to(torch.float8_e4m3fn).float()
    scale = amax / _FP8_MAX
    if rule is ScaleRule.RAW:
        return scale.clamp_min(torch.finfo(torch.float32).tiny)
    mantissa, exponent = torch.frexp(scale.clamp_min(_MIN_SCALE))
    return power_of_two(exponent - (mantissa == 0.5).int())


def _encode_fp4(values: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code; what rounds to zero keeps its sign."""
    magnitudes, even_wins = _fp4_midpoints()
    size = values.abs().unsqueeze(-1)
    above = (size > magnitudes.to(values.device)) | (
        (size == magnitudes.to(values.device)) & even_wins.to(values.device)
    )
    codes = above.sum(-1).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@cache
def _fp4_midpoints() -> tuple[Tensor, Tensor]:
    """Boundaries between neighbouring magnitudes, and whether a tie goes up."""
    steps = [E2M1.decode(code) for code in range(8)]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(steps)])
    return middles, torch.tensor([code % 2 == 1 for code in range(7)])
