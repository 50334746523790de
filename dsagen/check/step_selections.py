"""What the layers of a decode step should select: references of scores, of candidate blocks, and of both top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsagen.check.indexer_inputs import LogitsInputs
from dsagen.check.step_cases import StepCase
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.families.indexer_logits.reference import (
    block_scores_reference,
    candidates_reference,
    limits_reference,
    logits_reference,
)
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.spec import DeploymentSpec

SCORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Selection:
    """What a layer should select: `ids` int64 [rows, k] in order, then -1, and `counts` int64 [rows] of them."""

    ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Blocks:
    """Candidate blocks of each token, and `scores` [rows, blocks] and `counts` int32 [rows] that they are chosen by.

    `scored` says which of these scores are written. `chosen` int64 [rows, slots] are blocks in the order of keys, then
    -1, and `pages` the same as pages of 8 rows of the KV cache.
    """

    scores: Tensor
    counts: Tensor
    scored: Tensor
    chosen: Tensor
    pages: Tensor


@dataclass(frozen=True)
class References:
    """A step's selections by their references; ids are those of a KV cache of such pages and tables."""

    case: StepCase
    spec: DeploymentSpec
    page_size: int
    kv_table: Tensor | None

    @property
    def slots(self) -> int:
        """Candidate blocks that a token may have: no more than there are."""
        return min(self.case.candidate_blocks or 0, -(-self.case.width // BLOCK_KEYS))

    def unscored(self, chooses: bool) -> int:
        """Tokens that see no more keys than this are not scored, since every selection takes all that they see."""
        return min(self.case.k, BLOCK_KEYS * self.slots) if chooses else self.case.k

    def scores(self, index: LogitsInputs, chooses: bool = False) -> tuple[Tensor, Tensor]:
        """Scores as the kernels' dtype holds them, and which of them are scored."""
        options: dict[str, Any] = {"unscored_up_to": self.unscored(chooses), **index.named}
        scores, scored = logits_reference(*index.tensors, self._record, self.case.width, **options)
        return scores.to(SCORE_DTYPES[str(self.spec.scores)]), scored

    def select(self, scores: Tensor, index: LogitsInputs, k: int) -> Selection:
        """The exact top-k of scores."""
        chosen, counts = topk_reference(scores, k, lengths=self.limits(index))
        return Selection(self._physical(chosen, index, self.page_size), counts)

    def choose(self, scores: Tensor, index: LogitsInputs) -> Blocks:
        """The best blocks of each token, by scores of all keys that it sees."""
        limits = self.limits(index)
        of_blocks, counts = block_scores_reference(scores.float(), limits, BLOCK_KEYS)
        chosen, _ = topk_reference(of_blocks, self.slots, lengths=counts)
        column = torch.arange(of_blocks.shape[1], device=scores.device)
        scored = (column < counts[:, None]) & (limits > self.unscored(chooses=True))[:, None]
        pages = self._physical(chosen, index, self.page_size // BLOCK_KEYS)
        return Blocks(of_blocks.to(scores.dtype), counts, scored, chosen, pages)

    def inside(self, index: LogitsInputs, chosen: Tensor) -> Tensor:
        """Scores [rows, slots x 8] of the keys in chosen blocks, as the kernels' dtype holds them."""
        found = candidates_reference(
            *index.tensors, chosen, self._record, BLOCK_KEYS, max_seq_len=self.case.width, **index.named
        )
        return found.to(SCORE_DTYPES[str(self.spec.scores)])

    def select_inside(self, compact: Tensor, index: LogitsInputs, chosen: Tensor) -> Selection:
        """The exact top-k of scores of the keys in chosen blocks."""
        columns, counts = topk_reference(compact, self.case.k, drop_neg_inf=True)
        logical = translate_reference(columns, page_table=chosen, page_size=BLOCK_KEYS)
        return Selection(self._physical(logical, index, self.page_size), counts)

    def limits(self, index: LogitsInputs) -> Tensor:
        """Keys that each token sees, int64 [rows]."""
        case = self.case
        return limits_reference(index.context_lens, case.batch, case.next_n, case.width).flatten()

    def _physical(self, logical: Tensor, index: LogitsInputs, page_size: int) -> Tensor:
        rows = torch.arange(self.case.rows, device=logical.device) // self.case.next_n
        table = index.block_table if self.kv_table is None else self.kv_table
        return translate_reference(logical, page_table=table, page_size=page_size, table_of_row=rows)

    @property
    def _record(self) -> Any:
        assert self.spec.index is not None, "a spec with the op has an index"
        return index_format(self.spec.index.keys)
