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

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, UE4M3, UE8M0, ElementType
from dsagen.errors import SpecError

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


_KV = "k_cache"
_BYTE_DTYPES = E4M3.torch_dtypes
_PACKED_DTYPES = E2M1.torch_dtypes


def _record_tensor(record_bytes: int, io_stride_bytes: int, dtypes: tuple[str, ...]) -> tuple[CacheTensor, ...]:
    return (CacheTensor(_KV, dtypes, record_bytes, record_bytes, io_stride_bytes),)


_V32 = KvFormat(
    format_id="v32",
    family="v32",
    layout=Layout.INTERLEAVED,
    scale_kind=ScaleKind.FP32,
    scale_group_dims=128,
    d_qk=576,
    d_v=512,
    d_rope=64,
    rope_in_v=False,
    record_bytes=656,
    page_granule_bytes=656,
    tensors=_record_tensor(656, 656, _BYTE_DTYPES),
    segments=(
        Segment("values", E4M3, 512, _KV, 0, 656, first_dim=0),
        Segment("scales", FP32, 4, _KV, 512, 656),
        Segment("rope", BF16, 64, _KV, 528, 656, first_dim=512),
    ),
)

_V32_NOPE = KvFormat(
    format_id="v32_nope",
    family="v32_nope",
    layout=Layout.INTERLEAVED,
    scale_kind=ScaleKind.FP32,
    scale_group_dims=128,
    d_qk=512,
    d_v=512,
    d_rope=0,
    rope_in_v=False,
    record_bytes=528,
    page_granule_bytes=528,
    tensors=_record_tensor(528, 528, _BYTE_DTYPES),
    segments=(
        Segment("values", E4M3, 512, _KV, 0, 528, first_dim=0),
        Segment("scales", FP32, 4, _KV, 512, 528),
    ),
)

# Eight scale bytes per token of which the last is padding that readers ignore.
_V4 = KvFormat(
    format_id="v4",
    family="v4",
    layout=Layout.PAGE_SPLIT,
    scale_kind=ScaleKind.UE8M0,
    scale_group_dims=64,
    d_qk=512,
    d_v=512,
    d_rope=64,
    rope_in_v=True,
    record_bytes=584,
    page_granule_bytes=576,
    tensors=_record_tensor(584, 576, _BYTE_DTYPES),
    segments=(
        Segment("values", E4M3, 448, _KV, 0, 576, first_dim=0),
        Segment("rope", BF16, 64, _KV, 448, 576, first_dim=448),
        Segment("scales", UE8M0, 7, _KV, 0, 8, section_bytes_per_token=576),
    ),
)


def _v41_record(format_id: str, values: ElementType, group_dims: int, layout: Layout, granule_bytes: int) -> KvFormat:
    """V4.1's two formats: 512 quantised dims, rotary ones included, and one scale byte per group."""
    data_bytes, groups = values.bytes_for(512), 512 // group_dims
    record_bytes = data_bytes + groups
    split = layout is Layout.PAGE_SPLIT
    stride_bytes = data_bytes if split else record_bytes
    scale, kind = (UE8M0, ScaleKind.UE8M0) if values is E4M3 else (UE4M3, ScaleKind.E4M3)
    scales = (
        Segment("scales", scale, groups, _KV, 0, groups, section_bytes_per_token=data_bytes)
        if split
        else Segment("scales", scale, groups, _KV, data_bytes, record_bytes)
    )
    return KvFormat(
        format_id=f"{format_id}_{layout.value}",
        family=format_id,
        layout=layout,
        scale_kind=kind,
        scale_group_dims=group_dims,
        d_qk=512,
        d_v=512,
        d_rope=64,
        rope_in_v=True,
        record_bytes=record_bytes,
        page_granule_bytes=granule_bytes,
        tensors=_record_tensor(record_bytes, stride_bytes, _BYTE_DTYPES if values is E4M3 else _PACKED_DTYPES),
        segments=(Segment("values", values, 512, _KV, 0, stride_bytes, first_dim=0), scales),
    )


def _dense_record(format_id: str, element: ElementType, d_qk: int, d_rope: int, d_v: int = 512) -> KvFormat:
    """Unquantised rows of d_qk elements, of which the first d_v are the value."""
    row_bytes = element.bytes_for(d_qk)
    return KvFormat(
        format_id=format_id,
        family=element.name,
        layout=Layout.INTERLEAVED,
        scale_kind=ScaleKind.NONE,
        scale_group_dims=0,
        d_qk=d_qk,
        d_v=d_v,
        d_rope=d_rope,
        rope_in_v=False,
        record_bytes=row_bytes,
        page_granule_bytes=row_bytes,
        tensors=(CacheTensor(_KV, element.torch_dtypes, d_qk, row_bytes, row_bytes),),
        segments=(Segment("values", element, d_qk, _KV, 0, row_bytes, first_dim=0),),
    )


def _apart_record(family: str, d_qk: int, d_v: int) -> KvFormat:
    """Unquantised rows of d_qk key elements in one tensor, and of d_v value elements in another."""
    element = PLAIN_ELEMENTS[family]
    key_bytes, value_bytes = element.bytes_for(d_qk), element.bytes_for(d_v)
    return KvFormat(
        format_id=f"{family}_d{d_qk}_v{d_v}",
        family=family,
        layout=Layout.INTERLEAVED,
        scale_kind=ScaleKind.NONE,
        scale_group_dims=0,
        d_qk=d_qk,
        d_v=d_v,
        d_rope=0,
        rope_in_v=False,
        record_bytes=key_bytes + value_bytes,
        page_granule_bytes=CACHE_ALIGNMENT_BYTES,
        tensors=(
            CacheTensor(_KV, element.torch_dtypes, d_qk, key_bytes, key_bytes),
            CacheTensor("v_cache", element.torch_dtypes, d_v, value_bytes, value_bytes),
        ),
        segments=(
            Segment("values", element, d_qk, _KV, 0, key_bytes, first_dim=0),
            Segment("apart", element, d_v, "v_cache", 0, value_bytes, first_dim=d_qk),
        ),
        first_value=d_qk,
    )


# Latent and rotary parts in two tensors, as some engines allocate them.
_BF16_SPLIT = KvFormat(
    format_id="bf16_split",
    family="bf16_split",
    layout=Layout.INTERLEAVED,
    scale_kind=ScaleKind.NONE,
    scale_group_dims=0,
    d_qk=576,
    d_v=512,
    d_rope=64,
    rope_in_v=False,
    record_bytes=1152,
    page_granule_bytes=CACHE_ALIGNMENT_BYTES,
    tensors=(
        CacheTensor("ckv_cache", BF16.torch_dtypes, 512, 1024, 1024),
        CacheTensor("kpe_cache", BF16.torch_dtypes, 64, 128, 128),
    ),
    segments=(
        Segment("values", BF16, 512, "ckv_cache", 0, 1024, first_dim=0),
        Segment("rope", BF16, 64, "kpe_cache", 0, 128, first_dim=512),
    ),
)

_RECORDS = (
    _V32,
    replace(_V32, format_id="v32_pow2", scale_kind=ScaleKind.FP32_POW2),
    _V32_NOPE,
    _V4,
    _v41_record("v41", E4M3, 32, Layout.INTERLEAVED, 528),
    _v41_record("v41", E4M3, 32, Layout.PAGE_SPLIT, 512),
    _v41_record("v41_fp4", E2M1, 16, Layout.INTERLEAVED, 288),
    _v41_record("v41_fp4", E2M1, 16, Layout.PAGE_SPLIT, 256),
    _dense_record("bf16", BF16, 576, 64),
    _dense_record("bf16_d512", BF16, 512, 0),
    _dense_record("fp16", FP16, 576, 64),
    _dense_record("fp16_d512", FP16, 512, 0),
    _BF16_SPLIT,
)

KV_FORMATS: dict[str, KvFormat] = {record.format_id: record for record in _RECORDS}
# Families of unquantised keys and values in tensors of their own, as MHA and GQA have them.
_APART_ELEMENTS: dict[str, ElementType] = {f"{element.name}_kv": element for element in (BF16, FP16)}
_APART_DIMS = 128  # of both, unless the spec says otherwise
# Families in table order: the names that a spec may write.
KV_FAMILIES: tuple[str, ...] = (*dict.fromkeys(record.family for record in _RECORDS), *_APART_ELEMENTS)

# Families of unquantised rows, which exist in any width.
PLAIN_ELEMENTS: dict[str, ElementType] = {element.name: element for element in (BF16, FP16)} | _APART_ELEMENTS
PLAIN_DIMS_STEP = 64
MAX_PLAIN_DIMS = 1024
_PLAIN_ID = re.compile(r"((?:bf16|fp16)(?:_kv)?)_d([1-9][0-9]{1,3})_v([1-9][0-9]{1,3})\Z", re.ASCII)

# A second cache of another family that one softmax may take beside the first: (main, extra).
_EXTRA_PAIRS = frozenset({("v41", "v41_fp4")})


def kv_format(format_id: str) -> KvFormat:
    """The record of that id, such as `v32` or `v41_interleaved`; SpecError with the nearest one otherwise.

    Beside those of the table there is a record for unquantised rows of any width, such as `bf16_d192_v128`.
    """
    try:
        return KV_FORMATS[format_id]
    except (KeyError, TypeError):
        match = _PLAIN_ID.match(format_id) if isinstance(format_id, str) else None
        if match:
            return plain_format(match[1], int(match[2]), int(match[3]))
        raise SpecError(f"unknown KV format {format_id!r}{_nearest(format_id, KV_FORMATS)}") from None


@cache
def plain_format(family: str, d_qk: int, d_v: int) -> KvFormat:
    """The record of unquantised rows (`bf16` or `fp16`) of d_qk elements whose first d_v are the value, or of keys of
    d_qk elements and values of d_v (`bf16_kv` or `fp16_kv`).

    SpecError unless both are multiples of PLAIN_DIMS_STEP and a value that is part of its row is not the larger one.
    """
    for record in _RECORDS:
        if (record.family, record.d_qk, record.d_v) == (family, d_qk, d_v):
            return record
    steps = d_qk % PLAIN_DIMS_STEP == 0 and d_v % PLAIN_DIMS_STEP == 0
    if family in _APART_ELEMENTS:
        if not steps or not 0 < d_qk <= MAX_PLAIN_DIMS or not 0 < d_v <= MAX_PLAIN_DIMS:
            raise SpecError(
                f"{family} keys of d_qk {d_qk} and values of d_v {d_v}: both must be multiples of {PLAIN_DIMS_STEP} "
                f"up to {MAX_PLAIN_DIMS}"
            )
        return _apart_record(family, d_qk, d_v)
    if not steps or not 0 < d_v <= d_qk <= MAX_PLAIN_DIMS:
        raise SpecError(
            f"{family} rows of d_qk {d_qk} and d_v {d_v}: both must be multiples of {PLAIN_DIMS_STEP}, d_v at most "
            f"d_qk and d_qk at most {MAX_PLAIN_DIMS}"
        )
    return _dense_record(f"{family}_d{d_qk}_v{d_v}", PLAIN_ELEMENTS[family], d_qk, 0, d_v)


def resolve_kv_format(
    family: str, layout: str | None = None, scale: str | None = None, d_qk: int | None = None
) -> KvFormat:
    """The one record of a family that agrees with what is given; SpecError when there is none.

    A record id is accepted as the family too. What is left out takes the first record in table order, which is the
    interleaved layout and the weaker promise about scales (arbitrary fp32).
    """
    candidates = [r for r in _RECORDS if r.format_id == family] or [r for r in _RECORDS if r.family == family]
    # `bf16` is an id and a family: with a width given, the family decides.
    if family in KV_FAMILIES:
        candidates = [r for r in _RECORDS if r.family == family]
    if not candidates and isinstance(family, str):
        if family in _APART_ELEMENTS:
            candidates = [plain_format(family, _APART_DIMS, _APART_DIMS)]
        elif _PLAIN_ID.match(family):
            candidates = [kv_format(family)]
    if not candidates:
        raise SpecError(f"unknown KV format {family!r}{_nearest(family, (*KV_FAMILIES, *KV_FORMATS), KV_FAMILIES)}")
    for what, wanted, attribute in (
        ("layout", layout, "layout"),
        ("scale", scale, "scale_kind"),
        ("d_qk", d_qk, "d_qk"),
    ):
        if wanted is None:
            continue
        values = list(dict.fromkeys(getattr(r, attribute) for r in candidates))
        candidates = [r for r in candidates if getattr(r, attribute) == wanted]
        if not candidates:
            raise SpecError(f"KV format {family!r} has no {what} {wanted!r}: it has {', '.join(map(str, values))}")
    return candidates[0]


def extra_cache_problem(main: KvFormat, extra: KvFormat) -> str | None:
    """Why `extra` cannot be a second cache beside `main`, with what can; None when it can."""
    if extra.format_id == main.format_id:
        return None
    partners = [r.format_id for r in _RECORDS if (main.family, r.family) in _EXTRA_PAIRS and r.layout is main.layout]
    if extra.format_id in partners:
        return None
    allowed = " or ".join([main.format_id, *partners])
    return f"format {extra.format_id} cannot be a second cache beside {main.format_id}: allowed is {allowed}"


def _nearest(name: object, names: Iterable[str], listed: Iterable[str] | None = None) -> str:
    names = tuple(names)
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{hint}: known are {', '.join(listed or names)}"
