// Copies a part of a row to shared memory, in batches of kInFlight vectors for each thread (sm_90+). Each is a bulk copy that
// a warp of its own issues: lanes of one would do so in turn.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/bounded.cuh"

namespace topk {

template <class C, int kBatches>
struct PartCopy {
  static_assert(kBatches < C::kThreads / 32);
  static constexpr u32 kBatchVectors = C::kInFlight * C::kThreads;

  // `landed` is the shared address of a barrier for each batch. `row`, in global memory, begins with its first vector. All
  // threads come here; a barrier must follow.
  template <class Row>
  static DSA_DEVICE void start(const Row& row, u32 words, u32 landed) {
    const u32 thread = static_cast<u32>(ptx::thread_index()), warp = thread / 32, lane = thread % 32, vectors = row.vectors(), last = vectors - 1;
    if (warp < kBatches) {
      if (lane != 0) return;
      const u32 begin = row.whole(0) ? 0 : 1, end = row.whole(last) ? vectors : last, barrier = landed + 8 * warp;
      const u32 from = most(begin, warp * kBatchVectors), to = least((warp + 1) * kBatchVectors, end), bytes = from < to ? 16 * (to - from) : 0;
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect(barrier, bytes);
      if (bytes != 0) ptx::copy_bulk(words + 16 * from, row.vector_address(from), bytes, barrier);
    } else if (warp == kBatches && lane < 2 && vectors != 0) {
      // The ends, where elements lie outside of the part, by a thread each.
      const u32 side = lane == 0 ? 0 : last;
      if ((lane == 0 || last != 0) && !row.whole(side)) store(row, side, words);
    }
  }

  static DSA_DEVICE void wait(u32 batch, u32 landed) { ptx::mbarrier_wait(landed + 8 * batch, 0); }

 private:
  // Vector `n` with lowest scores in place of what lies outside.
  template <class Row>
  static DSA_DEVICE void store(const Row& row, u32 n, u32 words) {
    using Score = typename Row::Score;
    auto v = row.load(n);
    constexpr u32 kBits = 32 / Score::kPerWord, kElement = kBits == 32 ? 0xffffffffu : (1u << kBits % 32) - 1;
#pragma unroll
    for (u32 e = 0; e < Row::kElements; ++e)
      if ((v.live >> e & 1) == 0) v.words[e / Score::kPerWord] |= Score::kLowestWord & kElement << e % Score::kPerWord * kBits;
    ptx::store_shared_16(words + 16 * n, {v.words[0], v.words[1], v.words[2], v.words[3]});
  }
};

}  // namespace topk
