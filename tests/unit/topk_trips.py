"""What trips each guard of top-k: values, message, expression in C, values that hold, what only the message reads."""

TOPK_TRIPS = {
    "K-01": (
        {"smem_bytes": 101377, "smem_optin_bytes": 101376},
        "[K-01] shared memory: the plan needs 101377 B and a block may have 101376 B: hold fewer scores",
        "smem_bytes <= smem_optin_bytes",
        {"smem_bytes": 101376},
    ),
    "K-02": (
        {"threads": 1024, "registers_cap": 65, "registers_per_sm": 65536},
        "[K-02] registers: 1024 threads x 65 exceed the SM's 65536: use fewer warps",
        "(threads * registers_cap) <= registers_per_sm",
        {"registers_cap": 64},
    ),
    "TK-01": (
        {"threads": 1040},
        "[TK-01] block of 1040 threads: must be whole warps, at most 32",
        "((threads % 32) == 0 && 32 <= threads && threads <= 1024)",
        {"threads": 1024},
    ),
    "TK-02": (
        {"digit_bits": 13, "key_bits": 32},
        "[TK-02] digits of 13 bits for keys of 32: must be 1 to 12 and no more than the key has",
        "(1 <= digit_bits && digit_bits <= 12 && digit_bits <= key_bits)",
        {"digit_bits": 12},
    ),
    "TK-03": (
        {"threads": 1024, "vector_scores": 64},
        "[TK-03] block of 1024 threads x 64 scores: their counts are summed in 16 bits each, use fewer threads",
        "(threads * vector_scores) <= 65535",
        {"vector_scores": 63},
    ),
    "TK-10": (
        {"in_flight": 5, "vector_scores": 8},
        "[TK-10] 5 vectors of 8 scores in flight: a thread has a bit for each, so at most 32 scores",
        "(1 <= in_flight && (in_flight * vector_scores) <= 32)",
        {"in_flight": 4},
    ),
    "TK-11": (
        {"bitmap_words": 1536, "threads": 1024},
        "[TK-11] a bitmap of 1536 words: each of 1024 threads takes as many, so it must be a multiple",
        "((bitmap_words % threads) == 0 && 1 <= bitmap_words)",
        {"bitmap_words": 2048},
    ),
    "TK-12": (
        {"elements": 4097, "threads": 128},
        "[TK-12] a list of 4097 elements: must be 1 to 32 for each of 128 threads, which have a bit for each of theirs",
        "(1 <= elements && elements <= (32 * threads))",
        {"elements": 4096},
    ),
    "TK-19": (
        {"search_threads": 1024, "bins": 512, "digit_bits": 9},
        "[TK-19] digits of 9 bits: 1024 threads search their 512 bins, one each at least: use wider digits or "
        "fewer threads",
        "search_threads <= bins",
        {"bins": 1024},
    ),
    "TK-18": (
        {"sampled": 256, "threads": 1024, "vector_scores": 4, "elements": 4096},
        "[TK-18] 256 vectors of 4 scores sampled by each of 1024 threads, and a list of 4096: their product must "
        "be 1 to 4294967295, so sample fewer",
        "(1 <= sampled && (((sampled * threads) * vector_scores) * elements) <= 4294967295)",
        {"sampled": 255},
    ),
    "TK-13": (
        {"words": 36, "in_flight": 3},
        "[TK-13] 36 words a thread: must be one or two batches of 3 vectors",
        "((words % (4 * in_flight)) == 0 && 1 <= words && words <= (8 * in_flight))",
        {"words": 24},
    ),
    "TK-15": (
        {"row_scores": 32769, "bitmap_words": 1024},
        "[TK-15] rows of 32769 scores: the bitmap of 1024 words is narrower",
        "row_scores <= (32 * bitmap_words)",
        {"row_scores": 32768},
    ),
    "TK-24": (
        {"words": 64, "in_flight": 2, "threads": 256},
        "[TK-24] 64 words a thread: must be whole batches of 2 vectors, fewer than 256 threads have warps: one copies "
        "each, and another stores the ends",
        "((words % (4 * in_flight)) == 0 && 1 <= words && (8 * words) < (in_flight * threads))",
        {"words": 56},
    ),
    "TK-25": (
        {"at_once": 9, "threads": 512, "elements": 4096},
        "[TK-25] 9 candidates in registers of each of 512 threads: the list has 4096 places for those that are "
        "selected, so take fewer",
        "(at_once * threads) <= elements",
        {"at_once": 8},
    ),
    "TK-26": (
        {"bins": 2048, "threads": 1024, "digit_bits": 11},
        "[TK-26] digits of 11 bits: each of 1024 threads searches as many of their 2048 bins, 16 B at a time: use "
        "fewer threads",
        "(bins % (4 * threads)) == 0",
        {"threads": 512},
    ),
    "TK-04": (
        {"k": 2049, "topk_capacity": 2048},
        "[TK-04] k: 2049, the spec declares a capacity of 2048: pass 1..2048 or raise `topk` in the spec (of "
        "`extra_kv` where it has one)",
        "(1 <= k && k <= topk_capacity)",
        {"k": 2048},
    ),
    "TK-05": (
        {"rows": 2**31},
        "[TK-05] scores: 2147483648 rows are outside 0..2147483647, and each takes a CTA: pass fewer at a time",
        "(0 <= rows && rows <= 2147483647)",
        {"rows": 2**31 - 1},
    ),
    "TK-06": (
        {"width": 2**31},
        "[TK-06] scores: rows of 2147483648 are outside 0..2147483647, what int32 indices reach: pass narrower rows",
        "(0 <= width && width <= 2147483647)",
        {"width": 2**31 - 1},
    ),
    "TK-07": (
        {"page_size": 0},
        "[TK-07] page_size: 0 is outside 1..1073741824: pass how many indices an entry of page_table stands for",
        "(1 <= page_size && page_size <= 1073741824)",
        {"page_size": 1},
    ),
    "TK-08": (
        {"table_rows": 2, "table_columns": 2**31},
        "[TK-08] page_table: 2 rows of 2147483648 columns exceed 2147483647: pass a smaller table",
        "(table_rows <= 2147483647 && table_columns <= 2147483647)",
        {"table_columns": 2**31 - 1},
        {"name": "page_table"},
    ),
    "TK-09": (
        {"start": 3, "length": 8, "width": 10},
        "[TK-09] window of row 5: 8 scores from 3 leave the row's 10 (2 rows do)",
        "(0 <= start && start <= width && length <= (width - start))",
        {"length": 7},
        {"row": 5, "count": 2},
    ),
    "TK-20": (
        {"table_row": 7, "tables": 7},
        "[TK-20] table_of_row[2] = 7: page_table has 7 rows, so they are below 7 and not negative (3 outside)",
        "(0 <= table_row && table_row < tables)",
        {"table_row": 6},
        {"row": 2, "count": 3},
    ),
    "TK-21": (
        {"start": 2, "entries": 8, "columns": 9},
        "[TK-21] candidate_blocks: row 1 reads 8 entries from column 2 (table_starts), and a row of it has 9: pass "
        "a wider one or shorter windows (1 rows do)",
        "(0 <= start && (start + entries) <= columns)",
        {"start": 1},
        {"name": "candidate_blocks", "row": 1, "count": 1},
    ),
    "TK-22": (
        {"least": 0, "most": 2**31},
        "[TK-22] page_table: ids of row 4 may be 0..2147483648, outside 0..2147483647, what int32 holds: pass "
        "smaller pages or other offsets (1 rows outside)",
        "(0 <= least && most <= 2147483647)",
        {"most": 2**31 - 1},
        {"name": "page_table", "row": 4, "count": 1},
    ),
    "TK-14": (
        {"width": 32766, "lead": 3, "row_scores": 32768},
        "[TK-14] rows of 32766 scores, up to 3 behind a multiple of 16 bytes: this kernel holds 32768",
        "(width + lead) <= row_scores",
        {"width": 32765},
    ),
    "TK-16": (
        {"parts": 2},
        "[TK-16] rows of 524288 B, 66 in all, over 132 SMs: 2 of these a row, and two launches pay from 3 on",
        "3 <= parts",
        {"parts": 3},
        {"rows": 66, "row_bytes": 524288, "sm_count": 132},
    ),
    "TK-23": (
        {"rows": 15, "clusters": 15, "part_scores": 40000, "row_scores": 32768},
        "[TK-23] a cluster of 8 CTAs for each row, 15 in all: the device holds 15 at once, and a CTA 32768 scores of "
        "the 40000 that are its part",
        "(rows <= clusters && part_scores <= row_scores)",
        {"part_scores": 32768},
        {"cluster": 8},
    ),
    "TK-17": (
        {"workspace_bytes": 4096, "workspace_address": 0x108, "needed_bytes": 4096},
        "[TK-17] workspace: 4096 B at 0x108, the plan needs 4096 B at a multiple of 16: pass what "
        "topk_workspace_bytes tells, from where an allocation begins, or none",
        "(needed_bytes <= workspace_bytes && (workspace_address % 16) == 0)",
        {"workspace_address": 0x110},
    ),
}
