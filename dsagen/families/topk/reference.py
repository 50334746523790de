"""Top-k by sorting, in torch: what every kernel of the family is held to. Runs on any torch device."""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
# Scores sorted at once.
_CHUNK_ELEMENTS = 1 << 26
# How a sort sees an element, best first.
_NUMBER, _NAN, _OUTSIDE = 0, 1, 2


def topk_reference(
    scores: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    drop_neg_inf: bool = False,
) -> tuple[Tensor, Tensor]:
    """(indices int64 [rows, k] ascending, then -1; counts int64 [rows]) of scores [rows, width].

    The first k of a stable sort: numbers from the largest, NaN after all of them, equals by index. Windows are bounded
    to their row; indices count from a window's start.
    """
    rows, width = scores.shape
    device = scores.device
    first = torch.zeros(rows, dtype=torch.int64, device=device) if starts is None else starts.long().clamp(0, width)
    room = width - first
    count = room if lengths is None else torch.minimum(lengths.long().clamp(min=0), room)
    indices = torch.full((rows, k), NONE, dtype=torch.int64, device=device)
    counts = torch.zeros(rows, dtype=torch.int64, device=device)
    step = max(1, _CHUNK_ELEMENTS // max(width, 1))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        indices[part], counts[part] = _select(scores[part], k, first[part], count[part], drop_neg_inf)
    return indices, counts


def _select(scores: Tensor, k: int, first: Tensor, count: Tensor, drop_neg_inf: bool) -> tuple[Tensor, Tensor]:
    width = scores.shape[1]
    column = torch.arange(width, device=scores.device)
    inside = (column >= first[:, None]) & (column < (first + count)[:, None])
    values = scores.float() + 0.0  # -0 becomes +0
    nan = values.isnan()
    kind = torch.where(inside, torch.where(nan, _NAN, _NUMBER), _OUTSIDE).to(torch.int8)
    if drop_neg_inf:
        kind[nan | (values == -torch.inf)] = _OUTSIDE
    by_value = values.masked_fill(nan, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    order = by_value.gather(1, kind.gather(1, by_value).sort(dim=1, stable=True).indices)[:, :k]
    kept = kind.gather(1, order) != _OUTSIDE
    # Ascending, what is not selected last.
    chosen = torch.where(kept, order - first[:, None], width).sort(dim=1).values
    chosen = torch.where(chosen < width, chosen, NONE)
    counts = kept.sum(1)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=NONE), counts


def translate_reference(
    indices: Tensor,
    *,
    page_table: Tensor | None = None,
    page_size: int = 1,
    table_of_row: Tensor | None = None,
    table_starts: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The ids (int64) that indices [rows, k] become; -1 for -1, and where the tables have none."""
    rows = indices.shape[0]
    device = indices.device
    known, ids = indices >= 0, indices
    if page_table is not None:
        table = torch.arange(rows, device=device) if table_of_row is None else table_of_row.long()
        start = torch.zeros(rows, dtype=torch.int64, device=device) if table_starts is None else table_starts.long()
        tables, columns = page_table.shape
        page = indices // page_size + start[:, None]
        known = known & ((table >= 0) & (table < tables))[:, None] & (page >= 0) & (page < columns)
        place = table.clamp(0, max(tables - 1, 0))[:, None] * columns + page.clamp(0, max(columns - 1, 0))
        entry = page_table.reshape(-1).long()[torch.where(known, place, 0)] if page_table.numel() else indices
        known = known & (entry >= 0)
        ids = entry * page_size + indices % page_size
    if offsets is not None:
        ids = ids + offsets.long()[:, None]
    return torch.where(known & (ids >= 0) & (ids < 2**31), ids, NONE)
