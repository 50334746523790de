"""The argument block, member by member. Strides are in elements, those of q and of pages in bytes."""

from __future__ import annotations

from dsagen.plan import ParamField

PARAMS: tuple[ParamField, ...] = (
    ParamField("q", "pointer", "e4m3 [batch, next_n, heads, dim], last dim contiguous", "const u8"),
    ParamField("q_stride_b", "i64", "bytes between requests"),
    ParamField("q_stride_n", "i64", "bytes between tokens of a request"),
    ParamField("q_stride_h", "i64", "bytes between heads"),
    ParamField("k_cache", "pointer", "pages of the variant's key format", "const u8"),
    ParamField("page_stride_bytes", "i64", "distance between pages"),
    ParamField("pool_pages", "u32", "pages of the cache; a table entry from there on, or negative, means none"),
    ParamField("page_size", "u32", "keys of a page"),
    ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
    ParamField("page_shift", "u32", "ceil(log2(page_size))"),
    ParamField("wide_copies", "i32", "1: pages start at multiples of 16 bytes; 0: of 4"),
    ParamField("weights", "pointer", "fp32 [batch * next_n, heads], of either sign", "const float"),
    ParamField("weight_stride", "i64", "distance between rows of weights"),
    ParamField("lens", "pointer", "int32 [batch, next_n], or [batch]", "const i32"),
    ParamField("lens_stride_b", "i64", "distance between requests"),
    ParamField("lens_stride_n", "i64", "distance between tokens"),
    ParamField("per_token", "i32", "1: a length for each token; 0: for the last one of each request"),
    ParamField("most_keys", "i32", "bound of all lengths: columns of scores, and keys that a table row names"),
    ParamField("block_table", "pointer", "int32 [batch, columns] page numbers", "const i32"),
    ParamField("table_stride", "i64", "distance between rows of block_table"),
    ParamField("scores", "pointer", "[batch * next_n, width] of the variant's dtype", "void"),
    ParamField("score_stride", "i64", "distance between rows of scores"),
    ParamField("width", "i32", "columns of scores"),
    ParamField("batch", "i32", "requests"),
    ParamField("next_n", "i32", "tokens of a request"),
    ParamField("heads", "i32", "index heads"),
    ParamField("unit_tokens", "i32", "tokens of a request that share a pass over its keys"),
    ParamField("unit_count", "i32", "passes over the keys of a request: ceil(next_n / unit_tokens)"),
    ParamField("unscored", "i32", "tokens that see no more keys than this are left out; 0: none is"),
    ParamField("fills", "i32", "1: -inf into the columns behind each token's keys"),
    ParamField("blocks", "u32", "blocks of the grid"),
)
