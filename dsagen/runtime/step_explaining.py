"""What `Kernels.explain` tells of top-k, sparse decode and whole steps: the kernels that a call or a plan launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsagen.dependent import CHAIN_OPS, LEAST_REQUESTS, is_dependent
from dsagen.families.indexer_logits.forms import BLOCKS, CANDIDATES, COUNTED, PAGED
from dsagen.families.indexer_logits.op import most_counted
from dsagen.families.sparse_decode.choice import explain_choice, first_fitting
from dsagen.families.topk.op import TopkShape, explain_call, most_lead
from dsagen.plan import KernelPlan
from dsagen.quantity import quantity
from dsagen.runtime import step_ops
from dsagen.runtime.device_kernels import DeviceKernels
from dsagen.runtime.indexer import index_of
from dsagen.runtime.sparse_decode import OP as DECODE
from dsagen.runtime.step_ops import LOGITS, StepOps
from dsagen.runtime.step_plan import StepShape, layout_of
from dsagen.runtime.topk import OP as TOPK


class StepExplaining(StepOps):
    """Explanations of a step and of its later stages."""

    def _explained_head(self, op: str, kernels: DeviceKernels) -> str:
        """What is explained, and for which device."""
        facts = kernels.facts
        return (
            f"{op}: {self.spec.name} on device {kernels.ordinal} ({facts.name}, {kernels.arch}, {facts.sm_count} SMs)"
        )

    def _explain_topk(
        self, kernels: DeviceKernels, shape: TopkShape, launched: Sequence[KernelPlan] | None = None
    ) -> str:
        """What a call of that shape takes; `launched` are the kernels of a step in the place of a call's own."""
        plans = {role: plans for (op, role), plans in kernels.by_role.items() if op == TOPK}
        # Rows of a plan begin anywhere, and may take clusters where those of a call do not.
        shapes = shape, replace(shape, lead=most_lead(str(self.spec.scores)))
        both = [self._clusters_for_topk(kernels.ordinal, each) for each in shapes]
        clusters = {size: min(each[size] for each in both) for size in both[0]}
        return explain_call(plans, shape, kernels.facts.sm_count, clusters, self._topk_cluster, launched)

    def _explain_decode(
        self, kernels: DeviceKernels, sizes: tuple[int, int, int, int], num_splits: int | None, overlaps: bool = False
    ) -> str:
        """What a call of these sizes takes: batch, s_q, topk and extra_topk. `overlaps` as of a step's plan."""
        shape = self._shape(*sizes)
        judged = self._judge(kernels, shape, num_splits)
        chosen = first_fitting(judged)
        launched = kernels.dependent(chosen.plan) if overlaps and chosen is not None else None
        text = explain_choice(judged, shape, self._decide(kernels, shape), launched)
        combines = chosen is not None and chosen.partition.combine_ctas
        return f"{text}\ncombine: {kernels.combine.slug}" if combines else text

    def _explain_step(
        self,
        kernels: DeviceKernels,
        sizes: tuple[int, int, int],
        k: int | None,
        window: int | None,
        num_splits: int | None,
    ) -> str:
        """What each stage of a step takes, whose plan is told nothing else, and the workspace that they share."""
        ordinal, shape, widths = self._step_shape(*sizes, k, window, kernels.ordinal)
        stage_bytes = self._stage_bytes(shape, widths, num_splits, ordinal)
        layout = layout_of(shape, str(self.spec.scores), *stage_bytes)
        overlaps, counts = self._overlaps(None, shape.batch, ordinal), self._counts(None, shape, ordinal)
        selection = self._selection_of(shape)
        launched = self._topk_kernels(ordinal, self._choose_topk(ordinal, selection), overlaps)
        # What counts scores takes the place of the first pass.
        selecting = launched[-1:] if counts else launched
        begins_early = counts or is_dependent(launched[0].variant)
        logits = (COUNTED if counts else PAGED, BLOCKS, CANDIDATES)
        tokens = shape.batch, shape.next_n
        return "\n".join(
            (
                f"{' -> '.join(CHAIN_OPS)}: {shape.k} of up to {quantity(shape.max_seq_len, 'key')} for each of "
                f"{quantity(shape.rows, 'token')}",
                f"a token that sees no more than {quantity(shape.k, 'key')} is not scored",
                *self._told_of_overlap(shape.batch, ordinal, begins_early),
                *self._explain_counts(shape, ordinal),
                self._explained_head(LOGITS, kernels),
                self._explain_logits(ordinal, *tokens, shape.max_seq_len, logits),
                self._explained_head(TOPK, kernels),
                self._explain_topk(kernels, selection, selecting),
                self._explained_head(DECODE, kernels),
                self._explain_decode(kernels, (*tokens, *widths), num_splits, overlaps),
                f"workspace of the step: {layout.total_bytes} B, {layout.ids} B of them scores",
            )
        )

    def _told_of_overlap(self, requests: int, ordinal: int, begins_early: bool) -> list[str]:
        """How the launches of a step follow each other by default, for people; nothing where they have no choice.

        `begins_early` says whether top-k does where launches overlap.
        """
        if not self._can_overlap(ordinal):
            return []
        limit = f"from {LEAST_REQUESTS} requests on: an H200 is faster so with 128, slower with 16"
        if self._overlaps(None, requests, ordinal):
            if begins_early:
                return [f"top-k and attention begin while the stage before them ends ({limit})"]
            text = "of so many rows, or such long ones, top-k begins behind the scores"
            return [f"attention begins while top-k ends ({limit}); {text}"]
        return [f"top-k begins behind the scores; launches overlap {limit} (overlap=True asks for it)"]

    def _explain_counts(self, shape: StepShape, ordinal: int) -> list[str]:
        """Whether scores are counted where they are made, of a spec that declares it."""
        if not index_of(self.spec).histogram:
            return []
        kernel = self._on(ordinal).by_role[LOGITS, COUNTED][0]
        if self._counts(None, shape, ordinal):
            return [f"scores are counted by {kernel.slug}, and row_split selects without a first pass"]
        cluster = self._choose_topk(ordinal, self._selection_of(shape)).cluster
        reason = "rows that no blocks share have no first pass"
        if cluster > 1:
            reason = f"clusters of {cluster} CTAs hold the rows, and read them once"
        elif shape.next_n > most_counted(kernel):
            reason = f"{kernel.slug} has room for counts of {quantity(most_counted(kernel), 'token')} of a request"
        elif shape.rows > step_ops.MOST_COUNTED_ROWS:
            most = step_ops.MOST_COUNTED_ROWS
            reason = f"more than {most} tokens (histogram=True asks for it): of 1 an H200 is faster so, of 16 slower"
        return [f"scores are not counted where they are made: {reason}"]
