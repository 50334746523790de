"""Every limit of the indexer's logits, stated once."""

from __future__ import annotations

from dsagen.guard import Guard

PLAN_GUARDS: tuple[Guard, ...] = (
    Guard(
        "K-01",
        "plan",
        "smem_bytes <= smem_optin_bytes",
        "shared memory: the plan needs {smem_bytes} B and a block may have {smem_optin_bytes} B: use fewer stages or "
        "rows of q",
    ),
    Guard(
        "K-02",
        "plan",
        "threads * registers_cap * per_sm <= registers_per_sm",
        "registers: {per_sm} blocks of {threads} threads x {registers_cap} exceed the SM's {registers_per_sm}: use "
        "fewer warps",
    ),
    Guard(
        "IL-01",
        "plan",
        "blocks == 2 or blocks == 4",
        "tile of {blocks} blocks of 16 keys: the four lanes of a row share 2 or 4 between them",
    ),
    Guard(
        "IL-02",
        "plan",
        "dim == 32 or dim == 64 or dim == 128",
        "index keys of {dim} dims: 32, 64 and 128 are built",
    ),
    Guard(
        "IL-03",
        "plan",
        "most_heads <= query_rows",
        "{query_rows} rows of q: a token of {most_heads} heads must fit",
    ),
    Guard(
        "IL-04",
        "plan",
        "1 <= stages and threads % 32 == 0 and threads <= 1024",
        "ring of {stages} stages in a block of {threads} threads: at least one stage, and whole warps, at most 32",
    ),
)

# Of the hopper body.
WARPGROUP_GUARDS: tuple[Guard, ...] = (
    Guard(
        "IL-40",
        "plan",
        "8 <= heads and heads <= 128 and heads % 8 == 0",
        "{heads} heads: products of a warpgroup have 8 to 128 columns in steps of 8",
    ),
    Guard(
        "IL-41",
        "plan",
        "threads % 128 == 0",
        "block of {threads} threads: whole warpgroups of 128 are needed",
    ),
    Guard(
        "IL-42",
        "plan",
        "1 <= tokens and tokens * token_rows <= query_rows",
        "image of {query_rows} rows: at least a token must fit, {tokens} of {token_rows} rows are to",
    ),
    Guard(
        "IL-46",
        "plan",
        "tokens * token_bytes + stage_bytes <= operands_bytes",
        "{operands_bytes} B of q and codes: q of {tokens} tokens, {token_bytes} B each, and a stage of {stage_bytes} B "
        "must fit",
    ),
)
# Of its kernel for keys in one piece.
RAGGED_WARPGROUP_GUARDS: tuple[Guard, ...] = (
    Guard(
        "IL-43",
        "plan",
        "72 <= queries * heads and queries * heads <= 128 and columns == queries * heads",
        "{queries} tokens of {heads} heads in products of {columns} columns: tokens with 72 to 128 rows between them "
        "are needed, and a column for each row",
    ),
    Guard(
        "IL-44",
        "plan",
        "1 <= ahead and ahead + 2 <= stages",
        "{ahead} of {stages} stages ahead: at least one, and two fewer than there are, since the groups of a pair are "
        "a tile apart",
    ),
    Guard(
        "IL-45",
        "plan",
        "threads % 256 == 0",
        "block of {threads} threads: pairs of warpgroups of 128 are needed",
    ),
)
_SHARED_WITH_HOPPER = ("K-01", "K-02", "IL-02", "IL-04")
HOPPER_PLAN_GUARDS: tuple[Guard, ...] = (
    *(guard for guard in PLAN_GUARDS if guard.guard_id in _SHARED_WITH_HOPPER),
    *WARPGROUP_GUARDS,
)
HOPPER_RAGGED_PLAN_GUARDS: tuple[Guard, ...] = (
    *(guard for guard in PLAN_GUARDS if guard.guard_id in _SHARED_WITH_HOPPER),
    *(guard for guard in WARPGROUP_GUARDS if guard.guard_id == "IL-40"),
    *RAGGED_WARPGROUP_GUARDS,
)

TOKENS_GUARD = Guard(
    "IL-05",
    "launch",
    "1 <= next_n and next_n <= 8 and batch * next_n <= 2147483647",
    "q: {batch} requests of {next_n} tokens: 1..8 tokens a request, at most 2147483647 in all",
)
WIDTH_GUARD = Guard(
    "IL-06",
    "launch",
    "0 <= width and width <= 2147483583",
    "max_seq_len: {width} is outside 0..2147483583, what the tiles of int32 positions reach",
)
TILES_GUARD = Guard(
    "IL-07",
    "launch",
    "tiles <= 2147483647",
    "{tiles} tiles of keys: {units} units of up to {width} keys each exceed 2147483647 tiles: pass fewer requests, or "
    "a smaller max_seq_len",
)
POOL_GUARDS = (
    Guard(
        "IL-08",
        "launch",
        "1 <= pages and pages <= 2147483647 and 1 <= page_size and page_size <= 1073741824",
        "{name}: {pages} pages of {page_size} keys: 1..2147483647 pages of 1..1073741824 keys are needed",
    ),
    Guard(
        "IL-09",
        "launch",
        "page_stride_bytes % 4 == 0",
        "{name}: page stride {page_stride_bytes} B is no multiple of 4 B: pad the pages",
    ),
    Guard(
        "IL-15",
        "launch",
        "address % 4 == 0",
        "{name}: base address {address:#x} is no multiple of 4 B: pass a cache that begins at one: an allocation does, "
        "a view into it may not",
    ),
    Guard(
        "IL-10",
        "launch",
        "row_stride_bytes == record_bytes and (pages == 1 or page_stride_bytes >= page_bytes)",
        "{name}: row stride {row_stride_bytes} B and page stride {page_stride_bytes} B do not hold pages of "
        "{page_size} keys of {record_bytes} B ({page_bytes} B): keys of a page must be adjacent and pages must not "
        "overlap",
    ),
)
QUERY_ADDRESS_GUARD = Guard(
    "IL-16",
    "launch",
    "address % 16 == 0",
    "q: address {address:#x} is no multiple of 16 B: pass a tensor that begins at one, such as q.clone()",
)
QUERY_GUARDS = (
    Guard(
        "IL-11",
        "launch",
        "stride_b % 16 == 0 and stride_n % 16 == 0 and stride_h % 16 == 0",
        "q: strides {stride_b}, {stride_n}, {stride_h} B: each head must start at a multiple of 16 B: pass "
        "q.contiguous()",
    ),
    QUERY_ADDRESS_GUARD,
)
TABLE_GUARD = Guard(
    "IL-12",
    "launch",
    "columns <= 2147483647",
    "block_table: rows of {columns} pages exceed 2147483647: pass a narrower table",
)
UNSCORED_GUARD = Guard(
    "IL-13",
    "launch",
    "0 <= unscored and unscored <= 2147483647",
    "unscored_up_to: {unscored} is outside 0..2147483647: pass the k of the selection that follows, or 0",
)
# Of values on the device; they cost a wait, so only DSAGEN_CHECK_INDICES asks for them.
LENGTH_GUARD = Guard(
    "IL-14",
    "launch",
    "length <= most_keys",
    "context_lens: token {token} of request {request} sees {length} keys, more than the {most_keys} of max_seq_len and "
    "block_table ({count} tokens do): pass a larger max_seq_len, or a wider table",
)
PAGE_GUARD = Guard(
    "IL-17",
    "launch",
    "page < pages",
    "block_table[{request}, {column}] = {page}: k_cache has {pages} pages, so entries are below {pages}, or negative "
    "for none ({count} past it)",
)
RAGGED_TOKENS_GUARD = Guard(
    "IL-20",
    "launch",
    "tokens <= 2147483647",
    "q: {tokens} tokens exceed 2147483647: pass fewer",
)
KEY_COUNT_GUARD = Guard(
    "IL-21",
    "launch",
    "keys <= 2147483583",
    "keys: {keys} exceed 2147483583, what the tiles of int32 positions reach: pass fewer",
)
RAGGED_TILES_GUARD = Guard(
    "IL-22",
    "launch",
    "tiles <= 2147483647",
    "{tiles} tiles of keys: {units} units that may see {keys} keys each exceed 2147483647 tiles: pass fewer tokens",
)
KEY_ROW_GUARDS = (
    Guard(
        "IL-23",
        "launch",
        "address % 4 == 0 and key_stride_bytes % 4 == 0",
        "keys: address {address:#x} and stride {key_stride_bytes} B: each key must start at a multiple of 4 B: pass "
        "keys.contiguous()",
    ),
    Guard(
        "IL-24",
        "launch",
        "key_stride_bytes == 0 or key_stride_bytes >= row_bytes",
        "keys: stride {key_stride_bytes} B does not hold codes of {row_bytes} B: keys must not overlap",
    ),
)
MAX_WINDOW_GUARD = Guard(
    "IL-25",
    "launch",
    "0 <= width and width <= 2147483583",
    "max_window: {width} is outside 0..2147483583: pass the longest window of the call",
)
RAGGED_STRIDES_GUARD = Guard(
    "IL-26",
    "launch",
    "stride_t % 16 == 0 and stride_h % 16 == 0",
    "q: strides {stride_t}, {stride_h} B: each head must start at a multiple of 16 B: pass q.contiguous()",
)
# Of values on the device, as IL-14.
WINDOW_GUARD = Guard(
    "IL-27",
    "launch",
    "0 <= start and start <= end and end <= keys",
    "starts, ends: token {token} sees keys {start} up to {end}, which must not decrease within 0..{keys}, the number "
    "of keys ({count} tokens do not fit)",
)
WINDOW_WIDTH_GUARD = Guard(
    "IL-28",
    "launch",
    "window <= width",
    "starts, ends: token {token} sees {window} keys, more than the {width} of max_window ({count} tokens do): pass a "
    "larger max_window",
)
BLOCK_SIZE_GUARD = Guard(
    "IL-30",
    "launch",
    "block_size == 8 or block_size == 16",
    "block_size: {block_size} keys of a candidate block, 8 and 16 are built: pass one of them",
)
SLOTS_GUARD = Guard(
    "IL-31",
    "launch",
    "slots * block_size <= 2147483583",
    "candidate_blocks: {slots} slots of {block_size} keys are more than the 2147483583 columns that tiles reach: pass "
    "fewer",
)
# Of values on the device, as IL-14.
BLOCK_GUARD = Guard(
    "IL-32",
    "launch",
    "block < blocks",
    "candidate_blocks[{row}, {slot}] = {block}: a row of block_table names {blocks} blocks of {block_size} keys, so "
    "entries are below {blocks}, or negative for none ({count} past it)",
)
# Of decode steps whose scores are counted for their top-k.
COUNTED_GUARD = Guard(
    "IL-33",
    "launch",
    "next_n <= counted",
    "histogram: {next_n} tokens of a request, and shared memory has room for counts of {counted} beside the keys' "
    "ring: leave it out, and top-k counts by itself",
)
LAUNCH_GUARDS: tuple[Guard, ...] = (
    TOKENS_GUARD,
    WIDTH_GUARD,
    TILES_GUARD,
    *POOL_GUARDS,
    *QUERY_GUARDS,
    TABLE_GUARD,
    UNSCORED_GUARD,
    LENGTH_GUARD,
    PAGE_GUARD,
    RAGGED_TOKENS_GUARD,
    KEY_COUNT_GUARD,
    RAGGED_TILES_GUARD,
    *KEY_ROW_GUARDS,
    MAX_WINDOW_GUARD,
    RAGGED_STRIDES_GUARD,
    WINDOW_GUARD,
    WINDOW_WIDTH_GUARD,
    BLOCK_SIZE_GUARD,
    SLOTS_GUARD,
    BLOCK_GUARD,
    COUNTED_GUARD,
)
# Those of them that only calls over keys in one piece are held to, and those that they share with the others.
RAGGED_ONLY = frozenset(f"IL-{number}" for number in range(20, 29))
SHARED_GUARDS = frozenset(("IL-13", "IL-16"))
# Those that only steps with counted scores are held to.
COUNTED_ONLY = frozenset(("IL-33",))
# Those that only calls over candidate blocks are held to, and those of paged calls that these are not.
CANDIDATES_ONLY = frozenset(("IL-30", "IL-31", "IL-32"))
NOT_OF_CANDIDATES = frozenset(("IL-06", "IL-13"))
