"""The pools of cache pages that calls bring: what their tensors must be, and where their pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsagen.guard import Guard, check
from dsagen.kv_format import CacheTensor, KvFormat
from dsagen.runtime.tensors import TensorRule, require, require_one_kv_head


class Pool(NamedTuple):
    """One checked cache tensor. Of a single page the stride is what it would be."""

    address: int
    pages: int
    page_size: int
    page_stride_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that ids and slots can name."""
        return self.pages * self.page_size

    def same_pages(self, other: Pool) -> dict[str, int]:
        """What a guard of two tensors of one cache reads."""
        mine = {"pages": self.pages, "page_size": self.page_size}
        return mine | {"other_pages": other.pages, "other_page_size": other.page_size}


def checked_pool(name: str, tensor: torch.Tensor, record: KvFormat, rule: CacheTensor, guards: Sequence[Guard]) -> Pool:
    """The pool in a tensor [pages, page_size, 1, columns]; GuardError for one that is not as the format has it."""
    columns = f"[pages, page_size, 1, columns of KV format {record.format_id}]"
    require_one_kv_head(name, tensor)
    require(TensorRule(name, rule.dtypes, columns, (None, None, 1, rule.columns)), tensor)
    pages, page_size = int(tensor.shape[0]), int(tensor.shape[1])
    page_bytes = record.page_bytes(page_size, rule.name)
    page_stride, row_stride = (int(stride) * tensor.element_size() for stride in tensor.stride()[:2])
    pool = Pool(tensor.data_ptr(), pages, page_size, page_stride if pages > 1 else page_bytes)
    values = {
        "pages": pages,
        "page_size": page_size,
        "pool_tokens": pool.tokens,
        "address": pool.address,
        # The stride of a single page moves nothing, nor does that of one-token pages.
        "page_stride_bytes": page_stride if pages > 1 else 0,
        "row_stride_bytes": row_stride if page_size > 1 else rule.logical_stride_bytes,
        "token_bytes": rule.logical_stride_bytes,
        "page_bytes": page_bytes,
    }
    check(guards, values, name=name)
    return pool
