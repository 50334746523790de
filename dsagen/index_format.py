"""Index-key formats as records: which bytes of a page hold which dim of an index key, and where its scales lie.

Index keys have a cache of their own beside the KV cache. A page holds the codes of all its tokens first, and a word of
four bytes with the scales of each token behind them, so that dim `i` of the token at `offset` in `page` is at

    page * page_stride_bytes + offset * bytes of dim codes + i * bits of a code / 8

(of two codes in a byte the even dim has the low half) and scale `g` at

    page * page_stride_bytes + page_size * bytes of dim codes + offset * 4 + g * bytes of a scale

The tensor handed over has the shape [pages, page_size, 1, bytes of a token], which only counts bytes. Pages may lie
further apart than they are long. The same bytes a token may be another format: 132 are one fp32 scale or four ue8m0.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dsagen.dtype import E2M1, E4M3, FP32, UE8M0, ElementType
from dsagen.errors import SpecError

# Scales of a token: one fp32, or a ue8m0 for each of up to four blocks of dims.
SCALE_WORD_BYTES = 4
# What writers put into bytes of the word that no block has: a scale of 1. Nobody reads them.
UNUSED_SCALE_BYTE = 127


@dataclass(frozen=True)
class IndexFormat:
    """One format of index keys: a code of the type `values` for each dim, and scales of the type `scale`.

    A scale is for `dims_per_scale` dims that adjoin, or for all of a token where that is None.
    """

    format_id: str
    values: ElementType
    scale: ElementType
    dims_per_scale: int | None = None

    @property
    def is_block_scaled(self) -> bool:
        """Whether several blocks of a key's dims have scales of their own; the query then has as many of the kind."""
        return self.dims_per_scale is not None

    def code_bytes(self, dim: int) -> int:
        """Bytes of a token's codes."""
        return self.values.bytes_for(dim)

    def scale_count(self, dim: int) -> int:
        """Scales of a token. At fewer than four ue8m0 the word's other bytes mean nothing."""
        return 1 if self.dims_per_scale is None else -(-dim // self.dims_per_scale)

    def record_bytes(self, dim: int) -> int:
        """Bytes of a token, which is also the last size of the cache tensor."""
        return self.code_bytes(dim) + SCALE_WORD_BYTES

    def page_bytes(self, dim: int, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens, without padding."""
        return page_size * self.record_bytes(dim)

    def value_byte(self, dim: int, offset: int, index: int) -> int:
        """Byte of its page that holds dim `index` of the token at `offset`."""
        return offset * self.code_bytes(dim) + index * self.values.bits // 8

    def value_shift(self, index: int) -> int:
        """Lowest bit of dim `index` in its byte."""
        return index * self.values.bits % 8

    def scale_byte(self, dim: int, page_size: int, offset: int, index: int = 0) -> int:
        """First byte of its page that holds scale `index` of the token at `offset`."""
        return page_size * self.code_bytes(dim) + offset * SCALE_WORD_BYTES + index * self.scale.bytes_per_element


INDEX_FORMATS: dict[str, IndexFormat] = {
    "fp8": IndexFormat("fp8", E4M3, FP32),
    "mxfp8": IndexFormat("mxfp8", E4M3, UE8M0, 32),
    "mxfp4": IndexFormat("mxfp4", E2M1, UE8M0, 32),
}


def index_format(format_id: str) -> IndexFormat:
    """The record of that id; SpecError with the nearest one otherwise."""
    try:
        return INDEX_FORMATS[format_id]
    except (KeyError, TypeError):
        close = difflib.get_close_matches(str(format_id).lower(), INDEX_FORMATS, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SpecError(f"unknown index-key format {format_id!r}{hint}: known are {', '.join(INDEX_FORMATS)}") from None
