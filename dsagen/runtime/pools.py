"""The pools of cache pages that calls bring: what their tensors must be, and where their pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsagen.guard import Guard, check
from dsagen.kv_format import CacheTensor, KvFormat
from dsagen.runtime.tensors import TensorRule, require, require_kv_heads


class Pool(NamedTuple):
    """One checked cache tensor. Of a single page the stride is what it would be.

    A page of several KV heads is one of page_size x kv_heads rows: from token to token they go by `token_rows`, from KV
    head to KV head by `head_rows`.
    """

    address: int
    pages: int
    page_size: int
    page_stride_bytes: int
    token_rows: int = 1
    head_rows: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that ids and slots can name."""
        return self.pages * self.page_size

    def same_pages(self, other: Pool) -> dict[str, int]:
        """What a guard of two tensors of one cache reads."""
        mine = {"pages": self.pages, "page_size": self.page_size}
        return mine | {"other_pages": other.pages, "other_page_size": other.page_size}


def checked_pool(
    name: str,
    tensor: torch.Tensor,
    record: KvFormat,
    rule: CacheTensor,
    guards: Sequence[Guard],
    kv_heads: int = 1,
    heads_guard: Guard | None = None,
) -> Pool:
    """The pool in a tensor [pages, page_size, kv_heads, columns]; GuardError for one that is not as the format has it.

    `heads_guard` says where rows of several KV heads may lie.
    """
    layout = f"[pages, page_size, {kv_heads if kv_heads == 1 else 'kv_heads'}, columns of KV format {record.format_id}]"
    require_kv_heads(name, tensor, kv_heads)
    require(TensorRule(name, rule.dtypes, layout, (None, None, kv_heads, rule.columns)), tensor)
    pages, page_size = int(tensor.shape[0]), int(tensor.shape[1])
    page_bytes, row_bytes = record.page_bytes(page_size * kv_heads, rule.name), rule.logical_stride_bytes
    page_stride, token_stride, head_stride = (int(stride) * tensor.element_size() for stride in tensor.stride()[:3])
    if heads_guard is not None and kv_heads > 1:
        token_stride = token_stride if page_size > 1 else row_bytes * kv_heads
        placement = {"token_stride_bytes": token_stride, "head_stride_bytes": head_stride, "row_bytes": row_bytes}
        check([heads_guard], {**placement, "page_size": page_size, "kv_heads": kv_heads}, name=name)
        steps = {"token_rows": token_stride // row_bytes, "head_rows": head_stride // row_bytes}
        token_stride = row_bytes
    else:
        steps = {}
    pool = Pool(tensor.data_ptr(), pages, page_size, page_stride if pages > 1 else page_bytes, **steps)
    values = {
        "pages": pages,
        "page_size": page_size,
        "pool_tokens": pool.tokens,
        "address": pool.address,
        # The stride of a single page moves nothing, nor does that of one-token pages.
        "page_stride_bytes": page_stride if pages > 1 else 0,
        "row_stride_bytes": token_stride if page_size > 1 else row_bytes,
        "token_bytes": row_bytes,
        "page_bytes": page_bytes,
    }
    check(guards, values, name=name)
    return pool
