// A histogram of digits that all threads of a block search together, each a few neighbouring bins: from the largest digit
// down, where the n-th key lies. It is empty before and after.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/tile/scan.cuh"
#include "prims/types.cuh"

namespace topk {

template <int kThreads, int kDigitBits>
struct TopBins {
  static constexpr u32 kBins = 1u << kDigitBits, kEach = kBins / kThreads;
  static_assert(kEach % 4 == 0, "a thread's bins are read 16 B at a time");

  // Of the digit with the n-th key: how many of it are among the first n, and how many there are; 0 if there are less than n.
  struct Place {
    u32 digit, ties, equal;
  };

  const u32 thread, histogram, warp_sums, found;  // shared addresses: [kBins], [32], [4]

  DSA_DEVICE void count(u32 digit) const { ptx::shared_add(histogram + 4 * digit, 1); }

  // Behind a barrier after the last count; `without_top`: no key of the largest digit is one. All threads come here; two
  // barriers.
  DSA_DEVICE Place find(u32 n, bool without_top) const {
    const u32 lowest = kBins - kEach * (thread + 1);
    u32 counts[kEach], sum = 0, total;
#pragma unroll
    for (u32 i = 0; i < kEach; i += 4) {
      const u32 at = histogram + 4 * (lowest + i);
      const Words4 w = ptx::load_shared_16(at);
      ptx::store_shared_16(at, {0, 0, 0, 0});
      counts[i] = w.x, counts[i + 1] = w.y, counts[i + 2] = w.z, counts[i + 3] = w.w;
    }
    if (without_top && thread == 0) counts[kEach - 1] = 0;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) sum += counts[i];
    const u32 above = tile::block_exclusive_sum<kThreads>(sum, warp_sums, total);
    if (above < n && n <= above + sum) {
      u32 ties = n - above, digit = kEach;
      Place place{0, 0, 0};
#pragma unroll
      for (u32 i = kEach; i-- > 0;) {
        if (digit == kEach && ties <= counts[i]) digit = i, place = {lowest + i, ties, counts[i]};
        ties -= counts[i];
      }
      ptx::store_shared_16(found, {place.digit, place.ties, place.equal, 0});
    }
    ptx::block_sync();
    if (total < n) return {0, 0, 0};
    const Words4 w = ptx::load_shared_16(found);
    return {w.x, w.y, w.z};
  }
};

}  // namespace topk
