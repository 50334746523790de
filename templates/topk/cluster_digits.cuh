// Radix selection by a cluster: where the k-th largest key of all its blocks lies, a digit at a time.
//
//   tell     each block counts its keys in a histogram of its own, and tells all blocks the sums of its groups of bins
//   meet     the cluster's barrier
//   find     one warp finds the group from these sums, and adds up the group's bins of all blocks
//
// Every block finds the same. So of the others' histograms only one group is read, by one round of loads.
#pragma once
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/cluster_words.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "topk/threshold.cuh"

namespace topk {

// Blocks of a cluster that every device with clusters has.
constexpr int kMostBlocks = 8;

template <int kThreads, int kDigitBits>
struct ClusterDigits {
  using Digits = DigitSearch<kThreads, kDigitBits>;
  // A group is what a warp has in DigitSearch: kEach rows of 32 bins, from the largest digit down.
  static constexpr int kGroups = Digits::kWarps, kEach = Digits::kEach;

  const Digits& digits;
  const u32 sums;  // shared address: [blocks][32] sums of groups
  const u32 blocks, rank;

  // Behind a barrier of the block after its last count, and one of the cluster after sums were read.
  DSA_DEVICE void tell() const {
    if (digits.warp >= kGroups) return;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const u32 digit = bin(digits.warp, i), at = digits.histogram + 4 * digit;
      u32 count = ptx::load_shared_4(at);
      // Where counts are rotated, digit 0 has another bin besides: see DigitSearch.
      if (digit == 0) ptx::store_shared_4(at, count += ptx::load_shared_4(at + 4 * Digits::kBins));
      sum += count;
    }
    sum = ptx::warp_sum(sum);
    if (digits.lane < static_cast<int>(blocks))
      ptx::store_cluster_4(ptx::cluster_address(sums + 4 * (32 * rank + digits.warp), digits.lane), sum);
  }

  // The threshold with one more digit of `bits` bits. Behind the cluster's barrier; all threads come here, one barrier.
  DSA_DEVICE Threshold find(const Threshold& t, int bits) const {
    if (digits.warp == 0) search(t.ties);
    ptx::block_sync();
    const Words4 w = ptx::load_shared_16(digits.found);
    return {t.base + (w.x << (t.shift - bits)), t.shift - bits, w.y, w.z};
  }

 private:
  DSA_DEVICE u32 bin(u32 group, int i) const { return Digits::kBins - 1 - (group * kEach + i) * 32 - digits.lane; }

  DSA_DEVICE void search(u32 ties) const {
    u32 count = 0;
#pragma unroll
    for (u32 block = 0; block < kMostBlocks; ++block)
      if (block < blocks && digits.lane < kGroups) count += ptx::load_shared_4(sums + 4 * (32 * block + digits.lane));
    u32 through = tile::warp_inclusive_sum(count, digits.lane);
    const u32 group = ptx::highest_bit(ptx::ballot(through - count < ties && ties <= through));
    u32 above = ptx::shuffle(through - count, static_cast<int>(group)), counts[kEach][kMostBlocks];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (u32 block = 0; block < kMostBlocks; ++block)
        counts[i][block] = ptx::load_of_block_4_if(block < blocks, digits.histogram + 4 * bin(group, i), block);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      count = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) count += counts[i][block];
      through = above + tile::warp_inclusive_sum(count, digits.lane);
      if (through - count < ties && ties <= through)
        ptx::store_shared_16(digits.found, Words4{bin(group, i), ties - (through - count), count, 0});
      above = ptx::shuffle(through, 31);
    }
  }
};

}  // namespace topk
