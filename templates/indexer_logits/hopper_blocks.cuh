// Scores of candidate blocks as an epilogue of the hopper body: the largest score of each block of 8 adjacent keys, NaN where one
// is, and +inf for the block of a token's newest key, for a selection to take it.
#pragma once
#include "indexer_logits/store.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/max_nan.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Of the tokens of a unit, whose limits lie one after the other in shared memory.
template <class Score, class Params>
struct BlockEpilogue {
  using Word = typename Score::Word;

  // How many blocks each token sees keys of, scored or not. A division of 64 bits would be a call, and take registers of products.
  static DSA_DEVICE void begin(const Params& p, u32 threads) {
    const u32 next_n = static_cast<u32>(p.next_n), rows = static_cast<u32>(p.batch) * next_n;
    for (u32 row = static_cast<u32>(ptx::block_index()) * threads + ptx::thread_index(); row < rows; row += p.blocks * threads) {
      const u32 request = row / next_n, keys = Unit(p, request * p.unit_count).limit(p, static_cast<int>(row - request * next_n));
      p.block_counts[row] = static_cast<i32>((keys + kBlockKeys - 1) / kBlockKeys);
    }
  }

  DSA_DEVICE BlockEpilogue(const Params& params, u32 unit, u32 limits)
      : p(params), first_limit(limits), first_row(static_cast<u32>(Unit(params, unit).row(params, 0))) {}

  // The eight lanes whose numbers are equal modulo 4 have the scores of a block between them (OwnKey::place), and tiles begin
  // with a block. Blocks that no key is seen of are left out; one that has keys behind the newest has the newest, too. Whole
  // warps come here.
  template <class Own>
  DSA_DEVICE void store(const Own& last, float sum) const {
    const u32 keys = ptx::load_shared_4(last.limit), block = last.key / kBlockKeys;
    float largest = last.own.held ? sum * last.own.scale : kNegInf;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      largest = ptx::max_nan(largest, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(largest), distance)));
    if (last.key % kBlockKeys == 0 && last.key < keys)
      static_cast<Word*>(p.block_scores)[(first_row + (last.limit - first_limit) / 4) * p.block_stride + block] = Score::of(block == (keys - 1) / kBlockKeys ? -kNegInf : largest);
  }

 private:
  const Params& p;
  u32 first_limit, first_row;
};

template <class Base, class Params>
struct WithBlockEpilogue : Base {
  using Epilogue = BlockEpilogue<Base, Params>;
};

}  // namespace indexer_logits
