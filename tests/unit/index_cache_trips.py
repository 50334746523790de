"""What trips each guard of the index cache's ops, as in `kv_cache_trips`; shared ones as their owners have it."""

from indexer_trips import INDEXER_TRIPS
from kv_cache_trips import KV_CACHE_TRIPS

_SHARED_KV = ("KV-03", "KV-05", "KV-08", "KV-09", "KV-11", "KV-13", "KV-14", "KV-15", "KV-16")
_SHARED_POOL = ("IL-08", "IL-09", "IL-10", "IL-15")

INDEX_CACHE_TRIPS = {
    **{guard_id: KV_CACHE_TRIPS[guard_id] for guard_id in ("K-02", *_SHARED_KV)},
    **{guard_id: INDEXER_TRIPS[guard_id] for guard_id in _SHARED_POOL},
    "IC-01": (
        {"dim": 96},
        "[IC-01] index keys of 96 dims: 32, 64 and 128 are built",
        "(dim == 32 || dim == 64 || dim == 128)",
        {"dim": 64},
        {},
    ),
    "IC-02": (
        {"scale_dims": 24, "dim": 96},
        "[IC-02] scales of 24 of a key's 96 dims: a lane takes 16 dims of one scale, and a key has whole scales",
        "((scale_dims % 16) == 0 && (dim % scale_dims) == 0)",
        {"scale_dims": 32},
        {},
    ),
    "IC-03": (
        {"slots": 6, "keys": 5},
        "[IC-03] slots: 6 for 5 keys: each slot takes a key, the first ones where there are more keys than slots: pass "
        "fewer slots",
        "slots <= keys",
        {"slots": 5},
        {},
    ),
    "IC-04": (
        {"address": 258},
        "[IC-04] scales: address 0x102 is no multiple of 4 B: pass a tensor that begins at one: an allocation does, a "
        "view of a buffer may not",
        "(address % 4) == 0",
        {"address": 260},
        {},
    ),
}
