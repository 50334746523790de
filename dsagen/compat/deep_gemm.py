"""deep_gemm's indexer logits as of September 2026, for paged caches of fp8 keys with an fp32 scale each.

As deep_gemm_legacy, which see, with the names and arguments of the newer generation: no clean_logits, no dtype of
logits, which are fp32. Ragged and block-sparse calls are not built, and say so.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsagen.compat.deep_gemm_legacy import get_paged_mqa_logits_metadata
from dsagen.compat.logits import INDEXERS, PagedCall, not_built, num_sms, paged_logits, require_plain_q

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
fp8_fp4_mqa_logits = partial(not_built, "fp8_fp4_mqa_logits")
fp8_fp4_sparse_mqa_logits = partial(not_built, "fp8_fp4_sparse_mqa_logits")
fp8_fp4_paged_sparse_mqa_logits = partial(not_built, "fp8_fp4_paged_sparse_mqa_logits")
get_mqa_logits_metadata = partial(not_built, "get_mqa_logits_metadata")
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
    """fp32 [b * next_n, max_context_len]; q is a pair whose second part, scales of MX and FP4, has to be None."""
    function = "fp8_fp4_paged_mqa_logits"
    call = PagedCall(
        require_plain_q(function, q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        False, torch.float32, indices,
    )  # fmt: skip
    return paged_logits(function, call)
