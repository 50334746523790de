"""The index cache's ops on torch tensors: what a call must bring, and the arguments that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.index_cache.geometry import ROW_TYPES
from dsagen.families.index_cache.guards import POOL_GUARDS, SCALE_GUARD, SLOTS_GUARD
from dsagen.families.kv_cache.guards import COUNT_GUARD, ROW_GUARDS, TABLE_GUARD
from dsagen.guard import check, require_int
from dsagen.index_format import IndexFormat, index_format
from dsagen.runtime.blocks import Number
from dsagen.runtime.device_memory import new_output
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
from dsagen.spec import IndexSpec

OP = "index_cache"
_OUTPUTS = ("codes", "scales")
_OPTIONAL = ("token_starts", *_OUTPUTS)

Tensors = Mapping[str, Any]

# Calls by role. The scalar of a gather is `rows`.
FORMS: Mapping[str, CallForm] = {
    "write": CallForm(
        OP,
        ("keys", "k_cache", "slots"),
        frozenset({"k_cache"}),
        0,
        {"keys": "keys", "cache": "k_cache", "slots": "slots"},
    ),
    "gather": CallForm(
        OP,
        ("k_cache", "block_table", "row_starts", "token_starts", *_OUTPUTS),
        frozenset(_OUTPUTS),
        1,
        {
            "cache": "k_cache",
            **{name: name for name in ("block_table", "row_starts", "token_starts", *_OUTPUTS)},
        },
    ),
}


def code_dtype(record: IndexFormat) -> torch.dtype:
    """Of gathered codes, where the op allocates them: the type's own, or bytes of two codes each."""
    dtype: torch.dtype = getattr(torch, record.values.torch_dtypes[0])
    return dtype


def scale_dtype(record: IndexFormat) -> torch.dtype:
    """Of gathered scales: fp32, or words of four ue8m0."""
    return torch.int32 if record.is_block_scaled else torch.float32


def bind_write(t: Tensors, index: IndexSpec, row_type: str, driver: Driver) -> dict[str, Number]:
    """The arguments of a write; GuardError for the first thing that does not fit. `t` has keys, k_cache and slots."""
    _require_kinds(t, "keys", driver)
    require(TensorRule("keys", ROW_TYPES[row_type].torch_dtypes, "[keys, dim]", (None, index.dim)), t["keys"])
    _require_rows("keys", t["keys"])
    require(TensorRule("slots", ("int32", "int64"), "[keys or fewer]", (None,)), t["slots"])
    count = int(t["slots"].shape[0])
    check([SLOTS_GUARD], {"slots": count, "keys": int(t["keys"].shape[0])})
    pool = _pool_arguments(t["k_cache"], index)
    _require_no_overlap({"k_cache"}, t)
    return {
        "keys": t["keys"].data_ptr(),
        "key_stride": _stride(t["keys"]),
        "slots": t["slots"].data_ptr(),
        "slots_wide": int(t["slots"].dtype is torch.int64),
        "rows_count": count,
        **pool,
    }


def bind_gather(t: Tensors, index: IndexSpec, rows: int, driver: Driver) -> dict[str, Number]:
    """The arguments of a gather but for its outputs; GuardError for the first thing that does not fit.

    `t` has k_cache, block_table and row_starts, and token_starts, codes and scales or None.
    """
    _require_kinds(t, "k_cache", driver)
    count = require_int("rows", rows)
    if count < 0:
        raise GuardError(f"[T-17] rows: {count} is negative: pass how many rows row_starts ends with")
    check([COUNT_GUARD], {"rows": count}, name="rows")
    pool = _pool_arguments(t["k_cache"], index)
    table = _table_arguments(t)
    _require_outputs(t, index, count)
    _require_no_overlap(set(_OUTPUTS), t)
    return {"rows_count": count, **table, **pool}


def require_both_outputs(codes: torch.Tensor | None, scales: torch.Tensor | None) -> None:
    """Refuse one output of a gather without the other."""
    if (codes is None) != (scales is None):
        raise GuardError("[T-17] codes, scales: one without the other: pass both, or neither")


def make_outputs(t: Tensors, rows: int, index: IndexSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, bytes of a key's codes] and scales [rows], as given or new."""
    record, device = index_format(index.keys), t["k_cache"].device
    wanted = (
        ("codes", (rows, record.code_bytes(index.dim)), code_dtype(record)),
        ("scales", (rows,), scale_dtype(record)),
    )
    made = []
    for name, shape, dtype in wanted:
        tensor = t[name]
        if tensor is None:
            tensor = new_output(name, shape, dtype, device)
        made.append(tensor)
    codes, scales = made
    return codes, scales


def output_arguments(codes: torch.Tensor, scales: torch.Tensor) -> dict[str, Number]:
    """Where a gather writes."""
    return {
        "codes": codes.data_ptr(),
        "code_stride_bytes": _stride(codes),
        "scales": scales.data_ptr(),
        "scale_stride_bytes": _stride(scales) * scales.element_size(),
    }


def _require_kinds(t: Tensors, first: str, driver: Driver) -> None:
    """Plain tensors on one served device, all but the optional ones among them."""
    given = _given(t)
    for name, tensor in given:
        require_plain(name, tensor)
    require_served(first, t[first], driver)
    for name, tensor in given:
        require_device(name, tensor, t[first].device, first)
        require_memory(name, tensor)


def _given(t: Tensors) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in t.items() if tensor is not None or name not in _OPTIONAL]


def _require_no_overlap(outputs: set[str], t: Tensors) -> None:
    given = _given(t)
    require_no_overlap(outputs, given, {name: span_bytes(tensor) for name, tensor in given})


def _pool_arguments(cache: torch.Tensor, index: IndexSpec) -> dict[str, Number]:
    record = index_format(index.keys)
    record_bytes = record.record_bytes(index.dim)
    layout = f"[pages, page_size, 1, bytes of a {index.keys} key]"
    require(TensorRule("k_cache", record.values.torch_dtypes, layout, (None, None, 1, record_bytes)), cache)
    pages, page_size = int(cache.shape[0]), int(cache.shape[1])
    page_bytes = record.page_bytes(index.dim, page_size)
    page_stride = int(cache.stride(0)) if pages > 1 else page_bytes
    values = {
        "pages": pages,
        "page_size": page_size,
        "pool_tokens": pages * page_size,
        "address": cache.data_ptr(),
        "page_stride_bytes": page_stride,
        "row_stride_bytes": int(cache.stride(1)) if page_size > 1 else record_bytes,
        "record_bytes": record_bytes,
        "page_bytes": page_bytes,
    }
    check(POOL_GUARDS, values, name="k_cache")
    multiplier, shift = page_divisor(page_size)
    return {
        "cache": cache.data_ptr(),
        "page_stride_bytes": page_stride,
        "pool_tokens": pages * page_size,
        "page_size": page_size,
        "page_multiplier": multiplier,
        "page_shift": shift,
        "wide_pages": int((cache.data_ptr() | page_stride) % 16 == 0),
    }


def _table_arguments(t: Tensors) -> dict[str, Number]:
    table, starts = t["block_table"], t["token_starts"]
    require(TensorRule("block_table", ("int32",), "[requests, pages]", (None, None)), table)
    requests, columns = (int(size) for size in table.shape)
    check([TABLE_GUARD], {"requests": requests, "columns": columns})
    require(TensorRule("row_starts", ("int32",), "[requests + 1]", (requests + 1,)), t["row_starts"])
    if starts is not None:
        require(TensorRule("token_starts", ("int32",), "[requests]", (requests,)), starts)
    return {
        "block_table": table.data_ptr(),
        "table_stride": _stride(table),
        "table_columns": columns,
        "requests": requests,
        "row_starts": t["row_starts"].data_ptr(),
        # An empty list has no address, and a null one would mean that there is none.
        "token_starts": 0 if starts is None else starts.data_ptr() or 1,
    }


def _require_outputs(t: Tensors, index: IndexSpec, rows: int) -> None:
    record = index_format(index.keys)
    codes, scales = t["codes"], t["scales"]
    if codes is not None:
        shape = (rows, record.code_bytes(index.dim))
        require(TensorRule("codes", record.values.torch_dtypes, "[rows, bytes of a key's codes]", shape), codes)
        require_separate_elements("codes", codes)
        _require_rows("codes", codes)
    if scales is not None:
        dtype = str(scale_dtype(record)).removeprefix("torch.")
        require(TensorRule("scales", (dtype,), "[rows]", (rows,), last_dim_contiguous=False), scales)
        require_separate_elements("scales", scales)
        check([SCALE_GUARD], {"address": scales.data_ptr()})


def _require_rows(name: str, tensor: torch.Tensor) -> None:
    check([COUNT_GUARD], {"rows": int(tensor.shape[0])}, name=name)
    stride = _stride(tensor) * tensor.element_size()
    check(ROW_GUARDS, {"address": tensor.data_ptr(), "row_stride_bytes": stride}, name=name)


def _stride(tensor: torch.Tensor) -> int:
    # The stride of a dim of size 1 moves nothing, and torch lets it be any number.
    return int(tensor.stride(0)) if tensor.shape[0] > 1 else 0
