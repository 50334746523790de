"""What trips each guard of the indexer's logits: values, the complete message, the expression in C, values that
hold, and what only the message reads.
"""

POOL = {"pages": 2, "page_size": 64, "address": 256, "page_stride_bytes": 8640, "row_stride_bytes": 132}
POOL |= {"record_bytes": 132, "page_bytes": 8448}
QUERY = {"address": 256, "stride_b": 8192, "stride_n": 8192, "stride_h": 128}
NAMED = {"name": "k_cache"}

INDEXER_TRIPS = {
    "K-01": (
        {"smem_bytes": 101377, "smem_optin_bytes": 101376},
        "[K-01] shared memory: the plan needs 101377 B and a block may have 101376 B: use fewer stages or rows of q",
        "smem_bytes <= smem_optin_bytes",
        {"smem_bytes": 101376},
        {},
    ),
    "K-02": (
        {"threads": 128, "registers_cap": 255, "per_sm": 3, "registers_per_sm": 65536},
        "[K-02] registers: 3 blocks of 128 threads x 255 exceed the SM's 65536: use fewer warps",
        "((threads * registers_cap) * per_sm) <= registers_per_sm",
        {"per_sm": 2},
        {},
    ),
    "IL-01": (
        {"blocks": 3},
        "[IL-01] tile of 3 blocks of 16 keys: the four lanes of a row share 2 or 4 between them",
        "(blocks == 2 || blocks == 4)",
        {"blocks": 4},
        {},
    ),
    "IL-02": (
        {"dim": 96},
        "[IL-02] index keys of 96 dims: 32, 64 and 128 are built",
        "(dim == 32 || dim == 64 || dim == 128)",
        {"dim": 64},
        {},
    ),
    "IL-03": (
        {"most_heads": 128, "query_rows": 127},
        "[IL-03] 127 rows of q: a token of 128 heads must fit",
        "most_heads <= query_rows",
        {"query_rows": 128},
        {},
    ),
    "IL-04": (
        {"stages": 0, "threads": 128},
        "[IL-04] ring of 0 stages in a block of 128 threads: at least one stage, and whole warps, at most 32",
        "(1 <= stages && (threads % 32) == 0 && threads <= 1024)",
        {"stages": 1},
        {},
    ),
    "IL-40": (
        {"heads": 136},
        "[IL-40] 136 heads: products of a warpgroup have 8 to 128 columns in steps of 8",
        "(8 <= heads && heads <= 128 && (heads % 8) == 0)",
        {"heads": 128},
        {},
    ),
    "IL-41": (
        {"threads": 192},
        "[IL-41] block of 192 threads: whole warpgroups of 128 are needed",
        "(threads % 128) == 0",
        {"threads": 128},
        {},
    ),
    "IL-42": (
        {"query_rows": 72, "tokens": 1, "token_rows": 80},
        "[IL-42] image of 72 rows: at least a token must fit, 1 of 80 rows are to",
        "(1 <= tokens && (tokens * token_rows) <= query_rows)",
        {"query_rows": 80},
        {},
    ),
    "IL-46": (
        {"tokens": 4, "token_bytes": 8192, "stage_bytes": 16384, "operands_bytes": 49151},
        "[IL-46] 49151 B of q and codes: q of 4 tokens, 8192 B each, and a stage of 16384 B must fit",
        "((tokens * token_bytes) + stage_bytes) <= operands_bytes",
        {"operands_bytes": 49152},
        {},
    ),
    "IL-43": (
        {"queries": 2, "heads": 72, "columns": 144},
        "[IL-43] 2 tokens of 72 heads in products of 144 columns: tokens with 72 to 128 rows between them are needed, "
        "and a column for each row",
        "(72 <= (queries * heads) && (queries * heads) <= 128 && columns == (queries * heads))",
        {"queries": 1, "columns": 72},
        {},
    ),
    "IL-44": (
        {"ahead": 2, "stages": 3},
        "[IL-44] 2 of 3 stages ahead: at least one, and two fewer than there are, since the groups of a pair are a "
        "tile apart",
        "(1 <= ahead && (ahead + 2) <= stages)",
        {"stages": 4},
        {},
    ),
    "IL-45": (
        {"threads": 384},
        "[IL-45] block of 384 threads: pairs of warpgroups of 128 are needed",
        "(threads % 256) == 0",
        {"threads": 512},
        {},
    ),
    "IL-05": (
        {"batch": 2, "next_n": 9},
        "[IL-05] q: 2 requests of 9 tokens: 1..8 tokens a request, at most 2147483647 in all",
        "(1 <= next_n && next_n <= 8 && (batch * next_n) <= 2147483647)",
        {"next_n": 8},
        {},
    ),
    "IL-06": (
        {"width": 2**31 - 64},
        "[IL-06] max_seq_len: 2147483584 is outside 0..2147483583, what the tiles of int32 positions reach",
        "(0 <= width && width <= 2147483583)",
        {"width": 2**31 - 65},
        {},
    ),
    "IL-07": (
        {"tiles": 2**31, "units": 2**21, "width": 65536},
        "[IL-07] 2147483648 tiles of keys: 2097152 units of up to 65536 keys each exceed 2147483647 tiles: pass fewer "
        "requests, or a smaller max_seq_len",
        "tiles <= 2147483647",
        {"tiles": 2**31 - 1},
        {},
    ),
    "IL-08": (
        {**POOL, "pages": 0},
        "[IL-08] k_cache: 0 pages of 64 keys: 1..2147483647 pages of 1..1073741824 keys are needed",
        "(1 <= pages && pages <= 2147483647 && 1 <= page_size && page_size <= 1073741824)",
        {"pages": 1},
        NAMED,
    ),
    "IL-09": (
        {**POOL, "page_stride_bytes": 8642},
        "[IL-09] k_cache: page stride 8642 B is no multiple of 4 B: pad the pages",
        "(page_stride_bytes % 4) == 0",
        {"page_stride_bytes": 8644},
        NAMED,
    ),
    "IL-15": (
        {**POOL, "address": 258},
        "[IL-15] k_cache: base address 0x102 is no multiple of 4 B: pass a cache that begins at one: an allocation "
        "does, a view into it may not",
        "(address % 4) == 0",
        {"address": 260},
        NAMED,
    ),
    "IL-10": (
        {**POOL, "page_stride_bytes": 8444},
        "[IL-10] k_cache: row stride 132 B and page stride 8444 B do not hold pages of 64 keys of 132 B (8448 B): keys "
        "of a page must be adjacent and pages must not overlap",
        "(row_stride_bytes == record_bytes && (pages == 1 || page_stride_bytes >= page_bytes))",
        {"page_stride_bytes": 8448},
        NAMED,
    ),
    "IL-11": (
        {**QUERY, "stride_h": 132},
        "[IL-11] q: strides 8192, 8192, 132 B: each head must start at a multiple of 16 B: pass q.contiguous()",
        "((stride_b % 16) == 0 && (stride_n % 16) == 0 && (stride_h % 16) == 0)",
        {"stride_h": 144},
        {},
    ),
    "IL-16": (
        {**QUERY, "address": 264},
        "[IL-16] q: address 0x108 is no multiple of 16 B: pass a tensor that begins at one, such as q.clone()",
        "(address % 16) == 0",
        {"address": 272},
        {},
    ),
    "IL-17": (
        {"page": 5, "pages": 5},
        "[IL-17] block_table[1, 2] = 5: k_cache has 5 pages, so entries are below 5, or negative for none (3 past it)",
        "page < pages",
        {"page": -1},
        {"request": 1, "column": 2, "count": 3},
    ),
    "IL-12": (
        {"columns": 2**31},
        "[IL-12] block_table: rows of 2147483648 pages exceed 2147483647: pass a narrower table",
        "columns <= 2147483647",
        {"columns": 2**31 - 1},
        {},
    ),
    "IL-13": (
        {"unscored": -1},
        "[IL-13] unscored_up_to: -1 is outside 0..2147483647: pass the k of the selection that follows, or 0",
        "(0 <= unscored && unscored <= 2147483647)",
        {"unscored": 0},
        {},
    ),
    "IL-14": (
        {"length": 129, "most_keys": 128},
        "[IL-14] context_lens: token 1 of request 3 sees 129 keys, more than the 128 of max_seq_len and block_table (2 "
        "tokens do): pass a larger max_seq_len, or a wider table",
        "length <= most_keys",
        {"length": 128},
        {"token": 1, "request": 3, "count": 2},
    ),
    "IL-20": (
        {"tokens": 2**31},
        "[IL-20] q: 2147483648 tokens exceed 2147483647: pass fewer",
        "tokens <= 2147483647",
        {"tokens": 2**31 - 1},
        {},
    ),
    "IL-21": (
        {"keys": 2**31 - 64},
        "[IL-21] keys: 2147483584 exceed 2147483583, what the tiles of int32 positions reach: pass fewer",
        "keys <= 2147483583",
        {"keys": 2**31 - 65},
        {},
    ),
    "IL-22": (
        {"tiles": 2**31, "units": 2**21, "keys": 65536},
        "[IL-22] 2147483648 tiles of keys: 2097152 units that may see 65536 keys each exceed 2147483647 tiles: pass "
        "fewer tokens",
        "tiles <= 2147483647",
        {"tiles": 2**31 - 1},
        {},
    ),
    "IL-23": (
        {"address": 256, "key_stride_bytes": 130, "row_bytes": 128},
        "[IL-23] keys: address 0x100 and stride 130 B: each key must start at a multiple of 4 B: pass "
        "keys.contiguous()",
        "((address % 4) == 0 && (key_stride_bytes % 4) == 0)",
        {"key_stride_bytes": 132},
        {},
    ),
    "IL-24": (
        {"address": 256, "key_stride_bytes": 124, "row_bytes": 128},
        "[IL-24] keys: stride 124 B does not hold codes of 128 B: keys must not overlap",
        "(key_stride_bytes == 0 || key_stride_bytes >= row_bytes)",
        {"key_stride_bytes": 128},
        {},
    ),
    "IL-25": (
        {"width": -1},
        "[IL-25] max_window: -1 is outside 0..2147483583: pass the longest window of the call",
        "(0 <= width && width <= 2147483583)",
        {"width": 0},
        {},
    ),
    "IL-26": (
        {"address": 256, "stride_t": 8192, "stride_h": 132},
        "[IL-26] q: strides 8192, 132 B: each head must start at a multiple of 16 B: pass q.contiguous()",
        "((stride_t % 16) == 0 && (stride_h % 16) == 0)",
        {"stride_h": 144},
        {},
    ),
    "IL-27": (
        {"start": 3, "end": 2, "keys": 9},
        "[IL-27] starts, ends: token 4 sees keys 3 up to 2, which must not decrease within 0..9, the number of keys (5 "
        "tokens do not fit)",
        "(0 <= start && start <= end && end <= keys)",
        {"end": 9},
        {"token": 4, "count": 5},
    ),
    "IL-28": (
        {"window": 65, "width": 64},
        "[IL-28] starts, ends: token 4 sees 65 keys, more than the 64 of max_window (5 tokens do): pass a larger "
        "max_window",
        "window <= width",
        {"window": 64},
        {"token": 4, "count": 5},
    ),
    "IL-30": (
        {"block_size": 12},
        "[IL-30] block_size: 12 keys of a candidate block, 8 and 16 are built: pass one of them",
        "(block_size == 8 || block_size == 16)",
        {"block_size": 16},
        {},
    ),
    "IL-31": (
        {"slots": 2**28, "block_size": 8},
        "[IL-31] candidate_blocks: 268435456 slots of 8 keys are more than the 2147483583 columns that tiles reach: "
        "pass fewer",
        "(slots * block_size) <= 2147483583",
        {"slots": 2**28 - 9},
        {},
    ),
    "IL-33": (
        {"next_n": 3, "counted": 2},
        "[IL-33] histogram: 3 tokens of a request, and shared memory has room for counts of 2 beside the keys' ring: "
        "leave it out, and top-k counts by itself",
        "next_n <= counted",
        {"next_n": 2},
        {},
    ),
    "IL-32": (
        {"block": 40, "blocks": 40},
        "[IL-32] candidate_blocks[3, 1] = 40: a row of block_table names 40 blocks of 8 keys, so entries are below 40, "
        "or negative for none (2 past it)",
        "block < blocks",
        {"block": 39},
        {"row": 3, "slot": 1, "block_size": 8, "count": 2},
    ),
}
