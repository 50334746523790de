// What one CTA works on, and where its warps hand things to each other.
#pragma once
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"
#include "sparse_decode/constants.cuh"
#include "sparse_decode/source.cuh"

namespace sparse_decode {

// Moves a ring position and the parity of its round.
template <int kSlots>
DSA_DEVICE void advance_ring(int& slot, u32& parity, int by) {
  slot += by;
  if (slot >= kSlots) slot -= kSlots, parity ^= 1;
}

// Probabilities lie [token][head] in bf16, so that a transposed matrix load yields the B operand. The pitch is an odd
// multiple of 16 B; at 64 heads padding would not fit, and 16-byte chunks are swizzled by the token instead.
template <class C>
constexpr int kProbabilityBytes = C::kTileTokens * C::kProbabilityPitchBytes;

template <class C>
DSA_DEVICE u32 probability_address(u32 copy, int token) {
  return copy + token * C::kProbabilityPitchBytes;
}

// Offset of the 8 heads of head tile `tile` in a row whose token is `token_low` modulo 8.
template <class C>
DSA_DEVICE u32 probability_chunk(int tile, int token_low) {
  return 16 * (C::kProbabilityPitchBytes % 32 == 0 ? tile ^ token_low : tile);
}

template <class C, class Params>
struct Work {
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;

  static constexpr bool kTwoSources = C::kSources == 2;

  u32 row, split;  // query token batch x s_q + s, and which split of its tiles
  int first_head;
  int length, extra_length;  // live columns of the index rows
  int main_row_tiles;        // tiles of the main index row, all splits together; the extra row's follow them
  int tiles;                 // of this split: tiles split, split + num_splits, ...
  int main_tiles;            // how many of those are of the main index row: the first ones

  DSA_DEVICE Work(const Params& p) {
    u32 item = ptx::block_index();
    first_head = static_cast<int>(item % p.head_groups) * p.group_heads;
    item /= p.head_groups;
    split = item % p.num_splits;
    row = item / p.num_splits;
    length = Source<false>::length(p, batch(p), token(p));
    main_row_tiles = tiles_of(length);
    tiles = main_tiles = own_of(main_row_tiles, p);
    extra_length = 0;
    if constexpr (kTwoSources) {
      extra_length = Source<true>::length(p, batch(p), token(p));
      tiles = own_of(main_row_tiles + tiles_of(extra_length), p);
    }
  }

  DSA_DEVICE i64 batch(const Params& p) const { return row / static_cast<u32>(p.s_q); }
  DSA_DEVICE i64 token(const Params& p) const { return row % static_cast<u32>(p.s_q); }
  DSA_DEVICE int heads(const Params& p) const { return p.heads - first_head < p.group_heads ? p.heads - first_head : p.group_heads; }
  // Row of the partial results.
  DSA_DEVICE i64 partial_row(const Params& p) const { return static_cast<i64>(row) * p.num_splits + split; }

  // Tile of both index rows that the n-th stage is of.
  DSA_DEVICE i64 stage_tile(const Params& p, int n) const { return static_cast<i64>(n / kTileStages) * p.num_splits + split; }

  // First column of the n-th stage, given its tile counted from the begin of its own index row.
  DSA_DEVICE i64 stage_column(i64 tile, int n) const { return tile * C::kTileTokens + n % kTileStages * C::kStageTokens; }

 private:
  static DSA_DEVICE int tiles_of(int columns) { return (columns + C::kTileTokens - 1) / C::kTileTokens; }

  DSA_DEVICE int own_of(int all_tiles, const Params& p) const {
    const int first = static_cast<int>(split);
    return first < all_tiles ? (all_tiles - first - 1) / p.num_splits + 1 : 0;
  }
};

}  // namespace sparse_decode
