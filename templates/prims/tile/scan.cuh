// Prefix sums over the threads of a block.
#pragma once
#include "prims/ptx/block.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace tile {

// Sum over lanes 0 .. lane.
DSA_DEVICE u32 warp_inclusive_sum(u32 value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = ptx::shuffle(value, (lane - distance) & 31);
    if (lane >= distance) value += other;
  }
  return value;
}

// What the threads before this one pass, summed; `total` over all of them. `warp_sums` is the shared address of one word
// a warp. One barrier, after which the words are still read: the next call takes other words, or a barrier comes first.
template <int kThreads>
DSA_DEVICE u32 block_exclusive_sum(u32 value, u32 warp_sums, u32& total) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32, "a warp sums the warps' sums");
  const int thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
  const u32 inclusive = warp_inclusive_sum(value, lane);
  if (lane == 31) ptx::store_shared_4(warp_sums + 4 * warp, inclusive);
  ptx::block_sync();
  const u32 sum = lane < kWarps ? ptx::load_shared_4(warp_sums + 4 * lane) : 0;
  total = ptx::warp_sum(sum);
  return ptx::warp_sum(lane < warp ? sum : 0) + inclusive - value;
}

}  // namespace tile
