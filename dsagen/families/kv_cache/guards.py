"""Every limit of the cache ops, stated once."""

from __future__ import annotations

from dsagen.guard import Guard

PLAN_GUARDS: tuple[Guard, ...] = (
    Guard(
        "K-02",
        "plan",
        "threads * registers_cap * min_blocks <= registers_per_sm",
        "registers: {min_blocks} blocks of {threads} threads x {registers_cap} exceed the SM's {registers_per_sm}: use "
        "fewer",
    ),
    Guard(
        "KV-01",
        "plan",
        "threads % 32 == 0 and 32 <= threads and threads <= 1024",
        "block of {threads} threads: must be whole warps, at most 32",
    ),
    Guard(
        "KV-02",
        "plan",
        "value_dims % 16 == 0 and group_dims % 16 == 0 and 512 % group_dims == 0",
        "{value_dims} dims in groups of {group_dims}: a lane takes 16 dims of one group, and a warp whole groups of a "
        "power of two of lanes",
    ),
)

COUNT_GUARD = Guard(
    "KV-03",
    "launch",
    "rows <= 2147483647",
    "{name}: {rows} rows exceed 2147483647: pass fewer at a time",
)
POOL_GUARDS = (
    Guard(
        "KV-04",
        "launch",
        "pages >= 1 and 1 <= page_size and page_size <= 1073741824",
        "{name}: {pages} pages of {page_size} tokens: at least one page of 1..1073741824 tokens is needed",
    ),
    Guard(
        "KV-05",
        "launch",
        "pool_tokens <= 2147483647",
        "{name}: {pool_tokens} tokens exceed 2147483647, what the division by the page size is exact for: pass a "
        "smaller pool",
    ),
    Guard(
        "KV-06",
        "launch",
        "page_stride_bytes % 16 == 0",
        "{name}: page stride {page_stride_bytes} B is no multiple of 16 B: pad the pages",
    ),
    Guard(
        "KV-12",
        "launch",
        "address % 16 == 0",
        "{name}: base address {address:#x} is no multiple of 16 B: pass a cache that begins at one: an allocation "
        "does, a view into it may not",
    ),
    Guard(
        "KV-07",
        "launch",
        "row_stride_bytes == token_bytes and (pages == 1 or page_stride_bytes >= page_bytes)",
        "{name}: row stride {row_stride_bytes} B and page stride {page_stride_bytes} B do not hold pages of "
        "{page_size} rows of {token_bytes} B ({page_bytes} B): rows of a page must be adjacent and pages must "
        "not overlap",
    ),
)
ROW_GUARDS = (
    Guard(
        "KV-08",
        "launch",
        "row_stride_bytes % 16 == 0",
        "{name}: row stride {row_stride_bytes} B is no multiple of 16 B: pad the rows",
    ),
    Guard(
        "KV-13",
        "launch",
        "address % 16 == 0",
        "{name}: address {address:#x} is no multiple of 16 B: pass a tensor that begins at one: an allocation does, a "
        "view into it may not",
    ),
)
TABLE_GUARD = Guard(
    "KV-09",
    "launch",
    "requests <= 2147483646 and columns <= 2147483647",
    "block_table: {requests} rows of {columns} columns exceed what int32 counts: pass a smaller table",
)
SAME_POOL_GUARD = Guard(
    "KV-10",
    "launch",
    "pages == other_pages and page_size == other_page_size",
    "{name}: {pages} pages of {page_size} tokens, {other} has {other_pages} of {other_page_size}: both tensors of a "
    "cache have the same pages",
)
# Of values on the device; they cost a wait, so only DSAGEN_CHECK_INDICES asks for them.
SLOT_GUARD = Guard(
    "KV-11",
    "launch",
    "slot < pool_tokens",
    "{name}[{row}] = {slot}: the pool holds {pool_tokens} tokens, so slots are below {pool_tokens}, or negative to "
    "skip a row ({count} past it)",
)
# As the slots': what a block table says of the rows of a read.
ROW_STARTS_GUARD = Guard(
    "KV-14",
    "launch",
    "least <= row_start and row_start <= rows",
    "row_starts[{request}] = {row_start}: the first rows of requests ascend from 0 to at most the call's {rows} rows, "
    "so it is {least}..{rows} ({count} outside)",
)
REACH_GUARD = Guard(
    "KV-15",
    "launch",
    "0 <= token_start and token_start + tokens <= reach",
    "block_table: request {request} reads {tokens} tokens from position {token_start} (token_starts), outside of its "
    "{columns} pages, which hold {reach} tokens: pass a wider table or fewer rows ({count} requests do)",
)
PAGE_GUARD = Guard(
    "KV-16",
    "launch",
    "page < pages",
    "block_table[{request}, {column}] = {page}: the cache has {pages} pages, so pages are below {pages}, or negative "
    "for one that was given back ({count} rows read past it)",
)
LAUNCH_GUARDS: tuple[Guard, ...] = (
    COUNT_GUARD,
    *POOL_GUARDS,
    *ROW_GUARDS,
    TABLE_GUARD,
    SAME_POOL_GUARD,
    SLOT_GUARD,
    ROW_STARTS_GUARD,
    REACH_GUARD,
    PAGE_GUARD,
)
