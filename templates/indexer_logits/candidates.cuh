// Keys of candidate blocks: a list for each token names blocks of 8 or 16 consecutive keys, and scores stand in the list's
// order, a column for each key of each slot.
#pragma once
#include "indexer_logits/key_places.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// A token, whose list no other token shares. Its tiles are columns of scores, every one of which is written.
struct CandidateUnit : Unit {
  static constexpr bool kFills = false;

  template <class Params>
  DSA_DEVICE CandidateUnit(const Params& p, u32 unit) : Unit(p, unit) {}

  template <class Params>
  DSA_DEVICE u32 keys(const Params& p) const { return static_cast<u32>(p.width); }

  template <class Params>
  DSA_DEVICE Window window(const Params& p, int) const { return {0, keys(p)}; }
};

// Keys by column: those of a slot without a block, and those that the token does not see, are nowhere.
template <class C, class Params>
struct CandidateKeys {
  using Unit = CandidateUnit;
  static constexpr bool kSparse = true;
  static constexpr int kLaneKeys = C::kTileKeys / 32;
  static constexpr u32 kNone = 0xffffffffu;

  DSA_DEVICE explicit CandidateKeys(const Params& params) : p(params) {}

  DSA_DEVICE void start(const Unit& unit, u32 first, u32 end) {
    table = p.block_table + unit.request * p.table_stride;
    list = p.candidates + unit.row(p, 0) * p.candidate_stride;
    limit = unit.limit(p, unit.first_token);
    load_blocks(first, end);
  }

  // A key's page is behind two loads in turn, so blocks come a tile ahead of pages.
  DSA_DEVICE void find(u32 first, u32 end) {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const u32 in_block = (1u << p.block_shift) - 1, seen_blocks = (limit + in_block) >> p.block_shift;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      key[i] = block[i] << p.block_shift | ((first + 32 * i) & in_block);
      page[i] = block[i] < seen_blocks && key[i] < limit ? ptx::load_global_4(table + divisor.divide(key[i])) : kNone;
    }
    load_blocks(first + C::kWarps * C::kTileKeys, end);
  }

  DSA_DEVICE KeyPlace place(int i, u32) const { return place_in_page<C>(p, page[i], key[i]); }

  DSA_DEVICE const u8* somewhere() const { return p.k_cache; }

 private:
  const Params& p;
  const i32 *table, *list;
  u32 limit;  // keys that the token sees
  u32 block[kLaneKeys], key[kLaneKeys], page[kLaneKeys];

  // Of the lane's columns from `first` on; a negative block is past all that are seen.
  DSA_DEVICE void load_blocks(u32 first, u32 end) {
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const u32 column = first + 32 * i;
      block[i] = column < end ? ptx::load_global_4(list + (column >> p.block_shift)) : kNone;
    }
  }
};

}  // namespace indexer_logits
