"""flash_mla of the older generation, for sparse decode: V4.1 caches are split by page.

`sys.modules["flash_mla"] = dsagen.compat.flash_mla_legacy` before an engine imports it. `use(kernels)` gives it kernels
that are loaded already, prepared and frozen as a serving process wants them; without, a deployment is derived from each
new kind of call and loaded at its first one. What cannot be honoured is an error that names the argument.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from dsagen.compat.decode import DEPLOYMENTS, OLDER, DecodeCall, decode, refuse, repeated
from dsagen.compat.metadata import FlashMLASchedMeta

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "use",
]

use = DEPLOYMENTS.use


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A metadata object for the calls of a step, and None; arguments are ignored, as flash_mla does."""
    return FlashMLASchedMeta(), None


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
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    kv_format: str | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of sparse decode: bf16 [b, s_q, h_q, 512] and natural-log fp32 [b, h_q, s_q], +inf for an empty row.

    q bf16 [b, s_q, h_q, d_qk]; k_cache [pages, page_size, 1, bytes]; indices int32 [b, s_q, topk]. block_table and
    cache_seqlens are not read, as in flash_mla's sparse decode. A cache's format follows from d_qk and its bytes,
    unless `kv_format` (V32, V32_NO_ROPE, V4, V41, V41_FP4) names it, which 528 bytes without rotary dims need. `out`,
    by name only, is a destination for the first result, as the wrapper of vLLM's fork has it; of any strides.
    GuardError for what cannot be honoured.
    """
    # Another generation's call has other scalars, so that none takes one for its own.
    scalars = (OLDER.name, head_dim_v, num_splits, softmax_scale, causal, is_fp8_kvcache, kv_format)
    found = repeated(
        tile_scheduler_metadata, q, k_cache, indices, topk_length, attn_sink, out, extra_k_cache,
        extra_indices_in_kvcache, extra_topk_length, scalars,
    )  # fmt: skip
    if found is not None:
        return found
    call = DecodeCall(
        q, k_cache, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal, is_fp8_kvcache, indices,
        attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format=kv_format,
        out=out,
    )  # fmt: skip
    return decode(call, OLDER, scalars)


def _not_built(name: str) -> NoReturn:
    refuse("op", "not built: dsagen.compat has sparse decode only", function=name)


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> NoReturn:
    """GuardError: sparse prefill is not built."""
    _not_built("flash_mla_sparse_fwd")


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """GuardError: dense prefill is not built."""
    _not_built("flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """GuardError: dense prefill is not built."""
    _not_built("flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """GuardError: dense prefill is not built."""
    _not_built("flash_attn_varlen_kvpacked_func")
