// Where scores go: into a token's window and nowhere else, or -inf into what lies outside of the window.
#pragma once
#include "indexer_logits/key_ring.cuh"
//% if parts.counts
#include "indexer_logits/score_counts.cuh"
//% endif
#include "indexer_logits/work.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/max_nan.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

constexpr float kNegInf = -__builtin_huge_valf();
// Columns that a block fills at a time.
constexpr u32 kFillColumns = 2048;

struct Fp32Score {
  using Word = float;
  static constexpr bool kOfBlocks = false;
  static DSA_DEVICE Word of(float x) { return x; }
};

struct Bf16Score {
  using Word = u16;
  static constexpr bool kOfBlocks = false;
  static DSA_DEVICE Word of(float x) { return static_cast<u16>(ptx::pack_bf16(x, 0.0f)); }
};

// Scores of which the largest of each candidate block are stored, too.
template <class Score>
struct WithBlocks : Score {
  static constexpr bool kOfBlocks = true;
};

// Keys of a candidate block, which eight lanes have between them.
constexpr u32 kBlockKeys = 8;

// `kept` of the lane's sums, those of which lanes with the bit `distance` set keep the upper half, summed over both.
template <int kKept>
DSA_DEVICE void exchange(float (&sums)[kKept], const float* all, int distance, int lane) {
  const bool upper = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float keep = upper ? all[kKept + i] : all[i], give = upper ? all[i] : all[kKept + i];
    sums[i] = keep + ptx::float_of(ptx::shuffle_xor(ptx::bits_of(give), distance));
  }
}

// The largest score of each block of the tile, NaN where one is; +inf for the block of the newest key, for a selection to take
// it. Windows begin with key 0, and blocks that none of their keys is in are left out. Whole warps come here.
template <class C, class Score, class Params>
DSA_DEVICE void store_blocks(const Params& p, i64 row, u32 first_key, u32 end, const float (&own)[TileKeys<C>::kOwn],
                             const TileKeys<C>& keys, int lane) {
  static_assert(C::kTileKeys % kBlockKeys == 0);
  typename Score::Word* blocks = static_cast<typename Score::Word*>(p.block_scores) + row * p.block_stride;
#pragma unroll
  for (int i = 0; i < TileKeys<C>::kOwn; ++i) {
    // The lane's key is the (lane / 4)-th of its block.
    const u32 key = first_key + TileKeys<C>::place(i, lane), block = key / kBlockKeys;
    float largest = key < end && keys.held[i] ? own[i] * keys.scale[i] : kNegInf;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      largest = ptx::max_nan(largest, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(largest), distance)));
    if (lane < 4 && key < end) blocks[block] = Score::of(block == (end - 1) / kBlockKeys ? -kNegInf : largest);
  }
}

// How many blocks each token sees keys of, scored or not.
template <class Units, class Params>
DSA_DEVICE void count_blocks(const Params& p, u32 threads) {
  const u64 rows = Units::rows(p);
  for (u64 row = ptx::block_index() * threads + ptx::thread_index(); row < rows; row += p.blocks * threads)
    p.block_counts[row] = static_cast<i32>((Units::columns(p, row).end + kBlockKeys - 1) / kBlockKeys);
}

// The scores of a tile for one token, of sums over the heads of a lane's columns: summed over the four lanes of a row, each
// of which ends with other keys. Column 0 is for the key `origin`. Where scores are counted, the token's are at `counts`.
template <class C, class Score, class Params>
DSA_DEVICE void store_scores(const Params& p, i64 row, u32 first_key, Window window, u32 origin,
//% if parts.counts
                             u32 counts,
//% endif
                             const float (&sums)[2 * C::kBlocks], const TileKeys<C>& keys, int lane) {
  constexpr int kOwn = TileKeys<C>::kOwn;
  float halves[2 * kOwn], own[kOwn];
  exchange<2 * kOwn>(halves, sums, 2, lane);
  exchange<kOwn>(own, halves, 1, lane);
  typename Score::Word* scores = static_cast<typename Score::Word*>(p.scores) + row * p.score_stride;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const u32 key = first_key + TileKeys<C>::place(i, lane);
    if (key >= window.begin && key < window.end) scores[key - origin] = Score::of(keys.held[i] ? own[i] * keys.scale[i] : kNegInf);
//% if parts.counts
    if (key >= window.begin && key < window.end)
      count_score<C>(counts, Score::of(keys.held[i] ? own[i] * keys.scale[i] : kNegInf));
//% endif
  }
  if constexpr (Score::kOfBlocks) store_blocks<C, Score>(p, row, first_key, window.end, own, keys, lane);
}

// -inf into all columns but those of each row's window, shared by the blocks of the grid.
template <class Score, class Units = Unit, class Params>
DSA_DEVICE void fill_outside(const Params& p, u32 threads) {
  const u32 width = static_cast<u32>(p.width), parts = (width + kFillColumns - 1) / kFillColumns;
  const u64 all = Units::rows(p) * parts;
  for (u64 part = ptx::block_index(); part < all; part += p.blocks) {
    const u64 row = part / parts;
    const u32 first = static_cast<u32>(part - row * parts) * kFillColumns, last = width - first < kFillColumns ? width : first + kFillColumns;
    const Window kept = Units::columns(p, row);
    if (kept.begin <= first && last <= kept.end) continue;
    typename Score::Word* scores = static_cast<typename Score::Word*>(p.scores) + static_cast<i64>(row) * p.score_stride;
    for (u32 column = first + ptx::thread_index(); column < last; column += threads)
      if (column < kept.begin || column >= kept.end) scores[column] = Score::of(kNegInf);
  }
}

}  // namespace indexer_logits
