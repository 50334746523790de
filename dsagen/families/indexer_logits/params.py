"""The argument blocks, member by member. Strides are in elements, those of q, keys and pages in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from dsagen.index_format import IndexFormat
from dsagen.plan import ParamField

_SCORES = (
    ParamField("scores", "pointer", "[tokens, width] of the variant's dtype", "void"),
    ParamField("score_stride", "i64", "distance between rows of scores"),
    ParamField("width", "i32", "columns of scores"),
)
_CALL = (
    ParamField("heads", "i32", "index heads"),
    ParamField("unit_tokens", "i32", "neighbouring tokens that share a pass over keys"),
)
_LAST = (
    ParamField("unscored", "i32", "tokens that see no more keys than this are left out; 0: none is"),
    ParamField("fills", "i32", "1: -inf into the columns outside of each token's keys"),
    ParamField("blocks", "u32", "blocks of the grid"),
)
_WIDE = "1: rows of codes start at multiples of 16 bytes; 0: of 4"

_PAGED: tuple[ParamField, ...] = (
    ParamField("q", "pointer", "codes [batch, next_n, heads, bytes of dim], last dim contiguous", "const u8"),
    ParamField("q_stride_b", "i64", "bytes between requests"),
    ParamField("q_stride_n", "i64", "bytes between tokens of a request"),
    ParamField("q_stride_h", "i64", "bytes between heads"),
    ParamField("k_cache", "pointer", "pages of the variant's key format", "const u8"),
    ParamField("page_stride_bytes", "i64", "distance between pages"),
    ParamField("pool_pages", "u32", "pages of the cache; a table entry from there on, or negative, means none"),
    ParamField("page_size", "u32", "keys of a page"),
    ParamField("page_multiplier", "u64", "division by page_size: ceil(2^(31 + shift) / page_size)"),
    ParamField("page_shift", "u32", "ceil(log2(page_size))"),
    ParamField("wide_copies", "i32", _WIDE),
    ParamField("weights", "pointer", "fp32 [batch * next_n, heads], of either sign", "const float"),
    ParamField("weight_stride", "i64", "distance between rows of weights"),
    ParamField("lens", "pointer", "int32 [batch, next_n], or [batch]", "const i32"),
    ParamField("lens_stride_b", "i64", "distance between requests"),
    ParamField("lens_stride_n", "i64", "distance between tokens"),
    ParamField("per_token", "i32", "1: a length for each token; 0: for the last one of each request"),
    ParamField("most_keys", "i32", "bound of all lengths: columns of scores, and keys that a table row names"),
    ParamField("block_table", "pointer", "int32 [batch, columns] page numbers", "const i32"),
    ParamField("table_stride", "i64", "distance between rows of block_table"),
    *_SCORES,
    ParamField("batch", "i32", "requests"),
    ParamField("next_n", "i32", "tokens of a request"),
    *_CALL,
    ParamField("unit_count", "i32", "passes over the keys of a request: ceil(next_n / unit_tokens)"),
)
PAGED_PARAMS = (*_PAGED, *_LAST)
CANDIDATE_PARAMS = (
    *_PAGED,
    ParamField("candidates", "pointer", "int32 [tokens, slots] numbers of blocks, negative for none", "const i32"),
    ParamField("candidate_stride", "i64", "distance between rows of candidates"),
    ParamField("block_shift", "u32", "log2 of the keys of a block"),
    ParamField("blocks", "u32", "blocks of the grid"),
)
BLOCK_PARAMS = (
    *PAGED_PARAMS,
    ParamField("block_scores", "pointer", "[tokens, blocks] of the variant's dtype: the largest of 8 scores", "void"),
    ParamField("block_stride", "i64", "distance between rows of block_scores"),
    ParamField("block_counts", "pointer", "int32 [tokens], blocks that each token sees keys of", "i32"),
)
COUNTED_PARAMS = (
    *PAGED_PARAMS,
    ParamField(
        "histograms", "pointer", "[tokens, bins] of a top-k: scores by the first digit of their keys", "u32", kept=True
    ),
)
PAGED_SCALE_PARAMS: tuple[ParamField, ...] = (
    ParamField("q_scales", "pointer", "words of ue8m0 [batch, next_n, heads], last dim contiguous", "const u32"),
    ParamField("q_scale_stride_b", "i64", "distance between requests"),
    ParamField("q_scale_stride_n", "i64", "distance between tokens of a request"),
)
RAGGED_PARAMS: tuple[ParamField, ...] = (
    ParamField("q", "pointer", "codes [tokens, heads, bytes of dim], last dim contiguous", "const u8"),
    ParamField("q_stride_t", "i64", "bytes between tokens"),
    ParamField("q_stride_h", "i64", "bytes between heads"),
    ParamField("keys", "pointer", "codes [keys, bytes of dim], last dim contiguous", "const u8"),
    ParamField("key_stride_bytes", "i64", "distance between keys"),
    ParamField("scales", "pointer", "words [keys] of the variant's scales", "const u8"),
    ParamField("scale_stride_bytes", "i64", "distance between them"),
    ParamField("key_count", "i32", "keys"),
    ParamField("wide_copies", "i32", _WIDE),
    ParamField("weights", "pointer", "fp32 [tokens, heads], of either sign", "const float"),
    ParamField("weight_stride", "i64", "distance between rows of weights"),
    ParamField("starts", "pointer", "int32 [tokens], the first key that a token sees", "const i32"),
    ParamField("start_stride", "i64", "distance between them"),
    ParamField("ends", "pointer", "int32 [tokens], one past the last", "const i32"),
    ParamField("end_stride", "i64", "distance between them"),
    *_SCORES,
    ParamField("compressed", "i32", "1: column 0 of a row is its first key; 0: key 0"),
    ParamField("tokens", "i32", "rows of scores"),
    *_CALL,
    ParamField("unit_count", "i32", "passes over keys: ceil(tokens / unit_tokens)"),
    *_LAST,
)
RAGGED_SCALE_PARAMS: tuple[ParamField, ...] = (
    ParamField("q_scales", "pointer", "words of ue8m0 [tokens, heads], last dim contiguous", "const u32"),
    ParamField("q_scale_stride_t", "i64", "distance between tokens"),
)


_BY_FORM: Mapping[str, tuple[tuple[ParamField, ...], tuple[ParamField, ...]]] = {
    "paged": (PAGED_PARAMS, PAGED_SCALE_PARAMS),
    "ragged": (RAGGED_PARAMS, RAGGED_SCALE_PARAMS),
    "blocks": (BLOCK_PARAMS, PAGED_SCALE_PARAMS),
    "candidates": (CANDIDATE_PARAMS, PAGED_SCALE_PARAMS),
}


def params_of(record: IndexFormat, form: str, counts: bool = False) -> tuple[ParamField, ...]:
    """The block of a kernel for keys in that form, which has scales of q where keys have several.

    `counts`: of keys in pages, whose scores are counted.
    """
    params, scales = _BY_FORM[form]
    if counts:
        params = COUNTED_PARAMS
    return (*params, *(scales if record.is_block_scaled else ()))
