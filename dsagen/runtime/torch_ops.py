"""The ops as torch knows them, `torch.ops.dsagen.*`: for torch.compile, torch.export and whatever else traces.

Each takes the handle of loaded kernels (`Kernels.handle`) in place of `self`, and no plan: calls of a shape on a stream
share one. Out variants return nothing, and take what they write ahead of the options, so that it may come by position:
for a call with keywords torch looks up each argument that the call leaves out. The methods of `Kernels` call these
while torch.compile traces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsagen.index_format import index_format
from dsagen.runtime.entrances import Entrances
from dsagen.runtime.handles import find
from dsagen.runtime.index_cache import code_dtype, scale_dtype
from dsagen.runtime.indexer import empty_scores, index_of, require_width
from dsagen.runtime.indexer_blocks import block_columns
from dsagen.runtime.kv_cache import cache_of
from dsagen.runtime.op_signatures import by_name, into, parameters, refuse_grad
from dsagen.runtime.torch_decode import DECODE_OPS, DECODE_SCHEMAS
from dsagen.runtime.torch_step import STEP_OPS, STEP_SCHEMAS

NAMESPACE = "dsagen"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

_TOPK = "Tensor scores, str kernels, int k"
_TOPK_OPTIONS = (
    "Tensor? lengths=None, Tensor? starts=None, Tensor? page_table=None, "
    "int? page_size=None, Tensor? table_of_row=None, Tensor? table_starts=None, Tensor? candidate_blocks=None, "
    "Tensor? offsets=None, bool drop_neg_inf=False, str determinism='set'"
)
_READ = "Tensor k_cache, str kernels"
_READ_OPTIONS = (
    "Tensor? slots=None, Tensor? block_table=None, Tensor? row_starts=None, "
    "Tensor? token_starts=None, SymInt? rows=None, Tensor? kpe_cache=None, bool extra=False"
)
_GATHER = "Tensor k_cache, str kernels, Tensor block_table, Tensor row_starts, SymInt rows"
_GATHER_OPTIONS = "Tensor? token_starts=None"
_LOGITS = "Tensor q, Tensor k_cache, Tensor weights, Tensor context_lens, Tensor block_table, str kernels"
_RAGGED = "Tensor q, Tensor keys, Tensor key_scales, Tensor weights, Tensor starts, Tensor ends, str kernels"
_CANDIDATES = _LOGITS.replace(", str kernels", ", Tensor candidate_blocks, str kernels")
_CANDIDATES_OPTIONS = "int block_size=8, Tensor? q_scales=None, SymInt? max_seq_len=None"
_LOGITS_OPTIONS = "Tensor? q_scales=None, SymInt? max_seq_len=None, int unscored_up_to=0, bool fill_neg_inf=False"
_RAGGED_OPTIONS = _LOGITS_OPTIONS.replace("max_seq_len", "max_window")
SCHEMAS = {
    **DECODE_SCHEMAS,
    "topk": f"({_TOPK}, {_TOPK_OPTIONS}) -> Tensor",
    "topk_out": f"({_TOPK}, Tensor(a!) out, {_TOPK_OPTIONS}, *, Tensor(b!)? raw=None, Tensor(c!)? counts=None) -> ()",
    "indexer_logits": f"({_LOGITS}, {_LOGITS_OPTIONS}) -> Tensor",
    "indexer_logits_out": f"({_LOGITS}, Tensor(a!) out, {_LOGITS_OPTIONS}) -> ()",
    "indexer_logits_blocks": f"({_LOGITS}, {_LOGITS_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "indexer_logits_blocks_out": f"({_LOGITS}, Tensor(a!) out, Tensor(b!) block_scores, Tensor(c!) block_counts, "
    f"{_LOGITS_OPTIONS}) -> ()",
    "indexer_logits_ragged": f"({_RAGGED}, {_RAGGED_OPTIONS}) -> Tensor",
    "indexer_logits_ragged_out": f"({_RAGGED}, Tensor(a!) out, {_RAGGED_OPTIONS}) -> ()",
    "indexer_logits_candidates": f"({_CANDIDATES}, {_CANDIDATES_OPTIONS}) -> Tensor",
    "indexer_logits_candidates_out": f"({_CANDIDATES}, Tensor(a!) out, {_CANDIDATES_OPTIONS}) -> ()",
    "kv_write": "(Tensor rows, Tensor(a!) k_cache, Tensor slots, str kernels, Tensor? k_pe=None, "
    "Tensor(b!)? kpe_cache=None, bool extra=False) -> ()",
    "kv_read": f"({_READ}, {_READ_OPTIONS}) -> Tensor",
    "kv_read_out": f"({_READ}, Tensor(a!) out, {_READ_OPTIONS}) -> ()",
    "kv_convert": "(Tensor source, Tensor(a!) target, str kernels, Tensor? source_slots=None, "
    "Tensor? target_slots=None, bool extra=False) -> ()",
    "index_write": "(Tensor keys, Tensor(a!) k_cache, Tensor slots, str kernels) -> ()",
    "index_gather": f"({_GATHER}, {_GATHER_OPTIONS}) -> (Tensor, Tensor)",
    "index_gather_out": f"({_GATHER}, Tensor(a!) codes, Tensor(b!) scales, {_GATHER_OPTIONS}) -> ()",
    **STEP_SCHEMAS,
}


# Parameters are written out: torch calls by position, and gathering them into mappings would cost each call that no
# entrance repeats.


def _topk(
    scores: Tensor,
    kernels: str,
    k: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    table_of_row: Tensor | None = None,
    table_starts: Tensor | None = None,
    candidate_blocks: Tensor | None = None,
    offsets: Tensor | None = None,
    drop_neg_inf: bool = False,
    determinism: str = "set",
    *,
    out: Tensor | None = None,
    raw: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    return find(kernels).topk(
        scores,
        k=k,
        lengths=lengths,
        starts=starts,
        page_table=page_table,
        page_size=page_size,
        table_of_row=table_of_row,
        table_starts=table_starts,
        candidate_blocks=candidate_blocks,
        offsets=offsets,
        drop_neg_inf=drop_neg_inf,
        determinism=determinism,
        out=out,
        raw=raw,
        counts=counts,
    )


def _logits(method: str, tensors: int, options: tuple[str, ...]) -> Callable[..., Any]:
    """The op of a method that scores: so many tensors, the kernels' handle, then options by position or name; outputs
    come by name.
    """

    def run(*values: Any, **named: Any) -> Any:
        given, handle, rest = values[:tensors], values[tensors], values[tensors + 1 :]
        return getattr(find(handle), method)(*given, **by_name(options, rest, named))

    return run


_LOGITS_NAMES, _RAGGED_NAMES = parameters(_LOGITS_OPTIONS), parameters(_RAGGED_OPTIONS)
_CANDIDATES_NAMES = parameters(_CANDIDATES_OPTIONS)
_indexer_logits = _logits("indexer_logits", 5, _LOGITS_NAMES)
_indexer_logits_blocks = _logits("indexer_logits_blocks", 5, _LOGITS_NAMES)
_indexer_logits_ragged = _logits("indexer_logits_ragged", 6, _RAGGED_NAMES)
_indexer_logits_candidates = _logits("indexer_logits_candidates", 6, _CANDIDATES_NAMES)


def _kv_write(
    rows: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    kernels: str,
    k_pe: Tensor | None = None,
    kpe_cache: Tensor | None = None,
    extra: bool = False,
) -> None:
    find(kernels).kv_write(rows, k_cache, slots, k_pe=k_pe, kpe_cache=kpe_cache, extra=extra)


def _kv_read(
    k_cache: Tensor,
    kernels: str,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    row_starts: Tensor | None = None,
    token_starts: Tensor | None = None,
    rows: int | None = None,
    kpe_cache: Tensor | None = None,
    extra: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    return find(kernels).kv_read(
        k_cache,
        slots=slots,
        block_table=block_table,
        row_starts=row_starts,
        token_starts=token_starts,
        rows=rows,
        kpe_cache=kpe_cache,
        extra=extra,
        out=out,
    )


def _kv_convert(
    source: Tensor,
    target: Tensor,
    kernels: str,
    source_slots: Tensor | None = None,
    target_slots: Tensor | None = None,
    extra: bool = False,
) -> None:
    find(kernels).kv_convert(source, target, source_slots=source_slots, target_slots=target_slots, extra=extra)


def _index_write(keys: Tensor, k_cache: Tensor, slots: Tensor, kernels: str) -> None:
    find(kernels).index_write(keys, k_cache, slots)


def _index_gather(
    k_cache: Tensor,
    kernels: str,
    block_table: Tensor,
    row_starts: Tensor,
    rows: int,
    token_starts: Tensor | None = None,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return find(kernels).index_gather(
        k_cache, block_table, row_starts, rows, token_starts=token_starts, codes=codes, scales=scales
    )


_READ_NAMES = parameters(_READ_OPTIONS)


# What tracing needs: shapes and dtypes of results. The checks come with the call.


def _fake_topk(scores: Tensor, kernels: str, k: int, *rest: Any, **named: Any) -> Tensor:
    refuse_grad(scores, *rest, **named)
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


def _fake_indexer_logits(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    kernels: str,
    *rest: Any,
    **named: Any,
) -> Tensor:
    given = by_name(_LOGITS_NAMES, rest, named)
    refuse_grad(q, k_cache, weights, context_lens, block_table, **given)
    width = require_width(given.get("max_seq_len"))
    return empty_scores(q, q.shape[0] * q.shape[1], width, find(kernels).spec)


def _fake_indexer_logits_blocks(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = _fake_indexer_logits(q, *rest, **named)
    rows, width = scores.shape
    blocks = empty_scores(q, rows, block_columns(width), find(rest[4]).spec)
    return scores, blocks, q.new_empty((rows,), dtype=torch.int32)


def _fake_indexer_logits_ragged(
    q: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    kernels: str,
    *rest: Any,
    **named: Any,
) -> Tensor:
    given = by_name(_RAGGED_NAMES, rest, named)
    refuse_grad(q, keys, key_scales, weights, starts, ends, **given)
    most = given.get("max_window")
    return empty_scores(q, q.shape[0], keys.shape[0] if most is None else most, find(kernels).spec)


def _fake_indexer_logits_candidates(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    candidate_blocks: Tensor,
    kernels: str,
    *rest: Any,
    **named: Any,
) -> Tensor:
    given = {"block_size": 8, **by_name(_CANDIDATES_NAMES, rest, named)}
    refuse_grad(q, k_cache, weights, context_lens, block_table, candidate_blocks, **given)
    width = candidate_blocks.shape[1] * given["block_size"]
    return empty_scores(q, q.shape[0] * q.shape[1], width, find(kernels).spec)


def _fake_kv_read(k_cache: Tensor, kernels: str, *rest: Any, **named: Any) -> Tensor:
    given = by_name(_READ_NAMES, rest, named)
    refuse_grad(k_cache, **given)
    slots = given.get("slots")
    rows: int = given["rows"] if slots is None else slots.shape[0]
    record = cache_of(find(kernels).spec, bool(given.get("extra")))
    return k_cache.new_empty((rows, record.d_qk), dtype=torch.bfloat16)


def _fake_index_gather(
    k_cache: Tensor, kernels: str, block_table: Tensor, row_starts: Tensor, rows: int, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    refuse_grad(k_cache, block_table, row_starts, *rest, **named)
    index = index_of(find(kernels).spec)
    record = index_format(index.keys)
    codes = k_cache.new_empty((rows, record.code_bytes(index.dim)), dtype=code_dtype(record))
    return codes, k_cache.new_empty((rows,), dtype=scale_dtype(record))


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **DECODE_OPS,
    "topk": (_topk, _fake_topk),
    "topk_out": (into(_topk, 3, "out"), refuse_grad),
    "indexer_logits": (_indexer_logits, _fake_indexer_logits),
    "indexer_logits_out": (into(_indexer_logits, 6, "out"), refuse_grad),
    "indexer_logits_blocks": (_indexer_logits_blocks, _fake_indexer_logits_blocks),
    "indexer_logits_blocks_out": (
        into(_indexer_logits_blocks, 6, "out", "block_scores", "block_counts"),
        refuse_grad,
    ),
    "indexer_logits_ragged": (_indexer_logits_ragged, _fake_indexer_logits_ragged),
    "indexer_logits_ragged_out": (into(_indexer_logits_ragged, 7, "out"), refuse_grad),
    "indexer_logits_candidates": (_indexer_logits_candidates, _fake_indexer_logits_candidates),
    "indexer_logits_candidates_out": (into(_indexer_logits_candidates, 7, "out"), refuse_grad),
    "kv_write": (_kv_write, refuse_grad),
    "kv_read": (_kv_read, _fake_kv_read),
    "kv_read_out": (into(_kv_read, 2, "out"), refuse_grad),
    "kv_convert": (_kv_convert, refuse_grad),
    "index_write": (_index_write, refuse_grad),
    "index_gather": (_index_gather, _fake_index_gather),
    "index_gather_out": (into(_index_gather, 5, "codes", "scales"), refuse_grad),
    **STEP_OPS,
}

# Strides are part of a cache's meaning, so that a compiler may not change them on the way.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
for _name, _schema in SCHEMAS.items():
    _real, _fake = _OPS[_name]
    _LIBRARY.define(_name + _schema, tags=_TAGS)
    # One function for all devices: the kernels tell tensors of a device that they do not serve by themselves.
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    # What requires a gradient is refused by the kernels; torch's own fallback would look for it at each call as well.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)

# For calls that are like one before them; `Kernels` tells them what it has.
ENTRANCES = Entrances(_LIBRARY.impl, {name: real for name, (real, _) in _OPS.items()})
