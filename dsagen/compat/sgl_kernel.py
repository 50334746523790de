"""The top-k functions of sgl_kernel: `sgl_kernel.fast_topk_v2 = dsagen.compat.sgl_kernel.fast_topk_v2`, and so on.

`use(kernels)` gives them kernels that are loaded already, prepared and frozen as a serving process wants them; without,
a deployment is derived from a first call and loaded. Selections are exact for any row; among equal scores the lower
index wins. k is any number that the kernels have room for. What cannot be honoured is an error that names the argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.selection import SELECTIONS, require_int32, require_readable, require_tensor, select
from dsagen.guard import require_bool

__all__ = [
    "deepseek_v4_topk_transform_512",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "use",
]

use = SELECTIONS.use
_NAMES = {"scores": "score", "k": "topk", "starts": "row_starts", "page_table": "page_table_size_1"}
_RAGGED_NAMES = {**_NAMES, "offsets": "topk_indices_offset"}
_V4_NAMES = {
    "scores": "scores",
    "k": "page_indices",
    "lengths": "seq_lens",
    "out": "page_indices",
    "raw": "raw_indices",
}


def fast_topk_v2(score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """int32 [rows, topk]: the best of each row's first `lengths` scores from its start, counted from there; then -1."""
    _require_rows("fast_topk_v2", score, lengths, row_starts)
    return select("fast_topk_v2", score, topk, _NAMES, lengths=lengths, starts=row_starts)


def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """int32 [rows, topk]: page_table_size_1[request, index] of what fast_topk_v2 selects; then -1.

    Rows are a token of each request, or, where `cu_seqlens_q` (int32 [requests + 1]) has fewer requests than there are
    rows, the tokens of each request in turn; finding their requests costs two launches of torch's.
    """
    function = "fast_topk_transform_fused"
    _require_rows(function, score, lengths, row_starts)
    require_tensor(function, "page_table_size_1", page_table_size_1, 2)
    require_tensor(function, "cu_seqlens_q", cu_seqlens_q, 1)
    require_int32(function, "cu_seqlens_q", cu_seqlens_q)
    require_readable(function, "cu_seqlens_q", cu_seqlens_q, score.device)
    rows, requests = score.shape[0], cu_seqlens_q.shape[0] - 1
    if requests < min(rows, 1):
        text = f"shape {tuple(cu_seqlens_q.shape)}: expected [requests + 1], a request at least for {rows} rows"
        refuse("cu_seqlens_q", text, function)
    if requests > rows:
        refuse("cu_seqlens_q", f"{requests} requests of {rows} rows: each has one row at least", function)
    require_tensor(function, "page_table_size_1", page_table_size_1, rows=requests)
    table_of_row = None
    if requests < rows:
        numbers = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
        # The request of a row is the number of those that have ended before it.
        table_of_row = torch.searchsorted(cu_seqlens_q[1:], numbers, right=True, out_int32=True)
    options = {"lengths": lengths, "starts": row_starts, "page_table": page_table_size_1, "table_of_row": table_of_row}
    return select(function, score, topk, _NAMES, **options)


def fast_topk_transform_ragged_fused(
    score: Tensor, lengths: Tensor, topk_indices_offset: Tensor, topk: int, row_starts: Tensor | None = None
) -> Tensor:
    """int32 [rows, topk]: what fast_topk_v2 selects, with topk_indices_offset[row] added; then -1."""
    function = "fast_topk_transform_ragged_fused"
    _require_rows(function, score, lengths, row_starts)
    options = {"lengths": lengths, "starts": row_starts, "offsets": topk_indices_offset}
    return select(function, score, topk, _RAGGED_NAMES, **options)


def deepseek_v4_topk_transform_512(
    scores: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
    sort_output: bool = False,
) -> None:
    """page_table[row, index // page_size] * page_size + index % page_size into `page_indices` int32 [rows, k]; then -1.

    `raw_indices` gets the indices themselves. With `sort_output` both follow the position in the row.
    """
    function = "deepseek_v4_topk_transform_512"
    require_tensor(function, "page_indices", page_indices, 2)
    ordered = require_bool("sort_output", sort_output)
    select(
        function,
        scores,
        int(page_indices.shape[1]),
        _V4_NAMES,
        lengths=seq_lens,
        page_table=page_table,
        page_size=page_size,
        out=page_indices,
        raw=raw_indices,
        determinism="order" if ordered else "set",
    )


def _require_rows(function: str, score: Tensor, lengths: Tensor, row_starts: Tensor | None) -> None:
    """The checks of sgl_kernel that the op leaves to it: a length for each row, which the op may do without."""
    require_tensor(function, "score", score, 2)
    require_tensor(function, "lengths", lengths, 1, score.shape[0])
    if row_starts is not None:
        require_tensor(function, "row_starts", row_starts, 1, score.shape[0])
