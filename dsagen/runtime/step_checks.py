"""What only a decode step can get wrong: stages that do not fit each other, what is left out or given twice."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsagen.errors import GuardError
from dsagen.runtime.step_plan import DecodeStepPlan
from dsagen.runtime.tensors import TensorRule, require, require_memory, require_plain

# Shapes of calls that a plan remembers; a serving process has a handful.
_MAX_SHAPES = 64


class StepIndex(NamedTuple):
    """What a step selects by: the indexer's tensors under the step's names, and the tables of pages."""

    index_q: torch.Tensor | None
    index_cache: torch.Tensor | None
    weights: torch.Tensor | None
    context_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    kv_block_table: torch.Tensor | None
    index_q_scales: torch.Tensor | None


def require_window(
    two_caches: bool,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
) -> None:
    """Refuse a window where the spec has one cache, and the lack of one where it has two."""
    given = {"indices": indices, "topk_length": topk_length, "extra_k_cache": extra_k_cache}
    if not two_caches:
        stray = next((name for name, tensor in given.items() if tensor is not None), None)
        if stray is not None:
            raise GuardError(f"[T-17] {stray}: the spec declares no extra_kv, and decode_step selects: leave it out")
        return
    missing = next((name for name in ("indices", "extra_k_cache") if given[name] is None), None)
    if missing is not None:
        raise GuardError(
            f"[T-17] {missing}: missing: of the spec's two caches k_cache is read by `indices`, and extra_k_cache by "
            "what is selected: pass both"
        )


def require_reuse(plan: DecodeStepPlan, stray: StepIndex) -> None:
    """Refuse to reuse what was never selected, and arguments that would select anew."""
    if not plan.has_ids:
        raise GuardError(
            "[T-22] reuse_ids: nothing was selected with this plan yet: the first layer of a step passes index_q, "
            "index_cache, weights, context_lens and block_table"
        )
    given = next((name for name, tensor in zip(stray._fields, stray, strict=True) if tensor is not None), None)
    if given is not None:
        raise GuardError(f"[T-22] {given}: given with reuse_ids, which selects nothing: leave either out")


def page_size_of(plan: DecodeStepPlan, given: StepIndex, q: torch.Tensor, selected: torch.Tensor | None) -> int:
    """The page size of the cache that is selected from, after the checks, which shapes like some before have passed."""
    index_q, index_cache, _, lens, table, kv_block_table, _ = given
    try:
        shapes = (
            q.shape, selected.shape, index_q.shape, index_cache.shape, lens.shape, lens.stride(), table.shape,  # type: ignore[union-attr]
            None if kv_block_table is None else kv_block_table.shape,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # what is no tensor, and a nested one
        return _require_caches(plan, given, q, selected)
    found = plan.page_sizes.get(shapes)
    if found is None:
        if len(plan.page_sizes) >= _MAX_SHAPES:
            plan.page_sizes.clear()
        found = plan.page_sizes[shapes] = _require_caches(plan, given, q, selected)
    return found


def _require_caches(plan: DecodeStepPlan, given: StepIndex, q: torch.Tensor, selected: torch.Tensor | None) -> int:
    """The page size of the cache that is selected from; GuardError where stages would not fit each other."""
    index_q, index_cache, _, context_lens, block_table, kv_block_table, _ = given
    name = "k_cache" if plan.attention.extra_topk == 0 else "extra_k_cache"
    tensors = {"q": q, name: selected, "index_q": index_q, "index_cache": index_cache}
    tensors |= {"context_lens": context_lens, "block_table": block_table}
    if kv_block_table is not None:
        tensors["kv_block_table"] = kv_block_table
    for tensor_name, tensor in tensors.items():
        require_plain(tensor_name, tensor)
        assert tensor is not None
        require_memory(tensor_name, tensor)
    assert selected is not None and index_cache is not None and block_table is not None and index_q is not None
    if context_lens is not None and not context_lens.is_contiguous():
        raise GuardError(
            f"[T-22] context_lens: strides {context_lens.stride()}, and top-k reads adjacent lengths: pass "
            "context_lens.contiguous()"
        )
    shape = plan.shape
    for tensor_name, tensor in (("q", q), ("index_q", index_q)):
        found = tuple(tensor.shape[:2])
        if found != (shape.batch, shape.next_n):
            raise GuardError(
                f"[T-09] plan: made for batch {shape.batch}, next_n {shape.next_n}, {tensor_name} has {found}: make a "
                "plan for them with plan_decode_step"
            )
    if kv_block_table is not None:
        # Top-k, which is told the row of each token, takes tables of any number.
        require(TensorRule("kv_block_table", ("int32",), "[batch, pages]", (shape.batch, None)), kv_block_table)
    if index_cache.dim() != 4 or selected.dim() != 4 or block_table.dim() != 2:
        # A stage says which, and what is wrong with it; top-k, whose page size it is, comes behind the indexer.
        return int(selected.shape[1]) if selected.dim() > 1 else 1
    _require_same_pages(name, selected, index_cache, kv_block_table)
    pages = {"block_table": (block_table, index_cache), "kv_block_table": (kv_block_table, selected)}
    for table_name, (table, cache) in pages.items():
        if isinstance(table, torch.Tensor) and table.dim() == 2:
            columns, page_size = int(table.shape[1]), int(cache.shape[1])
            if columns * page_size < shape.max_seq_len:
                raise GuardError(
                    f"[T-22] {table_name}: rows of {columns} pages of {page_size} tokens name fewer than the plan's "
                    f"max_seq_len {shape.max_seq_len}: pass a wider table, or plan for what it names"
                )
    return int(selected.shape[1])


def _require_same_pages(
    name: str, selected: torch.Tensor, index_cache: torch.Tensor, kv_block_table: torch.Tensor | None
) -> None:
    """Refuse caches whose pages one table cannot name."""
    if kv_block_table is not None:
        return
    (pages, size), (index_pages, index_size) = selected.shape[:2], index_cache.shape[:2]
    if size != index_size:
        raise GuardError(
            f"[T-22] {name}: pages of {size} tokens, index_cache has pages of {index_size}, and block_table names "
            "pages of both: pass the pages of the KV cache as kv_block_table"
        )
    if pages < index_pages:
        raise GuardError(
            f"[T-22] {name}: {pages} pages, index_cache has {index_pages}, and block_table names pages of both: pass "
            "caches of as many pages, or the pages of the KV cache as kv_block_table"
        )


def lengths_of_tokens(plan: DecodeStepPlan, context_lens: torch.Tensor) -> torch.Tensor:
    """Each token's own length, [batch, next_n], where a call has those of each request's last token."""
    shape = plan.shape
    if (context_lens.shape[0], context_lens.dtype, context_lens.device) != (shape.batch, torch.int32, plan.device):
        # As it is, for the indexer to refuse by its rules.
        return context_lens
    return torch.sub(context_lens[:, None], plan.behind, out=plan.token_lengths)


def require_results(plan: DecodeStepPlan, ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Refuse destinations of a selection that top-k could not write as rows."""
    for name, tensor, like, layout in (
        ("ids", ids, plan.ids, "[batch, next_n, k]"),
        ("counts", counts, plan.counts, "[batch, next_n]"),
    ):
        require_plain(name, tensor)
        require(TensorRule(name, ("int32",), layout, tuple(like.shape)), tensor)
        if not tensor.is_contiguous():
            raise GuardError(
                f"[T-22] {name}: strides {tensor.stride()}, and top-k writes adjacent rows: pass a contiguous one"
            )
