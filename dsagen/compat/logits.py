"""The indexer's logits as deep_gemm calls them, in terms of the op: shared by the modules of both generations."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.deployments import Indexers, LogitsNeed
from dsagen.compat.selection import require_int32, require_tensor
from dsagen.errors import DeviceError, GuardError, SpecError
from dsagen.families.indexer_logits.guards import WIDTH_GUARD
from dsagen.guard import check, rename, require_bool, require_int
from dsagen.index_format import index_format
from dsagen.runtime.api import Kernels
from dsagen.runtime.device_memory import new_output

# One for the process: an engine may import both generations.
INDEXERS = Indexers()
_SCORES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Rows of logits begin at multiples of this many columns, and of this many bytes.
_ROW_COLUMNS, _ROW_BYTES = 256, 1024
# Multiprocessors, keys, heads and page sizes of a call of metadata are int32 there.
_MOST_INT = (1 << 31) - 1
_NAMES = {"k_cache": "kv_cache", "max_seq_len": "max_context_len", "q_scales": "q"}
_RAGGED_NAMES = {"keys": "kv", "key_scales": "kv", "starts": "cu_seq_len_k_start", "ends": "cu_seq_len_k_end"}
_RAGGED_NAMES |= {"max_window": "max_seqlen_k", "q_scales": "q"}


class Query(NamedTuple):
    """q of a call: codes, and scales of blocks where it has them."""

    codes: Tensor
    scales: Tensor | None = None


class PagedCall(NamedTuple):
    """The arguments of a paged call by deep_gemm's names."""

    q: Query
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    schedule_meta: Tensor
    max_context_len: int
    clean_logits: bool
    logits_dtype: torch.dtype
    indices: Tensor | None


class RaggedCall(NamedTuple):
    """The arguments of a ragged call by deep_gemm's names; `max_seqlen_k` 0: rows of all keys."""

    q: Query
    kv: object
    weights: Tensor
    cu_seq_len_k_start: Tensor
    cu_seq_len_k_end: Tensor
    clean_logits: bool
    max_seqlen_k: int
    logits_dtype: torch.dtype


def paged_logits(function: str, call: PagedCall) -> Tensor:
    """[b * next_n, max_context_len] of `logits_dtype`, a view of wider rows; GuardError for what cannot be honoured.

    Columns from a token's own length on are not written, or -inf with `clean_logits`.
    """
    clean = require_bool("clean_logits", call.clean_logits)
    q, scales = call.q
    for name, tensor, dims in (
        ("q", q, 4), ("kv_cache", call.kv_cache, 4), ("weights", call.weights, 2),
        ("context_lens", call.context_lens, 2), ("block_table", call.block_table, 2),
        ("schedule_meta", call.schedule_meta, 2),
    ):  # fmt: skip
        require_tensor(function, name, tensor, dims)
    if call.indices is not None:
        refuse("indices", "rows that share a request are not built: pass next_n tokens of each request", function)
    meta = call.schedule_meta
    if meta.dtype is not torch.int32 or meta.shape[1] != 2:
        refuse("schedule_meta", f"{meta.dtype} {tuple(meta.shape)}: expected what the metadata call returns", function)
    most = _columns("max_context_len", call.max_context_len, function)
    batch, next_n = int(q.shape[0]), int(q.shape[1])
    wanted = _need(function, call.q, call.logits_dtype, "paged")
    size = int(call.kv_cache.shape[3]) * call.kv_cache.element_size()
    expected = index_format(wanted.keys).record_bytes(wanted.dim)
    if size != expected:
        text = f"{size} B a token beside a q of {wanted.dim} dims: expected {expected}"
        refuse("kv_cache", text, function)
    kernels = _kernels(function, wanted, q)
    out = _rows(q, batch * next_n, most, call.logits_dtype)
    named: dict[str, Any] = {} if scales is None else {"q_scales": scales}
    try:
        return kernels.indexer_logits(
            q, call.kv_cache, call.weights, call.context_lens, call.block_table, out=out, fill_neg_inf=clean, **named
        )
    except GuardError as error:
        raise rename(error, _NAMES) from None


def ragged_logits(function: str, call: RaggedCall) -> Tensor:
    """[T, N], or with `max_seqlen_k` [T, max_seqlen_k] of which column j is a token's j-th key; views of wider rows.

    Columns outside of a token's window are not written, or -inf with `clean_logits`.
    """
    clean = require_bool("clean_logits", call.clean_logits)
    q, scales = call.q
    keys, key_scales = _pair(function, "kv", call.kv)
    if key_scales is None:
        refuse("kv", "expected a pair (keys, scales), found no scales", function)
    for name, tensor, dims in (
        ("q", q, 3), ("kv", keys, 2), ("weights", call.weights, 2), ("cu_seq_len_k_start", call.cu_seq_len_k_start, 1),
        ("cu_seq_len_k_end", call.cu_seq_len_k_end, 1),
    ):  # fmt: skip
        require_tensor(function, name, tensor, dims)
    most = _columns("max_seqlen_k", call.max_seqlen_k, function)
    kernels = _kernels(function, _need(function, call.q, call.logits_dtype, "ragged"), q)
    out = _rows(q, int(q.shape[0]), most or int(keys.shape[0]), call.logits_dtype)
    named: dict[str, Any] = {} if scales is None else {"q_scales": scales}
    try:
        return kernels.indexer_logits_ragged(
            q, keys, key_scales, call.weights, call.cu_seq_len_k_start, call.cu_seq_len_k_end,
            max_window=most or None, fill_neg_inf=clean, out=out, **named,
        )  # fmt: skip
    except GuardError as error:
        raise rename(error, _RAGGED_NAMES) from None


def ragged_metadata(starts: Tensor, ends: Tensor, num_kv_tokens: int, num_heads: int) -> Tensor:
    """int32 [multiprocessors + 1, 2] of zeros, as paged_metadata gives."""
    function = "get_mqa_logits_metadata"
    require_tensor(function, "cu_seq_len_k_start", starts, 1)
    require_tensor(function, "cu_seq_len_k_end", ends, 1, int(starts.shape[0]))
    for name, tensor in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        require_int32(function, name, tensor)
    _require_counts(function, num_kv_tokens=num_kv_tokens, num_heads=num_heads)
    return starts.new_zeros((num_sms() + 1, 2), dtype=torch.int32)


def paged_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None) -> Tensor:
    """int32 [num_sms + 1, 2] of zeros: kernels find their work by themselves, and read none of it."""
    function = "get_paged_mqa_logits_metadata"
    require_tensor(function, "context_lens", context_lens, 2)
    if context_lens.dtype is not torch.int32 or not context_lens.is_contiguous():
        refuse("context_lens", f"{context_lens.dtype} with strides {context_lens.stride()}: expected int32, contiguous",
               function)  # fmt: skip
    if indices is not None:
        refuse("indices", "rows that share a request are not built: pass next_n tokens of each request", function)
    _require_counts(function, block_kv=block_kv, num_sms=num_sms)
    return context_lens.new_zeros((num_sms + 1, 2))


def _require_counts(function: str, **counts: int) -> None:
    for name, value in counts.items():
        if not 1 <= require_int(name, value) <= _MOST_INT:
            refuse(name, f"{value}: expected 1..{_MOST_INT}", function)


def query_of(function: str, q: object) -> Query:
    """Of a pair (q, scales), of which the second is None for q whose scales the weights have."""
    return Query(*_pair(function, "q", q))


def _pair(function: str, name: str, pair: object) -> tuple[Tensor, Tensor | None]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        refuse(name, f"expected a pair of codes and scales, found {type(pair).__name__}", function)
    codes, scales = pair
    require_tensor(function, name, codes)
    if scales is not None:
        require_tensor(function, name, scales)
    return codes, scales


def num_sms() -> int:
    """Multiprocessors of torch's current device, or of the kernels that `use` was given last where there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    if not INDEXERS.given:
        raise DeviceError("get_num_sms: no CUDA device; for the emulator pass its kernels to use()")
    return INDEXERS.given[0].sm_count


def not_built(function: str, *_: Any, **__: Any) -> NoReturn:
    """GuardError for a function that no op serves yet."""
    refuse("op", "not built: paged and ragged logits are", function)


def _columns(name: str, value: object, function: str) -> int:
    found = require_int(name, value)
    if found < 0:
        refuse(name, f"{found}: expected the length of the longest row", function)
    try:
        # Before rows of so many are allocated.
        check([WIDTH_GUARD], {"width": found})
    except GuardError as error:
        raise rename(error, {"max_seq_len": name}) from None
    return found


def _need(function: str, q: Query, logits_dtype: torch.dtype, form: str) -> LogitsNeed:
    """Heads, dims and format by the codes of q: without scales fp8, with scales of blocks mxfp8, and of bytes mxfp4."""
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in _SCORES:
        refuse("logits_dtype", f"{logits_dtype!r:.200}: expected torch.float32 or torch.bfloat16", function)
    heads, dim = int(q.codes.shape[-2]), int(q.codes.shape[-1])
    keys = "fp8"
    if q.scales is not None:
        keys = "mxfp8" if q.codes.dtype is torch.float8_e4m3fn else "mxfp4"
        dim = dim if keys == "mxfp8" else 2 * dim
    return LogitsNeed(heads, dim, keys, _SCORES[logits_dtype], form)


def _kernels(function: str, wanted: LogitsNeed, q: Tensor) -> Kernels:
    try:
        return INDEXERS.kernels_for(wanted, q.device)
    except SpecError as error:
        text = f"no kernels for {wanted.heads} heads of {wanted.dim} dims, {wanted.keys} keys"
        refuse("q", f"{text}: {' '.join(str(error).split())}", function)


def _rows(q: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    step = max(_ROW_COLUMNS, _ROW_BYTES // dtype.itemsize)
    return new_output("logits", (rows, -(-columns // step) * step), dtype, q.device)[:, :columns]
