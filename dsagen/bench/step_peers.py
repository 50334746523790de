"""Decode steps made of other libraries' kernels on our inputs: DeepGEMM's scores, sglang's selection, an attention.

What an engine does once for all layers of a step, or once for all steps of a batch, happens in `bind`: schedules,
plans, padded heads, split caches. A call launches the three stages and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from dsagen.bench.data import DecodeCase, DecodeInputs
from dsagen.bench.logits_data import LogitsBenchCase, LogitsBenchInputs
from dsagen.bench.logits_peers import DeepGemm
from dsagen.bench.peers import PEERS, Peer
from dsagen.bench.step_data import StepBenchCase, StepBenchInputs, StepResult
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.bench.topk_peers import SglTopkV2

StepCall = Callable[[], StepResult]


class StepPeer:
    """A chain that ends with this library's attention."""

    def __init__(self, attention: Peer) -> None:
        self._logits, self._selection, self._attention = DeepGemm(), SglTopkV2(), attention

    @property
    def name(self) -> str:
        """Short names of the three, in order."""
        return " + ".join(part.name for part in (self._logits, self._selection, self._attention))

    @property
    def version(self) -> str:
        """Versions of the three; SpecError that says what to install when one is missing."""
        return " + ".join(part.version for part in (self._logits, self._selection, self._attention))

    def label(self, case: StepBenchCase) -> str:
        """The three, with what had to be changed to run the case."""
        return " + ".join((self._logits.name, self._selection.name, self._attention.label(_decode_case(case))))

    def refuses(self, case: StepBenchCase) -> str | None:
        """Why one of the libraries cannot run its stage; None when all can."""
        if case.window:
            return "chains of other libraries are bound to one cache, and the step has two"
        topk = _topk_case(case)
        reasons = (
            self._logits.refuses(_logits_case(case)),
            self._selection.refuses(topk),
            None
            if self._selection.paged(topk)
            else f"{self._selection.name} gives ids of at most {self._selection.PAGED_ROWS} tokens, not of {case.rows}",
            self._attention.refuses(_decode_case(case)),
        )
        return next((reason for reason in reasons if reason is not None), None)

    def bind(self, case: StepBenchCase, inputs: Sequence[StepBenchInputs], sm_scale: float) -> list[StepCall]:
        """One step for each input set. SpecError for a missing library and a refused case."""
        logits = [
            LogitsBenchInputs(
                item.index_q,
                item.weights,
                item.context_lens,
                k_cache=item.index_cache,
                block_table=item.block_table,
                q_scales=item.index_q_scales,
            )
            for item in inputs
        ]
        # Attention is bound to these ids, which the selection of every step overwrites.
        shape = (case.requests, case.next_n, case.selected)
        rows = [
            DecodeInputs(
                item.q, item.k_cache, item.k_cache_bf16, torch.zeros(shape, dtype=torch.int32, device=item.q.device),
                sm_scale,
            )
            for item in inputs
        ]  # fmt: skip
        select = self._selection.selector(inputs[0].context_lens.view(-1), case.page_size)
        scored, attended = self._logits.bind(_logits_case(case), logits), self._attention.bind(_decode_case(case), rows)

        def step(number: int) -> StepResult:
            scores, ids = scored[number](), rows[number].indices
            select(scores, tables[number], ids.view(case.rows, -1))
            return StepResult(scores, ids, *attended[number]())

        tables = [item.block_table.repeat_interleave(case.next_n, 0) for item in inputs]
        return [functools.partial(step, number) for number in range(len(inputs))]


def _logits_case(case: StepBenchCase) -> LogitsBenchCase:
    return LogitsBenchCase(
        "paged", case.index_keys, case.index_heads, case.index_dim, case.scores, case.requests, case.next_n,
        case.context, case.page_size,
    )  # fmt: skip


def _topk_case(case: StepBenchCase) -> TopkBenchCase:
    return TopkBenchCase(case.scores, case.rows, case.context, case.selected, "off", case.page_size)


def _decode_case(case: StepBenchCase) -> DecodeCase:
    return DecodeCase(
        case.kv_format, case.heads, case.requests, case.next_n, case.selected, case.context, case.page_size
    )


STEP_PEERS: tuple[StepPeer, ...] = tuple(StepPeer(attention) for attention in PEERS)
