"""The methods of loaded kernels that run a decode step: the indexer's scores, their top-k, attention over it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dsagen.arch import arch as arch_row
from dsagen.dependent import CHAIN_OPS, LEAST_REQUESTS, has_chain
from dsagen.errors import FrozenError, GuardError
from dsagen.families.indexer_logits.forms import BLOCKS, CANDIDATES, COUNTED, PAGED
from dsagen.families.indexer_logits.guards import COUNTED_GUARD
from dsagen.families.indexer_logits.op import BLOCK_KEYS, LogitsShape, most_counted, size_values
from dsagen.families.indexer_logits.op import SIZE_GUARDS as LOGITS_SIZES
from dsagen.families.topk.op import TopkShape
from dsagen.guard import check, rename, require_bool, require_int
from dsagen.quantity import quantity
from dsagen.runtime import traced
from dsagen.runtime.decode_ops import DecodeOps
from dsagen.runtime.indexer import SCORE_DTYPES, index_of
from dsagen.runtime.indexer_blocks import block_columns
from dsagen.runtime.plan_cache import PlanCache
from dsagen.runtime.step_candidates import (
    USE,
    CandidateLevel,
    StepBlocks,
    make_level,
    require_level,
    stray_candidates,
)
from dsagen.runtime.step_checks import (
    StepIndex,
    page_size_of,
    require_results,
    require_reuse,
    require_window,
)
from dsagen.runtime.step_plan import DecodeStepPlan, StepShape, layout_of, step_workspace
from dsagen.runtime.step_selection import Selected, StepSelection
from dsagen.runtime.tensors import require_plain
from dsagen.runtime.topk import TopkTensors, require_determinism, shape_of

if TYPE_CHECKING:
    from dsagen.runtime.api import Device

STEP = "decode_step"
LOGITS = "indexer_logits"
# Tokens of a step whose scores are counted where they are made unless the caller says so: 35.8 instead of 37.7 us for
# one request of 128 K keys on an H200, and 126.2 instead of 123.7 for 16. The limit lies between.
MOST_COUNTED_ROWS = 4


class StepOps(StepSelection, DecodeOps):
    """decode_step and its plan, over the methods of its stages."""

    # What steps without a plan share, by sizes, choices, device and stream.
    _step_plans: PlanCache[tuple[object, ...], DecodeStepPlan]

    def decode_step(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        *,
        plan: DecodeStepPlan,
        index_q: torch.Tensor | None = None,
        index_cache: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        index_q_scales: torch.Tensor | None = None,
        context_lens: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        kv_block_table: torch.Tensor | None = None,
        reuse_ids: bool = False,
        candidates: str | None = None,
        indices: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        extra_kpe_cache: torch.Tensor | None = None,
        v_cache: torch.Tensor | None = None,
        extra_v_cache: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's sparse attention: scores of cached index keys, the k best of them, attention over those tokens.

        - q, k_cache: as sparse_decode takes them, q [batch, next_n, heads, d_qk]
        - plan: of plan_decode_step, the same for all layers of a step; its `ids` are what was selected
        - index_q, index_cache, weights, index_q_scales, context_lens, block_table: as indexer_logits takes q, k_cache,
          q_scales and the others; context_lens contiguous. One length a request, [batch], costs a launch of torch's
          where next_n > 1
        - kv_block_table: int32 [batch, pages], where the KV cache has pages of its own; otherwise block_table names
          pages of both caches, which then have the same page size, and as many pages
        - reuse_ids: attend to what the plan's last call selected, as layers do that share an indexer; the arguments of
          the indexer and the tables are then left out
        - candidates: of a plan with candidate blocks, "choose" for the layer that chooses each token's best blocks of 8
          keys, by the scores of all, and "use" for layers that score the keys of these alone (V4.1), in those pages of
          the KV cache that the choosing layer was told
        - the others as in sparse_decode. With a second cache in the spec, selected tokens are that one's,
          `extra_k_cache`, and `indices` and `topk_length` are the list over `k_cache`, the window

        Tokens that see no more than k keys attend to all of them, and their keys are not scored. Lengths, tables and
        ids are device data, so a captured graph serves any. Returns (out, lse) as sparse_decode. Raises GuardError for
        what does not fit, before anything of the stage that it concerns is launched; what the other ops raise besides.
        """
        given = StepIndex(index_q, index_cache, weights, context_lens, block_table, kv_block_table, index_q_scales)
        options: dict[str, Any] = {
            "extra_k_cache": extra_k_cache,
            "attn_sink": attn_sink,
            "kpe_cache": kpe_cache,
            "extra_kpe_cache": extra_kpe_cache,
            "v_cache": v_cache,
            "extra_v_cache": extra_v_cache,
            "softmax_scale": softmax_scale,
        }
        if type(plan) is not DecodeStepPlan or plan.spec is not self.spec:
            raise GuardError("[T-09] plan: was not made by these kernels: pass what their plan_decode_step returned")
        if torch.compiler.is_compiling():
            window = {"indices": indices, "topk_length": topk_length}
            one_cache, d_v = self.spec.extra_kv is None, self.spec.dims.d_v
            return traced.decode_step(
                self.handle, plan, (q, k_cache), given, (reuse_ids, candidates), window, one_cache, (out, lse), d_v,
                options,
            )  # fmt: skip
        require_window(self.spec.extra_kv is not None, indices, topk_length, extra_k_cache)
        if require_bool("reuse_ids", reuse_ids):
            require_reuse(plan, given)
            if candidates is not None:
                raise stray_candidates()
            plan.claim(self._driver.current_stream(plan._ordinal))
        else:
            page_size = page_size_of(plan, given, q, k_cache if self.spec.extra_kv is None else extra_k_cache)
            plan.claim(self._driver.current_stream(plan._ordinal))
            into = Selected(plan.flat_ids, plan.flat_counts, plan.candidates)
            self._select(plan, given, page_size, candidates, into)
            plan.has_ids = True
        attention = plan.attention if reuse_ids else plan.following
        lists = self._lists((plan.ids, plan.counts), indices, topk_length)
        return self.sparse_decode(q, k_cache, plan=attention, out=out, lse=lse, **lists, **options)

    def decode_step_with_shared_plan(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        given: StepIndex,
        sizes: tuple[int, int],
        window: tuple[torch.Tensor | None, torch.Tensor | None],
        chosen: tuple[int | None, str | None, bool | None],
        results: tuple[torch.Tensor, torch.Tensor] | None,
        blocks: StepBlocks | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As decode_step, with the plan that steps of this shape share on the current stream.

        `sizes` are max_seq_len and k, `window` indices and topk_length, `chosen` the plan's num_splits, determinism and
        overlap, `results` where ids and counts go, `blocks` candidate blocks in the caller's memory and what the layer
        does with them. Returns (out, lse, ids, counts).
        """
        require_plain("q", q)
        if q.dim() != 4:
            raise GuardError(f"[T-05] q: {q.dim()} dims, expected [batch, next_n, heads, d_qk]")
        require_window(self.spec.extra_kv is not None, *window, options["extra_k_cache"])
        batch, next_n = (int(size) for size in q.shape[:2])
        width = None if window[0] is None else int(window[0].shape[-1])
        slots = None if blocks is None else blocks.slots(batch * next_n, q.device)
        plan = self._shared_step_plan((batch, next_n, *sizes), (width, slots), chosen, q.device)
        page_size = page_size_of(plan, given, q, k_cache if self.spec.extra_kv is None else options["extra_k_cache"])
        ids, counts = results or (torch.empty_like(plan.ids), torch.empty_like(plan.counts))
        require_results(plan, ids, counts)
        plan.claim(self._driver.current_stream(plan._ordinal))
        level = None if blocks is None else blocks.level_of(plan.candidates)
        mode = None if blocks is None else blocks.candidates
        self._select(plan, given, page_size, mode, Selected(ids.view(plan.flat_ids.shape), counts.view(-1), level))
        lists = self._lists((ids, counts), *window)
        return (*self.sparse_decode(q, k_cache, plan=plan.following, **lists, **options), ids, counts)

    def _lists(
        self,
        selected: tuple[torch.Tensor, torch.Tensor],
        indices: torch.Tensor | None,
        topk_length: torch.Tensor | None,
    ) -> dict[str, Any]:
        """The lists of sparse decode: what was selected is the second cache's where there are two."""
        if self.spec.extra_kv is None:
            return {"indices": selected[0], "topk_length": selected[1]}
        lists = {"indices": indices, "topk_length": topk_length}
        return {**lists, "extra_indices": selected[0], "extra_topk_length": selected[1]}

    def _shared_step_plan(
        self,
        sizes: tuple[int, int, int, int],
        widths: tuple[int | None, int | None],
        chosen: tuple[int | None, str | None, bool | None],
        device: torch.device,
    ) -> DecodeStepPlan:
        """`widths` are columns of the window and candidate blocks of a token."""
        batch, next_n, max_seq_len, k = sizes
        (window, candidate_blocks), (num_splits, determinism, overlap) = widths, chosen
        ordinal = self._ordinal(device)
        key = (*sizes, *widths, *chosen, ordinal, self._driver.current_stream(ordinal))
        with self._lock:
            plan = self._step_plans.get(key)
            if plan is None:
                plan = self.plan_decode_step(
                    batch, next_n, max_seq_len, k=k, window=window, num_splits=num_splits, determinism=determinism,
                    overlap=overlap, candidate_blocks=candidate_blocks, device=ordinal,
                )  # fmt: skip
                self._step_plans.add(key, plan)
            elif self._driver.is_capturing(ordinal):
                self._step_plans.pin(key)
            return plan

    def plan_decode_step(
        self,
        batch: int,
        next_n: int,
        max_seq_len: int,
        *,
        k: int | None = None,
        window: int | None = None,
        num_splits: int | None = None,
        determinism: str | None = None,
        overlap: bool | None = None,
        candidate_blocks: int | None = None,
        histogram: bool | None = None,
        workspace: torch.Tensor | None = None,
        device: Device | None = None,
    ) -> DecodeStepPlan:
        """A plan for steps of `next_n` tokens of each of `batch` requests that see up to `max_seq_len` keys.

        `max_seq_len` is what the workspace has room for, and need not be the model's: longer lengths are bounded to it,
        and with DSAGEN_CHECK_INDICES an error. `k` tokens are selected, by default as many as the spec has columns for;
        with a second cache `window` is the width of `indices`, likewise. `num_splits` is as in plan_sparse_decode,
        `determinism` as in topk: "order" by default where the spec asks for batch invariance, else "set". `overlap`
        places blocks of top-k and attention while the stage before them ends (programmatic dependent launch): results
        are the same, and few requests take longer so, by up to 6 %. By default plans for 64 requests or more do, where
        the arch has it; attention with body `hopper` always does. `candidate_blocks` are how many blocks of 8 keys a
        layer chooses for each token (V4.1: 2048), for which the plan allocates memory. `histogram` counts scores where
        they are made, in the place of top-k's first pass, by default where the spec declares it, blocks share rows and
        there are few; results are the same, and a traced step takes the default. `workspace` is uint8 memory of
        `decode_step_workspace_bytes` that serves nothing else; without it the plan allocates its own. Loads attention's
        kernels; `prepare` loads those of the other stages, too, which a first call under capture needs. GuardError for
        sizes past a limit, FrozenError during graph capture.
        """
        ordinal, shape, widths = self._step_shape(batch, next_n, max_seq_len, k, window, device)
        if self._driver.is_capturing(ordinal):
            raise FrozenError(
                "decode_step: making a plan during CUDA graph capture is not possible: call plan_decode_step before "
                "the capture and pass its plan"
            )
        if determinism is None:
            determinism = "set" if self.spec.determinism == "off" else "order"
        require_determinism(determinism)
        overlaps = self._overlaps(overlap, shape.batch, ordinal)
        sizes = self._stage_bytes(shape, widths, num_splits, ordinal)
        counts = self._counts(histogram, shape, ordinal)
        layout = layout_of(shape, str(self.spec.scores), *sizes)
        memory = step_workspace(self._driver, ordinal, workspace, layout.total_bytes)
        offsets = layout.selection, layout.attention
        parts = [memory[first : first + size] for first, size in zip(offsets, sizes, strict=True)]
        selection = self._make_topk_plan((shape.rows, max_seq_len, shape.k), parts[0], ordinal, overlaps, counts, True)
        attention = self._decode_plans((batch, next_n, *widths), num_splits, parts[1], ordinal, overlaps)
        stages = (selection, *attention)
        level = None if candidate_blocks is None else self._candidate_level(shape, candidate_blocks, ordinal, overlaps)
        scoring = self._on(ordinal).by_role[LOGITS, COUNTED if counts else PAGED][0].slug
        parts_of_plan = layout, memory, stages, determinism, scoring, level
        return DecodeStepPlan(self.spec, self._driver, ordinal, shape, *parts_of_plan)

    def _candidate_level(self, shape: StepShape, wanted: int, ordinal: int, overlaps: bool) -> CandidateLevel:
        for form in ("blocks", "candidates"):
            self._require_form(form, "candidate_blocks")
        if require_int("candidate_blocks", wanted) < 1:
            raise GuardError(f"[T-22] candidate_blocks: {wanted}: a token has 1 at least: leave it out for none")
        columns = block_columns(shape.max_seq_len)
        slots = min(wanted, columns)
        try:
            choosing = self._make_topk_plan((shape.rows, columns, slots), None, ordinal, is_dependent=False)
        except GuardError as error:
            raise rename(error, {"k": "candidate_blocks"}) from None
        inside = self._make_topk_plan((shape.rows, slots * BLOCK_KEYS, shape.k), None, ordinal, overlaps)
        dtype = SCORE_DTYPES[str(self.spec.scores)]
        return make_level(self._driver, ordinal, shape, slots, dtype, (choosing, inside))

    def decode_step_workspace_bytes(
        self,
        batch: int,
        next_n: int,
        max_seq_len: int,
        *,
        k: int | None = None,
        window: int | None = None,
        num_splits: int | None = None,
        device: Device | None = None,
    ) -> int:
        """Bytes of the workspace that a plan of that shape needs: scores, ids, and what the stages need. Allocates
        nothing.
        """
        ordinal, shape, widths = self._step_shape(batch, next_n, max_seq_len, k, window, device)
        return layout_of(
            shape, str(self.spec.scores), *self._stage_bytes(shape, widths, num_splits, ordinal)
        ).total_bytes

    def decode_step_slugs(self, plan: DecodeStepPlan, candidates: str | None = None) -> tuple[str, ...]:
        """Names of the kernels that steps of a plan take with such `candidates`, in the order of their launches."""
        on, dependent = self._on(plan._ordinal), plan.selection.is_dependent
        selected = partial(self._selecting_slugs, plan._ordinal)
        if candidates is None:
            return plan.slugs
        level = require_level(plan.candidates, candidates)
        if candidates == USE:
            inside = selected(level.compact, plan.shape.k, level.inside.is_dependent)
            return (on.by_role[LOGITS, CANDIDATES][0].slug, *inside, *plan.following.slugs)
        blocks = selected(level.block_scores, level.slots, level.choosing.is_dependent)
        keys = selected(plan.scores, plan.shape.k, dependent)
        return (on.by_role[LOGITS, BLOCKS][0].slug, *blocks, *keys, *plan.following.slugs)

    def _selecting_slugs(self, ordinal: int, scores: torch.Tensor, k: int, is_dependent: bool) -> list[str]:
        """Names of top-k's kernels for such scores."""
        chosen = self._choose_topk(ordinal, shape_of(TopkTensors(scores), k, self.spec))
        return [kernel.slug for kernel in self._topk_kernels(ordinal, chosen, is_dependent)]

    @property
    def can_overlap(self) -> bool:
        """Whether launches of steps on `device` may overlap: whether plans take `overlap=True`."""
        return self._can_overlap(self._ordinal(None))

    def _can_overlap(self, ordinal: int) -> bool:
        return has_chain(self.spec, arch_row(self._on(ordinal).arch))

    def _overlaps(self, asked: bool | None, requests: int, ordinal: int) -> bool:
        """Whether launches of a step overlap; GuardError where that is asked for and the arch has no such launches."""
        possible = self._can_overlap(ordinal)
        if asked is None:
            return possible and requests >= LEAST_REQUESTS
        if require_bool("overlap", asked) and not possible:
            raise GuardError(
                f"[T-22] overlap: {self._on(ordinal).arch} has no programmatic dependent launch, which sm_90 brought: "
                "leave it out"
            )
        return asked

    def _selection_of(self, shape: StepShape) -> TopkShape:
        """A step's call of top-k, whose scores lie as the plan's own: at multiples of 16 bytes."""
        return TopkShape(shape.rows, shape.max_seq_len, shape.k, self.spec.most_selected)

    def _counts(self, asked: bool | None, shape: StepShape, ordinal: int) -> bool:
        """Whether a step's scores are counted where they are made; GuardError where that is asked for and cannot be."""
        if asked is not None and not require_bool("histogram", asked):
            return False
        if not index_of(self.spec).histogram:
            if asked:
                text = f"the spec {self.spec.name} does not declare it: set index.histogram there, or leave it out"
                raise GuardError(f"[T-22] histogram: {text}")
            return False
        values = {"next_n": shape.next_n, "counted": most_counted(self._on(ordinal).by_role[LOGITS, COUNTED][0])}
        chosen = self._choose_topk(ordinal, self._selection_of(shape))
        shares = chosen.split is not None
        if asked:
            check([COUNTED_GUARD], values)
            if not shares:
                rows = f"{quantity(shape.rows, 'row')} of {quantity(shape.max_seq_len, 'score')}"
                text = "of so many rows that long top-k has no pass that counts could take the place of: leave it out"
                if chosen.cluster > 1:
                    text += f", or set DSAGEN_TOPK_CLUSTER=1, for clusters of {chosen.cluster} CTAs hold them"
                raise GuardError(f"[T-22] histogram: {rows}: {text}")
            return True
        return shares and shape.rows <= MOST_COUNTED_ROWS and COUNTED_GUARD.holds(values)

    def _step_shape(
        self, batch: int, next_n: int, max_seq_len: int, k: int | None, window: int | None, device: Device | None
    ) -> tuple[int, StepShape, tuple[int, int]]:
        """Device, sizes, and the widths of both lists of sparse decode."""
        for op in CHAIN_OPS:
            self._require_op(op)
        self._require_form("paged", "decode_step")
        spec = self.spec
        k = spec.selected_topk if k is None else require_int("k", k)
        shape = StepShape(require_int("batch", batch), require_int("next_n", next_n), max_seq_len, k)
        for name, size in (("batch", batch), ("next_n", next_n), ("max_seq_len", max_seq_len)):
            if require_int(name, size) < 1:
                raise GuardError(f"[T-22] {name}: {size}: a step has 1 at least: leave an empty step out")
        if spec.extra_kv is None and window is not None:
            raise GuardError(
                "[T-22] window: the spec declares no extra_kv, so what is selected is the only list: leave it out"
            )
        widths = (k, 0) if spec.extra_kv is None else (spec.topk if window is None else window, k)
        return self._ordinal(device), shape, widths

    def _stage_bytes(
        self, shape: StepShape, widths: tuple[int, int], num_splits: int | None, ordinal: int
    ) -> tuple[int, int]:
        """Workspaces of top-k and of attention, after the limits of all three stages have been held."""
        on = self._on(ordinal)
        logits = LogitsShape(shape.batch, shape.next_n, shape.max_seq_len, index_of(self.spec).heads)
        try:
            check(LOGITS_SIZES, size_values(on.by_role[LOGITS, PAGED][0], logits, on.facts.sm_count))
        except GuardError as error:
            raise rename(error, {"q": "batch, next_n"}) from None
        selection = self.topk_workspace_bytes(shape.rows, shape.max_seq_len, shape.k, device=ordinal)
        attention = self.sparse_decode_workspace_bytes(
            shape.batch, shape.next_n, widths[0], extra_topk=widths[1], num_splits=num_splits, device=ordinal
        )
        return selection, attention
