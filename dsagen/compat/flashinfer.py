"""Two functions of flashinfer: `flashinfer.top_k_page_table_transform = dsagen.compat.flashinfer....`, and so on.

`use(kernels)` gives them kernels that are loaded already; without, a deployment is derived from a first call, and
loaded. The selected set is the same at every call, and among equal scores the lower index wins, which is flashinfer's
tie_break 1 and serves 0. `deterministic` orders the output by index. What cannot be honoured is an error that
names the argument.
"""

from __future__ import annotations

from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.selection import SELECTIONS, require_tensor, select
from dsagen.guard import require_bool, require_int

__all__ = ["top_k_page_table_transform", "top_k_ragged_transform", "use"]

use = SELECTIONS.use
_MOST_PAGE_SIZE = 1 << 30
_NAMES = {
    "scores": "input",
    "page_table": "src_page_table",
    "starts": "row_starts",
    "table_of_row": "row_to_batch",
    "table_starts": "page_table_row_starts",
    "raw": "out_raw_indices",
}


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """int32 [rows, k]: table[batch, start + index // page_size] * page_size + index % page_size; then -1.

    Indices count from row_starts; `start` is page_table_row_starts, else row_starts, else 0. Without row_to_batch the
    row is the batch. Every call is safe to capture, so `dsa_graph_safe` changes nothing.
    """
    function = "top_k_page_table_transform"
    require_tensor(function, "input", input, 2)
    require_tensor(function, "src_page_table", src_page_table, 2)
    require_tensor(function, "lengths", lengths, 1, input.shape[0])
    require_bool("dsa_graph_safe", dsa_graph_safe)
    size = require_int("page_size", page_size)
    if size < 1 or size & (size - 1) or size > _MOST_PAGE_SIZE:
        refuse("page_size", f"{page_size!r}: expected a power of two up to {_MOST_PAGE_SIZE}", function)
    table_starts = page_table_row_starts
    if row_starts is not None and table_starts is None:
        if page_size > 1:
            refuse("page_table_row_starts", "missing: with row_starts and pages it says where a row's begin", function)
        table_starts = row_starts
    return select(
        function,
        input,
        k,
        {**_NAMES, "k": "k"},
        lengths=lengths,
        starts=row_starts,
        page_table=src_page_table,
        page_size=page_size,
        table_of_row=row_to_batch,
        table_starts=table_starts,
        out=out,
        raw=out_raw_indices,
        determinism=_mode(function, deterministic, tie_break),
    )


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """int32 [rows, k]: indices from row_starts, with offsets[row] added; then -1."""
    function = "top_k_ragged_transform"
    require_tensor(function, "input", input, 2)
    require_tensor(function, "lengths", lengths, 1, input.shape[0])
    require_tensor(function, "offsets", offsets, 1, input.shape[0])
    require_bool("dsa_graph_safe", dsa_graph_safe)
    mode = _mode(function, deterministic, tie_break)
    options = {"lengths": lengths, "starts": row_starts, "offsets": offsets, "determinism": mode}
    return select(function, input, k, {**_NAMES, "k": "k"}, **options)


def _mode(function: str, deterministic: bool, tie_break: int) -> str:
    """The op's determinism."""
    if require_int("tie_break", tie_break) not in (0, 1):
        refuse("tie_break", f"{tie_break!r}: among equals the lower index wins: pass 0 or 1", function)
    return "order" if require_bool("deterministic", deterministic) else "set"
