"""Every limit of sparse decode, stated once."""

from __future__ import annotations

from dsagen.guard import Guard

PLAN_GUARDS: tuple[Guard, ...] = (
    Guard(
        "K-01",
        "plan",
        "smem_bytes <= smem_optin_bytes",
        "shared memory: the plan needs {smem_bytes} B and a block may have {smem_optin_bytes} B: "
        "use fewer stages, a smaller tile or fewer heads in a CTA",
    ),
    Guard(
        "K-02",
        "plan",
        "threads * registers_cap <= registers_per_sm",
        "registers: {threads} threads x {registers_cap} exceed the SM's {registers_per_sm}: use fewer warps",
    ),
    Guard(
        "SD-01",
        "plan",
        "stages > tile_stages and producers <= stages",
        "stages {stages}: a tile of {tile_stages} stages needs one more than that, and {producers} producers one each, "
        "or the ring deadlocks",
    ),
    Guard(
        "SD-15",
        "plan",
        "moved_registers <= compiled_registers",
        "registers: the roles ask for {moved_registers} of the {compiled_registers} that the kernel is compiled with, "
        "so the last to ask would wait forever",
    ),
    Guard(
        "SD-02",
        "plan",
        "tile_tokens % 32 == 0 and spare_heads >= 1",
        "tile of {tile_tokens} tokens: must be a multiple of 32 that the score warps cover",
    ),
    Guard(
        "SD-03",
        "plan",
        "8 <= heads_n and heads_n <= 64 and heads_n % 8 == 0",
        "heads in a CTA: {heads_n} must be a multiple of 8 in 8..64",
    ),
    Guard(
        "SD-18",
        "plan",
        "d_qk % 64 == 0 and d_v % 128 == 0 and d_v <= 512",
        "rows of d_qk {d_qk} and d_v {d_v}: d_qk must be a multiple of 64, and d_v, which is dealt to warps, 128, 256, "
        "384 or 512: no kernel takes other widths",
    ),
    Guard(
        "SD-05",
        "plan",
        "row_bytes % 16 == 0 and row_pitch_bytes % 32 == 16",
        "row of {row_bytes} B at pitch {row_pitch_bytes} B: rows are copied 16 B at a time and the pitch must be an "
        "odd multiple of 16 B to be free of bank conflicts",
    ),
)

# Of how a spec's heads are dealt to CTAs, before any kernel is planned.
DEAL_GUARD = Guard(
    "SD-27",
    "plan",
    "kv_head_groups <= 2 * least_groups",
    "heads: {heads} of {kv_heads} KV heads are {heads_each} each, of which a CTA holds {most_heads}: equal parts take "
    "{kv_head_groups} CTAs where {least_groups} would do: pad each KV head's query heads to a multiple of "
    "{least_groups}",
)

LAUNCH_GUARDS: tuple[Guard, ...] = (
    Guard(
        "SD-04",
        "launch",
        "num_splits <= all_tiles",
        "num_splits {num_splits}: {columns} index columns in tiles of {tile_tokens} tokens are {all_tiles} tiles, so "
        "at least one split could never hold a token. Use num_splits <= {all_tiles}",
    ),
    Guard(
        "SD-06",
        "launch",
        "1 <= topk and topk <= topk_capacity",
        "{name}: {topk} columns, the spec declares topk {topk_capacity}: pass 1..{topk_capacity} columns or raise "
        "`topk` in the spec",
    ),
    Guard(
        "SD-16",
        "launch",
        "0 <= extra_topk and extra_topk <= extra_topk_capacity",
        "{name}: {extra_topk} columns, the spec declares extra_kv.topk {extra_topk_capacity}: pass "
        "0..{extra_topk_capacity} columns or raise it in the spec (without extra_kv there are 0)",
    ),
    Guard(
        "SD-07",
        "launch",
        "heads == spec_heads",
        "q: {heads} heads, the spec declares {spec_heads}: pass q with {spec_heads} heads or load a spec for {heads}",
    ),
    Guard(
        "SD-08",
        "launch",
        "main_ctas <= 2147483647 and combine_ctas <= 2147483647",
        "grid: {main_ctas} CTAs (combine {combine_ctas}) exceed 2147483647: use fewer splits or a smaller batch",
    ),
    Guard(
        "SD-29",
        "launch",
        "launches == 2 or num_splits == 1 or can_join == 1 and 8 % num_splits == 0",
        "one launch: {num_splits} splits (can_join {can_join}): take two, or 2, 4 or 8 splits of hopper, all "
        "heads in a CTA",
    ),
    Guard(
        "SD-13",
        "launch",
        "q_stride_b % 8 == 0 and q_stride_s % 8 == 0 and q_stride_h % 8 == 0",
        "q: strides ({q_stride_b}, {q_stride_s}, {q_stride_h}) elements: rows must start at multiples of 16 B, so "
        "strides must be multiples of 8 elements: pass q.contiguous(), or pad its rows",
    ),
    Guard(
        "SD-25",
        "launch",
        "q_address % 16 == 0",
        "q: address {q_address:#x} is no multiple of 16 B: pass a tensor that begins at one, such as q.clone()",
    ),
    Guard(
        "SD-14",
        "launch",
        "out_stride_b % 2 == 0 and out_stride_s % 2 == 0 and out_stride_h % 2 == 0",
        "out: strides ({out_stride_b}, {out_stride_s}, {out_stride_h}) elements: rows must start at multiples of 4 B, "
        "so strides must be even: pad its rows, or leave it out",
    ),
    Guard(
        "SD-26",
        "launch",
        "out_address % 4 == 0",
        "out: address {out_address:#x} is no multiple of 4 B: pass a tensor that begins at one, or leave it out",
    ),
)

# Of each tensor of a cache, which the messages name.
POOL_GUARDS: tuple[Guard, ...] = (
    Guard(
        "SD-09",
        "launch",
        "pool_tokens <= 2147483647",
        "{name}: {pool_tokens} tokens cannot be addressed by int32 indices, at most 2147483647 can: pass a smaller "
        "pool",
    ),
    Guard(
        "SD-10",
        "launch",
        "pages >= 1 and 1 <= page_size and page_size <= 1073741824",
        "{name}: {pages} pages of {page_size} tokens: at least one page of 1..1073741824 tokens is needed",
    ),
    Guard(
        "SD-11",
        "launch",
        "page_stride_bytes % 16 == 0",
        "{name}: page stride {page_stride_bytes} B is no multiple of 16 B: pad the pages",
    ),
    Guard(
        "SD-24",
        "launch",
        "address % 16 == 0",
        "{name}: base address {address:#x} is no multiple of 16 B: pass a cache that begins at one: an allocation "
        "does, a view into it may not",
    ),
    Guard(
        "SD-12",
        "launch",
        "row_stride_bytes == token_bytes and (pages == 1 or page_stride_bytes >= page_bytes)",
        "{name}: token stride {row_stride_bytes} B and page stride {page_stride_bytes} B do not hold pages of "
        "{page_size} tokens of {token_bytes} B ({page_bytes} B): tokens of a page must be adjacent and pages must not "
        "overlap",
    ),
)
# Of a cache of several KV heads: those of a token side by side, or each KV head's rows of a page.
KV_HEADS_GUARD = Guard(
    "SD-28",
    "launch",
    "token_stride_bytes == kv_heads * row_bytes and head_stride_bytes == row_bytes "
    "or token_stride_bytes == row_bytes and head_stride_bytes == page_size * row_bytes",
    "{name}: token stride {token_stride_bytes} B and KV-head stride {head_stride_bytes} B with rows of {row_bytes} B: "
    "a page holds either the {kv_heads} rows of each token side by side, or the {page_size} rows of each KV head",
)
SAME_PAGES_GUARD = Guard(
    "SD-17",
    "launch",
    "pages == other_pages and page_size == other_page_size",
    "{name}: {pages} pages of {page_size} tokens, {other} has {other_pages} of {other_page_size}: both tensors of a "
    "cache have the same pages",
)

# Of a call's sizes, before any kernel is weighed.
SIZE_GUARD = Guard(
    "SD-00",
    "launch",
    "least <= size and size <= 2147483647",
    "{name}: {size} is outside {least}..2147483647: pass {meaning}",
)
# Of a kernel that is loaded, where its splits are clusters.
CLUSTER_GUARD = Guard(
    "SD-30",
    "launch",
    "clusters >= 1",
    "one launch: this process may use too few multiprocessors of the device for a cluster of {num_splits} CTAs: set "
    "DSAGEN_SPARSE_DECODE_LAUNCHES=2",
)
WORKSPACE_GUARD = Guard(
    "SD-23",
    "launch",
    "workspace_bytes >= needed_bytes and workspace_address % 256 == 0",
    "workspace: {workspace_bytes} B at {workspace_address:#x}, the plan needs {needed_bytes} B at a multiple of 256 B: "
    "pass what sparse_decode_workspace_bytes tells, from where an allocation begins, or none",
)
# Of values on the device; they cost a wait, so only DSAGEN_CHECK_INDICES asks for them.
LENGTH_GUARD = Guard(
    "SD-21",
    "launch",
    "0 <= length and length <= topk",
    "{name}{place} = {length}: the index rows have {topk} columns, so lengths are 0..{topk} ({count} outside)",
)
INDEX_GUARD = Guard(
    "SD-22",
    "launch",
    "token_id < pool_tokens",
    "{name}{place} = {token_id}: {cache} holds {pool_tokens} tokens, so ids are below {pool_tokens}, or negative for "
    "padding ({count} past it)",
)
ARGUMENT_GUARDS: tuple[Guard, ...] = (
    *POOL_GUARDS,
    KV_HEADS_GUARD,
    SAME_PAGES_GUARD,
    SIZE_GUARD,
    CLUSTER_GUARD,
    WORKSPACE_GUARD,
    LENGTH_GUARD,
    INDEX_GUARD,
)
