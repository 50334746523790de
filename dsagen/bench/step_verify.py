"""Whether a decode step is right: its scores, the selection from them, and attention over what was selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.bench.step_data import CHOOSE, USE, StepBenchCase, StepBenchInputs, StepResult
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.bench.topk_verify import selection_problem
from dsagen.check.compare import Gates, compare_decode
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.families.indexer_logits.reference import block_scores_reference, candidates_reference, logits_reference
from dsagen.families.sparse_decode.reference import Source, sparse_decode_reference
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.kv_format import kv_format
from dsagen.spec import DeploymentSpec

# Query tokens whose scores and attention are verified; selections are verified whole.
CHECKED_ROWS = 4
_GROUP_DIMS = 128


@dataclass(frozen=True)
class Promise:
    """What a library's step is held to.

    Scores may be off by `score_error` of the largest of their row; with `lower_index_first` equal scores are taken as
    ours are, else in any way; `gates` are those of attention, None for ours; `lse_base` and `empty_lse` its lse's.
    """

    score_error: float
    lower_index_first: bool
    gates: Gates | None
    lse_base: str | int
    empty_lse: float


def step_problem(
    spec: DeploymentSpec, case: StepBenchCase, item: StepBenchInputs, result: StepResult, promise: Promise
) -> str:
    """What is wrong with what a step left; empty when nothing is."""
    return (
        _scores_problem(case, item, result, promise.score_error)
        or _blocks_problem(case, item, result)
        or _selection_problem(case, item, result, promise.lower_index_first)
        or _attention_problem(spec, case, item, result, promise)
    )


def _requests(case: StepBenchCase) -> int:
    return min(max(1, CHECKED_ROWS // case.next_n), case.requests)


def _scores_problem(case: StepBenchCase, item: StepBenchInputs, result: StepResult, of_largest: float) -> str:
    count = _requests(case)
    rows = slice(0, count * case.next_n)
    lens, table = item.context_lens[:count], item.block_table[:count]
    given = item.index_q[:count], item.index_cache, item.weights[rows], lens, table
    record, scales = index_format(case.index_keys), None if item.index_q_scales is None else item.index_q_scales[:count]
    if case.selects == USE:
        assert result.blocks is not None, "scores are of keys in blocks"
        want = candidates_reference(*given, result.blocks[rows].long(), record, BLOCK_KEYS, q_scales=scales)
    else:
        want, _ = logits_reference(*given, record, case.context, q_scales=scales)
    error = (result.scores[rows, : want.shape[1]].double() - want).abs().amax(1)
    # A NaN is no error that exceeds anything, and still wrong.
    if bool((~(error <= want.abs().amax(1) * of_largest)).any()):
        return f"scores are off by up to {float(error.max()):.3g}"
    return ""


def _blocks_problem(case: StepBenchCase, item: StepBenchInputs, result: StepResult) -> str:
    """Of a layer that chooses: whether blocks are the best by the scores of all keys."""
    if case.selects != CHOOSE:
        return ""
    assert result.blocks is not None, "blocks were chosen"
    seen = item.context_lens.view(-1).long()
    of_blocks, counts = block_scores_reference(result.scores[:, : case.context].float(), seen, BLOCK_KEYS)
    want, _ = topk_reference(of_blocks, result.blocks.shape[1], lengths=counts)
    return "" if torch.equal(result.blocks.long(), want) else "candidate blocks are not the best ones"


def _selection_problem(case: StepBenchCase, item: StepBenchInputs, result: StepResult, lower_index_first: bool) -> str:
    ids, table = result.ids.view(case.rows, -1), _tables_of_tokens(case, item)
    if not lower_index_first:
        shape = TopkBenchCase(case.scores, case.rows, case.context, case.selected, "off", case.page_size)
        return selection_problem(shape, result.scores[:, : case.context], _columns_of(ids, table, case.page_size))
    if case.selects == USE:
        assert result.blocks is not None, "keys are selected in blocks"
        columns, _ = topk_reference(result.scores, case.selected, drop_neg_inf=True)
        chosen = translate_reference(columns, page_table=result.blocks.long(), page_size=BLOCK_KEYS)
    else:
        chosen, _ = topk_reference(result.scores, case.selected, lengths=item.context_lens.view(-1))
    want = translate_reference(chosen, page_table=table, page_size=case.page_size)
    same = torch.equal(ids.long().sort(1).values, want.sort(1).values)
    return "" if same else "what was selected is not the top-k of the scores"


def _tables_of_tokens(case: StepBenchCase, item: StepBenchInputs) -> Tensor:
    return item.block_table.repeat_interleave(case.next_n, 0)


def _columns_of(ids: Tensor, table: Tensor, page_size: int) -> Tensor:
    """int64, like `ids`: the columns of scores that they stand for, -1 for ids on no page of their row."""
    pages, order = table.sort(1)
    page = torch.div(ids, page_size, rounding_mode="floor")
    place = torch.searchsorted(pages, page).clamp_(max=pages.shape[1] - 1)
    columns = order.gather(1, place) * page_size + ids % page_size
    return torch.where(pages.gather(1, place) == page, columns, -1)


def _attention_problem(
    spec: DeploymentSpec, case: StepBenchCase, item: StepBenchInputs, result: StepResult, promise: Promise
) -> str:
    rows = torch.arange(_requests(case) * case.next_n, device=item.q.device)
    first, extra = _source(case.kv_format, item.k_cache, result.ids), None
    if item.window_cache is not None and item.window_ids is not None:
        first, extra = _source(spec.kv.format_id, item.window_cache, item.window_ids), first
    want = sparse_decode_reference(
        item.q, first.record, first.caches, first.indices, sm_scale=spec.sm_scale, lse_base=promise.lse_base,
        empty_lse=promise.empty_lse, rows=rows, extra=extra,
    )  # fmt: skip
    out = result.out.flatten(0, 1)[rows]
    lse = want.lse if result.lse is None else result.lse.transpose(1, 2).flatten(0, 1)[rows]
    gates = promise.gates or Gates().for_logits(want.peak)
    group_dims = spec.kv_format.scale_group_dims or _GROUP_DIMS
    return compare_decode(out, lse, want.out, want.lse, group_dims, gates).problem


def _source(format_id: str, cache: Tensor, ids: Tensor) -> Source:
    record = kv_format(format_id)
    return Source(record, {record.tensors[0].name: cache}, ids)
