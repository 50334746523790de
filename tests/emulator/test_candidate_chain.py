"""V4.1's two levels on the emulator: all keys scored, the best blocks selected, and ids from these alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dsagen
from dsagen.check.indexer_cases import Lengths, LogitsCase
from dsagen.check.indexer_inputs import make_inputs
from dsagen.families.indexer_logits.reference import (
    block_scores_reference,
    candidates_reference,
    limits_reference,
    logits_reference,
)
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.runtime.emulated import EmulatorOptions

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
