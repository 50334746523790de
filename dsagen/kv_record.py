"""KV-cache formats as records: which bytes of a page hold which element of a token, and what its scale means.

A token is one or more *segments* (values, RoPE, scales). Element `i` of a segment, of the token at `offset` in `page`,
is at

    page * page_stride_bytes + section_bytes_per_token * page_size
        + offset * token_stride_bytes + offset_bytes + i * element size

of the segment's tensor. An interleaved format has one section that starts at byte 0; a page-split format keeps the data
rows of the whole page first and its scale rows behind them. Arithmetic here is in Python integers and never wraps.

A format is declared, never inferred: 528 bytes per token is three different formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dsagen.dtype import FP32, UE4M3, UE8M0, ElementType

# 16-byte loads and cp.async need it of every row; each record below is a multiple, so pages and bases must be too.
CACHE_ALIGNMENT_BYTES = 16


class Layout(StrEnum):
    """Where a token's scales lie: behind its own values, or behind the values of the whole page."""

    INTERLEAVED = "interleaved"
    PAGE_SPLIT = "page_split"


class ScaleKind(StrEnum):
    """What a scale may be. `fp32` is any positive fp32 and must be honoured exactly."""

    NONE = "none"
    FP32 = "fp32"
    FP32_POW2 = "fp32_pow2"
    UE8M0 = "ue8m0"
    E4M3 = "e4m3"


_SCALE_ELEMENTS: dict[ScaleKind, ElementType | None] = {
    ScaleKind.NONE: None,
    ScaleKind.FP32: FP32,
    ScaleKind.FP32_POW2: FP32,
    ScaleKind.UE8M0: UE8M0,
    ScaleKind.E4M3: UE4M3,
}


@dataclass(frozen=True)
class CacheTensor:
    """One tensor [pages, page_size, 1, columns] that carries bytes of the format.

    `columns` counts elements of its dtype. `logical_stride_bytes` is what the tensor's stride(1) must be;
    `io_stride_bytes` is the distance between the data rows of neighbouring tokens. They differ when scales lie behind
    the page (V4: 584 and 576).
    """

    name: str
    dtypes: tuple[str, ...]
    columns: int
    logical_stride_bytes: int
    io_stride_bytes: int


@dataclass(frozen=True)
class Segment:
    """`count` packed elements of each token. `first_dim` is the model dim that element 0 holds (-1 for scales)."""

    name: str
    element: ElementType
    count: int
    tensor: str
    offset_bytes: int
    token_stride_bytes: int
    section_bytes_per_token: int = 0
    first_dim: int = -1

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment in each token."""
        return self.element.bytes_for(self.count)

    def byte_address(self, page: int, offset: int, index: int, page_size: int, page_stride_bytes: int) -> int:
        """Byte of its tensor that holds element `index`; ValueError outside the page or the segment."""
        if page < 0 or not 0 <= offset < page_size or not 0 <= index < self.count:
            raise ValueError(
                f"{self.name}: page {page}, offset {offset}, element {index} is outside pages of {page_size} tokens "
                f"with {self.count} elements each"
            )
        row = self.section_bytes_per_token * page_size + offset * self.token_stride_bytes + self.offset_bytes
        return page * page_stride_bytes + row + index * self.element.bits // 8


@dataclass(frozen=True)
class DimAddress:
    """Where one dim of one token lies: tensor, first byte, and its element's lowest bit there (0, or 4 for FP4)."""

    tensor: str
    byte: int
    shift_bits: int
    element: ElementType


@dataclass(frozen=True)
class KvFormat:
    """One cache format.

    `format_id` names the record everywhere (slugs, evidence), `family` is what a spec writes together with `layout` and
    `scale_kind`. Dims 0 .. d_qk-1 are scored; d_v dims from `first_value` on are summed: 0, or d_qk where values are
    apart from keys. The last `d_rope` of d_qk are rotary (0: the record does not tell), and `rope_in_v` says whether
    they belong to V as well. Writers round the stride of pages up to
    `page_granule_bytes`; readers accept any multiple of CACHE_ALIGNMENT_BYTES.
    """

    format_id: str
    family: str
    layout: Layout
    scale_kind: ScaleKind
    scale_group_dims: int
    d_qk: int
    d_v: int
    d_rope: int
    rope_in_v: bool
    record_bytes: int
    page_granule_bytes: int
    tensors: tuple[CacheTensor, ...]
    segments: tuple[Segment, ...]
    first_value: int = 0

    @property
    def row_dims(self) -> int:
        """Dims of a token: of scored and summed ones together."""
        return max(self.d_qk, self.first_value + self.d_v)

    @property
    def d_nope(self) -> int:
        """Dims without rotary embedding."""
        return self.d_qk - self.d_rope

    @property
    def data_segments(self) -> tuple[Segment, ...]:
        """The segments that hold dims, in order of their dims."""
        return tuple(sorted((s for s in self.segments if s.first_dim >= 0), key=lambda s: s.first_dim))

    @property
    def scaled_dims(self) -> int:
        """How many leading dims have a scale."""
        return self.scale_group_dims * self.scale_groups

    @property
    def scale_groups(self) -> int:
        """Scales of each token."""
        return self.segment("scales").count if self.scale_kind is not ScaleKind.NONE else 0

    @property
    def logical_stride_bytes(self) -> int:
        """stride(1) of the only tensor, in bytes; ValueError when the format has several."""
        return self.cache_tensor().logical_stride_bytes

    @property
    def io_stride_bytes(self) -> int:
        """Distance between data rows of the only tensor, in bytes; ValueError when the format has several."""
        return self.cache_tensor().io_stride_bytes

    def cache_tensor(self, name: str | None = None) -> CacheTensor:
        """The tensor of that name, or the only one."""
        found = [t for t in self.tensors if name is None or t.name == name]
        if len(found) != 1:
            raise ValueError(
                f"{self.format_id}: name one of its tensors {[t.name for t in self.tensors]}, not {name!r}"
            )
        return found[0]

    def has_segment(self, name: str) -> bool:
        """Whether tokens have a segment of that name."""
        return any(s.name == name for s in self.segments)

    def segment(self, name: str) -> Segment:
        """The segment of that name; ValueError when tokens have none."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise ValueError(f"{self.format_id} has no segment {name!r}: it has {[s.name for s in self.segments]}")

    def scale_group(self, dim: int) -> int | None:
        """The index of the scale that multiplies a dim, or None for a dim that is stored as it is."""
        self._check_dim(dim)
        return dim // self.scale_group_dims if dim < self.scaled_dims else None

    def dim_address(self, page: int, offset: int, dim: int, page_size: int, page_stride_bytes: int) -> DimAddress:
        """Where dim 0 .. row_dims-1 of a token lies; `page_stride_bytes` is that of the tensor concerned."""
        self._check_dim(dim)
        segment = next(s for s in self.data_segments if s.first_dim <= dim < s.first_dim + s.count)
        index = dim - segment.first_dim
        byte = segment.byte_address(page, offset, index, page_size, page_stride_bytes)
        return DimAddress(segment.tensor, byte, index * segment.element.bits % 8, segment.element)

    def value_byte(self, page: int, offset: int, index: int, page_size: int, page_stride_bytes: int) -> int:
        """Byte of value `index`; of FP4 pairs the even one has the low four bits."""
        return self.segment("values").byte_address(page, offset, index, page_size, page_stride_bytes)

    def rope_byte(self, page: int, offset: int, index: int, page_size: int, page_stride_bytes: int) -> int:
        """First byte of rotary element `index` where it has a segment of its own; ValueError otherwise."""
        return self.segment("rope").byte_address(page, offset, index, page_size, page_stride_bytes)

    def scale_byte(self, page: int, offset: int, group: int, page_size: int, page_stride_bytes: int) -> int:
        """First byte of scale `group`; ValueError for a format without scales."""
        return self.segment("scales").byte_address(page, offset, group, page_size, page_stride_bytes)

    def page_bytes(self, page_size: int, tensor: str | None = None) -> int:
        """Bytes that a page of `page_size` tokens needs in a tensor, without padding."""
        return page_size * self.cache_tensor(tensor).logical_stride_bytes

    def default_page_stride_bytes(self, page_size: int, tensor: str | None = None) -> int:
        """The page stride that writers of this format allocate."""
        granule = self.page_granule_bytes
        return -(-self.page_bytes(page_size, tensor) // granule) * granule

    def page_stride_problem(self, page_size: int, page_stride_bytes: int, tensor: str | None = None) -> str | None:
        """Why a page stride cannot be read, with the way out; None when it can."""
        least = self.page_bytes(page_size, tensor)
        if page_stride_bytes < least:
            return (
                f"page stride {page_stride_bytes} B is less than the {least} B of {page_size} tokens x "
                f"{self.cache_tensor(tensor).logical_stride_bytes} B ({self.format_id})"
            )
        if page_stride_bytes % CACHE_ALIGNMENT_BYTES:
            return (
                f"page stride {page_stride_bytes} B is no multiple of {CACHE_ALIGNMENT_BYTES} B: pad pages of "
                f"{page_size} tokens to {self.default_page_stride_bytes(page_size, tensor)} B ({self.format_id})"
            )
        return None

    def _check_dim(self, dim: int) -> None:
        if not 0 <= dim < self.row_dims:
            raise ValueError(f"dim {dim} is outside 0 .. {self.row_dims - 1} of {self.format_id}")
