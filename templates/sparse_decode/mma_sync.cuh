// Sparse MLA decode for every arch: mma.sync on raw cache rows. One CTA handles one query token, one group of up to kHeads
// heads and one split of the index row.
//
// Swapped form: S^T[tokens x heads] = K Q^T, then O^T[dims x heads] = V^T P^T, so heads are the narrow MMA dimension and
// are padded to a multiple of 8 only.
//
//   producer warp        stage n = index, index + kProducers, ..: waits until freed, starts its row copies
//   score warp           tokens 16 kWarpBlocks (w % kBlockGroups) .., a share of the head tiles: S, softmax, P to shared memory
//   value warp           dims w kValueDims / kValueWarps .., all heads: O in registers
//
//   time ->   producers  | wait freed | copy rows of a later stage ..
//             score      | wait landed | S of tile i+1 | B | wait drained | P | hand over | S of tile i+2 ..
//             value      | wait P of tile i | O += V P, stage by stage, freeing them | wait P of tile i+1 ..
//
//   landed[stage]   the producer's copies arrive; score and value threads wait. Parity of stage n: (n / kStages) & 1.
//   freed[stage]    every lane of the score and value warps arrives after its last read; the producer waits before refilling.
//   filled[buffer]  every score thread arrives; value threads wait for P of tile i: parity (i / kProbabilityBuffers) & 1.
//   drained[buffer] every value thread arrives; score threads wait before they overwrite it.
//   finished        every score thread arrives once; value threads wait for the output factors.
//   B  barrier_any of the score warps: whether some score outgrew the softmax reference.
//   Slow path (the first tile, then rarely): column maxima -> C -> one thread per head raises the reference -> C; the value
//   warps find the factor by which O shrinks beside the P that they take over.
//
// Softmax reference: instead of a running maximum, a reference M per head that is raised only when a score exceeds it by
// kLazyThreshold (log2 units). The result is exact for any M; L >= 2^-kLazyThreshold keeps it in range. Scores of
// invalid tokens are -inf and M is finite or NaN, so no difference is -inf minus -inf. Rows without a valid id are zeros in
// shared memory, so that nothing stale meets a zero probability; blocks of 16 rows without a valid one are skipped by all.
#pragma once
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/registers.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/producer.cuh"
#include "sparse_decode/query.cuh"
#include "sparse_decode/score.cuh"
#include "sparse_decode/value.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

// Where a second cache has rows of another format it has an encoding and a copy of its own; its tiles come last.
template <class C, class Shared, class Encoding, class RowCopy, class Params, class ExtraEncoding = Encoding,
          class ExtraRowCopy = RowCopy>
struct MmaSync {
  static constexpr int kConsumerWarps = C::kScoreWarps + C::kValueWarps;
  // Where registers are moved, warpgroups are of one role: warps that have no work fill the last one.
  static constexpr bool kMovesRegisters = C::kValueRegisters > 0;
  static constexpr int kThreads = 32 * (kConsumerWarps + (kMovesRegisters ? (C::kProducers + 3) / 4 * 4 : C::kProducers));
  static_assert(C::kStages > C::kTileTokens / C::kStageTokens, "scores of a tile begin before the values of the last are done");
  static_assert(RowCopy::kArrivals == ExtraRowCopy::kArrivals);

  static DSA_DEVICE void run(const Params& p, Shared& shared) {
    if (ptx::thread_index() == 0) init_barriers(shared);
    ptx::barrier_sync(0, kThreads);
    const int warp = warp_index();
    if (warp < C::kValueWarps) {
      if constexpr (kMovesRegisters) move_registers<C::kValueRegisters>();
      run_value(p, shared);
    } else if (warp < kConsumerWarps) {
      if constexpr (kMovesRegisters) move_registers<C::kScoreRegisters>();
      run_score(p, shared);
    } else {
      if constexpr (kMovesRegisters) move_registers<C::kProducerRegisters>();
      run_producer(p, shared);
    }
  }

 private:
  // Roles read their indices themselves: a value that outlived the branch would be held to the registers of the poorest.
  static DSA_DEVICE int warp_index() { return static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0)); }
  static DSA_DEVICE int lane_index() { return ptx::thread_index() % 32; }

  static DSA_DEVICE void run_value(const Params& p, Shared& shared) {
    const Work<C, Params> work(p);
    start_consumer(p, shared, work);
    ValueWarp<C, Shared, Encoding, ExtraEncoding, Params> value(p, shared, work, warp_index(), lane_index());
    value.run();
    value.write();
  }

  static DSA_DEVICE void run_score(const Params& p, Shared& shared) {
    const Work<C, Params> work(p);
    start_consumer(p, shared, work);
    ScoreWarp<C, Shared, Encoding, ExtraEncoding, Params>(p, shared, work, warp_index() - C::kValueWarps, lane_index()).run();
  }

  static DSA_DEVICE void run_producer(const Params& p, Shared& shared) {
    const int index = warp_index() - kConsumerWarps;
    if (index >= C::kProducers) return;
    const Work<C, Params> work(p);
    Producer<C, Shared, RowCopy, ExtraRowCopy, Params>(p, shared, work, index, lane_index()).run();
  }

  template <int kRegisters>
  static DSA_DEVICE void move_registers() {
    if constexpr (kRegisters > C::kCompiledRegisters) ptx::registers_raise<kRegisters>();
    if constexpr (kRegisters < C::kCompiledRegisters) ptx::registers_lower<kRegisters>();
  }

  static DSA_DEVICE void start_consumer(const Params& p, Shared& shared, const Work<C, Params>& work) {
    QueryImage<C, Shared, Encoding, ExtraEncoding, Params>::stage(p, shared, work, warp_index(), lane_index());
    ptx::barrier_sync(2, 32 * kConsumerWarps);
  }

  static DSA_DEVICE void init_barriers(Shared& shared) {
#pragma unroll 1
    for (int slot = 0; slot < C::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.landed[slot]), RowCopy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.freed[slot]), 32 * kConsumerWarps);
    }
#pragma unroll 1
    for (int buffer = 0; buffer < C::kProbabilityBuffers; ++buffer) {
      ptx::mbarrier_init(ptx::shared_address(&shared.filled[buffer]), 32 * C::kScoreWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.drained[buffer]), 32 * C::kValueWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.finished[0]), 32 * C::kScoreWarps);
    RowCopy::fence_init();
  }
};

}  // namespace sparse_decode
