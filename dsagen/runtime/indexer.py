"""The indexer's logits on torch tensors: what a call must bring, and the arguments that follow from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.indexer_logits.guards import (
    LENGTH_GUARD,
    PAGE_GUARD,
    POOL_GUARDS,
    QUERY_GUARDS,
    TABLE_GUARD,
    TOKENS_GUARD,
    UNSCORED_GUARD,
    WIDTH_GUARD,
)
from dsagen.families.indexer_logits.op import LogitsShape
from dsagen.guard import check, require_int
from dsagen.index_format import index_format
from dsagen.runtime.blocks import Number
from dsagen.runtime.device_memory import no_memory
from dsagen.runtime.driver import Driver
from dsagen.runtime.launch import CallForm
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    require_separate_elements,
    require_served,
    span_bytes,
)
from dsagen.spec import DeploymentSpec, IndexSpec

OP = "indexer_logits"
SCORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows of scores that the op allocates begin at multiples of so many bytes, which is what top-k reads fastest.
_ROW_BYTES = 16
# Positions that tiles of int32 reach.
MOST_KEYS = 2147483583


class LogitsTensors(NamedTuple):
    """The tensors of one call; q_scales and out may be None."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    q_scales: torch.Tensor | None
    out: torch.Tensor | None

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings."""
        pairs = zip(self._fields, self, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None or name not in ("q_scales", "out")]


# Scalars of a call are max_seq_len, unscored_up_to and fill_neg_inf as given.
FORM = CallForm(
    OP,
    LogitsTensors._fields,
    frozenset({"out"}),
    3,
    {
        "q": "q",
        "k_cache": "k_cache",
        "weights": "weights",
        "lens": "context_lens",
        "block_table": "block_table",
        "q_scales": "q_scales",
        "scores": "out",
    },
)


class LogitsCall(NamedTuple):
    """A checked call: its sizes, and the arguments but for the partition and where scores go."""

    shape: LogitsShape
    arguments: dict[str, Number]


def index_of(spec: DeploymentSpec) -> IndexSpec:
    """The spec's indexer, which a spec with the op has."""
    assert spec.index is not None
    return spec.index


def bind(
    t: LogitsTensors, max_seq_len: int | None, unscored_up_to: int, fills: bool, spec: DeploymentSpec, driver: Driver
) -> LogitsCall:
    """Check a call; GuardError for the first thing that does not fit."""
    require_kinds(t.given(), t.q, driver)
    index = index_of(spec)
    require_query(t.q, index, "[batch, next_n, heads, {}]", (None, None))
    batch, next_n = int(t.q.shape[0]), int(t.q.shape[1])
    check([TOKENS_GUARD], {"batch": batch, "next_n": next_n})
    width = _width(t, max_seq_len)
    check([WIDTH_GUARD], {"width": width})
    check([UNSCORED_GUARD], {"unscored": require_int("unscored_up_to", unscored_up_to)})
    paged = paged_arguments(t, index)
    require_scores(t.out, spec, "[batch * next_n, max_seq_len]", (batch * next_n, width))
    require_no_overlap({"out"}, t.given(), {name: span_bytes(tensor) for name, tensor in t.given()})
    return LogitsCall(
        LogitsShape(batch, next_n, width, index.heads),
        {
            **paged,
            "most_keys": min(width, int(paged["most_keys"])),
            "width": width,
            "unscored": unscored_up_to,
            "fills": int(fills),
        },
    )


def paged_arguments(t: LogitsTensors, index: IndexSpec) -> dict[str, Number]:
    """The arguments of a call over cached keys but for columns of scores, whose q has been found to be one.

    `most_keys` is what a table row names, as far as tiles of int32 positions reach.
    """
    batch, next_n = int(t.q.shape[0]), int(t.q.shape[1])
    require(TensorRule("weights", ("float32",), "[batch * next_n, heads]", (batch * next_n, index.heads)), t.weights)
    scales = _scale_arguments(t, index)
    pool = _pool_arguments(t.k_cache, index)
    require(TensorRule("block_table", ("int32",), "[batch, pages]", (batch, None)), t.block_table)
    columns = int(t.block_table.shape[1])
    check([TABLE_GUARD], {"columns": columns})
    return {
        **_length_arguments(t.context_lens, batch, next_n),
        **_query_arguments(t.q),
        **scales,
        **pool,
        "weights": t.weights.data_ptr(),
        "weight_stride": stride_of(t.weights, 0),
        "most_keys": min(MOST_KEYS, columns * int(pool["page_size"])),
        "block_table": t.block_table.data_ptr(),
        "table_stride": stride_of(t.block_table, 0),
        "batch": batch,
        "next_n": next_n,
        "heads": index.heads,
    }


def make_out(out: torch.Tensor | None, q: torch.Tensor, tokens: int, width: int, spec: DeploymentSpec) -> torch.Tensor:
    """The scores' destination as given, or new: [tokens, width], rows at multiples of 16 B."""
    if out is not None:
        return out
    try:
        made = empty_scores(q, tokens, width, spec)
    except RuntimeError as error:
        size = tokens * width * SCORE_DTYPES[str(spec.scores)].itemsize
        advice = "score fewer tokens or shorter windows, or pass out"
        raise no_memory("out", size, q.device, advice, error) from None
    # A mode of torch that is active makes something else of it.
    require_plain("out", made)
    return made


def empty_scores(q: torch.Tensor, tokens: int, width: int, spec: DeploymentSpec) -> torch.Tensor:
    """[tokens, width] on the device of q, rows at multiples of 16 B."""
    dtype = SCORE_DTYPES[str(spec.scores)]
    step = _ROW_BYTES // dtype.itemsize
    return q.new_empty((tokens, -(-width // step) * step), dtype=dtype)[:, :width]


def out_arguments(out: torch.Tensor) -> dict[str, Number]:
    """Where scores go."""
    return {"scores": out.data_ptr(), "score_stride": stride_of(out, 0)}


def check_lengths(t: LogitsTensors, most_keys: int) -> None:
    """Refuse lengths past what scores and tables hold. Waits for the device."""
    lengths = t.context_lens if t.context_lens.dim() == 2 else t.context_lens[:, None]
    bad = lengths > most_keys
    if bool(bad.any()):
        request, token = (int(n) for n in bad.nonzero()[0])
        if t.context_lens.dim() == 1:
            token = int(t.q.shape[1]) - 1
        values = {"length": int(lengths[request, 0 if t.context_lens.dim() == 1 else token]), "most_keys": most_keys}
        check([LENGTH_GUARD], values, request=request, token=token, count=int(bad.sum()))


def check_pages(t: LogitsTensors) -> None:
    """Refuse pages past the cache where a token sees keys of them. Waits for the device."""
    lengths = t.context_lens if t.context_lens.dim() == 1 else t.context_lens.max(1).values
    first_keys = torch.arange(t.block_table.shape[1], device=lengths.device) * int(t.k_cache.shape[1])
    pages = int(t.k_cache.shape[0])
    bad = (t.block_table >= pages) & (first_keys < lengths[:, None])
    if bool(bad.any()):
        request, column = (int(n) for n in bad.nonzero()[0])
        values = {"page": int(t.block_table[request, column]), "pages": pages}
        check([PAGE_GUARD], values, request=request, column=column, count=int(bad.sum()))


def require_kinds(given: list[tuple[str, Any]], q: torch.Tensor, driver: Driver) -> None:
    """Refuse what is no plain tensor on the device of q, which the driver serves."""
    for name, tensor in given:
        require_plain(name, tensor)
    require_served("q", q, driver)
    for name, tensor in given:
        require_device(name, tensor, q.device, "q")
        require_memory(name, tensor)


def require_query(q: torch.Tensor, index: IndexSpec, layout: str, sizes: tuple[int | None, ...]) -> None:
    """Refuse a query whose codes are not those of the keys' format; `layout` names its dims, {} the last one."""
    record = index_format(index.keys)
    named = layout.format("dim" if record.values.bits == 8 else f"dim / {8 // record.values.bits}")
    shape = (*sizes, index.heads, record.code_bytes(index.dim))
    require(TensorRule("q", record.values.torch_dtypes, f"{named}, {record.values.name} codes", shape), q)


def require_scales(scales: torch.Tensor | None, index: IndexSpec, layout: str, shape: tuple[int, ...]) -> None:
    """Refuse scales of q that keys of the spec's format have no use for, and ask for those that they need."""
    if not index_format(index.keys).is_block_scaled:
        if scales is not None:
            raise GuardError(
                f"[T-23] q_scales: given, and {index.keys} keys have one fp32 scale each, beside which the scales of q "
                "are in weights: leave it out, or declare index.keys: mxfp8 or mxfp4"
            )
        return
    if scales is None:
        raise GuardError(
            f"[T-23] q_scales: missing, and {index.keys} codes of q have a ue8m0 for 32 dims as those of keys do: pass "
            f"int32 words {layout}"
        )
    require(TensorRule("q_scales", ("int32",), f"{layout}, four ue8m0 each", shape), scales)


def _width(t: LogitsTensors, max_seq_len: int | None) -> int:
    if max_seq_len is not None:
        return require_int("max_seq_len", max_seq_len)
    if t.out is None:
        return require_width(max_seq_len)
    return int(t.out.shape[1]) if t.out.dim() == 2 else 0


def require_width(max_seq_len: int | None) -> int:
    """Columns of scores of a call without out, traced or not."""
    if max_seq_len is None:
        raise GuardError(
            "[T-21] max_seq_len: missing, and without out nothing tells how wide scores are: pass the longest length "
            "of the batch, which need not be the model's"
        )
    return max_seq_len


def require_scores(
    out: torch.Tensor | None, spec: DeploymentSpec, layout: str, shape: tuple[int, int], name: str = "out"
) -> None:
    """Refuse an output that does not hold the scores of a call."""
    if out is None:
        return
    dtype = str(SCORE_DTYPES[str(spec.scores)]).removeprefix("torch.")
    require(TensorRule(name, (dtype,), layout, shape), out)
    require_separate_elements(name, out)


def _query_arguments(q: torch.Tensor) -> dict[str, Number]:
    strides = {f"stride_{name}": stride_of(q, dim) for name, dim in (("b", 0), ("n", 1), ("h", 2))}
    check(QUERY_GUARDS, {"address": q.data_ptr(), **strides})
    return {"q": q.data_ptr(), **{f"q_{name}": stride for name, stride in strides.items()}}


def _scale_arguments(t: LogitsTensors, index: IndexSpec) -> dict[str, Number]:
    require_scales(t.q_scales, index, "[batch, next_n, heads]", tuple(t.q.shape[:3]))
    if t.q_scales is None:
        return {}
    strides = {"q_scale_stride_b": stride_of(t.q_scales, 0), "q_scale_stride_n": stride_of(t.q_scales, 1)}
    return {"q_scales": t.q_scales.data_ptr(), **strides}


def _pool_arguments(cache: torch.Tensor, index: IndexSpec) -> dict[str, Number]:
    record = index_format(index.keys)
    record_bytes = record.record_bytes(index.dim)
    layout = f"[pages, page_size, 1, bytes of a {index.keys} key]"
    require(TensorRule("k_cache", record.values.torch_dtypes, layout, (None, None, 1, record_bytes)), cache)
    pages, page_size = int(cache.shape[0]), int(cache.shape[1])
    page_stride = stride_of(cache, 0)
    values = {
        "pages": pages,
        "page_size": page_size,
        "address": cache.data_ptr(),
        "page_stride_bytes": page_stride,
        "row_stride_bytes": int(cache.stride(1)) if page_size > 1 else record_bytes,
        "record_bytes": record_bytes,
        "page_bytes": record.page_bytes(index.dim, page_size),
    }
    check(POOL_GUARDS, values, name="k_cache")
    multiplier, shift = page_divisor(page_size)
    return {
        "k_cache": cache.data_ptr(),
        "page_stride_bytes": page_stride,
        "pool_pages": pages,
        "page_size": page_size,
        "page_multiplier": multiplier,
        "page_shift": shift,
        "wide_copies": int((cache.data_ptr() | page_stride) % 16 == 0),
    }


def _length_arguments(lens: torch.Tensor, batch: int, next_n: int) -> dict[str, Number]:
    per_token = lens.dim() != 1
    shape = (batch, next_n) if per_token else (batch,)
    layout = "[batch, next_n], or [batch]"
    require(TensorRule("context_lens", ("int32",), layout, shape, last_dim_contiguous=False), lens)
    return {
        "lens": lens.data_ptr(),
        "lens_stride_b": stride_of(lens, 0),
        "lens_stride_n": stride_of(lens, 1) if per_token else 0,
        "per_token": int(per_token),
    }


def stride_of(tensor: torch.Tensor, dim: int) -> int:
    """The stride of a dim in elements, 0 where it moves nothing."""
    # The stride of a dim of size 1 moves nothing, and torch lets it be any number.
    return int(tensor.stride(dim)) if tensor.shape[dim] > 1 else 0
