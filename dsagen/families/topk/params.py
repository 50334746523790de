"""The argument block, member by member. Strides are in elements."""

from __future__ import annotations

from dsagen.plan import ParamField

PARAMS: tuple[ParamField, ...] = (
    ParamField("scores", "pointer", "[rows, width] of the variant's dtype, last dim contiguous", "const void"),
    ParamField("row_stride", "i64", "distance between rows"),
    ParamField("width", "i32", "elements of a row; no window leaves it"),
    ParamField("rows", "i32", "rows of scores and of outputs"),
    ParamField("row_step", "i32", "blocks of the grid: each takes every row_step-th row, where it takes several"),
    ParamField("k", "i32", "slots of an output row, all of them written"),
    ParamField("starts", "pointer", "int32 [rows] first element of each window, or null: 0", "const i32"),
    ParamField("lengths", "pointer", "int32 [rows] elements of each window, or null: to the row's end", "const i32"),
    ParamField("ordered", "i32", "1: slots follow the indices; 0: any order, of the same elements"),
    ParamField("drops_neg_inf", "i32", "1: only what exceeds -inf is selected"),
    ParamField("out", "pointer", "int32 [rows, k] ids, then -1", "i32"),
    ParamField("out_stride", "i64", "distance between output rows"),
    ParamField("raw", "pointer", "int32 [rows, k] indices before any transform, or null", "i32"),
    ParamField("raw_stride", "i64", "distance between rows of raw"),
    ParamField("counts", "pointer", "int32 [rows] how many were selected, or null", "i32"),
    ParamField("offsets", "pointer", "int32 [rows] added to each id, or null", "const i32"),
    ParamField("page_table", "pointer", "int32 [table_rows, table_columns] page numbers, or null", "const i32"),
    ParamField("table_stride", "i64", "distance between rows of page_table"),
    ParamField("table_rows", "i32", "rows of page_table"),
    ParamField("table_columns", "i32", "columns of page_table"),
    ParamField("table_of_row", "pointer", "int32 [rows] row of page_table, or null: the same row", "const i32"),
    ParamField("table_starts", "pointer", "int32 [rows] column of a window's first page, or null: 0", "const i32"),
    ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
    ParamField("page_shift", "u32", "ceil(log2(page_size))"),
    ParamField("page_size", "u32", "indices of a page"),
)
# Of the kernels that share a row among blocks, besides. All of the workspace is zeros between calls.
SPLIT_PARAMS: tuple[ParamField, ...] = (
    *PARAMS,
    ParamField("parts", "i32", "blocks that share a row"),
    ParamField("part_slots", "i32", "places of a part in the row's list where parts are selected from: k, in fours"),
    ParamField("histograms", "pointer", "[rows, bins] keys by their first digit", "u32", kept=True),
    ParamField(
        "counters", "pointer", "[rows, 2] elements in the row's list, blocks that have finished", "u32", kept=True
    ),
    ParamField("lists", "pointer", "[rows, list_stride] indices of elements", "i32"),
    ParamField("list_stride", "i64", "distance between lists, a multiple of 4"),
)
