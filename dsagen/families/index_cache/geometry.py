"""What the kernels need to know of a key format and a rule: lanes of a key, places in bytes, and the C++ types."""

from __future__ import annotations

from collections.abc import Mapping

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, ElementType
from dsagen.index_format import SCALE_WORD_BYTES, UNUSED_SCALE_BYTE, IndexFormat
from dsagen.kv_rule import Rounding, WriteRule

THREADS = 128
# Eight blocks of 128 threads on an SM, so at most 64 registers each: a lane holds 16 dims, and needs about 40.
MIN_BLOCKS_PER_SM = 8
# Dims that a lane of a writer takes, and bytes of codes that a lane of a gather moves.
PIECE_DIMS = 16
PIECE_BYTES = 16

ROW_TYPES: Mapping[str, ElementType] = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
ROWS_CPP: Mapping[str, str] = {"bf16": "kv::Bf16Codes", "fp16": "kv::Fp16Codes", "fp32": "kv::Fp32Codes"}
_ROUNDING_CODES = {Rounding.NONE: 0, Rounding.POW2: 1}

Constants = tuple[tuple[str, int | float], ...]


def scale_dims(record: IndexFormat, dim: int) -> int:
    """Dims of a key that share a scale."""
    return dim // record.scale_count(dim)


def codes_cpp(rule: WriteRule) -> str:
    """The type that makes codes."""
    if rule.values is E4M3:
        return "index_cache::E4m3Keys"
    assert rule.values is E2M1
    return f"index_cache::E2m1Keys<{'true' if rule.ties_down else 'false'}>"


def write_constants(record: IndexFormat, dim: int, rule: WriteRule) -> Constants:
    """Dims of a key and of a scale, the bytes of a scale word that no scale has, and the rule's arithmetic."""
    scales_bytes = record.scale_count(dim) * record.scale.bytes_per_element
    filler = bytes(scales_bytes) + bytes([UNUSED_SCALE_BYTE]) * (SCALE_WORD_BYTES - scales_bytes)
    return (
        ("kThreads", THREADS),
        ("kDim", dim),
        ("kScaleDims", scale_dims(record, dim)),
        ("kBlockScaled", int(record.is_block_scaled)),
        ("kWordFiller", int.from_bytes(filler, "little")),
        ("kMost", rule.most),
        ("kInverseOfMost", 1.0 / rule.most),
        ("kAmaxFloor", rule.amax_floor),
        ("kScaleFloor", rule.scale_floor),
        ("kRounding", _ROUNDING_CODES[rule.rounding]),
        ("kMultiplies", int(rule.multiplies)),
        ("kByReciprocal", int(rule.by_reciprocal)),
    )


def gather_constants(record: IndexFormat, dim: int) -> Constants:
    """Bytes of a key's codes."""
    return (("kThreads", THREADS), ("kCodeBytes", record.code_bytes(dim)))


def rows_per_block(role: str, record: IndexFormat, dim: int) -> int:
    """Keys that a block of a role's kernel takes."""
    lanes = dim // PIECE_DIMS if role == "write" else record.code_bytes(dim) // PIECE_BYTES
    return THREADS // lanes


def moved_bytes(role: str, record: IndexFormat, dim: int, rows: str) -> int:
    """Bytes of memory traffic that one key takes in a role."""
    record_bytes = record.record_bytes(dim)
    return record_bytes + (ROW_TYPES[rows].bytes_for(dim) if role == "write" else record_bytes)
