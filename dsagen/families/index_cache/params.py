"""The argument blocks, member by member. Strides of keys are in elements, all others in bytes unless they say so."""

from __future__ import annotations

from dsagen.plan import ParamField


def _pool(target: str) -> tuple[ParamField, ...]:
    return (
        ParamField("cache", "pointer", "bytes of the pool", target),
        ParamField("page_stride_bytes", "i64", "distance between its pages"),
        ParamField("pool_tokens", "u32", "keys of the pool; slots at or past it name nothing"),
        ParamField("page_size", "u32", "keys of a page"),
        ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
        ParamField("page_shift", "u32", "ceil(log2(page_size))"),
        ParamField("wide_pages", "i32", "1: pages start at multiples of 16 bytes; 0: of 4"),
    )


WRITE_PARAMS: tuple[ParamField, ...] = (
    ParamField("keys", "pointer", "[at least rows_count, dim]", "const void"),
    ParamField("key_stride", "i64", "distance between keys, in elements"),
    ParamField("slots", "pointer", "int32 or int64 [rows_count]; negative: skip the key", "const void"),
    ParamField("slots_wide", "i32", "1: slots are int64"),
    ParamField("rows_count", "i32", "slots of the call"),
    *_pool("u8"),
)

GATHER_PARAMS: tuple[ParamField, ...] = (
    ParamField("codes", "pointer", "[rows_count, bytes of a key's codes]", "u8"),
    ParamField("code_stride_bytes", "i64", "distance between rows of codes"),
    ParamField("scales", "pointer", "[rows_count] scale words of 4 bytes", "u8"),
    ParamField("scale_stride_bytes", "i64", "distance between scale words"),
    ParamField("rows_count", "i32", "rows of the call"),
    ParamField("block_table", "pointer", "int32 [requests, table_columns] pages", "const i32"),
    ParamField("table_stride", "i64", "distance between rows of block_table, in elements"),
    ParamField("table_columns", "i32", "columns of block_table"),
    ParamField("requests", "i32", "rows of block_table"),
    ParamField("row_starts", "pointer", "int32 [requests + 1] first row of each request", "const i32"),
    ParamField("token_starts", "pointer", "int32 [requests] position of that row, or null: 0", "const i32"),
    *_pool("const u8"),
)
