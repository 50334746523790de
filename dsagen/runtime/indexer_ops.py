"""The methods of loaded kernels that score index keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsagen.arch import arch
from dsagen.errors import GuardError
from dsagen.families.indexer_logits.forms import BLOCKS, CANDIDATES, COUNTED, RAGGED, ROLES
from dsagen.families.indexer_logits.guards import RAGGED_TILES_GUARD, TILES_GUARD
from dsagen.families.indexer_logits.op import (
    LogitsShape,
    Partition,
    explain_forms,
    partition_of,
    ragged_partition,
    ragged_values,
    size_values,
)
from dsagen.guard import check, require_bool
from dsagen.plan import KernelPlan
from dsagen.runtime import traced
from dsagen.runtime.indexer import (
    OP,
    LogitsTensors,
    bind,
    check_lengths,
    check_pages,
    index_of,
    make_out,
    out_arguments,
)
from dsagen.runtime.indexer_blocks import METHOD as BLOCKS_METHOD
from dsagen.runtime.indexer_blocks import BlockTensors, bind_blocks, make_results, result_arguments
from dsagen.runtime.indexer_candidates import METHOD as CANDIDATES_METHOD
from dsagen.runtime.indexer_candidates import CandidateTensors, bind_candidates, check_blocks
from dsagen.runtime.indexer_ragged import METHOD, RaggedTensors, bind_ragged, check_token_windows
from dsagen.runtime.launch import OpLaunches, Step
from dsagen.runtime.op_methods import OpMethods


class IndexerOps(OpMethods):
    """indexer_logits and its forms for other keys and results, over what `Kernels` provides."""

    _logits_launches: OpLaunches
    _ragged_launches: OpLaunches
    _candidate_launches: OpLaunches
    _block_launches: OpLaunches

    def indexer_logits(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        q_scales: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        unscored_up_to: int = 0,
        fill_neg_inf: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """scores[t, j] = scale_j x sum_h weights[t, h] x relu(q[t, h] . k_j) of cached keys, on the current stream.

        - q: codes of the spec's index-key format [batch, next_n, heads, dim] (e2m1: dim / 2 bytes), 1 to 8 tokens a
          request, last dim contiguous
        - k_cache: [pages, page_size, 1, bytes of a key] of that format: codes of all keys of a page, then a word of
          scales for each; pages any multiple of 4 bytes apart (of 16 where copies should be wide)
        - weights: fp32 [batch x next_n, heads], of either sign, with every scale of q in them that q_scales has not
        - context_lens: int32 [batch, next_n], the keys that each token sees, or [batch], those of a request's last
          token: the i-th then sees next_n - 1 - i fewer. Any strides. A length is bounded to 0..max_seq_len and to the
          keys that a table row names; with DSAGEN_CHECK_INDICES a longer one is an error
        - block_table: int32 [batch, pages]; an entry that names no page of the pool gives its keys -inf, and entries
          behind the longest length are not read
        - q_scales: of mxfp8 and mxfp4, int32 [batch, next_n, heads], last dim contiguous: a word of four ue8m0, one for
          32 dims of q. They and those of keys multiply products before sums over dims
        - max_seq_len: columns of scores, the width of out by default
        - unscored_up_to: tokens that see no more keys than this are left out; pass the k of a topk that follows, which
          takes all of their keys unread
        - fill_neg_inf: -inf into the columns from each token's length on; otherwise nothing is written there
        - out: [batch x next_n, max_seq_len] of the spec's scores, allocated where not given

        Returns out. Raises GuardError for what does not fit, FrozenError when the kernel would have to be loaded during
        capture or after freeze(), DeviceError when the driver refuses.
        """
        if torch.compiler.is_compiling():
            return traced.indexer_logits(
                self.handle,
                (q, k_cache, weights, context_lens, block_table),
                out,
                q_scales=q_scales,
                max_seq_len=max_seq_len,
                unscored_up_to=unscored_up_to,
                fill_neg_inf=fill_neg_inf,
            )
        tensors = LogitsTensors(q, k_cache, weights, context_lens, block_table, q_scales, out)
        scalars = (max_seq_len, unscored_up_to, fill_neg_inf)
        repeated = False if self._checks_values else self._logits_launches.repeat(*tensors, *scalars)
        if repeated is not False:
            return out if repeated is True else repeated[0]  # type: ignore[return-value]
        self._require_form("paged", OP)
        fills = require_bool("fill_neg_inf", fill_neg_inf)
        shape, arguments = bind(tensors, max_seq_len, unscored_up_to, fills, self.spec, self._driver)
        plan, ordinal = self._require_pages("main", shape, tensors, arguments)
        result = make_out(out, q, shape.tokens, shape.width, self.spec)
        if shape.tokens and shape.width:
            part = partition_of(plan, shape, self._on(ordinal).facts.sm_count)
            self._launch_logits(self._logits_launches, plan, part, ordinal, arguments, tensors, scalars, result)
        return result

    def indexer_logits_blocks(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        q_scales: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        unscored_up_to: int = 0,
        fill_neg_inf: bool = False,
        out: torch.Tensor | None = None,
        block_scores: torch.Tensor | None = None,
        block_counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As indexer_logits, with the largest score of each block of 8 keys: what V4.1 chooses candidates by.

        - block_scores: [batch x next_n, ceil(max_seq_len / 8)] of the spec's scores, NaN where a key's is, and +inf for
          the block of each token's newest key, so that a selection takes it
        - block_counts: int32 [batch x next_n], blocks that each token sees keys of: the lengths of a topk of
          block_scores. Of tokens that unscored_up_to leaves out there are no scores of blocks either, so it is to be
          no more than 8 times the blocks that are selected, which that topk then takes unread

        Nothing is written behind a token's count. Returns (out, block_scores, block_counts), raises as indexer_logits.
        """
        if torch.compiler.is_compiling():
            return traced.indexer_logits_blocks(
                self.handle,
                (q, k_cache, weights, context_lens, block_table),
                (out, block_scores, block_counts),
                q_scales=q_scales,
                max_seq_len=max_seq_len,
                unscored_up_to=unscored_up_to,
                fill_neg_inf=fill_neg_inf,
            )
        tensors = BlockTensors(
            q, k_cache, weights, context_lens, block_table, q_scales, out, block_scores, block_counts
        )
        scalars = (max_seq_len, unscored_up_to, fill_neg_inf)
        repeated = False if self._checks_values else self._block_launches.repeat(*tensors, *scalars)
        if repeated is not False:
            return (out, block_scores, block_counts) if repeated is True else repeated  # type: ignore[return-value]
        self._require_form("blocks", BLOCKS_METHOD)
        fills = require_bool("fill_neg_inf", fill_neg_inf)
        call = bind_blocks(tensors, max_seq_len, unscored_up_to, fills, self.spec, self._driver)
        shape = call.shape
        plan, ordinal = self._require_pages(BLOCKS, shape, tensors.paged, call.arguments)
        results = make_results(tensors, call, self.spec)
        if shape.tokens:
            part = partition_of(plan, shape, self._on(ordinal).facts.sm_count)
            self._launch_logits(
                self._block_launches, plan, part, ordinal, call.arguments, tensors, scalars, results,
                result_arguments(results),
            )  # fmt: skip
        return results[-3:]  # type: ignore[return-value]

    def indexer_logits_ragged(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        key_scales: torch.Tensor,
        weights: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        *,
        q_scales: torch.Tensor | None = None,
        max_window: int | None = None,
        unscored_up_to: int = 0,
        fill_neg_inf: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As indexer_logits, of keys in one piece, of which each token sees a window: for prefill.

        - q: codes of the spec's index-key format [tokens, heads, dim] (e2m1: dim / 2 bytes), last dim contiguous
        - keys: codes [keys, dim], last dim contiguous, keys any multiple of 4 bytes apart (of 16 where copies should be
          wide); key_scales: [keys], fp32, or of mxfp8 and mxfp4 int32 words of four ue8m0
        - weights: fp32 [tokens, heads], of either sign; q_scales: of mxfp8 and mxfp4, int32 [tokens, heads]
        - starts, ends: int32 [tokens]; token t sees keys starts[t] up to and without ends[t]. Any strides. A window is
          what there is of it, and empty where it ends before it starts; with DSAGEN_CHECK_INDICES one that leaves
          0..keys or is turned round is an error, and so is one that is longer than max_window
        - max_window: compressed rows of so many columns, of which column j is key max(starts[t], 0) + j; a window has
          no more keys than that. Otherwise scores are [tokens, keys], column j key j
        - unscored_up_to: tokens that see no more keys than this are left out, as in indexer_logits
        - fill_neg_inf: -inf into all other columns; otherwise nothing is written outside of a token's window
        - out: [tokens, max_window or keys] of the spec's scores, allocated where not given

        Neighbouring tokens share a pass over the keys that any of them sees. Returns out, raises as indexer_logits.
        """
        if torch.compiler.is_compiling():
            return traced.indexer_logits_ragged(
                self.handle,
                (q, keys, key_scales, weights, starts, ends),
                out,
                q_scales=q_scales,
                max_window=max_window,
                unscored_up_to=unscored_up_to,
                fill_neg_inf=fill_neg_inf,
            )
        tensors = RaggedTensors(q, keys, key_scales, weights, starts, ends, q_scales, out)
        scalars = (max_window, unscored_up_to, fill_neg_inf)
        repeated = False if self._checks_values else self._ragged_launches.repeat(*tensors, *scalars)
        if repeated is not False:
            return out if repeated is True else repeated[0]  # type: ignore[return-value]
        self._require_form("ragged", METHOD)
        fills = require_bool("fill_neg_inf", fill_neg_inf)
        shape, width, arguments = bind_ragged(tensors, max_window, unscored_up_to, fills, self.spec, self._driver)
        ordinal = self._home_of(q)
        on = self._on(ordinal)
        (plan,) = on.by_role[OP, RAGGED]
        check([RAGGED_TILES_GUARD], ragged_values(plan, shape, on.facts.sm_count))
        if self._checks_values:
            self._refuse_capture(ordinal)
            check_token_windows(tensors, max_window)
        result = make_out(out, q, shape.tokens, width, self.spec)
        if shape.tokens and width:
            part = ragged_partition(plan, shape, on.facts.sm_count)
            self._launch_logits(self._ragged_launches, plan, part, ordinal, arguments, tensors, scalars, result)
        return result

    def indexer_logits_candidates(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        candidate_blocks: torch.Tensor,
        *,
        block_size: int = 8,
        q_scales: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As indexer_logits, of the keys in each token's candidate blocks alone: V4.1's second level.

        - candidate_blocks: int32 [batch x next_n, slots], last dim contiguous: block b is keys b x block_size and the
          block_size - 1 that follow; negative for none, in any order and place. With DSAGEN_CHECK_INDICES a block past
          all that block_table names is an error
        - block_size: 8 or 16 keys, of pages of any size
        - max_seq_len: what longer lengths are bounded to, without it the keys that block_table names
        - out: [batch x next_n, slots x block_size] of the spec's scores, allocated where not given: column
          s x block_size + i is the i-th key of slot s

        All columns are written: -inf where a slot has no block, and where the token does not see the key or its table
        entry names no page. A topk that follows drops -inf, and gives ids by its own candidate_blocks of 8. Returns
        out, raises as indexer_logits.
        """
        if torch.compiler.is_compiling():
            return traced.indexer_logits_candidates(
                self.handle,
                (q, k_cache, weights, context_lens, block_table, candidate_blocks),
                out,
                block_size=block_size,
                q_scales=q_scales,
                max_seq_len=max_seq_len,
            )
        tensors = CandidateTensors(q, k_cache, weights, context_lens, block_table, candidate_blocks, q_scales, out)
        repeated = False if self._checks_values else self._candidate_launches.repeat(*tensors, block_size, max_seq_len)
        if repeated is not False:
            return out if repeated is True else repeated[0]  # type: ignore[return-value]
        self._require_form("candidates", CANDIDATES_METHOD)
        shape, arguments = bind_candidates(tensors, block_size, max_seq_len, self.spec, self._driver)
        plan, ordinal = self._require_pages(CANDIDATES, shape, tensors.paged, arguments)
        if self._checks_values and shape.tokens:
            check_blocks(tensors, block_size)
        result = make_out(out, q, shape.tokens, shape.width, self.spec)
        if shape.tokens and shape.width:
            part = partition_of(plan, shape, self._on(ordinal).facts.sm_count)
            self._launch_logits(
                self._candidate_launches, plan, part, ordinal, arguments, tensors, (block_size, max_seq_len), result
            )
        return result

    def _require_pages(
        self, role: str, shape: LogitsShape, paged: LogitsTensors, arguments: Mapping[str, Any]
    ) -> tuple[KernelPlan, int]:
        """A role's kernel and the device of a call over pages, after its size and, if asked for, its values passed."""
        ordinal = self._home_of(paged.q)
        on = self._on(ordinal)
        (plan,) = on.by_role[OP, role]
        check([TILES_GUARD], size_values(plan, shape, on.facts.sm_count))
        if self._checks_values:
            self._refuse_capture(ordinal)
            if shape.tokens:
                check_lengths(paged, int(arguments["most_keys"]))
                check_pages(paged)
        return plan, ordinal

    def _launch_logits(
        self,
        launches: OpLaunches,
        plan: KernelPlan,
        part: Partition,
        ordinal: int,
        arguments: Mapping[str, Any],
        tensors: LogitsTensors | RaggedTensors | CandidateTensors | BlockTensors,
        scalars: tuple[Any, ...],
        result: torch.Tensor | BlockTensors,
        results: Mapping[str, Any] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernel of a call that has scores to write: into `result`, or where `results` say.

        `workspace` is memory of a plan that arguments lead to.
        """
        shared = {"unit_tokens": part.unit_tokens, "unit_count": part.unit_count, "blocks": part.blocks}
        kernel, stream = self._loader.load(plan, ordinal), self._driver.current_stream(ordinal)
        if isinstance(result, torch.Tensor):
            results, operands = out_arguments(result), tensors._replace(out=result)
        else:
            assert results is not None
            operands = result
        values = {**arguments, **shared, **results}
        call, asked = (*operands, *scalars), (*tensors, *scalars)
        launches.launch([Step(kernel, part.blocks)], stream, values, (*operands, workspace), call, asked)

    def logits_slugs(self, form: str) -> tuple[str, ...]:
        """Names of the kernels that serve calls with keys in that form: paged, ragged or candidates."""
        self._require_form(form, f"keys in the form {form}")
        return tuple(plan.slug for plan in self._on(self._ordinal(None)).by_role[OP, ROLES[form]])

    def _require_form(self, form: str, method: str) -> None:
        """GuardError where the spec does not have index keys in that form."""
        self._require_op(OP)
        forms = index_of(self.spec).forms
        if form not in forms:
            raise GuardError(
                f"[T-11] {method}: the spec {self.spec.name} declares index.forms {', '.join(forms)}: add {form} there"
            )

    def _explain_logits(
        self, ordinal: int, batch: int, next_n: int, width: int, roles: Sequence[str] | None = None
    ) -> str:
        """What a call of that shape takes, in each form of keys that the spec has; of a step, kernels of `roles`."""
        on = self._on(ordinal)
        kernels = [(role, plan) for (op, role), plans in on.by_role.items() if op == OP for plan in plans]
        # Only steps count scores.
        plans = [plan for role, plan in kernels if (role != COUNTED if roles is None else role in roles)]
        shape = LogitsShape(batch, next_n, width, index_of(self.spec).heads)
        return explain_forms(plans, shape, on.facts.sm_count, arch(on.arch), self._matrix.reasons())
