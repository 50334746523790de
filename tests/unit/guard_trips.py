"""What trips each guard of each family: values, the complete message, the expression in C."""

from __future__ import annotations

from dataclasses import dataclass, field

from index_cache_trips import INDEX_CACHE_TRIPS
from indexer_trips import INDEXER_TRIPS
from kv_cache_trips import KV_CACHE_TRIPS
from topk_trips import TOPK_TRIPS


@dataclass(frozen=True)
class Trip:
    """Values that a guard refuses, the complete message, and the expression in C."""

    values: dict[str, int]
    message: str
    c: str
    holding: dict[str, int]
    message_only: dict[str, object] = field(default_factory=dict)


COMPILED = {
    "stack_bytes": 0,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "allow_spill_bytes": 8,
    "registers": 128,
    "registers_cap": 128,
    "moves_registers": 1,
}
POOL = {"pages": 2, "page_size": 64, "address": 256, "page_stride_bytes": 41984}
TOKENS = {"row_stride_bytes": 656, "token_bytes": 656, "page_bytes": 41984}
KV_HEADS = {"head_stride_bytes": 256, "row_bytes": 256, "page_size": 64, "kv_heads": 2}
STRIDES = {"q_address": 32, "q_stride_b": 576, "q_stride_s": 576, "q_stride_h": 576}
OUT = {"out_address": 32, "out_stride_b": 512, "out_stride_s": 512, "out_stride_h": 512}

TRIPS: dict[str, dict[str, Trip]] = {
    "sparse_decode": {
        "K-01": Trip(
            {"smem_bytes": 232449, "smem_optin_bytes": 232448},
            "[K-01] shared memory: the plan needs 232449 B and a block may have 232448 B: use fewer stages, a smaller "
            "tile or fewer heads in a CTA",
            "smem_bytes <= smem_optin_bytes",
            {"smem_bytes": 232448},
        ),
        "K-02": Trip(
            {"threads": 512, "registers_cap": 129, "registers_per_sm": 65536},
            "[K-02] registers: 512 threads x 129 exceed the SM's 65536: use fewer warps",
            "(threads * registers_cap) <= registers_per_sm",
            {"registers_cap": 128},
        ),
        "SD-01": Trip(
            {"stages": 2, "tile_stages": 2, "producers": 2},
            "[SD-01] stages 2: a tile of 2 stages needs one more than that, and 2 producers one each, or the ring "
            "deadlocks",
            "(stages > tile_stages && producers <= stages)",
            {"stages": 3},
        ),
        "SD-02": Trip(
            {"tile_tokens": 48, "spare_heads": 1},
            "[SD-02] tile of 48 tokens: must be a multiple of 32 that the score warps cover",
            "((tile_tokens % 32) == 0 && spare_heads >= 1)",
            {"tile_tokens": 64},
        ),
        "SD-03": Trip(
            {"heads_n": 20},
            "[SD-03] heads in a CTA: 20 must be a multiple of 8 in 8..64",
            "(8 <= heads_n && heads_n <= 64 && (heads_n % 8) == 0)",
            {"heads_n": 24},
        ),
        "SD-05": Trip(
            {"row_bytes": 656, "row_pitch_bytes": 672},
            "[SD-05] row of 656 B at pitch 672 B: rows are copied 16 B at a time and the pitch must be an odd multiple "
            "of 16 B to be free of bank conflicts",
            "((row_bytes % 16) == 0 && (row_pitch_bytes % 32) == 16)",
            {"row_pitch_bytes": 656},
        ),
        "SD-04": Trip(
            {"num_splits": 33, "all_tiles": 32},
            "[SD-04] num_splits 33: 2048 index columns in tiles of 64 tokens are 32 tiles, so at least one split could "
            "never hold a token. Use num_splits <= 32",
            "num_splits <= all_tiles",
            {"num_splits": 32},
            {"columns": 2048, "tile_tokens": 64},
        ),
        "SD-06": Trip(
            {"topk": 2049, "topk_capacity": 2048},
            "[SD-06] indices: 2049 columns, the spec declares topk 2048: pass 1..2048 columns or raise `topk` in "
            "the spec",
            "(1 <= topk && topk <= topk_capacity)",
            {"topk": 2048},
            {"name": "indices"},
        ),
        "SD-07": Trip(
            {"heads": 64, "spec_heads": 16},
            "[SD-07] q: 64 heads, the spec declares 16: pass q with 16 heads or load a spec for 64",
            "heads == spec_heads",
            {"heads": 16},
        ),
        "SD-08": Trip(
            {"main_ctas": 2**31, "combine_ctas": 1},
            "[SD-08] grid: 2147483648 CTAs (combine 1) exceed 2147483647: use fewer splits or a smaller batch",
            "(main_ctas <= 2147483647 && combine_ctas <= 2147483647)",
            {"main_ctas": 2**31 - 1},
        ),
        "SD-29": Trip(
            {"launches": 1, "num_splits": 5, "can_join": 1},
            "[SD-29] one launch: 5 splits (can_join 1): take two, or 2, 4 or 8 splits of hopper, all heads in a CTA",
            "(launches == 2 || num_splits == 1 || (can_join == 1 && (8 % num_splits) == 0))",
            {"num_splits": 4},
        ),
        "SD-30": Trip(
            {"clusters": 0},
            "[SD-30] one launch: this process may use too few multiprocessors of the device for a cluster of 8 CTAs: "
            "set DSAGEN_SPARSE_DECODE_LAUNCHES=2",
            "clusters >= 1",
            {"clusters": 1},
            {"num_splits": 8},
        ),
        "SD-09": Trip(
            {"pool_tokens": 2**31},
            "[SD-09] k_cache: 2147483648 tokens cannot be addressed by int32 indices, at most 2147483647 can: pass a "
            "smaller pool",
            "pool_tokens <= 2147483647",
            {"pool_tokens": 2**31 - 1},
            {"name": "k_cache"},
        ),
        "SD-10": Trip(
            {"pages": 0, "page_size": 64},
            "[SD-10] extra_k_cache: 0 pages of 64 tokens: at least one page of 1..1073741824 tokens is needed",
            "(pages >= 1 && 1 <= page_size && page_size <= 1073741824)",
            {"pages": 1},
            {"name": "extra_k_cache"},
        ),
        "SD-11": Trip(
            {**POOL, "page_stride_bytes": 41992},
            "[SD-11] k_cache: page stride 41992 B is no multiple of 16 B: pad the pages",
            "(page_stride_bytes % 16) == 0",
            {"page_stride_bytes": 41984},
            {"name": "k_cache"},
        ),
        "SD-24": Trip(
            {**POOL, "address": 264},
            "[SD-24] k_cache: base address 0x108 is no multiple of 16 B: pass a cache that begins at one: an "
            "allocation does, a view into it may not",
            "(address % 16) == 0",
            {"address": 256},
            {"name": "k_cache"},
        ),
        "SD-12": Trip(
            {**POOL, **TOKENS, "page_stride_bytes": 41968},
            "[SD-12] k_cache: token stride 656 B and page stride 41968 B do not hold pages of 64 tokens of 656 B "
            "(41984 B): tokens of a page must be adjacent and pages must not overlap",
            "(row_stride_bytes == token_bytes && (pages == 1 || page_stride_bytes >= page_bytes))",
            {"page_stride_bytes": 41984},
            {"name": "k_cache"},
        ),
        "SD-18": Trip(
            {"d_qk": 640, "d_v": 576},
            "[SD-18] rows of d_qk 640 and d_v 576: d_qk must be a multiple of 64, and d_v, which is dealt to warps, "
            "128, 256, 384 or 512: no kernel takes other widths",
            "((d_qk % 64) == 0 && (d_v % 128) == 0 && d_v <= 512)",
            {"d_v": 512},
        ),
        "SD-16": Trip(
            {"extra_topk": 513, "extra_topk_capacity": 512},
            "[SD-16] extra_indices: 513 columns, the spec declares extra_kv.topk 512: pass 0..512 columns or "
            "raise it in the spec (without extra_kv there are 0)",
            "(0 <= extra_topk && extra_topk <= extra_topk_capacity)",
            {"extra_topk": 512},
            {"name": "extra_indices"},
        ),
        "SD-17": Trip(
            {"pages": 3, "page_size": 64, "other_pages": 4, "other_page_size": 64},
            "[SD-17] kpe_cache: 3 pages of 64 tokens, k_cache has 4 of 64: both tensors of a cache have the same pages",
            "(pages == other_pages && page_size == other_page_size)",
            {"other_pages": 3},
            {"name": "kpe_cache", "other": "k_cache"},
        ),
        "SD-27": Trip(
            {"heads": 74, "kv_heads": 2, "heads_each": 37, "most_heads": 32, "kv_head_groups": 37, "least_groups": 2},
            "[SD-27] heads: 74 of 2 KV heads are 37 each, of which a CTA holds 32: equal parts take 37 CTAs where 2 "
            "would do: pad each KV head's query heads to a multiple of 2",
            "kv_head_groups <= (2 * least_groups)",
            {"kv_head_groups": 4},
        ),
        "SD-28": Trip(
            {**KV_HEADS, "token_stride_bytes": 1024},
            "[SD-28] k_cache: token stride 1024 B and KV-head stride 256 B with rows of 256 B: a page holds either the "
            "2 rows of each token side by side, or the 64 rows of each KV head",
            "((token_stride_bytes == (kv_heads * row_bytes) && head_stride_bytes == row_bytes) || "
            "(token_stride_bytes == row_bytes && head_stride_bytes == (page_size * row_bytes)))",
            {"token_stride_bytes": 256, "head_stride_bytes": 64 * 256},
            {"name": "k_cache"},
        ),
        "SD-13": Trip(
            {**STRIDES, "q_stride_h": 580},
            "[SD-13] q: strides (576, 576, 580) elements: rows must start at multiples of 16 B, so strides must be "
            "multiples of 8 elements: pass q.contiguous(), or pad its rows",
            "((q_stride_b % 8) == 0 && (q_stride_s % 8) == 0 && (q_stride_h % 8) == 0)",
            {"q_stride_h": 584},
        ),
        "SD-25": Trip(
            {**STRIDES, "q_address": 0x28},
            "[SD-25] q: address 0x28 is no multiple of 16 B: pass a tensor that begins at one, such as q.clone()",
            "(q_address % 16) == 0",
            {"q_address": 0x20},
        ),
        "SD-14": Trip(
            {**OUT, "out_stride_b": 513},
            "[SD-14] out: strides (513, 512, 512) elements: rows must start at multiples of 4 B, so strides must be "
            "even: pad its rows, or leave it out",
            "((out_stride_b % 2) == 0 && (out_stride_s % 2) == 0 && (out_stride_h % 2) == 0)",
            {"out_stride_b": 514},
        ),
        "SD-26": Trip(
            {**OUT, "out_address": 0x22},
            "[SD-26] out: address 0x22 is no multiple of 4 B: pass a tensor that begins at one, or leave it out",
            "(out_address % 4) == 0",
            {"out_address": 0x24},
        ),
        "SD-15": Trip(
            {"moved_registers": 65537, "compiled_registers": 65536},
            "[SD-15] registers: the roles ask for 65537 of the 65536 that the kernel is compiled with, so the last to "
            "ask would wait forever",
            "moved_registers <= compiled_registers",
            {"moved_registers": 65536},
        ),
        "SD-00": Trip(
            {"size": -1, "least": 0},
            "[SD-00] batch: -1 is outside 0..2147483647: pass how many requests a call has",
            "(least <= size && size <= 2147483647)",
            {"size": 0},
            {"name": "batch", "meaning": "how many requests a call has"},
        ),
        "SD-23": Trip(
            {"workspace_bytes": 512, "workspace_address": 0x110, "needed_bytes": 512},
            "[SD-23] workspace: 512 B at 0x110, the plan needs 512 B at a multiple of 256 B: "
            "pass what sparse_decode_workspace_bytes tells, from where an allocation begins, or none",
            "(workspace_bytes >= needed_bytes && (workspace_address % 256) == 0)",
            {"workspace_address": 0x100},
        ),
        "SD-21": Trip(
            {"length": 101, "topk": 100},
            "[SD-21] topk_length[1] = 101: the index rows have 100 columns, so lengths are 0..100 (2 outside)",
            "(0 <= length && length <= topk)",
            {"length": 100},
            {"name": "topk_length", "place": [1], "count": 2},
        ),
        "SD-22": Trip(
            {"token_id": 64, "pool_tokens": 64},
            "[SD-22] indices[1, 2, 70] = 64: k_cache holds 64 tokens, so ids are below 64, or negative for padding (1 "
            "past it)",
            "token_id < pool_tokens",
            {"token_id": -1},
            {"name": "indices", "cache": "k_cache", "place": [1, 2, 70], "count": 1},
        ),
    },
    "index_cache": {guard_id: Trip(*fields) for guard_id, fields in INDEX_CACHE_TRIPS.items()},
    "indexer_logits": {guard_id: Trip(*fields) for guard_id, fields in INDEXER_TRIPS.items()},
    "kv_cache": {guard_id: Trip(*fields) for guard_id, fields in KV_CACHE_TRIPS.items()},
    "topk": {guard_id: Trip(*fields) for guard_id, fields in TOPK_TRIPS.items()},
    "every family": {
        "B-01": Trip(
            {**COMPILED, "stack_bytes": 8, "spill_store_bytes": 16},
            "[B-01] dsa_x spills: 8 bytes stack frame, 16 bytes spill stores, 0 bytes spill loads per thread at 128 "
            "registers; the plan allows 8 (allow_spill_bytes)",
            "(stack_bytes <= allow_spill_bytes && spill_store_bytes <= allow_spill_bytes && "
            "spill_load_bytes <= allow_spill_bytes)",
            {"spill_store_bytes": 8},
            {"symbol": "dsa_x"},
        ),
        "B-02": Trip(
            {"performance_messages": 1},
            "[B-02] dsa_x compiled with what ptxas reports as lost performance: (C7510) serialised",
            "performance_messages == 0",
            {"performance_messages": 0},
            {"symbol": "dsa_x", "first_message": "(C7510) serialised"},
        ),
        "B-03": Trip(
            {**COMPILED, "registers": 129},
            "[B-03] dsa_x takes 129 registers a thread, its plan allows 128: use another nvcc, or drop flags that "
            "raise registers",
            "registers <= registers_cap",
            {"registers": 128},
            {"symbol": "dsa_x"},
        ),
        "B-04": Trip(
            {**COMPILED, "registers": 127},
            "[B-04] dsa_x takes 127 registers a thread and moves registers between warps, which the plan reckons from "
            "exactly 128: with fewer, the last warps to ask would wait forever. Use another nvcc, or drop flags that "
            "change registers",
            "(moves_registers == 0 || registers == registers_cap)",
            {"moves_registers": 0},
            {"symbol": "dsa_x"},
        ),
        "L-01": Trip(
            {"registers": 129, "registers_cap": 128},
            "[L-01] loaded kernel uses 129 registers a thread, its plan allows 128: the store entry is not what was "
            "planned; rebuild it with `dsagen build --force`",
            "registers <= registers_cap",
            {"registers": 128},
        ),
        "L-02": Trip(
            {"local_bytes": 8},
            "[L-02] loaded kernel keeps 8 B a thread in local memory, its plan none: it spills; rebuild it with "
            "`dsagen build --force`",
            "local_bytes == 0",
            {"local_bytes": 0},
        ),
        "L-03": Trip(
            {"threads": 512, "max_threads": 448},
            "[L-03] loaded kernel runs with at most 448 threads a block, its plan needs 512: rebuild it with "
            "`dsagen build --force`",
            "threads <= max_threads",
            {"max_threads": 512},
        ),
        "L-04": Trip(
            {"static_smem_bytes": 16},
            "[L-04] loaded kernel has 16 B of static shared memory, its plan none: rebuild it with "
            "`dsagen build --force`",
            "static_smem_bytes == 0",
            {"static_smem_bytes": 0},
        ),
        "L-05": Trip(
            {"smem_bytes": 200000, "device_smem_bytes": 101376},
            "[L-05] kernel needs 200000 B of shared memory, this device gives a block 101376 B: build for the arch of "
            "this device",
            "smem_bytes <= device_smem_bytes",
            {"smem_bytes": 101376},
        ),
        "L-06": Trip(
            {**COMPILED, "registers": 120},
            "[L-06] loaded kernel has 120 registers a thread and moves registers between warps, which its plan reckons "
            "from exactly 128: it would wait forever; rebuild it with `dsagen build --force`",
            "(moves_registers == 0 || registers == registers_cap)",
            {"registers": 128},
        ),
    },
}
