"""The argument blocks, member by member. Strides of rows are in elements, those of pages in bytes."""

from __future__ import annotations

from dsagen.plan import ParamField


def _pool(cache: str, rope_cache: str, target: str) -> tuple[ParamField, ...]:
    return (
        ParamField("cache", "pointer", cache, target),
        ParamField("page_stride_bytes", "i64", "distance between its pages"),
        ParamField("rope_cache", "pointer", rope_cache, target),
        ParamField("rope_page_stride_bytes", "i64", "distance between its pages"),
        ParamField("pool_tokens", "u32", "tokens of the pool; slots at or past it name nothing"),
        ParamField("page_size", "u32", "tokens of a page"),
        ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
        ParamField("page_shift", "u32", "ceil(log2(page_size))"),
    )


_ROPE = "rotary dims where they have a tensor of their own, else null"

WRITE_PARAMS: tuple[ParamField, ...] = (
    ParamField("rows", "pointer", "[rows_count, d_qk], or [rows_count, d_nope] beside k_pe", "const void"),
    ParamField("row_stride", "i64", "distance between rows"),
    ParamField("k_pe", "pointer", "[rows_count, d_rope] rotary dims, or null: they follow in rows", "const void"),
    ParamField("k_pe_stride", "i64", "distance between rows of k_pe"),
    ParamField("slots", "pointer", "int32 or int64 [rows_count]; negative: skip the row", "const void"),
    ParamField("slots_wide", "i32", "1: slots are int64"),
    ParamField("rows_count", "i32", "rows of the call"),
    *_pool("bytes of the pool", _ROPE, "u8"),
)

READ_PARAMS: tuple[ParamField, ...] = (
    ParamField("out", "pointer", "bf16 [rows_count, d_qk]", "void"),
    ParamField("out_stride", "i64", "distance between rows of out"),
    ParamField("slots", "pointer", "int32 or int64 [rows_count], or null: by the block table", "const void"),
    ParamField("slots_wide", "i32", "1: slots are int64"),
    ParamField("rows_count", "i32", "rows of the call"),
    ParamField("block_table", "pointer", "int32 [requests, table_columns] pages", "const i32"),
    ParamField("table_stride", "i64", "distance between rows of block_table"),
    ParamField("table_columns", "i32", "columns of block_table"),
    ParamField("requests", "i32", "rows of block_table"),
    ParamField("row_starts", "pointer", "int32 [requests + 1] first row of each request", "const i32"),
    ParamField("token_starts", "pointer", "int32 [requests] position of that row, or null: 0", "const i32"),
    *_pool("bytes of the pool", _ROPE, "const u8"),
)


def _side(name: str, slots: str, target: str) -> tuple[ParamField, ...]:
    return (
        ParamField(name, "pointer", f"bytes of the {name} pool", target),
        ParamField(f"{name}_stride_bytes", "i64", "distance between its pages"),
        ParamField(f"{name}_slots", "pointer", slots, "const void"),
        ParamField(f"{name}_wide", "i32", "1: those slots are int64"),
        ParamField(f"{name}_tokens", "u32", "tokens of that pool; slots at or past it name nothing"),
        ParamField(f"{name}_page_size", "u32", "tokens of one of its pages"),
        ParamField(f"{name}_multiplier", "u64", "division by that size"),
        ParamField(f"{name}_shift", "u32", "ceil(log2) of that size"),
    )


_CONVERT_SLOTS = "int32 or int64 [rows_count], or null: 0, 1, .."
CONVERT_PARAMS: tuple[ParamField, ...] = (
    ParamField("rows_count", "i32", "tokens of the call"),
    *_side("source", _CONVERT_SLOTS, "const u8"),
    *_side("target", _CONVERT_SLOTS, "u8"),
)
