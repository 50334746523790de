"""The indexer's logits with scores of candidate blocks, on torch tensors: what a call must bring."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.runtime.blocks import Number
from dsagen.runtime.driver import Driver
from dsagen.runtime.indexer import (
    FORM as PAGED_FORM,
)
from dsagen.runtime.indexer import (
    SCORE_DTYPES,
    LogitsCall,
    LogitsTensors,
    bind,
    make_out,
    out_arguments,
    require_scores,
    stride_of,
)
from dsagen.runtime.launch import CallForm
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    span_bytes,
)
from dsagen.spec import DeploymentSpec

METHOD = "indexer_logits_blocks"
_OUTPUTS = frozenset({"out", "block_scores", "block_counts"})


class BlockTensors(NamedTuple):
    """The tensors of one call; q_scales and the last three may be None."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    q_scales: torch.Tensor | None
    out: torch.Tensor | None
    block_scores: torch.Tensor | None
    block_counts: torch.Tensor | None

    @property
    def paged(self) -> LogitsTensors:
        """Those that a call without scores of blocks has, too."""
        return LogitsTensors(*self[:7])

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings."""
        blocks = (("block_scores", self.block_scores), ("block_counts", self.block_counts))
        return [*self.paged.given(), *((name, tensor) for name, tensor in blocks if tensor is not None)]


# Scalars of a call are those of calls without scores of blocks.
FORM = CallForm(
    METHOD,
    BlockTensors._fields,
    _OUTPUTS,
    3,
    {**PAGED_FORM.addresses, "block_scores": "block_scores", "block_counts": "block_counts"},
)


def block_columns(width: int) -> int:
    """Columns of scores of blocks, of rows of `width` keys."""
    return -(-width // BLOCK_KEYS)


def bind_blocks(
    t: BlockTensors, max_seq_len: int | None, unscored_up_to: int, fills: bool, spec: DeploymentSpec, driver: Driver
) -> LogitsCall:
    """Check a call; GuardError for the first thing that does not fit."""
    call = bind(t.paged, max_seq_len, unscored_up_to, fills, spec, driver)
    tokens = call.shape.tokens
    for name, tensor in (("block_scores", t.block_scores), ("block_counts", t.block_counts)):
        if tensor is not None:
            require_plain(name, tensor)
            require_device(name, tensor, t.q.device, "q")
            require_memory(name, tensor)
    layout = "[batch * next_n, ceil(max_seq_len / 8)]"
    require_scores(t.block_scores, spec, layout, (tokens, block_columns(call.shape.width)), "block_scores")
    if t.block_counts is not None:
        require(TensorRule("block_counts", ("int32",), "[batch * next_n]", (tokens,)), t.block_counts)
    require_no_overlap(set(_OUTPUTS), t.given(), {name: span_bytes(tensor) for name, tensor in t.given()})
    return call


def make_results(t: BlockTensors, call: LogitsCall, spec: DeploymentSpec) -> BlockTensors:
    """The tensors with all outputs, as given or new."""
    shape = call.shape
    out = make_out(t.out, t.q, shape.tokens, shape.width, spec)
    scores = make_out(t.block_scores, t.q, shape.tokens, block_columns(shape.width), spec)
    counts = t.block_counts
    if counts is None:
        counts = t.q.new_empty(shape.tokens, dtype=torch.int32)
        require_plain("block_counts", counts)
    return t._replace(out=out, block_scores=scores, block_counts=counts)


def result_arguments(t: BlockTensors) -> dict[str, Number]:
    """Where results go."""
    assert t.out is not None and t.block_scores is not None and t.block_counts is not None
    assert t.block_scores.dtype in SCORE_DTYPES.values()
    return {
        **out_arguments(t.out),
        "block_scores": t.block_scores.data_ptr(),
        "block_stride": stride_of(t.block_scores, 0),
        "block_counts": t.block_counts.data_ptr(),
    }
