"""Index-key formats as records: which bytes of a page hold which dim of an index key, and where its scale lies.

Index keys have a cache of their own beside the KV cache. A page holds the codes of all its tokens first, and their
scales behind them, so that value `i` of the token at `offset` in `page` is at

    page * page_stride_bytes + offset * dim + i

and its scale at `page * page_stride_bytes + page_size * dim + offset * scale_bytes`. The tensor handed over has
the shape [pages, page_size, 1, dim + scale_bytes], which only counts bytes. Pages may lie further apart than they are
long.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dsagen.dtype import E4M3, FP32, ElementType
from dsagen.errors import SpecError


@dataclass(frozen=True)
class IndexFormat:
    """One format of index keys: `values` for each dim, and one scale of the type `scale` for each token."""

    format_id: str
    values: ElementType
    scale: ElementType

    def record_bytes(self, dim: int) -> int:
        """Bytes of a token, which is also the last size of the cache tensor."""
        return self.values.bytes_for(dim) + self.scale.bytes_per_element

    def page_bytes(self, dim: int, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens, without padding."""
        return page_size * self.record_bytes(dim)

    def value_byte(self, dim: int, offset: int, index: int) -> int:
        """Byte of its page that holds dim `index` of the token at `offset`."""
        return offset * self.values.bytes_for(dim) + index * self.values.bytes_per_element

    def scale_byte(self, dim: int, page_size: int, offset: int) -> int:
        """First byte of its page that holds the scale of the token at `offset`."""
        return page_size * self.values.bytes_for(dim) + offset * self.scale.bytes_per_element


INDEX_FORMATS: dict[str, IndexFormat] = {"fp8": IndexFormat("fp8", E4M3, FP32)}


def index_format(format_id: str) -> IndexFormat:
    """The record of that id; SpecError with the nearest one otherwise."""
    try:
        return INDEX_FORMATS[format_id]
    except (KeyError, TypeError):
        close = difflib.get_close_matches(str(format_id).lower(), INDEX_FORMATS, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SpecError(f"unknown index-key format {format_id!r}{hint}: known are {', '.join(INDEX_FORMATS)}") from None
