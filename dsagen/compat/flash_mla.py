"""flash_mla of the newer generation, for sparse decode: V4.1 caches are interleaved; `use_legacy` reads the older ones.

`sys.modules["flash_mla"] = dsagen.compat.flash_mla` before an engine imports it. See flash_mla_legacy for `use`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsagen.compat.decode import DEPLOYMENTS, NEWER, OLDER, DecodeCall, decode, refuse, repeated
from dsagen.compat.flash_mla_legacy import flash_attn_varlen_func, flash_mla_sparse_fwd, get_mla_metadata
from dsagen.compat.metadata import FlashMLASchedMeta
from dsagen.guard import require_bool

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "use",
]

use = DEPLOYMENTS.use


def get_mla_decoding_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """As get_mla_metadata."""
    return get_mla_metadata()


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As flash_mla_legacy's, which see, over the caches of the newer generation.

    `enable_batch_invariant` makes a row's bits independent of its batch. With `use_legacy` caches are those of the
    older generation. GuardError for what cannot be honoured.
    """
    scalars = (
        head_dim_v, num_splits, softmax_scale, causal, is_fp8_kvcache, enable_batch_invariant, use_legacy, kv_format,
        descale_q is None and descale_k is None,
    )  # fmt: skip
    found = repeated(
        tile_scheduler_metadata, q, k_cache, indices, topk_length, attn_sink, out, extra_k_cache,
        extra_indices_in_kvcache, extra_topk_length, scalars,
    )  # fmt: skip
    if found is not None:
        return found
    legacy = require_bool("use_legacy", use_legacy)
    if legacy and require_bool("enable_batch_invariant", enable_batch_invariant):
        refuse("enable_batch_invariant", "not together with use_legacy, as in flash_mla: pass either")
    for name, tensor in (("descale_q", descale_q), ("descale_k", descale_k)):
        if tensor is not None:
            refuse(name, "belongs to dense decode of FP8, which is not built: leave it out")
    is_fp8 = indices is not None if is_fp8_kvcache is None else is_fp8_kvcache
    call = DecodeCall(
        q, k_cache, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal, is_fp8, indices, attn_sink,
        extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
        require_bool("enable_batch_invariant", enable_batch_invariant), kv_format, out,
    )  # fmt: skip
    return decode(call, OLDER if legacy else NEWER, scalars)
