// What one CTA works on, and where its warps hand things to each other.
#pragma once
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"
#include "sparse_decode/constants.cuh"

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

  u32 row, split;  // query token batch x s_q + s, and which split of its index row
  int first_head;
  int length;  // live columns of the index row
  int tiles;   // of this split: tiles split, split + num_splits, ...

  DSA_DEVICE Work(const Params& p) {
    u32 item = ptx::block_index();
    first_head = static_cast<int>(item % p.head_groups) * p.group_heads;
    item /= p.head_groups;
    split = item % p.num_splits;
    row = item / p.num_splits;
    length = p.topk;
    if (p.topk_length != nullptr) {
      const int given = p.topk_length[batch(p) * p.length_stride_b + token(p) * p.length_stride_s];
      length = given < 0 ? 0 : given < length ? given : length;
    }
    const int all_tiles = (length + C::kTileTokens - 1) / C::kTileTokens;
    const int first = static_cast<int>(split);
    tiles = first < all_tiles ? (all_tiles - first - 1) / p.num_splits + 1 : 0;
  }

  DSA_DEVICE i64 batch(const Params& p) const { return row / static_cast<u32>(p.s_q); }
  DSA_DEVICE i64 token(const Params& p) const { return row % static_cast<u32>(p.s_q); }
  DSA_DEVICE int heads(const Params& p) const { return p.heads - first_head < p.group_heads ? p.heads - first_head : p.group_heads; }
  // Row of the partial results.
  DSA_DEVICE i64 partial_row(const Params& p) const { return static_cast<i64>(row) * p.num_splits + split; }

  // First column of the n-th stage.
  DSA_DEVICE i64 stage_column(const Params& p, int n) const {
    const i64 tile = static_cast<i64>(n / kTileStages) * p.num_splits + split;
    return tile * C::kTileTokens + n % kTileStages * C::kStageTokens;
  }
};

}  // namespace sparse_decode
