// Copies a row to shared memory, a bulk copy for each batch of vectors (sm_90+). The copy engine works beside the block,
// whose load/store pipe 16-byte copies would hold up until memory has taken them.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"

namespace topk {

template <class C, int kBatches>
struct RowCopy {
  static constexpr u32 kBatchVectors = C::kInFlight * C::kThreads;

  // `landed` is the shared address of a barrier for each batch. A barrier of the block must follow.
  static DSA_DEVICE void init(u32 landed) {
    if (ptx::thread_index() != 0) return;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) ptx::mbarrier_init(landed + 8 * batch, 1);
    ptx::fence_mbarrier_init();
  }

  // All threads come here, after a barrier behind the block's last read of the row before.
  template <class Row>
  static DSA_DEVICE void start(const Row& row, u32 words, u32 landed) {
    const u32 thread = static_cast<u32>(ptx::thread_index()), vectors = row.vectors(), last = vectors - 1;
    // The ends, where elements lie outside of the window, are stored by a thread each; the first issues the copies, too.
    const u32 side = thread == 0 ? 0 : last;
    if (thread < 2 && (thread == 0 || last != 0) && !row.whole(side)) row.store(side, words);
    if (thread != 0) return;
    ptx::fence_proxy_async();  // what was read and stored there
    const u32 begin = row.whole(0) ? 0 : 1, end = row.whole(last) ? vectors : last;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const u32 from = batch == 0 ? begin : batch * kBatchVectors;
      const u32 to = (batch + 1) * kBatchVectors < end ? (batch + 1) * kBatchVectors : end;
      const u32 bytes = from < to ? 16 * (to - from) : 0;
      ptx::mbarrier_arrive_expect(landed + 8 * batch, bytes);
      if (bytes != 0) ptx::copy_bulk(words + 16 * from, row.vector_address(from), bytes, landed + 8 * batch);
    }
  }

  static DSA_DEVICE void wait(u32 batch, u32 landed, u32 parity) { ptx::mbarrier_wait(landed + 8 * batch, parity); }
};

}  // namespace topk
