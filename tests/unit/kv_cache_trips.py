"""What trips each guard of the cache ops: values, the complete message, the expression in C, values that hold, and what
only the message reads.
"""

POOL = {"pages": 2, "page_size": 64, "pool_tokens": 128, "page_bytes": 33792, "token_bytes": 528}
POOL |= {"address": 256, "page_stride_bytes": 33792, "row_stride_bytes": 528}
NAMED = {"name": "k_cache"}

KV_CACHE_TRIPS = {
    "K-02": (
        {"threads": 128, "registers_cap": 72, "min_blocks": 8, "registers_per_sm": 65536},
        "[K-02] registers: 8 blocks of 128 threads x 72 exceed the SM's 65536: use fewer",
        "((threads * registers_cap) * min_blocks) <= registers_per_sm",
        {"registers_cap": 64},
        {},
    ),
    "KV-01": (
        {"threads": 48},
        "[KV-01] block of 48 threads: must be whole warps, at most 32",
        "((threads % 32) == 0 && 32 <= threads && threads <= 1024)",
        {"threads": 64},
        {},
    ),
    "KV-02": (
        {"value_dims": 512, "group_dims": 48},
        "[KV-02] 512 dims in groups of 48: a lane takes 16 dims of one group, and a warp whole groups of a power of "
        "two of lanes",
        "((value_dims % 16) == 0 && (group_dims % 16) == 0 && (512 % group_dims) == 0)",
        {"group_dims": 64},
        {},
    ),
    "KV-03": (
        {"rows": 2**31},
        "[KV-03] slots: 2147483648 rows exceed 2147483647: pass fewer at a time",
        "rows <= 2147483647",
        {"rows": 2**31 - 1},
        {"name": "slots"},
    ),
    "KV-04": (
        {**POOL, "pages": 0},
        "[KV-04] k_cache: 0 pages of 64 tokens: at least one page of 1..1073741824 tokens is needed",
        "(pages >= 1 && 1 <= page_size && page_size <= 1073741824)",
        {"pages": 1},
        NAMED,
    ),
    "KV-05": (
        {**POOL, "pool_tokens": 2**31},
        "[KV-05] k_cache: 2147483648 tokens exceed 2147483647, what the division by the page size is exact for: pass a "
        "smaller pool",
        "pool_tokens <= 2147483647",
        {"pool_tokens": 2**31 - 1},
        NAMED,
    ),
    "KV-06": (
        {**POOL, "page_stride_bytes": 33800},
        "[KV-06] k_cache: page stride 33800 B is no multiple of 16 B: pad the pages",
        "(page_stride_bytes % 16) == 0",
        {"page_stride_bytes": 33808},
        NAMED,
    ),
    "KV-12": (
        {**POOL, "address": 264},
        "[KV-12] k_cache: base address 0x108 is no multiple of 16 B: pass a cache that begins at one: an allocation "
        "does, a view into it may not",
        "(address % 16) == 0",
        {"address": 256},
        NAMED,
    ),
    "KV-07": (
        {**POOL, "row_stride_bytes": 512},
        "[KV-07] k_cache: row stride 512 B and page stride 33792 B do not hold pages of 64 rows of 528 B (33792 B): "
        "rows of a page must be adjacent and pages must not overlap",
        "(row_stride_bytes == token_bytes && (pages == 1 || page_stride_bytes >= page_bytes))",
        {"row_stride_bytes": 528},
        NAMED,
    ),
    "KV-08": (
        {"address": 256, "row_stride_bytes": 1160},
        "[KV-08] rows: row stride 1160 B is no multiple of 16 B: pad the rows",
        "(row_stride_bytes % 16) == 0",
        {"row_stride_bytes": 1152},
        {"name": "rows"},
    ),
    "KV-13": (
        {"address": 264, "row_stride_bytes": 1152},
        "[KV-13] rows: address 0x108 is no multiple of 16 B: pass a tensor that begins at one: an allocation does, a "
        "view into it may not",
        "(address % 16) == 0",
        {"address": 256},
        {"name": "rows"},
    ),
    "KV-14": (
        {"row_start": 3, "least": 4, "rows": 9},
        "[KV-14] row_starts[2] = 3: the first rows of requests ascend from 0 to at most the call's 9 rows, so it is "
        "4..9 (1 outside)",
        "(least <= row_start && row_start <= rows)",
        {"row_start": 4},
        {"request": 2, "count": 1},
    ),
    "KV-15": (
        {"token_start": 60, "tokens": 5, "reach": 64},
        "[KV-15] block_table: request 1 reads 5 tokens from position 60 (token_starts), outside of its 4 pages, which "
        "hold 64 tokens: pass a wider table or fewer rows (2 requests do)",
        "(0 <= token_start && (token_start + tokens) <= reach)",
        {"tokens": 4},
        {"request": 1, "columns": 4, "count": 2},
    ),
    "KV-16": (
        {"page": 3, "pages": 3},
        "[KV-16] block_table[1, 0] = 3: the cache has 3 pages, so pages are below 3, or negative for one that was "
        "given back (2 rows read past it)",
        "page < pages",
        {"page": 2},
        {"request": 1, "column": 0, "count": 2},
    ),
    "KV-09": (
        {"requests": 2**31 - 1, "columns": 4},
        "[KV-09] block_table: 2147483647 rows of 4 columns exceed what int32 counts: pass a smaller table",
        "(requests <= 2147483646 && columns <= 2147483647)",
        {"requests": 2**31 - 2},
        {},
    ),
    "KV-10": (
        {"pages": 3, "page_size": 64, "other_pages": 4, "other_page_size": 64},
        "[KV-10] kpe_cache: 3 pages of 64 tokens, k_cache has 4 of 64: both tensors of a cache have the same pages",
        "(pages == other_pages && page_size == other_page_size)",
        {"pages": 4},
        {"name": "kpe_cache", "other": "k_cache"},
    ),
    "KV-11": (
        {"slot": 128, "pool_tokens": 128},
        "[KV-11] slots[3] = 128: the pool holds 128 tokens, so slots are below 128, or negative to skip a row (2 past "
        "it)",
        "slot < pool_tokens",
        {"slot": 127},
        {"name": "slots", "row": 3, "count": 2},
    ),
}
