"""The index lists of a sparse-decode call and how much of them counts: what their tensors must be and may hold.

With several KV heads a list may be that of a query token, for all of them, or have a row for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsagen.families.sparse_decode.guards import INDEX_GUARD, LENGTH_GUARD
from dsagen.guard import check
from dsagen.runtime.tensors import TensorRule, free_strides, require

if TYPE_CHECKING:
    from dsagen.runtime.sparse_decode import DecodeTensors


def require_lists(
    prefix: str, indices: torch.Tensor, lengths: torch.Tensor | None, sizes: tuple[int, int, int]
) -> None:
    """Refuse lists and lengths of a cache that are not as a call with these sizes (batch, s_q, KV heads) has them."""
    batch, s_q, kv_heads = sizes
    topk, dtypes = f"{prefix}topk", ("int32",)
    if kv_heads > 1 and indices.dim() == 4:
        rule = TensorRule(f"{prefix}indices", dtypes, f"[batch, s_q, kv_heads, {topk}]", (*sizes, None))
    else:
        layout = f"[batch, s_q, {topk}]" + (f" (or [batch, s_q, kv_heads, {topk}])" if kv_heads > 1 else "")
        rule = TensorRule(f"{prefix}indices", dtypes, layout, (batch, s_q, None))
    require(rule, indices)
    if lengths is None:
        return
    shapes = {2: "[batch, s_q]", **({3: "[batch, s_q, kv_heads]"} if kv_heads > 1 else {})}
    layout = shapes.get(lengths.dim(), "[batch] (or [batch, s_q])")
    shape = sizes[: lengths.dim() if lengths.dim() in shapes else 1]
    require(TensorRule(f"{prefix}topk_length", dtypes, layout, shape, last_dim_contiguous=False), lengths)


def list_strides(prefix: str, indices: torch.Tensor, lengths: torch.Tensor | None) -> dict[str, int]:
    """The arguments that say how lists and lengths lie; 0 for a dim that they do not have."""
    columns = (*free_strides(indices)[:-1], 0)
    length = (0, 0, 0) if lengths is None else (*free_strides(lengths), 0, 0)
    return {
        f"{prefix}{name}_stride_{axis}": stride
        for name, strides in (("indices", columns), ("length", length))
        for axis, stride in zip(("b", "s", "kv"), strides, strict=False)
    }


def check_index_values(t: DecodeTensors) -> None:
    """Refuse lengths outside 0 .. topk, and live ids at or past the pool. Waits for the device.

    Negative ids are padding, and columns at or past a length are never read, so both may hold anything.
    """
    _check_list("", t.indices, t.topk_length, t.k_cache)
    if t.extra_indices is not None and t.extra_k_cache is not None:
        _check_list("extra_", t.extra_indices, t.extra_topk_length, t.extra_k_cache)


def _check_list(prefix: str, indices: torch.Tensor, lengths: torch.Tensor | None, k_cache: torch.Tensor) -> None:
    topk = int(indices.shape[-1])
    live = torch.ones_like(indices, dtype=torch.bool)
    if lengths is not None:
        bad = (lengths < 0) | (lengths > topk)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            values = {"length": int(lengths[place]), "topk": topk}
            name = f"{prefix}topk_length"
            check([LENGTH_GUARD], values, name=name, place=list(place), count=int(bad.sum()))
        per_list = lengths.reshape(*lengths.shape, *[1] * (3 - lengths.dim()))
        live = torch.arange(topk, device=indices.device) < per_list.unsqueeze(3)
    pool_tokens = int(k_cache.shape[0] * k_cache.shape[1])
    past = indices >= pool_tokens
    # Lengths may be of fewer dims than lists, and of more: a shared list is then checked up to the longest.
    bad = past & (live if past.dim() == 4 or lengths is None else live.any(2))
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        values = {"token_id": int(indices[place]), "pool_tokens": pool_tokens}
        names = {"name": f"{prefix}indices", "cache": f"{prefix}k_cache"}
        check([INDEX_GUARD], values, place=list(place), count=int(bad.sum()), **names)
