"""Argument blocks of the two kernels, member by member. Strides are in elements unless a name says bytes."""

from __future__ import annotations

from dsagen.plan import ParamField

_OUTPUT = (
    ParamField("out", "pointer", "bf16 [batch, s_q, heads, d_v], last dim contiguous", "u16"),
    ParamField("out_stride_b", "i64", "stride of batch"),
    ParamField("out_stride_s", "i64", "stride of s_q"),
    ParamField("out_stride_h", "i64", "stride of heads"),
    ParamField("lse", "pointer", "fp32 log-sum-exp, [batch, heads, s_q] by its strides", "float"),
    ParamField("lse_stride_b", "i64", "stride of batch"),
    ParamField("lse_stride_s", "i64", "stride of s_q"),
    ParamField("lse_stride_h", "i64", "stride of heads"),
    ParamField("attn_sink", "pointer", "fp32 [heads] natural-log sink logits, or null", "const float"),
    ParamField("lse_unit", "f32", "what a log2 unit is in the lse's base: ln 2, or 1 for base 2"),
    ParamField("empty_lse", "f32", "lse of a row without a valid token"),
)
_SIZES = (
    ParamField("s_q", "i32", "query tokens per request"),
    ParamField("heads", "i32", "query heads"),
    ParamField("num_splits", "i32", "splits of an index row; 1 writes out and lse, more write partials"),
)

MAIN_PARAMS: tuple[ParamField, ...] = (
    ParamField("q", "pointer", "bf16 [batch, s_q, heads, d_qk], last dim contiguous", "const u16"),
    ParamField("q_stride_b", "i64", "stride of batch"),
    ParamField("q_stride_s", "i64", "stride of s_q"),
    ParamField("q_stride_h", "i64", "stride of heads"),
    ParamField("kv", "pointer", "cache pool", "const u8"),
    ParamField("page_stride_bytes", "i64", "distance between pages"),
    ParamField("row_stride_bytes", "i64", "distance between tokens of a page"),
    ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
    ParamField("page_shift", "u32", "ceil(log2(page_size))"),
    ParamField("page_size", "u32", "tokens of a page"),
    ParamField("pool_tokens", "u32", "pages x page_size; ids at or past it are masked"),
    ParamField("head_groups", "i32", "CTAs that share a query token's heads"),
    ParamField("group_heads", "i32", "heads of a group; the last group may have fewer"),
    ParamField("topk", "i32", "columns of an index row"),
    ParamField("indices", "pointer", "int32 [batch, s_q, topk], page x page_size + slot, negative: none", "const i32"),
    ParamField("indices_stride_b", "i64", "stride of batch"),
    ParamField("indices_stride_s", "i64", "stride of s_q"),
    ParamField("topk_length", "pointer", "int32 live columns of a row, or null", "const i32"),
    ParamField("length_stride_b", "i64", "stride of batch"),
    ParamField("length_stride_s", "i64", "stride of s_q; 0 for one length per request"),
    ParamField("scale_log2", "f32", "softmax scale x log2(e)"),
    *_SIZES,
    *_OUTPUT,
    ParamField("lse_accum", "pointer", "fp32 [batch x s_q, num_splits, heads] base-2 partial lse", "float"),
    ParamField("o_accum", "pointer", "fp32 [batch x s_q, num_splits, heads, d_v] partial outputs", "float"),
)

COMBINE_PARAMS: tuple[ParamField, ...] = (
    ParamField("lse_accum", "pointer", "fp32 [batch x s_q, num_splits, heads] base-2 partial lse", "const float"),
    ParamField("o_accum", "pointer", "fp32 [batch x s_q, num_splits, heads, d_v] partial outputs", "const float"),
    *_SIZES,
    *_OUTPUT,
)
