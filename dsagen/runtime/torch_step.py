"""A decode step as torch knows it: one op, whose ids and counts are results, so that layers may share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsagen.runtime.handles import find
from dsagen.runtime.op_signatures import into, refuse_grad
from dsagen.runtime.step_candidates import CHOOSE, USE, StepBlocks
from dsagen.runtime.step_checks import StepIndex

_STEP = (
    "Tensor q, Tensor k_cache, Tensor index_q, Tensor index_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, str kernels, SymInt max_seq_len, SymInt k"
)
_OPTIONS = (
    "Tensor? index_q_scales=None, Tensor? kv_block_table=None, Tensor? indices=None, Tensor? topk_length=None, "
    "Tensor? extra_k_cache=None, Tensor? attn_sink=None, Tensor? kpe_cache=None, Tensor? extra_kpe_cache=None, "
    "Tensor? v_cache=None, Tensor? extra_v_cache=None, float? softmax_scale=None, int? num_splits=None, "
    "str? determinism=None, bool? overlap=None"
)
_WRITTEN, _BLOCKS = ("out", "lse", "ids", "counts"), ("blocks", "pages")
_RESULTS = "Tensor(a!) out, Tensor(b!) lse, Tensor(c!) ids, Tensor(d!) counts"
STEP_SCHEMAS = {
    "decode_step": f"({_STEP}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "decode_step_out": f"({_STEP}, {_RESULTS}, {_OPTIONS}) -> ()",
    # Layers that choose candidate blocks, and layers that select inside of them.
    "decode_step_choose_out": f"({_STEP}, {_RESULTS}, Tensor(e!) blocks, Tensor(f!) pages, {_OPTIONS}) -> ()",
    "decode_step_use_out": f"({_STEP}, {_RESULTS}, Tensor blocks, Tensor pages, {_OPTIONS}) -> ()",
}


def _decode_step(
    q: Tensor,
    k_cache: Tensor,
    index_q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    kernels: str,
    max_seq_len: int,
    k: int,
    index_q_scales: Tensor | None = None,
    kv_block_table: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    attn_sink: Tensor | None = None,
    kpe_cache: Tensor | None = None,
    extra_kpe_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    extra_v_cache: Tensor | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    determinism: str | None = None,
    overlap: bool | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    ids: Tensor | None = None,
    counts: Tensor | None = None,
    blocks: Tensor | None = None,
    pages: Tensor | None = None,
    candidates: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_blocks = None
    if candidates is not None and blocks is not None and pages is not None:
        of_blocks = StepBlocks(candidates, blocks, pages)
    return find(kernels).decode_step_with_shared_plan(
        q,
        k_cache,
        StepIndex(index_q, index_cache, weights, context_lens, block_table, kv_block_table, index_q_scales),
        (max_seq_len, k),
        (indices, topk_length),
        (num_splits, determinism, overlap),
        None if ids is None or counts is None else (ids, counts),
        of_blocks,
        extra_k_cache=extra_k_cache,
        attn_sink=attn_sink,
        kpe_cache=kpe_cache,
        extra_kpe_cache=extra_kpe_cache,
        v_cache=v_cache,
        extra_v_cache=extra_v_cache,
        softmax_scale=softmax_scale,
        out=out,
        lse=lse,
    )


def _fake_decode_step(
    q: Tensor,
    k_cache: Tensor,
    index_q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    kernels: str,
    max_seq_len: int,
    k: int,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_grad(q, k_cache, index_q, index_cache, weights, context_lens, block_table, *rest, **named)
    batch, next_n, heads = q.shape[:3]
    out = q.new_empty((batch, next_n, heads, find(kernels).spec.dims.d_v), dtype=torch.bfloat16)
    lse = q.new_empty((batch, next_n, heads), dtype=torch.float32).transpose(1, 2)
    ids = q.new_empty((batch, next_n, k), dtype=torch.int32)
    return out, lse, ids, q.new_empty((batch, next_n), dtype=torch.int32)


STEP_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "decode_step": (_decode_step, _fake_decode_step),
    "decode_step_out": (into(_decode_step, 10, *_WRITTEN), refuse_grad),
    "decode_step_choose_out": (into(partial(_decode_step, candidates=CHOOSE), 10, *_WRITTEN, *_BLOCKS), refuse_grad),
    "decode_step_use_out": (into(partial(_decode_step, candidates=USE), 10, *_WRITTEN, *_BLOCKS), refuse_grad),
}
