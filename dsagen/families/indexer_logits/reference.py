"""The indexer's logits in torch: what every kernel of the family is held to. Runs on any torch device."""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.dtype import ElementType
from dsagen.families.topk.geometry import DIGIT_BITS
from dsagen.index_format import SCALE_WORD_BYTES, IndexFormat

# Of the reference at a time: an intermediate of fp64.
_MOST_PRODUCTS = 1 << 26


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
    """(operands fp64 [n, dim], factors fp64 [n]) of tokens by int64 page and offset in [pages, page_size, 1, bytes].

    Scales of blocks are in the operands, as `scaled_values` has them; a scale of the whole token is its factor.
    """
    page_size = pool.shape[1]
    flat = torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())
    stride = pool.stride(0) * pool.element_size()
    start: Tensor = pages * stride + int(pool.storage_offset()) * pool.element_size()
    value_at = start + offsets * record.code_bytes(dim)
    scale_at = start + record.scale_byte(dim, page_size, 0) + offsets * SCALE_WORD_BYTES
    codes = flat[value_at.unsqueeze(1) + torch.arange(record.code_bytes(dim), device=pool.device)]
    words = flat[scale_at.unsqueeze(1) + torch.arange(SCALE_WORD_BYTES, device=pool.device)]
    if record.is_block_scaled:
        return scaled_values(record, codes, words), torch.ones_like(scale_at, dtype=torch.float64)
    return _decoded(record.values, codes), words.contiguous().view(torch.float32).double().squeeze(1)


def query_values(record: IndexFormat, q: Tensor, q_scales: Tensor | None) -> Tensor:
    """fp64 [..., dim] of codes [..., bytes of dim codes] and, of a block-scaled format, words int32 [...]."""
    if not record.is_block_scaled:
        return _decoded(record.values, q.view(torch.uint8))
    assert q_scales is not None
    words = q_scales.contiguous().view(torch.uint8).view(*q_scales.shape, SCALE_WORD_BYTES)
    return scaled_values(record, q.view(torch.uint8), words)


def scaled_values(record: IndexFormat, codes: Tensor, words: Tensor) -> Tensor:
    """fp64 [..., dim] values of a block-scaled format times their scales, each rounded as a bf16.

    codes are bytes [..., bytes of dim codes], words bytes [..., 4]. The rounding changes nothing that a bf16's exponent
    reaches, such as every value with a scale byte of 10 to 245.
    """
    values = _decoded(record.values, codes)
    assert record.dims_per_scale is not None
    scales = _decoded(record.scale, words).repeat_interleave(record.dims_per_scale, -1)[..., : values.shape[-1]]
    return (values * scales).to(torch.bfloat16).double()


def counts_reference(scores: Tensor, limits: Tensor, unscored_up_to: int) -> Tensor:
    """int32 [tokens, bins]: how many scores of a token, in columns below its limit, have each first digit of a key.

    The digit is that of a top-k's keys, unsigned numbers of 32 bits in the order of scores: NaN is lowest, then -inf,
    and -0 equals +0. scores are [tokens, width] of any float dtype, limits [tokens]; tokens of no more keys than
    `unscored_up_to` have none.
    """
    x = scores.float()
    bits = torch.where(x == 0, 0.0, x).contiguous().view(torch.int32).long()
    # Of negative numbers the larger has the smaller bits, sign aside. NaN has the digit below all that numbers have.
    ordered = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (1 << 31)
    digits = torch.where(x.isnan(), 0, (ordered >> (32 - DIGIT_BITS)) + 1)
    scored = torch.where(limits <= unscored_up_to, 0, limits)
    seen = torch.arange(scores.shape[1], device=scores.device) < scored[:, None]
    counts = torch.zeros(scores.shape[0], 1 << DIGIT_BITS, dtype=torch.int32, device=scores.device)
    return counts.scatter_add_(1, digits, seen.int())


def _decoded(element: ElementType, codes: Tensor) -> Tensor:
    """fp64 values of the codes in bytes [..., n], of two in a byte the low one first."""
    table = torch.tensor([element.decode(code) for code in range(1 << element.bits)], dtype=torch.float64)
    numbers = codes.view(torch.uint8).long()
    if element.bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    return table.to(codes.device)[numbers]


def logits_reference(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    record: IndexFormat,
    width: int,
    *,
    q_scales: Tensor | None = None,
    unscored_up_to: int = 0,
) -> tuple[Tensor, Tensor]:
    """(scores fp64 [batch * next_n, width], bool of the same shape: which of them are scored).

    q is codes [batch, next_n, heads, bytes of dim], q_scales words [batch, next_n, heads], weights [batch * next_n,
    heads]; what is not scored is -inf, and so is a key whose table entry names no page.
    """
    queries = query_values(record, q, q_scales)
    batch, next_n, _, dim = queries.shape
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
        w = weights.reshape(batch, next_n, -1)[request].double()
        own = scores_of(queries[request], w, values) * scales
        scores[request, :, :keys] = torch.where(there, own, -torch.inf)
    scored = position < limits[..., None]
    return scores.masked_fill(~scored, -torch.inf).flatten(0, 1), scored.flatten(0, 1)


def block_scores_reference(scores: Tensor, limits: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(scores of blocks [tokens, ceil(width / block_size)], how many a token sees, int32 [tokens]).

    From scores [tokens, width] of the keys below limits int64 [tokens], of which each token sees as many as its limit.
    The score of a block is its largest key's; the block of the newest key gets +inf, so that a selection takes it.
    """
    width = scores.shape[1]
    column = torch.arange(width, device=scores.device)
    seen = scores.masked_fill(column >= limits[:, None], -torch.inf)
    padded = torch.nn.functional.pad(seen, (0, -width % block_size), value=-torch.inf)
    of_blocks = padded.reshape(len(scores), -1, block_size).amax(2)
    counts = (limits + block_size - 1) // block_size
    newest = torch.arange(of_blocks.shape[1], device=scores.device) == counts[:, None] - 1
    return of_blocks.masked_fill(newest, torch.inf), counts.to(torch.int32)


def candidates_reference(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    candidate_blocks: Tensor,
    record: IndexFormat,
    block_size: int,
    *,
    q_scales: Tensor | None = None,
    max_seq_len: int | None = None,
) -> Tensor:
    """Scores fp64 [batch * next_n, slots * block_size] of the keys in candidate_blocks [batch * next_n, slots].

    Column s * block_size + i is key candidate_blocks[t, s] * block_size + i; -inf where the slot is negative, and where
    the token does not see the key. Lengths are bounded to what the table names, and to `max_seq_len`.
    """
    width = block_table.shape[1] * k_cache.shape[1]
    width = width if max_seq_len is None else min(width, max_seq_len)
    given = (q, k_cache, weights, context_lens, block_table, record, width)
    every, seen = logits_reference(*given, q_scales=q_scales)
    inside = torch.arange(block_size, device=q.device)
    key = (candidate_blocks.long().unsqueeze(-1) * block_size + inside).flatten(1)
    there = (key >= 0) & (key < width)
    if width == 0:
        return torch.full(key.shape, -torch.inf, dtype=torch.float64, device=q.device)
    place = torch.where(there, key, 0)
    return torch.where(there & seen.gather(1, place), every.gather(1, place), -torch.inf)


def scores_of(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """fp64 [tokens, keys] sums over heads of fp64 [tokens, heads, dim], [tokens, heads] and [keys, dim].

    NaN goes through: einsum multiplies zeros by it as well.
    """
    products = torch.einsum("nhd,kd->nhk", queries, keys).relu()
    return torch.einsum("nh,nhk->nk", weights, products)


def window_reference(starts: Tensor, ends: Tensor, keys: int, width: int | None) -> tuple[Tensor, Tensor]:
    """(first, count) int64 [tokens] of the keys that tokens see: what there is of start .. end - 1.

    With a `width` rows are compressed, and a window has no more keys than that. Those that are empty are (0, 0).
    """
    first = starts.long().clamp(min=0)
    count = (ends.long().clamp(max=keys) - first).clamp(min=0)
    first = torch.where(count > 0, first, 0)
    return first, count if width is None else count.clamp(max=width)


def ragged_reference(
    q: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    record: IndexFormat,
    max_window: int | None,
    *,
    q_scales: Tensor | None = None,
    unscored_up_to: int = 0,
) -> tuple[Tensor, Tensor]:
    """(scores fp64 [tokens, columns], bool of the same shape: which of them are scored).

    q is codes [tokens, heads, bytes of dim], q_scales words [tokens, heads], keys codes [keys, bytes of dim],
    key_scales [keys] fp32 or words. Column j is key j, or with `max_window`, the number of columns, the j-th of the
    token's window.
    """
    queries = query_values(record, q, q_scales)
    if record.is_block_scaled:
        values, factors = query_values(record, keys, key_scales), torch.ones(())
    else:
        values, factors = query_values(record, keys, None), key_scales.double()
    step = max(1, _MOST_PRODUCTS // max(1, queries.shape[1] * len(keys)))
    parts = [slice(token, token + step) for token in range(0, len(q), step)]
    every = torch.cat([scores_of(queries[part], weights[part].double(), values) for part in parts]) * factors
    first, count = window_reference(starts, ends, len(keys), max_window)
    count = torch.where(count <= unscored_up_to, 0, count)
    columns = len(keys) if max_window is None else max_window
    column = torch.arange(columns, device=q.device)
    position = column - first[:, None] if max_window is None else column.expand(len(q), -1)
    scored = (position >= 0) & (position < count[:, None])
    key = torch.where(scored, position + first[:, None], 0)
    scores = every.gather(1, key) if len(keys) else torch.zeros(scored.shape, dtype=torch.float64)
    return torch.where(scored, scores, -torch.inf), scored
