"""Rows of every KV format for the host model: bytes by segment, made without what dsagen makes them with."""

from __future__ import annotations

import numpy as np

from dsagen.kv_format import KvFormat

# ---- number formats -------------------------------------------------------------------------------------------------


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Rounded to bf16 (nearest even), as bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """Exact values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_table() -> np.ndarray:
    """Values of the 256 codes; two are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(code & 0x7F == 0x7F, np.nan, np.where(code & 0x80, -magnitude, magnitude))


def random_rows(
    record: KvFormat, random: np.random.Generator, count: int, level: np.ndarray, row_scale: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Bytes of each segment [count, bytes] and exact values [count, d_qk]; with a ramp the last 64 dims are `level`."""
    if record.scale_groups == 0:
        return _plain_rows(record, random, count, level, row_scale)
    dims, group_dims = record.scaled_dims, record.scale_group_dims
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) if record.family == "v41_fp4" else e4m3_table()[:127]
    spread = numbers[-1] / 3.7
    magnitude = np.abs(random.standard_normal((count, dims))) * spread
    codes = np.abs(magnitude[..., None] - numbers).argmin(2) if len(numbers) == 8 else _nearest(numbers, magnitude)
    signs = random.integers(0, 2, codes.shape)
    scales = np.exp(random.standard_normal((count, record.scale_groups)) * 0.7) * row_scale / spread
    scale_bytes, scales = _stored_scales(record, scales)
    values = numbers[codes] * np.where(signs, -1.0, 1.0) * np.repeat(scales, group_dims, axis=1)
    if level.any() and not record.has_segment("rope"):
        # A code of 1 under a scale that is the level, as nearly as the format has it.
        first = (dims - 64) // group_dims
        own, exact = _stored_scales(record, np.repeat(level[:, None], record.scale_groups - first, axis=1))
        width = own.shape[1] // (record.scale_groups - first)
        scale_bytes[:, first * width :] = own
        begin = first * group_dims
        codes[:, begin:], signs[:, begin:], values[:, begin:] = 0, 0, 0
        codes[:, dims - 64 :] = int(np.flatnonzero(numbers == 1)[0])
        values[:, dims - 64 :] = np.repeat(exact, group_dims, axis=1)[:, begin - dims :][:, -64:]
    if len(numbers) == 8:
        nibbles = (codes | signs << 3).astype(np.uint8)
        code_bytes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    else:
        code_bytes = (codes | signs << 7).astype(np.uint8)
    segments = {"values": code_bytes, "scales": scale_bytes}
    if record.has_segment("rope"):
        rope = bf16_bits(np.repeat(level[:, None], 64, axis=1) if level.any() else random.standard_normal((count, 64)))
        segments["rope"] = rope.view(np.uint8).reshape(count, 128)
        values = np.concatenate([values, bf16_value(rope)], axis=1)
    return segments, values


def _nearest(numbers: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    above = np.searchsorted(numbers, magnitude).clip(1, len(numbers) - 1)
    return np.where(magnitude - numbers[above - 1] < numbers[above] - magnitude, above - 1, above)


def _stored_scales(record: KvFormat, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of scales near the given ones, and their exact values."""
    kind = record.scale_kind.value
    if kind == "ue8m0":
        exponents = np.clip(np.round(np.log2(np.maximum(scales, 1e-30))), -126, 127)
        return (exponents + 127).astype(np.uint8), 2.0**exponents
    if kind == "e4m3":
        numbers = e4m3_table()[:127]
        codes = _nearest(numbers, np.abs(scales))
        return codes.astype(np.uint8), numbers[codes]
    stored = scales.astype(np.float32)
    return np.ascontiguousarray(stored).view(np.uint8), stored.astype(np.float64)


def _plain_rows(
    record: KvFormat, random: np.random.Generator, count: int, level: np.ndarray, row_scale: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The same of formats whose elements are numbers as they are."""
    values = random.standard_normal((count, record.d_qk)) * row_scale
    if level.any():
        values[:, -64:] = level[:, None]
    if record.family == "fp16":
        halves = values.astype(np.float16)
        bits, exact = halves.view(np.uint16), halves.astype(np.float64)
    else:
        bits = bf16_bits(values)
        exact = bf16_value(bits)
    segments = {}
    for segment in record.data_segments:
        part = np.ascontiguousarray(bits[:, segment.first_dim : segment.first_dim + segment.count])
        segments[segment.name] = part.view(np.uint8).reshape(count, 2 * segment.count)
    return segments, exact
