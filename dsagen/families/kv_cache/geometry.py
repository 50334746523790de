"""What the kernels need to know of a format and a rule: places in bytes, groups, and the C++ types that code them."""

from __future__ import annotations

from collections.abc import Mapping

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, ElementType
from dsagen.kv_format import KV_FORMATS, KvFormat, Layout, ScaleKind, Segment
from dsagen.kv_rule import Rounding, WriteRule

THREADS = 128
# Eight blocks of 128 threads on an SM, so at most 64 registers each: a lane holds 16 dims, and needs about 40.
MIN_BLOCKS_PER_SM = 8
# Dims that a lane handles at a time, which is what 16 B of e4m3 hold.
PIECE_DIMS = 16
WARP_DIMS = 32 * PIECE_DIMS

CODES_CPP: Mapping[ElementType, str] = {
    E4M3: "kv::E4m3Codes",
    E2M1: "kv::E2m1Codes",
    BF16: "kv::Bf16Codes",
    FP16: "kv::Fp16Codes",
    FP32: "kv::Fp32Codes",
}
SCALE_CPP: Mapping[ScaleKind, str] = {
    ScaleKind.NONE: "kv::NoScale",
    ScaleKind.FP32: "kv::Fp32Scale",
    ScaleKind.FP32_POW2: "kv::Fp32Scale",
    ScaleKind.UE8M0: "kv::Ue8m0Scale",
    ScaleKind.E4M3: "kv::E4m3Scale",
}
ROW_TYPES: Mapping[str, ElementType] = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
_ROUNDING_CODES = {Rounding.NONE: 0, Rounding.POW2: 1, Rounding.E4M3: 2}

Constants = tuple[tuple[str, int | float], ...]


def format_constants(record: KvFormat) -> Constants:
    """Where a token's segments lie and how its dims are grouped."""
    values = record.segment("values")
    scales = record.segment("scales") if record.scale_groups else None
    rope = record.segment("rope") if record.has_segment("rope") else None
    return (
        ("kThreads", THREADS),
        ("kValueDims", values.count),
        ("kGroupDims", record.scale_group_dims),
        ("kValuesStride", values.token_stride_bytes),
        ("kScalesSection", scales.section_bytes_per_token if scales else 0),
        ("kScalesStride", scales.token_stride_bytes if scales else 0),
        ("kScalesOffset", scales.offset_bytes if scales else 0),
        ("kRopeDims", rope.count if rope else 0),
        ("kRopeStride", rope.token_stride_bytes if rope else 0),
        ("kRopeOffset", rope.offset_bytes if rope else 0),
        ("kRopeApart", int(rope is not None and rope.tensor != values.tensor)),
    )


def write_constants(record: KvFormat, rule: WriteRule | None) -> Constants:
    """What a writer needs besides: the rule's arithmetic, bytes behind the scales, and where rotary dims begin."""
    own: Constants = (("kJoinDim", record.d_nope), ("kScalePadBytes", scale_pad_bytes(record)))
    if rule is None:
        return own
    return (
        *own,
        ("kMost", rule.most),
        ("kInverseOfMost", 1.0 / rule.most),
        ("kAmaxFloor", rule.amax_floor),
        ("kScaleFloor", rule.scale_floor),
        ("kRounding", _ROUNDING_CODES[rule.rounding]),
        ("kMultiplies", int(rule.multiplies)),
        ("kByReciprocal", int(rule.by_reciprocal)),
    )


def scale_pad_bytes(record: KvFormat) -> int:
    """Bytes behind a token's scales that belong to it and hold nothing: writers clear them, readers ignore them."""
    if not record.scale_groups or record.layout is not Layout.PAGE_SPLIT:
        return 0
    scales = record.segment("scales")
    return scales.token_stride_bytes - scales.size_bytes


def other_layout(record: KvFormat) -> KvFormat | None:
    """The format with the same content in the other layout, None where there is one layout."""
    for other in KV_FORMATS.values():
        same = (other.family, other.scale_kind, other.d_qk) == (record.family, record.scale_kind, record.d_qk)
        if same and other.layout is not record.layout:
            return other
    return None


def convert_constants(source: KvFormat, target: KvFormat) -> Constants:
    """Places of the two segments of a token in both layouts."""

    def places(name: str, values: Segment, scales: Segment) -> Constants:
        return (
            (f"k{name}Stride", values.token_stride_bytes),
            (f"k{name}Section", scales.section_bytes_per_token),
            (f"k{name}ScaleStride", scales.token_stride_bytes),
            (f"k{name}ScaleOffset", scales.offset_bytes),
        )

    return (
        ("kThreads", THREADS),
        ("kDataBytes", target.segment("values").size_bytes),
        ("kScaleBytes", target.segment("scales").size_bytes),
        *places("Source", source.segment("values"), source.segment("scales")),
        *places("Target", target.segment("values"), target.segment("scales")),
    )


def moved_bytes(record: KvFormat, row_bytes: int) -> int:
    """Bytes that a token needs to be written or read: its own in the cache, and those of its row."""
    return sum(segment.size_bytes for segment in record.segments) + scale_pad_bytes(record) + row_bytes
