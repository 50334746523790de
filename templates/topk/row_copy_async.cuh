// Copies a row to shared memory, 16 bytes a thread and copy (any arch).
#pragma once
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"

namespace topk {

// A thread copies the vectors that it has in sweeps, kInFlight of them a batch, so it needs to wait for its own only.
template <class C, int kBatches>
struct RowCopy {
  static_assert(kBatches == 1 || kBatches == 2);

  static DSA_DEVICE void init(u32) {}

  template <class Row>
  static DSA_DEVICE void start(const Row& row, u32 words, u32) {
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
      for (int u = 0; u < C::kInFlight; ++u) {
        const u32 n = static_cast<u32>((batch * C::kInFlight + u) * C::kThreads + ptx::thread_index());
        if (row.whole(n)) ptx::copy_async_16(words + 16 * n, row.vector_address(n), 16);
        else if (n < row.vectors()) row.store(n, words);
      }
      ptx::copy_async_commit();
    }
  }

  static DSA_DEVICE void wait(u32 batch, u32, u32) { batch + 1 < kBatches ? ptx::copy_async_wait<1>() : ptx::copy_async_wait<0>(); }
};

}  // namespace topk
