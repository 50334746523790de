// Cached index keys side by side, as scoring of ragged windows takes them: 16 B of codes a lane, and a key's scale word by
// its first lane. Bytes are moved, not decoded. Which key a row means comes from a block table and where each request's
// rows begin; a row without a key in the pool is zeros, and nothing is read for it.
#pragma once
#include "prims/kv/place.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"

namespace index_cache {

template <class C, class Params>
struct GatherKeys {
  static constexpr int kThreads = C::kThreads, kLanes = C::kCodeBytes / 16, kRows = kThreads / kLanes;
  static_assert(C::kCodeBytes % 16 == 0 && kThreads % kLanes == 0);
  static constexpr i64 kNone = -1;

  static DSA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index(), piece = thread % kLanes;
    const i64 row = static_cast<i64>(ptx::block_index()) * kRows + thread / kLanes;
    if (row >= p.rows_count) return;
    const kv_cache::Pages pages{p.page_multiplier, p.page_shift, p.page_size, p.pool_tokens};
    const i64 slot = table_slot(p, static_cast<i32>(row));
    Words4 codes{0, 0, 0, 0};
    u32 word = 0;
    if (pages.holds(slot)) {
      const kv_cache::Token token(pages, slot);
      codes = load(token.at(p.cache, p.page_stride_bytes, {0, C::kCodeBytes, 0}) + 16 * piece, p.wide_pages != 0);
      if (piece == 0) word = ptx::load_global_4(token.at(p.cache, p.page_stride_bytes, {C::kCodeBytes, 4, 0}));
    }
    ptx::store_global_16(p.codes + row * p.code_stride_bytes + 16 * piece, codes);
    if (piece == 0) ptx::store_global_4(p.scales + row * p.scale_stride_bytes, word);
  }

 private:
  static DSA_DEVICE Words4 load(const u8* from, bool wide) {
    if (wide) return ptx::load_global_16(from);
    return Words4{ptx::load_global_4(from), ptx::load_global_4(from + 4), ptx::load_global_4(from + 8), ptx::load_global_4(from + 12)};
  }

  // The slot of a row by its request's block table; kNone where there is none.
  static DSA_DEVICE i64 table_slot(const Params& p, i32 row) {
    if (p.requests == 0 || row < p.row_starts[0] || row >= p.row_starts[p.requests]) return kNone;
    // The last request whose rows begin at or before this one: empty requests begin where the next one does.
    i32 request = 0;
    for (i32 end = p.requests; end - request > 1;) {
      const i32 middle = request + (end - request) / 2;
      (p.row_starts[middle] <= row ? request : end) = middle;
    }
    const i64 start = p.token_starts == nullptr ? 0 : p.token_starts[request];
    const i64 position = start + (static_cast<i64>(row) - p.row_starts[request]);
    if (position < 0 || position > 0x7fffffff) return kNone;
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const u32 column = divisor.divide(static_cast<u32>(position));
    if (column >= static_cast<u32>(p.table_columns)) return kNone;
    const i64 page = p.block_table[request * p.table_stride + column];
    return page < 0 ? kNone : page * p.page_size + (static_cast<u32>(position) - column * p.page_size);
  }
};

}  // namespace index_cache
