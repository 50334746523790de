"""deep_gemm's indexer logits as of September 2026.

As deep_gemm_legacy, which see, with the names and arguments of the newer generation: ragged rows are compressed, no
clean_logits, no dtype of logits, which are fp32. Block-sparse calls are not built, and say so.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.deep_gemm_legacy import get_paged_mqa_logits_metadata
from dsagen.compat.logits import (
    INDEXERS,
    PagedCall,
    RaggedCall,
    not_built,
    num_sms,
    paged_logits,
    query_of,
    ragged_logits,
    ragged_metadata,
)
from dsagen.guard import require_int

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "get_mqa_logits_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "use",
]

use = INDEXERS.use
get_num_sms = num_sms
fp8_fp4_sparse_mqa_logits = partial(not_built, "fp8_fp4_sparse_mqa_logits")
fp8_fp4_paged_sparse_mqa_logits = partial(not_built, "fp8_fp4_paged_sparse_mqa_logits")
get_sparse_mqa_logits_metadata = partial(not_built, "get_sparse_mqa_logits_metadata")
get_paged_sparse_mqa_logits_metadata = partial(not_built, "get_paged_sparse_mqa_logits_metadata")


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    indices: Tensor | None = None,
) -> Tensor:
    """fp32 [b * next_n, max_context_len]; q as deep_gemm_legacy's takes it."""
    function = "fp8_fp4_paged_mqa_logits"
    call = PagedCall(
        query_of(function, q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        False, torch.float32, indices,
    )  # fmt: skip
    return paged_logits(function, call)


def get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor, num_kv_tokens: int, num_heads: int
) -> Tensor:
    """For ragged calls, as get_paged_mqa_logits_metadata: it holds nothing."""
    return ragged_metadata(cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, num_heads)


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    max_seqlen_k: int,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """fp32 [T, max_seqlen_k], column j the j-th key of a token's window, others not written; metadata is not read."""
    function, starts, ends = "fp8_fp4_mqa_logits", cu_seq_len_k_start, cu_seq_len_k_end
    if require_int("max_seqlen_k", max_seqlen_k) < 1:
        refuse("max_seqlen_k", f"{max_seqlen_k}: expected the length of the longest window", function)
    query = query_of(function, q)
    return ragged_logits(function, RaggedCall(query, kv, weights, starts, ends, False, max_seqlen_k, torch.float32))
