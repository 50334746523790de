// Where keys lie: in pages that a table names, or in one piece. A lane finds kLaneKeys keys of a tile, a tile ahead of their
// use.
#pragma once
#include "indexer_logits/ragged_work.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// A key's codes and its word of scales; nothing to be read where no page holds it.
struct KeyPlace {
  bool holds;
  const u8 *codes, *scales;
};

// Of a key on `page`, which may be none of the pool's.
template <class C, class Params>
DSA_DEVICE KeyPlace place_in_page(const Params& p, u32 page, u32 key) {
  const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
  const u32 offset = key - divisor.divide(key) * p.page_size;
  const bool holds = page < p.pool_pages;
  const u8* base = p.k_cache + (holds ? static_cast<i64>(page) * p.page_stride_bytes : 0);
  const u8* scales = base + static_cast<i64>(p.page_size) * C::kRowBytes + 4 * static_cast<i64>(offset);
  return {holds, base + static_cast<i64>(offset) * C::kRowBytes, scales};
}

template <class C, class Params>
struct PagedKeys {
  using Unit = indexer_logits::Unit;
  static constexpr bool kSparse = false;  // whole tiles may be nowhere, as a rule
  static constexpr int kLaneKeys = C::kTileKeys / 32;
  static constexpr u32 kNoPage = 0xffffffffu;

  DSA_DEVICE explicit PagedKeys(const Params& params) : p(params) {}

  DSA_DEVICE void start(const Unit& unit, u32, u32) { table = p.block_table + unit.request * p.table_stride; }

  // Of the lane's keys from `first` on, those below `end`.
  DSA_DEVICE void find(u32 first, u32 end) {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const u32 key = first + 32 * i;
      page[i] = key < end ? ptx::load_global_4(table + divisor.divide(key)) : kNoPage;
    }
  }

  // The i-th of the keys that were found last, which is `key`.
  DSA_DEVICE KeyPlace place(int i, u32 key) const { return place_in_page<C>(p, page[i], key); }

  // An address that may be read.
  DSA_DEVICE const u8* somewhere() const { return p.k_cache; }

 private:
  const Params& p;
  const i32* table;
  u32 page[kLaneKeys];
};

template <class C, class Params>
struct ContiguousKeys {
  using Unit = RaggedUnit;
  static constexpr bool kSparse = false;

  DSA_DEVICE explicit ContiguousKeys(const Params& params) : p(params) {}

  DSA_DEVICE void start(const Unit&, u32, u32) {}
  DSA_DEVICE void find(u32, u32 end_) { end = end_; }

  DSA_DEVICE KeyPlace place(int, u32 key) const {
    const bool holds = key < end;
    const i64 at = holds ? static_cast<i64>(key) : 0;
    return {holds, p.keys + at * p.key_stride_bytes, p.scales + at * p.scale_stride_bytes};
  }

  DSA_DEVICE const u8* somewhere() const { return p.keys; }

 private:
  const Params& p;
  u32 end;
};

}  // namespace indexer_logits
