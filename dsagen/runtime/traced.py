"""What the methods of loaded kernels do while torch.compile or torch.export traces them: they call torch's ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsagen.errors import GuardError
from dsagen.runtime.sparse_decode import SparseDecodePlan
from dsagen.runtime.step_candidates import USE, require_chosen, require_level, stray_candidates
from dsagen.runtime.step_checks import StepIndex, require_reuse, require_window
from dsagen.runtime.step_plan import DecodeStepPlan
from dsagen.runtime.torch_decode import OTHER_CACHES

# Read through torch at each call: tracing knows the ops by that.
_OPS = torch.ops.dsagen


def sparse_decode(
    handle: str,
    plan: SparseDecodePlan | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    out: Tensor | None,
    lse: Tensor | None,
    d_v: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """As Kernels.sparse_decode. A plan gives its shape and split count; the workspace is that of calls without one."""
    q, _, indices = tensors
    num_splits = None
    if plan is not None:
        extra = options.get("extra_indices")
        _require_device(plan, q, "plan_sparse_decode")
        found = (q.shape[0], q.shape[1], indices.shape[-1], 0 if extra is None else extra.shape[-1])
        if found != (plan.batch, plan.s_q, plan.topk, plan.extra_topk):
            raise GuardError(
                f"[T-09] plan: made for batch {plan.batch}, s_q {plan.s_q}, topk {plan.topk}, extra_topk "
                f"{plan.extra_topk}, which the tensors do not have: make a plan for them with plan_sparse_decode"
            )
        num_splits = plan.num_splits
    if out is None and lse is None:
        made: tuple[Tensor, Tensor] = _attend(handle, tensors, {**options, "num_splits": num_splits})
        return made
    if out is None:
        out = q.new_empty((*q.shape[:3], d_v), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32).transpose(1, 2)
    _attend(handle, tensors, {**options, "num_splits": num_splits}, out=out, lse=lse)
    return out, lse


def _require_device(plan: SparseDecodePlan | DecodeStepPlan, q: Tensor, maker: str) -> None:
    """Refuse a plan of another device than q's, which the op would leave unused without a word."""
    if q.device != plan.device:
        raise GuardError(
            f"[T-09] plan: made for device {plan.device}, q is on {q.device}: make a plan for it with {maker}"
        )


def _attend(handle: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any], **outputs: Tensor) -> Any:
    """Sparse decode by the op that takes what the call brings, into the outputs where they are given."""
    op = "sparse_decode_caches"
    if all(options.get(name) is None for name in OTHER_CACHES):
        op, options = "sparse_decode", {name: value for name, value in options.items() if name not in OTHER_CACHES}
    return getattr(_OPS, f"{op}_out" if outputs else op)(*tensors, handle, **options, **outputs)


def decode_step(
    handle: str,
    plan: DecodeStepPlan,
    tensors: tuple[Tensor, Tensor],
    given: StepIndex,
    selects: tuple[bool, str | None],
    window: dict[str, Tensor | None],
    one_cache: bool,
    results: tuple[Tensor | None, Tensor | None],
    d_v: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """As Kernels.decode_step. A plan gives sizes and choices, and gets ids, counts and candidate blocks.

    Its workspace is not used. `selects` are reuse_ids and candidates.
    """
    (reuse_ids, candidates), q, shape = selects, tensors[0], plan.shape
    if q.shape[0] != shape.batch or q.shape[1] != shape.next_n:
        raise GuardError(
            f"[T-09] plan: made for batch {shape.batch}, next_n {shape.next_n}, which q does not have: make a plan for "
            "it with plan_decode_step"
        )
    _require_device(plan, q, "plan_decode_step")
    require_window(not one_cache, window["indices"], window["topk_length"], options["extra_k_cache"])
    out, lse = results
    if out is None:
        out = q.new_empty((*q.shape[:3], d_v), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32).transpose(1, 2)
    num_splits = plan.attention.num_splits
    if reuse_ids:
        require_reuse(plan, given)
        if candidates is not None:
            raise stray_candidates()
        selected = {"indices": plan.ids, "topk_length": plan.counts}
        lists = selected if one_cache else {**window, **{f"extra_{name}": list_ for name, list_ in selected.items()}}
        indices = lists.pop("indices")
        _attend(handle, (*tensors, indices), {**lists, **options, "num_splits": num_splits}, out=out, lse=lse)
        return out, lse
    index = {"index_q_scales": given.index_q_scales, "kv_block_table": given.kv_block_table}
    chosen = {"num_splits": num_splits, "determinism": plan.determinism, "overlap": plan.overlaps}
    into = {"out": out, "lse": lse, "ids": plan.ids, "counts": plan.counts}
    op = _OPS.decode_step_out
    if candidates is not None:
        level = require_level(plan.candidates, candidates)
        if candidates == USE:
            require_chosen(level)
        into |= {"blocks": level.blocks, "pages": level.pages}
        op = _OPS.decode_step_use_out if candidates == USE else _OPS.decode_step_choose_out
        if candidates != USE:
            # The op is told the caches' pages when it runs.
            level.is_chosen, level.page_size = True, None
    op(
        *tensors, given.index_q, given.index_cache, given.weights, given.context_lens, given.block_table, handle,
        shape.max_seq_len, shape.k, **into, **index, **window, **options, **chosen,
    )  # fmt: skip
    plan.has_ids = True
    return out, lse


def topk(
    handle: str, scores: Tensor, k: int, out: Tensor | None, raw: Tensor | None, counts: Tensor | None, **options: Any
) -> Tensor:
    """As Kernels.topk."""
    if out is None and raw is None and counts is None:
        made: Tensor = _OPS.topk(scores, handle, k, **options)
        return made
    if out is None:
        out = scores.new_empty((scores.shape[0], k), dtype=torch.int32)
    _OPS.topk_out(scores, handle, k, **options, out=out, raw=raw, counts=counts)
    return out


def indexer_logits(handle: str, tensors: tuple[Tensor, ...], out: Tensor | None, **options: Any) -> Tensor:
    """As Kernels.indexer_logits."""
    if out is None:
        made: Tensor = _OPS.indexer_logits(*tensors, handle, **options)
        return made
    _OPS.indexer_logits_out(*tensors, handle, **options, out=out)
    return out


def indexer_logits_blocks(
    handle: str,
    tensors: tuple[Tensor, ...],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As Kernels.indexer_logits_blocks: all outputs are given, or none."""
    out, block_scores, block_counts = outputs
    if out is None and block_scores is None and block_counts is None:
        made: tuple[Tensor, Tensor, Tensor] = _OPS.indexer_logits_blocks(*tensors, handle, **options)
        return made
    if out is None or block_scores is None or block_counts is None:
        raise GuardError(
            "[T-19] out, block_scores, block_counts: traced calls bring all of them or none: pass the others as well"
        )
    _OPS.indexer_logits_blocks_out(
        *tensors, handle, **options, out=out, block_scores=block_scores, block_counts=block_counts
    )
    return out, block_scores, block_counts


def indexer_logits_ragged(handle: str, tensors: tuple[Tensor, ...], out: Tensor | None, **options: Any) -> Tensor:
    """As Kernels.indexer_logits_ragged."""
    if out is None:
        made: Tensor = _OPS.indexer_logits_ragged(*tensors, handle, **options)
        return made
    _OPS.indexer_logits_ragged_out(*tensors, handle, **options, out=out)
    return out


def indexer_logits_candidates(handle: str, tensors: tuple[Tensor, ...], out: Tensor | None, **options: Any) -> Tensor:
    """As Kernels.indexer_logits_candidates."""
    if out is None:
        made: Tensor = _OPS.indexer_logits_candidates(*tensors, handle, **options)
        return made
    _OPS.indexer_logits_candidates_out(*tensors, handle, **options, out=out)
    return out


def kv_read(handle: str, k_cache: Tensor, out: Tensor | None, **options: Any) -> Tensor:
    """As Kernels.kv_read."""
    if out is None:
        made: Tensor = _OPS.kv_read(k_cache, handle, **options)
        return made
    _OPS.kv_read_out(k_cache, handle, **options, out=out)
    return out


def kv_write(handle: str, rows: Tensor, k_cache: Tensor, slots: Tensor, **options: Any) -> None:
    """As Kernels.kv_write."""
    _OPS.kv_write(rows, k_cache, slots, handle, **options)


def kv_convert(handle: str, source: Tensor, target: Tensor, **options: Any) -> None:
    """As Kernels.kv_convert."""
    _OPS.kv_convert(source, target, handle, **options)


def index_write(handle: str, keys: Tensor, k_cache: Tensor, slots: Tensor) -> None:
    """As Kernels.index_write."""
    _OPS.index_write(keys, k_cache, slots, handle)


def index_gather(
    handle: str,
    k_cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    rows: int,
    token_starts: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As Kernels.index_gather."""
    given = (k_cache, handle, block_table, row_starts, rows)
    if codes is None or scales is None:
        made: tuple[Tensor, Tensor] = _OPS.index_gather(*given, token_starts=token_starts)
        return made
    _OPS.index_gather_out(*given, token_starts=token_starts, codes=codes, scales=scales)
    return codes, scales
