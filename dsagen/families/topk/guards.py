"""Every limit of top-k, stated once."""

from __future__ import annotations

from dsagen.guard import Guard

_BLOCK_GUARDS: tuple[Guard, ...] = (
    Guard(
        "K-01",
        "plan",
        "smem_bytes <= smem_optin_bytes",
        "shared memory: the plan needs {smem_bytes} B and a block may have {smem_optin_bytes} B: hold fewer scores",
    ),
    Guard(
        "K-02",
        "plan",
        "threads * registers_cap <= registers_per_sm",
        "registers: {threads} threads x {registers_cap} exceed the SM's {registers_per_sm}: use fewer warps",
    ),
    Guard(
        "TK-01",
        "plan",
        "threads % 32 == 0 and 32 <= threads and threads <= 1024",
        "block of {threads} threads: must be whole warps, at most 32",
    ),
    Guard(
        "TK-02",
        "plan",
        "1 <= digit_bits and digit_bits <= 12 and digit_bits <= key_bits",
        "digits of {digit_bits} bits for keys of {key_bits}: must be 1 to 12 and no more than the key has",
    ),
)
SELECT_GUARDS: tuple[Guard, ...] = (
    *_BLOCK_GUARDS,
    Guard(
        "TK-03",
        "plan",
        "threads * vector_scores <= 65535",
        "block of {threads} threads x {vector_scores} scores: their counts are summed in 16 bits each, use fewer "
        "threads",
    ),
    Guard(
        "TK-10",
        "plan",
        "1 <= in_flight and in_flight * vector_scores <= 32",
        "{in_flight} vectors of {vector_scores} scores in flight: a thread has a bit for each, so at most 32 scores",
    ),
    Guard(
        "TK-11",
        "plan",
        "bitmap_words % threads == 0 and 1 <= bitmap_words",
        "a bitmap of {bitmap_words} words: each of {threads} threads takes as many, so it must be a multiple",
    ),
    Guard(
        "TK-12",
        "plan",
        "1 <= elements and elements <= 32 * threads",
        "a list of {elements} elements: must be 1 to 32 for each of {threads} threads, which have a bit for each of "
        "theirs",
    ),
    Guard(
        "TK-19",
        "plan",
        "search_threads <= bins",
        "digits of {digit_bits} bits: {search_threads} threads search their {bins} bins, one each at least: use wider "
        "digits or fewer threads",
    ),
    Guard(
        "TK-18",
        "plan",
        "1 <= sampled and sampled * threads * vector_scores * elements <= 4294967295",
        "{sampled} vectors of {vector_scores} scores sampled by each of {threads} threads, and a list of {elements}: "
        "their product must be 1 to 4294967295, so sample fewer",
    ),
)
RESIDENT_GUARDS: tuple[Guard, ...] = (
    *SELECT_GUARDS,
    Guard(
        "TK-13",
        "plan",
        "words % (4 * in_flight) == 0 and 1 <= words and words <= 8 * in_flight",
        "{words} words a thread: must be one or two batches of {in_flight} vectors",
    ),
    Guard(
        "TK-15",
        "plan",
        "row_scores <= 32 * bitmap_words",
        "rows of {row_scores} scores: the bitmap of {bitmap_words} words is narrower",
    ),
)
CLUSTER_GUARDS: tuple[Guard, ...] = (
    *SELECT_GUARDS,
    Guard(
        "TK-24",
        "plan",
        "words % (4 * in_flight) == 0 and 1 <= words and 8 * words < in_flight * threads",
        "{words} words a thread: must be whole batches of {in_flight} vectors, fewer than {threads} threads have "
        "warps: one copies each, and another stores the ends",
    ),
    Guard(
        "TK-25",
        "plan",
        "at_once * threads <= elements",
        "{at_once} candidates in registers of each of {threads} threads: the list has {elements} places for those that "
        "are selected, so take fewer",
    ),
    Guard(
        "TK-26",
        "plan",
        "bins % (4 * threads) == 0",
        "digits of {digit_bits} bits: each of {threads} threads searches as many of their {bins} bins, 16 B at a time: "
        "use fewer threads",
    ),
)
PLAN_GUARDS: tuple[Guard, ...] = (*RESIDENT_GUARDS, *CLUSTER_GUARDS[len(SELECT_GUARDS) :])

CAPACITY_GUARD = Guard(
    "TK-04",
    "launch",
    "1 <= k and k <= topk_capacity",
    "k: {k}, the spec declares a capacity of {topk_capacity}: pass 1..{topk_capacity} or raise `topk` in the spec (of "
    "`extra_kv` where it has one)",
)
ROWS_GUARD = Guard(
    "TK-05",
    "launch",
    "0 <= rows and rows <= 2147483647",
    "scores: {rows} rows are outside 0..2147483647, and each takes a CTA: pass fewer at a time",
)
WIDTH_GUARD = Guard(
    "TK-06",
    "launch",
    "0 <= width and width <= 2147483647",
    "scores: rows of {width} are outside 0..2147483647, what int32 indices reach: pass narrower rows",
)
PAGE_GUARD = Guard(
    "TK-07",
    "launch",
    "1 <= page_size and page_size <= 1073741824",
    "page_size: {page_size} is outside 1..1073741824: pass how many indices an entry of page_table stands for",
)
TABLE_GUARD = Guard(
    "TK-08",
    "launch",
    "table_rows <= 2147483647 and table_columns <= 2147483647",
    "{name}: {table_rows} rows of {table_columns} columns exceed 2147483647: pass a smaller table",
)
# Of values on the device; they cost a wait, so only DSAGEN_CHECK_INDICES asks for them.
WINDOW_GUARD = Guard(
    "TK-09",
    "launch",
    "0 <= start and start <= width and length <= width - start",
    "window of row {row}: {length} scores from {start} leave the row's {width} ({count} rows do)",
)
TABLE_ROW_GUARD = Guard(
    "TK-20",
    "launch",
    "0 <= table_row and table_row < tables",
    "table_of_row[{row}] = {table_row}: page_table has {tables} rows, so they are below {tables} and not negative "
    "({count} outside)",
)
TABLE_REACH_GUARD = Guard(
    "TK-21",
    "launch",
    "0 <= start and start + entries <= columns",
    "{name}: row {row} reads {entries} entries from column {start} (table_starts), and a row of it has {columns}: pass "
    "a wider one or shorter windows ({count} rows do)",
)
ID_GUARD = Guard(
    "TK-22",
    "launch",
    "0 <= least and most <= 2147483647",
    "{name}: ids of row {row} may be {least}..{most}, outside 0..2147483647, what int32 holds: pass smaller pages or "
    "other offsets ({count} rows outside)",
)
# Which kernel takes a call: `lead` is by how many scores a window may start behind a multiple of 16 bytes.
FIT_GUARD = Guard(
    "TK-14",
    "launch",
    "width + lead <= row_scores",
    "rows of {width} scores, up to {lead} behind a multiple of 16 bytes: this kernel holds {row_scores}",
)
# Rows are shared among blocks where there are too few of them, each long enough for a part.
PARTS_GUARD = Guard(
    "TK-16",
    "launch",
    "3 <= parts",
    "rows of {row_bytes} B, {rows} in all, over {sm_count} SMs: {parts} of these a row, and two launches pay from 3 on",
)
# Rows of clusters run at once: those of a second wave would wait for whole rows.
CLUSTER_GUARD = Guard(
    "TK-23",
    "launch",
    "rows <= clusters and part_scores <= row_scores",
    "a cluster of {cluster} CTAs for each row, {rows} in all: the device holds {clusters} at once, and a CTA "
    "{row_scores} scores of the {part_scores} that are its part",
)
WORKSPACE_GUARD = Guard(
    "TK-17",
    "launch",
    "needed_bytes <= workspace_bytes and workspace_address % 16 == 0",
    "workspace: {workspace_bytes} B at {workspace_address:#x}, the plan needs {needed_bytes} B at a multiple of 16: "
    "pass what topk_workspace_bytes tells, from where an allocation begins, or none",
)
LAUNCH_GUARDS: tuple[Guard, ...] = (
    CAPACITY_GUARD,
    ROWS_GUARD,
    WIDTH_GUARD,
    PAGE_GUARD,
    TABLE_GUARD,
    WINDOW_GUARD,
    TABLE_ROW_GUARD,
    TABLE_REACH_GUARD,
    ID_GUARD,
    FIT_GUARD,
    PARTS_GUARD,
    CLUSTER_GUARD,
    WORKSPACE_GUARD,
)
