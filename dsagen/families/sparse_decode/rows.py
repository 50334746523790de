"""How a kernel sees the rows of its caches: what is copied into shared memory, and which policy reads it there.

Whatever the placement in a page or over tensors, a row lies in shared memory in one piece: the bytes that are copied as
rows, then its second part where it has one (scales that lie behind the rows of a page, dims in a tensor of their own).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsagen.dtype import BF16, E2M1, E4M3, FP16
from dsagen.kv_format import KvFormat, ScaleKind, Segment
from dsagen.plan import round_up

# Log2 units by which a score may exceed the softmax reference before the reference is raised. bf16 and fp32 have the
# range for far more, which is left to the scales; f16 probabilities have not.
LAZY_THRESHOLD = 16.0
F16_LAZY_THRESHOLD = 8.0


@dataclass(frozen=True)
class Encoding:
    """The policy that reads a format's rows.

    `scaled_copies` copies of the probabilities carry the scales of as many groups of value dims, 0 where scales are
    applied elsewhere or there are none. `raw_keys`: keys become operands from their codes, not by plain matrix loads.
    `narrow_groups`: scores are scaled group by group, and groups have two matrix steps. `heavy_keys`: making operands
    of keys takes most of a score warp's time. `values_apart`: values are no part of the scored row but lie behind it.
    """

    template: str
    header: str
    scaled_copies: int = 0
    raw_keys: bool = True
    narrow_groups: bool = False
    heavy_keys: bool = False
    lazy_threshold: float = LAZY_THRESHOLD
    values_apart: bool = False

    @property
    def probability_copies(self) -> int:
        """Copies of the probabilities in shared memory."""
        return max(1, self.scaled_copies)

    def cpp(self, row: str) -> str:
        """The C++ type for a struct with the constants of a row."""
        plain = f"{self.template}<{row}>"
        return f"kv::ValuesApart<{plain}>" if self.values_apart else plain


@dataclass(frozen=True)
class CacheRows:
    """The rows of one cache: the record, the policy that reads them, and where things lie in shared memory.

    `row_bytes` are copied as a row, `part_bytes` come from elsewhere and lie behind them. `nope_dims` lead and may have
    scales, `rope_dims` follow where they are stored apart from these. Offsets count from the row's begin.
    """

    record: KvFormat
    encoding: Encoding
    row_bytes: int
    part_bytes: int
    nope_dims: int
    rope_dims: int
    rope_offset_bytes: int
    scale_offset_bytes: int

    @property
    def image_bytes(self) -> int:
        """Bytes of a row in shared memory."""
        return self.row_bytes + self.part_bytes

    @property
    def pitch_bytes(self) -> int:
        """Distance between rows in shared memory."""
        return odd_pitch_bytes(self.image_bytes)

    def constants(self, prefix: str = "k") -> Iterator[tuple[str, int]]:
        """Names and values that the unit prints for these rows."""
        yield f"{prefix}NopeDims", self.nope_dims
        yield f"{prefix}RopeDims", self.rope_dims
        yield f"{prefix}RopeOffsetBytes", self.rope_offset_bytes
        yield f"{prefix}RowBytes", self.row_bytes
        yield f"{prefix}PartBytes", self.part_bytes
        yield f"{prefix}PartOffsetBytes", self.row_bytes
        yield f"{prefix}RowPitchBytes", self.pitch_bytes
        yield f"{prefix}ScaleGroupDims", self.record.scale_group_dims
        yield f"{prefix}ScaleOffsetBytes", self.scale_offset_bytes


@dataclass(frozen=True)
class Caches:
    """What a kernel attends to: the main cache's rows, and the second cache's where there is one."""

    main: CacheRows
    extra: CacheRows | None = None

    @property
    def two_formats(self) -> bool:
        """Whether the second cache's rows are read by a policy of their own."""
        return self.extra is not None and self.extra.record.format_id != self.main.record.format_id

    @property
    def each(self) -> tuple[CacheRows, ...]:
        """The rows of either format, once."""
        return (self.main, self.extra) if self.extra is not None and self.two_formats else (self.main,)

    @property
    def d_qk(self) -> int:
        """Dims of a scored row."""
        return self.main.record.d_qk

    @property
    def d_v(self) -> int:
        """Dims of a summed row."""
        return self.main.record.d_v

    @property
    def pitch_bytes(self) -> int:
        """Bytes that a row of either cache takes in a stage."""
        return max(rows.pitch_bytes for rows in self.each)

    @property
    def probability_copies(self) -> int:
        """Copies of the probabilities that either encoding asks for."""
        return max(rows.encoding.probability_copies for rows in self.each)

    @property
    def address_parts(self) -> int:
        """Addresses of a row that bulk copies are issued from."""
        return max(2 if rows.part_bytes >= LONG_PART_BYTES else 1 for rows in self.each)


# Parts of as many bytes are copied as rows are, shorter ones by each row's lane.
LONG_PART_BYTES = 64


def encoding_of(record: KvFormat) -> Encoding | str:
    """The encoding that reads a format, or why none does."""
    values, kind, group_dims = record.segment("values").element, record.scale_kind, record.scale_group_dims
    if values is E4M3 and kind in (ScaleKind.FP32, ScaleKind.FP32_POW2) and group_dims == 128:
        return Encoding("kv::Fp8Fp32Scale", "prims/kv/fp8_fp32_scale.cuh", scaled_copies=record.scale_groups)
    if values is E4M3 and kind is ScaleKind.UE8M0 and group_dims in (32, 64):
        return Encoding("kv::Fp8Ue8m0Scale", "prims/kv/fp8_ue8m0_scale.cuh", narrow_groups=group_dims == 32)
    if values is E2M1 and kind is ScaleKind.E4M3 and group_dims == 16:
        return Encoding("kv::Fp4E4m3Scale", "prims/kv/fp4_e4m3_scale.cuh", heavy_keys=True)
    apart = record.first_value > 0
    plain = "prims/kv/plain_values_apart.cuh" if apart else "prims/kv/plain.cuh"
    if values is BF16 and kind is ScaleKind.NONE:
        return Encoding("kv::Bf16", plain, raw_keys=False, values_apart=apart)
    if values is FP16 and kind is ScaleKind.NONE:
        return Encoding("kv::Fp16", plain, raw_keys=False, lazy_threshold=F16_LAZY_THRESHOLD, values_apart=apart)
    return f"KV format {record.format_id}: {values.name} values with {kind.value} scales are not built"


def cache_rows(record: KvFormat) -> CacheRows | str:
    """The rows of a format as kernels see them, or why no kernel reads them."""
    encoding = encoding_of(record)
    if isinstance(encoding, str):
        return encoding
    values = record.segment("values")
    rope = record.segment("rope") if record.has_segment("rope") else None
    scales = record.segment("scales") if record.scale_groups else None
    row_bytes = record.cache_tensor(values.tensor).io_stride_bytes
    return CacheRows(
        record=record,
        encoding=encoding,
        row_bytes=row_bytes,
        part_bytes=sum(s.token_stride_bytes for s in part_segments(record)),
        nope_dims=values.count,
        rope_dims=rope.count if rope else 0,
        rope_offset_bytes=_image_offset_bytes(record, rope, row_bytes) if rope else 0,
        scale_offset_bytes=_image_offset_bytes(record, scales, row_bytes) if scales else 0,
    )


def part_segments(record: KvFormat) -> tuple[Segment, ...]:
    """The segments that do not lie in the rows that hold the values; at most one in any record."""
    return tuple(segment for segment in record.segments if _is_apart(record, segment))


def _is_apart(record: KvFormat, segment: Segment) -> bool:
    return segment.section_bytes_per_token > 0 or segment.tensor != record.segment("values").tensor


def _image_offset_bytes(record: KvFormat, segment: Segment, row_bytes: int) -> int:
    return segment.offset_bytes + (row_bytes if _is_apart(record, segment) else 0)


def odd_pitch_bytes(row_bytes: int) -> int:
    """The least odd multiple of 16 that holds a row: consecutive rows then start in different banks."""
    pitch = round_up(row_bytes, 16)
    return pitch if pitch % 32 else pitch + 16
