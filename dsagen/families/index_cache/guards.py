"""Every limit of the index cache's ops: those of kernels, and of calls those that the cache's other users state.

What a cache of index keys must be is a limit of the indexer's logits, which read it; slots, rows and block tables are
those of the KV cache's ops.
"""

from __future__ import annotations

from dsagen.families.indexer_logits.guards import POOL_GUARDS as KEY_POOL_GUARDS
from dsagen.families.kv_cache.guards import (
    COUNT_GUARD,
    PAGE_GUARD,
    REACH_GUARD,
    ROW_GUARDS,
    ROW_STARTS_GUARD,
    SLOT_GUARD,
    TABLE_GUARD,
)
from dsagen.families.kv_cache.guards import POOL_GUARDS as KV_POOL_GUARDS
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
        "IC-01",
        "plan",
        "dim == 32 or dim == 64 or dim == 128",
        "index keys of {dim} dims: 32, 64 and 128 are built",
    ),
    Guard(
        "IC-02",
        "plan",
        "scale_dims % 16 == 0 and dim % scale_dims == 0",
        "scales of {scale_dims} of a key's {dim} dims: a lane takes 16 dims of one scale, and a key has whole scales",
    ),
)

# The division by the page size holds for slots of 31 bits.
TOKENS_GUARD = next(guard for guard in KV_POOL_GUARDS if "pool_tokens" in guard.names)
POOL_GUARDS = (*KEY_POOL_GUARDS, TOKENS_GUARD)
SLOTS_GUARD = Guard(
    "IC-03",
    "launch",
    "slots <= keys",
    "slots: {slots} for {keys} keys: each slot takes a key, the first ones where there are more keys than slots: pass "
    "fewer slots",
)
SCALE_GUARD = Guard(
    "IC-04",
    "launch",
    "address % 4 == 0",
    "scales: address {address:#x} is no multiple of 4 B: pass a tensor that begins at one: an allocation does, a view "
    "of a buffer may not",
)
LAUNCH_GUARDS: tuple[Guard, ...] = (
    COUNT_GUARD,
    *POOL_GUARDS,
    *ROW_GUARDS,
    SLOTS_GUARD,
    SCALE_GUARD,
    TABLE_GUARD,
    SLOT_GUARD,
    ROW_STARTS_GUARD,
    REACH_GUARD,
    PAGE_GUARD,
)
