"""The KV-cache formats that there are, each a record (`dsagen.kv_record`), and how a spec's words find theirs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from dsagen.dtype import BF16, E2M1, E4M3, FP16, FP32, UE4M3, UE8M0, ElementType
from dsagen.errors import SpecError
from dsagen.kv_record import (
    CACHE_ALIGNMENT_BYTES,
    CacheTensor,
    DimAddress,
    KvFormat,
    Layout,
    ScaleKind,
    Segment,
)

__all__ = [
    "CACHE_ALIGNMENT_BYTES",
    "KV_FAMILIES",
    "KV_FORMATS",
    "MAX_PLAIN_DIMS",
    "PLAIN_DIMS_STEP",
    "PLAIN_ELEMENTS",
    "CacheTensor",
    "DimAddress",
    "KvFormat",
    "Layout",
    "ScaleKind",
    "Segment",
    "extra_cache_problem",
    "kv_format",
    "plain_format",
    "resolve_kv_format",
]

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
