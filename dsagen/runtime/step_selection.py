"""What a decode step selects: scores of index keys and their top-k, of all keys or inside of candidate blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.errors import GuardError
from dsagen.families.indexer_logits.forms import COUNTED
from dsagen.families.indexer_logits.op import BLOCK_KEYS, partition_of
from dsagen.guard import rename
from dsagen.runtime.indexer import LogitsTensors, bind
from dsagen.runtime.indexer_ops import IndexerOps
from dsagen.runtime.launch import Step
from dsagen.runtime.step_candidates import CHOOSE, CandidateLevel, require_level, require_usable
from dsagen.runtime.step_checks import StepIndex, lengths_of_tokens
from dsagen.runtime.step_counts import CountedLaunches
from dsagen.runtime.step_plan import DecodeStepPlan
from dsagen.runtime.topk import TopkOptions, TopkTensors, output_arguments, require_determinism, shape_of
from dsagen.runtime.topk_ops import TopkOps

# What a stage calls the tensors that a step has by other names.
_STEP_NAMES = {
    "q": "index_q",
    "k_cache": "index_cache",
    "q_scales": "index_q_scales",
    "page_table": "kv_block_table",
    "lengths": "context_lens",
}


class Selected(NamedTuple):
    """Where a selection goes: ids int32 [rows, k] and counts int32 [rows]; candidate blocks, where there are any."""

    ids: torch.Tensor
    counts: torch.Tensor
    level: CandidateLevel | None


class StepSelection(IndexerOps, TopkOps):
    """The selecting stages of decode steps."""

    # Whether outputs are poisoned ahead of what writes them.
    _poisons: bool

    def _select(
        self, plan: DecodeStepPlan, given: StepIndex, page_size: int, candidates: str | None, into: Selected
    ) -> None:
        """Scores into the plan, and what top-k makes of them. Of layers with candidate blocks, these too."""
        if candidates is not None:
            require_usable(require_level(into.level, candidates), candidates, page_size)
        try:
            if candidates is None:
                self._select_of_all(plan, given, page_size, into)
            elif candidates == CHOOSE:
                self._choose_blocks(plan, given, page_size, into)
            else:
                self._select_inside(plan, given, into)
        except GuardError as error:
            raise rename(error, _STEP_NAMES) from None

    def _select_of_all(self, plan: DecodeStepPlan, given: StepIndex, page_size: int, into: Selected) -> None:
        index = self._index_of(plan, given)
        if plan.selection.counted is not None:
            try:
                self._count_scores(
                    plan, plan.selection.counted, LogitsTensors(*index, given.index_q_scales, plan.scores)
                )
                self._select_counted(plan, plan.selection.counted, given, index[3].view(-1), page_size, into)
            except BaseException:
                # What was counted may have been left.
                plan.selection.spoil()
                raise
            return
        self.indexer_logits(*index, q_scales=given.index_q_scales, unscored_up_to=plan.shape.k, out=plan.scores)
        self._select_scored(plan, given, index[3].view(-1), page_size, into)

    def _count_scores(self, plan: DecodeStepPlan, counted: CountedLaunches, tensors: LogitsTensors) -> None:
        """Scores into the plan, and counts of them into the histograms of its selection."""
        scalars = (None, plan.shape.k, False)
        if not self._checks_values and counted.scoring.repeat(*tensors, *scalars) is True:
            return
        call = bind(tensors, None, plan.shape.k, False, self.spec, self._driver)
        kernel, ordinal = self._require_pages(COUNTED, call.shape, tensors, call.arguments)
        plan.selection.claim(self._driver.current_stream(ordinal))
        part = partition_of(kernel, call.shape, self._on(ordinal).facts.sm_count)
        arguments = {**call.arguments, "histograms": plan.selection.arguments()["histograms"]}
        self._launch_logits(
            counted.scoring, kernel, part, ordinal, arguments, tensors, scalars, plan.scores,
            workspace=plan.selection.workspace,
        )  # fmt: skip

    def _select_counted(
        self,
        plan: DecodeStepPlan,
        counted: CountedLaunches,
        given: StepIndex,
        lengths: torch.Tensor,
        page_size: int,
        into: Selected,
    ) -> None:
        """The best of what the plan has scores and counts of."""
        k, selection = plan.shape.k, plan.selection
        tensors = TopkTensors(
            plan.scores, lengths, None, _kv_table(given), plan.row_tables, out=into.ids, counts=into.counts
        )
        scalars = (k, page_size, False, plan.determinism, False)
        if not self._checks_values and counted.selecting.repeat(*tensors, *scalars) is True:
            return
        options = TopkOptions(k, page_size, drop_neg_inf=False, ordered=require_determinism(plan.determinism))
        arguments, ordinal = self._bind_topk(tensors, options, selection)
        chosen = self._choose_topk(ordinal, shape_of(tensors, k, self.spec))
        # Claimed before the scores were counted: who claims may set zeros, which would lose the counts.
        stream = self._driver.current_stream(ordinal)
        kernel = self._loader.load(chosen.plans[-1], ordinal)
        step = Step(kernel, chosen.ctas, overlaps=selection.is_dependent)
        outputs = output_arguments(tensors, into.ids)
        values = {**arguments, **outputs, **selection.arguments(), "row_step": chosen.ctas}
        self._launch_topk(counted.selecting, [step], stream, values, selection, (tensors, into.ids, scalars))

    def _select_inside(self, plan: DecodeStepPlan, given: StepIndex, into: Selected) -> None:
        level = into.level
        assert level is not None, "a layer uses what another one has chosen"
        if self._poisons:
            level.poison(chooses=False)
        index = self._index_of(plan, given)
        # The last block may reach behind the keys that a step is for.
        self.indexer_logits_candidates(
            *index,
            level.blocks,
            q_scales=given.index_q_scales,
            max_seq_len=plan.shape.max_seq_len,
            out=level.compact,
        )
        self.topk(
            level.compact,
            k=plan.shape.k,
            page_table=level.pages,
            page_size=BLOCK_KEYS,
            drop_neg_inf=True,
            determinism=plan.determinism,
            plan=level.inside,
            out=into.ids,
            counts=into.counts,
        )

    def _choose_blocks(self, plan: DecodeStepPlan, given: StepIndex, page_size: int, into: Selected) -> None:
        level = into.level
        assert level is not None, "blocks are chosen for a plan that has room for them"
        if self._poisons:
            level.poison(chooses=True)
        index = self._index_of(plan, given)
        self.indexer_logits_blocks(
            *index,
            q_scales=given.index_q_scales,
            # What neither selection reads of a token is not scored.
            unscored_up_to=min(plan.shape.k, BLOCK_KEYS * level.slots),
            out=plan.scores,
            block_scores=level.block_scores,
            block_counts=level.block_counts,
        )
        self.topk(
            level.block_scores,
            k=level.slots,
            lengths=level.block_counts,
            page_table=_kv_table(given),
            page_size=page_size // BLOCK_KEYS,
            table_of_row=plan.row_tables,
            determinism="order",
            plan=level.choosing,
            out=level.pages,
            raw=level.blocks,
        )
        level.is_chosen, level.page_size = True, page_size
        self._select_scored(plan, given, index[3].view(-1), page_size, into)

    def _index_of(self, plan: DecodeStepPlan, given: StepIndex) -> tuple[Any, Any, Any, torch.Tensor, Any]:
        """What the indexer takes: with lengths of each token where a request has several."""
        lengths: Any = given.context_lens
        if self._poisons:
            plan.poison()
        if plan.shape.next_n > 1 and isinstance(lengths, torch.Tensor) and lengths.dim() == 1:
            lengths = lengths_of_tokens(plan, lengths)
        return given.index_q, given.index_cache, given.weights, lengths, given.block_table

    def _select_scored(
        self, plan: DecodeStepPlan, given: StepIndex, lengths: torch.Tensor, page_size: int, into: Selected
    ) -> None:
        """The best of what the plan has scores of."""
        self.topk(
            plan.scores,
            k=plan.shape.k,
            lengths=lengths,
            page_table=_kv_table(given),
            page_size=page_size,
            table_of_row=plan.row_tables,
            determinism=plan.determinism,
            plan=plan.selection,
            out=into.ids,
            counts=into.counts,
        )


def _kv_table(given: StepIndex) -> torch.Tensor | None:
    """Pages of the KV cache."""
    return given.block_table if given.kv_block_table is None else given.kv_block_table
