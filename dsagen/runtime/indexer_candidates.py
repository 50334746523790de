"""The indexer's logits in candidate blocks of cached keys, on torch tensors: what a call must bring."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.families.indexer_logits.guards import (
    BLOCK_GUARD,
    BLOCK_SIZE_GUARD,
    SLOTS_GUARD,
    TOKENS_GUARD,
    WIDTH_GUARD,
)
from dsagen.families.indexer_logits.op import LogitsShape
from dsagen.guard import check, require_int
from dsagen.runtime.driver import Driver
from dsagen.runtime.indexer import (
    FORM as PAGED_FORM,
)
from dsagen.runtime.indexer import (
    LogitsCall,
    LogitsTensors,
    index_of,
    paged_arguments,
    require_kinds,
    require_query,
    require_scores,
    stride_of,
)
from dsagen.runtime.launch import CallForm
from dsagen.runtime.tensors import TensorRule, require, require_no_overlap, span_bytes
from dsagen.spec import DeploymentSpec

METHOD = "indexer_logits_candidates"


class CandidateTensors(NamedTuple):
    """The tensors of one call; q_scales and out may be None."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    candidate_blocks: torch.Tensor
    q_scales: torch.Tensor | None
    out: torch.Tensor | None

    @property
    def paged(self) -> LogitsTensors:
        """Those that a call over all keys has, too."""
        shared = (self.q, self.k_cache, self.weights, self.context_lens, self.block_table)
        return LogitsTensors(*shared, self.q_scales, self.out)

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings."""
        return [*self.paged.given(), ("candidate_blocks", self.candidate_blocks)]


# Scalars of a call are block_size and max_seq_len as given.
FORM = CallForm(
    METHOD,
    CandidateTensors._fields,
    frozenset({"out"}),
    2,
    {**PAGED_FORM.addresses, "candidates": "candidate_blocks"},
)


def bind_candidates(
    t: CandidateTensors, block_size: int, max_seq_len: int | None, spec: DeploymentSpec, driver: Driver
) -> LogitsCall:
    """Check a call; GuardError for the first thing that does not fit. Its shape's width are the columns of scores."""
    require_kinds(t.given(), t.q, driver)
    index = index_of(spec)
    require_query(t.q, index, "[batch, next_n, heads, {}]", (None, None))
    batch, next_n = int(t.q.shape[0]), int(t.q.shape[1])
    check([TOKENS_GUARD], {"batch": batch, "next_n": next_n})
    check([BLOCK_SIZE_GUARD], {"block_size": require_int("block_size", block_size)})
    paged = paged_arguments(t.paged, index)
    if max_seq_len is not None:
        check([WIDTH_GUARD], {"width": require_int("max_seq_len", max_seq_len)})
        paged |= {"most_keys": min(max_seq_len, int(paged["most_keys"]))}
    rule = TensorRule("candidate_blocks", ("int32",), "[batch * next_n, slots]", (batch * next_n, None))
    require(rule, t.candidate_blocks)
    slots = int(t.candidate_blocks.shape[1])
    check([SLOTS_GUARD], {"slots": slots, "block_size": block_size})
    width = slots * block_size
    require_scores(t.out, spec, "[batch * next_n, slots * block_size]", (batch * next_n, width))
    require_no_overlap({"out"}, t.given(), {name: span_bytes(tensor) for name, tensor in t.given()})
    return LogitsCall(
        LogitsShape(batch, next_n, width, index.heads),
        {
            **paged,
            "candidates": t.candidate_blocks.data_ptr(),
            "candidate_stride": stride_of(t.candidate_blocks, 0),
            "block_shift": block_size.bit_length() - 1,
            "width": width,
        },
    )


def check_blocks(t: CandidateTensors, block_size: int) -> None:
    """Refuse blocks past all that a table row names. Waits for the device."""
    blocks = -(-int(t.block_table.shape[1]) * int(t.k_cache.shape[1]) // block_size)
    bad = t.candidate_blocks >= blocks
    if bool(bad.any()):
        row, slot = (int(n) for n in bad.nonzero()[0])
        values = {"block": int(t.candidate_blocks[row, slot]), "blocks": blocks}
        check([BLOCK_GUARD], values, row=row, slot=slot, block_size=block_size, count=int(bad.sum()))
