// Counts of scores by the first digit of their keys, a histogram for each token, which a selection that shares rows among blocks
// takes in the place of its first pass.
//
// A block counts the scores that it stores in shared memory, and adds what it has to the row's histogram when it leaves a unit.
// All threads come to take and finish; between two calls, which a barrier each comes before, any of them may add.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/global_atomic.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"
#include "topk/score.cuh"

namespace indexer_logits {

DSA_DEVICE u32 fp32_bits_of(float score) { return ptx::bits_of(score); }
DSA_DEVICE u32 fp32_bits_of(u16 bf16_score) { return static_cast<u32>(bf16_score) << 16; }

// Counts a score, as it is stored, among those at a shared address.
template <class C, class Word>
DSA_DEVICE void count_score(u32 counts, Word score) {
  ptx::shared_add(counts + 4 * (topk::ordered_key(fp32_bits_of(score)) >> (32 - C::kDigitBits)), 1);
}

// The counts of a unit's tokens lie kStride bytes apart in shared memory.
template <class C, int kStride>
struct ScoreCounts {
  static constexpr u32 kThreads = 32 * C::kWarps, kBins = 1u << C::kDigitBits, kBytes = 4 * kBins;

  const u32 first;  // shared address of those of token 0
  u32 row = 0, tokens = 0;  // those that are counted

  // Of up to so many tokens; a barrier must follow before one is counted.
  DSA_DEVICE ScoreCounts(u32 address, u32 most_tokens) : first(address) {
    for (u32 token = 0; token < most_tokens; ++token)
#pragma unroll 4
      for (u32 i = 4 * ptx::thread_index(); i < kBins; i += 4 * kThreads)
        ptx::store_shared_16(first + token * kStride + 4 * i, Words4{0, 0, 0, 0});
  }

  // On to the tokens of a unit, when all threads have counted those of the one before.
  template <class Params>
  DSA_DEVICE void take(const Params& p, const Unit& unit) {
    hand_over(p);
    row = static_cast<u32>(unit.row(p, 0)), tokens = static_cast<u32>(unit.tokens);
  }

  template <class Params>
  DSA_DEVICE void finish(const Params& p) const {
    ptx::block_sync();
    hand_over(p);
  }

 private:
  // Adds what was counted to the rows' histograms, and clears it.
  template <class Params>
  DSA_DEVICE void hand_over(const Params& p) const {
    for (u32 token = 0; token < tokens; ++token) {
      u32* histogram = p.histograms + static_cast<i64>(row + token) * kBins;
#pragma unroll 4
      for (u32 bin = ptx::thread_index(); bin < kBins; bin += kThreads) {
        const u32 at = first + token * kStride + 4 * bin, count = ptx::load_shared_4(at);
        if (count == 0) continue;
        ptx::global_add(histogram + bin, count);
        ptx::store_shared_4(at, 0);
      }
    }
  }
};

}  // namespace indexer_logits
