"""V4.1's two levels on the emulator: all keys scored, the best blocks selected, and ids from these alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsagen
from dsagen.check.indexer_cases import Lengths, LogitsCase
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs
from dsagen.check.step_cases import WINDOW, StepCase
from dsagen.check.step_run import StepRun, layer_arguments
from dsagen.families.indexer_logits.reference import (
    block_scores_reference,
    candidates_reference,
    limits_reference,
    logits_reference,
)
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile

BLOCK, BLOCKS, K, WIDTH = 8, 12, 70, 400


@pytest.fixture(scope="module")
def kernels(shared_store: Path) -> Iterator[tuple[dsagen.Kernels, dsagen.Kernels]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
        options = EmulatorOptions(races=False)
        names = ("v41_indexer_candidates_h64", "v32_topk_h128")
        indexer, select = (dsagen.load(name, device="emulator", emulator=options) for name in names)
        yield indexer, select


@pytest.mark.parametrize("lengths", [Lengths.EDGES, Lengths.PER_REQUEST])
def test_ids_are_the_best_of_the_best_blocks(kernels: tuple[dsagen.Kernels, dsagen.Kernels], lengths: Lengths) -> None:
    indexer, select = kernels
    index, record = indexer.spec.index, index_format("mxfp4")
    assert index is not None
    # Sums are exact. Among tokens are those that see fewer keys than ids, fewer blocks than candidates, and none.
    case = LogitsCase("", 5, 2, WIDTH, lengths=lengths)
    inputs = make_inputs(case, record, index, torch.Generator().manual_seed(5))
    limits = limits_reference(inputs.context_lens, 5, 2, WIDTH).flatten()

    _, of_blocks, counts = indexer.indexer_logits_blocks(
        *inputs.tensors, max_seq_len=WIDTH, unscored_up_to=BLOCK * BLOCKS, **inputs.named
    )
    blocks = select.topk(of_blocks, k=BLOCKS, lengths=counts, determinism="order")
    compact = indexer.indexer_logits_candidates(*inputs.tensors, blocks, **inputs.named)
    ids = select.topk(compact, k=K, candidate_blocks=blocks, drop_neg_inf=True, determinism="order")

    want, _ = logits_reference(*inputs.tensors, record, WIDTH, **inputs.named)
    want_blocks, _ = topk_reference(block_scores_reference(want.float(), limits, BLOCK)[0], BLOCKS, lengths=counts)
    assert blocks.long().equal(want_blocks)
    inside = candidates_reference(*inputs.tensors, want_blocks, record, BLOCK, **inputs.named).float()
    columns, _ = topk_reference(inside, K, drop_neg_inf=True)
    assert ids.long().equal(translate_reference(columns, page_table=want_blocks, page_size=BLOCK))
    for row, limit in zip(ids.tolist(), limits.tolist(), strict=True):
        found = [key for key in row if key >= 0]
        assert found == sorted(set(found)) and row[: len(found)] == found
        assert len(found) == min(K, limit) and (limit == 0 or max(found) < limit)
        # All that there is, where it is no more than is asked for.
        assert limit > K or found == list(range(limit))


# ---- the same in decode steps: one layer chooses blocks, the next scores what is in them

STEP_SPEC = load_spec("v41_h16").replace(
    ops=["indexer_logits", "topk", "sparse_decode"],
    index={"heads": 32, "dim": 128, "keys": "mxfp4", "forms": ["paged", "blocks", "candidates"]},
)


class AllReadable(StepRun):
    """Inputs of a step whose KV cache has every token that a table names."""

    def _readable(self, kernels: Any, index: LogitsInputs, table: Tensor | None, page_size: int) -> Tensor:
        pages = index.block_table if table is None else table
        return torch.unique(pages.long()[..., None] * page_size + torch.arange(page_size))


@pytest.mark.parametrize("lengths", [Lengths.EDGES, Lengths.PER_TOKEN])
def test_layers_select_inside_of_the_blocks_that_one_has_chosen(shared_store: Path, lengths: Lengths) -> None:
    launches: list[EmulatedLaunch] = []
    kernels = dsagen.load(STEP_SPEC, device="emulator", emulator=EmulatorOptions(observe=launches.append, threads=1))
    case = StepCase("chosen", 4, 2, WIDTH, K, kv_page_size=16, lengths=lengths)
    run = AllReadable(case, lambda _: kernels, torch.device("cpu"), 3)
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    first, other, (layer,) = inputs.index, run.inputs(kernels, 1).index, inputs.layers
    options = {"k": K, "window": WINDOW, "determinism": "order", "candidate_blocks": BLOCKS}
    plan = kernels.plan_decode_step(4, 2, WIDTH, **options)
    shared = {"context_lens": first.context_lens, "block_table": first.block_table, "kv_block_table": inputs.kv_table}
    given = {**layer_arguments(layer), **shared, "softmax_scale": 512**-0.55, "plan": plan}
    record, limits = index_format("mxfp4"), limits_reference(first.context_lens, 4, 2, WIDTH).flatten()
    assert inputs.kv_table is not None

    def physical(logical: Tensor) -> Tensor:
        rows = torch.arange(8) // 2
        return translate_reference(logical, page_table=inputs.kv_table, page_size=16, table_of_row=rows)

    def step(index: LogitsInputs, **more: Any) -> None:
        run.poison(plan, outputs)
        of = {
            "index_q": index.q,
            "index_cache": index.k_cache,
            "weights": index.weights,
            "index_q_scales": index.q_scales,
        }
        kernels.decode_step(layer.q, out=outputs[0].out.view, lse=outputs[0].lse, **given, **of, **more)
        assert run._attention_problem(kernels.spec, layer, plan.ids, outputs[0]) == ""

    step(first, candidates="choose")
    scores, _ = logits_reference(*first.tensors, record, WIDTH, **first.named)
    chosen, _ = topk_reference(scores.float(), K, lengths=limits)
    assert plan.ids.view(8, K).long().equal(physical(chosen))
    of_blocks, counts = block_scores_reference(scores.float(), limits, BLOCK)
    blocks, _ = topk_reference(of_blocks, BLOCKS, lengths=counts)
    assert plan.candidates is not None and plan.candidates.blocks.long().equal(blocks)

    del launches[:]
    step(other, candidates="use")
    of = (other.q, other.k_cache, other.weights, first.context_lens, first.block_table)
    inside = candidates_reference(*of, blocks, record, BLOCK, **other.named).float()
    columns, found = topk_reference(inside, K, drop_neg_inf=True)
    logical = translate_reference(columns, page_table=blocks, page_size=BLOCK)
    assert plan.ids.view(8, K).long().equal(physical(logical)) and plan.counts.view(-1).long().equal(found)
    assert [launch.symbol.endswith("launch_dependent") for launch in launches][:3] == [False, True, True]
    assert "candidates" in launches[0].symbol
