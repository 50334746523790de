"""Sparse decode as torch knows it: an op for one cache in one tensor, and one for all that a call can bring.

torch looks for each parameter that a call leaves out by its name, which costs the call, so the op that most calls are
has no parameter of what only other caches need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsagen.runtime.handles import find
from dsagen.runtime.op_signatures import into, refuse_grad
from dsagen.runtime.sparse_decode import DecodeTensors

_TENSORS = "Tensor q, Tensor k_cache, Tensor indices, str kernels"
_OUTPUTS = "Tensor(a!) out, Tensor(b!) lse"
_OPTIONS = "Tensor? topk_length=None, Tensor? attn_sink=None, float? softmax_scale=None, int? num_splits=None"
# Options of `sparse_decode_caches` alone.
OTHER_CACHES = (
    "extra_k_cache",
    "extra_indices",
    "extra_topk_length",
    "kpe_cache",
    "extra_kpe_cache",
    "v_cache",
    "extra_v_cache",
)
_ALL_OPTIONS = ", ".join((_OPTIONS, *(f"Tensor? {name}=None" for name in OTHER_CACHES)))
DECODE_SCHEMAS = {
    "sparse_decode": f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    "sparse_decode_out": f"({_TENSORS}, {_OUTPUTS}, {_OPTIONS}) -> ()",
    "sparse_decode_caches": f"({_TENSORS}, {_ALL_OPTIONS}) -> (Tensor, Tensor)",
    "sparse_decode_caches_out": f"({_TENSORS}, {_OUTPUTS}, {_ALL_OPTIONS}) -> ()",
}


def _sparse_decode_caches(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    kernels: str,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    kpe_cache: Tensor | None = None,
    extra_kpe_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    extra_v_cache: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    others = (kpe_cache, extra_k_cache, extra_indices, extra_topk_length, extra_kpe_cache, v_cache, extra_v_cache)
    tensors = DecodeTensors(q, k_cache, indices, topk_length, attn_sink, out, lse, *others)
    return find(kernels).decode_with_shared_plan(tensors, softmax_scale, num_splits)


def _fake_sparse_decode(
    q: Tensor, k_cache: Tensor, indices: Tensor, kernels: str, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    refuse_grad(q, k_cache, indices, *rest, **named)
    batch, s_q, heads = q.shape[:3]
    out = q.new_empty((batch, s_q, heads, find(kernels).spec.dims.d_v), dtype=torch.bfloat16)
    return out, q.new_empty((batch, s_q, heads), dtype=torch.float32).transpose(1, 2)


_into_outputs = into(_sparse_decode_caches, 4, "out", "lse")
# The schema alone tells the two ops apart.
DECODE_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sparse_decode": (_sparse_decode_caches, _fake_sparse_decode),
    "sparse_decode_out": (_into_outputs, refuse_grad),
    "sparse_decode_caches": (_sparse_decode_caches, _fake_sparse_decode),
    "sparse_decode_caches_out": (_into_outputs, refuse_grad),
}
