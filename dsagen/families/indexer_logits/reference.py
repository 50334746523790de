"""The indexer's logits in torch: what every kernel of the family is held to. Runs on any torch device."""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.index_format import IndexFormat


def limits_reference(context_lens: Tensor, batch: int, next_n: int, most_keys: int) -> Tensor:
    """int64 [batch, next_n] keys that each token sees.

    Lengths of [batch, next_n] are each token's own. One length of a request, [batch], is its last token's; those before
    see one key less each. Negative ones are 0, and none exceeds `most_keys`.
    """
    if context_lens.dim() == 2:
        lengths = context_lens.long()
    else:
        behind = torch.arange(next_n - 1, -1, -1, device=context_lens.device)
        lengths = context_lens.long()[:, None] - behind
    assert lengths.shape == (batch, next_n)
    return lengths.clamp(0, most_keys)


def read_keys(record: IndexFormat, pool: Tensor, dim: int, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(values fp64 [n, dim], scales fp64 [n]) of tokens by int64 page and offset in [pages, page_size, 1, bytes]."""
    page_size = pool.shape[1]
    flat = torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())
    stride = pool.stride(0) * pool.element_size()
    start: Tensor = pages * stride + int(pool.storage_offset()) * pool.element_size()
    value_at = start + offsets * record.value_byte(dim, 1, 0)
    scale_at = start + record.scale_byte(dim, page_size, 0) + offsets * record.scale.bytes_per_element
    codes = flat[value_at.unsqueeze(1) + torch.arange(dim, device=pool.device)]
    words = flat[scale_at.unsqueeze(1) + torch.arange(4, device=pool.device)].contiguous()
    return codes.view(torch.float8_e4m3fn).double(), words.view(torch.float32).double().squeeze(1)


def logits_reference(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    record: IndexFormat,
    width: int,
    *,
    unscored_up_to: int = 0,
) -> tuple[Tensor, Tensor]:
    """(scores fp64 [batch * next_n, width], bool of the same shape: which of them are scored).

    q is e4m3 [batch, next_n, heads, dim], weights [batch * next_n, heads]; what is not scored is -inf, and so is a key
    whose table entry names no page.
    """
    batch, next_n, _, dim = q.shape
    pages, page_size = k_cache.shape[:2]
    most = min(width, block_table.shape[1] * page_size)
    limits = limits_reference(context_lens, batch, next_n, most)
    limits = torch.where(limits <= unscored_up_to, 0, limits)
    scores = torch.full((batch, next_n, width), -torch.inf, dtype=torch.float64, device=q.device)
    position = torch.arange(width, device=q.device)
    for request in range(batch):
        keys = int(limits[request].max())
        if keys == 0:
            continue
        seen = position[:keys]
        page = block_table[request].long()[seen // page_size]
        there = (page >= 0) & (page < pages)
        values, scales = read_keys(record, k_cache, dim, torch.where(there, page, 0), seen % page_size)
        products = torch.einsum("nhd,kd->nhk", q[request].double(), values).relu()
        w = weights.reshape(batch, next_n, -1)[request].double()
        # NaN goes through: einsum multiplies zeros by it as well.
        own = torch.einsum("nh,nhk->nk", w, products) * scales
        scores[request, :, :keys] = torch.where(there, own, -torch.inf)
    scored = position < limits[..., None]
    return scores.masked_fill(~scored, -torch.inf).flatten(0, 1), scored.flatten(0, 1)
