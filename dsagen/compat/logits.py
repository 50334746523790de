"""The indexer's logits as deep_gemm calls them, in terms of the op: shared by the modules of both generations."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.deployments import Indexers, LogitsNeed
from dsagen.compat.selection import require_tensor
from dsagen.errors import DeviceError, GuardError, SpecError
from dsagen.guard import rename, require_bool, require_int

# One for the process: an engine may import both generations.
INDEXERS = Indexers()
_SCORES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Rows of logits begin at multiples of this many columns, and of this many bytes.
_ROW_COLUMNS, _ROW_BYTES = 256, 1024
_SCALE_BYTES = 4
_NAMES = {"k_cache": "kv_cache", "max_seq_len": "max_context_len"}


class PagedCall(NamedTuple):
    """The arguments of a paged call by deep_gemm's names."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    schedule_meta: Tensor
    max_context_len: int
    clean_logits: bool
    logits_dtype: torch.dtype
    indices: Tensor | None


def paged_logits(function: str, call: PagedCall) -> Tensor:
    """[b * next_n, max_context_len] of `logits_dtype`, a view of wider rows; GuardError for what cannot be honoured.

    Columns from a token's own length on are not written, or -inf with `clean_logits`.
    """
    clean = require_bool("clean_logits", call.clean_logits)
    for name, tensor, dims in (
        ("q", call.q, 4), ("kv_cache", call.kv_cache, 4), ("weights", call.weights, 2),
        ("context_lens", call.context_lens, 2), ("block_table", call.block_table, 2),
        ("schedule_meta", call.schedule_meta, 2),
    ):  # fmt: skip
        require_tensor(function, name, tensor, dims)
    if call.indices is not None:
        refuse("indices", "rows that share a request are not built: pass next_n tokens of each request", function)
    if call.logits_dtype not in _SCORES:
        refuse("logits_dtype", f"{call.logits_dtype}: expected torch.float32 or torch.bfloat16", function)
    meta = call.schedule_meta
    if meta.dtype is not torch.int32 or meta.shape[1] != 2:
        refuse("schedule_meta", f"{meta.dtype} {tuple(meta.shape)}: expected what the metadata call returns", function)
    batch, next_n, heads, dim = (int(size) for size in call.q.shape)
    most = require_int("max_context_len", call.max_context_len)
    if most < 0:
        refuse("max_context_len", f"{most}: expected the length of the longest request", function)
    wanted = LogitsNeed(heads, dim, _keys_of(function, call.kv_cache, dim), _SCORES[call.logits_dtype])
    try:
        kernels = INDEXERS.kernels_for(wanted, call.q.device)
    except SpecError as error:
        refuse("q", f"no kernels for {heads} heads of {dim} dims: {' '.join(str(error).split())}", function)
    out = _rows(call.q, batch * next_n, most, call.logits_dtype)
    try:
        return kernels.indexer_logits(
            call.q, call.kv_cache, call.weights, call.context_lens, call.block_table, out=out, fill_neg_inf=clean
        )
    except GuardError as error:
        raise rename(error, _NAMES) from None


def paged_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None) -> Tensor:
    """int32 [num_sms + 1, 2] of zeros: kernels find their work by themselves, and read none of it."""
    function = "get_paged_mqa_logits_metadata"
    require_tensor(function, "context_lens", context_lens, 2)
    if context_lens.dtype is not torch.int32 or not context_lens.is_contiguous():
        refuse("context_lens", f"{context_lens.dtype} with strides {context_lens.stride()}: expected int32, contiguous",
               function)  # fmt: skip
    if indices is not None:
        refuse("indices", "rows that share a request are not built: pass next_n tokens of each request", function)
    for name, value in (("block_kv", block_kv), ("num_sms", num_sms)):
        if require_int(name, value) < 1:
            refuse(name, f"{value}: expected 1 at least", function)
    return context_lens.new_zeros((num_sms + 1, 2))


def require_plain_q(function: str, q: object) -> Tensor:
    """Q of a pair (q, scales): e4m3 without scales, which weights have. GuardError for FP4 and for other things."""
    if not isinstance(q, tuple) or len(q) != 2:
        refuse("q", f"expected a pair (q, scales or None), found {type(q).__name__}", function)
    if q[1] is not None:
        refuse("q", "with scales of its own (MX and FP4) is not built: pass (q, None), scales folded into weights",
               function)  # fmt: skip
    require_tensor(function, "q", q[0])
    plain: Tensor = q[0]
    return plain


def num_sms() -> int:
    """Multiprocessors of torch's current device, or of the kernels that `use` was given last where there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    if not INDEXERS.given:
        raise DeviceError("get_num_sms: no CUDA device; for the emulator pass its kernels to use()")
    return INDEXERS.given[0].sm_count


def not_built(function: str, *_: Any, **__: Any) -> NoReturn:
    """GuardError for a function that no op serves yet."""
    refuse("op", "not built: paged logits are", function)


def _keys_of(function: str, kv_cache: Tensor, dim: int) -> str:
    size = int(kv_cache.shape[3]) * kv_cache.element_size()
    if size != dim + _SCALE_BYTES:
        refuse("kv_cache", f"{size} B a token beside a q of {dim} dims: expected {dim + _SCALE_BYTES}", function)
    return "fp8"


def _rows(q: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    step = max(_ROW_COLUMNS, _ROW_BYTES // dtype.itemsize)
    return torch.empty((rows, -(-columns // step) * step), dtype=dtype, device=q.device)[:, :columns]
