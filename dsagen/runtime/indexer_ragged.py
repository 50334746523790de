"""The indexer's logits over keys in one piece, on torch tensors: what a call must bring, and what follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.families.indexer_logits.guards import (
    KEY_COUNT_GUARD,
    KEY_ROW_GUARDS,
    MAX_WINDOW_GUARD,
    QUERY_ADDRESS_GUARD,
    RAGGED_STRIDES_GUARD,
    RAGGED_TOKENS_GUARD,
    UNSCORED_GUARD,
    WINDOW_GUARD,
    WINDOW_WIDTH_GUARD,
)
from dsagen.families.indexer_logits.op import RaggedShape
from dsagen.families.indexer_logits.reference import window_reference
from dsagen.guard import check, require_int
from dsagen.index_format import index_format
from dsagen.runtime.blocks import Number
from dsagen.runtime.driver import Driver
from dsagen.runtime.indexer import (
    index_of,
    require_kinds,
    require_query,
    require_scales,
    require_scores,
    stride_of,
)
from dsagen.runtime.launch import CallForm
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_no_overlap,
    span_bytes,
)
from dsagen.spec import DeploymentSpec, IndexSpec

METHOD = "indexer_logits_ragged"


class RaggedTensors(NamedTuple):
    """The tensors of one call; q_scales and out may be None."""

    q: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor
    weights: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    q_scales: torch.Tensor | None
    out: torch.Tensor | None

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings."""
        pairs = zip(self._fields, self, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None or name not in ("q_scales", "out")]


# Scalars of a call are max_window, unscored_up_to and fill_neg_inf as given.
FORM = CallForm(
    METHOD,
    RaggedTensors._fields,
    frozenset({"out"}),
    3,
    {
        "q": "q",
        "keys": "keys",
        "scales": "key_scales",
        "weights": "weights",
        "starts": "starts",
        "ends": "ends",
        "q_scales": "q_scales",
        "scores": "out",
    },
)


class RaggedCall(NamedTuple):
    """A checked call: its sizes, columns of scores, and the arguments but for the partition and where scores go."""

    shape: RaggedShape
    width: int
    arguments: dict[str, Number]


def bind_ragged(
    t: RaggedTensors, max_window: int | None, unscored_up_to: int, fills: bool, spec: DeploymentSpec, driver: Driver
) -> RaggedCall:
    """Check a call; GuardError for the first thing that does not fit."""
    require_kinds(t.given(), t.q, driver)
    index = index_of(spec)
    require_query(t.q, index, "[tokens, heads, {}]", (None,))
    tokens = int(t.q.shape[0])
    check([RAGGED_TOKENS_GUARD], {"tokens": tokens})
    check([UNSCORED_GUARD], {"unscored": require_int("unscored_up_to", unscored_up_to)})
    require_scales(t.q_scales, index, "[tokens, heads]", (tokens, index.heads))
    keys = _key_arguments(t, index)
    count = t.keys.shape[0]
    width = count if max_window is None else require_int("max_window", max_window)
    check([MAX_WINDOW_GUARD], {"width": width})
    require(TensorRule("weights", ("float32",), "[tokens, heads]", (tokens, index.heads)), t.weights)
    for name, tensor in (("starts", t.starts), ("ends", t.ends)):
        require(TensorRule(name, ("int32",), "[tokens]", (tokens,), last_dim_contiguous=False), tensor)
    layout = "[tokens, keys]" if max_window is None else "[tokens, max_window]"
    require_scores(t.out, spec, layout, (tokens, width))
    require_no_overlap({"out"}, t.given(), {name: span_bytes(tensor) for name, tensor in t.given()})
    return RaggedCall(
        RaggedShape(tokens, count, index.heads),
        width,
        {
            **_query_arguments(t),
            **keys,
            "weights": t.weights.data_ptr(),
            "weight_stride": stride_of(t.weights, 0),
            "starts": t.starts.data_ptr(),
            "start_stride": stride_of(t.starts, 0),
            "ends": t.ends.data_ptr(),
            "end_stride": stride_of(t.ends, 0),
            "width": width,
            "compressed": int(max_window is not None),
            "tokens": tokens,
            "heads": index.heads,
            "unscored": unscored_up_to,
            "fills": int(fills),
        },
    )


def check_token_windows(t: RaggedTensors, max_window: int | None) -> None:
    """Refuse windows that leave the keys, are turned round, or exceed `max_window`. Waits for the device."""
    keys = int(t.keys.shape[0])
    bad = (t.starts < 0) | (t.starts > t.ends) | (t.ends > keys)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        values = {"start": int(t.starts[token]), "end": int(t.ends[token]), "keys": keys}
        check([WINDOW_GUARD], values, token=token, count=int(bad.sum()))
    if max_window is None:
        return
    lengths = window_reference(t.starts, t.ends, keys, None)[1]
    long = lengths > max_window
    if bool(long.any()):
        token = int(long.nonzero()[0])
        values = {"window": int(lengths[token]), "width": max_window}
        check([WINDOW_WIDTH_GUARD], values, token=token, count=int(long.sum()))


def _query_arguments(t: RaggedTensors) -> dict[str, Number]:
    strides = {"stride_t": stride_of(t.q, 0), "stride_h": stride_of(t.q, 1)}
    check([RAGGED_STRIDES_GUARD, QUERY_ADDRESS_GUARD], {"address": t.q.data_ptr(), **strides})
    found: dict[str, Number] = {"q": t.q.data_ptr(), **{f"q_{name}": stride for name, stride in strides.items()}}
    if t.q_scales is not None:
        found |= {"q_scales": t.q_scales.data_ptr(), "q_scale_stride_t": stride_of(t.q_scales, 0)}
    return found


def _key_arguments(t: RaggedTensors, index: IndexSpec) -> dict[str, Number]:
    record = index_format(index.keys)
    row_bytes = record.code_bytes(index.dim)
    require(
        TensorRule("keys", record.values.torch_dtypes, f"[keys, bytes of {index.keys} codes]", (None, row_bytes)),
        t.keys,
    )
    count = int(t.keys.shape[0])
    check([KEY_COUNT_GUARD], {"keys": count})
    dtype, what = ("int32", "words of four ue8m0") if record.is_block_scaled else ("float32", "a scale each")
    rule = TensorRule(
        "key_scales", (dtype,), f"[keys], {what} of {index.keys} keys", (count,), last_dim_contiguous=False
    )
    require(rule, t.key_scales)
    stride = stride_of(t.keys, 0)
    values = {"address": t.keys.data_ptr(), "key_stride_bytes": stride, "row_bytes": row_bytes}
    check(KEY_ROW_GUARDS, values)
    return {
        "keys": t.keys.data_ptr(),
        "key_stride_bytes": stride,
        "scales": t.key_scales.data_ptr(),
        "scale_stride_bytes": 4 * stride_of(t.key_scales, 0),
        "key_count": count,
        "wide_copies": int((t.keys.data_ptr() | stride) % 16 == 0),
    }
