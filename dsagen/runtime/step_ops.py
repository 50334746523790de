"""The methods of loaded kernels that run a decode step: the indexer's scores, their top-k, attention over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsagen.arch import arch as arch_row
from dsagen.dependent import CHAIN_OPS, has_chain
from dsagen.errors import FrozenError, GuardError
from dsagen.families.indexer_logits.op import SIZE_GUARDS as LOGITS_SIZES
from dsagen.families.indexer_logits.op import LogitsShape, size_values
from dsagen.guard import check, rename, require_bool, require_int
from dsagen.runtime.decode_ops import DecodeOps
from dsagen.runtime.indexer import index_of
from dsagen.runtime.indexer_ops import IndexerOps
from dsagen.runtime.step_plan import DecodeStepPlan, StepShape, layout_of, step_workspace
from dsagen.runtime.tensors import require_plain
from dsagen.runtime.topk import TopkTensors, require_determinism, shape_of
from dsagen.runtime.topk_ops import TopkOps

if TYPE_CHECKING:
    from dsagen.runtime.api import Device

STEP = "decode_step"
# Shapes of calls that a plan remembers; a serving process has a handful.
_MAX_SHAPES = 64
# What a stage calls the tensors that a step has by other names.
_INDEXER_NAMES = {"q": "index_q", "k_cache": "index_cache", "q_scales": "index_q_scales"}
_TOPK_NAMES = {"page_table": "kv_block_table", "lengths": "context_lens"}


class StepOps(IndexerOps, TopkOps, DecodeOps):
    """decode_step and its plan, over the methods of its stages."""

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
        - the others as in sparse_decode. With a second cache in the spec, selected tokens are that one's,
          `extra_k_cache`, and `indices` and `topk_length` are the list over `k_cache`, the window

        Tokens that see no more than k keys attend to all of them, and their keys are not scored. Lengths, tables and
        ids are device data, so a captured graph serves any. Returns (out, lse) as sparse_decode. Raises GuardError for
        what does not fit, before anything of the stage that it concerns is launched; what the other ops raise besides.
        """
        if type(plan) is not DecodeStepPlan or plan.spec is not self.spec:
            raise GuardError("[T-09] plan: was not made by these kernels: pass what their plan_decode_step returned")
        index = (index_q, index_cache, weights, context_lens, block_table)
        selected = k_cache if self.spec.extra_kv is None else extra_k_cache
        _require_window(self.spec.extra_kv is not None, indices, topk_length, extra_k_cache)
        if require_bool("reuse_ids", reuse_ids):
            _require_reuse(plan, (*index, kv_block_table, index_q_scales))
            plan.claim(self._driver.current_stream(plan._ordinal))
        else:
            page_size = _page_size(plan, index, kv_block_table, q, selected)
            plan.claim(self._driver.current_stream(plan._ordinal))
            self._select(plan, index, index_q_scales, kv_block_table, page_size)
        if self.spec.extra_kv is None:
            lists: dict[str, Any] = {"indices": plan.ids, "topk_length": plan.counts}
        else:
            lists = {"indices": indices, "topk_length": topk_length}
            lists |= {"extra_indices": plan.ids, "extra_topk_length": plan.counts}
        return self.sparse_decode(
            q,
            k_cache,
            **lists,
            plan=plan.attention if reuse_ids else plan.following,
            extra_k_cache=extra_k_cache,
            attn_sink=attn_sink,
            kpe_cache=kpe_cache,
            extra_kpe_cache=extra_kpe_cache,
            v_cache=v_cache,
            extra_v_cache=extra_v_cache,
            softmax_scale=softmax_scale,
            out=out,
            lse=lse,
        )

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
        workspace: torch.Tensor | None = None,
        device: Device | None = None,
    ) -> DecodeStepPlan:
        """A plan for steps of `next_n` tokens of each of `batch` requests that see up to `max_seq_len` keys.

        `max_seq_len` is what the workspace has room for, and need not be the model's: longer lengths are bounded to it,
        and with DSAGEN_CHECK_INDICES an error. `k` tokens are selected, by default as many as the spec has columns for;
        with a second cache `window` is the width of `indices`, likewise. `num_splits` is as in plan_sparse_decode,
        `determinism` as in topk: "order" by default where the spec asks for batch invariance, else "set". `overlap`
        places blocks of top-k and attention while the stage before them ends (programmatic dependent launch), by
        default where the arch has it; results are the same. `workspace` is uint8 memory of
        `decode_step_workspace_bytes` that serves nothing else; without it the plan allocates its own. Loads kernels
        that are not loaded yet. GuardError for sizes past a limit, FrozenError during graph capture.
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
        overlaps = self._overlaps(overlap, ordinal)
        sizes = self._stage_bytes(shape, widths, num_splits, ordinal)
        layout = layout_of(shape, str(self.spec.scores), *sizes)
        memory = step_workspace(self._driver, ordinal, workspace, layout.total_bytes)
        offsets = layout.selection, layout.attention
        parts = [memory[first : first + size] for first, size in zip(offsets, sizes, strict=True)]
        selection = self._make_topk_plan((shape.rows, max_seq_len, shape.k), parts[0], ordinal, overlaps)
        attention = self._decode_plans((batch, next_n, *widths), num_splits, parts[1], ordinal, overlaps)
        stages = (selection, *attention)
        return DecodeStepPlan(self.spec, self._driver, ordinal, shape, layout, memory, stages, determinism)

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

    def decode_step_slugs(self, plan: DecodeStepPlan) -> tuple[str, ...]:
        """Names of the kernels that steps of a plan take, in the order of their launches."""
        on = self._on(plan._ordinal)
        scored = on.by_role["indexer_logits", "main"][0].slug
        wanted = shape_of(TopkTensors(plan.scores), plan.shape.k, self.spec)
        chosen = self._choose_topk(plan._ordinal, wanted)
        selected = [kernel.slug for kernel in self._topk_kernels(plan._ordinal, chosen, plan.selection.is_dependent)]
        return (scored, *selected, *plan.following.slugs)

    def _overlaps(self, asked: bool | None, ordinal: int) -> bool:
        """Whether launches of a step overlap; GuardError where that is asked for and the arch has no such launches."""
        arch = arch_row(self._on(ordinal).arch)
        possible = has_chain(self.spec, arch)
        if asked is not None and require_bool("overlap", asked) and not possible:
            raise GuardError(
                f"[T-22] overlap: {arch.name} has no programmatic dependent launch, which sm_90 brought: leave it out"
            )
        return possible if asked is None else asked

    def _select(
        self,
        plan: DecodeStepPlan,
        index: tuple[torch.Tensor | None, ...],
        index_q_scales: torch.Tensor | None,
        kv_block_table: torch.Tensor | None,
        page_size: int,
    ) -> None:
        """Scores and ids into the plan."""
        index_q, index_cache, weights, context_lens, block_table = index
        shape = plan.shape
        lengths = context_lens
        if self._poisons:
            plan.poison()
        if shape.next_n > 1 and isinstance(context_lens, torch.Tensor) and context_lens.dim() == 1:
            lengths = _lengths_of_tokens(plan, context_lens)
        try:
            self.indexer_logits(
                index_q,  # type: ignore[arg-type]
                index_cache,  # type: ignore[arg-type]
                weights,  # type: ignore[arg-type]
                lengths,  # type: ignore[arg-type]
                block_table,  # type: ignore[arg-type]
                q_scales=index_q_scales,
                unscored_up_to=shape.k,
                out=plan.scores,
            )
        except GuardError as error:
            raise rename(error, _INDEXER_NAMES) from None
        assert lengths is not None, "the indexer has refused it"
        try:
            self.topk(
                plan.scores,
                k=shape.k,
                lengths=lengths.view(-1),
                page_table=block_table if kv_block_table is None else kv_block_table,
                page_size=page_size,
                table_of_row=plan.row_tables,
                determinism=plan.determinism,
                plan=plan.selection,
                out=plan.flat_ids,
                counts=plan.flat_counts,
            )
        except GuardError as error:
            raise rename(error, _TOPK_NAMES) from None
        plan.has_ids = True

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
        if min(shape.batch, shape.next_n, require_int("max_seq_len", max_seq_len)) < 1:
            raise GuardError(
                f"[T-22] plan: batch {batch}, next_n {next_n}, max_seq_len {max_seq_len}: a step has 1 of each at "
                "least: leave an empty step out"
            )
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
        check(LOGITS_SIZES, size_values(on.by_role["indexer_logits", "main"][0], logits, on.facts.sm_count))
        selection = self.topk_workspace_bytes(shape.rows, shape.max_seq_len, shape.k, device=ordinal)
        attention = self.sparse_decode_workspace_bytes(
            shape.batch, shape.next_n, widths[0], extra_topk=widths[1], num_splits=num_splits, device=ordinal
        )
        return selection, attention

    def _explain_step(
        self,
        explain: Callable[..., str],
        ordinal: int,
        sizes: tuple[int, int, int],
        k: int | None,
        window: int | None,
        num_splits: int | None,
    ) -> str:
        """What each stage of a step takes, told by `explain`, and the workspace that they share."""
        _, shape, (topk, extra_topk) = self._step_shape(*sizes, k, window, ordinal)
        stage_bytes = self._stage_bytes(shape, (topk, extra_topk), num_splits, ordinal)
        layout = layout_of(shape, str(self.spec.scores), *stage_bytes)
        overlaps = self._overlaps(None, ordinal)
        common = {"batch": shape.batch, "s_q": shape.next_n, "device": ordinal}
        texts = (
            explain("indexer_logits", width=shape.max_seq_len, **common),
            explain("topk", width=shape.max_seq_len, topk=shape.k, **common),
            explain("sparse_decode", topk=topk, extra_topk=extra_topk, num_splits=num_splits, **common),
        )
        return "\n".join(
            (
                f"{' -> '.join(CHAIN_OPS)}: {shape.k} of up to {shape.max_seq_len} keys for each of {shape.rows} "
                "tokens",
                f"a token that sees no more than {shape.k} keys is not scored",
                *(["top-k of few rows and attention begin while the stage before them ends"] if overlaps else []),
                *texts,
                f"workspace of the step: {layout.total_bytes} B, {layout.ids} B of them scores",
            )
        )


def _require_window(
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


def _require_reuse(plan: DecodeStepPlan, stray: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse to reuse what was never selected, and arguments that would select anew."""
    if not plan.has_ids:
        raise GuardError(
            "[T-22] reuse_ids: nothing was selected with this plan yet: the first layer of a step passes index_q, "
            "index_cache, weights, context_lens and block_table"
        )
    names = ("index_q", "index_cache", "weights", "context_lens", "block_table", "kv_block_table", "index_q_scales")
    given = next((name for name, tensor in zip(names, stray, strict=True) if tensor is not None), None)
    if given is not None:
        raise GuardError(f"[T-22] {given}: given with reuse_ids, which selects nothing: leave either out")


def _page_size(
    plan: DecodeStepPlan,
    index: tuple[torch.Tensor | None, ...],
    kv_block_table: torch.Tensor | None,
    q: torch.Tensor,
    selected: torch.Tensor | None,
) -> int:
    """The page size of the cache that is selected from, after the checks, which shapes like some before have passed."""
    index_q, index_cache, _, lens, table = index
    try:
        shapes = (
            q.shape, selected.shape, index_q.shape, index_cache.shape, lens.shape, lens.stride(), table.shape,  # type: ignore[union-attr]
            None if kv_block_table is None else kv_block_table.shape,
        )  # fmt: skip
    except AttributeError:
        return _require_caches(plan, index, kv_block_table, q, selected)
    found = plan.page_sizes.get(shapes)
    if found is None:
        if len(plan.page_sizes) >= _MAX_SHAPES:
            plan.page_sizes.clear()
        found = plan.page_sizes[shapes] = _require_caches(plan, index, kv_block_table, q, selected)
    return found


def _require_caches(
    plan: DecodeStepPlan,
    index: tuple[torch.Tensor | None, ...],
    kv_block_table: torch.Tensor | None,
    q: torch.Tensor,
    selected: torch.Tensor | None,
) -> int:
    """The page size of the cache that is selected from; GuardError where stages would not fit each other."""
    index_q, index_cache, _, context_lens, block_table = index
    name = "k_cache" if plan.attention.extra_topk == 0 else "extra_k_cache"
    tensors = {"q": q, name: selected, "index_q": index_q, "index_cache": index_cache}
    tensors |= {"context_lens": context_lens, "block_table": block_table}
    for tensor_name, tensor in tensors.items():
        require_plain(tensor_name, tensor)
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


def _lengths_of_tokens(plan: DecodeStepPlan, context_lens: torch.Tensor) -> torch.Tensor:
    """Each token's own length, [batch, next_n], where a call has those of each request's last token."""
    shape = plan.shape
    if (context_lens.shape[0], context_lens.dtype, context_lens.device) != (shape.batch, torch.int32, plan.device):
        # As it is, for the indexer to refuse by its rules.
        return context_lens
    return torch.sub(context_lens[:, None], plan.behind, out=plan.token_lengths)
