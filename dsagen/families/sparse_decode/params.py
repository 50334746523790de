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

_QUERY = (
    ParamField("q", "pointer", "bf16 [batch, s_q, heads, d_qk], last dim contiguous", "const u16"),
    ParamField("q_stride_b", "i64", "stride of batch"),
    ParamField("q_stride_s", "i64", "stride of s_q"),
    ParamField("q_stride_h", "i64", "stride of heads"),
)
_GROUPS = (
    ParamField("head_groups", "i32", "CTAs that share a query token's heads"),
    ParamField("group_heads", "i32", "heads of a group; the last group may have fewer"),
)
_KV_HEAD_GROUPS = ParamField("kv_head_groups", "i32", "CTAs that share the query heads of a KV head")
_PARTIALS = (
    ParamField("lse_accum", "pointer", "fp32 [batch x s_q, num_splits, heads] base-2 partial lse", "float"),
    ParamField("o_accum", "pointer", "fp32 [batch x s_q, num_splits, heads, d_v] partial outputs", "float"),
)


def _pool(prefix: str) -> tuple[ParamField, ...]:
    """Arguments of a cache; `extra_` in front of those of the second one."""
    return (
        ParamField(f"{prefix}kv", "pointer", "cache pool", "const u8"),
        ParamField(f"{prefix}page_stride_bytes", "i64", "distance between pages"),
        ParamField(f"{prefix}row_stride_bytes", "i64", "distance between tokens of a page"),
        ParamField(f"{prefix}page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
        ParamField(f"{prefix}page_shift", "u32", "ceil(log2(page_size))"),
        ParamField(f"{prefix}page_size", "u32", "tokens of a page"),
        ParamField(f"{prefix}pool_tokens", "u32", "pages x page_size; ids at or past it are masked"),
    )


def _lists(prefix: str) -> tuple[ParamField, ...]:
    """Arguments of a cache's index rows."""
    indices = f"int32 [batch, s_q, {prefix}topk], page x page_size + slot, negative: none"
    return (
        ParamField(f"{prefix}topk", "i32", "columns of an index row"),
        ParamField(f"{prefix}indices", "pointer", indices, "const i32"),
        ParamField(f"{prefix}indices_stride_b", "i64", "stride of batch"),
        ParamField(f"{prefix}indices_stride_s", "i64", "stride of s_q"),
        ParamField(f"{prefix}topk_length", "pointer", "int32 live columns of a row, or null", "const i32"),
        ParamField(f"{prefix}length_stride_b", "i64", "stride of batch"),
        ParamField(f"{prefix}length_stride_s", "i64", "stride of s_q; 0 for one length per request"),
    )


def _part(prefix: str) -> tuple[ParamField, ...]:
    """Arguments of what a row has elsewhere."""
    return (
        ParamField(f"{prefix}kv_part", "pointer", "second part of token 0 of page 0", "const u8"),
        ParamField(f"{prefix}part_page_stride_bytes", "i64", "distance between pages of second parts"),
        ParamField(f"{prefix}part_row_stride_bytes", "i64", "distance between second parts of a page"),
    )


def _kv_heads(prefix: str, has_part: bool) -> tuple[ParamField, ...]:
    """Arguments of a cache of several KV heads."""
    return (
        ParamField(f"{prefix}head_stride_bytes", "i64", "distance between a token's rows of two KV heads"),
        ParamField(f"{prefix}indices_stride_kv", "i64", "stride of KV heads; 0 where they share a list"),
        ParamField(f"{prefix}length_stride_kv", "i64", "stride of KV heads; 0 where they share a length"),
        *(
            (ParamField(f"{prefix}part_head_stride_bytes", "i64", "distance between second parts of two KV heads"),)
            if has_part
            else ()
        ),
    )


def main_params(
    has_part: bool, has_extra: bool, extra_has_part: bool, kv_heads: bool = False
) -> tuple[ParamField, ...]:
    """The main kernel's arguments: those of rows with a second part, of a second cache and of several KV heads only
    where there is one.
    """
    return (
        *_QUERY,
        *_pool(""),
        *_GROUPS,
        *_lists(""),
        ParamField("scale_log2", "f32", "softmax scale x log2(e)"),
        *_SIZES,
        *_OUTPUT,
        *_PARTIALS,
        *(_part("") if has_part else ()),
        *((*_pool("extra_"), *_lists("extra_")) if has_extra else ()),
        *(_part("extra_") if extra_has_part else ()),
        *((_KV_HEAD_GROUPS, *_kv_heads("", has_part)) if kv_heads else ()),
        *(_kv_heads("extra_", extra_has_part) if kv_heads and has_extra else ()),
    )


COMBINE_PARAMS: tuple[ParamField, ...] = (
    ParamField("lse_accum", "pointer", "fp32 [batch x s_q, num_splits, heads] base-2 partial lse", "const float"),
    ParamField("o_accum", "pointer", "fp32 [batch x s_q, num_splits, heads, d_v] partial outputs", "const float"),
    *_SIZES,
    *_OUTPUT,
)
