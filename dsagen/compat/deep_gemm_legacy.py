"""deep_gemm's indexer logits as of June 2026, over fp8 keys with an fp32 scale each, and over MX and FP4 ones.

`deep_gemm.fp8_paged_mqa_logits = dsagen.compat.deep_gemm_legacy.fp8_paged_mqa_logits`, and so on. `use(kernels)` gives
them kernels that are loaded already; without, a deployment is derived from each new kind of call and loaded at its
first one. Any page size, head counts in steps of 8 and up to 8 tokens a request. Unlike deep_gemm's, no column behind a
token's own length is written, and `clean_logits` makes them -inf. What cannot be honoured is an error that names the
argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.compat.logits import (
    INDEXERS,
    PagedCall,
    Query,
    RaggedCall,
    num_sms,
    paged_logits,
    paged_metadata,
    query_of,
    ragged_logits,
)

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "use",
]

use = INDEXERS.use
get_num_sms = num_sms


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """int32 [num_sms + 1, 2], for the calls of a step. It holds no schedule: blocks find their work on the device."""
    return paged_metadata(context_lens, block_kv, num_sms, indices)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """fp32 [b * next_n, max_context_len], a view of rows of a multiple of 256 columns.

    q e4m3 [b, next_n, h, d]; kv_cache uint8 [pages, block_kv, 1, d + 4]; weights fp32 [b * next_n, h]; context_lens
    int32 [b, next_n], each token's own; block_table int32 [b, pages]. GuardError for what cannot be honoured.
    """
    call = PagedCall(
        Query(q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        torch.float32, indices,
    )  # fmt: skip
    return paged_logits("fp8_paged_mqa_logits", call)


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """As fp8_paged_mqa_logits, of `logits_dtype`; q is a pair: e4m3 with None or, of MX
    keys, with int32 words of four ue8m0 [b, next_n, h]; or bytes of e2m1 pairs with such words.
    """
    function = "fp8_fp4_paged_mqa_logits"
    call = PagedCall(
        query_of(function, q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        clean_logits, logits_dtype, indices,
    )  # fmt: skip
    return paged_logits(function, call)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """fp32 [T, N]; with `max_seqlen_k` [T, max_seqlen_k], column j the j-th key of a token's window.

    q e4m3 [T, h, d]; kv e4m3 [N, d] and fp32 [N]; weights fp32 [T, h]; token t sees keys cu_seq_len_k_start[t] up to
    and without cu_seq_len_k_end[t]. `clean_logits` makes other columns -inf, in either form of rows.
    """
    starts, ends = cu_seq_len_k_start, cu_seq_len_k_end
    call = RaggedCall(Query(q), kv, weights, starts, ends, clean_logits, max_seqlen_k, torch.float32)
    return ragged_logits("fp8_mqa_logits", call)


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As fp8_mqa_logits, of `logits_dtype`; q as fp8_fp4_paged_mqa_logits takes it, and kv has scales alike."""
    function, starts, ends = "fp8_fp4_mqa_logits", cu_seq_len_k_start, cu_seq_len_k_end
    query = query_of(function, q)
    return ragged_logits(
        function, RaggedCall(query, kv, weights, starts, ends, clean_logits, max_seqlen_k, logits_dtype)
    )
