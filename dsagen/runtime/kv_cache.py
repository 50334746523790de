"""The cache ops on torch tensors: what a call must bring, and the arguments that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.kv_cache.geometry import ROW_TYPES, other_layout
from dsagen.families.kv_cache.guards import (
    COUNT_GUARD,
    PAGE_GUARD,
    POOL_GUARDS,
    REACH_GUARD,
    ROW_GUARDS,
    ROW_STARTS_GUARD,
    SAME_POOL_GUARD,
    SLOT_GUARD,
    TABLE_GUARD,
)
from dsagen.guard import check, require_int
from dsagen.kv_format import KvFormat
from dsagen.runtime.blocks import Number
from dsagen.runtime.device_memory import new_output
from dsagen.runtime.driver import Driver
from dsagen.runtime.launch import CallForm
from dsagen.runtime.pools import Pool, checked_pool
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    require_separate_elements,
    span_bytes,
)
from dsagen.spec import DeploymentSpec

OP = "kv_cache"
_SLOT_DTYPES = ("int32", "int64")

Tensors = Mapping[str, Any]


def _form(tensors: tuple[str, ...], outputs: set[str], scalars: int, addresses: Mapping[str, str]) -> CallForm:
    names = {name: name for name in tensors if not name.endswith("cache")}
    return CallForm(OP, tensors, frozenset(outputs), scalars, {**names, **addresses})


_CACHES = {"cache": "k_cache", "rope_cache": "kpe_cache"}
# Calls by role. The scalars are `extra`, and `rows` of a read.
FORMS: Mapping[str, CallForm] = {
    "write": _form(("rows", "k_cache", "slots", "k_pe", "kpe_cache"), {"k_cache", "kpe_cache"}, 1, _CACHES),
    "read": _form(
        ("k_cache", "kpe_cache", "slots", "block_table", "row_starts", "token_starts", "out"), {"out"}, 2, _CACHES
    ),
    "convert": _form(("source", "target", "source_slots", "target_slots"), {"target"}, 1, {}),
}


def cache_of(spec: DeploymentSpec, extra: bool) -> KvFormat:
    """The format of the first or the second cache; GuardError without a second one."""
    if not extra:
        return spec.kv_format
    if spec.extra_kv_format is None:
        raise GuardError(f"[T-17] extra: the spec {spec.name} declares no second cache: leave it out, or add extra_kv")
    return spec.extra_kv_format


def bind_write(t: Tensors, record: KvFormat, row_type: str, driver: Driver) -> dict[str, Number]:
    """The arguments of a write; GuardError for the first thing that does not fit.

    `t` has rows, k_cache and slots, and k_pe and kpe_cache or None.
    """
    given = _require_kinds(t, ("rows", "k_cache", "slots"), driver)
    _require_parts(t, record)
    apart = t["k_pe"] is not None
    if apart and not record.d_rope:
        raise GuardError(f"[T-17] k_pe: format {record.format_id} has no rotary dims of its own: pass whole rows")
    dtype = ROW_TYPES[row_type].torch_dtypes
    width = record.d_nope if apart else record.d_qk
    require(TensorRule("rows", dtype, "[rows, d_nope]" if apart else "[rows, d_qk]", (None, width)), t["rows"])
    count = int(t["rows"].shape[0])
    if apart:
        require(TensorRule("k_pe", dtype, "[rows, d_rope]", (count, record.d_rope)), t["k_pe"])
        _require_rows("k_pe", t["k_pe"])
    _require_rows("rows", t["rows"])
    require(TensorRule("slots", _SLOT_DTYPES, "[rows]", (count,)), t["slots"])
    pools = _pool_arguments(t, record)
    require_no_overlap({"k_cache", "kpe_cache"}, given, {name: span_bytes(tensor) for name, tensor in given})
    return {
        "rows": t["rows"].data_ptr(),
        "row_stride": _row_stride(t["rows"]),
        "k_pe": t["k_pe"].data_ptr() if apart else 0,
        "k_pe_stride": _row_stride(t["k_pe"]) if apart else 0,
        **_slot_arguments(t["slots"]),
        "rows_count": count,
        **pools,
    }


def bind_read(t: Tensors, record: KvFormat, rows: int | None, driver: Driver) -> dict[str, Number]:
    """The arguments of a read but for out; GuardError for the first thing that does not fit.

    `t` has k_cache, and kpe_cache, slots, block_table, row_starts, token_starts and out or None.
    """
    given = _require_kinds(t, ("k_cache",), driver)
    _require_parts(t, record)
    count = _read_rows(t, rows)
    check([COUNT_GUARD], {"rows": count}, name="rows")
    pools = _pool_arguments(t, record)
    if t["out"] is not None:
        require(TensorRule("out", ("bfloat16",), "[rows, d_qk]", (count, record.d_qk)), t["out"])
        require_separate_elements("out", t["out"])
        _require_rows("out", t["out"])
    require_no_overlap({"out"}, given, {name: span_bytes(tensor) for name, tensor in given})
    return {"rows_count": count, **_slot_arguments(t["slots"]), **_table_arguments(t), **pools}


def make_out(out: torch.Tensor | None, rows: int, record: KvFormat, device: torch.device) -> torch.Tensor:
    """The rows' destination as given, or new: bf16 [rows, d_qk]."""
    if out is not None:
        return out
    return new_output("out", (rows, record.d_qk), torch.bfloat16, device)


def out_arguments(out: torch.Tensor) -> dict[str, Number]:
    """Where a read writes."""
    return {"out": out.data_ptr(), "out_stride": _row_stride(out)}


def bind_convert(t: Tensors, record: KvFormat, driver: Driver) -> dict[str, Number]:
    """The arguments of a conversion into `record` from its other layout; GuardError for what does not fit.

    `t` has source and target, and source_slots and target_slots or None.
    """
    other = other_layout(record)
    if other is None:
        raise GuardError(f"[T-17] kv_convert: format {record.format_id} has one layout: there is nothing to convert")
    given = _require_kinds(t, ("source", "target"), driver)
    pools = {"source": _pool("source", t["source"], other), "target": _pool("target", t["target"], record)}
    slots = {name: t[f"{name}_slots"] for name in pools}
    if (slots["source"] is None) != (slots["target"] is None):
        raise GuardError("[T-17] source_slots, target_slots: one without the other: pass both, or neither")
    if slots["source"] is None:
        count = pools["source"].tokens
        if count > pools["target"].tokens:
            raise GuardError(
                f"[T-17] target: its {pools['target'].tokens} tokens do not hold the source's {count}: pass slots, or "
                "a larger target"
            )
    else:
        require(TensorRule("source_slots", _SLOT_DTYPES, "[rows]", (None,)), slots["source"])
        count = int(slots["source"].shape[0])
        require(TensorRule("target_slots", _SLOT_DTYPES, "[rows]", (count,)), slots["target"])
    check([COUNT_GUARD], {"rows": count}, name="source_slots")
    require_no_overlap({"target"}, given, {name: span_bytes(tensor) for name, tensor in given})
    arguments: dict[str, Number] = {"rows_count": count}
    for name, pool in pools.items():
        multiplier, shift = page_divisor(pool.page_size)
        arguments |= {
            name: pool.address,
            f"{name}_stride_bytes": pool.page_stride_bytes,
            f"{name}_slots": 0 if slots[name] is None else _address(slots[name]),
            f"{name}_wide": int(slots[name] is not None and slots[name].dtype is torch.int64),
            f"{name}_tokens": pool.tokens,
            f"{name}_page_size": pool.page_size,
            f"{name}_multiplier": multiplier,
            f"{name}_shift": shift,
        }
    return arguments


def check_slots(name: str, slots: torch.Tensor | None, pool_tokens: Number) -> None:
    """Refuse slots past the pool. Waits for the device."""
    if slots is None or not slots.numel():
        return
    bad = slots >= pool_tokens
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        values = {"slot": int(slots[row]), "pool_tokens": int(pool_tokens)}
        check([SLOT_GUARD], values, name=name, row=row, count=int(bad.sum()))


def check_table(t: Tensors, arguments: Mapping[str, Number]) -> None:
    """Refuse what a read's block table does not give: rows out of order, positions past its columns, absent pages.

    Rows behind the last request's are padding, a negative page is one that was given back. Waits for the device.
    """
    if t["block_table"] is None or not arguments["requests"]:
        return
    starts, rows = t["row_starts"].long(), int(arguments["rows_count"])
    least = torch.nn.functional.pad(starts[:-1].cummax(0).values, (1, 0))
    bad = (starts < least) | (starts > rows)
    if bool(bad.any()):
        request = int(bad.nonzero()[0])
        values = {"row_start": int(starts[request]), "least": int(least[request]), "rows": rows}
        check([ROW_STARTS_GUARD], values, request=request, count=int(bad.sum()))
    first = torch.zeros_like(starts[1:]) if t["token_starts"] is None else t["token_starts"].long()
    _check_reach(starts.diff(), first, arguments)
    _check_pages(t, starts, first, arguments)


def _check_reach(tokens: torch.Tensor, first: torch.Tensor, arguments: Mapping[str, Number]) -> None:
    columns = int(arguments["table_columns"])
    # Positions are int32.
    reach = min(columns * int(arguments["page_size"]), 1 << 31)
    bad = (tokens > 0) & ((first < 0) | (first + tokens > reach))
    if bool(bad.any()):
        request = int(bad.nonzero()[0])
        values = {"token_start": int(first[request]), "tokens": int(tokens[request]), "reach": reach}
        check([REACH_GUARD], values, request=request, columns=columns, count=int(bad.sum()))


def _check_pages(t: Tensors, starts: torch.Tensor, first: torch.Tensor, arguments: Mapping[str, Number]) -> None:
    pages = int(t["k_cache"].shape[0])
    row = torch.arange(int(starts[0]), int(starts[-1]), device=starts.device)
    request = torch.searchsorted(starts, row, right=True) - 1
    column = (first[request] + row - starts[request]) // int(arguments["page_size"])
    named = t["block_table"][request, column]
    bad = named >= pages
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        values = {"page": int(named[at]), "pages": pages}
        check([PAGE_GUARD], values, request=int(request[at]), column=int(column[at]), count=int(bad.sum()))


def _require_kinds(t: Tensors, needed: tuple[str, ...], driver: Driver) -> list[tuple[str, Any]]:
    """Plain tensors on one CUDA device, the needed ones among them."""
    given = [(name, tensor) for name, tensor in t.items() if tensor is not None or name in needed]
    for name, tensor in given:
        require_plain(name, tensor)
    first, tensor = next((name, tensor) for name, tensor in given if name == needed[0])
    if driver.ordinal(tensor.device) is None:
        raise GuardError(f"[T-03] {first}: on {tensor.device}, expected a CUDA device: move it with {first}.to('cuda')")
    for name, other in given:
        require_device(name, other, tensor.device, first)
        require_memory(name, other)
    return given


def _require_parts(t: Tensors, record: KvFormat) -> None:
    wanted = len(record.tensors) > 1
    if wanted == (t["kpe_cache"] is not None):
        return
    if wanted:
        raise GuardError(f"[T-17] kpe_cache: format {record.format_id} keeps rotary dims in their own tensor: pass it")
    raise GuardError(f"[T-17] kpe_cache: format {record.format_id} has one tensor: leave it out")


def _pool_arguments(t: Tensors, record: KvFormat) -> dict[str, Number]:
    pool = _pool("k_cache", t["k_cache"], record, record.segment("values").tensor)
    multiplier, shift = page_divisor(pool.page_size)
    arguments: dict[str, Number] = {
        "cache": pool.address,
        "page_stride_bytes": pool.page_stride_bytes,
        "rope_cache": 0,
        "rope_page_stride_bytes": 0,
        "pool_tokens": pool.tokens,
        "page_size": pool.page_size,
        "page_multiplier": multiplier,
        "page_shift": shift,
    }
    if t["kpe_cache"] is not None:
        rope = _pool("kpe_cache", t["kpe_cache"], record, record.segment("rope").tensor)
        check([SAME_POOL_GUARD], rope.same_pages(pool), name="kpe_cache", other="k_cache")
        arguments |= {"rope_cache": rope.address, "rope_page_stride_bytes": rope.page_stride_bytes}
    return arguments


def _pool(name: str, tensor: torch.Tensor, record: KvFormat, part: str | None = None) -> Pool:
    return checked_pool(name, tensor, record, record.cache_tensor(part), POOL_GUARDS)


def _read_rows(t: Tensors, rows: int | None) -> int:
    """How many rows a read gives: a slot list says it, a block table does not."""
    with_table = (t["block_table"], t["row_starts"], rows)
    if t["slots"] is not None:
        if any(item is not None for item in (*with_table, t["token_starts"])):
            raise GuardError("[T-17] slots: given with block_table, row_starts, token_starts or rows: pass either")
        require(TensorRule("slots", _SLOT_DTYPES, "[rows]", (None,)), t["slots"])
        return int(t["slots"].shape[0])
    if any(item is None for item in with_table):
        raise GuardError("[T-17] kv_read: pass slots, or block_table with row_starts and rows")
    count = require_int("rows", rows)
    if count < 0:
        raise GuardError(f"[T-17] rows: {count} is negative: pass how many rows row_starts ends with")
    require(TensorRule("block_table", ("int32",), "[requests, pages]", (None, None)), t["block_table"])
    requests, columns = (int(size) for size in t["block_table"].shape)
    check([TABLE_GUARD], {"requests": requests, "columns": columns})
    require(TensorRule("row_starts", ("int32",), "[requests + 1]", (requests + 1,)), t["row_starts"])
    if t["token_starts"] is not None:
        require(TensorRule("token_starts", ("int32",), "[requests]", (requests,)), t["token_starts"])
    return count


def _slot_arguments(slots: torch.Tensor | None) -> dict[str, Number]:
    if slots is None:
        return {"slots": 0, "slots_wide": 0}
    return {"slots": _address(slots), "slots_wide": int(slots.dtype is torch.int64)}


def _table_arguments(t: Tensors) -> dict[str, Number]:
    table, starts = t["block_table"], t["token_starts"]
    if table is None:
        names = ("block_table", "table_stride", "table_columns", "requests", "row_starts", "token_starts")
        return dict.fromkeys(names, 0)
    return {
        "block_table": table.data_ptr(),
        "table_stride": _row_stride(table),
        "table_columns": int(table.shape[1]),
        "requests": int(table.shape[0]),
        "row_starts": t["row_starts"].data_ptr(),
        "token_starts": 0 if starts is None else _address(starts),
    }


def _address(tensor: torch.Tensor) -> int:
    # An empty list has no address, and a null one would mean that there is none.
    return tensor.data_ptr() or 1


def _row_stride(tensor: torch.Tensor) -> int:
    return int(tensor.stride(0)) if tensor.shape[0] > 1 else 0


def _require_rows(name: str, tensor: torch.Tensor) -> None:
    check([COUNT_GUARD], {"rows": int(tensor.shape[0])}, name=name)
    stride = _row_stride(tensor) * tensor.element_size()
    check(ROW_GUARDS, {"address": tensor.data_ptr(), "row_stride_bytes": stride}, name=name)
